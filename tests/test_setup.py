"""Which PyTorch is installed where, and what `make` says; tools are stand-ins, no download."""

import re
import shutil
import subprocess
from importlib import metadata

import pytest

from conftest import SOURCE, bake, template

PYTORCH = "https://download.pytorch.org/whl"
CPU_INDEX = f"{PYTORCH}/cpu"

PYTHON = """\
#!/bin/sh
# Stands in for Python, its venv module and pip.
case "$*" in
    "-V") echo "Python 3.8.10" ;;
    *version_info*) exit ${FAKE_OLD:-0} ;;
    *ensurepip*) exit ${FAKE_NO_VENV:-0} ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; echo "venv $3" >>"$FAKE_LOG" ;;
    *"import torch"*) printf '%s' "$FAKE_TROUBLE" ;;
    "-m pip config list") printf '%s' "$FAKE_PIP_CONFIG" ;;
    "-m pip install"*)
        echo "$*" | sed 's/^-m //; s/ --no-input --quiet//' >>"$FAKE_LOG"
        echo "WARNING: there is no such extra" >&2
        case "$*" in *--index-url*) exit ${FAKE_INDEX_FAILS:-0} ;; esac
        exit ${FAKE_INSTALL_FAILS:-0} ;;
esac
"""

# Prints a line for each GPU: its name for -L, else the fields of the query.
NVIDIA_SMI = """\
#!/bin/sh
echo "nvidia-smi $*" >>"$FAKE_LOG.smi"
for gpu in {gpus}; do
    case "$*" in
        -L) echo "GPU 0: some GPU (UUID: GPU-0)" ;;
        *driver_version,compute_cap*)
            [ "${{gpu#*,}}" ] || {{ echo 'Field "compute_cap" is not a valid field'; exit 2; }}
            echo "$gpu" | sed "s/,/, /" ;;
        *driver_version*) echo "${{gpu%,*}}" ;;
        *compute_cap*) echo "${{gpu#*,}}" ;;
    esac
done
"""

UV = '#!/bin/sh\necho "uv $*" >>"$FAKE_LOG"\nexit ${FAKE_INSTALL_FAILS:-0}\n'


class Machine:
    """A machine with these tools on its PATH, and a log of what was run on it."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "log"
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.log.touch()
        self.add("python3", PYTHON)
        self.add("uname", "#!/bin/sh\necho Linux\n")
        self.add("nvidia-smi", "#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
        self.add("rocm_agent_enumerator", "#!/bin/sh\necho gfx000\n")

    def add(self, name, text):
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def gpus(self, *gpus):
        """Give it NVIDIA GPUs: driver and compute capability of each, "580.65.06,9.0"."""
        self.add("nvidia-smi", NVIDIA_SMI.format(gpus=" ".join(gpus)))

    def installed(self, version):
        """Make it look as if this torch were installed."""
        folder = self.folder / ".venv" / "lib" / "python3.12" / "site-packages" / "torch"
        folder.mkdir(parents=True)
        (folder / "version.py").write_text(
            f"__all__ = ['__version__']\n__version__ = '{version}'\ndebug = False\n"
        )

    def run(self, *command, **env):
        base = {"PATH": f"{self.tools}:/usr/bin:/bin", "FAKE_LOG": str(self.log)}
        return subprocess.run(
            command, cwd=self.folder, env=base | env, capture_output=True, text=True
        )

    def setup(self, *words, expect=0, **env):
        """Run `make setup`; return what was installed how, and the lines of `setup` on errors."""
        result = self.run("make", "setup", *words, **env)
        assert bool(result.returncode) == bool(expect), result.stdout + result.stderr
        self.printed, self.errors = result.stdout.splitlines(), result.stderr.splitlines()
        errors = [line for line in self.errors if line.startswith("setup: ")]
        return self.log.read_text().splitlines(), errors


@pytest.fixture
def machine(tmp_path):
    for name in ("Makefile", "install.sh"):
        shutil.copy(template() / SOURCE / name, tmp_path / name)
    (tmp_path / "vendor").mkdir()
    (tmp_path / WHEEL).touch()
    (tmp_path / "pyproject.toml").write_text('dependencies = [\n    "torch>=2.13",\n]\n')
    return Machine(tmp_path)


WHEEL = "vendor/samestep-1.0.0+0-py3-none-any.whl"
PLAIN = f"pip install torch>=2.13 {WHEEL} -e ."
HOPPER, VOLTA = "580.65.06,9.0", "580.65.06,7.0"


def from_index(build, *options):
    return f"pip install {' '.join([*options, '--index-url', f'{PYTORCH}/{build}'])} torch>=2.13"


FROM_CPU_INDEX = from_index("cpu", "--no-deps")
OVER = ["--no-deps", "--force-reinstall"]


def test_without_a_gpu_torch_comes_from_the_cpu_index(machine):
    assert machine.setup() == (["venv .venv", FROM_CPU_INDEX, PLAIN], [])
    assert machine.printed[1] == (
        "setup: no GPU in sight, so PyTorch's CPU build comes. If another machine trains, add to "
        "the command: TORCH_BACKEND=cu130 (NVIDIA) or TORCH_BACKEND=rocm7.2 (AMD)"
    )
    assert [line.split()[1] for line in machine.printed] == [
        *("creating", "no", "installing", "installing", "done,")
    ]
    assert machine.errors == ["WARNING: there is no such extra"] * 2
    machine.log.write_text("")  # a venv that is there is kept
    assert machine.setup(FAKE_OLD="1", FAKE_NO_VENV="1")[0] == [FROM_CPU_INDEX, PLAIN]


@pytest.mark.parametrize(
    "tool, text, expected",
    [
        ("nvidia-smi", "exit 127", [FROM_CPU_INDEX]),
        ("uname", "echo Darwin", []),
        # Dependencies that only this index has.
        ("rocm_agent_enumerator", "printf 'gfx000\\ngfx90a\\n'", [from_index("rocm7.2")]),
    ],
)
def test_other_machines(machine, tool, text, expected):
    machine.add(tool, f"#!/bin/sh\n{text}\n")
    assert machine.setup() == (["venv .venv", *expected, PLAIN], [])


@pytest.mark.parametrize(
    "gpus, installed, words, expected",
    [
        # A login node, then a GPU: the CPU build does not count.
        ([HOPPER], "2.13.0+cpu", "", ["pip install --no-deps --force-reinstall torch>=2.13"]),
        ([VOLTA], "2.13.0+cu130", "", [from_index("cu126", *OVER)]),
        ([HOPPER], "", "", []),
        ([HOPPER, VOLTA], "", "", [from_index("cu126", "--no-deps")]),
        ([], "2.13.0+cpu", "TORCH_BACKEND=cu130", [from_index("cu130", *OVER)]),
        ([HOPPER], "2.13.0+cu130", f"TORCH_INDEX={CPU_INDEX}", [from_index("cpu", *OVER)]),
    ],
)
def test_driver_gpu_and_installed_choose_the_build(machine, gpus, installed, words, expected):
    if gpus:
        machine.gpus(*gpus)
    if installed:
        machine.installed(installed)
    log, errors = machine.setup(*words.split())
    expected = [*expected, PLAIN]
    assert (log[1:], errors) == (expected, [])
    told = [line for line in machine.printed if "gives way" in line]
    assert len(told) == ("--force-reinstall" in "".join(expected))
    assert not told or f"build {installed.partition('+')[2]} gives way to " in told[0]
    assert not any("in sight" in line for line in machine.printed)


@pytest.mark.parametrize("gpus, expected", [([], "cpu"), ([VOLTA], "cu126")])
def test_uv_is_used_where_it_is_there(machine, gpus, expected):
    machine.add("uv", UV)
    machine.gpus(*gpus)
    command = "uv pip install --quiet --python .venv/bin/python torch>=2.13 --torch-backend"
    assert machine.setup()[0][1:] == [f"{command} {expected} {WHEEL} -e ."]
    assert "uv failed" in machine.setup(expect=2, FAKE_INSTALL_FAILS="1")[1][-1]


SECRET = "https://somebody:secret@example.org/simple"
CONFIG = f":env:.extra-index-url='{SECRET}'\nglobal.find-links='/wheels'\nglobal.cert='x'\n"


def test_a_configured_pip_decides_which_torch_comes(machine):
    log, _ = machine.setup(FAKE_PIP_CONFIG=CONFIG)
    assert log[1:] == [PLAIN]
    line = "setup: pip's settings (PIP_EXTRA_INDEX_URL, global.find-links) decide which build of "
    assert machine.printed[1].startswith(line) and "TORCH_BACKEND=cpu" in machine.printed[1]
    assert machine.printed[2] == f"setup: installing torch>=2.13 {WHEEL} -e ."


def test_an_index_for_torch_overrides_what_was_found(machine):
    machine.gpus(HOPPER)
    words = [f"TORCH_INDEX={SECRET}", "TORCH=torch==2.13.0", "EXTRAS=dev,trackio"]
    log, _ = machine.setup(*words, FAKE_PIP_CONFIG=CONFIG)
    assert log[1:] == [
        f"pip install --no-deps --index-url {SECRET} torch==2.13.0",
        f"pip install torch==2.13.0 {WHEEL} -e .[dev,trackio]",
    ]
    assert "setup: installing torch==2.13.0 from https://***@example.org/simple" in machine.printed
    assert not any("secret" in line or "decide" in line for line in machine.printed)


FAILING = {"FAKE_INDEX_FAILS", "FAKE_INSTALL_FAILS"}


@pytest.mark.parametrize(
    "gpu, env, words",
    [
        ("", {"PYTHON": "python4"}, "python4 was not found. Install Python 3.11 or newer."),
        ("", {"FAKE_NO_VENV": "1"}, "sudo apt install python3-venv"),
        ("", {"FAKE_INDEX_FAILS": "1"}, ".venv/bin/python -m pip install torch"),
        ("524.99,8.0", {}, "driver 524.99 is too old for PyTorch. Install 580 or newer (525 will"),
        (HOPPER, {"FAKE_INSTALL_FAILS": "1"}, "setup: pip failed; its reason is above."),
    ],
)
def test_a_machine_that_cannot_be_set_up_gets_one_line(machine, gpu, env, words):
    if gpu:
        machine.gpus(gpu)
    log, (error,) = machine.setup(expect=2, **env)
    assert words in error
    assert len([line for line in log if "pip install" in line]) == len(FAILING & {*env})


@pytest.mark.parametrize("task", ["image_classification", "preference"])
def test_the_wheels_of_offline_md_are_all_that_a_project_needs(tmp_path, task):
    """Those that docs/offline.md names, with what they require; torch is on the machine."""
    project = bake(tmp_path, task=task, tracker="none").path
    text = (project / "docs" / "offline.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^pip download --dest wheels \$platform (.*)$", text, flags=re.MULTILINE)
    found = {word for words in commands for word in words.split() if not word.startswith("-")}
    # The library lies in vendor/.
    todo = found = found | {"torch", "samestep"}
    while todo:
        lines = [line for name in todo for line in requirements(name) if "extra ==" not in line]
        todo = {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in lines} - found
        found = found | todo
    pyproject = (project / "pyproject.toml").read_text(encoding="utf-8")
    pyproject = pyproject.partition("[project.optional")[0]
    needed = {name.replace("_", "-") for name in re.findall(r'^    "([\w-]+)', pyproject, re.M)}
    assert len(needed) > 14 and needed <= found


def requirements(name):
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # of another system
        return []


# ---- make ----------------------------------------------------------------------------------------


HARDWARE = ["cpu", "multi_gpu_bf16", "multi_gpu_fp16", "single_gpu_bf16", "single_gpu_fp16"]


@pytest.fixture
def ready(machine):
    """A machine that is set up, with hardware files and two recipes."""
    names = [f"accelerate/{name}" for name in HARDWARE] + ["train/default", "train/smoke"]
    for name in names:
        file = machine.folder / "configs" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    scripts = machine.folder / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name in ("accelerate", "python"):
        (scripts / name).write_text('#!/bin/sh\necho "$@"\n')
        (scripts / name).chmod(0o755)
    return machine


AMPERE, TURING = "580.65.06,8.0", "580.65.06,7.5"


@pytest.mark.parametrize(
    "gpus, visible, hardware",
    [
        ([], {}, "cpu.yaml"),
        ([AMPERE], {}, "single_gpu_bf16.yaml"),
        ([AMPERE, TURING], {}, "multi_gpu_fp16.yaml --num_processes 2"),
        ([AMPERE] * 4, {"CUDA_VISIBLE_DEVICES": "1,2"}, "multi_gpu_bf16.yaml --num_processes 2"),
    ],
)
def test_train_finds_the_hardware(ready, gpus, visible, hardware):
    ready.gpus(*gpus)
    command = f"-m samestep launch --config_file configs/accelerate/{hardware}"
    command += " train.py --config configs/train/default.yaml"
    assert ready.run("make", "--silent", "train", **visible).stdout.split() == command.split()


def test_make_passes_recipe_and_flags_on(ready):
    """To prepare data it looks for no GPU."""
    ready.gpus(AMPERE)
    words = ["RECIPE=smoke", "ARGS=--learning_rate 1e-3"]
    printed = ready.run("make", "--silent", "prepare", *words).stdout
    command = "-m samestep prepare --config configs/train/smoke.yaml --learning_rate 1e-3"
    assert printed.split() == command.split()
    assert not (ready.folder / "log.smi").exists()


def test_what_is_missing_is_said_in_one_line(ready):
    result = ready.run("make", "train", "RECIPE=defualt")
    assert result.returncode == 2 and result.stdout == ""
    message = "train/defualt.yaml is missing. RECIPE is one of: default smoke."
    assert len(result.stderr.splitlines()) == 1 and message in result.stderr
