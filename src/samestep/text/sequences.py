"""Sequences of context_length tokens: documents one after the other, or packed whole.

Documents are rows of token ids, `input_ids`, with `loss_mask` where some tokens do not count in the
loss. Packed, they are sorted so that each sequence is a run of neighbours: `first` marks where one
begins. The view reads Arrow's buffers.
"""

import re
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch

from samestep.core.inputs import IGNORE_INDEX, Source
from samestep.data import columns
from samestep.data.sources import split_data
from samestep.data.views import source_numbers
from samestep.text import tokenizing

BLOCK = 50_000  # documents that are packed together, whatever the number of processes


# ---- Packing -------------------------------------------------------------------------------------


def pack(tokens: Any, cfg: Any, name: str) -> Any:
    """The documents of a datasets.Dataset in the order of their sequences: best-fit decreasing.

    A document of more tokens than a sequence has, or than the model sees at once, continues in
    another sequence, or is truncated, as cfg.overlong says. Pieces without a token in the loss are
    left out. One process packs a block at a time. `name`: of the split, for a line about it.
    """
    packed = []
    tokens = columns.in_order(tokens)
    length = cfg.context_length
    longest, truncate = min(tokenizing.most_tokens(cfg), length), cfg.overlong == "truncate"
    features = datasets.Features({**tokens.features, "first": datasets.Value("bool")})
    numbers = source_numbers(tokens)
    for source, title in enumerate(names_of(tokens)):
        own = np.flatnonzero(numbers == source)
        if len(own):
            part = tokens.select(range(own[0], own[-1] + 1)).with_format("arrow")
            packed.append(
                part.map(
                    lambda table: pack_block(table, length, longest, truncate),
                    batched=True,
                    batch_size=BLOCK,
                    features=features,
                ).with_format(None)
            )
            if not len(packed[-1]):
                raise ValueError(f"task.context_length: {title} has no token in the loss; raise it")
    found = datasets.concatenate_datasets(packed)
    long = int((columns.ListColumn(tokens, "input_ids").lengths > longest).sum())
    size = int(columns.ListColumn(found, "input_ids").lengths.sum())
    rows = int(found.data.column("first").to_numpy().sum())
    used = f"{100 * size / max(rows * length, 1):.0f} % of their tokens used"
    done = "truncated" if truncate else "split"
    cut = f"; {long:,} documents are longer, and {done}" if long else ""
    if truncate and len(found) < len(tokens):
        cut += f": {len(tokens) - len(found):,} have no token in the loss then, and are left out"
    if name == "train" and cfg.streaming:
        name = "beginnings of shards"
    print(f"Prepared {name}: {rows:,} sequences, {used}{cut}", flush=True)
    return found


def pack_block(table: pa.Table, length: int, longest: int, truncate: bool) -> pa.Table:
    """A block of documents as their pieces, in the order of the sequences that they fill."""
    table = table.combine_chunks()
    ids, masks = (table.column(name).chunk(0) for name in ("input_ids", "loss_mask"))
    starts = np.concatenate([[0], np.cumsum(ids.value_lengths().to_numpy())])
    values, counted = ids.flatten().to_numpy(), masks.flatten().to_numpy()
    pieces = []
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        for first in range(start, start + 1 if truncate else max(stop, start + 1), longest):
            end = min(first + longest, stop)
            if counted[first + 1 : end].any():  # the first is not in the loss
                pieces.append((first, end))
    rows = assign_rows([end - first for first, end in pieces], length)
    order = [pieces[i] for row in rows for i in row]
    offsets = np.cumsum([0, *(end - first for first, end in order)]).astype(np.int32)

    def lists(flat: np.ndarray) -> pa.Array:
        parts = [flat[first:end] for first, end in order]
        return pa.ListArray.from_arrays(offsets, np.concatenate(parts or [flat[:0]]))

    begins = [number == 0 for row in rows for number in range(len(row))]
    source = table.column("source")[0].as_py()
    names = pa.array([source] * len(order), pa.int64())
    found = {"input_ids": lists(values), "loss_mask": lists(counted), "source": names}
    return pa.table({**found, "first": pa.array(begins, pa.bool_())}).select(
        [*table.column_names, "first"]
    )


def pack_alone(tokens: dict[str, list], cfg: Any, longest: int) -> Any:
    """The sequences of these documents, columns as those of formats.tokenize; there may be none."""
    truncate = cfg.overlong == "truncate"
    packed = pack_block(pa.table(tokens), cfg.context_length, longest, truncate)
    return Sequences(datasets.Dataset(packed), cfg) if packed.num_rows else []


def assign_rows(lengths: list[int], room: int) -> list[list[int]]:
    """Best-fit decreasing: longest first, each into the row with the least room that holds it.

    Gives the numbers of the pieces in each row.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set where a row has room for r more tokens
    # The sort is stable, and the result therefore the same on every machine.
    for piece in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        need = lengths[piece]
        fitting = rooms >> need
        if fitting:
            left = need + (fitting & -fitting).bit_length() - 1  # the lowest bit
            row = by_room[left].pop()
            if not by_room[left]:
                rooms ^= 1 << left
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(piece)
        by_room.setdefault(left - need, []).append(row)
        rooms |= 1 << (left - need)
    return rows


# ---- View ----------------------------------------------------------------------------------------


class Sequences(torch.utils.data.Dataset):
    """Sequences of `length` tokens, source by source: rows {name: array (length,)}, int64.

    input_ids; labels, aligned with them, -100 where a token does not count; position_ids of packed
    documents, which begin again at 0 with each. With `vocabulary` (a row for each token: `bytes` of
    text, and `unigram_loss` in nats) a row also has their sums over the tokens in the loss.
    Sources and their weights are those of cfg.data.
    """

    def __init__(self, tokens: Any, cfg: Any, vocabulary: Any = None):
        self.arguments = (tokens, cfg, vocabulary)
        self.tokens, self.length = columns.in_order(tokens), cfg.context_length
        self.vocabulary = vocabulary
        weights = {each.name: each.weight for each in split_data(cfg.data)}
        self.ids = columns.ListColumn(self.tokens, "input_ids")
        self.is_packed = "first" in tokens.column_names
        self.masks = columns.ListColumn(self.tokens, "loss_mask") if self.is_packed else None
        numbers = source_numbers(self.tokens)
        self.sources: list[Source] = []
        self.bounds: list[np.ndarray] = []  # of each source: where sequences begin, and an end
        for source, name in enumerate(names_of(tokens)):
            own = np.flatnonzero(numbers == source)
            if not len(own):  # of validation rows alone
                continue
            self.check_size(name, own)
            bounds = self.find_bounds(own)
            self.bounds.append(bounds)
            self.sources.append(Source(name, len(bounds) - 1, weights.get(name, 1)))
        self.ends = np.cumsum([len(each) - 1 for each in self.bounds]).tolist()
        self.tables = {}
        if vocabulary is not None:
            read = {name: vocabulary.data.column(name) for name in ("bytes", "unigram_loss")}
            self.tables = {name: values.to_numpy() for name, values in read.items()}

    def check_size(self, name: str, documents: np.ndarray) -> None:
        """Raises ValueError for a source whose tokens fill no sequence to train on."""
        size = int(self.ids.starts[documents[-1] + 1] - self.ids.starts[documents[0]])
        if not self.is_packed and self.vocabulary is None and size < self.length:
            text = f"which do not fill a sequence of {self.length}"
            hint = "give more, or a smaller task.context_length"
            raise ValueError(f"task.data: {name} has {size} tokens to train on, {text}; {hint}")

    def find_bounds(self, documents: np.ndarray) -> np.ndarray:
        """Where the sequences of these neighbours begin, and where the last ends: places of tokens,
        or of packed documents."""
        first, last = int(documents[0]), int(documents[-1]) + 1
        if self.is_packed:
            begins = self.tokens.data.column("first").to_numpy()[first:last]
            return np.append(np.flatnonzero(begins) + first, last)
        start, stop = int(self.ids.starts[first]), int(self.ids.starts[last])
        bounds = np.arange(start, stop, self.length)
        if len(bounds) and stop - bounds[-1] < 2:  # a token alone has no loss
            return bounds
        return np.append(bounds, stop)

    def __reduce__(self):  # pickled, a memory map would become a copy
        return Sequences, self.arguments

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        number = next(n for n, end in enumerate(self.ends) if i < end)
        place = i - (self.ends[number] - len(self.bounds[number]) + 1)
        start, stop = self.bounds[number][place : place + 2].tolist()
        row = self.packed_row(start, stop) if self.is_packed else self.plain_row(start, stop)
        if self.tables:
            counted = row["labels"][1:][row["labels"][1:] != IGNORE_INDEX]
            row |= {name: table[counted].sum() for name, table in self.tables.items()}
        return row

    def plain_row(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """The tokens from one place to another, padded to the length."""
        ids = self.ids.read(start, stop).astype(np.int64)
        labels = ids.copy()
        if len(ids) < self.length:
            room = (0, self.length - len(ids))
            ids = np.pad(ids, room)
            labels = np.pad(labels, room, constant_values=IGNORE_INDEX)
        return {"input_ids": ids, "labels": labels}

    def packed_row(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """These documents, one after the other, padded to the length. The first token of each is
        not in the loss."""
        places = self.ids.starts[start : stop + 1]
        lengths, size = np.diff(places), int(places[-1] - places[0])
        row = self.plain_row(int(places[0]), int(places[-1]))
        row["labels"][:size][self.masks.read(int(places[0]), int(places[-1])) == 0] = IGNORE_INDEX
        begins = places[:-1] - places[0]
        row["labels"][begins] = IGNORE_INDEX
        row["position_ids"] = np.zeros(self.length, np.int64)
        row["position_ids"][:size] = np.arange(size) - np.repeat(begins, lengths)
        return row

    def digest(self) -> str:
        """A text for all sequences: tokens by their values, and how they are cut."""
        shape = [self.length, self.is_packed, [len(each) for each in self.bounds]]
        return f"{columns.digest(self.tokens)} {shape}"


def names_of(tokens: Any) -> list[str]:
    """The names of the sources; rows of an owner's own dataset have one."""
    return getattr(tokens.features["source"], "names", None) or ["data"]


def vocabulary_table(tokens: Any, tokenizer: Any) -> Any:
    """A datasets.Dataset with a row for each token of the vocabulary.

    bytes            of text that it stands for
    unigram_loss     in nats: the loss of a model that knows only the frequencies of tokens
    """
    tokens, sizes = columns.in_order(tokens), token_bytes(tokenizer)
    counts = np.ones(len(sizes), np.int64)
    ids = columns.ListColumn(tokens, "input_ids")
    masked = "loss_mask" in tokens.column_names
    masks = columns.ListColumn(tokens, "loss_mask") if masked else None
    for number, chunk in enumerate(ids.chunks):
        if masks:
            start, stop = ids.bounds[number], ids.bounds[number + 1]
            chunk = chunk[masks.read(start, stop) != 0]
        counts += np.bincount(chunk, minlength=len(counts))
    losses = -np.log(counts / counts.sum()).astype(np.float32)
    return datasets.Dataset.from_dict({"bytes": sizes, "unigram_loss": losses})


def token_bytes(tokenizer: Any) -> np.ndarray:
    """Bytes of text that each token stands for, 0 for special ones: int64 (vocabulary,)."""
    sizes = np.zeros(len(tokenizer), np.int64)
    byte_level = "ByteLevel" in tokenizer.backend_tokenizer.to_str().partition('"decoder"')[2][:500]
    for token, i in tokenizer.get_vocab().items():
        if byte_level:
            sizes[i] = len(token)  # a character stands for a byte
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):
            sizes[i] = 1
        else:
            sizes[i] = len(token.replace("▁", " ").encode())  # SentencePiece writes spaces so
    sizes[tokenizer.all_special_ids] = 0
    return sizes
