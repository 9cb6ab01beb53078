"""Trains what task.py describes on the hardware that an accelerate YAML describes.

    accelerate launch --config_file configs/accelerate/cpu.yaml train.py
    accelerate launch --config_file configs/accelerate/multi_gpu_bf16.yaml train.py
    accelerate launch --config_file configs/accelerate/cpu.yaml train.py \\
        --config configs/train/smoke.yaml --learning_rate 1e-3 --output_dir runs/mine
    python train.py --help

The YAML after --config_file owns the hardware: processes, devices, precision. The recipe after
--config owns the mathematics, and flags override it. The hardware never changes the result. The
samples of a step and its learning rate are functions of the step; random numbers are functions of
the step and the micro-batch. The gradient is that of the summed losses of the step, divided by its
number of loss terms. So the loop has no state but the step, and the same command continues a run
that was killed.
"""

import training.begin  # noqa: F401  # isort: skip
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import send_to_device
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

import task
from task import TaskConfig
from training import (
    batches,
    checkpoints,
    contract,
    device,
    model_card,
    monitor,
    run_folder,
    sharding,
    shutdown,
    speed,
    tracking,
    weights,
)
from training.batches import EvaluationSampler, SampleDataset, StepBatchSampler, StepReader
from training.config import (
    EXPORT,
    NOTHING,
    ONE_COMMAND,
    ROUNDING,
    UNSAVED,
    BatchSize,
    DecayRate,
    Seconds,
    Workers,
)
from training.console import one_line, say
from training.ranks import Ranks, UserError, as_user_error, attempt, catch
from training.saving import Saver
from training.shares import ShareBalancer
from training.startup import RunStart, agree_on_start, prepare_run
from training.sums import EvaluationSums, StepGradients

# ---- Config --------------------------------------------------------------------------------------


@dataclass
class Config:
    """Fields of a recipe, each also a flag; what they say holds on any hardware."""

    # Run
    output_dir: str = field(default="", metadata=NOTHING)
    """Folder of the run; empty: runs/ and the recipe's file name."""
    seed: NonNegativeInt = 0
    """Seed of the weights, the sample order, dropout and noise."""
    resume: str = field(default="auto", metadata=UNSAVED)
    """auto: continue from the newest checkpoint in output_dir; or never; or a checkpoint's path."""
    accept_changes: bool = field(default=False, metadata=ONE_COMMAND)
    """Continue from a checkpoint although data or settings that affect the result have changed."""
    check: bool = field(default=False, metadata=ONE_COMMAND)
    """Check everything that needs no model, print the result in one line, and stop."""
    config_file: str = field(default="", metadata=ONE_COMMAND)
    """With check: the accelerate YAML to check as well."""
    eval_only: bool = field(default=False, metadata=ONE_COMMAND)
    """Evaluate the newest checkpoint (with export best: the best), or the one that resume names."""
    timeout: Seconds = field(default=1800, metadata=NOTHING)
    """Seconds that a process waits for the others before the run ends with an error."""

    # Length and batches
    max_steps: NonNegativeInt = 800
    """Optimizer steps to train; 0: num_epochs decides."""
    num_epochs: NonNegativeFloat = 0.0
    """Passes over the training data, in place of max_steps."""
    global_batch_size: BatchSize = 32
    """Samples in an optimizer step, over all processes."""
    micro_batch_size: BatchSize = field(default=32, metadata=ROUNDING)
    """Largest number of samples that a device takes at once; lower it when memory runs out. The
    result stays the same to rounding, except for what a model draws, as dropout does."""
    device_shares: Literal["equal", "auto"] | list[PositiveFloat] = field(
        default="equal", metadata=NOTHING
    )
    """How the micro-batches of a step are dealt to the processes: equal; a list with the speed of
    each, such as [2, 1]; or auto, by speeds that are measured. Results stay the same to rounding,
    with exact to the last bit."""
    num_workers: Workers | None = field(default=None, metadata=NOTHING)
    """Worker processes that load data for each training process; 0: it loads its own data; null: up
    to 4 on a GPU for a task that augments its rows, otherwise 0."""

    # Optimizer
    learning_rate: NonNegativeFloat = 3e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """AdamW's weight decay of matrices; biases and norms have none."""
    beta1: DecayRate = 0.9
    """AdamW's decay rate of the first moment."""
    beta2: DecayRate = 0.99
    """AdamW's decay rate of the second moment."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this norm; 0: never."""
    max_skipped_steps: NonNegativeInt = field(default=10, metadata=NOTHING)
    """Steps in a row that may be skipped because their loss or gradient is not finite; then the run
    ends. 0: any number."""

    # Learning rate schedule
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after the warm-up; wsd: constant, then a linear decay."""
    warmup_steps: NonNegativeInt = 50
    """Steps over which the learning rate rises from zero to its peak."""
    decay_fraction: ClosedUnitInterval = 0.2
    """wsd only: fraction of all steps, at the end, in which the learning rate decays."""
    final_lr_fraction: ClosedUnitInterval = 0.1
    """Final learning rate as a fraction of the peak."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the peak grows with global_batch_size / reference_batch_size."""
    reference_batch_size: BatchSize = 32
    """Global batch size for which learning_rate was chosen; read by lr_scaling."""

    # Evaluation and checkpoints
    eval_every: NonNegativeInt = field(default=100, metadata=NOTHING)
    """Steps between evaluations; the last step is always evaluated; 0: only the last."""
    save_every: NonNegativeInt = field(default=200, metadata=NOTHING)
    """Steps between checkpoints; the last step is always saved; 0: only the last."""
    keep_checkpoints: NonNegativeInt = field(default=2, metadata=NOTHING)
    """Newest checkpoints to keep, besides the one with the best eval_loss; 0: all."""
    async_save: bool = field(default=False, metadata=NOTHING)
    """Write checkpoints in the background: training waits only for a copy to host memory, which
    takes as much memory as the checkpoint. Not with DeepSpeed."""
    export: Literal["last", "best"] = field(default="last", metadata=EXPORT)
    """Model to export at the end: the last, or the one with the smallest eval_loss. best also saves
    a checkpoint after each evaluation that is the best so far."""

    # Logging
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
    profile_steps: list[PositiveInt] | None = field(default=None, metadata=NOTHING)
    """First and last step to profile, such as [10, 13]: writes traces, and a table of the longest
    operations, into profile/ in the run folder."""

    # Speed, memory and determinism
    compile: bool = False
    """torch.compile: starts more slowly, runs faster; for GPUs. The repeated blocks of a model are
    compiled once. It changes the masks of dropout."""
    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """Format of DDP's messages. bf16 (needs NCCL) and fp16 halve the bytes, for slow networks."""
    tf32: bool = field(default=False, metadata=ROUNDING)
    """On a GPU in fp32: round the inputs of matrix products and convolutions to TF32, which is much
    faster and keeps 3 digits."""
    deterministic: bool = False
    """On a GPU: slower kernels; a continued run is then bit-identical to an uninterrupted one."""
    exact: bool = field(default=False, metadata=ROUNDING)
    """The same bytes on any number of processes, also if it changes in the middle of a run. Fixes
    micro_batch_size; a step needs a micro-batch for each process; FSDP needs a power of two of
    processes. Implies deterministic."""
    gradient_checkpointing: bool = field(default=False, metadata=ROUNDING)
    """Recompute activations in the backward pass: less memory, about a third more time."""

    task: TaskConfig = field(default_factory=TaskConfig)
    """What is trained: see task.py."""


# ---- Optimizer and schedule ----------------------------------------------------------------------


def build_optimizer(model: torch.nn.Module, cfg: Config) -> torch.optim.Optimizer:
    """The optimizer: change it here. `lr` is a placeholder; each step sets it from lr_at.

    It keeps all in `state`, by weight. Adafactor and Rprop cannot update FSDP's DTensors.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = sharding.split_by_kind(groups)
    return torch.optim.AdamW(groups, lr=0.0, betas=(cfg.beta1, cfg.beta2), fused=True)


def lr_at(step: int, cfg: Config, max_steps: int) -> float:
    """Learning rate of this step, counted from 1. Nothing of a schedule is ever stored."""
    ratio = cfg.global_batch_size / cfg.reference_batch_size
    peak = cfg.learning_rate * ratio ** {"none": 0, "sqrt": 0.5, "linear": 1}[cfg.lr_scaling]
    if step <= cfg.warmup_steps:
        return peak * step / cfg.warmup_steps
    decay_start = cfg.warmup_steps
    if cfg.lr_schedule == "wsd":
        decay_start = max(decay_start, round(max_steps * (1 - cfg.decay_fraction)))
    decay_steps = max(max_steps - decay_start, 1)
    left = min(1 - (step - 1 - decay_start) / decay_steps, 1)  # of the decay: 1 down to 0
    if cfg.lr_schedule == "constant":
        left = 1
    elif cfg.lr_schedule == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return peak * (cfg.final_lr_fraction + (1 - cfg.final_lr_fraction) * left)


def due(step: int, every: int, last: bool) -> bool:
    """Whether something that happens every so many steps (0: only at the end) is due now."""
    return last or (every > 0 and step % every == 0)


# ---- Evaluation ----------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(accelerator: Accelerator, ranks: Ranks, model, loader, stop=lambda: 0) -> tuple:
    """The scores of all of the loader's data, each sample counted once, and the task's sums.

    Returns (None, None) as soon as `stop()`, asked before each batch, is 1 on any process.
    """
    model.eval()
    sharding.SharedBuffers(model).share()
    eval_batches = iter(loader)
    totals = EvaluationSums(loader.batch_sampler.plans, accelerator.device)
    for number in range(len(loader)):
        fetched, problem = catch(next, eval_batches)
        (stopped,) = ranks.sum_over_ranks(stop(), problem=problem)
        if stopped:
            model.train()
            return None, None
        # Every rank runs the model on every batch: under DDP and FSDP a forward is a collective.
        batch = send_to_device(fetched[0], accelerator.device, non_blocking=True)
        batches.seed_micro_batch(0, 1, number)  # a model that draws noise: the same each time
        with device.eager(model), sharding.split_rows(accelerator, batch):
            totals.add(model(task.eval_sums, batch))
    sums = totals.total(ranks)
    model.train()
    with as_user_error():
        return contract.score(task, sums, loader.dataset.sources)


# ---- Export --------------------------------------------------------------------------------------


def report(model: torch.nn.Module, sums: dict, output: Path, start: RunStart, state) -> dict:
    """Prints what the task shows of an evaluation, texts and pictures; returns it."""
    if not hasattr(task, "report"):
        return {}
    output.mkdir(exist_ok=True)
    weights.place_for_report(model, state)
    shown = dict(task.report(model.eval(), sums, output, start.cfg.task, start.prepared) or {})
    for name, value in shown.items():
        say(f"{name}: {value}")
    return shown


def export(model: torch.nn.Module, start: RunStart, run_info: dict) -> None:
    """Saves the trained model with its card. For `run_info` see model_card.write_card."""
    folder = start.output / "model"
    with checkpoints.replaced_folder(folder) as fresh:
        task.export(model.eval(), fresh, start.cfg.task, start.prepared)
        model_card.write_card(fresh, folder, run_info)


def draw_curves(output: Path) -> Path | str:
    """Draws curves.png. plot.py needs tasklib/, which a project may have deleted."""
    import plot

    return plot.try_draw([output], output / "curves.png")


# ---- Training ------------------------------------------------------------------------------------


# An error on one process must end all of them: the others would wait for it until the timeout. Code
# that may fail on one process stands inside `with ranks.fail_together()`. Every process enters it,
# even if only the main process acts inside. ranks.from_main sends the main process's value to all.


def main(start: RunStart, ranks: Ranks, stop: shutdown.StopRequest) -> int:
    """Trains, evaluates, saves and exports as the config says; the exit code. Raises UserError."""
    cfg, output, plan = start.cfg, start.output, start.plan
    (train_data, eval_data), step_size = start.data, cfg.global_batch_size

    # Find where to start. The main process found the checkpoint in prepare().
    point = agree_on_start(ranks, start)
    checkpoint, saved = point.checkpoint, point.saved
    max_steps, best_loss = point.max_steps, point.best_loss
    first_step, first_sample = saved.get("step", 0), saved.get("samples", 0)  # done before

    # Check only, or find that the run is finished.
    if cfg.check or point.finished:
        if cfg.check:
            checkpoints.hand_over_verified()
        say(start.summary())
        return 0

    # Create the accelerator, and print what runs on what.
    with as_user_error():
        accelerator = device.make_accelerator(cfg)
    processes, precision = accelerator.num_processes, accelerator.mixed_precision
    say(
        f"{output}: {processes} x {accelerator.device.type}, {precision.replace('no', 'fp32')}, "
        f"distributed: {accelerator.distributed_type.value}; "
        f"a step of {plan.describe(ranks.layout.unit)}"
    )
    for remark in point.remarks:
        say(remark)
    sharding.configure_deepspeed(accelerator, plan, cfg.max_grad_norm)

    # Write the config and the status, and start the tracker.
    settings = start.manifest["config"]
    if accelerator.is_main_process and not cfg.eval_only:
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        run_folder.replace_text(output / "config.yaml", text)
        run_folder.write_status(output, "running")
        tracking.start_tracker(accelerator, settings)

    # Build the model. The seed gives all ranks the same one.
    def build_model() -> torch.nn.Module:
        torch.manual_seed(cfg.seed)
        return task.build_model(cfg.task, start.prepared)

    model = weights.build(build_model, accelerator, ranks)
    with ranks.fail_together(), as_user_error():
        if cfg.gradient_checkpointing:
            weights.enable_gradient_checkpointing(model)
        sharding.check_model_shares_rows(model, ranks.layout)
    model = weights.sync_batch_norms(model, accelerator, plan, cfg.device_shares)
    trained = [p for p in model.parameters() if p.requires_grad]
    parameters, size = sum(p.numel() for p in trained), sum(p.nbytes for p in trained)
    share_trained = parameters / sum(p.numel() for p in model.parameters())

    # Build the loaders.
    train_rows = SampleDataset(train_data, task, cfg.seed, point.mixture)
    eval_rows = SampleDataset(eval_data, task)
    last_sample = first_sample + max(max_steps - first_step, 0) * step_size
    train_sampler = StepBatchSampler(plan, first_sample, last_sample, train_rows.sort)
    eval_sampler = EvaluationSampler(plan, eval_rows)
    workers = device.count_workers(cfg.num_workers, task, accelerator.device)
    loading = {"num_workers": workers, "pin_memory": accelerator.device.type == "cuda"}
    train_loader = batches.make_loader(train_rows, train_sampler, task, **loading)
    eval_loader = batches.make_loader(eval_rows, eval_sampler, task, **loading)

    # Build the optimizer.
    with ranks.fail_together():
        if accelerator.is_main_process:
            start.manifest["frozen_weights"] = weights.frozen_digest(model)
        sharding.split_matrices(model, accelerator, ranks.layout)
    optimizer = build_optimizer(model, cfg)
    optimizer_settings = weights.optimizer_settings(optimizer)
    start.manifest["optimizer"] = weights.settings_as_text(optimizer_settings)

    # Prepare. The samplers deal the batches; each is moved to the device in its turn.
    with ranks.fail_together(), as_user_error():
        module = weights.wrap(model, optimizer, accelerator, cfg)
        with sharding.whole_buffers(module, accelerator):
            model, optimizer = accelerator.prepare(module, optimizer)
    automatic = cfg.device_shares == "auto" and processes > 1
    unit = getattr(task, "UNIT", "samples")
    meter = speed.SpeedMeter(accelerator, ranks, unit)
    balancer = ShareBalancer(plan, meter.stopwatch) if automatic else None
    gradients = StepGradients(accelerator, ranks, model, cfg.exact, meter.stopwatch)

    # Resume.
    state = weights.TrainingState(accelerator, model, optimizer, optimizer_settings)
    if checkpoint:
        with ranks.fail_together(), as_user_error():
            state.load(checkpoint, saved, start.manifest)
        say(f"{'evaluating' if cfg.eval_only else 'continuing from'} {checkpoint}")
    else:
        with ranks.fail_together(), as_user_error():
            if accelerator.is_main_process:  # AdamW will keep two moments of each weight
                checkpoints.check_disk_space(output / "checkpoints", 3 * size)

    # Evaluate only.
    if cfg.eval_only:
        scores, sums = evaluate(accelerator, ranks, model, eval_loader)
        say("  ".join(f"{name} {number:.5g}" for name, number in scores.items()))
        full_model = weights.gather_model(accelerator, ranks, model, build_model)
        with ranks.fail_together(), as_user_error():
            if accelerator.is_main_process:
                line = {"step": first_step, "checkpoint": str(checkpoint), **scores}
                tracking.write_json_object(output / "evaluation" / "metrics.json", line)
        accelerator.state.destroy_process_group()  # the others leave: see End
        if accelerator.is_main_process:
            attempt("no report", report, full_model, sums, output / "evaluation", start, state)
        return 0

    # Try an evaluation: a mistake in task.py shows now, and not hours later.
    with ranks.fail_together(), as_user_error():
        first_batches = batches.first_batches(eval_rows, eval_sampler, task)
        first_batches = send_to_device(first_batches, accelerator.device)
        with device.eager(model), sharding.split_rows(accelerator, *first_batches):
            warnings = contract.try_evaluation(task, model, first_batches)
        for warning in warnings:
            say(warning)

    # Start the logs, and what watches the run.
    log = tracking.Log(accelerator, settings, first_step, max_steps)
    if point.changed:
        log.write({"step": first_step, "event": "changed", "changes": "; ".join(point.changed)})
    step_monitor = monitor.StepMonitor(accelerator, ranks, sum(plan.shares), cfg.max_skipped_steps)
    with device.eager(model):
        meter.count_flops(model, task, first_batches[0], share_trained)
    profiler = speed.Profiler(meter, cfg.profile_steps, output)

    # Evaluate first, if a stop has interrupted the evaluation of this checkpoint.
    model.train()
    stop.training, stopped = True, False
    if due(first_step, cfg.eval_every, False) and checkpoint and "eval_loss" not in saved:
        scores, _ = evaluate(accelerator, ranks, model, eval_loader, stop.requested)
        stopped = scores is None
        if scores:
            log.write({"step": first_step, **scores})
            if checkpoint.parent == output / "checkpoints" and not point.changed:
                best_loss = min(best_loss, scores["eval_loss"])
                with ranks.fail_together():
                    if accelerator.is_main_process:
                        checkpoints.add_to_manifest(checkpoint, {"eval_loss": scores["eval_loss"]})

    # Train. Steps are counted from 1. The next step's data is fetched while the device computes.
    step, sums = first_step, None
    last_step = first_step if stopped else max_steps
    saver = Saver(accelerator, ranks, start, state)
    reader = StepReader(train_loader, ranks, stop.requested, balancer, lambda: saver.problem)
    meter.start()
    if first_step < last_step:
        with meter.waiting():
            reader.fetch()
    for step in range(first_step + 1, last_step + 1):
        profiler.begin(step)

        # Take the micro-batches of the step, and what all ranks agreed on.
        plan, window, terms, ids_hash = reader.take()
        meter.add(terms, ids_hash)
        if reader.dealt:  # new shares, used from the next step on
            log.write({"step": step, **reader.dealt})
            eval_sampler.step_plan = balancer.plan

        # Set the learning rate.
        lr = lr_at(step, cfg, max_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # Sum the gradients of the micro-batches.
        step_losses, scale = [], gradients.start(plan, terms)
        for number, batch in zip(plan.run(), window, strict=True):
            batch = send_to_device(batch, accelerator.device, non_blocking=True)
            batches.seed_micro_batch(cfg.seed, step, number)
            shared_rows = sharding.split_rows(accelerator, batch)
            with accelerator.accumulate(model), gradients.micro_batch(number), shared_rows:
                loss = model(task.loss_sum, batch)
                if step == first_step + 1 and not step_losses:
                    with ranks.fail_together(), as_user_error():
                        contract.check_loss(loss)
                accelerator.backward(loss * monitor.one_or_nan(loss) * scale)
            step_losses.append(loss.detach())

        # Fetch the next step.
        if step < last_step:
            with meter.waiting():
                reader.fetch()

        # Update the weights.
        gradients.complete()
        norm = gradients.clip(cfg.max_grad_norm)
        monitor.skip_unless_finite(optimizer, norm)
        optimizer.step()
        optimizer.zero_grad()
        profiler.end(step)

        # Count the step, and find out what is due. Nothing below changes the weights.
        step_monitor.add(step, terms, plan.run(), step_losses, norm)
        log.advance(step, f"{parameters:,} parameters to train; {terms:,} {unit} a step")
        samples = first_sample + (step - first_step) * step_size
        final = step == max_steps
        stopped = reader.stop_seen()
        evaluating = due(step, cfg.eval_every, final) and not stopped
        saving = due(step, cfg.save_every, final or stopped)

        # Log. Also before saving, so that a resumed run starts a new averaging window.
        if due(step, cfg.log_every, evaluating or saving):
            loss_mean, grad_norm, notes, reason = step_monitor.read()
            for note in notes:
                end = samples - (step - note["step"]) * step_size
                log.write({**note, "sample_ids": train_rows.ids(range(end - step_size, end))})
            line = {"step": step, "samples": samples, "epoch": samples / len(train_data)}
            line |= {**train_rows.count_samples(samples), "loss": loss_mean, "lr": lr}
            line |= {"grad_norm": grad_norm, **meter.read()}
            log.write(line)
            if meter.straggler:
                log.write({"step": step, **meter.straggler})
            if reason:
                raise UserError(reason)
        saver.log_commits(log, step)

        # Evaluate.
        manifest = {**start.manifest, "step": step, "samples": samples, "processes": processes}
        with meter.paused():
            if evaluating:
                requested = (lambda: 0) if final else stop.requested
                scores, sums = evaluate(accelerator, ranks, model, eval_loader, requested)
                stopped = scores is None
                if scores:
                    log.write({"step": step, **scores})
                    manifest["eval_loss"] = scores["eval_loss"]
                    best_so_far = scores["eval_loss"] < best_loss
                    saving = saving or (cfg.export == "best" and best_so_far)
                    best_loss = min(best_loss, scores["eval_loss"])

            # Save.
            if saving or stopped:
                began = time.perf_counter()
                saver.save(manifest)
                log.write({"step": step, "save_seconds": time.perf_counter() - began})
        if stopped:
            break
    saver.finish()
    saver.log_commits(log, step)
    log.close()

    # Export the last model, or the best, unless the run is to be continued.
    if stopped:
        say(f"stopped after step {step}; the same command continues the run")
    else:
        last = exported = max(first_step, max_steps)
        if cfg.export == "best":
            exported = weights.load_best(state, ranks, start) or last
        if exported < last or sums is None:  # it has not just been evaluated
            scores, sums = evaluate(accelerator, ranks, model, eval_loader)
        full_model = weights.gather_model(accelerator, ranks, model, build_model)
        with ranks.fail_together(), as_user_error():
            if accelerator.is_main_process:
                start.check_folder()
                run_info = {"step": exported, "steps": last, "scores": scores, **start.manifest}
                export(full_model, start, run_info)

    # End. A report may take longer than the timeout: the others leave, and nothing waits for them.
    accelerator.wait_for_everyone()
    accelerator.state.destroy_process_group()
    code, ended = (shutdown.STOPPED, "stopped") if stopped else (0, "finished")
    if accelerator.is_main_process:
        run_folder.write_status(output, ended, exit_code=code, **point.facts)
        if not stopped:
            shown = attempt("no report", report, full_model, sums, output, start, state)
            attempt("the tracker has no report", log.show, shown or {}, exported)
            curves, problem = catch(draw_curves, output)
            curves = curves or f"no picture: {one_line(problem)}"
            say(f"model: {output / 'model'}  curves: {curves}")
        attempt("the tracker was not closed", tracking.end_tracker, accelerator)
    return code


def prepare() -> RunStart:
    """Does all that needs no model, before the processes meet; raises ValueError."""
    return prepare_run(Config, task, __doc__)


if __name__ == "__main__":
    shutdown.run(main, prepare)
