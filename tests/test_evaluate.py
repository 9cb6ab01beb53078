"""samestep evaluate: the harness's numbers are ours, and land where they are looked for."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import ROOT, bake, load_task, write_table

ADDED = ROOT / ".venv" / "extra"
ROWS = [{"prompt": f"{i} and", "completion": f" {i + 1}"} for i in range(100, 140)]
HELD = ROWS[::4]
FIELDS = {"rows": "prompt", "context_length": 32, "hidden_size": 32, "num_layers": 1}
FIELDS |= {"num_heads": 2, "vocab_size": 300, "data": "rows.jsonl", "validation_data": "held.jsonl"}


def own_numbers(project):
    """The loss of a row, in nats, and the fraction of rows whose completion is the likeliest: by
    the task, of the rows in held.jsonl."""
    task = load_task("causal_lm")
    paths = {name: str(project / FIELDS[name]) for name in ("data", "validation_data")}
    cfg = task.TaskConfig(**{**FIELDS, **paths, "cache_dir": str(project / "cache")})
    prepared = task.prepare_data(cfg)
    model = AutoModelForCausalLM.from_pretrained(project / "runs/run/model")
    batch = task.collate([*task.datasets(cfg, prepared)[1]])
    counted = batch["labels"] >= 0
    starts = (batch["position_ids"] == 0).flatten().cumsum(0).view_as(counted)  # number of a text
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        logits = model(**inputs, use_cache=False).logits
        sums = task.eval_sums(model, batch)
    right = logits.argmax(-1) == batch["labels"]
    texts = {int(number) for number in starts[counted]}
    exact = [bool(right[counted & (starts == number)].all()) for number in texts]
    assert len(exact) == len(HELD) and int(counted.sum()) == int(sums["tokens"])
    return float(sums["loss"]) / len(exact), sum(exact) / len(exact)


@pytest.mark.slow
def test_the_loss_and_the_accuracy_of_the_harness_are_ours(tmp_path):
    """On packed rows of prompts and completions, each with the token that ends a text."""
    if not (ADDED / "lm_eval").exists():
        pytest.skip("make test-all installs lm-evaluation-harness")
    baked = bake(tmp_path / "project", tracker="tensorboard")
    write_table(baked.path, [row for row in ROWS if row not in HELD])
    write_table(baked.path, HELD, name="held")
    flags = [word for name, value in FIELDS.items() for word in (f"--task.{name}", value)]
    flags += ["--config", "configs/train/smoke.yaml", "--max_steps", 60, "--output_dir", "runs/run"]
    baked.train(1, *flags, "--learning_rate", 0.02)

    ended = [{**row, "completion": f"{row['completion']}<|endoftext|>"} for row in HELD]
    write_table(baked.path, ended, name="cloze")
    example = (ROOT / "templates" / "examples" / "cloze.yaml").read_text()
    (baked.path / "cloze.yaml").write_text(example)
    path = f"{ADDED}:{os.environ['PYTHONPATH']}"
    command = ["python", "-m", "samestep", "evaluate", "runs/run/model", "--tasks", "cloze.yaml"]
    printed = baked.run(*command, PYTHONPATH=path).stdout

    found = json.loads((baked.path / "runs/run/model/metrics.json").read_text())["cloze"]
    loss, accuracy = own_numbers(baked.path)
    assert math.log(found["perplexity"]) == pytest.approx(loss, rel=1e-5)
    assert found["acc"] == accuracy and 0 < accuracy < 1
    assert found["sample_len"] == len(HELD)
    score = f"{found['acc']:.5g}"
    assert f"cloze/acc {score}" in printed
    card = baked.path / "runs/run/model/README.md"
    assert f"| cloze/acc | {score} |" in card.read_text()

    # Again, of fewer rows: the card has one such section, and metrics.json the newest numbers.
    baked.run(*command, "--limit", 4, PYTHONPATH=path)
    headings = [line for line in card.read_text().splitlines() if line.startswith("## ")]
    assert headings[-2:] == ["## Hardware and versions", "## lm-evaluation-harness"]
    assert len(headings) == 4
    assert json.loads((card.parent / "metrics.json").read_text())["cloze"]["sample_len"] == 4
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(baked.path / "runs" / "run"))
    events.Reload()
    (*_, first, last) = events.Scalars("cloze/acc")
    assert first.value == pytest.approx(accuracy) and first.step == last.step == 60


def test_bad_input_is_one_line(tmp_path):
    """What is wrong, and what to write instead."""
    (tmp_path / "lm_eval.py").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"architectures": ["ViTModel"]}')
    (tmp_path / "none.yaml").write_text("output_type: loglikelihood")
    cases = {
        "model --tasks gone.yaml": "cannot read the task gone.yaml: ",
        "model --tasks none.yaml": "none.yaml names no task; write `task: NAME` in it",
        "other --tasks a": "other holds no model of transformers",
        "gone --tasks a": "there is no model in gone; train first",
    }
    program = [sys.executable, "-m", "samestep", "evaluate"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    for words, problem in cases.items():
        ended = subprocess.run(
            [*program, *words.split()], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1, ended.stderr
        assert ended.stderr.startswith("samestep evaluate: ") and problem in ended.stderr
    (tmp_path / "lm_eval.py").unlink()
    ended = subprocess.run([*program, "model", "--tasks", "a"], cwd=tmp_path, capture_output=True)
    assert b"is not installed; run make setup EXTRAS=eval\n" in ended.stderr
