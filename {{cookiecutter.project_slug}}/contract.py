"""What train.py expects of task.py, checked where a mistake can first be seen.

Each mistake is a ValueError of one line that names the function, what it gave, and what to give.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

import task

FUNCTIONS = """prepare_data datasets collate count build_model loss_sum eval_sums metrics export"""
TAKEN = ("step", "eval_loss", "event")  # keys of lines of metrics.jsonl


def kind(value: Any) -> str:
    """What a value is, for the end of an error."""
    if torch.is_tensor(value):
        return f"a tensor, {str(value.dtype).removeprefix('torch.')}, of shape {(*value.shape,)}"
    return f"{value!r:.60}, {type(value).__name__}"


def check_names() -> None:
    """Raises ValueError for a function that train.py calls and task.py does not have."""
    missing = [name for name in FUNCTIONS.split() if not callable(getattr(task, name, None))]
    if missing:
        raise ValueError(
            f"task.py has no function {', '.join(missing)}; README.md shows a whole task.py"
        )


def check_datasets(data: Any) -> None:
    """Raises ValueError unless these are two datasets that know their length."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise ValueError(f"task.datasets gives {kind(data)}; give (train, validation)")
    for each in data:
        if not (hasattr(each, "__len__") and hasattr(each, "__getitem__")):
            raise ValueError(
                f"task.datasets gives {kind(each)}; give datasets with a length and rows by number"
            )


def check_rows(ids: Iterable[int], rows: list) -> None:
    """Raises ValueError for rows that are dicts with different keys."""
    first = None
    for number, row in zip(ids, rows, strict=True):
        if not isinstance(row, dict):
            return
        first = first or (number, row)
        for (i, has), (j, lacks) in ((first, (number, row)), ((number, row), first)):
            for name in has.keys() - lacks.keys():
                raise ValueError(
                    f"task.datasets: row {j} has no {name!r}, which row {i} has; give all rows the "
                    "same keys"
                )


def check_batch(batch: Any) -> None:
    """Raises ValueError unless this is a dict of tensors on the CPU."""
    if not isinstance(batch, dict) or not batch:
        raise ValueError(f"task.collate gives {kind(batch)}; give a dict of tensors")
    for name, value in batch.items():
        if not torch.is_tensor(value) or value.device.type != "cpu":
            raise ValueError(f"task.collate: {name!r} is {kind(value)}; give a tensor on the CPU")


def whole(count: Any) -> int:
    """What task.count has given, if it is a whole number; raises ValueError for any other."""
    try:
        number = count.__index__()
    except (AttributeError, TypeError):
        number = -1
    if number < 0:
        raise ValueError(f"task.count gives {kind(count)}; give the number of loss terms, an int")
    return number


def check_loss(loss: Any) -> None:
    """Raises ValueError unless this is a scalar in float32 that has a gradient."""
    if torch.is_tensor(loss) and (loss.shape, loss.dtype) == ((), torch.float32):
        if loss.requires_grad:
            return
        raise ValueError("task.loss_sum gives a loss without a gradient; call model(...) for it")
    raise ValueError(
        f"task.loss_sum gives {kind(loss)}; give the sum of the losses, a float32 of shape ()"
    )


def check_sums(sums: Any) -> None:
    """Raises ValueError unless this is a dict of tensors that can be added up in float64."""
    if not isinstance(sums, dict) or not sums:
        raise ValueError(f"task.eval_sums gives {kind(sums)}; give a dict of tensors")
    for name, value in sums.items():
        if not torch.is_tensor(value) or value.is_complex():
            raise ValueError(f"task.eval_sums: {name!r} is {kind(value)}; give a tensor")


def scores(found: Any) -> dict[str, float]:
    """What task.metrics has given, as floats; raises ValueError for what is none."""
    numbers = {}
    if not isinstance(found, dict) or "loss" not in found:
        raise ValueError(f"task.metrics gives {kind(found)}; give a dict of floats, with 'loss'")
    for name, value in found.items():
        if not isinstance(name, str) or name in TAKEN:
            raise ValueError(f"task.metrics: {name!r} is no name for a score; give another")
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # text, or a tensor of several numbers
            raise ValueError(f"task.metrics: {name!r} is {kind(value)}; give a float") from None
    return numbers


@torch.no_grad()
def try_evaluation(model: Callable, batches: list[dict[str, torch.Tensor]]) -> list[str]:
    """Raises ValueError where an evaluation would end in one, hours later perhaps.

    `batches`: one, and perhaps its two halves. Gives remarks on sums that are not those of the
    halves: as a rule means.
    """
    model.eval()
    sums, *halves = [task.eval_sums(model, batch) for batch in batches]
    check_sums(sums)
    remarks = [not_a_sum(f"eval_sums: {name!r}", sums[name], [half[name] for half in halves])
               for name in sums if halves]  # fmt: skip
    with contextlib.suppress(Exception):  # it may need what only training rows have
        loss, *parts = [task.loss_sum(model, batch) for batch in batches]
        remarks.append(not_a_sum("loss_sum", loss, parts))
    model.train()
    try:
        found = task.metrics({name: value.detach().cpu().double() for name, value in sums.items()})
    except (ArithmeticError, ValueError):  # of so few rows there may be nothing to compute
        pass
    else:
        scores(found)
    return [remark for remark in remarks if remark]


def not_a_sum(name: str, whole: torch.Tensor, halves: list[torch.Tensor]) -> str:
    """A remark on a value of a batch far from the sum of those of its halves, or nothing."""
    total, parts = (sum(float(each.sum()) for each in some) for some in ([whole], halves))
    if not halves or not abs(total - parts) > 0.2 * abs(parts) + 1e-6:  # NaN is no matter of this
        return ""
    return (
        f"warning: task.{name} of a batch is {total:.5g}, but {parts:.5g} if its halves are added "
        "up: is it a mean? A sum is expected"
    )
