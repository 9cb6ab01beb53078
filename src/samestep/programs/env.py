"""Prints the lines by which a shell gives any launcher the meaning of an accelerate YAML.

    eval "$(python -m samestep env configs/accelerate/fsdp2.yaml)"
    torchrun --nproc-per-node 2 train.py --config configs/train/default.yaml

`unset` for every ACCELERATE_*, FSDP_* and PARALLELISM_CONFIG_* that is set, then `export` for what
`accelerate launch` would set, made by accelerate's own functions. Options of `accelerate launch`
may follow the YAML, such as --mixed_precision no. The number of processes and the rendezvous are
up to the launcher: num_processes, num_machines, machine_rank and the port have no effect.

For sh, dash, bash and zsh. If the YAML is wrong, eval fails, and train.py does not train.
Exit codes: 0 the lines are printed; 2 the input is wrong.
"""

import contextlib
import io
import json
import os
import re
import shlex
import sys

from samestep.base import launching
from samestep.base.console import one_line
from samestep.launch import launcher

_LAUNCHER = ("MASTER_ADDR", "MASTER_PORT")  # which the launcher sets
_SHELL_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # others cannot be unset, and mean nothing


def shell_lines(words: list[str]) -> list[str]:
    """The lines for a YAML and options of `accelerate launch`; raises ValueError for wrong ones."""
    before = dict(os.environ)
    clean = launching.without_yaml(before)
    os.environ.clear()
    os.environ.update(clean)  # accelerate's functions begin with it
    _, after = launcher.read([*words, "train.py"])
    after = {name: text for name, text in after.items() if name not in _LAUNCHER}
    of_yaml = {name for name in {*before, *after} if name.startswith(launching.PREFIXES)}
    changed = {name: text for name, text in after.items() if text != clean.get(name)}
    others = {n: [text, clean.get(n)] for n, text in changed.items() if n not in of_yaml}
    after[launching.EXPORTED] = json.dumps(others)
    lines = []
    for name in before:
        gone = name not in after and name not in _LAUNCHER
        if (name in of_yaml or gone) and _SHELL_NAME.fullmatch(name):
            lines.append(f"unset {name}")
    for name, text in after.items():
        if name in of_yaml or text != before.get(name):
            lines.append(f"export {name}={shlex.quote(text)}")
    return lines


def main() -> int:
    """Prints the lines; the exit code."""
    words = sys.argv[1:]
    if {"--help", "-h"} & {*words}:
        print(__doc__ or "samestep env YAML OPTIONS_OF_ACCELERATE_LAUNCH")
        return 0
    try:
        if not words or words[0].startswith("-"):
            raise ValueError("name a YAML, such as configs/accelerate/cpu.yaml; see --help")
        silent = io.StringIO()  # what accelerate would tell somebody who launches
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            lines = shell_lines(["--config_file", *words])
    except ValueError as error:
        line = one_line(error, 500)
        print(f"export {launching.FAILED}={shlex.quote(line)}\nfalse")  # the status of eval
        print(f"samestep env: {line}", file=sys.stderr)
        return 2
    sys.stdout.reconfigure(errors="surrogateescape")  # of a path that is not UTF-8
    waits = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")  # preflight has set it in this process
    print("\n".join([*lines, f"export OMP_WAIT_POLICY={shlex.quote(waits)}"]))
    return 0
