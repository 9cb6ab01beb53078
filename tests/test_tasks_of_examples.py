"""Examples that are tasks of transformers: each keeps the promises, and is right by comparison."""

import importlib
import inspect
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from conftest import ROOT, bake, digest, kill_after, lines, prepare_task, read_weights, write_table
from samestep.core import batches
from samestep.data.plain import load_splits
from samestep.project import contract

FOLDER = ROOT / "examples"
STEPS = ["--max_steps", 4, "--save_every", 2, "--eval_every", 0, "--keep_checkpoints", 0]
STEPS += ["--global_batch_size", 8, "--micro_batch_size", 4, "--log_every", 1]
STEPS += ["--warmup_steps", 0, "--lr_schedule", "constant", "--learning_rate", 0.001]
STEPS += ["--weight_decay", 0]
WORDS = "the a train of samples stops and resumes at any step with equal bytes".split()


def text(i, most=12):
    """Some words, in unequal numbers."""
    return " ".join(WORDS[(i * i + k * (1 + i % 5)) % len(WORDS)] for k in range(1 + i % most))


def own_loss(model, batch):
    """The mean loss that transformers computes of a batch."""
    known = inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters
    return model(**{name: values for name, values in batch.items() if name in known}).loss


def reward_loss(model, batch):
    """The loss of TRL's RewardTrainer."""
    sides = [{name: values[:, side] for name, values in batch.items()} for side in (0, 1)]
    chosen, rejected = (model(**each).logits[:, 0] for each in sides)
    return -F.logsigmoid(chosen - rejected).mean()


def windows(batch):
    """What a model for questions gets of a batch."""
    own = batch["starts"] >= 0
    names = {"starts": "start_positions", "ends": "end_positions"}
    return {names.get(name, name): values[own] for name, values in batch.items() if name != "row"}


def ctc_loss(model, batch):
    """The loss of a character, by torch alone."""
    logits = model(batch["input_values"], batch["attention_mask"]).logits
    frames = batch["attention_mask"].sum(1)
    for kernel, stride in zip(model.config.conv_kernel, model.config.conv_stride, strict=True):
        frames = (frames - kernel) // stride + 1
    labels, sizes = batch["labels"].clamp(min=0), (batch["labels"] >= 0).sum(1)
    chances = logits.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(chances, labels, frames, sizes, reduction="sum") / sizes.sum()


def drawn(folder, name, fill):
    """The path of an image of 8 x 8 pixels."""
    Image.new("L", (8, 8), fill).save(folder / name)
    return str(folder / name)


def unreadable(folder):
    (folder / "a.png").write_text("no image")
    return str(folder / "a.png")


@dataclass
class Example:
    """An example, and what the tests need of it."""

    name: str
    lines: int  # most lines of the file
    loads: str  # class that loads the export
    rows: list = field(default_factory=list)  # of a small dataset; empty: the bundled one
    settings: dict = field(default_factory=dict)
    wrong: tuple = ()  # a row that is not right, or a function that makes it, and what is said then
    own: Callable = own_loss
    inputs: Callable = dict  # of the model, from a batch
    killed: bool = False
    flags: tuple = ()  # of train.py

    @property
    def task(self):
        sys.path.insert(0, str(FOLDER))
        try:
            return importlib.import_module(self.name)
        finally:
            sys.path.remove(str(FOLDER))

    def fields(self, folder, rows=None):
        """Settings for rows that are written there."""
        rows = rows or self.rows
        if not rows:
            return self.settings
        return self.settings | {"data": str(write_table(folder, rows, "jsonl"))}


TAGS = {"the": "O", "a": "O", "of": "O", "train": "B-noun", "samples": "I-noun", "stops": "B-verb"}
EXAMPLES = [
    Example(
        "masked_lm",
        120,
        "AutoModelForMaskedLM",
        [{"text": text(i)} for i in range(90)],
        {"mask_fraction": 0.5},
        ({"texts": "a"}, "task.data has no column text in its split train; rename one of texts"),
        killed=True,
    ),
    Example(
        "token_classification",
        142,
        "AutoModelForTokenClassification",
        [
            {"tokens": text(i).split(), "ner_tags": [TAGS.get(w, "B-x") for w in text(i).split()]}
            for i in range(90)
        ],
        {},
        ({"tokens": ["a"], "ner_tags": ["noun"]}, "noun in ner_tags is not O, B-KIND or I-KIND"),
    ),
    Example(
        "reward_model",
        120,
        "AutoModelForSequenceClassification",
        [{"prompt": text(i, 5), "chosen": text(i + 1), "rejected": text(i)} for i in range(90)],
        {},
        (
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            "task.data: equal answers to 'a': remove this row",
        ),
        reward_loss,
        lambda batch: {name: values.flatten(0, 1) for name, values in batch.items()},
    ),
    Example(
        "multiple_choice",
        120,
        "AutoModelForMultipleChoice",
        [
            {"sent1": text(i), "sent2": "then", "label": i % 4}
            | {f"ending{k}": text(i + k, 7) for k in range(4)}
            for i in range(90)
        ],
        {},
        (
            {f"ending{k}": "a" for k in range(4)} | {"sent1": "b", "sent2": "c", "label": 4},
            "task.data: the label 4 is not a number of 0 to 3",
        ),
    ),
    Example(
        "question_answering",
        180,
        "AutoModelForQuestionAnswering",
        [
            {"question": f"{text(i, 3)}?", "context": f"{text(i)} {'so ' * i}{i}."}
            | {"answers": {"text": [f"{i}"], "answer_start": [len(text(i)) + 1 + 3 * i]}}
            for i in range(90)
        ],
        {},
        (
            {"question": "a", "context": "b", "answers": {"text": ["c"], "answer_start": [0]}},
            "task.data: the answer of 'a' is not in its context",
        ),
        lambda model, batch: own_loss(model, windows(batch)),
        windows,
    ),
    Example(
        "image_pretraining",
        120,
        "ViTMAEForPreTraining",
        wrong=(
            lambda folder: {"image": unreadable(folder)},
            "task.data: row 0 has an unreadable image",
        ),
    ),
    Example(
        "semantic_segmentation",
        140,
        "AutoModelForSemanticSegmentation",
        wrong=(
            lambda folder: {n: drawn(folder, f"{n}.png", 7) for n in ("image", "label")},
            "task.data: a label of (8, 8) with classes [7], where it should be (8, 8)",
        ),
    ),
    Example(
        "object_detection",
        175,
        "AutoModelForObjectDetection",
        wrong=(
            lambda folder: (
                {"image": drawn(folder, "a.png", 7)}
                | {"objects": {"bbox": [[1, 1, 4, 4]], "category": [7]}}
            ),
            "task.data: box [1, 1, 4, 4] of class 7; give [x, y, width, height] and the number",
        ),
    ),
    Example(
        "speech_recognition",
        170,
        "AutoModelForCTC",
        [
            {"text": f"{i}", "audio": {"sampling_rate": 8000, "array": [*range(1100 + i)]}}
            for i in range(50)
        ],
        {},
        (
            {"text": "12", "audio": {"sampling_rate": 8000, "array": [0.5] * 9}},
            "task.data: 9 samples for '12'; give a text, and 500 samples of sound or more",
        ),
        ctc_loss,
        killed=True,
    ),
    Example(
        "vision_language",
        180,
        "AutoModelForImageTextToText",
        settings={"train_vision": True},
        wrong=(
            {
                "images": [],
                "messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}],
            },
            "task.data: 0 images for [{'role': 'user'",
        ),
        killed=True,
        flags=("--find_unused_parameters", "true"),  # LLaVA does not read its last layer
    ),
    Example("vision_language", 180, "AutoModelForImageTextToText", settings={"lora_rank": 4}),
]
each_example = pytest.mark.parametrize(
    "example", EXAMPLES, ids=lambda each: "-".join([each.name, *map(str, each.settings)])
)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    baked = bake(tmp_path_factory.mktemp("own"), pictures=False, tracker="none")
    (baked.path / "configs" / "train" / "default.yaml").write_text("")
    return baked


def flags_of(fields):
    return [word for name, value in fields.items() for word in (f"--task.{name}", value)]


@dataclass
class Loaded:
    """An example with its prepared data, in this process."""

    task: object
    train: object
    model: torch.nn.Module

    def batch(self, first, last):
        """The samples of the run at these positions, as a batch."""
        samples = self.train.__getitems__(range(first, last))
        return self.task.collate([row for _, row in samples])


def load(example, folder, rows=None):
    """The functions of an example, its rows in the order of a run, and its new model."""
    cfg = example.task.TaskConfig(**example.fields(folder, rows))
    cfg.cache_dir = str(folder / "cache")
    data = prepare_task(example.task, cfg)
    bound = contract.bind(example.task, cfg, data)
    train, _ = contract.read_views(bound, data)
    batches.seed_everything(0)
    return Loaded(bound, batches.SampleDataset(train, bound, 0), bound.build_model())


def test_examples_are_short():
    for each in EXAMPLES:
        assert len((FOLDER / f"{each.name}.py").read_text().splitlines()) <= each.lines


def test_held_out_rows_stay_held_out_when_data_grows(tmp_path):
    """Equal rows are on one side; a file and rows give the same splits, other columns are left."""
    rows = [{"text": f"row {i % 150}", "other": i} for i in range(200)]
    few, many = (load_splits(rows[:number], ["text"]) for number in (100, 200))
    first, last = ({*splits["validation"]["text"]} for splits in (few, many))
    assert first <= last and 5 <= len(first) < len(last) <= 30
    assert not last & {*many["train"]["text"]}
    assert len(many["train"]) + len(many["validation"]) == 200
    assert many["train"].column_names == ["text"]
    read = load_splits(str(write_table(tmp_path, rows, "jsonl")), ["text"])
    assert [[*read[name]["text"]] for name in read] == [[*many[name]["text"]] for name in many]
    with pytest.raises(ValueError, match="task.data has no column label in its split train"):
        load_splits(rows, ["text", "label"])


def train_plainly(example, loaded):
    """The gradients' norms of three steps of a plain loop with transformers' own loss."""
    optimizer = torch.optim.AdamW(
        loaded.model.train().parameters(), 1e-3, (0.9, 0.99), weight_decay=0
    )
    norms = []
    for step in range(3):
        example.own(loaded.model, loaded.batch(8 * step, 8 * step + 8)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


ANSWER = """
import sys, torch, transformers
folder, name, file = sys.argv[1:]
batch, before = torch.load(file)
model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
missing = [name for name in info["missing_keys"] if "num_batches_tracked" not in name]
assert not missing and not info["unexpected_keys"], info
with torch.no_grad():
    after = model.eval()(**batch)[0]
print(float((after - before).abs().max() / before.abs().max()))
"""


@pytest.mark.slow
@each_example
def test_an_example_keeps_the_promises(project, tmp_path, example):
    """Losses on one and two processes in other micro-batches; bytes with exact, and after kill -9
    or a stop; the gradients of a plain loop; an export that transformers loads elsewhere."""
    shutil.copy(FOLDER / f"{example.name}.py", project.path / "task.py")
    flags = [*STEPS, *example.flags, *flags_of(example.fields(tmp_path))]
    runs = {"one": (1, []), "two": (2, ["--micro_batch_size", 2])}
    runs |= {f"exact-{n}": (n, ["--exact", "true", "--micro_batch_size", 2]) for n in (1, 3)}
    for run, (processes, given) in runs.items():
        project.train(processes, *flags, *given, "--output_dir", tmp_path / run)
    losses = {run: [line["loss"] for line in lines(tmp_path / run, "loss")] for run in runs}
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-6)
    one, two = (lines(tmp_path / run, "eval_loss")[-1] for run in ("one", "two"))
    assert two.pop("eval_loss") == pytest.approx(one.pop("eval_loss"), rel=1e-5)
    assert two == pytest.approx(one, abs=1e-3)  # of likeliest classes some are as likely as others
    last, middle = "checkpoints/step-00000004", "checkpoints/step-00000002"
    assert len({digest(tmp_path / f"exact-{n}" / last) for n in (1, 3)}) == 1

    resumed = [*flags, "--output_dir", tmp_path / "resumed"]
    if example.killed:
        project.train(1, *resumed, codes=(-9,), before=kill_after(tmp_path / "resumed", 2))
    else:
        shutil.copytree(tmp_path / "one" / middle, tmp_path / "resumed" / middle)
    assert "continuing from" in project.train(1, *resumed)
    assert digest(tmp_path / "resumed" / last) == digest(tmp_path / "one" / last)

    loaded = load(example, tmp_path)
    norms = [line["grad_norm"] for line in lines(tmp_path / "one", "grad_norm")]
    assert train_plainly(example, loaded) == pytest.approx(norms[:3], rel=1e-5)

    loaded.model.load_state_dict(read_weights(tmp_path / "one" / last), strict=False)
    model = getattr(loaded.model, "get_base_model", lambda: loaded.model)()
    known = {*inspect.signature(model.forward).parameters} - {"start_positions", "end_positions"}
    batch = {name: v for name, v in example.inputs(loaded.batch(0, 2)).items() if name in known}
    batch.pop("labels", None)
    with torch.no_grad():
        torch.save([batch, loaded.model.eval()(**batch)[0]], tmp_path / "answer.pt")
    command = ["-c", ANSWER, tmp_path / "one" / "model", example.loads, tmp_path / "answer.pt"]
    assert float(project.run("python", *command).stdout) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("example", [each for each in EXAMPLES if each.wrong], ids=lambda e: e.name)
def test_bad_input_is_one_line(tmp_path, example):
    row, said = example.wrong
    row = row(tmp_path) if callable(row) else row
    with pytest.raises(ValueError) as error:
        load(example, tmp_path, [row] * 20)
    assert said in str(error.value) and "\n" not in str(error.value)
