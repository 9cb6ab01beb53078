"""The report: tables on the screen, hardware.json, and what got slower since an older one."""

import argparse
import dataclasses
import datetime
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.base.console import escaped, one_line, say
from samestep.base.files import read_text, replace_text
from samestep.hardware import places
from samestep.processes.ranks import catch

FORMAT = 1  # of hardware.json
REPORT, BASELINE = "hardware.json", "baseline.json"  # in the folder --report


@dataclass(frozen=True)
class Figure:
    """A number that was measured.

    Units of time ("us") are better if lower, and those with "/s" if higher; no others are compared.
    `where` is a device ("0") or a pair ("0-1"), empty: all processes together. `size` is the x of a
    curve: bytes of a message, or processes.
    """

    name: str
    value: float
    unit: str
    where: str = ""
    size: int = 0
    peak: float | None = None  # of the device, by its data sheet, in the same unit


@dataclass
class Section:
    """What a verb found. `failures` make samestep hardware exit with 1."""

    verb: str
    facts: dict[str, Any] = field(default_factory=dict)  # names, versions, settings: not compared
    conditions: dict[str, Any] = field(default_factory=dict)  # must be equal for `compare`
    figures: list[Figure] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # advice in words, in order
    failures: list[str] = field(default_factory=list)


def number(kind: type, most: float) -> Callable[[str], float]:
    """A type for argparse: numbers above 0, up to `most`."""

    def convert(text: str) -> float:
        value, problem = catch(kind, text)
        if problem or not 0 < value <= most:
            wanted = f"a {'whole ' if kind is int else ''}number above 0, up to {most:,}"
            raise argparse.ArgumentTypeError(f"expected {wanted}; got {one_line(repr(text), 60)}")
        return value

    return convert


# ---- On the screen -------------------------------------------------------------------------------


def show(section: Section) -> None:
    """Prints facts, figures and advice."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if section.facts:
        table = Table(title=section.verb, show_header=False)
        for name, value in section.facts.items():
            if isinstance(value, dict):
                value = [
                    f"{key}: {short(each) if isinstance(each, float) else each}"
                    for key, each in value.items()
                ]
            text = "\n".join(value) if isinstance(value, list) else str(value)
            table.add_row(escaped(name), escaped(text, kept="\n"))
        console.print(table)
    if section.figures:
        table = Table(title=f"{section.verb}: figures")
        for heading in ("what", "where", "value", "unit"):
            table.add_column(heading, justify="right" if heading == "value" else "left")
        if any(each.peak for each in section.figures):
            table.add_column("of the peak")
        for alike in places.group([each.name for each in section.figures]).values():
            row = sorted((section.figures[n] for n in alike), key=lambda each: each.value)
            ends = [row[0], row[-1]]  # of several devices the lowest and the highest
            shares = [f"{each.value / each.peak:.0%}" for each in ends if each.peak]
            cells = [each.where for each in ends], [short(each.value) for each in ends], shares
            where, value, share = (" .. ".join(dict.fromkeys(cell)) for cell in cells)
            last = [share] if len(table.columns) > 4 else []
            table.add_row(escaped(row[0].name), escaped(where), value, row[0].unit, *last)
        console.print(table)
    for line in [*section.lines, *(f"failed: {line}" for line in section.failures)]:
        console.print(escaped(line))


def short(value: float) -> str:
    """A number with four digits, or all before the point: 0.1234, 12.34, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# ---- hardware.json -------------------------------------------------------------------------------


def load(path: Path) -> dict[str, Any]:
    """The content of a hardware.json; raises ValueError if it is none."""
    content, _ = catch(json.loads, read_text(path))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{one_line(path, 100)} is no hardware.json of this version of the program; give one "
            "that `python -m samestep hardware` has written"
        )
    return content


def prepare_folder(folder: Path) -> None:
    """Creates the folder for hardware.json; raises an error if nothing can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    if (folder / REPORT).exists():  # a file of someone else is not replaced
        load(folder / REPORT)


def finish(sections: list[Section], folder: Path, old: dict[str, Any], limit: float) -> int:
    """Prints and saves what was found, and compares it with an older report, if one is given; the
    exit code."""
    path, slower = folder / REPORT, 0
    content = load(path) if path.exists() else {"format": FORMAT}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    for section in sections:
        show(section)
        content[section.verb] = {"time": now, **dataclasses.asdict(section)}
    replace_text(path, json.dumps(content, indent=1) + "\n")
    say(f"figures: {path}")
    for section in sections if old else ():
        slower += compare(section, old, limit)
    return int(slower > 0 or any(section.failures for section in sections))


# ---- Comparison ----------------------------------------------------------------------------------


def speeds(figures: list[dict[str, Any]]) -> dict[tuple[str, str, str], float]:
    """The values of times and speeds by (name, where, unit)."""
    return {
        (each["name"], each.get("where", ""), each["unit"]): each["value"]
        for each in figures
        if each["unit"] == "us" or each["unit"].endswith("/s")
    }


def check_comparable(verbs: list[str], conditions: dict[str, Any], old: dict[str, Any]) -> None:
    """Raises ValueError if the older report says nothing about these verbs, or of other things."""
    known = [old[verb] for verb in verbs if speeds(old.get(verb, {}).get("figures", []))]
    if not known:
        raise ValueError(f"the older report has no speeds of {', '.join(verbs)}")
    differ = {
        f"{name} was {one_line(before, 100)} and is {one_line(conditions[name], 100)}": None
        for each in known
        for name, before in sorted(each["conditions"].items())
        if name in conditions and before != conditions[name]
    }
    if differ:
        raise ValueError(f"the older report is of something else: {'; '.join(differ)}")


def compare(section: Section, old: dict[str, Any], limit: float) -> int:
    """Prints what has changed by more than `limit` since an older report that `check_comparable`
    has passed; the number of figures that are slower by more, or gone."""
    before = speeds(old.get(section.verb, {}).get("figures", []))
    now = speeds([dataclasses.asdict(each) for each in section.figures])
    slower = 0
    for key in before:
        name, where, unit = key
        value, was = now.get(key, math.nan), before[key]
        ratio = value / was if unit.endswith("/s") else was / value
        slower += not ratio >= 1 - limit  # NaN, too
        if not abs(ratio - 1) <= limit:
            place = f"{section.verb}, {name}" + (f" ({where})" if where else "")
            change = f"{abs(ratio - 1):.0%} {'faster' if ratio >= 1 else 'slower'}"
            change = "only in the older report" if key not in now else change
            say(f"{place}: {short(value)} {unit}, was {short(was)}: {change}")
    if before:
        missing = f"more than {limit:.0%} slower than in the older report, or missing"
        say(f"{section.verb}: {slower} of {len(before)} figures are {missing}")
    return slower
