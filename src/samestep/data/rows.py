"""Rows of a task as `datasets`: read and checked on all cores, and split by their content.

Readers give rows to Dataset.from_generator in parts that follow from the files. Problems travel in
a column, and the first in the order of the rows is raised: so all is the same for any number of
processes.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np

from samestep.base.console import one_line
from samestep.data import hub, sources, splits, tables
from samestep.data.sources import IncompleteRow, UselessRow
from samestep.data.tables import Columns, Row, Span

SPAN = 8_000_000  # bytes of a .jsonl that a process reads at a time
DOCUMENT = 1 << 20  # bytes of a .txt above which it is several documents
HUB_ROWS = 10_000  # rows of the Hub that a process reads at a time
# Beside the columns of a row: hashes of what decides whether it is held out and of its content, its
# size in bytes, what is wrong with it, and what to count of it.
NOTES = {
    "group": datasets.Value("int64"),
    "content": datasets.Value("int64"),
    "size": datasets.Value("int64"),
    "problem": datasets.Value("string"),
    "kind": datasets.Value("string"),
    "remarks": datasets.Value("string"),
}
KEPT = {"place": datasets.Value("string")}  # in the rows that a task gets
PROBLEM, INCOMPLETE, USELESS = "problem", "incomplete", "useless"


class RowKind(NamedTuple):
    """What a task reads of its rows."""

    columns: Callable[[Any], Columns]  # the column of each role, of the config of a source
    # Makes of a row the values that are stored, and remarks to count. Raises ValueError for a row
    # that cannot be used, IncompleteRow for one that may be left out, UselessRow for one that is.
    normalize: Callable[[dict], tuple[dict[str, str], list[str]]]
    features: dict[str, Any]  # of the values that are stored
    extensions: tuple[str, ...]  # of files
    bundled: dict[str, Callable[[], Iterable[Row]]]  # rows of data that the task brings along
    optional: Container[str] = ()  # roles whose column may be missing
    documents: bool = False  # a large .txt is cut into documents


class Part(NamedTuple):
    """Rows that a process reads at a time: of a file or a part of it, of the Hub, or bundled."""

    field: str  # of the config, for messages
    columns: Columns
    path: str = ""  # of a file
    span: Span = tables.WHOLE
    block: int = 0  # bytes of a document, for a .txt that is cut
    bundled: str = ""
    split: str = ""  # of the Hub
    source: str = ""  # its name


def num_processes(rows: int) -> int | None:
    """Processes for `map` over so many rows: the cores of this process; None: it alone."""
    cores = min(len(os.sched_getaffinity(0)), rows // 500)
    return cores if cores > 1 else None


# ---- Reading -------------------------------------------------------------------------------------


def parts_of(cfg: Any, field: str, kind: RowKind, name: str) -> list[Part]:
    """The rows that a field of the config of one source names, in parts that do not depend on the
    number of processes."""
    columns = dict(kind.columns(cfg))
    if cfg.group_column:
        columns["group"] = cfg.group_column
    if field == "data" and cfg.data in kind.bundled:
        return [Part(field, columns, bundled=cfg.data, source=name)]
    if field.endswith("split"):
        rows = len(hub.load_hub_split(cfg, getattr(cfg, field), field))
        bounds = range(0, max(rows, 1), HUB_ROWS)
        spans = [Span(start, min(start + HUB_ROWS, rows)) for start in bounds]
        whole = Part(field, columns, split=getattr(cfg, field), source=name)
        return [whole._replace(span=span) for span in spans]
    files = sources.list_files(getattr(cfg, field), kind.extensions, field)
    found: list[Part] = []
    for path in files:
        size, ending = path.stat().st_size, tables.file_ending(path)
        whole = Part(field, columns, str(path), source=name)
        if kind.documents and ending not in tables.TABLES:
            block = DOCUMENT
            if len(files) == 1 and field == "data":  # some of it has to be held out
                block = min(block, max(1, int(size * cfg.validation_fraction)))
            found.append(whole._replace(block=block))
        elif ending == ".jsonl" and path.suffix == ".jsonl" and size > SPAN:
            bounds = [*pairwise([*range(0, size - SPAN // 2, SPAN), size])]
            spans = [Span(start, stop, None if start else 0) for start, stop in bounds]
            spans[-1] = spans[-1]._replace(stop=None)
            found += [whole._replace(span=span) for span in spans]
        else:
            found.append(whole)
    return found


def read_part(part: Part, cfg: Any, kind: RowKind) -> Iterator[Row]:
    """The rows of a part, each with its place."""
    if part.bundled:
        yield from kind.bundled[part.bundled]()
    elif part.split:
        dataset = hub.open_columns(cfg, part.split, part.columns, part.field, kind.optional)
        place = f"{cfg.data}, split {part.split}"
        yield from hub.read_range(dataset, part.columns, place, part.span.start, part.span.stop)
    elif part.block:
        yield from read_documents(Path(part.path), part.field, part.block)
    else:
        path = Path(part.path)
        yield from tables.read_rows(path, part.columns, part.field, kind.optional, part.span)


def read_documents(path: Path, field: str, block: int) -> Iterator[Row]:
    """A .txt file as documents of about this many bytes, cut at line ends."""
    place, lines, size, number = one_line(path, 200), [], 0, 0
    try:
        with tables.open_at(path) as file:
            start = 1
            for number, line in enumerate(file, 1):
                lines.append(line.decode())
                size += len(line)
                if size >= block:
                    yield {"text": "".join(lines)}, f"{place}, line {start}"
                    lines, size, start = [], 0, number + 1
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save it as UTF-8"
        raise ValueError(f"task.{field}: cannot read {place}, line {number}: {byte}") from None
    except OSError as error:
        raise ValueError(f"task.{field}: cannot read {place}: {one_line(error)}") from None
    if lines or not number:
        yield {"text": "".join(lines)}, f"{place}, line {start}"


def hash_of(text: str) -> int:
    """64 bits for a text, the same on every machine, as a signed number."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big", signed=True)


def read_rows(parts: list[Part], cfg: Any, kind: RowKind) -> Iterator[dict]:
    """What Dataset.from_generator gets: the rows of some parts, with NOTES."""
    nothing = {name: "" for name in kind.features}
    for part in parts:
        numbers = {"group": 0, "content": 0, "size": 0, "problem": "", "kind": "", "remarks": ""}
        numbers["source"] = part.source
        rows = read_part(part, cfg, kind)
        while True:
            try:
                row, place = next(rows)
            except StopIteration:
                break
            except ValueError as error:  # the file cannot be read any further
                yield {**nothing, **numbers, "problem": str(error), "kind": PROBLEM, "place": ""}
                break
            place = str(place)
            try:
                group = row.pop("group", None)
                stored, remarks = kind.normalize(row)
            except ValueError as error:
                what = USELESS if isinstance(error, UselessRow) else PROBLEM
                if isinstance(error, IncompleteRow) and what == PROBLEM:
                    what = INCOMPLETE
                problem = {"problem": str(error), "kind": what, "place": place}
                yield {**nothing, **numbers, **problem}
                continue
            key = json.dumps(stored, ensure_ascii=False, sort_keys=True)
            content = hash_of(key)
            held = content if "group" not in part.columns else hash_of(str(group))
            notes = {"group": held, "content": content, "size": len(key.encode()), "place": place}
            yield {**stored, **numbers, **notes, "remarks": json.dumps(remarks)}


def read_source(cfg: Any, field: str, kind: RowKind, name: str, names: list[str]) -> Any:
    """The rows of one source that can be used, a datasets.Dataset, and a Counter of those that are
    left out, by the reason.

    Raises ValueError for the first row that cannot be used. `names`: of all sources.
    """
    parts = parts_of(cfg, field, kind, name)
    cores = min(len(os.sched_getaffinity(0)), len(parts))
    own = {"source": datasets.ClassLabel(names=names)}
    rows = datasets.Dataset.from_generator(
        read_rows,
        datasets.Features({**kind.features, **own, **KEPT, **NOTES}),
        gen_kwargs={"parts": parts, "cfg": cfg, "kind": kind},
        num_proc=cores if cores > 1 else None,
        fingerprint=sha256(f"{name} {field}".encode()).hexdigest()[:16],
        writer_batch_size=100 if kind.documents else 1000,
    )
    kinds = np.array(rows.data.column("kind").to_pylist(), dtype=object)
    left_out: Counter = Counter()
    for number in np.flatnonzero(kinds != "").tolist():
        row = rows[number]
        if row["kind"] == PROBLEM:
            place = f"task.{field}: {row['place']}: " if row["place"] else ""
            raise ValueError(f"{place}{row['problem']}")
        error = {INCOMPLETE: IncompleteRow, USELESS: UselessRow}[row["kind"]](row["problem"])
        sources.leave_out(error, row["place"], cfg, field, left_out)
    if left_out:
        rows = keep(rows, kinds == "")
    if not len(rows):
        data = one_line(getattr(cfg, field), 100)
        raise ValueError(f"task.{field}: there are no rows in {data}")
    return rows, left_out


def keep(rows: datasets.Dataset, mask: np.ndarray) -> datasets.Dataset:
    """The rows where the mask is true. (`select` reads each row through a list of indices, which
    takes 0.1 ms.)"""
    choose = lambda table, places: table.filter(mask[places[0] : places[-1] + 1])  # noqa: E731
    chosen = rows.with_format("arrow").map(choose, batched=True, with_indices=True)
    return chosen.with_format(None)


# ---- Splits --------------------------------------------------------------------------------------


def load_rows(cfg: Any, kind: RowKind, plural: str = "rows", most_bytes: int = 0) -> Any:
    """The rows of all sources that cfg.data names: a DatasetDict with train and validation.

    Each row has the features of `kind`, its `source` (ClassLabel), and its `place` for messages.
    `most_bytes`: of the rows that are held out; 0: cfg.validation_rows rows. Raises ValueError for
    rows that cannot be used, and where none can be held out.
    """
    train, validation, left_out = [], [], Counter()  # type: ignore[var-annotated]
    given = sources.by_source(cfg, kind.extensions)
    names = [source.name for source, _ in given]
    for source, own in given:
        bundled = own.data in kind.bundled
        sources.print_skipped_files(own, kind.extensions, bundled)
        on_hub = not bundled and hub.is_hub_name(own.data)
        if on_hub:
            hub.check_commit(own)
        fields = ["data_split" if on_hub else "data"]
        if own.validation_data:
            fields.append("validation_data")
        elif on_hub and own.validation_split:
            fields.append("validation_split")
        for field in fields:
            name, known = source.name, names
            if field == "validation_data" and own.validation_data != own.data:
                name = Path(own.validation_data).name
                known = [name]
            rows, more = read_source(own, field, kind, name, known)
            sources.add_left_out(left_out, more)
            describe(rows, own.validation_data if field == "validation_data" else own.data, plural)
            (train if field == fields[0] else validation).append(rows)
    read = sum(map(len, [*train, *validation])) + left_out.total()
    equal = sum(len(rows) - len(np.unique(column(rows, "content"))) for rows in train)
    if validation:
        known = np.concatenate([column(rows, "content") for rows in train])
        contents = np.concatenate([column(rows, "content") for rows in validation])
        sources.say_overlap(int(np.isin(contents, known).sum()), len(contents))
    else:
        train, validation = hold_out(cfg, train, most_bytes)
    columns = [*kind.features, "source", *KEPT]
    found = datasets.DatasetDict()
    for split, parts in (("train", train), ("validation", validation)):
        found[split] = datasets.concatenate_datasets([p.select_columns(columns) for p in parts])
    sizes = [len(rows) for rows in found.values()]
    remark = f"; {equal:,} are equal to others" if equal else ""
    sources.say_prepared(plural, read, sizes[0], f"{sizes[1]:,}", left_out, remark)
    return found


def hold_out(cfg: Any, train: list[Any], most_bytes: int) -> tuple[list[Any], list[Any]]:
    """Splits the rows of each source by the hash of their content, or of their group."""
    kept, held = [], []
    most = (most_bytes or max(len(train), cfg.validation_rows)) / len(train)
    for rows in train:
        hashes = column(rows, "group").view("<u8")
        sizes = column(rows, "size") if most_bytes else np.ones(len(rows))
        limits = splits.extremes([(hashes, np.zeros(len(rows), int))])
        chosen = splits.hold_out(hashes, sizes, limits, cfg.validation_fraction, most)
        is_held = splits.is_in(hashes, chosen)
        if not is_held.any() or is_held.all():
            what = "rows are of one group" if cfg.group_column else "rows are equal"
            raise ValueError(f"task.data: all {what}; add others, to hold some out")
        kept.append(keep(rows, ~is_held))
        held.append(keep(rows, is_held))
    return kept, held


def column(rows: datasets.Dataset, name: str) -> np.ndarray:
    """A column of numbers, in the order of the rows."""
    return rows.data.column(name).to_numpy()


def describe(rows: datasets.Dataset, data: str, plural: str) -> None:
    """Prints the number of rows, and how many have each remark."""
    counts: Counter = Counter()
    for text, number in Counter(rows.data.column("remarks").to_pylist()).items():
        for each in json.loads(text or "[]"):
            counts[each] += number
    print(f"Preparing data: {len(rows):,} {plural} of {one_line(data, 100)}", flush=True)
    for each in sorted(counts):
        print(f"Preparing data: in {counts[each]:,} {plural} {each}", flush=True)
