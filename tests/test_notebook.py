"""The notebook: run as it stands, by the program that Jupyter has for this."""

import json
import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT

ADDED = ROOT / ".venv" / "extra"


@pytest.mark.slow
def test_the_notebook_trains_stops_continues_and_shows(tmp_path):
    """Without the cells that install, as all is here, and with a recipe of some seconds."""
    if not ADDED.exists():
        pytest.skip("make test-all installs nbclient")
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = [c for c in notebook["cells"] if "install" not in c["metadata"].get("tags", ())]
    assert not any(cell.get("outputs") for cell in cells)
    source = json.dumps(notebook | {"cells": cells})
    changes = {'\\"..\\"': f"{str(ROOT)!r}", "default.yaml": "smoke.yaml --max_steps 300"}
    for old, new in {**changes, "Timer(40": "Timer(15"}.items():
        assert old in source
        source = source.replace(old, new)
    (tmp_path / "notebook.ipynb").write_text(source, encoding="utf-8")
    env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    env["PYTHONPATH"] = f"{ADDED}:{os.environ['PYTHONPATH']}"
    run = [sys.executable, ADDED / "bin" / "jupyter-execute", "--inplace", "notebook.ipynb"]
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    printed = "".join("".join(output.get("text", ())) for output in outputs)
    assert re.search("exit code (0|75)\n", printed) and "step 300" in printed, printed
    assert "(300, " in "".join(outputs[-1]["data"]["text/plain"])
