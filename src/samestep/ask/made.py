"""What a run was made of, and the hashes of its states: what diff, receipt and audit compare."""

import hashlib
import json
from typing import Any

from samestep.ask.record import Record
from samestep.base.errors import UserError
from samestep.state import checkpoints, state_hash

FREE = ("hardware cpu_name", "hardware devices", "hardware python", "hardware datasets")
LAYOUT = ("hardware processes", "hardware nodes", "hardware threads")  # may differ with exact
LATER = ("settings ", "code optimizer", "hardware sharding", *FREE[:2], *LAYOUT)  # unknown at first


def facts_of(manifest: dict) -> dict[str, Any]:
    """What decides the result of a run, by `GROUP NAME`: settings, code, data, hardware."""
    facts = {f"settings {n}": v for n, v in checkpoints.flatten(manifest["config"]).items()}
    for number, group in enumerate(manifest.get("optimizer", ())):
        facts |= {f"code optimizer {number} {name}": value for name, value in group.items()}
    for file, functions in manifest["code"].items():
        facts |= {f"code {file} {name}": digest for name, digest in functions.items()}
    facts["code samestep samestep"] = manifest["library"]
    facts |= {f"data {name}": value for name, value in manifest["data"].items()}
    facts["data identity"] = manifest["identity"]
    return facts | {f"hardware {name}": value for name, value in manifest["hardware"].items()}


def differing(before: dict, after: dict) -> dict[str, list]:
    """The facts that differ, in their order; of code, those of files that both have loaded."""
    loaded = [{n.split()[1] for n in facts if n.startswith("code ")} for facts in (before, after)]
    both, changed = loaded[0] & loaded[1], checkpoints.differences(before, after)
    return {n: v for n, v in changed.items() if not n.startswith("code ") or n.split()[1] in both}


def describe(name: str, before: Any, after: Any) -> str:
    """A few words for a fact that differs: digests say nothing to a reader."""
    group, _, short = name.partition(" ")
    if group == "code" and not short.startswith("optimizer"):
        return f"code of {short.split()[1]}"
    return f"other data ({short})" if group == "data" else f"{short}: {before} -> {after}"


def newest(record: Record) -> dict[str, Any]:
    """The manifest of the newest checkpoint; raises UserError without any."""
    if not record.manifests:
        raise UserError(f"{record.folder} has no valid checkpoint; give the folder of a run")
    return record.manifests[max(record.manifests)]


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
