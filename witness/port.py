"""Ports accelerate's nlp_example.py to Training, counts the lines that change, and trains with it.

python witness/port.py CLONE     a folder of accelerate with its examples
"""

import os
import re
import runpy
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from unittest import mock

import transformers
from accelerate.test_utils.examples import compare_against_test
from torch.utils.data import DataLoader

OWN = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "own_script.py"))
PREPARE = """
    model, optimizer, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, eval_dataloader, lr_scheduler
    )
    training = Training(
        accelerator, model, optimizer, train_dataloader.dataset, folder="runs/mrpc", seed=seed,
        global_batch_size=int(config["batch_size"]), micro_batch_size=batch_size,
        collate=train_dataloader.collate_fn, settings=config,
    )
"""
LOOP = """
    max_steps = (len(train_dataloader) * num_epochs) // gradient_accumulation_steps
    for update in training.steps(max_steps, save_every=200):
        model.train()
        for batch in update:
            with accelerator.accumulate(model):
                update.backward(lambda: model(**batch).loss, mean=True)
        update.clip(0)
        optimizer.step()
        lr_scheduler.step()
        if not update.due("epoch"):
            continue
"""
PORT = (  # what is replaced, and by what
    (r"\n    model, optimizer, train_dataloader.*?\n    \)\n", PREPARE),
    (r"\n    for epoch in .*?zero_grad\(\)\n", LOOP),
    (r'f"epoch \{epoch\}:"', 'f"step {update.number}:"'),
    (r"\nfrom accelerate import", "\nfrom samestep import Training\nfrom accelerate import"),
)


class Metric:
    """Stands for the metric, which a hub has: the accuracy."""

    def __init__(self):
        self.right = []

    def add_batch(self, predictions, references):
        self.right += (predictions == references).tolist()

    def compute(self):
        return {"accuracy": sum(self.right) / len(self.right)}


def dataloaders(accelerator, batch_size):
    """Stand for MRPC and its tokenizer: the rows of examples/own_script.py."""
    given = {"collate_fn": OWN["collate"], "batch_size": batch_size}
    train, evaluation = OWN["make_rows"](320, seed=1), OWN["make_rows"](64, seed=2)
    return DataLoader(train, shuffle=True, **given), DataLoader(evaluation, **given)


class Batch(dict):
    """A batch as a tokenizer pads it."""

    def to(self, device):
        return self


def train(path):
    """Run the ported script, with a tiny model and rows that are there."""
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    evaluate = ModuleType("evaluate")
    evaluate.load = lambda *_: Metric()
    sys.modules["evaluate"] = evaluate
    collate = OWN["collate"]
    OWN["collate"] = lambda rows: Batch(collate(rows))
    script = runpy.run_path(str(path))
    names = script["training_function"].__globals__
    names["get_dataloaders"] = dataloaders
    model = transformers.BertForSequenceClassification(config)
    loaded = mock.Mock(from_pretrained=lambda *_, **__: model)
    names["AutoModelForSequenceClassification"] = loaded
    with mock.patch.object(sys, "argv", [str(path), "--cpu"]):
        script["main"]()


def main():
    given = (Path(sys.argv[1]) / "examples" / "nlp_example.py").read_text("utf-8")
    ported = given
    for pattern, text in PORT:
        ported, count = re.subn(pattern, lambda _, text=text: text, ported, flags=re.S)
        if count != 1:
            sys.exit(f"nlp_example.py has {count} places of {pattern}")
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("examples").mkdir()
        for before, after in ((given, ported), (ported, given)):
            for path, text in (("examples/nlp_example.py", before), ("after.py", after)):
                Path(path).write_text(text, "utf-8")
            lines = compare_against_test("examples/nlp_example.py", "after.py", parser_only=False)
            counts.append(len(lines))
        Path("ported.py").write_text(ported, "utf-8")
        train("ported.py")
        os.chdir("/")
    print(f"port: {counts[0]} lines are new, {counts[1]} go")


if __name__ == "__main__":
    main()
