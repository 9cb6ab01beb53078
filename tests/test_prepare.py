"""samestep prepare: the preparation of train.py as a program of its own, without a run."""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conftest import bake, lines


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A project of the default answers, whose data is not prepared yet."""
    return bake(tmp_path_factory.mktemp("fresh"), tracker="none")


def files(folder):
    """The stamps of all files below a folder."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in found}


@pytest.mark.slow
def test_train_finds_what_prepare_has_prepared(fresh, tmp_path):
    """One line at the end; no run folder; and the training prepares nothing again."""
    before = {path.name for path in fresh.path.iterdir()} | {"__pycache__"}
    flags = ["--config", "configs/train/smoke.yaml", "--task.cache_dir", tmp_path / "cache"]
    flags += ["--output_dir", tmp_path / "run", "--max_steps", 2, "--warmup_steps", 1]
    first, again = [
        fresh.run("python", "-m", "samestep", "prepare", *flags).stdout for _ in range(2)
    ]
    pattern = r"prepared in (\S+): ([\d,]+) rows to train on, ([\d,]+) to evaluate on\n"
    folder, rows, _ = re.fullmatch(pattern, again).groups()
    assert first.endswith(again) and folder.startswith(str(tmp_path / "cache"))
    assert {path.name for path in fresh.path.iterdir()} <= before
    assert not (tmp_path / "run").exists()
    prepared = files(Path(folder))
    printed = fresh.run("python", "train.py", *flags).stdout
    assert "Prepar" not in printed and len(lines(tmp_path / "run", "loss")) > 0
    assert files(Path(folder)) == prepared
    checked = fresh.run("python", "train.py", *flags, "--check", "--resume", "never", check=False)
    assert checked.returncode == 2  # of a run that is there; `prepare` has not looked for one
    assert (
        fresh.run("python", "-m", "samestep", "prepare", *flags, "--resume", "never").stdout
        == again
    )


def test_no_gpu_and_no_process_group_are_touched(tiny):
    """Also where a launcher's variables say that there are others."""
    program = (
        "import sys, torch; sys.argv = ['samestep prepare']\n"
        "def refuse(*_, **__): raise TypeError('touched')\n"
        "torch.cuda.init = torch.cuda._lazy_init = refuse\n"
        "torch.distributed.init_process_group = torch.distributed.TCPStore = refuse\n"
        "from samestep.programs import prepare; prepare.main()"
    )
    for env in ({}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}):
        result = tiny.run("python", "-c", program, **env)
        assert result.stdout == "prepared: 37 rows to train on, 11 to evaluate on\n", result


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--sed", 1], "command line: there is no field sed; did you mean seed?"),
        (["--config", "no.yaml"], "no.yaml: No such file or directory; --config takes"),
        (["--task.fail_where", "prepare_data", "--task.fail_rank", 0], "no prepare_data here"),
        (["--task.fail_where", "datasets", "--task.fail_rank", 0], "no datasets here"),
        (["--check"], "only train.py can do --check; leave it out"),
        (["--eval_only"], "only train.py can do --eval_only; leave it out"),
    ],
)
def test_a_mistake_is_a_line(tiny, flags, said):
    result = tiny.run("python", "-m", "samestep", "prepare", *flags, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"samestep prepare: {said}") and result.stderr.count("\n") == 1


def test_another_error_has_its_traceback(tiny):
    flags = ["--task.fail_where", "prepare_data", "--task.fail_rank", 0]
    result = tiny.run(
        "python", "-m", "samestep", "prepare", *flags, "--task.fail_kind", "TypeError", check=False
    )
    assert result.returncode == 1 and result.stderr.count("Traceback") == 1
    assert result.stderr.endswith("TypeError: no prepare_data here\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_preparation_at_once(tiny, tmp_path, number):
    program = "from samestep.programs import prepare; print('begun', flush=True); "
    program += "prepare.main()"
    command = ["python", "-c", program, "--task.prepare_seconds", "100"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tiny.path, env=tiny.env(), **pipes) as run:
        run.stdout.readline()
        time.sleep(1)
        start = time.monotonic()
        run.send_signal(number)
        printed = run.communicate(timeout=60)
        assert run.returncode == 75 and time.monotonic() - start < 10
    assert printed[1].endswith("stopped before the first step; the same command starts again\n")
