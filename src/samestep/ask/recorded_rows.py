"""The rows of a run: which each step has, and in which steps each was trained on."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel

from samestep.ask import start_again
from samestep.ask.recorded_run import RecordedRun
from samestep.base.console import one_line
from samestep.base.errors import UserError
from samestep.data.rows import NOTES
from samestep.prepared import preview, run_data
from samestep.run import startup
from samestep.settings import config
from samestep.step.order import SampleOrder, hash64, permute
from samestep.step.samples import SampleDataset
from samestep.text.lanes import unpack_id
from samestep.text.sequences import Sequences

WIDTH = 60  # characters of a text


def _to_array(value: Any) -> np.ndarray:
    """Numbers or text; parts of unequal lengths, as of a tuple, follow each other."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.concatenate([_to_array(each).ravel() for each in value])


class Part:
    """The rows between two changes of their order, and what a person sees of each."""

    def __init__(self, rows: SampleDataset, data: Any):
        self.rows, self.view, self.tokenizer = rows, rows.dataset, preview.tokenizer_of(data)
        self.table = getattr(self.view, "dataset", self.view)
        self.columns = {*getattr(self.table, "column_names", ())}
        if notes := self.columns & {*NOTES}:  # batches may not see them
            self.notes = self.table.with_format(None).select_columns([*notes])

    def place(self, number: int) -> str:
        """The source of a sample, and its place: the file and the line."""
        if self.rows.is_stream:
            epoch, shard, block, place = unpack_id(number)
            name = Path(self.view.shards[shard]).name
            return f"{name}, block {block}, sample {place}, epoch {epoch}"
        words = []
        ends = np.cumsum([each.rows for each in self.rows.sources])
        if len(ends) > 1:
            words.append(self.rows.sources[int(np.searchsorted(ends, number, "right"))].name)
        if "place" in self.columns:
            words.append(self.notes[number]["place"])
        elif {"file", "line"} <= self.columns:
            note, kind = self.notes[number], self.notes.features["file"]
            file = note["file"]
            if isinstance(kind, ClassLabel):
                file = kind.int2str(note["file"])
            words.append(f"{file}, line {note['line']}")
        return ": ".join(words)

    def text(self, row: Any) -> str:
        """A row as text: tokens decoded, other numbers by their names."""
        words: list[Any] = []
        for name, value in row.items() if isinstance(row, Mapping) else [("row", row)]:
            values = _to_array(value)
            if self.tokenizer and name.endswith("input_ids"):
                labels = _to_array(row.get("labels"))
                if labels.shape == values.shape:  # behind the last one is padding
                    values = values[: np.flatnonzero(labels >= 0).max(initial=-1) + 1]
                words.append(self.tokenizer.decode(values[values >= 0], skip_special_tokens=True))
            elif values.ndim == 0 and values.dtype.kind in "biufU":
                words.append(f"{name}={value}")
            elif not self.tokenizer:
                words.append(f"{name} {values.dtype}{values.shape}")
        return " ".join(" | ".join(words).split())

    def line(self, number: int, row: Any, width: int | None = WIDTH, word: str = "") -> str:
        """What is told of a sample in a line: its beginning, or what is around a word of it."""
        place, text = self.place(number), self.text(row)
        place = f"[{place}] " if place else ""
        begin = max(text.find(word) - WIDTH // 2, 0)
        if begin:
            text = f"...{text[begin:]}"
        return f"{number:>8} {one_line(f'{place}{text[:width]}', 1000)}"

    def find(self, word: str) -> list[int]:
        """The rows that a number, a place or a text means; spaces do not count. Where sequences are
        cut out of texts that follow each other, a text may reach over several."""
        numbers = range(len(self.view))
        if word.isdecimal():
            if int(word) not in numbers:
                raise UserError(f"row {word}: there are {len(numbers):,} rows, from 0 on")
            return [int(word)]
        if isinstance(self.view, range):
            raise UserError(f"{one_line(word, 60)}: rows of a script are known by their numbers")
        is_cut = isinstance(self.view, Sequences) and "lengths" not in self.columns
        ends = (word, f": {word}", f"/{word}")
        found = [i for i in numbers if self.place(i) == word or self.place(i).endswith(ends[1:])]
        if found:  # the row before may hold the beginning
            return sorted({*found, *(max(i - 1, 0) for i in found if is_cut)})
        texts = ["".join(self.text(self.view[i]).split()) for i in numbers]
        whole, wanted = ("" if is_cut else "\n").join(texts), "".join(word.split())
        begins = np.cumsum([0, *(len(text) + (not is_cut) for text in texts)])
        rows: set[int] = set()
        at = whole.find(wanted)
        while at >= 0:
            first, last = np.searchsorted(begins, [at, at + len(wanted) - 1], side="right") - 1
            rows |= {*range(int(first), int(last) + 1)}
            at = whole.find(wanted, at + 1)
        return sorted(rows)


class RecordedRows:
    """The rows of a run; raises UserError where they are not those of then. flags: of train.py."""

    def __init__(self, record: RecordedRun, flags: list[str]):
        self.record, self.flags = record, flags
        self.is_script = not record.config  # which a script of one's own does not write
        if not self.is_script:
            self.train, self.task = startup.find_project()
        self.parts: dict[int, Part] = {}  # by the first sample
        self.is_stream = self.part(record.last).rows.is_stream
        self.next = 0  # of a stream: the step to which it has been read

    def part(self, step: int) -> Part:
        """The rows of which a step has its own."""
        entry = self.record.entry(step)
        if entry["samples"] not in self.parts:
            self.parts[entry["samples"]] = self.read_part(entry, step)
        return self.parts[entry["samples"]]

    def read_part(self, entry: dict, step: int) -> Part:
        if self.is_script:  # its rows are known by their numbers
            numbers = range(self.record.manifest(step)["data"]["samples"])
            return Part(SampleDataset(numbers, None, entry["seed"]), None)
        with tempfile.TemporaryDirectory() as folder:
            words = start_again.words(self.record.settings(step), Path(folder), self.flags)
            cfg, _ = config.parse_config(self.train.Config, words, None)
        data, task, views, samples = run_data.read_data(
            cfg, self.task, self.record.folder, entry["prepared"]
        )
        digest = run_data.digest_view(views[0]) or samples.fingerprints[0]
        if entry["data"] not in ("", digest):
            raise UserError(
                f"the data of the steps from {entry['step'] + 1} on have changed, and those of "
                "then are not in task.cache_dir: their rows are not known"
            )
        rows = SampleDataset(views[0], task, entry["seed"], entry["mixture"])
        return Part(rows, data)

    def samples(self, step: int) -> list[tuple[int, Any]]:
        """The id and the row of each sample of a step, in the order of its micro-batches."""
        view = self.part(step).view
        if not self.is_stream:
            return [(each, view[each]) for each in self.ids(step)]
        if step != self.next:
            self.seek(step)
        self.next = step + 1
        return view.__getitems__([*self.record.positions(step)])

    def lines(self, step: int) -> dict[int, str]:
        """What is told of each sample of a step, by its number."""
        part = self.part(step)
        return {number: part.line(number, row) for number, row in self.samples(step)}

    def ids(self, step: int) -> list[int]:
        """The ids of the samples of a step, in that order."""
        if self.is_stream:
            return [number for number, _ in self.samples(step)]
        rows = self.part(step).rows
        return rows.ids(rows.sort(self.record.positions(step)))

    def seek(self, step: int) -> None:
        """A stream is read on from the checkpoint before, or from the beginning."""
        manifests, entry = self.record.manifests, self.record.entry(step)
        before = max((each for each in manifests if each < step), default=0)
        if before < entry["step"]:
            change = f"step {entry['step']}, after which the order is another one"
            raise UserError(f"step {step} of a stream: the checkpoint of {change}, is gone")
        saved, size = manifests.get(before, {}), entry["global_batch_size"]
        begin = saved.get("samples", 0), saved.get("lanes")
        self.part(step).view.begin(entry["seed"], size, *begin)

    def hash(self, first: int, last: int) -> str:
        """What metrics.jsonl calls the batch_hash of these steps."""
        total = 0
        for step in range(first, last + 1):
            total += int(hash64(np.array(self.ids(step))).view(np.int64).sum())
        return f"{total % 2**64:016x}"

    def steps_of(self, row: int, data: str) -> list[int]:
        """The steps that have trained on a row of these data, by their digest in the history."""
        found, history = [], self.record.history
        ends = [each["step"] for each in history[1:]] + [self.record.last]
        for entry, end in zip(history, ends, strict=True):
            if entry["data"] == data and entry["step"] < end:
                begin, size = entry["samples"], entry["global_batch_size"]
                order = self.part(entry["step"] + 1).rows.order
                last = begin + (end - entry["step"]) * size
                positions = _positions_of(order, row, begin, last)
                found += [entry["step"] + 1 + (each - begin) // size for each in positions]
        return found


def _positions_of(order: SampleOrder, row: int, begin: int, end: int) -> list[int]:
    """The positions from `begin` up to `end` of a run that take this row: the order, backwards."""
    mixture, origin = order.mixture, int(order.first)
    source = int(np.searchsorted(order.firsts, row, side="right")) - 1
    first, size, seed = order.orders[source]
    before = int(mixture.places[source])  # what the source had given when the mixture began
    passes = np.arange(before // size, mixture.count(end - origin)[source] // size + 1)
    places = permute(np.full(len(passes), row - first), size, hash64(seed, passes), back=True)
    turns = passes * size + places.astype(np.int64) - before
    weight, slots = int(mixture.weights[source]), np.flatnonzero(mixture.table == source)
    periods, turns = np.divmod(turns[turns >= 0], weight)
    positions = origin + periods * len(mixture.table) + slots[turns]
    return sorted(positions[(positions >= begin) & (positions < end)].tolist())
