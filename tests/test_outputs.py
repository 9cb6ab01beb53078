"""Scores that are no sums: each row's outputs are gathered once, in the order of the rows."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from conftest import ROOT, before_calls, lines, make_tiny, train_module
from refusals import cases
from samestep.base.errors import UserError
from samestep.processes import mesh
from samestep.step.outputs import EvaluationOutputs, merge, to_part

OUTPUTS = """

from sklearn.metrics import roc_auc_score
from samestep.step.inputs import Source

sums_to_scores, rows_of = metrics, views


def views(cfg):
    train, validation = rows_of(cfg)
    validation.sources = [Source("a", 21, 1), Source("b", cfg.held_out - 21, 1)]
    return train, validation


def eval_outputs(model, batch):
    values = model(batch["x"])
    widths = batch["counted"].sum(1)
    own = torch.arange(int(widths.max())) < widths[:, None]
    values = values[:, : own.shape[1]].masked_fill(~own, -100)
    return {
        "values": values,
        "half": values[:, 0].bfloat16(),
        "places": torch.where(own, torch.arange(own.shape[1]), -100),
        "positive": batch["y"][:, 0] > 0,
    }


def metrics(sums, outputs):
    values = outputs["values"].double()
    numbers = torch.arange(1, len(values) + 1)[:, None]
    places = (outputs["places"] * numbers).sum()
    auc = roc_auc_score(outputs["positive"], values[:, 0])
    outputs["values"].zero_()
    return sums_to_scores(sums) | {
        "auc": auc, "order": (values * numbers).sum(), "places": places,
        "rounded": abs(outputs["half"].numpy() - values[:, 0].numpy()).max() < 0.01,
    }
"""  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project of the task tiny, whose validation rows have 1 to 4 outputs, and two sources."""
    project = make_tiny(tmp_path_factory.mktemp("outputs"))
    (project.path / "task.py").write_text(
        (ROOT / "tests" / "tasks" / "tiny.py").read_text() + OUTPUTS
    )
    return project


def train(project, output, processes, *flags, code="", codes=(0,), **options):
    """What a run of two steps prints, with this code at the end of task.py."""
    if code:
        project = project.copied(output.parent, f"\n\n{code}\n")
    words = ["--output_dir", output, "--max_steps", 2, "--warmup_steps", 0, *flags]
    if "--task.held_out" not in flags:
        words += ["--task.held_out", 61]
    return project.train(processes, *words, codes=codes, **options)


def expected(output):
    """The scores of the exported model, of all validation rows at once."""
    with train_module(ROOT / "tests" / "tasks" / "tiny.py") as module:
        task = module.task
        cfg = task.TaskConfig(held_out=61)
        model, rows = task.build_model(cfg), task.views(cfg)[1]
        batch = task.collate([rows[i] for i in range(61)])
    model.load_state_dict(torch.load(output / "model" / "weights.pt"))
    model.eval()
    with torch.no_grad():
        values = model(batch["x"])
    values = values.masked_fill(~batch["counted"], -100).double()
    places = torch.arange(4).masked_fill(~batch["counted"], -100)
    positive, numbers = batch["y"][:, 0] > 0, torch.arange(1, 62)[:, None]
    scores = {
        "order": float((values * numbers).sum()),
        "places": float((places * numbers).sum()),
        "rounded": 1.0,
        "rows": 61.0,
    }
    for name, part in {"": slice(None), "/a": slice(21), "/b": slice(21, None)}.items():
        scores[f"auc{name}"] = roc_auc_score(positive[part], values[part, 0])
    return scores


def test_scores_of_all_rows_are_the_same_on_any_number_of_processes(project, tmp_path):
    """With micro-batches of 8 and 3, and with two sources."""
    found = {}
    for processes, micro in [(1, 8), (2, 8), (2, 3)]:
        output = tmp_path / f"{processes}-{micro}"
        train(project, output, processes, "--micro_batch_size", micro)
        found[output] = lines(output, "eval_loss")[-1]
    right = expected(output)
    for output, scores in found.items():
        picked = {name: scores[name] for name in right}
        assert picked == pytest.approx(right, rel=1e-6), output
    assert right["auc/a"] != right["auc/b"]


RUNS_OUT = """
if number == 12 and os.environ.get("RANK", "0") == "0":
    import torch
    print("planted")
    raise torch.OutOfMemoryError("planted")
"""


@pytest.mark.parametrize("name", ["task.eval_outputs", "samestep.step.outputs.to_part"])
@pytest.mark.parametrize("processes", [1, 2])
def test_memory_that_runs_out_changes_no_score(project, tmp_path, name, processes):
    """Of the model, or of the copies of its outputs: the evaluation begins again."""
    flags, before = ["--micro_batch_size", "auto"], before_calls(name, RUNS_OUT)
    printed = train(project, tmp_path / "run", processes, *flags, before=before)
    assert printed.count("planted") == 1
    scores, right = lines(tmp_path / "run", "eval_loss")[-1], expected(tmp_path / "run")
    assert {name: scores[name] for name in right} == pytest.approx(right, rel=1e-6)


def test_ranks_without_rows_and_an_evaluation_alone(project, tmp_path):
    """Three batches for two processes, of whose sources one has a single row; then `eval_only`."""
    flags = ["--task.held_out", 22, "--micro_batch_size", 16]
    train(project, tmp_path / "a", 1, *flags)
    train(project, tmp_path / "b", 2, *flags)
    one, two = (lines(tmp_path / name, "eval_loss")[-1] for name in "ab")
    assert {name: one[name] for name in ("auc", "order")} == pytest.approx(
        {name: two[name] for name in ("auc", "order")}, rel=1e-6
    )
    assert one["auc/b"] is None and two["auc/b"] is None  # one row has no AUC
    train(project, tmp_path / "b", 2, *flags, "--eval_only", "true")
    alone = json.loads((tmp_path / "b" / "evaluation" / "metrics.json").read_text())
    assert alone["order"] == pytest.approx(two["order"], rel=1e-6)


WRONG = cases("wrong_tasks")["outputs"]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_outputs_are_one_line(project, tmp_path, name):
    """The batches of a source of 21 rows have 8 and 5; those of 40 have 8, of 39 also 7."""
    said, code = WRONG[name].values()
    flags = ["--task.held_out", 60, "--micro_batch_size", 8]
    printed = train(project, tmp_path / "run", 2, *flags, code=code, codes=[2])
    assert printed.count(said) == 1, printed


def test_each_row_counts_once_and_is_padded_in_its_type():
    """Of neighbors that compute the same rows the first one; a row past the last is left out."""
    ranks = SimpleNamespace(
        layout=mesh.Layout(2, 1, ("FSDP",), tp=2),
        raise_everywhere=lambda problem: None,
        gather_on_main=lambda parts: [parts],
    )
    second = EvaluationOutputs(ranks)
    second.add({"x": torch.ones(2)}, np.array([0, 1]))
    assert second.parts == []
    ranks.layout = mesh.Layout(2, 0, ("FSDP",), tp=2)
    first = EvaluationOutputs(ranks)
    first.add({"x": torch.ones(2)}, np.array([0, 1]))
    first.add({"x": torch.ones(1)}, np.array([-1]))
    assert [part.ids.tolist() for part in first.parts] == [[0, 1]]
    first.add({"x": torch.ones(3)}, np.array([2, 3]))
    assert isinstance(first.problem, UserError)

    kinds = (torch.float32, torch.int64, torch.bool, torch.uint8, torch.bfloat16)
    names = [str(kind) for kind in kinds]
    long, short = torch.ones(1, 2, 3), torch.ones(2, 1, 4)
    parts = [
        to_part({name: values.to(kind) for name, kind in zip(names, kinds, strict=True)}, ids)
        for values, ids in [(long, np.array([1])), (short, np.array([2, 0]))]
    ]
    merged = merge(parts, 3)
    for name, padding in zip(names, (-100, -100, 0, 0, -100), strict=True):
        right = torch.full((3, 2, 4), float(padding))
        right[1, :, :3] = 1
        right[[0, 2], 0] = 1
        assert torch.equal(merged[name].float(), right), name
    assert merged["torch.bfloat16"].dtype == torch.float32
