"""`hardware check` and `hardware smoke`: what they find out, and faults that they name."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import ROOT, preloaded
from samestep.hardware import check, devices, places, smoke
from samestep.report.peaks import fp8_type

CPU = torch.device("cpu")

# ---- What nvidia-smi prints ----------------------------------------------------------------------

MATRIX = "        GPU0    GPU1\nGPU0     X      NV12"
TOPOLOGY = "\\t\\033[4mGPU0\\tGPU1\\033[0m\\nGPU0\\t X \\tNV12\\n\\nLegend:\\n\\n  X    = Self\\n"


@pytest.mark.parametrize(
    "program, printed, said",
    [
        (f"printf '{TOPOLOGY}'", MATRIX, "torch sees no GPU; "),
        ("echo NVIDIA-SMI has failed; exit 9", "nvidia-smi: NVIDIA-SMI has failed",
         "torch sees no GPU; nvidia-smi: NVIDIA-SMI has failed"),
        ("printf '\\377\\376 0, GPU'", "\ufffd\ufffd 0, GPU", "torch sees no GPU; "),
        ("echo 'GPU 0: H100 (UUID: GPU-5d5b)'", "GPU 0: H100 (UUID: GPU-5d5b)",
         "nvidia-smi lists 1, but torch sees none: "),
        (None, "nvidia-smi does not run: [Errno 2] No such file or directory: 'nvidia-smi'",
         "torch sees no GPU"),
    ],
)  # fmt: skip
def test_what_nvidia_smi_prints_and_why_there_is_no_gpu(
    monkeypatch, tmp_path, program, printed, said
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if program:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert check.nvidia_smi("-L") == printed
    assert check.no_gpu().startswith(said)


# ---- The machine ---------------------------------------------------------------------------------


def test_places_are_short():
    assert places.name([0, 1, 2, 5, 7, 8]) == "processes 0-2, 5, 7-8"
    values = ["2.13"] * 7 + ["2.12"]
    assert places.by_value(values, ["a"] * 4 + ["b"] * 4) == (
        "processes 0-6 on a, b: 2.13\nprocess 7 on b: 2.12"
    )
    assert places.by_value(["same"] * 64) == "same"


def test_formats_run_only_with_right_numbers(monkeypatch):
    found = devices.try_formats(CPU)
    assert found["fp32"] == "runs" and "tf32" not in found
    right = devices.multiply
    monkeypatch.setattr(devices, "multiply", lambda *a: right(*a) * 1.001)
    assert devices.try_format("fp32", CPU).startswith("wrong: the error of a product is 0.001")
    assert devices.try_format("bf16", CPU) in ("runs", "emulated")  # within its tolerance
    monkeypatch.setattr(devices, "multiply", lambda *a: right(*a) * np.nan)
    assert devices.try_format("bf16", CPU).startswith("wrong: ")
    lines = check.describe_formats({"fp32": "runs", "bf16": "emulated", "fp8": "no: not here"})
    assert lines == "runs: fp32\nemulated, slow: bf16\nfp8: no: not here"


def test_fp8_of_mi300_is_its_own(monkeypatch):
    about = SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    assert fp8_type(torch.device("cuda")) == torch.float8_e4m3fn
    about.gcnArchName = "gfx942:sramecc+:xnack-"
    own = fp8_type(torch.device("cuda"))
    assert own == torch.float8_e4m3fnuz and fp8_type(CPU) == torch.float8_e4m3fn


# ---- All processes together ----------------------------------------------------------------------


def process(rank, **changes):
    """What a process says of itself: GPU `rank` of 8 on one of eight machines."""
    device = {
        "name": "NVIDIA H100 80GB HBM3, compute capability 9.0, 79.2 GiB",
        "uuid": f"{rank}",
        "free": 78.5,
        "total": 79.2,
        "formats": {"fp32": "runs"},
    }
    own = {
        "host": f"node{rank // 8}",
        "versions": {"torch": "2.13.0", "driver": "580.65.06"},
        "cpu": "AMD EPYC 9654",
        "cores": "96 physical, 192 logical, 192 allowed",
        "allowed": 192.0,
        "memory": "1512 GiB",
        "free": "1400 GiB",
        "shared memory": 500e9,
        "free disk": 100.0,
        "speeds": [],
        "network": f"node{rank // 8} at eth0 10.0.0.{rank // 8}",
        "backend": "nccl",
    }
    device |= {name: changes.pop(name) for name in [*changes] if name in device and name != "free"}
    return {**own, "devices": [device], **changes}


def test_64_processes_that_agree_are_a_short_report():
    section = check.describe([process(rank) for rank in range(64)])
    assert not section.failures and not section.lines
    assert section.facts["processes"] == "64 on 8 machines; nccl"
    assert section.facts["device"] == "NVIDIA H100 80GB HBM3, compute capability 9.0, 79.2 GiB"
    assert section.facts["torch"] == "2.13.0"


def test_disagreement_names_the_processes_and_both_values():
    everywhere = [process(rank) for rank in range(64)]
    everywhere[63] = process(63, versions={"torch": "2.12.1", "driver": "580.65.06"})
    everywhere[5]["cores"] = "96 physical, 192 logical, 8 allowed"
    cores, version = check.describe(everywhere).failures
    assert version.endswith("2.13.0; process 63 on node7: 2.12.1")
    assert version.startswith("torch differs: processes 0-62 on node0, node1, node2, node3, ...: ")
    assert "; process 5 on node0: 96 physical, 192 logical, 8 allowed" in cores


WRONG = {"fp32": "wrong: the error of a product is 0.1, the limit 1e-05"}


@pytest.mark.parametrize(
    "rank, changes, said",
    [
        (1, {"uuid": "0"}, "processes 0-1 on node0 use one GPU, 0; lower num_processes"),
        (8, {"uuid": "0"}, ""),  # on two machines: virtual GPUs may do so
        (1, {"formats": WRONG}, "process 1 on node0 computes wrong numbers: fp32 wrong: "),
    ],
)
def test_what_is_wrong_names_the_processes(rank, changes, said):
    failures = check.describe([process(0), process(rank, **changes)]).failures
    assert [line.startswith(said) for line in failures] == ([True] if said else [])


def test_warnings_name_the_process_or_the_machine():
    first = process(0) | {"shared memory": 64e6, "allowed": 1.0, "free disk": 3.0}
    second = process(1)
    second["devices"][0]["free"] = 10.0
    lines = check.describe([first, second]).lines
    expected = [
        "/dev/shm of node0 has 0.064 GB",
        "3 GB are free in the folder --report of node0",
        "2 processes on node0 share 1 cores",
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
    own = smoke.sketch(gradient)
    assert own.shape == (4,) and own[0] == pytest.approx(30**0.5)
    for changed in (-gradient["a"], gradient["a"].T):
        assert abs(smoke.sketch(gradient | {"a": changed}) - own).max() > 0.1


# ---- For real ------------------------------------------------------------------------------------


def run(project, processes, *words, seconds=120):
    """Runs `hardware` in so many processes: exit codes, what the first printed, all errors."""
    ended = preloaded(
        project.path, project.envs(processes), ["-m", "samestep", "hardware", *words], seconds
    )
    codes, out, errors = zip(*ended, strict=True)
    return {*codes}, out[0], "".join(errors)


def smoke_of(tiny, folder, fault="", flags=(), processes=2, change=("", "")):
    """Runs smoke in a copy of the project, with code at the end of its task, or a change of
    train.py: exit codes, what it printed, errors."""
    project = type(tiny)(folder / "project")
    shutil.copytree(tiny.path, project.path, ignore=shutil.ignore_patterns("runs", ".cache"))
    with open(project.path / "task.py", "a") as file:
        file.write(fault)
    train, (old, new) = project.path / "train.py", change
    assert not old or train.read_text().count(old) == 1
    train.write_text(train.read_text().replace(old, new) if old else train.read_text())
    if new == LEFT:  # which the other process waits for
        with open(project.path / "configs" / "train" / "default.yaml", "a") as file:
            file.write("timeout: 5\n")
    found = run(project, processes, "smoke", "--report", str(folder / "report"), *flags)
    assert not list((folder / "report").glob(".smoke*"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_check_runs(tiny, tmp_path, processes):
    codes, out, errors = run(tiny, processes, "check", "--report", str(tmp_path))
    assert codes == {0} and not errors
    section = json.loads((tmp_path / "hardware.json").read_text())["check"]
    assert section["facts"]["device"] == "CPU: torch sees no GPU"
    assert "fp32" in section["facts"]["precisions"] and "now" not in section["facts"]
    named = {"free disk of --report", "checkpoint write"}
    assert {each["name"] for each in section["figures"]} >= named
    assert [path.name for path in tmp_path.iterdir()] == ["hardware.json"]
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes, flags",
    [(1, []), (2, []), (2, ["--device_shares", "[3,1]"]), (2, ["--exact", "true"])],
)
def test_smoke_passes(tiny, tmp_path, processes, flags):
    codes, out, errors = smoke_of(tiny, tmp_path, flags=flags, processes=processes)
    assert codes == {0} and not errors, out + errors
    assert f"{3 + processes} passed, 0 failed, {2 - processes} left out" in out
    assert max(map(len, out.splitlines())) <= 100


LOSS = "old = loss_sum\ndef loss_sum(model, batch):\n    return old(model, batch) * {} ** RANK\n"
MODEL = "old = build_model\ndef build_model(*a):\n    model = old(*a)\n    if RANK == 1: {}\n"
MODEL += "    return model\n"
CALLS = "old, calls = loss_sum, []\ndef loss_sum(model, batch):\n    calls.append(1)\n"
CALLS += "    if RANK == 1 and len(calls) >= {}: raise RuntimeError('broken')\n"
CALLS += "    return old(model, batch)\n"
HOOK = MODEL.format("model[0].weight.register_hook(lambda g: g * 1.1)")
NOISE = "model[3].bias.data += 1e-3"
SHAPE = "model[0] = torch.nn.Linear(8, 32, bias=False)"
BACKWARD = "accelerator.backward(gradients.guard(loss) * (gradients.averaged / max(terms, 1)))"
BEGIN = "        gradients.begin(train_loader.plan)\n"
SAME = BEGIN + "        micro_batches[0] = micro_batches[ranks.layout.rank]\n"
SHARE = "for number, batch in micro_batches:"
LEFT = "for number, batch in micro_batches[int(ranks.layout.rank == 1) :]:"
STEP = "        optimizer.step()\n"
OTHER = "        optimizer.param_groups[0]['lr'] *= 1 + ranks.layout.rank\n" + STEP
LOAD = "    step, scores = saver.load()\n"
SHIFT = LOAD + "    next(model.parameters()).data += 1e-3 * bool(step)\n"
LOOP, WEIGHTS = "the loop of train.py: ", "same weights after the step: "
FAULTS = {  # at the end of task.py, or in train.py: the check that fails, and what it says
    "loss": (LOSS.format("1.01"), "same loss and gradient: ", "process 1 on"),
    "nan": (LOSS.format("float('nan')"), "same loss and gradient: process 1 on", "loss nan"),
    "gradient": (HOOK, "same loss and gradient: ", "gradient of 0.weight is off by"),
    "weights": (MODEL.format(NOISE), "same weights at the start: ", "process 1 on"),
    "shapes": (MODEL.format(SHAPE), "same weights at the start: ", "different shapes of weights"),
    "raises": (CALLS.format(1), "same loss and gradient: process 1 on", "RuntimeError: broken"),
    "scaled twice": ((BACKWARD, BACKWARD.replace("(grad", "(2 * grad")), LOOP, "has grad_norm "),
    "a micro-batch left out": ((BEGIN, SAME), LOOP, "its first step has "),
    "a share left out": ((SHARE, LEFT), LOOP, "waited 5 s for the other processes"),
    "an error": (("        gradients.complete()", "        raise TypeError"), LOOP, "an error"),
    "another update": ((STEP, OTHER), WEIGHTS, "have different weights"),
    "no update": ((STEP, ""), WEIGHTS, "has changed no weight"),
    "other weights come back": ((LOAD, SHIFT), "save and load: processes 0-1 on", "changed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_smoke_names_what_is_wrong(tiny, tmp_path, fault):
    code, name, words = FAULTS[fault]
    where = {"fault": code} if isinstance(code, str) else {"change": code}
    codes, out, errors = smoke_of(tiny, tmp_path, **where)
    assert codes == {1}, out + errors
    line = next(each for each in out.splitlines() if each.startswith(f"failed: {name}"))
    assert words in line


@pytest.mark.slow
def test_a_signal_leaves_no_files(tiny, tmp_path):
    fault = "import os\n" + CALLS.replace("if RANK == 1 and", "if").format(2)
    fault = fault.replace("raise RuntimeError('broken')", "os.kill(os.getpid(), 15)")
    codes, out, errors = smoke_of(tiny, tmp_path, fault, processes=1)
    assert (codes, errors) == ({1}, "samestep hardware: stopped by a signal\n"), out
    assert not list((tmp_path / "report").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("factor, code", [(1, 0), (1.01, 1)])
def test_smoke_checks_the_step_of_fsdp(tiny, tmp_path, factor, code):
    project = type(tiny)(tmp_path / "project")
    shutil.copytree(tiny.path, project.path, ignore=shutil.ignore_patterns("runs", ".cache"))
    train = project.path / "train.py"
    train.write_text(train.read_text().replace(BACKWARD, BACKWARD.replace("(l", f"({factor} * l")))
    launch = ["accelerate", "launch", "--quiet", "--config_file", "configs/accelerate/fsdp2.yaml"]
    launch += ["--num_processes", "2", "--mixed_precision", "no", ROOT / "tests/sharded_on_cpu.py"]
    result = project.run(
        *launch, "-m", "samestep", "hardware", "smoke", "--report", tmp_path, check=False
    )
    assert result.returncode == code, result.stdout + result.stderr
    wrong = re.search("failed: the loop of train.py: its first step has grad_norm", result.stdout)
    assert bool(wrong) == bool(code), result.stdout
    assert f"{4 - code} passed, {code} failed, 1 left out" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, error",
    [
        (["check", "--report", "task.py"], "--report task.py: File exists; give a folder"),
        (["check", "--learning_rate", "1"], "check takes no --learning_rate; see --help"),
        (["smoke", "--learning_rat", "1"], "learning_rate"),
        (["smoke", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["smoke", "--resume", "never"], "only train.py can do --resume; leave it out"),
        (["smoke", "--max_steps", "9"], "a few steps do not read --max_steps; leave it out"),
        (["bench", "--output_dir", "x"], "a few steps do not read --output_dir; leave it out"),
        (["bench", "--seconds=nan"], "--seconds: expected a number above 0, up to 60; got 'nan'"),
        (["check", "--threshold", "0.2"], "--threshold is read with --compare; give the older"),
        (["check", "--compare", "task.py"], "task.py is no hardware.json of this version"),
        (["recommend"], "start it with `python -m samestep hardware recommend`"),
    ],
)
def test_bad_input_is_one_line_once(tiny, words, error):
    codes, out, errors = run(tiny, 2, *words)
    assert codes == {2} and error in errors, errors
    assert errors.startswith("samestep hardware: ") and errors.count("\n") == 1
    assert "failed" not in out
