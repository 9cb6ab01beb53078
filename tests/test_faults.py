"""Losses that are not finite, errors of one process alone, full disks, processes that hang,
or that are no longer alike.
"""

import contextlib
import copy
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from conftest import (
    before_calls,
    checkpoint,
    digest,
    edit,
    kill_after,
    lines,
    manifest,
    read_checkpoint,
    read_weights,
    status,
)
from refusals import cases
from same import check_same
from samestep.processes import alike, mesh
from samestep.processes.mesh import Layout
from samestep.step import monitor, order
from samestep.step.plan import StepPlan
from samestep.step.step import Step, skip_unless_finite
from test_exact import SOON

# ---- Not finite ----------------------------------------------------------------------------------


@pytest.mark.parametrize("processes, poison", [(1, ["nan"]), (2, ["inf", "--task.poison_rank", 0])])
def test_a_step_that_is_not_finite_changes_nothing_on_any_process(tiny, output, processes, poison):
    """Neither weights nor moments; also where the loss of one is infinite, its gradient is not."""
    flags = ["--output_dir", output, "--save_every", 1, "--task.poison", *poison]
    tiny.train(processes, *flags, "--task.poisoned", 20)
    skipped = {line["step"]: line for line in lines(output, "event")}
    assert skipped and {line["event"] for line in skipped.values()} == {"skipped"}
    for line in skipped.values():
        assert 20 in line["sample_ids"] and len(line["sample_ids"]) == 8
    lost = {line["step"] for line in lines(output, "loss") if line["loss"] is None}
    assert lost == {*skipped}
    for step in range(2, 13):
        before, after = [read_checkpoint(checkpoint(output, s)) for s in (step - 1, step)]
        assert all(values.isfinite().all() for values in after.values())
        for kind in ("model.", "state."):
            names = [name for name in before if name.startswith(kind)]
            same = all(torch.equal(before[name], after[name]) for name in names)
            assert names and same == (step in skipped)


def test_a_step_without_items_in_the_loss_changes_nothing(tiny, tmp_path):
    """No weight decays, and it counts as skipped."""
    flags = ["--task.silent", 1, "--save_every", 1, "--max_skipped_steps", 3, "--log_every", 1]
    printed = tiny.train(2, *flags, "--output_dir", tmp_path, "--check_export", "false", codes=[2])
    assert "no item is in the loss in 3 steps in a row, up to step 3" in printed
    events = [(each["step"], each["event"], each["items"]) for each in lines(tmp_path, "event")]
    assert events == [(step, "skipped", 0) for step in (1, 2, 3)]
    assert digest(checkpoint(tmp_path, 1)) == digest(checkpoint(tmp_path, 2))


def test_weights_that_are_not_finite_are_never_saved(tiny, output):
    """Overflow in the update itself, with finite losses until then."""
    flags = ["--learning_rate", 1e38, "--warmup_steps", 0, "--weight_decay", 0, "--save_every", 1]
    printed = tiny.train(1, "--output_dir", output, *flags, codes=[2])
    assert "is not finite, so nothing was saved" in printed
    for path in output.glob("checkpoints/step-*"):
        assert all(tensor.isfinite().all() for tensor in read_weights(path).values())


def feed(losses, norm=1.0, scales=None):
    """What a new watch reads after steps with these losses; `scales`: fp16's, before and after."""
    scales = [*scales] if scales else []
    scaler = SimpleNamespace(get_scale=lambda: scales.pop(0)) if scales else None
    ranks = SimpleNamespace(sum_arrays=lambda values: values, layout=mesh.Layout())
    plan = StepPlan(2, 1, shares=(2,))
    watch = monitor.StepMonitor(SimpleNamespace(scaler=scaler), ranks, plan, 2)
    for number, loss in enumerate(losses, 1):
        step = Step(None, number, [], items=2, last=False)
        step.losses = [torch.tensor(0.5 * loss), torch.tensor(1.5 * loss)]
        step.norm = torch.tensor(norm)
        watch.steps.append(step)
    return watch.read()


def test_what_the_watch_notes():
    noise = [3 + 0.01 * math.sin(7 * i) - 0.001 * i for i in range(60)]
    numbers, notes, reason = feed(noise)
    assert numbers["loss"] == pytest.approx(sum(noise) / 60, rel=1e-6) and numbers["items"] == 120
    assert numbers["grad_norm"] == 1.0 and notes == [] and reason == ""
    worst = max(range(60), key=noise.__getitem__)
    assert numbers["worst"]["step"] == worst + 1 and numbers["worst"]["grad_norm"] == 1.0
    assert numbers["worst"]["loss"] == pytest.approx(noise[worst], rel=1e-6)
    assert "worst" not in feed([2.5])[0]  # of one step the line says it all
    numbers, notes, reason = feed([math.nan, 3.0, math.inf, math.nan, 3.5])
    assert numbers["worst"]["step"] == 5 and numbers["items"] == 4 and numbers["loss"] == 3.25
    assert [n["step"] for n in notes] == [1, 3, 4] and "2 steps in a row, up to step 4" in reason


@pytest.mark.parametrize("loss, norm, scales, count", cases("overflows"))
def test_overflows_of_fp16_that_its_scaler_mends_are_no_skipped_steps(loss, norm, scales, count):
    numbers, notes, reason = feed([loss, loss], norm, scales)
    assert len(notes) == count and bool(reason) == bool(count)
    assert count or numbers["loss"] == loss


@pytest.mark.parametrize("fp16", [True, False])
@pytest.mark.parametrize(
    "kind, settings", [(torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9})]
)
def test_a_step_whose_gradients_are_finite_and_whose_norm_is_not_is_skipped(kind, settings, fp16):
    """The scaler of fp16 looks at single gradients; their squares may overflow in the norm. SGD
    knows no found_inf, so its gradients are taken away."""
    Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(8))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if fp16 else None
    inner = kind([weight], lr=0.1, **settings)
    optimizer = AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)

    def step(gradient, limit=1.0):
        weight.grad = torch.full((8,), gradient)
        if fp16:
            scaler.scale(weight.sum() * 0)
            weight.grad *= scaler.get_scale()
            scaler.unscale_(inner)
        norm = torch.nn.utils.clip_grad_norm_([weight], limit)
        skip_unless_finite(optimizer, norm)
        optimizer.step()
        optimizer.zero_grad()
        state = [v.clone() for v in optimizer.state.get(weight, {}).values() if torch.is_tensor(v)]
        return [weight.detach().clone(), *state]

    before = step(1.0)
    assert not torch.equal(before[0], torch.ones(8)) and before[0].isfinite().all()
    for gradient, limit in ((1e25, 1.0), (1e25, math.inf), (math.inf, 1.0)):  # a finite one first
        assert all(map(torch.equal, before, step(gradient, limit)))
        if fp16:
            assert scaler.get_scale() == (1024.0 if gradient == 1e25 else 512.0)
    assert not all(map(torch.equal, before, step(1.0)))


# ---- Errors of one process -----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["prepare_data", "build_model"])
def test_an_error_of_one_process_is_told_to_all_and_printed_once(tiny, tmp_path, where):
    flags = ["--output_dir", tmp_path / "run", "--task.fail_where", where]
    printed = tiny.train(2, *flags, codes=[2], timeout=300)
    assert re.search(f"^train.py: process 1 on .*no {where} here$", printed, re.M), printed


def test_a_row_that_one_process_cannot_read_ends_all_and_costs_no_checkpoint(tiny, output):
    """A line of its own, its traceback in a file, and a line from the main process. The step before
    it is saved, although its data is fetched before that."""
    size, row = 1000, 5  # a row that the fingerprint of the data does not read
    place = order.sample_ids(range(size), size, 0).tolist().index(row)
    rank = place % 8 * 2 // 8  # the process that computes it
    flags = ["--task.fail_where", "row", "--task.fail_rank", rank, "--task.samples", size]
    flags += ["--task.fail_kind", "TypeError", "--global_batch_size", 8, "--micro_batch_size", 2]
    flags += ["--max_steps", 200, "--save_every", place // 8, "--eval_every", 0]
    printed = tiny.train(2, *flags, "--output_dir", output, codes=[1], timeout=300)
    saved = max(int(path.name[5:]) for path in output.glob("checkpoints/step-*"))
    assert saved == place // 8 == lines(output, "loss")[-1]["step"]
    assert printed.count("TypeError: no row here") == 2 and "Traceback" not in printed
    file = output / f"error-{rank}.txt"
    assert re.search(rf"^train.py: TypeError.* \(task\.py, line \d+\); .*{file}$", printed, re.M)
    assert file.read_text().startswith("Traceback") and "no row here" in file.read_text()
    assert printed.count(f"train.py: process {rank} on ") == 1
    assert "TypeError: no row here" in status(output)["reason"]
    assert status(output)["exit_code"] == 1


WAITS = """
if number == 8 and os.environ["RANK"] == "1":
    raise TypeError("on this process alone")
if number == 8:
    time.sleep(1000)
"""


def test_an_error_reaches_a_process_that_waits_for_its_device(tiny, output):
    """As one that reads a number of its GPU does, where NCCL waits for the process that failed."""
    waits = f"{SOON}\n{before_calls('task.loss_sum', WAITS)}"
    printed = tiny.train(2, "--output_dir", output, before=waits, codes=[1])
    assert printed.count("TypeError: on this process alone") == 2 and "Traceback" not in printed
    assert printed.count("train.py: process 1 on ") == 1
    assert "the same command continues from the newest checkpoint" in printed
    assert status(output)["state"] == "failed" and status(output)["exit_code"] == 1


def test_a_checkpoint_that_one_process_cannot_write_ends_all_and_keeps_the_old(tiny, output):
    """Process 1 may write no file above 4 kB: its random state is larger, the log lines are not."""
    tiny.train(2, "--output_dir", output)
    shutil.rmtree(checkpoint(output, 12))
    (output / "status.json").unlink()
    limited = """
import os, resource
if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
"""
    printed = tiny.train(2, "--output_dir", output, before=limited, codes=[1, 2])
    errors = [line for line in printed.splitlines() if line.startswith("train.py: ")]
    assert len(errors) == 1 and "process 1 on " in errors[0], printed
    names = sorted(p.name for p in output.glob("checkpoints/*"))
    assert names == ["step-00000004", "step-00000008"]


# ---- Disks ---------------------------------------------------------------------------------------


def test_a_disk_without_room_is_said_before_the_first_step_and_keeps_what_is_there(quick, tmp_path):
    full = "import shutil; shutil.disk_usage = lambda _: shutil._ntuple_diskusage(10**9, 10**9, 9)"
    said = quick("--output_dir", tmp_path / "run", before=full, codes=[2])
    assert "a checkpoint needs 0.0 MB, but only 0.0 MB are free" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    quick("--output_dir", tmp_path / "run")
    before = sorted((tmp_path / "run").glob("checkpoints/*"))
    more = ["--output_dir", tmp_path / "run", "--max_steps", 14, "--accept_changes"]
    assert "saved checkpoints are kept" in quick(*more, before=full, codes=[2])
    assert sorted((tmp_path / "run").glob("checkpoints/*")) == before != []


FULL = """
import shutil, task
def export(model, folder, *_):
    (folder / "weights.pt").write_bytes(b"half")
    shutil.disk_usage = lambda _: shutil._ntuple_diskusage(10**9, 10**9, {})
    raise {}
task.export = export
"""


def test_a_disk_that_is_full_at_the_export_is_a_line_and_keeps_the_old_model(quick, output):
    """For torch, then for a plain file. The next start exports without room for a checkpoint."""
    flags = ["--output_dir", output, "--max_steps", 4]
    before = FULL.format(0, "RuntimeError('unexpected pos 64 vs 0')")  # as torch says it
    said = quick(*flags, before=before, codes=[2])
    line = said.splitlines()[-1]
    assert line.startswith(f"train.py: {output}: No space left on device after 0.0 MB of the mod")
    assert status(output)["state"] == "failed"
    assert [p.name for p in output.iterdir() if p.is_dir()] == ["checkpoints"]
    no_room = "import shutil; shutil.disk_usage = lambda _: shutil._ntuple_diskusage(9, 9, 0)"
    quick(*flags, before=no_room)
    model = (output / "model" / "weights.pt").read_bytes()
    assert status(output)["state"] == "finished"
    before = FULL.format(10**8, "OSError(28, 'No space left on device')")
    quick(*flags, "--max_steps", 5, "--accept_changes", before=before, codes=[2])
    assert (output / "model" / "weights.pt").read_bytes() == model


def test_what_a_run_writes_has_the_rights_that_new_files_get(quick, output, umask=0o027):
    """safetensors makes files that only their owner can read; colleagues are to load model/."""
    quick("--output_dir", output, before=f"import os; os.umask({umask}); "
          f"from samestep.base import files; files.UMASK = {umask}")  # fmt: skip
    found = [output, *output.rglob("*")]
    modes = {p.stat().st_mode & 0o777 | (0o111 & ~umask if p.is_file() else 0) for p in found}
    assert len(found) > 15 and modes == {0o777 & ~umask}


# ---- Processes that hang or die ------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_hangs_is_named_after_the_timeout(tiny, tmp_path):
    """The second of two, when it reads a row."""
    flags = ["--timeout", 5, "--task.hang_at", 5, "--task.samples", 100, "--max_steps", 100]
    runs = tiny.start(2, "--output_dir", tmp_path / "run", *flags)
    try:
        printed = "".join(runs[0].communicate(timeout=300))
    finally:
        for run in runs:
            run.kill()
    assert runs[0].returncode == 1
    assert "train.py: waited 5 s for the other processes; no answer from process 1" in printed
    assert printed.count("train.py: ") == 1 and "Traceback" not in printed
    assert "no answer from process 1" in status(tmp_path / "run")["reason"]


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_with_a_line(tiny, tmp_path):
    last = int(order.sample_ids([31], 37, 0)[0])  # of the fourth step, which the second one reads
    ends = tiny.ends(2, "--output_dir", tmp_path / "run", "--task.signal_at", last)
    assert [code for code, *_ in ends] == [1, -9] and "Traceback" not in ends[0][2]
    assert "train.py: lost the connection to another process, which has died" in ends[0][2]


def test_data_that_changed_is_refused_unless_accepted(tiny, tmp_path):
    output, project = tmp_path / "run", tiny.copied(tmp_path)
    project.train(1, "--output_dir", output, "--max_steps", 4)
    saved = manifest(checkpoint(output, 4))
    assert saved["data"]["samples"] == 37 and saved["config"]["global_batch_size"] == 8
    changed = ["--output_dir", output, "--max_steps", 6]
    edit(project.path / "task.py", "1000 * self.cfg.seed", "7")
    printed = project.train(1, *changed, codes=[2])
    assert "train.py: the data changed: 37 other rows; " in printed
    assert f"data fingerprint: {saved['data']['fingerprint']} -> " in printed
    project.train(1, *changed, "--accept_changes")
    (note,), (*_, last) = lines(output, "changes"), lines(output, "loss")
    assert note["step"] == 4 and last["step"] == 6 and math.isfinite(last["loss"])
    assert "data fingerprint" in note["changes"] and note["changes"]["max_steps"] == [4, 6]


def facts_of(model):
    """What one of two processes gathers about its weights."""
    found = []
    note = lambda facts: found.append(facts) or [facts]  # noqa: E731
    ranks = SimpleNamespace(layout=Layout(2), gather=note, differ=lambda *_: True)
    alike.check_alike(ranks, model, "")
    return found[0]


@pytest.mark.parametrize(
    ("kind", "factor", "refused"),
    [("", 1, False), ("", 1 + 1e-6, True), ("b", 1 + 1e-6, False), ("b", 1.01, True)],
)
def test_weights_of_two_kinds_of_devices_are_compared_by_their_sums(kind, factor, refused):
    model = torch.nn.Linear(3, 4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(factor)
    own, *sums = facts_of(other)
    both = [facts_of(model), (kind or own, *sums)]
    ranks = SimpleNamespace(layout=Layout(2), gather=lambda _: both, differ=lambda *_: True)
    expected = pytest.raises(ValueError, match="after step 3 process 1 has other weights")
    with expected if refused else contextlib.nullcontext():
        alike.check_alike(ranks, model, "after step 3")


WIDE = """

def build_model(cfg, build=build_model):
    model = build(cfg)
    layers = [torch.nn.Linear(cfg.width, cfg.width) for _ in range(6)]
    for place, layer in enumerate(layers):
        model.insert(2 + place, layer)
    return model
"""


def test_three_processes_resume_bit_for_bit(tiny, tmp_path):
    """DDP chooses its buckets before the first step of each start: 12 steps, against 5 and 7."""
    project = tiny.copied(tmp_path, WIDE)
    flags = ["--save_every", 5, "--eval_every", 0, "--output_dir"]
    project.train(3, *flags, tmp_path / "whole")
    first = kill_after(tmp_path / "run", 5)
    project.train(3, *flags, tmp_path / "run", before=first, codes=[-9, 1])
    project.train(3, *flags, tmp_path / "run")
    check_same(tmp_path / "whole", tmp_path / "run")
