"""Which PyTorch is installed where, and what `make` says; tools are stand-ins, no download."""

import shutil
import subprocess

import pytest

from conftest import ROOT, SOURCE, template

TOOLS = ROOT / "tests" / "stand_ins"


def add(file, text):
    """Writes a script for sh."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}")
    file.chmod(0o755)


class Machine:
    """A machine with these tools on its PATH, and a log of what was installed on it."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "log"
        self.log.touch()
        (folder / "tools").mkdir()
        for name in ("python3", "uname", "nvidia-smi", "rocm_agent_enumerator"):
            shutil.copy(TOOLS / name, folder / "tools")

    def installed(self, version):
        """Make it look as if this torch were installed."""
        folder = self.folder / ".venv" / "lib" / "python3.12" / "site-packages" / "torch"
        folder.mkdir(parents=True)
        (folder / "version.py").write_text(f"__version__ = '{version}'\ndebug = False\n")

    def run(self, *words, **env):
        """Run `make`."""
        base = {"PATH": f"{self.folder}/tools:/usr/bin:/bin", "FAKE_LOG": str(self.log)}
        options = {"cwd": self.folder, "env": base | env, "capture_output": True, "text": True}
        return subprocess.run(["make", *words], **options)

    def setup(self, *words, expect=0, **env):
        """Run `make setup`; return what was installed how, and the lines of `setup` on errors."""
        result = self.run("setup", *words, **env)
        assert bool(result.returncode) == bool(expect), result.stdout + result.stderr
        self.printed = result.stdout
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
    index = f"https://download.pytorch.org/whl/{build}"
    return f"pip install {options}--index-url {index} torch>=2.13"


OVER = "--no-deps --force-reinstall "
CUDA = {"FAKE_GPUS": "9.0"}
CASES = [  # the machine, the torch that is installed, words of make, what comes before PLAIN
    ({}, "", [], [from_index("cpu")]),
    (CUDA, "", [], []),
    ({"FAKE_SYSTEM": "Darwin"}, "", [], []),
    ({"FAKE_PIP_CONFIG": CONFIG}, "", [], []),
    ({"FAKE_PIP_CONFIG": "global.cert='x'\n"}, "", [], [from_index("cpu")]),
    ({}, "2.13.0+cpu", ["TORCH_BACKEND=cpu"], [from_index("cpu")]),
    (CUDA, "2.13.0+cpu", ["TORCH_BACKEND=cu130"], [from_index("cu130", OVER)]),
    ({}, "", ["TORCH_BACKEND=rocm7.2"], [from_index("rocm7.2", "")]),
]


@pytest.mark.parametrize("env, installed, words, expected", CASES)
def test_settings_and_a_named_build_decide(machine, env, installed, words, expected):
    if installed:
        machine.installed(installed)
    assert machine.setup(*words, **env) == ([*expected, PLAIN], [])
    chosen = expected == [from_index("cpu")] and not words
    assert ("no GPU in sight" in machine.printed) == chosen
    # A venv that is there is kept.
    log, _ = machine.setup(*words, **env, FAKE_OLD="1", FAKE_NO_VENV="1", EXTRAS="dev")
    assert log[-1] == f"{PLAIN}[dev]"


def test_uv_is_used_where_pip_has_no_settings(machine):
    shutil.copy(TOOLS / "uv", machine.folder / "tools")
    command = "uv pip install --quiet --python .venv/bin/python"
    packages = f"torch>=2.13 {WHEEL} -e ."
    assert machine.setup()[0] == [f"{command} --torch-backend cpu {packages}"]
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
    assert said in error and len(log) == tried


@pytest.fixture
def ready(machine):
    """A machine that is set up, with the project's hardware files and two recipes."""
    folder = machine.folder
    shutil.copytree(template() / SOURCE / "configs" / "accelerate", folder / "configs/accelerate")
    (folder / "configs" / "train").mkdir()
    for name in ("default", "smoke"):
        (folder / "configs" / "train" / f"{name}.yaml").touch()
    for name in ("accelerate", "python"):
        add(folder / ".venv" / "bin" / name, 'echo "$@"\n')
    return machine


FOUND = [  # compute capabilities of the GPUs, CUDA_VISIBLE_DEVICES, and what is chosen
    ("", {}, "cpu.yaml"),
    ("8.0", {}, "single_gpu_bf16.yaml"),
    ("8.0 7.5", {}, "multi_gpu_fp16.yaml --num_processes 2"),
    ("8.0 8.0 8.0", {"CUDA_VISIBLE_DEVICES": "1,2"}, "multi_gpu_bf16.yaml --num_processes 2"),
]


@pytest.mark.parametrize("gpus, visible, hardware", FOUND)
def test_train_finds_the_hardware(ready, gpus, visible, hardware):
    printed = ready.run("--silent", "train", FAKE_GPUS=gpus, **visible).stdout
    command = f"-m samestep launch --config_file configs/accelerate/{hardware}"
    assert printed == f"{command} train.py --config configs/train/default.yaml\n"


def test_make_passes_recipe_and_flags_on(ready):
    """To prepare data it looks for no GPU."""
    printed = ready.run("--silent", "prepare", "RECIPE=smoke", "ARGS=--seed 1", **CUDA).stdout
    assert printed == "-m samestep prepare --config configs/train/smoke.yaml --seed 1\n"
    assert not (ready.folder / "log.smi").exists()


def test_what_is_missing_is_said_in_one_line(ready):
    result = ready.run("train", "RECIPE=defualt")
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "train/defualt.yaml is missing. RECIPE is one of: default smoke." in result.stderr
    said = ready.run("update").stderr
    assert said.count("\n") == 1 and "names no URL. Write: make update TEMPLATE=" in said
    add(ready.folder / "tools" / "cruft", 'echo "$@"\n')
    printed = ready.run("--silent", "update", "TEMPLATE=../a b").stdout
    assert printed == "update --skip-apply-ask --template-path ../a b\n"
