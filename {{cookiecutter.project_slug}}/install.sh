#!/bin/sh
# Creates the virtual environment $VENV if it is missing. Then installs $TORCH, and what the
# arguments of `pip install` name: VENV=.venv sh install.sh -e '.[dev]'
#
# PyTorch comes in several builds. On Linux, PyPI's build brings several GB of CUDA libraries, so a
# machine without an NVIDIA GPU gets the CPU build from PyTorch's own index. If pip's settings name
# constraints or other indexes, they decide instead, and a line says so. TORCH_INDEX names an index
# for torch, and overrides all of this.
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
# The version bound of pyproject.toml, so that pip keeps this build in later steps.
TORCH=${TORCH:-$(sed -n 's/^ *"\(torch[<>=~!].*\)",$/\1/p' pyproject.toml)}
TORCH=${TORCH:-torch}
TORCH_INDEX=${TORCH_INDEX:-}
CPU_INDEX=https://download.pytorch.org/whl/cpu

stop() {
    echo "setup: $*" >&2
    exit 2
}

pip() {
    PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 "$VENV/bin/python" -m pip "$@"
}

# Installs quietly: on a terminal one line shows what pip is doing. pip's warnings and errors follow,
# except those about local index folders that do not exist.
install() {
    failed=
    { pip install --no-input --progress-bar off "$@" 2>"$VENV/pip.log" || echo FAILED; } | progress || failed=1
    grep -v '^WARNING: Location .* is ignored' "$VENV/pip.log" >&2 || :
    [ -z "$failed" ]
}

progress() {
    while read -r line; do
        [ "$line" != FAILED ] || break
        if [ -t 1 ]; then printf '\r\033[K  %.76s' "$line"; fi
    done
    if [ -t 1 ]; then printf '\r\033[K'; fi
    [ "$line" != FAILED ]
}

# Prints the names of pip's settings that say where packages come from. Values may hold a password.
settings() {
    pip config list | awk -F= '
        $1 ~ /\.(constraint|(extra-)?index-url|find-links|no-index)$/ && length($2) > 2 {
            if (sub(/^:env:\./, "PIP_", $1)) { $1 = toupper($1); gsub("-", "_", $1) }
            printf "%s%s", comma, $1; comma = ", "
        }'
}

if [ ! -e "$VENV/bin/python" ]; then
    command -v "$PYTHON" >/dev/null || stop "$PYTHON was not found. Install Python 3.10 or newer."
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        stop "$("$PYTHON" -V) is too old. Name Python 3.10 or newer, for example: PYTHON=python3.12"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "$PYTHON has no venv module. On Debian and Ubuntu: sudo apt install python3-venv"
    echo "setup: creating $VENV with $("$PYTHON" -V)"
    "$PYTHON" -m venv "$VENV"
fi
pip --version >/dev/null 2>&1 ||
    stop "$VENV has no pip. Remove the folder and try again, or use the tool that created it."
pip_is_new='import pip, sys; sys.exit([int(n) for n in pip.__version__.split(".")[:2]] < [21, 3])'
"$VENV/bin/python" -c "$pip_is_new" ||
    stop "The pip of $VENV is too old. Run: $VENV/bin/python -m pip install --upgrade pip"

gpu=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || :)
if [ -z "$TORCH_INDEX" ] && [ "$(uname -s)" = Linux ] && [ "$gpu" = 0 ]; then
    deciding=$(settings)
    if [ -z "$deciding" ]; then
        TORCH_INDEX=$CPU_INDEX
    elif ! ls -d "$VENV"/lib/python3*/site-packages/torch >/dev/null 2>&1; then
        echo "setup: pip's settings ($deciding) decide which build of PyTorch comes. PyPI's brings" \
            "several GB of CUDA, useless without a GPU. For the CPU build, press Ctrl-C and add to" \
            "the command: TORCH_INDEX=$CPU_INDEX"
    fi
fi
if [ -n "$TORCH_INDEX" ]; then
    shown=$(echo "$TORCH_INDEX" | sed 's|//[^/]*@|//***@|')
    echo "setup: installing $TORCH from $shown"
    # --no-deps: only torch comes from this index. Its dependencies come in the next step.
    install --no-deps --index-url "$TORCH_INDEX" "$TORCH" ||
        stop "$shown gave no $TORCH. Try again later, or install a build of PyTorch yourself:" \
            "$VENV/bin/python -m pip install torch"
fi
echo "setup: installing $TORCH $*"
install "$TORCH" "$@" || stop "pip failed; its reason is above."
echo "setup: done, $(du -sh "$VENV" | cut -f1) in $VENV"
