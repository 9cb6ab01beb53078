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

import samestep.base.begin  # noqa: F401  # isort: skip
import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import task
import train
from samestep.base.fields import check_pairs, number_type, refuse
from samestep.models import next_token
from samestep.processes import device, shutdown
from samestep.processes.ranks import Ranks, as_user_error
from samestep.settings.config import ONE_COMMAND, parse_config
from samestep.settings.mesh import STAGES
from samestep.start.startup import RunStart, prepare_run
from samestep.step.monitor import one_or_nan, skip_unless_finite
from samestep.training.ending import export, finish
from samestep.training.loading import EvalLoader, TrainLoader
from samestep.training.log import RunLog
from samestep.training.run import Run
from samestep.training.saving import Saver

Batch = dict[str, torch.Tensor]


@dataclass
class Config(train.Config):
    # Pipeline
    stages: number_type("Stages", int, 2, 1000) = field(default=2, metadata=ONE_COMMAND)
    """Processes that share the layers of a model. A step needs as many micro-batches at least."""


# ---- Stages of a model ---------------------------------------------------------------------------


class Elsewhere(torch.nn.Module):
    """Stands for what another stage has, so that names stay. It gives back what it gets, or for the
    embedding `states`, which the stage before has sent."""

    states = None

    def forward(self, given, *_, **__):
        return given if self.states is None else self.states


def part_of(model: Any, stage: int, stages: int) -> Any:
    """A model with the weights of one stage, which it shares with `model`: some layers, in the
    first stage the embedding, in the last the norm and the head."""
    part, decoder, count = copy.copy(model), copy.copy(model.model), len(model.model.layers)
    part._modules, decoder._modules = {**model._modules}, {**decoder._modules}
    own = range(count * stage // stages, count * (stage + 1) // stages)
    layers = [layer if i in own else Elsewhere() for i, layer in enumerate(decoder.layers)]
    part.model, decoder.layers = decoder, torch.nn.ModuleList(layers)
    if stage:
        decoder.embed_tokens = Elsewhere()
    if stage < stages - 1:
        decoder.norm, part.lm_head = Elsewhere(), None
    return part


def compute(part: Any, function: Callable, batch: Batch, states: torch.Tensor | None) -> Any:
    """function(model, batch) in the last stage, in others the hidden states for the next one,
    (B, T, H). `states` are those of the stage before."""
    part.model.embed_tokens.states = states
    if part.lm_head is not None:
        return function(part, batch)
    return part.model(**next_token.model_inputs(part, part.loss_plan, batch))[0]


def check_stages(model: Any, stages: int, row: Batch) -> Batch:
    """The task's sums of a batch; raises ValueError if the stages of the model do not give them."""
    name, decoder = type(model).__name__, getattr(model, "model", None)
    known = hasattr(model, "loss_plan") and row["input_ids"].ndim == 2  # not of preferences
    known = known and all(hasattr(decoder, part) for part in ("embed_tokens", "layers", "norm"))
    refuse((not known, f"{name} cannot be cut into stages; take causal_lm, or fsdp2.yaml"))
    rates = [getattr(m, "attention_dropout", 0) or getattr(m, "p", 0) for m in model.modules()]
    layers, tied = len(decoder.layers), decoder.embed_tokens.weight is model.lm_head.weight
    refuse(
        (layers < stages, f"{stages} stages need as many layers, and {name} has {layers}"),
        (any(rates), f"{name} has dropout, whose masks would depend on the stages; set it to 0"),
        (tied, f"embedding and head of {name} are one weight of two stages; use fsdp2.yaml"),
    )
    row = {name: values[:, :8] if values.ndim > 1 else values for name, values in row.items()}
    row["labels"] = row["input_ids"]
    sums, states = task.eval_sums(model.eval(), row), None
    for stage in range(stages):
        states = compute(part_of(model, stage, stages), task.eval_sums, row, states)
    wrong = not torch.allclose(states["loss"], sums["loss"], rtol=1e-4)
    refuse((wrong, f"the stages of {name} give another loss than the whole; use fsdp2.yaml"))
    return sums


class Turn(torch.nn.Module):
    """What PipelineStage calls for each micro-batch."""

    def __init__(self, pipeline: "Pipeline"):
        super().__init__()
        self.pipeline = pipeline

    def forward(self, states, **batch):
        result = self.pipeline.compute(task.loss_sum, batch, states)
        return result[None] if self.pipeline.last else result


class Pipeline(torch.nn.Module):
    """The stage of this process, in place of the module that train.py prepares. `model` is the
    task's, without the weights of other stages, whose shapes are in `elsewhere`."""

    def __init__(self, run: Run, model: Any, stages: int):
        super().__init__()
        self.run, self.device, self.rank = run, run.accelerator.device, run.ranks.layout.rank
        self.stage, self.last = self.rank % stages, self.rank % stages == stages - 1
        grid = torch.arange(run.ranks.layout.processes).view(-1, stages)
        self.replica, self.copies = (  # all stages of a replica; one stage of all replicas
            dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=run.ranks.limit)[0]
            for ranks in (grid, grid.T)
        )
        row = task.collate([run.start.data[1][0]])
        with run.ranks.fail_together(), as_user_error(), torch.no_grad():
            sums = check_stages(model, stages, row)
        self.zeros = {name: torch.zeros_like(values) for name, values in sums.items()}
        self.model, whole = part_of(model, self.stage, stages).to(self.device), model.state_dict()
        own = self.model.state_dict()
        self.elsewhere = {f"model.{n}": v.to("meta") for n, v in whole.items() if n not in own}

        # Stages exchange hidden states of one shape, in the type that next_token.py gives them.
        half = run.accelerator.mixed_precision == "bf16" and model.loss_plan.is_split
        self.dtype, self.width = torch.bfloat16 if half else torch.float32, model.config.hidden_size
        ids = row["input_ids"].expand(run.plan.micro_batch_size, -1).to("meta")
        states = self.empty_states(ids).requires_grad_()
        ends = states if self.stage else ids, torch.empty(1) if self.last else states
        stage = PipelineStage(
            Turn(self), self.stage, stages, self.device, *ends, group=self.replica
        )
        turns = len(run.plan.run())
        self.schedule = Schedule1F1B(stage, turns, loss_fn=self.normalize, scale_grads=False)

    def empty_states(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty(*ids.shape, self.width, dtype=self.dtype, device=ids.device)

    def compute(self, function: Callable, batch: Batch, states: torch.Tensor | None) -> Any:
        """That of this stage, in the precision of the YAML."""
        with self.run.accelerator.autocast():
            result = compute(self.model, function, batch, states)
        return result if self.last else result.to(self.dtype)

    def forward(self, function: Callable, batch: Batch) -> Any:
        """function(model, batch) in the last stage; in others zeros, like sums of an evaluation."""
        states = None
        if self.stage:
            states = self.empty_states(batch["input_ids"])
            dist.recv(states, self.rank - 1, group=self.replica)
        result = self.compute(function, batch, states)
        if not self.last:
            dist.send(result.contiguous(), self.rank + 1, group=self.replica)
        return result if self.last else self.zeros

    def gradients(self, micro_batches: list[tuple[int, Batch]], terms: int) -> list[torch.Tensor]:
        """Computes the gradient of sum(losses) / terms, of this stage for the micro-batches of its
        replica. Returns their losses; zeros before the last stage."""
        self.terms, self.losses = max(terms, 1), []
        batches = [batch for _, batch in micro_batches]
        batch = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
        batch = send_to_device(batch, self.device, non_blocking=True)
        first = [] if self.stage else [batch["input_ids"]]
        self.run.meter.stopwatch.start(len(batches))
        with self.run.meter.stopwatch.micro_batch():
            self.schedule.step(*first, target=batch["labels"], **batch)
        return self.losses or [torch.zeros((), device=self.device)] * len(batches)

    def normalize(self, loss: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """What is differentiated; NaN unless the loss is finite, so that all skip the step."""
        self.losses.append(loss.detach()[0])
        return loss[0] * one_or_nan(loss[0]) / self.terms

    def clip(self, max_norm: float) -> torch.Tensor:
        """Adds up the gradients of the replicas, and scales them down to this norm over all stages;
        0: never. Gives the norm before that, float32 ()."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        for work in [dist.all_reduce(each, group=self.copies, async_op=True) for each in grads]:
            work.wait()
        square = torch.nn.utils.get_total_norm(grads).square()
        dist.all_reduce(square, group=self.replica)
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, square.sqrt())
        return square.sqrt()

    def state_dict(self, *_, **__) -> Batch:
        """All weights, on the main process, with the names of the module that train.py prepares: to
        export them. All processes must call it."""
        own = {f"model.{name}": values for name, values in self.model.state_dict().items()}
        names = [*enumerate(self.run.ranks.gather([*own]))][1 : self.replica.size()]
        if self.rank == 0:
            for rank, name in ((rank, name) for rank, each in names for name in each):
                values = torch.empty_like(self.elsewhere[name], device=self.device)
                dist.recv(values, rank, group=self.replica)
                own[name] = values.cpu()
        elif self.rank < self.replica.size():
            for values in own.values():
                dist.send(values.contiguous(), 0, group=self.replica)
        return own


# ---- Training ------------------------------------------------------------------------------------


def main(start: RunStart, ranks: Ranks, stop: shutdown.StopRequest) -> int:
    """Trains, evaluates, saves and exports as train.py does, which explains each step."""
    cfg, run = start.cfg, Run(start, ranks, stop, task)
    if run.nothing_to_do:
        return run.explain()
    tracker = None if cfg.tracker == "none" else cfg.tracker
    options = device.accelerator_options(cfg)
    accelerator = Accelerator(log_with=tracker, project_dir=cfg.output_dir, **options)
    run.use(accelerator)
    if accelerator.is_main_process:
        run.begin()

    # Keep one stage of the model; the optimizer has its weights alone.
    pipeline = Pipeline(run, run.build_model(), cfg.stages)
    optimizer = train.build_optimizer(pipeline.model, cfg)
    with run.preparing(pipeline.model, optimizer):
        optimizer = accelerator.prepare(optimizer)

    train_data, eval_data = start.data
    eval_loader = EvalLoader(run, eval_data)
    train_loader = TrainLoader(run, train_data, eval_loader)
    saver = Saver(run, pipeline, optimizer)
    step, scores = saver.load()
    sums, stopped = None, False
    eval_loader.try_batch(pipeline)
    log = RunLog(run, train_loader)

    stop.training = not cfg.eval_only
    pipeline.train()
    run.meter.start()
    train_loader.fetch()
    while True:
        # Evaluate and save.
        last = step == run.last_step
        if step and not scores and not stopped and train.due(step, cfg.eval_every, last):
            scores, sums = train.evaluate(run, pipeline, eval_loader, can_stop=not last)
            stopped = scores is None
            if scores:
                log.note(**scores)
        if step and (train.due(step, cfg.save_every, last or stopped) or saver.wants(step, scores)):
            saver.save(step, scores, log)
        if last or stopped:
            break

        # Compute the gradient of the next step, of this stage.
        step, scores, sums = step + 1, None, None
        log.begin(step)
        micro_batches, terms = train_loader.take()
        losses = pipeline.gradients(micro_batches, terms)
        train_loader.fetch()

        # Update the weights, unless the gradient is not finite.
        norm = pipeline.clip(cfg.max_grad_norm)
        skip_unless_finite(optimizer, norm)
        lr = train.lr_at(step, cfg, run.last_step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()

        # Log.
        log.add(terms, losses, norm, lr)
        last, stopped = step == run.last_step, train_loader.stop_seen()
        intervals = (cfg.log_every, cfg.eval_every, cfg.save_every)
        if any(train.due(step, every, last or stopped) for every in intervals):
            log.write_means()
        saver.log_commits(log)
    saver.finish(log)

    exported, whole = step, None
    if not stopped:
        if cfg.export == "best" and not cfg.eval_only:
            exported = saver.load_best() or step
        if exported < step or sums is None:
            scores, sums = train.evaluate(run, pipeline, eval_loader, can_stop=False)
        whole = export(run, pipeline, exported, scores)
    accelerator.wait_for_everyone()
    return finish(run, log, saver, whole, sums, exported)


def prepare() -> RunStart:
    """What needs no model. The library reads the number of stages from the environment."""
    cfg, *_ = parse_config(Config, sys.argv[1:], __doc__.split("\n\n")[1].strip())
    remedy, lora = "use train.py", getattr(cfg.task, "lora_rank", 0)
    fields = {"exact": cfg.exact, "compile": cfg.compile, "task.lora_rank": lora}
    check_pairs(*((on, name, "stages", remedy) for name, on in fields.items()))
    os.environ[STAGES] = str(cfg.stages)
    start = prepare_run(Config, task, __doc__)
    turns, most = len(start.plan.run()), start.plan.samples // len(start.plan.shares) // cfg.stages
    give = f"micro_batch_size of at most {most}" if most else "larger global_batch_size"
    refuse((turns < cfg.stages, f"{cfg.stages} stages need as many micro-batches; give a {give}"))
    return start


if __name__ == "__main__":
    shutdown.run(main, prepare)
