"""Writes the receipt of a run, a few kB by which anybody can audit it.

    python -m samestep receipt runs/mine                    writes runs/mine/receipt.json

It has the settings, digests of the data and of each function of the code, versions, hardware, and
the chain of the hashes of all saved states; of the checkpoints that are there 8 digits for each
weight, which name the one that differs. Paths of this machine and secrets stay out.
"""

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from samestep.ask.recorded_run import HARDWARE, Number, RecordedRun, check, digest_of, print_line
from samestep.base.console import plural, without_credentials
from samestep.base.errors import UserError
from samestep.base.files import read_text, replace_text
from samestep.base.launching import PREFIXES
from samestep.state import state_hash

VERSION = 1  # of what a receipt holds: one with another is not read
# Those of a machine.
OWN = ("output_dir", "tracker", "project", "offline", "upload_code", "timeout", "mirror")
_LOCAL = re.compile(r"""(^|[\s"'=:,;(\[])(~|/\w|file:)""")
SECRET = re.compile(r"(^|[_.])(token|key|password|secret|credentials?|(api|access|auth|hf)_\w+)$")
_TOKEN = re.compile(r"\b(hf_|gh._|github_pat_|sk-|AKIA)\w{12}")


# ---- Writing -------------------------------------------------------------------------------------


def is_public(name: str, value: Any) -> bool:
    """Whether a setting may be published: it names no place of a machine, and opens no door."""
    text = json.dumps(value)
    hidden = name in OWN or SECRET.search(name) or _TOKEN.search(text) or _LOCAL.search(text)
    return not hidden and without_credentials(text) == text


def public(values: dict) -> dict:
    """Those that may be published, of the task's settings, too."""
    found = {n: public(v) if n == "task" and isinstance(v, dict) else v for n, v in values.items()}
    return {name: value for name, value in found.items() if is_public(name, value)}


def make(record: RecordedRun) -> dict[str, Any]:
    """The receipt of a run; raises UserError for one that cannot have any."""
    manifest = record.newest()
    begins = max((line["step"] for line in record.log if "changes" in line), default=0)
    chain = [each for each in record.saves() if each["step"] >= begins]
    sharding = manifest["hardware"]["sharding"]
    if sharding not in ("none", "FSDP2") or not chain:
        raise UserError(f"{record.folder}: receipts support DDP and FSDP2, not {sharding}")
    saves = []
    names = [*record.weights_at(manifest["step"])]
    for each in chain:
        save = {name: each[name] for name in ("step", "state", "version")}
        if each["step"] in record.manifests:
            weights = record.weights_at(each["step"], each["version"])
            save["weights"] = "".join(weights.get(name, 8 * "-") for name in names)
        saves.append(save)
    variables = record.started()["environment"]
    parts = ("code", "library", "identity", "optimizer", "hardware")
    content = {
        "receipt": VERSION,
        **{name: public(manifest[name]) for name in ("config", "data")},
        **{name: manifest[name] for name in parts},
        "environment": public({n: v for n, v in variables.items() if n.startswith(PREFIXES)}),
        "begins": begins,
        "names": names,
        "previous": chain[0]["previous"],
        "saves": saves,
        "chain": state_hash.chain_hash(chain[-1]),
    }
    return content | {"sha256": digest_of(content)}


def receipt(args: Namespace) -> None:
    """Writes the receipt of a run."""
    found, path = make(RecordedRun(args.run)), args.output or Path(args.run, "receipt.json")
    text = json.dumps(found, indent=1) + "\n"
    replace_text(path, text)
    steps = [save["step"] for save in found["saves"]]
    args.answer |= {"path": path, "steps": steps, "exact": found["config"]["exact"]}
    exact = "exact: audit it on any number of processes"
    if not found["config"]["exact"]:
        count = plural(found["hardware"]["processes"], "process")
        exact = f"not exact: audit it on {count}, as here"
    size = f"{len(text) / 1e3:.1f} kB"
    print_line(f"{path}: {size}, states of steps {steps[0]} to {steps[-1]}, {exact}")
    if older := [save["step"] for save in found["saves"] if save["version"] == 1]:
        print_line(
            f"  up to step {older[-1]} a state is hashed without learning rates and averages"
        )


# ---- Reading -------------------------------------------------------------------------------------

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_KINDS = {
    "config": dict[str, Any], "data": dict[str, str | int], "code": dict[str, dict[str, str]],
    "library": str, "identity": str, "optimizer": list[dict[str, str]],
    "hardware": dict[str, Any], "environment": dict[str, str], "begins": Number,
    "names": list[str], "previous": Literal[""] | _Digest,
    "saves": Annotated[list[dict[str, Any]], Field(min_length=1)],
    "chain": _Digest, "receipt": Literal[VERSION], "sha256": str,
}  # fmt: skip
_SAVE = {"step": Number, "state": _Digest}


def _one_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, none of whose names is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def read(path: Path) -> dict[str, Any]:
    """A receipt; raises UserError unless it is as it was written, and its chain is that of its
    states."""
    try:
        found = json.loads(read_text(path), object_pairs_hook=_one_of_each)
        json.dumps(found, allow_nan=False)
        digest = digest_of({name: found[name] for name in found.keys() - {"sha256"}})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is no receipt; samestep receipt RUN writes one") from None
    check(_KINDS, found, path)
    if digest != found.pop("sha256"):
        raise UserError(f"{path} was changed: its digest is another")
    check({"exact": bool}, found["config"], path)
    check(HARDWARE, found["hardware"], path)
    before, previous, names = max(found["begins"] - 1, 0), found["previous"], found["names"]
    for save in found["saves"]:
        check(_SAVE, save, path)
        weights, version = save.get("weights", ""), save.get("version", 1)
        if version not in range(1, state_hash.VERSION + 1):
            raise UserError(f"{path} has states of version {version!r}; update samestep")
        if save["step"] <= before or len(weights) not in (0, 8 * len(names)):
            raise UserError(f"{path}: what it says of step {save['step']} is none of a run")
        before, previous = save["step"], state_hash.chain_hash(save | {"previous": previous})
    if previous != found["chain"]:
        raise UserError(f"{path} was changed: its chain is not that of its states")
    return found
