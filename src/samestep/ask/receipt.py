"""Writes the receipt of a run, a few kB by which anybody can audit it.

    python -m samestep receipt runs/mine                    writes runs/mine/receipt.json

It has the settings, digests of the data and of each function of the code, versions, hardware, and
the chain of the hashes of all saved states; of the checkpoints that are there 8 digits for each
weight, which name the one that differs. Paths of this machine and secrets stay out.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from samestep.ask import made
from samestep.ask.record import Record
from samestep.base.console import protect_output, without_credentials
from samestep.base.errors import UserError
from samestep.base.files import read_text, replace_text
from samestep.base.launching import PREFIXES
from samestep.core import checkpoints, state_hash
from samestep.programs import make_parser

PARTS = ("code", "library", "identity", "frozen_weights", "optimizer", "hardware")
OWN = ("output_dir", "tracker", "project", "offline", "upload_code", "timeout")  # of a machine
LOCAL = re.compile(r"""(^|[\s"'=:,;(\[])(~|/\w|file:)""")
SECRET = re.compile(r"(^|[_.])(token|key|password|secret|credentials?|(api|access|auth|hf)_\w+)$")
TOKEN = re.compile(r"\b(hf_|gh._|github_pat_|sk-|AKIA)\w{12}")


def is_public(name: str, value: Any) -> bool:
    """Whether a setting may be published: it names no place of a machine, and opens no door."""
    text = json.dumps(value)
    if SECRET.search(name) or TOKEN.search(text) or without_credentials(text) != text:
        return False
    return not LOCAL.search(text)


def publish(config: dict) -> tuple[dict, list[str]]:
    """The settings that may be published, and the names of those that are left out."""
    settings = checkpoints.flatten(config)
    left_out = [n for n, value in settings.items() if not is_public(n, value) and n not in OWN]
    kept = settings.keys() - {*left_out, *OWN}
    found = {name: value for name, value in config.items() if name in kept}
    if isinstance(config.get("task"), dict):
        task = {n: value for n, value in config["task"].items() if f"task.{n}" in kept}
        found["task"] = task
    return found, left_out


def make(record: Record) -> dict[str, Any]:
    """The receipt of a run; raises UserError for one that cannot have any."""
    manifest, begins = made.newest(record), made.last_change(record)
    chain = [each for each in made.saves_of(record) if each["step"] >= begins]
    sharding = manifest["hardware"]["sharding"]
    if sharding not in ("none", "FSDP2") or not chain:
        raise UserError(
            f"{record.folder} was trained with {sharding}; receipts are supported for DDP and FSDP2"
        )
    names: list[str] = []
    saves = []
    for each in reversed(chain):
        save = {"step": each["step"], "state": each["state"]}
        if each["step"] in record.manifests:
            weights = made.weights_at(record, each["step"])
            names = names or [*weights]
            if [*weights] == names:
                save["weights"] = "".join(weights.values())
        saves.insert(0, save)
    variables: dict[str, str] = {}
    if (record.folder / "hardware.yaml").exists():  # which a script of one's own does not write
        variables = yaml.safe_load(read_text(record.folder / "hardware.yaml"))["environment"]
    variables = {n: v for n, v in variables.items() if n.startswith(PREFIXES) and is_public(n, v)}
    config, left_out = publish(manifest["config"])
    content = {
        "receipt": 1,
        "config": config,
        "left_out": left_out,
        **{name: manifest[name] for name in PARTS},
        "data": {name: value for name, value in manifest["data"].items() if is_public(name, value)},
        "environment": variables,
        "begins": begins,
        "names": names,
        "previous": chain[0]["previous"],
        "saves": saves,
        "chain": state_hash.chain_hash(chain[-1]),
    }
    return content | {"sha256": made.digest_of(content)}


def read(path: Path) -> dict[str, Any]:
    """A receipt; raises UserError unless it is as it was written."""
    try:
        found = json.loads(read_text(path))
        content = {name: value for name, value in found.items() if name != "sha256"}
        intact, chain = found["sha256"] == made.digest_of(content), found["previous"]
        for save in found["saves"]:
            chain = state_hash.chain_hash({**save, "previous": chain})
        intact = intact and chain == found["chain"]
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        raise UserError(f"{path} is no receipt; samestep receipt RUN writes one") from None
    if not intact:
        raise UserError(f"{path} was changed: its digest is another")
    return found


def main() -> None:
    protect_output()
    parser = make_parser("receipt", __doc__)
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/default")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN/receipt.json")
    args = parser.parse_args()
    try:
        found, path = make(Record(args.run)), args.output or args.run / "receipt.json"
        text = json.dumps(found, indent=1) + "\n"
        replace_text(path, text)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    steps = [save["step"] for save in found["saves"]]
    states = f"{len(steps)} states, of steps {steps[0]} to {steps[-1]}"
    print(f"{path}: {len(text) / 1e3:.1f} kB, {states}, {found['sha256'][:16]}")
    if found["left_out"]:
        names = ", ".join(found["left_out"])
        print(f"left out, as paths of this machine or secrets: {names}")
    if found["begins"]:
        print(f"the run was changed after step {found['begins']}: it can be audited from there on")
    if not found["config"]["exact"]:
        print("not exact: it can be audited on as many processes and threads alone")
