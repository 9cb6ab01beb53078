"""Rows of varying length, prepared in units: the same on any number of cores, and after kills."""

import json
import math
import random

import numpy as np
import pytest

import reference
from conftest import load_task

row_files, units = load_task("samestep.text.row_files"), load_task("samestep.text.units")
KINDS = ("text_classification", "seq2seq")


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param, load_task(request.param)


def write(path, rows, names):
    lines = (json.dumps(dict(zip(names, row, strict=True))) for row in rows)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def config(kind, data, cache, **fields):
    name, task = kind
    small = {"vocab_size": 300, "hidden_size": 16, "num_heads": 2, "num_layers": 1}
    return task.TaskConfig(data=str(data), cache_dir=str(cache), **{**small, **fields})


def rows_of(name, number):
    """Rows of texts of several lengths; every third text comes twice."""
    draw = random.Random(number)
    words = [f"w{i}" for i in range(200)]
    rows = []
    for i in range(number):
        text = f"{' '.join(draw.choices(words, k=draw.randint(1, 30)))} é{i - (i % 3 == 2)}"
        if i % 3 == 2:
            text = rows[-1][0]
        rows.append((text, f"c{i // 3 % 4}" if name == "text_classification" else f"t {i}"))
    return rows


def decoded(kind, cfg, folder, rows):
    """The first text of each row."""
    module = kind[1].text_data if kind[0] == "text_classification" else kind[1].pairs
    decode = module.load_tokenizer(cfg, folder).decode
    return [decode(row["input_ids"], skip_special_tokens=True) for row in rows]


def columns(kind):
    return ("text", "label") if kind[0] == "text_classification" else ("source", "target")


def contents(folder):
    """The bytes of all files but the index, which has no times either."""
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def small_units(kind, monkeypatch):
    monkeypatch.setattr(units, "SMALLEST", 4000)
    monkeypatch.setattr(units, "LARGEST", 20_000)
    return units


@pytest.mark.slow
def test_cores_and_kills_change_nothing(kind, small_units, tmp_path, monkeypatch):
    """A worker dies at each of its units in turn; what is done is not done again."""
    task, workers = kind[1], small_units.do_units.__globals__
    paths = [
        write(tmp_path / f"{n}.jsonl", rows_of(kind[0], size), columns(kind))
        for n, size in (("a", 400), ("b", 200))
    ]
    data, found = f"{paths[0]}:3,{paths[1]}", []
    for cores in (3, 1):
        monkeypatch.setitem(workers, "count_cores", lambda cores=cores: cores)
        cfg = config(kind, data, tmp_path / f"cache-{cores}")
        found.append(contents(task.prepare_data(cfg)))
    writer = row_files.UnitWriter
    commit, cfg = writer.commit, config(kind, data, tmp_path / "killed")
    kills = 0
    for unit in range(50):

        def die(self, facts, unit=unit):
            if self.name == f"{unit:06}":
                raise KeyboardInterrupt
            commit(self, facts)

        monkeypatch.setattr(writer, "commit", die)
        try:
            folder = task.prepare_data(cfg)
            break
        except KeyboardInterrupt:
            kills += 1
            done = [*(tmp_path / "killed").glob("*.unfinished/[0-9]*.json")]
            assert len(done) >= unit
    found.append(contents(folder))
    assert kills > 8
    assert found[0] == found[1] == found[2]


def test_rows_held_out_are_those_of_a_split_in_memory(kind, small_units, tmp_path):
    """In the order of their hashes; a bound takes the first of them."""
    name, task = kind
    rows = rows_of(name, 600)
    data = write(tmp_path / "rows.jsonl", rows, columns(kind))
    label = (lambda row: row[0][1]) if name == "text_classification" else (lambda row: None)
    pairs = [(row, "") for row in rows]
    _, held = reference.hold_out(pairs, 0.1, lambda row: row[0][0], label)
    expected = [row[0] for row, _ in held]
    for bound in (1000, 20, 1):
        cfg = config(kind, data, tmp_path / "cache", validation_rows=bound, max_length=512) if (
            name == "text_classification"
        ) else config(kind, data, tmp_path / "cache", validation_rows=bound)  # fmt: skip
        folder = task.prepare_data(cfg)
        train, validation = task.datasets(cfg, folder)
        texts = decoded(kind, cfg, folder, validation)
        assert texts == expected[: len(texts)] and len(train) + len(texts) == 600
        assert len(texts) == len(expected) if bound == 1000 else len(texts) >= 1
        assert bound < 20 or len(texts) > bound - 3 or bound == 1000
        for part in (train, validation):
            assert part.sizes().tolist() == [row["length"] for row in part]
            assert part.sizes().dtype == np.int32


def test_several_sources_are_each_split_and_lie_one_after_the_other(kind, small_units, tmp_path):
    name, task = kind
    every = [rows_of(name, 300), rows_of(name, 90)]
    if name == "text_classification":  # a class that only one source has
        every[1] = [(text, "d" if label == "c3" else label) for text, label in every[1]]
    paths = [write(tmp_path / f"{i}.jsonl", rows, columns(kind)) for i, rows in enumerate(every)]
    cfg = config(kind, "", tmp_path / "cache", validation_rows=40)
    cfg.data = [{"path": str(path), "weight": 3 - i} for i, path in enumerate(paths)]
    folder = task.prepare_data(cfg)
    train, validation = task.datasets(cfg, folder)
    texts, held = (decoded(kind, cfg, folder, part) for part in (train, validation))
    label = (lambda row: row[0][1]) if name == "text_classification" else (lambda row: None)
    named = [[(each.name, each.weight) for each in part.sources] for part in (train, validation)]
    assert named == 2 * [[("0.jsonl", 3), ("1.jsonl", 2)]]
    for rows, mine, out in zip(every, train.sources, validation.sources, strict=True):
        expected = reference.hold_out([(r, "") for r in rows], 0.1, lambda r: r[0][0], label)[1]
        own, held = held[: out.rows], held[out.rows :]
        assert own == [row[0] for row, _ in expected][: len(own)] and 5 < len(own) <= 20
        learnt, texts = texts[: mine.rows], texts[mine.rows :]
        assert learnt == [row[0] for row in rows if row[0] not in own]
    assert not held and not texts
    cfg.data = f"{paths[0]},{paths[1]}:7"  # another mixture of the same prepared rows
    assert task.prepare_data(cfg) == folder
    assert [each.weight for each in task.datasets(cfg, folder)[0].sources] == [1, 7]


def test_a_damaged_file_is_written_again_and_the_others_stay(kind, small_units, tmp_path, capsys):
    task = kind[1]
    data = write(tmp_path / "rows.jsonl", rows_of(kind[0], 300), columns(kind))
    cfg = config(kind, data, tmp_path / "cache")
    folder = task.prepare_data(cfg)
    before = contents(folder)
    file = folder / "000001.train.input_ids"
    kept = (folder / "000000.train.input_ids").stat().st_ino
    file.write_bytes(file.read_bytes()[:-3])
    assert task.prepare_data(cfg) == folder and contents(folder) == before
    assert "has a damaged file: 000001.train.input_ids: preparing again" in capsys.readouterr().out
    assert (folder / "000000.train.input_ids").stat().st_ino == kept


def test_each_class_keeps_a_text_and_numbers_have_exact_sums(tmp_path):
    task = load_task("text_classification")
    kind = ("text_classification", task)
    rows = [(f"text {i}", "often" if i < 97 else f"once {i}") for i in range(100)]
    cfg = config(kind, write(tmp_path / "a.jsonl", rows, ("text", "label")), tmp_path / "cache")
    folder = task.prepare_data(cfg)
    train, _ = task.datasets(cfg, folder)
    assert {int(row["labels"]) for row in train} == {0, 1, 2, 3}
    values = [1e16 if i % 2 else -1e16 + i for i in range(100)]
    rows = [(f"text {i}", value) for i, value in enumerate(values)]
    data = write(tmp_path / "b.jsonl", rows, ("text", "label"))
    cfg = config(kind, data, tmp_path / "cache", problem_type="regression")
    folder = task.prepare_data(cfg)
    hashes = units.hash_of
    held = sorted(range(100), key=lambda i: hashes(f"text {i}"))[:10]
    kept = [value for i, value in enumerate(values) if i not in held]
    mean = math.fsum(kept) / 90
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in kept) / 90)
    assert json.loads((folder / "scale.json").read_text()) == [mean, std]
