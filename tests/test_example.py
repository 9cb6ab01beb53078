"""What people copy: the example around a plain nn.Module, the notebook, the page on sweeps."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from conftest import ROOT, SOURCE, bake, digest, lines, status

# Where make test-all installs nbclient and optuna.
ADDED = ROOT / ".venv" / "extra"
added = pytest.mark.skipif(not ADDED.exists(), reason="make test-all installs it")
SWEEPS = (ROOT / SOURCE / "docs" / "sweeps.md").read_text(encoding="utf-8")
TASKS = [path.stem for path in (ROOT / "templates" / "tasks").glob("*.py")]
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
    assert names == sorted([*TASKS, *EXAMPLES, "train_pipeline"])
    most = {"plain_module": 75, "unet3d": 120, "diffusion": 120, "train_pipeline": 335}
    for name, lines_ in most.items():
        said = example(name).stdout
        assert ("mv" if name in EXAMPLES else "says how") in said
        written = baked.path / f"{name}.py"
        source = ROOT / "templates" / "examples" / written.name
        assert written.read_bytes() == source.read_bytes()
        assert len(written.read_text(encoding="utf-8").splitlines()) <= lines_
        again = example(name, check=False)
        assert again.returncode == 2 and f"{written.name} is there already" in again.stderr
    code = (baked.path / "plain_module.py").read_text(encoding="utf-8")
    assert "transformers" not in code and "import samestep" not in code


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_resumes_and_exports(own, tmp_path, name):
    """The same losses for each cut and number of processes; the same bytes after a kill."""
    project, (settings, left) = own[0], EXAMPLES[name]
    shutil.copy(ROOT / "templates" / "examples" / f"{name}.py", project.path / "task.py")
    flags = [w for k, v in settings.items() for w in (f"--{'' if '_' in k else 'task.'}{k}", v)]
    cut = ["--micro_batch_size", 4, "--max_steps", 10]
    runs = {"one": (1, []), "two": (2, ["--max_steps", 20]), "cut": (1, cut)}
    runs |= {f"exact-{n}": (n, ["--exact", "true", "--max_steps", 20]) for n in (1, 2)}
    for run, (processes, more) in runs.items():
        project.train(processes, *flags, *more, "--output_dir", tmp_path / run)
    last, kept = "checkpoints/step-00000020", "checkpoints/step-00000010"
    assert digest(tmp_path / "exact-1" / last) == digest(tmp_path / "exact-2" / last)
    shutil.copytree(tmp_path / "two" / kept, tmp_path / "killed" / kept)
    said = project.train(2, *flags, *runs["two"][1], "--output_dir", tmp_path / "killed")
    assert "continuing from" in said
    assert digest(tmp_path / "killed" / last) == digest(tmp_path / "two" / last)
    losses = {run: [line["loss"] for line in lines(tmp_path / run, "loss")] for run in runs}
    for run in ("two", "cut"):
        assert losses[run][:10] == pytest.approx(losses["one"][:10], rel=1e-6)
    scores = [line["eval_loss"] for line in lines(tmp_path / "one", "eval_loss")]
    assert len(scores) == 3 and scores[-1] < left * losses["one"][0]
    assert status(tmp_path / "one")["state"] == "finished"
    assert "## Evaluation" in (tmp_path / "one" / "model" / "README.md").read_text()

    # The export loads again, and gives the last score.
    scored = """if True:
        import sys, task, torch
        from safetensors.torch import load_model
        from samestep.settings import contract
        cfg = task.TaskConfig(**{k: int(v) for k, v in map(lambda w: w.split("="), sys.argv[2:])})
        bound = contract.bind(task, cfg, None)
        model = bound.build_model()
        load_model(model, sys.argv[1])
        rows = bound.views()[1]
        rows = [rows[i] for i in range(len(rows))]
        print(task.metrics(task.eval_sums(model.eval(), task.collate(rows)))["loss"])
    """
    given = [f"{key}={value}" for key, value in settings.items() if "_" not in key]
    weights = tmp_path / "one" / "model" / "model.safetensors"
    loss = float(project.run("python", "-c", scored, weights, *given).stdout)
    assert loss == pytest.approx(scores[-1], rel=1e-4)


@pytest.mark.slow
def test_a_projects_own_tests_pass_with_the_example(own):
    """Without those that say again what the test above says."""
    shutil.copy(ROOT / "templates/examples/plain_module.py", own[0].path / "task.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    assert "4 passed" in own[0].run(*command, "-k", "promises or cut or alone").stdout


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
    recipe = project.path / "configs" / "train" / "smoke.yaml"
    recipe.write_text(replaced(recipe.read_text(), {"max_steps: 40": "max_steps: 4"}))
    project.run("bash", "-c", replaced(block("sh"), {"1e-3 3e-3 1e-2": "1e-3 1e-2"}))
    for rate in ("1e-3", "1e-2"):
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
