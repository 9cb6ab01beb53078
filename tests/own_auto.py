"""A script of one's own in which memory runs out where a test plans it.

own_auto.py FOLDER SIZE PLAN [WORDS]: PLAN is JSON. `limits`: of numbers in a batch, for each
process, at the place `at`. `faults`: [rank, step, place], each raised once; places are forward,
middle, backward, optimizer and eval. `later`: limits from such a step on. `eval`: limits of
evaluations. kill: a step.
"""

import json
import os
import signal
import sys

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.multiprocessing.reductions import StorageWeakRef

from samestep import Training
from samestep.step.inputs import Stream

folder, size, given, *words = sys.argv[1:]
plan = {
    "limits": [],
    "eval": [],
    "at": "forward",
    "faults": [],
    "later": {},
    "kill": 0,
    **json.loads(given),
}
now = {"step": 0, "place": plan["at"]}
storages = []  # of the activations of attempts that failed
options = {"static_graph": True} if "static" in words else {}
options["find_unused_parameters"] = "sometimes" in words
accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
rank = accelerator.process_index


def fail(place, numbers=0):
    limits = plan["eval"] if place == "eval" else plan["limits"]
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
        fail("backward", gradient.numel() // 16)
        return gradient


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, hidden):
        hidden = torch.tanh(self.inner(hidden))
        storages.append(StorageWeakRef(hidden.untyped_storage()))
        fail("middle", hidden.numel() // 16)
        return Planted.apply(hidden)


class Model(torch.nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(16, 32)
        self.passes, self.queue, self.hidden = 0, [], None
        if "buffer" in words:
            self.register_buffer("mean", torch.zeros(()))
        if "large" in words:
            self.register_buffer("kept", torch.zeros(30_000_000))
        if "sometimes" in words:
            self.extra = torch.nn.Parameter(torch.ones(()))
        if "synced" in words:
            self.synced = torch.nn.SyncBatchNorm(16)

    def forward(self, ids):
        fail("forward", ids.numel())
        hidden = self.embed(ids.clamp(min=0))
        if "buffer" in words and self.training:
            self.mean.lerp_(hidden.detach().mean(), 0.1)
            hidden = hidden + self.mean
        if "large" in words and self.training:
            self.kept += 1
        if "state" in words and self.training:
            self.passes += 1
            self.queue = [*self.queue, float(hidden.detach().sum())][-3:]
            hidden = hidden + 1e-3 * sum(self.queue)
        for block in self.blocks:
            hidden = block(hidden)
        if "state" in words:
            self.hidden = hidden
        logits = self.head(hidden)
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
if "stream" in words:
    read = {"__getitems__": lambda rows, places: [(i, rows[i]) for i in places]}
    rows = type("Rows", (list, Stream), read)(rows)
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
    micro_batch_size=int(size) if size.isdigit() else size, collate=collate,
    count=lambda batch: int((batch["ids"][:, 1:] >= 0).sum()), rows_depend="buffer" in words,
    exact="exact" in words,
)  # fmt: skip


def say(*values):
    os.write(1, (" ".join(map(str, values)) + "\n").encode())  # at once


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
                    say("FREE", *(each.expired() for each in failed))
                storages.clear()
                step.backward(lambda batch=batch: model(**batch))
                failed = training.memory and training.memory.is_out and [*storages]
    norm = step.clip(1.0)
    optimizer.step()
    if step.number % 4 == 0:
        now["place"] = "eval"
        loss = float(training.evaluate(rows[:23], eval_sums)["loss"])
        now["place"] = plan["at"]
        say("EVAL", step.number, loss)
    say("LOSS", step.number, step.loss, float(norm))
