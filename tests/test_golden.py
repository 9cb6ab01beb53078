"""What each task makes of committed rows, compared with the files in tests/golden/.

A case has the first and the last row of both splits as a batch, with the decoded text; a digest of
all rows of a split; losses and scores of three steps in one process with one thread. After a change
that was meant: `UPDATE_GOLDEN=1`, and read the diff of the files.
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
from refusals import cases
from samestep.contract import contract
from samestep.prepared import prepared

FOLDER = Path(__file__).with_name("golden")
STEPS = ["--max_steps", 3, "--log_every", 1, "--check_export", "false"]
HELD_OUT = ["--task.validation_fraction", 0.25]
TASKS = cases("golden")


def record(project, name, case, folder):
    """Trains a case for three steps in a project of its task, and reads its data: the facts."""
    recipe, rows, words = TASKS[name][case]
    flags = words.split()
    output = folder / case
    if rows:
        flags = [*flags, *HELD_OUT, "--task.data", FOLDER / rows]
    flags = [*flags, *STEPS, "--task.cache_dir", folder / "cache", "--output_dir", output]
    project.train(1, "--config", f"configs/train/{recipe}.yaml", *flags)
    facts = read_data(load_task(name), output)
    facts["losses"] = [line["loss"] for line in lines(output, "loss")]
    facts["scores"] = {k: v for k, v in lines(output, "eval_loss")[-1].items() if k != "step"}
    return facts


def read_data(task, output):
    """The batches of both splits, a row each, and the names of the classes."""
    cfg = task.TaskConfig(**yaml.safe_load((output / "config.yaml").read_text("utf-8"))["task"])
    with contextlib.redirect_stdout(io.StringIO()):
        bound = contract.bind(task, cfg, prepared.prepare(task, cfg))
        views = bound.views()
    model = json.loads((output / "model" / "config.json").read_text("utf-8"))
    facts, tokenizer = {"classes": model.get("id2label")}, None
    if (output / "model" / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(output / "model")
    for part, rows in zip(("train", "validation"), views, strict=True):
        batches = (bound.collate([rows[i]]) for i in range(len(rows)))
        found = [values_of(batch, tokenizer) for batch in batches]
        facts[part] = {"examples": len(found), "examples_sha256": hash_of(found)}
        facts[part] |= {"first": found[0], "last": found[-1]}
    return facts


def values_of(batch, tokenizer):
    """The row of a batch in words and numbers: tokens also decoded, and of pixels their hash."""
    found = {}
    for name, (values,) in batch.items():
        if name == "pixel_values":
            pixels = (values * 1000).round().to(torch.int32).contiguous()
            found["pixels_sha256"] = hashlib.sha256(pixels.numpy().tobytes()).hexdigest()
            continue
        found[name] = values.tolist()
        if name == "input_ids":
            found["text"] = tokenizer.decode(values.tolist())
    return found


def hash_of(value):
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


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
