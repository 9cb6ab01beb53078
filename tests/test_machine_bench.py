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

    assert 0.002 <= devices.seconds_per_call(work, calls=devices.BLOCKS) < 0.2
    calls.clear()
    devices.seconds_per_call(lambda: calls.append(0), 9.0, lambda number: 20 * devices.BLOCKS)
    assert len(calls) == 3 + (2 + 20) * devices.BLOCKS


# ---- Slow devices --------------------------------------------------------------------------------


NAMES = [("n0", "H200")] * 3 + [("n1", "H200")]
SLOW = "slow device: process 3 on n1 (H200): its "
STEPS, PRODUCTS = SLOW + "training step does {} samples/s, ", SLOW + "matrix products do 350 TF"
THIRD = [100, 100, 100, 70]


@pytest.mark.parametrize(
    "steps, products, first, rule, ways",
    [
        (THIRD, [700] * 4, STEPS.format(70), "20%", ["370 unequal", "300 leave", "280 use"]),
        ([100] * 3 + [25], [700] * 4, STEPS.format(25), "50%", ["325 unequal", "300 leave"]),
        ([100] * 4, [700] * 3 + [350], PRODUCTS, "20%", ["400 use", "400 unequal", "300 leave"]),
        ([100, 45], [700] * 2, "slow device: process 1", "50%", ["145 unequal", "100 leave"]),
        ([100, 40], [300, 700], "slow device: process 0", "20%", ["140 unequal", "80 use"]),
        ([100] * 3 + [81], [700] * 4, "no device is more than 20% behind the fastest", "", []),
        ([0, 0], [700, 70], "slow device", "", []),
        ([0, 0], [700, 0], "", "", []),
        ([100], [700], "", "", []),
    ],
)
def test_slow_devices_are_named_with_what_to_do(steps, products, first, rule, ways):
    lines = bench.advise(NAMES[: len(steps)], steps, products)
    assert lines[0].startswith(first) if first else not lines
    found = [re.match(r"\d\. at most (\d+) samples/s: (\w+)", line) for line in lines]
    found = [" ".join(each.groups()) for each in found if each]
    most = 2 if products[0] == 300 else 3  # not all can be left out
    assert found[: len(ways)] == ways and len(found) == most * bool(ways)
    assert not rule or f"rule of thumb, for more than {rule} behind: " in "\n".join(lines)
    if steps == THIRD:
        assert 'unequal shares: --device_shares "[1.43, 1.43, 1.43, 1]", or auto' in lines[-3]
    if steps == [0, 0] and products[1]:
        assert lines[-1].startswith("what to do about it is not known: not all")


def test_what_a_process_cannot_measure_is_said():
    """Of two processes, of which the other one has measured `theirs`."""

    def measure(own, theirs):
        gather = lambda value: [value, theirs]  # noqa: E731
        processes = SimpleNamespace(fail_together=contextlib.nullcontext, gather=gather)
        bench.everywhere(section, processes, "x", own)

    def fail():
        raise RuntimeError("out of\nmemory")

    section = report.Section("bench")
    found = [Figure(name, 1.0, "GB/s") for name in "xy"]
    measure(fail, (found, ""))
    assert [(each.name, each.where) for each in section.figures] == [("x", "1"), ("y", "1")]
    measure(lambda: found, (found, ""))
    places = [each.name + each.where for each in section.figures[2:]]
    assert places == ["x0", "x1", "y0", "y1"]
    measure(fail, ([], "out of memory"))
    said = "out of memory"
    assert section.lines == [f"not measured: x on process 0: {said}", f"not measured: x: {said}"]


def test_many_devices_share_a_row(capsys):
    figures = [Figure("x", v, "GB/s", str(i), peak=2e4) for i, v in enumerate((5, 3, 1234.5, 4))]
    report.show(report.Section("bench", figures=[*figures, Figure("y", 0.123456, "us")]))
    out = " ".join(capsys.readouterr().out.split())
    assert "│ x │ 1 .. 2 │ 3 .. 1,234 │ GB/s │ 0% .. 6% │" in out
    assert "of the peak" in out
    assert "│ y │ │ 0.1235 │ us │ │" in out


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
    *(f"memory {kind}, {n} MiB" for kind in ("fp32", "bf16") for n in (16, 64, 256)),
    "data loader", "training step alone",
]  # fmt: skip


@pytest.mark.slow
def test_one_process(tiny, tmp_path):
    printed, section = launch(tiny, "cpu", tmp_path / "one")
    for name in OF_EACH:
        assert {*values(section, name)} == {"0"}
    assert values(section, "checkpoint write")
    assert len(section["figures"]) == len(OF_EACH) + 1 and section["failures"] == []
    loads, steps = (values(section, name)["0"] for name in ("data loader", "training step alone"))
    assert [line[:32] for line in section["lines"]] == ["1 of 1 processes wait for data: "] * (
        loads < steps
    )
    assert "Warning" not in printed
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["hardware.json"]


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
        bus, latency = (values(section, f"{kind} {what}.*") for what in ("busbw", "latency"))
        assert {*bus} == {4096, 65536, 2**20, 2**24}
        assert latency == {4096: pytest.approx(factor * 4096 / bus[4096] / 1e3)}
    scaling = values(section, "training together.*")
    assert {*scaling} == {2}
    assert "Warning" not in printed and "Traceback" not in printed

    # The slow process, and what each way out gives by the measured speeds.
    quick, late = values(section, "training step alone").values()
    assert late < min(2 / 0.02, quick / 2) and scaling[2] < 4 / 0.02
    named = r"slow device: process 1 on \S+ \(cpu\): its training step does "
    assert sum(bool(re.match(named, line)) for line in section["lines"]) == 1
    ways = [line for line in section["lines"] if re.match(r"\d\. ", line)]
    assert "unequal shares: --device_shares" in ways[0] and len(ways) == 3
