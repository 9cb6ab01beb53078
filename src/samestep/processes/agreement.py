"""Finds out before the first step whether all processes run the same, and write to the same folder.

A machine with an older copy of the project, with other data or another library would not fail: it
would train something else.
"""

import hashlib
import json
import os
import secrets
import socket
import time
from pathlib import Path

from samestep import __version__
from samestep.base.begin import installed_version
from samestep.base.console import IS_MAIN, one_line
from samestep.base.fields import flatten
from samestep.processes.ranks import PROCESSES, Ranks, UserError, as_user_error

LIBRARY = Path(__file__).resolve().parents[1]
# Those of other libraries, and devices, may differ unless exact is set.
VERSIONS = ("python", "torch", "accelerate", "transformers", "nccl")
# What the launcher says about the accelerate YAML.
HARDWARE = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_", "ACCELERATE_FP8_")
HARDWARE += ("ACCELERATE_DEEPSPEED_", "FSDP_", "PARALLELISM_CONFIG_")
SHOWN = 5  # differences in a line
FOLDER_SECONDS = 10  # for a network disk to show a new file


def collect_facts(manifest: dict, exact: bool, project: Path) -> dict[str, str]:
    """What must be the same on all processes, by names that a person understands.

    `project`: the folder of train.py and task.py.
    """
    versions = manifest["versions"]
    if not exact:
        versions = {name: versions[name] for name in VERSIONS if name in versions}
        versions["python"] = versions["python"].rpartition(".")[0]
    facts = dict(versions)
    code = {name: project / name for name in ("train.py", "task.py")}
    if "+" in (version := installed_version() or __version__):  # its last part names the content
        facts["samestep"] = version
    else:
        code |= {str(p.relative_to(LIBRARY.parent)): p for p in sorted(LIBRARY.rglob("*.py"))}
    for name, path in code.items():
        facts[f"code {name}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    facts |= {f"data {name}": value for name, value in manifest["data"].items()}
    facts |= flatten(manifest["config"])
    facts |= {n: value for n, value in os.environ.items() if n.startswith(HARDWARE)}
    return {name: str(value) for name, value in facts.items()}


def check_same(processes: Ranks, facts: dict[str, str]) -> None:
    """Raises UserError on all processes, which names machines and differences, if there are any."""
    text = json.dumps(facts, sort_keys=True)
    if len({*processes.gather(hashlib.sha256(text.encode()).hexdigest())}) == 1:
        return
    everywhere = processes.gather((socket.gethostname(), facts))
    differences = []
    for name in dict.fromkeys(name for _, each in everywhere for name in each):
        places: dict[str, list[int]] = {}  # ranks by value
        for rank, (_, each) in enumerate(everywhere):
            places.setdefault(each.get(name, "missing"), []).append(rank)
        if len(places) > 1:
            if name.startswith("data "):  # a digest
                places = {one_line(value, 20): ranks for value, ranks in places.items()}
            differences.append(f"{name} is {describe_places(places, everywhere)}")
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    raise UserError(
        f"the machines do not run the same: {'; '.join(differences[:SHOWN])}{more}; give all of "
        "them the same code, settings, data and versions"
    )


def describe_places(places: dict[str, list[int]], everywhere: list[tuple[str, dict]]) -> str:
    """Which value is where: by machines, or by processes if they differ within a machine."""
    hosts = {value: {everywhere[r][0] for r in ranks} for value, ranks in places.items()}
    if sum(map(len, hosts.values())) == len(set().union(*hosts.values())):
        names = {value: sorted(each) for value, each in hosts.items()}
    else:
        names = {v: [f"process {r}" for r in ranks] for v, ranks in places.items()}
    return " and ".join(
        f"{value} on {', '.join(each[:3])}{', ...' if len(each) > 3 else ''}"
        for value, each in names.items()
    )


def check_shared(processes: Ranks, output: Path) -> None:
    """Raises UserError on all processes if one of them does not see the main one's run folder."""
    if PROCESSES == 1:
        return
    name = processes.from_main(f".shared-{secrets.token_hex(8)}")
    try:
        with processes.fail_together(), as_user_error():
            if IS_MAIN:
                (output / name).touch()
        seen = processes.gather((socket.gethostname(), os.getcwd(), appears(output / name)))
    finally:
        if IS_MAIN:
            (output / name).unlink(missing_ok=True)
    main = seen[0][0]
    without = {host: folder for host, folder, found in seen if not found}
    if without:
        host, folder = next(iter(without.items()))
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        raise UserError(
            f"output_dir {os.path.join(folder, output)} on {host}{more} is not the folder that "
            f"{main} writes to, {os.path.join(seen[0][1], output)}; put it on a disk that all "
            "machines share, under the same path"
        )


def appears(file: Path) -> bool:
    """Whether a file of another machine is there, or comes soon."""
    deadline = time.monotonic() + FOLDER_SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return file.exists()
