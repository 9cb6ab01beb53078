"""A run before its loop: where it starts and ends, and the model that it trains."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import send_to_device

from samestep.base import files, run_folder
from samestep.base.console import print_on_main, without_credentials
from samestep.contract import contract, dtypes
from samestep.launch import device, shutdown
from samestep.processes import sharding
from samestep.processes.ranks import Ranks
from samestep.report import speed, tracking
from samestep.run.startup import IDENTITY, RunStart, agree_on_start
from samestep.state import checkpoints, deepspeed, optimizers, provenance, weights
from samestep.step import context_parallel, exact, seeds, shares
from samestep.step.model import (
    TaskModule,
    build_on_ranks,
    enable_gradient_checkpointing,
    sync_batch_norms,
)
from samestep.step.plan import assign_micro_batches
from samestep.step.samples import SampleDataset, collate

# Variables that decide where and how a run computes; none of them holds a secret.
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "DS_", "NCCL_", "TORCH_NCCL_", "GLOO_")
NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")


class Run:
    """A run of train.py on this process. All processes call its methods, in the same order."""

    def __init__(self, start: RunStart, ranks: Ranks, stop: shutdown.StopRequest):
        """Finds where to start, which the main process has found in `prepare`."""
        self.start, self.ranks, self.stop, self.task = start, ranks, stop, start.task
        self.cfg, self.output, self.plan = start.cfg, start.output, start.plan
        self.resume_point = agree_on_start(ranks, start)
        self.first_step = self.resume_point.saved.get("step", 0)  # done before
        self.first_sample = self.resume_point.saved.get("samples", 0)
        self.last_step = max(self.first_step, self.resume_point.max_steps)
        self.nothing_to_do = self.cfg.check or bool(self.resume_point.finished)
        self.problem: Exception | None = None  # of work in the background
        self.lanes: dict[int, int] = {}  # of a stream: see TrainLoader.last_of_lanes
        # Outputs of the trained model for test inputs, and what failed: see ending.py.
        self.tested: tuple[list[dict] | None, Exception | None] = (None, None)
        self.shares = ""  # micro-batches of each process, where they were measured

    def samples(self, step: int) -> int:
        """Samples of the run up to the end of this step."""
        saved = self.resume_point.saved
        return checkpoints.samples_at(step, saved, self.cfg.global_batch_size)

    def epochs(self, step: int) -> int:
        """Passes over the training data that are complete at the end of this step."""
        return self.samples(step) // self.start.manifest["data"]["samples"]

    def train_rows(self) -> SampleDataset:
        """The rows to train on, by their positions in the run. A stream begins where the run
        starts."""
        view = self.start.views[0]
        rows = SampleDataset(view, self.task, self.cfg.seed, self.resume_point.mixture)
        if rows.is_stream:
            lanes = self.resume_point.saved.get("lanes")
            view.begin(self.cfg.seed, self.plan.samples, self.first_sample, lanes)
        return rows

    def measure_shares(self, model: torch.nn.Module) -> None:
        """With device_shares auto, assigns the micro-batches by the speed of each device: once, and
        again at the next start. Call it with the prepared model, before the loaders are made."""
        cfg, plan = self.cfg, self.plan
        if cfg.device_shares != "auto" or len(plan.shares) == 1:
            return
        with self.ranks.fail_together():
            rows = self.train_rows()
            step = rows.sort(range(self.first_sample, self.first_sample + plan.samples))
            middle = plan.positions(step, plan.count // 2)  # of rows that are sorted by size
            batch, *_ = collate(self.task, rows.__getitems__(list(middle)))
            batch = send_to_device(batch, self.accelerator.device)
        with self.ranks.fail_together():
            model.train()
            seeds.seed_everything(cfg.seed)
            seconds = shares.measure_micro_batch(model, lambda: model(self.task.loss_sum, batch))
        speeds = [1 / each for each in self.ranks.gather(seconds)]
        assigned = assign_micro_batches(plan.count, speeds, least=1)
        self.plan = dataclasses.replace(plan, shares=assigned)
        self.shares = " + ".join(map(str, assigned))
        print_on_main(f"device_shares auto: a step of {self.plan.describe()}, by measured speeds")

    def gather_lanes(self) -> list[int]:
        """Of a stream: the last sample of each lane in the newest step, over all processes."""
        last = {
            lane: sample for own in self.ranks.gather(self.lanes) for lane, sample in own.items()
        }
        return [last[lane] for lane in sorted(last)]

    def print_summary(self) -> int:
        """Says why there is nothing to do; the exit code."""
        print_on_main(self.start.summary())
        return 0

    def set_accelerator(self, accelerator: Accelerator) -> None:
        """Checks the accelerator, and prints what runs on what."""
        self.accelerator, cfg = accelerator, self.cfg
        device.check_accelerator(accelerator, cfg)
        kept = f"weights {self.task.WEIGHTS}, " if hasattr(self.task, "WEIGHTS") else ""
        self.hardware = (
            f"{accelerator.num_processes} x {accelerator.device.type}, "
            f"{accelerator.mixed_precision.replace('no', 'fp32')}, {kept}"
            f"distributed: {accelerator.distributed_type.value}; "
            f"a step of {self.plan.describe(self.ranks.layout.replica_name)}"
        )
        print_on_main(f"{self.output}: {self.hardware}")
        for remark in self.resume_point.remarks:
            print_on_main(remark)
        self.complete_manifest()
        if self.ranks.layout.deepspeed:
            deepspeed.configure(accelerator, self.plan, cfg.max_grad_norm)
        self.unit = getattr(self.task, "UNIT", "samples")
        self.meter = speed.SpeedMeter(accelerator, self.ranks, self.unit)

    def complete_manifest(self) -> None:
        """Adds hardware and history to manifests; prints what changed since the checkpoint's."""
        manifest, saved = self.start.manifest, self.resume_point.saved
        device_type = self.accelerator.device.type
        now = provenance.describe_hardware(self.ranks, device_type, manifest["hardware"])
        if line := provenance.hardware_line(saved.get("hardware", now), now):
            print_on_main(line)
        manifest["hardware"] = now
        about = self.first_step, self.first_sample
        manifest["history"] = provenance.extend_history(saved, manifest, *about)

    def start_logging(self) -> None:
        """Writes config.yaml, hardware.yaml and the status, and starts the tracker.

        Only the main process calls it.
        """
        if self.cfg.eval_only:
            return
        text = yaml.safe_dump(self.start.given, sort_keys=False, allow_unicode=True)
        files.replace_text(self.output / "config.yaml", text)
        hardware = self.start.manifest["hardware"]
        hardware = hardware | {"environment": _launch_variables()}
        text = yaml.safe_dump(hardware, sort_keys=False, allow_unicode=True)
        files.replace_text(self.output / "hardware.yaml", text)
        self.keep_identity()
        saved = self.first_step if self.resume_point.own else 0
        run_folder.write_status(self.output, "running", saved=saved)
        tracking.start_tracker(self.accelerator, self.start.manifest["config"])

    def keep_identity(self) -> None:
        """Copies what the data wrote beside its rows, such as a tokenizer, into the run folder."""
        data, kept = self.start.data, self.output / IDENTITY
        if hasattr(data, "folder"):
            from samestep.prepared import prepared

            if prepared.identity_of(kept) != self.start.manifest["identity"]:
                with checkpoints.replaced_folder(kept) as fresh:
                    prepared.copy_identity(data.folder, fresh)

    def new_model(self) -> torch.nn.Module:
        """The task's model with its first weights, the same on each process."""
        seeds.seed_everything(self.cfg.seed)
        return contract.check_model(self.task.build_model())

    def build_model(self) -> torch.nn.Module:
        """The task's model as the recipe and the YAML want it: before it is prepared."""
        accelerator, layout = self.accelerator, self.ranks.layout
        model = build_on_ranks(self.new_model, accelerator, self.ranks)
        if line := dtypes.describe(model):
            print_on_main(line)
        with self.ranks.fail_together():
            if self.cfg.gradient_checkpointing:
                enable_gradient_checkpointing(model)
            context_parallel.check_model_shares_rows(model, layout)
        model = sync_batch_norms(model, accelerator, self.plan, self.cfg.device_shares)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in trained)
        self.trained_bytes = sum(p.nbytes for p in trained)
        self.share_trained = self.parameters / sum(p.numel() for p in model.parameters())
        with self.ranks.fail_together():
            if accelerator.is_main_process:
                self.start.manifest["frozen_weights"] = weights.frozen_digest(model)
            sharding.split_matrices(model, accelerator, layout)
        return model

    @contextlib.contextmanager
    def preparing(self, model: torch.nn.Module, optimizer: Any) -> Iterator[TaskModule]:
        """Gives the module to prepare in its body: `module(function, batch)`, see TaskModule."""
        if self.ranks.layout.tp > 1:
            sharding.split_by_kind(optimizer)
        self.optimizer_settings = optimizers.optimizer_settings(optimizer)
        self.start.manifest["optimizer"] = optimizers.settings_as_text(self.optimizer_settings)
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


def _launch_variables() -> dict[str, str]:
    """The variables that hardware.yaml lists beside these entries."""
    chosen = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES) or name in NAMES:
            chosen[name] = without_credentials(value)
    return chosen
