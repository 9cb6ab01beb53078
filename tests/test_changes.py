"""What a step changes is saved and comes back, or ends the run with its name: rules about kinds."""

import functools

import pytest

from conftest import ROOT
from test_core import script, words_of

PROGRAM = (ROOT / "tests" / "own_state.py",)
COME_BACK = [
    *("count", "queue", "noisy", "rotary", "observer", "codebook", "hooked"),  # changed by forward
    *("bank", "branch", "centered"),
    *("teacher", "hidden_teacher", "rate", "heated", "flag", "graph", "history", "experiment"),
    *("curriculum", "late_curriculum", "shards", "outside_draws"),  # rows, and what is drawn
    *("unfreeze", "freeze", "turns", "joins", "own_optimizer"),
    *("super_step", "plateau", "cosine", "lambdas", "kept", "penalty", "nan_setting"),
]
# Of these the result depends on which process computes what.
ONE_PROCESS = ("count", "queue", "noisy", "observer", "codebook", "bank", "branch", "centered")
ENDS = {
    "odd_moment": "the optimizer's GG of 0.weight is a list",
    "complex_moment": "phase is of torch.complex128, and a checkpoint holds none of that type",
    "lost_plateau": "no checkpoint would hold ReduceLROnPlateau",
    "baseline": "is another the second time",
    "own_queue": "is another the second time",
    "caching": "keeps what it drew, or has",
    "own_numpy": "is another the second time",
    "outside": "depends on a weight of shape () outside of the model",
    "outside_tensor": "depends on a weight of shape () outside of the model",
    "forgotten": "no optimizer has 2.weight, 2.bias, so it would never change",
    "rewired": "model.edges is a sparse, quantized or nested tensor; a checkpoint holds",
    "pruned": "other weights or modules than at the start: 0.weight, 0.weight_mask, 0.weight_orig",
    "still": "is in eval mode, which trained before",
    "second_optimizer": "a second optimizer is prepared",
    "set_setting": "settings.words is a set; give a number",
    "tensor_setting": "settings.weights.of.0 is a Tensor; give a number",
}
# What a run of the first kind finds when it resumes as the second.
CHANGED = {
    ("cosine", "longer_cosine"): "CosineAnnealingLR.T_max: 6 -> 12",
    ("lambdas", "other_lambdas"): "LambdaLR.lr_lambdas: ",
    ("two_schedulers", "other_second"): "scheduler.1 ExponentialLR.gamma: 0.9 -> 0.8",
    ("one_cycle", "other_part"): "OneCycleLR._schedule_phases: ",
    ("cosine", "other_kind"): "scheduler.0 kind: CosineAnnealingLR -> ExponentialLR",
    ("Kind", "other_rate"): "optimizer group 0 lr: 0.01 -> 0.02",
    ("Kind", "other_groups"): "weights of group 0: 4 weights",
    ("Kind", "other_row"): "300 of 300 rows compared",
}


def run(kind, folder, steps, *options, processes=1):
    return script(processes, kind, folder, steps, *options, program=PROGRAM)


def sha(ended):
    """The loss, rate and weights at the end of a run, equal on all processes."""
    words_of(ended)
    lines = {printed[printed.rindex("loss ") :] for _, printed, _ in ended}
    assert len(lines) == 1
    return lines.pop()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The end of an uninterrupted run of a kind."""

    @functools.cache
    def end(kind, processes=1):
        return sha(run(kind, tmp_path_factory.mktemp("whole"), 5, processes=processes))

    return end


@pytest.mark.parametrize("kind", COME_BACK)
def test_what_a_step_changes_comes_back(kind, whole, tmp_path):
    words_of(run(kind, tmp_path, 3))
    assert sha(run(kind, tmp_path, 5)) == whole(kind)


@pytest.mark.parametrize("kind", sorted({*COME_BACK} - {*ONE_PROCESS}))
def test_on_two_processes_too(kind, whole, tmp_path):
    words_of(run(kind, tmp_path, 3, processes=2))
    assert sha(run(kind, tmp_path, 5, processes=2)) == whole(kind, 2)


@pytest.mark.parametrize("kind", ["teacher", "rate", "turns", "joins", "history", "own_optimizer"])
def test_with_exact_the_bytes_are_those_of_any_number_of_processes(kind, tmp_path):
    ends = {sha(run(kind, tmp_path / str(n), 4, "exact", processes=n)) for n in (1, 2)}
    assert len(ends) == 1


@pytest.mark.parametrize("kind", ENDS)
def test_what_would_be_lost_ends_the_run_with_its_name(kind, tmp_path):
    ((code, _, errors),) = run(kind, tmp_path, 40)
    assert code == 2 and ENDS[kind] in errors and errors.count("\n") == 1, errors


@pytest.mark.parametrize("kind", ["count", "queue", "codebook", "observer", "branch"])
def test_with_exact_what_a_forward_pass_changes_ends_the_run(kind, tmp_path):
    ((code, _, errors),) = run(kind, tmp_path, 4, "exact")
    assert code == 2 and "exact: " in errors and " changes " in errors


def test_what_is_state_and_differs_between_processes_ends_the_run(tmp_path):
    for said, kind, *options in (
        ("1 attribute.model.queue", "queue"),
        ("1 registered.0", "average"),
        ("4 the buffer mean", "late_observer", "exact"),
    ):
        (code, _, errors), _ = run(kind, tmp_path / kind, 4, *options, processes=2)
        assert code == 2 and f"after step {said} differs between process 0" in errors


def test_buffers_that_training_changes_are_said_on_several_processes(tmp_path):
    ended = run("observer", tmp_path / "observer", 2, processes=2)
    assert words_of(ended).count("warning: training changes mean, on each process") == 1
    ended = run("bank", tmp_path / "bank", 2, processes=2)
    assert words_of(ended).count("warning: a forward pass adds to model.bank, which the loss") == 1


@pytest.mark.parametrize("kinds", CHANGED)
def test_a_setting_that_was_changed_is_found_though_nobody_named_it(kinds, tmp_path):
    before, after = kinds
    words_of(run(before, tmp_path, 3))
    ((code, _, errors),) = run(after, tmp_path, 5)
    assert code == 2 and CHANGED[kinds] in errors and "accept_changes" in errors
    assert CHANGED[kinds] in words_of(run(after, tmp_path, 5, "accept"))


def test_an_accepted_schedule_is_the_new_one(tmp_path):
    words_of(run("cosine", tmp_path / "run", 4))
    words = words_of(run("longer_cosine", tmp_path / "run", 8, "accept"))
    rate = words_of(run("longer_cosine", tmp_path / "whole", 8)).partition("rate ")[2].split()[0]
    assert f"rate {rate}" in words


def test_a_scheduler_written_by_hand_is_named_once(tmp_path):
    words = words_of(run("by_hand", tmp_path, 6))
    assert words.count("warning: by_hand.n has changed with the learning rate") == 1
    assert "fleeting.n, fleeting.first has changed" in words_of(run("fleeting", tmp_path / "b", 6))


def test_results_are_left_out_in_a_line(tmp_path):
    words = words_of(run("kept", tmp_path, 4))
    assert words.count("left out of checkpoints") == 1 and "model.hidden, model.losses" in words
