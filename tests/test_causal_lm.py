"""The task causal_lm: what it reads, how it packs, what it counts, and how it answers bad input."""

import copy
import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from conftest import ROOT, write_table
from refusals import cases
from samestep.data import views
from samestep.text import formats, sequences
from samestep.text import tokenizing as text_module
from small_models import word_tokenizer
from test_tasks import chat, refusal

IGNORE_INDEX = -100


def test_every_token_but_the_first_is_predicted_once_and_its_bytes_are_counted(kit, prepare):
    cfg, prepared, parts = prepare(kit.rows)
    for part in parts:
        batch = kit.task.collate([*part])
        assert batch["input_ids"].shape == batch["labels"].shape == (len(part), 16)
        inputs, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
        real = int((labels != IGNORE_INDEX).sum())
        assert len(labels) >= real > 16 * (len(part) - 1)
        assert inputs[:real].tolist() == labels[:real].tolist()
        assert kit.task.count(batch) == real - len(part)  # the first of a sequence is not
    real = kit.task.count(batch)
    firsts = [kit.tokenizer(prepared).decode(row["input_ids"][:1]) for row in parts[1]]
    size = sum(len(text.encode()) for text in kit.keys(prepared, parts[1]))
    size -= sum(len(each.replace("<|endoftext|>", "").encode()) for each in firsts)
    torch.manual_seed(0)
    sums = kit.task.eval_sums(kit.task.build_model(cfg, prepared).eval(), batch)
    scores = kit.task.metrics(sums)
    assert int(batch["bytes"].sum()) == size
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    bits = scores["loss"] * real / math.log(2)
    assert scores["bits_per_byte"] == pytest.approx(bits / size)
    assert scores["unigram_loss"] < math.log(300)


def test_ids_may_be_larger_than_the_number_of_tokens():
    tokenizer = word_tokenizer({"a": 0, "b": 70_000, "[U]": 1}, eos_token="[U]", unk_token="[U]")
    found = text_module.tokenize({"text": ["a b"]}, tokenizer, with_masks=False)
    assert found["input_ids"][0].tolist() == [0, 70_000, 1]


def test_text_of_any_bytes_survives(kit, prepare):
    texts = ["<|endoftext|> is written out\n", "emoji 🙂 and \x00 and ü\r\n"]
    rows = [*({"text": text} for text in texts), *kit.rows]
    cfg, prepared, parts = prepare(rows)
    tokenizer = kit.tokenizer(prepared)
    assert tokenizer.decode(tokenizer(texts[1])["input_ids"]) == texts[1]
    end = tokenizer.eos_token_id
    ends = sum(int((row["labels"] == end).sum()) for part in parts for row in part)
    assert ends == len(rows)  # a document that spells the mark does not end there


@pytest.fixture(params=["byte-level", "llama 2"])
def separating(request):
    """A BPE of English and of Chinese without spaces, and such a text. That of Llama 2 writes
    spaces by its normalizer, and separates nowhere."""
    draw, signs = random.Random(0), [chr(0x4E00 + i) for i in range(300)]
    chinese = "".join(draw.choices([*signs, "，", "。\n"], [*[1] * 300, 15, 2], k=20_000))
    english = (ROOT / "templates/causal_lm/task.py").read_text()[:12_000]
    whole = f"{chinese}{english}\n\n\n{'0123456789' * 300}{' ' * 3000}a\n\n{chinese[::-1]}"
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # pairs within words are learned
    if request.param == "byte-level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    signs = [*pre_tokenizers.ByteLevel.alphabet(), "\n"]
    signs = {"initial_alphabet": signs, "special_tokens": ["</s>"]}
    trainer = trainers.BpeTrainer(vocab_size=2500, show_progress=False, **signs)
    tokenizer.train_from_iterator(f"{chinese}{english}".splitlines(), trainer)
    if request.param == "llama 2":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
        facts = {**json.loads(tokenizer.to_str()), "pre_tokenizer": None}
        tokenizer = Tokenizer.from_str(json.dumps(facts))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"), whole


def test_a_text_in_pieces_has_the_tokens_of_the_whole(separating, monkeypatch):
    tokenizer, source = separating
    wanted = tokenizer(source, add_special_tokens=False).input_ids
    assert len(wanted) < 0.5 * len(source.encode())  # tokens of several bytes
    for short, at_once in ((5000, 200), (700, 3)):
        monkeypatch.setattr(text_module, "SHORT", short)
        monkeypatch.setattr(text_module, "AT_ONCE", at_once)
        texts = ["a b", source, "", source[:5], source]
        found = [each.tolist() for each in text_module.tokenize_texts(texts, tokenizer)]
        assert found[1] == found[4] == wanted, short
        assert found[2] == []


# ---- Prompts, chats, packing ---------------------------------------------------------------------

PROMPTS = [
    {"prompt": f"What is {i} times {i}? ", "completion": "x" * (1 + 7 * i % 23) + f" {i * i}"}
    for i in range(60)
]


@pytest.fixture
def pack(kit, prepare, tmp_path):
    """What is packed of rows: the tokenizer, and all rows of training in one batch."""

    def make(table, kind="jsonl", context_length=128, template="", **fields):
        fields |= write_template(tmp_path, template) if template else {}
        data = kit.write(tmp_path, table, kind)
        cfg, prepared, (train, _) = prepare(data, context_length=context_length, **fields)
        return kit.tokenizer(prepared), kit.task.collate([*train])

    return make


def write_template(folder, text):
    (folder / "a.jinja").write_text(text)
    return {"chat_template": str(folder / "a.jinja")}


def segments(batch):
    """Inputs and labels of each packed text; padding is a text of one position with no label."""
    for inputs, places, labels in zip(
        batch["input_ids"], batch["position_ids"], batch["labels"], strict=True
    ):
        starts = [*(places == 0).nonzero().flatten().tolist(), len(places)]
        for first, last in itertools.pairwise(starts):
            if last - first > 1 or labels[first] != IGNORE_INDEX:
                yield inputs[first:last], labels[first:last]


def marked_texts(tokenizer, batch):
    """Each packed text; what of it is trained stands in «»."""
    for ids, labels in segments(batch):
        text, trained = "", labels != IGNORE_INDEX
        cuts = (trained.int().diff().nonzero()[:, 0] + 1).tolist()
        for part, mask in zip(ids.tensor_split(cuts), trained.tensor_split(cuts), strict=True):
            text += f"«{tokenizer.decode(part)}»" if mask[0] else tokenizer.decode(part)
        yield text


def test_the_loss_of_a_packed_row_is_that_of_its_texts_alone(task, prepare):
    cfg, prepared, (train, _) = prepare(PROMPTS, context_length=128)
    batch = task.collate([*train])
    torch.manual_seed(0)
    model = task.build_model(cfg, prepared).double()
    assert model.decisions["packed"]  # asked whether it separates texts
    for weights in model.parameters():
        weights.data *= 4  # attention that is not almost even
    alone = []
    for inputs, labels in segments(batch):
        assert len(inputs) > 1
        alone.append(task.loss_sum(model, {"input_ids": inputs[None], "labels": labels[None]}))
    assert len(alone) == 53 and len(batch["labels"]) < 27
    together = task.loss_sum(model, batch).item()
    assert together == pytest.approx(sum(alone).item(), rel=1e-6)
    # Without positions, texts see those before them, and the loss is another one.
    del batch["position_ids"]
    assert task.loss_sum(model, batch).item() != pytest.approx(together, rel=1e-3)


def test_completions_alone_are_trained_and_every_one_of_them(pack):
    found = [*marked_texts(*pack(PROMPTS))]
    wanted = {"{prompt}«{completion}<|endoftext|>»".format(**row) for row in PROMPTS}
    assert len(found) == 53 and {*found} < wanted


def test_a_tokenizer_of_another_run_keeps_its_tokens(tmp_path):
    """Its own bos, eos and pad, with a template of this run or none."""
    marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    word_tokenizer(["a", *marks.values()], **marks).save_pretrained(tmp_path / "own")
    (tmp_path / "made").mkdir()
    cfg = SimpleNamespace(vocabulary=str(tmp_path / "own"), model_name_or_path="", length=8)
    cfg.trust_remote_code = False
    rows = [{"text": "a"}]
    for template in ("", "{{ messages }}\n", "{{ tools }}"):
        vars(cfg).update(write_template(tmp_path, template) if template else {"chat_template": ""})
        made = text_module.prepare_tokenizer(cfg, tmp_path / "made", rows, "length")
        assert [made.bos_token, made.eos_token, made.pad_token] == [*marks.values()]
        assert made.chat_template == (template or None)


@pytest.mark.parametrize("policy", ["split", "truncate"])
def test_what_is_too_long_is_split_or_truncated_and_said(kit, task, prepare, capsys, policy):
    texts = [" ".join([str(i)] * 40) for i in range(100, 130)]
    fields = {"context_length": 24, "packing": "best_fit", "overlong": policy}
    cfg, prepared, parts = prepare([(text,) for text in texts], **fields)
    done = {"split": "split", "truncate": "truncated"}[policy]
    assert f"; 28 documents are longer, and {done}\n" in (out := capsys.readouterr().out)
    assert "\nPrepared: 28 rows to train on, 2 to evaluate on\n" in out
    counts = [task.count(task.collate([*part])) for part in parts]
    if policy == "truncate":
        assert counts[0] == 28 * 23
    else:  # every token but the first of each piece is in the loss
        tokenizer = kit.tokenizer(prepared)
        sizes = [len(tokenizer(text).input_ids) + 2 for text in texts]
        assert sum(counts) == sum(size - -(-size // 24) for size in sizes)


# ---- Tools, other forms of chats, what a template leaves out -------------------------------------

CHATS = cases("chats")
AGENT, TOOLS = CHATS["tools, once and in parallel"]["row"].values()


def numbered(row):
    """Rows of the numbers 0 to 29: each is this one with its number for #."""
    return [json.loads(json.dumps(row).replace("#", str(i))) for i in range(30)]


def test_chats_that_differ_in_ids_and_times_are_equal(prepare, tmp_path):
    """They are on one side: to be trained on, or to be evaluated on."""
    rows = [chat(f"{i % 20}?", f"{i % 20}!") for i in range(200)]
    for i, row in enumerate(rows):
        row["messages"][0].update(id=i, time=f"2026-01-01T10:00:{i}")
    _, data, _ = prepare(rows, context_length=16, validation_fraction=0.3)
    train, held = ({tuple(ids) for ids in part["input_ids"]} for part in data.values())
    assert train and held and not train & held


@pytest.mark.parametrize("form", CHATS)
def test_what_is_read_and_trained_of_a_chat(pack, form, capsys):
    row, fields, columns, *texts = CHATS[form].values()
    for kind in ("jsonl", "csv", "parquet"):
        text = texts[-1] if kind == "parquet" else texts[0]
        rows = numbered(row)
        if kind == "csv":
            rows = [
                {name: v if isinstance(v, str) else json.dumps(v) for name, v in row.items()}
                for row in rows
            ]
        found = [*marked_texts(*pack(rows, kind, **fields))]
        assert f"from {columns}\n" in capsys.readouterr().out
        wanted = {text.strip("\n").replace("#", str(i)) for i in range(30)}
        assert {*found} <= wanted and len(found) > 20


TEXTS = Path(__file__).with_name("chat_templates")
PLAIN = (TEXTS / "plain.jinja").read_text().strip()
SYSTEM = {"role": "system", "content": "  Be brief.\n"}
LEFT_OUT = {
    "agent": {"messages": [SYSTEM, *AGENT[:4]], "tools": TOOLS},
    "parallel": {"messages": AGENT[4:]},
    "thought": chat("a", "b", reasoning_content="because"),
    "thinks": chat("a", "<think>why 7</think>answer 7", "b", "c"),
}


@pytest.mark.parametrize("case", cases("templates"))
def test_what_a_template_leaves_out_is_refused(config, kit, tmp_path, case):
    old, new, name, said = case.values()
    rows = [copy.deepcopy(LEFT_OUT[name]) for _ in range(2)]
    for i, row in enumerate(rows):
        row["messages"][-1]["content"] = f"{i}!"
    given = write_template(tmp_path, PLAIN.replace(old, new, 1).replace("OF", "true"))
    cfg = config(rows, context_length=400, **given)
    if said:
        text = refusal(kit, cfg)
        assert text.startswith("task.chat_template: ") and said in text
    else:
        assert kit.prepare_data(cfg).folder.is_dir()


def test_a_template_that_is_not_there_is_one_line(kit, config):
    said = refusal(kit, config(kit.rows, chat_template="none.jinja"))
    assert said == "task.chat_template: there is no file none.jinja"


THINKING = (TEXTS / "thinking.jinja").read_text().strip()  # as that of Qwen3


def test_a_turn_is_trained_as_inference_renders_it(pack):
    """Its reasoning is in the loss; that of the turns before it is not in the context."""
    rows, wanted = [], {}
    for i in range(30):
        thoughts = [f"<think>{i} is {word}</think>{word} {i}" for word in ("odd", "even")]
        messages = chat(f"{i}?", thoughts[0], "No?", thoughts[1])["messages"]
        rows.append({"messages": messages})
        wanted[thoughts[0]] = messages[:2]
        wanted[thoughts[1]] = messages
    tokenizer, batch = pack(rows, template="\ufeff" + THINKING)
    assert tokenizer.chat_template == THINKING
    found = [*segments(batch)]
    assert len(found) > 0.6 * len(wanted)
    for ids, labels in found:
        trained = labels[labels != IGNORE_INDEX]
        messages = wanted[tokenizer.decode(trained).removesuffix("<|endoftext|>")]
        prompt, whole = (
            tokenizer.apply_chat_template(each, add_generation_prompt=ask, return_dict=False)
            for each, ask in ((messages[:-1], True), (messages, False))
        )
        assert ids.tolist() == whole == prompt + trained.tolist()


def test_a_trained_model_is_asked_what_is_held_out(kit, config, monkeypatch):
    """Not a prompt of the demo, unless one is given; of texts their beginnings."""
    monkeypatch.setattr(formats, "generate", lambda model, prompt, *_, **options: prompt)
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=512))
    chats = [{"messages": chat(f"What is {i}?", "A number.")["messages"]} for i in range(30)]
    texts = [{"text": f"{i} {i} {i}"} for i in range(200)]
    for rows, begin in ((chats, "What is"), (texts, "")):
        cfg = config(rows, context_length=64)
        data = kit.prepare_data(cfg)
        shown = formats.write_samples(model, cfg, data)
        assert [*shown] == ["held out 1", "held out 2"] and all(begin in t for t in shown.values())
        assert "A number." not in str(shown) and "function is called" not in str(shown)
        cfg.sample_prompt = "Mine"
        assert "Mine" in formats.write_samples(model, cfg, data)["sample"]


def test_documents_are_packed_a_block_of_tokens_after_the_other(monkeypatch):
    cfg = SimpleNamespace(
        context_length=64, overlong="split", packing="auto", model_name_or_path=""
    )
    found = {"input_ids": [[n] * 50 for n in range(90)], "loss_mask": [[1] * 50] * 90}
    monkeypatch.setattr(sequences, "BLOCK", 400)
    monkeypatch.setattr(sequences, "READ", 3)
    blocks = [*sequences._packed_blocks(datasets.Dataset.from_dict(found), cfg)]
    sizes = [sum(map(len, block["input_ids"])) for block in blocks]
    assert sum(sizes) == 90 * 50 and max(sizes) <= 400 + 3 * 50


def test_rows_that_are_filtered_or_mixed_are_not_read_as_they_are_stored():
    """Arrow's buffers hold all rows in their first order: before sequences are made, and after."""
    cfg = SimpleNamespace(context_length=8, data="a", model_name_or_path="", streaming=False)
    cfg.overlong, cfg.packing = "split", "auto"
    ids = [[n] * (2 + n % 5) for n in range(30)]
    found = {"input_ids": ids, "loss_mask": [[1] * len(each) for each in ids]}
    tokens = datasets.Dataset.from_dict({**found, "source": [0] * 30})
    left = tokens.filter(lambda row: row["input_ids"][0] % 3 == 0)
    wanted = {each[0]: len(each) for each in left["input_ids"] if each[0]}
    for documents in (left.remove_columns("loss_mask"), left):
        rows = sequences.write_sequences(documents, cfg, "train")
        for again in (rows, rows.shuffle(seed=1)):
            view = sequences.Sequences(again, cfg)
            seen = Counter(np.concatenate([row["input_ids"] for row in view]).tolist())
            assert {n: seen[n] for n in seen if n} == wanted
            assert [len(each) for each in again["input_ids"]] == views.lengths_of(
                again, "input_ids"
            ).tolist()
    two = datasets.Dataset.from_dict({**found, "source": [n % 2 for n in range(30)]})
    with pytest.raises(ValueError, match="several sources are mixed"):
        sequences.Sequences(two, cfg)


def test_as_many_sequences_are_evaluated_as_asked_for(prepare, tmp_path):
    """Evenly spread over the held-out rows; what is prepared is what is trained on."""
    (tmp_path / "own").mkdir()
    for name, number in (("train", 300), ("dev", 40)):
        rows = [{"text": f"{'words ' * 40}{i}"} for i in range(number)]
        write_table(tmp_path / "own", rows, name=name)
    _, data, (train, held) = prepare(tmp_path / "own", validation_rows=7)
    assert len(held) == len(data["validation"]) == 7
    for row, view in zip(data["train"], train, strict=True):
        size = len(row["input_ids"])
        assert view["input_ids"][:size].tolist() == view["labels"][:size].tolist()
        assert view["input_ids"][:size].tolist() == row["input_ids"]
    assert [row["unigram_loss"] for row in held] == data["validation"]["unigram_loss"]


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_a_sequence_keeps_the_place_of_its_first_document(kit, prepare, tmp_path, packing):
    (tmp_path / "own").mkdir()
    random.seed(0)
    for name in ("a", "b"):
        rows = [{"text": f"{name} {i} " + "a word" * random.randint(1, 9)} for i in range(60)]
        write_table(tmp_path / "own", rows, name=name)
    cfg, data, _ = prepare(tmp_path / "own", packing=packing, context_length=40)
    decode, found = kit.tokenizer(data).decode, set()
    for split in data.values():
        for row in split:
            path = Path(split.features["file"].int2str(row["file"]))
            line = path.read_text().splitlines()[row["line"] - 1]
            text = decode(row["input_ids"]).split("<|endoftext|>")[packing == "best_fit"]
            assert text in json.loads(line)["text"] and (packing == "stream" or text[0] in "ab")
            found.add((path, row["line"]))
    assert len({path for path, _ in found}) == 2 and len(found) > 15
