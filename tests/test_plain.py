"""Rows and labels of examples/, by the values that are trained on; and load_splits for any task."""

import json
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers as t
from PIL import Image
from safetensors.torch import load_file, save_file

from conftest import load_task, prepare_task, write_table
from refusals import refused
from samestep.ask.recorded_rows import Part
from samestep.contract import contract
from samestep.data.plain import load_splits, map_rows
from samestep.data.sources import DataConfig
from samestep.step.samples import hash_entries

ORIENTATION = 0x0112


def prepare(folder, name, rows=None, data=None, **fields):
    """The example, its config and prepared data of these rows: all but the first are trained on."""
    task, given = load_task(name), {}
    if rows:
        (folder / "more").mkdir(exist_ok=True)
        given = {"data": str(write_table(folder, rows[1:], "jsonl"))}
        given["validation_data"] = str(write_table(folder / "more", rows[:1], "jsonl"))
    elif data:
        given = {"data": str(data)}
    cfg = task.TaskConfig(**given, **fields)
    cfg.cache_dir = str(folder / "cache")
    return task, cfg, prepare_task(task, cfg)


def save_model(folder, task, cfg, data, **config):
    """The model of an example as a folder to start from; its config with these values."""
    torch.manual_seed(0)
    model = contract.bind(task, cfg, data).build_model()
    contract.bind(task, cfg, data).export(model, folder)
    if config:
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(known | config))
    return model


# ---- Rows ----------------------------------------------------------------------------------------


def paint(folder, name, mode, turned=1, **options):
    """A file of an image: red above, blue below, and what lies under transparent pixels is red."""
    image = Image.new("RGB", (8, 6), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 8, 3))
    image = image.convert(mode)
    if mode in ("RGBA", "LA"):
        alpha = Image.new("L", (8, 6), 255)
        alpha.paste(0, (0, 0, 8, 3))
        image.putalpha(alpha)
    exif = Image.Exif()
    exif[ORIENTATION] = turned
    image.save(folder / name, exif=exif, **options)
    return name


@pytest.mark.parametrize(
    "name, mode, turned, options, top, bottom",
    [
        ("a.png", "RGB", 1, {}, (255, 0, 0), (0, 0, 255)),
        ("a.png", "RGBA", 1, {}, (255, 255, 255), (0, 0, 255)),
        ("a.png", "LA", 1, {}, (255, 255, 255), (29, 29, 29)),
        ("a.png", "RGB", 3, {}, (0, 0, 255), (255, 0, 0)),
        ("a.png", "RGB", 1, {"transparency": (255, 0, 0)}, (255, 255, 255), (0, 0, 255)),
        ("a.jpg", "CMYK", 4, {"quality": 100}, (0, 0, 255), (255, 0, 0)),
        ("a.tif", "L", 1, {}, (76, 76, 76), (29, 29, 29)),
    ],
)
def test_images_of_a_column_are_upright_on_white_and_of_8_bits(
    tmp_path, name, mode, turned, options, top, bottom
):
    rows = [{"file_name": paint(tmp_path, name, mode, turned, **options), "n": i} for i in range(9)]
    file = str(write_table(tmp_path, rows, "jsonl"))
    splits = load_splits(file, ["photo", "n"], images=["photo"])
    image = splits["train"][0]["photo"]
    assert (image.mode, image.size) == ("RGB", (8, 6)) and len(splits["train"][0]) == 2
    for place, color in (((4, 0), top), ((4, 5), bottom)):
        assert np.abs(np.subtract(image.getpixel(place), color)).max() <= 3


def test_rows_of_any_task_are_refused_by_their_places(tmp_path):
    rows = [{"text": f"row {i}", "tags": ["a", "b"], "n": i} for i in range(20)]
    splits = load_splits(DataConfig(str(write_table(tmp_path, rows, "jsonl"))), ["text", "tags"])
    assert splits["train"][0].keys() == {"text", "tags"} and "place" in splits["train"].column_names
    first = f"rows.jsonl, line {int(splits['train'][0]['text'][4:]) + 1}"
    with refused(f"{first}: the task cannot read it (KeyError: 'nothing')"):
        map_rows(splits, lambda row: {"n": row["nothing"]})
    part = Part(SimpleNamespace(dataset=splits["train"], sources=[], is_stream=False), None)
    assert part.place(0).endswith(first) and part.find(first) == [0]
    assert "place" not in part.text(splits["train"][0])
    several = map_rows(splits, lambda row: [{"n": [1]}, {"n": [2, 3]}], keep=["text"])
    assert [row["n"] for row in several["train"]][:4] == [[1], [2, 3]] * 2
    assert several["train"][1]["text"] == several["train"][0]["text"] != several["train"][2]["text"]
    for wrong, said in (
        ({"text": "a", "tags": ["a", None]}, "line 21: the tags has null in its list"),
        ({"text": 7, "tags": ["a"]}, "line 21: the text is 7 but must be string"),
        ({"text": "a", "tags": "a"}, "line 21: the tags is 'a' but must be list"),
    ):
        with refused(said):
            load_splits(str(write_table(tmp_path, [*rows, wrong], "jsonl")), ["text", "tags"])
    lines = (tmp_path / "rows.jsonl").read_text() + '\n{"text": "a", "text": "b", "tags": []}\n'
    (tmp_path / "rows.jsonl").write_text(lines)
    with refused("the key 'text' is there twice"):
        load_splits(str(tmp_path / "rows.jsonl"), ["text"])


# ---- Labels --------------------------------------------------------------------------------------

REWRITES = """{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role=='user' -%}
{%- set ns.last=loop.index0 -%}{%- endif -%}{%- endfor -%}{%- for m in messages -%}
{%- set i=loop.index0 -%}<|{{ m.role }}|>{%- for part in m.content -%}{%- if part.type=='image' -%}
<image>{%- elif m.role=='assistant' and i<ns.last -%}{{ part.text.split('!')[-1] }}{%- else -%}
{{ part.text }}{%- endif -%}{%- endfor -%}<|endoftext|>{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def test_a_template_that_rewrites_turns_gives_each_answer_a_sample(tmp_path):
    task, cfg, data = prepare(tmp_path, "vision_language")
    save_model(tmp_path / "model", task, cfg, data)
    (tmp_path / "model" / "chat_template.jinja").write_text(REWRITES)
    paint(tmp_path, "a.png", "RGB")
    image, turn = {"type": "image"}, {"role": "user", "content": "Really?"}
    asked = [{"type": "text", "text": "Is"}, image, {"type": "text", "text": " redder?"}, image]
    chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": "think! one"}]
    chat += [turn, {"role": "assistant", "content": "think! yes"}]
    place = str(tmp_path / "a.png")
    rows = [{"images": [place] * 2, "messages": messages} for messages in (chat, chat[:2])]
    _, _, data = prepare(
        tmp_path, "vision_language", rows, model_name_or_path=str(tmp_path / "model")
    )
    tokenizer = t.AutoProcessor.from_pretrained(data.folder).tokenizer
    said = [
        tokenizer.decode([label for label in row["labels"] if label >= 0])
        for row in data["validation"]
    ]
    assert said == ["think! one<|endoftext|>", "think! yes<|endoftext|>"]
    whole = tokenizer.decode(data["validation"][1]["input_ids"])
    assert "<|assistant|> one<|endoftext|><|user|>Really?<|endoftext|>" in whole
    assert len(task.collate([*data["validation"]], data)["pixel_values"]) == 4


def test_the_mask_of_an_answer_has_its_first_word_and_nothing_else(tmp_path):
    task, cfg, data = prepare(tmp_path, "vision_language")
    tokenizer = t.AutoProcessor.from_pretrained(data.folder).tokenizer
    for row in data["validation"]:
        whole = tokenizer.decode(row["input_ids"])
        answer = tokenizer.decode([label for label in row["labels"] if label >= 0])
        assert whole.endswith(f"assistant:\n{answer}") and answer != "<|endoftext|>"


@pytest.mark.parametrize("kind", ["text", "list", "space", "two", "none"])
def test_answers_in_their_usual_forms_have_their_span(tmp_path, kind):
    context = "Long ago Anna bought\u00a0 pens."
    forms = {
        "text": {"text": "Anna", "answer_start": 9},
        "list": [{"text": "Anna", "answer_start": 9}],
        "space": {"text": [" Anna "], "answer_start": [8]},
        "two": {"text": ["Anna", "pens"], "answer_start": [9, 22]},
        "none": {"text": [], "answer_start": []},
    }
    rows = [{"question": f"Who {i}?", "context": context, "answers": forms[kind]} for i in range(9)]
    task, cfg, data = prepare(tmp_path, "question_answering", rows)
    row = data["train"][0]
    (start,), (end,) = row["starts"], row["ends"]
    offsets = row["offsets"][0]
    found = context[offsets[start][0] : offsets[end][1]].strip() if start else ""
    assert found == ("" if kind == "none" else "Anna") and cfg.unanswerable == (kind == "none")
    outputs = {"row": torch.tensor([0]), "place": torch.tensor([[9, 13] if found else [0, 0]])}
    scores = task.metrics({"loss": torch.ones(()), "windows": torch.ones(())}, outputs, data)
    assert (scores["exact_match"], scores["f1"]) == (1, 1)


def test_pairs_that_the_template_shows_alike_are_left_out(tmp_path, capsys):
    ask = [{"role": "user", "content": "Why?"}]
    rows = []
    for i in range(12):
        answers = [{"role": "assistant", "content": f"So {i}", "name": n} for n in ("a", "b")]
        answers[1]["content"] += " too" if i % 2 else ""
        rows.append({"prompt": [*ask], "chosen": answers[:1], "rejected": answers[1:]})
    sizes = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 300}
    rows[0]["rejected"][0]["content"] = "other"
    _, _, data = prepare(tmp_path, "preference", rows, **sizes)
    assert len(data["train"]) == 6 and "5 of 11 pairs are equal" in capsys.readouterr().out


def test_tags_by_number_and_words_that_are_cut_are_counted(tmp_path, capsys):
    words = ["a"] * 60 + ["Oslo", "Lima"]
    rows = [{"tokens": [*words, str(i)], "ner_tags": [0] * 60 + [2, 1, 0]} for i in range(4)]
    names = {"labels": "O, I-PLACE, B-PLACE"}
    _, cfg, data = prepare(tmp_path, "token_classification", rows, max_length=32, **names)
    assert "removes 99 of 189 words, 3 of 3 entities" in capsys.readouterr().out
    _, cfg, data = prepare(tmp_path, "token_classification", rows, **names)
    assert data["train"].features["labels"].feature.names == ["O", "I-PLACE", "B-PLACE"]
    assert [each for each in data["train"][0]["labels"] if each > 0] == [2, 1]


def test_classes_of_a_column_count_though_no_row_has_them(tmp_path):
    rows = [{"tokens": ["a", f"{i}"], "ner_tags": [0, 1]} for i in range(30)]
    kind = datasets.List(datasets.ClassLabel(names=["O", "B-b", "I-b"]))
    table = datasets.Dataset.from_list(rows).cast_column("ner_tags", kind)
    table.to_parquet(tmp_path / "rows.parquet")
    _, _, data = prepare(tmp_path, "token_classification", data=tmp_path / "rows.parquet")
    assert data["train"].features["labels"].feature.names == ["O", "B-b", "I-b"]
    assert [label for label in data["train"][0]["labels"] if label >= 0] == [0, 1]


# ---- Heads ---------------------------------------------------------------------------------------


def permute(folder, names, head):
    """Puts the classes of a model into this order, by hand."""
    config = json.loads((folder / "config.json").read_text())
    old = [config["id2label"][str(i)] for i in range(len(names))]
    weights = load_file(folder / "model.safetensors")
    for name in [each for each in weights if head in each]:
        weights[name] = weights[name][[old.index(each) for each in names]].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config["id2label"] = {str(i): name for i, name in enumerate(names)}
    config["label2id"] = {name: i for i, name in enumerate(names)}
    (folder / "config.json").write_text(json.dumps(config))


HEADS = {
    "token_classification": ("classifier.", ["O", "I-b", "B-b"], "classifier"),
    "semantic_segmentation": ("classifier.", ["square", "ground", "disc"], "decode_head"),
    "object_detection": ("class_labels_classifier", ["frame", "block"], "class_labels"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_in_another_order_is_mapped_by_the_names(tmp_path, capsys, name):
    head, order, said = HEADS[name]
    rows = None
    if name == "token_classification":
        rows = [{"tokens": ["a", "b", f"{i}"], "ner_tags": ["B-b", "I-b", "O"]} for i in range(9)]
    task, cfg, data = prepare(tmp_path, name, rows)
    old = save_model(tmp_path / "model", task, cfg, data)
    permute(tmp_path / "model", order, head)
    cfg.model_name_or_path = str(tmp_path / "model")
    new = contract.bind(task, cfg, data).build_model()
    assert new.config.id2label == old.config.id2label
    states = old.state_dict()
    assert all(torch.equal(states[key], value) for key, value in new.state_dict().items())
    assert f"{said}" in capsys.readouterr().out


def test_letters_are_those_of_the_head_and_group_norm_trains_without_a_mask(tmp_path, capsys):
    draw = np.random.default_rng(0)

    def sounds(text):
        values = [draw.normal(0, 0.1, 2500 + 100 * i).tolist() for i in range(8)]
        return [{"audio": {"array": v, "sampling_rate": 8000}, "text": text} for v in values]

    task, cfg, data = prepare(tmp_path, "speech_recognition", sounds("abc"))
    model = save_model(tmp_path / "model", task, cfg, data)
    letters = json.loads((tmp_path / "model" / "vocab.json").read_text())
    letters["a"], letters["c"] = letters["c"], letters["a"]
    (tmp_path / "model" / "vocab.json").write_text(json.dumps(letters))
    start = {"model_name_or_path": str(tmp_path / "model")}
    task, cfg, data = prepare(tmp_path, "speech_recognition", sounds("cab"), **start)
    assert data["train"][0]["labels"] == [letters[letter] for letter in "cab"]
    assert torch.equal(task.build_model(cfg, data).lm_head.weight, model.lm_head.weight)
    task, cfg, data = prepare(tmp_path, "speech_recognition", sounds("bad"), **start)
    assert data["train"][0]["labels"] == [letters["b"], letters["a"], len(letters)]
    assert len(task.build_model(cfg, data).lm_head.weight) == len(letters) + 1
    assert "new weights for lm_head" in capsys.readouterr().out and not task.rows_depend(cfg)
    config = {**model.config.to_dict(), "feat_extract_norm": "group", "do_stable_layer_norm": False}
    t.Wav2Vec2ForPreTraining(t.Wav2Vec2Config(**config)).save_pretrained(tmp_path / "base")
    options = {"sampling_rate": 8000, "return_attention_mask": False}
    t.Wav2Vec2FeatureExtractor(**options).save_pretrained(tmp_path / "base")
    base = {"model_name_or_path": str(tmp_path / "base")}
    task, cfg, data = prepare(tmp_path, "speech_recognition", sounds("abc"), **base)
    batch = task.collate([*data["train"]], data)
    assert task.rows_depend(cfg) and "attention_mask" not in batch
    sums = task.eval_sums(task.build_model(cfg, data).eval(), batch)
    assert torch.isfinite(sums["loss"]) and sums["characters"] == 21


def test_processors_keep_the_numbers_of_the_model(tmp_path):
    for name, mean in (("semantic_segmentation", [0.1] * 3), ("object_detection", [0.2] * 3)):
        task, cfg, data = prepare(tmp_path, name)
        save_model(tmp_path / name, task, cfg, data)
        file = tmp_path / name / "preprocessor_config.json"
        known = json.loads(file.read_text())
        file.write_text(json.dumps({**known, "image_mean": mean}))
        start = {"model_name_or_path": str(tmp_path / name), "image_size": 32}
        _, cfg, data = prepare(tmp_path, name, **start)
        assert [*task.load_processor(data.folder).image_mean] == mean


def test_own_classes_name_themselves(tmp_path):
    paint(tmp_path, "a.png", "RGB")
    place, box = str(tmp_path / "a.png"), [1, 1, 3, 3]
    forms = [{"bbox": [box], "categories": ["a, cat"]}, [{"bbox": box, "label": "dog"}]]
    forms.append({"bbox": [], "category": []})
    rows = [{"image": place, "objects": each} for each in forms]
    task, cfg, data = prepare(tmp_path, "object_detection", [*rows[:1], *rows])
    assert contract.bind(task, cfg, data).build_model().config.id2label == {0: "a, cat", 1: "dog"}
    assert [row["objects"]["category"] for row in data["train"]] == [[0], [1], []]
    assert hash_entries(task.collate([data["train"][2]], data))  # boxes (0, 4)
    batch = task.collate([*data["train"]], data)
    assert task.count(batch) == 2
    assert torch.isfinite(task.loss_sum(task.build_model(cfg), batch))
