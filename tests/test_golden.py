"""What each task makes of committed rows, compared with the files in tests/golden/.

A case has the first and the last example of both splits as the loss sees them, with the decoded
text; a digest of all examples of a split; losses and scores of three steps in one process with one
thread. After a change that was meant: `UPDATE_GOLDEN=1`, and read the diff of the files.
"""

import contextlib
import hashlib
import io
import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from conftest import bake, lines, load_task
from samestep.project import contract, prepared

FOLDER = Path(__file__).with_name("golden")
STEPS = ["--max_steps", 3, "--log_every", 1, "--check_export", "false"]
HELD_OUT = ["--task.validation_fraction", 0.25]
PROMPTS = ["--task.rows", "prompt", "--task.completion_column", "chosen"]
SOURCES = ["--task.source_column", "prompt", "--task.target_column", "chosen"]
# Of each task the cases: the recipe, the rows (of tests/golden/, or of the recipe), and flags.
TASKS = {
    "causal_lm": {
        "texts": ("smoke", "texts.jsonl", []),
        "chats": ("smoke", "chats.jsonl", []),
        "prompts": ("smoke", "pairs.jsonl", PROMPTS),
    },
    "preference": {"pairs": ("smoke", "pairs.jsonl", [])},
    "seq2seq": {"pairs": ("smoke", "pairs.jsonl", SOURCES)},
    "text_classification": {"texts": ("smoke", "texts.jsonl", [])},
    "image_classification": {"demo": ("default", "", [])},
}


def record(project, name, case, folder):
    """Trains a case for three steps in a project of its task, and reads its data: the facts."""
    recipe, rows, flags = TASKS[name][case]
    output = folder / case
    if rows:
        flags = [*flags, *HELD_OUT, "--task.data", FOLDER / rows]
    flags = [*flags, *STEPS, "--task.cache_dir", folder / "cache", "--output_dir", output]
    project.train(1, "--config", f"configs/train/{recipe}.yaml", *flags)
    facts = {}
    for part, examples in read_data(load_task(name), output).items():
        facts[part] = {
            "examples": len(examples),
            "examples_sha256": digest(examples),
            "first": examples[0],
            "last": examples[-1],
        }
    facts["losses"] = [line["loss"] for line in lines(output, "loss")]
    facts["scores"] = {k: v for k, v in lines(output, "eval_loss")[-1].items() if k != "step"}
    return facts


def digest(value):
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_data(task, output):
    """The examples of both splits, as the loss of this run sees them.

    `targets` are the tokens to predict at each place of input_ids: where the loss shifts the
    labels, they are moved here.
    """
    cfg = task.TaskConfig(**yaml.safe_load((output / "config.yaml").read_text("utf-8"))["task"])
    with contextlib.redirect_stdout(io.StringIO()):
        bound = contract.bind(task, cfg, prepared.prepare(task, cfg))
        train, validation = bound.views()
    names = json.loads((output / "model" / "config.json").read_text("utf-8")).get("id2label", {})
    tokenizer = None
    if (output / "model" / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(output / "model")
    found = {}
    for part, rows in {"train": train, "validation": validation}.items():
        batches = (bound.collate([rows[i]]) for i in range(len(rows)))
        found[part] = [example_of(task.__name__, batch, tokenizer, names) for batch in batches]
    return found


def example_of(name, batch, tokenizer, names):
    """A batch of one example in words and numbers that no format of files decides."""
    labels = batch["labels"][0]
    if name == "image_classification":
        pixels = (batch["pixel_values"] * 1000).round().to(torch.int32).contiguous()
        pixels = hashlib.sha256(pixels.numpy().tobytes()).hexdigest()
        return {"pixels_sha256": pixels, "class": names[str(int(labels))]}
    ids = batch["input_ids"][0]
    if name == "text_classification":
        label = {"class": names[str(int(labels))], "weight": float(batch["weight"])}
        return {**label, **decoded("input_ids", ids, tokenizer)}
    if name == "seq2seq":
        return {**decoded("input_ids", ids, tokenizer), **decoded("labels", labels, tokenizer)}
    if name == "preference":
        pair = zip(("chosen", "rejected"), ids, labels, strict=True)
        return {answer: shifted(*each, tokenizer) for answer, *each in pair}
    example = shifted(ids, labels, tokenizer)
    if "position_ids" in batch:
        example["starts"] = starts_of(batch["position_ids"][0][: len(example["input_ids"])])
    return example


def decoded(name, ids, tokenizer):
    return {f"{name}_text": tokenizer.decode(ids), name: ids.tolist()}


def shifted(ids, targets, tokenizer):
    """Tokens up to the last one from which another is predicted, without the padding after it."""
    targets = torch.cat([targets[1:], torch.tensor([-100])])
    end = int((targets >= 0).nonzero().max()) + 1
    ids, targets = ids[:end], targets[:end]
    counted = {"loss_text": tokenizer.decode(targets[targets >= 0])}
    return {**decoded("input_ids", ids, tokenizer), **counted, "targets": targets.tolist()}


def starts_of(positions):
    """Where the documents of a packed sequence begin."""
    return (positions == 0).nonzero()[:, 0].tolist()


def store(file, facts):
    """Writes a task's file: a line for each list."""
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    # Within quotes no line ends.
    text = re.sub(r"\[\n[^\]\[\"]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    file.write_text(text + "\n", encoding="utf-8")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in TASKS if name != "causal_lm"]


@pytest.mark.parametrize("name", ["causal_lm", *SLOW])
def test_examples_splits_and_losses_are_those_of_the_file(name, tmp_path):
    project, file = bake(tmp_path, task=name, tracker="none"), FOLDER / f"{name}.json"
    new = {case: record(project, name, case, tmp_path) for case in TASKS[name]}
    if os.environ.get("UPDATE_GOLDEN"):
        store(file, new)
    old = json.loads(file.read_text(encoding="utf-8"))
    assert new.keys() == old.keys()
    for case, facts in old.items():
        for part in ("train", "validation"):
            assert json.loads(json.dumps(new[case][part])) == facts[part], case
        # Other processors and builds of torch round otherwise.
        assert new[case]["losses"] == pytest.approx(facts["losses"], rel=1e-5), case
        assert new[case]["scores"] == pytest.approx(facts["scores"], rel=1e-5, abs=1e-9), case
