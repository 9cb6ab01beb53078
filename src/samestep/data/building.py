"""Arrow files of `datasets` from tables that a function yields in several processes.

`Dataset.from_generator` takes rows one by one, at 3 microseconds a column; this takes tables.
"""

import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import datasets
import pyarrow
from datasets.builder import Key
from datasets.exceptions import DatasetGenerationError

from samestep.base.console import one_line

Tables = Callable[[list], Iterator[pyarrow.Table]]


@dataclass
class TablesConfig(datasets.BuilderConfig):
    """What `build` is given. (In a module of its own: `datasets` replaces names of this module.)"""

    tables: Tables | None = None
    features: datasets.Features | None = None
    units: list = field(default_factory=list)


class TablesBuilder(datasets.ArrowBasedBuilder):
    """Writes the tables of config.units."""

    BUILDER_CONFIG_CLASS = TablesConfig

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=self.config.features)

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        return [datasets.SplitGenerator("train", {"units": self.config.units})]

    def _generate_tables(self, units: list) -> Iterator[tuple[Key, pyarrow.Table]]:
        for number, table in enumerate(self.config.tables(units)):
            yield Key(0, number), table


def build(
    tables: Tables, features: datasets.Features, units: list, num_proc: int | None
) -> datasets.Dataset:
    """Return the rows of `tables(units)` in order; each process calls it with a run of the units.

    The files lie in the cache of `datasets`; none is used again. Raises ValueError with the reason
    where they cannot be written, and OSError as for a full disk.
    """
    config = {"tables": tables, "features": features, "units": units}
    builder = TablesBuilder(config_id=f"default-{uuid.uuid4().hex}", **config)
    try:
        builder.download_and_prepare(num_proc=num_proc, verification_mode="no_checks")
    except DatasetGenerationError as error:  # says nothing itself
        raise explain(error) from None
    if not builder.info.splits["train"].num_examples:
        return datasets.Dataset(features.arrow_schema.empty_table())
    return builder.as_dataset("train")


def explain(error: Exception) -> Exception:
    """The error beneath one of `datasets`."""
    cause = error.__cause__
    if isinstance(cause, OSError | MemoryError):
        return cause
    # Of another process it is a traceback as text, which begins with the first error.
    lines = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .*", str(cause), re.MULTILINE)
    reason = one_line(lines[0] if lines else f"{type(cause).__name__}: {cause}", 200)
    return ValueError(f"task.data: the rows cannot be stored: {reason}")
