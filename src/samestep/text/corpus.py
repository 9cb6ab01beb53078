"""Texts for a language model, prepared in bounded memory on all cores: see units.py.

The first pass checks the rows. Then come the rows that are held out, the vocabulary of a new model,
and the second pass, which writes the tokens of each unit into files: see token_rows.py.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from samestep.base.console import one_line
from samestep.base.fields import check_fields
from samestep.base.files import remove
from samestep.base.workers import Tell, do_units
from samestep.data import demo_data, hub, sources, tables
from samestep.data.cache import once_per_folder
from samestep.models import pretrained
from samestep.text import chats, packing, row_formats, token_rows, tokenizing, units
from samestep.text.row_formats import ENDINGS, OPTIONAL, RowFormat
from samestep.text.token_rows import UnitWriter
from samestep.text.units import Notes, Unit, read_unit

END_OF_TEXT = "<|endoftext|>"  # of a new model
BYTES_A_TOKEN = 6  # at most, to hold out enough where the tokens are not known yet
BATCH = 1_000_000  # characters that are tokenised in one call


class TextInput(NamedTuple):
    """The rows of one source, or those to evaluate on."""

    name: str
    cfg: Any  # with `data` of this source
    row_format: RowFormat
    field: str
    held: bool  # all rows are for evaluation
    notes: Notes


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
        (*each, row_formats.recognize_format(each[1])) for each in sources.by_source(cfg, ENDINGS)
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
    inputs = scan_inputs(cfg, by_source, folder, bool(not cfg.model_name_or_path))
    held = choose_held(cfg, inputs)
    if not cfg.model_name_or_path and not (folder / tokenizing.FILE).exists():
        scans = [folder / f"scan-{i}" for i, each in enumerate(inputs) if not each.held]
        size = sum(each.notes.size for each in inputs if not each.held) / 1e6
        part = f"{units.SAMPLE / 1e6:,.0f} MB, chosen by hash, of " * (size * 1e6 > units.SAMPLE)
        print(f"Preparing data: learning a vocabulary from {part}{size:,.1f} MB", flush=True)
        texts = units.read_sample(scans, held)
        tokenizing.learn_vocabulary(texts, cfg.vocab_size, folder, last=[END_OF_TEXT])
    tokenizer = load_tokenizer(cfg, folder)
    dtype = token_rows.token_dtype(len(tokenizer), cfg.context_length)
    maker = RowMaker(tokenizer, cfg.context_length, longest, cfg.too_long, best_fit, dtype)
    shares = cut_single_texts(cfg, inputs)
    todo = [(number, unit) for number, each in enumerate(inputs) for unit in each.notes.units]

    def work(number: int, tell: Tell) -> None:
        if not read_unit(folder, number, verify=True):
            source, unit = todo[number]
            share = shares.get(source, 1.0)
            write_unit(UnitWriter(folder, number), inputs[source], unit, held, share, maker, tell)

    do_units(work, [sum(piece.size for piece in unit) for _, unit in todo], "Preparing data")
    return finish(inputs, [source for source, _ in todo], folder, maker, cfg.validation_rows)


def scan_inputs(cfg: Any, by_source: list, folder: Path, learns: bool) -> list[TextInput]:
    """The first pass over each source, and over the rows to evaluate on."""
    inputs = []
    for each, own, row_format in by_source:
        shipped = None
        if own.data in demo_data.TEXTS:
            shipped = list(demo_data.text_rows(own.data, row_format.kind))
        on_hub = shipped is None and hub.is_hub_name(own.data)
        fields = ["data_split" if on_hub else "data"]
        if own.validation_data:
            fields.append("validation_data")
        elif on_hub and own.validation_split:
            fields.append("validation_split")
        sources.print_skipped_files(own, ENDINGS, shipped is not None)
        for name in fields:
            notes = units.scan_field(
                own,
                name,
                folder / f"scan-{len(inputs)}",
                ENDINGS,
                row_format.columns,
                row_formats.row_check(row_format.kind),
                row_formats.key_of,
                row_formats.texts_of if learns else None,
                shipped,
                OPTIONAL,
                long_texts=row_format.kind == "text",
                nothing="there is no text",
            )
            held = name.startswith("validation")
            given = held and not on_hub and own.validation_data != own.data
            label = Path(own.validation_data).name if given else each.name
            inputs.append(TextInput(label, own, row_format, name, held, notes))
    for _, own, row_format in by_source:
        ours = [each for each in inputs if each.cfg is own]
        rows = sum(each.notes.rows for each in ours)
        counts = sum((each.notes.counts for each in ours), Counter())
        row_formats.describe_input(own, row_format, rows, counts)
    return inputs


def choose_held(cfg: Any, inputs: list[TextInput]) -> set[int]:
    """The hashes of the rows that are held out, whichever source they are in."""
    train, given = ([i for i in inputs if i.held == held] for held in (False, True))
    repeated = sum(units.count_repeated(each.notes) for each in train)
    if repeated:
        total = sum(each.notes.rows for each in train)
        print(f"Preparing data: {repeated:,} of {total:,} rows are equal to others", flush=True)
    if given:
        known = units.count_known([i.notes for i in train], [i.notes for i in given])
        sources.say_overlap(known, sum(i.notes.rows for i in given))
        return set()
    held: set[int] = set()
    for each in train:
        data, rows = one_line(each.cfg.data, 100), each.notes.rows
        if rows == 1 and each.row_format.kind == "text":
            continue
        if rows == 1:
            raise ValueError(f"task.data: {data} has one row; add rows, to hold one out")
        most = BYTES_A_TOKEN * cfg.context_length * cfg.validation_rows / len(train)
        own = units.hold_out(each.notes, cfg.validation_fraction, most, size_of_row=True)
        if not own:
            message = f"all rows of {data} are equal; add others, to hold some out"
            raise ValueError(f"task.data: {message}")
        held |= own
    return held


def cut_single_texts(cfg: Any, inputs: list[TextInput]) -> dict[int, float]:
    """The share of the text that is trained on, of sources that are a single text.

    A long text in several pieces is cut here: the pieces after the place are held out.
    """
    cuts = {}
    if any(each.held for each in inputs):
        return cuts
    for number, each in enumerate(inputs):
        if each.notes.rows != 1 or each.row_format.kind != "text":
            continue
        most = BYTES_A_TOKEN * cfg.context_length * cfg.validation_rows
        share = 1 - min(cfg.validation_fraction, most / max(each.notes.size, 1))
        cuts[number] = share
        pieces = [piece for unit in each.notes.units for piece in unit]
        if not pieces[0].is_text:
            continue
        place, parts = int(share * each.notes.size), []
        for piece in pieces[1:]:  # no part may be so short that no place to cut is found in it
            if abs(piece.span.start - place) < 2 * tables.SEARCHED:
                place = piece.span.start
        for piece in pieces:
            start, stop = piece.span.start, piece.span.stop
            if start >= place:
                parts.append([piece._replace(held=True)])
            elif stop is None or stop > place:
                before = tables.Span(start, place, piece.span.lines)
                after = tables.Span(place, stop)
                half = piece.size // 2
                parts.append([piece._replace(span=before, size=half)])
                parts.append([piece._replace(span=after, size=half, held=True)])
            else:
                parts.append([piece])
        each.notes.units[:] = parts
        cuts[number] = 1.0
    return cuts


# ---- A unit --------------------------------------------------------------------------------------


def write_unit(
    out: UnitWriter, source: TextInput, unit: Unit, held: set[int], share: float, maker: "RowMaker",
    tell: Tell,
) -> None:  # fmt: skip
    """Tokenises the rows of a unit into files: .tokens to train on, .held those held out."""
    counts, texts, waiting = np.zeros(len(maker.tokenizer), np.int64), [], 0
    facts: dict[str, Any] = {"texts": 0, "tokens": 0, "held_texts": 0, "held": 0, "questions": []}
    facts |= {"long": 0, "empty": 0, "used": 0, "most_texts": 0}

    def write(values: np.ndarray, labels: np.ndarray) -> None:
        out.append("tokens", values)
        facts["tokens"] += values.size
        counts[:] += np.bincount(labels, minlength=len(counts))

    def write_packed() -> None:
        block = maker.pack(texts, facts)
        labels = block[:, 1].ravel()
        write(block, labels[labels != np.iinfo(maker.dtype).max])

    for rows, is_held, ends, size in batches_of(source, unit, held, share):
        facts["held_texts" if is_held else "texts"] += len(rows) * ends[0]
        tokens = maker.tokenize(rows, source.row_format.kind, ends)
        if is_held:
            wanted = 2 * (source.row_format.kind != "text") - len(facts["questions"])
            facts["questions"] += [maker.question(row) for row, _ in rows[: max(wanted, 0)]]
            for ids, mask in tokens:
                facts["held"] += len(ids)
                out.append("held", np.asarray(ids, maker.dtype))
                if maker.best_fit:
                    out.append("held-mask", np.asarray(mask, np.uint8))
                    out.append("held-sizes", np.array([len(ids)], "<i8"))
        elif maker.best_fit:
            texts, waiting = texts + tokens, waiting + size
            if waiting > 2 * units.LARGEST:  # of .parquet, a group of rows may have any size
                write_packed()
                texts, waiting = [], 0
        else:
            values = np.concatenate([ids for ids, _ in tokens]).astype(maker.dtype)
            write(values, values)
        tell(size)
    if texts:
        write_packed()
    seen = np.flatnonzero(counts)
    out.append("counts", np.stack([seen, counts[seen]]).astype("<u4"))
    out.commit(facts)


def batches_of(
    source: TextInput, unit: Unit, held: set[int], share: float
) -> Iterator[tuple[list[tables.Row], bool, tuple[bool, bool], int]]:
    """Rows of about BATCH characters: whether they are held out, whether texts begin and end with
    them, and the bytes of the input. Only a part of a long text does not."""
    check = row_formats.row_check(source.row_format.kind)
    skip = source.cfg.incomplete_rows == "skip"
    waiting: dict[bool, list] = {False: [], True: []}
    sizes = {False: 0, True: 0}
    for piece in unit:
        if piece.is_text:
            is_held = piece.held or piece.hash_of_text() in held
            blocks = piece.read({"text": "text"}, ())
            begins, block = not piece.span.start, next(blocks, None)
            while block:
                row, block = block, next(blocks, None)
                ends = not block and piece.span.stop is None
                yield [row], is_held, (begins, ends), len(row[0]["text"].encode())
                begins = False
            continue
        for fields, place in piece.read(source.row_format.columns, OPTIONAL):
            try:
                check(fields)
            except sources.IncompleteRow:
                if skip:
                    continue
                raise
            text_of_row = row_formats.key_of(fields)
            parts = [(fields, units.hash_of(text_of_row) in held)]
            if share < 1:
                end = int(len(text_of_row) * share)
                parts = [({"text": text_of_row[:end]}, False), ({"text": text_of_row[end:]}, True)]
            for each, is_held in parts:
                waiting[is_held].append((each, place))
                sizes[is_held] += len(text_of_row)
                if sizes[is_held] > BATCH:
                    yield waiting[is_held], is_held, (True, True), sizes[is_held]
                    waiting[is_held], sizes[is_held] = [], 0
    for is_held, rows in waiting.items():
        if rows:
            yield rows, is_held, (True, True), sizes[is_held]


class RowMaker(NamedTuple):
    """How rows become tokens."""

    tokenizer: Any
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

    def tokenize(self, rows: list[tables.Row], kind: str, ends: tuple[bool, bool]) -> list:
        """Token ids and loss masks of the rows; `ends`: whether texts begin and end with them.

        Others are parts of a file: see `tables.find_cut` for where they were cut.
        """
        if kind != "text":
            return row_formats.tokenize_rows(rows, kind, self.tokenizer)
        start = [] if self.shares_ends or not ends[0] else self.start
        end = [self.tokenizer.eos_token_id] if ends[1] else []
        texts = [row["text"] for row, _ in rows]
        before = "" if ends[0] else "a" if texts[0][:1].isspace() else "\n"
        after = "" if ends[1] else "a" if texts[0][-1:].isspace() else "\na"
        found = tokenizing.tokenize_texts(texts, self.tokenizer, before, after)
        texts = [np.concatenate([start, ids, end]).astype(np.int32) for ids in found]
        return [(ids, np.ones(len(ids), np.uint8)) for ids in texts]

    def question(self, row: dict) -> list[int]:
        kind = "prompt" if "prompt" in row else "chat"
        return row_formats.question_tokens(row, kind, self.tokenizer)

    def pack(self, texts: list, facts: dict) -> np.ndarray:
        return packing.pack_best_fit(
            texts, self.length, self.longest, self.too_long, self.dtype, facts
        )


# ---- The end -------------------------------------------------------------------------------------


def finish(
    inputs: list[TextInput], owners: list[int], folder: Path, maker: RowMaker, validation_rows: int
) -> dict[str, Any]:
    """Writes what the units have in common; the facts for the index of the prepared folder."""
    done = [read_unit(folder, number) for number in range(len(owners))]
    parts: dict[str, list] = {"train": [], "validation": []}
    counts, most_texts = np.ones(len(maker.tokenizer), np.int64), 0
    trains = [i for i, each in enumerate(inputs) if not each.held]
    for source, each in enumerate(inputs):
        own = [i for i, owner in enumerate(owners) if owner == source]
        part, totals = "validation" if each.held else "train", {}
        for name in ("texts", "tokens", "long", "empty", "used"):
            totals[name] = sum(done[i][name] for i in own)
        files = [(f"{i:06}.tokens", done[i]["tokens"]) for i in own if done[i]["tokens"]]
        parts[part].append(list_rows(each, source, files, folder, maker, part))
        say_prepared(each, totals, parts[part][-1][1], maker, part)
        if not each.held:
            for i in own:
                seen, times = np.fromfile(folder / f"{i:06}.counts", "<u4").reshape(2, -1)
                counts[seen] += times
        held = [i for i in own if done[i]["held"]]
        if held:
            files = [(f"{i:06}.held", done[i]["held"]) for i in held]
            if maker.best_fit:
                facts: dict = {"long": 0, "empty": 0, "used": 0, "most_texts": 0}
                block = maker.pack([t for i in held for t in read_held(folder, i, maker)], facts)
                most_texts = max(most_texts, facts["most_texts"])
                files = [(f"held-{source}.tokens", block.size)]
                block.tofile(folder / files[0][0])
            name, rows, files = list_rows(each, source, files, folder, maker, "validation")
            rows = min(rows, max(1, validation_rows // len(trains)))
            number = max(sum(done[i]["held_texts"] for i in held), 1)
            of = "" if len(trains) == 1 else f" of {one_line(name, 60)}"
            texts = f"{number:,} text{'s' * (number > 1)}"
            print(f"Preparing data: held out{of} {rows:,} rows, from {texts}", flush=True)
            parts["validation"].append([name, rows, files])
        most_texts = max([most_texts, *(done[i]["most_texts"] for i in own)])
    if not parts["validation"]:
        raise ValueError("task.validation_fraction: nothing is held out; raise it")
    np.save(folder / "bytes.npy", tokenizing.token_bytes(maker.tokenizer))
    np.save(folder / "unigram_loss.npy", -np.log(counts / counts.sum()))
    questions = [tokens for facts in done for tokens in facts["questions"]][:2]
    prompts = {f"held out {number}": tokens for number, tokens in enumerate(questions, 1)}
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    rows = {"length": maker.length, "dtype": maker.dtype, "packed": maker.best_fit}
    rows |= {"parts": parts, "most_texts": most_texts}
    (folder / token_rows.FACTS).write_text(json.dumps(rows), encoding="utf-8")
    for scanned in [*folder.glob("scan-*"), *folder.glob(".*.trash")]:
        remove(scanned)
    written = {name: value for each in done for name, value in each["files"].items()}
    digests = {name: digest for name, (_, digest) in written.items() if not name.endswith("counts")}
    unnamed = {part: [each[1:] for each in several] for part, several in parts.items()}
    content = json.dumps([sorted(digests.items()), {**rows, "parts": unnamed}], sort_keys=True)
    return {"content": hashlib.sha256(content.encode()).hexdigest(), "hashed": written}


def list_rows(
    source: TextInput, number: int, files: list, folder: Path, maker: RowMaker, part: str
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
                f"task.context_length: no answer of {part} begins within {maker.longest} tokens; "
                "raise it, or give --task.too_long split"
            )
        return [source.name, total // (3 * maker.length), files]
    if total <= maker.length:
        purpose, field = ("train", "data") if part == "train" else ("evaluate", source.field)
        data, raised = getattr(source.cfg, field), part != "train" and not source.held
        raise ValueError(
            f"task.{field}: {one_line(data, 100)} has {total} tokens to {purpose} on, which do not "
            f"fill a row of {maker.length + 1}; add text, "
            + "raise task.validation_fraction or task.validation_rows, " * raised
            + "or lower task.context_length"
        )
    return [source.name, -(-(total - 1) // maker.length), files]


def read_held(folder: Path, unit: int, maker: RowMaker) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The texts of a unit that are held out: token ids, loss mask."""
    names = (("held", maker.dtype), ("held-mask", np.uint8), ("held-sizes", "<i8"))
    ids, mask, sizes = (np.fromfile(folder / f"{unit:06}.{name}", kind) for name, kind in names)
    ends = np.cumsum(sizes)[:-1]
    yield from zip(np.split(ids, ends), np.split(mask, ends), strict=True)


def say_prepared(source: TextInput, totals: dict, rows: int, maker: RowMaker, part: str) -> None:
    if totals["long"] or totals["empty"]:
        print(
            f"Prepared {part}: {totals['long']:,} of {totals['texts']:,} texts are longer than "
            f"{maker.longest} tokens (the most that a row or the model holds) and were "
            f"{maker.too_long}"
            + f"; {totals['empty']:,} pieces without a loss term were left out"
            * bool(totals["empty"]),
            flush=True,
        )
    used = totals["used"] if maker.best_fit else totals["tokens"]
    purpose = "train" if part == "train" else "evaluate"
    size = totals["tokens"] // 3 if maker.best_fit else totals["tokens"]
    print(
        f"Prepared: {rows:,} rows of {maker.length} tokens to {purpose} on, "
        f"{used / max(size, 1):.1%} of them useful, the rest padding; "
        f"{used:,} tokens, {used / max(totals['texts'], 1):,.0f} in a text",
        flush=True,
    )
