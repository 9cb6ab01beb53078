"""Rows of text in `datasets`: readers, splits, and the traps that were found in datasets 5.2."""

import csv
import gzip
import json
import os
from dataclasses import dataclass

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Value

from samestep.data import folders, readers, rows, sources, tables
from samestep.data.sources import IncompleteRow, UselessRow

EXTENSIONS = (".txt", *folders.TABLES)
TEXTS = [f"text {i}, with a comma\nand two lines" for i in range(40)]


@dataclass
class Config(sources.DataConfig):
    text_column: str = "text"


def normalize(row):
    """The text as it is, with a remark on some."""
    text = row["text"]
    if text is None or not str(text).strip():
        raise IncompleteRow("the text is empty")
    if not isinstance(text, str):
        raise ValueError(f"the text is {text!r} but must be text")
    if text == "useless":
        raise UselessRow("say nothing")
    return {"text": text}, ["is odd"] if text.endswith("1") else []


@pytest.fixture(autouse=True)
def work(tmp_path_factory, monkeypatch):
    """The cache of `datasets` in a fresh folder, as while prepare_data runs."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("work"))
    datasets.disable_progress_bars()


@pytest.fixture
def cores(monkeypatch):
    def use(number):
        monkeypatch.setattr(rows, "count_cores", lambda: number)

    use(1)
    return use


@pytest.fixture
def small_spans(monkeypatch):
    monkeypatch.setattr(readers, "SPAN", 300)
    monkeypatch.setattr(rows, "TABLE", 500)


def load(data, /, normalize=normalize, **fields):
    """(train, validation)"""
    options = {name: fields.pop(name) for name in [*fields] if name not in FIELDS}
    cfg = Config(data=str(data), **fields)
    sources.check_data_config(cfg, (), reads_groups=True)
    form = rows.RowFormat(
        normalize,
        {"text": Value("string")},
        columns=lambda _: {"text": cfg.text_column},
        optional=options.pop("optional", ()),
        key=options.pop("key", rows.key_of),
    )
    found = rows.load_rows(rows.find_inputs(cfg, {}, EXTENSIONS), cfg, form, **options)
    return found["train"], found["validation"]


FIELDS = [*Config.__dataclass_fields__]


def texts(split):
    return split["text"][:]


def both(data, **fields):
    return sorted(text for split in load(data, **fields) for text in split["text"])


def write(path, content):
    """Texts with ids, or dicts, as a file of the kind that the path says."""
    content = [{"text": r, "id": i} if isinstance(r, str) else r for i, r in enumerate(content)]
    inner = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
    if inner.suffix in (".csv", ".tsv"):
        with open(inner, "w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, [*content[0]], delimiter=tables.SEPARATORS[inner.suffix])
            writer.writeheader()
            writer.writerows(content)
    elif inner.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), inner, row_group_size=7)
    elif inner.suffix == ".json":
        inner.write_text(json.dumps(content))
    else:
        inner.write_text("".join(json.dumps(row) + "\n" for row in content))
    if inner != path:
        plain = inner.read_bytes()
        zstd = pyarrow.Codec("zstd")
        gz = path.suffix == ".gz"
        path.write_bytes(gzip.compress(plain) if gz else zstd.compress(plain, asbytes=True))
        inner.unlink()
    return path


# ---- Reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ending", folders.TABLES)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, cores, small_spans, ending, packing):
    if ending == ".parquet" and packing:
        pytest.skip("compresses itself")
    path = write(tmp_path / f"a{ending}{packing}", TEXTS)
    assert both(path) == sorted(TEXTS)
    if path.name == "a.jsonl":  # many programs name such a file .json
        assert both(path.rename(tmp_path / "a.json")) == sorted(TEXTS)
        write(path, ["one line"]).rename(tmp_path / "b.json")
        assert both(tmp_path) == sorted([*TEXTS, "one line"])


@pytest.mark.parametrize("ending", [".jsonl", ".txt", ".parquet"])
def test_any_number_of_processes_gives_the_same_rows(tmp_path, cores, small_spans, ending):
    """Trap 20: also of one file."""
    for name in range(10, 70 if ending == ".txt" else 12):
        write(tmp_path / f"{name}{ending}", [f"{name}{i}" * 9 for i in range(100)])
    found = []
    for number in (1, 3):
        cores(number)
        found.append([split.to_dict() for split in load(tmp_path)])
    assert found[0] == found[1]
    train, validation = found[0]
    assert len(train["text"]) > 50 and validation["text"]
    number = lambda place: place.partition(ending)[0]  # noqa: E731
    assert [*map(number, train["place"])] == sorted(map(number, train["place"]))


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".json"])
def test_values_stay_as_they_are_written(tmp_path, cores, ending):
    """Traps 3, 4, 5, 6 and 7: dates, numbers, NA, columns called type and message."""
    odd = ["2020-03-01", "NA", "null", "007", "1e5", "nan", "true", '{"a": 1}', "0.12345678901234"]
    odd += [str(2**70), "2020-03-01T10:00:00"]
    content = [{"text": text, "type": "user", "message": f"m {i}"} for i, text in enumerate(odd)]
    assert both(write(tmp_path / f"a{ending}", content)) == sorted(odd)


def test_columns_that_are_not_read_may_be_of_any_type(tmp_path, cores, capsys):
    maps = pyarrow.array([[("a", "b")]] * 40, pyarrow.map_("string", "string"))
    table = pyarrow.table({"text": TEXTS, "maps": maps})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert both(tmp_path / "a.parquet") == sorted(TEXTS)
    (tmp_path / "a.jsonl").write_text('{"text": "a", "\\ud800": 1}\n{"text": "b"}\n')
    assert both(tmp_path / "a.jsonl") == ["a", "b"]
    assert "from text (not read: ?)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.csv", b"text,kind\nx,1,2\n", "line 2: the first line has 2 fields, this one 3"),
        ("a.csv", b'text,kind\nx,1\n"x,1\ny,2\n', 'line 3: a " is opened and never closed'),
        ("a.csv", b"", "it is empty: it has no column names"),
        ("a.csv", b"text,kind\nx,1\ntext,kind\ny,2\n", "line 3: the column names stand here"),
        ("a.csv", b"text,text,kind\nx,y,1\n", "more than one column text among text, text, kind"),
        ("a.tsv", b'text\tn\n"Why\t1\nx\t1\ny"\t2\n', 'line 2: a " takes the lines to 4 as one'),
        ("a.jsonl.gz", b"", "it has 0 bytes: it is truncated"),
        ("a.json", b'[{"text": "x"},\n{"b" 1}]', "line 2: invalid JSON at column 6: Expecting ':'"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text" "y"}', "line 3: invalid JSON at column 9"),
        ("a.jsonl", b'{"body": "x", "kind": 1}\n', "no column text among body, kind; name the"),
        ("a.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "line 1: a number has more than 4,300 dig"),
        ("a.parquet", b"PAR1", "cannot read"),
        ("a.txt", b"a line\n" * 90_000 + b"\xff" * 4, "line 90001: byte 0xff is not UTF-8"),
    ],
)
def test_a_bad_file_is_one_line_with_its_place(tmp_path, cores, name, content, said):
    """Trap 8."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        load(tmp_path / name)
    text = str(error.value)
    assert text.startswith("task.data: cannot read ") and said in text and name in text
    assert text.isprintable() and len(text) < 500


@pytest.mark.parametrize("processes", [1, 3])
def test_the_first_problem_is_raised_with_its_line(tmp_path, cores, small_spans, processes):
    """Trap 14: not that of the process that ends first."""
    cores(processes)
    lines = [json.dumps({"text": f"text {i}"}) for i in range(300)]
    lines[250], lines[130], lines[200] = "{", '{"text": 3}', '{"text": null}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="^task.data: .*a.jsonl, line 131: the text is 3 but must"):
        load(tmp_path / "a.jsonl")


def test_marks_of_utf_8_and_lines_of_windows(tmp_path, cores, small_spans):
    for name in ("a.jsonl", "b.csv", "c.json", "d.tsv"):
        path = write(tmp_path / name, [f"text {name} {i}" for i in range(30)])
        content = path.read_text("utf-8-sig").replace("\n", "\r\n")
        path.write_text(content, encoding="utf-8-sig", newline="")
    (tmp_path / "e.txt").write_text("a text", encoding="utf-8-sig")
    found = both(tmp_path)
    assert len(found) == 121 == len({*found}) and {*"\r\ufeff"}.isdisjoint("".join(found))


def test_a_huge_text_is_documents_cut_at_line_ends(tmp_path, cores, monkeypatch):
    monkeypatch.setattr(readers, "SPAN", 40_000)
    monkeypatch.setattr(readers, "DOCUMENT", 10_000)
    monkeypatch.setattr(readers, "SEARCHED", 1000)
    lines = "".join(f"{i} äöü\n" for i in range(20_000))
    run = "€" * 50_000  # without a line's end
    for content in (lines, lines + run + "\n" + lines):
        (tmp_path / "a.txt").write_text(content)
        found = []
        for number in (1, 3):
            cores(number)
            train, validation = load(tmp_path / "a.txt")
            place = lambda row: int(row["place"].rpartition(" ")[2])  # noqa: E731
            found.append(sorted([*train, *validation], key=place))
        spans = readers.spans_of(tmp_path / "a.txt")
        read = [row["text"] for span in spans for row, _ in readers.read_span(span, {"text": ""})]
        assert found[0] == found[1] and "".join(read) == content
        assert len(validation) > 1 and max(len(row["text"]) for row in found[0]) < 12_000
        if content == lines:
            for row in found[0]:
                assert row["text"].endswith("\n") and row["text"].startswith(f"{place(row) - 1} ")


def test_one_short_text_is_cut_so_that_some_is_held_out(tmp_path, cores):
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(300)))
    train, validation = load(tmp_path / "a.txt")
    assert len(train) > 5 and len(validation) >= 1


# ---- datasets ------------------------------------------------------------------------------------


def test_an_edited_function_and_an_edited_file_are_read_anew(tmp_path, cores):
    """Traps 1 and 2: functions are hashed by name, files by their mtime."""
    path = write(tmp_path / "a.jsonl", TEXTS)
    stamp = path.stat().st_mtime_ns
    assert both(path) == sorted(TEXTS)
    write(path, [text.replace("text", "next") for text in TEXTS])
    os.utime(path, ns=(stamp, stamp))
    assert both(path)[0].startswith("next 0")

    def edit(word):
        def helper(row):
            return {"text": word + row["text"]}, []

        return helper

    assert both(path, normalize=edit("A "))[0].startswith("A next")
    assert both(path, normalize=edit("B "))[0].startswith("B next")


# ---- What is read and left out -------------------------------------------------------------------


def test_what_is_read_and_left_out_is_printed(tmp_path, cores, capsys):
    content = [*TEXTS[:20], "useless", "", TEXTS[0], *(f"odd {i}1" for i in range(9))]
    path = write(tmp_path / "a.jsonl", content)
    train, validation = load(path, incomplete_rows="skip", plural="documents")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"Preparing data: 30 documents of {path}, from text (not read: id)"
    assert printed[1] == "Preparing data: in 9 documents is odd"
    assert printed[2] == (
        f"Prepared: 32 documents read, {len(train)} to train on, {len(validation)} to evaluate on; "
        f"left out: 1 say nothing (the first: {path}, line 21), 1 incomplete: the text is empty "
        f"(the first: {path}, line 22); 1 are equal to others"
    )
    assert len(train) + len(validation) == 30 and train.column_names == ["text", "source", "place"]


# ---- Splits --------------------------------------------------------------------------------------


def test_no_row_that_is_held_out_is_trained_on_as_data_grows(tmp_path, cores):
    every = [f"text {i}" for i in range(400)]
    trained, held = set(), set()
    for number in (50, 100, 200, 400):
        train, validation = map(texts, load(write(tmp_path / "a.jsonl", every[:number])))
        assert trained <= {*train} and held <= {*validation} and len(validation) > number / 40
        trained, held = {*train}, {*validation}
    validation = texts(load(write(tmp_path / "b.csv", every), validation_rows=7)[1])
    assert len(validation) == 7 and {*validation} < held


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_rows_of_a_group_are_on_one_side(tmp_path, cores, ending):
    content = [{"text": f"text {i}", "patient": i % 23} for i in range(200)]
    found = {}
    for number in (100, 200):
        path = write(tmp_path / f"a{ending}", content[:number])
        split = load(path, group_column="patient")
        sides = [{int(text.split()[1]) % 23 for text in texts(side)} for side in split]
        assert sides[0] and sides[1] and not sides[0] & sides[1]
        found[number] = sides
    assert found[100] == found[200]
    with pytest.raises(ValueError, match="no column doctor among text, patient; .*group_column"):
        load(path, group_column="doctor")


def test_a_group_is_one_in_files_with_other_types(tmp_path, cores):
    """pandas writes 1.0 for 1 where a column has nulls, and NaN for null."""
    write(tmp_path / "a.jsonl", [{"text": f"a {i}", "patient": i % 23} for i in range(100)])
    floats = [{"text": f"b {i}", "patient": float(i % 23)} for i in range(100)]
    write(tmp_path / "b.parquet", floats)
    split = load(tmp_path, group_column="patient")
    sides = [{int(text.split()[1]) % 23 for text in texts(side)} for side in split]
    assert sides[0] and sides[1] and not sides[0] & sides[1]
    write(tmp_path / "b.jsonl", [*floats, {"text": "x", "patient": float("nan")}])
    with pytest.raises(ValueError, match="b.jsonl, line 101: the group is NaN"):
        load(tmp_path / "b.jsonl", group_column="patient")


def test_mixtures_are_in_the_order_of_the_config(tmp_path, cores, small_spans):
    cores(2)
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(40)])
    data = ",".join(f"{tmp_path / name}.jsonl:{i}" for i, name in enumerate("bac", 1))
    for split in load(data):
        assert split.features["source"].names == ["b.jsonl", "a.jsonl", "c.jsonl"]
        assert ["bac"[number] for number in split["source"]] == [t[0] for t in texts(split)]
        assert [*split["source"]] == sorted(split["source"]) and {*split["source"]} == {0, 1, 2}
        assert len(split) > 3
