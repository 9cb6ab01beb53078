"""The report: tables on the screen, hardware.json, and what is slower than in an older one."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from samestep.base.console import escaped, one_line, print_on_main
from samestep.base.files import read_text

SLOWER = 0.2  # a figure that is slower by more than this fraction is named


@dataclass(frozen=True)
class Figure:
    """A number that was measured: times ("us") are better if lower, speeds ("/s") if higher."""

    name: str
    value: float
    unit: str
    where: str = ""  # a device, or all together: links
    peak: float | None = None  # of the device, by its data sheet, in the same unit


@dataclass
class Section:
    """A part of the report. `failures` make samestep hardware exit with 1."""

    verb: str
    facts: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def short(value: float) -> str:
    """A number with four digits, or all before the point: 0.1234, 12.34, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show(section: Section) -> None:
    """Prints facts, figures and advice."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    table = Table("fact", Column(overflow="fold"), title=section.verb, show_header=False)
    for name, text in section.facts.items():
        table.add_row(escaped(name), escaped(text, kept="\n"))
    console.print(table)
    if section.figures:
        table = Table("what", "where", "value", "unit", "of the peak")
        for each in section.figures:
            share = f"{each.value / each.peak:.0%}" if each.peak else ""
            table.add_row(escaped(each.name), each.where, short(each.value), each.unit, share)
        console.print(table)
    for line in [*section.lines, *(f"failed: {line}" for line in section.failures)]:
        console.print(escaped(line))


def speeds(figures: list[dict]) -> dict[tuple[str, str, str], float]:
    """The times and speeds of a report, by name, place and unit."""
    found = {(each["name"], each["where"], each["unit"]): each["value"] for each in figures}
    return {key: float(value) for key, value in found.items() if value > 0}


def compare(section: Section, path: Path) -> int:
    """Prints what has changed in bench since an older report; the number of figures that are
    slower, or gone. Raises ValueError if that is damaged, or of something else."""
    name = one_line(path, 100)
    try:
        old = json.loads(read_text(path))["bench"]
        facts, before = dict(old["facts"]), speeds(old["figures"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{name} is no report of bench; give a hardware.json") from None
    for fact, now in section.facts.items():
        if facts.get(fact) != now:
            lost = "; if a device is lost: docs/measuring.md" if fact == "devices" else ""
            was = one_line(facts.get(fact), 100)
            raise ValueError(f"{name} is of something else: {fact} was {was} and is {now}{lost}")
    slower, measured = 0, speeds([vars(each) for each in section.figures])
    for key, old_value in before.items():
        value = measured.get(key, math.nan)
        ratio = value / old_value if key[2].endswith("/s") else old_value / value
        if abs(ratio - 1) <= SLOWER:
            continue
        change = f"{abs(ratio - 1):.0%} {'faster' if ratio > 1 else 'slower'}"
        if math.isnan(ratio):
            change = "only in the older report"
        if not ratio > 1:
            slower += 1
        print_on_main(f"{' '.join(key)}: {short(value)}, was {short(old_value)}: {change}")
    print_on_main(f"{slower} of {len(before)} figures are more than {SLOWER:.0%} slower")
    return slower
