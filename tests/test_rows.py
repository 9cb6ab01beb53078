"""Rows of text: readers, splits, and the traps that were found in the loaders of datasets 5.2."""

import gzip
import itertools
import json
from dataclasses import dataclass

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Value

from conftest import write_table
from refusals import refused, table
from samestep.data import files, inputs, readers, rows, sources
from samestep.data.sources import IncompleteRow

ENDINGS = (*files.TEXTS, *files.TABLES)
TEXTS = [f"text {i}, with a comma\nand two lines" for i in range(40)]


@dataclass
class Config(sources.DataConfig):
    text_column: str = "text"


def normalize(row):
    """The text as it is."""
    text = row["text"]
    if text is None or not str(text).strip():
        raise IncompleteRow("the text is empty")
    if not isinstance(text, str):
        raise ValueError(f"the text is {text!r} but must be text")
    return {"text": text}


@pytest.fixture(autouse=True)
def work(tmp_path_factory, monkeypatch):
    """The cache of `datasets` in a fresh folder, as while prepare_data runs."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("work"))
    datasets.disable_progress_bars()


def load(data, **fields):
    """(train, validation)"""
    cfg = Config(data=str(data), **fields)
    sources.check_data_config(cfg, ())
    form = inputs.RowFormat({cfg.text_column: True}, normalize, {"text": Value("string")})
    named = inputs.find_inputs(cfg, {}, ENDINGS)
    found = rows.load_rows(named, cfg, lambda source, first: form)
    return found["train"], found["validation"]


def texts(split):
    return split["text"][:]


def both(data, **fields):
    return sorted(text for split in load(data, **fields) for text in split["text"])


def write(path, content):
    """Texts with ids, or dicts, as a file of the kind that the path says."""
    content = [{"text": r, "id": i} if isinstance(r, str) else r for i, r in enumerate(content)]
    name, kind = path.name.split(".", 1)
    return write_table(path.parent, content, kind, name)


# ---- Reading -------------------------------------------------------------------------------------


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    for ending in (*files.TABLES, ".jsonl.gz", ".json.gz", ".csv.gz", ".tsv.gz"):
        path = write(tmp_path / f"a{ending}", TEXTS)
        assert both(path) == sorted(TEXTS)
        path.unlink()
    write(tmp_path / "a.jsonl", TEXTS).rename(tmp_path / "a.json")  # many programs name it so
    write(tmp_path / "b.jsonl", ["one line"]).rename(tmp_path / "b.json")
    assert both(tmp_path) == sorted([*TEXTS, "one line"])


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".json"])
def test_values_stay_as_they_are_written(tmp_path, ending):
    """Traps 3, 4, 5, 6 and 7: dates, numbers, NA, columns called type and message."""
    odd = ["2020-03-01", "NA", "null", "007", "1e5", "nan", "true", '{"a": 1}', "0.12345678901234"]
    odd += [str(2**70), "2020-03-01T10:00:00"]
    content = [{"text": text, "type": "user", "message": f"m {i}"} for i, text in enumerate(odd)]
    assert both(write(tmp_path / f"a{ending}", content)) == sorted(odd)


def test_columns_that_are_not_read_may_be_of_any_type(tmp_path):
    maps = pyarrow.array([[("a", "b")]] * 40, pyarrow.map_("string", "string"))
    table = pyarrow.table({"text": TEXTS, "maps": maps})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert both(tmp_path / "a.parquet") == sorted(TEXTS)
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800", "\\ud800": 1}\n{"text": "b"}\n')
    assert both(tmp_path / "a.jsonl") == ["a?", "b"]
    (tmp_path / "a.csv").write_text("text,,\nc,1,2\nd,1,2\n")
    assert both(tmp_path / "a.csv") == ["c", "d"]


FILES = [
    (name, text.encode("latin-1"), said)
    for file, said in table("files")
    for name, text in file.items()
]
FILES += [
    ("a.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "Exceeds the limit (4300 digits)"),
    ("a.txt", b"a line\n" * 90_000 + b"\xff" * 4, "can't decode byte 0xff"),
]


@pytest.mark.parametrize("name, content, said", FILES)
def test_a_bad_file_is_one_line_with_its_place(tmp_path, name, content, said):
    """Trap 8."""
    (tmp_path / name).write_bytes(content)
    with refused(said, "task.data: cannot read ") as error:
        load(tmp_path / name)
    assert name in str(error.value)


def test_the_first_problem_is_raised_with_its_line(tmp_path):
    lines = [json.dumps({"text": f"text {i}"}) for i in range(300)]
    lines[250], lines[130], lines[200] = "{", '{"text": 3}', '{"text": null}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="^task.data: .*a.jsonl, line 131: the text is 3 but must"):
        load(tmp_path / "a.jsonl")


def test_marks_of_utf_8_and_lines_of_windows(tmp_path):
    for name in ("a.jsonl", "b.csv", "c.json", "d.tsv"):
        path = write(tmp_path / name, [f"text {name} {i}" for i in range(30)])
        content = path.read_text("utf-8-sig").replace("\n", "\r\n")
        path.write_text(content, encoding="utf-8-sig", newline="")
    found = both(tmp_path)
    assert len(found) == 120 == len({*found}) and {*"\r\ufeff"}.isdisjoint("".join(found))
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"text {name}", encoding="utf-8-sig")
    assert both(tmp_path / "texts") == ["text a", "text b"]


def test_a_text_is_documents_cut_at_line_ends(tmp_path, monkeypatch):
    """Also a short one, of which some is so held out; a text that grows keeps its documents."""
    monkeypatch.setattr(readers, "DOCUMENT", 1000)
    lines = "".join(f"{i} äöü\n" for i in range(2000))
    run = "€" * 5000  # without a line's end
    for content in (lines, lines + run + "\n" + lines):
        (tmp_path / "a.md").write_text(content)
        train, validation = load(tmp_path / "a.md")
        place = lambda row: int(row["place"].rpartition(" ")[2])  # noqa: E731
        found = sorted([*train, *validation], key=place)
        assert "".join(row["text"] for row in found) == content
        assert len(validation) and max(len(row["text"]) for row in found) < 2001
        if content == lines:
            held, trained = {*texts(validation)}, {*texts(train)}
            for row in found:
                assert row["text"].endswith("\n") and row["text"].startswith(f"{place(row) - 1} ")
    last = found[-1]["text"]
    assert held - {last} <= {*texts(validation)} and trained - {last} <= {*texts(train)}


# ---- What is read and left out -------------------------------------------------------------------


def test_what_is_read_and_left_out_is_a_line_each(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "README.md").write_text("About these rows.")
    path = write(tmp_path / "a" / "a.jsonl", [*TEXTS[:20], "", TEXTS[0], "", "odd"])
    (tmp_path / "a" / "b.jsonl").write_text("\n")
    (tmp_path / "a" / "c.csv.gz").write_bytes(gzip.compress(b"text\n"))
    with pytest.raises(ValueError, match="line 21: the text is empty; --task.incomplete_rows skip"):
        load(path)
    capsys.readouterr()
    train, validation = load(path.parent, incomplete_rows="skip")
    assert capsys.readouterr().out.splitlines() == [
        f"Preparing data: {path.parent} has 3 files to train on, 0 to evaluate on, 1 not read (the "
        "first: README.md)",
        f"Preparing data: 22 rows of {path.parent}, from text; 2 left out (the first: {path}, line "
        "21: the text is empty)",
        "Preparing data: columns that are not used: id",
        "Preparing data: 2 files without rows (the first: b.jsonl)",
        f"Prepared: {len(train)} rows to train on, {len(validation)} to evaluate on",
    ]
    assert len(train) + len(validation) == 22 and {*train.column_names} == {"text", *rows.NOTES}


@pytest.mark.parametrize("ending, first", [(".jsonl", 1), (".csv", 2), (".parquet", 1)])
def test_a_row_keeps_its_file_and_line_as_numbers(tmp_path, ending, first, monkeypatch):
    word = "row" if ending == ".parquet" else "line"
    for name in "ab":
        write(tmp_path / f"{name}{ending}", [f"{name} {i}" for i in range(20)])
    for split in load(tmp_path):
        for row in split:
            name, number = row["text"].split()
            path = split.features["file"].int2str(row["file"])
            assert path == f"{tmp_path}/{name}{ending}"
            assert row["line"] == int(number) + first
            assert row["place"] == f"{path}, {word} {row['line']}"
    monkeypatch.setattr(rows, "MOST_NAMES", 1)  # they would be read at each start
    assert load(tmp_path)[0].features["file"] == Value("int64")


# ---- Splits --------------------------------------------------------------------------------------


def test_what_is_held_out_hashes_low_and_was_not_trained_on_before():
    for seed, most in itertools.product(range(12), (5, 1000)):
        draw = np.random.default_rng(seed)
        hashes = draw.integers(2**64, size=800, dtype=np.uint64)
        sides = hashes[draw.integers(700, size=800)]  # some belong together
        some, every = (rows.hold_out(sides[:number], 0.1, most) for number in (500, 800))
        low = sorted(side for side in {*sides.tolist()} if side < 0.1 * 2**64)
        assert every.tolist() == low[: len(every)] and np.isin(sides, every).sum() <= most
        assert len(every) == len(low) or np.isin(sides, low[: len(every) + 1]).sum() > most
        assert {*sides[:500].tolist()} & {*every.tolist()} <= {*some.tolist()}
        assert len(rows.hold_out(sides[:1], 1e-9, most)) == 1


def test_no_row_that_is_held_out_is_trained_on_as_data_grows(tmp_path):
    every = [f"text {i}" for i in range(400)]
    trained, held = set(), set()
    for number in (50, 100, 200, 400):
        train, validation = map(texts, load(write(tmp_path / "a.jsonl", every[:number])))
        assert trained <= {*train} and held <= {*validation} and len(validation) > number / 40
        trained, held = {*train}, {*validation}
    validation = texts(load(write(tmp_path / "b.csv", every), validation_rows=7)[1])
    assert len(validation) == 7 and {*validation} < held


def test_rows_of_a_group_are_on_one_side(tmp_path):
    """Also in files with other types: pandas writes 1.0 for 1 where a column has nulls, and NaN."""
    found, kinds = [], {"a.jsonl": int, "b.csv": int, "c.parquet": float}
    for number in (50, 100):
        for name, kind in kinds.items():
            content = [{"text": f"{name} {i}", "patient": kind(i % 23)} for i in range(number)]
            write(tmp_path / name, content)
        split = load(tmp_path, group_column="patient")
        found.append([{int(text.split()[1]) % 23 for text in texts(side)} for side in split])
    assert found[0] == found[1]
    assert found[0][0] and found[0][1] and not found[0][0] & found[0][1]
    with pytest.raises(ValueError, match="no column doctor among .*text, patient.*; name the"):
        load(tmp_path, group_column="doctor")
    write(tmp_path / "a.jsonl", [*content, {"text": "x", "patient": float("nan")}])
    with pytest.raises(ValueError, match="a.jsonl, line 101: the group is NaN"):
        load(tmp_path / "a.jsonl", group_column="patient")


def test_mixtures_are_in_the_order_of_the_config(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(40)])
    data = ",".join(f"{tmp_path / name}.jsonl:{i}" for i, name in enumerate("bac", 1))
    for split in load(data):
        assert split.features["source"].names == ["b.jsonl", "a.jsonl", "c.jsonl"]
        assert ["bac"[number] for number in split["source"]] == [t[0] for t in texts(split)]
        assert [*split["source"]] == sorted(split["source"]) and {*split["source"]} == {0, 1, 2}
        assert len(split) > 3
