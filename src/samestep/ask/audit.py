"""Trains a part of a run again, from its receipt, and compares the states to the last bit.

    python -m samestep audit receipt.json --steps 0:20                      in a project's folder
    python -m samestep audit receipt.json --steps 0:20 --processes 2
    python -m samestep audit receipt.json --steps 20:40 --run runs/mine     from its checkpoint
    python -m samestep audit receipt.json --steps 0:20 --task.data my.jsonl
    python -m samestep audit receipt.json --steps 0:20 --run runs/words -- python own_script.py

Code, data and versions are compared first. A command after -- is run in a copy of this folder
without its runs, where it writes into RUN. What trains is ended when the last step is saved. With
`exact` the processes do not matter. Exit codes: 0 equal; 1 not equal; 2 wrong input.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from samestep.ask import again, receipt
from samestep.ask.record import FREE, LATER, LAYOUT, Record, describe, differing, facts_of
from samestep.base.console import one_line
from samestep.base.errors import UserError
from samestep.base.launching import PREFIXES
from samestep.state import checkpoints

NOT_COPIED = (".git", ".venv", "__pycache__")


class _Audit:
    """The steps `first` + 1 to `last` of a receipt; raises UserError for others."""

    def __init__(self, args: Namespace):
        self.is_script = bool(args.command)
        self.receipt, self.run, self.anyway = receipt.read(args.receipt), args.run, args.anyway
        self.saves = {save["step"]: save for save in self.receipt["saves"]}
        known = [*self.saves] if self.receipt["begins"] else [0, *self.saves]
        asked = re.fullmatch(r"(\d*):(\d*)", args.steps)
        steps = [int(asked[1] or known[0]), int(asked[2] or known[-1])] if asked else []
        if not asked or not {*steps} <= {*known} or steps[0] >= steps[1]:
            shown = ", ".join(map(str, known))
            raise UserError(f"--steps {args.steps}: give A:B of the steps {shown}")
        self.first, self.last = steps
        self.seen: set[int] = set()
        self.checkpoint: Path | None = None
        if self.first and not self.run:
            raise UserError(f"to resume after step {self.first} give --run, the folder of the run")
        if self.first:
            record = Record(self.run)
            record.weights_at(self.first)
            if record.manifests[self.first]["state"] != self.saves[self.first]["state"]:
                raise UserError(f"{self.run} has another state after step {self.first}")
            folder = self.run / "checkpoints"
            self.checkpoint = checkpoints.checkpoint_folder(folder, self.first).absolute()

    def check(self, manifest: dict) -> None:
        """Compares what both are made of, as far as it is known; raises UserError where other bits
        must be expected."""
        given, found = facts_of(self.receipt), facts_of(manifest)
        free = {*FREE, *(LAYOUT if self.receipt["config"]["exact"] else ())}
        for name, pair in differing(given, found).items():
            later = name not in found and name.startswith(LATER)
            hidden = name not in given and name.startswith(("settings ", "data "))
            if later or hidden:
                continue
            text = describe(name, *pair)
            if name not in free and not self.anyway:
                raise UserError(f"not what the receipt was made of: {text}; --anyway tries it")
            print(f"  differs, and {'may' if name in free else 'must not'}: {text}")

    def compare(self, record: Record, step: int) -> bool:
        """Prints whether the state of a new checkpoint is that of the receipt."""
        save, state = self.saves[step], record.manifests[step]["state"]
        self.seen.add(step)
        word = "equal" if state == save["state"] else "NOT EQUAL"
        print(f"  step {step:6}: {word} {save['state'][:16]}")
        if state != save["state"] and "weights" in save:
            digits = save["weights"]
            given = {n: digits[8 * i : 8 * i + 8] for i, n in enumerate(self.receipt["names"])}
            changed = checkpoints.differences(given, record.weights_at(step))
            print(f"    {len(changed)} of {len(given)} weights differ, the first: {min(changed)}")
        return state == save["state"]

    def follow(self, started: list[subprocess.Popen], folder: Path, log: Path) -> bool:
        """Compares checkpoints as they come, until the last or another state; whether all were
        equal."""
        while self.last not in self.seen:
            codes = [each.poll() for each in started]
            for path in reversed(checkpoints.list_checkpoints(folder / "checkpoints")):
                step = checkpoints.step_of(path)
                if self.first < step <= self.last and step in self.saves.keys() - self.seen:
                    record = Record(folder)
                    if self.is_script and not self.seen:
                        self.check(record.manifests[step])
                    if not self.compare(record, step):
                        return False
            if self.last not in self.seen and (None not in codes or any(codes)):
                said = [line for line in log.read_text(errors="replace").splitlines() if line]
                reason = one_line((said or ["nothing was printed"])[-1])
                raise UserError(f"the run ended before step {self.last} was saved: {reason}")
            time.sleep(0.05)
        return True


def prepare(audit: _Audit, scratch: Path, args: Namespace) -> tuple[list, list]:
    """Compares code and data; the command that trains again, and the environments of processes."""
    from samestep.run import startup

    environment, hardware = audit.receipt["environment"], audit.receipt["hardware"]
    envs = again.environments(environment, hardware, args.processes)
    os.environ |= {n: text for n, text in envs[0].items() if n.startswith(PREFIXES)}  # precision
    train, task = startup.find_project()
    settings = {"tracker": "", **audit.receipt["config"]}  # no receipt names a tracker
    recipe = again.write_recipe(settings, scratch)
    words = ["--config", recipe, "--output_dir", str(scratch / "run"), *args.flags]
    words += ["--resume", str(audit.checkpoint or "never"), "--accept_changes", "true"]
    manifest = startup.prepare_run(train.Config, task, None, [*words, "--check", "true"]).manifest
    hardware = manifest["hardware"] | {"processes": len(envs)}
    audit.check(manifest | {"config": {}, "hardware": hardware})  # settings are the receipt's
    return [sys.executable, "train.py", *words], envs


def _copy_folder(audit: _Audit, copied: Path) -> Path:
    """Copies this folder without the folders of runs, but for the checkpoint to begin from; the
    folder of the run there."""

    def leave_out(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if n in NOT_COPIED or Path(folder, n, "checkpoints").is_dir()]

    if not audit.run or not (copied / audit.run).resolve().is_relative_to(copied.resolve()):
        raise UserError("give --run, the folder below this one where the command writes")
    shutil.copytree(Path(), copied, symlinks=True, ignore=leave_out)
    if audit.checkpoint:
        place = copied / audit.run / "checkpoints" / audit.checkpoint.name
        shutil.copytree(audit.checkpoint, place)
    return copied / audit.run


def answer(args: Namespace) -> int:
    """Trains in a scratch folder, and prints whether all states are equal; the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it has started ends, too
    began, audit = time.monotonic(), _Audit(args)
    print(f"audit of {args.receipt}, steps {audit.first} to {audit.last}", flush=True)
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        place, run, envs = Path(), Path(folder, "run"), [dict(os.environ)]
        command = args.command
        if command:
            place = Path(folder, "copy")
            run = _copy_folder(audit, place)
        else:
            command, envs = prepare(audit, Path(folder), args)
        log = Path(folder, "log")
        with open(log, "w") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            with again.started(command, envs, cwd=place, **streams) as started:
                equal = audit.follow(started, run, log)
    verdict = "the same run, to the bit" if equal else "NOT the run of the receipt"
    print(f"=> {verdict}; {time.monotonic() - began:.0f} s")
    return int(not equal)
