"""The report: tables on the screen, hardware.json, and what got slower since an older one."""

import argparse
import dataclasses
import datetime
import json
import math
import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.base.console import escaped, one_line, print_on_main
from samestep.base.files import read_text, replace_text
from samestep.processes.ranks import catch

FORMAT = 1  # of hardware.json
REPORT, BASELINE = "hardware.json", "baseline.json"  # in the folder --report
HOSTS = 4  # names in a line


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


# ---- Which processes have what: `processes 0-6 on node1` -----------------------------------------


def group(values: Sequence[Hashable]) -> dict[Any, list[int]]:
    """The places of each distinct value in a list."""
    found: dict[Any, list[int]] = {}
    for number, value in enumerate(values):
        found.setdefault(value, []).append(number)
    return found


def place_of(numbers: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """These processes, ascending, and their machines: `hosts` has that of each of the run."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    word = "processes" if len(numbers) > 1 else "process"
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    machines = list(dict.fromkeys(hosts[n] for n in numbers)) if hosts else []
    more = ", ..." if len(machines) > HOSTS else ""
    where = f" on {', '.join(machines[:HOSTS])}{more}" if machines else ""
    return f"{word} {shown}{where}"


def by_value(values: Sequence[str | None], hosts: Sequence[str] = ()) -> str:
    """The value, if all that have one have the same; otherwise a line for each and its places."""
    groups = group(values)
    groups.pop(None, None)
    if len(groups) == 1:
        return next(iter(groups))
    return "\n".join(f"{place_of(numbers, hosts)}: {value}" for value, numbers in groups.items())


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
        for alike in group([each.name for each in section.figures]).values():
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
    if catch(check_format, content)[1]:
        raise ValueError(
            f"{one_line(path, 100)} is no hardware.json of this version of the program; give one "
            "that `python -m samestep hardware` has written"
        )
    return content


def check_format(content: Any) -> None:
    """Raises an error if this is not the content of a hardware.json."""
    if content["format"] != FORMAT:
        raise ValueError
    for verb in {*content} - {"format"}:
        speeds(content[verb]["figures"])
        dict(content[verb]["conditions"])


def prepare_folder(folder: Path) -> None:
    """Creates the folder for hardware.json; raises an error if nothing can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    if (folder / REPORT).exists():  # a file of someone else is not replaced
        load(folder / REPORT)


def finish(sections: list[Section], options: argparse.Namespace, old: dict[str, Any]) -> int:
    """Prints and saves what was found, and compares it with an older report; the exit code.

    A report without a failure is kept as `options.baseline`, if nothing is there yet. What is
    slower than that counts as no failure: only `options.compare` asks for it.
    """
    path, slower = options.report / REPORT, 0
    content = load(path) if path.exists() else {"format": FORMAT}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    for section in sections:
        show(section)
        content[section.verb] = {"time": now, **dataclasses.asdict(section)}
    text = json.dumps(content, indent=1) + "\n"
    replace_text(path, text)
    print_on_main(f"figures: {path}")
    for section in sections if old else ():
        slower += compare(section, old, options.threshold)
    failed = any(section.failures for section in sections)
    if options.baseline and not options.baseline.exists() and not failed:
        replace_text(options.baseline, text)
        print_on_main(f"kept as the baseline, with which later calls compare: {options.baseline}")
    return int(failed or (slower > 0 and options.compare is not None))


# ---- Comparison ----------------------------------------------------------------------------------


def speeds(figures: list[dict[str, Any]]) -> dict[tuple[str, str, str], float]:
    """The values of times and speeds by (name, where, unit)."""
    return {
        (each["name"], each.get("where", ""), each["unit"]): each["value"]
        for each in figures
        if each["value"] > 0 and (each["unit"] == "us" or each["unit"].endswith("/s"))
    }


def check_comparable(verbs: list[str], conditions: dict[str, Any], old: dict[str, Any]) -> None:
    """Raises ValueError if the older report says nothing about these verbs, or of other things."""
    known = [old[verb] for verb in verbs if speeds(old.get(verb, {}).get("figures", []))]
    if not known:
        raise ValueError(f"the older report has no speeds of {', '.join(verbs)}")
    differ = [
        f"{name} was {one_line(each['conditions'].get(name), 100)} and is {one_line(now, 100)}"
        for each in known
        for name, now in sorted(conditions.items())
        if each["conditions"].get(name) != now
    ]
    if differ:
        lost = "; if a device is lost: docs/measuring.md" * ("processes was" in str(differ))
        raise ValueError(
            f"the older report is of something else: {'; '.join(dict.fromkeys(differ))}{lost}"
        )


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
            print_on_main(f"{place}: {short(value)} {unit}, was {short(was)}: {change}")
    if before:
        missing = f"more than {limit:.0%} slower than in the older report, or missing"
        print_on_main(f"{section.verb}: {slower} of {len(before)} figures are {missing}")
    return slower
