"""A script of one's own whose steps change what is no weight: own_state.py KIND FOLDER STEPS.

Each kind is a class: what differs from the plain loop. See test_changes.py.
"""

import hashlib
import os
import random
import sys
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.utils import prune
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
)
from torch.utils.data import Subset, TensorDataset

from samestep import Training


class Kind:
    """The plain loop, and what a kind may change."""

    exact, depend, settings = False, False, {}  # noqa: RUF012
    dataset = TensorDataset

    def __init__(self):
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
        self.inner.append(torch.nn.Linear(8, 1))

    def model(self):
        return self.inner

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def prepared(self):
        """Register what has a state."""

    def before(self, step): ...

    def loss(self, model, x, y):
        return (model(x) - y).square().sum()

    def after(self, step): ...


class Net(torch.nn.Module):
    """A model around the inner one, with more attributes."""

    def __init__(self, inner, **values):
        super().__init__()
        self.inner = inner
        for name, value in values.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.inner(x)


# ---- What a forward pass changes -----------------------------------------------------------------


class Count(Net):  # a warm-up inside the model
    def forward(self, x):
        self.calls += self.training
        return self.inner(x) * min(1, 0.05 * self.calls)


class Hooked(Net):  # a library's way: hooks of the first pass, of which a private flag tells
    def forward(self, x):
        if not self._hooked:
            self.inner[0].register_forward_hook(lambda module, given, y: 1.1 * y)
            self._hooked = True
        return self.inner(x)


class Queue(Net):  # keys of before, in an attribute
    def forward(self, x):
        y = self.inner(x) + self.queue.mean()
        if self.training:
            self.queue = torch.cat([y.detach().flatten(), self.queue])[:6]
        return y


class Bank(Net):  # what batches have left, which the loss reads once there are six
    def forward(self, x):
        y = self.inner(x)
        if self.training:
            self.bank = [*self.bank, y.detach().mean()][-6:]
        return y + (0.1 * sum(self.bank) if len(self.bank) == 6 else 0)


class Branch(Net):  # a draw of the model's own that changes nothing yet
    def forward(self, x):
        if self.training and self.noise.random() < 1e-9:
            return 2 * self.inner(x)
        return self.inner(x)


class Centered(Net):  # a buffer that each batch replaces
    def __init__(self, inner):
        super().__init__(inner)
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("wide", torch.ones(1).expand(4), persistent=False)

    def forward(self, x):
        if self.training:
            self.center = 0.9 * self.center + 0.1 * x.mean(0)
        return self.inner(x * self.wide - self.center)


class Kept(Net):  # activations that a hook keeps, and an auxiliary loss: results
    def forward(self, x):
        self.hidden = self.inner[0](x)
        self.losses = {"aux": self.hidden.square().mean()}
        return self.inner[2](self.hidden.tanh()) + 0 * self.losses["aux"]


class Noisy(Net):  # noise from a generator of the model's own
    def forward(self, x):
        draw = torch.randn(1, generator=self.noise) if self.training else torch.zeros(1)
        return self.inner(x) + 0.1 * draw


class Rotary(Net):  # a cache that grows with the longest row, as in transformers
    def __init__(self, inner):
        super().__init__(inner, longest=0)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x):
        if len(x) > self.longest:
            self.longest = len(x)
            self.cache = torch.arange(len(x) + 0.0)
        return self.inner(x) + 0 * self.cache[: len(x), None]


class Observer(Net):  # a running mean in a buffer that no state_dict has
    def __init__(self, inner):
        super().__init__(inner)
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x):
        if self.training and getattr(self, "watches", True):
            self.mean.lerp_(x.mean(0), 0.1)
        return self.inner(x - self.mean)


class Codebook(Net):
    def forward(self, x):
        if self.training:
            self.code.data.lerp_(x.mean(0), 0.1)
        return self.inner(x - self.code.detach())


def wrapped(net, **values):
    """A kind with this model."""

    class Wrapped(Kind):
        def model(self):
            fresh = {name: value() for name, value in values.items()}
            return net(self.inner, **fresh)

    return Wrapped


count, queue = wrapped(Count, calls=int), wrapped(Queue, queue=lambda: torch.zeros(6))
hooked = wrapped(Hooked, _hooked=bool)
kept, rotary, observer = wrapped(Kept, hidden=type(None)), wrapped(Rotary), wrapped(Observer)
bank, centered = wrapped(Bank, bank=list), wrapped(Centered)
branch = wrapped(Branch, noise=lambda: np.random.default_rng(3))
noisy = wrapped(Noisy, noise=lambda: torch.Generator().manual_seed(3))
codebook = wrapped(Codebook, code=lambda: torch.nn.Parameter(torch.zeros(4), requires_grad=False))


class late_observer(observer):  # noqa: N801
    def before(self, step):
        bare.watches = step.number > 2


# ---- What the body changes after the batches -----------------------------------------------------


class teacher(Kind):  # noqa: N801
    """A momentum teacher inside the model."""

    def model(self):
        copy = torch.nn.Linear(4, 1).requires_grad_(False)
        return Net(self.inner, teacher=copy)

    def loss(self, model, x, y):
        teacher = bare.teacher(x)
        return super().loss(model, x, y) + (model(x) - teacher).square().sum()

    def after(self, step):
        bare.teacher.weight.lerp_(bare.inner[0].weight[:1], 0.2)


class hidden_teacher(teacher):  # noqa: N801
    """In a list, so that no state_dict has it."""

    def model(self):
        return Net(self.inner, teachers=[torch.nn.Linear(4, 1).requires_grad_(False)])

    def loss(self, model, x, y):
        return Kind.loss(self, model, x, y) + (model(x) - bare.teachers[0](x)).square().sum()

    def after(self, step):
        bare.teachers[0].weight.lerp_(bare.inner[0].weight[:1], 0.2)


class rate(Kind):  # noqa: N801
    """A rate of dropout that falls at one step."""

    def model(self):
        return Net(torch.nn.Sequential(torch.nn.Dropout(0.5), *self.inner))

    def after(self, step):
        if step.number == 2:
            bare.inner[0].p = 0.1


@dataclass(slots=True)
class Heat:
    value: float = 1.0


class heated(Kind):  # noqa: N801
    """A number of an object that has no __dict__."""

    def model(self):
        return Net(self.inner, heat=Heat())

    def loss(self, model, x, y):
        return super().loss(model, x, y) * bare.heat.value

    def after(self, step):
        bare.heat.value *= 1.5


@dataclass(frozen=True)
class Scales:
    first: float
    others: tuple


class flag(Kind):  # noqa: N801
    """A private flag, which is set at a step, beside settings that are read-only."""

    def model(self):
        return Net(self.inner, _warm=False, scales=Scales(2.0, (3.0, torch.ones(1))))

    def loss(self, model, x, y):
        scale = bare.scales.first
        if bare._warm:
            scale = bare.scales.others[0]
        return super().loss(model, x, y) * scale

    def after(self, step):
        bare._warm = step.number >= 2


class Fixed(dict):
    """A dict that cannot be written, such as diffusers' FrozenDict."""

    update = clear = __setitem__ = None


class graph(Kind):  # noqa: N801
    """Attributes that cannot be written or saved, and that no step changes."""

    def model(self):
        given = np.arange(3.0)
        given.setflags(write=False)
        around = [1]
        around.append(around)
        edges = torch.eye(4).to_sparse()
        names, mask = np.array(["a", "b"]), torch.ones(1).expand(4)
        config = Fixed(kind="small", names=names)
        return Net(self.inner, edges=edges, given=given, around=around, mask=mask, config=config)

    def loss(self, model, x, y):
        return super().loss(model, (bare.edges @ x.T).T * bare.mask, y)


class rewired(graph):  # noqa: N801
    def after(self, step):
        if step.number == 3:
            bare.edges = 2 * bare.edges


class history(Kind):  # noqa: N801
    """Norms of before, in a deque of the model; a generator of Python's and one of NumPy's."""

    def model(self):
        more = {"random": random.Random(3), "numpy": np.random.default_rng(3)}
        return Net(self.inner, norms=deque(maxlen=3), **more)

    def before(self, step):
        self.scale = 1 + 0.1 * sum(bare.norms) * bare.numpy.random()

    def loss(self, model, x, y):
        return super().loss(model, x, y) * self.scale

    def after(self, step):
        bare.norms.append(round(float(step.norm), 3) * bare.random.random())


class experiment(Kind):  # noqa: N801
    """Counters and times of a script's own, registered and not: harmless."""

    def prepared(self):
        self.steps, self.began = 0, time.time()
        accelerator.register_for_checkpointing(self)

    def state_dict(self):
        return {"steps": self.steps, "seconds": time.time() - self.began}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def after(self, step):
        self.steps += 1
        bare.updates = step.number


class Levels(TensorDataset):
    """Rows whose scale is set by the loop."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.level = 1.0

    def __getitem__(self, place):
        x, y = super().__getitem__(place)
        return x * self.level, y


class curriculum(Kind):  # noqa: N801
    dataset = Levels

    def before(self, step):
        rows.level = 1 + 0.1 * step.number


class late_curriculum(Kind):  # noqa: N801
    """A level of a dataset inside, which is as at the start again when a step is saved."""

    def dataset(self, *tensors):
        return Subset(Levels(*tensors), range(300))

    def before(self, step):
        rows.dataset.level = 1 + 0.1 * step.number

    def after(self, step):
        rows.dataset.level = 1.0


class Shards(TensorDataset):
    """Rows of the shard that was read last, which is kept."""

    shard = -1

    def __getitem__(self, place):
        if place // 100 != self.shard:
            self.shard = place // 100
            first = 100 * self.shard
            self.kept = [values[first : first + 100] for values in self.tensors]
        return tuple(values[place % 100] for values in self.kept)


class shards(late_curriculum):  # noqa: N801
    def dataset(self, *tensors):
        return Subset(Shards(*tensors), range(300))


class Caching(TensorDataset):
    """Rows that keep what they drew when they were read first."""

    kept: dict = {}  # noqa: RUF012

    def __getitem__(self, place):
        if place not in self.kept:
            x, y = super().__getitem__(place)
            self.kept[place] = x + torch.randn(4), y
        return self.kept[place]


class caching(Kind):  # noqa: N801
    dataset = Caching


class outside_draws(Kind):  # noqa: N801
    """What is drawn before and after the batches."""

    def before(self, step):
        self.mix = 0.5 + torch.rand(()).item() + np.random.rand() + random.random()

    def loss(self, model, x, y):
        return super().loss(model, x, y) * self.mix

    def after(self, step):
        if step.number % 2:
            training.evaluate(rows, lambda m, b: {"n": m(b[0]).sum()})
        bare[0].weight.data.add_(0.01 * torch.randn(8, 4))


# ---- Which weights train -------------------------------------------------------------------------


class unfreeze(Kind):  # noqa: N801
    def model(self):
        self.inner[0].requires_grad_(False)
        return self.inner

    def before(self, step):
        if step.number == 3:
            bare[0].requires_grad_(True)


class freeze(Kind):  # noqa: N801
    def before(self, step):
        if step.number == 3:
            bare[0].requires_grad_(False)


class turns(Kind):  # noqa: N801
    """Halves in turn."""

    def before(self, step):
        bare[0].requires_grad_(step.number % 2 == 0)
        bare[2].requires_grad_(step.number % 2 == 1)


class joins(unfreeze):  # noqa: N801
    """A layer joins the optimizer at a step."""

    def optimizer(self, model):
        return torch.optim.AdamW(model[2].parameters(), lr=1e-2)

    def before(self, step):
        if step.number == 3:
            bare[0].requires_grad_(True)
            optimizer.optimizer.add_param_group({"params": [*bare[0].parameters()], "lr": 3e-3})


# ---- What an optimizer and a scheduler keep ------------------------------------------------------


class Own(torch.optim.Optimizer):
    """SGD whose rate falls by a count in its state, one of its own, and one of the group."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2, "k": 0})
        self.n, self.seen = 0, []

    @torch.no_grad()
    def step(self, closure=None):
        state = self.state["all"]
        state["mean"] = 0.9 * state.get("mean", torch.zeros(())) + 0.1
        self.n += 1
        self.seen = [*self.seen, float(self.n)][-3:]
        for group in self.param_groups:
            group["k"] += 1
            scale = group["lr"] / (1 + self.n + group["k"] + state["mean"] + sum(self.seen))
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(scale * p.grad)


class Twice(torch.optim.SGD):
    """Its step calls that of its base."""

    def step(self, closure=None):
        return super().step(closure)


class super_step(Kind):  # noqa: N801
    def optimizer(self, model):
        return Twice(model.parameters(), lr=1e-2, momentum=0.9)


class own_optimizer(Kind):  # noqa: N801
    def optimizer(self, model):
        return Own(model.parameters())


class odd_moment(Kind):  # noqa: N801
    """A list in the optimizer's state of a weight."""

    def after(self, step):
        optimizer.state[bare[0].weight]["GG"] = [torch.ones(1)]


class complex_moment(Kind):  # noqa: N801
    def after(self, step):
        optimizer.state[bare[0].weight]["phase"] = torch.ones(1, dtype=torch.complex128)


class plateau(Kind):  # noqa: N801
    """A scheduler that follows a loss."""

    def prepared(self):
        self.scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        accelerator.register_for_checkpointing(self.scheduler)

    def after(self, step):
        self.scheduler.step(1.0)


class lost_plateau(plateau):  # noqa: N801
    def prepared(self):
        self.scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


class by_hand(Kind):  # noqa: N801
    """A scheduler written by hand, which nobody saves."""

    def prepared(self):
        self.held, self.n = optimizer, 0

    def after(self, step):
        self.n += 1
        self.held.param_groups[0]["lr"] = 1e-2 / self.n


class fleeting(by_hand):  # noqa: N801
    """The same, with a number that is deleted."""

    def prepared(self):
        super().prepared()
        self.first = 1

    def after(self, step):
        super().after(step)
        if self.n == 2:
            del self.first


class cosine(Kind):  # noqa: N801
    total = 6

    def prepared(self):
        self.scheduler = accelerator.prepare(CosineAnnealingLR(optimizer.optimizer, self.total))

    def after(self, step):
        self.scheduler.step()


class longer_cosine(cosine):  # noqa: N801
    total = 12


class lambdas(cosine):  # noqa: N801
    base = 0.9

    def prepared(self):
        base = self.base
        self.scheduler = LambdaLR(optimizer.optimizer, lambda n: base**n)
        accelerator.register_for_checkpointing(self.scheduler)


class two_schedulers(cosine):  # noqa: N801
    """Of one kind."""

    second = 0.9

    def prepared(self):
        rates = (0.99, self.second)
        self.scheduler = accelerator.prepare(
            *(ExponentialLR(optimizer.optimizer, r) for r in rates)
        )

    def after(self, step):
        for scheduler in self.scheduler:
            scheduler.step()


class other_second(two_schedulers):  # noqa: N801
    second = 0.8


class one_cycle(cosine):  # noqa: N801
    part = 0.3

    def prepared(self):
        scheduler = OneCycleLR(optimizer.optimizer, 1e-2, total_steps=12, pct_start=self.part)
        self.scheduler = accelerator.prepare(scheduler)


class other_part(one_cycle):  # noqa: N801
    part = 0.5


class other_kind(cosine):  # noqa: N801
    def prepared(self):
        self.scheduler = accelerator.prepare(ExponentialLR(optimizer.optimizer, 0.9))


class other_lambdas(lambdas):  # noqa: N801
    base = 0.8


class other_rate(Kind):  # noqa: N801
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=2e-2)


class other_groups(Kind):  # noqa: N801
    def optimizer(self, model):
        first, *others = model.parameters()
        return torch.optim.AdamW([{"params": others}, {"params": [first]}], lr=1e-2)


class other_row(Kind):  # noqa: N801
    pass


# ---- Mistakes ------------------------------------------------------------------------------------


class baseline(Kind):  # noqa: N801
    """A running mean of the loop's own, beside dropout."""

    depend, mean = True, 0.0

    def loss(self, model, x, y):
        loss = super().loss(model, x, y)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss * (1 + self.mean + 0 * torch.rand(()).item())


class own_queue(Kind):  # noqa: N801
    """Rows of before, kept by the loop."""

    depend, rows = True, torch.zeros(2, 4)

    def loss(self, model, x, y):
        loss = super().loss(model, x, y) + model(self.rows).sum()
        self.rows = x[:2].clone()
        return loss


class own_numpy(Kind):  # noqa: N801
    draw = np.random.default_rng(3)

    def loss(self, model, x, y):
        return super().loss(model, x, y) * (1 + self.draw.random()) + 0 * torch.randn(()).item()


class outside(Kind):  # noqa: N801
    """A temperature that is no part of the model."""

    scale = torch.nn.Parameter(torch.ones(()))

    def loss(self, model, x, y):
        return super().loss(model, x, y) * self.scale


class outside_tensor(outside):  # noqa: N801
    scale = torch.ones((), requires_grad=True)


class penalty(Kind):  # noqa: N801
    """A gradient penalty: the inputs have gradients, and that is right."""

    def loss(self, model, x, y):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return super().loss(model, x.detach(), y) + slope.square().sum()


class forgotten(Kind):  # noqa: N801
    def optimizer(self, model):
        return torch.optim.AdamW(model[0].parameters(), lr=1e-2)


class pruned(Kind):  # noqa: N801
    def after(self, step):
        if step.number == 2:
            prune.l1_unstructured(bare[0], "weight", 0.5)


class still(Kind):  # noqa: N801
    def after(self, step):
        if step.number == 2:
            bare.eval()


class second_optimizer(Kind):  # noqa: N801
    def prepared(self):
        accelerator.prepare(torch.optim.SGD(bare.parameters(), lr=1e-3))


class set_setting(Kind):  # noqa: N801
    settings = {"words": {"a", "b"}}  # noqa: RUF012


class tensor_setting(Kind):  # noqa: N801
    settings = {"weights": {"of": [torch.ones(2)]}}  # noqa: RUF012


class nan_setting(Kind):  # noqa: N801
    settings = {"threshold": float("nan")}  # noqa: RUF012


class average(Kind):  # noqa: N801
    """A meter of the losses of this process, registered: it differs between processes."""

    mean = torch.zeros(())

    def prepared(self):
        accelerator.register_for_checkpointing(self)

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]

    def after(self, step):
        self.mean = step.losses[-1] * 0.5


# ---- What `samestep rehearse` finds, and what it leaves alone ------------------------------------


class Average:
    def __init__(self, model):
        self.shadow = [p.detach().clone() for p in model.parameters()]


class ema(Kind):  # noqa: N801
    """An average of the weights that nobody saves, and no loss depends on."""

    def prepared(self):
        self.ema = Average(bare)

    def after(self, step):
        for average, p in zip(self.ema.shadow, bare.parameters(), strict=True):
            average.lerp_(p, 0.1)


class late_mean(Kind):  # noqa: N801
    """A running mean that changes after the batches, of the loop's own."""

    def prepared(self):
        self.mean = 0.0

    def loss(self, model, x, y):
        return super().loss(model, x, y) * (1 + self.mean)

    def after(self, step):
        self.mean = 0.9 * self.mean + 0.1 * step.loss


class stream(Kind):  # noqa: N801
    """Numbers of a generator of the loop's own, drawn before the batches."""

    def prepared(self):
        self.draw = random.Random(3)

    def before(self, step):
        self.scale = 1 + self.draw.random()

    def loss(self, model, x, y):
        return super().loss(model, x, y) * self.scale


class by_rank(Kind):  # noqa: N801
    def loss(self, model, x, y):
        return super().loss(model, x, y) * (1 + 0.1 * accelerator.process_index)


class by_world(Kind):  # noqa: N801
    def loss(self, model, x, y):
        return super().loss(model, x, y) / accelerator.num_processes


class by_batch(Kind):  # noqa: N801
    """A loss that depends on the size of its batch where the loop is not tried."""

    def loss(self, model, x, y):
        return super().loss(model, x, y) * (1 + 0.01 * len(x) * (training.current.number > 1))


class new_rows(Kind):  # noqa: N801
    """Other rows at each start, none of the 64 that are read first."""

    def prepared(self):
        rows.tensors[0][1::7] += int.from_bytes(os.urandom(2), "big") / 65536


class still_weight(Kind):  # noqa: N801
    """Harmless, and worth a line: a weight whose learning rate is 0."""

    def optimizer(self, model):
        first, *others = model.parameters()
        groups = [{"params": others}, {"params": [first], "lr": 0.0, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)


class notes(Kind):  # noqa: N801
    """A list of losses, a cache of rows, times: harmless."""

    def prepared(self):
        self.losses, self.cache, self.began = [], {}, time.time()

    def after(self, step):
        self.losses.append(step.loss)
        self.cache[step.number] = torch.full((2,), float(step.number))
        self.seconds = torch.tensor(time.time() - self.began)


kind, folder, steps, *options = sys.argv[1:]
accelerator = Accelerator()
set_seed(0)
this = globals()[kind]()
x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
if kind == "other_row":
    x[1] += 1  # none of the 64 that are read first
rows = this.dataset(x, x.sum(1, keepdim=True))
model = this.model()
optimizer = this.optimizer(model)
model, optimizer = accelerator.prepare(model, optimizer)
bare = accelerator.unwrap_model(model)
this.prepared()
training = Training(
    accelerator, model, optimizer, rows, folder=folder, seed=0, global_batch_size=12,
    micro_batch_size=2, exact="exact" in options, rows_depend=this.depend, keep_checkpoints=0,
    settings=this.settings, accept_changes="accept" in options,
)  # fmt: skip
for step in training.steps(int(steps), save_every=2):
    this.before(step)
    for batch in step:
        with accelerator.accumulate(model):
            step.backward(lambda batch=batch: this.loss(model, *batch))
    step.clip(1.0)
    optimizer.step()
    with torch.no_grad():
        this.after(step)
content = b"".join(p.detach().numpy().tobytes() for p in bare.parameters())
print("loss", step.loss, "rate", optimizer.param_groups[0]["lr"])
print("SHA", hashlib.sha256(content).hexdigest()[:16], flush=True)
