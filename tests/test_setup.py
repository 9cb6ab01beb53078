"""Which PyTorch is installed where, and what `make` says; tools are stand-ins, no download."""

import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, SOURCE, bake, template

CPU_INDEX = "https://download.pytorch.org/whl/cpu"

PYTHON = """\
#!/bin/sh
# Stands in for Python, its venv module and pip.
case "$*" in
    "-V") echo "Python 3.8.10" ;;
    *"pip.__version__"*) exit ${FAKE_OLD_PIP:-0} ;;
    *version_info*) exit ${FAKE_OLD:-0} ;;
    *ensurepip*) exit ${FAKE_NO_VENV:-0} ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; echo "venv $3" >>"$FAKE_LOG" ;;
    "-m pip --version") exit ${FAKE_NO_PIP:-0} ;;
    "-m pip config list") printf '%s' "$FAKE_PIP_CONFIG" ;;
    "-m pip install"*)
        echo "$*" | sed 's/^-m //; s/ --no-input --progress-bar off//' >>"$FAKE_LOG"
        echo "Collecting torch"
        echo "WARNING: Location '/wheels/torch' is ignored: it is no folder" >&2
        echo "WARNING: there is no such extra" >&2
        case "$*" in *--index-url*) exit ${FAKE_INDEX_FAILS:-0} ;; esac
        exit ${FAKE_INSTALL_FAILS:-0} ;;
esac
"""

TASKS = sorted(path.stem for path in (ROOT / "templates" / "tasks").glob("*.py"))


class Machine:
    """A machine with these tools on its PATH, and a log of what was run on it."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "log"
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.log.touch()
        self.add("python3", PYTHON)
        self.add("uname", "#!/bin/sh\necho Linux\n")
        self.add("nvidia-smi", "#!/bin/sh\nexit 9\n")

    def add(self, name, text):
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def gpus(self, number):
        lines = "".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})\\n" for i in range(number))
        self.add("nvidia-smi", f"#!/bin/sh\nprintf '{lines}'\n")

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
    (tmp_path / "pyproject.toml").write_text('dependencies = [\n    "torch>=2.6",\n]\n')
    return Machine(tmp_path)


PLAIN = "pip install torch>=2.6 -e ."
FROM_CPU_INDEX = f"pip install --no-deps --index-url {CPU_INDEX} torch>=2.6"


def test_without_a_gpu_torch_comes_from_the_cpu_index(machine):
    assert machine.setup() == (["venv .venv", FROM_CPU_INDEX, PLAIN], [])


def test_nvidia_smi_need_not_exist(machine):
    (machine.tools / "nvidia-smi").unlink()
    assert machine.setup()[0][1:] == [FROM_CPU_INDEX, PLAIN]


def test_with_a_gpu_torch_is_pypis(machine):
    machine.gpus(1)
    assert machine.setup()[0][1:] == [PLAIN]


def test_on_macos_torch_is_pypis(machine):
    machine.add("uname", "#!/bin/sh\necho Darwin\n")
    assert machine.setup()[0][1:] == [PLAIN]


@pytest.mark.parametrize(
    "config",
    [
        ":env:.constraint='constraints.txt'",
        ":env:.index-url='https://example.org/simple'",
        "global.extra-index-url='https://example.org/simple'",
        "install.find-links='/wheels'",
        "global.no-index='true'",
        'global.index-url="it\'s"',
    ],
)
def test_a_configured_pip_decides_alone(machine, config):
    config = f"global.timeout='60'\n{config}\n"
    assert machine.setup(FAKE_PIP_CONFIG=config)[0][1:] == [PLAIN]
    assert machine.printed[1].startswith("setup: pip's settings (")


@pytest.mark.parametrize("config", ["global.timeout='60'", ":env:.index-url=''", "global.cert='x'"])
def test_other_settings_of_pip_decide_nothing(machine, config):
    assert machine.setup(FAKE_PIP_CONFIG=config)[0][1:] == [FROM_CPU_INDEX, PLAIN]


SECRET = "https://somebody:secret@example.org/simple"
CONFIG = f":env:.extra-index-url='{SECRET}'\nglobal.find-links='/wheels'\nglobal.cert='x'\n"


def test_who_decides_is_named_before_torch_is_there_and_not_again(machine):
    machine.setup(FAKE_PIP_CONFIG=CONFIG)
    assert machine.printed[1:3] == [
        "setup: pip's settings (PIP_EXTRA_INDEX_URL, global.find-links) decide which build of "
        "PyTorch comes. PyPI's brings several GB of CUDA, useless without a GPU. For the CPU "
        f"build, press Ctrl-C and add to the command: TORCH_INDEX={CPU_INDEX}",
        "setup: installing torch>=2.6 -e .",
    ]
    packages = machine.folder / ".venv" / "lib" / "python3.12" / "site-packages"
    (packages / "torch").mkdir(parents=True)
    machine.setup(FAKE_PIP_CONFIG=CONFIG)
    assert [line.split()[1] for line in machine.printed] == ["installing", "done,"]


@pytest.mark.parametrize("config", ["", CONFIG])
def test_an_index_for_torch_overrides_what_was_found(machine, config):
    machine.gpus(1)
    log, _ = machine.setup(f"TORCH_INDEX={SECRET}", FAKE_PIP_CONFIG=config)
    assert log[1:] == [f"pip install --no-deps --index-url {SECRET} torch>=2.6", PLAIN]
    assert "setup: installing torch>=2.6 from https://***@example.org/simple" in machine.printed
    assert not any("secret" in line or "decide" in line for line in machine.printed)


def test_pip_is_quiet_but_for_what_it_complains_of(machine):
    machine.setup()
    assert [line.split()[1] for line in machine.printed] == [
        "creating",
        *["installing"] * 2,
        "done,",
    ]
    assert machine.errors == ["WARNING: there is no such extra"] * 2
    machine.gpus(1)
    machine.setup(FAKE_INSTALL_FAILS="1", expect=2)
    assert machine.errors[:-1] == [
        "WARNING: there is no such extra",
        "setup: pip failed; its reason is above.",
    ]


def test_torch_can_be_pinned_and_extras_chosen(machine):
    log, _ = machine.setup(TORCH="torch==2.13.0", EXTRAS="dev,trackio")
    assert log[1:] == [
        f"pip install --no-deps --index-url {CPU_INDEX} torch==2.13.0",
        "pip install torch==2.13.0 -e .[dev,trackio]",
    ]


def test_when_the_cpu_index_fails_nothing_else_is_tried(machine):
    log, errors = machine.setup(expect=2, FAKE_INDEX_FAILS="1")
    assert log[1:] == [FROM_CPU_INDEX]
    assert len(errors) == 1 and CPU_INDEX in errors[0]
    assert ".venv/bin/python -m pip install torch" in errors[0]


def test_a_venv_that_is_there_is_kept(machine):
    machine.setup()
    machine.log.write_text("")
    assert machine.setup(FAKE_OLD="1", FAKE_NO_VENV="1")[0] == [FROM_CPU_INDEX, PLAIN]


@pytest.mark.parametrize(
    "env, words",
    [
        ({"PYTHON": "python4"}, "python4 was not found. Install Python 3.10 or newer."),
        ({"FAKE_OLD": "1"}, "Python 3.8.10 is too old. Name Python 3.10 or newer"),
        ({"FAKE_NO_VENV": "1"}, "sudo apt install python3-venv"),
        ({"FAKE_NO_PIP": "1"}, ".venv has no pip."),
        ({"FAKE_OLD_PIP": "1"}, ".venv/bin/python -m pip install --upgrade pip"),
    ],
)
def test_a_machine_that_cannot_be_set_up_gets_one_line(machine, env, words):
    log, errors = machine.setup(expect=2, **env)
    assert len(errors) == 1 and words in errors[0]
    assert not [line for line in log if "pip install" in line]


def test_bound_of_torch_is_read_from_the_real_pyproject(machine, project):
    shutil.copy(project.path / "pyproject.toml", machine.folder)
    torch = machine.setup()[0][-1].split()[2]
    assert torch.startswith("torch>=")
    assert f'    "{torch}",\n' in (project.path / "pyproject.toml").read_text(encoding="utf-8")


# ---- make ----------------------------------------------------------------------------------------


@pytest.fixture
def ready(machine):
    """A machine that is set up, with two hardware files and two recipes."""
    for name in ("accelerate/cpu", "accelerate/multi_gpu_bf16", "accelerate/single_gpu_bf16"):
        path = machine.folder / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (machine.folder / "configs" / "train").mkdir()
    for name in ("default", "smoke"):
        (machine.folder / "configs" / "train" / f"{name}.yaml").touch()
    scripts = machine.folder / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name in ("accelerate", "python"):
        (scripts / name).write_text('#!/bin/sh\necho "$@"\n')
        (scripts / name).chmod(0o755)
    return machine


@pytest.mark.parametrize(
    "gpus, hardware", [(0, "cpu"), (1, "single_gpu_bf16"), (2, "multi_gpu_bf16")]
)
def test_train_finds_the_hardware(ready, gpus, hardware):
    ready.gpus(gpus)
    result = ready.run("make", "--silent", "train")
    assert (
        result.stdout.split()
        == (
            f"launch.py --config_file configs/accelerate/{hardware}.yaml "
            f"{'--num_processes 2 ' if gpus == 2 else ''}"
            "train.py --config configs/train/default.yaml"
        ).split()
    )


def test_train_takes_hardware_recipe_and_flags(ready):
    words = ["HARDWARE=single_gpu_bf16", "RECIPE=smoke", "ARGS=--learning_rate 1e-3"]
    result = ready.run("make", "--silent", "train", *words)
    assert (
        result.stdout.split()
        == (
            "launch.py --config_file configs/accelerate/single_gpu_bf16.yaml "
            "train.py --config configs/train/smoke.yaml --learning_rate 1e-3"
        ).split()
    )


@pytest.mark.parametrize("target", ["test", "lint"])
def test_pytest_and_ruff_are_installed_when_they_are_first_used(ready, target):
    scripts = ready.folder / ".venv" / "bin"
    for name in ("python", "pytest", "ruff"):
        (scripts / name).write_text('#!/bin/sh\necho "$(basename "$0") $*"\n')
        (scripts / name).chmod(0o755)
    commands = {"test": ["python -m pytest"], "lint": ["ruff check .", "ruff format --check ."]}
    assert ready.run("make", "--silent", target).stdout.splitlines() == commands[target]
    (scripts / "pytest").unlink()
    install = "python -m pip install --quiet --disable-pip-version-check -e .[dev]"
    first = ["installing pytest and ruff, once", install]
    assert ready.run("make", "--silent", target).stdout.splitlines() == first + commands[target]
    (scripts / "python").write_text("#!/bin/sh\nexit 1\n")
    result = ready.run("make", "--silent", target)
    assert result.returncode == 2 and result.stdout == "installing pytest and ruff, once\n"
    line = f"pip failed; its reason is above. Correct it, then run: make {target}"
    assert result.stderr.splitlines()[0] == line


@pytest.mark.parametrize(
    "word, message",
    [
        (
            "HARDWARE=tpu",
            "configs/accelerate/tpu.yaml is missing. "
            "HARDWARE is one of: cpu multi_gpu_bf16 single_gpu_bf16.",
        ),
        (
            "RECIPE=defualt",
            "configs/train/defualt.yaml is missing. RECIPE is one of: default smoke.",
        ),
        ("VENV=other", "other/bin/accelerate is missing. Run first: make setup."),
    ],
)
def test_what_is_missing_is_said_in_one_line(ready, word, message):
    result = ready.run("make", "train", word)
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and message in result.stderr


@pytest.mark.parametrize("folder", [".", SOURCE])
def test_make_alone_lists_every_target(machine, folder):
    makefile = template() / folder / "Makefile"
    result = machine.run("make", "-f", str(makefile))
    targets = makefile.read_text().split(".PHONY:")[1].splitlines()[0].split()
    assert [line.split()[1] for line in result.stdout.splitlines()] == targets
    assert result.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_what_agents_md_names_is_there_and_works(tmp_path, task):
    project = bake(tmp_path, task=task, tracker="none")
    (project.path / ".venv").symlink_to(sys.prefix)
    text = (project.path / "AGENTS.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\| `([^`]+)`", text, flags=re.MULTILINE)
    assert {"make setup", "make train RECIPE=smoke", "make lint", "make test"} < set(commands)
    for command in commands:
        if command == "make setup":
            project.run("make", "--dry-run", "setup")
        elif command != "make test":  # see test_the_projects_own_tests_pass
            project.run("sh", "-c", command)
    for word in re.findall(r"`([^`\s=]+)`", text):
        if "." in word or "/" in word:
            assert (project.path / word).exists(), word
    assert (project.path / "runs" / "smoke" / "model").is_dir()
