"""Finds out before the first step whether all processes run the same, and write to the same folder.

A machine with an older copy of the project, with other data or another library would not fail: it
would train something else.
"""

import functools
import os
import socket
import sys
import time
from pathlib import Path

from samestep.base.errors import UserError, some
from samestep.base.files import read_json_object
from samestep.processes import alike
from samestep.processes.ranks import Ranks
from samestep.state.checkpoints import flatten
from samestep.state.provenance import LIBRARY, hash_functions, short_hash

# Other versions, and devices, may differ unless exact is set.
VERSIONS = ("python", "torch", "accelerate", "transformers", "nccl")
# What the launcher says about the accelerate YAML.
HARDWARE = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_", "ACCELERATE_FP8_")
HARDWARE += ("ACCELERATE_DEEPSPEED_", "FSDP_", "PARALLELISM_CONFIG_")
OWN = ("train.py", "task.py")
_FOLDER_SECONDS = 10  # for a network disk to show a new file


def collect_facts(manifest: dict, exact: bool) -> dict[str, str]:
    """Collect what must be the same on all processes, by names that a person understands.

    Beside train.py and task.py, modules of the project count on the processes that have them.
    """
    versions = manifest["hardware"]
    if not exact:
        versions = {name: versions[name] for name in VERSIONS if name in versions}
        versions["python"] = versions["python"].rpartition(".")[0]
    facts = dict(versions)
    for file, functions in manifest["code"].items():
        if file in OWN:
            facts |= {f"code {name}": digest for name, digest in functions.items()}
        else:
            facts[f"{alike.LOADED}{file}"] = short_hash(str(functions).encode())
    facts["library samestep"] = manifest["library"]
    facts |= {f"data {name}": value for name, value in manifest["data"].items()}
    facts |= flatten(manifest["config"])
    facts |= {n: value for n, value in os.environ.items() if n.startswith(HARDWARE)}
    return {name: str(value) for name, value in facts.items()}


def _loaded_modules(project: Path) -> dict[str, Path]:
    """Find the files of the project's loaded modules, by their names in it; no environment's."""
    files, root = {}, project.resolve()

    @functools.cache  # thousands of modules lie in few folders
    def inside(folder: str) -> bool:
        return "site-packages" not in folder and Path(folder).resolve().is_relative_to(root)

    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None) or ""
        if not (file.endswith(".py") and inside(os.path.dirname(file)) and os.path.isfile(file)):
            continue  # a module may lie in a .zip
        path = Path(file).resolve()
        if not path.is_relative_to(root) or path.is_relative_to(LIBRARY):
            continue
        name = path.relative_to(root)
        if not any(part.startswith(".") or part == "site-packages" for part in name.parts):
            files[str(name)] = path
    return files


def hash_project(project: Path | None, own: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
    """Hash the functions of each module of the project that is loaded, the program among them, and
    of the files `own`. `project`: their folder; None in a notebook."""
    if project is None:
        return {}
    files = _loaded_modules(project) | {name: project / name for name in own}
    return {file: hash_functions(path, file) for file, path in files.items()}


def sees_folder(processes: Ranks, output: Path) -> bool:
    """Return whether this process sees the main one's run folder: it reads the holder of its lock,
    which is the main one. All processes call it."""
    holder = processes.from_main(read_json_object(output / "lock"))
    deadline = time.monotonic() + _FOLDER_SECONDS
    while read_json_object(output / "lock") != holder and time.monotonic() < deadline:
        time.sleep(0.2)
    return bool(holder) and read_json_object(output / "lock") == holder


def check_shared(processes: Ranks, output: Path) -> None:
    """Raise UserError on all processes if one of them does not see the main one's run folder."""
    if processes.layout.processes == 1:
        return
    is_shared = sees_folder(processes, output)
    if not any(processes.sum_over_ranks(int(not is_shared))):
        return
    place = os.path.join(os.getcwd(), output)
    seen = processes.gather((socket.gethostname(), place, is_shared))
    main, shared, _ = seen[0]
    without = dict.fromkeys(f"{place} on {host}" for host, place, is_seen in seen if not is_seen)
    raise UserError(
        f"output_dir {some([*without], 3)} is not the folder that {main} writes to, {shared}; "
        "put it on a disk that all nodes share, under the same path, or give a mirror"
    )
