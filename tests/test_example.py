"""What people copy: the examples, and the notebook."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from conftest import ROOT, bake, lines, status, write_recipe
from refusals import cases

# Where make test-all installs nbclient.
ADDED = ROOT / ".venv" / "extra"
added = pytest.mark.skipif(not ADDED.exists(), reason="make test-all installs it")
LINES, LEARNED = cases("examples").values()


@pytest.mark.slow
def test_examples_are_listed_written_and_short(tmp_path):
    baked = bake(tmp_path, tracker="none")
    (wheel,) = baked.path.glob("vendor/*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "library")

    def example(*words):
        command = ["python", "-m", "samestep", "example", *words]
        return baked.run(*command, check=False, PYTHONPATH=str(tmp_path / "library"))

    names = [line.split()[0] for line in example().stdout.splitlines()]
    tasks = [path.parent.name for path in (ROOT / "templates").glob("*/task.py")]
    assert names == sorted([*tasks, *LINES])
    for name, number in LINES.items():
        text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        assert len(text.splitlines()) <= number
    example("plain_module")
    written = (baked.path / "plain_module.py").read_text(encoding="utf-8")
    assert written == (ROOT / "examples/plain_module.py").read_text(encoding="utf-8")
    again = example("plain_module")
    assert again.returncode == 2 and "plain_module.py is there already" in again.stderr
    assert "transformers" not in written and "import samestep" not in written


@pytest.mark.slow
def test_examples_of_plain_modules_learn(tmp_path):
    """What holds for each task is in test_tasks.py."""
    project = write_recipe(bake(tmp_path, pictures=False, tracker="none"), "example")
    for name, (flags, left) in LEARNED.items():
        shutil.copy(ROOT / "examples" / f"{name}.py", project.path / "task.py")
        project.train(1, *flags.split(), "--output_dir", tmp_path / name)
        scores = [line["eval_loss"] for line in lines(tmp_path / name, "eval_loss")]
        assert len(scores) == 3 and scores[-1] < left * lines(tmp_path / name, "loss")[0]["loss"]
        assert status(tmp_path / name)["state"] == "finished"
        assert "## Evaluation" in (tmp_path / name / "model" / "README.md").read_text()


# ---- The notebook --------------------------------------------------------------------------------


@added
@pytest.mark.slow
def test_the_notebook_trains_stops_continues_and_shows(tmp_path):
    """Without the cells that install, as all is here, and with a recipe of some seconds."""
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = [c for c in notebook["cells"] if "install" not in c["metadata"].get("tags", ())]
    assert not any(cell.get("outputs") for cell in cells)
    source, changes = json.dumps(notebook | {"cells": cells}), {"Timer(40": "Timer(15"}
    changes |= {'\\"..\\"': f"{str(ROOT)!r}", "default.yaml": "smoke.yaml --max_steps 100"}
    for old, new in changes.items():
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
    assert re.search("exit code (0|75)\n", printed) and "step 100" in printed, printed
    assert "(100, " in "".join(outputs[-1]["data"]["text/plain"])
