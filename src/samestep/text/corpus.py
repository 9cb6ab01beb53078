"""Texts for a language model, prepared in bounded memory on all cores: see units.py.

The first pass checks the rows. Then come the rows that are held out, the vocabulary of a new model,
and the second pass, which writes the tokens of each unit into files: see token_rows.py.
"""

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from samestep.base.console import one_line
from samestep.base.files import replace_text
from samestep.data import demo_data, sources, tables
from samestep.data.cache import once_per_folder
from samestep.data.tables import Span
from samestep.text import chats, packing, row_formats, tokenizing, units
from samestep.text.row_formats import OPTIONAL, RowFormat
from samestep.text.unit_files import UnitWriter, finish_folder
from samestep.text.units import PARTS, Batch, Input, RowKind

END_OF_TEXT = "<|endoftext|>"  # of a new model
BYTES_A_TOKEN = 6  # at most, to hold out enough where the tokens are not known yet


# ---- Models --------------------------------------------------------------------------------------


@once_per_folder
def load_tokenizer(cfg: Any, folder: Path) -> Any:
    """The tokenizer of a language model, with a chat template where rows are chats."""
    ends = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    tokenizer = tokenizing.load_tokenizer(cfg, folder, model_max_length=cfg.context_length, **ends)
    if cfg.rows == "chat" or cfg.chat_template:
        own = tokenizer.chat_template or chats.CHAT_TEMPLATE
        tokenizer.chat_template = chats.read_template(cfg) if cfg.chat_template else own
    return tokenizer


def test_inputs(rows: list[dict], cfg: Any, data: Path) -> list[tuple[Any, dict]]:
    """For the check of the export: the beginnings of texts, or chats."""
    tokenizer, length = load_tokenizer(cfg, data), min(cfg.context_length // 2, 32)
    starts = [row["input_ids"][:length] for row in rows]
    texts = [tokenizer.decode(each, skip_special_tokens=True) for each in starts]
    texts, longest = [cfg.sample_prompt, *texts], max_text_length(cfg, True)
    asked = row_formats.ask(texts, cfg.sample_prompt, cfg.rows == "chat", tokenizer)
    return [each for each in asked if 0 < len(each[1]["input_ids"][0]) < longest]


def max_text_length(cfg: Any, best_fit: bool) -> int:
    """Tokens of a text that the model sees at once, at most context_length.

    Raises ValueError for rows of one text that are longer than a model to start from can see.
    """
    tokenizing.check_lengths(cfg, *(() if best_fit else ("context_length",)))
    return min(tokenizing.most_tokens(cfg), cfg.context_length)


# ---- Build ---------------------------------------------------------------------------------------


def recognize(cfg: Any) -> dict[str, RowFormat]:
    """What the rows of each source of cfg.data are.

    Replaces `rows` auto by their kind. Raises ValueError if the sources have rows of more kinds.
    """
    own = [each for _, each in sources.by_source(cfg, row_formats.endings_of(cfg))]
    formats = {each.data: row_formats.recognize_format(each) for each in own}
    kinds = {row_format.kind: data for data, row_format in formats.items()}
    if len(kinds) > 1:
        found = " and ".join(f"{kind} in {one_line(name, 60)}" for kind, name in kinds.items())
        raise ValueError(f"task.data: rows are {found}; give sources with rows of one kind")
    (cfg.rows,) = kinds
    return formats


def build(
    cfg: Any, formats: dict[str, RowFormat], folder: Path, longest: int, best_fit: bool
) -> dict[str, Any]:
    """Fills the folder of prepared data, or goes on filling it; what `cache.prepare` wants.

    `longest`: tokens of a text that the model sees.
    """
    most = BYTES_A_TOKEN * cfg.context_length * cfg.validation_rows
    kind = RowKind(
        row_formats.endings_of(cfg),
        lambda own: formats[own.data].columns,
        row_formats.row_check(cfg),
        row_formats.key_of,
        row_formats.texts_of,
        nothing_held="all rows of {data} are equal; add others, to hold some out",
        shipped={n: partial(demo_data.text_rows, n, cfg.rows) for n in demo_data.TEXTS},
        optional=OPTIONAL,
        long_texts=cfg.rows == "text",
        most_bytes=most,
    )
    inputs, held = units.scan(cfg, folder, kind)
    for source in inputs:
        print(row_formats.describe_input(source, formats[source.cfg.data]), flush=True)
    if kept := tokenizing.vocabulary_path(cfg):
        replace_text(folder / tokenizing.FILE, kept.read_text(encoding="utf-8"))
    units.learn_vocabulary(cfg, folder, inputs, held, last=[END_OF_TEXT])
    tokenizer = load_tokenizer(cfg, folder)
    # The smallest type for token ids, for positions in a row, and for IGNORE_INDEX.
    dtype = "<u2" if len(tokenizer) < 2**16 and cfg.context_length <= 2**16 else "<u4"
    how = (cfg.rows, cfg.context_length, longest, cfg.overlong, best_fit, dtype)
    maker = RowMaker(tokenizer, *how)
    train, validation = units.parts_of(inputs)
    for each in [] if validation else train:
        if each.is_single_text:
            cut_single_text(each, min(cfg.validation_fraction, most / max(each.size, 1)))
    done = units.write(folder, inputs, held, maker.write_unit)
    return finish(inputs, done, folder, maker, max(1, cfg.validation_rows // len(train)))


def cut_single_text(source: Input, held: float) -> None:
    """Holds out the end of a single text, about this share of it.

    A long text in several pieces is cut here: the pieces after the place are held out.
    """
    pieces = [piece for unit in source.units for piece in unit]
    if pieces[0].text is None:
        source.share = 1 - held
        return
    place = int((1 - held) * source.size)
    for piece in pieces[1:]:  # no part may be so short that no place to cut is found in it
        if abs(piece.span.start - place) < 2 * tables.SEARCHED:
            place = piece.span.start
    source.units.clear()
    for piece in pieces:
        start, stop, lines = piece.span
        inside = start < place and (stop is None or place < stop)
        spans = [Span(start, place, lines), Span(place, stop)] if inside else [piece.span]
        for span in spans:
            size, is_held = piece.size // len(spans), span.start >= place
            source.units.append([piece._replace(span=span, size=size, is_held=is_held)])


# ---- A unit --------------------------------------------------------------------------------------


class RowMaker(NamedTuple):
    """How rows become tokens."""

    tokenizer: Any
    kind: str  # of the rows
    length: int  # tokens in a row
    longest: int  # tokens of a text that the model sees
    overlong: str
    best_fit: bool
    dtype: str

    @property
    def start(self) -> list[int]:
        """Tokens before a text: begin-of-text, or end-of-text where there is none."""
        return tokenizing.begin_tokens(self.tokenizer) or [self.tokenizer.eos_token_id]

    @property
    def shares_ends(self) -> bool:
        """Whether one token of a stream both ends a text and begins the next."""
        return not self.best_fit and self.start == [self.tokenizer.eos_token_id]

    def write_unit(self, out: UnitWriter, source: Input, batches: Iterator[Batch]) -> dict:
        """Tokenises the rows of a unit into files: .tokens to train on, .held those held out."""
        frequencies = np.zeros(len(self.tokenizer), np.int64)
        totals, most_texts, questions = Counter(), 0, []
        texts, waiting = [], 0

        def write(values: np.ndarray, labels: np.ndarray) -> None:
            out.append("tokens", values)
            totals["tokens"] += values.size
            frequencies[:] += np.bincount(labels, minlength=len(frequencies))

        def write_packed() -> int:
            block, most = self.pack(texts, totals)
            labels = block[:, 1].ravel()
            write(block, labels[labels != np.iinfo(self.dtype).max])
            return max(most, most_texts)

        for batch in batches:
            totals["held_texts" if batch.is_held else "texts"] += len(batch.rows) * batch.begins
            tokens = self.tokenize(batch)
            if batch.is_held:
                wanted = 2 * (self.kind != "text") - len(questions)
                questions += [
                    row_formats.question_tokens(row, self.kind, self.tokenizer)
                    for row, _ in batch.rows[: max(wanted, 0)]
                ]
                for ids, mask in tokens:
                    totals["held"] += len(ids)
                    out.append("held", ids.astype(self.dtype))
                    if self.best_fit:
                        out.append("held-mask", mask)
                        out.append("held-sizes", np.array([len(ids)], "<i8"))
            elif self.best_fit:
                texts, waiting = texts + tokens, waiting + batch.size
                if waiting > 2 * units.LARGEST:  # of .parquet, a group of rows may have any size
                    most_texts = write_packed()
                    texts, waiting = [], 0
            else:
                values = np.concatenate([ids for ids, _ in tokens]).astype(self.dtype)
                write(values, values)
        if texts:
            most_texts = write_packed()
        seen = np.flatnonzero(frequencies)
        out.append("counts", np.stack([seen, frequencies[seen]]).astype("<u4"))
        return {"totals": totals, "most_texts": most_texts, "questions": questions}

    def tokenize(self, batch: Batch) -> list[tokenizing.Tokens]:
        """Token ids and loss masks of the rows; for parts of a text, see `tables.find_cut`."""
        if self.kind != "text":
            return row_formats.tokenize_rows(batch.rows, self.kind, self.tokenizer)
        start = [] if self.shares_ends or not batch.begins else self.start
        end = [self.tokenizer.eos_token_id] if batch.ends else []
        texts = [row["text"] for row, _ in batch.rows]
        before = "" if batch.begins else "a" if texts[0][:1].isspace() else "\n"
        after = "" if batch.ends else "a" if texts[0][-1:].isspace() else "\na"
        found = tokenizing.tokenize_texts(texts, self.tokenizer, before, after)
        texts = [np.concatenate([start, ids, end]).astype(np.int32) for ids in found]
        return [(ids, np.ones(len(ids), np.uint8)) for ids in texts]

    def pack(self, texts: list[tokenizing.Tokens], totals: Counter) -> tuple[np.ndarray, int]:
        how = (self.length, self.longest, self.overlong, self.dtype)
        return packing.pack_best_fit(texts, *how, totals)


# ---- The end -------------------------------------------------------------------------------------


def finish(
    inputs: list[Input], done: list[dict], folder: Path, maker: RowMaker, most_held: int
) -> dict[str, Any]:
    """Writes what the units have in common; the facts for the index of the prepared folder.

    `most_held`: rows of tokens that are held out, of each source. Prints how many rows of the input
    were read, and what became of them.
    """
    sums: Counter = Counter()
    parts: dict[str, list] = {part: [] for part in PARTS}
    frequencies = np.ones(len(maker.tokenizer), np.int64)
    most_texts = max(facts["most_texts"] for facts in done)
    remark = ""
    for number, source in enumerate(inputs):
        own = {f"{i:06}": facts for i, facts in enumerate(done) if facts["input"] == number}
        totals: Counter = Counter()
        for facts in own.values():
            totals.update(facts["totals"])
        for kind in ("tokens", "held") if totals["held"] else ("tokens",):
            part = PARTS[source.is_validation or kind == "held"]
            files = [
                (f"{unit}.{kind}", facts["totals"].get(kind, 0)) for unit, facts in own.items()
            ]
            files = [(name, size) for name, size in files if size]
            if kind == "held" and maker.best_fit:
                texts = [text for name, _ in files for text in read_held(folder / name, maker)]
                block, most = maker.pack(texts, Counter())
                files, most_texts = [(f"held-{number}.tokens", block.size)], max(most_texts, most)
                block.tofile(folder / files[0][0])
            if maker.shares_ends:  # the token before the first text
                files.insert(0, (f"start-{number}.tokens", 1))
                np.array(maker.start, maker.dtype).tofile(folder / files[0][0])
            rows = count_rows(source, sum(size for _, size in files), maker, part)
            if kind == "tokens":
                say_packed(part, totals, rows, maker)
                sums[part] += totals["texts"]
            else:
                rows = min(rows, most_held)
                sums[part] += totals["held_texts"] or 1
            sums[f"rows of {part}"] += rows
            parts[part].append([source.name, rows, files])
        sums["empty"] += totals["empty"]
        if source.is_validation:
            continue
        sums["equal"] += source.count_repeated()
        if totals["held"] and source.is_single_text:
            remark = "; the end of a single text is held out"
        for unit in own:
            seen, times = np.fromfile(folder / f"{unit}.counts", "<u4").reshape(2, -1)
            frequencies[seen] += times
    if not parts["validation"]:
        raise ValueError("task.validation_fraction: nothing is held out; raise it")
    left_out = sum((each.left_out for each in inputs), Counter())
    read = sum(each.rows for each in inputs) + left_out.total()
    left_out["pieces without a loss term"] = sums["empty"]
    remark = f"; {sums['equal']:,} are equal to others" * bool(sums["equal"]) + remark
    evaluated = f"{sums['validation']:,} ({sums['rows of validation']:,} rows of tokens)"
    plural = row_formats.PLURALS[maker.kind]
    sources.say_prepared(plural, read, sums["train"], evaluated, left_out, remark)
    np.save(folder / "bytes.npy", tokenizing.token_bytes(maker.tokenizer))
    np.save(folder / "unigram_loss.npy", -np.log(frequencies / frequencies.sum()))
    questions = [tokens for facts in done for tokens in facts["questions"]][:2]
    prompts = {f"held out {number}": tokens for number, tokens in enumerate(questions, 1)}
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    shared = {"length": maker.length, "dtype": maker.dtype, "packed": maker.best_fit}
    shared |= {"parts": parts, "most_texts": most_texts}
    files = chain.from_iterable(facts["files"].items() for facts in done)
    digests = sorted((name, each[1]) for name, each in files if not name.endswith("counts"))
    unnamed = {part: [each[1:] for each in several] for part, several in parts.items()}
    about = dict(sorted((shared | {"parts": unnamed}).items()))
    return finish_folder(folder, done, shared, [digests, about])


def count_rows(source: Input, total: int, maker: RowMaker, part: str) -> int:
    """The rows that `total` tokens fill. Raises ValueError if they fill none."""
    if maker.best_fit:
        if not total:
            raise ValueError(
                f"task.context_length: no answer of {part} begins within {maker.longest} tokens; "
                "raise it, or give --task.overlong split"
            )
        return total // (3 * maker.length)
    if total <= maker.length:
        is_held = part == "validation" and not source.is_validation
        more = "raise task.validation_fraction or task.validation_rows, " * is_held
        raise ValueError(
            f"task.{source.field}: {source.data} has {total} tokens to "
            f"{'train' if part == 'train' else 'evaluate'} on, which do not fill a row of "
            f"{maker.length + 1}; add text, {more}or lower task.context_length"
        )
    return -(-(total - 1) // maker.length)


def read_held(path: Path, maker: RowMaker) -> Iterator[tokenizing.Tokens]:
    """The texts of a unit that are held out: token ids, loss mask."""
    names = (("", maker.dtype), ("-mask", np.uint8), ("-sizes", "<i8"))
    ids, mask, sizes = (np.fromfile(f"{path}{name}", kind) for name, kind in names)
    ends = np.cumsum(sizes)[:-1]
    yield from zip(np.split(ids, ends), np.split(mask, ends), strict=True)


def say_packed(part: str, totals: Counter, rows: int, maker: RowMaker) -> None:
    """Prints how the rows of tokens are filled."""
    size = totals["tokens"] // 3 if maker.best_fit else totals["tokens"]
    used = totals["used"] if maker.best_fit else size
    if totals["long"]:
        print(
            f"Prepared {part}: {totals['long']:,} of {totals['texts']:,} texts are longer than "
            f"{maker.longest} tokens (the most that a row or the model holds) and were "
            f"{'split' if maker.overlong == 'split' else 'truncated'}",
            flush=True,
        )
    print(
        f"Prepared: {rows:,} rows of {maker.length} tokens to "
        f"{'train' if part == 'train' else 'evaluate'} on, {used / max(size, 1):.1%} of them "
        f"useful, the rest padding; {used:,} tokens, {used / max(totals['texts'], 1):,.0f} in a "
        "text",
        flush=True,
    )
