#!/bin/sh
# Makes the virtual environment $VENV if it is missing and installs $TORCH and the arguments of
# `pip install` that are given: VENV=.venv sh install.sh -e '.[dev]'
#
# PyTorch is the one package that needs a choice: on Linux, PyPI's build brings several GB of CUDA
# libraries. A machine without an NVIDIA GPU gets the CPU build from PyTorch's own index, unless
# pip's configuration names constraints or other places to look in: then that decides.
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
# The bound of pyproject.toml, so that no later step has a reason to fetch another build.
TORCH=${TORCH:-$(sed -n 's/^ *"\(torch[<>=~!].*\)",$/\1/p' pyproject.toml)}
TORCH=${TORCH:-torch}
CPU_INDEX=https://download.pytorch.org/whl/cpu

stop() {
    echo "setup: $*" >&2
    exit 2
}

pip() {
    "$VENV/bin/python" -m pip "$@"
}

needs_cpu_index() {
    [ "$(uname -s)" = Linux ] || return 1
    nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && return 1
    # Not `grep -q`, which would close the pipe before pip has written all of it.
    ! pip config list |
        grep -E "\.(constraint|(extra-)?index-url|find-links|no-index)=['\"][^'\"]" >/dev/null
}

if [ ! -e "$VENV/bin/python" ]; then
    command -v "$PYTHON" >/dev/null || stop "$PYTHON was not found. Install Python 3.10 or newer."
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        stop "$("$PYTHON" -V) is too old. Name Python 3.10 or newer, for example: PYTHON=python3.12"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "$PYTHON has no venv module. On Debian and Ubuntu: sudo apt install python3-venv"
    "$PYTHON" -m venv "$VENV"
fi
pip --version >/dev/null 2>&1 ||
    stop "$VENV has no pip. Remove the folder and try again, or install with what made it."

if needs_cpu_index; then
    # --no-deps: this index is for torch alone, what torch needs comes with the rest.
    pip install --no-deps --index-url "$CPU_INDEX" "$TORCH" ||
        stop "$CPU_INDEX gave no $TORCH. Try again later, or install a build of PyTorch yourself:" \
            "$VENV/bin/python -m pip install torch"
fi
pip install "$TORCH" "$@"
