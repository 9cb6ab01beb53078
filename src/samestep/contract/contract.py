"""The functions that train.py calls in task.py, and checks of their results.

`Task` is the contract. A mistake raises ValueError as early as it can be seen, with one line that
names the function, its result, and the expected result.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from samestep.contract import dtypes
from samestep.step.inputs import Batch, Source, expect

# Keys of metrics.jsonl that no score may have, also with the name of a source: eval_loss/NAME.
_RESERVED = ("step", "samples", "eval_loss", "event")


class Task(Protocol):
    """The functions of task.py. Mistakes that the user can correct raise ValueError with one line.

    A function gets `cfg` and `data` if it names them, besides the arguments that stand before these
    here. B is the number of rows in a batch.

    Required are collate, count, build_model, loss_sum, eval_sums, metrics and export, and at least
    one of prepare_data and views.
    """

    TaskConfig: type
    """A dataclass. Each field is a flag --task.FIELD, and its docstring the help. A field that only
    the model reads is marked with metadata=MODEL: a change of it prepares no data anew."""

    UNIT: str
    """Name of an item in the loss, in the plural. Throughput is logged as UNIT_per_second; without
    it, as samples_per_second."""

    WEIGHTS: str
    """Without it, weights that train are converted to float32, and frozen ones keep their dtype.
    "as built": all keep the dtype that build_model gives them, for an optimizer that is made for
    bfloat16 (8-bit, or with stochastic rounding)."""

    def check_config(self, cfg: Any) -> None:
        """Raises ValueError for fields that cannot work together. It is called at each start."""

    def prepare_data(self, cfg: Any, folder: Path) -> Any:
        """A datasets.DatasetDict with the splits train and validation, or None.

        It runs once for the fields of cfg, the files that they name and its own code: on one
        process, under a lock, with Python, NumPy and torch seeded. What it returns is saved, with
        all that it has written in `folder`, such as a tokenizer; every process loads it as `data`,
        with data.folder. These files are the run's identity: a run that resumes finds its own in
        `folder`, and keeps them where data has grown. Fields of cfg that were left open (`auto`)
        may be filled in; that is saved too. Fields marked with MODEL cannot be read."""

    def views(self, cfg: Any, data: Any) -> tuple[Any, Any]:
        """(train, validation), map-style datasets with len(), [i] and optionally the faster
        __getitems__([i, j, ...]); without this function data["train"] and data["validation"]. Row i
        must be the same in every process and every run; Python, NumPy and torch are seeded before.
        A view may have `sources`, a list of Source; `sizes()`, the length of each row, int (N,);
        and `digest()`, a text for all its rows: without it those of datasets.Dataset count by their
        values, and of others 64 rows. A row that cannot be read raises ValueError, or
        ConnectionError if that may pass."""

    def collate(self, rows: list) -> Mapping:
        """A batch: any mapping to CPU tensors whose first dimension is B = len(rows), to texts,
        or to lists and mappings of such. Later functions get it as a dict. Rows for training come
        from `augment`, in the checks at the start too; rows for validation do not."""

    def count(self, batch: Batch) -> int:
        """Number of items in the loss of a batch, from its labels alone; of each batch that
        `collate` makes."""

    def build_model(self, cfg: Any, data: Any) -> torch.nn.Module:
        """A model with new or pretrained weights, on the CPU; torch is seeded. Under FSDP2 the main
        process alone makes the weights, and the others the same model on torch.device("meta"). If
        it has an attribute `decisions`, theirs get it, too."""

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The loss summed over the count(batch) items: float32, shape (). A sum, not a mean:
        train.py divides by the items of the global batch. The batch is on the model's device. It
        runs under autocast: compute the loss in float32, with F.cross_entropy or .float()."""

    def eval_sums(self, model: torch.nn.Module, batch: Batch) -> Batch:
        """Tensors of any shape. They are added up over all batches, in float64. It runs under
        autocast, which rounds products of matrices: count in other ways."""

    def eval_outputs(self, model: torch.nn.Module, batch: Batch) -> Batch:
        """For scores that are no sums, such as AUC: a dict of tensors (B, ...), after eval_sums of
        the same batch, under autocast. Each row is kept once, in CPU memory, bfloat16 and float16
        as float32, and metrics gets all of them. The other dimensions may differ between batches:
        shorter rows are padded with -100, unsigned integers with 0, booleans with False. Write
        these into the padding of a batch, too."""

    def metrics(self, sums: Batch, outputs: Batch) -> dict[str, float]:
        """Numbers from these totals: "loss", which is logged as eval_loss, and others. `outputs`,
        if there is eval_outputs: tensors (N, ...) of the N validation rows, or of those of a
        source, in their order, on the CPU. Then the main process alone computes the scores."""

    def export(self, model: torch.nn.Module, output: Path, cfg: Any, data: Any) -> None:
        """Saves the trained model in this empty folder. It is unwrapped, and in eval mode."""

    def augment(self, row: Any, generator: torch.Generator) -> Any:
        """The augmented row for training. Draw random numbers from this generator only: it belongs
        to the row and the epoch, so the result depends on no worker, rank or micro-batch. That goes
        for the noise of a model, too (a VAE, diffusion), as an entry of the row. What the model
        itself draws depends on the micro-batch. Rows for validation are not augmented: give them
        noise in views, from a generator that is seeded with the number of the row."""

    def files(self, cfg: Any) -> list:
        """Paths of more files and folders that prepare_data reads, beside those that fields name:
        it runs again where one has changed."""

    def rows_depend(self, cfg: Any, data: Any) -> bool:
        """Whether the loss of a row depends on others by intent, as negatives from the batch do.
        Then the result depends on micro-batches, and the check of independent rows is left out."""

    def check_context_parallel(self, cfg: Any, data: Any) -> None:
        """Raises ValueError for settings under which GPUs cannot share a sequence: each has a part
        of its tokens and labels. All attention must be causal, over whole sequences, by
        F.scaled_dot_product_attention. loss_sum and eval_sums get the parts, with position_ids and
        shift_labels; the results are added up. Without this function it is not supported."""

    def report(
        self, model: torch.nn.Module, sums: Batch, output: Path, cfg: Any, data: Any
    ) -> dict[str, str | Path]:
        """Results of an evaluation for people, by name: texts, and paths of pictures that it has
        written in the folder `output`."""

    def test_inputs(self, rows: list, cfg: Any, data: Any) -> list[tuple[Any, dict]]:
        """What the check of the export gives to the trained model, and then to what it loads from
        the folder by transformers: each input as a pipeline takes it (a text, messages, an image;
        None where there is no tokenizer or image processor), and as the run gives it to the model,
        arrays with B = 1. The attention mask of tokens is left out. `rows`: a few validation
        rows."""


REQUIRED = "collate count build_model loss_sum eval_sums metrics export".split()
OPTIONAL = """prepare_data views check_config augment files rows_depend check_context_parallel
    report test_inputs eval_outputs""".split()
GIVEN = ("cfg", "data")  # to functions that name them


def check_functions(task: Any) -> None:
    """Raises ValueError if a function is missing or does not accept its arguments."""
    if not dataclasses.is_dataclass(task.TaskConfig):
        raise ValueError("task.TaskConfig is not a dataclass; write @dataclass above it")
    missing = [name for name in REQUIRED if not callable(getattr(task, name, None))]
    if not any(callable(getattr(task, name, None)) for name in ("prepare_data", "views")):
        missing.insert(0, "prepare_data or views")
    if missing:
        example = "to write a whole task: python -m samestep example plain_module"
        raise ValueError(f"task.py has no function {', '.join(missing)}; {example}")
    for name in [*REQUIRED, *OPTIONAL]:
        if callable(function := getattr(task, name, None)):
            wanted = [*inspect.signature(getattr(Task, name)).parameters][1:]
            if name == "metrics" and not callable(getattr(task, "eval_outputs", None)):
                wanted.remove("outputs")
            given = inspect.signature(function)
            by_name = (*GIVEN, "folder") if name == "prepare_data" else GIVEN
            first = [each for each in wanted if each not in by_name]
            named = {each: None for each in by_name if each in given.parameters}
            try:
                given.bind(*first, **named)
            except TypeError:
                call = f"{name}({', '.join(wanted)})"
                raise ValueError(f"task.py: {name}{given} is called as {call}") from None


def bind(task: Any, cfg: Any, data: Any) -> SimpleNamespace:
    """The functions of task.py, with the arguments `cfg` and `data` of those that name them."""
    found = SimpleNamespace()
    for name in ("UNIT", "WEIGHTS"):
        if hasattr(task, name):
            setattr(found, name, getattr(task, name))
    for name in [*REQUIRED, *OPTIONAL]:
        function = getattr(task, name, None)
        if name == "rows_depend" and isinstance(function, bool):  # a value will do
            found.rows_depend = functools.partial(bool, function)
        elif callable(function) and name != "prepare_data":
            given = inspect.signature(function).parameters
            named = {n: v for n, v in zip(GIVEN, (cfg, data), strict=True) if n in given}
            setattr(found, name, functools.partial(function, **named) if named else function)
    if hasattr(found, "build_model"):
        found.build_model = dtypes.building(found.build_model, getattr(task, "WEIGHTS", None))
    return found


def read_views(task: Any, data: Any) -> tuple[Any, Any]:
    """The rows to train and to evaluate on, of a bound task; ValueError unless there are both."""
    if hasattr(task, "views"):
        views = task.views()
    else:
        if not data:
            raise ValueError(
                "task.prepare_data returns None, and task.py has no views; give a DatasetDict with "
                "train and validation, or a function views"
            )
        missing = [name for name in ("train", "validation") if name not in data]
        if missing:
            raise ValueError(f"task.prepare_data returns no split {' and '.join(missing)}; add it")
        views = data["train"], data["validation"]
    right = isinstance(views, tuple | list) and len(views) == 2
    expect(right, "task.views returns", views, "(train, validation)")
    for each in views:
        right = hasattr(each, "__len__") and hasattr(each, "__getitem__")
        expect(right, "task.views returns", each, "datasets with len() and [i]")
        if not len(each):
            use = "train on" if each is views[0] else "evaluate on"
            raise ValueError(f"task.views returns no row to {use}; give at least one")
    return views[0], views[1]


def check_model(model: Any) -> torch.nn.Module:
    """The model of task.build_model; raises ValueError for one that cannot be trained."""
    expect(isinstance(model, torch.nn.Module), "task.build_model returns", model, "an nn.Module")
    if getattr(model, "is_quantized", False):  # its checkpoints restore other weights, silently
        raise ValueError(
            "task.build_model returns a quantized model, whose runs would not resume as they were"
        )
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if not trained:
        raise ValueError("task.build_model returns a model without a weight that trains")
    for name, weight in trained:
        if not torch.ops.aten.is_non_overlapping_and_dense(weight):  # fused AdamW changes others
            raise ValueError(
                f"task.build_model: the weight {name} is a part of another tensor, with gaps; make "
                "it nn.Parameter(part.contiguous())"
            )
    return model


def check_metrics(metrics: Any) -> dict[str, float]:
    """The task's metrics as floats; raises ValueError for anything else."""
    numbers = {}
    right = isinstance(metrics, dict) and "loss" in metrics
    expect(right, "task.metrics returns", metrics, "a dict of floats, with 'loss'")
    for name, value in metrics.items():
        if not isinstance(name, str) or name.partition("/")[0] in _RESERVED:
            raise ValueError(f"task.metrics: a score cannot be called {name!r}; give another name")
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # text, or a tensor of several numbers
            expect(False, f"task.metrics: {name!r} is", value, "a float")
    return numbers


def score(
    task: Any, sums: list[Batch], sources: list[Source], outputs: Batch | None = None
) -> tuple[dict[str, float], Batch]:
    """The scores of an evaluation, and its sums, from the sums of each source and the outputs of
    all rows, if the task has eval_outputs.

    The task's "loss" is called eval_loss. Of several sources each has its scores too, such as
    eval_loss/NAME; NaN stands for those that the task cannot compute from so few rows.
    """

    def scores_of(own: Batch, first: int, end: int | None) -> dict[str, float]:
        given = [own]
        if outputs is not None:
            rows = {name: each[first:end] for name, each in outputs.items()}
            if len(sums) > 1:  # metrics may change them in place
                rows = {name: each.clone() for name, each in rows.items()}
            given.append(rows)
        scores = check_metrics(task.metrics(*given))
        return {"eval_loss": scores.pop("loss"), **scores}

    total: Any = {name: sum(each[name] for each in sums) for name in sums[0]}
    scores = scores_of(total, 0, None)
    found, end = dict(scores), 0
    for each, source in zip(sums, sources, strict=False) if len(sums) > 1 else ():
        first, end = end, end + int(source.rows)
        try:
            own = scores_of(each, first, end)
        except (ArithmeticError, ValueError):
            own = dict.fromkeys(scores, math.nan)
        found |= {f"{name}/{source.name}": number for name, number in own.items()}
    return found, total
