"""Sequences of context_length tokens: what a language model trains on.

A prepared row is a sequence: `input_ids`, cut out of documents that follow each other; or whole
documents, with `loss_mask` and the `lengths` of the documents. `file` and `line` are the place of
the first document. Rows to evaluate on also have the `bytes` of text in the loss, and its
`unigram_loss`.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import Features, List, Value

from samestep.data.rows import NUMBERS, write_tables
from samestep.data.views import Rows, cells_of, lengths_of, rows_of, values_of
from samestep.step.inputs import IGNORE_INDEX
from samestep.text import tokenizing

BLOCK = 20_000_000  # tokens of the documents that are packed together, about
MANY = 32  # sequences, below which packing if_many fills none
READ = 100  # documents that are read at once: each may have a megabyte
COLUMNS = ("input_ids", "loss_mask", "lengths", "bytes", "unigram_loss")
Documents = Iterable[tuple[np.ndarray, np.ndarray]]  # token ids, and which are in the loss


# ---- From documents to sequences -----------------------------------------------------------------


def make_sequences(tokens: datasets.DatasetDict, cfg: Any, tokenizer: Any) -> datasets.DatasetDict:
    """The sequences of documents, which are rows of `input_ids`, `source` and perhaps `loss_mask`.

    Of rows that are held out at most cfg.validation_rows sequences are evaluated, evenly spread
    over each source; of cfg.validation_data all. Raises ValueError for a source that fills no
    sequence to train on.
    """
    if cfg.packing == "if_many" and "loss_mask" in tokens["train"].column_names:
        size = int(lengths_of(tokens["train"], "input_ids").sum())
        if size < MANY * cfg.context_length and not cfg.streaming:
            cfg.packing = "none"
    train, rows = (write_sequences(tokens[name], cfg, name) for name in ("train", "validation"))
    sizes = _token_bytes(tokenizer)
    losses = _unigram_losses(train, len(sizes))
    if not (cfg.validation_data or cfg.validation_split):
        rows = _spread(rows, cfg.validation_rows)

    def count_loss(row: dict) -> dict:
        columns = {name: [value] for name, value in row.items()}
        labels = training_rows(columns, cfg.context_length)[0]["labels"][1:]
        counted = labels[labels != IGNORE_INDEX]
        return {"bytes": sizes[counted].sum(), "unigram_loss": losses[counted].sum()}

    sums = {"bytes": Value("int64"), "unigram_loss": Value("float32")}
    features = Features({**rows.features, **sums})
    validation = rows.map(count_loss, features=features)
    return datasets.DatasetDict(train=train, validation=validation)


def _spread(rows: datasets.Dataset, most: int) -> datasets.Dataset:
    """At most so many rows, evenly spread over each source."""
    numbers = values_of(rows, "source")
    sources = np.unique(numbers)
    chosen: list[int] = []
    for source in sources:
        own = np.flatnonzero(numbers == source)
        number = min(max(most // len(sources), 1), len(own))
        chosen += own[np.arange(number) * len(own) // number].tolist()
    if len(chosen) < len(rows):
        text = f"{len(chosen):,} of {len(rows):,} sequences, as task.validation_rows says"
        print(f"Prepared validation: evaluated are {text}", flush=True)
    return rows.select(chosen)


def write_sequences(documents: datasets.Dataset, cfg: Any, name: str) -> datasets.Dataset:
    """The sequences of a split in an Arrow file, source by source. Prints how full they are."""
    is_packed = "loss_mask" in documents.column_names
    features = Features({**documents.features})
    if is_packed:
        features["lengths"] = List(Value("int32"))
    names = getattr(features["source"], "names", None) or ["data"]
    numbers = values_of(documents, "source")

    def tables() -> Iterator[pa.Table]:
        for source in np.unique(numbers).tolist():
            own = documents.select(np.flatnonzero(numbers == source))
            size = 0
            kept = [each for each in NUMBERS if each in features]
            numbers_of = {each: values_of(own, each) for each in kept}
            for found in _packed_blocks(own, cfg) if is_packed else _cut(own, cfg.context_length):
                first = found.pop("first")
                found |= {each: values[first] for each, values in numbers_of.items()}
                size += sum(map(len, found["input_ids"]))
                yield pa.Table.from_pydict(found, features.arrow_schema)
            if is_packed and not size:
                text = f"{names[source]} has no token in the loss; raise it"
                raise ValueError(f"task.context_length: {text}")
            if name == "train" and size < cfg.context_length and not is_packed:
                text = f"which do not fill a sequence of {cfg.context_length}"
                hint = "give more, or a smaller task.context_length"
                text = f"{names[source]} has {size} tokens to train on, {text}; {hint}"
                raise ValueError(f"task.data: {text}")

    rows = write_tables(tables(), features)
    _print_use(documents, rows, cfg, name)
    return rows


def _print_use(documents: Any, rows: Any, cfg: Any, name: str) -> None:
    """Prints the number of sequences, how full they are, and how many documents are too long."""
    size = int(lengths_of(rows, "input_ids").sum())
    text = f"{len(rows):,} sequences, {100 * size / (len(rows) * cfg.context_length):.0f} %"
    text += " of their tokens used"
    if "lengths" in rows.column_names:
        pieces = int(lengths_of(rows, "lengths").sum())
        truncate = cfg.overlong == "truncate"
        lengths = lengths_of(documents, "input_ids")
        if long := int((lengths > longest_piece(cfg)).sum()):
            done = "truncated" if truncate else "split"
            text += f"; {long:,} documents are longer, and {done}"
        if truncate and pieces < len(documents):
            lost = len(documents) - pieces
            text += f": {lost:,} have no token in the loss then, and are left out"
    if name == "train" and cfg.streaming:
        name = "beginnings of shards"
    print(f"Prepared {name}: {text}", flush=True)


def _cut(documents: datasets.Dataset, length: int) -> Iterator[dict[str, Any]]:
    """Sequences of documents that follow each other, and of each the number of the document where
    it begins as `first`; the last may be shorter."""
    ends = np.cumsum(lengths_of(documents, "input_ids"))
    rest: list[np.ndarray] = []
    start = 0  # of the next sequence, in tokens
    for table in documents.with_format("arrow").iter(READ):
        ids = np.concatenate([*rest, table.column("input_ids").combine_chunks().flatten()])
        whole = len(ids) // length * length
        starts = start + np.arange(0, whole, length)
        first = np.searchsorted(ends, starts, side="right")
        yield {"input_ids": [*ids[:whole].reshape(-1, length)], "first": first}
        rest = [ids[whole:]]
        start += whole
    if rest and len(rest[0]) > 1:  # a token alone has no loss
        yield {"input_ids": rest, "first": np.searchsorted(ends, [start], side="right")}


def _packed_blocks(documents: datasets.Dataset, cfg: Any) -> Iterator[dict[str, Any]]:
    """Sequences of whole documents, a block after the other."""
    block: list[tuple[np.ndarray, np.ndarray]] = []
    size = begin = 0
    for table in documents.with_format("arrow").iter(READ):
        ids, masks = (cells_of(table.column(name)) for name in ("input_ids", "loss_mask"))
        block += zip(ids, masks, strict=True)
        size += sum(map(len, ids))
        if size >= BLOCK:
            yield pack(block, cfg, longest_piece(cfg), begin)
            begin += len(block)
            block, size = [], 0
    if block:
        yield pack(block, cfg, longest_piece(cfg), begin)


def longest_piece(cfg: Any) -> int:
    """Maximum number of tokens of a document in a sequence: the model sees no more at once."""
    return min(tokenizing.most_tokens(cfg), cfg.context_length)


def pack(documents: Documents, cfg: Any, longest: int, begin: int = 0) -> dict[str, Any]:
    """The sequences of a block of documents, which are numbered from `begin` on: best-fit
    decreasing; where cfg.packing is none, a piece each. `first` is the number of the document that
    a sequence begins with.

    A document of more than `longest` tokens continues in another sequence, or is truncated, as
    cfg.overlong says. Pieces without a token in the loss are left out.
    """
    pieces = []
    for number, (ids, mask) in enumerate(documents, begin):
        for first in range(0, 1 if cfg.overlong == "truncate" else max(len(ids), 1), longest):
            end = first + longest
            if mask[first + 1 : end].any():  # the first is not in the loss
                pieces.append((ids[first:end], mask[first:end], number))
    rows = [[number] for number in range(len(pieces))]
    if cfg.packing != "none":
        rows = _assign_rows([len(ids) for ids, _, _ in pieces], cfg.context_length)
    lengths = [np.array([len(pieces[i][0]) for i in row], np.int32) for row in rows]
    tokens, masks = ([np.concatenate([pieces[i][n] for i in row]) for row in rows] for n in (0, 1))
    first = np.array([pieces[row[0]][2] for row in rows], int)
    return {"input_ids": tokens, "loss_mask": masks, "lengths": lengths, "first": first}


def _assign_rows(lengths: list[int], room: int) -> list[list[int]]:
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


# ---- The loss of frequencies, and bytes ----------------------------------------------------------


def _unigram_losses(rows: datasets.Dataset, size: int) -> np.ndarray:
    """The loss of each token for a model that knows only how often each is in the loss: float32
    (vocabulary,), in nats."""
    counts = np.ones(size, np.int64)
    for table in rows.with_format("arrow").iter(1000):
        ids = table.column("input_ids").combine_chunks().flatten().to_numpy()
        if "loss_mask" in table.column_names:
            ids = ids[table.column("loss_mask").combine_chunks().flatten().to_numpy() != 0]
        counts += np.bincount(ids, minlength=size)
    return -np.log(counts / counts.sum()).astype(np.float32)


def _token_bytes(tokenizer: Any) -> np.ndarray:
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


# ---- View ----------------------------------------------------------------------------------------


class Sequences(Rows):
    """Sequences of `length` tokens: rows {name: array (length,)}, int64.

    input_ids; labels, aligned with them, -100 where a token does not count; position_ids of packed
    documents, which begin again at 0 with each. Rows to evaluate on also have the sums `bytes` and
    `unigram_loss` of their tokens in the loss.
    """

    sizes = None  # type: ignore[assignment]  # all are padded to one length

    def __init__(self, dataset: Any, cfg: Any):
        names = [name for name in COLUMNS if name in dataset.column_names]
        super().__init__(dataset, names, [], cfg)
        self.length = cfg.context_length
        if cfg.packing == "none":
            self.length = int(lengths_of(dataset, "input_ids").max())

    def __getitems__(self, places: list[int]) -> list[dict[str, Any]]:
        return training_rows(self.columns(places), self.length)


def training_rows(columns: dict[str, list], length: int) -> list[dict[str, Any]]:
    """The rows that are trained on, of columns of prepared ones, padded to the length. The first
    token of each packed document is not in the loss."""

    def padded(values: np.ndarray, padding: int) -> np.ndarray:
        table = np.full((len(sizes), length), padding)
        table[is_inside] = values
        return table

    sizes = np.array([len(each) for each in columns["input_ids"]])
    is_inside = np.arange(length) < sizes[:, None]
    ids = np.concatenate(columns["input_ids"]).astype(np.int64)
    labels = ids
    found = {"input_ids": padded(ids, 0)}
    if "lengths" in columns:
        lengths = np.concatenate(columns["lengths"])
        begins = np.cumsum(lengths) - lengths
        is_counted = np.concatenate(columns["loss_mask"]) != 0
        is_counted[begins] = False
        labels = np.where(is_counted, ids, IGNORE_INDEX)
        found["position_ids"] = padded(np.arange(len(ids)) - np.repeat(begins, lengths), 0)
    found["labels"] = padded(labels, IGNORE_INDEX)
    for name in {"bytes", "unigram_loss"} & {*columns}:
        found[name] = np.array(columns[name])
    return rows_of(found)
