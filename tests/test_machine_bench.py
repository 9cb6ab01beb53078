"""`hardware bench`: its advice about slow devices, and whole runs on CPUs."""

import contextlib
import json
import math
import re
import time
from types import SimpleNamespace

import pytest

from conftest import make_tiny
from samestep.hardware import bench, devices, report

Figure = report.Figure


def test_the_median_of_several_blocks_and_calls_that_all_agree_on():
    calls = []

    def work():
        calls.append(0)
        time.sleep(0.2 if len(calls) == 6 else 0.002)  # that of the first block: 2 warm it up

    assert devices.seconds_per_call(work, calls=devices.BLOCKS) == pytest.approx(0.002, rel=0.5)
    calls.clear()
    devices.seconds_per_call(lambda: calls.append(0), 9.0, lambda number: 20 * devices.BLOCKS)
    assert len(calls) == 3 + (2 + 20) * devices.BLOCKS


# ---- Slow devices --------------------------------------------------------------------------------


def test_a_device_is_slow_more_than_15_percent_behind_the_median():
    assert bench.behind([100, 100, 85, 100]) == {}
    assert bench.behind([100, 100, 84, 100]) == {2: pytest.approx(0.16)}
    assert bench.behind([100, 50]) == {1: pytest.approx(1 / 3)}  # the median is 75
    assert bench.behind([100, 0, 100]) == {} and bench.behind([100]) == {}


def test_the_ways_out_and_what_each_gives():
    """Steps of 32 samples on devices with 100, 100, 100 and 50 samples a second.

    Equal: 4 x 8 samples, the slow one needs 8/50 s. Without it: (3, 3, 2) x 4 samples, so 12/100 s.
    Unequal: 16 micro-batches of 2, of which the fast ones take 5, 5 and 4: 10/100 s.
    """
    ways = bench.ways_out([100, 100, 100, 50], [3], samples=32, largest=8, exact=False)
    (unequal, first), (without, second), (equal, third) = ways
    assert (unequal, without, equal) == pytest.approx((320, 32 / 0.12, 200))
    assert "--device_shares auto: 32 samples = (5 + 5 + 4 + 2) x 2" in first
    assert "leave it out" in second and "num_processes 3" in second and "process 3" in second
    assert "--device_shares equal: 32 samples = 4 x 1 x 8" in third
    # Where no training step is slow, what changes least comes first.
    ways = bench.ways_out([100.0] * 4, [3], samples=32, largest=8, exact=False)
    assert [round(speed) for speed, _ in ways] == [400, 400, 267]
    assert ways[0][1].startswith("use all equally")


NAMES = [("n0", "H200")] * 3 + [("n1", "H200")]
MIDDLE = "50% behind the median of"
SLOW = (
    "slow device: process 3 on n1 (H200): its training step does 50 samples/s, 50% behind the "
    "median of 100; its matrix products do 350 TFLOP/s, 50% behind the median of 700"
)


@pytest.mark.parametrize(
    "steps, products, samples, exact, first, last",
    [
        ([100, 100, 100, 50], [700, 700, 700, 350], 32, False, SLOW, "3. 200 samples/s: use all"),
        ([100, 100, 100, 90], [700] * 4, 32, False, "no device is more than 15%", "no device"),
        ([100, 50], [350, 700], 32, False, "slow device: process 0 on n0 (H200): its matrix",
         "3. 100 samples/s: leave it out, in the YAML num_processes 1, and gpu_ids without the "
         "device of process 1:"),
        ([0, 0], [700, 70], 32, False, "slow device", "what to do about it is not known: not all"),
        ([100, 100, 50], [1] * 3, 30, True, "slow device", "3. not possible: "),
    ],
)  # fmt: skip
def test_slow_devices_are_named_with_what_to_do(steps, products, samples, exact, first, last):
    lines = bench.advise(NAMES[: len(steps)], steps, products, samples, 8, exact)
    assert lines[0].startswith(first) and lines[-1].startswith(last), lines


def test_what_a_process_cannot_measure_is_said():
    """Of two processes, of which the other one has measured `theirs`."""

    def measure(own, theirs):
        gather = lambda value: [value, theirs]  # noqa: E731
        processes = SimpleNamespace(fail_together=contextlib.nullcontext, gather=gather)
        bench.everywhere(section, processes, "x", own)

    def fail():
        raise RuntimeError("out of\nmemory")

    section = report.Section("bench")
    mine, theirs = ([Figure(name, 1.0, "GB/s", rank) for name in "xy"] for rank in "01")
    measure(fail, (theirs, ""))
    assert section.figures == theirs
    measure(lambda: mine, (theirs, ""))
    assert section.figures[2:] == [mine[0], theirs[0], mine[1], theirs[1]]
    measure(fail, ([], "out of memory"))
    said = "out of memory"
    assert section.lines == [f"not measured: x on process 0: {said}", f"not measured: x: {said}"]


def test_many_devices_share_a_row():
    figures = [Figure("x", value, "GB/s", str(i)) for i, value in enumerate((5, 3, 9, 4, 5.0))]
    assert report.side_by_side(figures) == [[figures[1], figures[2]]]
    assert report.side_by_side(figures[:2]) == [figures[:1], figures[1:2]]
    assert [report.short(n) for n in (0.123456, 999.94, 1234.5)] == ["0.1235", "999.9", "1,234"]


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


OF_EACH = [
    *(f"matmul {kind}, {n}" for kind in ("fp32", "bf16") for n in (256, 512, 1024)),
    r"memory, read \+ written", "data loader", "training step alone",
]  # fmt: skip


@pytest.mark.slow
def test_one_process_and_what_got_slower(tiny, tmp_path):
    printed, section = launch(tiny, "cpu", tmp_path / "one")
    for name in OF_EACH:
        assert {*values(section, name)} == {"0"}
    assert values(section, "checkpoint write")
    assert len(section["figures"]) == len(OF_EACH) + 1 and section["failures"] == []
    first, second, *more = section["lines"]
    assert first == "host to device: a CPU has nothing to copy"
    assert second == "links: one process exchanges nothing"
    loads, steps = (values(section, name)["0"] for name in ("data loader", "training step alone"))
    assert [line[:32] for line in more] == ["1 of 1 processes wait for data: "] * (loads < steps)
    assert "Warning" not in printed
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["hardware.json"]

    # Against an older report in which one figure was a hundred times better.
    old = json.loads((tmp_path / "one" / "hardware.json").read_text())
    (figure,) = (each for each in old["bench"]["figures"] if each["name"] == "data loader")
    figure["value"] *= 100
    (tmp_path / "old.json").write_text(json.dumps(old))
    flags = ["--compare", tmp_path / "old.json", "--threshold", 0.9]
    printed, _ = launch(tiny, "cpu", tmp_path / "new", *flags, code=1)
    assert re.search(r"data loader \(0\): \S+ samples/s, was \S+: \d+% slower", printed)
    assert "1 of 10 figures are more than 90% slower" in printed


@pytest.mark.slow
def test_two_processes_and_a_slow_one(tmp_path):
    """Process 1 sleeps 20 ms in each step, and is named with what to do about it."""
    project = make_tiny(tmp_path)
    with open(project.path / "task.py", "a") as file:
        file.write(
            "\n\nfast_loss_sum = loss_sum\n\n\ndef loss_sum(model, batch):\n"
            "    time.sleep(0.02 * (RANK == 1))\n    return fast_loss_sum(model, batch)\n"
        )
    printed, section = launch(project, "cpu_multi", tmp_path / "report")
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
