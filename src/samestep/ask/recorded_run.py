"""What the folder of a run says of it, checked: a stranger may have written it. Needs no torch."""

import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from samestep.base import run_folder
from samestep.base.console import escaped, without_credentials
from samestep.base.errors import UserError, some
from samestep.base.fields import NonNegativeInt
from samestep.base.files import read_text
from samestep.settings.config import BatchSize, naming, read_yaml
from samestep.state import checkpoints, state_hash

ROWS = ("seed", "global_batch_size", "task.data", "data ")  # what decides the rows of a step
# Facts that may differ; with exact LAYOUT, too; LATER are not known before the first checkpoint.
FREE = ("hardware cpu_name", "hardware devices", "hardware python", "hardware datasets")
LAYOUT = ("hardware processes", "hardware nodes", "hardware threads")
LATER = ("settings ", "code optimizer", "hardware sharding", *FREE[:2], *LAYOUT)


def print_line(text: str) -> None:
    """Prints one line, whatever files have put into it."""
    print(escaped(without_credentials(text[:2000])))


def tell(text: str) -> None:
    """Tells a person at a terminal what takes its time now."""
    if sys.stderr.isatty():
        print(f"... {text}", file=sys.stderr, flush=True)


# ---- What files may hold -------------------------------------------------------------------------

_MOST = 10**9  # steps
Number = Annotated[int, Field(ge=0, le=_MOST)]  # of a step
_Key = Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")]  # a folder of prepared data
_Count = Annotated[int, Field(ge=1, le=10**6)]
_ENTRY: dict[str, Any] = {"step": Number, "samples": NonNegativeInt, "seed": NonNegativeInt}
_ENTRY |= {"global_batch_size": BatchSize, "mixture": dict[str, Any] | None}
_ENTRY |= {"data": str, "prepared": _Key}
HARDWARE = {"processes": _Count, "threads": _Count, "precision": str}


def check(kinds: dict[str, Any], found: Any, place: object) -> Any:
    """A JSON object; raises UserError unless its entries are of these types."""
    for name, kind in kinds.items():
        adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(strict=True))
        try:
            adapter.validate_python(found[name])
        except (ValidationError, LookupError, TypeError) as error:
            problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "missing"
            raise UserError(f"{place}: {name}: {problem}") from None
    return found


OTHER = "state of "  # begins the name of what is state and no weight


def _read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML; empty: there is no file. Raises ValueError for anything else."""
    if not path.exists():
        return {}
    text = read_text(path)
    with naming(path):
        read_yaml(text)  # refuses names that are given twice, and what grows beyond its text
        found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise UserError(f"{path} is empty or damaged: it has no settings")
    return found


# ---- A run ---------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """The steps that a line of metrics.jsonl tells of."""

    first: int
    last: int
    line: dict


class RecordedRun:
    """The record of a run; raises UserError for a folder that holds none, or a damaged one.

    manifests: of the checkpoints that are there, by step, in order.
    config:    the settings of the newest start; a script of one's own writes none.
    log:       the lines of metrics.jsonl; intervals: those with a loss.
    history:   see provenance.extend_history.
    last:      the last step that is known.
    """

    def __init__(self, folder: str | Path):
        self.folder, self.intervals = Path(folder), []
        self.manifests: dict[int, dict[str, Any]] = {}
        for path in reversed(checkpoints.list_checkpoints(self.folder / "checkpoints")):
            with contextlib.suppress(ValueError):
                manifest = checkpoints.verify(path, hashed=False)
                if all(each["bytes"] >= 0 for each in manifest["files"].values()):  # no pipe
                    self.manifests[manifest["step"]] = manifest
        self.config = _read_mapping(self.folder / "config.yaml")
        if not (self.manifests or self.config):
            raise UserError(f"{self.folder} is no folder of a run; give one, such as runs/default")
        newest = max(self.manifests, default=0)
        # A run without a checkpoint has had no change.
        facts = {name: self.config.get(name) for name in ("seed", "global_batch_size")}
        begin = {"step": 0, "samples": 0, "mixture": None, "data": "", "prepared": "", **facts}
        self.history = self.manifest(newest).get("history") if self.manifests else [begin]
        if not self.history:
            raise UserError(f"{self.folder}: an older samestep has made it, without a history")
        steps = [check(_ENTRY, each, self.folder)["step"] for each in self.history]
        if steps != sorted({*steps}):
            raise UserError(f"{self.folder}: the steps of its history are not in their order")
        self.log, before, self.last = run_folder.read_metrics(self.folder), 0, newest
        for line in self.log:
            if not 0 <= line["step"] <= _MOST:
                raise UserError(f"metrics.jsonl of {self.folder} has a step {line['step']}")
            if "loss" in line:
                self.intervals.append(Interval(before + 1, line["step"], line))
            if "loss" in line or "started" in line:
                before = line["step"]
                self.last = max(newest, before)
            changed = any(name.startswith(ROWS) for name in line.get("changes", ()))
            if changed and line["step"] >= newest:  # no checkpoint tells of what came after
                self.last = line["step"]
                break

    def manifest(self, step: int) -> dict[str, Any]:
        """That of the first checkpoint that holds a step, else of the newest; {}: there is none."""
        later = [number for number in self.manifests if number >= step]
        chosen = later[:1] or [*self.manifests][-1:]
        return self.manifests[chosen[0]] if chosen else {}

    def started(self) -> dict[str, Any]:
        """What hardware.yaml says of the newest start; raises UserError without it."""
        path = self.folder / "hardware.yaml"
        return check({"environment": dict[str, str]}, _read_mapping(path), path)

    def newest(self) -> dict[str, Any]:
        """The manifest of the newest checkpoint; raises UserError without any."""
        if not self.manifests:
            raise UserError(f"{self.folder} has no valid checkpoint; give the folder of a run")
        return self.manifests[max(self.manifests)]

    def settings(self, step: int) -> dict[str, Any]:
        """The settings with which a step was trained."""
        if self.config and step > max(self.manifests, default=0):
            return self.config
        return self.manifest(step)["config"]

    def entry(self, step: int) -> dict:
        """The entry of the history that tells of a step; raises UserError without one."""
        first = self.history[0]["step"] + 1
        if not first <= step <= self.last:
            known = f"{self.folder} tells of steps {first} to {self.last}"
            raise UserError(f"step {step}: {known}; give one of them")
        return [each for each in self.history if each["step"] < step][-1]

    def replayed(self, step: int) -> tuple[dict[str, Any], dict[str, Any], list[dict]]:
        """The question of training.replay about a step; the settings, variables and hardware that
        it was trained with; and the lines of metrics.jsonl from the checkpoint before it on."""
        entry = self.entry(step)
        about = [each for each in self.intervals if each.first <= step <= each.last]
        if not about:
            raise UserError(f"metrics.jsonl of {self.folder} has no line about step {step}")
        started = self.started()
        trained = {"settings": self.settings(step), "environment": started["environment"]}
        trained["hardware"] = self.manifest(step).get("hardware", started)
        sharding = trained["hardware"].get("sharding", "none")
        kinds = {part.split()[0] for part in sharding.split(", ")}
        if kinds - {"none", "FSDP2", "dp_replicate", "dp_shard"}:
            raise UserError(
                f"step {step} was trained with {sharding}; DeepSpeed, tensor and context "
                "parallelism and pipelines cannot be replayed"
            )
        begin, start = 0, "never"
        for number in reversed(self.manifests):  # the newest valid one counts
            if number < about[0].first and not begin:
                path = checkpoints.checkpoint_folder(self.folder / "checkpoints", number)
                with contextlib.suppress(ValueError):
                    checkpoints.verify(path)
                    begin, start = number, str(path.resolve())
        if not begin and self.history[0]["step"]:
            raise UserError(f"there is no checkpoint before step {step} to begin from")
        last = about[0].last
        lines = [each.line for each in self.intervals if begin < each.last <= last]
        question = {"step": step, "begin": begin, "checkpoint": start, "last": last}
        question |= {"lines": [line["step"] for line in lines]}
        return question | {"data": entry["data"], "prepared": entry["prepared"]}, trained, lines

    def positions(self, step: int) -> range:
        """The positions in the run of the samples of a step."""
        entry = self.entry(step)
        size = entry["global_batch_size"]
        first = entry["samples"] + (step - 1 - entry["step"]) * size
        return range(first, first + size)

    def saves(self) -> list[dict]:
        """The step, state, version of its hash, and previous entry of each save whose chain leads
        to the newest. One that neither a checkpoint nor metrics.jsonl tells of cuts the chain."""
        told = {line.get("committed_step", line["step"]): line for line in self.log}
        told |= self.manifests
        states = {step: each["state"] for step, each in told.items() if each.get("state")}
        saves: list[dict] = []
        for step in sorted(states):
            previous = state_hash.chain_hash(saves[-1]) if saves else ""
            known = self.manifests.get(step, {}).get("previous", previous)
            if known != previous:
                saves = []
            version = told[step].get("state_version", 1)
            entry = {"step": step, "state": states[step], "version": version}
            saves.append(entry | {"previous": known})
        return saves

    def state_at(self, step: int, version: int) -> str:
        """The state of a checkpoint by a version of the hash."""
        manifest = self.manifests[step]
        if manifest.get("state_version", 1) == version:
            return manifest["state"]
        return state_hash.state_of(self.tensors_at(step, version), manifest, version)

    def tensors_at(self, step: int, wanted: int = state_hash.VERSION) -> dict[str, list]:
        """Dtype, shape and hash of each tensor of a checkpoint, by a version of the hash.

        Raises ValueError unless they are the state that the manifest names.
        """
        path = checkpoints.checkpoint_folder(self.folder / "checkpoints", step)
        if step not in self.manifests:
            raise UserError(f"{path} is no valid checkpoint")
        manifest = checkpoints.verify(path)
        version, files = manifest.get("state_version", 1), [*manifest["files"]]
        tensors = state_hash.hash_tensors(path, files, version)
        if state_hash.state_of(tensors, manifest, version) != manifest["state"]:
            raise UserError(f"{path} does not hold the state that its manifest names")
        if (wanted > 2) == (version > 2):  # hashed alike
            return tensors
        return state_hash.hash_tensors(path, files, wanted)

    def weights_at(self, step: int, version: int = state_hash.VERSION) -> dict[str, str]:
        """8 hex digits of each weight of a checkpoint, of its values and its optimizer state, and
        of what else is state, such as the settings of a group. For errors see `tensors_at`."""
        weights: dict[str, list] = {}
        for name, about in sorted(self.tensors_at(step, version).items()):
            kind, _, weight = name.partition(".")
            if kind in ("state", "number"):  # state.WEIGHT.exp_avg
                weight = weight.rpartition(".")[0]
            if kind not in ("model", "state", "number"):
                weight = OTHER + name
            weights.setdefault(weight, []).append([name, *about])
        for name, value in state_hash.rest_of(self.manifests[step])["others"].items():
            weights.setdefault(OTHER + name, []).append([name, value])
        return {name: digest_of(about)[:8] for name, about in sorted(weights.items())}


# ---- What two runs are compared by ---------------------------------------------------------------


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


def describe_weights(before: dict, after: dict) -> str:
    """How many weights differ in what `weights_at` gives, and the first; else what else does."""
    changed = sorted(checkpoints.differences(before, after))
    weights = [name for name in changed if not name.startswith(OTHER)]
    count = len([name for name in before if not name.startswith(OTHER)])
    if weights:
        return f"{len(weights)} of {count} weights, first {weights[0]}"
    return some(changed, 3) or "no weight by its 8 digits"


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


def difference(before: Any, now: Any) -> str:
    """How far two values are apart."""
    if before == now or (before is None and now != now):  # a line has null for NaN
        return "equal"
    if isinstance(before, float) and isinstance(now, float):
        return f"{abs(now - before) / max(abs(before), 1e-30):.1e} apart"
    return "DIFFERS"


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
