"""The report of a verb: a table on the screen, hardware.json, and what got slower since."""

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.base.console import escaped, one_line, say
from samestep.base.files import read_text, replace_text
from samestep.processes.ranks import catch

FORMAT = 1  # of hardware.json
MOST_ROWS = 4  # of the table, for a figure of several devices; of more it shows two in one row


@dataclass(frozen=True)
class Figure:
    """A number that was measured.

    Units of time ("s", "ms", "us") are better if lower, and those with "/s" if higher; `--compare`
    looks at no others. `where` is a device ("0") or a pair ("0-1"), empty: all processes together.
    `size` is the x of a curve: bytes of a message, or processes.
    """

    name: str
    value: float
    unit: str
    where: str = ""
    size: int = 0
    peak: float | None = None  # of the device, by its data sheet, in the same unit

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from the other figures of its section."""
        return (self.name, self.where, self.size)


@dataclass
class Section:
    """What a verb found. `failures` make samestep hardware exit with 1."""

    verb: str
    facts: dict[str, Any] = field(default_factory=dict)  # names, versions, settings: not compared
    conditions: dict[str, Any] = field(default_factory=dict)  # must be equal for `compare`
    figures: list[Figure] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # advice in words, in order
    failures: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The section of hardware.json."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        entries = dataclasses.asdict(self)
        entries["figures"] = [
            {n: v for n, v in each.items() if v not in ("", None) and (n, v) != ("size", 0)}
            for each in entries["figures"]
        ]
        return {"time": now, **entries}


def show(section: Section) -> None:
    """Prints facts, figures and advice."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if section.facts:
        table = Table(title=section.verb, show_header=False)
        for name, value in section.facts.items():
            table.add_row(escaped(name), escaped(readable(value), kept="\n"))
        console.print(table)
    if section.figures:
        table, rows = Table(title=f"{section.verb}: figures"), []
        for group in side_by_side(section.figures):
            shares = [f"{each.value / each.peak:.0%}" for each in group if each.peak]
            cells = [each.where for each in group], [short(each.value) for each in group], shares
            where, value, share = (" .. ".join(dict.fromkeys(cell)) for cell in cells)
            rows.append((group[0].name, where, value, group[0].unit, share))
        columns = list(zip(*rows, strict=True))
        headings = ("what", "where", "value", "unit", "of the peak")
        kept = [i for i, cells in enumerate(columns) if any(cells)]
        for i in kept:
            table.add_column(headings[i], justify="right" if headings[i] == "value" else "left")
        for row in rows:
            table.add_row(*(escaped(row[i]) for i in kept))
        console.print(table)
    for line in section.lines:
        console.print(escaped(line))
    for line in section.failures:
        console.print(f"failed: {escaped(line)}")


def side_by_side(figures: list[Figure]) -> list[list[Figure]]:
    """The rows of the table: one figure; or of many devices the lowest and the highest."""
    rows: dict[tuple, list[Figure]] = {}
    for each in figures:
        rows.setdefault((each.name, each.size), []).append(each)
    found = []
    for row in rows.values():
        if len(row) <= MOST_ROWS:
            found += [[each] for each in row]
        else:
            low, *_, high = sorted(row, key=lambda each: each.value)
            found.append([low, high])
    return found


def short(value: float) -> str:
    """A number with four digits, or all before the point: 0.1234, 12.34, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def readable(value: Any) -> str:
    """A fact as text: of a list one entry a line, of a mapping one pair a line."""
    if isinstance(value, dict):
        return "\n".join(f"{name}: {readable(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return "\n".join(map(readable, value))
    return str(value)


def load(path: Path) -> dict[str, Any]:
    """The content of a hardware.json; raises ValueError if it is none."""
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        raise ValueError(f"{one_line(path, 100)}: {error.strerror}") from None
    except (ValueError, RecursionError):
        content = None
    if not is_report(content):
        raise ValueError(
            f"{one_line(path, 100)} is no hardware.json of this version of the program; give one "
            "that `python -m samestep hardware bench` has written"
        )
    return content


def is_report(content: Any) -> bool:
    """Whether this is the content of a hardware.json, so that `compare` can read it."""
    try:
        sections = [each for name, each in content.items() if name != "format"]
        figures = [figure for section in sections for figure in section["figures"]]
        texts = [figure[name] for figure in figures for name in ("name", "unit")]
        texts += [figure.get("where", "") for figure in figures]
        numbers = [number for each in figures for number in (each["value"], each.get("size", 0))]
        mappings = [section["conditions"] for section in sections]
    except (AttributeError, KeyError, TypeError):
        return False
    kinds: list[tuple[list, Any]] = [(texts, str), (numbers, (int, float)), (mappings, dict)]
    typed = all(isinstance(each, kind) for values, kind in kinds for each in values)
    return typed and content.get("format") == FORMAT


def prepare_folder(folder: Path) -> None:
    """Creates the folder for hardware.json; raises ValueError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"{error.strerror or error}; give a folder that can be written to"
        raise ValueError(f"--report {folder}: {reason}") from None


def save(folder: Path, section: Section) -> dict[str, Any]:
    """Adds the section to hardware.json in this folder, which it creates; returns the content.

    A file that is no hardware.json of this version stays, under another name.
    """
    prepare_folder(folder)
    path = folder / "hardware.json"
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)  # another verb may end at the same time
        content = {"format": FORMAT}
        if path.exists():
            older, problem = catch(load, path)
            if problem:
                kept = free_name(path)
                path.rename(kept)
                say(f"{problem}; it is kept as {kept.name}")
            content = older or content
        content[section.verb] = section.as_json()
        replace_text(path, json.dumps(content, indent=1) + "\n")
        return content
    except OSError as error:  # of a full disk: it names no file
        raise ValueError(f"{path} is not written: {error.strerror or error}") from None
    finally:
        os.close(handle)


def free_name(path: Path) -> Path:
    """The path with .broken, .broken2, ... behind it, the first that is free."""
    names = (f"{path.name}.broken{n if n > 1 else ''}" for n in itertools.count(1))
    return next(path.with_name(name) for name in names if not path.with_name(name).exists())


# ---- Comparison ----------------------------------------------------------------------------------


def number(kind: type, most: float) -> Callable[[str], float]:
    """A type for argparse: numbers above 0, up to `most`."""

    def convert(text: str) -> float:
        value, problem = catch(kind, text)
        if problem or not 0 < value <= most:
            wanted = f"a {'whole ' if kind is int else ''}number above 0, up to {most:,}"
            raise argparse.ArgumentTypeError(f"expected {wanted}; got {one_line(repr(text), 60)}")
        return value

    return convert


def threshold(text: str) -> float:
    """A fraction between 0 and 1, for argparse."""
    value, problem = catch(float, text)
    if problem or not 0 < value < 1:
        raise argparse.ArgumentTypeError(
            f"{one_line(text, 60)} is no fraction between 0 and 1; 0.1 means 10 % slower"
        )
    return value


def check_comparable(verb: str, conditions: dict[str, Any], old: dict[str, Any]) -> None:
    """Raises ValueError if the older report says nothing about this verb, or of other things."""
    if not any(is_compared(each["unit"]) for each in old.get(verb, {}).get("figures", [])):
        raise ValueError(f"the older report has no speeds of {verb}; nothing can be compared")
    before = old[verb]["conditions"]
    differ = [
        f"{name} was {one_line(before[name], 100)} and is {one_line(conditions[name], 100)}"
        for name in before.keys() & conditions.keys()
        if before[name] != conditions[name]
    ]
    if differ:
        raise ValueError(f"the older report is of something else: {'; '.join(sorted(differ))}")


def is_compared(unit: str) -> bool:
    """Whether figures of this unit become better or worse: times and speeds."""
    return unit in ("s", "ms", "us") or unit.endswith("/s")


def compare(section: Section, old: dict[str, Any], limit: float) -> tuple[list[str], list[str]]:
    """(lines about all changes, those about figures that are slower by more than `limit`, or gone).

    `old` is the content of an older hardware.json. Raises ValueError for `check_comparable`.
    """
    check_comparable(section.verb, section.conditions, old)
    before = {
        (each["name"], each.get("where", ""), each.get("size", 0), each["unit"]): each["value"]
        for each in old[section.verb]["figures"]
        if is_compared(each["unit"])
    }
    lines, worse = [], []
    for each in [figure for figure in section.figures if is_compared(figure.unit)]:
        was = before.pop((*each.key, each.unit), None)
        where = f" ({each.where})" if each.where else ""
        line = f"{each.name}{where}: {short(each.value)} {each.unit}"
        if was is None or not 0 < was < math.inf:
            lines.append(f"{line}, not in the older report")
            continue
        ratio = each.value / was if each.unit.endswith("/s") else was / (each.value or math.nan)
        change = f"{abs(ratio - 1):.0%} {'faster' if ratio >= 1 else 'slower'}"
        if not 0 <= ratio < math.inf:
            ratio, change = 0.0, "which is no measurement"
        lines.append(f"{line}, was {short(was)}: {change}")
        worse += lines[-1:] if ratio < 1 - limit else []
    missing = [
        f"{name}{f' ({where})' if where else ''}: only in the older report"
        for name, where, *_ in before
    ]
    lines += missing
    worse += missing
    if not any(", was " in line for line in lines):
        raise ValueError(f"the older report has none of these figures of {section.verb}")
    return lines, worse
