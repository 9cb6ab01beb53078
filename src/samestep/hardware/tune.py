"""Short trials of train.py: the fastest precision, compilation and micro-batch size."""

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.base.console import one_line, say
from samestep.hardware import project, report, trials, written
from samestep.hardware.report import Figure, Section, number, short
from samestep.hardware.search import NOISE, Settings, find_space, search
from samestep.hardware.trials import Hardware, Trial
from samestep.processes.ranks import PROCESSES, UserError
from samestep.processes.shutdown import LAUNCHER_PID

RECIPE, ACCELERATE = Path("configs/train/tuned.yaml"), Path("configs/accelerate/tuned.yaml")
CACHE = Path(".cache")  # for the runs of trials; /tmp may be too small for the check of disks
UNTRIED = "all combinations, other YAMLs and numbers of processes, tf32, num_workers"


@dataclass
class Recipe:
    """The recipe to tune."""

    cfg: Any  # train.Config
    path: Path
    flags: list[str]  # of train.py
    unit: str  # plural name of the loss terms

    def __str__(self) -> str:
        named = any(word.partition("=")[0] == "--config" for word in self.flags)
        return one_line(" ".join([*([] if named else [str(self.path)]), *self.flags]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of tune."""
    whole = number(int, 9_999_999)
    parser.add_argument("--config_file", default="", help="accelerate YAML; as make train chooses")
    parser.add_argument("--steps", type=whole, default=20, help="steps that a trial measures")
    parser.add_argument("--timeout", type=whole, default=600, help="seconds a trial may take")


def read_recipe(config_class: type, task: Any, flags: list[str]) -> Recipe:
    """The recipe with the flags; raises ValueError."""
    if PROCESSES > 1 or LAUNCHER_PID:
        raise UserError(
            "tune starts all processes by itself; run: python -m samestep hardware tune "
            "--config_file YAML"
        )
    cfg, path = project.read_recipe(config_class, task, flags)
    return Recipe(cfg, path, flags, getattr(task, "UNIT", "samples"))


def run(options: argparse.Namespace, recipe: Recipe, old: dict[str, Any]) -> Section:
    """Tries settings out, and writes the best. Raises ValueError.

    `old`: the report to compare with, which must be of the same device, processes and recipe.
    A signal, which the program turns into KeyboardInterrupt, ends the running trial; then it shows
    what it has measured, and raises SystemExit.
    """
    for path in (RECIPE, ACCELERATE):
        written.refuse_foreign(path)
    section, tried = Section("tune"), {}
    try:
        hardware = trials.look_at_hardware(options.config_file)
        space = find_space(recipe.cfg, hardware)
        describe(section, options, recipe, hardware)
        if old:
            report.check_comparable("tune", section.conditions, old)
        with trial_folder() as folder:
            prepare_data(recipe, hardware, folder)
            try_out = functools.partial(show_trial, options, recipe, hardware, folder)
            chosen = search(try_out, space, tried)
    except KeyboardInterrupt:
        add_results(section, recipe, tried)
        report.show(section)
        raise SystemExit("stopped by a signal; no YAML was written") from None
    add_results(section, recipe, tried)
    section.lines += [f"not tried: {line}" for line in [*space.skipped, UNTRIED]]
    if not chosen:
        section.failures.append("no trial gave a speed, so no YAML was written")
        return section
    write_pair(recipe, hardware, chosen, tried[chosen])
    section.lines += [
        f"best: {chosen}: {describe_trial(recipe, tried[chosen])}; differences up to {NOISE:.0%} "
        "do not count",
        f"written: {RECIPE} and {ACCELERATE}; next: make train HARDWARE=tuned RECIPE=tuned",
    ]
    return section


@contextlib.contextmanager
def trial_folder() -> Iterator[Path]:
    """A folder for the trials, which only one tune has: two would slow each other down.

    Removes what a tune that was killed has left: its folder, and processes of its trial.
    """
    folder = CACHE.resolve() / "tune"
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "tune.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("another tune runs in this project; wait for its end") from None
        trials.end_processes(str(folder))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def prepare_data(recipe: Recipe, hardware: Hardware, folder: Path) -> None:
    """Checks the input and prepares the data, which may take hours and so is no part of a trial.

    train.py says what is wrong; then this raises SystemExit.
    """
    file = folder / "recipe.yaml"
    cfg = dataclasses.replace(recipe.cfg, output_dir=str(folder / "run"))
    file.write_text(written.whole_recipe(cfg), encoding="utf-8")
    words = ["train.py", "--check", "--config", str(file), "--config_file", str(hardware.file)]
    say("checking the recipe and preparing the data")
    code = trials.run_program(words, hardware, folder)
    if code:
        raise SystemExit(code)


def describe(
    section: Section, options: argparse.Namespace, recipe: Recipe, hardware: Hardware
) -> None:
    """Adds what all trials have in common."""
    every, warm_up, count = trials.cut_lines(options.steps)
    processes = hardware.layout.processes
    section.conditions = {
        "device": hardware.device,
        "processes": processes,
        "recipe": str(recipe),
    }
    section.facts = {
        **section.conditions,
        "accelerate YAML": one_line(hardware.file),
        "fixed": f"{recipe.cfg.global_batch_size} samples a step, and all other settings",
        "trial": f"{every * count} steps after {every * warm_up} of warm-up; the median of {count} "
        "speeds",
    }


def show_trial(
    options: argparse.Namespace,
    recipe: Recipe,
    hardware: Hardware,
    parent: Path,
    settings: Settings,
) -> Trial:
    """Runs a trial in a new folder in `parent`, and prints a line about it."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    every, warm_up, count = trials.cut_lines(options.steps)
    changes = {
        **settings.fields,
        "output_dir": str(folder / "run"),
        "max_steps": every * (warm_up + count) + 1,  # it is killed before the evaluation at the end
        "num_epochs": 0,
        "log_every": every,
        "eval_every": 0,
        "save_every": 0,
        "export": "last",
        "tracker": "none",
        "profile_steps": None,
    }
    text = written.whole_recipe(dataclasses.replace(recipe.cfg, **changes))
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    (folder / "hardware.yaml").write_text(yaml_for(hardware, settings), encoding="utf-8")
    print(f"{settings} ... ", end="", flush=True)
    trial = trials.run_trial(folder, hardware, recipe.unit, options.steps, options.timeout)
    began = f"; first steps after {trial.seconds:.0f} s" if trial.seconds else ""
    say(describe_trial(recipe, trial) + began)
    shutil.rmtree(folder, ignore_errors=True)
    return trial


def yaml_for(hardware: Hardware, settings: Settings) -> str:
    """The accelerate YAML with the precision of these settings."""
    changes = {**hardware.changes, "mixed_precision": settings.precision}
    return written.accelerate_with(hardware.file, **changes)


def describe_trial(recipe: Recipe, trial: Trial) -> str:
    """Speed and memory, or the problem."""
    if trial.problem:
        return f"failed: {trial.problem}"
    memory = f", {short(trial.memory)} GB" if trial.memory else ""
    return f"{short(trial.speed)} {recipe.unit}/s{memory}"


def add_results(section: Section, recipe: Recipe, tried: dict[Settings, Trial]) -> None:
    """Adds figures, failed trials, and what mixed precision gains."""
    for settings, trial in tried.items():
        if trial.problem:
            section.lines.append(f"{settings}: {describe_trial(recipe, trial)}")
            continue
        section.figures.append(Figure(str(settings), trial.speed, f"{recipe.unit}/s"))
        if trial.memory:
            section.figures.append(Figure(f"{settings}: peak memory", trial.memory, "GB"))
        plain = tried.get(dataclasses.replace(settings, precision="no"))
        if settings.precision != "no" and plain and not plain.problem:
            less = f", {trial.memory / plain.memory:.2f} times the memory" if trial.memory else ""
            gain = f"{trial.speed / plain.speed:.2f} times the speed{less}"
            section.lines.append(f"{settings}, compared with fp32: {gain}")
    section.figures.sort(key=lambda figure: figure.unit == "GB")  # speeds first
    if section.figures and not any(trial.memory for trial in tried.values()):
        section.lines.append("peak memory: train.py measures none on this device")


def write_pair(recipe: Recipe, hardware: Hardware, chosen: Settings, trial: Trial) -> None:
    """Writes recipe and accelerate YAML of the best settings."""
    today = datetime.date.today().isoformat()
    heading = f"tune on {today}: {describe_trial(recipe, trial)}\n# from "
    keep = "\n# The next tune replaces it; to keep it, rename it."
    text = written.recipe_with(type(recipe.cfg), recipe.flags, **chosen.fields)
    written.write_headed(RECIPE, f"{heading}{recipe}{keep}", text)
    text = yaml_for(hardware, chosen)
    written.write_headed(ACCELERATE, heading + one_line(hardware.file) + keep, text)
