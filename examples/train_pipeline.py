"""Trains what task.py describes as train.py does, with the layers of its model dealt to stages.

    accelerate launch --config_file configs/accelerate/multi_gpu_bf16.yaml --num_processes 4 \\
        train_pipeline.py --stages 4 --micro_batch_size 2
    torchrun --nproc_per_node 4 train_pipeline.py --stages 2 --micro_batch_size 2
    python train_pipeline.py --help

A stage is a process with some of the layers, and neighbours are the stages of one replica: the
second command has two replicas of two stages. The micro-batches of a step pass through the stages
by 1F1B, of torch.distributed.pipelining. Samples, losses, norms, learning rates and checkpoints are
those of train.py: a run moves there and back.
"""

import samestep.base.preflight  # noqa: F401  # isort: skip
import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import send_to_device
from pydantic import Field
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import task
import train
from samestep import Ranks, Run, RunStart, Training, finish, prepare_run, write_evaluation
from samestep.launch import device, shutdown
from samestep.launch.launched import STAGES, TP
from samestep.models import next_token
from samestep.processes.sharding import full_tensor, local
from samestep.settings.config import ONE_COMMAND, parse_config
from samestep.step.model import TaskModule

Batch = dict[str, torch.Tensor]


@dataclass
class Config(train.Config):
    # Pipeline
    stages: Annotated[int, Field(ge=2, le=1000)] = field(default=2, metadata=ONE_COMMAND)
    """Processes that share the layers of a model. A step needs as many micro-batches at least."""
    tensor_parallel: Annotated[int, Field(ge=1, le=1000)] = field(default=1, metadata=ONE_COMMAND)
    """Processes that share each matrix of a stage."""


# ---- Stages of a model ---------------------------------------------------------------------------


class Elsewhere(torch.nn.Module):
    """Stands for what another stage has. It gives back what it gets; in place of the embedding,
    `states`, which the stage before has computed."""

    states: torch.Tensor | None = None

    def forward(self, given, *_, **__):
        return given if self.states is None else self.states


def cut(model: Any, stage: int, stages: int) -> Any:
    """One stage, which shares its weights with `model`: some layers, in the first stage the
    embedding, in the last the norm and the head. Names of weights, the number of layers, the rotary
    embedding and the masks stay as they are."""
    part = copy.copy(model)
    part._modules = {**model._modules}
    part.model = decoder = copy.copy(model.model)
    decoder._modules = {**model.model._modules}
    count = len(model.model.layers)
    own = range(count * stage // stages, count * (stage + 1) // stages)
    layers = [layer if i in own else Elsewhere() for i, layer in enumerate(model.model.layers)]
    decoder.layers = torch.nn.ModuleList(layers)
    if stage:
        decoder.embed_tokens = Elsewhere()
    if stage < stages - 1:
        decoder.norm = Elsewhere()
        part.lm_head = None
    return part


def missing(model: Any, part: Any) -> Batch:
    """The weights of the model that a stage lacks, by name: their shapes, on the meta device."""
    own = part.state_dict().keys()
    shapes = {n: (v.shape, v.dtype) for n, v in model.state_dict().items() if n not in own}
    return {n: torch.empty(s, dtype=d, device="meta") for n, (s, d) in shapes.items()}


def decode(part: Any, batch: Batch) -> torch.Tensor:
    """The hidden states that the decoder makes of a batch: (B, T, H)."""
    return part.model(**next_token.model_inputs(part, batch))[0]


def compute(part: Any, function: Callable, batch: Batch, states: torch.Tensor | None) -> Any:
    """function(model, batch) in the last stage; in others the hidden states for the next one."""
    part.model.embed_tokens.states = states
    return decode(part, batch) if part.lm_head is None else function(part, batch)


@torch.no_grad()
def check_cut(model: Any, stages: int, eval_sums: Callable, batch: Batch) -> Batch:
    """Raises ValueError for a model that so many stages do not make up. Returns the task's sums."""
    name, plan = type(model).__name__, getattr(model, "config", None)
    plan = {*(getattr(plan, "base_model_pp_plan", None) or {})}
    known = hasattr(model, "decisions") and plan == {"embed_tokens", "layers", "norm"}
    if not known or hasattr(model, "peft_config") or batch["input_ids"].ndim != 2:
        raise ValueError(f"{name} cannot be cut into stages; give a decoder of causal_lm, no LoRA")
    count = model.config.num_hidden_layers
    if count < stages:
        raise ValueError(f"{stages} stages need as many layers, and {name} has {count}")
    if any(getattr(m, "attention_dropout", 0) or getattr(m, "p", 0) for m in model.modules()):
        raise ValueError(f"{name} has dropout, whose masks would depend on the stages; set it to 0")
    shared = {*model.state_dict()} - {name for name, _ in model.named_parameters()}
    if shared:
        raise ValueError(f"stages of {name} would share {' and '.join(shared)}; use fsdp2.yaml")
    row = {name: (v[:, :8] if v.ndim > 1 else v).to(model.device) for name, v in batch.items()}
    whole, states = decode(model.eval(), row), None
    for stage in range(stages):
        states = compute(cut(model, stage, stages), decode, row, states)
    if not next_token.are_close(whole, states):
        raise ValueError(f"the stages of {name} give other states than the whole; use fsdp2.yaml")
    return eval_sums(model, row)


# ---- The pipeline --------------------------------------------------------------------------------


class Pipeline(TaskModule):
    """The stage of this process, in place of the module that train.py prepares. `model` is the
    task's, without the weights of other stages, whose shapes are in `elsewhere`."""

    def __init__(self, run: Run):
        torch.nn.Module.__init__(self)
        layout, self.run, self.device = run.ranks.layout, run, run.accelerator.device
        self.count, self.tp, self.rank = layout.stages, layout.tp, layout.rank
        self.stage = self.rank // self.tp % self.count
        self.last = self.stage == self.count - 1
        # Groups: this stage in all replicas, the stages of this replica, the parts of this stage.
        grid = torch.arange(layout.processes).view(-1, self.count, self.tp)
        lists = [grid.movedim(along, 2).flatten(0, 1).tolist() for along in range(3)]
        make, limit = dist.new_subgroups_by_enumeration, run.ranks.limit
        self.copies, self.replica, parts = (make(each, timeout=limit)[0] for each in lists)
        mesh = DeviceMesh.from_group(parts, self.device.type)
        run.accelerator.state.device_mesh = {"tp": mesh}  # for build_model, which splits matrices
        model, batch = run.build_model(run.accelerator), run.task.collate([run.start.views[1][0]])
        with run.ranks.fail_together():
            if hasattr(run.task, "eval_outputs"):
                raise ValueError("stages do not support task.eval_outputs; use fsdp2.yaml")
            sums = check_cut(model, self.count, run.task.eval_sums, batch)
        self.zeros = {name: torch.zeros_like(values) for name, values in sums.items()}
        self.model = cut(model, self.stage, self.count).to(self.device)
        elsewhere = missing(model, self.model).items()
        self.elsewhere = {f"model.{name}": values for name, values in elsewhere}

        self.width = model.config.hidden_size  # stages exchange hidden states of one shape, in fp32
        ids = batch["input_ids"].expand(run.plan.largest, -1).to("meta")
        states, turn = self.empty_states(ids).requires_grad_(), torch.nn.Module()
        turn.forward = self.take_turn
        ends = states if self.stage else ids, torch.empty(1) if self.last else states
        stage = PipelineStage(turn, self.stage, self.count, self.device, *ends, group=self.replica)
        turns, mean_loss = len(run.plan.run()), lambda loss, _: loss[0]
        self.schedule = Schedule1F1B(stage, turns, loss_fn=mean_loss, scale_grads=False)

    def empty_states(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty(*ids.shape, self.width, device=ids.device)

    def compute(self, function, batch: Batch, states: torch.Tensor | None):
        """What this stage makes of a batch, in the precision of the YAML."""
        with self.run.accelerator.autocast():
            result = compute(self.model, function, batch, states)
        return result if self.last else result.float()

    def forward(self, function, batch: Batch):
        """function(model, batch) in the last stage; in others zeros, like sums of an evaluation."""
        states = self.empty_states(batch["input_ids"]) if self.stage else None
        if self.stage:
            dist.recv(states, self.rank - self.tp, group=self.replica)
        result = self.compute(function, batch, states)
        if self.last:
            return result
        dist.send(result.contiguous(), self.rank + self.tp, group=self.replica)
        return self.zeros

    def take_turn(self, states: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        """What this stage makes of a micro-batch in training; the last one its part of the mean
        loss, (1,): NaN unless it is finite, so that all skip the step."""
        result = self.compute(self.run.task.loss_sum, batch, states)
        if not self.last:
            return result
        self.losses.append(result.detach())
        return (result * (1 + 0 * result.detach()) / self.num_items)[None]

    def compute_step(self, micro_batches: list, num_items: int) -> list[torch.Tensor]:
        """Computes the gradient of sum(losses) / num_items for the micro-batches of this replica.
        Returns the losses; zeros before the last stage."""
        self.num_items = max(num_items, 1)
        self.losses = []
        batches = [each.batch for each in micro_batches]
        batch = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
        batch = send_to_device(batch, self.device, non_blocking=True)
        first = [] if self.stage else [batch["input_ids"]]
        self.schedule.step(*first, target=batch["labels"], **batch)
        self.meter.stopwatch.stop()
        return self.losses or [torch.zeros((), device=self.device)] * len(batches)

    def reduce(self) -> None:
        """`clip` adds up the gradients of the replicas."""

    def clip(self, max_norm: float) -> torch.Tensor:
        """Adds up the gradients of the replicas, and scales them down to this norm over all stages;
        0: never. Gives the norm before that, float32 ()."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        for each in [dist.all_reduce(local(g), group=self.copies, async_op=True) for g in grads]:
            each.wait()
        square = torch.stack([full_tensor(g.norm()) for g in grads]).square().sum()
        dist.all_reduce(square, group=self.replica)
        scale = ((max_norm or torch.inf) / (square.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(g) for g in grads], scale)
        return square.sqrt()

    def state_dict(self, *_, **__) -> Batch:
        """All weights on the main process, for the export, which all processes must call."""
        own = {f"model.{name}": full_tensor(v) for name, v in self.model.state_dict().items()}
        everywhere = self.run.ranks.gather([*own])[: self.count * self.tp : self.tp]
        for stage, name in [(i, name) for i, names in enumerate(everywhere) for name in names]:
            rank = stage * self.tp
            if self.rank == rank > 0:
                dist.send(own[name].contiguous(), 0, group=self.replica)
            elif self.rank == 0 < rank:
                own[name] = torch.empty_like(self.elsewhere[name], device=self.device)
                dist.recv(own[name], rank, group=self.replica)
                own[name] = own[name].cpu()
        return own


# ---- Training ------------------------------------------------------------------------------------


def main(start: RunStart, ranks: Ranks, stop: shutdown.StopRequest) -> int:
    """Trains, evaluates, saves and exports: the loop of train.py, which explains it."""
    run = Run(start, ranks, stop)
    cfg = run.cfg
    if run.nothing_to_do:
        return run.print_summary()
    options = device.accelerator_options(cfg)
    tracker = None if cfg.tracker == "none" else cfg.tracker
    accelerator = Accelerator(log_with=tracker, project_dir=cfg.output_dir, **options)
    run.set_accelerator(accelerator)
    pipeline = Pipeline(run)
    optimizer = train.build_optimizer(pipeline.model, cfg)
    with run.preparing(pipeline.model, optimizer):
        optimizer = accelerator.prepare(optimizer)
    training = Training(accelerator, pipeline, optimizer, run.rows, **run.options)
    training.gradients, pipeline.meter = pipeline, training.meter
    if cfg.eval_only:
        return write_evaluation(training, train.evaluate(training))
    if training.lacks_scores(cfg.eval_every, run.max_steps):
        training.score(train.evaluate(training))

    for step in training.steps(run.max_steps):
        for group in optimizer.param_groups:
            group["lr"] = train.lr_at(step.number, cfg, run.max_steps)
        step.losses = pipeline.compute_step(step.micro_batches, step.items)
        step.reduce()
        step.clip(cfg.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        training.log(step)
        to_evaluate = step.due(cfg.eval_every)
        if step.due(cfg.save_every) or (to_evaluate and cfg.export == "best"):
            training.save()
        if to_evaluate:
            training.score(train.evaluate(training))
    accelerator.wait_for_everyone()
    return finish(training, train.evaluate)


def prepare() -> RunStart:
    """What needs no model. The library reads the number of stages from the environment."""
    cfg, *_ = parse_config(Config, sys.argv[1:], __doc__)
    os.environ[STAGES], os.environ[TP] = str(cfg.stages), str(cfg.tensor_parallel)
    start = prepare_run(Config, task, __doc__)
    if cfg.check:
        del os.environ[STAGES]  # one process checks for all
    if start.plan.samples % start.plan.count:
        raise ValueError(
            f"stages need micro-batches of one size, and a step has {start.plan.describe()}; give "
            "a global_batch_size that micro_batch_size x replicas divides"
        )
    most = start.plan.samples // len(start.plan.shares) // cfg.stages
    remedy = f"micro_batch_size of at most {most}" if most else "larger global_batch_size"
    if len(start.plan.run()) < cfg.stages:
        needed = f"{cfg.stages} stages need as many micro-batches in a step"
        raise ValueError(f"{needed}; give a {remedy}")
    return start


if __name__ == "__main__":
    shutdown.run(main, prepare)
