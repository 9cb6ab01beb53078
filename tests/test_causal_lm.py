"""The task causal_lm: what it reads, how it packs, what it counts, and how it answers bad input."""

import argparse
import json
import math
import random
import shutil
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from conftest import ROOT, SOURCE, load_task
from samestep.data import tables
from samestep.text import corpus, row_formats, units
from samestep.text import tokenizing as text_module

WORDS = "the quick brown fox jumps over the lazy dog and runs away again".split()
IGNORE_INDEX = -100

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


def read_back(task, cfg):
    """The text of both parts, and their rows."""
    prepared = task.prepare_data(cfg)
    tokenizer = corpus.load_tokenizer(cfg, prepared)
    parts = task.datasets(cfg, prepared)
    texts = []
    for part in parts:
        rows = task.collate([part[i] for i in range(len(part))])
        learnt = rows["labels"][rows["labels"] != IGNORE_INDEX]
        tokens = torch.cat([rows["input_ids"][0, :1], learnt])
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


def test_a_single_text_keeps_its_end_for_validation(task, config, tmp_path):
    (train, validation), _ = read_back(task, config(write(tmp_path, "txt")))
    assert documents(train)[0] + documents(validation)[0] == "".join(DOCUMENTS)


def test_every_token_but_the_first_is_predicted_once_and_its_bytes_are_counted(
    task, config, tmp_path
):
    (_, validation), (train, rows) = read_back(task, config(write(tmp_path, "jsonl")))
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
    prepared = task.prepare_data(cfg)
    _, rows = task.datasets(cfg, prepared)
    torch.manual_seed(0)
    model = task.build_model(cfg, prepared).eval()
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


def favour_unused_tokens(head, tokenizer):
    """Makes tokens that the tokenizer lacks the likeliest, whatever the hidden state."""
    head.weight.data.zero_()
    head.weight.data[len(tokenizer)] = 100.0
    head.weight.data[len(tokenizer) + 1] = -100.0


def test_a_new_vocabulary_has_rows_that_are_never_generated(task, config, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from samestep.programs import predict

    cfg = config(write(tmp_path, "jsonl"))
    prepared = task.prepare_data(cfg)
    tokenizer, model = corpus.load_tokenizer(cfg, prepared), task.build_model(cfg, prepared)
    assert len(tokenizer) == 300 and model.config.vocab_size == len(model.lm_head.weight) == 384
    favour_unused_tokens(model.lm_head, tokenizer)
    model.eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3)}
    assert model(input_ids=inputs["input_ids"]).logits.argmax(-1).min() >= 300
    # All others have the same logit, and the first of them is chosen.
    assert task.report(model, {}, tmp_path, cfg, prepared)["sample"].endswith("!!!")
    task.export(model, tmp_path / "model", cfg, prepared)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 300
    for flags in ([], ["--temperature", "1"]):
        arguments = argparse.Namespace(tokens=5, temperature=float(flags[1]) if flags else 0.0)
        options = predict.pipeline_options("text-generation", arguments, loaded)
        answer = loaded.generate(**inputs, generation_config=options["generation_config"])
        assert answer.shape == (1, 8) and answer.max() < 300


def test_a_vocabulary_of_whole_128s_has_no_other_rows(task, config):
    cfg = config("pydoc", vocab_size=384)
    prepared = task.prepare_data(cfg)
    assert len(corpus.load_tokenizer(cfg, prepared)) == 384
    model = task.build_model(cfg, prepared)
    assert model.config.vocab_size == 384 and model.generation_config.suppress_tokens is None


def test_text_of_any_bytes_survives(task, config, tmp_path):
    texts = ["<|endoftext|> is written out\n", "emoji 🙂 and \x00 and ü\r\n", *DOCUMENTS]
    file = tmp_path / "odd.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    cfg = config(file)
    prepared = task.prepare_data(cfg)
    tokenizer = corpus.load_tokenizer(cfg, prepared)
    for text in texts[1:]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    end = tokenizer.eos_token_id
    parts = task.datasets(cfg, prepared)
    ends = sum(int((row["labels"] == end).sum()) for part in parts for row in part)
    assert ends == len(texts)  # a document that spells the mark does not end there


def llama_2(tokenizer):
    """Writes spaces by its normaliser, and separates nowhere."""
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    facts = {**json.loads(tokenizer.to_str()), "pre_tokenizer": None}
    return Tokenizer.from_str(json.dumps(facts))


SEPARATORS = {
    "byte-level": (pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    "byte-level, first space": (pre_tokenizers.ByteLevel(), None),
    "metaspace": (pre_tokenizers.Metaspace(), None),
    "metaspace, whole texts": (pre_tokenizers.Metaspace("▁", "first", False), None),
    "llama 2": (pre_tokenizers.Metaspace(), llama_2),
}


@pytest.fixture(params=SEPARATORS)
def separating(request):
    """A BPE of English and of Chinese without spaces, and such a text."""
    draw, signs = random.Random(0), [chr(0x4E00 + i) for i in range(300)]
    chinese = "".join(draw.choices([*signs, "，", "。\n"], [*[1] * 300, 15, 2], k=20_000))
    english = (ROOT / "templates/tasks/causal_lm.py").read_text()[:12_000]
    whole = f"{chinese}{english}\n\n\n{'0123456789' * 300}{' ' * 3000}a\n\n{chinese[::-1]}"
    separator, change = SEPARATORS[request.param]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # pairs within words are learnt
    if request.param.startswith("byte"):
        tokenizer.pre_tokenizer = separator
    signs = [*pre_tokenizers.ByteLevel.alphabet(), "\n"]
    signs = {"initial_alphabet": signs, "special_tokens": ["</s>"]}
    trainer = trainers.BpeTrainer(vocab_size=2500, show_progress=False, **signs)
    tokenizer.train_from_iterator(f"{chinese}{english}".splitlines(), trainer)
    tokenizer.pre_tokenizer = separator
    tokenizer = change(tokenizer) if change else tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"), whole


def test_a_text_in_pieces_has_the_tokens_of_the_whole(separating, monkeypatch):
    tokenizer, source = separating
    wanted = tokenizer(source, add_special_tokens=False).input_ids
    assert len(wanted) < 0.5 * len(source.encode())  # tokens of several bytes
    for short in (5000, 1200, 700, 10**6):
        monkeypatch.setattr(text_module, "SHORT", short)
        found = text_module.tokenize_texts(["a b", source, "", source[:5], source], tokenizer)
        assert found[1] == found[4] == wanted, short
        assert found[2] == []


def test_a_file_in_blocks_has_the_tokens_of_the_whole(separating, tmp_path, monkeypatch):
    tokenizer, source = separating
    (tmp_path / "a.txt").write_text(source, encoding="utf-8")
    wanted = tokenizer(source, add_special_tokens=False).input_ids
    monkeypatch.setattr(tables, "BLOCK", 5000)
    monkeypatch.setattr(tables, "SEARCHED", 4000)
    maker = corpus.RowMaker(tokenizer, "text", 64, 64, "split", False, "<u2")
    blocks = [*tables.read_text(tmp_path / "a.txt", "data", tables.WHOLE)]
    assert len(blocks) > 10
    found = []
    for number, block in enumerate(blocks):
        ends = number == 0, number == len(blocks) - 1
        batch = units.Batch([({"text": block}, "")], [0], False, 0, *ends)
        [(ids, _)] = maker.tokenize(batch)
        found += ids.tolist()
    assert found == [*wanted, tokenizer.eos_token_id]


@pytest.mark.slow
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
    folder = task.prepare_data(cfg)
    shutil.rmtree(folder)
    leftover = folder.with_suffix(".unfinished")
    leftover.mkdir()
    for name in ("tokenizer.partial", "000000.tokens", "000000.partial"):
        (leftover / name).write_text("half of")
    (train, _), _ = read_back(task, cfg)
    assert len(documents(train)) == 54 and not leftover.exists()


@pytest.mark.slow
def test_the_data_that_ships_with_python(task, config):
    for data, least in (("pydoc", 50), ("stdlib", 150)):
        cfg = config(data, context_length=256, vocab_size=400)
        _, (train, validation) = read_back(task, cfg)
        assert len(train) > 5 * len(validation) > least / 10


BAD = [
    ("missing.txt", None, "nothing to read at"),
    ("empty", (), "nothing to read at"),
    ("a.txt", b"", "the text is empty; --task.incomplete_rows skip leaves such rows out"),
    ("a.txt", b"abc \xff def", "byte 0xff is not UTF-8"),
    ("a.txt", b"short", "which do not fill a row of 17"),
    ("a.txt", b"a b c " * 20, "fill a row of 17; add text, raise task.validation_fraction or"),
    ("a.md", b"text", "nothing to read at"),
    ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2"),
    ("a.jsonl", b'{"text": "a"}\n{"body": "b"}', "line 2: no column text among body"),
    ("a.jsonl", b'{"text": " "}\n', "line 1: the text is empty"),
    ("a.jsonl", b'{"text": null}\n', "line 1: the text is empty"),
    ("a.jsonl", b'{"text": 1}\n', "line 1: the text is 1 but must be text"),
    ("a.jsonl", b"\n", "there is no text in"),
    ("a.jsonl", b'{"text": "a"}\n' * 3, "are equal; add others, to hold some out"),
    ("a.jsonl", b'{"question": "a", "answer": "b"}', "has the columns question, answer, but"),
    ("a.parquet", b"PAR1 but truncated", "cannot read"),
    (
        "b.parquet",
        {"body": ["a"], "title": ["b"]},
        "has the columns body, title, but task.rows auto looks for",
    ),
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
    prepared = task.prepare_data(cfg)
    train, _ = task.datasets(cfg, prepared)
    tokenizer = corpus.load_tokenizer(cfg, prepared)
    return tokenizer, task.collate([train[i] for i in range(len(train))])


def segments(batch):
    """Inputs and labels of each packed text; padding is a text of one position with no label."""
    for inputs, places, labels in zip(
        batch["input_ids"], batch["position_ids"], batch["labels"], strict=True
    ):
        starts = [*(places == 0).nonzero().flatten().tolist(), len(places)]
        for first, last in zip(starts, starts[1:], strict=False):
            if last - first > 1 or labels[first] != IGNORE_INDEX:
                yield inputs[first:last], labels[first:last]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_of_a_packed_row_is_that_of_its_texts_alone(task, config, tmp_path, attention):
    fields = {"context_length": 128, "rows": "prompt", "attn_implementation": attention}
    cfg = config(write_rows(tmp_path, PROMPTS), **fields)
    _, batch = packed(task, cfg)
    torch.manual_seed(0)
    model = task.build_model(cfg, task.prepare_data(cfg)).double()
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
    learnt = sorted(
        tokenizer.decode(labels[labels != IGNORE_INDEX]) for _, labels in segments(batch)
    )
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
        assert tokenizer.decode(labels[labels != IGNORE_INDEX]) == expected


def test_best_fit_wastes_less_than_a_hundredth(task, config, tmp_path):
    import random

    generator = random.Random(0)
    rows = [
        {
            "prompt": "ask " * generator.randint(1, 20),
            "completion": "tell " * generator.randint(1, 60),
        }
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
    limit = "24 tokens (the most that a row or the model holds)"
    assert f"27 of 27 texts are longer than {limit} and were {policy}" in said
    if policy == "cut":
        assert task.count(train) == 27 * 24
        return
    validation = task.datasets(cfg, task.prepare_data(cfg))[1]
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
    assert tokenizer.decode(labels[labels != IGNORE_INDEX]).startswith("that is ")
    (tmp_path / "odd.jinja").write_text("{{ messages | length }}" + own)
    for file, said in (
        ("odd.jinja", "does not begin with what the template gives"),
        ("none.jinja", "no file"),
    ):
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
        learnt = tokenizer.decode(labels[labels != IGNORE_INDEX])
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
    ("prompt", {"prompt": "a", "completion": ""}, "line 3: the completion is empty; --task.incomp"),
    (
        "prompt",
        {"prompt": None, "completion": "b"},
        "line 3: the prompt is empty; --task.incomplete",
    ),
    ("prompt", {"prompt": "a"}, "no column completion among prompt; name the right one with"),
    ("prompt", {"prompt": 1, "completion": "b"}, "line 3: the prompt is 1 but must be text"),
    ("chat", {"messages": []}, "line 3: there are no messages; --task.incomplete_rows skip"),
    ("chat", {"messages": None}, "line 3: there are no messages"),
    ("chat", {"messages": {}}, "line 3: there are no messages"),
    (
        "chat",
        {"messages": {"role": "user"}},
        "line 3: messages is {'role': 'user'} but must be a list of",
    ),
    (
        "chat",
        {"messages": ["hi"]},
        "line 3: message 1 is 'hi' but must be an object with role and content",
    ),
    (
        "chat",
        {"messages": [{"role": "user", "content": "a"}]},
        "line 3: no message after the first has the role assistant (roles: ",
    ),
    (
        "chat",
        {"messages": [{"role": "assistant", "content": "a"}]},
        "line 3: no message after the first has the role assistant (roles: ",
    ),
    ("chat", {"messages": [{"role": "user"}]}, "line 3: message 1 has no content, only role"),
    ("chat", {"messages": "[{"}, "line 3: messages is '[{', which is not JSON (Expecting"),
    ("chat", {"talk": []}, "no column messages among talk; name the right one with --task.messa"),
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
        ({"rows": "prompt"}, "task.rows is 'prompt' but must be text where task.data is pydoc"),
        (
            {"data": "docstrings", "rows": "text"},
            "task.rows is 'text' but must be prompt or chat where",
        ),
        ({"rows": "chat", "data": "docstrings", "packing": "stream"}, "best_fit for prompts"),
        ({"lora_rank": 4}, "task.lora_rank is 4 but must be 0, unless task.model_name_or_path"),
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


# ---- Tools, other forms of chats, what a template leaves out -------------------------------------

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "tides")
]


def agents(text=False):
    """Chats in which tools are called, once or in parallel; with arguments as JSON text or not."""

    def call(name, **arguments):
        arguments = json.dumps(arguments) if text else arguments
        return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}

    def chat(i):
        tool = {"role": "tool", "tool_call_id": "c"}
        return [
            {"role": "user", "content": f"Weather of {i}?"},
            {"role": "assistant", "content": None, "tool_calls": [call("weather", city=str(i))]},
            {**tool, "content": f"rain {i}"},
            {"role": "assistant", "content": f"Rain in {i}."},
            {"role": "user", "content": "And the tides, twice?"},
            {
                "role": "assistant", "content": "I look.",
                "tool_calls": [call("tides", days=i, high=True), call("tides")],
            },
            {**tool, "content": "low"}, {**tool, "content": "high"},
            {"role": "assistant", "content": "Low, then high."},
        ]  # fmt: skip

    return [{"messages": chat(i), "tools": TOOLS} for i in range(40)]


def learnt_by_number(tokenizer, batch):
    """What is learnt of each chat, by the number that its first question names; and the inputs."""
    found = {}
    for inputs, labels in segments(batch):
        text = tokenizer.decode(inputs)
        number = int(text.split("Weather of ")[1].split("?")[0])
        found[number] = (text, tokenizer.decode(labels[labels != IGNORE_INDEX]))
    return found


def write_agents(folder, kind):
    """Chats with tools in a file of this kind, all with the same content."""
    import csv

    import pyarrow as pa
    import pyarrow.parquet

    if kind == "dict":
        return write_rows(folder, agents())
    rows = agents(text=True)
    if kind == "text":
        return write_rows(folder, rows)
    if kind != "csv":  # a struct has the keys of all messages and calls, null where one has none
        rows = agents() if kind == "structs" else rows
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
        return folder / "a.parquet"
    with open(folder / "a.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["messages", "tools"])
        writer.writerows([json.dumps(row[name]) for name in row] for row in rows)
    return folder / "a.csv"


@pytest.mark.parametrize("kind", ["dict", "text", "parquet", "structs", "csv"])
def test_tool_calls_are_learnt_and_what_tools_answer_is_not(task, config, tmp_path, kind, capsys):
    cfg = config(write_agents(tmp_path, kind), context_length=700, vocab_size=400)
    tokenizer, batch = packed(task, cfg)
    assert ", 40 with tools, from messages\n" in capsys.readouterr().out and cfg.rows == "chat"
    found = learnt_by_number(tokenizer, batch)
    assert len(found) == 36
    tools = "".join(f"{json.dumps(tool)}\n" for tool in TOOLS)
    for i, (text, learnt) in found.items():
        assert text.startswith(
            f"Tools: <tools>\n{tools}</tools>\nUser: Weather of {i}?\nAssistant:"
        )
        assert f"\nTool: rain {i}\n" in text and "\nTool: low\nTool: high\n" in text
        calls = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            for name, arguments in (
                ("weather", {"city": str(i)}), ("tides", {"days": i, "high": True}), ("tides", {})
            )
        ]  # fmt: skip
        answers = [calls[0], f"Rain in {i}.", "\n".join(["I look.", *calls[1:]]), "Low, then high."]
        assert learnt == "".join(f" {answer}<|endoftext|>\n" for answer in answers)


def test_an_answer_of_weight_zero_is_not_learnt(task, config, tmp_path):
    """The form in which OpenAI takes chats: 0 for an answer that is context alone."""

    def chat(i, weights):
        asked = {"role": "user", "content": f"Weather of {i}?"}
        answers = [{"role": "assistant", "content": text} for text in ("Bad.", "Sun.")]
        for answer, weight in zip(answers, weights, strict=True):
            answer |= {} if weight is None else {"weight": weight}
        return {"messages": [asked, answers[0], {"role": "user", "content": "No?"}, answers[1]]}

    cfg = config(
        write_rows(tmp_path, [chat(i, (0, None)) for i in range(20)]),
        vocab_size=300,
        context_length=200,
    )
    found = learnt_by_number(*packed(task, cfg))
    assert {learnt for _, learnt in found.values()} == {" Sun.<|endoftext|>\n"}
    assert all("Bad." in text for text, _ in found.values())
    for weights, said in (
        ((0, 0), "line 1: no message of the assistant is trained on"),
        ((1, 2), "is 2; give 0 or 1"),
    ):
        cfg = config(
            write_rows(tmp_path, [chat(i, weights) for i in range(20)]),
            vocab_size=300,
            context_length=200,
        )
        with pytest.raises(ValueError, match=said):
            task.prepare_data(cfg)


def test_share_gpt_and_alpaca_are_chats(task, config, tmp_path, capsys):
    share = [
        {
            "id": i,
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": f"{i}?"},
                {"from": "gpt", "value": f"{i}!"},
            ],
        }
        for i in range(30)
    ]
    alpaca = [
        {"instruction": "Repeat.", "input": f"{i}" if i % 2 else "", "output": f"{i}!", "text": "x"}
        for i in range(30)
    ]
    asked = {"share": "System: Be brief.\nUser: {}?\nAssistant:", "alpaca": "User: Repeat."}
    said = {"share": ", from conversations (not read: id)", "alpaca": "input (not read: text)"}
    for name, rows in (("share", share), ("alpaca", alpaca)):
        file = write_rows(tmp_path, rows, f"{name}.jsonl")
        labels = []
        for fields in ({}, {"rows": "chat"}):
            cfg = config(file, context_length=64, **fields)
            tokenizer, batch = packed(task, cfg)
            labels.append(batch["labels"])
        assert torch.equal(*labels)
        printed = capsys.readouterr().out
        assert f"30 chats of {file}" in printed and said[name] in printed
        for inputs, learnt in segments(batch):
            answer = tokenizer.decode(learnt[learnt != IGNORE_INDEX])
            number = int(answer.split("!")[0])
            assert answer == f" {number}!<|endoftext|>\n"
            text = tokenizer.decode(inputs)
            assert text.startswith(asked[name].format(number))
            if name == "alpaca":
                given = f"\n\n{number}" if number % 2 else ""
                assert text.startswith(f"User: Repeat.{given}\nAssistant: {number}!")


AUTO = [
    ({"text": "a", "prompt": "b", "completion": "c"}, "prompt", ["prompt", "completion"]),
    ({"text": "a", "prompt": "b"}, "text", ["text"]),
    ({"text": "a", "messages": CHATS[0]["messages"]}, "chat", ["messages", "tools"]),
    ({"instruction": "a", "output": "b"}, "chat", ["instruction", "output", "input"]),
]


@pytest.mark.parametrize("row, rows, read", AUTO)
def test_rows_are_known_by_their_columns(config, tmp_path, row, rows, read):
    row_format = row_formats.recognize_format(config(write_rows(tmp_path, [row])))
    assert (row_format.kind, [*row_format.columns.values()]) == (rows, read)
    assert row_format.names == [*row]


def test_a_field_that_names_a_column_decides_what_rows_are(config, tmp_path):
    row = {"text": "a", "body": "b", "talk": CHATS[0]["messages"], "q": "c", "a": "d"}
    file = write_rows(tmp_path, [row])
    for fields, rows in [
        ({"text_column": "body"}, "text"), ({"messages_column": "talk"}, "chat"),
        ({"prompt_column": "q", "completion_column": "a"}, "prompt"), ({"rows": "text"}, "text"),
    ]:  # fmt: skip
        row_format = row_formats.recognize_format(config(file, **fields))
        assert row_format.kind == rows
        assert {*fields.values()} <= {"text", *row_format.columns.values()}
    for data, rows in (("pydoc", "text"), ("stdlib", "text"), ("docstrings", "prompt")):
        assert row_formats.recognize_format(config(data)).kind == rows


def test_incomplete_rows_are_counted_and_skipped(task, config, tmp_path, capsys):
    silent = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    late = [*CHATS[0]["messages"][:4], {"role": "assistant", "content": " "}]
    for good, bad in [
        ([{"text": text} for text in DOCUMENTS], [{"text": ""}, {"text": None}, {"text": " \n"}]),
        (PROMPTS, [{"prompt": "a", "completion": c} for c in (None, "", " ")]),
        (CHATS, [{"messages": silent}, {"messages": late}, {"messages": None}]),
        (
            [{"instruction": f"a{i}", "output": "b"} for i in range(60)],
            [{"instruction": a, "output": b} for a, b in (("a", ""), (None, "b"), ("a", None))],
        ),
    ]:
        file = write_rows(tmp_path, [*good[:1], *bad, *good[1:]])
        with pytest.raises(ValueError, match="line 2: .*; --task.incomplete_rows skip leaves"):
            task.prepare_data(config(file, context_length=64))
        task.prepare_data(config(file, context_length=64, incomplete_rows="skip"))
        said = capsys.readouterr().out
        assert f"left out 3 incomplete rows of {len(good) + 3}, the first: " in said
        assert f" {len(good)} " in said.splitlines()[1]


BAD_CHATS = [
    (
        [{"from": "bot", "value": "a"}],
        "message 1 is from 'bot' but must be from user, assistant, system",
    ),
    (
        [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}],
        "message 2 is from 'bot' but must be from user, assistant, system",
    ),
    ([{"role": "user", "content": [{"text": "a"}]}], "the content of message 1 is [{'text': 'a'}]"),
    ([{"content": "a"}], "message 1 has no role, only content"),
    ([{"role": 1, "content": "a"}], "the role of message 1 is 1 but must be text"),
    ([{"from": "human", "text": "a"}], "message 1 has no content, only text, role"),
    ([{"role": "assistant", "tool_calls": ["a"]}], "message 1 has the tool call 'a'; write {"),
    (
        [{"role": "assistant", "tool_calls": {"a": 1}}],
        "tool_calls of message 1 is {'a': 1} but must be",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "arguments in message 1 is '{', which is not JSON (Expecting",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}],
        "arguments in message 1 is [1] but must be an object",
    ),
    (
        [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}],
        "message 1 has function_call, the old form of tool_calls; write tool_calls",
    ),
]


@pytest.mark.parametrize("messages, said", BAD_CHATS)
def test_messages_of_no_known_form_are_one_line(task, config, tmp_path, messages, said):
    file = write_rows(tmp_path, [CHATS[0], {"messages": messages}])
    with pytest.raises(ValueError) as error:
        task.prepare_data(config(file))
    assert f"line 2: {said}" in str(error.value) and "\n" not in str(error.value)
    file = write_rows(tmp_path, [{**CHATS[0], "tools": [{"description": "a"}]}])
    with pytest.raises(
        ValueError, match="line 1: tools is .* but must be a list of objects, each with a na"
    ):
        task.prepare_data(config(file))


def test_other_names_of_roles_are_read_as_the_known_ones_and_said(task, config, tmp_path, capsys):
    names = {"user": "human", "assistant": "model"}
    chats = [
        {"messages": [{**m, "role": names.get(m["role"], "System")} for m in row["messages"]]}
        for row in CHATS
    ]
    labels = []
    for rows in (CHATS, chats):
        file = write_rows(tmp_path, rows, f"{len(labels)}.jsonl")
        labels.append(packed(task, config(file, context_length=128))[1]["labels"])
    assert torch.equal(*labels)
    said = [line for line in capsys.readouterr().out.splitlines() if "is read as" in line]
    pairs = ("System is read as system", "human is read as user", "model is read as assistant")
    assert said == [f"Preparing data: in {len(CHATS):,} chats {each}" for each in pairs]


PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}{% if m['tool_calls'] %}"
    "{{ m['tool_calls'] | tojson }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)
ROLES = {"system": "content of message 1 (system)", "tool": "content of message 4 (tool)"}
DROPS = [
    *((f"m['role'] != '{role}'", said) for role, said in ROLES.items()),
    ("m['role'] != 'user'", "content of message 2 (user)"),
    ("not m['tool_calls']", "tool_calls of message 3 (assistant)"),
]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.fixture
def drop(task, config, tmp_path):
    """What is said of chats with tools and this template; empty: nothing."""

    def tell(template, rows=None):
        chat = [{"role": "system", "content": "  Be brief.\n"}, *agents()[7]["messages"][:4]]
        rows = rows or [{"messages": chat, "tools": TOOLS}] * 2
        (tmp_path / "a.jinja").write_text(template)
        rows = [{**row, "messages": [*row["messages"][:-1], {**row["messages"][-1],
                 "content": f"{i}!"}]} for i, row in enumerate(rows)]  # fmt: skip
        file = write_rows(tmp_path, rows)
        cfg = config(file, context_length=400, chat_template=str(tmp_path / "a.jinja"))
        try:
            task.prepare_data(cfg)
        except ValueError as error:
            return str(error)
        return ""

    return tell


def test_a_template_that_shows_all_is_taken(drop):
    assert drop(WITH_TOOLS + PLAIN) == ""
    # It writes a tool's answer as JSON, which is no part of the text then.
    written = PLAIN.replace("m['content'] | trim", "m['content'] | tojson")
    assert drop(WITH_TOOLS + written) == ""


@pytest.mark.parametrize("condition, said", DROPS)
def test_what_a_template_leaves_out_is_refused(drop, condition, said):
    text = drop(WITH_TOOLS + PLAIN.replace("messages %}", f"messages if {condition} %}}", 1))
    assert f": the template leaves out {said}; give one that shows it" in text


def test_tools_parallel_calls_and_reasoning_that_are_left_out_are_refused(drop):
    assert "the template leaves out tools; give" in drop(PLAIN)
    first = PLAIN.replace("m['tool_calls'] | tojson", "m['tool_calls'][0] | tojson")
    assert drop(WITH_TOOLS + first) == ""
    parallel = [{"messages": agents()[3]["messages"][4:]}] * 2
    assert "leaves out tool_calls of message 2 (assistant)" in drop(first, parallel)
    names = PLAIN.replace("m['tool_calls'] | tojson", "m['tool_calls'] | map(attribute='function."
                          "name') | list | tojson")  # fmt: skip
    assert "leaves out arguments of tool_calls of message 2" in drop(names, parallel)
    thought = {"role": "assistant", "content": "b", "reasoning_content": "because"}
    rows = [{"messages": [{"role": "user", "content": "a"}, thought]}] * 2
    assert "leaves out reasoning_content of message 2 (assistant)" in drop(PLAIN, rows)
    # Of an earlier turn it may be gone later: that turn is learnt from a text of its own.
    thinks = PLAIN.replace("<{{ m['role'] }}>", "<{{ m['role'] }}>{% if loop.last %}"
                           "{{ m['reasoning_content'] }}{% endif %}")  # fmt: skip
    again = [rows[0]["messages"] * 2]
    assert drop(thinks, [{"messages": chat} for chat in again * 2]) == ""


def test_a_dropped_word_that_stands_elsewhere_by_chance_is_noticed(drop):
    chat = [
        {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "1"}, {"role": "assistant", "content": "1"},
    ]  # fmt: skip
    text = drop(PLAIN.replace("messages %}", "messages if m['role'] != 'tool' %}", 1),
                [{"messages": chat}] * 2)  # fmt: skip
    assert "leaves out content of message 3 (tool)" in text


def test_tool_calls_that_are_left_out_only_beside_content_are_noticed(drop):
    """Their name stands among the tools, their argument in the question."""
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{i}: Paris?"},
                {"role": "assistant", "content": content, "tool_calls": [CALL]},
                {"role": "tool", "content": "rain"}, {"role": "assistant", "content": "Rain."},
            ],
            "tools": TOOLS,
        }
        for i, content in enumerate([None, None, "I look."])
    ]  # fmt: skip
    either = PLAIN.replace(
        "{% if m['tool_calls'] %}", "{% if m['tool_calls'] and not m['content'] %}"
    )
    assert drop(WITH_TOOLS + either, chats[:2]) == ""
    assert "leaves out tool_calls of message 2 (assistant)" in drop(WITH_TOOLS + either, chats)
