"""Rows of varying length, prepared in units: the same on any number of cores."""

import json
import math
import random

import numpy as np
import pytest

import reference
from conftest import load_task
from samestep.base import workers
from samestep.text import units

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


def reference_texts(name, rows):
    """The first texts of the rows that are held out."""
    label = (lambda row: row[0][1]) if name == "text_classification" else (lambda row: None)
    _, held = reference.hold_out([(row, "") for row in rows], 0.1, lambda row: row[0][0], label)
    return [row[0] for row, _ in held]


def contents(folder):
    """The bytes of all files but the index, which has no times either."""
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def small_units(kind, monkeypatch):
    monkeypatch.setattr(units, "SMALLEST", 4000)
    monkeypatch.setattr(units, "LARGEST", 20_000)
    return units


def test_cores_change_nothing(kind, small_units, tmp_path, monkeypatch):
    paths = [
        write(tmp_path / f"{n}.jsonl", rows_of(kind[0], size), columns(kind))
        for n, size in (("a", 400), ("b", 200))
    ]
    found = []
    for cores in (3, 1):
        monkeypatch.setattr(workers, "count_cores", lambda cores=cores: cores)
        cfg = config(kind, f"{paths[0]}:3,{paths[1]}", tmp_path / f"cache-{cores}")
        found.append(contents(kind[1].prepare_data(cfg)))
    assert found[0] == found[1] and "000008.json" in found[0]


def test_rows_held_out_of_each_source_are_those_of_a_split_in_memory(kind, small_units, tmp_path):
    """In the order of their hashes; a bound takes the first of them. Sources lie one by one."""
    name, task = kind
    every = [rows_of(name, 600), rows_of(name, 90)]
    if name == "text_classification":  # a class that only one source has
        every[1] = [(text, "d" if label == "c3" else label) for text, label in every[1]]
    paths = [write(tmp_path / f"{i}.jsonl", rows, columns(kind)) for i, rows in enumerate(every)]
    for bound in (2000, 40, 2):
        cfg = config(kind, f"{paths[0]}:3,{paths[1]}:2", tmp_path / "cache", validation_rows=bound)
        folder = task.prepare_data(cfg)
        train, validation = task.datasets(cfg, folder)
        for part in (train, validation):
            assert [(each.name, each.weight) for each in part.sources] == [
                ("0.jsonl", 3),
                ("1.jsonl", 2),
            ]
            assert part.sizes().tolist() == [row["length"] for row in part]
            assert part.sizes().dtype == np.int32
        texts, held = (decoded(kind, cfg, folder, part) for part in (train, validation))
        for rows, mine, out in zip(every, train.sources, validation.sources, strict=True):
            own, held = held[: out.rows], held[out.rows :]
            assert own == reference_texts(name, rows)[: len(own)] and 0 < len(own) <= bound // 2
            assert bound < 2000 or own == reference_texts(name, rows)
            learnt, texts = texts[: mine.rows], texts[mine.rows :]
            assert learnt == [row[0] for row in rows if row[0] not in own]
        assert not held and not texts
    cfg.data = f"{paths[0]},{paths[1]}:7"  # another mixture of the same prepared rows
    assert task.prepare_data(cfg) == folder
    assert [each.weight for each in task.datasets(cfg, folder)[0].sources] == [1, 7]


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
    held = [i for i in range(100) if hashes(f"text {i}") < 0.1 * 2**64]
    kept = [value for i, value in enumerate(values) if i not in held]
    mean = math.fsum(kept) / len(kept)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in kept) / len(kept))
    assert json.loads((folder / "scale.json").read_text()) == [mean, std]
