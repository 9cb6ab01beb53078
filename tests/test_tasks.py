"""The contract of a task, for all four: what holds whatever is trained.

A kit has what the tests need of one task: rows of a small data set, settings of a tiny model, and
how a prepared row is told from others.
"""

import json
import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import bake, lines, load_task, parse_error, write_table

NUMBERS = "zero one two three four five six seven eight nine".split()
SPELLED = [" ".join(NUMBERS[int(digit)] for digit in str(n)) for n in range(100, 160)]
COLORS = {"blue": (30, 60, 200), "green": (40, 180, 60), "red": (220, 40, 30)}
SMALL = {"hidden_size": 16, "num_heads": 2, "num_layers": 1}
STEPS = ["--max_steps", 6, "--eval_every", 3, "--save_every", 3, "--log_every", 1]
STEPS += ["--global_batch_size", 8, "--micro_batch_size", 2, "--keep_checkpoints", 0]


def decode(load: Callable, name="input_ids"):
    """Tells the rows of a task by the text of a column."""

    def keys(task, cfg, prepared, part):
        tokenizer = load(task)(cfg, prepared)
        return [tokenizer.decode(row[name], skip_special_tokens=True) for row in part]

    return keys


def documents(task, cfg, prepared, part):
    """The documents of packed rows; the first token of a part is the label of none."""
    batch = task.collate([*part])
    tokens = torch.cat([batch["input_ids"][0, :1], batch["labels"][batch["labels"] >= 0]])
    text = task.corpus.load_tokenizer(cfg, prepared).decode(tokens)
    return [each for each in text.split("<|endoftext|>") if each]


def pixels(task, cfg, prepared, part):
    return [image.tobytes() for image, *_ in part]


@dataclass
class Kit:
    """One task, and a small data set for it."""

    name: str
    rows: list[dict]
    settings: dict
    keys: Callable  # of (task, cfg, prepared, part): what tells each row of a part
    empty: tuple[str, str]  # a column that may be empty, and what is said then
    other: dict  # a setting that changes prepared rows
    noise: dict = field(default_factory=dict)  # settings that make training draw random numbers
    ranges: list[tuple] = field(default_factory=list)

    @cached_property
    def task(self):
        return load_task(self.name)

    def config(self, folder, data, **fields):
        small = {**SMALL, **self.settings, "cache_dir": str(folder / "cache")}
        return self.task.TaskConfig(data=str(data), **{**small, **fields})

    def prepare(self, folder, data, **fields):
        """Settings, the prepared folder, and both parts."""
        cfg = self.config(folder, data, **fields)
        prepared = self.task.prepare_data(cfg)
        return cfg, prepared, self.task.datasets(cfg, prepared)

    def write(self, folder, kind="jsonl", rows=None):
        """Rows as a table of this kind; images lie beside it."""
        rows = self.rows if rows is None else rows
        for row in rows:
            if (row.get("image") or "").strip():
                path, number = folder / row["image"], int(row["image"][1:-4])
                noise = np.random.default_rng(number).integers(0, 20, (12, 12, 3))
                color = np.array(COLORS.get(row["label"], (0, 0, 0)))
                Image.fromarray((color + noise).astype(np.uint8)).save(path)
        return write_table(folder, rows, kind)

    def flags(self, **fields):
        settings = {**SMALL, **self.settings, **fields}
        return [word for name, value in settings.items() for word in (f"--task.{name}", value)]


SHARE = ("validation_fraction", "1.0", "a number, above 0 and below 1")
MODEL = [
    ("hidden_size", "0", "a whole number from 1 to 65,536"),
    ("num_layers", "0", "a whole number from 1 to 1,000"),
    ("num_heads", "1025", "a whole number from 1 to 1,024"),
    ("dropout", "1.0", "a number, at least 0 and below 1"),
    SHARE,
]
KITS = [
    Kit(
        "causal_lm",
        [{"text": f"{text}.\n"} for text in SPELLED],
        {"context_length": 16, "vocab_size": 300},
        documents,
        ("text", "the text is empty"),
        {"context_length": 12},
        {"dropout": 0.1},
        [
            ("validation_fraction", "nan", "a number, above 0 and below 1"),
            ("context_length", "1", "a whole number from 2 to 1,048,576"),
            ("vocab_size", "256", "a whole number from 257 to 1,048,576"),
            ("loss_chunk", "8", "a whole number from 16 to 1,073,741,824"),
            ("lora_rank", "4097", "a whole number from 0 to 4,096"),
            ("lora_alpha", "-1", "a number from 0 to 1,000,000"),
        ],
    ),
    Kit(
        "text_classification",
        [{"text": text, "label": ["odd", "even"][i % 2]} for i, text in enumerate(SPELLED)],
        {"max_length": 32, "vocab_size": 300, "dropout": 0.0},
        decode(lambda task: task.text_data.load_tokenizer),
        ("label", "the label is empty"),
        {"max_length": 4},
        {"token_dropout": 0.2},
        [
            ("max_length", "2", "a whole number from 3 to 1,048,576"),
            ("vocab_size", "259", "a whole number from 260 to 1,048,576"),
            ("token_dropout", "1.0", "a number, at least 0 and below 1"),
        ],
    ),
    Kit(
        "image_classification",
        [{"image": f"i{i}.png", "label": [*COLORS][i % 3]} for i in range(60)],
        {"image_size": 8, "patch_size": 4, "min_crop": 1.0},
        pixels,
        ("image", "the image is empty"),
        {"stored_size": 6},
        {"flip": "true", "min_crop": 0.5},
        [
            ("image_size", "0", "a whole number from 1 to 4,096"),
            ("stored_size", "-1", "a whole number from 0 to 8,192"),
            ("min_crop", "0.0", "a number from 0.01 to 1"),
            ("patch_size", "0", "a whole number from 1 to 4,096"),
        ],
    ),
    Kit(
        "seq2seq",
        [{"source": text, "target": str(n)} for n, text in enumerate(SPELLED, 100)],
        {"vocab_size": 300, "dropout": 0.0},
        decode(lambda task: task.pairs.load_tokenizer),
        ("target", "the target is empty"),
        {"max_source_length": 3},
        {"dropout": 0.1},
        [("max_source_length", "0", "a whole number from 2 to 1,048,576")],
    ),
]


@pytest.fixture(params=KITS, ids=[kit.name for kit in KITS])
def kit(request):
    return request.param


# ---- Data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
def test_every_row_is_in_one_part_the_same_from_every_kind_of_file(kit, tmp_path, kind):
    found = []
    for each in ("jsonl", kind):
        cfg, prepared, parts = kit.prepare(
            tmp_path, kit.write(tmp_path, each), validation_fraction=0.2
        )
        keys = [kit.keys(kit.task, cfg, prepared, part) for part in parts]
        assert len({*keys[0], *keys[1]}) == len(keys[0]) + len(keys[1]) == 60
        assert 10 <= len(keys[1]) <= 14
        found.append([sorted(each) for each in keys])
    assert found[0] == found[1]
    if kit.name != "image_classification":
        expected = sorted(str([*row.values()][0]) for row in kit.rows)
        assert sorted(found[0][0] + found[0][1]) == expected


def test_equal_rows_are_on_one_side(kit, tmp_path):
    cfg, prepared, parts = kit.prepare(tmp_path, kit.write(tmp_path, rows=kit.rows * 3))
    train, held_out = ({*kit.keys(kit.task, cfg, prepared, part)} for part in parts)
    assert train and held_out and not train & held_out and len(train | held_out) == 60


def test_given_validation_rows_are_all_that_is_evaluated_on(kit, tmp_path, capsys):
    (tmp_path / "more").mkdir()
    more = kit.write(tmp_path / "more", rows=kit.rows[40:])
    data = kit.write(tmp_path, rows=kit.rows[:50])
    cfg, prepared, parts = kit.prepare(tmp_path, data, validation_data=str(more))
    assert [len(kit.keys(kit.task, cfg, prepared, part)) for part in parts] == [50, 20]
    said = capsys.readouterr().out
    assert "10 of 20 validation " in said and "are training" in said


def test_data_is_prepared_once_and_again_when_a_file_or_a_setting_changes(kit, tmp_path, capsys):
    data = kit.write(tmp_path)
    first = kit.task.prepare_data(kit.config(tmp_path, data))
    assert capsys.readouterr().out.startswith("Preparing data: ")
    assert kit.task.prepare_data(kit.config(tmp_path, data)) == first
    assert capsys.readouterr().out == ""
    share = kit.task.prepare_data(kit.config(tmp_path, data, validation_fraction=0.3))
    other = kit.task.prepare_data(kit.config(tmp_path, data, **kit.other))
    kit.write(tmp_path, rows=kit.rows[:59])
    fewer = kit.task.prepare_data(kit.config(tmp_path, data))
    assert capsys.readouterr().out and len({first, share, other, fewer}) == 4
    digests = {kit.task.cache.content_digest(each) for each in (first, share, other, fewer)}
    assert len(digests) == 4


def test_incomplete_rows_are_refused_or_left_out_and_counted(kit, tmp_path, capsys):
    column, said = kit.empty
    bad = [{**kit.rows[i], column: empty} for i, empty in enumerate([None, "", " "])]
    data = kit.write(tmp_path, rows=[*kit.rows[:1], *bad, *kit.rows[1:]])
    with pytest.raises(ValueError, match=rf"^task\.data: .*, line 2: .*{said}; --task.incomplete"):
        kit.task.prepare_data(kit.config(tmp_path, data))
    cfg, prepared, parts = kit.prepare(tmp_path, data, incomplete_rows="skip")
    assert sum(len(kit.keys(kit.task, cfg, prepared, part)) for part in parts) == 60
    assert "left out 3 incomplete rows of 63, the first: " in capsys.readouterr().out


# ---- Loss ----------------------------------------------------------------------------------------


def test_the_loss_is_a_sum_however_rows_are_batched_and_padded(kit, tmp_path):
    cfg, prepared, parts = kit.prepare(tmp_path, kit.write(tmp_path), validation_fraction=0.5)
    task = kit.task
    torch.manual_seed(0)
    model = task.build_model(cfg, prepared).eval()
    rows = [parts[1][i] for i in range(7)]
    batch = task.collate(rows)
    for parts in ([rows[:3], rows[3:]], [[row] for row in rows]):
        cut = [task.collate(part) for part in parts]
        with torch.no_grad():
            losses = [task.loss_sum(model, each) for each in [batch, *cut]]
            sums = [task.eval_sums(model, each) for each in [batch, *cut]]
        assert {(loss.dtype, loss.shape) for loss in losses} == {(torch.float32, ())}
        assert float(losses[0]) == pytest.approx(float(sum(losses[1:])), rel=1e-5)
        assert int(task.count(batch)) == sum(int(task.count(each)) for each in cut) > 0
        for name, whole in sums[0].items():
            added = sum(each[name].double() for each in sums[1:])
            assert torch.allclose(whole.double(), added, rtol=1e-5), name
    scores = task.metrics({name: value.double() for name, value in sums[0].items()})
    assert scores["loss"] == pytest.approx(float(losses[0]) / int(task.count(batch)), rel=1e-5)
    assert all(math.isfinite(score) for score in scores.values())


def test_rows_go_to_worker_processes_as_names_of_files(kit, tmp_path):
    _, _, (train, _) = kit.prepare(tmp_path, kit.write(tmp_path))
    packed = pickle.dumps(train)
    assert len(packed) < 10_000
    again, rows = pickle.loads(packed), range(len(train))
    batches = [kit.task.collate([each[i] for i in rows]) for each in (train, again)]
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])


# ---- Bad input -----------------------------------------------------------------------------------


RANGES = [(kit, *case) for kit in KITS for case in [*MODEL, *kit.ranges]]


@pytest.mark.parametrize("kit, name, value, expected", RANGES)
def test_values_out_of_range_are_refused_where_fields_are_parsed(kit, name, value, expected):
    assert parse_error(kit.task, name, value) == f"{name}: expected {expected}; got {value!r}"


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("missing", None, "nothing to read at"), ("empty", (), "nothing to read at"),
        ("a.md", b"text", "nothing to read at"), ("a.jsonl", b"\n", "no"),
        ("a.jsonl", b'{"odd": 1}\n{"odd": ', "odd"), ("a.parquet", b"PAR1", "cannot read"),
    ],
)  # fmt: skip
def test_bad_files_are_answered_in_one_line(kit, tmp_path, name, content, said):
    path = tmp_path / name
    if content == ():
        path.mkdir()
    elif content:
        path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        kit.task.prepare_data(kit.config(tmp_path, path))
    message = str(error.value)
    assert message.startswith("task.data") and said in message
    assert "\n" not in message and name in message


def test_a_width_that_heads_do_not_divide_is_refused_before_anything_is_read(kit, tmp_path):
    with pytest.raises(ValueError, match=r"^task.hidden_size is 15 but must be a multiple of "):
        kit.task.prepare_data(kit.config(tmp_path, "no such file", hidden_size=15))


# ---- Runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kit", [pytest.param(k, marks=pytest.mark.slow if k.name != "seq2seq" else []) for k in KITS]
)
def test_one_and_two_processes_train_the_same_and_a_lost_half_is_made_up_for(kit, tmp_path):
    project = bake(tmp_path, task=kit.name, tracker="none")
    data = ["--task.data", kit.write(tmp_path), *kit.flags(**kit.noise), *STEPS]
    one, two, again = (project.path / "runs" / name for name in ("one", "two", "again"))
    project.train(1, *data, "--output_dir", one)
    project.train(2, *data, "--num_workers", 1, "--output_dir", two)
    for key in ("loss", "eval_loss"):
        for mine, theirs in zip(lines(one, key), lines(two, key), strict=True):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6)
            assert mine.get("batch_hash") == theirs.get("batch_hash")
    shutil.copytree(one / "checkpoints", again / "checkpoints")
    shutil.rmtree(again / "checkpoints" / "step-00000006")
    assert "continuing from" in project.train(1, *data, "--output_dir", again)
    for name in ("checkpoints/step-00000006/rank-00000.safetensors", "model/model.safetensors"):
        assert (one / name).read_bytes() == (again / name).read_bytes()
    assert json.loads((one / "status.json").read_text())["state"] == "finished"
