"""Rows of shards as samples, while the model trains: read, checked and tokenized in blocks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from samestep.data.folders import Shard, describe_shards, split_shards
from samestep.data.rows import Input, RowFormat, RowMaker
from samestep.streaming.lanes import ShardStream

BLOCK = 500_000  # bytes of the rows of a block, about
MAXIMUM_ROWS = 50_000  # of a block

Block = dict[str, list]  # the columns of stored rows, with their places


class RowStream(ShardStream):
    """Samples of the shards of cfg.data.

    `form`     how rows are read: those that are prepared to evaluate on are read so, too.
    `make`     gets a block and returns its samples, or their columns.
    `size`     of a block, in bytes: its samples are made and permuted together.
    """

    def __init__(self, cfg: Any, form: RowFormat, make: Callable[[Block], Any], size: int = BLOCK):
        self.cfg, self.form, self.make, self.size = cfg, form, make, size
        own = split_shards(cfg, (*form.extensions, ".tar")).train
        self.described = describe_shards(own)
        self.columns = form.columns_of(Input("data", cfg.data, "stream", shards=own))
        super().__init__([each.path for each in own], cfg.lanes)

    def blocks(self, shard: str) -> Iterator[Block]:
        """Raises ValueError for a row that cannot be used. Prints how many are skipped."""
        source = Input("data", self.cfg.data, "stream", shards=[Shard(shard, "", 0, "")])
        source.open(self.columns, self.form.optional)
        maker = RowMaker([source], self.form, None, self.cfg.incomplete_rows == "skip")
        names = [*self.form.features, "place"]
        block: Block = {name: [] for name in names}
        size = 0
        skipped: dict[str, tuple[int, str]] = {}  # by the reason: a number, and the first place
        for row in maker.rows([[(0, span) for span in source.spans]]):
            if row["problem"]:
                raise ValueError(row["problem"])
            if row["skipped"]:
                number, first = skipped.get(row["skipped"], (0, row["place"]))
                skipped[row["skipped"]] = (number + 1, first)
                continue
            for name in names:
                block[name].append(row[name])
            size += row["size"]
            if size >= self.size or len(block["place"]) >= MAXIMUM_ROWS:
                yield block
                block, size = {name: [] for name in names}, 0
        if block["place"]:
            yield block
        for reason, (number, first) in skipped.items():
            print(f"left out: {number:,} {reason} (the first: {first})", flush=True)

    def samples(self, block: Block) -> Sequence:
        found = self.make(block)
        if not isinstance(found, dict):
            return found
        columns = [[np.asarray(each) for each in values] for values in found.values()]
        return [dict(zip(found, values, strict=True)) for values in zip(*columns, strict=True)]

    def digest(self) -> str:
        return self.described
