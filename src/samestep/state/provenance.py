"""What a manifest records of how a run was made: hardware and versions, code, and its history."""

import ast
import contextlib
import hashlib
import json
import os
import platform
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

import samestep
from samestep.base import files
from samestep.base.console import one_line, without_credentials
from samestep.base.errors import some
from samestep.processes.mesh import AXES, Layout
from samestep.processes.ranks import Ranks
from samestep.state.checkpoints import as_lines, differences

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "numpy")
# Variables that decide where and how a run computes; none of them holds a secret.
_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "DS_", "NCCL_", "TORCH_NCCL_", "GLOO_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")
LIBRARY = Path(samestep.__file__).resolve().parent


# ---- Hardware and versions -----------------------------------------------------------------------


def versions(precision: str, on_gpu: bool) -> dict[str, str]:
    """Collect what rounding depends on: versions of Python and libraries, device, precision."""
    numbers = {"python": platform.python_version(), "precision": precision.replace("no", "fp32")}
    numbers["cpu"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if on_gpu:
        numbers["gpu"] = torch.cuda.get_device_name(int(os.environ.get("LOCAL_RANK", 0)))
        if torch.distributed.is_nccl_available():
            numbers["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    numbers["samestep"] = samestep.__version__
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            numbers[package] = metadata.version(package)
    return numbers


def cpu_name() -> str:
    """Return the name of the processor, as its maker gives it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _describe_sharding(layout: Layout) -> str:
    """Name what shards the model, with the sizes of its axes; none: each process holds all."""
    words = []
    if layout.fsdp:
        words.append("FSDP2")
    if layout.deepspeed:
        words.append(f"ZeRO-{os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '?')}")
    for name in (*AXES, "stages"):
        if getattr(layout, name) > 1:
            words.append(f"{name} {getattr(layout, name)}")
    return ", ".join(words) or "none"


def describe_hardware(ranks: Ranks, device_type: str, numbers: dict) -> dict[str, Any]:
    """Describe the hardware of all processes, which must call it. `numbers`: see `versions`."""
    name = {"cpu": numbers["cpu"], "cuda": numbers.get("gpu")}.get(device_type, device_type)
    devices = {name: ranks.layout.processes}
    if ranks.differ(str(name)):
        devices = dict(Counter(ranks.gather(name)))
    return {
        "processes": ranks.layout.processes,
        "nodes": int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        "sharding": _describe_sharding(ranks.layout),
        "devices": devices,
        "threads": torch.get_num_threads(),
        "cpu_name": cpu_name(),
        **numbers,
    }


def describe(
    config: dict, data: dict, code: dict, versions: dict, identity: str = "", prepared: str = "",
    mixture: dict | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the entries of all manifests of a run, as they are known before its processes meet.

    config: settings, as JSON will hold them. data: the number of rows and their fingerprints.
    code: digests of functions, by file. versions: see `versions`; describe_hardware completes them.
    identity, prepared: of data that were prepared. mixture: of several sources.
    """
    return {
        "config": config,
        "code": code,
        "data": data,
        "identity": identity,
        "prepared": prepared,
        "mixture": mixture or {},
        "library": library_digest(),
        "hardware": versions,
    }


def describe_start(manifest: dict) -> dict[str, Any]:
    """Return what metrics.jsonl tells of a start: hardware, digests of what decides the result."""
    parts = ("config", "data", "code", "library")
    digests = {name: short_hash(json.dumps(manifest[name]).encode()) for name in parts}
    return manifest["hardware"] | digests


def write_hardware(output: Path, manifest: dict) -> None:
    """Write hardware.yaml into the folder of a run: the main process calls it."""
    chosen = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES) or name in _NAMES:
            chosen[name] = without_credentials(value)
    hardware = manifest["hardware"] | {"environment": chosen}
    text = yaml.safe_dump(hardware, sort_keys=False, allow_unicode=True)
    files.replace_text(output / "hardware.yaml", text)


# ---- Code ----------------------------------------------------------------------------------------


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def library_digest() -> str:
    """Hash all .py files of this library as they are, edited or not: 16 hex digits."""
    digest = hashlib.sha256()
    for path in sorted([*LIBRARY.rglob("*.py"), *LIBRARY.rglob("*.jinja")]):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(LIBRARY)} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def statements_of(path: Path) -> list[tuple[str, ast.stmt]]:
    """List the statements of a file, each with the name that it binds: a function, a class or a
    constant; empty for others.

    Left out are comments, the file's docstring, and the fields of TaskConfig, whose values count.
    """
    statements = []
    for number, node in enumerate(ast.parse(path.read_bytes()).body):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        name = getattr(node, "name", "")
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(targets[0], ast.Name):
            name = targets[0].id
        if isinstance(node, ast.ClassDef) and name == "TaskConfig":
            kept = [statement for statement in node.body if not _is_field(statement)]
            node.body = kept or ast.parse("pass").body
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if number or not is_text:
            statements.append((name, node))
    return statements


def _is_field(node: ast.stmt) -> bool:
    """Return whether a statement of a dataclass is one of its fields, or a text below it."""
    if isinstance(node, ast.AnnAssign):
        kind = ast.unparse(node.annotation)
        return "ClassVar" not in kind and "InitVar" not in kind
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def hash_functions(path: Path, file: str) -> dict[str, str]:
    """Hash each function, class and constant of a file, such as task.loss_sum, and all its other
    statements, under the name of the file: 16 hex digits, see statements_of."""
    module = file.removesuffix(".py").replace(os.sep, ".")
    texts = {file: ""}
    for bound, node in statements_of(path):
        name = f"{module}.{bound}" if bound else file
        texts[name] = f"{texts.get(name, '')}{ast.unparse(node)}\n"
    return {name: short_hash(text.encode()) for name, text in texts.items()}


def changed_code(saved: dict, manifest: dict, project: Path | None) -> dict[str, list]:
    """Return digests before and now of the names whose code differs between two manifests: `code
    NAME` of the files that both have, also of those that are imported later, and `library`.
    project: the folder of the program and its modules."""
    changed = {}
    before, now = saved.get("code", {}), {**manifest["code"]}
    for file in before.keys() - now.keys() if project else ():
        if (project / file).is_file():
            now[file] = hash_functions(project / file, file)
    for file in before.keys() & now.keys():
        changed |= differences(before[file], now[file])
    named = {f"code {name}": changed[name] for name in sorted(changed)}
    return named | differences(*({"library": m.get("library")} for m in (saved, manifest)))


# ---- Since the checkpoint ------------------------------------------------------------------------


def describe_changes(changes: dict[str, list]) -> list[str]:
    """Write a line for the settings, the code and the library that have changed."""
    code = [name.removeprefix("code ") for name in changes if name.startswith("code ")]
    settings = {n: pair for n, pair in changes.items() if n != "library" and n[:5] != "code "}
    lines = ["; ".join(as_lines(settings))] if settings else []
    if code:
        lines.append(f"code of {some(code, 10)}")
    if "library" in changes:
        lines.append("the library samestep")
    return lines


def hardware_line(before: dict, now: dict) -> str:
    """Say what differs between the hardware of a checkpoint and of now; empty: nothing."""
    found = {"micro_batch_size": ""}  # of auto
    if not (changed := differences(before | found, now | found)):
        return ""
    text = one_line("; ".join(as_lines(changed)), 500)
    return f"the hardware or a version changed, rounding may differ: {text}"


def extend_history(saved: dict, manifest: dict, step: int, samples: int) -> list[dict]:
    """Return the history of the run that resumes after so many samples from a checkpoint with the
    manifest `saved`: an entry for each change of what decides which rows a step has."""
    config, history = manifest["config"], [*saved.get("history", [])]
    about = {
        "mixture": manifest.get("mixture", {}),
        "seed": config["seed"],
        "global_batch_size": config["global_batch_size"],
        "data": manifest["data"]["fingerprint"],
        "prepared": manifest["prepared"],
    }
    about = json.loads(json.dumps(about))  # as it will be read
    if not history or {**history[-1], **about} != history[-1]:
        history.append({"step": step, "samples": samples, **about})
    return history
