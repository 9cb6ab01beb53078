"""What task.py gives wrongly is one line that names the function, before hours are spent."""

from types import SimpleNamespace

import pytest
import torch

from conftest import lines, status
from samestep.settings import mesh

ONE = mesh.Layout()  # of the processes: one alone

OLD = "import task, torch; task.old = {{}}; old = task.{0}; task.{0} = lambda *a: "
SCALAR = "give the sum of the losses, a float32 of shape ()"
CASES = [
    ("metrics", "{**old(*a), 'acc': torch.ones(3)}", "'acc' is a tensor, float32, of shape (3,)"),
    ("metrics", "{**old(*a), 'acc': 'good'}", "'acc' is 'good', str; give a float"),
    ("metrics", "{**old(*a), 'step': 3}", "a score cannot be called 'step'"),
    ("metrics", "{'los': 1.0}", "give a dict of floats, with 'loss'"),
    ("eval_sums", "{'loss': 1.0}", "task.eval_sums: 'loss' is 1.0, float"),
    ("eval_sums", "{'loss': torch.ones(()).bfloat16()}", "which rounds sums; call .float()"),
    ("eval_sums", "torch.ones(3)", "task.eval_sums returns a tensor, float32, of shape (3,)"),
    (
        "loss_sum",
        "old(*a).half()",
        f"task.loss_sum returns a tensor, float16, of shape (); {SCALAR}",
    ),
    ("loss_sum", "old(*a)[None]", f"of shape (1,); {SCALAR}"),
    ("loss_sum", "old(*a).item()", "task.loss_sum returns "),
    ("loss_sum", "old(*a).detach()", "a loss without a gradient"),
    ("build_model", "None", "task.build_model returns None, NoneType; give an nn.Module"),
    (
        "build_model",
        "setattr(m := old(*a), 'is_quantized', True) or m",
        "task.build_model returns a quantised model, whose runs do not continue as they were",
    ),
    ("count", "-1", "task.count returns -1, int"),
    ("collate", "{**old(*a), 'names': ['x']}", "'names' is ['x'], list; give a tensor on the CPU"),
    ("datasets", "old(*a)[0]", "give (train, validation)"),
    ("datasets", "(old(*a)[0], iter([1]))", "give datasets with len() and [i]"),
    ("datasets", "([], old(*a)[1])", "task.datasets returns no row to train on; give at least one"),
]


@pytest.mark.parametrize("name, value, said", CASES)
def test_what_a_function_gives_wrongly_is_one_line(quick, tmp_path, name, value, said):
    output = tmp_path / "run"
    flags = ["--output_dir", output, "--num_workers", 0]
    printed = quick(*flags, before=OLD.format(name) + value, codes=[2])
    last = printed.rstrip("\n").split("\n")[-1]
    assert last.startswith("train.py: task.") and said in last and name in last
    assert "in float64, since it runs under autocast" not in printed
    assert "Traceback" not in printed
    if output.exists():  # known before the first step has ended
        written = output / "metrics.jsonl"
        assert status(output)["state"] == "failed"
        assert not written.exists() or not written.read_text()


CHECKED = [
    (OLD.format("count") + "2.0", "task.count returns"),
    (OLD.format("collate") + "a[0]", "task.collate returns"),
    (OLD.format("datasets") + "None", "task.datasets returns None"),
    ("import task; del task.metrics, task.count", "no function count, metrics; to write a whole"),
    ("import task; task.build_model = lambda cfg: None", "build_model(cfg) is called as"),
    ("import task; task.collate = lambda: {}", "collate() is called as collate(rows)"),
    ("import task; task.sizes = lambda dataset: [1, 2]", "task.sizes returns an array of shape"),
    ("import task; task.sizes = lambda dataset: int('no lengths')", "int() with base 10: 'no len"),
    ("import task; task.TaskConfig = type('TaskConfig', (), {})", "is not a dataclass"),
    (
        "import task; task.report = lambda model, sums: {}",
        "report(model, sums, folder, cfg, prepared)",
    ),
    (
        OLD.format("datasets") + "(type('Rows', (), {'__len__': lambda s: 9, '__getitem__': "
        "lambda s, i: {**old(*a)[0][i], 'x': torch.rand(8)}})(), old(*a)[1])",
        "row 0 changes when it is read again; draw random numbers in augment",
    ),
]


@pytest.mark.parametrize("before, said", CHECKED)
def test_what_the_check_finds(quick, tmp_path, before, said):
    printed = quick("--check", "--output_dir", tmp_path / "run", before=before, codes=[2])
    assert printed.startswith("train.py: ") and printed.count("\n") == 1 and said in printed
    assert not (tmp_path / "run").exists()


def test_a_loss_that_autocast_computes_in_bf16_is_warned_of(quick, tmp_path):
    """Outside, accelerate has made it float32, and its rounding could not be seen."""
    flags = ["--max_steps", 1, "--output_dir"]
    bf16, said = {"ACCELERATE_MIXED_PRECISION": "bf16"}, "computes the loss in bfloat16"
    loss = "import task; task.loss_sum = lambda m, b: m(b['x']).sum()"
    assert said in quick(*flags, tmp_path / "bf16", before=loss, env=bf16)
    better = loss.replace("m(b['x'])", "m(b['x']).float()")
    assert said not in quick(*flags, tmp_path / "fp32", before=better, env=bf16)


def test_scores_are_floats_whatever_holds_the_number(quick, tmp_path):
    """A tensor of one number, NumPy's numbers and whole ones are as good as floats."""
    value = "{'loss': torch.tensor(1.5), 'seven': __import__('numpy').int64(7), 'yes': True}"
    quick("--output_dir", tmp_path / "run", before=OLD.format("metrics") + value)
    assert lines(tmp_path / "run", "eval_loss")[-1] == {
        "step": 12, "eval_loss": 1.5, "seven": 7.0, "yes": 1.0
    }  # fmt: skip


def test_a_row_that_cannot_be_read_is_one_line(quick, tmp_path):
    """Row 1 of 200 is none of the 64 of the fingerprint: it is met before the first step."""
    fail = "(old(*a)[0], type('Rows', (), {'__len__': lambda s: 200, '__getitem__': lambda s, i: "
    fail += "old(*a)[1][0] if i != 1 else int('row 1')})())"
    output = tmp_path / "run"
    printed = quick("--output_dir", output, before=OLD.format("datasets") + fail, codes=[2])
    assert "Traceback" not in printed and "train.py: invalid literal for int()" in printed


def test_metrics_that_need_more_rows_than_the_first_batch_do_not_end_a_run(quick, tmp_path):
    value = "{**old(*a), 'share': 1 / max(0, float(a[0]['rows']) - 2)}"
    flags = ["--micro_batch_size", 2, "--output_dir", tmp_path / "run"]
    quick(*flags, before=OLD.format("metrics") + value)
    assert lines(tmp_path / "run", "eval_loss")[-1]["share"] == pytest.approx(1 / 9)


def test_a_line_has_the_mean_loss_of_all_terms_since_the_line_before():
    from samestep.step import monitor

    ranks = SimpleNamespace(sum_arrays=lambda values: values, layout=ONE)
    watch, one = monitor.StepMonitor(SimpleNamespace(scaler=None), ranks, 1, 10), torch.ones(())
    for step, (terms, total) in enumerate([(3, 6.0), (1, 10.0), (5, torch.nan), (0, 0.0)], 1):
        watch.add(step, terms, range(1), [total * one], step * one)
    loss, norm, notes, reason = watch.read()
    assert (loss, norm, reason) == (16 / 4, 4, "") and [n["step"] for n in notes] == [3]
    watch.add(5, 2, range(1), [torch.nan * one], one)
    assert str(watch.read()[0]) == "nan"
    watch.add(6, 2, range(1), [5 * one], one)
    assert watch.read()[0] == 2.5


def losses_of_steps(monitor, values, shares):
    """The mean loss of two steps as the last rank reads it, after the others have sent theirs."""
    sent = []
    add = lambda table: sent.append(table) or sum(sent)  # noqa: E731
    ranks = SimpleNamespace(sum_arrays=add, layout=ONE)
    for rank, share in enumerate(shares):
        first = sum(shares[:rank])
        watch = monitor.StepMonitor(SimpleNamespace(scaler=None), ranks, len(values), 10)
        for step in (1, 2):
            losses = [torch.tensor(step * value) for value in values[first : first + share]]
            watch.add(step, 4, range(first, first + share), losses, torch.ones(()))
        found = watch.read()[0]
    return found


def test_losses_are_added_in_the_order_of_the_micro_batches_whoever_computed_them():
    """In float64, where 2**60 + 1 is 2**60: another order gives another sum."""
    from samestep.step import monitor

    values = [1.0, 2.0**60, 1.0, -(2.0**60), 3.0]
    for shares in ((5,), (2, 3), (1, 1, 3), (4, 0, 1)):
        assert losses_of_steps(monitor, values, shares) == (3.0 + 6.0) / 8
    assert losses_of_steps(monitor, values[::-1], (2, 3)) == (1.0 + 2.0) / 8


MEANS = [
    ("loss_sum", "(a[0](a[1]['x']) - a[1]['y']).square().mean()", "task.loss_sum is "),
    (
        "eval_sums",
        "{**old(*a), 'loss': old(*a)['loss'] / len(a[1]['x'])}",
        "task.eval_sums: 'loss'",
    ),
]


@pytest.mark.parametrize("name, value, said", MEANS)
def test_a_mean_in_place_of_a_sum_is_warned_of(quick, tmp_path, name, value, said):
    flags = ["--output_dir", tmp_path / "run", "--max_steps", 2, "--warmup_steps", 0]
    assert "warning" not in quick(*flags)
    flags[1] = tmp_path / "mean"
    printed = quick(*flags, before=OLD.format(name) + value)
    assert f"warning: {said}" in printed and "is it a mean? A sum is expected" in printed
    assert printed.count("warning") == 1
