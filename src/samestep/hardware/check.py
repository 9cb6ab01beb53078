"""Facts about this machine, and problems that make training wrong or impossible.

    python -m samestep.hardware.check facts       what `hardware check` asks of a process of its own
    python -m samestep.hardware.check cuda:0      since a GPU may hang, and takes memory
"""

import contextlib
import io
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from accelerate.commands.env import env_command, env_command_parser
from torch.utils import collect_env

from samestep.base.console import one_line
from samestep.hardware import devices
from samestep.hardware.devices import Devices, nvidia_smi
from samestep.hardware.report import Section
from samestep.processes.device import allow_tf32
from samestep.processes.ranks import catch
from samestep.settings.accelerate_yaml import without_gpu

GIB = 2**30
SECONDS = 180  # of a process that looks at a device
FREE = 0.9  # of a GPU's memory
LOST = r".*(?:GPU is lost|fallen off|Unable to determine the device handle|Unknown Error).*"
STATE = "index,temperature.gpu,power.draw,power.limit,clocks.sm,clocks.max.sm"
ERRORS = "index,ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure"
# Largest error of a product of matrices, relative to its norm. The factors are numbers of the
# format, so it is that of adding up and of rounding the result.
TOLERANCE = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 1e-2, "fp16": 2e-3}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FACTS = {  # names in the report, and those of collect_env
    "torch": "torch_version", "CUDA": "cuda_compiled_version", "ROCm": "hip_compiled_version",
    "cuDNN": "cudnn_version", "driver": "nvidia_driver_version", "system": "os",
}  # fmt: skip


def run(used: Devices) -> Section:
    """What this machine is, and what is wrong with it."""
    section = Section("check")
    hangs = look_at_nvidia_smi(section, used)
    names = ["facts", *(used.name(number) for number in range(used.count))]
    if hangs:  # so would what asks it again
        del names[0]
    if used.kind == "cpu":
        names = [*dict.fromkeys(names)]
    with ThreadPoolExecutor() as threads:
        answers = [*threads.map(ask, names)]
    kinds = set()
    for name, (found, problem) in zip(names, answers, strict=True):
        if problem:
            section.failures.append(f"{name} does not answer: {problem}")
        elif name == "facts":
            section.facts = found | section.facts
        else:
            kinds.add(describe(section, name, found))
    if len(kinds) > 1:
        section.lines.append("the GPUs differ; a run on all of them needs device_shares: auto")
    return section


# ---- What nvidia-smi says ------------------------------------------------------------------------


def look_at_nvidia_smi(section: Section, used: Devices) -> bool:
    """Adds what it says of GPUs that torch may not see, of their errors and links; True: it hangs.

    A machine without it, or whose torch may not use a GPU, is no failure.
    """
    code, listed = nvidia_smi("-L")
    if code == 127:
        return False
    there = len(re.findall(r"^GPU \d", listed, re.MULTILINE))
    if lost := re.search(LOST, listed, re.IGNORECASE):
        section.failures.append(
            f"a GPU is lost: {one_line(lost[0], 200)}; train on the others, with "
            "CUDA_VISIBLE_DEVICES, until the machine is restarted: docs/measuring.md"
        )
    elif code:
        section.failures.append(f"the driver does not work: {one_line(listed, 200)}")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")  # empty: none shall be used
    seen = torch.accelerator.device_count()
    if there and not seen and chosen is None:
        section.failures.append(f"torch sees no GPU, nvidia-smi lists {there}: {without_gpu()}")
    elif 0 < seen < there and chosen is None:
        section.lines.append(f"torch sees {seen} of the {there} GPUs that nvidia-smi lists")
    if code:
        return code == -1
    _, state = nvidia_smi(f"--query-gpu={STATE}", "--format=csv")
    _, links = nvidia_smi("topo", "-m")
    section.facts |= {"nvidia-smi": state, "links": links}
    code, errors = nvidia_smi(f"--query-gpu={ERRORS}", "--format=csv,noheader")
    for line in errors.splitlines() if not code else ():
        index, uncorrected, *remapped = [word.strip() for word in line.split(",")]
        if uncorrected.isdecimal() and int(uncorrected):
            section.failures.append(
                f"GPU {index} has {uncorrected} uncorrected errors of memory (ECC) since it was "
                "reset: its numbers may be wrong; reset it, and replace it if they come again"
            )
        if "Yes" in remapped or "1" in remapped:
            section.failures.append(f"GPU {index} must be reset: rows of its memory wait for it")
    if used.kind == "cuda" and used.count > 1:
        _, paths = nvidia_smi("topo", "-p2p", "w")
        missing = re.findall(r"\b(?:CNS|GNS|TNS|NS|DR)\b", re.sub(r"(?s)Legend.*", "", paths))
        if missing:
            section.lines.append(
                "some GPUs cannot reach each other's memory (nvidia-smi topo -p2p w): what they "
                "send goes through the host, which is slow; if training hangs: NCCL_P2P_DISABLE=1"
            )
    return False


# ---- What torch says -----------------------------------------------------------------------------


def ask(what: str) -> tuple[dict, str]:
    """What a process of its own finds out, and why it does not."""
    words = [*devices.PREFIX, "-m", "samestep.hardware.check", what]
    code, printed = devices.run(*words, seconds=SECONDS)
    last = (printed.strip().splitlines() or ["no word"])[-1]
    if code is None:
        return {}, f"it hangs, for {SECONDS} s"
    if code:
        return {}, one_line(last, 200)
    return json.loads(last), ""


def describe(section: Section, name: str, found: dict) -> str:
    """Adds a device with its formats and its memory; its name."""
    formats = found["formats"]
    section.facts[name] = {"name": found["name"], **formats}
    wrong = [f"{format} {state}" for format, state in formats.items() if "wrong" in state]
    if wrong:
        section.failures.append(f"{name} computes wrong numbers: {'; '.join(wrong)}")
    if formats["fp32"].startswith("no: "):
        section.failures.append(f"{name} does not compute: fp32: {formats['fp32']}")
    free, total = found.get("memory", (1, 1))
    if free < FREE * total:
        size = f"{free / GIB:.1f} of {total / GIB:.1f} GiB"
        section.lines.append(f"{name} has {size} free; nvidia-smi names who has the rest")
    return found["name"]


def collect_facts() -> dict[str, str]:
    """Versions and kinds, by torch's collect_env and `accelerate env`."""
    env = collect_env.get_env_info()._asdict()
    with contextlib.redirect_stdout(io.StringIO()):
        told = env_command(env_command_parser().parse_args([]))
    facts = {name: env[key] for name, key in FACTS.items()}
    cpu = re.search(r"Model name: *(.+)", env["cpu_info"] or "")
    facts |= {"python": told["Python version"], "accelerate": told["`Accelerate` version"]}
    facts |= {"memory": told["System RAM"], "processor": cpu[1] if cpu else ""}
    return {name: text for name, text in facts.items() if text and text != "N/A"}


def probe(device: torch.device) -> dict:
    """A device's name, free and whole memory, and the formats in which it computes."""
    found: dict = {"name": {"cpu": "CPU", "mps": "Apple GPU (MPS)"}.get(device.type)}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found["name"] = f"{about.name}, {about.total_memory / GIB:.1f} GiB"
        found["memory"] = torch.cuda.mem_get_info(device)
    formats = [format for format in TOLERANCE if device.type == "cuda" or format != "tf32"]
    return found | {"formats": {format: try_format(format, device) for format in formats}}


def try_format(format: str, device: torch.device) -> str:
    """`runs`, `emulated`, `wrong: ...` or `no: ...` with the reason, by a product of matrices."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=draw).to(TYPES.get(format)) for _ in range(2))
    allow_tf32(format == "tf32")
    product, problem = catch(lambda: (a.to(device) @ b.to(device)).cpu().double())
    allow_tf32(False)
    if problem:  # each backend refuses a format with an error of its own
        return f"no: {one_line(problem, 100) or type(problem).__name__}"
    right = a.double() @ b.double()
    error = float((product - right).norm() / right.norm())
    if not error <= TOLERANCE[format]:  # NaN, too
        return f"wrong: the error of a product is {error:.1g}, the limit {TOLERANCE[format]:g}"
    if format == "tf32" and error < TOLERANCE["fp32"]:
        return "no: computed as fp32"
    if format == "bf16" and device.type == "cuda":
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                return "emulated, slow"
    return "runs"


if __name__ == "__main__":
    asked = sys.argv[1]
    print(json.dumps(collect_facts() if asked == "facts" else probe(torch.device(asked))))
