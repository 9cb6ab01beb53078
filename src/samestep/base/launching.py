"""What launchers, shells and processes tell each other by variables of the environment."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

NO_MIRROR = "SAMESTEP_NO_MIRROR"  # a variable: of what `samestep audit`, replay, rehearse start
STOPPED = 75  # exit code: stopped on request; the same command continues
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")  # of variables that a YAML becomes
EXPORTED = "SAMESTEP_ENV"  # what else samestep env has set, as JSON: values now and before
FAILED = "SAMESTEP_ENV_FAILED"  # why samestep env set nothing


def write_exit_code(code: int | str) -> None:
    """Writes the exit code for samestep launch on this machine: accelerate makes each one 1."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and "EXIT_CODE_FILE" in os.environ:
        with contextlib.suppress(OSError):
            Path(os.environ["EXIT_CODE_FILE"]).write_text(str(code))


def without_yaml(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a YAML has become in it, and what samestep env has set."""
    left = {name: text for name, text in env.items() if not name.startswith(PREFIXES)}
    for name, (text, before) in json.loads(left.pop(EXPORTED, "{}")).items():
        if left.get(name) == text:
            left |= {name: before}
    left.pop(FAILED, None)
    return {name: text for name, text in left.items() if text is not None}
