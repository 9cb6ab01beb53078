"""Pairs of a source and a target text: read, checked, split, tokenised; targets generated."""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.base.console import one_line
from samestep.base.fields import check_fields
from samestep.data import sources
from samestep.data.cache import once_per_folder
from samestep.data.tables import TABLES, Columns, Row
from samestep.models import pretrained
from samestep.text import row_files, tokenizing, units
from samestep.text.row_files import Input, RowReader

PAD, END = "<pad>", "</s>"  # special tokens of a new vocabulary; T5 starts targets with PAD
BLOCK = 1000  # texts in one call of a tokenizer, which bounds its memory


def build(
    cfg: Any,
    folder: Path,
    columns: Columns,
    shipped: dict[str, Callable[[], Iterator[Row]]],
) -> dict[str, Any]:
    """Fills the folder of prepared data, or goes on filling it; what `cache.prepare` wants.

    `columns`: those of "source" and "target". `shipped` gives the rows of data that the task brings
    along. Validation rows keep their texts, as bytes, which the report compares with generated
    ones. Raises ValueError for rows that cannot be used.
    """
    train, given, held = scan_pairs(cfg, folder, columns, shipped)
    number, evaluated = row_files.count_rows(train, given, held)
    data = one_line(cfg.data, 100)
    size = f"{number:,} rows of {data} to train and {evaluated:,} to evaluate on"
    print(f"Preparing data: {size}", flush=True)
    if not cfg.model_name_or_path and not (folder / tokenizing.FILE).exists():
        texts, special = row_files.read_sample(folder, held), [PAD, END]
        tokenizing.learn_vocabulary(texts, cfg.vocab_size, folder, first=special, end=END)
    tokenizer = load_tokenizer(cfg, folder)
    dtype = row_files.token_dtype(tokenizer)
    limits = {"source": cfg.max_source_length, "target": cfg.max_target_length}

    def encode(rows: list[Row], part: str) -> tuple[row_files.Arrays, dict[str, int]]:
        arrays: row_files.Arrays = {}
        cut: dict[str, int] = {}
        for (role, limit), name in zip(limits.items(), ("input_ids", "labels"), strict=True):
            prefix = cfg.source_prefix if role == "source" else ""
            texts = [prefix + row[role] for row, _ in rows]
            ids, cut[name] = tokenize_texts(texts, role, limit, tokenizer)
            arrays[name] = [each.astype(dtype) for each in ids]
            if part == "validation":
                arrays[role] = [np.frombuffer(row[role].encode(), np.uint8) for row, _ in rows]
        lengths = zip(arrays["input_ids"], arrays["labels"], strict=True)
        arrays["length"] = np.array([sum(map(len, both)) for both in lengths], np.int32)
        return arrays, cut

    done = row_files.write(folder, train, given, held, encode)
    for part in ("train", "validation"):
        described = []
        for (role, limit), name in zip(limits.items(), ("input_ids", "labels"), strict=True):
            size, cut = row_files.describe_lengths(done, name, [part])
            described.append(f"{role}s of {size}" + f" ({cut:,} cut to {limit:,})" * bool(cut))
        print(f"Prepared {part}: {'; '.join(described)}", flush=True)
    return row_files.finish(folder, done, {})


def scan_pairs(
    cfg: Any, folder: Path, columns: Columns, shipped: dict[str, Callable[[], Iterator[Row]]]
) -> tuple[list[Input], list[Input], set[int]]:
    """The first pass over training rows and, if they are given, validation rows; the hashes of
    those held out."""
    texts = None if cfg.model_name_or_path else dict.values
    key: Callable[[dict], str] = lambda row: row["source"]  # noqa: E731
    readers = []
    for each, own in sources.by_source(cfg, TABLES):
        rows = list(shipped[each.data]()) if each.data in shipped else None
        sources.print_skipped_files(own, TABLES, rows is not None)
        readers.append(
            RowReader(each.name, own, columns, TABLES, check_pair, key, texts, None, rows)
        )
    if any(reader.fields[1:] for reader in readers):  # else rows with equal sources stay together
        readers = [each._replace(key=lambda row: "\0".join(row.values())) for each in readers]
    train = row_files.scan(readers, folder, "train")
    given = row_files.scan(readers, folder, "validation")
    if given:
        row_files.say_overlap(train, given)
        return train, given, set()
    held: set[int] = set()
    for _, reader, notes in train:
        most = max(1, cfg.validation_rows // len(train))
        own = units.hold_out(notes, cfg.validation_fraction, most)
        if not own:
            data = one_line(reader.cfg.data, 100)
            raise ValueError(f"task.data: all sources of {data} are equal; add others")
        held |= own
    return train, [], held


def check_pair(row: dict) -> None:
    """Raises ValueError for a row whose source or target is missing, empty, or not text."""
    for role, value in row.items():
        if value is None or value != value or not str(value).strip():  # tables have NaN for null
            raise sources.IncompleteRow(f"the {role} is empty")
        if not isinstance(value, str):
            raise ValueError(f"the {role} is {one_line(repr(value), 60)} but must be text")


def tokenize_texts(
    texts: list[str], role: str, limit: int, tokenizer: Any
) -> tuple[list[np.ndarray], int]:
    """Token ids of sources or targets, int32, and how many of them were cut.

    A text of more than `limit` tokens loses its end, but not the special tokens after it.
    """
    name = {"source": "text", "target": "text_target"}[role]  # some tokenizers tell them apart
    rows, cut = [], 0
    for start in range(0, len(texts), BLOCK):
        block = texts[start : start + BLOCK]
        encoded = tokenizer(**{name: block}, verbose=False).input_ids
        for each, ids in zip(block, encoded, strict=True):
            if len(ids) > limit:
                ids = tokenizer(**{name: each}, truncation=True, max_length=limit).input_ids
                cut += 1
            rows.append(np.array(ids, np.int32))
    return rows, cut


def check_model(cfg: Any) -> None:
    """Raises ValueError unless a pretrained model is an encoder-decoder that sees all the text."""
    if not cfg.model_name_or_path:
        return
    from transformers import AutoConfig

    config, name = pretrained.load(AutoConfig, cfg), one_line(cfg.model_name_or_path, 100)
    if not getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"task.model_name_or_path: {name} is not an encoder-decoder; give another")
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    expected = f"at most {limit}, the positions of {name}"
    for length in ("max_source_length", "max_target_length"):
        check_fields(cfg, [(length, getattr(cfg, length) <= limit, expected)])
    load_tokenizer(cfg, None)


@once_per_folder
def load_tokenizer(cfg: Any, folder: Path | None) -> Any:
    """The tokenizer of the pretrained model, or the one in the folder of prepared data."""
    names = ["input_ids", "attention_mask"]
    ends = {"pad_token": PAD, "eos_token": END, "model_input_names": names}
    tokenizer = tokenizing.load_tokenizer(cfg, folder, ("eos_token",), **ends)
    tokenizer.model_max_length = cfg.max_source_length  # samestep predict cuts sources there
    return tokenizer


def check_targets(model: Any, cfg: Any) -> None:
    """Raises ValueError for an encoder-decoder that does not say how a target starts."""
    start = getattr(model.config, "decoder_start_token_id", None)
    if start is None or not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        name = one_line(cfg.model_name_or_path, 100)
        raise ValueError(
            f"task.model_name_or_path: {name}, a {model.config.model_type}, does not say with "
            "which token a target starts; give another model"
        )


def set_generation(model: Any, cfg: Any) -> None:
    """Writes the search of cfg and the prefix of sources into the configs of the exported model."""
    model.config.source_prefix = cfg.source_prefix  # for samestep predict
    settings = model.generation_config
    settings.update(num_beams=cfg.num_beams, max_new_tokens=cfg.max_target_length, max_length=None)
    if cfg.num_beams == 1:  # transformers does not save settings of a search that is not used
        settings.update(early_stopping=None, length_penalty=None)


@torch.no_grad()
def generate_texts(model: Any, batches: Iterable[dict], tokenizer: Any) -> list[str]:
    """The text that the model generates for each row, by the search of its generation_config.

    A batch has input_ids and attention_mask, int64 (B, T).
    """
    texts: list[str] = []
    for batch in batches:
        inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
        # Sampling would use up the random numbers of the run.
        tokens = model.generate(**inputs, do_sample=False)
        texts += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return texts
