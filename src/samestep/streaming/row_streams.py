"""Rows of shards as samples, while the model trains: read, checked and tokenized in blocks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from samestep.data.files import File, describe_shards, split_shards
from samestep.data.readers import Columns
from samestep.data.rows import Input, RowFormat, stored_rows
from samestep.streaming.lanes import ShardStream

BLOCK = 500_000  # bytes of the rows of a block, about
_MAXIMUM_ROWS = 50_000  # of a block
LONGEST = 1_000_000  # characters of a document, of which a longer text is several

Block = dict[str, list]  # the columns of stored rows, with their places


class RowStream(ShardStream):
    """Samples of the shards of cfg.data.

    `form`     what is stored of rows: those that are prepared to evaluate on are read so, too.
    `columns`  that are read.
    `make`     gets a block and returns its samples.
    `size`     of a block, in bytes: its samples are made and permuted together.
    """

    def __init__(
        self,
        cfg: Any,
        form: RowFormat,
        columns: Columns,
        make: Callable[[Block], Sequence],
        size: int = BLOCK,
    ):
        self.cfg, self.form, self.columns = cfg, form, columns
        self.make, self.size = make, size
        own = split_shards(cfg)[0]
        self.described = describe_shards(own)
        super().__init__([each.path for each in own], cfg.lanes)

    def blocks(self, shard: str) -> Iterator[Block]:
        """Raises ValueError for a row that cannot be used. (How many are left out is printed of
        those that are prepared: several processes may read a shard, and each epoch again.)"""
        source = Input("data", self.cfg.data, "", [File(shard, "", 0)], columns=self.columns)
        names = [*self.form.features, "place"]
        block: Block = {name: [] for name in names}
        size = 0
        for stored, _, place in stored_rows(source, self.form, self.cfg, []):
            for row in _pieces_of(stored):
                for name in names:
                    block[name].append(row.get(name, str(place)))
                size += sum(map(len, row.values()))
                if size >= self.size or len(block["place"]) >= _MAXIMUM_ROWS:
                    yield block
                    block, size = {name: [] for name in names}, 0
        if block["place"]:
            yield block

    def samples(self, block: Block) -> Sequence:
        return self.make(block)

    def digest(self) -> str:
        return self.described


def _pieces_of(row: dict[str, str]) -> list[dict[str, str]]:
    """The row; of a long text several, since the samples of a block are numbered."""
    if "text" not in row:
        return [row]
    text = row["text"]
    return [{"text": text[start : start + LONGEST]} for start in range(0, len(text), LONGEST)]
