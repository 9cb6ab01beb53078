"""What a script of one's own gives Training, checked: a mistake that would be silent is a line.

`Script` has what train.py's run has, too (run/run.py): what a run is made of before its first step.
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from samestep.base import run_folder
from samestep.base.console import print_on_main
from samestep.base.errors import UserError, attempt
from samestep.processes import alike, exclusions, failures
from samestep.processes.mesh import layout_of_accelerator
from samestep.processes.ranks import Ranks
from samestep.processes.stop import StopRequest, launcher_process
from samestep.state import checkpoints, consistency, inventory, provenance, weights
from samestep.step import exact, samples, seeds
from samestep.step.model import bare_model, form_of, is_compiled
from samestep.step.plan import plan_step
from samestep.training.resume import ResumePoint, describe_run, find_together

# Names that tell what a line of metrics is about; others are refused where the line is written.
NOT_VALUES = ("step", "started", "event", "state", "committed_step", "eval_loss")
NOT_SCORES = (*NOT_VALUES[:-1], "loss", "samples")


class Script:
    """A run of a script. training: has its other arguments, see there.

    functions: collate, count and augment, by name; None for one that the script does not give."""

    # What train.py's run has otherwise.
    optimizer_settings: list[dict] = []  # noqa: RUF012
    sets_lr = False  # whether the loop sets the learning rate of each step
    watches_rows = True  # whether their attributes may change
    sets_modes = False  # whether parts that are frozen are put in eval mode
    mixture = None
    verb = "continuing from"
    shows_lines = False  # a script prints what it likes
    evaluates_last = False  # whether nothing of a step changes after its evaluation
    profile_steps = None
    about = ""
    trial_mode = contextlib.nullcontext  # where the loop is tried: its body may need gradients
    tries_backward = True
    warns_of_rounding = False  # whether rounding may make the trial of the loss a warning
    rounds = False  # whether products are rounded below float32
    loss_name, prefix = "the loss", ""
    loss_remedy = (
        "step.backward takes the sum over the items, not their mean (reduction='sum', or mean=True "
        "with the count of that mean); if rows depend on each other by intent, give "
        "rows_depend=True"
    )

    def __init__(
        self, training: Any, rows: Any, global_batch_size: int, micro_batch_size: int | str,
        settings: dict, functions: dict[str, Callable | None],
    ):  # fmt: skip
        self.training, self.folder = training, training.folder
        self.project = _folder_of_script()
        self.label = f"{self.folder}: "  # before lines of the library, among those of the script
        self.lock: run_folder.RunLock | None = None
        self.has_ended = False  # by an error, or since it was asked to stop
        self.stop = StopRequest(launcher_process())
        _end_in_one_line(self)  # first: it tells errors in status.json, too
        accelerator, is_exact, seed = training.accelerator, training.exact, training.seed
        check_whole(1, global_batch_size=global_batch_size, log_every=training.log_every)
        if micro_batch_size != "auto":
            check_whole(1, micro_batch_size=micro_batch_size)
        exclusions.check({"micro_batch_size auto": micro_batch_size == "auto", "exact": is_exact})
        check_whole(
            0, seed=seed, keep_checkpoints=training.keep_checkpoints,
            keep_every=training.keep_every, num_workers=training.num_workers or 0,
            max_skipped_steps=training.max_skipped_steps,
        )  # fmt: skip
        check_rows(rows)
        check_prepared(accelerator, training.model, training.optimizer)
        if is_exact:
            prepare_exact(accelerator, training.model, training.optimizer)
        layout = layout_of_accelerator(accelerator)
        self.ranks = Ranks(layout)
        self.plan = plan_step(
            global_batch_size, micro_batch_size, layout.replicas, is_exact,
            rank=layout.replica, in_step=layout.in_step,
        )  # fmt: skip
        self.task = SimpleNamespace(**{name: f for name, f in functions.items() if f})
        self.unit = "items" if functions["count"] else "samples"
        fixed = {"seed": seed, "global_batch_size": global_batch_size, "exact": is_exact}
        if is_exact:
            fixed["micro_batch_size"] = micro_batch_size
        self.model = bare_model(accelerator, training.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.trained_bytes = sum(p.nbytes for p in trained)
        self.manifest = self.describe(rows, _merge_settings(fixed, settings))

    def describe(self, rows: Any, settings: dict) -> dict:
        """Return the entries of all manifests: settings, rows and model, the same on all processes.

        Raises UserError if the same rows are another batch the second time, or processes differ.
        """
        # Reading rows seeds it.
        drawn = provenance.short_hash(torch.get_rng_state().numpy().tobytes())
        with self.ranks.fail_together():
            config = json.loads(json.dumps(_plain_setting("settings", settings)))  # as read later
            hashes, draws = [], []

            def read_twice() -> list[tuple]:
                for number in range(2):
                    seeds.seed_everything(number)
                    read, drew = samples.read_samples(rows, self.task, 1 + number, training=True)
                    hashes.append(samples.hash_batch(rows, self.task, read))
                    draws.append(drew)
                return read

            read, self.by_reading = inventory.moved_by(rows, read_twice)
            samples.check_repeated(hashes, draws)
            seeds.seed_everything(self.training.seed)
            # To try the loop on: the shortest first, the longest last.
            self.samples = read[:8]
            if not self.training.rows_depend:  # whose collate may take no single row
                self.samples = samples.choose_probes(read, self.task)
        accelerator = self.training.accelerator
        on_gpu = accelerator.device.type == "cuda"
        manifest = provenance.describe(
            config=config,
            data={"samples": len(rows), "fingerprint": hashes[0]},
            code=consistency.hash_project(self.project),
            versions=provenance.versions(accelerator.mixed_precision, on_gpu),
        )
        facts = consistency.collect_facts(manifest, self.training.exact)
        alike.check_same(self.ranks, facts | self.describe_model(drawn))
        device = accelerator.device.type
        hardware = provenance.describe_hardware(self.ranks, device, manifest["hardware"])
        frozen = weights.frozen_digest(self.model)
        manifest |= {"hardware": hardware, "frozen_weights": frozen}
        if accelerator.is_main_process:  # the only one that compares
            manifest["row_digests"] = samples.digest_rows(rows, self.task)
        return manifest

    def describe_model(self, drawn: str) -> dict[str, str]:
        """Return what must be the same on all processes, since it was built by each.

        The weights of DDP are those of process 0. FSDP takes each part from the process that keeps
        it: if all have drawn the same numbers since they were seeded, they have the same weights.
        """
        form = provenance.short_hash(repr(form_of(self.model)).encode())
        facts = {"model (names and shapes of its weights)": form}
        accelerator = self.training.accelerator
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        sends = hasattr(accelerator, "has_sent_weights") or not self.ranks.layout.fsdp
        if sends or plugin.cpu_ram_efficient_loading:
            return facts
        seeded = torch.Generator().manual_seed(torch.initial_seed()).get_state()
        fresh = provenance.short_hash(seeded.numpy().tobytes()) == drawn
        is_read = getattr(self.model, "name_or_path", "")  # by from_pretrained, and not drawn
        if self.ranks.layout.processes > 1 and not is_read:
            problem = (
                "under FSDP2 each process keeps parts of the weights that it has built, and it is "
                "not known that all have built the same: call samestep.send_weights(accelerator, "
                "model) before accelerator.prepare"
            )
            if fresh:  # nothing was drawn since the seed was set
                raise UserError(f"{problem}, or set_seed before the model is built")
            print_on_main(f"warning: {problem}")
        facts["random state (call set_seed before the model is built)"] = drawn
        return facts

    def find_start(self, training: Any) -> ResumePoint:
        """Lock the folder, and find where the run starts."""
        asked: list[str] = []

        def find(broken: dict[Path, str]) -> ResumePoint:
            self.lock = self.lock or run_folder.RunLock(self.folder)
            if not broken:
                asked.extend(training.mirror.ask())
            point, accept, none = ResumePoint(remarks=[*asked]), training.accept_changes, {}
            check = functools.partial(
                checkpoints.check_settings, current=self.manifest, effects=none, accept=accept,
                defaults=none,
            )  # fmt: skip
            given = {"mirror": training.mirror, "check": check, "broken": broken}
            point.find(self.folder, training.begins_from, hashed=False, **given)
            if not point.checkpoint:
                checkpoints.check_none_saved(self.folder)
            point.compare(self.manifest, training.accept_changes, {}, {}, self.project)
            if point.in_folder:
                point.best = point.saved.get("best")
            if self.plan.is_auto:
                is_sharded = self.ranks.layout.sharded
                point.find_size(self.folder, self.manifest["hardware"], is_sharded)
            point.write_running(self.folder)
            provenance.write_hardware(self.folder, self.manifest)
            return point

        point = find_together(self.ranks, training.mirror, find)
        training.mirror.join(self.ranks, point.saved.get("step", 0) if point.in_folder else 0)
        self.hardware = describe_run(training.accelerator, self.plan.describe())
        print_on_main(f"{self.label}{self.hardware}")
        point.say(self.manifest["hardware"])
        return point

    def prepare_steps(self, training: Any) -> None:
        """Prepare the model for the first step."""
        if training.exact and training.gradients is None:
            exact.sum_inside_blocks(self.model)

    def after_trial(self, training: Any, batch: Any) -> None:
        """Check more after the loop was tried: nothing in a script."""

    def end_loop(self, training: Any, state: str) -> None:
        """End the run: "finished" after its last step, "stopped" after a break out of the steps."""
        if state == "finished":
            training.close()
            training.write_status("finished", exit_code=0)
            if not training.mirror.upload():  # the same command uploads it
                with self.ranks.fail_together():
                    training.mirror.check()
                training.write_status("finished", exit_code=1)
                raise failures.Ended(1)
        elif not self.has_ended:
            training.saver.join()
            training.note_commits()
            training.write_status("stopped")
            training.mirror.end_failed()

    def end_stopped(self, training: Any) -> None:
        """End the trackers of a process that ends, since it was asked to stop."""
        self.has_ended = True
        attempt("the tracker was not closed", training.accelerator.end_training)


# ---- Arguments -----------------------------------------------------------------------------------


def _end_in_one_line(run: Script) -> None:
    """End a script that fails with a line and an exit code, as train.py ends; the status of the run
    has it, too. Tracebacks stay on the screen."""

    def say(_: type, error: BaseException, __: Any) -> None:
        program, output = Path(sys.argv[0]).name, run.folder if run.lock else None
        run.has_ended = True
        code = failures.report(error, program, output, in_script=True)
        run.training.mirror.end_failed()
        sys.exit(code)

    sys.excepthook = say


def _folder_of_script() -> Path | None:
    """Return the folder of the program that runs; None in a notebook."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file).resolve().parent if file and os.path.isfile(file) else None


def check_whole(least: int, **numbers: Any) -> None:
    """Raise UserError unless these are whole numbers, and none is too small."""
    for name, value in numbers.items():
        if not isinstance(value, int) or value < least:
            raise UserError(f"{name} is {value!r}; give a whole number, at least {least}")
        if value >= 2**64:
            raise UserError(f"{name} is {value}; give a number below 2**64")


def check_rows(rows: Any) -> None:
    """Raise UserError unless rows can be addressed, and there is one."""
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise UserError(f"rows are a {type(rows).__name__}; give a dataset with len() and [i]")
    if not len(rows):
        raise UserError("rows are empty; give at least one")


def check_prepared(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Raise UserError unless these come from accelerator.prepare, and can be trained."""
    if hasattr(model, "_orig_mod"):
        raise UserError(
            "torch.compile has wrapped the model: call model.compile() before accelerator.prepare, "
            "without dynamo_backend"
        )
    known = [accelerator.unwrap_model(prepared) for prepared in accelerator._models]
    is_known = any(accelerator.unwrap_model(model) is prepared for prepared in known)
    if not is_known or not isinstance(optimizer, AcceleratedOptimizer):
        raise UserError(
            "Training takes what accelerator.prepare(model, optimizer) returns; prepare the model "
            "and the optimizer, and no dataloader"
        )
    if len(accelerator._optimizers) > 1:
        raise UserError(
            "a second optimizer is prepared, and no checkpoint would hold it: write one class that "
            "makes the steps of both, as MuonAdamW in docs/cookbook.md, and prepare that"
        )
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "FSDP") and not kind.startswith("MULTI_"):
        raise UserError(f"Training works with DDP and FSDP2, not with {kind}")
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise UserError("Training works with fsdp_version: 2; this is FSDP of version 1")
    if layout_of_accelerator(accelerator).replica_size > 1:
        raise UserError("Training works with DDP and FSDP2, not with tensor or context parallelism")
    config = getattr(accelerator.unwrap_model(model), "config", None)
    config = getattr(config, "distributed_config", None)
    if any((getattr(config, name, 1) or 1) > 1 for name in ("tp_size", "pp_size")):
        raise UserError(
            "Training works with fsdp_size and ep_size of a DistributedConfig, not with tp_size or "
            "pp_size, whose processes need the same rows: leave them out"
        )
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
    """Make torch deterministic, on CPUs with one thread; raise UserError for what is not."""
    precision, is_fsdp = accelerator.mixed_precision, accelerator.distributed_type.value == "FSDP"
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    on_cpu = accelerator.device.type == "cpu"
    # Under FSDP on CPUs a fused optimizer rounds the last values of a shard in another way.
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    exclusions.check(
        {
            "exact": True,
            "fp8": precision == "fp8",
            "half precision under FSDP2": is_fsdp and precision != "no",
            "offload": is_fsdp and hasattr(plugin.cpu_offload, "pin_memory"),  # a CPUOffloadPolicy
            "fused=True under FSDP2 on CPUs": on_cpu and is_fsdp and is_fused,
            "an Apple GPU": accelerator.device.type == "mps",
            "compile": is_compiled(model),
        }
    )
    exact.be_deterministic()
    if on_cpu:
        torch.set_num_threads(1)  # sums depend on the number of threads


def _merge_settings(fixed: dict, settings: dict) -> dict:
    """Merge Training's own settings and the script's; raise UserError if they differ."""
    if not isinstance(settings, dict):
        raise UserError(f"settings are a {type(settings).__name__}; give a dict, as vars(args)")
    for name in fixed.keys() & settings.keys():
        if settings[name] != fixed[name]:
            raise UserError(
                f"{name} is {fixed[name]!r}, and in settings {settings[name]!r}; give the same, or "
                "call it otherwise in settings"
            )
    return fixed | settings


def _plain_setting(name: str, value: Any) -> Any:
    """Return a setting as JSON has it; raise UserError for one that another start could not
    compare: JSON has no tensors, and the text of a set differs from start to start."""
    if isinstance(value, dict):
        named = {str(key): entry for key, entry in value.items()}
        return {key: _plain_setting(f"{name}.{key}", entry) for key, entry in named.items()}
    if isinstance(value, list | tuple):
        return [_plain_setting(f"{name}.{i}", entry) for i, entry in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Path | torch.dtype | torch.device):
        return str(value)
    if value is not None and not isinstance(value, bool | int | float | str):
        raise UserError(
            f"{name} is a {type(value).__name__}; give a number, a text, or a list or dict of "
            "these, such as sorted(...) of a set or tensor.tolist()"
        )
    return value


def plain_values(values: dict[str, Any], reserved: tuple[str, ...]) -> dict[str, Any]:
    """Return values for a line of metrics as numbers and texts; raise UserError for anything else,
    and for names that a line has of itself."""
    plain = {}
    for name, value in values.items():
        if isinstance(value, np.generic) or (torch.is_tensor(value) and value.numel() == 1):
            value = value.item()
        if name in reserved or not isinstance(value, float | int | str):
            raise UserError(
                f"{name} is {value!r:.60}; log a number or a text, under another name than those "
                "of a line of metrics.jsonl"
            )
        plain[name] = value
    return plain
