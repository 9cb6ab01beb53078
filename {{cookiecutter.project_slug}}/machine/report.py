"""The report of hardware.py: a table on the screen, hardware.json, and what got slower since."""

import dataclasses
import datetime
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from training.console import escaped, one_line
from training.run_folder import replace_text

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
    """What a verb found. `failures` make hardware.py exit with 1."""

    verb: str
    facts: dict[str, Any] = field(default_factory=dict)  # names, versions, settings: not compared
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
    console = Console(highlight=False, soft_wrap=True)
    if section.facts:
        table = Table(title=section.verb, show_header=False)
        for name, value in section.facts.items():
            table.add_row(escaped(name), escaped(readable(value), kept="\n"))
        console.print(table)
    if section.figures:
        table = Table(title=f"{section.verb}: figures")
        table.add_column("what", no_wrap=True)
        table.add_column("where")
        table.add_column("value", justify="right")
        table.add_column("unit")
        if any(each.peak for each in section.figures):
            table.add_column("of peak")
        for group in side_by_side(section.figures):
            shares = [f"{each.value / each.peak:.0%}" for each in group if each.peak]
            cells = [each.where for each in group], [short(each.value) for each in group], shares
            where, value, share = (" .. ".join(dict.fromkeys(cell)) for cell in cells)
            table.add_row(group[0].name, where, value, group[0].unit, *filter(None, [share]))
        console.print(table)
    for line in section.lines:
        console.print(escaped(line), markup=False)
    for line in section.failures:
        console.print(f"failed: {escaped(line)}", markup=False)


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
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{one_line(path, 100)}: {error.strerror}") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{one_line(path, 100)} is no hardware.json of this program; give one that "
            "`python hardware.py bench` has written"
        )
    return content


def save(folder: Path, section: Section) -> dict[str, Any]:
    """Adds the section to hardware.json in this folder, which it creates; returns the content."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "hardware.json"
    content = load(path) if path.exists() else {"format": FORMAT}
    content[section.verb] = section.as_json()
    replace_text(path, json.dumps(content, indent=1) + "\n")
    return content


def compare(section: Section, old: dict[str, Any], threshold: float) -> tuple[list[str], list[str]]:
    """(all changes as lines, those for the worse by more than `threshold`).

    `old` is the content of an older hardware.json. Raises ValueError if it has no such section, or
    none of its figures.
    """
    before = {
        (each["name"], each.get("where", ""), each.get("size", 0)): each["value"]
        for each in old.get(section.verb, {}).get("figures", [])
    }
    shared = [each for each in section.figures if before.get(each.key) and each.value]
    shared = [each for each in shared if each.unit in ("s", "ms", "us") or each.unit.endswith("/s")]
    if not shared:
        raise ValueError(f"the old report has no figures of {section.verb} to compare with")
    changes, worse = [], []
    for each in shared:
        speed = each.value / before[each.key]
        speed = speed if each.unit.endswith("/s") else 1 / speed
        where = f" ({each.where})" if each.where else ""
        line = (
            f"{each.name}{where}: {short(before[each.key])} -> {short(each.value)} {each.unit}, "
            f"{abs(speed - 1):.0%} {'faster' if speed >= 1 else 'slower'}"
        )
        changes.append(line)
        if speed < 1 - threshold:
            worse.append(line)
    return changes, worse
