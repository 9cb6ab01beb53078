"""Rows of text: readers, splits, and the traps that were found in the loaders of datasets 5.2.

Where data comes from: files, folders, the Hub; the part held out; a task of one's own.
"""

import gzip
import itertools
import json
import os
import shutil
from dataclasses import dataclass

import datasets
import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from datasets import Value

import hub
from conftest import ROOT, bake, load_task, write_table
from refusals import cases, check_ended, refused, table
from samestep.base.console import one_line
from samestep.contract import contract
from samestep.data import files, inputs, readers, rows, sources
from samestep.data.sources import IncompleteRow
from samestep.models import pretrained
from samestep.prepared import prepared_key
from samestep.step.loader import StepBatchSampler
from samestep.step.plan import StepPlan
from samestep.step.samples import SampleDataset
from samestep.text import tokenizing

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


TASKS = ["causal_lm", "text_classification", "image_classification", "seq2seq", "preference"]


# ---- Files ---------------------------------------------------------------------------------------


def test_a_run_of_characters_does_not_hold_up_a_vocabulary():
    text = "short " + "x" * 2500 + " end"
    assert list(tokenizing.break_long_words([text])) == [
        "short " + "x" * 1000 + " " + "x" * 1000 + " " + "x" * 500 + " end"
    ]


def write_files(folder, names):
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}\n')


def test_linked_folders_count_once_and_hidden_copies_do_not(tmp_path, monkeypatch):
    names = "data/a/1.txt elsewhere/2.txt data/.copies/3.txt data/a/._1.txt data/aa.txt"
    write_files(tmp_path, names)
    data = tmp_path / "data"
    (data / "b").symlink_to(tmp_path / "elsewhere")
    (data / "a" / "up").symlink_to(data)
    wanted = ["a/1.txt", "aa.txt", "b/2.txt"]
    for root in (str(data), "."):
        monkeypatch.chdir(data)
        found, others = files.list_files(root, "data", (".txt",))
        assert [each.name for each in found] == wanted and not others
        assert [each.path for each in found] == [os.path.join(root, name) for name in wanted]


def test_what_cannot_be_reached_is_never_left_out(tmp_path, monkeypatch):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "1.txt").write_text("a cat")
    cfg = sources.DataConfig(data="own", validation_data=str(tmp_path))
    (tmp_path / "dogs").symlink_to("none")
    with refused("dogs is a link to nothing", "task.validation_data: "):
        prepared_key.stamps_of(prepared_key.files_of(cfg))
    (tmp_path / "dogs").unlink()
    os.mkfifo(tmp_path / "dogs")
    with refused("dogs is no regular file"):
        prepared_key.stamps_of(prepared_key.files_of(cfg))
    for named in (str(tmp_path / "c*" / "*.txt"), {str(tmp_path / "cats" / "1.txt"): 2}):
        cfg = sources.DataConfig(data="own", validation_data=named)
        assert [*prepared_key.files_of(cfg).values()] == [str(tmp_path / "cats" / "1.txt")]
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("cats"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="cats"):
        files.list_files(str(tmp_path), "data", (".txt",))


def test_a_folder_without_a_file_that_can_be_read_is_refused_as_one_with_a_file_twice(tmp_path):
    write_files(tmp_path, "a.jsonl b.JSONL.gz c.jsonl.xz d.jsonl.zst e.JPG.gz LICENSE .hidden")
    with refused(", but 6 other files; pass --task.data PATH, a", "task.data: nothing to read at "):
        files.list_files(str(tmp_path), "data", (".txt",))
    (tmp_path / "a.jsonl.gz").write_text("")
    with refused("has a.jsonl.gz and the same without .gz; remove one"):
        files.list_files(str(tmp_path), "data", files.TABLES)


def test_a_bundled_dataset_is_not_taken_for_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    with refused("is a bundled dataset, and a file or folder here: rename it, or give ./digits"):
        sources.check_data_config(sources.DataConfig(data="digits"), ["digits"])
    sources.check_data_config(sources.DataConfig(data="./digits"), ["digits"])


@pytest.mark.parametrize("name", TASKS)
def test_shipped_recipes_have_no_field_that_nothing_reads(name, monkeypatch):
    task = load_task(name)
    monkeypatch.setattr(pretrained, "folder_of", lambda cfg: None)  # runs/default/model, later
    for recipe in (ROOT / "templates" / name).glob("*.yaml"):
        lines = [line for line in recipe.read_text().splitlines() if "{{" not in line]
        fields = yaml.safe_load("\n".join(lines)).get("task") or {}
        task.check_config(task.TaskConfig(**fields))


# ---- The Hub -------------------------------------------------------------------------------------


def small(data):
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 300}
    flags = ["--config", "configs/train/smoke.yaml", "--max_steps", "2", "--warmup_steps", "0"]
    return [*flags, "--task.data", data, *[f"--task.{k}={v}" for k, v in sizes.items()]]


@pytest.mark.slow
def test_data_and_model_of_the_hub_by_name_config_split_and_commit(tmp_path):
    project = bake(tmp_path, tracker="none")
    project.train(1, *small("manual"), "--output_dir", "runs/base")
    data = [hub.DATA, "--task.data_config", "easy", "--task.context_length", "16"]
    pinned = ["--task.data_revision", hub.COMMIT]
    model = ["--task.model_name_or_path", hub.MODEL, "--task.revision", hub.COMMIT]
    flags = [*small(data[0]), *data[1:], *pinned]
    with hub.serve(project.path / "runs" / "base" / "model") as (address, asked):
        env = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        env |= {name: "" for name in os.environ if name.lower().endswith("_proxy")}
        printed = project.train(1, *flags, *model, "--task.validation_split", "test", **env)
        assert "Prepared: 50 rows to train on, 10 to evaluate on" in printed
        assert any(path.startswith(f"{hub.MODEL}/resolve/{hub.COMMIT}/") for path in asked)
        assert (project.path / "runs" / "smoke" / "model" / "model.safetensors").exists()

        floating = f"write --task.data_revision {hub.COMMIT}, which is main of owner/rows"
        for given, said in (
            ([*small(data[0]), *data[1:]], floating),
            (small("owner/none"), "neither here nor on the Hub"),
        ):
            given += ["--check", "--output_dir", "runs/refused"]
            [(code, _, errors)] = project.ends(1, *given, **env)
            check_ended([code, "", errors], said)
    # All of it is on this disk now: the same command needs no network.
    flags += ["--task.validation_split", "test", "--output_dir", "runs/again"]
    shutil.rmtree(project.path / ".cache")
    again = project.train(1, *flags, HF_HOME=str(tmp_path / "hub"))
    assert "Prepared: 50 rows to train on, 10 to evaluate on" in again


# ---- A task of one's own -------------------------------------------------------------------------


def test_the_contract_describes_each_function_of_a_task():
    names = {name for name in vars(contract.Task) if name[0].islower()}
    assert names == {*contract.REQUIRED, *contract.OPTIONAL}


def test_sorting_moves_rows_within_a_step_alone():
    sizes = torch.randint(1, 100, (50,), generator=torch.Generator().manual_seed(0)).numpy()
    rows = SampleDataset(range(50), seed=1)
    rows.sizes = sizes
    for micro, shares in ((8, (2,)), (2, (5, 2, 1))):
        steps = [[], [], []]
        for rank, share in enumerate(shares):
            plan = StepPlan(16, micro, shares, rank)
            slices = list(StepBatchSampler(plan, 16, 64, rows.sort))
            assert [len(s) for s in slices] == [micro] * 3 * share
            for step in range(3):
                steps[step] += sum(slices[step * share : (step + 1) * share], [])
        for step, window in enumerate(steps):
            assert sorted(window) == list(range(16 + 16 * step, 32 + 16 * step))
            ordered = sizes[rows.ids(window)].tolist()
            assert ordered == sorted(ordered)


def test_a_weight_that_is_not_a_whole_number_of_at_least_1_is_refused():
    for weight in ("0", "0.5"):
        with refused(f"one of its sources is 'a:{weight}'; give each as PATH"):
            sources.split_data(f"a:{weight},b")
    for twice in ("a:2,a", "a.jsonl:2,./a.jsonl:1", "x/../b,b"):
        with refused("names a source twice; add its weights"):
            sources.split_data(twice)
    given = [each[:2] for each in sources.split_data("a:2,b.1, c")]
    assert given == [("a", 2), ("b.1", 1), ("c", 1)]


# ---- Splits --------------------------------------------------------------------------------------

TREES = cases("trees")
ALL_ENDINGS = (".txt", *files.TABLES, *files.IMAGES)


@pytest.mark.parametrize("name", TREES)
def test_files_and_splits_are_known_by_their_names_on_a_disk_and_in_a_store(tmp_path, capsys, name):
    names, read, said, in_store, *held_out = TREES[name].values()
    write_files(tmp_path, names)
    fsspec.filesystem("memory").put(f"{tmp_path}/", f"/{tmp_path.name}/", recursive=True)
    for data in [str(tmp_path), f"memory://{tmp_path.name}"][: 1 + in_store]:
        fields = {"validation_data": f"{data}/{held_out[0]}"} if held_out else {}
        found = inputs.find_inputs(sources.DataConfig(data=data, **fields), {}, ALL_ENDINGS)
        assert [" ".join(file.name for file in each.files) for each in found] == read
        printed = capsys.readouterr().out.replace(data, "DATA")
        assert printed == (f"Preparing data: {said}\n" if said else "")


def test_a_run_that_is_named_is_data(tmp_path):
    write_files(tmp_path, "status.json hardware.yaml metrics.jsonl model/config.json")
    assert len(files.list_folder(str(tmp_path))) == 4


@pytest.mark.parametrize("data", ["{}", "{}:2,{}:0"])
def test_a_line_that_is_cut_shows_no_part_of_a_secret(data):
    """Cut before the secret is taken out, a URL ends before its @, and looks like a path."""
    url = f"s3://user:{'SECRET' * 20}@bucket/rows"
    task = load_task("causal_lm")
    given = data.replace("{}", url)
    for more in ({}, {"data_config": "x"}, {"tools_column": "x"}):
        with pytest.raises(ValueError) as error:
            task.check_config(task.TaskConfig(data=given, **more))
        assert "SECRET" not in one_line(error.value)
