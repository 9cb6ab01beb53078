#!/bin/sh
# Creates the virtual environment $VENV if it is missing. Then installs $TORCH, and what the
# arguments of `pip install` name: VENV=.venv sh install.sh -e '.[dev]'
#
# pip installs what its settings give, and so does uv, where it is there and pip has no settings of
# packages, which uv does not read. TORCH_BACKEND=NAME takes PyTorch from PyTorch's own index of that
# build: cpu, cu126, cu130, rocm7.2, ... Linux without a GPU in sight and without settings gets cpu.
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH_BACKEND=${TORCH_BACKEND:-}
# The version bound of pyproject.toml, so that pip keeps this build in later steps.
TORCH=${TORCH:-$(sed -n 's/^ *"\(torch[<>=~!].*\)",$/\1/p' pyproject.toml)}
if [ -t 2 ]; then quiet=; else quiet=--quiet; fi

stop() {
    echo "setup: $*" >&2
    exit 2
}

pip() {
    PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 "$VENV/bin/python" -m pip "$@"
}

# On a terminal pip prints hundreds of lines: here those of downloads of a megabyte and more. Its errors come as they are.
add() {
    if [ "$quiet" ]; then
        pip install --no-input --quiet "$@"
        return
    fi
    failed=$({ { pip install --no-input --progress-bar off "$@" || echo "$?" >&3; } |
        sed -u -n 's/^ *Downloading \(.*\/\)*\([^ ]* ([0-9.]* [MG]B)\).*/setup: downloading \2/p' >&2; } 3>&1)
    return "${failed:-0}"
}

if [ ! -e "$VENV/bin/python" ]; then
    command -v "$PYTHON" >/dev/null || stop "$PYTHON was not found. Install Python 3.11 or newer."
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        stop "$("$PYTHON" -V) is too old. Name Python 3.11 or newer, for example: PYTHON=python3.12"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "$PYTHON has no venv module. On Debian and Ubuntu: sudo apt install python3-venv"
    echo "setup: creating $VENV with $("$PYTHON" -V)"
    "$PYTHON" -m venv "$VENV"
fi
uv=$(command -v uv || pip --version >/dev/null 2>&1 || stop "$VENV has no pip; remove the folder")
settings=$(pip config list 2>/dev/null | grep -E "\.(constraint|(extra-)?index-url|find-links|no-index)='.+'" || :)
[ -z "$settings" ] || uv=
installed=$(cat "$VENV"/lib/python3*/site-packages/torch/version.py 2>/dev/null || :)
if [ -z "$TORCH_BACKEND$settings$installed" ] && [ "$(uname -s)" = Linux ] &&
    ! { nvidia-smi -L || PATH=$PATH:/opt/rocm/bin rocm_agent_enumerator; } 2>/dev/null | grep -qE '^GPU |gfx[1-9]'; then
    TORCH_BACKEND=cpu
    echo "setup: no GPU in sight, so PyTorch's CPU build comes. If another machine trains, add to the command:" \
        "TORCH_BACKEND=cu130 (NVIDIA) or TORCH_BACKEND=rocm7.2 (AMD)"
fi
other= # another build is installed
case $TORCH_BACKEND:$installed in :* | *: | *"+$TORCH_BACKEND'"*) ;; *) other=1 ;; esac
echo "setup: installing $TORCH ${TORCH_BACKEND:+(build $TORCH_BACKEND) }$*"
if [ -n "$uv" ]; then
    "$uv" pip install $quiet --python "$VENV/bin/python" ${TORCH_BACKEND:+--torch-backend "$TORCH_BACKEND"} \
        ${other:+--reinstall-package torch} "$TORCH" "$@" || stop "uv failed; its reason is above."
else # only torch comes from the index; what ROCm's needs is only there
    case $TORCH_BACKEND in rocm*) alone= ;; *) alone=--no-deps ;; esac
    [ -z "$TORCH_BACKEND" ] || add $alone ${other:+--force-reinstall} \
        --index-url "https://download.pytorch.org/whl/$TORCH_BACKEND" "$TORCH" || stop "pip failed; its reason is above."
    add "$TORCH" "$@" || stop "pip failed; its reason is above."
fi
echo "setup: done, $(du -sh "$VENV" | cut -f1) in $VENV"
