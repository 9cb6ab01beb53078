"""`hardware check` and `hardware smoke`: what they find out, and faults that they name."""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import ROOT, bake, lines, preloaded, wait_until
from samestep.hardware import check, devices, precision, report, smoke
from samestep.programs import hardware
from samestep.report.peaks import fp8_type

CPU = torch.device("cpu")

# ---- What nvidia-smi prints ----------------------------------------------------------------------

MATRIX = "        GPU0    GPU1\nGPU0     X      NV12"
TOPOLOGY = "\\t\\033[4mGPU0\\tGPU1\\033[0m\\nGPU0\\t X \\tNV12\\n\\nLegend:\\n\\n  X    = Self\\n"


@pytest.mark.parametrize(
    "program, printed",
    [
        (f"printf '{TOPOLOGY}'", MATRIX),
        ("echo NVIDIA-SMI has failed; exit 9", "NVIDIA-SMI has failed"),
        (None, "nvidia-smi does not run: [Errno 2] No such file or directory: 'nvidia-smi'"),
    ],
)
def test_what_nvidia_smi_prints_and_why_there_is_no_gpu(monkeypatch, tmp_path, program, printed):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if program:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert check.nvidia_smi("-L") == printed
    said = check.no_gpu()
    assert said.startswith("torch sees no GPU")
    assert said.endswith(" ".join(printed.split()) if program else "no GPU")


def test_an_nvidia_smi_that_hangs_and_cannot_be_killed_is_left_alone(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n/bin/sleep 3\necho >{tmp_path}/ended\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(check, "MOST", 0.1)
    monkeypatch.setattr(check.subprocess.Popen, "kill", lambda program: None)  # it is in state D
    assert check.nvidia_smi("-L").endswith("timed out after 0.1 seconds")
    assert not (tmp_path / "ended").exists()


# ---- The machine ---------------------------------------------------------------------------------


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


HOSTS = [f"node{rank // 8}" for rank in range(64)]


def processes(count):
    """What so many processes say of themselves, eight on a machine."""
    facts = {"torch": "2.13.0", "driver": "580.65.06", "cores": "96 allowed", "device": "H100"}
    everywhere = [report.Section("check", {**facts}) for _ in range(count)]
    for rank in range(0, count, 8):
        everywhere[rank].facts["memory free"] = f"{1400 + rank} GiB"
    return everywhere


def test_what_64_processes_have_in_common_and_what_differs():
    everywhere = processes(64)
    section = check.describe(everywhere, HOSTS)
    assert not section.failures and not section.lines
    assert section.facts["processes"] == "64 on 8 machines" and section.facts["device"] == "H100"
    free = section.facts["memory free"].splitlines()
    assert len(free) == 8 and free[1] == "process 8 on node1: 1408 GiB"
    everywhere[63].facts["torch"] = "2.12.1"
    del everywhere[7].facts["driver"]
    everywhere[1].lines.append("full")
    everywhere[1].failures.append("cuda:1 computes wrong numbers")
    found = check.describe(everywhere, HOSTS)
    version, driver, wrong = found.failures
    assert version.startswith("torch differs: processes 0-62 on node0, node1, node2, node3, ...: ")
    assert version.endswith("2.13.0; process 63 on node7: 2.12.1")
    assert driver.endswith("; process 7 on node0: missing")
    assert wrong == "process 1 on node0: cuda:1 computes wrong numbers"
    assert found.lines == ["warning: process 1 on node0: full"]


def test_what_may_go_wrong_on_a_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(check, "LEAST_FREE_DISK", 10**9)
    monkeypatch.setattr(check, "LEAST_SHARED_MEMORY", 10**9)
    monkeypatch.setattr(check, "allowed_cores", lambda: 1.5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    section = report.Section("check")
    check.look_at_machine(section, tmp_path, CPU)
    disk, shared, cores = section.lines
    assert " GB are free in the folder --report" in disk and shared.startswith("/dev/shm has ")
    assert cores == "2 processes share 1.5 cores"
    assert [each.name for each in section.figures] == ["free disk of --report"]


NO_KERNEL = "no: CUDA error: no kernel image is available for execution on the device"
SILENT = "does not answer: CUDA error: uncorrectable ECC error"


def fail(device):
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might")


@pytest.mark.parametrize(
    "broken, wrong, said",
    [
        ("", None, ""),
        ("try_formats", lambda _: {"fp32": NO_KERNEL}, f"does not compute: fp32: {NO_KERNEL}"),
        ("describe_device", fail, SILENT),
        ("mem_get_info", fail, SILENT),
    ],
)
def test_a_gpu_that_does_not_compute_or_answer_is_a_failure(monkeypatch, broken, wrong, said):
    """The second of two."""

    def answer(place, name, right):
        function = lambda gpu: wrong(gpu) if gpu.index and name == broken else right(gpu)  # noqa: E731
        monkeypatch.setattr(place, name, function)

    answer(devices, "try_formats", lambda gpu: {"fp32": "runs"})
    answer(check, "describe_device", lambda gpu: f"H10{gpu.index}")
    answer(torch.cuda, "mem_get_info", lambda gpu: (9 << 30, 9 << 30))
    section = check.look_at_process([torch.device("cuda", i) for i in range(2)])
    failed = "".join(section.failures)
    assert failed.startswith(f"cuda:1 {said}") if said else not failed
    assert section.facts["cuda:0, memory free"] == "9.0 of 9.0 GiB"
    differ = ["the GPUs differ; a run on all of them needs device_shares: auto"]
    assert section.lines == (differ if broken != "describe_device" else [])


@pytest.mark.parametrize("seen", ["cuda", "cpu"])  # torch may see no GPU at all
def test_a_lost_gpu_is_a_failure(monkeypatch, tmp_path, seen):
    said = "Unable to determine the device handle for GPU3: 0000:1B:00.0: GPU is lost."
    monkeypatch.setattr(check, "nvidia_smi", lambda *_: f"0, 580.65.06, 41\n{said} Reboot")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    section = report.Section("check")
    check.look_at_machine(section, tmp_path, torch.device(seen))
    (line,) = section.failures
    assert line.startswith(f"a GPU is lost: {said}") and "CUDA_VISIBLE_DEVICES" in line


def test_the_odd_one_out():
    trial = SimpleNamespace(hosts=HOSTS[:4], limit=lambda table: table["no"])

    def said(*losses):
        trial.ranks = SimpleNamespace(gather=lambda own: [own * loss for loss in losses])
        smoke.compare_alone(trial, 1.0, {"a": np.ones(2)})

    said(1, 1 + 1e-6, 1, 1)
    with pytest.raises(smoke.Wrong, match="^process 2 on node0: loss 1.5, gradient of a is off by"):
        said(1, 1, 1.5, 1)
    with pytest.raises(
        smoke.Wrong, match="^process 3 on node0: loss nan, gradient of a is not fin"
    ):
        said(1, 1, 1, np.nan)


def test_a_sketch_shows_errors_that_keep_the_norm():
    gradient = {"a": np.array([[1.0, -2], [3, 4]]), "b": np.array([5.0])}
    own = smoke.sketch(0.5, gradient)
    assert own.shape == (5,) and own[0] == 0.5 and own[1] == pytest.approx(30**0.5)
    for changed in (-gradient["a"], gradient["a"].T):
        assert abs(smoke.sketch(0.5, gradient | {"a": changed}) - own).max() > 0.1


# ---- For real ------------------------------------------------------------------------------------


def run(project, processes, *words, seconds=120):
    """Runs `hardware` in so many processes: exit codes, what the first printed, all errors."""
    ended = preloaded(
        project.path, project.envs(processes), ["-m", "samestep", "hardware", *words], seconds
    )
    codes, out, errors = zip(*ended, strict=True)
    return {*codes}, out[0], "".join(errors)


def with_fault(tiny, folder, fault):
    """A copy of the project with code at the end of its task, or with a change of train.py."""
    project = type(tiny)(folder / "project")
    shutil.copytree(tiny.path, project.path, ignore=shutil.ignore_patterns("runs", ".cache"))
    file = project.path / ("task.py" if isinstance(fault, str) else "train.py")
    text = file.read_text()
    assert isinstance(fault, str) or text.count(fault[0]) == 1
    file.write_text(text + fault if isinstance(fault, str) else text.replace(*fault))
    if fault == (SHARE, LEFT):  # which the other process waits for
        with open(project.path / "configs" / "train" / "default.yaml", "a") as recipe:
            recipe.write("timeout: 5\n")
    return project


def smoke_of(tiny, folder, fault="", flags=(), processes=2):
    """Runs smoke with a fault: exit codes, what it printed, errors."""
    project, output = with_fault(tiny, folder, fault), folder / "report"
    found = run(project, processes, "smoke", "--report", str(output), *flags)
    assert not list(output.glob(".smoke*"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--device_shares", "[3,1]"], ["--exact", "true"]])
def test_smoke_passes(tiny, tmp_path, flags):
    codes, out, errors = smoke_of(tiny, tmp_path, flags=flags)
    assert codes == {0} and not errors, out + errors
    assert "5 passed, 0 failed, 0 left out" in out


LOSS = "old = loss_sum\ndef loss_sum(model, batch):\n    return old(model, batch) * {} ** RANK\n"
MODEL = "old = build_model\ndef build_model(*a):\n    model = old(*a)\n    if RANK == 1: {}\n"
MODEL += "    return model\n"
CALLS = "old, calls = loss_sum, []\ndef loss_sum(model, batch):\n    calls.append(1)\n"
CALLS += "    if RANK == 1 and len(calls) >= {}: raise RuntimeError('broken')\n"
CALLS += "    return old(model, batch)\n"
HOOK = MODEL.format("model[0].weight.register_hook(lambda g: g * 1.1)")
NOISE = "model[3].bias.data += 1e-3"
BACKWARD = "accelerator.backward(gradients.nan_if_not_finite(loss) * scale)"
BEGIN = "        gradients.start_step(train_loader.plan)\n"
SAME = BEGIN + "        micro_batches[0] = micro_batches[ranks.layout.rank]\n"
SHARE = "for number, batch in micro_batches:"
LEFT = "for number, batch in micro_batches[int(ranks.layout.rank == 1) :]:"
STEP = "        optimizer.step()\n"
OTHER = "        optimizer.param_groups[0]['lr'] *= 1 + ranks.layout.rank\n" + STEP
LOAD = "    step, scores = saver.load()\n"
SHIFT = LOAD + "    next(model.parameters()).data += 1e-3 * bool(step)\n"
LOOP, WEIGHTS = "the loop of train.py: ", "same weights after the step: "
FAULTS = {  # at the end of task.py, or in train.py: the check that fails, and what it says
    "nan": (LOSS.format("float('nan')"), "same loss and gradient: process 1 on", "loss nan"),
    "gradient": (HOOK, "same loss and gradient: ", "gradient of 0.weight is off by"),
    "weights": (MODEL.format(NOISE), "same weights at the start: weights differ", "process 1 on"),
    "raises": (CALLS.format(1), "same loss and gradient: process 1 on", "RuntimeError: broken"),
    "scaled twice": ((BACKWARD, BACKWARD.replace("(grad", "(2 * grad")), LOOP, "has grad_norm "),
    "a micro-batch left out": ((BEGIN, SAME), LOOP, "its first step has "),
    "a share left out": ((SHARE, LEFT), LOOP, "waited 5 s for the other processes"),
    "another update": ((STEP, OTHER), WEIGHTS, "weights differ, by their digests: "),
    "no update": ((STEP, ""), WEIGHTS, "has changed no weight"),
    "other weights come back": ((LOAD, SHIFT), "save and load: processes 0-1 on", "changed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_smoke_names_what_is_wrong(tiny, tmp_path, fault):
    code, name, words = FAULTS[fault]
    codes, out, errors = smoke_of(tiny, tmp_path, code)
    assert codes == {1}, out + errors
    line = next(each for each in out.splitlines() if each.startswith(f"failed: {name}"))
    assert words in line


@pytest.mark.slow
def test_a_signal_leaves_no_files(tiny, tmp_path):
    fault = "import os\n" + CALLS.replace("if RANK == 1 and", "if").format(2)
    fault = fault.replace("raise RuntimeError('broken')", "os.kill(os.getpid(), 15)")
    codes, out, errors = smoke_of(tiny, tmp_path, fault, processes=1)
    assert codes == {75} and errors.startswith("samestep hardware: stopped "), out
    assert not list((tmp_path / "report").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("factor, code", [(1, 0), (1.01, 1)])
def test_smoke_checks_the_step_of_fsdp(tiny, tmp_path, factor, code):
    change = (BACKWARD, BACKWARD.replace("(grad", f"({factor} * grad"))
    project = with_fault(tiny, tmp_path, change)
    launch = ["accelerate", "launch", "--quiet", "--config_file", "configs/accelerate/fsdp2.yaml"]
    launch += ["--num_processes", "2", "--mixed_precision", "no", ROOT / "tests/sharded_on_cpu.py"]
    result = project.run(
        *launch, "-m", "samestep", "hardware", "smoke", "--report", tmp_path, check=False
    )
    assert result.returncode == code, result.stdout + result.stderr
    wrong = re.search("failed: the loop of train.py: its first step has grad_norm", result.stdout)
    assert bool(wrong) == bool(code), result.stdout
    assert f"{4 - code} passed, {code} failed, 1 left out" in result.stdout


def test_the_first_report_is_the_baseline_of_later_ones(tmp_path, capsys):
    baseline = tmp_path / report.BASELINE
    options = SimpleNamespace(report=tmp_path, threshold=0.1, compare=None, baseline=baseline)
    same = {"device": "H100", "processes": 8}

    def measured(code=0, conditions=same, **speeds):
        figures = [report.Figure(name, speed, "GB/s", "0") for name, speed in speeds.items()]
        section = report.Section("bench", {}, conditions, figures)
        old = report.load(options.compare or baseline) if baseline.exists() else {}
        report.check_comparable(["check", "bench"], conditions, old) if old else None
        assert report.finish([section], options, old) == code
        return capsys.readouterr().out

    assert "kept as the baseline" in measured(x=100.0, y=1.0)
    assert "bench: 0 of 2 figures are more than 10% slower" in measured(x=95.0, y=1.0, z=1.0)
    out = measured(x=80.0)
    assert "bench, x (0): 80 GB/s, was 100: 20% slower\n" in out
    assert "bench, y (0): nan GB/s, was 1: only in the older report\n" in out
    assert "bench: 2 of 2 figures are" in out
    assert "bench, x (0): 200 GB/s, was 100: 100% faster" in measured(x=200.0, y=1.0)
    with pytest.raises(ValueError, match="processes was 8 and is 7; if a device is lost: docs/mea"):
        measured(0, same | {"processes": 7}, x=100.0)
    with pytest.raises(ValueError, match="precision was None and is bf16"):
        measured(0, same | {"precision": "bf16"}, x=100.0)
    options.compare = baseline
    measured(1, x=80.0, y=1.0)
    baseline.with_name(report.REPORT).write_text('{"mine": 1}')
    with pytest.raises(ValueError, match="is no hardware.json of this version"):
        report.prepare_folder(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "[1]", '{"format": 1, "bench": 3}']
    + [
        json.dumps({"format": 1, "bench": {"figures": figures, "conditions": conditions}})
        for figures, conditions in [
            ([{"name": "x"}], {}),
            ([{"name": "x", "unit": "GB/s", "value": "fast"}], {}),
            ([], 3),
        ]
    ],
)
def test_an_older_report_that_is_damaged(monkeypatch, tmp_path, capsys, content):
    """A baseline is said to be; a report that was asked for is refused."""
    baseline = tmp_path / report.BASELINE
    baseline.write_text(content)
    monkeypatch.setattr(hardware, "read_project", lambda flags: None)
    monkeypatch.setattr(sys, "argv", ["samestep hardware", "--report", str(tmp_path)])
    assert hardware.prepare()[-1] == {}
    said = f"not compared with {baseline}, which you may remove: {baseline} is no hardware.json"
    assert capsys.readouterr().out.startswith(said[:90])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--compare", str(baseline)])
    with pytest.raises(ValueError, match="is no hardware.json of this version"):
        hardware.prepare()


@pytest.fixture
def starting(monkeypatch, tmp_path):
    """Processes that `start_processes` starts are those of a script; variables that it sets."""
    (tmp_path / "python").write_text(
        "#!/bin/sh\ntrap '/bin/sleep 0.5; echo >ended-$RANK; exit 75' TERM\n"
        "echo >began-$RANK\nwhile :; do /bin/sleep 0.1; done\n"
    )
    (tmp_path / "python").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path)})
    return monkeypatch


def test_no_process_outlives_the_one_that_started_it(starting, tmp_path):
    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is None:
                wait_until(lambda: len([*tmp_path.glob("began-*")]) == 2)
                raise SystemExit(75)
            return super().wait(timeout)

    starting.setattr(subprocess, "Popen", Interrupted)
    starting.setattr(sys, "argv", ["samestep hardware", "--processes", "2"])
    with pytest.raises(SystemExit):
        hardware.start_processes()
    assert len([*tmp_path.glob("ended-*")]) == 2


@pytest.mark.parametrize("visible, precision", [("1", "bf16"), ("0", "fp16"), (None, "fp16")])
def test_the_precision_is_that_of_the_visible_gpus(starting, visible, precision):
    """Of a T4 and an A100, as the project's Makefile has it."""
    cards = {"0": "7.5", "1": "8.0"}

    def query(*words):
        chosen = [cards[words[1]]] if words[0] == "-i" else [*cards.values()]
        return "\n".join(["compute_cap", *chosen])

    starting.setattr(check, "nvidia_smi", query)
    starting.setattr(torch.cuda, "is_available", lambda: True)
    starting.setattr(torch.accelerator, "device_count", lambda: 1)
    starting.setattr(sys, "argv", ["samestep hardware"])
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    assert hardware.start_processes() is None
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == precision


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_one_command_runs_all_phases_on_all_devices(tiny, tmp_path, processes):
    command = ["python", "-m", "samestep", "hardware", "--report", tmp_path, "--seconds", 0.01]
    result = tiny.run(*command, "--processes", processes)
    assert f"{3 + processes} passed, 0 failed" in result.stdout and not result.stderr
    assert max(len(line) for line in result.stdout.splitlines() if line[:1] == "│") <= 100
    found = json.loads((tmp_path / "hardware.json").read_text())
    assert {*found} == {"format", "check", "bench", "smoke"}
    assert found["check"]["facts"]["device"].startswith("CPU: torch sees no GPU\nruns: fp32")
    assert {each["where"] for each in found["bench"]["figures"] if "alone" in each["name"]} == {
        str(rank) for rank in range(processes)
    }
    assert (tmp_path / "baseline.json").read_text() == (tmp_path / "hardware.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text_classification", "causal_lm"])
def test_both_precisions_train_the_same_steps(tmp_path, task):
    project = bake(tmp_path, task=task, tracker="none")
    recipe = ["--config", "configs/train/smoke.yaml"]
    verb = ["python", "-m", "samestep", "hardware", "precision", "--steps", 6, *recipe]
    folder = project.path / "runs" / "hardware"
    for name in (".of-hardware", "fp32"):  # of an earlier call: they are replaced
        (folder / "precision" / name).mkdir(parents=True)
    (folder / "precision" / "fp32" / "metrics.jsonl").write_text('{"loss": 1}\n')
    project.run(*verb)
    facts = json.loads((folder / "hardware.json").read_text())["precision"]["facts"]
    fp32, bf16 = (lines(folder / "precision" / name, "loss") for name in ("fp32", "bf16"))
    assert len(fp32) == 6
    assert [each["batch_hash"] for each in fp32] == [each["batch_hash"] for each in bf16]
    away = max(abs(b["loss"] / a["loss"] - 1) for a, b in zip(fp32, bf16, strict=True))
    assert facts["losses of a step"] == {"largest difference, relative": pytest.approx(away)}
    assert 0 < away < 0.05
    last = [lines(folder / "precision" / n, "eval_loss")[-1]["eval_loss"] for n in ("fp32", "bf16")]
    found = {"fp32": last[0], "bf16": last[1], "difference": last[1] - last[0]}
    assert facts["eval_loss"] == pytest.approx(found)
    assert (folder / "precision.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "words, error",
    [
        ([], "runs/precision has other content; remove it, or give another --report"),
        (["--max_steps=9"], "precision decides on --max_steps itself; give --steps"),
        (["--check"], "precision decides on --check itself; leave it out"),
        (["--output_dir", "runs/x"], "precision decides on --output_dir itself; leave it out"),
    ],
)
def test_precision_removes_only_what_it_wrote(tmp_path, words, error):
    (tmp_path / "runs" / "precision").mkdir(parents=True)
    kept = tmp_path / "runs" / "precision" / "metrics.jsonl"
    kept.write_text("x")
    options = SimpleNamespace(report=tmp_path / "runs", steps=6, mixed="bf16", flags=words)
    with pytest.raises(ValueError, match=re.escape(error)):
        precision.run(options, None, None, CPU)
    assert kept.read_text() == "x"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, error",
    [
        (["check", "--report", "task.py"], "task.py: File exists"),
        (["check", "--learning_rate", "1"], "check takes no --learning_rate; see --help"),
        (["smoke", "--learning_rat", "1"], "learning_rate"),
        (["smoke", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["smoke", "--resume", "never"], "only train.py can do --resume; leave it out"),
        (["bench", "--seconds=nan"], "--seconds: expected a number above 0, up to 100,000; got"),
        (["bench", "--threshold", "10"], "expected a number above 0, up to 1; got '10'"),
        (["smoke", "--processes", "3"], "smoke does not read --processes; leave it out"),
        (["check", "--compare", "task.py"], "task.py is no hardware.json of this version"),
        (["recommend"], "start it with `python -m samestep hardware recommend`"),
        (["precision"], "start it with `python -m samestep hardware precision`"),
    ],
)
def test_bad_input_is_one_line_once(tiny, words, error):
    codes, out, errors = run(tiny, 2, *words)
    assert codes == {2} and error in errors, errors
    assert errors.startswith("samestep hardware: ") and errors.count("\n") == 1
    assert "failed" not in out
