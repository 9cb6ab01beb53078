"""Facts about this machine, and problems that make training wrong or impossible."""

import os
import re

import torch

from samestep.base.console import one_line
from samestep.hardware.devices import Devices, Wrong, ask, nvidia_smi, run_python
from samestep.hardware.report import Section
from samestep.settings.accelerate_yaml import without_gpu

LOST = r".*(?:GPU is lost|fallen off|Unable to determine the device handle|Unknown Error).*"
STATE = "--query-gpu=index,temperature.gpu,power.draw,power.limit,clocks.sm,clocks.max.sm"
ERRORS = "--query-gpu=index,ecc.errors.uncorrected.volatile.total,remapped_rows.pending"


def run(section: Section, used: Devices) -> None:
    """What this machine is, and what is wrong with it."""
    look_at_nvidia_smi(section)
    kinds = set()
    for name in dict.fromkeys(used.name(number) for number in range(used.count)):
        try:
            found = ask("look", device=name)
        except Wrong as error:
            section.failures.append(f"{name} does not compute: {error}")
            continue
        kinds.add(found["name"])
        section.facts[name] = found["name"]
        if found["wrong"]:
            section.failures.append(f"{name} computes wrong numbers: {'; '.join(found['wrong'])}")
        if found["free"] < 0.9:
            text = f"{found['free']:.0%} of its memory free; nvidia-smi names who has the rest"
            section.lines.append(f"{name} has {text}")
    if len(kinds) > 1:
        section.lines.append("the GPUs differ; a run on all of them needs device_shares: auto")


def look_at_nvidia_smi(section: Section) -> None:
    """Adds what it says of GPUs that torch may not see, of their errors, and facts."""
    code, listed = nvidia_smi("-L")
    if code != -1:  # collect_env asks it again
        for module in ("torch.utils.collect_env", "accelerate.commands.env"):
            section.facts[module] = run_python(["-m", module])[1].strip()
    there, seen = len(re.findall(r"^GPU \d", listed, re.M)), torch.accelerator.device_count()
    lost = re.findall(LOST, listed, re.IGNORECASE)
    if lost or code not in (0, 127):
        line = one_line([listed, *lost][-1], 200)
        section.failures.append(f"nvidia-smi: {line}; see docs/measuring.md, A lost device")
    if there > seen and "CUDA_VISIBLE_DEVICES" not in os.environ:
        text = f"torch sees {seen} GPUs, and nvidia-smi lists {there}"
        if seen:
            section.lines.append(text)
        else:
            section.failures.append(f"{text}: {without_gpu()}")
    if code:
        return
    section.facts["nvidia-smi"] = nvidia_smi(STATE, "--format=csv")[1]
    unknown, errors = nvidia_smi(ERRORS, "--format=csv,noheader")  # to old cards and drivers
    for line in errors.splitlines() if not unknown else ():
        index, uncorrected, pending = [word.strip() for word in line.split(",")]
        if uncorrected not in ("0", "[N/A]") or pending == "Yes":
            section.failures.append(
                f"GPU {index} has errors in its memory (ECC: {uncorrected} uncorrected; rows to be "
                f"replaced: {pending}), so numbers may be wrong: reset it, or take it out"
            )
