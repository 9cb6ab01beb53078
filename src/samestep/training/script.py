"""What Training asks of a script: a mistake that would be silent is found, and said in a line."""

import contextlib
import json
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import send_to_device

from samestep.base.console import print_on_main
from samestep.base.errors import Failed, UserError
from samestep.processes import alike
from samestep.processes.mesh import layout_of_accelerator
from samestep.state import provenance, weights
from samestep.step import exact, seeds, trial
from samestep.step.loader import MicroBatch
from samestep.step.model import bare_model, eager, form_of, is_compiled, keep_modes
from samestep.step.samples import check_repeated, choose_probes, collate, hash_batch, read_samples

if TYPE_CHECKING:
    from samestep.step.step import Step
    from samestep.training.training import Training

# ---- Before training -----------------------------------------------------------------------------


def end_in_one_line(run: "Training") -> None:
    """What ends the script is one line, if it is a UserError or of another process; the exit code
    is that of train.py. The status of the run tells it, too."""
    others = sys.excepthook

    def say(kind: type, error: BaseException, trace: Any) -> None:
        code = 2 if isinstance(error, UserError) else 1
        with contextlib.suppress(OSError):
            run.write_state("failed", exit_code=code)
        if not isinstance(error, UserError | Failed):
            return others(kind, error, trace)
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(code)

    sys.excepthook = say


def check_whole(least: int, **numbers: Any) -> None:
    """Raises UserError unless these are whole numbers, and none is too small."""
    for name, value in numbers.items():
        if not isinstance(value, int) or value < least:
            raise UserError(f"{name} is {value!r}; give a whole number, at least {least}")


def check_rows(rows: Any) -> None:
    """Raises UserError unless rows can be addressed, and there is one."""
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise UserError(f"rows are a {type(rows).__name__}; give a dataset with len() and [i]")
    if not len(rows):
        raise UserError("rows are empty; give at least one")


def check_prepared(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Raises UserError unless these come from accelerator.prepare, and can be trained."""
    if hasattr(model, "_orig_mod"):
        raise UserError(
            "torch.compile has wrapped the model: call model.compile() before accelerator.prepare, "
            "without dynamo_backend"
        )
    known = [accelerator.unwrap_model(each) for each in accelerator._models]
    is_known = any(accelerator.unwrap_model(model) is each for each in known)
    if not is_known or not isinstance(optimizer, AcceleratedOptimizer):
        raise UserError(
            "Training takes what accelerator.prepare(model, optimizer) returns; prepare the model "
            "and the optimizer, and no dataloader"
        )
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "FSDP") and not kind.startswith("MULTI_"):
        raise UserError(f"Training works with DDP and FSDP2, not with {kind}")
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise UserError("Training works with fsdp_version: 2; this is FSDP of version 1")
    if layout_of_accelerator(accelerator).replica_size > 1:
        raise UserError("Training works with DDP and FSDP2, not with tensor or context parallelism")
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy if kind == "FSDP" else None
    dtypes = {policy.reduce_dtype or policy.param_dtype, policy.output_dtype} if policy else set()
    if dtypes - {None, torch.float32} or (policy and accelerator.mixed_precision == "fp16"):
        raise UserError(
            "FSDP2 in half precision takes bf16, and adds gradients in float32: give "
            "FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy("
            "param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)), "
            "and call the model under accelerator.autocast()"
        )
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != accelerator.num_processes:
        raise UserError(
            f"{launched} processes were launched, and this Accelerator knows "
            f"{accelerator.num_processes}: on CPUs make Accelerator(cpu=True)"
        )


def prepare_exact(accelerator: Accelerator, model: Any, optimizer: AcceleratedOptimizer) -> None:
    """Makes torch deterministic, on CPUs with one thread; raises UserError for what is not."""
    precision, is_fsdp = accelerator.mixed_precision, accelerator.distributed_type.value == "FSDP"
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    on_cpu = accelerator.device.type == "cpu"
    # Under FSDP on CPUs a fused optimizer rounds the last values of a shard in another way.
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    excluded = {
        "fp8": precision == "fp8",
        f"{precision} under FSDP2": is_fsdp and precision != "no",
        "offload": is_fsdp and hasattr(plugin.cpu_offload, "pin_memory"),  # a CPUOffloadPolicy
        "fused=True under FSDP2 on CPUs": on_cpu and is_fsdp and is_fused,
        "an Apple GPU": accelerator.device.type == "mps",
        "torch.compile": is_compiled(model),
    }
    for name, is_there in excluded.items():
        if is_there:
            raise UserError(f"exact cannot be combined with {name}; leave one of them out")
    exact.be_deterministic()
    if on_cpu:
        torch.set_num_threads(1)  # sums depend on the number of threads


def merge_settings(fixed: dict, settings: dict) -> dict:
    """Training's own settings and those of the script; raises UserError if they differ."""
    if not isinstance(settings, dict):
        raise UserError(f"settings are a {type(settings).__name__}; give a dict, as vars(args)")
    for name in fixed.keys() & settings.keys():
        if settings[name] != fixed[name]:
            raise UserError(
                f"{name} is {fixed[name]!r}, and in settings {settings[name]!r}; give the same, or "
                "call it otherwise in settings"
            )
    return fixed | settings


def describe(run: "Training", settings: dict) -> dict:
    """The entries of all manifests: settings, rows and model; the same on all processes.

    Raises UserError if the same rows are another batch the second time, or processes differ.
    """
    drawn = provenance.short_hash(torch.get_rng_state().numpy().tobytes())  # reading rows seeds it
    with run.ranks.fail_together():
        config = json.loads(json.dumps(settings, default=str))  # as it will be read
        found = []
        for number in range(2):
            seeds.seed_everything(number)
            samples = read_samples(run.rows.dataset, run.task, 1 + number, training=True)
            found.append(hash_batch(run.rows.dataset, run.task, samples))
        check_repeated(*found)
        seeds.seed_everything(run.seed)
        run.few = choose_probes(samples, run.task)
    data = {"samples": len(run.rows), "fingerprint": found[0]}
    check_same(run, config, data, drawn)
    device = run.accelerator.device
    numbers = provenance.versions(run.accelerator.mixed_precision, device.type == "cuda")
    return {
        "config": config,
        "data": data,
        "identity": "",
        "prepared": "",
        "code": provenance.script_code(),
        "library": provenance.library_digest(),
        "hardware": provenance.describe_hardware(run.ranks, device.type, numbers),
        "frozen_weights": weights.frozen_digest(bare_model(run.accelerator, run.model)),
    }


def check_same(run: "Training", config: dict, data: dict, drawn: str) -> None:
    """Raises UserError unless all processes have the same settings, rows and model.

    The weights of DDP are those of process 0. FSDP takes each part from the process that keeps it:
    if all have drawn the same numbers, they have the same weights.
    """
    facts = {f"setting {name}": repr(value) for name, value in config.items()}
    facts |= {f"data {name}": repr(value) for name, value in data.items()}
    form = form_of(bare_model(run.accelerator, run.model))
    facts["model (names and shapes of its weights)"] = provenance.short_hash(repr(form).encode())
    plugin = getattr(run.accelerator.state, "fsdp_plugin", None)
    if run.ranks.layout.fsdp and not plugin.cpu_ram_efficient_loading:
        facts["random state (call set_seed before the model is built)"] = drawn
    alike.check_same(run.ranks, facts)


def adopt_schedulers(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> None:
    """Lets a prepared scheduler make one step when it is told to, not one for each process. Raises
    UserError for a scheduler that no checkpoint would hold."""
    for scheduler in accelerator._schedulers:
        scheduler.split_batches = True
    steps = (optimizer.step, optimizer.optimizer.step)
    has_scheduler = any(hasattr(each, "_wrapped_by_lr_sched") for each in steps)
    known = [*accelerator._schedulers, *accelerator._custom_objects]
    if has_scheduler and not any(hasattr(each, "get_last_lr") for each in known):
        raise UserError(
            "no checkpoint would hold the learning rate scheduler of this optimizer: call "
            "accelerator.register_for_checkpointing(scheduler) before the first step"
        )


# ---- Is the loss a sum? --------------------------------------------------------------------------


def try_loop(step: "Step") -> Iterator[Any]:
    """Gives a short and a long row together to the body of the loop, then each alone, in eval mode:
    the loss of both must be the sum of the losses of each.

    Where random numbers are drawn it compares the loss per item of eight rows. For the passes in
    train mode before that see trial.backward_passes.
    """
    run = step.training
    rows = [run.few[0], run.few[-1]]
    print_on_main(f"{run.folder}: tries the loop on {len(rows)} rows")
    before = _states_of_others(run)
    with keep_modes(run.model), eager(run.model):
        for _ in trial.backward_passes(run.ranks, run.model):
            yield from _try_batch(step, rows)
        run.model.eval()
        together = yield from _try_batch(step, rows)
        if together.draws:
            rows = run.few
            together = yield from _try_batch(step, rows)
        alone = []
        for number, row in enumerate(() if run.rows_depend else rows):
            alone.append((yield from _try_batch(step, [row], number)))
    step.losses = []
    if _states_of_others(run) != before:
        raise UserError(
            "the loop over the batches changes a scheduler, or what is registered for checkpoints: "
            "it runs once for each batch, and before the first step; do that after the loop"
        )
    is_half = any(parameter.element_size() < 4 for parameter in run.model.parameters())
    limit = 5e-2 if is_half or run.accelerator.mixed_precision != "no" else 1e-4
    problem = alone and trial.differ("the loss", together, alone, limit)
    if problem:
        raise UserError(
            f"{problem}: step.backward takes the sum over the items, not their mean "
            "(reduction='sum', or mean=True with the count of that mean); if rows depend on each "
            "other by intent, give rows_depend=True"
        )


def _states_of_others(run: "Training") -> tuple[dict, dict]:
    """What tells whether schedulers and registered objects are as before."""
    packed, tensors = run.saver.state.pack_others()
    states = {name: str(each) for name, each in packed.items() if not name.startswith("group.")}
    return states, {name: alike.bit_sums(each).tolist() for name, each in tensors.items()}


def _try_batch(
    step: "Step", samples: list[tuple], number: int = 0
) -> Generator[Any, None, trial.Computed]:
    """Gives these samples to the body of the loop as one batch; returns a Computed. `number`: that
    of its random numbers."""
    run, accelerator = step.training, step.training.accelerator
    seeds.seed_micro_batch(run.seed, 1, number)
    before = trial.random_state(accelerator.device)
    batch, (num_items, ids_hash), ids = collate(run.task, samples)
    micro_batch = MicroBatch(0, batch, num_items, ids_hash, ids)
    accelerator.gradient_accumulation_steps, accelerator.step = 1, 0
    step.losses = []
    yield from step.compute(micro_batch, send_to_device(batch, accelerator.device))
    trial.check_reduced(run.model)
    draws = trial.random_state(accelerator.device) != before
    return trial.Computed(batch, num_items, {"": step.losses[0]}, draws)


# ---- In the loop ---------------------------------------------------------------------------------


def check_backward(times: int, accumulated: int) -> None:
    """Raises UserError unless a batch had its backward pass, once, inside one `accumulate`."""
    if times != 1:
        raise UserError(f"step.backward was called {times} times for a batch; call it once")
    if accumulated != 1:
        raise UserError("the loop calls accelerator.accumulate; leave it out: the step does so")


def check_order(step: "Step", wanted: str, what: str) -> None:
    """Raises UserError for what comes too early, or twice."""
    if step.gradient != wanted:
        raise UserError(
            f"{what} in step {step.number}, whose gradient is {step.gradient}: first `for batch in "
            "step` to its end, then step.clip(...), then optimizer.step(), each once"
        )


def watch_optimizer(run: "Training") -> None:
    """Lets the optimizer make one step where it is due, and no other, and clear no part of it."""

    def use(*_: Any) -> None:
        if run.current:
            check_order(run.current, "clipped", "optimizer.step()")
            run.current.gradient = "used"

    def clear(*args: Any, **named: Any) -> None:
        if run.current and run.current.gradient == "not added up":
            raise UserError(
                "optimizer.zero_grad() in the loop over the batches deletes the gradients of those "
                "before; leave it out: each step begins without gradients"
            )
        zero_grad(*args, **named)

    inner = run.optimizer.optimizer
    inner.register_step_pre_hook(use)
    zero_grad, inner.zero_grad = inner.zero_grad, clear


def check_complete(step: "Step") -> None:
    """Raises UserError unless the optimizer has used the gradient of a step."""
    scaler = step.training.accelerator.scaler  # of fp16, which skips steps
    if not (step.gradient == "clipped" and scaler and step.training.optimizer.step_was_skipped):
        check_order(step, "used", "the end of the loop's body")
