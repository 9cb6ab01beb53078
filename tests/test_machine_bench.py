"""`hardware bench`: its formulas, its advice about slow devices, and whole runs on CPUs."""

import argparse
import contextlib
import errno
import json
import math
import re
import time
from types import SimpleNamespace

import pytest
import torch

from conftest import make_tiny
from samestep.hardware import bench, links, report, slow, timing, workload
from samestep.processes import ranks

Figure = report.Figure


# ---- Formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, bus", [("all_reduce", 6.0), ("all_gather", 3.0), ("reduce_scatter", 3.0)]
)
def test_bandwidths_are_those_of_nccl_tests(kind, bus):
    """2 GB in half a second are 4 GB/s; of four processes each sends 3/4 of it, or twice that."""
    assert links.bandwidths(kind, 2 * 10**9, 0.5, 4) == pytest.approx((4.0, bus))


def test_the_median_ignores_an_outlier(monkeypatch):
    """Calls of 2 ms, the warm-up of 9 s, and one of 5 s that something else has disturbed."""
    now, lasts = [0], iter([9000] * timing.WARM_UP + [2, 2, 5000, 2, 2])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])

    def work():
        now[0] += next(lasts) * 10**6

    assert timing.seconds_per_call(work, torch.device("cpu"), calls=5) == pytest.approx(0.002)


def test_all_processes_make_the_number_of_calls_that_they_agree_on():
    calls = []
    timing.seconds_per_call(lambda: calls.append(0), torch.device("cpu"), 9.0, lambda number: 7)
    assert len(calls) == timing.WARM_UP + 1 + 7


def test_sizes_counts_and_pairs():
    assert [links.size_name(size) for size in links.GPU_SIZES[::2]] == ["4 KiB", "1 MiB", "256 MiB"]
    assert [workload.process_counts(n) for n in (2, 3, 4, 6)] == [
        [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]
    ]  # fmt: skip
    assert links.choose_pairs(3) == ([(0, 1), (0, 2), (1, 2)], [])
    pairs, (line,) = links.choose_pairs(40)
    assert len(pairs) == 39 and pairs[-1] == (38, 39) and "780 pairs" in line


def test_operations_reduce_and_gather(monkeypatch):
    """What each operation takes and gives, of 100 bytes on 3 processes: 24 numbers, 8 each."""
    given = {}
    for name in ("all_reduce", "all_gather_single", "reduce_scatter_single"):
        note = lambda *tensors, name=name: given.update({name: [*map(len, tensors)]})  # noqa: E731
        monkeypatch.setattr(torch.distributed, name, note, raising=False)
    for kind in links.FACTORS:
        work, size = links.operation(kind, 100, 3, torch.device("cpu"))
        work()
        assert size == 96
    assert given == {"all_reduce": [24], "all_gather_single": [24, 8],
                     "reduce_scatter_single": [8, 24]}  # fmt: skip


# ---- Slow devices --------------------------------------------------------------------------------


def test_a_device_is_slow_more_than_15_percent_behind_the_median():
    assert slow.behind([100, 100, 85, 100]) == {}
    assert slow.behind([100, 100, 84, 100]) == {2: pytest.approx(0.16)}
    assert slow.behind([100, 50]) == {1: pytest.approx(1 / 3)}  # the median is 75
    assert slow.behind([100, 0, 100]) == {} and slow.behind([100]) == {}


def test_the_ways_out_and_what_each_gives():
    """Steps of 32 samples on devices with 100, 100, 100 and 50 samples a second.

    Equal: 4 x 8 samples, the slow one needs 8/50 s. Without it: (3, 3, 2) x 4 samples, so 12/100 s.
    Unequal: 16 micro-batches of 2, of which the fast ones take 5, 5 and 4: 10/100 s.
    """
    ways = slow.ways_out([100, 100, 100, 50], [3], samples=32, largest=8, exact=False)
    (unequal, first), (without, second), (equal, third) = ways
    assert (unequal, without, equal) == pytest.approx((320, 32 / 0.12, 200))
    assert "--device_shares auto: 32 samples = (5 + 5 + 4 + 2) x 2" in first
    assert "leave it out" in second and "num_processes 3" in second and "process 3" in second
    assert "--device_shares equal: 32 samples = 4 x 1 x 8" in third


def test_what_changes_least_comes_first_among_equals():
    """By its training step no device is slow here: matrix products are."""
    ways = slow.ways_out([100.0] * 4, [3], samples=32, largest=8, exact=False)
    assert [round(speed) for speed, _ in ways] == [400, 400, 267]
    assert ways[0][1].startswith("use all equally")


def test_a_way_that_is_not_possible_says_why():
    """30 samples in micro-batches of 8 go to no number of processes."""
    ways = slow.ways_out([100, 100, 50], [2], samples=30, largest=8, exact=True)
    assert all(speed == 0 and "exact: 30 samples" in way for speed, way in ways)
    lines = slow.advise([slow.Speed("a", "b", s, 1) for s in (100, 100, 50)], 30, 8, True)
    assert [line[:15] for line in lines[-3:]] == ["1. not possible", "2. not possible",
                                                  "3. not possible"]  # fmt: skip


def test_a_slow_device_is_named():
    speeds = [slow.Speed("n0", "H200", 100, 700)] * 3 + [slow.Speed("n1", "H200", 50, 350)]
    first, _, heading, *ways = slow.advise(speeds, 32, 8, False)
    assert first == (
        "slow device: process 3 on n1 (H200): its training step does 50 samples/s, 50% behind the "
        "median of 100; its matrix products do 350 TFLOP/s, 50% behind the median of 700"
    )
    assert "32 samples" in heading
    assert [way.split(":")[0] for way in ways] == [
        "1. 320 samples/s", "2. 266.7 samples/s", "3. 200 samples/s"
    ]  # fmt: skip
    assert slow.advise(speeds[:3], 32, 8, False) == []


def test_devices_that_are_slow_in_something_are_not_all_left_out():
    speeds = [slow.Speed("n0", "H200", 100, 350), slow.Speed("n0", "H200", 50, 700)]
    first, second, *_, leave = slow.advise(speeds, 32, 8, False)
    assert "process 0" in first and "matrix products" in first and "training step" not in first
    assert "process 1" in second and "training step" in second
    assert leave.startswith("3. 100 samples/s: leave it out") and "of process 1:" in leave


def test_without_training_steps_there_are_no_ways_out():
    speeds = [slow.Speed("n0", "H200", 0, 700), slow.Speed("n0", "H200", 0, 70)]
    _, last = slow.advise(speeds, 32, 8, False)
    assert "not all training steps were measured" in last


# ---- What cannot be measured ---------------------------------------------------------------------


def processes(*others):
    """The ranks of several processes, of which the others measured this."""
    return SimpleNamespace(
        fail_together=contextlib.nullcontext, gather=lambda value: [value, *others]
    )


def test_what_a_process_cannot_measure_is_said():
    section = report.Section("bench")

    def fail():
        raise RuntimeError("out of\nmemory")

    theirs = [Figure("x", 1.0, "GB/s", "1"), Figure("y", 1.0, "GB/s", "1")]
    bench.everywhere(section, processes((theirs, "")), "x", fail)
    assert section.figures == theirs
    assert section.lines == ["not measured: x on process 0: out of memory"]
    mine = [Figure("x", 2.0, "GB/s", "0"), Figure("y", 2.0, "GB/s", "0")]
    bench.everywhere(section, processes((theirs, "")), "x", lambda: mine)
    assert section.figures[2:] == [mine[0], theirs[0], mine[1], theirs[1]]
    bench.everywhere(section, processes(([], "out of memory")), "y", fail)
    assert section.lines[1:] == ["not measured: y: out of memory"]


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "inf", "nan", "x"])
def test_seconds_have_a_range(seconds, capsys):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--seconds={seconds}"])
    assert "--seconds: expected a number above 0, up to 60; got" in capsys.readouterr().err


def test_no_file_stays_after_a_failed_write(tmp_path, monkeypatch):
    def fail(share, folder):
        (folder / "rank-00000.safetensors").write_bytes(b"half")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(workload.tensor_files, "write_share", fail)
    with pytest.raises(OSError):
        workload.measure_disk(tmp_path / "new", 4096)
    assert [*(tmp_path / "new").iterdir()] == []


def test_a_report_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "report").write_text("")
    with pytest.raises(ranks.UserError, match="File exists"), ranks.as_user_error():
        workload.measure_disk(tmp_path / "report", 4096)


def test_many_devices_share_a_row():
    figures = [Figure("x", value, "GB/s", str(i)) for i, value in enumerate((5, 3, 9, 4, 5.0))]
    assert report.side_by_side(figures) == [[figures[1], figures[2]]]
    assert report.side_by_side(figures[:2]) == [figures[:1], figures[1:2]]
    assert [report.short(n) for n in (0.123456, 12.3456, 999.94, 1234.5)] == [
        "0.1235", "12.35", "999.9", "1,234"
    ]  # fmt: skip


# ---- Runs ----------------------------------------------------------------------------------------


def launch(project, hardware, folder, *flags, code=0):
    """Runs bench under a YAML; what it printed, and its section of hardware.json."""
    command = ["accelerate", "launch", "--quiet"]
    command += ["--config_file", f"configs/accelerate/{hardware}.yaml"]
    command += ["-m", "samestep", "hardware", "bench"]
    result = project.run(*command, "--seconds", 0.02, "--report", folder, *flags, check=False)
    text = result.stdout + result.stderr
    assert result.returncode == code, text
    return text, json.loads((folder / "hardware.json").read_text())["bench"]


def values(section, name):
    """{where or size: value} of a figure, which are all finite and above 0."""
    found = {
        each.get("where") or each.get("size", 0): each["value"]
        for each in section["figures"]
        if re.fullmatch(name, each["name"])
    }
    assert found and all(0 < value < math.inf for value in found.values()), name
    return found


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """A report of one process: its folder, what was printed, and the section."""
    folder = tmp_path_factory.mktemp("bench") / "one"
    return folder, *launch(tiny, "cpu", folder)


OF_EACH = [
    *(f"matmul {kind}, {n}" for kind in ("fp32", "bf16") for n in (256, 512, 1024)),
    r"memory, read \+ written", "data loader", "training step alone",
]  # fmt: skip


@pytest.mark.slow
def test_one_process(alone):
    folder, printed, section = alone
    for name in OF_EACH:
        assert {*values(section, name)} == {"0"}
    assert values(section, "checkpoint write") and values(section, "checkpoint hash")
    assert len(section["figures"]) == len(OF_EACH) + 2 and section["failures"] == []
    first, second, *more = section["lines"]
    assert first == "host to device: a CPU has nothing to copy"
    assert second == "links: one process exchanges nothing"
    loads, steps = (values(section, name)["0"] for name in ("data loader", "training step alone"))
    assert [line[:32] for line in more] == ["1 of 1 processes wait for data: "] * (loads < steps)
    assert "Warning" not in printed
    assert [path.name for path in folder.iterdir()] == ["hardware.json"]


@pytest.mark.slow
def test_what_got_slower_is_named(alone, tiny, tmp_path):
    """Against an older report in which one figure was a hundred times better."""
    folder, _, _ = alone
    old = json.loads((folder / "hardware.json").read_text())
    (figure,) = (each for each in old["bench"]["figures"] if each["name"] == "data loader")
    figure["value"] *= 100
    (tmp_path / "old.json").write_text(json.dumps(old))
    flags = ["--compare", tmp_path / "old.json", "--threshold", 0.9]
    printed, _ = launch(tiny, "cpu", tmp_path / "new", *flags, code=1)
    assert re.search(r"data loader \(0\): \S+ samples/s, was \S+: \d+% slower", printed)
    assert "1 of 11 figures are more than 90% slower" in printed


@pytest.mark.slow
def test_two_processes_and_a_slow_one(tmp_path):
    """Process 1 sleeps 20 ms in each step, and is named with what to do about it."""
    project = make_tiny(tmp_path)
    with open(project.path / "task.py", "a") as file:
        file.write(
            "\n\nfast_loss_sum = loss_sum\n\n\ndef loss_sum(model, batch):\n"
            "    time.sleep(0.02 * (RANK == 1))\n    return fast_loss_sum(model, batch)\n"
        )
    folder = tmp_path / "report"
    printed, section = launch(project, "cpu_multi", folder)
    for name in OF_EACH:
        assert {*values(section, name)} == {"0", "1"}
    assert {*values(section, "point-to-point.*")} == {"0-1"}
    for kind, factor in (("all_reduce", 1), ("all_gather", 0.5), ("reduce_scatter", 0.5)):
        algorithm, bus = values(section, f"{kind} algbw.*"), values(section, f"{kind} busbw.*")
        assert {*algorithm} == {*bus} == {4096, 65536, 2**20, 2**24}
        for size in algorithm:
            assert bus[size] == pytest.approx(algorithm[size] * factor)
        latency = values(section, f"{kind} latency.*")
        assert latency == {4096: pytest.approx(4096 / algorithm[4096] / 1e3)}
    scaling = values(section, "training together.*")
    assert {*scaling} == {1, 2}
    assert "Warning" not in printed and "Traceback" not in printed

    # The slow process, and what each way out gives by the measured speeds: steps of 8 samples.
    quick, late = values(section, "training step alone").values()
    assert late < min(2 / 0.02, quick / 2) and scaling[2] < 4 / 0.02
    named = r"slow device: process 1 on \S+ \(cpu\): its training step does "
    assert sum(bool(re.match(named, line)) for line in section["lines"]) == 1
    ways = [line for line in section["lines"] if re.match(r"\d\. ", line)]
    unequal = max(8 / max((8 - n) / quick, n / late) for n in range(1, 8))
    expected = {"use all equally": 2 * late, "leave it out": quick, "unequal shares": unequal}
    found = {}
    for line in ways:
        speed, way = re.match(r"\d\. (\S+) samples/s: ([^,]+),", line).groups()
        found[way] = float(speed.replace(",", ""))
    assert found == pytest.approx(expected, rel=1e-3)
    assert [*found.values()] == sorted(found.values(), reverse=True)
    assert found["unequal shares"] == max(found.values()) or found["leave it out"] >= unequal
