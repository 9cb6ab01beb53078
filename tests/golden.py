"""What each task makes of its demo and of committed rows, compared with the files in tests/golden/.

    python tests/golden.py                which examples, splits and losses have changed
    python tests/golden.py causal_lm      those of this task
    python tests/golden.py --write        writes the files anew, after a change that was meant

A case has the first and the last example of both splits as the loss sees them, with the decoded
text; a digest of all examples of a split; losses and scores of three steps in one process with one
thread. Demos that come from Python's own manual and library hold for the version that the file
names.
"""

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from transformers import AutoTokenizer

from conftest import ROOT, bake, lines, load_task
from samestep.project import contract, prepared

FOLDER = Path(__file__).resolve().with_suffix("")
STEPS = ["--max_steps", 3, "--log_every", 1, "--check_export", "false"]
HELD_OUT = ["--task.validation_fraction", 0.25]
PROMPTS = ["--task.rows", "prompt", "--task.completion_column", "chosen"]
SOURCES = ["--task.source_column", "prompt", "--task.target_column", "chosen"]
# Of each task and case the recipe, the rows (in tests/golden/, or those of the recipe) and flags.
CASES = {
    ("causal_lm", "texts"): ("smoke", "texts.jsonl", []),
    ("causal_lm", "chats"): ("smoke", "chats.jsonl", []),
    ("causal_lm", "prompts"): ("smoke", "pairs.jsonl", PROMPTS),
    ("causal_lm", "demo"): ("default", "", []),
    ("preference", "pairs"): ("smoke", "pairs.jsonl", []),
    ("preference", "demo"): ("default", "", []),
    ("seq2seq", "pairs"): ("smoke", "pairs.jsonl", SOURCES),
    ("seq2seq", "demo"): ("default", "", ["--task.report_samples", 1]),
    ("text_classification", "texts"): ("smoke", "texts.jsonl", []),
    ("text_classification", "demo"): ("default", "", []),
    ("image_classification", "demo"): ("default", "", []),
}
TASKS = sorted({task for task, _ in CASES})
OF_PYTHON = ("causal_lm", "preference", "text_classification")  # whose demos come from Python
ROUNDING = 1e-5  # relative: losses of other processors and builds of torch
# Absolute: a mean of differences of logarithms, which round by 1e-7, and nearly cancel.


# ---- What a case gives now -----------------------------------------------------------------------


def record(project, name, case, folder):
    """Trains a case for three steps in a project of its task, and reads its data: the facts."""
    recipe, rows, flags = CASES[name, case]
    output = folder / case
    if rows:
        flags = [*flags, *HELD_OUT, "--task.data", FOLDER / rows]
    flags = [*flags, *STEPS, "--task.cache_dir", folder / "cache", "--output_dir", output]
    project.train(1, "--config", f"configs/train/{recipe}.yaml", *flags)
    facts = {}
    if case == "demo" and name in OF_PYTHON:
        facts["python"] = platform.python_version()
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

    This and `example_of` alone know the contract of task.py. `targets` are the tokens to predict at
    each place of input_ids: where the loss shifts the labels, they are moved here.
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


# ---- What has changed ----------------------------------------------------------------------------


def compare(name, case, old, new):
    """Lines that say what differs between the facts of a case; none if nothing does."""
    mine, theirs = flatten(old), flatten(new)
    found = []
    for key in sorted({*mine, *theirs}):
        before, now = mine.get(key), theirs.get(key)
        if not is_same(key, before, now):
            shown = f"old {around(before, now)}, new {around(now, before)}"
            found.append(f"{name}, {case}: {key}: {shown}")
    return found


def flatten(facts, place=""):
    """Facts by their places, such as "train: first: input_ids"."""
    found = {}
    for key, value in facts.items():
        where = f"{place}: {key}" if place else key
        if key == "losses":
            found |= {f"loss of step {i}": loss for i, loss in enumerate(value, 1)}
        elif isinstance(value, dict):
            found |= flatten(value, where)
        else:
            found[where] = value
    return found


def is_same(key, old, new):
    """Whether two facts are equal; losses and scores but for rounding."""
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=ROUNDING, abs_tol=1e-9)
    return old == new


def around(value, other):
    """A value from shortly before the place where it begins to differ from another."""
    if not isinstance(value, list | str) or not isinstance(other, type(value)):
        return repr(value)
    place = max(len(os.path.commonprefix([value, other])) - 3, 0)
    return f"{value[place : place + 12]!r} from {place} of {len(value)}"


def stored(name):
    """The facts of a task's file."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def is_for_another_python(facts):
    return facts.get("python", platform.python_version()) != platform.python_version()


def store(name, cases):
    """Writes a task's file: a line for each list."""
    text = json.dumps(cases, indent=1, ensure_ascii=False)
    # Within quotes no line ends.
    text = re.sub(r"\[\n[^\]\[\"]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if unknown := {*arguments.tasks} - {*TASKS}:
        parser.error(f"no task: {', '.join(unknown)}; there are {', '.join(TASKS)}")
    sys.path.insert(0, str(ROOT / "src"))  # as pytest does it
    changed = []
    for name in arguments.tasks or TASKS:
        cases = {}
        with tempfile.TemporaryDirectory() as folder:
            project = bake(folder, task=name, tracker="none")
            for case in [case for task, case in CASES if task == name]:
                cases[case] = record(project, name, case, Path(folder))
        if arguments.write:
            store(name, cases)
            continue
        for case, old in stored(name).items():
            if is_for_another_python(old):
                print(f"{name}, {case}: not compared: it is for Python {old['python']}")
            else:
                changed += compare(name, case, old, cases[case])
    if not arguments.write:
        print("\n".join(changed or ["nothing has changed"]))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
