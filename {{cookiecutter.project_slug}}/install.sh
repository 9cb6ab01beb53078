#!/bin/sh
# Creates the virtual environment $VENV if it is missing. Then installs $TORCH, and what the
# arguments of `pip install` name: VENV=.venv sh install.sh -e '.[dev]'
#
# PyTorch comes in several builds. The GPU and its driver decide which one is installed:
#   pypi      the one of PyPI, CUDA 13: NVIDIA with driver 580 or newer; macOS
#   cu126     CUDA 12.6: NVIDIA with an older driver, from 525 on, or older than Turing (V100)
#   rocm7.2   AMD with ROCm
#   cpu       no GPU in sight
# TORCH_BACKEND names another one, by the names of `uv pip install --torch-backend`; a login node
# needs that. TORCH_INDEX is the URL of an index to take torch from. Without these two, settings of
# pip that name constraints or indexes decide, and a line says so. uv does the work where it is
# installed, except with such settings, which it does not read.
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
# The version bound of pyproject.toml, so that pip keeps this build in later steps.
TORCH=${TORCH:-$(sed -n 's/^ *"\(torch[<>=~!].*\)",$/\1/p' pyproject.toml)}
TORCH=${TORCH:-torch}
TORCH_INDEX=${TORCH_INDEX:-}
TORCH_BACKEND=${TORCH_BACKEND:-${UV_TORCH_BACKEND:-auto}}
PYTORCH=https://download.pytorch.org/whl
PATH=$PATH:/opt/rocm/bin

stop() {
    echo "setup: $*" >&2
    exit 2
}

pip() {
    PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 "$VENV/bin/python" -m pip "$@"
}

# Both have a display of their own, for a terminal.
install() {
    if [ -t 2 ]; then quiet=; else quiet=--quiet; fi
    if [ -n "$uv" ]; then
        "$uv" pip install $quiet --python "$VENV/bin/python" "$@"
    else
        pip install --no-input $quiet "$@"
    fi
}

# Prints the names of pip's settings that say where packages come from. Values may hold a password.
settings() {
    pip config list 2>/dev/null | awk -F= '
        $1 ~ /\.(constraint|(extra-)?index-url|find-links|no-index)$/ && length($2) > 2 {
            if (sub(/^:env:\./, "PIP_", $1)) { $1 = toupper($1); gsub("-", "_", $1) }
            printf "%s%s", comma, $1; comma = ", "
        }'
}

# Prints driver and compute capability of each NVIDIA GPU, such as "580.65.06, 9.0". Drivers that
# are too old for any build do not know the capability.
nvidia_gpus() {
    for fields in driver_version,compute_cap driver_version; do
        nvidia-smi --query-gpu=$fields --format=csv,noheader 2>/dev/null | grep '^[0-9]' && break
    done
}

nvidia_build() {
    echo "$nvidia" | awk -F ', *' '
        { driver = int($1); capability = $2 + 0 }
        capability && (!low || capability < low) { low = capability }
        capability > high { high = capability }
        END {
            if (driver < (high >= 10 ? 580 : 525)) print "none"
            else if (driver >= 580 && (!low || low >= 7.5 || high >= 10)) print "pypi"
            else print "cu126"
        }'
}

# Prints the build of an installed torch, which its version names: cpu, cu130, ...
installed_build() {
    sed -n "s/^__version__ = '[^+]*+\(.*\)'/\1/p" \
        "$VENV"/lib/python3*/site-packages/torch/version.py 2>/dev/null
}

# Prints why torch cannot compute on the GPU; nothing if it can.
trouble() {
    (
        unset CUDA_VISIBLE_DEVICES
        "$VENV/bin/python" -c '
try:
    import torch
    torch.ones(1, device="cuda").item()
except Exception as error:
    print(str(error).strip().split("\n")[0])
' 2>/dev/null
    )
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
uv=$(command -v uv || :)
if pip --version >/dev/null 2>&1; then
    pip_is_new='import pip, sys; sys.exit([int(n) for n in pip.__version__.split(".")[:2]] < [21, 3])'
    "$VENV/bin/python" -c "$pip_is_new" ||
        stop "The pip of $VENV is too old. Run: $VENV/bin/python -m pip install --upgrade pip"
    deciding=$(settings)
    [ -z "$deciding" ] || uv=
elif [ -n "$uv" ]; then
    deciding=
else
    stop "$VENV has no pip. Remove the folder and try again, or use the tool that created it."
fi

# The build for this machine.
nvidia='' amd='' fitting=pypi
if [ "$(uname -s)" = Linux ]; then
    nvidia=$(nvidia_gpus || :)
    amd=$(rocm_agent_enumerator 2>/dev/null | grep 'gfx[1-9]' || :)
    if [ -n "$nvidia" ]; then
        fitting=$(nvidia_build)
    elif [ -n "$amd" ]; then
        fitting=rocm7.2
    else
        fitting=cpu
    fi
fi

# The build to install, and the index that has it. PyPI and pip's own settings need none.
build=$fitting index=$TORCH_INDEX named=''
if [ -n "$index" ]; then
    build=$(basename "$index") named=1
elif [ "$TORCH_BACKEND" != auto ]; then
    build=$TORCH_BACKEND index=$PYTORCH/$TORCH_BACKEND named=1
elif [ -n "$deciding" ]; then
    build=
elif [ "$fitting" = none ]; then
    stop "NVIDIA's driver ${nvidia%%,*} is too old for PyTorch. Install 580 or newer (525 will do" \
        "for GPUs before Blackwell), or train on the CPU: add TORCH_BACKEND=cpu to the command"
elif [ "$fitting" != pypi ]; then
    index=$PYTORCH/$fitting
fi

# Another build that is installed gives way to one that was named, or that can use the GPU.
have=$(installed_build || :)
replace=
case $named:$build:$have in
    *: | *:"$have:$have") ;;
    1:cpu:* | 1:xpu:* | 1:cu[0-9]*:* | 1:rocm[0-9]*:*) replace=1 ;;
    :pypi:cpu | :cu*:cpu | :rocm*:cpu | :cu12*:cu13*) replace=1 ;;
    :pypi:rocm* | :cu*:rocm* | :rocm*:cu*) replace=1 ;;
esac
if [ -n "$replace" ]; then
    echo "setup: PyTorch's build $have gives way to $build"
elif ls -d "$VENV"/lib/python3*/site-packages/torch >/dev/null 2>&1 || [ -n "$named" ]; then
    :
elif [ -n "$deciding" ]; then
    case $fitting in pypi | none) ;; *)
        echo "setup: pip's settings ($deciding) decide which build of PyTorch comes. PyPI's brings" \
            "several GB of CUDA 13. For the build that fits this machine, press Ctrl-C and add to the" \
            "command: TORCH_BACKEND=$fitting" ;;
    esac
elif [ "$build" = cpu ]; then
    echo "setup: no GPU in sight, so PyTorch's CPU build comes. If another machine trains, add to the" \
        "command: TORCH_BACKEND=cu130 (NVIDIA) or TORCH_BACKEND=rocm7.2 (AMD)"
fi

if [ -n "$uv" ] && [ -z "$TORCH_INDEX" ]; then
    # `auto` reads the driver's version. It knows no compute capability, and takes an Intel display
    # for a GPU: hence all other builds by name.
    [ "$build" != pypi ] || build=auto
    set -- --torch-backend "$build" ${replace:+--reinstall-package torch} "$@"
elif [ -n "$index$replace" ]; then
    shown=$(echo "${index:-PyPI}" | sed 's|//[^/]*@|//***@|')
    echo "setup: installing $TORCH from $shown"
    # Only torch comes from this index. Its dependencies come in the next step; ROCm's are only here.
    case $build in rocm*) alone= ;; *) alone=--no-deps ;; esac
    install $alone ${replace:+--force-reinstall} ${index:+--index-url "$index"} "$TORCH" ||
        stop "$shown gave no $TORCH. Try again later, or install a build of PyTorch yourself:" \
            "$VENV/bin/python -m pip install torch"
fi
echo "setup: installing $TORCH $*"
install "$TORCH" "$@" || stop "${uv:-pip} failed; its reason is above."
echo "setup: done, $(du -sh "$VENV" | cut -f1) in $VENV"

if [ -n "$nvidia$amd" ] && [ "$build" != cpu ]; then
    reason=$(trouble || echo "python ended with an error")
    have=$(installed_build || :)
    case $fitting:$have in
        "$have:$have" | pypi:cu13* | cu12*:cu12*) mend="after an update of the driver, reboot" ;;
        none:*) mend="NVIDIA's driver ${nvidia%%,*} is too old: install 580 or newer" ;;
        pypi:*) mend="run again with TORCH_BACKEND=cu130" ;;
        *) mend="run again with TORCH_BACKEND=$fitting" ;;
    esac
    [ -z "$reason" ] ||
        echo "setup: this torch (build ${have:-unknown}) cannot use the GPU: $reason; $mend" >&2
fi
