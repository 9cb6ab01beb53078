"""The contract of a task, for all that the repository has: what holds whatever is trained.

A kit has what the tests need of one task: rows of a small dataset, settings of a tiny model, and
how a prepared row is told from others. Those of examples/ take longer.
"""

import inspect
import json
import math
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from transformers import AutoTokenizer

from conftest import ROOT, bake, lines, load_task, prepare_task, status, write_table
from refusals import cases, refused, table
from same import check_same, check_same_curve
from samestep.contract import contract
from samestep.data import views
from samestep.data.plain import load_splits
from samestep.step import inputs

NUMBERS = "zero one two three four five six seven eight nine".split()
SPELLED = [" ".join(NUMBERS[int(digit)] for digit in str(n)) for n in range(100, 160)]
COLORS = {"blue": (30, 60, 200), "green": (40, 180, 60), "red": (220, 40, 30)}
STEPS = ["--max_steps", 6, "--eval_every", 3, "--save_every", 3, "--log_every", 1]
STEPS += ["--global_batch_size", 8, "--micro_batch_size", 2, "--keep_checkpoints", 0]
WORDS = "the a train of samples stops and resumes at any step with equal bytes".split()


def text(i, most=12):
    """Some words, in unequal numbers."""
    return " ".join(WORDS[(i * i + k * (1 + i % 5)) % len(WORDS)] for k in range(1 + i % most))


def picture(color, number=0):
    """An image of one color, and a little noise that is its own."""
    noise = np.random.default_rng([number, *color]).integers(0, 20, (12, 12, 3))
    return Image.fromarray((np.array(color) + noise).astype(np.uint8))


def own_loss(model, batch):
    """The mean loss that transformers computes of a batch."""
    known = inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters
    return model(**{name: values for name, values in batch.items() if name in known}).loss


def reward_loss(model, batch):
    """The loss of TRL's RewardTrainer."""
    sides = [{name: values[:, side] for name, values in batch.items()} for side in (0, 1)]
    chosen, rejected = (model(**each).logits[:, 0] for each in sides)
    return -F.logsigmoid(chosen - rejected).mean()


def span_loss(model, batch):
    """The loss of the windows that have the answer."""
    own = batch["starts"] >= 0
    names = {"starts": "start_positions", "ends": "end_positions"}
    given = {names.get(name, name): v for name, v in batch.items() if name != "row"}
    return own_loss(model, {name: values[own] for name, values in given.items()})


def ctc_loss(model, batch):
    """The loss of a character, by torch alone."""
    logits = model(batch["input_values"], batch["attention_mask"]).logits
    frames = batch["attention_mask"].sum(1)
    for kernel, stride in zip(model.config.conv_kernel, model.config.conv_stride, strict=True):
        frames = (frames - kernel) // stride + 1
    labels, sizes = batch["labels"].clamp(min=0), (batch["labels"] >= 0).sum(1)
    chances = logits.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(chances, labels, frames, sizes, reduction="sum") / sizes.sum()


@dataclass
class Kit:
    """One task, and a small dataset for it: see tests/cases/kits.yaml."""

    name: str
    own: Callable
    number: int = 0
    settings: dict = field(default_factory=dict)
    empty: str = ""
    noise: dict = field(default_factory=dict)
    loads: str = ""

    @cached_property
    def rows(self):
        return [ROWS[self.name](i) for i in range(self.number)]

    @cached_property
    def task(self):
        return load_task(self.name)

    def config(self, folder, data=None, **fields):
        """Settings for a file or folder, or for rows, which are written."""
        data = self.write(folder, data) if isinstance(data, list) else data
        if isinstance(fields.get("validation_data"), list):
            (folder / "more").mkdir()
            more = self.write(folder / "more", fields["validation_data"])
            fields["validation_data"] = str(more)
        given = {"data": str(data)} if data else {}
        cfg = self.task.TaskConfig(**{**given, **self.settings, **fields})
        cfg.cache_dir = str(folder / "cache")
        return cfg

    def prepare(self, folder, data=None, **fields):
        """Settings, the prepared folder, and both parts."""
        cfg = self.config(folder, data, **fields)
        prepared = self.prepare_data(cfg)
        return cfg, prepared, self.read_views(cfg, prepared)

    def prepare_data(self, cfg):
        return prepare_task(self.task, cfg) if hasattr(self.task, "prepare_data") else None

    def read_views(self, cfg, prepared):
        return contract.read_views(contract.bind(self.task, cfg, prepared), prepared)

    def tokenizer(self, prepared):
        return AutoTokenizer.from_pretrained(prepared.folder)

    def keys(self, prepared, part):
        """What tells each row of a part: its text, that of its prompt, or its pixels."""
        if self.name == "image_classification":
            return [row["image"].tobytes() for row in part]
        tokenizer = self.tokenizer(prepared)
        if self.name == "causal_lm":
            labels = self.task.collate([*part])["labels"]
            return [*filter(None, tokenizer.decode(labels[labels >= 0]).split("<|endoftext|>"))]
        found = [row.get("input_ids") for row in part]
        if self.name == "preference":
            found = [self.task.preferences.prompt_of(row) for row in part]
        return tokenizer.batch_decode(found, skip_special_tokens=self.name != "preference")

    def write(self, folder, rows=None, kind="jsonl", names=None):
        """Rows as a table of this kind; a tuple has the values of the columns of the kit, or of
        these. Images whose names are numbers lie beside it.
        """
        rows = self.rows if rows is None else rows
        names = names or [*(self.rows or rows)[0]]
        rows = [
            row if isinstance(row, dict) else dict(zip(names, row, strict=True)) for row in rows
        ]
        for row in rows:
            if number := re.fullmatch(r"i(\d+)\.png", str(row.get("image"))):
                color = COLORS.get(row["label"], (0, 0, 0))
                picture(color, int(number[1])).save(folder / row["image"])
        return write_table(folder, rows, kind)

    def flags(self, **fields):
        settings = {**self.settings, **fields}
        return [word for name, value in settings.items() for word in (f"--task.{name}", value)]


TAGS = {"the": "O", "a": "O", "of": "O", "train": "B-noun", "samples": "I-noun", "stops": "B-verb"}
TONE = {"sampling_rate": 8000}
LABELS = ["odd", "even"]


def question(i):
    """A row of question_answering: the answer is the number at the end of the context."""
    before = f"{text(i)} {'so ' * i}"
    answers = {"text": [f"{i}"], "answer_start": [len(before)]}
    return {"question": f"{text(i, 3)}?", "context": f"{before}{i}.", "answers": answers}


def choice(i):
    endings = {f"ending{k}": text(i + k, 7) for k in range(4)}
    return {"sent1": text(i), "sent2": "then", "label": i % 4, **endings}


def tagged(i):
    words = text(i).split()
    return {"tokens": words, "ner_tags": [TAGS.get(word, "B-x") for word in words]}


ROWS = {  # a row by its number
    "causal_lm": lambda i: {"text": f"{SPELLED[i]}.\n"},
    "text_classification": lambda i: {"text": SPELLED[i], "label": LABELS[i % 2]},
    "image_classification": lambda i: {"image": f"i{i}.png", "label": [*COLORS][i % 3]},
    "seq2seq": lambda i: {"source": SPELLED[i], "target": str(100 + i)},
    "preference": lambda i: {"prompt": SPELLED[i], "chosen": f" {i}", "rejected": f" {i}?"},
    "masked_lm": lambda i: {"text": text(i)},
    "token_classification": tagged,
    "reward_model": lambda i: {
        "prompt": text(i, 5),
        "chosen": text(i + 1),
        "rejected": text(i),
    },
    "multiple_choice": choice,
    "question_answering": question,
    "speech_recognition": lambda i: {
        "text": f"{i}",
        "audio": {**TONE, "array": [*range(1100 + i)]},
    },
}
OWN = {"reward_model": reward_loss, "question_answering": span_loss}
OWN["speech_recognition"] = ctc_loss
KITS = [Kit(own=OWN.get(each["name"], own_loss), **each) for each in cases("kits")]
TEMPLATES = [kit for kit in KITS if kit.empty]
EXAMPLES = [kit for kit in KITS if not kit.empty]
BY_NAME = {kit.name: kit for kit in KITS}


def name_of(kit):
    return kit.name + "-lora" * ("lora_rank" in kit.settings)


ALL = [*TEMPLATES, *(pytest.param(kit, marks=pytest.mark.slow) for kit in EXAMPLES)]
each_task = pytest.mark.parametrize("kit", ALL, ids=name_of)


@pytest.fixture(params=TEMPLATES, ids=name_of)
def kit(request):
    return request.param


def refusal(kit, cfg):
    """The one line with which a task refuses its data."""
    with refused() as error:
        kit.read_views(cfg, kit.prepare_data(cfg))
    return str(error.value)


# ---- Data ----------------------------------------------------------------------------------------


def test_every_row_is_in_one_part(kit, tmp_path):
    cfg, prepared, parts = kit.prepare(tmp_path, kit.rows, validation_fraction=0.2)
    packed = pickle.dumps(parts)  # as for worker processes: names of files
    keys = [kit.keys(prepared, part) for part in pickle.loads(packed)]
    held = {"causal_lm": 9, "preference": 8}.get(kit.name, 13)
    if kit.name == "image_classification":  # versions of Pillow write other bytes
        held = min(max(len(keys[1]), 5), 20)
    assert len(packed) < 20_000 and len(keys[1]) == held
    assert len({*keys[0], *keys[1]}) == len(keys[0]) + len(keys[1]) == 60
    if kit.name != "image_classification":
        assert sorted(keys[0] + keys[1]) == sorted(str([*row.values()][0]) for row in kit.rows)


def test_rows_that_belong_together_are_on_one_side_and_columns_have_any_name(kit, tmp_path):
    kit.write(tmp_path)  # the images
    rows = [{f"my {name}": value for name, value in row.items()} for row in kit.rows]
    if kit.name in ("seq2seq", "preference"):  # to one text there are several answers
        rows += [{**row, f"my {kit.empty}": row[f"my {kit.empty}"] + " or so"} for row in rows]
    else:
        rows *= 3
    fields = {f"{name}_column": f"my {name}" for name in kit.rows[0]}
    cfg, prepared, parts = kit.prepare(tmp_path, rows, **fields)
    train, held_out = ({*kit.keys(prepared, part)} for part in parts)
    assert train and held_out and not train & held_out and len(train | held_out) == 60


@pytest.mark.parametrize("case", cases("long"))
def test_long_texts_are_cut_aloud_and_keep_their_end(tmp_path, capsys, case):
    name, row, columns, settings = case.values()
    row = {key: value if isinstance(value, str) else "nine " * value for key, value in row.items()}
    _, _, parts = BY_NAME[name].prepare(tmp_path, [*BY_NAME[name].rows, row], **settings)
    printed, rows = capsys.readouterr().out, [row for part in parts for row in part]
    for name, most in columns.items():
        assert f" {most} at most; 1 have {most}, where rows are truncated\n" in printed, printed
        assert max(len(row[name]) for row in rows) == most
        assert len({int(row[name][-1]) for row in rows}) == 1


def test_given_validation_rows_are_all_that_is_evaluated_on(kit, tmp_path, capsys):
    given = {"validation_data": kit.rows[40:]}
    cfg, prepared, parts = kit.prepare(tmp_path, kit.rows[:50], **given)
    assert [len(kit.keys(prepared, part)) for part in parts] == [50, 20]
    assert len(inputs.list_sources(parts[0], training=True)) <= 1  # none is of validation alone
    said = capsys.readouterr().out
    assert "10 of 20 validation " in said and "are training" in said


def test_another_tokenizer_of_the_model_prepares_anew(tmp_path, monkeypatch):
    """Where a branch on the Hub has moved."""
    kit, hub = BY_NAME["causal_lm"], tmp_path / "hub" / "models--owner--model"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.parent))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (hub / "refs").mkdir(parents=True)
    models = {"a" * 40: 300, "b" * 40: 290}
    for commit, size in models.items():
        cfg, prepared, _ = kit.prepare(tmp_path, kit.rows, vocab_size=size)
        folder = hub / "snapshots" / commit
        kit.task.build_model(cfg, prepared).config.save_pretrained(folder)
        kit.tokenizer(prepared).save_pretrained(folder)
    found = []
    for commit in [*models, *models]:
        (hub / "refs" / "main").write_text(commit)
        prepared = kit.prepare(tmp_path, kit.rows, model_name_or_path="owner/model")[1]
        digests = [views.digest(prepared[name]) for name in ("train", "validation")]
        found.append((prepared.folder, str(digests)))
    assert found[:2] == found[2:] and [len({*each}) for each in zip(*found, strict=True)] == [2, 2]


def test_incomplete_rows_are_refused_or_left_out_and_counted(kit, tmp_path, capsys):
    bad = [{**kit.rows[i], kit.empty: empty} for i, empty in enumerate([None, "", " "])]
    rows = [*kit.rows[:1], *bad, *kit.rows[1:]]
    text = refusal(kit, kit.config(tmp_path, rows))
    assert text.startswith("task.data: ") and ", line 2: " in text
    assert f"the {kit.empty} is empty; --task.incomplete_rows skip leaves such rows out" in text
    cfg, prepared, parts = kit.prepare(tmp_path, rows, incomplete_rows="skip")
    assert sum(len(kit.keys(prepared, part)) for part in parts) == 60
    assert re.search(r"; 3 left out \(the first: .*, line 2: .*\)\n", capsys.readouterr().out)


def test_held_out_rows_stay_held_out_when_data_grows(tmp_path):
    """Equal rows are on one side; a file and rows give the same splits, other columns are left."""
    rows = [{"text": f"row {i % 150}", "other": i} for i in range(200)]
    few, many = (load_splits(rows[:number], ["text"]) for number in (100, 200))
    first, last = ({*splits["validation"]["text"]} for splits in (few, many))
    assert first <= last and 5 <= len(first) < len(last) <= 30
    assert not last & {*many["train"]["text"]}
    assert len(many["train"]) + len(many["validation"]) == 200
    assert [*many["train"][0]] == ["text"]
    read = load_splits(str(write_table(tmp_path, rows, "jsonl")), ["text"])
    assert [[*read[name]["text"]] for name in read] == [[*many[name]["text"]] for name in many]
    with pytest.raises(ValueError, match="no column label among text, other; rename the right one"):
        load_splits(rows, ["text", "label"])


# ---- Loss ----------------------------------------------------------------------------------------


def norm_of_gradient(model, loss):
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))
    model.zero_grad()
    return norm


@each_task
def test_the_loss_is_a_sum_however_rows_are_batched_and_padded(kit, tmp_path):
    """And divided by the count it is the loss of transformers, also in its gradient."""
    half = {"validation_fraction": 0.5} if kit in TEMPLATES else {}
    cfg, prepared, (_, part) = kit.prepare(tmp_path, kit.rows or None, **half)
    task = contract.bind(kit.task, cfg, prepared)
    torch.manual_seed(0)
    model = task.build_model().eval()
    rows = [part[i] for i in range(min(7, len(part)))]
    batch = task.collate(rows)
    for parts in ([rows[:3], rows[3:]], [[row] for row in rows]):
        cut = [task.collate(each) for each in parts]
        with torch.no_grad():
            losses = [task.loss_sum(model, each) for each in [batch, *cut]]
            sums = [task.eval_sums(model, each) for each in [batch, *cut]]
        assert {(loss.dtype, loss.shape) for loss in losses} == {(torch.float32, ())}
        assert float(losses[0]) == pytest.approx(float(sum(losses[1:])), rel=1e-5)
        assert int(task.count(batch)) == sum(int(task.count(each)) for each in cut) > 0
        for name, whole in sums[0].items():
            added = sum(each[name].double() for each in sums[1:])
            assert torch.allclose(whole.double(), added, rtol=1e-5), name
    mean = task.loss_sum(model, batch) / task.count(batch)
    if kit.loads:
        own = kit.own(model, batch)
        assert mean.item() == pytest.approx(own.item(), rel=1e-5)
        norms = [norm_of_gradient(model, each) for each in (mean, own)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0
    if not hasattr(task, "eval_outputs"):
        scores = task.metrics({name: value.double() for name, value in sums[0].items()})
        assert scores["loss"] == pytest.approx(mean.item(), rel=1e-5)
        assert all(math.isfinite(score) for score in scores.values())


# ---- Bad input -----------------------------------------------------------------------------------


def chat(*texts, **last):
    """A row with messages; the last one with these keys, too."""
    turns = zip(["user", "assistant"] * len(texts), texts, strict=False)
    messages = [{"role": role, "content": text} for role, text in turns]
    messages[-1].update(last)
    return {"messages": messages}


CASES = [(name, said, given) for lines, name in table("rows") for said, given in lines.items()]


@pytest.mark.parametrize("name, said, given", CASES)
def test_what_is_refused_is_answered_in_one_line(tmp_path, monkeypatch, name, said, given):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kit, fields = BY_NAME[name], dict(given)
    data, times = fields.pop("data"), fields.pop("times", 1)
    data = kit.rows if data is None else times * data
    text = refusal(kit, kit.config(tmp_path, data, **fields))
    assert text.startswith("task.") and said in text
    if isinstance(data, list):
        name = "validation_data" if "validation_data" in fields else "data"
        assert text.startswith(f"task.{name}: ") and ("rows.jsonl" in text or "no.csv" in text)
    elif data == "no.csv":
        assert not (tmp_path / "cache").exists()


def test_a_model_that_is_missing_is_one_line(kit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a request was made"))
    for name, said in table("models"):
        text = refusal(kit, kit.config(tmp_path, kit.rows, model_name_or_path=name))
        assert text.startswith(f"task.model_name_or_path: {said}")


@pytest.mark.slow
@pytest.mark.parametrize("wrong, name", table("examples"))
def test_a_wrong_row_of_an_example_is_one_line(tmp_path, monkeypatch, wrong, name):
    monkeypatch.chdir(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (8, 8), 7).save("a.png")
    Image.new("L", (8, 8), 255).save("white.png")
    Image.new("L", (12, 12)).save("dark.png")
    Image.new("RGB", (8, 8)).save("rgb.png")
    Image.new("RGB", (8, 8)).save("turned.jpg", exif=exif)
    Image.fromarray(np.full((8, 8), 3000, np.uint16)).save("deep.png")
    for number, (said, row) in enumerate(wrong.items()):
        (folder := tmp_path / str(number)).mkdir()
        images = re.sub(r'"(\w+\.(png|jpg))"', rf'"{tmp_path}/\1"', json.dumps(row))
        rows = [json.loads(images)]
        text = refusal(BY_NAME[name], BY_NAME[name].config(folder, rows, validation_data=rows))
        assert text.startswith("task.data") and said in text, text


# ---- Runs ----------------------------------------------------------------------------------------


def check_two_processes_and_a_lost_half(project, folder, *flags, two=()):
    """Two processes have the numbers of one; one process makes up for a lost half bit by bit.

    `two` are more flags for the two.
    """
    whole, again = folder / "whole", folder / "again"
    options = ["--num_workers", 1, *two, "--output_dir"]
    printed = project.train(2, *flags, *options, folder / "two")
    project.train(1, *flags, "--output_dir", whole)
    check_same_curve(whole, folder / "two")
    shutil.copytree(whole / "checkpoints", again / "checkpoints")
    shutil.rmtree(again / "checkpoints" / "step-00000006")
    assert "continuing from" in project.train(1, *flags, "--output_dir", again)
    check_same(whole, again)
    assert status(again)["state"] == "finished"
    project.check_asked(again, 5)
    return printed


@each_task
def test_a_run_keeps_the_promises(kit, tmp_path):
    """One and two processes train the same, in other micro-batches where these draw no numbers; a
    lost half is made up for; with exact, three have the bytes of one; and transformers alone has
    the same loss from the export."""
    task = {"task": kit.name} if kit in TEMPLATES else {}
    project = bake(tmp_path, pictures=False, tracker="none", **task)
    if not task:
        shutil.copy(ROOT / "examples" / f"{kit.name}.py", project.path / "task.py")
        recipe = "warmup_steps: 1\nlearning_rate: 0.0003\n"
        (project.path / "configs" / "train" / "default.yaml").write_text(recipe)
    data = kit.write(tmp_path) if kit.rows else None
    flags = [*kit.flags(**kit.noise), *STEPS, "--exact", "true"]
    if kit.name == "vision_language":  # LLaVA does not read its last layer
        flags += ["--find_unused_parameters", str("lora_rank" not in kit.settings).lower()]
    flags += ["--task.data", data] if data else []
    two = ["--exact", "false", "--micro_batch_size", 2 if kit.noise else 4]
    printed = check_two_processes_and_a_lost_half(project, tmp_path, *flags, two=two)
    said = [line for line in printed.splitlines() if line.startswith("Prepar")]
    assert len(said) == len({*said}) and (said or kit in EXAMPLES)  # prepared by one of them
    project.train(3, *flags, "--output_dir", tmp_path / "three")
    check_same(tmp_path / "whole", tmp_path / "three")
    one, other = (lines(tmp_path / run, "eval_loss")[-1] for run in ("whole", "two"))
    assert other == pytest.approx(one, rel=1e-4, abs=1e-6)
    if kit.loads:
        cfg, prepared, (_, part) = kit.prepare(tmp_path, data)
        batch = contract.bind(kit.task, cfg, prepared).collate([*part])
        model = getattr(transformers, kit.loads).from_pretrained(tmp_path / "whole" / "model")
        with torch.no_grad():
            loss = kit.own(model.eval(), batch).item()
        assert loss == pytest.approx(one["eval_loss"], rel=1e-5)
