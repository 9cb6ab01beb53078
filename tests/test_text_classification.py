"""The task text_classification: what it reads and counts, how well it learns, what it refuses."""

import itertools
import json
import os

import datasets
import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import f1_score, r2_score
from transformers import AutoTokenizer

from refusals import cases, check_ended
from samestep.contract import contract
from samestep.data import labels
from samestep.prepared import prepared as prepared_data
from small_models import new_model
from test_tasks import STEPS, refusal

TREES, FISH = "oak birch elm pine beech".split(), "carp trout pike eel perch".split()
TEXTS = [f"text {i}" for i in range(40)]
ROWS = [
    (f"the {words[i % 5]} and the {words[(i // 5 + 1) % 5]} number {i}", name)
    for i in range(40)
    for words, name in [(TREES, "tree") if i % 4 else (FISH, "fish")]
]


# ---- What is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, values, fields, names, read", cases("labels"))
def test_labels_of_any_kind_are_read(kit, prepare, tmp_path, kind, values, fields, names, read):
    given = [values[i % len(values)] for i in range(len(TEXTS))]
    if not kind.startswith("class"):
        data = kit.write(tmp_path, [*zip(TEXTS, given, strict=True)], kind)
    else:
        rows = datasets.Dataset.from_dict({"text": TEXTS, "label": given})
        data = tmp_path / "a.parquet"
        label = datasets.ClassLabel(names=["no", "yes"])
        label = datasets.List(label) if kind == "classes" else label
        rows.cast_column("label", label).to_parquet(data)
    _, prepared, parts = prepare(data, incomplete_rows="skip", **fields)
    assert labels.read(prepared.folder)["names"] == names
    wanted = [read[i % len(read)] for i in range(len(TEXTS))]
    found = [row["labels"].tolist() for part in parts for row in part]
    assert sorted(found) == sorted(each for each in wanted if each is not None)


def test_texts_lie_in_the_folder_of_their_class(prepare, tmp_path):
    """Below that of a split, if there is one; its name may be Latin-1."""
    names = [os.fsdecode(name) for name in (b"caf\xe8", b"caf\xe9")]
    for i, split, name in itertools.product(range(3), ("train", "test"), names):
        (tmp_path / "a" / split / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / split / name / f"{i}.txt").write_text(f"text {i} of {name!a}")
    _, prepared, parts = prepare(tmp_path / "a")
    assert labels.read(prepared.folder)["names"] == ["caf\\xe8", "caf\\xe9"]
    assert prepare(tmp_path / "a")[1].folder == prepared.folder
    assert sum(map(len, parts)) == 6


def test_a_folder_called_test_beside_classes_is_refused(kit, prepare, tmp_path):
    """It is a split, or a class: what it holds is left out, or trained on."""
    for name in ("billing", "sales", "test tube", "test"):
        (tmp_path / "a" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "a" / name / f"{i}.txt").write_text(f"{name} {i}")
    said = refusal(kit, kit.config(tmp_path, tmp_path / "a"))
    assert f"task.data: {tmp_path}/a/test/0.txt is not in the folder of its class; it " in said
    (tmp_path / "a" / "test").rename(tmp_path / "a" / "tests")
    (tmp_path / "a" / "README.md").write_text("no class")
    _, prepared, parts = prepare(tmp_path / "a")
    names = ["billing", "sales", "test tube", "tests"]
    assert labels.read(prepared.folder)["names"] == names and sum(map(len, parts)) == 12


def test_a_class_whose_only_row_is_held_out_is_a_class(kit, prepare):
    rows = [(text, "ab"[i % 2]) for i, text in enumerate(TEXTS)]
    cfg, prepared, (_, validation) = prepare(rows, validation_fraction=0.3)
    held = kit.keys(prepared, validation)[0]
    rows = [(text, "c" if text == held else name) for text, name in rows]
    _, prepared, parts = prepare(rows, validation_fraction=0.3)
    assert labels.read(prepared.folder)["names"] == ["a", "b", "c"]
    assert [2 in {int(row["labels"]) for row in part} for part in parts] == [False, True]


# ---- Models to start from ------------------------------------------------------------------------

PAIRS = [(f"the {a} is tall", f"a {a} or {b} {i}", "yes") for i, (a, b) in
         enumerate([*zip(TREES, FISH, strict=True)] * 5)]  # fmt: skip
PAIRS += [(text, f"no {pair}", "no") for text, pair, _ in PAIRS]


@pytest.fixture
def start(tmp_path):
    """Saves a tiny model with a tokenizer of BERT, whose pairs have token types; its folder."""

    def make(kind, side="right", **sizes):
        folder = tmp_path / kind
        folder.mkdir()
        words = sorted({word for row in PAIRS for text in row for word in text.split()})
        (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]))
        tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), padding_side=side)
        tokenizer.save_pretrained(folder)
        sizes |= {"vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0}
        new_model(kind, "ForSequenceClassification", **sizes).save_pretrained(folder)
        return str(folder)

    return make


def test_padding_on_the_left_is_refused_where_positions_count_it(kit, task, prepare, start):
    for kind in ("Llama", "GPT2"):
        folder = start(kind, "left", initializer_range=0.5)
        cfg, data, _ = prepare(kit.rows, model_name_or_path=folder, max_length=32)
        if kind == "Llama":  # its positions are relative
            task.build_model(cfg, data)
    with pytest.raises(ValueError, match="pads on the left, and the positions of a gpt2"):
        task.build_model(cfg, data)


@pytest.mark.parametrize("kind, most", [("Roberta", 63), ("Bert", 64)])
def test_a_text_has_no_more_tokens_than_there_are_positions(kit, config, start, kind, most):
    """RoBERTa's first position is that after padding's, here 0."""
    fields = {"model_name_or_path": start(kind)}
    said = refusal(kit, config(kit.rows, **fields, max_length=most + 1))
    assert f"task.max_length is {most + 1} but must be at most {most}" in said
    kit.prepare_data(config(kit.rows, **fields, max_length=most))
    model = transformers.AutoModel.from_pretrained(fields["model_name_or_path"])
    model(input_ids=torch.full((1, most), 5))
    with pytest.raises((IndexError, ValueError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 5))


def test_tokens_without_embeddings_are_refused(kit, config, start):
    """But for those of masks, which no text has."""
    folder = start("Bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"more{i}" for i in range(len(tokenizer), 99)])
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(folder)
    fields = {"model_name_or_path": folder, "max_length": 32}
    kit.prepare_data(config(kit.rows, **fields))
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(folder)
    said = refusal(kit, config(kit.rows, **fields))
    assert "has 101 tokens, and the model embeddings of 99; save the model again after" in said


def test_pairs_are_encoded_as_the_tokenizer_does(kit, task, prepare, tmp_path, start):
    path = kit.write(tmp_path, PAIRS, "csv", ("a", "b", "label"))
    fields = {"text_column": "a", "text_pair_column": "b", "token_dropout": 0.9}
    fields |= {"model_name_or_path": start("Bert")}
    cfg, prepared, (part, _) = prepare(path, max_length=48, **fields)
    tokenizer = kit.tokenizer(prepared)
    known = {tuple(tokenizer(a, b).input_ids): [a, b] for a, b, _ in PAIRS}
    pairs = [known[tuple(row["input_ids"].tolist())] for row in part]
    separator = tokenizer.sep_token_id
    bound = contract.bind(task, cfg, prepared)
    for row in part:
        ids = bound.augment(row, torch.Generator().manual_seed(0))["input_ids"].tolist()
        assert ids.count(separator) == row["input_ids"].tolist().count(separator) == 2
        assert len(ids) < len(row["input_ids"])
    model = task.build_model(cfg, prepared).eval()
    assert model.config.text_pair is True
    batch = task.collate([*part], prepared)
    alone = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        mine = task.logits_of(model, batch)
        theirs = model(**tokenizer(pairs, padding=True, return_tensors="pt")).logits
        without_types = model(**alone).logits
    assert torch.allclose(mine, theirs, atol=1e-6)
    assert not torch.allclose(mine, without_types, atol=1e-6)
    _, _, (short, _) = prepare(path, max_length=8, **fields)
    assert {row["input_ids"].tolist().count(separator) for row in short} == {2}
    assert short.sizes().max() <= 8


# ---- Loss and metrics ----------------------------------------------------------------------------

LABELS = {
    "single_label_classification": [name for _, name in ROWS],
    "multi_label_classification": [
        [["oak"], [], ["carp", "eel"], ["oak", "eel"]][i % 4] for i in range(40)
    ],
    "regression": [1000.0 + i % 7 for i in range(40)],
}


@pytest.mark.parametrize("kind", LABELS)
def test_loss_and_scores_are_those_of_transformers_and_scikit_learn(task, prepare, tmp_path, kind):
    rows = [(text, label) for (text, _), label in zip(ROWS, LABELS[kind], strict=True)]
    cfg, prepared, (_, rows) = prepare(rows, problem_type=kind, validation_fraction=0.5)
    torch.manual_seed(1)
    model, rows = task.build_model(cfg, prepared).eval(), [*rows]
    whole = task.collate(rows, prepared)
    with torch.no_grad():
        inputs = {name: whole[name] for name in ("input_ids", "attention_mask", "labels")}
        mean, logits = model(**inputs, return_dict=True).to_tuple()[:2]
    assert task.loss_sum(model, whole).item() / len(rows) == pytest.approx(mean.item(), rel=1e-5)
    halves = [task.eval_sums(model, task.collate(part, prepared)) for part in (rows[:7], rows[7:])]
    sums = {name: sum(part[name].double() for part in halves) for name in halves[0]}
    truth, logits = whole["labels"].double().numpy(), logits.double().numpy()
    if kind == "regression":  # in its own unit, 2 around 1003
        mean_label, deviation = labels.read(prepared.folder).values()
        truth, said = truth * deviation + mean_label, logits[:, 0] * deviation + mean_label
        assert min(truth) == pytest.approx(1000) and max(truth) == pytest.approx(1006)
        errors = truth - said
        expected = {"mae": np.abs(errors).mean(), "rmse": np.sqrt((errors**2).mean())}
        expected["r2"] = r2_score(truth, said)
    else:
        single = kind == "single_label_classification"
        said = logits.argmax(1) if single else (logits > 0).astype(int)
        micro, macro = (
            f1_score(truth, said, average=average, zero_division=0)
            for average in ("micro", "macro")
        )
        expected = {"accuracy" if single else "micro_f1": micro, "macro_f1": macro}
        report = task.report(model, sums, tmp_path, cfg, prepared)
        assert "macro avg" in report["classes"] and "samples avg" not in report["classes"]
        assert all(name in report["classes"] for name in model.config.label2id)
        assert not single or report["confusion"].stat().st_size > 5000
    expected["loss"] = mean.item()
    scores = task.metrics(sums, prepared)
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_numbers_are_learned_in_standard_deviations_whatever_their_scale(task, prepare):
    """The same loss and r2, errors in their own unit, and another identity for another scale."""
    values = np.random.default_rng(0).normal(size=40)
    found, ids = [], set()
    for scale, mean in ((1.0, 0.0), (15.0, 1006.0)):
        rows = [(text, mean + scale * v) for (text, _), v in zip(ROWS, values, strict=True)]
        cfg, prepared, (_, held_out) = prepare(rows, problem_type="regression")
        torch.manual_seed(0)
        model = task.build_model(cfg, prepared).eval()
        scores = task.metrics(task.eval_sums(model, task.collate([*held_out], prepared)), prepared)
        assert model.config.label_std == pytest.approx(scale, rel=0.3)
        assert model.config.label_mean == pytest.approx(mean + scale * 0.1, abs=scale * 0.2)
        errors = [scores[name] / scale for name in ("mae", "rmse")]
        found.append([scores["loss"], scores["r2"], *errors])
        ids |= {prepared_data.identity_of(prepared.folder), prepared.folder}
    assert found[1] == pytest.approx(found[0], rel=1e-3) and len(ids) == 4
    rows = [(text, 0.1) for text, _ in ROWS]  # equal numbers leave nothing to explain
    cfg, prepared, (train, _) = prepare(rows, problem_type="regression")
    model = task.build_model(cfg, prepared).eval()
    scores = task.metrics(task.eval_sums(model, task.collate([*train], prepared)), prepared)
    assert scores["r2"] == 0


def test_balanced_weights_give_each_class_the_same_share(task, prepare, tmp_path):
    _, prepared, parts = prepare(ROWS, class_weights="balanced")
    train, validation = (task.collate([*part], prepared) for part in parts)
    shares = [train["weight"][train["labels"] == i].sum().item() for i in (0, 1)]
    assert shares[0] == pytest.approx(shares[1])
    assert train["weight"].mean().item() == pytest.approx(1)
    assert (validation["weight"] == 1).all()


# ---- Runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_numbers_of_pairs_are_learned_and_predicted_in_their_unit(kit, baked, tmp_path):
    rows = [
        (*text.replace(" and ", "|and ").split("|"), 1015 if name == "tree" else 985)
        for text, name in ROWS
    ]
    data = kit.write(tmp_path, rows, "csv", ("text", "pair", "label"))
    flags = ["--task.problem_type", "regression", "--task.text_pair_column", "pair"]
    flags += [*STEPS, "--max_steps", 50, "--warmup_steps", 2, "--learning_rate", 2e-3]
    flags += ["--save_every", 0, "--eval_every", 0, "--task.data", data, "--task.max_length", 32]
    baked.train(1, *flags, "--output_dir", "runs/numbers")
    command = ["python", "-m", "samestep", "predict", "--model", "runs/numbers/model"]
    given = ["the oak\tand the elm", "the pike\tand the eel"]  # both are in the rows
    said = baked.run(*command, *given).stdout.splitlines()
    high, low = (json.loads(line)["value"] for line in said)
    assert 1020 > high > low + 1.5 > 980
    card = (baked.path / "runs/numbers/model/README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    # As docs/serving.md says.
    code += "\nscore = answer({'text': 'the oak', 'text_pair': 'and the elm'})['score']"
    code += "\nconfig = answer.model.config"
    code += "\nprint(score * config.label_std + config.label_mean)"
    assert float(baked.run("python", "-c", code).stdout) == pytest.approx(high, rel=1e-6)
    refused = baked.run(*command, "the oak", check=False)
    check_ended(refused, "the oak: ValueError: it has no tab, but")


def test_tables_count_under_autocast(task):
    """bf16 has no 257. A table of 601 rows has 601."""
    logits = torch.eye(3)[[0, 1, 1]].repeat(301, 1)[:601]
    labels = torch.tensor([0, 1, 0]).repeat(301)[:601]
    with torch.autocast("cpu", torch.bfloat16):
        one, several = (
            task.classification.count_answers(logits, truth)
            for truth in (labels, torch.eye(3)[labels])
        )
    assert one.dtype == several.dtype == torch.float32
    assert one.tolist() == [[201, 200, 0], [0, 200, 0], [0, 0, 0]]
    assert several[0].tolist() == [[200, 0], [200, 201]]
