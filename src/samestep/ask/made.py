"""What a run was made of, and the hashes of its states: what diff, receipt and audit compare."""

import hashlib
import json
from itertools import pairwise
from typing import Any

from samestep.ask.record import Record
from samestep.base.errors import UserError
from samestep.core import checkpoints, state_hash

HARDWARE = ("processes", "nodes", "sharding", "threads", "cpu_name", "precision", "cpu", "gpu")
LAYOUT = tuple(f"hardware {name}" for name in HARDWARE[:4])  # free with exact
FREE = ("hardware cpu_name", "versions python", "versions datasets")
DATA = {"fingerprint": "rows to train on", "validation": "rows to evaluate on"}
DATA |= {"identity": "tokenizer or classes", "frozen_weights": "frozen weights"}

Facts = dict[str, Any]  # by `GROUP NAME`, such as `code task.py task.loss_sum`
Changes = dict[str, list]  # two values, by fact


def facts_of(manifest: dict) -> Facts:
    """What decides the result of a run, as a manifest has it."""
    facts = {f"settings {n}": v for n, v in checkpoints.flatten(manifest["config"]).items()}
    for number, group in enumerate(manifest.get("optimizer", ())):
        facts |= {f"optimizer group {number} {name}": value for name, value in group.items()}
    for file, functions in manifest["code"].items():
        facts |= {f"code {file} {name}": digest for name, digest in functions.items()}
    facts["code samestep samestep"] = manifest["library"]
    known = {name: manifest[name] for name in DATA if name in manifest}
    facts |= {f"data {name}": value for name, value in (manifest["data"] | known).items()}
    return facts | hardware_facts(manifest["hardware"])


def hardware_facts(hardware: dict) -> Facts:
    facts = {}
    for name, value in hardware.items():
        if name != "devices":
            facts[f"{'hardware' if name in HARDWARE else 'versions'} {name}"] = value
    return facts


def differing(before: Facts, after: Facts) -> Changes:
    """The facts that differ, in their order; of code, those of files that both have loaded."""
    changed = checkpoints.differences(before, after)
    loaded = [{n.split()[1] for n in facts if n.startswith("code ")} for facts in (before, after)]
    kept = loaded[0] & loaded[1]
    return {n: v for n, v in changed.items() if not n.startswith("code ") or n.split()[1] in kept}


def matters(name: str, exact: bool, effects: dict[str, str]) -> bool:
    """Whether the bits of a result depend on a fact. `effects`: see startup.change_effects."""
    if name.startswith("settings "):
        return effects.get(name.removeprefix("settings ")) != "nothing"
    return name not in FREE and not (exact and name in LAYOUT)


def describe(name: str, before: Any, after: Any) -> str:
    """A few words for a fact that differs."""
    group, _, short = name.partition(" ")
    if group == "code":
        return f"code of {short.split()[1]}"
    if group == "data" and short in DATA:
        return f"other {DATA[short]}"
    return f"{short}: {before} -> {after}"


# ---- States --------------------------------------------------------------------------------------


def last_change(record: Record) -> int:
    """The step after which a run was last started with other settings, code, data, versions or
    hardware than before; 0: it never was."""
    starts = []
    for line in record.log:
        if "started" in line:
            starts.append((line["step"], hardware_facts(line["started"])))
    if not record.log:  # a script of one's own
        starts = [(step, facts_of(manifest)) for step, manifest in record.manifests.items()]
    exact, step = newest(record)["config"]["exact"], 0
    for (_, before), (after, now) in pairwise(starts):
        if any(matters(name, exact, {}) for name in differing(before, now)):
            step = after
    return step


def newest(record: Record) -> dict[str, Any]:
    """The manifest of the newest checkpoint; raises UserError without any."""
    if not record.manifests:
        raise UserError(f"{record.folder} has no valid checkpoint; give the folder of a run")
    return [*record.manifests.values()][-1]


def saves_of(record: Record) -> list[dict]:
    """The step, state and previous entry of each save whose chain leads to the newest. One that
    neither a checkpoint nor metrics.jsonl tells of cuts the chain."""
    lines = [line for line in record.log if "state" in line]
    states = {line.get("committed_step", line["step"]): line["state"] for line in lines}
    states |= {step: each["state"] for step, each in record.manifests.items()}
    saves: list[dict] = []
    for step in sorted(each for each in states if states[each]):
        previous = state_hash.chain_hash(saves[-1]) if saves else ""
        known = record.manifests.get(step, {}).get("previous", previous)
        if known != previous:
            saves = []
        saves.append({"step": step, "state": states[step], "previous": known})
    return saves


def weights_at(record: Record, step: int) -> dict[str, str]:
    """8 hex digits of each weight in a checkpoint: its values, and what the optimizer keeps of it.

    Raises ValueError unless they are the state that the manifest names.
    """
    path = checkpoints.checkpoint_folder(record.folder / "checkpoints", step)
    manifest = checkpoints.verify(path)
    tensors = state_hash.hash_tensors(path, [*manifest["files"]])
    if state_hash.state_of(tensors) != manifest["state"]:
        raise UserError(f"{path} does not hold the state that its manifest names")
    weights: dict[str, list] = {}
    for name, about in sorted(tensors.items()):
        kind, _, weight = name.partition(".")
        if kind != "model":  # state.WEIGHT.exp_avg
            weight = weight.rpartition(".")[0]
        weights.setdefault(weight, []).append([name, *about])
    return {name: digest_of(about)[:8] for name, about in sorted(weights.items())}


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
