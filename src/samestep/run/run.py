"""A run of train.py: its accelerator and its model, and what it gives Training."""

import contextlib
import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import send_to_device

from samestep.base import files, garbage, run_folder
from samestep.base.console import print_json, print_on_main
from samestep.base.errors import as_user_error, attempt, catch
from samestep.base.workers import count_cores
from samestep.contract import contract, dtypes
from samestep.launch import device
from samestep.prepared.run_data import IDENTITY
from samestep.processes import sharding
from samestep.processes.ranks import Ranks
from samestep.report import tracking
from samestep.run import probes
from samestep.run.startup import RunStart, agree_on_start
from samestep.settings import length
from samestep.state import checkpoints, deepspeed, provenance, weights
from samestep.state.optimizers import optimizer_settings, settings_as_text
from samestep.step import context_parallel, exact, seeds, trial
from samestep.step.evaluation import Evaluation
from samestep.step.model import (
    TaskModule,
    build_on_ranks,
    eager,
    enable_gradient_checkpointing,
    sync_batch_norms,
)
from samestep.step.plan import assign_micro_batches
from samestep.step.samples import collate
from samestep.training.resume import describe_run


class Run:
    """A run of train.py on this process. All processes call its methods, in the same order.

    cfg: the settings. task: the functions of task.py, with cfg and data.
    rows: to train on. validation: to evaluate on.
    max_steps: its last step. options: the arguments of Training.
    """

    verb = "continuing from"
    warns_of_rounding = True
    sets_lr = True  # the loop sets the learning rate of each step
    watches_rows = False  # views are made anew
    sets_modes = True  # see model.TaskModule.train
    shows_lines = True
    evaluates_last = True  # in the body of the loop
    trial_mode = torch.no_grad  # where the loop is tried
    loss_name, prefix, label = "task.loss_sum", "task.", ""
    loss_remedy = "give a sum over independent rows, or write rows_depend = True"

    def __init__(self, start: RunStart, ranks: Ranks, stop: Any):
        """Take the place to start, which the main process has found in `prepare_run`."""
        self.start, self.ranks, self.stop, self.task = start, ranks, stop, start.task
        self.cfg, self.output = start.cfg, start.output
        self.project = Path(inspect.getfile(type(start.cfg))).parent
        self.plan, self.lock, self.mirror = start.plan, start.lock, start.mirror
        self.rows, self.validation = start.views
        self.accelerator: Any = None
        self.point = agree_on_start(ranks, start)
        self.first_step = self.point.saved.get("step", 0)  # done before
        self.max_steps = max(self.first_step, self.point.max_steps)
        self.nothing_to_do = self.cfg.check or bool(self.point.finished)
        self.manifest, self.mixture = start.manifest, self.point.mixture
        self.samples = start.probes[0]  # to try the loop on
        self.unit = getattr(self.task, "UNIT", "samples")
        self.profile_steps = self.cfg.profile_steps
        self.rounds = self.cfg.tf32
        # exact counts them in each step.
        self.tries_backward = not (self.cfg.exact or self.cfg.find_unused_parameters)
        self.sums: dict | None = None  # of the newest evaluation, for the report
        # Outputs of the trained model for test inputs, and what failed: see ending.py.
        self.tested: tuple[list[dict] | None, Exception | None] = (None, None)
        if self.cfg.eval_only:
            self.verb = "evaluating"

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of Training."""
        cfg = self.cfg
        same = ("seed", "global_batch_size", "micro_batch_size", "exact", "keep_checkpoints")
        same += ("keep_every", "async_save", "num_workers", "log_every", "max_skipped_steps")
        same += ("accept_changes",)
        given = {name: getattr(cfg, name) for name in same}
        depend = getattr(self.task, "rows_depend", bool)()
        return {**given, "folder": self.output, "rows_depend": depend, "run": self}

    def print_summary(self) -> int:
        """Say why there is nothing to do; return the exit code."""
        print_on_main(self.start.summary())
        print_json(0, **self.start.answer())
        return 0 if self.mirror.upload() else 1

    # ---- The accelerator and the model

    def set_accelerator(self, accelerator: Accelerator) -> None:
        """Check the accelerator, and print what runs on what. The main process writes config.yaml,
        hardware.yaml and the status, and starts the tracker."""
        self.accelerator, cfg = accelerator, self.cfg
        device.check_accelerator(accelerator, cfg)
        kept = f"weights {self.task.WEIGHTS}, " if hasattr(self.task, "WEIGHTS") else ""
        step = self.plan.describe(self.ranks.layout.replica_name)
        self.hardware = describe_run(accelerator, step, kept)
        print_on_main(f"{self.output}: {self.hardware}")
        kind, versions = accelerator.device.type, self.manifest["hardware"]
        hardware = provenance.describe_hardware(self.ranks, kind, versions)
        self.manifest["hardware"] = hardware
        self.point.say(hardware)
        if self.ranks.layout.deepspeed:
            deepspeed.configure(accelerator, self.plan, cfg.max_grad_norm)
        if accelerator.is_main_process and not cfg.eval_only:
            text = yaml.safe_dump(self.start.given, sort_keys=False, allow_unicode=True)
            files.replace_text(self.output / "config.yaml", text)
            if self.plan.is_auto:
                self.point.find_size(self.output, hardware, self.ranks.layout.sharded)
            provenance.write_hardware(self.output, self.manifest)
            self.keep_identity()
            self.point.write_running(self.output)
            tracking.start_tracker(accelerator, self.manifest["config"])

    def keep_identity(self) -> None:
        """Copy what the data wrote beside its rows, such as a tokenizer, into the run folder."""
        data, kept = self.start.data, self.output / IDENTITY
        if hasattr(data, "folder"):
            from samestep.prepared import prepared

            if prepared.identity_of(kept) != self.start.manifest["identity"]:
                with checkpoints.replaced_folder(kept) as fresh:
                    prepared.copy_identity(data.folder, fresh)

    def new_model(self) -> torch.nn.Module:
        """Build the task's model with its first weights, the same on each process."""
        seeds.seed_everything(self.cfg.seed)
        return contract.check_model(self.task.build_model())

    def build_model(self, accelerator: Accelerator) -> torch.nn.Module:
        """Build the task's model as the recipe and the YAML want it: before it is prepared."""
        if self.accelerator is None:
            self.set_accelerator(accelerator)
        layout = self.ranks.layout
        model = build_on_ranks(self.new_model, accelerator, self.ranks)
        garbage.collect_as_usual()  # a model's libraries are imported
        if line := dtypes.describe(model):
            print_on_main(line)
        with self.ranks.fail_together():
            if self.cfg.gradient_checkpointing:
                enable_gradient_checkpointing(model)
            context_parallel.check_model_shares_rows(model, layout)
        model = sync_batch_norms(model, accelerator, self.plan, self.cfg.device_shares)
        trained = [p for p in model.parameters() if p.requires_grad]
        parameters = sum(p.numel() for p in trained)
        self.trained_bytes = sum(p.nbytes for p in trained)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.share_trained = parameters / self.parameters
        self.about = f"{parameters:,} parameters to train; {{items}} {self.unit} a step"
        with self.ranks.fail_together():
            if accelerator.is_main_process:
                self.manifest["frozen_weights"] = weights.frozen_digest(model)
            sharding.split_matrices(model, accelerator, layout)
        return model

    @contextlib.contextmanager
    def preparing(self, model: torch.nn.Module, optimizer: Any) -> Iterator[TaskModule]:
        """Give the module to prepare in the body: `module(function, batch)`, see TaskModule."""
        if self.ranks.layout.tp > 1:
            sharding.split_by_kind(optimizer)
        self.optimizer_settings = optimizer_settings(optimizer)
        self.manifest["optimizer"] = settings_as_text(self.optimizer_settings)
        with self.ranks.fail_together():
            sharding.check_weights(model, self.ranks.layout)
            context = sharding.compute_context(self.accelerator, self.cfg.exact)
            module = TaskModule(model, context)
            if self.cfg.exact:
                exact.sum_inside_blocks(module)
            if self.ranks.layout.deepspeed:
                deepspeed.hand_over(module, optimizer, self.accelerator)
            if self.cfg.compile:
                device.compile_blocks(module)
            with sharding.hide_buffers(module, self.accelerator):
                yield module

    # ---- What Training asks: see training/script.py

    def find_start(self, training: Any) -> Any:
        return self.point

    def prepare_steps(self, training: Any) -> dict[str, Any] | None:
        """Assign micro-batches by the speed of each device, if device_shares is auto, before the
        first step, and again at the next start; return a line for the log."""
        if training.step == 0 and getattr(self.cfg.task, "model_name_or_path", ""):
            training.open_log(0).note(event="begin", few_rows_loss=self.few_loss(training))
        plan, model, rows = training.plan, training.model, training.rows
        if self.cfg.device_shares != "auto" or len(plan.shares) == 1:
            return None
        with self.ranks.fail_together():
            first = training.samples(training.step)
            step = rows.sort(range(first, first + plan.samples))
            middle = plan.positions(step, plan.count // 2)  # of rows that are sorted by size
            batch = collate(self.task, rows.__getitems__(list(middle))).batch
            batch = send_to_device(batch, self.accelerator.device)
        with self.ranks.fail_together():
            model.train()
            seeds.seed_everything(self.cfg.seed)
            put_back = training.saver.state.keep()
            loss_of = lambda: model(self.task.loss_sum, batch)  # noqa: E731
            seconds = measure_micro_batch(model, loss_of, put_back)
        speeds = [1 / duration for duration in self.ranks.gather(seconds)]
        assigned = assign_micro_batches(plan.count, speeds, least=1)
        training.plan = self.plan = dataclasses.replace(plan, shares=assigned)
        print_on_main(f"device_shares auto: a step of {self.plan.describe()}, by measured speeds")
        return {"event": "shares", "shares": " + ".join(map(str, assigned))}

    def after_trial(self, training: Any, computed: Any) -> None:
        """Check the rest of the task after the loop was tried."""
        with eager(training.model):
            given = training.model, self.task, computed.batch, self.share_trained
            training.meter.count_flops(*given)
        probes.probe_task(self, training, draws=computed.draws)

    def end_loop(self, training: Any, state: str) -> None:
        """Leave the end after the last step, or a break, to the export."""

    def end_stopped(self, training: Any) -> None:
        """Leave the processes, and close the tracker, of a run that was asked to stop."""
        attempt("the processes were not left", self.leave)
        self.end_tracking()

    def leave(self) -> bool:
        """End the communication of the processes; return whether this is the main one, which works
        on: what it does may take longer than the timeout."""
        self.accelerator.wait_for_everyone()
        self.accelerator.state.destroy_process_group()
        torch.set_num_threads(count_cores())  # the other processes leave their cores
        return self.accelerator.is_main_process

    def end_tracking(self) -> None:
        if self.accelerator.is_main_process:
            attempt("the tracker was not closed", self.accelerator.end_training)

    # ---- Evaluation

    def few_loss(self, training: Any) -> float:
        """Return the loss of a few held-out rows, evenly spread; NaN: the scores need more rows."""
        count = len(self.validation)
        few = range(0, count, -(-count // length.FEW_ROWS))
        evaluation = training.evaluation(torch.utils.data.Subset(self.validation, few))
        model, sums = training.exported, self.sums
        with torch.no_grad():
            for batch in evaluation:
                evaluation.add(lambda: model(self.task.eval_sums, batch))
                if hasattr(self.task, "eval_outputs"):
                    evaluation.keep(lambda: model(self.task.eval_outputs, batch))
        scores, _ = catch(self.score, evaluation)
        self.sums = sums
        return scores["eval_loss"] if scores else math.nan

    def advise(self, training: Any) -> None:
        """Print what to write if the loss of these rows hardly fell since the first step."""
        lines = run_folder.read_metrics(self.output)
        found = [line["few_rows_loss"] for line in lines if line.get("few_rows_loss") is not None]
        if found := self.ranks.from_main(found):
            rows, losses = self.manifest["data"]["samples"], (found[-1], self.few_loss(training))
            given = rows, self.max_steps, losses, self.parameters
            for line in length.remarks_on_loss(self.cfg, *given):
                print_on_main(line)

    def score(self, evaluation: Evaluation) -> dict[str, float]:
        """Compute the scores of an evaluation: of outputs, on the main process, which has them."""
        task, ranks, sums = self.task, self.ranks, evaluation.sums()
        sources = evaluation.rows.sources
        if not hasattr(task, "eval_outputs"):
            with as_user_error():
                scores, self.sums = contract.score(task, sums, sources)
            return scores
        outputs, result = evaluation.gathered(), None
        with ranks.fail_together():
            if outputs is not None:
                result = contract.score(task, sums, sources, outputs)
        scores, self.sums = ranks.from_main(result)
        return scores


def measure_micro_batch(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], put_back: Callable[[], None]
) -> float:
    """Measure the seconds that this device takes for loss and gradient of a micro-batch: the median
    of three, after one to warm up. No process waits for another. put_back: see nothing_changes."""
    seconds = []
    with trial.nothing_changes(model, put_back):
        for _ in range(4):
            began = time.perf_counter()
            loss_of().backward()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - began)
            model.zero_grad(set_to_none=True)
    return median(seconds[1:])
