"""Reports of errors in other projects, tried here: cases of README.md that no other file has."""

import json
import math
import re

import pytest
import torch
import transformers
from tokenizers import processors

from conftest import ROOT, bake, kill_after, lines, write_table
from same import check_same, check_same_curve, curve
from samestep.models import lora, next_token
from small_models import new_model, word_tokenizer
from test_causal_lm import segments
from test_tasks import BY_NAME, chat, picture

TABLE = (ROOT / "tests" / "reports" / "README.md").read_text()
CHATS = [chat("why " * (60 if i % 2 else 1), f"{i} is so") for i in range(60)]


def test_each_report_has_a_link_and_tests_that_exist():
    rows = [row.split("|")[1:-1] for row in TABLE.splitlines() if row.startswith("| [")]
    for link, *_, tests in rows:
        assert "](https://github.com/" in link
        for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", tests):
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), (file, name)


@pytest.mark.slow
def test_a_run_is_killed_at_the_end_of_an_epoch_and_inside_the_next(tiny, tmp_path):
    """An epoch has five steps. No epoch is skipped, none begins again, no step is taken twice."""
    flags = ["--task.samples", 40, "--task.dropout", 0.2, "--save_every", 1, "--output_dir"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    tiny.train(1, *flags, whole)
    for step in (5, 7):
        tiny.train(1, *flags, again, before=kill_after(again, step), codes=[-9])
    tiny.train(1, *flags, again)
    check_same(whole, again)
    assert [line["step"] for line in lines(again, "loss")] == [*range(1, 13)]


@pytest.mark.slow
def test_a_step_of_more_samples_than_an_epoch_accumulates_all_of_them(tiny, tmp_path):
    flags = ["--task.samples", 5, "--output_dir"]
    tiny.train(1, *flags, tmp_path / "one", "--micro_batch_size", 8)
    tiny.train(2, *flags, tmp_path / "two", "--micro_batch_size", 2)
    check_same_curve(tmp_path / "two", tmp_path / "one", 1e-5, 1e-5)
    assert len(curve(tmp_path / "two")) == 12


def test_a_validation_split_without_a_class_keeps_the_numbers_of_the_others(tmp_path):
    for split, classes in (("train", "abc"), ("validation", "ac")):
        for name in classes:
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for i in range(4):
                picture((60 * ord(name) % 255, i, 9), i).save(folder / f"{i}.png")
    (tmp_path / "images" / "train" / "d").mkdir()  # without a file: no class
    kit = BY_NAME["image_classification"]
    _, prepared, _ = kit.prepare(tmp_path, tmp_path / "images")
    names = prepared["train"].features["label"].names
    assert names == prepared["validation"].features["label"].names == ["a", "b", "c"]
    assert sorted({*prepared["validation"]["label"]}) == [0, 2]


def test_words_for_nothing_are_texts_and_labels(tmp_path):
    words = ["null", "NA", "None", "nan", "N/A"]
    rows = [{"text": words[i % 5] * (1 + i % 4), "label": words[i // 5 % 3]} for i in range(60)]
    kit = BY_NAME["text_classification"]
    cfg, prepared, parts = kit.prepare(tmp_path, kit.write(tmp_path, rows, "csv"))
    texts = {text for part in parts for text in kit.keys(prepared, part)}
    assert {*words} < texts and sum(map(len, parts)) == 60
    assert json.loads((prepared.folder / "labels.json").read_text())["names"] == sorted(words[:3])


def base_model(folder):
    """A small model whose tokenizer puts <s> before a text, pads with </s>, and whose template
    writes <s> itself."""
    words = "<s> </s> <unk> why is so User Bot".split() + [str(i) for i in range(60)]
    marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    tokenizer = word_tokenizer(words, **marks)
    begins = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    tokenizer.backend_tokenizer.post_processor = begins
    tokenizer.chat_template = (
        "{% set names = {'user': 'User', 'assistant': 'Bot'} %}{{ bos_token }}"
        "{% for m in messages %}{{ names[m['role']] }} "
        "{{ m['content'] }}{% if m['role'] == 'assistant' %} {{ eos_token }}{% endif %} "
        "{% endfor %}{% if add_generation_prompt %}Bot {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 128, "vocab_size": len(words)}
    new_model("Llama", tie_word_embeddings=True, **sizes).save_pretrained(folder)
    return tokenizer, {"model_name_or_path": str(folder), "context_length": 64}


@pytest.mark.parametrize("rows", ["chat", "prompt"])
def test_one_bos_begins_a_document_and_its_eos_is_trained_though_it_pads(tmp_path, rows):
    (tokenizer, given), kit = base_model(tmp_path / "base"), BY_NAME["causal_lm"]
    data = CHATS[::2]
    if rows == "prompt":
        data = [{"prompt": f"why {i} ", "completion": f"{i} is so"} for i in range(30)]
    cfg, prepared, (train, _) = kit.prepare(tmp_path, data, **given)
    found = [*segments(kit.task.collate([*train]))]
    for ids, labels in found:
        assert ids[0] == tokenizer.bos_token_id and (ids == 0).sum() == 1
        end = ids.tolist().index(tokenizer.eos_token_id)
        assert labels[end] >= 0 and (labels[end:] >= 0).sum() == 1 and end > 5
    assert len(found) == 28
    for _, tokens in kit.task.test_inputs([*train][:2], cfg, prepared):
        assert tokens["input_ids"][0].count(tokenizer.bos_token_id) == 1


def test_documents_that_truncation_leaves_without_an_answer_are_counted(tmp_path, capsys):
    kit = BY_NAME["causal_lm"]
    fields = {"context_length": 32, "overlong": "truncate"}
    _, prepared, (train, _) = kit.prepare(tmp_path, CHATS, **fields)
    (line,) = re.findall(r"Prepared train: .*", capsys.readouterr().out)
    lost = int(re.search(r"truncated: (\d+) have no token in the loss then", line)[1])
    rows = prepared["train"]
    assert 20 < lost < 32 and lost + len(rows) == 54
    assert all(any(mask[1:]) for mask in rows["loss_mask"])
    with pytest.raises(ValueError, match=r"rows.jsonl has no token in the loss; raise it"):
        kit.prepare(tmp_path, CHATS[1::2], **fields)


@pytest.mark.slow
def test_adapters_with_gradient_checkpointing_are_those_without(tmp_path):
    base_model(tmp_path / "base")
    project = bake(tmp_path, pictures=False, task="causal_lm", tracker="none")
    write_table(tmp_path, CHATS[::2])
    flags = ["--task.data", tmp_path / "rows.jsonl", "--max_steps", 3, "--task.lora_rank", 4]
    flags += ["--task.model_name_or_path", tmp_path / "base", "--task.context_length", 64]
    flags += ["--warmup_steps", 0, "--save_every", 3, "--eval_every", 3, "--output_dir"]
    project.train(1, *flags, tmp_path / "without", "--gradient_checkpointing", "false")
    project.train(1, *flags, tmp_path / "with", "--gradient_checkpointing", "true")
    check_same(tmp_path / "without", tmp_path / "with")


def test_an_adapter_of_tied_embeddings_is_not_merged(tmp_path):
    _, given = base_model(tmp_path)
    fields = {"lora_rank": 2, "merge_lora": True, "lora_targets": "q_proj,embed_tokens"}
    cfg = BY_NAME["causal_lm"].task.TaskConfig(**given, **fields)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"an adapter of one of them cannot be merged"):
        lora.add_adapters(model, cfg, "CAUSAL_LM")


def test_layers_whose_state_runs_into_the_next_packed_text_are_refused():
    """Of LFM2: a state in place of a mask, which positions do not reset; from new weights, too,
    which leak little."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
    config = transformers.Lfm2Config(**sizes, layer_types=["conv", "full_attention"])
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="cannot keep packed texts apart; take another model"):
        next_token.check_separates_texts(model)


@pytest.mark.parametrize("closing", ["after the answer", "before the next turn", "nowhere"])
def test_the_mark_that_ends_an_answer_is_in_the_loss_wherever_the_template_writes_it(
    tmp_path, capsys, closing
):
    (tokenizer, given), kit = base_model(tmp_path / "base"), BY_NAME["causal_lm"]
    after = between = last = ""
    if closing == "after the answer":
        after = "{% if m['role'] == 'assistant' %} </s>{% endif %}"
    elif closing == "before the next turn":
        between = "{% if not loop.first and m['role'] == 'user' %}</s> {% endif %}"
        last = "{% if messages[-1]['role'] == 'assistant' %}</s>{% endif %}"
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{between}{{{{ 'User' if m['role'] == 'user' else 'Bot' }}}} "
        f"{{{{ m['content'] }}}}{after} {{% endfor %}}{last}"
        "{% if add_generation_prompt %}Bot {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "base")
    data = [chat(*[f"why {i}", f"{i} is so"] * 2) for i in range(40)]
    _, _, (train, _) = kit.prepare(tmp_path, data, **given)
    ends = 0 if closing == "nowhere" else 1
    for _, labels in segments(kit.task.collate([*train])):
        in_loss = labels[labels >= 0].tolist()
        assert len(in_loss) == 2 * (3 + ends)
        assert in_loss.count(tokenizer.eos_token_id) == 2 * ends
    warned = "the chat template ends answers without a special token of the tokenizer"
    assert capsys.readouterr().out.count(warned) == 1 - ends


def test_rates_and_samples_depend_on_no_process_and_on_no_evaluation(tiny, tmp_path):
    """Evaluations after each step, or after the last; dropout tells what they draw."""
    flags = ["--task.dropout", 0.2, "--eval_every"]
    tiny.train(1, *flags, 12, "--output_dir", tmp_path / "one")
    tiny.train(2, *flags, 1, "--output_dir", tmp_path / "two")
    found = [lines(tmp_path / name, "loss") for name in ("one", "two")]
    for one, two in zip(*found, strict=True):
        assert [one[key] for key in ("step", "batch_hash")] == [two["step"], two["batch_hash"]]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    decay = [0.001 + 0.0045 * (1 + math.cos(math.pi * step / 10)) for step in range(10)]
    rates = [line["lr"] for line in lines(tmp_path / "two", "loss")]
    assert rates == pytest.approx([0.005, 0.01, *decay], rel=1e-9)
