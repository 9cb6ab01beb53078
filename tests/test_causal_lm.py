"""The task causal_lm: what it reads, how it packs, what it counts, and how it answers bad input."""

import json
import math
import subprocess
import sys

import pytest
import torch

from conftest import ROOT, SOURCE, load_task

WORDS = "the quick brown fox jumps over the lazy dog and runs away again".split()
DOCUMENTS = [" ".join(WORDS[i % 13 :] + WORDS[: i % 13]) + f" {i}.\n" for i in range(60)]


@pytest.fixture(scope="module")
def task():
    return load_task("causal_lm")


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
        labels = torch.cat([part[i]["labels"] for i in range(len(part))])
        tokens = torch.cat([part[0]["input_ids"][:1], labels[labels != task.IGNORED]])
        texts.append(tokenizer.decode(tokens))
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
        whole = task.collate([dataset[i] for i in range(len(dataset))])
        inputs, labels = whole["input_ids"].flatten(), whole["labels"].flatten()
        real = task.count(whole)
        assert len(labels) >= real > 16 * (len(dataset) - 1)
        assert inputs[1:real].tolist() == labels[: real - 1].tolist()


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
    ends = sum(int((row["labels"] == end).sum()) for part in task.datasets(cfg) for row in part)
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
sys.path[:0] = {[str(ROOT / SOURCE), str(ROOT / "templates" / "tasks")]!r}
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
    ("a.jsonl", b'{"text": "a"}\n{"body": "b"}', "line 2: no column text among body"),
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


# ---- Prompts, chats, packing ---------------------------------------------------------------------

PROMPTS = [
    {"prompt": f"What is {i} times {i}? ", "completion": "x" * (1 + 7 * i % 23) + f" {i * i}"}
    for i in range(60)
]
CHATS = [
    {"messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{i} and 1?"},
        {"role": "assistant", "content": f"that is {i + 1}"}, {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes" + "!" * (i % 7)},
    ]}
    for i in range(60)
]  # fmt: skip


def write_rows(folder, rows, name="rows.jsonl"):
    (folder / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder / name


def packed(task, cfg):
    """Tokenizer, and all rows of training in one batch."""
    task.prepare_data(cfg)
    train, _ = task.datasets(cfg)
    return task.build_model(cfg).tokenizer, task.collate([train[i] for i in range(len(train))])


def segments(batch):
    """Inputs and labels of each packed text; padding is a text of one position with no label."""
    for inputs, places, labels in zip(
        batch["input_ids"], batch["position_ids"], batch["labels"], strict=True
    ):
        starts = [*(places == 0).nonzero().flatten().tolist(), len(places)]
        for first, last in zip(starts, starts[1:], strict=False):
            if last - first > 1 or labels[first] != -100:
                yield inputs[first:last], labels[first:last]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_of_a_packed_row_is_that_of_its_texts_alone(task, config, tmp_path, attention):
    fields = {"context_length": 128, "rows": "prompt", "attn_implementation": attention}
    cfg = config(write_rows(tmp_path, PROMPTS), **fields)
    _, batch = packed(task, cfg)
    torch.manual_seed(0)
    model = task.build_model(cfg).double()
    for weights in model.parameters():
        weights.data *= 4  # attention that is not almost even
    alone = []
    for inputs, labels in segments(batch):
        assert len(inputs) > 1
        alone.append(task.loss_sum(model, {"input_ids": inputs[None], "labels": labels[None]}))
    assert len(alone) == 54 and len(batch["labels"]) < 27
    together = task.loss_sum(model, batch)
    assert together.item() == pytest.approx(sum(alone).item(), rel=1e-6)
    # Without positions, texts see those before them, and the loss is another one.
    del batch["position_ids"]
    assert task.loss_sum(model, batch).item() != pytest.approx(together.item(), rel=1e-3)


def test_completions_alone_are_learnt_and_every_one_of_them(task, config, tmp_path):
    cfg = config(write_rows(tmp_path, PROMPTS), context_length=128, rows="prompt")
    tokenizer, batch = packed(task, cfg)
    learnt = sorted(tokenizer.decode(labels[labels != -100]) for _, labels in segments(batch))
    answers = {row["completion"] + "<|endoftext|>" for row in PROMPTS}
    assert len(learnt) == 54 and set(learnt) < answers


def test_all_answers_of_a_chat_are_learnt_and_nothing_else(task, config, tmp_path):
    cfg = config(write_rows(tmp_path, CHATS), context_length=128, rows="chat")
    tokenizer, batch = packed(task, cfg)
    for inputs, labels in segments(batch):
        text = tokenizer.decode(inputs)
        assert text.startswith("System: Be brief.\nUser: ")
        number = int(text.split("User: ")[1].split()[0])
        expected = f" that is {number + 1}<|endoftext|>\n yes{'!' * (number % 7)}<|endoftext|>\n"
        assert tokenizer.decode(labels[labels != -100]) == expected


def test_best_fit_wastes_less_than_a_hundredth(task, config, tmp_path):
    import random

    draw = random.Random(0)
    rows = [
        {"prompt": "ask " * draw.randint(1, 20), "completion": "tell " * draw.randint(1, 60)}
        for _ in range(1500)
    ]
    cfg = config(write_rows(tmp_path, rows), context_length=256, rows="prompt")
    _, batch = packed(task, cfg)
    lengths = [len(inputs) for inputs, _ in segments(batch)]
    assert len(lengths) == 1350
    assert sum(lengths) / batch["labels"].numel() > 0.99
    assert sum(lengths) / (len(lengths) * max(lengths)) < 0.6  # each padded to the longest


@pytest.mark.parametrize("policy", ["split", "cut"])
def test_what_is_too_long_is_split_or_cut_and_said(task, config, tmp_path, capsys, policy):
    texts = [" ".join([str(i)] * 40) for i in range(100, 130)]
    file = write_rows(tmp_path, [{"text": text} for text in texts])
    fields = {"context_length": 24, "packing": "best_fit", "too_long": policy}
    cfg = config(file, **fields)
    tokenizer, train = packed(task, cfg)
    said = capsys.readouterr().out
    assert f"27 of 27 texts are longer than 24 tokens and were {policy}" in said
    if policy == "cut":
        assert task.count(train) == 27 * 24
        return
    validation = task.datasets(cfg)[1]
    held_out = task.collate([validation[i] for i in range(len(validation))])
    # Every token of a text, and its end, is the label of one piece.
    whole = sum(len(tokenizer(text).input_ids) + 1 for text in texts)
    assert task.count(train) + task.count(held_out) == whole


def test_a_template_of_ones_own_and_one_that_cannot_work(task, config, tmp_path):
    own = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    own += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "own.jinja").write_text(own)
    fields = {"context_length": 128, "rows": "chat"}
    rows = write_rows(tmp_path, CHATS)
    cfg = config(rows, chat_template=str(tmp_path / "own.jinja"), **fields)
    tokenizer, batch = packed(task, cfg)
    inputs, labels = next(segments(batch))
    assert tokenizer.decode(inputs).startswith("<system>Be brief.<user>")
    assert tokenizer.decode(labels[labels != -100]).startswith("that is ")
    (tmp_path / "odd.jinja").write_text("{{ messages | length }}" + own)
    for file, said in (("odd.jinja", "no beginning of the answered"), ("none.jinja", "no file")):
        with pytest.raises(ValueError, match="task.chat_template") as error:
            task.prepare_data(config(rows, chat_template=str(tmp_path / file), **fields))
        assert said in str(error.value) and "\n" not in str(error.value)


def test_a_template_that_leaves_out_reasoning_later_gives_each_answer_its_own_text(
    task, config, tmp_path
):
    template = (
        "{% for m in messages %}<{{ m['role'] }}>"
        "{% if loop.last and m['role'] == 'assistant' %}(thinks){% endif %}"
        "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (tmp_path / "thinks.jinja").write_text(template)
    fields = {"context_length": 128, "rows": "chat"}
    rows = write_rows(tmp_path, CHATS)
    cfg = config(rows, chat_template=str(tmp_path / "thinks.jinja"), **fields)
    tokenizer, batch = packed(task, cfg)
    texts = list(segments(batch))
    assert len(texts) == 2 * 54
    for inputs, labels in texts:
        learnt = tokenizer.decode(labels[labels != -100])
        assert learnt.startswith("(thinks)") and learnt.count("(thinks)") == 1
        assert tokenizer.decode(inputs).count("<assistant>") == (2 if "yes" in learnt else 1)


def test_rows_of_prompts_and_chats_come_from_every_kind_of_table(task, config, tmp_path):
    import csv

    import pyarrow as pa
    import pyarrow.parquet

    chats = [row["messages"] for row in CHATS]
    with open(tmp_path / "p.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(PROMPTS)
    with open(tmp_path / "c.csv", "w", newline="") as file:
        csv.writer(file).writerows([["talk"], *([json.dumps(chat)] for chat in chats)])
    table = pa.table({name: [row[name] for row in PROMPTS] for name in ("prompt", "completion")})
    pa.parquet.write_table(table, tmp_path / "p.parquet")
    pa.parquet.write_table(pa.table({"talk": chats}), tmp_path / "c.parquet")
    write_rows(tmp_path, PROMPTS, "p.jsonl")
    write_rows(tmp_path, [{"talk": chat} for chat in chats], "c.jsonl")
    for kind, rows in (("p", "prompt"), ("c", "chat")):
        found = []
        for ending in ("jsonl", "csv", "parquet"):
            fields = {"context_length": 128, "rows": rows}
            fields |= {"messages_column": "talk"} if rows == "chat" else {}
            _, batch = packed(task, config(tmp_path / f"{kind}.{ending}", **fields))
            found.append(batch["labels"])
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


BAD_ROWS = [
    ("prompt", {"prompt": "a", "completion": ""}, "line 3: no completion, a string"),
    ("prompt", {"prompt": "a"}, "no column completion among prompt; name the one to take with"),
    ("prompt", {"prompt": 1, "completion": "b"}, "line 3: no prompt, a string"),
    ("chat", {"messages": []}, "line 3: no answer: no message after the first"),
    ("chat", {"messages": [{"role": "user", "content": "a"}]}, "line 3: no answer"),
    ("chat", {"messages": [{"role": "assistant", "content": "a"}]}, "line 3: no answer"),
    ("chat", {"messages": [{"role": "user"}]}, "line 3: no messages, a list of objects with"),
    ("chat", {"messages": "[{"}, "line 3: no messages, since"),
    ("chat", {"talk": []}, "no column messages among talk; name the one to take with --task.messa"),
]


@pytest.mark.parametrize("rows, bad, said", BAD_ROWS)
def test_bad_rows_are_answered_in_one_line(task, config, tmp_path, rows, bad, said):
    good = PROMPTS if rows == "prompt" else CHATS
    file = write_rows(tmp_path, [*good[:2], bad, *good[2:]])
    with pytest.raises(ValueError) as error:
        task.prepare_data(config(file, rows=rows, context_length=64))
    assert str(error.value).startswith("task.data: ") and said in str(error.value)
    assert "\n" not in str(error.value) and "line 3" in str(error.value)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"rows": "prompt"}, "task.data is 'pydoc' but must be"),
        ({"data": "docstrings"}, "task.data is 'docstrings' but must be"),
        ({"rows": "chat", "data": "docstrings", "packing": "stream"}, "best_fit for prompts"),
        ({"lora_rank": 4}, "task.lora_rank is 4 but must be 0, or task.model_name_or_path"),
        ({"packing": "best_fit", "attn_implementation": "flash_attention_2"}, "sdpa or eager"),
        (
            {"model_name_or_path": "no/such/folder"},
            "_or_path: there is no folder no/such/folder;",
        ),
        ({"data": "owner/name"}, "owner/name is neither here nor on the Hub"),
        ({"validation_data": "none.jsonl"}, "task.validation_data: nothing to read at none.jsonl"),
    ],
)
def test_settings_that_do_not_fit_each_other(task, config, fields, said, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError) as error:
        task.prepare_data(config(**{"data": "pydoc", **fields}))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_validation_data_of_ones_own_is_all_that_is_evaluated_on(task, config, tmp_path):
    train = write_rows(tmp_path, [{"text": text} for text in DOCUMENTS[:50]], "train.jsonl")
    other = write_rows(tmp_path, [{"text": text} for text in DOCUMENTS[50:]], "other.jsonl")
    texts, _ = prepared(task, config(train, validation_data=str(other)))
    assert sorted(documents(texts[0])) == sorted(DOCUMENTS[:50])
    assert sorted(documents(texts[1])) == sorted(DOCUMENTS[50:])
