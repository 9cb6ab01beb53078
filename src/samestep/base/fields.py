"""Types, metadata and rules for the fields of a TaskConfig.

A type is the range of a field's values. The metadata says how a change of the field affects a run
that continues: without metadata, it changes the result and has to be accepted. What executes code,
writes or sends is NOTHING, or {"received": False}: then no receipt and no run folder may give it.
Rules between fields are functions.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic_core import to_jsonable_python

from samestep.base.console import one_line

NOTHING = {"changes": "nothing"}
ROUNDING = {"changes": "rounding"}  # the same result up to rounding and the masks of dropout
MODEL = {"shapes_data": False}  # only the model reads it; beside others: metadata=NOTHING | MODEL

LARGEST = 10**18  # sums and products of whole numbers have to fit into the 64 bits of a tensor
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
ClosedUnitInterval = Annotated[float, Field(ge=0, le=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


def check_fields(cfg: Any, rules: Sequence[tuple[str, Any, str]]) -> None:
    """Raises ValueError for the first violated rule: (field, whether it holds, expected value)."""
    for name, holds, expected in rules:
        if not holds:
            value = one_line(repr(getattr(cfg, name)), 60)
            raise ValueError(f"task.{name} is {value} but must be {expected}")


def check_ignored_fields(
    cfg: Any, rules: list[tuple[str, bool, str]], section: str = "task."
) -> None:
    """Raises ValueError for the first field that is set although the other settings ignore it.

    `rules`: (names of fields, whether they are used, the circumstance that makes them ignored).
    """
    defaults = {each.name: each.default for each in dataclasses.fields(cfg)}
    for names, used, circumstance in rules:
        for name in names.split():
            if not used and getattr(cfg, name) != defaults[name]:
                value = one_line(repr(getattr(cfg, name)), 60)
                raise ValueError(
                    f"{section}{name} is {value}, which has no effect {circumstance}; leave it "
                    f"out, or give its default, {one_line(repr(defaults[name]), 60)}"
                )


def as_json(value: Any) -> Any:
    """The value of a field as JSON holds it. A set is sorted: its own order is another in each
    process."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return to_jsonable_python({key: as_json(entry) for key, entry in value.items()})
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(map(as_json, value), key=repr)
    return to_jsonable_python(value)


def local_path(text: str) -> Path:
    """The path in a field, whether it exists or not."""
    return Path(os.path.expanduser(text))  # unlike Path.expanduser it leaves ~nobody


def is_local_name(name: str) -> bool:
    """Whether the Hub cannot hold this name, or it begins with the name of a local folder."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    first, _, rest = name.partition("/")
    return bool(rest) and (first == "runs" or Path(first).is_dir())
