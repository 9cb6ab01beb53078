"""What people copy: the examples, and the notebook."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import test_tasks_of_examples
from conftest import ROOT, bake, digest, lines, status

# Where make test-all installs nbclient.
ADDED = ROOT / ".venv" / "extra"
added = pytest.mark.skipif(not ADDED.exists(), reason="make test-all installs it")
TASKS = [path.parent.name for path in (ROOT / "templates").glob("*/task.py")]
# Tasks: their settings for a short run, and the most that is left of the first loss.
EXAMPLES = {
    "plain_module": ({"learning_rate": 0.02}, 0.1),
    "unet3d": ({"samples": 90, "side": 8, "width": 4}, 0.8),
    "diffusion": ({"width": 16}, 0.6),
}
RECIPE = "warmup_steps: 5\nlog_every: 1\nsave_every: 10\neval_every: 20\nkeep_checkpoints: 0\n"
RECIPE += "lr_schedule: constant\n"  # of which a shorter run is the beginning of a longer one
RECIPE += "max_steps: 60\nglobal_batch_size: 32\nmicro_batch_size: 8\nlearning_rate: 0.01\n"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A project, and the verb that writes examples into it."""
    baked = bake(tmp_path_factory.mktemp("own"), tracker="none")
    (wheel,) = baked.path.glob("vendor/*.whl")
    library = tmp_path_factory.mktemp("library")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(library)
    (baked.path / "configs" / "train" / "default.yaml").write_text(RECIPE)
    return baked, functools.partial(
        baked.run, "python", "-m", "samestep", "example", PYTHONPATH=str(library)
    )


@pytest.mark.slow
def test_examples_are_listed_and_written(own):
    baked, example = own
    names = [line.split()[0] for line in example().stdout.splitlines()]
    others = {each.name for each in test_tasks_of_examples.EXAMPLES}
    assert names == sorted([*TASKS, *EXAMPLES, *others, "train_pipeline", "own_script"])
    maximum = {"plain_module": 75, "unet3d": 120, "diffusion": 120, "train_pipeline": 345}
    maximum["own_script"] = 90
    for name, number in maximum.items():
        text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        assert len(text.splitlines()) <= number
    example("plain_module")
    written = (baked.path / "plain_module.py").read_text(encoding="utf-8")
    assert written == (ROOT / "examples/plain_module.py").read_text(encoding="utf-8")
    again = example("plain_module", check=False)
    assert again.returncode == 2 and "plain_module.py is there already" in again.stderr
    assert "transformers" not in written and "import samestep" not in written


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_and_resumes(own, tmp_path, name):
    """The same losses on two processes, in other micro-batches; the same bytes after a resume."""
    project, (settings, left) = own[0], EXAMPLES[name]
    shutil.copy(ROOT / "examples" / f"{name}.py", project.path / "task.py")
    flags = [w for k, v in settings.items() for w in (f"--{'' if '_' in k else 'task.'}{k}", v)]
    short = [*flags, "--max_steps", 10]
    project.train(1, *flags, "--output_dir", tmp_path / "one")
    project.train(2, *short, "--micro_batch_size", 4, "--output_dir", tmp_path / "two")
    one, two = ([line["loss"] for line in lines(tmp_path / run, "loss")] for run in ("one", "two"))
    assert two == pytest.approx(one[:10], rel=1e-6)
    kept, last = "checkpoints/step-00000050", "checkpoints/step-00000060"
    shutil.copytree(tmp_path / "one" / kept, tmp_path / "resumed" / kept)
    assert "continuing from" in project.train(1, *flags, "--output_dir", tmp_path / "resumed")
    assert digest(tmp_path / "resumed" / last) == digest(tmp_path / "one" / last)
    scores = [line["eval_loss"] for line in lines(tmp_path / "one", "eval_loss")]
    assert len(scores) == 3 and scores[-1] < left * one[0]
    assert status(tmp_path / "one")["state"] == "finished"
    assert "## Evaluation" in (tmp_path / "one" / "model" / "README.md").read_text()


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
