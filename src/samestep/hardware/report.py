"""The report: tables on the screen, hardware.json, and what is slower than in an older one."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from samestep.base.console import escaped, print_on_main
from samestep.base.files import read_text

LONG = 30  # lines of a fact that is in hardware.json alone
SLOWER = 0.2  # a figure that is slower by more than this fraction is named


@dataclass
class Section:
    """A part of the report. `failures` make samestep hardware exit with 1."""

    facts: dict[str, str] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)  # of each device, in this order
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def short(value: float) -> str:
    """A number with four digits, or all before the point: 0.1234, 12.34, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show(verb: str, section: Section) -> None:
    """Prints facts, figures and advice."""
    table = Table(title=verb, show_header=False)
    for name, text in section.facts.items():
        if text.count("\n") < LONG:
            table.add_row(escaped(name), escaped(text, kept="\n"))
    for name, values in section.figures.items():
        table.add_row(name, "  ".join(map(short, values)))
    Console(highlight=False, markup=False, emoji=False).print(table)
    for line in [*section.lines, *(f"failed: {line}" for line in section.failures)]:
        print_on_main(escaped(line))


def compare(section: Section, path: Path) -> None:
    """Names what is slower than in an older report; another machine or recipe is not compared."""
    try:
        old = json.loads(read_text(path))["bench"]
        facts, figures = old["facts"], dict(old["figures"])
    except (ValueError, KeyError, TypeError):
        facts, figures = {}, {}
    if facts != section.facts:
        print_on_main(f"{path} has other devices, another recipe or precision: not compared")
        return
    slower = 0
    for name, values in section.figures.items():
        old_values = figures.get(name, [])
        for rank, (now, before) in enumerate(zip(values, old_values, strict=False)):
            if now < (1 - SLOWER) * before:
                slower += 1
                print_on_main(f"slower: {name}, {rank}: {short(now)}, was {short(before)}")
    print_on_main(f"{slower} figures are more than {SLOWER:.0%} slower than in {path}")
