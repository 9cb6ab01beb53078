"""What metrics.jsonl says about time, memory and MFU; traces of single steps."""

import contextlib
import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from same import check_same_curve
from samestep.processes import mesh as layout
from samestep.report import speed


def make_meter(processes=1, others=()):
    """A meter of process 0, a model that its stopwatch watches; `others`: what they measured."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=processes,
        process_index=0,
        mixed_precision="no",
    )
    ranks = SimpleNamespace(
        layout=layout.Layout(processes),
        fail_together=contextlib.nullcontext,
        gather=lambda value: [value] * processes,
        sum_arrays=lambda array: np.array([array[0], *others]) if others else array,
    )
    meter = speed.SpeedMeter(accelerator, ranks, "tokens")
    model = torch.nn.Linear(1, 1)
    meter.stopwatch.watch(model)
    return meter, model


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves when told to: clock(seconds)."""
    now = [100.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(speed.time, "perf_counter_ns", lambda: round(1e9 * now[0]))

    def advance(seconds):
        now[0] += seconds

    return advance


def take_step(clock, meter, model, compute, fetch, rest=0.0):
    """A step that takes so many seconds."""
    meter.add(1000, 1, computed=3000)
    loss = model(torch.ones(1))
    clock(compute)
    loss.backward()
    clock(0.25 * rest)  # for the other processes
    with meter.waiting():
        clock(fetch)
    clock(0.75 * rest)


def test_shares_are_those_of_the_clock(clock):
    meter, model = make_meter()
    meter.start()
    with meter.waiting():
        clock(0.5)
    for _ in range(2):
        take_step(clock, meter, model, compute=3.0, fetch=1.0, rest=0.75)
    with meter.paused():
        clock(1000)
    line = meter.read()
    assert line["tokens_per_second"] == pytest.approx(2000 / 10)
    assert line["computed_tokens_per_second"] == pytest.approx(6000 / 10)
    assert line["data_wait"] == pytest.approx(0.25) and line["compute"] == pytest.approx(0.6)
    assert line["peak_memory_gb"] > 0.05 and not {"mfu", "peer_wait"} & {*line}
    take_step(clock, meter, model, compute=1.0, fetch=0.0, rest=1.0)
    assert meter.read()["compute"] == pytest.approx(0.5)  # nothing of the last line is left


def test_the_process_that_others_wait_for_is_named(clock):
    """Process 2 computes 0.2 s more than the 1 s of the others, in each of 10 steps."""
    others = [[seconds] * 10 + [0.0] * 12 for seconds in (1.0, 1.2)]
    meter, model = make_meter(3, others)
    meter.start()
    for _ in range(10):
        take_step(clock, meter, model, compute=1.0, fetch=0.0)
    line = meter.read()
    assert line["slowest"] == 2
    assert line["peer_wait"] == pytest.approx(1.2 - np.mean([1.0, 1.0, 1.2]))


def test_mfu_by_hand(clock, monkeypatch):
    """A matrix of 8 x 16 on 10 rows: 2 x 10 x 8 x 16 FLOPs forward, and as many twice backward."""
    monkeypatch.setattr(speed, "peaks_of", lambda device: {"fp32": 67.0, "tf32": 495.0})
    meter, watched = make_meter()
    model = torch.nn.Linear(8, 16, bias=False)
    task = SimpleNamespace(loss_sum=None, count=lambda batch: 5)
    model.forward = lambda function, batch: batch @ model.weight.T
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    meter.count_flops(model, task, torch.ones(10, 8), 0.25)
    torch.backends.cuda.matmul.allow_tf32 = before
    assert model.training and meter.flops == 2.25 * 2 * 10 * 8 * 16 / 5
    meter.start()
    take_step(clock, meter, watched, compute=0.5, fetch=0.0)
    assert meter.read()["mfu"] == pytest.approx(meter.flops * 1000 / 0.5 / 495e12)


@pytest.mark.slow
def test_profile_writes_traces_and_changes_no_number(tiny, tmp_path):
    tiny.train(2, "--output_dir", tmp_path / "plain")
    tiny.train(2, "--output_dir", tmp_path / "run", "--profile_steps", "[3, 5, 6]")
    check_same_curve(tmp_path / "plain", tmp_path / "run", rel=0)
    folders = sorted((tmp_path / "run" / "profile").iterdir())
    assert [folder.name for folder in folders] == ["steps-3-5", "steps-9-11"]
    traces = [*tmp_path.glob("run/profile/*/process-[01].pt.trace.json.gz")]
    assert len(traces) == 4
    for path in traces:
        events = json.loads(gzip.open(path).read())["traceEvents"]
        names = [event.get("name") for event in events]
        assert names.count("Optimizer.step#AdamW.step") == 3


@pytest.mark.slow
def test_a_run_may_end_while_it_is_profiled(tiny, tmp_path):
    """In a process of its own: a fork of the tests skips Python's finalisation."""
    flags = ["--max_steps", 12, "--profile_steps", "[12, 13]", "--output_dir", tmp_path]
    tiny.train(1, *flags, OMP_NUM_THREADS="1")
    assert not [*tmp_path.glob("profile/*")]


# Counts calls of Python and C functions from the start of step 3 to that of step 11.
CALLS = """
import collections, json, sys
calls = collections.Counter()
def count(frame, event, _):
    if event in ("call", "c_call"):
        path = frame.f_code.co_filename
        if path.startswith("<frozen importlib"):
            return  # accelerate searches sys.path for lomo_optim
        ours = event == "call" and ("/samestep/" in path or path.endswith("train.py"))
        calls["ours" if ours else "others"] += 1
def between_steps(step):
    sys.setprofile(None)
    if step == 11:
        print(json.dumps(calls))
    elif step >= 3:
        sys.setprofile(count)
"""
TRAINED = """
from samestep.training.log import RunLog
start_step = RunLog.start_step
RunLog.start_step = lambda log, step: [start_step(log, step), between_steps(step)]
"""
PLAIN = """
import torch, task
rows, _ = task.views(task.TaskConfig(samples=100))
model = task.build_model(task.TaskConfig())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
batches = iter(torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=task.collate))
for step in range(1, 12):
    between_steps(step)
    micro_batches = [next(batches) for _ in range(2)]
    items = max(sum(map(task.count, micro_batches)), 1)
    losses = []
    for batch in micro_batches:
        loss = task.loss_sum(model, batch)
        (loss / items).backward()
        losses.append(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_step_makes_few_calls_beside_a_plain_loop(tiny, tmp_path):
    """What a small step costs on a CPU is the number of calls, which depends on no clock.

    Each of the 8 rows of a step is seeded, which is about 125 of them. Left out are about 250 calls
    in which accelerate searches sys.path for the package lomo_optim, twice in `optimizer.step`:
    their number depends on sys.path.
    """
    flags = ["--micro_batch_size", 4, "--eval_every", 0, "--save_every", 0, "--log_every", 100]
    printed = tiny.train(1, "--output_dir", tmp_path / "run", *flags, before=CALLS + TRAINED)
    trained = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    plain = json.loads(tiny.run("python", "-c", CALLS + PLAIN).stdout)
    above = (sum(trained.values()) - sum(plain.values())) / 8
    assert 0 < above < 900 and 0 < trained["ours"] / 8 < 200, (above, trained["ours"] / 8)
