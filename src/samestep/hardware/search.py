"""The search of samestep hardware tune: which settings may be tried, in which order, and the best.

It does not know how a trial is run.
"""

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from samestep.hardware.trials import FULL, Hardware, Trial
from samestep.processes.ranks import UserError
from samestep.start import startup
from samestep.step import batches

NOISE = 0.03  # a speed counts as higher from 3 % on


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
class Space:
    """What may be tried."""

    start: Settings  # those of the recipe and the YAML
    precisions: list[str]
    sizes: list[int]  # of micro-batches, ascending
    compile: bool = True  # whether its other value may be tried
    skipped: list[str] = field(default_factory=list)  # lines: what is not tried


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
    if not (chosen := best(tried, start)):
        return None
    for size in [each for each in space.sizes if each > chosen.micro_batch_size]:
        larger = dataclasses.replace(chosen, micro_batch_size=size)
        if attempt(larger).problem == FULL and not chosen.gradient_checkpointing:
            larger = dataclasses.replace(larger, gradient_checkpointing=True)
        if attempt(larger).problem or not is_faster(tried[larger], tried[chosen]):
            break
        chosen = larger
    return best(tried, start)
