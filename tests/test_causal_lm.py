"""The task causal_lm: what it reads, how it packs, what it counts, and how it answers bad input."""

import importlib.util
import json
import math
import subprocess
import sys

import pytest
import torch

from conftest import ROOT

SOURCE = ROOT / "templates" / "tasks" / "causal_lm.py"
WORDS = "the quick brown fox jumps over the lazy dog and runs away again".split()
DOCUMENTS = [" ".join(WORDS[i % 13 :] + WORDS[: i % 13]) + f" {i}.\n" for i in range(60)]


@pytest.fixture(scope="module")
def task():
    spec = importlib.util.spec_from_file_location("causal_lm", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["causal_lm"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(task, tmp_path):
    """Settings of a very small task, with the data given as keywords."""

    def make(data, **fields):
        small = {"context_length": 16, "vocab_size": 300, "hidden_size": 16, "num_layers": 1}
        small |= {"num_heads": 2, "cache_dir": str(tmp_path / "cache")}
        return task.TaskConfig(data=str(data), **{**small, **fields})

    return make


def prepared(task, cfg):
    """The text of both parts, and their rows."""
    task.prepare_data(cfg)
    tokenizer = task.build_model(cfg).tokenizer
    parts = task.datasets(cfg)
    texts = []
    for part in parts:
        rows = [part[i]["tokens"] for i in range(len(part))]
        tokens = torch.cat([rows[0][:1], *[row[1:] for row in rows]])
        texts.append(tokenizer.decode(tokens[tokens != task.IGNORED]))
    return texts, parts


def documents(text):
    """The documents between the marks that end them."""
    return [document for document in text.split("<|endoftext|>") if document]


def write(folder, kind):
    """DOCUMENTS as a file, or files, of this kind."""
    if kind == "txt":
        (folder / "a.txt").write_text("".join(DOCUMENTS), encoding="utf-8")
        return folder / "a.txt"
    if kind == "jsonl":
        rows = "\n".join(json.dumps({"text": text}) for text in DOCUMENTS)
        (folder / "a.jsonl").write_text(rows, encoding="utf-8")
        return folder / "a.jsonl"
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet

        pa.parquet.write_table(pa.table({"text": DOCUMENTS}), folder / "a.parquet")
        return folder / "a.parquet"
    inner = folder / "texts" / "inner"
    inner.mkdir(parents=True)
    for i, text in enumerate(DOCUMENTS):
        (inner / f"{i}.txt").write_text(text, encoding="utf-8")
    (inner / "ignored.md").write_text("no text of ours")
    return folder / "texts"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_every_document_is_in_one_part_and_comes_back_as_it_was(task, config, tmp_path, kind):
    (train, validation), _ = prepared(task, config(write(tmp_path, kind)))
    train, validation = documents(train), documents(validation)
    assert sorted(train + validation) == sorted(DOCUMENTS)
    assert len(validation) == 6


def test_a_single_text_keeps_its_end_for_validation(task, config, tmp_path):
    (train, validation), _ = prepared(task, config(write(tmp_path, "txt")))
    assert documents(train)[0] + documents(validation)[0] == "".join(DOCUMENTS)


def test_every_token_but_the_first_is_predicted_once_and_its_bytes_are_counted(
    task, config, tmp_path
):
    (_, validation), (train, rows) = prepared(task, config(write(tmp_path, "jsonl")))
    batch = task.collate([rows[i] for i in range(len(rows))])
    assert batch["input_ids"].shape == batch["labels"].shape == (len(rows), 16)
    assert int(batch["bytes"].sum()) == sum(len(d.encode()) for d in documents(validation))
    for dataset in (train, rows):
        tokens = [dataset[i]["tokens"] for i in range(len(dataset))]
        assert all(int(a[-1]) == int(b[0]) for a, b in zip(tokens, tokens[1:], strict=False))
        whole = task.collate([dataset[i] for i in range(len(dataset))])
        real = sum(int((row[1:] != task.IGNORED).sum()) for row in tokens)
        assert task.count(whole) == real > 16 * (len(dataset) - 1)


def test_the_loss_is_the_sum_over_the_counted_tokens(task, config, tmp_path):
    cfg = config(write(tmp_path, "jsonl"))
    _, (_, rows) = prepared(task, cfg)
    torch.manual_seed(0)
    model = task.build_model(cfg).eval()
    batch = task.collate([rows[i] for i in range(len(rows))])
    with torch.no_grad():
        # transformers shifts labels itself: the row with its first token again gives the same mean.
        labels = torch.cat([batch["input_ids"][:, :1], batch["labels"]], 1)
        inputs = torch.cat([batch["input_ids"], batch["labels"][:, -1:].clamp(min=0)], 1)
        mean = model(input_ids=inputs, labels=labels).loss
    assert task.loss_sum(model, batch).item() / task.count(batch) == pytest.approx(
        mean.item(), rel=1e-5
    )
    sums = task.eval_sums(model, batch)
    scores = task.metrics(sums)
    assert scores["loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    nats = scores["loss"] * task.count(batch)
    assert scores["bits_per_byte"] == pytest.approx(nats / math.log(2) / float(sums["bytes"]))
    assert scores["unigram_loss"] < math.log(300)


def test_text_of_any_bytes_survives(task, config, tmp_path):
    texts = ["<|endoftext|> is written out\n", "emoji 🙂 and \x00 and ü\r\n", *DOCUMENTS]
    file = tmp_path / "odd.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    cfg = config(file)
    task.prepare_data(cfg)
    tokenizer = task.build_model(cfg).tokenizer
    for text in texts[1:]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    end = tokenizer.eos_token_id
    ends = sum(int((row["tokens"][1:] == end).sum()) for part in task.datasets(cfg) for row in part)
    assert ends == len(texts)  # a document that spells the mark does not end there


def test_preparation_is_done_once_and_again_when_the_file_changes(task, config, tmp_path, capsys):
    file = write(tmp_path, "jsonl")
    task.prepare_data(config(file))
    assert "60 documents" in capsys.readouterr().out
    task.prepare_data(config(file))
    assert capsys.readouterr().out == ""
    with open(file, "a", encoding="utf-8") as more:
        more.write('\n{"text": "one more document"}')
    task.prepare_data(config(file))
    assert "61 documents" in capsys.readouterr().out


def test_processes_that_start_together_prepare_once(task, config, tmp_path):
    cfg = config(write(tmp_path, "jsonl"))
    program = f"""
import sys
sys.path.insert(0, {str(SOURCE.parent)!r})
import causal_lm
causal_lm.prepare_data(causal_lm.{cfg!r})
"""
    running = [
        subprocess.Popen([sys.executable, "-B", "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sorted(map(len, printed))[:2] == [0, 0] and "60 documents" in "".join(printed)
    assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 1


def test_a_killed_preparation_leaves_nothing_that_counts(task, config, tmp_path):
    cfg = config(write(tmp_path, "jsonl"))
    leftover = task.prepared_folder(cfg).with_suffix(".unfinished")
    leftover.mkdir(parents=True)
    (leftover / "tokenizer.json").write_text("half of")
    (train, _), _ = prepared(task, cfg)
    assert len(documents(train)) == 54 and not leftover.exists()


def test_the_data_that_ships_with_python(task, config):
    for data, least in (("pydoc", 50), ("stdlib", 150)):
        cfg = config(data, context_length=256, vocab_size=400)
        _, (train, validation) = prepared(task, cfg)
        assert len(train) > 5 * len(validation) > least / 10


BAD = [
    ("missing.txt", None, "nothing to read at"),
    ("empty", (), "nothing to read at"),
    ("a.txt", b"", "there is no text in"),
    ("a.txt", b"abc \xff def", "position 4"),
    ("a.txt", b"short", "which do not fill a row of 17"),
    ("a.md", b"text", "nothing to read at"),
    ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2"),
    ("a.jsonl", b'{"text": "a"}\n{"body": "b"}', "line 2: no text"),
    ("a.jsonl", b'{"text": " "}\n', "there is no text in"),
    ("a.parquet", b"PAR1 but truncated", "cannot read"),
    ("b.parquet", {"body": ["a"], "title": ["b"]}, "no column text among body, title"),
]


@pytest.mark.parametrize("name, content, said", BAD)
def test_bad_data_is_answered_in_one_line(task, config, tmp_path, name, content, said):
    path = tmp_path / name
    if content == ():
        path.mkdir()
    elif isinstance(content, dict):
        import pyarrow as pa
        import pyarrow.parquet

        pa.parquet.write_table(pa.table(content), path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        task.prepare_data(config(path))
    message = str(error.value)
    assert message.startswith("task.data") and said in message
    assert "\n" not in message and name in message


@pytest.mark.parametrize(
    "field, value",
    [
        ("validation_fraction", 1.0), ("validation_fraction", float("nan")), ("context_length", 1),
        ("vocab_size", 256), ("num_layers", 0), ("num_heads", 0), ("hidden_size", 15),
        ("dropout", 1.0),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_before_anything_is_read(task, config, field, value):
    with pytest.raises(ValueError, match=f"task.{field} is .* but must be"):
        task.prepare_data(config("no such file", **{field: value}))
