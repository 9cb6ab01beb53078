"""Trains what task.py describes on the hardware that an accelerate YAML describes.

    accelerate launch --config_file configs/accelerate/cpu.yaml train.py
    accelerate launch --config_file configs/accelerate/multi_gpu_bf16.yaml train.py
    accelerate launch --config_file configs/accelerate/cpu.yaml train.py \\
        --config configs/train/smoke.yaml --learning_rate 1e-3 --output_dir runs/mine
    python train.py --help

The YAML after --config_file owns the hardware: processes, devices, precision. The recipe after
--config owns the mathematics, and flags override it. The hardware never changes the result: which
samples make up a step and the learning rate are functions of the step, the random numbers of the
step and the micro-batch, and the gradient of a step is that of the sum of its losses over the
number of its loss terms. So the step is the only state of the loop, and the same command, given
again, continues a run that was killed.
"""

import math
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import yaml
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin, send_to_device
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch.utils.data import DataLoader

import checkpoints
import contract
import health
import model_card
import process
import task
import tracking
from command_line import BatchSize, DecayRate, Seconds, Workers
from data_order import Rows, Slices, collate, mix
from process import Ranks, StopRequest, UserError, ask, attempt
from start import Start, prepare_run
from task import TaskConfig
from tracking import IS_MAIN, Log, one_line, say

# ---- Config --------------------------------------------------------------------------------------

# What a change of a field does to a run that continues: metadata of the field. Without it, another
# result: such a change has to be accepted.
NOTHING = {"changes": "nothing"}
ROUNDING = {"changes": "rounding"}  # the same result, but for the last digits and dropout's masks
UNSAVED = {"changes": "nothing", "saved": False}  # of one start alone: not in config.yaml
OCCASION = {**UNSAVED, "occasion": True}  # nor in a recipe: a flag


@dataclass
class Config:
    """Fields of a recipe, each also a flag; what they say holds on any hardware."""

    output_dir: str = field(default="", metadata=NOTHING)
    """Folder of the run; empty: runs/ and the recipe's file name."""
    seed: NonNegativeInt = 0
    """Seed of the weights, the sample order and dropout."""
    resume: str = field(default="auto", metadata=UNSAVED)
    """auto: go on from the newest checkpoint in output_dir; never; or the path of a checkpoint."""
    accept_changes: bool = field(default=False, metadata=OCCASION)
    """Go on from a checkpoint although the data, or fields that change the result, are not those it
    was made with."""
    check: bool = field(default=False, metadata=OCCASION)
    """Check all that can be known without a model, say in one line what was found, and stop."""
    config_file: str = field(default="", metadata=OCCASION)
    """With check: the accelerate YAML to check too."""
    eval_only: bool = field(default=False, metadata=OCCASION)
    """Evaluate the newest checkpoint, or the one that resume names, and stop; train nothing."""
    timeout: Seconds = field(default=1800, metadata=NOTHING)
    """Seconds that a process waits for the others before the run ends with an error."""

    max_steps: NonNegativeInt = 800
    """Optimizer steps to train; 0: num_epochs decides."""
    num_epochs: NonNegativeFloat = 0.0
    """Passes over the training data, in place of max_steps."""
    global_batch_size: BatchSize = 32
    """Samples in an optimizer step, over all processes."""
    micro_batch_size: BatchSize = field(default=32, metadata=ROUNDING)
    """Most samples a device takes at once; lower it when memory runs out. The result stays the same
    to rounding, but for what dropout drops."""
    num_workers: Workers = field(default=0, metadata=NOTHING)
    """Processes that load data for each training process; 0: it loads its own."""

    learning_rate: NonNegativeFloat = 3e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """AdamW's decay of matrices; biases and norms have none."""
    beta1: DecayRate = 0.9
    """AdamW's decay rate of the first moment."""
    beta2: DecayRate = 0.99
    """AdamW's decay rate of the second moment."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this norm; 0: never."""
    max_skipped_steps: NonNegativeInt = field(default=10, metadata=NOTHING)
    """Steps in a row that may be skipped, as their loss or gradient is not finite, before the run
    ends; 0: any number."""
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Course of the learning rate after the warm-up; wsd: constant, then a linear decay."""
    warmup_steps: NonNegativeInt = 50
    """Steps over which the learning rate rises from zero to its peak."""
    decay_share: ClosedUnitInterval = 0.2
    """wsd only: the last share of all steps, in which the learning rate decays."""
    final_lr_share: ClosedUnitInterval = 0.1
    """Learning rate at the end, as a share of the peak."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the peak grows with global_batch_size / reference_batch_size."""
    reference_batch_size: BatchSize = 32
    """Global batch size for which learning_rate was chosen; read by lr_scaling."""

    eval_every: NonNegativeInt = field(default=100, metadata=NOTHING)
    """Steps between evaluations; there is one at the end; 0: only that one."""
    save_every: NonNegativeInt = field(default=200, metadata=NOTHING)
    """Steps between checkpoints; there is one at the end; 0: only that one."""
    keep_checkpoints: NonNegativeInt = field(default=2, metadata=NOTHING)
    """Newest checkpoints to keep, besides the one with the best eval_loss; 0: all."""
    export: Literal["last", "best"] = field(default="last", metadata=NOTHING)
    """Which model is exported at the end: the last, or the one with the smallest eval_loss. For
    best, there is a checkpoint of each evaluation that is the best so far."""
    log_every: PositiveInt = field(default=10, metadata=NOTHING)
    """Steps between lines of metrics.jsonl; their loss is the mean over these steps."""
    tracker: Literal["wandb", "trackio", "tensorboard", "none"] = field(
        default="none", metadata=NOTHING
    )
    """Where metrics go besides metrics.jsonl."""
    project: str = field(default="accelerate", metadata=NOTHING)
    """The tracker's project."""
    upload_code: bool = field(default=False, metadata=NOTHING)
    """W&B: also upload the code, the git commit and the uncommitted changes."""

    compile: bool = False
    """torch.compile: slower to start, faster to run; for GPUs. Dropout's masks are others then."""
    deterministic: bool = False
    """On a GPU: slower kernels, but a continued run is bit-identical to an unbroken one."""
    gradient_checkpointing: bool = field(default=False, metadata=ROUNDING)
    """Recompute activations in the backward pass: less memory, about a third more time."""

    task: TaskConfig = field(default_factory=TaskConfig)
    """What is trained: see task.py."""


# ---- Optimizer and schedule ----------------------------------------------------------------------


def build_optimizer(model: torch.nn.Module, cfg: Config) -> torch.optim.Optimizer:
    """The optimizer: change it here. `lr` is a placeholder; each step sets it from lr_at."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(cfg.beta1, cfg.beta2), fused=True)


def lr_at(step: int, cfg: Config, max_steps: int) -> float:
    """Learning rate of the step with this number, from 0; nothing of a schedule is ever stored."""
    ratio = cfg.global_batch_size / cfg.reference_batch_size
    peak = cfg.learning_rate * ratio ** {"none": 0, "sqrt": 0.5, "linear": 1}[cfg.lr_scaling]
    if step < cfg.warmup_steps:
        return peak * (step + 1) / cfg.warmup_steps
    start = cfg.warmup_steps
    if cfg.lr_schedule == "wsd":
        start = max(start, round(max_steps * (1 - cfg.decay_share)))
    left = min(1 - (step - start) / max(max_steps - start, 1), 1)  # of the decay: 1 down to 0
    if cfg.lr_schedule == "constant":
        left = 1
    elif cfg.lr_schedule == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return peak * (cfg.final_lr_share + (1 - cfg.final_lr_share) * left)


def due(step: int, every: int, last: bool) -> bool:
    """Whether something that happens `every` so many steps (0: at the end) happens after `step`."""
    return last or (every > 0 and step % every == 0)


# ---- Evaluation ----------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(accelerator: Accelerator, ranks: Ranks, model, loader, asked=lambda: 0) -> tuple:
    """The task's metrics over all of the loader's data, each sample counted once, and its sums.

    None and None, at once, when `asked`, called before each batch, says 1 on any process.
    """
    model.eval()
    # Apple's GPUs have no float64.
    home = "cpu" if accelerator.device.type == "mps" else accelerator.device
    totals, batches = {}, iter(loader)
    for _ in range(len(loader)):
        fetched, problem = attempt(next, batches)
        if ranks.agree(asked(), problem=problem)[0]:
            model.train()
            return None, None
        # Every rank runs the model on every batch: under DDP and FSDP a forward is a collective.
        batch, (_, _, rows) = fetched
        sums = task.eval_sums(model, batch)
        for name, value in sums.items():
            value = value.to(home).double()
            totals[name] = totals.get(name, 0.0) + (value if rows else torch.zeros_like(value))
    totals = {name: value.cpu() for name, value in accelerator.reduce(totals, "sum").items()}
    model.train()
    scores = ask(contract.scores, task.metrics(totals))
    return {"eval_loss": scores.pop("loss"), **scores}, totals


def rehearse(accelerator: Accelerator, model, rows: Rows, slices: Slices, cfg: Config) -> list[str]:
    """Evaluates the first batch: a mistake in task.py is said now, not after hours of training."""
    pairs = rows.__getitems__(slices.first_batch())
    half = 0 if cfg.compile else len(pairs) // 2  # it would compile each size
    parts = [pairs, pairs[:half], pairs[half:]] if half else [pairs]
    batches = [send_to_device(collate(part)[0], accelerator.device) for part in parts]
    return contract.try_evaluation(model, batches)


# ---- Saving --------------------------------------------------------------------------------------


def save(accelerator: Accelerator, ranks: Ranks, start: Start, manifest: dict) -> None:
    """Commits a checkpoint: all processes write, then the main one makes it count.

    What fails on one of them ends all with its reason, and older checkpoints stay.
    """
    partial = checkpoints.partial_path(start.output / "checkpoints", manifest["step"])
    try:
        ranks.alone(start.check_folder)
        ranks.alone(ask, checkpoints.begin, partial)
        ranks.together(ask, checkpoints.write, partial, accelerator.save_state, partial)
        place = (accelerator.process_index, accelerator.num_processes)
        shares = ranks.gather(ranks.together(checkpoints.vouch, partial, *place))
        digests = {block: digest for share in shares for block, digest in share.items()}
        committed = ranks.alone(ask, checkpoints.commit, partial, manifest, digests)
        ranks.alone(ask, checkpoints.prune, committed, start.cfg.keep_checkpoints)
    finally:
        if IS_MAIN:  # a full disk gets back what did not become a checkpoint
            shutil.rmtree(partial, ignore_errors=True)


def report(model: torch.nn.Module, sums: dict, output: Path) -> dict:
    """Shows on the screen what the task has to show of an evaluation: texts, and pictures."""
    if not hasattr(task, "report"):
        return {}
    output.mkdir(exist_ok=True)
    shown, problem = attempt(task.report, model.eval(), sums, output)
    if problem:  # it is not worth a run
        say(f"no report: {type(problem).__name__}: {one_line(problem)}")
    for name, value in (shown or {}).items():
        say(f"{name}: {value}")
    return shown or {}


def export(model: torch.nn.Module, sums: dict, output: Path, log: Log, facts: dict) -> None:
    """Saves the trained model with its card, shows what it can do, and draws the curves."""
    from plot import attempt_picture, draw

    fresh = checkpoints.fresh_folder(output / "model")
    task.export(model.eval(), fresh)
    model_card.write(fresh, output / "model", facts)
    checkpoints.swap(fresh, output / "model")
    log.show(report(model, sums, output), facts["step"])

    curves = attempt_picture(draw, [output], output / "curves.png")
    say(f"model: {output / 'model'}  curves: {curves}")


# ---- Training ------------------------------------------------------------------------------------


def make_accelerator(cfg: Config, accumulation: int) -> Accelerator:
    """The accelerator that the launcher's YAML asks for; raises UserError where it cannot be."""
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
        torch.use_deterministic_algorithms(True)
    accelerator = Accelerator(
        cpu=process.on_cpu(),
        dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=True),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulation, sync_with_dataloader=False
        ),
        dynamo_backend="inductor" if cfg.compile else None,
        log_with=None if cfg.tracker == "none" else cfg.tracker,
        project_dir=cfg.output_dir,
    )
    torch.backends.cuda.matmul.allow_tf32 = False  # accelerate allows it together with compile
    ask(process.check, accelerator)
    process.save_bare_models(accelerator)
    return accelerator


def main(start: Start, ranks: Ranks, stop: StopRequest) -> int:
    """Trains, evaluates, saves and exports as the config says; the exit code. Raises UserError."""
    cfg, output = start.cfg, start.output
    train_data, eval_data = start.data
    micro, accumulation, processes = start.micro, start.accumulation, process.PROCESSES
    step_size, fields = cfg.global_batch_size, start.facts["config"]

    # Find where to start; a finished run has nothing left to do.
    known = (start.checkpoint, start.manifest, start.finished, start.max_steps, start.changed)
    checkpoint, manifest, finished, max_steps, changed = ranks.gather(known)[0]
    first_step, first_sample = manifest.get("step", 0), manifest.get("samples", 0)
    if cfg.check:
        ranks.alone(checkpoints.hand_over)
        where = f"goes on from {checkpoint}" if checkpoint else "starts from the beginning"
        where = "is finished" if finished else where
        samples = f"{step_size} of {len(train_data):,} samples"
        say(f"checked: {output} {where}; {max_steps:,} steps, each with {samples}")
        return 0
    if finished:
        say(f"{output} is finished: {finished}; for a new run give another --output_dir")
        return 0

    # Say what runs on what, and from where.
    accelerator = make_accelerator(cfg, accumulation)
    precision = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    say(
        f"{output}: {processes} x {accelerator.device.type}, {precision}, "
        f"distributed: {accelerator.distributed_type.value}; a step of {step_size} "
        f"samples = {processes} x {accumulation} x {micro} (processes x micro-batches x samples)"
    )
    for remark in start.remarks:
        say(remark)
    if IS_MAIN and not cfg.eval_only:
        with open(output / "config.yaml", "w", encoding="utf-8") as file:
            yaml.safe_dump(fields, file, sort_keys=False, allow_unicode=True)
        checkpoints.write_status(output, "running")
        tracking.start_tracker(accelerator, fields)

    # Build everything and hand it to accelerate; the same seed gives all ranks the same model.
    torch.manual_seed(cfg.seed)
    model = ranks.together(ask, task.build_model, cfg.task)
    trained = [p for p in model.parameters() if p.requires_grad]
    parameters, size = sum(p.numel() for p in trained), sum(p.nbytes for p in trained)
    if cfg.gradient_checkpointing:
        ask(process.enable_gradient_checkpointing, model)
    model = process.sync_batch_norms(model, accelerator)
    last_sample = first_sample + max(max_steps - first_step, 0) * step_size
    train_rows, eval_rows = Rows(train_data, cfg.seed), Rows(eval_data)
    train_slices = Slices(first_sample, last_sample, micro, processes, step_size, train_rows.sort)
    eval_slices = Slices(0, len(eval_data), cfg.micro_batch_size, processes, 0, eval_rows.sort)
    loading = {
        "collate_fn": collate,
        "num_workers": cfg.num_workers,
        "persistent_workers": cfg.num_workers > 0,
        "pin_memory": accelerator.device.type == "cuda",
        "worker_init_fn": process.ignore_signals,
        "generator": torch.Generator(),  # or a loader draws from the generator of dropout
    }
    optimizer = build_optimizer(model, cfg)
    settings = process.settings_of(optimizer)
    start.facts["optimizer"] = process.as_text(settings)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_rows, batch_sampler=train_slices, **loading),
        DataLoader(eval_rows, batch_sampler=eval_slices, **loading),
    )
    if checkpoint:
        restore = process.load_checkpoint
        ranks.together(ask, restore, accelerator, optimizer, settings, checkpoint, manifest)
        say(f"{'evaluating' if cfg.eval_only else 'continuing from'} {checkpoint}")
    else:  # AdamW will keep two moments of each weight
        ranks.alone(ask, checkpoints.check_room, output / "checkpoints", 3 * size)
    if cfg.eval_only:
        scores, sums = evaluate(accelerator, ranks, model, eval_loader)
        say("  ".join(f"{name} {number:.5g}" for name, number in scores.items()))
        about = {"step": first_step, "checkpoint": str(checkpoint), **scores}
        ranks.alone(ask, tracking.write_object, output / "evaluation" / "metrics.json", about)
        bare_model = accelerator.unwrap_model(model, keep_torch_compile=False)
        ranks.alone(report, bare_model, sums, output / "evaluation")
        return 0
    rehearsed = ranks.together(ask, rehearse, accelerator, model, eval_rows, eval_slices, cfg)
    for remark in rehearsed:
        say(remark)

    log = Log(accelerator, fields, first_step, max_steps)
    if changed:
        log.write({"step": first_step, "event": "changed", "changes": "; ".join(changed)})
    watch = health.Watch(accelerator, cfg.max_skipped_steps)
    unit = getattr(task, "UNIT", "samples")
    model.train()
    stop.training, stopped = True, False
    if due(first_step, cfg.eval_every, False) and checkpoint and "eval_loss" not in manifest:
        # A stop has cut this evaluation short.
        scores = evaluate(accelerator, ranks, model, eval_loader, stop.asked)[0]
        stopped = scores is None
        if scores:
            log.write({"step": first_step, **scores})
            if not changed and checkpoint.parent == output / "checkpoints":
                ranks.alone(checkpoints.amend, checkpoint, {"eval_loss": scores["eval_loss"]})
    best_loss = math.inf
    if cfg.export == "best":
        best_loss = ranks.alone(checkpoints.find_best, output / "checkpoints", start.facts)[1]
    batches, done = iter(train_loader), first_step
    ids_hash, terms_seen, waited, clock = 0, 0, 0.0, time.perf_counter()
    for step in range(first_step, first_step if stopped else max_steps):
        # Fetch the micro-batches of the step, and agree on what all of them hold.
        began = time.perf_counter()
        window, problem = attempt(lambda: [next(batches) for _ in range(accumulation)])
        waited += time.perf_counter() - began
        counted = np.array([numbers for _, numbers in window or [(None, (0, 0, 0))]]).sum(axis=0)
        terms, step_hash, _, stopped = ranks.agree(*counted, stop.asked(), problem=problem)
        terms_seen, ids_hash = terms_seen + terms, (ids_hash + step_hash) % 2**64

        # Sum the gradients of the micro-batches, and update the weights.
        lr = lr_at(step, cfg, max_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), device=accelerator.device)
        for turn, (batch, _) in enumerate(window):
            # Dropout depends on the place of the micro-batch in the step, not on the rank.
            place = turn * processes + accelerator.process_index
            process.seed_generators(int(mix(cfg.seed, step, place)[0]), accelerator.device)
            with accelerator.accumulate(model):
                loss = task.loss_sum(model, batch)
                if step == first_step:
                    ranks.together(ask, contract.check_loss, loss)
                # accelerate divides by the micro-batches, and DDP by the processes: both undone,
                # the gradient is that of the sum over the step divided by its number of terms.
                scale = accumulation * processes / max(terms, 1)
                accelerator.backward(loss * (scale + health.spoil(loss)))
                if accelerator.sync_gradients:
                    limit = cfg.max_grad_norm or math.inf
                    norm = accelerator.clip_grad_norm_(model.parameters(), limit)
                    health.skip_unless_finite(optimizer, norm)
                optimizer.step()
                optimizer.zero_grad()
            loss_sum += loss.detach()

        done = step + 1
        watch.add(done, terms, loss_sum, norm)
        log.advance(done, f"{parameters:,} parameters to train; {terms:,} {unit} a step", loss_sum)

        # Log, evaluate and save when due; nothing below changes the weights.
        final = done == max_steps
        stopped = stopped and not final  # the last step ends the run anyway
        evaluating = due(done, cfg.eval_every, final) and not stopped
        saving = due(done, cfg.save_every, final or stopped)
        samples = first_sample + (done - first_step) * step_size
        if due(done, cfg.log_every, evaluating or saving):  # so a continued run begins a line
            mean_loss, grad_norm, notes, reason = watch.read()
            seconds = time.perf_counter() - clock
            for note in notes:
                end = samples - (done - note["step"]) * step_size
                log.write({**note, "sample_ids": train_rows.ids(range(end - step_size, end))})
            line = {"step": done, "samples": samples, "epoch": samples / len(train_data)}
            line |= {"loss": mean_loss, "lr": lr, "grad_norm": grad_norm}
            line |= {f"{unit}_per_second": terms_seen / seconds, "data_wait": waited / seconds}
            log.write({**line, "batch_hash": f"{ids_hash:016x}"})
            ids_hash, terms_seen, waited, clock = 0, 0, 0.0, time.perf_counter()
            if reason:
                raise UserError(reason)
        if evaluating or saving:
            paused = time.perf_counter()
            facts = {"step": done, "samples": samples, "processes": processes, **start.facts}
            if evaluating:
                asked = (lambda: 0) if final else stop.asked
                scores, sums = evaluate(accelerator, ranks, model, eval_loader, asked)
                stopped = scores is None
                if scores:
                    log.write({"step": done, **scores})
                    eval_loss = facts["eval_loss"] = scores["eval_loss"]
                    saving = saving or (cfg.export == "best" and eval_loss < best_loss)
                    best_loss = min(best_loss, eval_loss)
            if saving or stopped:
                began = time.perf_counter()
                ranks.together(ask, health.check_finite, accelerator, model, optimizer)
                save(accelerator, ranks, start, facts)
                log.write({"step": done, "save_seconds": time.perf_counter() - began})
            clock += time.perf_counter() - paused  # throughput is that of training alone
        if stopped:
            break
    log.close()

    # Export the model and draw the curves, unless the run is to be continued.
    if stopped:
        say(f"stopped after step {done}; the same command continues the run")
    else:
        last = exported = max(first_step, max_steps)
        bare_model = accelerator.unwrap_model(model, keep_torch_compile=False)
        if cfg.export == "best":
            folder = output / "checkpoints"
            exported = process.load_best(accelerator, ranks, folder, start.facts) or last
        if exported < last or first_step >= max_steps:  # it has not just been evaluated
            scores, sums = evaluate(accelerator, ranks, model, eval_loader)
        facts = {"step": exported, "steps": last, "scores": scores, **start.facts}
        ranks.alone(start.check_folder)
        ranks.alone(export, bare_model, sums, output, log, facts)
    accelerator.wait_for_everyone()
    tracking.end_tracker(accelerator)
    code = process.STOPPED if stopped else 0
    if IS_MAIN:
        state = "stopped" if stopped else "finished"
        checkpoints.write_status(output, state, exit_code=code, settings=start.settings)
    return code


def prepare() -> Start:
    """All that needs no model, before the processes meet; raises UserError."""
    return prepare_run(Config, __doc__)


if __name__ == "__main__":
    process.run(main, prepare)
