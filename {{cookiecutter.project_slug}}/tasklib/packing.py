"""Packing: tokenised texts in rows of one length, as many tokens and as little padding as possible.

Both ways give the columns of the rows, int arrays (rows, length): `input_ids`, and `labels`, the
token after each input or IGNORE_INDEX. `used`, (rows,), counts the tokens that are not padding.
"""

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasklib.messages import one_line
from tasklib.text import Tokens

IGNORE_INDEX = -100  # the label that cross entropy leaves out


def pack_stream(texts: list[Tokens], length: int, source: str) -> dict[str, np.ndarray]:
    """Rows filled with one text after the other, cut where a row ends; only the last has padding.

    Raises ValueError where all texts together do not fill a row; `source` names them there.
    """
    tokens = array("i")
    for ids, _ in texts:  # one token may both end a text and begin the next
        tokens.extend(ids[1:] if tokens and ids[0] == tokens[-1] else ids)
    if len(tokens) <= length:
        raise ValueError(
            f"task.data: {one_line(source, 100)} has {len(tokens)} tokens to train or evaluate on, "
            f"which do not fill a row of {length + 1}; add text, or lower task.context_length"
        )
    tokens.extend([IGNORE_INDEX] * ((1 - len(tokens)) % length))
    flat = np.array(tokens)
    inputs, labels = flat[:-1].reshape(-1, length), flat[1:].reshape(-1, length)
    return {"input_ids": inputs.clip(0), "labels": labels, "used": (labels != IGNORE_INDEX).sum(1)}


def pack_best_fit(
    texts: list[Tokens], length: int, longest: int, too_long: str, part: str
) -> dict[str, np.ndarray]:
    """Rows of whole texts, which `position_ids` keep apart: they begin again at 0 with each text.

    A text of more than `longest` inputs is split, or loses its end where `too_long` is cut. Pieces
    without a loss term are left out. Prints the number of both for this `part` of the data; raises
    ValueError where nothing is left.
    """
    pieces: list[Tokens] = []
    long = empty = 0
    for tokens, mask in texts:
        long += len(tokens) > longest + 1
        starts = range(0, max(len(tokens) - 1, 1), longest)
        for start in starts[: 1 if too_long == "cut" else None]:
            piece = slice(start, start + longest + 1)  # the last token is a label only
            if any(mask[piece][1:]):
                pieces.append((tokens[piece], mask[piece]))
            else:
                empty += 1
    if long or empty:
        print(
            f"Prepared {part}: {long:,} of {len(texts):,} texts are longer than {longest} tokens "
            f"(the most that a row or the model holds) and were {too_long}"
            + f"; {empty:,} pieces without a loss term were left out"
            * bool(empty),
            flush=True,
        )
    if not pieces:
        raise ValueError(
            f"task.context_length: no answer of {part} begins within {longest} tokens; raise it, "
            "or give --task.too_long split"
        )
    rows = assign_rows(pieces, length)
    columns = {name: np.zeros((len(rows), length), np.int32) for name in ("input_ids", "labels")}
    columns["position_ids"] = np.zeros_like(columns["labels"])
    columns["labels"][:] = IGNORE_INDEX
    columns["used"] = np.zeros(len(rows), np.int64)
    for row, members in enumerate(rows):
        for tokens, mask in members:
            ids, first = np.array(tokens), columns["used"][row]
            place = (row, slice(first, first + len(ids) - 1))
            columns["input_ids"][place] = ids[:-1]
            columns["position_ids"][place] = range(len(ids) - 1)
            columns["labels"][place] = np.where(np.array(mask)[1:], ids[1:], IGNORE_INDEX)
            columns["used"][row] += len(ids) - 1
    return columns


def assign_rows(pieces: list[Tokens], length: int) -> list[list[Tokens]]:
    """Best-fit decreasing: longest first, each into the row with the least room that holds it."""
    rows: list[list[Tokens]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set where a row has room for r more inputs
    # The sort is stable, and the result therefore the same on every machine.
    for piece in sorted(pieces, key=lambda piece: -len(piece[0])):
        need = len(piece[0]) - 1
        fitting = rooms >> need
        if fitting:
            room = need + (fitting & -fitting).bit_length() - 1  # the lowest bit
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        by_room.setdefault(room - need, []).append(row)
        rooms |= 1 << (room - need)
    return rows


def save_most_texts(parts: dict[str, dict[str, np.ndarray]], folder: Path) -> None:
    """Writes down the largest number of texts in a row of any part; 0: rows of a stream."""
    most = 0
    for columns in parts.values():
        if "position_ids" in columns:
            places = np.arange(columns["labels"].shape[1])
            begins = (columns["position_ids"] == 0) & (places < columns["used"][:, None])
            most = max(most, int(begins.sum(1).max()))
    (folder / "most_texts.json").write_text(json.dumps(most), encoding="utf-8")


def load_most_texts(folder: Path) -> int:
    """The largest number of texts in a row of packed data; 0: rows of a stream."""
    return json.loads((folder / "most_texts.json").read_text(encoding="utf-8"))


@torch.no_grad()
def check_model_separates_texts(model: Any) -> None:
    """Raises ValueError for a model in which a packed text attends to the text before it."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    rows = [torch.tensor([[*first, 3, 5, 7, 9]]) for first in ([3, 4, 5, 6], [7, 8, 9, 10])]
    inputs = {"position_ids": positions, "use_cache": False}
    try:
        logits = [model.eval()(input_ids=row, **inputs).logits[:, 4:] for row in rows]
        separate = torch.allclose(*logits, atol=1e-5)
    except TypeError:  # its forward takes no position_ids
        separate = False
    if not separate:
        raise ValueError(
            f"task.model_name_or_path: models of the type {model.config.model_type} cannot keep "
            "packed texts apart; take another model, or texts with --task.packing stream"
        )
