"""The task text_classification: what it reads and counts, how well it learns, what it refuses."""

import csv
import json

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, r2_score

import reference
from conftest import bake, lines, load_task

TREES, FISH = "oak birch elm pine beech".split(), "carp trout pike eel perch".split()
ROWS = [
    (f"the {words[i % 5]} and the {words[(i // 5 + 1) % 5]} number {i}", name)
    for i in range(40)
    for words, name in [(TREES, "tree") if i % 4 else (FISH, "fish")]
]


@pytest.fixture(scope="module")
def task():
    return load_task("text_classification")


@pytest.fixture
def config(task, tmp_path):
    """Settings of a very small task, with the data given as keywords."""

    def make(data, **fields):
        small = {"max_length": 32, "vocab_size": 300, "hidden_size": 16, "num_heads": 2}
        small |= {"cache_dir": str(tmp_path / "cache"), "dropout": 0.0}
        return task.TaskConfig(data=str(data), **{**small, **fields})

    return make


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return bake(tmp_path_factory.mktemp("texts"), task="text_classification", tracker="none")


def write(folder, rows, kind="jsonl", names=("text", "label")):
    """Rows of a text and a label as a file, or a folder of files, of this kind."""
    path = folder / f"rows.{kind}"
    dicts = [dict(zip(names, row, strict=True)) for row in rows]
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, dicts)), encoding="utf-8")
    elif kind == "csv":
        with open(path, "w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, names)
            table.writeheader()
            table.writerows(dicts)
    elif kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet

        pa.parquet.write_table(pa.Table.from_pylist(dicts), path)
    else:
        for i, (text, label) in enumerate(rows):
            (path / label).mkdir(parents=True, exist_ok=True)
            (path / label / f"{i}.txt").write_text(text, encoding="utf-8")
    return path


def batch_of(task, dataset):
    return task.collate([dataset[i] for i in range(len(dataset))])


def texts_of(task, cfg, prepared, dataset):
    tokenizer = task.text_data.load_tokenizer(cfg, prepared)
    return [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in dataset]


# ---- What is read --------------------------------------------------------------------------------


def test_numbers_and_truths_are_classes_too(task, config, tmp_path):
    for labels, names in (([2, 10, 1], ["1", "2", "10"]), ([True, False], ["False", "True"])):
        rows = [(f"text {i}", labels[i % len(labels)]) for i in range(30)]
        cfg = config(write(tmp_path, rows))
        prepared = task.prepare_data(cfg)
        assert list(task.build_model(cfg, prepared).config.id2label.values()) == names


def test_given_validation_rows_are_taken_and_long_texts_are_cut_aloud(
    task, config, tmp_path, capsys
):
    (tmp_path / "more").mkdir()
    given = write(tmp_path / "more", [("word " * 100, "fish"), ("short", "tree")])
    cfg = config(write(tmp_path, ROWS), validation_data=str(given))
    prepared = task.prepare_data(cfg)
    train, validation = task.datasets(cfg, prepared)
    assert (len(train), len(validation)) == (40, 2)
    assert validation[0]["length"] == 32 and validation.sizes().max() == 32
    printed = capsys.readouterr().out
    assert "Prepared: texts of 11 tokens on average, 32 at most; 1 cut to 32\n" in printed
    assert "tree with 75.0%" in printed
    tokenizer = task.text_data.load_tokenizer(cfg, prepared)
    assert validation[0]["input_ids"][-1] == tokenizer.sep_token_id


def test_functions_of_a_file_stay_together_and_none_is_there_twice(task):
    rows = list(task.demo_data.area_rows())
    assert len({row["label"] for row, _ in rows}) == 10
    assert len({row["text"] for row, _ in rows}) == len(rows) > 3000
    label = lambda row: row[0]["label"]  # noqa: E731
    train, held = reference.hold_out(rows, 0.1, lambda row: row[1], label)
    assert not {place for _, place in train} & {place for _, place in held}
    assert len({row["label"] for row, _ in held}) >= 8


def labels_in(task, cfg, prepared):
    """The sets of labels of all rows, training and validation."""
    names = json.loads((prepared / "names.json").read_text())
    rows = [row for part in task.datasets(cfg, prepared) for row in part]
    return sorted([names[i] for i in np.nonzero(row["labels"])[0]] for row in rows)


@pytest.mark.parametrize("form", [json.dumps, str, lambda x: str(np.array(x)), ";".join])
def test_lists_in_cells_are_several_labels(task, config, tmp_path, form):
    """As JSON, Python and NumPy write them, and as text."""
    lists = [["love", "it's god"], [], ["god"], ["love"]]
    rows = [(f"text {i}", form(lists[i % 4])) for i in range(40)]
    cfg = config(write(tmp_path, rows, "csv"), problem_type="multi_label_classification")
    prepared = task.prepare_data(cfg)
    expected = sorted(
        [n for n in ("god", "it's god", "love") if n in lists[i % 4]] for i in range(40)
    )
    assert labels_in(task, cfg, prepared) == expected


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_column_for_each_label(task, config, tmp_path, kind):
    values = {"csv": ["0", "1", "True", "false"], "jsonl": [0, 1, True, False]}.get(
        kind, [0.0, 1.0]
    )
    rows = [(f"text {i}", values[i % len(values)], values[1 - i % 2], values[0]) for i in range(8)]
    several = {"problem_type": "multi_label_classification", "label_columns": "rude, kind,odd"}
    names = ("text", "rude", "kind", "odd")
    cfg = config(write(tmp_path, rows, kind, names), **several)
    prepared = task.prepare_data(cfg)
    truth = {"0": 0, "0.0": 0, "False": 0, "false": 0}
    there = [[n for n, v in zip(names[1:], row[1:], strict=True) if truth.get(str(v), 1)]
             for row in rows]  # fmt: skip
    assert labels_in(task, cfg, prepared) == sorted(there)
    assert list(task.build_model(cfg, prepared).config.id2label.values()) == ["rude", "kind", "odd"]
    rows[3] = ("text 3", *[{"csv": "yes", "jsonl": 2}.get(kind, 0.5)] * 3)
    with pytest.raises(ValueError, match="[345]: the label rude is .* but must be 0 or 1$"):
        task.prepare_data(config(write(tmp_path, rows, kind, names), **several))
    with pytest.raises(ValueError, match="no column odd among .* with --task.label_columns$"):
        rows = [row[:3] for row in rows]
        task.prepare_data(config(write(tmp_path, rows, kind, names[:3]), **several))


def test_many_classes_of_one_row_each_are_named(task, config, tmp_path, capsys):
    rows = [(f"text {i}", f"[label {i}") for i in range(30)] + ROWS[:20]
    task.prepare_data(config(write(tmp_path, rows)))
    said = "32 classes of 47 rows, 30 of them in one row alone: are task.label_column and"
    assert said in capsys.readouterr().out
    task.prepare_data(config(write(tmp_path, ROWS)))
    assert "alone" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("labels", [[1, 0, None], ["a", "nan", None], [0.5, 1.5, None]])
def test_rows_without_a_label_are_refused_or_skipped(task, config, tmp_path, capsys, kind, labels):
    rows = [(f"text {i}", labels[i % 3]) for i in range(30)]
    numbers = {"problem_type": "regression"} if 0.5 in labels else {}
    with pytest.raises(ValueError, match=r"(row 3|line [34]): the label is empty; --task.incomp"):
        task.prepare_data(config(write(tmp_path, rows, kind), **numbers))
    cfg = config(write(tmp_path, rows, kind), incomplete_rows="skip", **numbers)
    prepared = task.prepare_data(cfg)
    assert sum(map(len, task.datasets(cfg, prepared))) == 20
    assert "left out 10 incomplete rows of 30" in capsys.readouterr().out
    if not numbers:
        assert json.loads((prepared / "names.json").read_text()) == sorted(map(str, labels[:2]))


def test_nan_in_a_table_is_no_label_and_its_whole_numbers_are_classes(task, config, tmp_path):
    rows = [(f"text {i}", [1.0, 2.0, float("nan")][i % 3]) for i in range(30)]
    cfg = config(write(tmp_path, rows, "parquet"), incomplete_rows="skip")
    prepared = task.prepare_data(cfg)
    assert json.loads((prepared / "names.json").read_text()) == ["1", "2"]


PAIRS = [(f"the {a} is tall", f"a {a} or {b} {i}", "yes") for i, (a, b) in
         enumerate([*zip(TREES, FISH, strict=True)] * 5)]  # fmt: skip
PAIRS += [(text, f"no {pair}", "no") for text, pair, _ in PAIRS]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder with a tiny BERT, whose pairs have token types."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    words = sorted({word for row in PAIRS for text in row for word in text.split()})
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=99, intermediate_size=16, max_position_embeddings=64, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("start", ["new", "bert"])
def test_pairs_are_encoded_as_the_tokenizer_does(task, config, tmp_path, bert, start):
    path = write(tmp_path, PAIRS, "csv", ("a", "b", "label"))
    fields = {"text_column": "a", "text_pair_column": "b", "token_dropout": 0.9}
    fields |= {"model_name_or_path": str(bert)} if start == "bert" else {}
    cfg = config(path, max_length=48, **fields)
    prepared = task.prepare_data(cfg)
    part = task.datasets(cfg, prepared)[0]
    tokenizer = task.text_data.load_tokenizer(cfg, prepared)
    known = {tuple(tokenizer(a, b).input_ids): (a, b) for a, b, _ in PAIRS}
    pairs = [known[tuple(row["input_ids"].tolist())] for row in part]
    separator = tokenizer.sep_token_id
    for row in part:
        ids = task.augment(row, torch.Generator().manual_seed(0))["input_ids"].tolist()
        assert ids.count(separator) == row["input_ids"].tolist().count(separator) == 2
        assert len(ids) < len(row["input_ids"])
    model = task.build_model(cfg, prepared).eval()
    assert model.config.text_pair is True
    with torch.no_grad():
        mine = task.logits_of(model, batch_of(task, part))
        theirs = model(**tokenizer([*map(list, pairs)], padding=True, return_tensors="pt")).logits
        without = model(**{k: v for k, v in batch_of(task, part).items() if "ids" in k[:9]
                           or "mask" in k}).logits  # fmt: skip
    assert torch.allclose(mine, theirs, atol=1e-6)
    assert torch.allclose(mine, without, atol=1e-6) == (start == "new")
    short = config(path, max_length=8, **fields)
    prepared = task.prepare_data(short)
    lengths = [
        row["input_ids"].tolist().count(separator) for row in task.datasets(short, prepared)[0]
    ]
    assert set(lengths) == {2} and task.datasets(short, prepared)[0].sizes().max() <= 8


# ---- Loss and metrics ----------------------------------------------------------------------------

LABELS = {
    "single_label_classification": [name for _, name in ROWS],
    "multi_label_classification": [[["oak"], [], ["carp", "eel"], ["oak", "eel"]][i % 4]
                                   for i in range(40)],
    "regression": [1000.0 + i % 7 for i in range(40)],
}  # fmt: skip


@pytest.mark.parametrize("kind", LABELS)
def test_loss_and_scores_are_those_of_transformers_and_scikit_learn(task, config, tmp_path, kind):
    rows = [(text, label) for (text, _), label in zip(ROWS, LABELS[kind], strict=True)]
    cfg = config(write(tmp_path, rows), problem_type=kind, validation_fraction=0.5)
    prepared = task.prepare_data(cfg)
    _, rows = task.datasets(cfg, prepared)
    torch.manual_seed(0)
    model = task.build_model(cfg, prepared).eval()
    whole = batch_of(task, rows)
    with torch.no_grad():
        inputs = {name: whole[name] for name in ("input_ids", "attention_mask", "labels")}
        mean, logits = model(**inputs, return_dict=True).to_tuple()[:2]
    assert task.count(whole) == len(rows)
    assert task.loss_sum(model, whole).item() / len(rows) == pytest.approx(mean.item(), rel=1e-5)

    halves = [task.collate([rows[i] for i in part]) for part in (range(7), range(7, len(rows)))]
    sums = [task.eval_sums(model, half) for half in halves]
    sums = {name: sum(part[name].double() for part in sums) for name in sums[0]}
    scores = task.metrics(sums)
    assert scores["loss"] == pytest.approx(mean.item(), rel=1e-5)
    truth, said = whole["labels"].double().numpy(), (logits > 0).int().numpy()
    mean, deviation = json.loads((prepared / "scale.json").read_text())
    if kind == "regression":  # in its own unit, 2 around 1003
        truth, said = ((each * deviation + mean) for each in (truth, logits[:, 0].numpy()))
        assert min(truth) == pytest.approx(1000) and max(truth) == pytest.approx(1006)
        assert scores["mae"] == pytest.approx(np.abs(truth - said).mean(), rel=1e-5)
        assert scores["rmse"] == pytest.approx(np.sqrt(((truth - said) ** 2).mean()), rel=1e-5)
        assert scores["r2"] == pytest.approx(r2_score(truth, said), rel=1e-4)
        assert (
            "of always saying the mean"
            in task.report(model, sums, tmp_path, cfg, prepared)["errors"]
        )
        return
    if kind == "single_label_classification":
        said = logits.argmax(1).numpy()
        assert scores["accuracy"] == pytest.approx((truth == said).mean())
        assert task.report(model, sums, tmp_path, cfg, prepared)["confusion"].stat().st_size > 5000
    else:
        micro = f1_score(truth, said, average="micro", zero_division=0)
        assert scores["micro_f1"] == pytest.approx(micro)
    macro = f1_score(truth, said, average="macro", zero_division=0)
    assert scores["macro_f1"] == pytest.approx(macro)
    text = task.report(model, sums, tmp_path, cfg, prepared)["classes"]
    assert all(name in text for name in model.config.label2id)


def test_numbers_are_learnt_in_standard_deviations_whatever_their_scale(task, config, tmp_path):
    """The same loss and r2, errors in their own unit, and another identity for another scale."""
    values = np.random.default_rng(0).normal(size=40)
    found = []
    for scale, mean in ((1.0, 0.0), (15.0, 1006.0), (1e15, 1e17)):
        rows = [(text, mean + scale * v) for (text, _), v in zip(ROWS, values, strict=True)]
        cfg = config(write(tmp_path, rows), problem_type="regression")
        prepared = task.prepare_data(cfg)
        torch.manual_seed(0)
        model = task.build_model(cfg, prepared).eval()
        scores = task.metrics(
            task.eval_sums(model, batch_of(task, task.datasets(cfg, prepared)[1]))
        )
        assert model.config.label_std == pytest.approx(scale, rel=0.3)
        assert model.config.label_mean == pytest.approx(mean + scale * 0.1, abs=scale * 0.2)
        errors = [scores[name] / scale for name in ("mae", "rmse")]
        found.append([scores["loss"], scores["r2"], *errors])
        ids = {task.identity(cfg, prepared), task.cache.content_digest(prepared)} | {prepared.name}
        found[-1].append(ids)
    for other in found[1:]:
        assert other[:4] == pytest.approx(found[0][:4], rel=1e-3)
        assert not other[4] & found[0][4]


def test_marks_of_another_training_do_not_stay_in_the_config(task, config, tmp_path):
    rows = [(text, 1000.0 + i) for i, (text, _) in enumerate(ROWS)]
    cfg = config(write(tmp_path, rows), problem_type="regression")
    prepared = task.prepare_data(cfg)
    (tmp_path / "model").mkdir()
    task.export(task.build_model(cfg, prepared), tmp_path / "model", cfg, prepared)
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    assert 1015 < saved["label_mean"] < 1025
    rows = [(text, number / 100) for text, number in rows]
    for kind, data in (("regression", rows), ("single_label_classification", ROWS)):
        cfg = config(
            write(tmp_path, data), problem_type=kind, model_name_or_path=str(tmp_path / "model")
        )
        prepared = task.prepare_data(cfg)
        found = task.build_model(cfg, prepared).config.to_dict()
        if kind == "regression":
            assert found["label_mean"] == pytest.approx(saved["label_mean"] / 100)
        else:
            assert "label_mean" not in found and "label_std" not in found


def test_equal_numbers_leave_nothing_to_explain(task, config, tmp_path):
    rows = [(text, 0.1) for text, _ in ROWS]
    cfg = config(write(tmp_path, rows), problem_type="regression")
    prepared = task.prepare_data(cfg)
    batch = batch_of(task, task.datasets(cfg, prepared)[0])
    assert task.metrics(task.eval_sums(task.build_model(cfg, prepared).eval(), batch))["r2"] == 0


def test_balanced_weights_give_each_class_the_same_share(task, config, tmp_path):
    cfg = config(write(tmp_path, ROWS), class_weights="balanced")
    prepared = task.prepare_data(cfg)
    train, validation = (batch_of(task, part) for part in task.datasets(cfg, prepared))
    shares = [train["weight"][train["labels"] == i].sum().item() for i in (0, 1)]
    assert shares[0] == pytest.approx(shares[1])
    assert train["weight"].mean().item() == pytest.approx(1)
    assert (validation["weight"] == 1).all()


def test_padding_changes_nothing_and_dropped_tokens_are_the_rows_own(task, config, tmp_path):
    cfg = config(write(tmp_path, ROWS), token_dropout=0.5)
    prepared = task.prepare_data(cfg)
    rows, _ = task.datasets(cfg, prepared)
    model = task.build_model(cfg, prepared).eval()
    alone = sum(task.loss_sum(model, task.collate([rows[i]])).item() for i in range(8))
    together = task.loss_sum(model, task.collate([rows[i] for i in range(8)])).item()
    assert alone == pytest.approx(together, rel=1e-5)
    draws = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    first, same, other = (task.augment(rows[0], draw)["input_ids"].tolist() for draw in draws)
    assert first == same != other and len(first) < len(rows[0]["input_ids"])


# ---- Bad input -----------------------------------------------------------------------------------

MULTI, NUMBER = ({"problem_type": kind} for kind in list(LABELS)[1:])
BAD = [
    ([("a", "x"), (" ", "y")], {}, "line 2: the text is empty"),
    ([("a", "x"), (3, "y")], {}, "line 2: the text is 3"),
    ([("a", "x"), ("b", None)], {}, "line 2: the label is empty"),
    ([("a", "x"), ("b", 1.5)], {}, "line 2: the label is 1.5, not text or a whole number"),
    ([("a", "x"), ("b", "x")], {}, "only the label x"),
    ([("a", "x")], {}, "no second text"),
    ([], {}, "no rows"),
    ([("a", ["x"]), ("b", [1.5])], MULTI, "line 2: the label is [1.5], not a list of names"),
    ([("a", ["x"]), ("b", "[x, y]")], MULTI, "line 2: the label is '[x, y]', not a list of"),
    ([("a", "x"), ("b", ["x"])], {}, "the label ['x'] is a list: --task.problem_type multi_"),
    ([("a", "x"), ("b", "['x' 'y']")], {}, "is a list: --task.problem_type multi_label"),
    ([("a", []), ("b", [])], MULTI, "has no label"),
    (
        [("a", 1), ("b", float("nan"))],
        NUMBER,
        "line 2: the label is NaN; --task.incomplete_rows skip",
    ),
    ([("a", 1), ("b", "many")], NUMBER, "line 2: the label is 'many', not a finite number"),
    ([("a", 1), ("b", True)], NUMBER, "line 2: the label is True, not a finite number"),
    (ROWS, {"label_column": "kind"}, "line 1: no column kind among text, label"),
]


@pytest.mark.parametrize("rows, fields, said", BAD)
def test_bad_rows_are_answered_in_one_line(task, config, tmp_path, rows, fields, said):
    with pytest.raises(ValueError) as error:
        task.prepare_data(config(write(tmp_path, rows), **fields))
    message = str(error.value)
    assert message.startswith("task.data: ") and said in message and "\n" not in message


@pytest.mark.parametrize(
    "rows, said",
    [
        (
            [("a", "tree"), ("b", "bird")],
            "line 2: class 'bird' is not in the training data, which has fish, tree",
        ),
        ([], "there are no rows in"),
        ([("a", 0.5)], "line 1: the label is 0.5"),
    ],
)
def test_bad_validation_rows_are_answered_in_one_line(task, config, tmp_path, rows, said):
    (tmp_path / "more").mkdir()
    given = write(tmp_path / "more", rows)
    with pytest.raises(ValueError) as error:
        task.prepare_data(config(write(tmp_path, ROWS), validation_data=str(given)))
    message = str(error.value)
    assert message.startswith("task.validation_data: ") and said in message
    assert "\n" not in message


@pytest.mark.parametrize("field, value", [("hidden_size", 15), ("label_columns", "a,b")])
def test_wrong_settings_are_refused_before_anything_is_read(task, config, field, value):
    with pytest.raises(ValueError, match=f"task.{field} is .* but must be"):
        task.prepare_data(config("no such file", **{field: value}))


def test_settings_that_exclude_each_other_are_refused(task, config, tmp_path):
    with pytest.raises(ValueError, match="task.problem_type is .* for task.data stdlib"):
        task.prepare_data(config("stdlib", problem_type="regression"))
    with pytest.raises(ValueError, match="task.text_pair_column is 'text' but must be another"):
        task.prepare_data(config("x.csv", text_pair_column="text"))
    for names in ("a", "a,a", "a,,b", ","):
        several = {"problem_type": "multi_label_classification", "label_columns": names}
        with pytest.raises(ValueError, match="task.label_columns is .* must be names with commas"):
            task.prepare_data(config("x.csv", **several))
    with pytest.raises(ValueError, match="nothing reads it beside task.label_columns"):
        several["label_columns"] = "a,b"
        task.prepare_data(config("x.csv", label_column="c", **several))
    with pytest.raises(ValueError, match="task.max_length is 5 but must be at least 6"):
        task.prepare_data(config("x.csv", text_pair_column="b", max_length=5))
    with pytest.raises(ValueError, match="task.class_weights is 'balanced' but must be none"):
        task.prepare_data(config("x.csv", problem_type="regression", class_weights="balanced"))
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        with pytest.raises(ValueError, match="^task.model_name_or_path: .*"):
            folder = str(tmp_path / name)
            task.prepare_data(config(write(tmp_path, ROWS), model_name_or_path=folder))


# ---- Runs ----------------------------------------------------------------------------------------

STEPS = ["--max_steps", 6, "--eval_every", 3, "--save_every", 3, "--log_every", 1]
STEPS += ["--global_batch_size", 8, "--micro_batch_size", 2, "--keep_checkpoints", 0]
TINY = ["--task.hidden_size", 16, "--task.num_heads", 2, "--task.vocab_size", 300]
TINY += ["--task.max_length", 32]


@pytest.fixture(scope="module")
def learnt(project):
    """A run on the functions of Python's library, shorter than the default recipe's."""
    short = ["--max_steps", 40, "--warmup_steps", 15, "--eval_every", 0, "--save_every", 0]
    short += ["--task.max_length", 64, "--output_dir", "runs/learnt"]
    project.train(1, *short)
    return project.path / "runs" / "learnt"


@pytest.mark.slow
def test_areas_of_the_library_are_told_apart(learnt):
    (scores,) = lines(learnt, "eval_loss")
    assert scores["accuracy"] > 0.6 and scores["macro_f1"] > 0.5  # the largest class has 18 %
    assert (learnt / "confusion.png").read_bytes()[:4] == b"\x89PNG"


def test_the_exported_model_answers_as_the_evaluation_did(task, learnt, project):
    from transformers import pipeline

    answer = pipeline("text-classification", str(learnt / "model"))
    assert answer.tokenizer.model_max_length == 64
    rows = [(row, place) for row, place in task.demo_data.area_rows() if row["label"] == "xml"][:8]
    texts = [row["text"] for row, _ in rows]
    tokens = answer.tokenizer(texts, truncation=True).input_ids
    batch = [
        {"input_ids": np.array(ids), "length": len(ids), "pad": 0, "labels": np.int64(0)}
        | {"weight": np.float32(1)}
        for ids in tokens
    ]
    with torch.no_grad():
        scores = task.logits_of(answer.model, task.collate(batch)).softmax(1)
    for row, result in zip(scores, answer(texts, truncation=True, batch_size=8), strict=True):
        assert result["label"] == answer.model.config.id2label[int(row.argmax())]
        assert result["score"] == pytest.approx(row.max().item(), rel=1e-4)
    given = "class Codec(codecs.Codec): def encode(self, input, errors='strict'):"
    command = [
        "python",
        "-m",
        "samestep",
        "predict",
        "--json",
        "--model",
        "runs/learnt/model",
        given,
    ]
    printed = json.loads(project.run(*command).stdout)
    (best,) = answer([given], truncation=True)
    assert printed["classes"][0]["label"] == best["label"] == "encodings"


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(LABELS)[1:])
def test_labels_and_numbers_are_learnt_from_a_model_of_ones_own(project, learnt, tmp_path, kind):
    """Labels stand with ; between them in the CSV, and numbers of pairs as they are."""
    number = kind == "regression"
    rows = [(text, "tree;living" if name == "tree" else "living") for text, name in ROWS]
    if number:
        pairs = [(*text.split(" and "), 1015 if name == "tree" else 985) for text, name in ROWS]
        rows = [(text, f"and {pair}", label) for text, pair, label in pairs]
    names = ("text", *["pair"] * number, "label")
    flags = ["--task.problem_type", kind, "--task.data", write(tmp_path, rows, "csv", names)]
    flags += ["--task.text_pair_column", "pair"] * number
    flags += ["--task.model_name_or_path", "runs/learnt/model", "--task.max_length", 32]
    flags += ["--output_dir", f"runs/{kind}", *STEPS, "--max_steps", 20, "--warmup_steps", 2]
    flags += ["--gradient_checkpointing", "true", "--task.attn_implementation", "eager"]
    printed = project.train(1, *flags)
    assert "new weights for classifier" in printed
    model = f"runs/{kind}/model"
    between = "\t" if number else " "
    given = [f"the oak{between}and the elm", f"the carp{between}and the eel"]
    command = ["python", "-m", "samestep", "predict", "--json", "--model", model, *given]
    answers = [json.loads(line) for line in project.run(*command).stdout.splitlines()]
    if number:
        assert 1020 > answers[0]["value"] > answers[1]["value"] + 1.5 > 980
        card = (project.path / model / "README.md").read_text()
        code = card.partition("```python\n")[2].partition("```")[0].replace("a text", "the oak")
        code = f"{code.replace('its pair', 'and the elm')}\nprint(number)"
        said = project.run("python", "-c", code).stdout
        assert float(said) == pytest.approx(answers[0]["value"], rel=1e-6)
        refused = project.run(
            "python", "-m", "samestep", "predict", "--model", model, "the oak", check=False
        )
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1
        assert "the oak has no tab, but" in refused.stderr
        return
    answers = [answer["classes"] for answer in answers]
    scores = [{each["label"]: each["score"] for each in answer} for answer in answers]
    assert scores[0]["tree"] > scores[1]["tree"] + 0.1
    assert [set(each) for each in scores] == [{"living", "tree"}] * 2


def test_the_vocabulary_of_a_new_model_is_saved_as_before(tmp_path):
    """Its bytes are part of `identity`: runs of older projects would be refused otherwise."""
    from samestep.text import tokenizing

    tokenizing.learn_vocabulary(
        ["one text"], 262, tmp_path, first=["[P]", "[C]", "[S]"], begin="[C]", end="[S]"
    )
    saved = json.loads((tmp_path / "tokenizer.json").read_text())["post_processor"]
    assert saved == {"type": "BertProcessing", "sep": ["[S]", 2], "cls": ["[C]", 1]}


@pytest.mark.parametrize("several", [False, True])
def test_tables_count_under_autocast(task, several):
    """bf16 has no 257. A table of 601 rows has 601."""
    logits = torch.eye(3)[[0, 1, 1]].repeat(301, 1)[:601]
    labels = torch.tensor([0, 1, 0]).repeat(301)[:601]
    labels = torch.eye(3)[labels] if several else labels
    count = task.classification.count_answers
    with torch.autocast("cpu", torch.bfloat16):
        table = count(logits, labels)
    assert table.dtype == torch.float32 and torch.equal(table, count(logits, labels))
    if several:
        assert table[0].tolist() == [[200, 0], [200, 201]]
    else:
        assert table.tolist() == [[201, 200, 0], [0, 200, 0], [0, 0, 0]]
