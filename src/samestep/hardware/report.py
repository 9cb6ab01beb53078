"""The report of a verb: a table on the screen, hardware.json, and what got slower since."""

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


@dataclass(frozen=True)
class Figure:
    """A number that was measured.

    Units of time ("us") are better if lower, and those with "/s" if higher; `--compare` looks at no
    others. `where` is a device ("0") or a pair ("0-1"), empty: all processes together. `size` is
    the x of a curve: bytes of a message, or processes.
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


def show(section: Section) -> None:
    """Prints facts, figures and advice."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if section.facts:
        table = Table(title=section.verb, show_header=False)
        for name, value in section.facts.items():
            table.add_row(escaped(name), escaped(readable(value), kept="\n"))
        console.print(table)
    if section.figures:
        table = Table(title=f"{section.verb}: figures")
        for heading in ("what", "where", "value", "unit", "of the peak"):
            table.add_column(heading, justify="right" if heading == "value" else "left")
        for alike in places.group([each.name for each in section.figures]).values():
            row = sorted((section.figures[n] for n in alike), key=lambda each: each.value)
            ends = [row[0], row[-1]]  # of several devices the lowest and the highest
            shares = [f"{each.value / each.peak:.0%}" for each in ends if each.peak]
            cells = [each.where for each in ends], [short(each.value) for each in ends], shares
            where, value, share = (" .. ".join(dict.fromkeys(cell)) for cell in cells)
            table.add_row(escaped(row[0].name), escaped(where), value, row[0].unit, share)
        console.print(table)
    for line in [*section.lines, *(f"failed: {line}" for line in section.failures)]:
        console.print(escaped(line))


def short(value: float) -> str:
    """A number with four digits, or all before the point: 0.1234, 12.34, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def readable(value: Any) -> str:
    """A fact as text: of a list one entry a line, of a mapping one pair a line."""
    if isinstance(value, dict):
        value = [f"{name}: {each}" for name, each in value.items()]
    return "\n".join(value) if isinstance(value, list) else str(value)


def load(path: Path) -> dict[str, Any]:
    """The content of a hardware.json; raises ValueError if it is none."""
    content, _ = catch(json.loads, read_text(path))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{one_line(path, 100)} is no hardware.json of this version of the program; give one "
            "that `python -m samestep hardware bench` has written"
        )
    return content


def prepare_folder(folder: Path) -> None:
    """Creates the folder for hardware.json; raises an error if nothing can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    if (folder / "hardware.json").exists():  # a file of someone else is not replaced
        load(folder / "hardware.json")


def save(folder: Path, section: Section) -> Path:
    """Adds the section to hardware.json in this folder; the file."""
    path = folder / "hardware.json"
    entries = dataclasses.asdict(section)
    entries["figures"] = [
        {n: v for n, v in each.items() if v not in ("", None) and (n, v) != ("size", 0)}
        for each in entries["figures"]
    ]
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    content = load(path) if path.exists() else {"format": FORMAT}
    content[section.verb] = {"time": now, **entries}
    replace_text(path, json.dumps(content, indent=1) + "\n")
    return path


def finish(section: Section, options: argparse.Namespace, old: dict[str, Any]) -> int:
    """Prints, saves and compares what a verb has found; the exit code."""
    show(section)
    say(f"figures: {save(options.report, section)}")
    worse = []
    if old:
        changes, worse = compare(section, old, options.threshold)
        say("\n".join([f"compared with {options.compare}:", *changes]))
        slower = f"more than {options.threshold:.0%} slower, or missing"
        say(f"{len(worse)} of {len(changes)} figures are {slower}")
    return 1 if section.failures or worse else 0


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


def is_compared(unit: str) -> bool:
    """Whether figures of this unit become better or worse: times and speeds."""
    return unit == "us" or unit.endswith("/s")


def check_comparable(verb: str, conditions: dict[str, Any], old: dict[str, Any]) -> None:
    """Raises ValueError if the older report says nothing about this verb, or of other things."""
    if not any(is_compared(each["unit"]) for each in old.get(verb, {}).get("figures", [])):
        raise ValueError(f"the older report has no speeds of {verb}; nothing can be compared")
    before = old[verb]["conditions"]
    differ = [
        f"{name} was {one_line(before.get(name), 100)} and is {one_line(value, 100)}"
        for name, value in sorted(conditions.items())
        if before.get(name) != value
    ]
    if differ:
        raise ValueError(f"the older report is of something else: {'; '.join(differ)}")


def compare(section: Section, old: dict[str, Any], limit: float) -> tuple[list[str], list[str]]:
    """(lines about all changes, those about figures that are slower by more than `limit`, or gone).

    `old` is the content of an older hardware.json that `check_comparable` has passed.
    """
    before = {}
    for each in old[section.verb]["figures"]:
        if is_compared(each["unit"]):
            place = f" ({each['where']})" if "where" in each else ""
            before[each["name"] + place, each["unit"]] = each["value"]
    lines, worse = [], []
    for each in section.figures:
        if not is_compared(each.unit):
            continue
        name = each.name + (f" ({each.where})" if each.where else "")
        line, was = f"{name}: {short(each.value)} {each.unit}", before.pop((name, each.unit), None)
        if not was:
            lines.append(f"{line}, not in the older report")
            continue
        ratio = each.value / was if each.unit.endswith("/s") else was / (each.value or math.nan)
        change = "faster" if ratio >= 1 else "slower"
        lines.append(f"{line}, was {short(was)}: {abs(ratio - 1):.0%} {change}")
        worse += [] if ratio >= 1 - limit else lines[-1:]  # NaN, too
    missing = [f"{name}: only in the older report" for name, _ in before]
    return lines + missing, worse + missing
