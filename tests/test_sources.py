"""Where data comes from: files, folders, the Hub; the part held out; a task of one's own."""

import json
import os
import random
import re
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hub
from conftest import ROOT, SOURCE, bake, lines, load_task, status

sources = load_task("sources")
TEXTS = [f"text {i}, with a comma\nand two lines" for i in range(20)]
COLUMNS = {"text": "body", "label": "kind"}


# ---- Files ---------------------------------------------------------------------------------------


def write(folder, ending):
    """TEXTS with a label each, as a table of this kind."""
    import csv

    import pyarrow as pa
    import pyarrow.parquet

    path = folder / f"rows{ending}"
    rows = [{"id": i, "body": text, "kind": i % 3} for i, text in enumerate(TEXTS)]
    if ending == ".csv":
        with open(path, "w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif ending == ".parquet":
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        pa.parquet.write_table(pa.table(columns), path, row_group_size=7)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("ending", sources.TABLES)
def test_rows_of_every_kind_of_table(tmp_path, ending):
    path = write(tmp_path, ending)
    rows = list(sources.rows_of(path, COLUMNS))
    assert [row["text"] for row, _ in rows] == TEXTS
    assert [int(row["label"]) for row, _ in rows] == [i % 3 for i in range(20)]
    assert all(list(row) == ["text", "label"] for row, _ in rows)
    assert all(place.startswith(f"{path}, ") for _, place in rows)
    with pytest.raises(ValueError) as error:
        list(sources.rows_of(path, {"text": "words", "label": "kind"}))
    line = "no column words among id, body, kind; name the one to take with --task.text_column"
    assert line in str(error.value) and str(path) in str(error.value)


def test_a_text_file_is_a_row_with_the_name_of_its_folder(tmp_path):
    for name in ("good/1.txt", "good/2.txt", "bad/1.TXT"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "good" / "notes.md").write_text("no data")
    found = sources.files(str(tmp_path), (".txt",))
    rows = [row for file in found for row, _ in sources.rows_of(file, COLUMNS)]
    assert rows == [
        {"text": "bad/1.TXT", "label": "bad"},
        {"text": "good/1.txt", "label": "good"},
        {"text": "good/2.txt", "label": "good"},
    ]


def test_linked_folders_count_and_hidden_copies_do_not(tmp_path, monkeypatch):
    for name in ("data/a/1.txt", "elsewhere/2.txt", "data/.copies/3.txt", "data/a/._1.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "data" / "b").symlink_to(tmp_path / "elsewhere")
    data = tmp_path / "data"
    assert sources.files(str(data), (".txt",)) == [data / "a" / "1.txt", data / "b" / "2.txt"]
    monkeypatch.chdir(data)
    assert sources.files(".", (".txt",)) == [Path("a/1.txt"), Path("b/2.txt")]
    (tmp_path / "data" / "a" / "up").symlink_to(tmp_path / "data")
    with pytest.raises(ValueError, match="is a link to a folder above itself"):
        sources.files(str(data), (".txt",))


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"data_revision": "abc"}, "task.data_revision is for data sets on the Hub; task.data is"),
        ({"validation_split": "test"}, "task.validation_split is for data sets on the Hub"),
        ({"data_config": "easy"}, "task.data_config is for data sets on the Hub"),
    ],
)
def test_fields_of_the_hub_do_not_go_with_files(tmp_path, fields, said):
    path = write(tmp_path, ".csv")
    with pytest.raises(ValueError, match=said):
        sources.used_files(sources.DataConfig(data=str(path), **fields), sources.TABLES)


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.csv", b"body,kind\nx,1,2\n", "line 2: not the 2 fields of the first line"),
        ("a.csv", b"body,kind\nx\n", "line 2: not the 2 fields of the first line"),
        ("a.csv", b'body,kind\n"x,1\n', "cannot read"),
        ("a.csv", b"\xff\xfe", "cannot read"),
        ("a.csv", b"", "no column body among nothing"),
        ("a.jsonl", b'["body"]\n', "line 1: not an object: ['body']"),
        ("a.jsonl", b'{"body": "x", "kind": 1}\n{', "line 2: "),
        ("a.parquet", b"PAR1", "cannot read"),
        ("a.txt", b"\xff", "cannot read"),
    ],
)
def test_a_bad_file_is_one_line_with_its_place(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        list(sources.rows_of(tmp_path / name, COLUMNS))
    text = str(error.value)
    assert text.startswith("task.data: cannot read ") and said in text and "\n" not in text
    assert str(tmp_path / name) in text


def test_halves_of_surrogate_pairs_are_replaced_wherever_they_stand(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "a\\ud800", "kind": [{"x": "\\udc00b"}]}')
    [(row, _)] = sources.rows_of(tmp_path / "a.jsonl", COLUMNS)
    assert row == {"text": "a?", "label": [{"x": "?b"}]}


@pytest.mark.parametrize(
    "data, hub",
    [
        ("owner/name", True), ("name", True), ("owner/name-2.0_x", True), ("a/b/c", False),
        ("none.txt", False), ("../x", False), ("/x", False), ("rows.jsonl", False), ("", False),
    ],
)  # fmt: skip
def test_what_is_taken_for_a_name_on_the_hub(data, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sources.on_hub(data) == hub
    if hub:
        (tmp_path / data).mkdir(parents=True)
        assert not sources.on_hub(data)


# ---- Held out ------------------------------------------------------------------------------------


def made(number, labels=3):
    return [({"text": f"row {i % 90}", "label": i % labels}, str(i)) for i in range(number)]


def test_rows_held_out_are_the_same_in_any_order_and_never_on_both_sides():
    rows = made(300)
    shuffled = random.Random(0).sample(rows, len(rows))
    parts = [sources.hold_out(r, 0.1, lambda row: row[0]["text"]) for r in (rows, shuffled)]
    assert sorted(map(str, parts[0][1])) == sorted(map(str, parts[1][1]))
    train, held = ({row["text"] for row, _ in part} for part in parts[0])
    assert not train & held and len(train | held) == 90
    assert len(parts[0][0]) + len(parts[0][1]) == 300 and 26 <= len(parts[0][1]) <= 34


def test_each_stratum_is_held_out_and_keeps_something_to_train_on():
    rows = [({"text": f"{i}", "label": min(i // 40, 3)}, "") for i in range(121)]  # 40, 40, 40, 1
    train, held = sources.hold_out(rows, 0.1, lambda r: r[0]["text"], lambda r: r[0]["label"])
    counts = [sum(row["label"] == label for row, _ in held) for label in range(4)]
    assert counts == [4, 4, 4, 0]
    few = [({"text": str(i), "label": i % 2}, "") for i in range(4)]
    train, held = sources.hold_out(few, 0.1, lambda r: r[0]["text"], lambda r: r[0]["label"])
    assert len(train) == 3 and len(held) == 1


# ---- The Hub -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with a small model in runs/base, which the local Hub serves."""
    baked = bake(tmp_path_factory.mktemp("sources"), tracker="none")
    baked.train(1, *small("pydoc"), "--output_dir", "runs/base")
    return baked


def small(data):
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 300}
    flags = ["--config", "configs/train/smoke.yaml", "--max_steps", "2", "--warmup_steps", "0"]
    return [*flags, "--task.data", data, *[f"--task.{k}={v}" for k, v in sizes.items()]]


def test_data_and_model_of_the_hub_by_name_config_split_and_commit(project, tmp_path):
    data = [hub.DATA, "--task.data_config", "easy", "--task.context_length", "16"]
    pinned = ["--task.data_revision", hub.COMMIT]
    model = ["--task.model_name_or_path", hub.MODEL, "--task.revision", hub.COMMIT]
    flags = [*small(data[0]), *data[1:], *pinned]
    with hub.serve(project.path / "runs" / "base" / "model") as (address, asked):
        env = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        env |= {name: "" for name in os.environ if name.lower().endswith("_proxy")}
        printed = project.train(1, *flags, *model, "--task.validation_split", "test", **env)
        assert "60 documents of owner/rows" in printed
        assert any(path.startswith(f"{hub.MODEL}/resolve/{hub.COMMIT}/") for path in asked)
        assert (project.path / "runs" / "smoke" / "model" / "model.safetensors").exists()

        def refused(*more):
            cases = [{"flags": [*more, "--check", "--output_dir", "runs/refused"]}]
            [(code, _, said)] = project.forked(cases, **env)
            assert code == 2 and said.count("\n") == 1, said
            return said

        floating = refused(*small(data[0]), *data[1:])
        assert f"write --task.data_revision {hub.COMMIT}, which is main of owner/rows" in floating
        assert "BuilderConfig 'none' not found" in refused(*flags, "--task.data_config", "none")
        assert 'Unknown split "none"' in refused(*flags, "--task.data_split", "none")
        column = refused(*flags, "--task.text_column", "words")
        assert "owner/rows, split train: no column words among text" in column
        missing = refused(*small("owner/none"), *pinned)
        assert "cannot load owner/none, config default, split train from the Hub" in missing
        assert "neither here nor on the Hub" in refused(*small("owner/none"))
    # All of it is on this disk now: the same command needs no network.
    flags += ["--task.validation_split", "test", "--output_dir", "runs/again"]
    shutil.rmtree(project.path / ".cache")
    again = project.train(1, *flags, HF_HOME=str(tmp_path / "hub"))
    assert "60 documents of owner/rows" in again


# ---- A task of one's own -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A project whose task.py is the one that its README shows."""
    baked = bake(tmp_path_factory.mktemp("own"), tracker="none")
    readme = (baked.path / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(\"\"\"What is trained.+?)```", readme, flags=re.DOTALL)
    assert 40 <= len([line for line in code.splitlines() if line.strip()]) <= 60
    assert "transformers" not in code
    (baked.path / "task.py").write_text(code, encoding="utf-8")
    (baked.path / "configs" / "train" / "default.yaml").write_text(
        "max_steps: 60\nglobal_batch_size: 32\nmicro_batch_size: 8\nlearning_rate: 0.02\n"
        "warmup_steps: 5\nlog_every: 1\nsave_every: 20\neval_every: 20\nkeep_checkpoints: 0\n"
    )
    return baked


@pytest.mark.parametrize("hardware", ["cpu", "cpu_multi"])
def test_the_readmes_task_trains_resumes_and_exports(own, hardware):
    runs = own.path / "runs"

    def launch(name):
        flags = ["train.py", "--output_dir", f"runs/{name}"]
        config = f"configs/accelerate/{hardware}.yaml"
        return own.run("python", "launch.py", "--config_file", config, *flags).stdout

    launch(hardware)
    whole = runs / hardware
    scores = [line["eval_loss"] for line in lines(whole, "eval_loss")]
    assert len(scores) == 3 and scores[-1] < 0.05 < scores[0]  # the mean alone gives 0.5
    weights = load_file(whole / "model" / "model.safetensors")
    assert sum(v.numel() for v in weights.values()) == 64 * 3 + 1
    assert status(whole)["state"] == "finished"
    assert "## Evaluation" in (whole / "model" / "README.md").read_text()

    continued = runs / f"{hardware}-continued"
    kept = "checkpoints/step-00000020"
    shutil.copytree(whole / kept, continued / kept)
    assert "continuing from" in launch(continued.name)
    for name in ("model.safetensors", "optimizer.bin"):
        file = f"checkpoints/step-00000060/{name}"
        assert (continued / file).read_bytes() == (whole / file).read_bytes()
    if hardware == "cpu_multi" and (runs / "cpu").exists():
        one, two = ([line["loss"] for line in lines(runs / n, "loss")] for n in ("cpu", hardware))
        assert one[:20] == pytest.approx(two[:20], rel=1e-5)


def test_the_contract_names_what_train_py_calls():
    """The docstring of a task says all that other files take from it, and no more."""
    called = set()
    for name in ("train.py", "start.py", "data_order.py"):
        code = (ROOT / SOURCE / name).read_text()
        called |= set(re.findall(r"\btask\.([a-z_]+)\b(?!:)", code)) - {"py"}
        called |= set(re.findall(r'getattr\(task, "(\w+)"', code)) - {"UNIT"}
    contracts = set()
    for name in ("causal_lm", "text_classification", "image_classification"):
        doc = (ROOT / "templates" / "tasks" / f"{name}.py").read_text().split('"""')[1]
        contracts.add(doc.partition("\n\n")[2])
    [contract] = contracts
    assert called == set(re.findall(r"^([a-z_]+)\([\w, ]+\)  ", contract, re.MULTILINE))


@pytest.fixture
def data_order(monkeypatch):
    """The module, around a task that has none of the optional functions."""
    monkeypatch.setitem(sys.modules, "task", types.ModuleType("task"))
    yield load_task("data_order")
    del sys.modules["data_order"]


def test_random_numbers_of_a_row_are_its_own(data_order):
    """Augmentation draws the same whichever worker or rank reads the row, and anew each epoch."""

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, i):
            return i

    rows = data_order.Rows(Numbers(), seed=3)
    rows.augment = lambda row, draw: (row, torch.rand(1, generator=draw).item())
    epoch = dict(row for _, row in rows.__getitems__(list(range(10))))
    one_by_one = dict(rows.__getitems__([p])[0][1] for p in reversed(range(10)))
    following = dict(row for _, row in rows.__getitems__(list(range(10, 20))))
    assert epoch == one_by_one and len(set(epoch.values())) == 10
    assert set(epoch) == set(following) and not set(epoch.values()) & set(following.values())


def test_sorting_moves_rows_within_a_step_alone(data_order):
    sizes = torch.randint(1, 100, (50,), generator=torch.Generator().manual_seed(0)).numpy()
    rows = data_order.Rows(range(50), seed=1)
    rows.sizes = sizes
    for micro, processes in ((8, 1), (4, 1), (2, 2)):
        slices = list(data_order.Slices(16, 64, micro, processes, 16, rows.sort))
        assert [len(s) for s in slices] == [micro] * (48 // micro)
        for step in range(3):
            window = sum(slices[step * 16 // micro : (step + 1) * 16 // micro], [])
            assert sorted(window) == list(range(16 + 16 * step, 32 + 16 * step))
            ordered = sizes[rows.ids(window)].tolist()
            assert ordered == sorted(ordered)
    filler = list(data_order.Slices(0, 50, 8, 4, 0, rows.sort))
    assert (
        len(filler) == 8 and filler[-1] == [50] and sorted(sum(filler[:7], [])) == list(range(50))
    )
