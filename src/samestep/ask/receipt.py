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
from typing import Any

from samestep.ask.record import Record, digest_of
from samestep.base.console import without_credentials
from samestep.base.errors import UserError
from samestep.base.files import read_text, replace_text
from samestep.base.launching import PREFIXES
from samestep.state import state_hash

OWN = ("output_dir", "tracker", "project", "offline", "upload_code", "timeout")  # of a machine
_LOCAL = re.compile(r"""(^|[\s"'=:,;(\[])(~|/\w|file:)""")
SECRET = re.compile(r"(^|[_.])(token|key|password|secret|credentials?|(api|access|auth|hf)_\w+)$")
_TOKEN = re.compile(r"\b(hf_|gh._|github_pat_|sk-|AKIA)\w{12}")


def is_public(name: str, value: Any) -> bool:
    """Whether a setting may be published: it names no place of a machine, and opens no door."""
    text = json.dumps(value)
    hidden = name in OWN or SECRET.search(name) or _TOKEN.search(text) or _LOCAL.search(text)
    return not hidden and without_credentials(text) == text


def public(values: dict) -> dict:
    """Those that may be published, of the task's settings, too."""
    found = {n: public(v) if n == "task" and isinstance(v, dict) else v for n, v in values.items()}
    return {name: value for name, value in found.items() if is_public(name, value)}


def make(record: Record) -> dict[str, Any]:
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
        save = {"step": each["step"], "state": each["state"]}
        if each["step"] in record.manifests:
            weights = record.weights_at(each["step"])
            save["weights"] = "".join(weights.get(name, 8 * "-") for name in names)
        saves.append(save)
    variables = record.hardware()["environment"]
    parts = ("code", "library", "identity", "optimizer", "hardware")
    content = {
        "receipt": 1,
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


def read(path: Path) -> dict[str, Any]:
    """A receipt; raises UserError unless it is as it was written."""
    try:
        found = json.loads(read_text(path))
        digest = found.pop("sha256")
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        raise UserError(f"{path} is no receipt; samestep receipt RUN writes one") from None
    if digest != digest_of(found):
        raise UserError(f"{path} was changed: its digest is another")
    return found


def answer(args: Namespace) -> None:
    found, path = make(Record(args.run)), args.output or Path(args.run, "receipt.json")
    text = json.dumps(found, indent=1) + "\n"
    replace_text(path, text)
    steps = [save["step"] for save in found["saves"]]
    exact = "exact" if found["config"]["exact"] else "for as many processes only"
    print(f"{path}: {len(text) / 1e3:.1f} kB, states of steps {steps[0]} to {steps[-1]}, {exact}")
