"""The task seq2seq: what it reads and counts, how well it learns, what it writes and refuses."""

import json

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.mbart import tokenization_mbart as mbart

from conftest import lines
from samestep.data import demo_data, rows
from samestep.text import tokenizing
from small_models import new_model
from test_tasks import BY_NAME, STEPS, refusal

ROWS = [(row["source"], row["target"]) for row in BY_NAME["seq2seq"].rows]


# ---- Loss and metrics ----------------------------------------------------------------------------


def test_scores_count_tokens_and_whole_targets(task):
    """A model that says the last token of a vocabulary of 5, whatever it is asked."""

    class Fours(torch.nn.Module):
        def prepare_decoder_input_ids_from_labels(self, labels):
            return labels

        def forward(self, decoder_input_ids, **_):
            logits = torch.zeros(*decoder_input_ids.shape, 5).index_fill(2, torch.tensor([4]), 9.0)
            return type("Output", (), {"logits": logits})

    targets = [[4, 4], [4, 1, 4], [4], [2]]
    rows = [{"input_ids": np.array([3]), "labels": np.array(labels)} for labels in targets]
    sums = task.eval_sums(Fours(), task.collate(rows))
    scores = task.metrics({name: value.double() for name, value in sums.items()})
    assert (scores["token_accuracy"], scores["exact_match"]) == (5 / 7, 2 / 4)
    right, wrong = (-float(torch.tensor([0.0, 0, 0, 0, 9]).log_softmax(0)[i]) for i in (4, 0))
    assert scores["loss"] == pytest.approx((5 * right + 2 * wrong) / 7, rel=1e-6)


def test_a_model_for_shorter_texts_is_refused(kit, config, bart):
    fields = {"max_source_length": 65, "max_target_length": 32, "model_name_or_path": str(bart)}
    said = "task.max_source_length is 65 but must be at most 64"
    assert said in refusal(kit, config("rows.csv", **fields))


# ---- Languages -----------------------------------------------------------------------------------


def build(family, **fields):
    """A tiny model with random weights."""
    sizes = {"d_model": 16, "max_position_embeddings": 64}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 32}
    return new_model(family, "ForConditionalGeneration", **sizes, **fields)


def save_translator(folder, kind):
    """A tiny NLLB or mBART and its tokenizer."""
    marks, characters = ["<s>", "<pad>", "</s>", "<unk>"], ["\u2581", *map(chr, range(33, 127))]
    if kind == "nllb":
        vocabulary = {piece: i for i, piece in enumerate([*marks, *characters])}
        tokenizer = transformers.NllbTokenizer(vocab=vocabulary, merges=[])
    else:
        pieces = [*marks, *characters, *mbart.FAIRSEQ_LANGUAGE_CODES, "<mask>"]
        tokenizer = transformers.MBartTokenizer(vocab=[(piece, -1.0) for piece in pieces])
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    ids["vocab_size"] = len(tokenizer)
    family = {"nllb": "M2M100", "mbart": "MBart"}[kind]
    build(family, **ids, init_std=0.5).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


LANGUAGES = {"nllb": ("deu_Latn", "fra_Latn"), "mbart": ("de_DE", "fr_XX")}


@pytest.mark.parametrize("kind", LANGUAGES)
def test_languages_are_in_sources_targets_and_what_is_generated(kit, task, tmp_path, kind):
    folder, (source, target) = tmp_path / kind, LANGUAGES[kind]
    save_translator(folder, kind)
    fields = {"model_name_or_path": str(folder), "max_source_length": 40}
    fields |= {"source_lang": source, "target_lang": target, "max_target_length": 12}
    cfg, data, (rows, _) = kit.prepare(tmp_path, kit.rows, **fields)
    codes = [kit.tokenizer(data).convert_tokens_to_ids(each) for each in (source, target)]
    place = -1 if kind == "mbart" else 0
    assert {row["input_ids"][place] for row in rows} == {codes[0]}
    assert {row["labels"][place] for row in rows} == {codes[1]}

    task.export(task.build_model(cfg, data), tmp_path / "out", cfg, data)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer("a b c", return_tensors="pt")
    assert inputs["input_ids"][0, place] == codes[0]
    tokens = model.generate(**inputs, do_sample=False)
    assert tokens[0, 0 if kind == "mbart" else 1] == codes[1]
    # What is generated is what the model predicts under teacher forcing, from the same start.
    labels = tokens[:, 1:]
    if kind == "mbart":  # whose labels end with the language that targets begin with
        labels = torch.cat([labels, tokens[:, :1]], 1)
    logits = task.target_logits(model, {**inputs, "labels": labels})
    first, last = (0, 10) if kind == "mbart" else (1, 10)  # the eleventh is forced to be the end
    assert labels.shape[1] > last
    assert torch.equal(logits.argmax(-1)[:, first:last], labels[:, first:last])


def test_languages_that_are_missing_or_unknown_are_refused(kit, config, bart, tmp_path):
    save_translator(tmp_path / "nllb", "nllb")
    nllb = {"model_name_or_path": str(tmp_path / "nllb"), "max_source_length": 40}
    nllb |= {"max_target_length": 12}
    said = refusal(kit, config(kit.rows, **nllb))
    assert "task.source_lang is '' but must be one of the 202 languages of the tokenizer" in said
    assert "ace_Arab" in said and len(said) < 300
    said = refusal(kit, config(kit.rows, **nllb, source_lang="eng_Latn", target_lang="fra"))
    assert "task.target_lang is 'fra' but must be one of the 202" in said and "fra_Latn" in said
    plain = {"max_source_length": 40, "max_target_length": 12, "model_name_or_path": str(bart)}
    said = refusal(kit, config(kit.rows, **plain, source_lang="en"))
    assert "task.source_lang is 'en' but must be empty: its tokenizer writes no language" in said


def test_languages_have_names_without_the_marks_of_their_tokens():
    class M2M100:
        src_lang, unk_token_id = "en", 3
        lang_code_to_id = {"en": 7, "de": 8}
        convert_tokens_to_ids = {"__en__": 7, "__de__": 8, "en": 5}.get

    assert tokenizing.languages_of(M2M100) == ["de", "en"]
    assert tokenizing.language_id(M2M100, "en") == 7


# ---- Runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bart(task, tmp_path_factory):
    """A folder with a tiny BART and its tokenizer."""
    folder = tmp_path_factory.mktemp("bart")
    texts = [text for row in ROWS for text in row]
    tokenizing.learn_vocabulary(texts, 300, folder, ends=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        pad_token=tokenizing.PAD,
        eos_token=tokenizing.END_OF_TEXT,
        model_input_names=["input_ids", "attention_mask"],
    )
    ids = dict.fromkeys(["pad_token_id", "decoder_start_token_id"], tokenizer.pad_token_id)
    ids |= dict.fromkeys(["bos_token_id", "eos_token_id", "forced_eos_token_id"], 299)
    model = build("Bart", vocab_size=300, **ids)
    # Settings of a beam search, as the BART that summarises has them.
    model.generation_config.update(num_beams=4, early_stopping=True, length_penalty=2.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_pretrained_model_trains_and_answers(kit, baked, bart, tmp_path):
    output = baked.path / "runs" / "bart"
    flags = ["--task.model_name_or_path", bart, "--task.source_prefix", "read: "]
    flags += ["--task.data", kit.write(tmp_path), "--task.max_source_length", 48]
    flags += ["--task.max_target_length", 8, "--task.num_beams", 2, *STEPS, "--max_steps", 2]
    printed = baked.train(1, *flags, "--output_dir", output)
    assert "generation: BLEU" in printed and "(7 rows, 2 beams)" in printed
    assert "new weights" not in printed
    model = AutoModelForSeq2SeqLM.from_pretrained(output / "model")
    start = AutoModelForSeq2SeqLM.from_pretrained(bart)
    for mine, theirs in zip(model.parameters(), start.parameters(), strict=True):
        assert not torch.equal(mine, theirs)
    assert model.generation_config.num_beams == 2 and model.config.source_prefix == "read: "
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    tokens = model.generate(**tokenizer(["read: one two three"], return_tensors="pt"))
    (answer,) = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    given = ["-m", "samestep", "predict", "--model", output / "model", "one two three"]
    assert json.loads(baked.run("python", *given).stdout)["text"] == answer
    # The example of the card says the same.
    card = (output / "model" / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    code = code.replace("a text", "one two three")
    assert baked.run("python", "-c", code).stdout[:-1] == answer


@pytest.mark.slow
def test_dates_are_learned_and_the_report_scores_the_targets_that_the_model_writes(task, baked):
    """The report is that of transformers and sacrebleu alone, from the exported model."""
    from sacrebleu import corpus_bleu, corpus_chrf

    short = ["--max_steps", 300, "--warmup_steps", 30, "--eval_every", 0, "--save_every", 0]
    output = baked.path / "runs" / "learned"
    printed = baked.train(1, *short, "--task.report_samples", 40, "--output_dir", output)
    (scores,) = lines(output, "eval_loss")
    assert scores["eval_loss"] < 1.2 and scores["token_accuracy"] > 0.75
    assert scores["exact_match"] > 0.02  # measured: 0.82, 0.85, 0.14
    model = AutoModelForSeq2SeqLM.from_pretrained(output / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    pairs = [*demo_data.date_rows()]
    sides = np.array([rows.hash_of(row["source"]) for row in pairs], np.uint64)
    is_held = np.isin(sides, rows.hold_out(sides, 0.1, 1000))
    held = [row for row, own in zip(pairs, is_held, strict=True) if own]
    sources, targets = ([row[name] for row in held[:40]] for name in ("source", "target"))
    written = []
    for source in sources:
        tokens = model.generate(**tokenizer([source], return_tensors="pt"))
        written += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    bleu, chrf = (score(written, [targets]).score for score in (corpus_bleu, corpus_chrf))
    assert f"generation: BLEU {bleu:.1f}, chrF {chrf:.1f} (40 rows, greedy search)" in printed
    verdict = "as the target" if written[0] == targets[0] else f"target: {targets[0]}"
    assert f"sample 1: {sources[0]} -> {written[0]} ({verdict})" in printed
