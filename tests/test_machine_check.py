"""`hardware check` and `hardware smoke`: what they find out, and faults that they name."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import ROOT, preloaded
from samestep.hardware import check, host, nvidia_smi, places, precisions, smoke

# ---- What nvidia-smi prints ----------------------------------------------------------------------

H100 = """\
0, GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77, 580.65.06, Disabled, 34, 70.33, 700.00, 345, 1980
1, GPU-8c1f3b5e-0001-4f7e-9d55-0a1b2c3d4e5f, 580.65.06, Disabled, 41, 512.10, 700.00, 1755, 1980
"""
MIG = "0, GPU-aaaa0000-1111-2222-3333-444455556666, 550.90, Enabled, 31, 45.12, 400.00, 210, 1410"
T4 = "0, GPU-f9b6c7a2-1111-2222-3333-444455556666, 470.57.02, [N/A], 51, 27.58, 70.00, 300, 1590"
VIRTUAL = "0, GPU-11112222-0000-0000-0000-0000, 550.54, [N/A], N/A, [N/A], [N/A], [N/A], [N/A]"
INSTANCES = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa0000-1111-2222-3333-444455556666)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb0000-1111-2222-3333-444455556666)
"""
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31,64-95\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31,64-95\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63,96-127\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63,96-127\t1\t\tN/A\n"
    "NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n"
)


def read(text):
    return nvidia_smi.read_table(text, nvidia_smi.FIELDS)


def test_fields_of_gpus_are_read_and_missing_ones_are_unknown():
    first, second = read(H100)
    assert first["uuid"] == "5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"  # as torch shows it
    assert nvidia_smi.describe_state(first) == "34 C, 70 of 700 W, 345 of 1980 MHz"
    assert nvidia_smi.number_of(second, "power.draw") == 512.1
    (t4,) = read(T4)
    assert "mig.mode.current" not in t4 and t4["driver_version"] == "470.57.02"
    (virtual,) = read(VIRTUAL)
    assert nvidia_smi.describe_state(virtual) == "temperature unknown, power unknown, clock unknown"
    assert nvidia_smi.describe_state({}) == nvidia_smi.describe_state(virtual)
    assert read("No devices were found\n") == read("") == []
    partly = {"power.draw": "27.58"}
    assert ", 28 of unknown W, " in nvidia_smi.describe_state(partly)


def test_instances_belong_to_the_gpu_above_them():
    assert nvidia_smi.read_instances(INSTANCES) == {
        "c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f": "0",
        "cba663e8-9bed-5b25-b243-5985ef7c9beb": "0",
    }


@pytest.fixture
def fake(monkeypatch):
    """Gives nvidia-smi these answers, by a word of its arguments."""

    def use(answers):
        def call(*arguments):
            for word, text in answers.items():
                if any(word in each for each in arguments):
                    return text, ""
            return "", 'nvidia-smi: Field "x" is not a valid field to query.'

        monkeypatch.setattr(nvidia_smi, "call", call)

    return use


def test_query_takes_old_drivers_and_mig_devices(fake):
    uuid = "GPU-aaaa0000-1111-2222-3333-444455556666"
    fake({"driver": MIG, "throttle_reasons": f"{uuid}, 0x0000000000000048", "-L": INSTANCES})
    gpus, problem = nvidia_smi.query()
    instance = gpus["c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"]
    assert not problem and instance["card"] == "aaaa0000-1111-2222-3333-444455556666"
    assert nvidia_smi.slowed_by(instance) == ["hardware slowdown", "too hot (hardware)"]
    fake({"driver": "No devices were found\n"})
    assert nvidia_smi.query() == ({}, "nvidia-smi lists no GPU")


def test_no_nvidia_smi_is_a_reason_and_no_crash(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_smi.query() == ({}, "nvidia-smi is not installed")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed because it has no driver\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert nvidia_smi.query() == (
        {},
        "nvidia-smi: NVIDIA-SMI has failed because it has no driver",
    )
    monkeypatch.setattr(check.torch.accelerator, "is_available", lambda: False)
    assert check.no_gpu().startswith("torch sees no GPU; nvidia-smi: NVIDIA-SMI has failed")
    program.write_text("#!/bin/sh\nprintf '\\377\\376 0, GPU'\n")
    assert nvidia_smi.query() == ({}, "nvidia-smi lists no GPU")


@pytest.mark.parametrize(
    "reasons, slowed",
    [
        ("0x0000000000000000", []),
        ("0x0000000000000001", []),  # idle
        ("0x0000000000000004", ["power cap"]),
        ("0x00000000000000a0", ["too hot (software)", "power brake of the supply"]),
        ("", []),
    ],
)
def test_reasons_of_a_slow_clock(reasons, slowed):
    assert nvidia_smi.slowed_by({"reasons": reasons}) == slowed


def test_programs_on_a_gpu_that_are_not_ours():
    text = (
        "GPU-aaaa, 4242, /usr/bin/python3, 20480\nGPU-aaaa, 77, [Not Found], [N/A]\n"
        "GPU-bbbb, 99, python, 1\n"
    )
    apps = nvidia_smi.read_table(text, nvidia_smi.APPS)
    assert nvidia_smi.other_programs(apps, "aaaa", {77}) == ["python3 (process 4242, 20.0 GiB)"]
    assert nvidia_smi.other_programs(apps, "aaaa", {4242}) == ["a program (process 77)"]
    # In a container the ids are those of the host: two programs, of which one is ours.
    assert nvidia_smi.other_programs(apps, "aaaa", {1}) == ["1 (ids of the host)"]
    assert nvidia_smi.other_programs(apps, "aaaa", {1, 2}) == []
    assert nvidia_smi.other_programs(apps, "cccc", {1}) == []


def test_links_are_a_line_for_each_kind():
    assert nvidia_smi.links(TOPOLOGY) == {
        "NV12": ["0-1", "2-3"],
        "SYS": ["0-2", "0-3", "1-2", "1-3"],
    }
    lines = nvidia_smi.describe_links(TOPOLOGY).splitlines()
    assert lines[0] == "12 x NVLink: 0-1, 2-3"
    assert lines[1] == "SYS (between NUMA nodes, slow): 0-2, 0-3, 1-2, 1-3"
    alone = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\n"
    assert nvidia_smi.describe_links(alone) == nvidia_smi.describe_links("") == ""


# ---- The machine ---------------------------------------------------------------------------------


def test_places_are_short():
    assert places.ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    values = ["2.13"] * 7 + ["2.12"]
    assert places.by_value(values) == "processes 0-6: 2.13\nprocess 7: 2.12"
    assert places.by_value(values, ["a"] * 4 + ["b"] * 4) == (
        "processes 0-6 on a, b: 2.13\nprocess 7 on b: 2.12"
    )
    assert places.by_value(["same"] * 64) == "same"


def test_limits_of_cgroups():
    assert host.read_quota("max 100000\n") is host.read_quota("-1 100000") is None
    assert host.read_quota("150000 100000\n") == 1.5
    new = host.cgroup_files("0::/a/b\n", "memory", "memory.max", "old")
    assert [str(path) for path in new] == [
        "/sys/fs/cgroup/a/b/memory.max",
        "/sys/fs/cgroup/a/memory.max",
        "/sys/fs/cgroup/memory.max",
    ]
    old = host.cgroup_files("4:memory:/x\n1:cpu,cpuacct:/y\n", "memory", "memory.max", "old")
    assert [*map(str, old)] == ["/sys/fs/cgroup/memory/x/old", "/sys/fs/cgroup/memory/old"]


def test_processor_names():
    assert host.cpu_model("processor\t: 0\nmodel name\t: AMD EPYC 7763\nmodel name\t: B") == (
        "AMD EPYC 7763"
    )
    assert host.cpu_model("processor\t: 0\nCPU architecture: 8\n")  # ARM


def test_an_unwritable_folder_is_one_line_and_leaves_nothing(tmp_path):
    host.WRITTEN, before = 1 << 20, host.WRITTEN
    write, read, free = host.measure_disk(tmp_path / "new")
    assert min(write, read, free) > 0 and not list((tmp_path / "new").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--report .*file: .*; give a folder that can be written"):
        host.measure_disk(tmp_path / "file")
    host.WRITTEN = before


def test_formats_run_only_with_right_numbers(monkeypatch):
    import torch

    cpu = torch.device("cpu")
    found = precisions.try_formats(cpu)
    assert found["fp32"] == "runs" and "tf32" not in found
    right = precisions.multiply
    monkeypatch.setattr(precisions, "multiply", lambda *a: (right(*a)[0] * 1.001, right(*a)[1]))
    assert precisions.try_format("fp32", cpu).startswith("wrong: the error of a product is 0.001")
    assert precisions.try_format("bf16", cpu) in ("runs", "emulated")  # within its tolerance
    monkeypatch.setattr(precisions, "multiply", lambda *a: (right(*a)[0] * np.nan, right(*a)[1]))
    assert precisions.try_format("bf16", cpu).startswith("wrong: ")
    lines = precisions.describe({"fp32": "runs", "bf16": "emulated", "fp8": "no: not here"})
    assert lines == "runs: fp32\nemulated, slow: bf16\nfp8: no: not here"


def test_fp8_of_mi300_is_its_own(monkeypatch):
    import torch

    about, cpu = SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-"), torch.device("cpu")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    assert precisions.fp8_type(torch.device("cuda")) == torch.float8_e4m3fn
    about.gcnArchName = "gfx942:sramecc+:xnack-"
    own = precisions.fp8_type(torch.device("cuda"))
    assert own == torch.float8_e4m3fnuz and precisions.fp8_type(cpu) == torch.float8_e4m3fn

    def multiply(a, b, *scales, out_dtype):
        assert a.dtype == b.dtype == own
        return (a.float() @ b.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    monkeypatch.setattr(precisions, "fp8_type", lambda device: own)
    assert precisions.try_format("fp8", cpu) == "emulated"


# ---- All processes together ----------------------------------------------------------------------


def process(rank, **changes):
    """What a process says of itself: GPU `rank` of 8 on one of eight machines."""
    device = {
        "name": "NVIDIA H100 80GB HBM3, compute capability 9.0, 79.2 GiB",
        "uuid": f"{rank}",
        "free": 78.5,
        "total": 79.2,
        "precisions": {"fp32": "runs"},
        "state": "78.5 of 79.2 GiB free, 34 C",
        "slowed": [],
        "others": [],
    }
    own = {
        "host": f"node{rank // 8}",
        "pid": rank,
        "versions": {"torch": "2.13.0", "driver": "580.65.06"},
        "cpu": "AMD EPYC 9654",
        "cores": "96 physical, 192 logical, 192 allowed",
        "allowed": 192.0,
        "memory": "1512 GiB",
        "free": "1400 GiB",
        "shared memory": 500e9,
        "network": f"node{rank // 8} at eth0 10.0.0.{rank // 8}",
        "backend": "nccl",
        "problem": "",
        "links": "18 x NVLink: all pairs",
    }
    for name, value in changes.items():
        (device if name in device else own)[name] = value
    return {**own, "devices": [device]}


def report_on(everywhere, free=100.0):
    first = {"disk": (1.0, 2.0, free)}
    return check.describe(everywhere, [first] * len(everywhere))


def test_64_processes_that_agree_are_a_short_report():
    section = report_on([process(rank) for rank in range(64)])
    assert not section.failures and not section.lines
    assert section.facts["processes"] == "64 on 8 machines; nccl"
    assert section.facts["device"] == "NVIDIA H100 80GB HBM3, compute capability 9.0, 79.2 GiB"
    assert section.facts["torch"] == "2.13.0"


def test_disagreement_names_the_processes_and_both_values():
    everywhere = [process(rank) for rank in range(64)]
    everywhere[63] = process(63, versions={"torch": "2.12.1", "driver": "580.65.06"})
    everywhere[5]["cores"] = "96 physical, 192 logical, 8 allowed"
    cores, torch = report_on(everywhere).failures
    assert torch.endswith("2.13.0; process 63 on node7: 2.12.1")
    assert torch.startswith("torch differs: processes 0-62 on node0, node1, node2, node3, ...: ")
    assert "; process 5 on node0: 96 physical, 192 logical, 8 allowed" in cores


def test_two_processes_on_one_gpu_are_a_failure():
    everywhere = [process(0), process(1, uuid="0")]
    (line,) = report_on(everywhere).failures
    assert line.startswith("processes 0-1 on node0 use one GPU, 0; lower num_processes")
    everywhere = [process(0), process(8, uuid="0")]  # on two machines: virtual GPUs may do so
    assert not report_on(everywhere).failures


def test_wrong_numbers_name_the_process():
    wrong = {"fp32": "wrong: the error of a product is 0.1, the limit 1e-05"}
    (line,) = report_on([process(0), process(1, precisions=wrong)]).failures
    assert line.startswith("process 1 on node0 computes wrong numbers: fp32 wrong: ")


def test_warnings_name_the_process_or_the_machine():
    everywhere = [
        process(0, others=["python (process 7, 3.0 GiB)"], slowed=["power cap"]),
        process(1, free=10.0),
    ]
    everywhere[0]["shared memory"], everywhere[0]["allowed"] = 64e6, 1.0
    lines = report_on(everywhere, free=3.0).lines
    expected = [
        "/dev/shm of node0 has 0.064 GB",
        "3 GB are free in the folder --report of node0",
        "2 processes on node0 share 1 cores",
        "the GPU of process 0 on node0 is used by other programs: python (process 7, 3.0 GiB)",
        "the GPU of process 0 on node0 is slowed down: power cap",
        "the GPU of process 1 on node0 has 10.0 of 79.2 GiB free",
    ]
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(f"warning: {start}")


def test_the_odd_one_out():
    scales = np.ones(2)
    rows = np.array([[1.0, 2], [1, 2], [1, 2.5], [1, 2]])
    assert smoke.odd_ones(rows, scales, 0.1) == {2: (0.5, 1)}
    assert smoke.odd_ones(rows, scales, 0.6) == {}
    assert {*smoke.odd_ones(rows[1:3], scales, 0.4)} == {0, 1}  # of two, nobody knows
    rows[3, 0] = np.nan
    found = smoke.odd_ones(rows, scales, 0.1)
    assert {*found} == {2, 3} and found[3] == (np.inf, 0)
    assert {*smoke.odd_ones(rows[3:], scales, 0.1)} == {0}


def test_a_sketch_shows_errors_that_keep_the_norm():
    gradient = {"a": np.array([[1.0, -2], [3, 4]]), "b": np.array([5.0])}
    flipped = {"a": -gradient["a"], "b": gradient["b"]}
    swapped = {"a": gradient["a"].T, "b": gradient["b"]}
    own = smoke.sketch(gradient)
    assert own.shape == (4,) and own[0] == pytest.approx(30**0.5)
    for other in (flipped, swapped):
        assert abs(smoke.sketch(other) - own).max() > 0.1


# ---- For real ------------------------------------------------------------------------------------


def run(project, processes, *words, seconds=120):
    """Runs `hardware` in so many processes: exit codes, what the first printed, all errors."""
    ended = preloaded(
        project.path, project.envs(processes), ["-m", "samestep", "hardware", *words], seconds
    )
    codes, out, errors = zip(*ended, strict=True)
    return {*codes}, out[0], "".join(errors)


def with_fault(tiny, folder, fault):
    """A copy of the tiny project with this code at the end of its task."""
    project = type(tiny)(folder / "project")
    shutil.copytree(tiny.path, project.path, ignore=shutil.ignore_patterns("runs", ".cache"))
    with open(project.path / "task.py", "a") as file:
        file.write(fault)
    return project


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_check_runs(tiny, tmp_path, processes):
    codes, out, errors = run(tiny, processes, "check", "--report", str(tmp_path))
    assert codes == {0} and not errors
    section = json.loads((tmp_path / "hardware.json").read_text())["check"]
    assert section["facts"]["device"] == "CPU: torch sees no GPU"
    assert "fp32" in section["facts"]["precisions"] and "now" not in section["facts"]
    assert {each["name"] for each in section["figures"]} >= {"disk write, flushed", "disk read"}
    assert [path.name for path in tmp_path.iterdir()] == ["hardware.json"]
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("processes, left_out", [(1, 2), (2, 0)])
def test_smoke_passes(tiny, tmp_path, processes, left_out):
    codes, out, errors = run(tiny, processes, "smoke", "--report", str(tmp_path))
    assert codes == {0} and not errors, out + errors
    assert f"{8 - left_out} passed, 0 failed, {left_out} left out" in out
    assert [path.name for path in tmp_path.iterdir()] == ["hardware.json"]
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--device_shares", "[3,1]"], ["--exact", "true"]])
def test_smoke_passes_with_other_sums(tiny, tmp_path, flags):
    codes, out, errors = run(tiny, 2, "smoke", "--report", str(tmp_path), *flags)
    assert codes == {0} and "8 passed, 0 failed" in out, out + errors


LOSS = "old = loss_sum\ndef loss_sum(model, batch):\n    return old(model, batch) * {} ** RANK\n"
MODEL = "old = build_model\ndef build_model(*a):\n    model = old(*a)\n    if RANK == 1: {}\n"
MODEL += "    return model\n"
CALLS = "old, calls = loss_sum, []\ndef loss_sum(model, batch):\n    calls.append(1)\n"
CALLS += "    if RANK == 1 and len(calls) >= {}: raise RuntimeError('broken')\n"
CALLS += "    return old(model, batch)\n"
FAULTS = {
    "loss": (LOSS.format("1.01"), "same loss and gradient: ", "process 1 on"),
    "nan": (LOSS.format("float('nan')"), "same loss and gradient: process 1 on", "loss nan"),
    "gradient": (
        MODEL.format("model[0].weight.register_hook(lambda g: g * 1.01)"),
        "gradients are added up: process 1 on",
        "of 0.weight is off by 0.01",
    ),
    "weights": (
        MODEL.format("model[3].bias.data += 1e-3"),
        "same weights at the start: ",
        "process 1 on",
    ),
    "shapes": (
        MODEL.format("model[0] = torch.nn.Linear(8, 32, bias=False)"),
        "to build the model: ",
        "process 1 on",
    ),
    "raises": (CALLS.format(1), "same loss and gradient: process 1 on", "RuntimeError: broken"),
    "raises later": (CALLS.format(6), "gradients are added up: process 1 on", "broken"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_smoke_names_the_process_that_is_wrong(tiny, tmp_path, fault):
    code, check_name, words = FAULTS[fault]
    project = with_fault(tiny, tmp_path, code)
    codes, out, _ = run(project, 2, "smoke", "--report", str(tmp_path / "report"))
    assert codes == {1}, out
    line = next(each for each in out.splitlines() if each.startswith(f"failed: {check_name}"))
    assert words in line
    assert not list((tmp_path / "report").glob(".smoke*"))


BACKWARD = "accelerator.backward(gradients.guard(loss) * (gradients.averaged / max(terms, 1)))"
SCALED = "its first step has grad_norm "
LOOP_FAULTS = {  # what the owner of train.py writes in place of what, and what smoke says
    "scaled twice": (BACKWARD, BACKWARD.replace("(grad", "(2 * grad"), SCALED),
    "a micro-batch left out": (
        "        gradients.begin(train_loader.plan)\n",
        "        gradients.begin(train_loader.plan)\n"
        "        micro_batches[0] = micro_batches[ranks.layout.rank]\n",
        "its first step has ",
    ),
    "a share left out": (
        "for number, batch in micro_batches:",
        "for number, batch in micro_batches[int(ranks.layout.rank == 1) :]:",
        "waited 5 s for the other processes",
    ),
    "raises": ("        gradients.complete()", "        raise TypeError", "ended with an error"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", LOOP_FAULTS)
def test_smoke_runs_the_loop_of_the_owner(tiny, tmp_path, fault):
    old, new, words = LOOP_FAULTS[fault]
    project = with_fault(tiny, tmp_path, "")
    train = project.path / "train.py"
    assert train.read_text().count(old) == 1
    train.write_text(train.read_text().replace(old, new))
    with open(project.path / "configs" / "train" / "default.yaml", "a") as file:
        file.write("timeout: 5\n")
    codes, out, errors = run(project, 2, "smoke", "--report", str(tmp_path / "report"))
    assert codes == {1} and "7 passed, 1 failed" in out, out + errors
    line = next(each for each in out.splitlines() if each.startswith("failed: the loop of train"))
    assert words in line
    assert not list((tmp_path / "report").glob(".smoke*"))


@pytest.mark.slow
def test_a_signal_leaves_no_files(tiny, tmp_path):
    fault = "import os\n" + CALLS.replace("if RANK == 1 and", "if").format(4)
    fault = fault.replace("raise RuntimeError('broken')", "os.kill(os.getpid(), 15)")
    project = with_fault(tiny, tmp_path, fault)
    codes, out, errors = run(project, 1, "smoke", "--report", str(tmp_path / "report"))
    assert (codes, errors) == ({1}, "samestep hardware: stopped by a signal\n"), out
    assert not list((tmp_path / "report").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("calls, code", [(99, 0), (4, 1)])
def test_smoke_checks_the_gradients_of_fsdp(tiny, tmp_path, calls, code):
    # After the 4th call process 1 computes with the model that is prepared.
    fault = "old, calls = loss_sum, []\ndef loss_sum(model, batch):\n    calls.append(1)\n"
    fault += f"    factor = 1.01 if RANK == 1 and len(calls) > {calls} else 1\n"
    fault += "    return old(model, batch) * factor\n"
    project = with_fault(tiny, tmp_path, fault)
    launch = ["accelerate", "launch", "--quiet", "--config_file", "configs/accelerate/fsdp2.yaml"]
    launch += ["--num_processes", "2", "--mixed_precision", "no", ROOT / "tests/sharded_on_cpu.py"]
    result = project.run(
        *launch, "-m", "samestep", "hardware", "smoke", "--report", tmp_path, check=False
    )
    assert result.returncode == code, result.stdout + result.stderr
    wrong = re.search("added up: processes 0-1 on .*: the sum of gradients of", result.stdout)
    assert bool(wrong) == bool(code), result.stdout
    looped = "failed: the loop of train.py: its first step has loss" in result.stdout
    assert looped == bool(code)
    assert f"{7 - 2 * code} passed, {2 * code} failed, 1 left out" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, error",
    [
        (["check", "--report", "task.py"], "--report task.py: File exists; give a folder"),
        (["smoke", "--report", "task.py"], "task.py"),
        (["check", "--learning_rate", "1"], "check takes no --learning_rate; see --help"),
        (["smoke", "--learning_rat", "1"], "learning_rate"),
        (["smoke", "--task.fail_where", "build_model", "--task.fail_rank", "0"], "no build_model"),
        (["smoke", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["smoke", "--resume", "never"], "only train.py can do --resume; leave it out"),
        (["smoke", "--max_steps", "9"], "a few steps do not read --max_steps; leave it out"),
        (["bench", "--output_dir", "x"], "a few steps do not read --output_dir; leave it out"),
        (["bench", "--accept_changes"], "only train.py can do --accept_changes; leave it out"),
        (["check", "--threshold", "0.2"], "--threshold is read with --compare; give the older"),
    ],
)
def test_bad_input_is_one_line_once(tiny, words, error):
    codes, out, errors = run(tiny, 2, *words)
    assert codes == {2} and error in errors, errors
    assert errors.startswith("samestep hardware: ") and errors.count("\n") == 1
    assert "failed" not in out


@pytest.mark.slow
def test_a_missing_model_folder_is_one_line(project):
    codes, _, errors = run(project, 2, "smoke", "--task.model_name_or_path", "nowhere")
    assert codes == {2} and "nowhere" in errors
    assert errors.startswith("samestep hardware: ") and errors.count("\n") == 1
