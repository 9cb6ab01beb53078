"""What people copy: the example around a plain nn.Module, the notebook, the page on sweeps."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from safetensors.torch import load_file

from conftest import ROOT, SOURCE, bake, digest, lines, status

# Where make test-all installs nbclient and optuna.
ADDED = ROOT / ".venv" / "extra"
added = pytest.mark.skipif(not ADDED.exists(), reason="make test-all installs it")
SWEEPS = (ROOT / SOURCE / "docs" / "sweeps.md").read_text(encoding="utf-8")
TASKS = [path.stem for path in (ROOT / "templates" / "tasks").glob("*.py")]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A project whose task.py is the example."""
    baked = bake(tmp_path_factory.mktemp("own"), tracker="none")
    (wheel,) = baked.path.glob("vendor/*.whl")
    library = tmp_path_factory.mktemp("library")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(library)
    example = ["python", "-m", "samestep", "example"]
    listed = baked.run(*example, PYTHONPATH=str(library)).stdout
    names = [line.split()[0] for line in listed.splitlines()]
    assert names == sorted([*TASKS, "cloze", "plain_module", "train_pipeline"])
    baked.run(*example, "plain_module", PYTHONPATH=str(library))
    assert "cloze.yaml is" in baked.run(*example, "cloze", PYTHONPATH=str(library)).stdout
    cloze = (ROOT / "templates" / "examples" / "cloze.yaml").read_bytes()
    assert (baked.path / "cloze.yaml").read_bytes() == cloze
    assert "says how" in baked.run(*example, "train_pipeline", PYTHONPATH=str(library)).stdout
    pipeline = (baked.path / "train_pipeline.py").read_text(encoding="utf-8")
    assert len(pipeline.splitlines()) <= 250
    again = baked.run(*example, "plain_module", check=False, PYTHONPATH=str(library))
    assert again.returncode == 2 and "plain_module.py is there already" in again.stderr
    code = (baked.path / "plain_module.py").read_text(encoding="utf-8")
    (baked.path / "plain_module.py").unlink()
    assert 40 <= len([line for line in code.splitlines() if line.strip()]) <= 60
    assert "transformers" not in code and "import samestep" not in code
    (baked.path / "task.py").write_text(code, encoding="utf-8")
    (baked.path / "configs" / "train" / "default.yaml").write_text(
        "max_steps: 60\nglobal_batch_size: 32\nmicro_batch_size: 8\nlearning_rate: 0.02\n"
        "warmup_steps: 5\nlog_every: 1\nsave_every: 20\neval_every: 20\nkeep_checkpoints: 0\n"
    )
    return baked


@pytest.mark.slow
def test_the_example_trains_resumes_and_exports(own, tmp_path):
    losses = []
    for processes in (1, 2):
        whole, continued = tmp_path / f"{processes}", tmp_path / f"{processes}-continued"
        kept = "checkpoints/step-00000020"
        own.train(processes, "--output_dir", whole)
        shutil.copytree(whole / kept, continued / kept)
        assert "continuing from" in own.train(processes, "--output_dir", continued)
        last = "checkpoints/step-00000060"
        assert digest(continued / last) == digest(whole / last)

        scores = [line["eval_loss"] for line in lines(whole, "eval_loss")]
        assert len(scores) == 3 and scores[-1] < 0.05 < scores[0]  # the mean alone gives 0.5
        weights = load_file(whole / "model" / "model.safetensors")
        assert sum(v.numel() for v in weights.values()) == 64 * 3 + 1
        assert status(whole)["state"] == "finished"
        assert "## Evaluation" in (whole / "model" / "README.md").read_text()
        losses.append([line["loss"] for line in lines(whole, "loss")])
    assert losses[0][:20] == pytest.approx(losses[1][:20], rel=1e-5)


@pytest.mark.slow
def test_a_projects_own_tests_pass_with_the_example(own):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    assert "skipped" not in own.run(*command).stdout


# ---- The notebook --------------------------------------------------------------------------------


def replaced(text, changes):
    """A text with all of these changes, each of which must find its place."""
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


@added
@pytest.mark.slow
def test_the_notebook_trains_stops_continues_and_shows(tmp_path):
    """Without the cells that install, as all is here, and with a recipe of some seconds."""
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = [c for c in notebook["cells"] if "install" not in c["metadata"].get("tags", ())]
    assert not any(cell.get("outputs") for cell in cells)
    changes = {'\\"..\\"': f"{str(ROOT)!r}", "default.yaml": "smoke.yaml --max_steps 300"}
    source = replaced(json.dumps(notebook | {"cells": cells}), {**changes, "Timer(40": "Timer(15"})
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


# ---- Sweeps --------------------------------------------------------------------------------------


def block(language):
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", SWEEPS, re.M | re.S)
    return code


@pytest.mark.slow
def test_a_loop_compares_learning_rates(tmp_path):
    project = bake(tmp_path / "project", tracker="none")
    (project.path / ".venv").symlink_to(sys.prefix)
    project.run("bash", "-c", block("sh"))
    for rate in ("1e-3", "3e-3", "1e-2"):
        assert status(project.path / "runs" / f"lr-{rate}")["state"] == "finished"
    assert (project.path / "curves.png").stat().st_size > 10_000


@added
@pytest.mark.slow
def test_a_sweep_stops_the_trial_that_lags_behind(tmp_path):
    project = bake(tmp_path / "project", tracker="none")
    known = 'study.enqueue_trial({"learning_rate": 3e-3})'
    changes = {"default.yaml": "smoke.yaml --max_steps 200", "n_trials=20": "n_trials=2"}
    changes[known] = f"{known}\n{known.replace('3e-3', '1e-5')}"
    program = replaced(block("python"), changes)
    (project.path / "sweep.py").write_text(program, encoding="utf-8")
    env = project.env() | {"PYTHONPATH": f"{ADDED}:{os.environ['PYTHONPATH']}"}
    options = {"cwd": project.path, "env": env, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "sweep.py"], **options)
    assert done.returncode == 0, done.stderr
    best, pruned = (status(project.path / "runs" / "sweep" / trial) for trial in "01")
    assert (best["state"], best["exit_code"]) == ("finished", 0)
    assert (pruned["state"], pruned["exit_code"]) == ("stopped", 75)
    assert done.stdout.splitlines()[-1].endswith("runs/sweep/0")
