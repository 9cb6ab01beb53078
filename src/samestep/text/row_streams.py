"""Sequences of the rows of shards, made while the model trains: read, checked and tokenized in
blocks, as `prepare_data` of causal_lm does it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samestep.data import readers
from samestep.data.files import File, describe_shards, split_shards
from samestep.data.inputs import Input, RowFormat
from samestep.text import formats, sequences, tokenizing
from samestep.text.lanes import ShardStream

_SEQUENCES = 64  # of a block, at least, which are permuted together
_BYTES_A_TOKEN = 4  # about, where the tokens are not known yet
_MAXIMUM_ROWS = 50_000  # of a block
_LONGEST = 1_000_000  # characters of a document, of which a longer text is several

Block = dict[str, list]  # the columns of stored rows, with their places


class RowStream(ShardStream):
    """Samples of the shards of cfg.data: rows as those of `sequences.Sequences`.

    `folder`: of the prepared data, with the tokenizer.
    """

    def __init__(self, cfg: Any, folder: Path):
        self.cfg, self.folder = cfg, folder
        own = split_shards(cfg)[0]
        self.longest = sequences.longest_piece(cfg)
        self.described = describe_shards(own)
        super().__init__([each.path for each in own], cfg.lanes)

    def choose(self, source: Input, first: dict) -> RowFormat:
        """Choose the format of a shard; raises ValueError for other rows than were prepared."""
        kind, form = formats.choose_format(source, first, self.cfg, self.cfg.rows)
        if kind != self.cfg.rows:
            shard = source.files[0].path
            raise ValueError(
                f"task.data: rows are {self.cfg.rows} elsewhere, and {kind} in {shard}"
            )
        return form

    def blocks(self, shard: str) -> Iterator[Block]:
        """Raises ValueError for a row that cannot be used. (How many are left out is printed of
        those that are prepared: several processes may read a shard, and each epoch again.)"""
        source = Input("data", self.cfg.data, "", [File(shard, "", 0)], choose=self.choose)
        names = [*formats.STORED[self.cfg.rows], "place"]
        full = _SEQUENCES * self.cfg.context_length * _BYTES_A_TOKEN
        block: Block = {name: [] for name in names}
        size = 0
        for stored, _, place in readers.read(source, self.cfg, []):
            rows = [stored]
            if text := stored.get("text"):  # a long one is several: a block's are numbered
                starts = range(0, len(text), _LONGEST)
                rows = [{"text": text[start : start + _LONGEST]} for start in starts]
            for row in rows:
                for name in names:
                    block[name].append(row.get(name, str(place)))
                size += sum(map(len, row.values()))
                if size >= full or len(block["place"]) >= _MAXIMUM_ROWS:
                    yield block
                    block, size = {name: [] for name in names}, 0
        if block["place"]:
            yield block

    def samples(self, block: Block) -> Sequence:
        """The sequences of a block. A last one that is not full is dropped, where documents are not
        packed whole."""
        cfg, length = self.cfg, self.cfg.context_length
        is_packed = formats.is_packed(cfg)
        tokens = tokenizing.tokenize(block, tokenizing.load_tokenizer(self.folder), is_packed)
        if is_packed:
            documents = zip(tokens["input_ids"], tokens["loss_mask"], strict=True)
            found = sequences.pack(documents, cfg, self.longest)
        else:
            ids = np.concatenate(tokens["input_ids"])
            found = {"input_ids": [*ids[: len(ids) // length * length].reshape(-1, length)]}
        return sequences.training_rows(found, length) if found["input_ids"] else []

    def digest(self) -> str:
        return self.described
