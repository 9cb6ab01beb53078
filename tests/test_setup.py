"""Which PyTorch is installed where, and what `make` says; tools are stand-ins, no download."""

import re
import shutil
import subprocess
from importlib import metadata

import pytest

from conftest import ROOT, SOURCE, bake, template

PYTORCH = "https://download.pytorch.org/whl"
CPU_INDEX = f"{PYTORCH}/cpu"

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
HOPPER, OLD_DRIVER, VOLTA = "580.65.06,9.0", "550.54.15,8.0", "580.65.06,7.0"


def from_index(build, *options):
    return f"pip install {' '.join([*options, '--index-url', f'{PYTORCH}/{build}'])} torch>=2.13"


def without_packages(build):
    return from_index(build, "--no-deps")


def replaced(build):
    return from_index(build, "--no-deps", "--force-reinstall")


FROM_CPU_INDEX = without_packages("cpu")
REPLACED = "pip install --no-deps --force-reinstall torch>=2.13"


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


@pytest.mark.parametrize("gpu", ["524.99,8.0", "450.80.02,", "570.124.06,12.0"])
def test_a_driver_too_old_for_any_build_is_one_line(machine, gpu):
    machine.gpus(gpu)
    log, errors = machine.setup(expect=2)
    assert log == ["venv .venv"]
    assert errors == [
        f"setup: NVIDIA's driver {gpu.split(',')[0]} is too old for PyTorch. Install 580 or newer "
        "(525 will do for GPUs before Blackwell), or train on the CPU: add TORCH_BACKEND=cpu to "
        "the command"
    ]
    assert machine.setup("TORCH_BACKEND=cpu")[0][1:] == [FROM_CPU_INDEX, PLAIN]


@pytest.mark.parametrize(
    "gpus, installed, words, expected",
    [
        # A login node, then a GPU: the CPU build does not count.
        ([HOPPER], "2.13.0+cpu", "", [REPLACED]),
        ([VOLTA], "2.13.0+cu130", "", [replaced("cu126")]),
        ([OLD_DRIVER], "2.6.0+cu124", "", [without_packages("cu126")]),
        ([HOPPER], "", "", []),
        (["580.65.06,[N/A]"], "", "", []),
        (["525.60.13,7.5"], "", "", [without_packages("cu126")]),
        ([HOPPER, VOLTA], "", "", [without_packages("cu126")]),
        (["580.65.06,12.0", VOLTA], "", "", []),
        ([], "2.13.0+cpu", "TORCH_BACKEND=cu130", [replaced("cu130")]),
        ([HOPPER], "2.13.0+cpu", "TORCH_BACKEND=cpu", [FROM_CPU_INDEX]),
        ([HOPPER], "2.13.0+cu130", f"TORCH_INDEX={CPU_INDEX}", [replaced("cpu")]),
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


@pytest.mark.parametrize(
    "gpus, words, installed, expected",
    [
        ([], [], "", "--torch-backend cpu"),
        ([HOPPER], [], "", "--torch-backend auto"),
        ([VOLTA], [], "", "--torch-backend cu126"),
        ([HOPPER], [], "2.13.0+cpu", "--torch-backend auto --reinstall-package torch"),
    ],
)
def test_uv_is_used_where_it_is_there(machine, gpus, words, installed, expected):
    machine.add("uv", UV)
    machine.gpus(*gpus)
    if installed:
        machine.installed(installed)
    command = "uv pip install --quiet --python .venv/bin/python torch>=2.13"
    assert machine.setup(*words)[0][1:] == [f"{command} {expected} {WHEEL} -e ."]
    assert "uv failed" in machine.setup(*words, expect=2, FAKE_INSTALL_FAILS="1")[1][-1]


def test_uv_does_not_read_pips_settings_and_needs_no_pip(machine):
    machine.add("uv", UV)
    assert machine.setup(FAKE_PIP_CONFIG=CONFIG)[0][1:] == [PLAIN]
    log, _ = machine.setup(f"TORCH_INDEX={SECRET}", FAKE_NO_PIP="1")
    assert [line.split()[:2] for line in log[2:]] == [["uv", "pip"]] * 2
    assert f"--no-deps --index-url {SECRET} torch>=2.13" in log[2]


@pytest.mark.parametrize(
    "gpu, build, mend",
    [
        (HOPPER, "cpu", "run again with TORCH_BACKEND=cu130"),
        (VOLTA, "cu130", "run again with TORCH_BACKEND=cu126"),
        (HOPPER, "cu130", "after an update of the driver, reboot"),
        ("470.57.02,3.5", "cu130", "NVIDIA's driver 470.57.02 is too old: install 580 or"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_one_line(machine, gpu, build, mend):
    machine.gpus(gpu)
    machine.installed(f"2.13.0+{build}")
    (error,) = machine.setup(FAKE_PIP_CONFIG=CONFIG, FAKE_TROUBLE="no CUDA")[1]
    line = f"setup: this torch (build {build}) cannot use the GPU: no CUDA; {mend}"
    assert error.startswith(line) and machine.printed[-1].startswith("setup: done, ")
    assert machine.setup("TORCH_BACKEND=cpu", FAKE_TROUBLE="no CUDA")[1] == []


@pytest.mark.parametrize(
    "config, decides",
    [
        (":env:.constraint='constraints.txt'", True),
        ("install.find-links='/wheels'", True),
        ('global.index-url="it\'s"', True),
        (":env:.index-url=''", False),
    ],
)
def test_a_configured_pip_decides_alone(machine, config, decides):
    log, _ = machine.setup(FAKE_PIP_CONFIG=f"global.timeout='60'\n{config}\n")
    assert log[1:] == [FROM_CPU_INDEX] * (not decides) + [PLAIN]
    assert machine.printed[1].startswith("setup: pip's settings (") == decides


SECRET = "https://somebody:secret@example.org/simple"
CONFIG = f":env:.extra-index-url='{SECRET}'\nglobal.find-links='/wheels'\nglobal.cert='x'\n"


def test_who_decides_is_named_before_torch_is_there_and_not_again(machine):
    machine.setup(FAKE_PIP_CONFIG=CONFIG)
    line = "setup: pip's settings (PIP_EXTRA_INDEX_URL, global.find-links) decide which build of "
    assert machine.printed[1].startswith(line) and "TORCH_BACKEND=cpu" in machine.printed[1]
    assert machine.printed[2] == f"setup: installing torch>=2.13 {WHEEL} -e ."
    machine.installed("2.13.0+cpu")
    machine.setup(FAKE_PIP_CONFIG=CONFIG)
    assert [line.split()[1] for line in machine.printed] == ["installing", "done,"]


@pytest.mark.parametrize("config", ["", CONFIG])
def test_an_index_for_torch_overrides_what_was_found(machine, config):
    machine.gpus(HOPPER)
    words = [f"TORCH_INDEX={SECRET}", "TORCH=torch==2.13.0", "EXTRAS=dev,trackio"]
    log, _ = machine.setup(*words, FAKE_PIP_CONFIG=config)
    assert log[1:] == [
        f"pip install --no-deps --index-url {SECRET} torch==2.13.0",
        f"pip install torch==2.13.0 {WHEEL} -e .[dev,trackio]",
    ]
    assert "setup: installing torch==2.13.0 from https://***@example.org/simple" in machine.printed
    assert not any("secret" in line or "decide" in line for line in machine.printed)


def test_when_an_installation_fails_nothing_else_is_tried(machine):
    log, (error,) = machine.setup(expect=2, FAKE_INDEX_FAILS="1")
    assert log[1:] == [FROM_CPU_INDEX]
    assert CPU_INDEX in error and ".venv/bin/python -m pip install torch" in error
    machine.gpus(HOPPER)
    errors = machine.setup(FAKE_INSTALL_FAILS="1", expect=2)[1]
    assert errors == ["setup: pip failed; its reason is above."]


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


@pytest.mark.parametrize("task", TASKS)
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
    folder = machine.folder / "configs" / "accelerate"
    folder.mkdir(parents=True)
    for name in HARDWARE:
        (folder / f"{name}.yaml").touch()
    (machine.folder / "configs" / "train").mkdir()
    for name in ("default", "smoke"):
        (machine.folder / "configs" / "train" / f"{name}.yaml").touch()
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
        ([], None, "cpu"),
        ([AMPERE], None, "single_gpu_bf16"),
        ([VOLTA] * 8, None, "multi_gpu_fp16 8"),
        ([AMPERE, TURING], None, "multi_gpu_fp16 2"),
        (["580.65.06,[N/A]"], None, "single_gpu_bf16"),
        ([AMPERE] * 4, "1,2", "multi_gpu_bf16 2"),
        ([AMPERE] * 4, "", "cpu"),
        ("AMD", None, "multi_gpu_bf16 2"),
    ],
)
def test_train_finds_the_hardware(ready, gpus, visible, hardware):
    if gpus == "AMD":
        ready.add("rocm_agent_enumerator", "#!/bin/sh\nprintf 'gfx000\\ngfx90a\\ngfx90a\\n'\n")
    else:
        ready.gpus(*gpus)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    hardware, _, number = hardware.partition(" ")
    number = f" --num_processes {number}" if number else ""
    command = f"-m samestep launch --config_file configs/accelerate/{hardware}.yaml{number}"
    command += " train.py --config configs/train/default.yaml"
    assert ready.run("make", "--silent", "train", **env).stdout.split() == command.split()


def test_make_passes_hardware_recipe_and_flags_on(ready):
    """To prepare data it looks for no GPU."""
    ready.gpus(AMPERE)
    words = ["RECIPE=smoke", "ARGS=--learning_rate 1e-3"]
    rest = "--config configs/train/smoke.yaml --learning_rate 1e-3"
    printed = ready.run("make", "--silent", "prepare", *words).stdout
    assert printed.split() == f"-m samestep prepare {rest}".split()
    assert not (ready.folder / "log.smi").exists()
    printed = ready.run("make", "--silent", "train", "HARDWARE=single_gpu_bf16", *words).stdout
    launch = "-m samestep launch --config_file configs/accelerate/single_gpu_bf16.yaml train.py"
    assert printed.split() == f"{launch} {rest}".split()


@pytest.mark.parametrize(
    "target, commands",
    [("test", ["python -m pytest"]), ("lint", ["ruff check .", "ruff format --check ."])],
)
def test_pytest_and_ruff_are_installed_when_they_are_first_used(ready, target, commands):
    scripts = ready.folder / ".venv" / "bin"
    for name in ("python", "ruff"):
        (scripts / name).write_text('#!/bin/sh\necho "$(basename "$0") $*"\n')
        (scripts / name).chmod(0o755)
    told, install, *then = ready.run("make", "--silent", target).stdout.splitlines()
    assert told == "installing pytest and ruff, once" and then == commands
    assert install.startswith("python -m pip install ") and install.endswith(f"{WHEEL} -e .[dev]")
    shutil.copy(scripts / "ruff", scripts / "pytest")
    assert ready.run("make", "--silent", target).stdout.splitlines() == commands
    (scripts / "pytest").unlink()
    (scripts / "python").write_text("#!/bin/sh\nexit 1\n")
    result = ready.run("make", "--silent", target)
    line = f"pip failed; its reason is above. Correct it, then run: make {target}"
    assert result.returncode == 2 and result.stderr.splitlines()[0] == line


@pytest.mark.parametrize(
    "word, message",
    [
        (
            "HARDWARE=tpu",
            f"accelerate/tpu.yaml is missing. HARDWARE is one of: {' '.join(HARDWARE)}",
        ),
        ("RECIPE=defualt", "train/defualt.yaml is missing. RECIPE is one of: default smoke."),
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
    targets = makefile.read_text().split(".PHONY:")[1].split("\n\n")[0].replace("\\\n", "").split()
    assert [line.split()[1] for line in result.stdout.splitlines()] == targets
    assert result.stderr == ""
