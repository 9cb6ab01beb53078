"""The report: tables on the screen, hardware.json, and what is slower than in an older one."""

import dataclasses
import datetime
import json
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.base.console import escaped, one_line, print_on_main
from samestep.base.files import read_text, replace_text
from samestep.processes.ranks import UserError

FORMAT = 2  # of hardware.json
REPORT, BASELINE = "hardware.json", "baseline.json"  # in the folder --report
SLOWER = 0.2  # a figure that is slower by more than this fraction is named


@dataclass(frozen=True)
class Figure:
    """A number that was measured: times ("us") are better if lower, speeds ("/s") if higher."""

    name: str
    value: float
    unit: str
    where: str = ""  # a device ("0"), or two ("0-1"); empty: all together
    peak: float | None = None  # of the device, by its data sheet, in the same unit


@dataclass
class Section:
    """What a part of the report found. `failures` make samestep hardware exit with 1."""

    verb: str
    facts: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)  # of figures that can be compared
    figures: list[Figure] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def short(value: float) -> str:
    """A number with four digits, or all before the point: 0.1234, 12.34, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show(section: Section) -> None:
    """Prints facts, figures and advice."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if section.facts:
        table = Table(title=section.verb, show_header=False)
        for name, value in section.facts.items():
            if isinstance(value, dict):
                value = "\n".join(f"{key}: {each}" for key, each in value.items())
            table.add_row(escaped(name), escaped(str(value), kept="\n"))
        console.print(table)
    if section.figures:
        table = Table("what", "where", "value", "unit", "of the peak", title=section.verb)
        for each in section.figures:
            share = f"{each.value / each.peak:.0%}" if each.peak else ""
            table.add_row(escaped(each.name), each.where, short(each.value), each.unit, share)
        console.print(table)
    for line in [*section.lines, *(f"failed: {line}" for line in section.failures)]:
        console.print(escaped(line))


# ---- hardware.json -------------------------------------------------------------------------------


def prepare_folder(folder: Path) -> None:
    """Creates the folder; raises an error if nothing can be written there, or another's file is."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    path = folder / REPORT
    if path.exists() and '"format"' not in read_text(path)[:100]:
        raise UserError(f"{one_line(path, 100)} was not written by samestep hardware; rename it")


def save(sections: list[Section], path: Path) -> None:
    """Writes these parts of a report, beside those that an earlier call has written there."""
    content: dict[str, Any] = {}
    if path.exists():
        try:
            content = load(path)
        except ValueError:  # of an older version, or damaged
            content = {}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    content = {"format": FORMAT, **content}
    for section in sections:
        content[section.verb] = {"time": now, **dataclasses.asdict(section)}
    replace_text(path, json.dumps(content, indent=1) + "\n")


def load(path: Path) -> dict[str, Any]:
    """The content of a hardware.json; raises ValueError if it is none of this version."""
    try:
        content = json.loads(read_text(path))
        if content["format"] != FORMAT:
            raise ValueError
        speeds(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"{one_line(path, 100)} is no hardware.json of this version; give one that "
            "`python -m samestep hardware` has written"
        ) from None
    return content


def speeds(content: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    """The times and speeds of a report, by name, place and unit."""
    bench = content.get("bench", {"figures": [], "conditions": {}})
    dict(bench["conditions"])
    found = {
        (each["name"], each["where"], each["unit"]): float(each["value"])
        for each in bench["figures"]
    }
    return {key: value for key, value in found.items() if value > 0}


def compare(new: dict[str, Any], old: dict[str, Any]) -> int:
    """Prints what has changed since an older report; the number of figures that are slower, or
    gone. Raises ValueError if that was measured on something else."""
    if not speeds(old):
        raise ValueError("the older report has no figures of bench")
    was, now = old["bench"]["conditions"], new["bench"]["conditions"]
    for name in now:
        if was.get(name) != now[name]:
            lost = "; if a device is lost: docs/measuring.md" if name == "processes" else ""
            before, after = one_line(was.get(name), 100), one_line(now[name], 100)
            raise ValueError(f"{name} was {before} in the older report and is {after}{lost}")
    slower, measured = 0, speeds(new)
    for (name, where, unit), before in speeds(old).items():
        value = measured.get((name, where, unit), math.nan)
        ratio = value / before if unit.endswith("/s") else before / value
        if abs(ratio - 1) <= SLOWER:
            continue
        change = f"{abs(ratio - 1):.0%} {'faster' if ratio > 1 else 'slower'}"
        if math.isnan(ratio):
            change = "only in the older report"
        if not ratio > 1:
            slower += 1
        place = f"{name} ({where})" if where else name
        print_on_main(f"{place}: {short(value)} {unit}, was {short(before)}: {change}")
    print_on_main(f"{slower} of {len(speeds(old))} figures are more than {SLOWER:.0%} slower")
    return slower
