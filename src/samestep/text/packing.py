"""Packing: tokenised texts in rows of one length, with as little padding as possible."""

from collections import Counter
from typing import Any

import numpy as np
import torch

from samestep.text.tokenizing import Tokens


def pack_best_fit(
    texts: list[Tokens], length: int, longest: int, overlong: str, dtype: str, totals: Counter
) -> tuple[np.ndarray, int]:
    """Rows of whole texts (rows, 3, length): input_ids, labels, and position_ids to part them; and
    the most texts in a row.

    Positions begin again at 0 with each text. The largest number of the type stands for
    IGNORE_INDEX. A text of more than `longest` inputs is split or truncated, as `overlong`
    says. Pieces without a loss item are left out. `totals` counts both, as long and empty, and as
    used the tokens that are not padding.
    """
    pieces = []
    for tokens, mask in texts:
        totals["long"] += len(tokens) > longest + 1
        starts = range(0, max(len(tokens) - 1, 1), longest)
        for start in starts[: 1 if overlong == "truncate" else None]:
            piece = slice(start, start + longest + 1)  # the last token is a label only
            if np.any(mask[piece][1:]):
                pieces.append((tokens[piece], mask[piece]))
            else:
                totals["empty"] += 1
    rows = assign_rows(pieces, length)
    block, ignored = np.zeros((len(rows), 3, length), dtype), np.iinfo(dtype).max
    block[:, 1] = ignored
    for row, members in zip(block, rows, strict=True):
        first = 0
        for ids, mask in members:
            end = first + len(ids) - 1
            row[0, first:end] = ids[:-1]
            row[1, first:end] = np.where(mask[1:], ids[1:], ignored)
            row[2, first:end] = range(len(ids) - 1)
            first = end
        totals["used"] += first
    return block, max(map(len, rows), default=0)


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


@torch.no_grad()
def check_model_separates_texts(model: Any) -> None:
    """Raises ValueError for a model in which a packed text attends to the text before it."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    rows = [torch.tensor([[*first, 3, 5, 7, 9]]) for first in ([3, 4, 5, 6], [7, 8, 9, 10])]
    inputs = {"position_ids": positions, "use_cache": False}
    try:
        logits = [model.eval()(input_ids=row, **inputs).logits[:, 4:] for row in rows]
        separate = torch.allclose(logits[0], logits[1], atol=1e-5)
    except TypeError:  # its forward takes no position_ids
        separate = False
    if not separate:
        raise ValueError(
            f"task.model_name_or_path: models of the type {model.config.model_type} cannot keep "
            "packed texts apart; take another model, or texts with --task.packing stream"
        )
