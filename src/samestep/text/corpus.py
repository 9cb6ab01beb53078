"""Texts for a language model, prepared in bounded memory on all cores: see units.py.

The first pass checks the rows. Then come the rows that are held out, the vocabulary of a new model,
and the second pass, which writes the tokens of each unit into files: see token_rows.py.
"""

import json
from collections import Counter
from collections.abc import Iterator
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
from samestep.text.units import Batch, Input, Reader

END_OF_TEXT = "<|endoftext|>"  # of a new model
BYTES_A_TOKEN = 6  # at most, to hold out enough where the tokens are not known yet
FACTS = "texts tokens held_texts held questions long empty used most_texts".split()  # of a unit


# ---- Models --------------------------------------------------------------------------------------


@once_per_folder
def load_tokenizer(cfg: Any, folder: Path) -> Any:
    """The tokenizer of a language model, with a chat template where rows are chats."""
    ends = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    tokenizer = tokenizing.load_tokenizer(cfg, folder, model_max_length=cfg.context_length, **ends)
    if cfg.chat_template:
        tokenizer.chat_template = chats.read_template(cfg)
    elif cfg.rows == "chat":
        tokenizer.chat_template = tokenizer.chat_template or chats.CHAT_TEMPLATE
    return tokenizer


def questions(rows: list[dict], cfg: Any, folder: Path) -> list[tuple[Any, dict]]:
    """For the check of the export: the beginnings of texts, or chats."""
    tokenizer, length = load_tokenizer(cfg, folder), min(cfg.context_length // 2, 32)
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


def recognize(cfg: Any) -> list[tuple[sources.WeightedData, Any, RowFormat]]:
    """Each source of cfg.data, the config with its data alone, and what its rows are.

    Replaces `rows` auto by their kind. Raises ValueError if the sources have rows of more kinds.
    """
    data = [
        (*each, row_formats.recognize_format(each[1]))
        for each in sources.by_source(cfg, row_formats.endings_of(cfg))
    ]
    kinds = {row_format.kind: own.data for _, own, row_format in data}
    if len(kinds) > 1:
        found = " and ".join(f"{kind} in {one_line(name, 60)}" for kind, name in kinds.items())
        raise ValueError(f"task.data: rows are {found}; give sources with rows of one kind")
    (cfg.rows,) = kinds
    return data


def build(
    cfg: Any,
    by_source: list[tuple[sources.WeightedData, Any, RowFormat]],
    folder: Path,
    longest: int,
    best_fit: bool,
) -> dict[str, Any]:
    """Fills the folder of prepared data, or goes on filling it; what `cache.prepare` wants.

    `longest`: tokens of a text that the model sees.
    """
    readers = [make_reader(cfg, *each) for each in by_source]
    inputs = units.scan_all(readers, folder)
    for _, own, row_format in by_source:
        found = [each for each in inputs if each.reader.cfg is own]
        print(row_formats.describe_input(own, row_format, found), flush=True)
    train = [each for each in inputs if not each.given]
    held = choose_held(cfg, inputs)
    if kept := tokenizing.vocabulary_path(cfg):
        replace_text(folder / tokenizing.FILE, kept.read_text(encoding="utf-8"))
    units.learn_vocabulary(cfg, folder, train, held, last=[END_OF_TEXT])
    tokenizer = load_tokenizer(cfg, folder)
    # The smallest type for token ids, for positions in a row, and for IGNORE_INDEX.
    dtype = "<u2" if len(tokenizer) < 2**16 and cfg.context_length <= 2**16 else "<u4"
    how = (cfg.rows, cfg.context_length, longest, cfg.too_long, best_fit, dtype)
    maker = RowMaker(tokenizer, *how)
    if len(train) == len(inputs):
        for each in train:
            cut_single_text(cfg, each)
    done = units.write(folder, inputs, held, maker.write_unit)
    return finish(inputs, done, folder, maker, cfg.validation_rows)


def make_reader(cfg: Any, source: sources.WeightedData, own: Any, row_format: RowFormat) -> Reader:
    """How the rows of a source are read. Prints the files that are not."""
    shipped, kind, endings = None, row_format.kind, row_formats.endings_of(cfg)
    if own.data in demo_data.TEXTS:
        shipped = [*demo_data.text_rows(own.data, kind)]
    sources.print_skipped_files(own, endings, shipped is not None)
    return Reader(
        source.name,
        own,
        endings,
        row_format.columns,
        row_formats.row_check(kind, cfg),
        row_formats.key_of,
        None if cfg.model_name_or_path else row_formats.texts_of,
        shipped=shipped,
        optional=OPTIONAL,
        long_texts=kind == "text",
    )


def choose_held(cfg: Any, inputs: list[Input]) -> set[int]:
    """The hashes of the rows that are held out, whichever source they are in."""
    most = BYTES_A_TOKEN * cfg.context_length * cfg.validation_rows

    def problem(source: Input) -> str:
        return f"all rows of {source.shown} are equal; add others, to hold some out"

    return units.choose_held(inputs, cfg.validation_fraction, most, problem, size_of_row=True)


def cut_single_text(cfg: Any, source: Input) -> None:
    """Sets the share that is trained on of a source that is a single text.

    A long text in several pieces is cut here: the pieces after the place are held out.
    """
    if source.rows != 1 or not source.reader.long_texts:
        return
    most = BYTES_A_TOKEN * cfg.context_length * cfg.validation_rows
    share = 1 - min(cfg.validation_fraction, most / max(source.size, 1))
    pieces = [piece for unit in source.units for piece in unit]
    if not pieces[0].is_text:
        source.share = share
        return
    place = int(share * source.size)
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
            source.units.append([piece._replace(span=span, size=size, held=is_held)])


# ---- A unit --------------------------------------------------------------------------------------


class RowMaker(NamedTuple):
    """How rows become tokens."""

    tokenizer: Any
    kind: str  # of the rows
    length: int  # tokens in a row
    longest: int  # tokens of a text that the model sees
    too_long: str
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
        counts, texts, waiting = np.zeros(len(self.tokenizer), np.int64), [], 0
        facts: dict[str, Any] = {**dict.fromkeys(FACTS, 0), "questions": []}

        def write(values: np.ndarray, labels: np.ndarray) -> None:
            out.append("tokens", values)
            facts["tokens"] += values.size
            counts[:] += np.bincount(labels, minlength=len(counts))

        def write_packed() -> None:
            block = self.pack(texts, facts)
            labels = block[:, 1].ravel()
            write(block, labels[labels != np.iinfo(self.dtype).max])

        for batch in batches:
            facts["held_texts" if batch.is_held else "texts"] += len(batch.rows) * batch.begins
            tokens = self.tokenize(batch)
            if batch.is_held:
                wanted = 2 * (self.kind != "text") - len(facts["questions"])
                facts["questions"] += [
                    row_formats.question_tokens(row, self.kind, self.tokenizer)
                    for row, _ in batch.rows[: max(wanted, 0)]
                ]
                for ids, mask in tokens:
                    facts["held"] += len(ids)
                    out.append("held", np.asarray(ids, self.dtype))
                    if self.best_fit:
                        out.append("held-mask", np.asarray(mask, np.uint8))
                        out.append("held-sizes", np.array([len(ids)], "<i8"))
            elif self.best_fit:
                texts, waiting = texts + tokens, waiting + batch.size
                if waiting > 2 * units.LARGEST:  # of .parquet, a group of rows may have any size
                    write_packed()
                    texts, waiting = [], 0
            else:
                values = np.concatenate([ids for ids, _ in tokens]).astype(self.dtype)
                write(values, values)
        if texts:
            write_packed()
        seen = np.flatnonzero(counts)
        out.append("counts", np.stack([seen, counts[seen]]).astype("<u4"))
        return facts

    def tokenize(self, batch: Batch) -> list:
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

    def pack(self, texts: list, facts: dict) -> np.ndarray:
        how = (self.length, self.longest, self.too_long, self.dtype)
        return packing.pack_best_fit(texts, *how, facts)


# ---- The end -------------------------------------------------------------------------------------


def finish(
    inputs: list[Input],
    done: list[tuple[Input, dict]],
    folder: Path,
    maker: RowMaker,
    validation_rows: int,
) -> dict[str, Any]:
    """Writes what the units have in common; the facts for the index of the prepared folder.

    Prints how many rows of the input were read, and what became of them.
    """
    found: Counter = Counter()  # of the texts of each part, and of pieces without a loss term
    parts: dict[str, list] = {part: [] for part in units.PARTS}
    counts, most_texts = np.ones(len(maker.tokenizer), np.int64), 0
    train = [each for each in inputs if not each.given]
    for number, source in enumerate(inputs):
        part = units.PARTS[source.given]
        own = {i: facts for i, (each, facts) in enumerate(done) if each is source}
        totals = {n: sum(facts[n] for facts in own.values()) for n in FACTS if n != "questions"}
        files = [(f"{i:06}.tokens", facts["tokens"]) for i, facts in own.items()]
        parts[part].append(list_rows(source, number, files, folder, maker, part))
        say_packed(source, totals, parts[part][-1][1], maker)
        found += Counter({part: totals["texts"], "empty": totals["empty"]})
        for i in own if not source.given else ():
            seen, times = np.fromfile(folder / f"{i:06}.counts", "<u4").reshape(2, -1)
            counts[seen] += times
        most_texts = max([most_texts, *(facts["most_texts"] for facts in own.values())])
        if totals["held"]:
            files = [(f"{i:06}.held", facts["held"]) for i, facts in own.items()]
            if maker.best_fit:
                texts = [text for name, n in files if n for text in read_held(folder / name, maker)]
                packed: Counter = Counter()
                block = maker.pack(texts, packed)
                files = [(f"held-{number}.tokens", block.size)]
                block.tofile(folder / files[0][0])
                most_texts = max(most_texts, packed["most_texts"])
            name, rows, files = list_rows(source, number, files, folder, maker, "validation")
            rows = min(rows, max(1, validation_rows // len(train)))
            parts["validation"].append([name, rows, files])
            found += Counter({"validation": totals["held_texts"] or 1, "cut": source.rows == 1})
    if not parts["validation"]:
        raise ValueError("task.validation_fraction: nothing is held out; raise it")
    say_prepared(inputs, parts["validation"], maker, found)
    np.save(folder / "bytes.npy", tokenizing.token_bytes(maker.tokenizer))
    np.save(folder / "unigram_loss.npy", -np.log(counts / counts.sum()))
    facts = [each for _, each in done]
    questions = [tokens for each in facts for tokens in each["questions"]][:2]
    prompts = {f"held out {number}": tokens for number, tokens in enumerate(questions, 1)}
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    shared = {"length": maker.length, "dtype": maker.dtype, "packed": maker.best_fit}
    shared |= {"parts": parts, "most_texts": most_texts}
    files = chain.from_iterable(each["files"].items() for each in facts)
    digests = sorted((name, each[1]) for name, each in files if not name.endswith("counts"))
    unnamed = {part: [each[1:] for each in several] for part, several in parts.items()}
    about = dict(sorted((shared | {"parts": unnamed}).items()))
    return finish_folder(folder, facts, shared, [digests, about])


def list_rows(
    source: Input, number: int, files: list, folder: Path, maker: RowMaker, part: str
) -> list:
    """Name, rows and files of a source, as `token_rows.TokenRows` reads them."""
    files = [(name, size) for name, size in files if size]
    if maker.shares_ends:  # the token before the first text
        first = (f"start-{number}.tokens", 1)
        np.array(maker.start, maker.dtype).tofile(folder / first[0])
        files = [first, *files]
    total = sum(size for _, size in files)
    if maker.best_fit:
        if not total:
            raise ValueError(
                f"task.context_length: no answer of {part} begins within {maker.longest} tokens; "
                "raise it, or give --task.too_long split"
            )
        return [source.name, total // (3 * maker.length), files]
    if total <= maker.length:
        held = part == "validation"
        more = "raise task.validation_fraction or task.validation_rows, " * (held > source.given)
        raise ValueError(
            f"task.{source.field}: {source.shown} has {total} tokens to "
            f"{'evaluate' if held else 'train'} on, which do not fill a row of "
            f"{maker.length + 1}; add text, {more}or lower task.context_length"
        )
    return [source.name, -(-(total - 1) // maker.length), files]


def read_held(path: Path, maker: RowMaker) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The texts of a unit that are held out: token ids, loss mask."""
    names = (("", maker.dtype), ("-mask", np.uint8), ("-sizes", "<i8"))
    ids, mask, sizes = (np.fromfile(f"{path}{name}", kind) for name, kind in names)
    ends = np.cumsum(sizes)[:-1]
    yield from zip(np.split(ids, ends), np.split(mask, ends), strict=True)


def say_prepared(inputs: list[Input], held: list, maker: RowMaker, found: Counter) -> None:
    """Prints what became of the rows that were read. `found`: the texts of each part, those cut in
    two, and the pieces that are `empty`, without a loss term."""
    left_out = sum((each.left_out for each in inputs), Counter())
    read = sum(each.rows for each in inputs) + left_out.total()
    left_out["pieces without a loss term"] = found["empty"]
    rows = sum(rows for _, rows, _ in held)
    equal = sum(units.count_repeated(each) for each in inputs if not each.given)
    remark = f"; {equal:,} are equal to others" * bool(equal)
    remark += "; the end of a single text is held out" * bool(found["cut"])
    evaluated = f"{found['validation']:,} ({rows:,} rows of tokens)"
    plural = row_formats.PLURALS[maker.kind]
    sources.say_prepared(plural, read, found["train"], evaluated, left_out, remark)


def say_packed(source: Input, totals: dict, rows: int, maker: RowMaker) -> None:
    if totals["long"]:
        print(
            f"Prepared {units.PARTS[source.given]}: {totals['long']:,} of {totals['texts']:,} "
            f"texts are longer than {maker.longest} tokens (the most that a row or the model "
            f"holds) and were {maker.too_long}",
            flush=True,
        )
    size = totals["tokens"] // 3 if maker.best_fit else totals["tokens"]
    used = totals["used"] if maker.best_fit else size
    print(
        f"Prepared: {rows:,} rows of {maker.length} tokens to "
        f"{'evaluate' if source.given else 'train'} on, {used / max(size, 1):.1%} of them useful, "
        f"the rest padding; {used:,} tokens, {used / max(totals['texts'], 1):,.0f} in a text",
        flush=True,
    )
