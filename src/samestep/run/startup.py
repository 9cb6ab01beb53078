"""Prepares a run before the processes meet: config, data, and the checkpoint to continue from.

Each process does this alone, since preparing data may take longer than the timeout of the process
group. `--check` runs only this part.
"""

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import yaml

from samestep.base import run_folder
from samestep.base.console import is_main, one_line, plural
from samestep.base.errors import UserError
from samestep.base.fields import as_json
from samestep.base.files import read_json_object, read_text
from samestep.contract import contract
from samestep.launch import launched, shutdown
from samestep.launch.device import check_combinations, check_devices, use_cpu
from samestep.prepared import preview
from samestep.prepared.run_data import digest_view, read_data, run_of
from samestep.processes import alike, exclusions
from samestep.processes.mesh import Layout
from samestep.processes.ranks import Ranks
from samestep.report import tracking
from samestep.settings import config, length
from samestep.state import checkpoints, consistency, provenance
from samestep.state.mirror import Mirror
from samestep.step.inputs import Stream, list_sources
from samestep.step.order import first_mixture, next_mixture
from samestep.step.plan import StepPlan, plan_step
from samestep.step.samples import FINGERPRINT_ROWS
from samestep.training import rehearsal
from samestep.training.replay import read_question
from samestep.training.resume import ResumePoint, find_together


@dataclass
class _ResumePoint(ResumePoint):
    """Where the run starts, and how far it goes."""

    max_steps: int = 0
    mixture: dict = field(default_factory=dict)  # of the sources: see order.next_mixture
    finished: str = ""  # why there is nothing left to do

    def find_checkpoint(
        self, cfg: Any, mirror: Mirror | None = None, current: Any = None,
        broken: dict[Path, str] | None = None,
    ) -> None:  # fmt: skip
        """Find the checkpoint to start from; raise ValueError where one is missing.

        current: the manifest of this start, with which those of the mirror are compared."""
        output = Path(cfg.output_dir)
        check = functools.partial(checkpoints.check_settings, current=current, **_compared(cfg))
        self.find(output, cfg.resume, cfg.eval_only, False, mirror, check, broken)
        begins = not self.in_folder and not (cfg.eval_only and self.checkpoint)
        if begins and cfg.resume != "never" and not (output / "model").exists():
            checkpoints.check_none_saved(output, "give --resume never, or another --output_dir")
        if cfg.eval_only and not self.checkpoint:
            folder = output / "checkpoints"
            raise ValueError(f"eval_only: there is no checkpoint in {folder}; train first")

    def find_start(self, cfg: Any, manifest: dict, given: dict) -> None:
        """Find the last step, and whether the run can resume from its checkpoint, or has ended.

        `given`: the settings as config.yaml holds them.

        Raises ValueError if it cannot continue.
        """
        output, effects = Path(cfg.output_dir), change_effects(cfg)
        folder = output / "checkpoints"
        if self.in_folder and self.same_validation(manifest):
            self.best = self.saved.get("best")
        if cfg.eval_only and cfg.export == "best" and cfg.resume == "auto":
            path, saved, lost = checkpoints.find_best(folder, self.best)
            if path:  # it may be older than the newest
                self.checkpoint, self.saved, self.verified = path, saved, True
            else:
                self.remarks.append(f"{lost}: the newest is evaluated")
        step, samples = self.saved.get("step", 0), self.saved.get("samples", 0)
        project = Path(inspect.getfile(type(cfg))).parent
        self.compare(manifest, **_compared(cfg), project=project)
        if cfg.eval_only:  # a run whose last step is its first
            self.max_steps = step
            return
        if cfg.num_epochs:
            total = length.samples_of(cfg, manifest["data"]["samples"])
            self.max_steps = step + max(0, -(-(total - samples) // cfg.global_batch_size))
        rows = manifest["data"]["samples"]
        self.remarks += length.remarks_on_length(cfg, rows, self.max_steps)
        if self.checkpoint:
            manifest["mixture"] = self.continue_mixture(manifest["mixture"])
        self.mixture = manifest["mixture"]
        self.check_finished(output, given, effects)
        if step < self.max_steps:
            checkpoints.check_disk_space(folder)
        if cfg.export == "best" and self.best and not self.finished:
            path, _, lost = checkpoints.find_best(folder, self.best, hashed=False)
            if not path:
                self.remarks.append(f"warning: {lost}")
                self.best = None
            if any(name.startswith(("task.", "code ", "library")) for name in self.changed):
                self.remarks.append(
                    "warning: the best evaluation may be one from before the change of task "
                    "settings or code; if they change the loss, give --export last"
                )

    def same_validation(self, manifest: dict) -> bool:
        """Return whether the checkpoint was evaluated on the rows of today."""
        return self.saved.get("data", {}).get("validation") == manifest["data"]["validation"]

    def continue_mixture(self, current: dict) -> dict:
        """Return the mixture of sources after the checkpoint; `current`: that of a new run."""
        weights = {name: weight for name, (weight, _) in current["sources"].items()}
        before, samples = self.saved["mixture"], self.saved["samples"]
        mixture = next_mixture(before, samples, weights)
        if mixture["first"] != before["first"]:
            goes_on = "each goes on after its last row"
            self.remarks.append(f"other weights of sources after {samples:,} samples: {goes_on}")
        return mixture

    def check_finished(self, output: Path, given: dict, effects: dict) -> None:
        """Note that the run has finished: its newest checkpoint is the last, and exported.

        The export may be that of the best checkpoint. Raises ValueError for a model whose
        checkpoints are gone, unless it was made with these settings.
        """
        step, best = self.saved.get("step", 0), self.saved.get("best") or [0]
        exported = read_json_object(output / "status.json").get("exported", -1)
        if not (output / "model").exists():
            return
        if self.in_folder:
            if step < self.max_steps or exported not in (step, best[0]):
                return
            self.finished = f"{plural(step, 'step')}, and model/ is that of step {exported}"
            if self.changed:
                changes = "; ".join(provenance.describe_changes(self.changed))
                self.finished += f"; no step is left for {changes}"
            self.finished += "; to export again delete model/"
            return
        before = {"config": _read_settings(output / "config.yaml")}
        now = {"config": given}
        settings = [checkpoints.result_settings(entries, effects) for entries in (before, now)]
        if exported == -1 or checkpoints.differences(*settings):
            # Another training would replace the model.
            raise ValueError(
                f"{output} holds a finished run, whose checkpoints are gone and whose settings "
                "may differ from yours; give another --output_dir"
            )
        self.finished = "its checkpoints are gone, its model is there"


@dataclass
class RunStart:
    """What is known before the model is built."""

    cfg: Any  # train.Config, with what prepare_data has filled in
    given: dict  # its settings before that, for config.yaml
    output: Path
    lock: Any  # run_folder.RunLock, held until the process ends; None off the main process
    plan: StepPlan
    data: Any  # what task.prepare_data returned
    task: Any  # the functions of task.py, see contract.bind
    views: tuple  # the rows to train and to evaluate on
    probes: list[list[tuple]]  # samples of each, to try the task on
    manifest: dict  # what the manifests of this run have in common
    resume_point: _ResumePoint  # on the main process; its files are verified by all
    # Finds it again on the main process, without checkpoints that are broken, and why.
    find: Callable[[dict[Path, str]], _ResumePoint]
    mirror: Mirror  # which has no URL unless this command trains

    def summary(self) -> str:
        """Say why this command does not train: it only checks, or the run is finished."""
        resume_point = self.resume_point
        if resume_point.finished and not self.cfg.check:
            other = "for a new run give another --output_dir"
            return f"{self.output} is finished: {resume_point.finished}; {other}"
        if self.cfg.eval_only:
            rows = f"{len(self.views[1]):,} samples"
            return f"checked: {self.output} evaluates {resume_point.checkpoint} on {rows}"
        start = "starts from the beginning"
        if resume_point.finished:
            start = "is finished"
        elif resume_point.checkpoint:
            start = f"goes on from {resume_point.checkpoint}"
        samples = f"{self.cfg.global_batch_size} of {len(self.views[0]):,} samples"
        if isinstance(self.views[0], Stream):
            samples = f"{self.cfg.global_batch_size} samples of a stream"
        steps = f"{plural(resume_point.max_steps, 'step')}, each with {samples}"
        lines = []
        if "LAUNCHING" not in os.environ:  # the run prints remarks
            lines = preview.describe_samples(self.probes[0], self.task, self.data)
            lines += resume_point.remarks
        return "\n".join([*lines, f"checked: {self.output} {start}; {steps}"])

    def answer(self) -> dict[str, Any]:
        """Return what --json prints of a start."""
        names = ("checkpoint", "finished", "max_steps", "remarks")
        found = {name: getattr(self.resume_point, name) for name in names}
        samples = None if isinstance(self.views[0], Stream) else len(self.views[0])
        return {"output_dir": self.output, "samples": samples, **found}


def _read_settings(path: Path) -> dict:
    """Read the settings in a config.yaml that a run has written; empty if missing or damaged."""
    try:
        settings = yaml.safe_load(read_text(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


def find_project() -> tuple[ModuleType, ModuleType]:
    """Import train.py and task.py of this folder; raise UserError if it is not a project's."""
    for name in ("train.py", "task.py"):
        if not Path(name).is_file():
            raise UserError(f"there is no {name} in {Path.cwd()}; start it in a project's folder")
    import task
    import train

    return train, task


def read_config(config_class: type, about: str | None, arguments: list[str]) -> Any:
    """Read this run's config from defaults, recipe and flags; raise ValueError for bad input."""
    cfg, recipe = config.parse_config(config_class, arguments, about)
    cfg.output_dir = cfg.output_dir or f"runs/{recipe.stem}"
    cfg.output_dir, cfg.resume = map(os.path.expanduser, (cfg.output_dir, cfg.resume))
    if "://" in cfg.output_dir:
        shown = one_line(cfg.output_dir, 100)
        raise ValueError(f"output_dir is {shown}, a URL; give a folder, and copy it when it ends")
    if cfg.json and not cfg.check:
        raise ValueError("json is true, but only --check answers in JSON; give both")
    if question := rehearsal.read_question():
        rehearsal.change(cfg, question)
    every = cfg.save_every
    if cfg.keep_every and (every in ("epoch", 0) or cfg.keep_every % every):
        raise ValueError(
            f"keep_every is {cfg.keep_every}, and save_every {every}; only steps that are saved "
            "can be kept: give save_every in steps, and a multiple of it as keep_every"
        )
    steps = cfg.profile_steps or [1, 1]
    if len(steps) not in (2, 3) or not 0 <= steps[1] - steps[0] < min([100, *steps[2:]]):
        raise ValueError(
            f"profile_steps is {steps}; give the first and the last of at most 100 steps, such as "
            "[10, 13], or [10, 13, 1000] for the same every 1000 steps"
        )
    return cfg


def resolved_config(cfg: Any) -> dict[str, Any]:
    """Return the settings that config.yaml and manifests hold: all but those that belong to one
    start. config.yaml has them as they were given, manifests with what prepare_data has filled in.

    A path, an option of an Enum and the like become what they are read from.
    """
    saved = [f.name for f in dataclasses.fields(cfg) if f.metadata.get("saved", True)]
    values = as_json(dataclasses.asdict(cfg))
    return {name: value for name, value in values.items() if name in saved}


def change_effects(cfg: Any) -> dict[str, str]:
    """Return the effect of a change of each field on a resumed run: "changes" in its metadata."""
    fields = config.fields_of(type(cfg)).items()
    effects = {name: field.metadata.get("changes", "result") for name, (_, field) in fields}
    if cfg.exact:  # rounding is a part of the result
        effects = {n: "result" if e == "rounding" else e for n, e in effects.items()}
    if cfg.eval_only:  # only the task's settings affect an evaluation
        effects = {n: e if n.startswith("task.") else "nothing" for n, e in effects.items()}
    return effects


def _compared(cfg: Any) -> dict[str, Any]:
    """Return how settings are compared with a checkpoint's: see checkpoints.check_settings."""
    fields = config.fields_of(type(cfg)).items()
    defaults = {name: field.default for name, (_, field) in fields}
    return {"accept": cfg.accept_changes, "effects": change_effects(cfg), "defaults": defaults}


def _read_layout(cfg: Any) -> Layout:
    """Read the layout that the launcher has set up; a check knows no other processes.

    Raises ValueError for one that the libraries, train.py or this machine cannot do.
    """
    if cfg.check:
        return Layout()
    launched.check_started()
    layout = launched.this_layout()
    launched.check_launched(layout)
    if shutdown.LAUNCHER_WORDS and "LAUNCHING" not in os.environ:  # samestep launch has checked
        launched.check_words(shutdown.LAUNCHER_WORDS)
    check_devices()
    return layout


def check_parts(rows: Any, task: Any, parts: int) -> None:
    """Raise ValueError for rows that context parallelism cannot cut into so many parts.

    It takes every position of a row to see all earlier ones, and counts losses by position.
    """
    row = rows[0] if isinstance(rows[0], Mapping) else {}
    tokens = np.asarray(row.get("input_ids", ())).size
    equal = tokens and tokens == np.asarray(row.get("labels", ())).size and not tokens % parts
    whole = hasattr(task, "eval_outputs") or "position_ids" in row  # packed by best_fit
    if not equal or whole or not hasattr(task, "check_context_parallel"):
        raise ValueError(
            f"context parallelism cuts rows into {parts} equal parts, and the first has {tokens} "
            f"input_ids. It needs as many labels, a context_length that {parts} divides, and in "
            "task.py check_context_parallel; it cannot be combined with position_ids and "
            "eval_outputs. Or use fsdp2.yaml"
        )
    task.check_context_parallel()


def _check_stream(cfg: Any, layout: Layout) -> None:
    """Raise ValueError for fields and layouts that do not go with a stream."""
    exclusions.check({"micro_batch_size auto": cfg.micro_batch_size == "auto", "a stream": True})
    if cfg.num_epochs or "epoch" in (cfg.eval_every, cfg.save_every):
        raise ValueError(
            "a stream has no end that is known: give max_steps in place of num_epochs, and "
            "eval_every and save_every in steps"
        )
    if layout.cp > 1:
        raise ValueError("context parallelism cuts prepared rows; leave task.streaming out")


# ---- Data ----------------------------------------------------------------------------------------


def _collect_manifest(cfg: Any, data: Any, views: tuple, fingerprints: list[str]) -> dict:
    """Collect the entries of all manifests of this run: settings, data, identity, versions.

    Of rows that are neither those of a datasets.Dataset nor say their digest, 64 count.
    """
    train, validation = views
    samples = 0 if isinstance(train, Stream) else len(train)
    entries = {"samples": samples, "fingerprint": digest_view(train) or fingerprints[0]}
    entries["validation"] = digest_view(validation) or fingerprints[1]
    sources = list_sources(train, training=True)
    if len(sources) > 1:
        texts = [f"{part.name}: weight {part.weight}, {part.rows} rows" for part in sources]
        entries["sources"] = "; ".join(texts)
    identity = ""
    if hasattr(data, "folder"):
        from samestep.prepared import prepared

        identity = prepared.identity_of(data.folder)
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    on_gpu = torch.cuda.is_available() and not use_cpu()  # more processes on a CPU than GPUs
    return provenance.describe(
        config=resolved_config(cfg),
        data=entries,
        code=consistency.hash_project(Path(inspect.getfile(type(cfg))).parent, consistency.OWN),
        versions=provenance.versions(precision, on_gpu),
        identity=identity,
        prepared=getattr(getattr(data, "folder", None), "name", ""),
        mixture=first_mixture({source.name: int(source.weight) for source in sources}),
    )


def _remarks_on_rows(manifest: dict, data: Any, views: tuple, fingerprints: list[str]) -> list[str]:
    """Return a line if a resumed run cannot see a change of each row."""
    counted = {"fingerprint": "train on", "validation": "evaluate on"}
    for name, view, fingerprint in zip(counted, views, fingerprints, strict=True):
        known = manifest["data"][name] != fingerprint or len(view) <= FINGERPRINT_ROWS
        if known or name == "validation" and not hasattr(data, "folder"):
            continue
        return [
            f"of the rows to {counted[name]} {FINGERPRINT_ROWS} are compared where the run "
            "resumes; for all of them give a datasets.Dataset without a transform, or a view with "
            "a method digest()"
        ]
    return []


def prepare_run(
    config_class: type, task: Any, about: str | None, arguments: list[str] | None = None
) -> RunStart:
    """Read the config, prepare the data, find the start; raise ValueError for bad input.

    `about` is train.py's docstring. --help shows the commands in its second paragraph.
    `arguments`: those of the command, unless they are given.
    """
    contract.check_functions(task)
    arguments = sys.argv[1:] if arguments is None else arguments
    cfg = read_config(config_class, about, arguments)
    output, layout = Path(cfg.output_dir), _read_layout(cfg)
    check_combinations(cfg, layout)
    plan = _plan(cfg, layout)
    cfg.tracker = "none" if cfg.eval_only else cfg.tracker
    tracking.check_tracker(cfg.tracker)
    run = run_of(cfg)
    if run and not _read_settings(run / "config.yaml").get("min_steps"):  # it keeps its steps
        cfg.min_steps = 0
    given = resolved_config(cfg)
    mirror, remarks = _mirror(cfg), []
    if cfg.mirror and not mirror.url:
        remarks.append(f"what {cfg.mirror} holds is not looked at: only a run that trains does")
    if is_main():  # before the data, whose preparation may take hours
        remarks += mirror.ask(cfg.resume)
        if not mirror.url:
            _ResumePoint(max_steps=cfg.max_steps).find_checkpoint(cfg)
    stored = read_question().get("prepared", "")  # samestep replay takes the data of then
    data, bound, views, samples = read_data(cfg, task, run, stored)
    chosen: list[str] = []
    if getattr(cfg, "min_steps", 0) and cfg.num_epochs and not isinstance(views[0], Stream):
        chosen = length.choose_steps(cfg, len(views[0]))
        given |= {"global_batch_size": cfg.global_batch_size, "num_epochs": cfg.num_epochs}
        try:
            plan = _plan(cfg, layout)
        except UserError as error:
            raise UserError("; ".join([*chosen, str(error)])) from None
    if isinstance(views[0], Stream):
        _check_stream(cfg, layout)
    if layout.cp > 1:  # each process takes a part from the front and one from the back
        check_parts(views[0], bound, 2 * layout.cp)
    manifest = _collect_manifest(cfg, data, views, samples.fingerprints)
    remarks = [*config.remarks_on_rate(cfg), *chosen, *remarks]
    remarks = _remarks_on_rows(manifest, data, views, samples.fingerprints) + remarks
    mixture = manifest["mixture"]

    def find(broken: dict[Path, str]) -> _ResumePoint:
        point = _ResumePoint(max_steps=cfg.max_steps, remarks=[*remarks])
        manifest["mixture"] = mixture
        point.find_checkpoint(cfg, mirror, manifest, broken)
        point.find_start(cfg, manifest, given)
        return point

    # Until here nothing is written into the run folder.
    lock = run_folder.RunLock(output) if is_main() and not cfg.check else None
    resume_point = find({}) if is_main() else _ResumePoint(max_steps=cfg.max_steps)
    return RunStart(
        cfg, given, output, lock, plan, data, bound, views, samples.probes, manifest, resume_point,
        find, mirror,
    )  # fmt: skip


def _mirror(cfg: Any) -> Mirror:
    """Return the mirror of a run that trains; a check or an evaluation has none."""
    trains = not (cfg.check or cfg.eval_only)
    return Mirror(
        cfg.mirror if trains else "", Path(cfg.output_dir), keep=cfg.keep_checkpoints,
        keep_every=cfg.keep_every, grace=cfg.mirror_grace, brings_best=cfg.export == "best",
    )  # fmt: skip


def _plan(cfg: Any, layout: Layout) -> StepPlan:
    """Cut the global batch, and for as many processes as an elastic run may have."""
    sizes, rank = (cfg.global_batch_size, cfg.micro_batch_size), (layout.replica, layout.in_step)
    plan = plan_step(*sizes, layout.replicas, cfg.exact, cfg.device_shares, *rank)
    if maximum := launched.most_processes():  # a machine too many would end the run of the others
        replicas = maximum // layout.replica_size
        in_step = replicas if layout.in_step else 0
        plan_step(*sizes, replicas, cfg.exact, cfg.device_shares, 0, in_step)
    return plan


def agree_on_start(processes: Ranks, start: RunStart) -> _ResumePoint:
    """Return where the main process found that the run starts.

    Raises UserError unless all processes run the same, and see the same run folder.
    """
    facts = consistency.collect_facts(start.manifest, start.cfg.exact)
    alike.check_same(processes, facts)
    is_finished = processes.from_main(bool(start.resume_point.finished))
    if not (start.mirror.url or start.cfg.check or is_finished):
        consistency.check_shared(processes, start.output)
    find = lambda broken: start.find(broken) if broken else start.resume_point  # noqa: E731
    point = start.resume_point = find_together(processes, start.mirror, find)
    if start.mirror.url:
        step = point.saved.get("step", 0) if point.in_folder else 0
        start.mirror.join(processes, step, brings=not point.finished)
    return point
