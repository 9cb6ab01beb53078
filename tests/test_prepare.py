"""samestep prepare: the preparation of train.py as a program of its own, without a run."""

import json
import re

import pytest

from conftest import bake, lines
from samestep.programs import prepare

PREPARE = ("python", "-m", "samestep", "prepare")


@pytest.mark.slow
def test_train_finds_what_prepare_has_prepared(tmp_path):
    """One line at the end; no run folder; and the training prepares nothing again."""
    fresh = bake(tmp_path, tracker="none")
    flags = ["--config", "configs/train/smoke.yaml", "--task.cache_dir", tmp_path / "cache"]
    flags += ["--output_dir", tmp_path / "run", "--max_steps", 2, "--warmup_steps", 1]
    first, again = (fresh.run(*PREPARE, *flags).stdout for _ in range(2))
    line = rf"prepared in {tmp_path}/cache/\S+: [\d,]+ rows to train on, [\d,]+ to evaluate on\n"
    assert re.fullmatch(line, again) and first.endswith(again)
    assert not (tmp_path / "run").exists() and not (fresh.path / "runs").exists()
    printed = fresh.run("python", "train.py", *flags).stdout
    assert "Prepar" not in printed and len(lines(tmp_path / "run", "loss")) > 0
    # A run that is there is refused by train.py; `prepare` does not look for one.
    assert fresh.run(*PREPARE, *flags, "--resume", "never").stdout == again


def test_no_gpu_and_no_process_group_are_touched(tiny):
    """Also where a launcher's variables say that there are others."""
    program = (
        "import os, sys, torch; sys.argv = ['samestep prepare']; os.environ.update({})\n"
        "def refuse(*_, **__): raise TypeError('touched')\n"
        "torch.cuda.init = torch.cuda._lazy_init = refuse\n"
        "torch.distributed.init_process_group = torch.distributed.TCPStore = refuse\n"
        "from samestep.programs import prepare; prepare.main()"
    )
    for env in ({}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}):
        result = tiny.run("python", "-c", program.format(env))
        assert result.stdout == "prepared: 37 rows to train on, 11 to evaluate on\n", result


def test_prepared_data_that_no_run_names_is_removed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("now", "kept", "earlier", "old", "old-a1b2", "other"):
        (tmp_path / "cache" / name / "rows").mkdir(parents=True)
        (tmp_path / "cache" / name / "rows" / "data.arrow").write_bytes(b"x" * 2_000_000)
        if name != "other":  # being prepared, or somebody's own
            (tmp_path / "cache" / name / "prepared.json").write_text("{}")
    manifest = tmp_path / "runs" / "a" / "checkpoints" / "step-00000003" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    history = [{"step": 0, "prepared": "earlier"}, {"step": 3, "prepared": "kept"}]
    manifest.write_text(json.dumps({"prepared": "kept", "history": history}))
    prepare.prune(tmp_path / "cache" / "now")
    left = {"now", "kept", "earlier", "other"}
    assert {path.name for path in (tmp_path / "cache").iterdir()} == left
    removed = [f"removed {tmp_path}/cache/{name}: 2.0 MB\n" for name in ("old", "old-a1b2")]
    assert capsys.readouterr().out == "".join(removed)


SWALLOWED = """
import os, signal, sys, time
sys.path[0] = os.getcwd()
import task
from samestep.programs import prepare

def prepare_data(cfg):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        pass
    time.sleep(100)

task.prepare_data = prepare_data
prepare.main()
"""


def test_a_signal_counts_where_its_exception_is_lost(tiny):
    """As in a destructor, in the compilation of a module, and in the start of one in C."""
    result = tiny.run("python", "-c", SWALLOWED, check=False)
    said = "-c: stopped before the first step; the same command starts again\n"
    assert (result.returncode, result.stdout, result.stderr) == (75, "", said)
