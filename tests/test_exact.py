"""exact: the same bytes on any number of processes. And how a step is assigned, and added up."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from conftest import kill_before, lines, newest, read_weights, with_ddp
from same import check_same, check_same_curve, digests
from samestep.step import order
from samestep.step.exact import ExactGradients
from samestep.step.plan import assign_micro_batches, plan_step
from test_invariance import DROPOUT

EXACT = ["--exact", "true", *DROPOUT]


def train_all(project, folder, cases, *flags, before=""):
    """Trains each case, (processes, *flags), into a folder of its own; gives the folders."""
    outputs = []
    for number, (processes, *own) in enumerate(cases):
        outputs.append(folder / str(number))
        words = [*EXACT, *flags, *own, "--output_dir", outputs[-1]]
        project.train(processes, *words, before=before)
    return outputs


def test_seven_micro_batches_on_any_processes_in_any_shares(tiny, tmp_path):
    """Ordinary runs differ in their last digits, so these bytes would show another order."""
    flags = ["--global_batch_size", 7, "--micro_batch_size", 1]
    cases = [(1, "--num_workers", 2), (2, "--device_shares", "auto")]
    cases.append((4, "--device_shares", "[1, 3, 1, 2]"))
    outputs = train_all(tiny, tmp_path, cases, *flags)
    check_same(*outputs)
    (plain,) = train_all(tiny, tmp_path / "plain", [(4,)], *flags, "--exact", "false")
    assert digests(plain) != digests(outputs[0])
    check_same_curve(outputs[0], plain)


@pytest.mark.slow
def test_one_process_that_torchrun_starts(tiny, tmp_path):
    """DDP wraps its model, as that of an elastic run that has shrunk; accelerate's no_sync does
    nothing there."""
    (alone,) = train_all(tiny, tmp_path, [(1,)])
    launched = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    tiny.train(1, *EXACT, "--output_dir", tmp_path / "launched", env=launched)
    check_same(alone, tmp_path / "launched")


def test_skipped_steps_are_skipped_on_any_processes(tiny, tmp_path):
    flags = ["--task.poisoned", 5, "--task.poison", "nan", "--max_skipped_steps", 0]
    outputs = train_all(tiny, tmp_path, [(1,), (3,)], *flags)
    check_same(*outputs)
    assert 1 < len(lines(outputs[0], "skipped_norm")) < 6


@pytest.mark.parametrize("limit", [0.05, 100.0, 0])
def test_the_norm_and_the_clipped_gradient_are_those_of_torch(limit):
    weights, others = [], []
    for shape in [(4, 3), (5,), (), (2, 3, 4)]:
        grad = torch.randn(shape)
        for found in (weights, others):
            found.append(torch.nn.Parameter(torch.zeros(shape)))
            found[-1].grad = grad.clone()
    accelerator = SimpleNamespace(unscale_gradients=lambda: None)
    own = SimpleNamespace(weights=SimpleNamespace(parameters=weights), accelerator=accelerator)
    norm = ExactGradients.clip(own, limit)
    expected = torch.nn.utils.clip_grad_norm_(others, limit or torch.inf)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-6, atol=0)


ODD = """

WEIGHTS = 'as built'

class Odd(torch.nn.Module):
    '''Weights of several types and layouts; some have no gradient in some micro-batches, one has
    never any.'''

    def __init__(self, model):
        super().__init__()
        self.model, self.poison_rank, self.fail_report = model, -1, False
        kinds = [torch.float32, torch.bfloat16, torch.float64]
        values = [torch.ones(4, 6).to(kind) for kind in kinds]
        values += [torch.ones(6, 4).t()]
        self.odd = torch.nn.ParameterList([*values, torch.ones(())])
        self.never = torch.nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        more = sum((each * x[0, :6]).sum() for each in self.odd) if x[0, 0] > 0 else 0
        return self.model(x) + more / 100

def build_model(cfg, build=build_model):
    return Odd(build(cfg))
"""


AT_ONCE = "from samestep.step import exact as e; e._deliver_in_pairs = e._deliver_at_once"


@pytest.mark.slow
def test_odd_weights_and_an_exchange_in_parts(tiny, tmp_path):
    """In buckets of a few weights, and in one; in pairs of processes, and as on GPUs."""
    project = tiny.copied(tmp_path, ODD)
    whole = train_all(project, tmp_path / "whole", [(1,), (2,)])
    project = with_ddp(project, tmp_path / "ddp", "bucket_cap_mb=1e-4")
    parts = train_all(project, tmp_path / "parts", [(3,)])
    check_same(*whole, *parts, *train_all(project, tmp_path / "once", [(3,)], before=AT_ONCE))
    # As without exact: the optimizer skips it, and does not decay it.
    assert read_weights(newest(whole[0]))["never"].tolist() == [[1] * 3] * 3


def sample_of(step):
    """The id of a sample of this step, among 200."""
    return int(order.sample_ids([8 * step - 3], 200, 0)[0])


# A process that has died cannot say so: the others wait for it.
SOON = "from samestep.launch import rendezvous as r; r.LOOK, r.GRACE = 0.2, 1"


def test_a_run_that_is_killed_and_stopped_goes_on_with_other_processes(tiny, tmp_path):
    """1 -> 3 -> 2 -> 1 processes. Steps that were lost have the same numbers again."""
    flags = [*EXACT, "--task.samples", 200, "--micro_batch_size", 1, "--save_every", 3]
    tiny.train(1, *flags, "--output_dir", tmp_path / "whole")
    flags += ["--output_dir", tmp_path / "run"]
    stations = [(1, 6, "SIGKILL", [-9]), (3, 5, "SIGUSR1", [75]), (2, 9, "SIGKILL", [-9, 1])]
    for processes, step, name, ends in stations:
        own = ["--task.signal_at", sample_of(step), "--task.signal", name]
        tiny.train(processes, *flags, *own, codes=ends, before=SOON)
    tiny.train(1, *flags)
    check_same(tmp_path / "whole", tmp_path / "run")
    assert len(lines(tmp_path / "run", "loss")) >= len(lines(tmp_path / "whole", "loss")) + 2


BATCH_NORM = """

def build_model(cfg, build=build_model):
    return build(cfg).insert(1, torch.nn.BatchNorm1d(cfg.width))
"""
NOISY = """
import torch
class Noisy(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(torch.randn_like(p), alpha=1e-3)
torch.optim.AdamW = Noisy
"""


def test_an_optimizer_that_draws_is_seeded_by_the_step(tiny, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    tiny.train(1, *EXACT, "--output_dir", whole, before=NOISY)
    tiny.train(1, *EXACT, "--output_dir", run, before=NOISY + kill_before(7), codes=[-9])
    tiny.train(3, *EXACT, "--output_dir", run, before=NOISY)
    check_same(whole, run)


def test_a_run_that_continues_keeps_its_micro_batches(tiny, tmp_path):
    flags = [*EXACT, "--max_steps", 4, "--output_dir", tmp_path / "run"]
    tiny.train(1, *flags, "--micro_batch_size", 2)
    flags += ["--max_steps", 6, "--accept_changes", "false", "--micro_batch_size", 1]
    printed = tiny.train(2, *flags, codes=[2])
    assert "micro_batch_size: 2 -> 1" in printed


def ways(count, ranks):
    """All ways to assign so many micro-batches to so many ranks."""
    if ranks == 1:
        return [(count,)]
    return [(n, *rest) for n in range(count + 1) for rest in ways(count - n, ranks - 1)]


@pytest.mark.parametrize("speeds", [(1, 1, 1), (1, 2, 4, 7)])
@pytest.mark.parametrize("least", [0, 1])
def test_no_way_to_assign_takes_less_time(speeds, least):
    def seconds(shares):
        return max(share / speed for share, speed in zip(shares, speeds, strict=True))

    for count in range(least * len(speeds), 15):
        shares = assign_micro_batches(count, speeds, least)
        assert sum(shares) == count and min(shares) >= least
        possible = [way for way in ways(count, len(speeds)) if min(way) >= least]
        assert seconds(shares) == min(map(seconds, possible))
        if len({*speeds}) == 1:
            assert max(shares) - min(shares) <= 1 and list(shares) == sorted(shares)[::-1]


def test_neighbours_that_share_weights_take_turns():
    """Two copies of a model, each on three processes: a copy has one run of micro-batches."""
    plan = plan_step(12, 1, 6, exact=True, in_step=3)
    runs = [[*plan.run(rank)] for rank in range(6)]
    assert runs == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
