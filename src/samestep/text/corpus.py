"""Texts for a language model, prepared in bounded memory on all cores: see units.py.

The first pass checks the rows. Then come the rows that are held out, the vocabulary of a new model,
and the second pass, which writes the tokens of each unit into files: see token_rows.py.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from samestep.base.console import one_line
from samestep.base.fields import check_fields
from samestep.base.files import replace_text
from samestep.data import demo_data, sources, tables
from samestep.data.cache import once_per_folder
from samestep.models import pretrained
from samestep.text import chats, packing, row_formats, tokenizing, units
from samestep.text.row_formats import OPTIONAL, RowFormat
from samestep.text.unit_files import UnitWriter, finish_folder
from samestep.text.units import Batch, Input, Reader

END_OF_TEXT = "<|endoftext|>"  # of a new model
BYTES_A_TOKEN = 6  # at most, to hold out enough where the tokens are not known yet
PART = {False: "train", True: "validation"}


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
    """For the check of the export: the beginnings of texts, or chats of one and two questions."""
    tokenizer = load_tokenizer(cfg, folder)
    if cfg.rows == "chat":
        user = {"role": "user", "content": cfg.sample_prompt}
        asked: list = [[user], [user, {"role": "assistant", "content": "Yes."}, user]]
        place, options = "task.sample_prompt", {"add_generation_prompt": True}
        shown = [chats.apply_template(each, [], place, tokenizer, **options) for each in asked]
        tokens = [tokenizer(text, add_special_tokens=False).input_ids for text in shown]
    else:
        length = min(cfg.context_length // 2, 32)
        starts = [row["input_ids"][:length] for row in rows]
        texts = [tokenizer.decode(each, skip_special_tokens=True) for each in starts]
        asked = [text for text in [cfg.sample_prompt, *texts] if text.strip()]
        tokens = [tokenizer(text, verbose=False).input_ids for text in asked]
    longest, pairs = max_text_length(cfg, True), zip(asked, tokens, strict=True)
    return [(text, {"input_ids": [ids]}) for text, ids in pairs if 0 < len(ids) < longest]


def max_text_length(cfg: Any, best_fit: bool) -> int:
    """Tokens of a text that the model sees at once, at most context_length.

    Raises ValueError for rows of one text that are longer than a model to start from can see.
    """
    if not cfg.model_name_or_path:
        return cfg.context_length
    from transformers import AutoConfig

    limit = getattr(pretrained.load(AutoConfig, cfg), "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else cfg.context_length
    fits, wanted = best_fit or cfg.context_length <= limit, f"at most {limit}"
    check_fields(cfg, [("context_length", fits, f"{wanted}, which the model can see")])
    return min(limit, cfg.context_length)


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
    inputs = scan_inputs(cfg, by_source, folder)
    train, given = ([each for each in inputs if each.given == value] for value in (False, True))
    held = choose_held(cfg, train, given)
    if kept := tokenizing.vocabulary_path(cfg):
        replace_text(folder / tokenizing.FILE, kept.read_text(encoding="utf-8"))
    elif not cfg.model_name_or_path and not (folder / tokenizing.FILE).exists():
        size = sum(each.size for each in train) / 1e6
        part = f"{units.SAMPLE / 1e6:,.0f} MB, chosen by hash, of " * (size * 1e6 > units.SAMPLE)
        print(f"Preparing data: learning a vocabulary from {part}{size:,.1f} MB", flush=True)
        texts = units.read_sample(train, held)
        tokenizing.learn_vocabulary(texts, cfg.vocab_size, folder, last=[END_OF_TEXT])
    tokenizer = load_tokenizer(cfg, folder)
    # The smallest type for token ids, for positions in a row, and for IGNORE_INDEX.
    dtype = "<u2" if len(tokenizer) < 2**16 and cfg.context_length <= 2**16 else "<u4"
    maker = RowMaker(
        tokenizer, cfg.rows, cfg.context_length, longest, cfg.too_long, best_fit, dtype
    )
    for each in train if not given else ():
        cut_single_text(cfg, each)
    done = units.write(folder, inputs, held, maker.write_unit)
    return finish(inputs, done, folder, maker, cfg.validation_rows)


def scan_inputs(cfg: Any, by_source: list, folder: Path) -> list[Input]:
    """The first pass over each source, and over the rows to evaluate on."""
    inputs: list[Input] = []
    lines, endings = [], row_formats.endings_of(cfg)
    for each, own, row_format in by_source:
        shipped = None
        if own.data in demo_data.TEXTS:
            shipped = [*demo_data.text_rows(own.data, row_format.kind)]
        sources.print_skipped_files(own, endings, shipped is not None)
        reader = Reader(
            each.name,
            own,
            endings,
            row_format.columns,
            row_formats.row_check(row_format.kind, cfg),
            row_formats.key_of,
            None if cfg.model_name_or_path else row_formats.texts_of,
            shipped=shipped,
            optional=OPTIONAL,
            long_texts=row_format.kind == "text",
        )
        found = []
        for field in reader.fields:
            found.append(units.scan(reader, field, folder / f"scan-{len(inputs) + len(found)}"))
        inputs += found
        rows = sum(each.rows for each in found)
        counts = sum((each.counts for each in found), Counter())
        lines.append(row_formats.describe_input(own, row_format, rows, counts))
    print(*lines, sep="\n", flush=True)
    return inputs


def choose_held(cfg: Any, train: list[Input], given: list[Input]) -> set[int]:
    """The hashes of the rows that are held out, whichever source they are in."""
    if given:
        units.say_overlap(train, given)
        return set()
    held: set[int] = set()
    for each in train:
        data, rows = one_line(each.reader.cfg.data, 100), each.rows
        if rows == 1 and each.reader.long_texts:
            continue
        if rows == 1:
            raise ValueError(f"task.data: {data} has one row; add rows, to hold one out")
        most = BYTES_A_TOKEN * cfg.context_length * cfg.validation_rows / len(train)
        own = units.hold_out(each, cfg.validation_fraction, most, size_of_row=True)
        if not own:
            message = f"all rows of {data} are equal; add others, to hold some out"
            raise ValueError(f"task.data: {message}")
        held |= own
    return held


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
    place, parts = int(share * source.size), []
    for piece in pieces[1:]:  # no part may be so short that no place to cut is found in it
        if abs(piece.span.start - place) < 2 * tables.SEARCHED:
            place = piece.span.start
    for piece in pieces:
        start, stop = piece.span.start, piece.span.stop
        if start >= place:
            parts.append([piece._replace(held=True)])
        elif stop is None or stop > place:
            before, after = tables.Span(start, place, piece.span.lines), tables.Span(place, stop)
            half = piece.size // 2
            parts.append([piece._replace(span=before, size=half)])
            parts.append([piece._replace(span=after, size=half, held=True)])
        else:
            parts.append([piece])
    source.units[:] = parts


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
        names = "texts tokens held_texts held questions long empty used most_texts".split()
        facts: dict[str, Any] = {**dict.fromkeys(names, 0), "questions": []}

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
    found: Counter = Counter()
    parts: dict[str, list] = {"train": [], "validation": []}
    counts, most_texts = np.ones(len(maker.tokenizer), np.int64), 0
    trains = sum(not each.given for each in inputs)
    for number, source in enumerate(inputs):
        own = {i: facts for i, (each, facts) in enumerate(done) if each is source}
        names = ("texts", "tokens", "long", "empty", "used", "held_texts")
        totals = {name: sum(facts[name] for facts in own.values()) for name in names}
        files = [(f"{i:06}.tokens", own[i]["tokens"]) for i in own if own[i]["tokens"]]
        rows = list_rows(source, number, files, folder, maker, source.given)
        parts[PART[source.given]].append(rows)
        say_packed(source, totals, rows[1], maker)
        found["held" if source.given else "train"] += totals["texts"]
        found["empty"] += totals["empty"]
        for i in own if not source.given else ():
            seen, times = np.fromfile(folder / f"{i:06}.counts", "<u4").reshape(2, -1)
            counts[seen] += times
        packed = [*own.values()]
        files = [(f"{i:06}.held", own[i]["held"]) for i in own if own[i]["held"]]
        if files:
            if maker.best_fit:
                packed.append({"long": 0, "empty": 0, "used": 0, "most_texts": 0})
                texts = [text for name, _ in files for text in read_held(folder / name, maker)]
                block = maker.pack(texts, packed[-1])
                files = [(f"held-{number}.tokens", block.size)]
                block.tofile(folder / files[0][0])
            name, most, files = list_rows(source, number, files, folder, maker, True)
            most = min(most, max(1, validation_rows // trains))
            found["held"] += totals["held_texts"] or 1
            found["cut"] += source.rows == 1
            parts["validation"].append([name, most, files])
        most_texts = max([most_texts, *(facts["most_texts"] for facts in packed)])
    if not parts["validation"]:
        raise ValueError("task.validation_fraction: nothing is held out; raise it")
    found["equal"] = sum(units.count_repeated(each) for each in inputs if not each.given)
    say_prepared(inputs, parts["validation"], maker, found)
    np.save(folder / "bytes.npy", tokenizing.token_bytes(maker.tokenizer))
    np.save(folder / "unigram_loss.npy", -np.log(counts / counts.sum()))
    facts = [each for _, each in done]
    questions = [tokens for each in facts for tokens in each["questions"]][:2]
    prompts = {f"held out {number}": tokens for number, tokens in enumerate(questions, 1)}
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    shared = {"length": maker.length, "dtype": maker.dtype, "packed": maker.best_fit}
    shared |= {"parts": parts, "most_texts": most_texts}
    digests = {
        name: digest
        for each in facts
        for name, (_, digest) in each["files"].items()
        if not name.endswith("counts")
    }
    unnamed = {part: [each[1:] for each in several] for part, several in parts.items()}
    about = dict(sorted((shared | {"parts": unnamed}).items()))
    return finish_folder(folder, facts, shared, [sorted(digests.items()), about])


def list_rows(
    source: Input, number: int, files: list, folder: Path, maker: RowMaker, held: bool
) -> list:
    """Name, rows and files of a source, as `token_rows.TokenRows` reads them."""
    if maker.shares_ends:  # the token before the first text
        first = (f"start-{number}.tokens", 1)
        np.array(maker.start, maker.dtype).tofile(folder / first[0])
        files = [first, *files]
    total = sum(size for _, size in files)
    if maker.best_fit:
        if not total:
            raise ValueError(
                f"task.context_length: no answer of {PART[held]} begins within {maker.longest} "
                "tokens; raise it, or give --task.too_long split"
            )
        return [source.name, total // (3 * maker.length), files]
    if total <= maker.length:
        field, purpose = ("data", "train")
        if held:
            field, purpose = source.field, "evaluate"
        data, raised = getattr(source.reader.cfg, field), held and not source.given
        raise ValueError(
            f"task.{field}: {one_line(data, 100)} has {total} tokens to {purpose} on, which do not "
            f"fill a row of {maker.length + 1}; add text, "
            + "raise task.validation_fraction or task.validation_rows, " * raised
            + "or lower task.context_length"
        )
    return [source.name, -(-(total - 1) // maker.length), files]


def read_held(path: Path, maker: RowMaker) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The texts of a unit that are held out: token ids, loss mask."""
    names = (("", maker.dtype), ("-mask", np.uint8), ("-sizes", "<i8"))
    ids, mask, sizes = (np.fromfile(f"{path}{name}", kind) for name, kind in names)
    ends = np.cumsum(sizes)[:-1]
    yield from zip(np.split(ids, ends), np.split(mask, ends), strict=True)


def say_prepared(inputs: list[Input], held: list, maker: RowMaker, found: Counter) -> None:
    """Prints what became of the rows that were read. `found`: those to train on, held out, equal to
    others and cut in two, and the pieces that are `empty`, without a loss term."""
    left_out = sum((each.left_out for each in inputs), Counter())
    read = sum(each.rows for each in inputs) + left_out.total()
    left_out["pieces without a loss term"] = found["empty"]
    evaluated = f"{found['held']:,} ({sum(rows for _, rows, _ in held):,} rows of tokens)"
    remark = f"; {found['equal']:,} are equal to others" * bool(found["equal"])
    remark += "; the end of a single text is held out" * bool(found["cut"])
    plural = row_formats.PLURALS[maker.kind]
    sources.say_prepared(plural, read, found["train"], evaluated, left_out, remark)


def say_packed(source: Input, totals: dict, rows: int, maker: RowMaker) -> None:
    if totals["long"]:
        print(
            f"Prepared {PART[source.given]}: {totals['long']:,} of {totals['texts']:,} texts are "
            f"longer than {maker.longest} tokens (the most that a row or the model holds) and were "
            f"{maker.too_long}",
            flush=True,
        )
    used = totals["used"] if maker.best_fit else totals["tokens"]
    size = totals["tokens"] // 3 if maker.best_fit else totals["tokens"]
    print(
        f"Prepared: {rows:,} rows of {maker.length} tokens to "
        f"{'evaluate' if source.given else 'train'} on, {used / max(size, 1):.1%} of them useful, "
        f"the rest padding; {used:,} tokens, {used / max(totals['texts'], 1):,.0f} in a text",
        flush=True,
    )
