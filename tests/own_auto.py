"""A script of one's own in which memory runs out where a test plans it.

own_auto.py FOLDER SIZE PLAN [WORDS]: PLAN is JSON. `limits`: of numbers in a batch, for each
process. `faults`: [rank, step, place] with a place of forward, middle, backward, optimizer, eval,
each raised once; a step of 0 is the search. `later`: limits from such a step on. kill: a step.
"""

import json
import os
import signal
import sys

import torch
from accelerate import Accelerator
from torch.multiprocessing.reductions import StorageWeakRef

from samestep import Training

folder, size, given, *words = sys.argv[1:]
plan = {"limits": [], "faults": [], "later": {}, "kill": 0, **json.loads(given)}
now = {"step": 0, "place": "forward"}
storages = []  # of the activations of attempts that failed
accelerator = Accelerator()
rank = accelerator.process_index


def fail(place, numbers=0):
    limits = plan["limits"]
    for step, others in plan["later"].items():
        limits = others if now["step"] >= int(step) else limits
    planned = [rank, now["step"], place]
    if planned in plan["faults"]:
        plan["faults"].remove(planned)
    elif not (limits and place == now["place"] and numbers > limits[rank]):
        return
    raise torch.OutOfMemoryError(f"planted in {place} of step {now['step']}")


class Planted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        fail("backward")
        return gradient


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.inner = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 32)
        self.passes, self.queue, self.hidden = 0, [], None
        if "norm" in words:
            self.register_buffer("mean", torch.zeros(()))
        if "sometimes" in words:
            self.extra = torch.nn.Parameter(torch.ones(()))

    def forward(self, ids):
        fail("forward", ids.numel())
        hidden = self.embed(ids.clamp(min=0))
        if "norm" in words and self.training:
            self.passes += 1
            self.mean.lerp_(hidden.detach().mean(), 0.1)
            self.queue = [*self.queue, float(hidden.detach().sum())][-3:]
            hidden = hidden + self.mean + 1e-3 * sum(self.queue)
        hidden = torch.tanh(self.inner(hidden))
        if "norm" in words:
            self.hidden = hidden
        storages.append(StorageWeakRef(hidden.untyped_storage()))
        fail("middle")
        logits = self.head(Planted.apply(hidden))
        if "sometimes" in words and int(ids.sum()) % 3 == 0:
            logits = logits * self.extra
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        return losses.sum()


torch.manual_seed(0)
model = Model()
draw = torch.Generator().manual_seed(1)
lengths = torch.randint(4, 13, (64,), generator=draw).tolist()
rows = [torch.randint(0, 32, (length,), generator=draw) for length in lengths]
kind = torch.optim.SGD if "sgd" in words else torch.optim.AdamW
optimizer = kind(model.parameters(), lr=1e-2)
plain_step = optimizer.step


def planted_step(*args, **named):
    fail("optimizer")
    return plain_step(*args, **named)


optimizer.step = planted_step
model, optimizer = accelerator.prepare(model, optimizer)


def collate(rows):
    return {"ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)}


def eval_sums(model, batch):
    fail("eval", batch["ids"].numel())
    return {"loss": model(**batch).detach()}


training = Training(
    accelerator, model, optimizer, rows, folder=folder, seed=0, global_batch_size=16,
    micro_batch_size=size if size == "auto" else int(size), collate=collate,
    count=lambda batch: int((batch["ids"][:, 1:] >= 0).sum()), rows_depend="norm" in words,
)  # fmt: skip
failed = []
for step in training.steps(12, save_every=5):
    if step.number == plan["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    for batch in step:
        now["step"] = step.number if training.gradients else 0
        with accelerator.accumulate(model):
            if "plain" in words:
                step.backward(model(**batch))
            else:
                if failed:
                    print("FREE", [each.expired() for each in failed], flush=True)
                storages.clear()
                step.backward(lambda batch=batch: model(**batch))
                failed = training.memory and training.memory.is_out and [*storages]
    norm = step.clip(1.0)
    optimizer.step()
    if step.number % 4 == 0:
        now["place"] = "eval"
        loss = float(training.evaluate(rows[:23], eval_sums)["loss"])
        now["place"] = "forward"
        print("EVAL", step.number, loss, flush=True)
    print("LOSS", rank, step.number, repr(step.loss), float(norm), flush=True)
