"""Checkpoints of real runs: moved between kinds of parallelism, and saved in the background."""

import textwrap

import pytest
from safetensors import safe_open

from conftest import checkpoint, copy_until, lines, status
from refusals import cases
from same import check_close, check_same
from samestep.state import checkpoints
from samestep.step import order

FLAGS = ["--save_every", 3, "--eval_every", 6, "--task.dropout", 0.0]
WHOLE = FLAGS  # 12 steps with checkpoints at 3, 6, 9 and 12
ASYNC = [*FLAGS, "--async_save", "true"]


# ---- From one layout to another ------------------------------------------------------------------


def test_a_run_moves_from_one_process_to_two_and_back(tiny, whole, tmp_path):
    """Three steps each: 1, 2, 1. Each process writes a file, and nothing else is written."""
    output = copy_until(whole, 3, tmp_path / "1")
    for step, processes in ((6, 2), (9, 1)):
        output = copy_until(output, step - 3, tmp_path / str(step))
        printed = tiny.train(processes, "--output_dir", output, *FLAGS)
        assert f"continuing from {checkpoint(output, step - 3)}" in printed
        for path in (output / "checkpoints").iterdir():
            files = {file.name for file in path.iterdir()} - {"manifest.json"}
            writers = processes if path != checkpoint(output, step - 3) else len(files)
            assert files == {f"rank-{rank:05}.safetensors" for rank in range(writers)}
        names, sizes = [], []
        for path in checkpoint(output, step).glob("*.safetensors"):
            sizes.append(path.stat().st_size)
            with safe_open(path, "pt") as opened:
                names += opened.keys()
        # No tensor is written twice, and each process writes about as much.
        assert len(names) == len({*names}) == 16 and max(sizes) < 2 * min(sizes)
        check_close(checkpoint(output, step), checkpoint(whole, step), rel=2e-6)
        losses = [line["loss"] for line in lines(whole, "loss")][step - 3 :]
        assert [line["loss"] for line in lines(output, "loss")] == pytest.approx(losses, rel=1e-6)


def test_changes_of_settings(tmp_path):
    def compare(before, new="all", accept=True):
        saved = {"files": {}, "config": {"task": before}}
        now = {"config": {"task": {"train_on": new}}}
        defaults = {"task.train_on": "all"}
        return checkpoints.check_settings(tmp_path, saved, now, {}, accept, defaults)

    assert compare({}) == {} and compare({"classes": ""}) == {"task.classes": ["", None]}
    assert compare({}, "last") == {"task.train_on": [None, "last"]}
    with pytest.raises(ValueError, match="task.train_on: None -> last.* or accept_changes to"):
        compare({}, "last", accept=False)
    # The places of the lanes of a stream are those of a list of shards, in an order by the seed.
    stream = {"files": {}, "lanes": [1, 2], "config": {"seed": 0}}
    with pytest.raises(ValueError, match="seed: 0 -> 1.*a stream resumes over the same shards"):
        checkpoints.check_settings(tmp_path, stream, {"config": {"seed": 1}}, {}, True, {})


# ---- In the background ---------------------------------------------------------------------------

# Runs a piece of Python before each file is written: it sees `write`, `calls` and `folder`.
SLOWED = """
import os, signal, threading, time
from samestep.state import tensor_files
write, calls, inside = tensor_files.write_share, [], []
def slow(share, folder):
    assert not inside, "two saves at once"
    inside.append(1)
    calls.append(folder)
    main = threading.current_thread() is threading.main_thread()
    {}
    write(share, folder)
    inside.clear()
tensor_files.write_share = slow
"""


def test_in_the_background_the_same_bytes_are_saved(tiny, tmp_path):
    """One save at a time, although each takes longer than the steps between two, and the main
    process's longer than the other's."""
    runs = [tmp_path / name for name in ("waiting", "background")]
    tiny.train(2, "--output_dir", runs[0], *FLAGS)
    slow = SLOWED.format("assert not main; time.sleep(0.6 - 0.3 * int(os.environ['RANK']))")
    tiny.train(2, "--output_dir", runs[1], *ASYNC, before=slow)
    for step in (3, 6, 9, 12):
        files = [sorted(checkpoint(run, step).glob("*.safetensors")) for run in runs]
        assert [each.name for each in files[0]] == [each.name for each in files[1]]
        assert len(files[0]) == 2
        for mine, theirs in zip(*files, strict=True):
            assert mine.read_bytes() == theirs.read_bytes()
    committed = lines(runs[1], "commit_seconds")
    assert len(committed) == len(lines(runs[1], "save_seconds")) == 4
    assert all(line["commit_seconds"] >= 0.3 for line in committed)
    assert not lines(runs[0], "commit_seconds")
    steps = [line["step"] for line in lines(runs[1], "step")]
    assert steps == sorted(steps)


def test_kill_9_in_the_middle_leaves_the_checkpoint_before(tiny, tmp_path):
    output, unbroken = tmp_path / "run", tmp_path / "unbroken"
    code = "write(share, folder); len(calls) == 2 and os.kill(os.getpid(), 9)"
    slow = [*ASYNC, "--task.row_seconds", 0.02]
    tiny.train(2, "--output_dir", output, *slow, before=SLOWED.format(code), codes=[-9, 1])
    found = {path.name for path in (output / "checkpoints").iterdir()}
    assert found == {"step-00000003", ".step-00000006.partial"}
    tiny.train(2, "--output_dir", output, *ASYNC, "--accept_changes")
    tiny.train(2, "--output_dir", unbroken, *FLAGS)
    check_same(unbroken, output)


ENDS = cases("ends")


@pytest.mark.parametrize("name", ENDS)
def test_a_run_that_ends_waits_for_the_save_in_flight(tiny, output, name):
    """It keeps the checkpoint that it has begun; a stop saves one more, a failed save is none."""
    code, processes, ended, said, flags = ENDS[name].values()
    flags = ["--output_dir", output, *ASYNC, *flags.split()]
    if name == "a loss that is not finite":
        flags += ["--task.poisoned", int(order.sample_ids([2], 37, 0)[0])]
    slowed = SLOWED.format(textwrap.indent(code, "    ").strip())
    printed = tiny.train(processes, *flags, before=slowed, codes=[ended])
    last = lines(output, "loss")[-1]["step"]
    assert said.format(last) in printed and status(output)["exit_code"] == ended
    wanted = {"a failure": {3}, "a stop": {5, last}}.get(name, {2})
    assert {path.name for path in output.glob("checkpoints/*")} == {f"step-{n:08}" for n in wanted}
    assert all(checkpoints.verify(checkpoint(output, n))["step"] == n for n in wanted)
    assert name != "a failure" or 6 <= last < 100
