"""Which PyTorch is installed where, and what `make` says; tools are stand-ins, no download."""

import shutil
import subprocess

import pytest

from conftest import SOURCE, template

PYTORCH = "https://download.pytorch.org/whl"

PYTHON = """\
#!/bin/sh
# Stands in for Python, its venv module and pip.
case "$*" in
    "-V") echo "Python 3.8.10" ;;
    *version_info*) exit ${FAKE_OLD:-0} ;;
    *ensurepip*) exit ${FAKE_NO_VENV:-0} ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; echo "venv $3" >>"$FAKE_LOG" ;;
    "-m pip config list") printf '%s' "$FAKE_PIP_CONFIG" ;;
    "-m pip install"*)
        echo "$*" | sed 's/^-m //; s/ --no-input --quiet//' >>"$FAKE_LOG"
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
        *compute_cap*) echo "$gpu" ;;
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
        """Give it NVIDIA GPUs of these compute capabilities."""
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
        self.printed = result.stdout.splitlines()
        errors = [line for line in result.stderr.splitlines() if line.startswith("setup: ")]
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
CONFIG = ":env:.extra-index-url='https://somebody@example.org/simple'\n"


def from_index(build, options="--no-deps "):
    return f"pip install {options}--index-url {PYTORCH}/{build} torch>=2.13"


OVER = "--no-deps --force-reinstall "
# GPUs, the torch that is installed, words of make, pip's settings, what comes before PLAIN.
CASES = [
    ([], "", "", "", from_index("cpu")),
    (["9.0"], "", "", "", ""),
    ([], "", "", CONFIG, ""),
    ([], "", "", "global.cert='x'\n", from_index("cpu")),
    ([], "2.13.0+cpu", "TORCH_BACKEND=cpu", "", from_index("cpu")),
    (["9.0"], "2.13.0+cpu", "TORCH_BACKEND=cu130", CONFIG, from_index("cu130", OVER)),
    ([], "", "TORCH_BACKEND=rocm7.2", "", from_index("rocm7.2", "")),
]  # fmt: skip


@pytest.mark.parametrize("gpus, installed, words, settings, expected", CASES)
def test_settings_and_a_named_build_decide(machine, gpus, installed, words, settings, expected):
    machine.gpus(*gpus)
    if installed:
        machine.installed(installed)
    log, errors = machine.setup(*words.split(), FAKE_PIP_CONFIG=settings)
    assert (log, errors) == (["venv .venv", *filter(None, [expected]), PLAIN], [])
    chosen = expected == from_index("cpu") and not words
    assert any("no GPU in sight" in line for line in machine.printed) == chosen
    machine.log.write_text("")  # a venv that is there is kept
    machine.setup(*words.split(), FAKE_OLD="1", FAKE_NO_VENV="1", EXTRAS="dev")
    assert machine.log.read_text().endswith(f"{PLAIN}[dev]\n")


def test_a_mac_gets_what_pip_gives(machine):
    machine.add("uname", "#!/bin/sh\necho Darwin\n")
    assert machine.setup() == (["venv .venv", PLAIN], [])


def test_uv_is_used_where_pip_has_no_settings(machine):
    machine.add("uv", UV)
    command = "uv pip install --quiet --python .venv/bin/python"
    packages = f"torch>=2.13 {WHEEL} -e ."
    assert machine.setup()[0][1:] == [f"{command} --torch-backend cpu {packages}"]
    machine.installed("2.13.0+cpu")
    again = f"{command} --torch-backend cu130 --reinstall-package torch {packages}"
    assert machine.setup("TORCH_BACKEND=cu130")[0][-1] == again
    assert machine.setup(FAKE_PIP_CONFIG=CONFIG)[0][-1] == PLAIN
    assert "uv failed" in machine.setup(expect=2, FAKE_INSTALL_FAILS="1")[1][-1]


NOT_SET_UP = [  # what is wrong, what is said, and how many installations were tried
    ({"PYTHON": "python4"}, "python4 was not found. Install Python 3.11 or newer.", 0),
    ({"FAKE_OLD": "1"}, "Python 3.8.10 is too old. Name Python 3.11 or newer", 0),
    ({"FAKE_NO_VENV": "1"}, "sudo apt install python3-venv", 0),
    ({"FAKE_INDEX_FAILS": "1"}, "pip failed; its reason is above.", 1),
    ({"FAKE_INSTALL_FAILS": "1"}, "pip failed; its reason is above.", 2),
]


@pytest.mark.parametrize("env, said, tried", NOT_SET_UP)
def test_a_machine_that_cannot_be_set_up_gets_one_line(machine, env, said, tried):
    log, (error,) = machine.setup(expect=2, **env)
    assert said in error and len([line for line in log if "pip install" in line]) == tried


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


AMPERE, TURING = "8.0", "7.5"
FOUND = [  # GPUs, CUDA_VISIBLE_DEVICES, and what is chosen
    ([], {}, "cpu.yaml"),
    ([AMPERE], {}, "single_gpu_bf16.yaml"),
    ([AMPERE, TURING], {}, "multi_gpu_fp16.yaml --num_processes 2"),
    ([AMPERE] * 4, {"CUDA_VISIBLE_DEVICES": "1,2"}, "multi_gpu_bf16.yaml --num_processes 2"),
]


@pytest.mark.parametrize("gpus, visible, hardware", FOUND)
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
    lines = ready.run("make", "update").stderr.splitlines()
    assert len(lines) == 1 and ".cruft.json names no URL. Write: make update TEMPLATE=" in lines[0]
    ready.add("cruft", '#!/bin/sh\necho "$@"\n')
    printed = ready.run("make", "--silent", "update", "TEMPLATE=../a b").stdout
    assert printed == "update --skip-apply-ask --template-path ../a b\n"
