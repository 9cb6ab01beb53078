"""Short trials of train.py: the fastest precision, compilation and micro-batch size."""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import report, trials, written
from machine.report import Figure, Section, rounded
from machine.trials import FULL, Hardware, Trial
from training import batches, config, contract, startup
from training.console import one_line, say
from training.ranks import PROCESSES, UserError

RECIPE, ACCELERATE = Path("configs/train/tuned.yaml"), Path("configs/accelerate/tuned.yaml")
CACHE = Path(".cache")  # for the folders of trials; /tmp may be too small for the check of disks
NOISE = 0.03  # a speed counts as higher from 3 % on
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNTRIED = "all combinations, other YAMLs and numbers of processes, tf32, num_workers"


@dataclass(frozen=True)
class Settings:
    """What the trials differ in."""

    precision: str  # mixed_precision of the accelerate YAML: no, bf16, fp16 or fp8
    compile: bool
    gradient_checkpointing: bool
    micro_batch_size: int

    def __str__(self) -> str:
        words = [self.precision.replace("no", "fp32")]
        words += ["compile"] * self.compile + ["checkpointing"] * self.gradient_checkpointing
        return ", ".join([*words, f"micro-batch {self.micro_batch_size}"])

    @property
    def fields(self) -> dict[str, Any]:
        """Those of a recipe."""
        return {name: value for name, value in vars(self).items() if name != "precision"}


@dataclass
class Recipe:
    """The recipe to tune."""

    cfg: Any  # train.Config
    path: Path
    flags: list[str]  # of train.py
    unit: str  # plural name of the loss terms


@dataclass
class Space:
    """What may be tried."""

    start: Settings  # those of the recipe and the YAML
    precisions: list[str]
    sizes: list[int]  # of micro-batches, ascending
    compile: bool = True  # whether its other value may be tried
    skipped: list[str] = dataclasses.field(default_factory=list)  # lines: what is not tried


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of tune."""
    parser.add_argument("--config_file", default="", help="accelerate YAML; as make train chooses")
    parser.add_argument("--steps", type=positive, default=20, help="steps that a trial measures")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds a trial may take")


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    if not re.fullmatch("[0-9]{1,7}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{one_line(text, 60)} is no whole number from 1")
    return int(text)


def read_recipe(config_class: type, task: Any, flags: list[str]) -> Recipe:
    """The recipe with the flags; raises ValueError."""
    if PROCESSES > 1:
        raise UserError(
            "tune starts all processes by itself; run: python hardware.py tune --config_file YAML"
        )
    contract.check_functions(task)
    cfg, path, _ = config.parse_config(config_class, flags, "hardware.py tune FLAGS")
    if cfg.check or cfg.eval_only:
        raise UserError(f"tune trains; leave out --{'check' if cfg.check else 'eval_only'}")
    return Recipe(cfg, path, flags, getattr(task, "UNIT", "samples"))


# ---- The search ----------------------------------------------------------------------------------


def find_space(cfg: Any, hardware: Hardware) -> Space:
    """What this recipe, these devices and the libraries allow; raises UserError."""
    layout, own, skipped = hardware.layout, hardware.precision, []
    startup.check_sharing(cfg, layout)

    def cut(largest: int) -> int:
        rest = (cfg.exact, cfg.device_shares, 0, layout.sharded)
        plan = batches.plan_step(cfg.global_batch_size, largest, layout.replicas, *rest)
        return plan.micro_batch_size

    first = cut(cfg.micro_batch_size)
    sizes = {first}
    if cfg.exact:
        skipped.append("other micro-batch sizes: exact fixes them")
    else:
        for n in range(1, cfg.global_batch_size.bit_length()):
            sizes |= {cut(first << n), cut(max(first >> n, 1))}
    half, old = "bf16", hardware.capability and hardware.capability < (8, 0)
    if hardware.kind == "mps" or (old and layout.sharded):
        skipped.append("fp16 and bf16: not with this device and YAML")
        half = own
    elif old:
        half = "fp16"
    may_compile = True
    try:
        startup.check_sharing(dataclasses.replace(cfg, compile=True), layout)
        if hardware.kind == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
            raise ValueError("on a CPU it needs a C++ compiler, such as g++")
    except ValueError as error:
        may_compile = False
        skipped.append(f"compile: {error}")
    start = Settings(own, cfg.compile, cfg.gradient_checkpointing, first)
    return Space(start, list(dict.fromkeys([own, "no", half])), sorted(sizes), may_compile, skipped)


def is_faster(trial: Trial, other: Trial) -> bool:
    """Whether a trial is faster by more than the noise."""
    return trial.speed > other.speed * (1 + NOISE)


def best(tried: dict[Settings, Trial], start: Settings) -> Settings | None:
    """The simplest of the settings than which none is faster; None if none ran.

    Simple is: not compiled, no checkpointing, fp32, the micro-batch size of the recipe.
    """
    ran = {settings: trial for settings, trial in tried.items() if not trial.problem}
    near = [each for each in ran if not any(is_faster(t, ran[each]) for t in ran.values())]
    return min(
        near,
        default=None,
        key=lambda s: (
            *(s.compile, s.gradient_checkpointing, s.precision != "no"),
            *(s.micro_batch_size != start.micro_batch_size, -ran[s].speed),
        ),
    )


def search(
    try_out: Callable[[Settings], Trial], space: Space, tried: dict[Settings, Trial]
) -> Settings | None:
    """Tries one setting after the other on the best so far; the best, or None if none ran.

    It fills `tried`, in order. Raises UserError if the first trial ends with exit code 2.
    """
    start = space.start

    def attempt(settings: Settings, **changes: Any) -> Trial:
        settings = dataclasses.replace(settings, **changes)
        if settings not in tried:
            tried[settings] = try_out(settings)
        return tried[settings]

    # The precisions. If none fits into memory, less of everything until one does.
    for precision in space.precisions:
        trial = attempt(start, precision=precision)
        if len(tried) == 1 and trial.code == 2 and trial.problem != FULL:
            raise UserError(trial.problem)
    light = next((each for each in space.precisions if each != "no"), "no")
    for size in [each for each in reversed(space.sizes) if each <= start.micro_batch_size]:
        for checkpointing in (False, True):
            if not best(tried, start) and FULL in [each.problem for each in tried.values()]:
                changes = {"gradient_checkpointing": checkpointing, "micro_batch_size": size}
                attempt(start, precision=light, **changes)

    # Compilation, then checkpointing.
    for name in ["compile"] * space.compile + ["gradient_checkpointing"]:
        if chosen := best(tried, start):
            attempt(chosen, **{name: not getattr(chosen, name)})

    # Larger micro-batches until they are no faster; with checkpointing once memory is the limit.
    chosen = best(tried, start)
    for size in [each for each in space.sizes if chosen and each > chosen.micro_batch_size]:
        larger = dataclasses.replace(chosen, micro_batch_size=size)
        if attempt(larger).problem == FULL and not chosen.gradient_checkpointing:
            larger = dataclasses.replace(larger, gradient_checkpointing=True)
        if attempt(larger).problem or not is_faster(tried[larger], tried[chosen]):
            break
        chosen = larger
    return best(tried, start)


# ---- The verb ------------------------------------------------------------------------------------


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Turns the first signal that asks to stop into a KeyboardInterrupt, and ignores others."""

    def stop(*_) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if before[number] != signal.SIG_IGN or number != signal.SIGHUP:  # nohup
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(options: argparse.Namespace, recipe: Recipe) -> Section:
    """Tries settings out, and writes the best. Raises ValueError.

    A signal ends the running trial; then it shows what it has measured, and raises SystemExit.
    """
    for path in (RECIPE, ACCELERATE):
        written.refuse_foreign(path)
    section, tried = Section("tune"), {}
    with stopped_by_signals():
        try:
            hardware = trials.look_at_hardware(options.config_file)
            space = find_space(recipe.cfg, hardware)
            describe(section, options, recipe, hardware)
            CACHE.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="tune-", dir=CACHE) as folder:
                folder = Path(folder).resolve()
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


def describe(
    section: Section, options: argparse.Namespace, recipe: Recipe, hardware: Hardware
) -> None:
    """Adds what all trials have in common."""
    every, warm_up, count = trials.cut_lines(options.steps)
    processes = hardware.layout.processes
    section.conditions = {
        "device": hardware.device,
        "processes": processes,
        "recipe": one_line(" ".join([str(recipe.path), *recipe.flags])),
    }
    section.facts = {
        **section.conditions,
        "accelerate YAML": one_line(hardware.file),
        "fixed": f"global_batch_size {recipe.cfg.global_batch_size}, and all other settings",
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
        "resume": "auto",
        "max_steps": every * (warm_up + count) + 1,  # it is killed before the evaluation at the end
        "num_epochs": 0,
        "log_every": every,
        "eval_every": 0,
        "save_every": 0,
        "export": "last",
        "tracker": "none",
        "profile_steps": None,
    }
    text = written.recipe_with(recipe.cfg, recipe.path, recipe.flags, **changes)
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
    memory = f", {rounded(trial.memory)} GB" if trial.memory else ""
    return f"{rounded(trial.speed)} {recipe.unit}/s{memory}"


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
    if tried and not any(trial.memory for trial in tried.values()):
        section.lines.append("peak memory: train.py measures none on this device")


def write_pair(recipe: Recipe, hardware: Hardware, chosen: Settings, trial: Trial) -> None:
    """Writes recipe and accelerate YAML of the best settings."""
    today = datetime.date.today().isoformat()
    heading = f"{written.HEADING} tune on {today}: {describe_trial(recipe, trial)}\n# from "
    keep = "\n# The next tune replaces it; to keep it, rename it."
    words = one_line(" ".join([str(recipe.path), *recipe.flags]))
    text = written.recipe_with(recipe.cfg, recipe.path, recipe.flags, **chosen.fields)
    written.write_headed(RECIPE, heading + words + keep, text)
    text = yaml_for(hardware, chosen)
    written.write_headed(ACCELERATE, heading + one_line(hardware.file) + keep, text)
