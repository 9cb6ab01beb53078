"""The functions that train.py calls in task.py, and checks of their results.

`Task` is the contract. A mistake raises ValueError as early as it can be seen, with one line that
names the function, its result, and the expected result.
"""

import contextlib
import dataclasses
import inspect
import math
import operator
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

Batch = dict[str, torch.Tensor]
# Keys of metrics.jsonl that no score may have, also with the name of a source: eval_loss/NAME.
RESERVED = ("step", "samples", "eval_loss", "event")
LONGEST_PERIOD = 100_000  # largest sum of the weights of sources, for their table


class Source(Protocol):
    """A part of a dataset: rows that follow each other."""

    name: str
    """Its name in metrics.jsonl."""

    rows: int
    """Number of its rows. Those of all sources make up the dataset, in this order."""

    weight: int
    """Its share of the training samples is weight / the sum of all weights."""

    shards: np.ndarray | None
    """Number of rows of each shard, an int array, for rows that are best read shard by shard. None:
    all rows are shuffled together."""

    window: int
    """Number of shards whose rows are shuffled together."""


class Task(Protocol):
    """The functions of task.py. Mistakes that the user can correct raise ValueError with one line.

    B is the number of rows in a batch. `prepared` is the return value of `prepare_data` in this
    process: all that later functions need, such as the folder of the prepared data. Nothing else is
    passed from one function to the next. Datasets are copied to worker processes.

    Optional are UNIT, identity, digest, sources, augment, sizes, report, questions and
    check_shared_rows.
    """

    TaskConfig: type
    """A dataclass. Each field is a flag --task.FIELD, and its docstring the help."""

    UNIT: str
    """Name of a loss term, in the plural. Throughput is logged as UNIT_per_second; without it, as
    samples_per_second."""

    def prepare_data(self, cfg: Any) -> Any:
        """Prepares the data once: downloads, tokenises, stores. It is called first.

        All processes call it at the same time, before they can communicate. It may fill in fields
        of cfg that were left open (`auto`). It should refuse settings and data that cannot work:
        say what is wrong, where, and what to write instead.
        """

    def datasets(self, cfg: Any, prepared: Any) -> tuple[Any, Any]:
        """(train, validation), map-style datasets with len(), [i] and optionally the faster
        __getitems__([i, j, ...]). Row i must be the same in every process and every run. A training
        dataset that fetches its rows from afar may have a number `ahead`: with each batch its
        fetch([i, j, ...]) gets the rows that come so many samples later, and must not wait for
        them. A row that cannot be read raises ValueError, or ConnectionError if that may pass."""

    def collate(self, rows: list) -> Batch:
        """A batch: a dict of CPU tensors whose first dimension is B = len(rows)."""

    def count(self, batch: Batch) -> int:
        """Loss terms of a batch, from its labels alone."""

    def build_model(self, cfg: Any, prepared: Any) -> torch.nn.Module:
        """A model with new or pretrained weights, on the CPU; torch is seeded. Under FSDP2 the main
        process alone makes the weights, and the others the same model on torch.device("meta"). If
        it has an attribute `adaptation`, theirs get adaptation.apply(model)."""

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The loss summed over the count(batch) terms: float32, shape (). A sum, not a mean:
        train.py divides by the terms of the whole step. The batch is on the model's device. It
        runs under autocast: compute the loss in float32, with F.cross_entropy or .float()."""

    def eval_sums(self, model: torch.nn.Module, batch: Batch) -> Batch:
        """Tensors of any shape. They are added up over all batches, in float64. It runs under
        autocast, which rounds products of matrices: count in other ways."""

    def metrics(self, sums: Batch) -> dict[str, float]:
        """Numbers from these totals: "loss", which is logged as eval_loss, and others."""

    def export(self, model: torch.nn.Module, folder: Path, cfg: Any, prepared: Any) -> None:
        """Saves the trained model in this empty folder. It is unwrapped, and in eval mode."""

    def identity(self, cfg: Any, prepared: Any) -> str:
        """Text that identifies what the weights belong to, such as a vocabulary. A checkpoint with
        another text is never continued."""

    def digest(self, cfg: Any, prepared: Any) -> str:
        """Text that identifies every byte of the prepared data. A checkpoint with another text is
        refused, unless the change is accepted. Without this function: that of the folder which
        `cache.prepare` returned, if `prepared` is one. Otherwise train.py compares the number of
        rows and 64 rows of each dataset, and does not notice other changes."""

    def sources(self, dataset: Any) -> list[Source]:
        """The parts that a dataset consists of. Training takes its samples from them in proportion
        to their weights, and each passes over its own rows. Evaluation ignores the weights, and
        also gives the scores of each. Without this function: dataset.sources; without both, all
        rows are one source."""

    def augment(self, row: Any, generator: torch.Generator) -> Any:
        """The augmented row for training. Draw random numbers from this generator only: it belongs
        to the row and the epoch, so the result depends on no worker, rank or micro-batch. That goes
        for the noise of a model, too (a VAE, diffusion), as an entry of the row. What the model
        itself draws depends on the micro-batch. Rows for validation are not augmented: give them
        noise in the dataset, from a generator that is seeded with the number of the row."""

    def sizes(self, dataset: Any) -> Any:
        """Length of each row: int array (N,). Rows are sorted by it within a step, so that
        micro-batches need less padding. Without this function: dataset.sizes(), if it has it."""

    def check_shared_rows(self, cfg: Any, prepared: Any) -> None:
        """Raises ValueError for settings under which GPUs cannot share a row (context parallelism):
        each has a part of its tokens and labels. All attention must be causal, over whole rows, by
        F.scaled_dot_product_attention. loss_sum and eval_sums get the parts, with position_ids; the
        results are added up. Without this function context parallelism is refused."""

    def report(
        self, model: torch.nn.Module, sums: Batch, folder: Path, cfg: Any, prepared: Any
    ) -> dict[str, str | Path]:
        """Results of an evaluation for people, by name: texts, and paths of pictures that it has
        written in the folder."""

    def questions(self, rows: list, cfg: Any, prepared: Any) -> list[tuple[Any, dict]]:
        """What the check of the export asks the trained model, and then what it loads from the
        folder by transformers alone: each question as a pipeline takes it (a text, messages, an
        image), and as the run gives it to the model, arrays with B = 1. The attention mask of
        tokens is left out. `rows`: a few validation rows."""


REQUIRED = """prepare_data datasets collate count build_model loss_sum eval_sums metrics
    export""".split()
OPTIONAL = "identity digest sources augment sizes report questions check_shared_rows".split()


def check_functions(task: Any) -> None:
    """Raises ValueError if a function is missing or does not accept its arguments."""
    if not dataclasses.is_dataclass(task.TaskConfig):
        raise ValueError("task.TaskConfig is not a dataclass; write @dataclass above it")
    missing = [name for name in REQUIRED if not callable(getattr(task, name, None))]
    if missing:
        example = "to write a whole task: python -m samestep example plain_module"
        raise ValueError(f"task.py has no function {', '.join(missing)}; {example}")
    for name in [*REQUIRED, *OPTIONAL]:
        if callable(function := getattr(task, name, None)):
            wanted = [*inspect.signature(getattr(Task, name)).parameters][1:]
            given = inspect.signature(function)
            try:
                given.bind(*wanted)
            except TypeError:
                call = f"{name}({', '.join(wanted)})"
                raise ValueError(f"task.py: {name}{given} is called as {call}") from None


def expect(right: object, place: str, value: Any, wanted: str) -> None:
    """Raises ValueError, with the place and the value in task.py, unless the value is right."""
    if right:
        return
    shown = f"{value!r:.60}, {type(value).__name__}"
    if torch.is_tensor(value):
        shown = f"a tensor, {str(value.dtype).removeprefix('torch.')}, of shape {(*value.shape,)}"
    raise ValueError(f"task.{place} {shown}; give {wanted}")


def check_datasets(data: Any) -> None:
    """Raises ValueError unless these are two datasets with rows."""
    right = isinstance(data, tuple | list) and len(data) == 2
    expect(right, "datasets returns", data, "(train, validation)")
    for each in data:
        right = hasattr(each, "__len__") and hasattr(each, "__getitem__")
        expect(right, "datasets returns", each, "datasets with len() and [i]")
        if not len(each):
            use = "train on" if each is data[0] else "evaluate on"
            raise ValueError(f"task.datasets returns no row to {use}; give at least one")


def list_sources(task: Any, dataset: Any, training: bool) -> list[Source]:
    """The sources of a dataset, empty if neither the task nor the dataset names some.

    Raises ValueError for sources that do not fit the dataset. Without `training`, those without
    rows are left out.
    """
    own = task and callable(getattr(task, "sources", None))  # it may be a module of that name
    sources = task.sources(dataset) if own else getattr(dataset, "sources", None)
    fields = list(Source.__annotations__)
    known = isinstance(sources, list | tuple) and len(sources)
    if not known or not all(hasattr(each, field) for each in sources for field in fields):
        names = f"a list of sources, each with {', '.join(fields)}"
        expect(not own, "sources returns", sources, names)
        return []  # an attribute with another meaning
    for each in sources:
        shards = np.asarray([each.rows] if each.shards is None else each.shards)
        numbers = np.array([each.rows, each.weight - 1, each.window - 1, *shards.flat])
        whole = numbers.dtype.kind in "iu" and numbers.min() >= 0
        if not whole or shards.ndim != 1 or shards.sum() != each.rows:
            raise ValueError(
                f"task.sources: {each.name!r} needs whole numbers: rows from 0, a weight and a "
                "window from 1, and shards, an int array, that add up to the rows"
            )
        if training and not each.rows:
            raise ValueError(f"task.sources: {each.name} has no rows to train on; leave it out")
    name, times = Counter(each.name for each in sources).most_common(1)[0]
    if times > 1:
        raise ValueError(f"task.sources: {times} are called {name!r}; give each another name")
    total = sum(each.rows for each in sources)
    if total != len(dataset):
        together = f"{total:,} rows together, but the dataset has {len(dataset):,}"
        raise ValueError(f"task.sources: they have {together}")
    weights = [int(each.weight) for each in sources]
    if sum(weights) // math.gcd(*weights) > LONGEST_PERIOD:
        too_fine = f"the weights {weights} are too fine; their sum is above {LONGEST_PERIOD:,}"
        raise ValueError(f"task.sources: {too_fine}")
    return [each for each in sources if each.rows]


def check_batch(batch: Any) -> None:
    """Raises ValueError unless this is a dict of tensors on the CPU."""
    expect(isinstance(batch, dict) and batch, "collate returns", batch, "a dict of tensors")
    for name, value in batch.items():
        on_cpu = torch.is_tensor(value) and value.device.type == "cpu"
        expect(on_cpu, f"collate: {name!r} is", value, "a tensor on the CPU")


def check_count(count: Any) -> int:
    """The result of task.count as an int; raises ValueError unless it is a whole number from 0."""
    try:
        number = operator.index(count)
    except TypeError:
        number = -1
    expect(number >= 0, "count returns", count, "the number of items in the loss, an int")
    return number


def check_model(model: Any) -> torch.nn.Module:
    """The model of task.build_model; raises ValueError for one that cannot be trained."""
    expect(isinstance(model, torch.nn.Module), "build_model returns", model, "an nn.Module")
    if getattr(model, "is_quantized", False):  # its checkpoints restore other weights, silently
        raise ValueError(
            "task.build_model returns a quantised model, whose runs do not continue as they were"
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


def check_loss(loss: Any) -> None:
    """Raises ValueError unless this is a float32 scalar with a gradient."""
    right = torch.is_tensor(loss) and (loss.shape, loss.dtype) == ((), torch.float32)
    expect(right, "loss_sum returns", loss, "the sum of the losses, a float32 of shape ()")
    if not loss.requires_grad:
        raise ValueError("task.loss_sum returns a loss without a gradient; call model(...) for it")


def check_sums(sums: Any) -> None:
    """Raises ValueError unless this is a dict of tensors that float64 can hold, and that count."""
    expect(isinstance(sums, dict) and sums, "eval_sums returns", sums, "a dict of tensors")
    for name, value in sums.items():
        expect(torch.is_tensor(value), f"eval_sums: {name!r} is", value, "a tensor")
        exact = value.dtype not in (torch.bfloat16, torch.float16) and not value.is_complex()
        better = "one that rounds no sums: call .float(), and count without products of matrices"
        expect(exact, f"eval_sums: {name!r} is", value, better)


def check_metrics(metrics: Any) -> dict[str, float]:
    """The task's metrics as floats; raises ValueError for anything else."""
    numbers = {}
    right = isinstance(metrics, dict) and "loss" in metrics
    expect(right, "metrics returns", metrics, "a dict of floats, with 'loss'")
    for name, value in metrics.items():
        if not isinstance(name, str) or name.partition("/")[0] in RESERVED:
            raise ValueError(f"task.metrics: a score cannot be called {name!r}; give another name")
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # text, or a tensor of several numbers
            expect(False, f"metrics: {name!r} is", value, "a float")
    return numbers


def score(task: Task, sums: list[Batch], sources: list[Source]) -> tuple[dict[str, float], Batch]:
    """The scores of an evaluation, and its sums, from the sums of each source.

    The task's "loss" is called eval_loss. Of several sources each has its scores too, such as
    eval_loss/NAME; NaN stands for those that the task cannot compute from so few rows.
    """

    def scores_of(sums: Batch) -> dict[str, float]:
        scores = check_metrics(task.metrics(sums))
        return {"eval_loss": scores.pop("loss"), **scores}

    total: Any = {name: sum(each[name] for each in sums) for name in sums[0]}
    scores = scores_of(total)
    found = dict(scores)
    for each, source in zip(sums, sources, strict=False) if len(sums) > 1 else ():
        try:
            own = scores_of(each)
        except (ArithmeticError, ValueError):
            own = dict.fromkeys(scores, math.nan)
        found |= {f"{name}/{source.name}": number for name, number in own.items()}
    return found, total


@torch.no_grad()
def try_evaluation(task: Task, model: torch.nn.Module, batches: list[Batch]) -> list[str]:
    """Evaluates a batch, so that mistakes appear at the start and not after hours of training.

    `batches` is one batch, optionally followed by its two halves. Returns a warning for each value
    that differs from the sum over the halves: it is probably a mean.
    """
    dtype, warnings = torch.float32, []

    # Inside of the model: outside, accelerate has made all results float32.
    def eval_sums(model: Any, batch: Batch) -> Batch:
        sums = task.eval_sums(model, batch)
        check_sums(sums)
        return sums

    def loss_sum(model: Any, batch: Batch) -> Batch:
        nonlocal dtype
        loss = task.loss_sum(model, batch)
        dtype = loss.dtype
        return {"": loss}

    model.eval()
    results = {"eval_sums": [model(eval_sums, batch) for batch in batches]}
    if len(batches) > 1:
        with contextlib.suppress(Exception):  # it may need columns that only training rows have
            results["loss_sum"] = [model(loss_sum, batch) for batch in batches]
    model.train()
    if dtype in (torch.bfloat16, torch.float16):  # check_loss refuses others
        warnings.append(
            f"warning: task.loss_sum computes the loss in {str(dtype).removeprefix('torch.')}, "
            "since it runs under autocast; call .float() on the outputs of the model"
        )
    for function, (whole, *halves) in results.items():
        for name, value in whole.items() if halves else ():
            total, added = float(value.sum()), sum(float(half[name].sum()) for half in halves)
            if abs(total - added) > 0.2 * abs(added) + 1e-6:
                place = f"{function}: {name!r}" if name else function
                warnings.append(
                    f"warning: task.{place} is {total:.5g} for a batch, but {added:.5g} as the sum "
                    "of its two halves: is it a mean? A sum is expected"
                )
    totals = {name: value.cpu().double() for name, value in results["eval_sums"][0].items()}
    metrics: Any = {"loss": 0.0}
    with contextlib.suppress(ArithmeticError, ValueError):  # undefined for so few rows
        metrics = task.metrics(totals)
    check_metrics(metrics)
    return warnings
