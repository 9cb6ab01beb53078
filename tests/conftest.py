"""What all tests share: projects baked from a clean copy of the template, and how to run in one."""

import atexit
import compileall
import contextlib
import csv
import functools
import gzip
import hashlib
import importlib
import importlib.util
import json
import os
import py_compile
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "{{cookiecutter.project_slug}}"
DEFAULT_SLUG = "my_training"
NOT_TEMPLATE = (".git", ".venv", "demo", "runs", "wandb", "__pycache__", ".*_cache", ".cache")
# Settings of whoever runs the tests that would change what a run does.
FOREIGN = ("ACCELERATE_", "WANDB_", "TRACKIO_", "COOKIECUTTER_", "TORCHINDUCTOR_")

# A report computes with all cores: on a busy machine, threads that wait must not spin.
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

# In the background of a script, or under nohup, all that the tests start would ignore these.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)

# Run in forks of tests/preloaded.py, unless a variable is set that imports may read.
PRELOADED = ("-c", "train.py", "-m")
# Runs train.py after a piece of Python.
TRAIN = """
import os, sys
sys.path[0] = os.getcwd()
import train
exec(sys.argv.pop(1), {})
sys.argv[0] = "train.py"
train.shutdown.run(train.main, train.prepare)
"""
# A question to a run, after a piece of Python; what it starts are forks, which need no imports.
ASK = """
import atexit, os, runpy, sys
from samestep.ask import start_again
def finished(command, envs, log):
    children = []
    for env in envs:
        children.append(os.fork())
        if not children[-1]:
            atexit._clear()  # it would remove the scratch folder
            os.environ.clear()
            os.environ.update(env)
            sys.argv = command[1:]
            file = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            try:
                runpy.run_path(command[1], run_name="__main__")
            except SystemExit as end:
                os._exit(end.code or 0)
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)
start_again.finished = finished
exec(sys.argv.pop(1), {})
from samestep.__main__ import main
sys.exit(main())
"""
# What is baked and started here imports the library from its sources, not from a wheel.
LIBRARY = [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(LIBRARY)))
# A module that a test writes again within a second, in the same size, must not come from a .pyc.
sys.dont_write_bytecode = True
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
# But the library, which each process would compile anew: the hash of a source decides.
HASHED = py_compile.PycInvalidationMode.CHECKED_HASH
compileall.compile_dir(ROOT / "src", quiet=2, invalidation_mode=HASHED)


@functools.cache
def preloader():
    """The process of tests/preloaded.py, for the whole session."""
    command = [sys.executable, str(Path(__file__).with_name("preloaded.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, env=BakedProject(ROOT).env(), **pipes)
    atexit.register(server.stdin.close)
    return server


def preloaded(folder, envs, arguments, seconds, stdin=b""):
    """Exit code, stdout and stderr of `python *arguments` in each of these environments."""
    server = preloader()
    given = stdin.decode("latin-1")
    cases = [[str(folder), env, [*map(str, arguments)], given] for env in envs]
    server.stdin.write(json.dumps([cases, seconds]) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def visible_gpus():
    """CUDA_VISIBLE_DEVICES for all GPUs that whoever runs the tests lets them use."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return os.environ["CUDA_VISIBLE_DEVICES"]
    found = shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True)
    listed = found.stdout.splitlines() if found else []
    return ",".join(map(str, range(sum(line.startswith(b"GPU ") for line in listed))))


# For tests/test_gpu.py; all other tests compare numbers of CPUs, wherever they are run.
GPUS = visible_gpus()
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def latest(flags):
    """Flags of train.py, of one that is given twice the last: train.py itself refuses that."""
    found = {}
    for word in map(str, flags):
        if word.startswith("--"):
            name = word.partition("=")[0]
            found.pop(name, None)
            found[name] = []
        found[name].append(word)
    return [word for words in found.values() for word in words]


@dataclass(eq=False)
class BakedProject:
    """A generated project, and how commands are run in it."""

    path: Path
    # Whether runs in forks of tests/preloaded.py draw curves.png, half of what a tiny run takes.
    pictures: bool = False

    def env(self, **extra):
        """The environment of a run: one thread, no network, nothing of the caller's settings."""
        if "PYTHONPATH" in extra:
            extra["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
        env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        scripts = str(Path(sys.executable).parent)
        env["PATH"] = os.pathsep.join([scripts, env["PATH"]])
        if not self.pictures:
            env["NO_PICTURE"] = "1"
        return env | {**THREADS, "HF_HUB_OFFLINE": "1"} | extra

    def run(self, *command, check=True, timeout=600, stdin=b"", **env):
        """Run a command in the project; `check` demands exit code 0 and shows what was printed."""
        command = [str(word) for word in command]
        if command[0] == "python" and command[1] in PRELOADED and not env:
            given = [self.path, [self.env()], command[1:], timeout, stdin]
            ((code, *printed),) = preloaded(*given)
            result = subprocess.CompletedProcess(command, code, *printed)
        else:
            options = {"cwd": self.path, "env": self.env(**env), "stdin": subprocess.DEVNULL}
            options |= {"capture_output": True, "text": True, "timeout": timeout}
            result = subprocess.run(command, **options)
        ended = f"{command} ended with {result.returncode}:\n{result.stdout}{result.stderr}"
        assert result.returncode == 0 or not check, ended
        return result

    def copied(self, folder, code=""):
        """A copy of the project in a folder, with this code at the end of its task."""
        path = shutil.copytree(self.path, folder / "project", symlinks=True)
        with open(path / "task.py", "a") as file:
            file.write(code)
        return BakedProject(path)

    def launch(self, launcher, hardware, *flags, **env):
        """Start a launcher (accelerate or samestep launch) in a process group of its own."""
        name, *words = launcher.split()
        command = ["python", "-m", "samestep", "launch"]
        if name == "accelerate":
            command = ["accelerate", "launch", "--quiet"]
            # What samestep launch sets.
            env["PET_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
        command += [*words, "--config_file", f"configs/accelerate/{hardware}.yaml"]
        command += ["train.py", *latest(flags)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=self.env(**env), **self.apart(), **pipes)

    def apart(self):
        """Options of Popen for what runs in the project, in a process group of its own."""
        return {"cwd": self.path, "stdin": subprocess.DEVNULL, "start_new_session": True}

    def envs(self, processes, **extra):
        """The environment of each of so many processes, as a launcher would set it."""
        env = self.env(**extra)
        if processes == 1:
            return [env]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        env |= {"ACCELERATE_USE_CPU": "true"}
        return [env | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(processes)]

    def start(self, processes, *flags, **env):
        """Start train.py in so many processes, as a launcher would: a list of Popen objects."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = ["python", "train.py", *latest(flags)]
        envs = self.envs(processes, **env)
        return [subprocess.Popen(command, env=each, **self.apart(), **pipes) for each in envs]

    def ends(
        self, processes, *flags, before="", program=("train.py",), env=None, timeout=120, **first
    ):
        """Run a program in so many processes: exit code, stdout and stderr of each.

        `before` is Python that runs when train.py is imported, `env` has variables that no import
        reads. Those of `first` are set before any import, which takes 4 s more.
        """
        if not first:
            program = ["-c", TRAIN, before] if before else program
            envs = [{**each, **(env or {})} for each in self.envs(processes)]
            return preloaded(self.path, envs, [*program, *map(str, flags)], timeout)
        assert processes == 1 and not before
        command = ["python", "train.py", *flags]
        run = self.run(*command, check=False, timeout=timeout, **first)
        return [[run.returncode, run.stdout, run.stderr]]

    def train(self, processes, *flags, codes=(0,), **options):
        """What all processes of such a run printed; checks their exit codes, and that one line
        says why input is wrong."""
        ends = self.ends(processes, *latest(flags), **options)
        text = "".join(printed + errors for _, printed, errors in ends)
        found = [code for code, _, _ in ends]
        assert {*found} <= {*codes}, f"{flags} ended with {found}:\n{text}"
        assert {*found} != {2} or text.count("train.py: ") == 1 and "Traceback" not in text, text
        return text

    def ask(self, *words, before="", code=0):
        """What a question to a run prints; `before` is Python that runs before the imports of
        task.py and train.py."""
        before = before and f"import os, sys; sys.path[:0] = [os.getcwd()]\n{before}"
        result = self.run("python", "-c", ASK, before, *words, check=False)
        printed = result.stdout + result.stderr
        assert result.returncode == code, f"{words} ended with {result.returncode}:\n{printed}"
        return printed

    def check_asked(self, run, step, command=(), before=""):
        """The rows of a run are those computed, and a step is equal to the bit. `command`: of a
        script of one's own."""
        count = len(lines(run, "loss"))
        assert f"{count} of {count} line" in self.ask("rows", run)
        printed = self.ask("replay", run, "--step", step, *command, before=before)
        assert re.search(r"\b(\d+) of \1 lines? of metrics.jsonl", printed), printed
        assert "computed twice: equal" in printed, printed
        return printed


def before_calls(name, code):
    """Python for `before`: this code runs before each call of a function, such as task.loss_sum. It
    sees the arguments, `given`, and the number of the call, from 1 on."""
    owner, _, attribute = name.rpartition(".")
    return f"""
import functools, os, pkgutil, signal, time
owner = pkgutil.resolve_name("{owner}")
@functools.wraps(owner.{attribute})  # its parameters are looked at
def wrapped(*given, old=owner.{attribute}, calls=[], **named):
    calls.append(1)
    number = len(calls)
{textwrap.indent(code, "    ")}
    return old(*given, **named)
owner.{attribute} = wrapped
"""


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def kill_after(output, step):
    """Python for `before`: the process is killed at the micro-batch after a checkpoint."""
    saved = f"{output}/checkpoints/step-{step:08}"
    return before_calls("task.loss_sum", f"if os.path.exists('{saved}'): {KILL}")


def kill_before(step, action=KILL):
    """Python for `before`: the process is killed before a step, or does something else."""
    start = "samestep.training.log.RunLog.start_step"
    return before_calls(start, f"if given[1] == {step}: {action}")


def lines(output, key):
    """The lines of a run's metrics.jsonl that hold this key."""
    text = (Path(output) / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):  # torn: the run was killed, or is writing it now
            continue
    return [line for line in found if isinstance(line, dict) and key in line]


def read_checkpoint(checkpoint):
    """The tensors of a checkpoint by name, whole, whoever has written their parts."""
    import torch
    from safetensors import safe_open

    whole = {}
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name, place in json.loads(file.metadata()["DCP_SHARDING_INFO"]).items():
                part, dtype = file.get_tensor(name), getattr(torch, place["dtype"])
                whole.setdefault(name, torch.empty(place["shape"], dtype=dtype))
                ends = zip(place["saved_offsets"], part.shape, strict=True)
                whole[name][tuple(slice(first, first + size) for first, size in ends)] = part
    return whole


def read_weights(checkpoint):
    """The weights in a checkpoint, by their names in the task's model."""
    whole = read_checkpoint(checkpoint)
    return {name[6:]: values for name, values in whole.items() if name.startswith("model.")}


def digest(checkpoint):
    """SHA-256 of all names, types, shapes and bytes of the tensors in a checkpoint."""
    import torch

    found = hashlib.sha256()
    for name, values in sorted(read_checkpoint(checkpoint).items()):
        found.update(f"{name} {values.dtype} {[*values.shape]}".encode())
        found.update(values.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def reseal(checkpoint, **facts):
    """Changes facts of a checkpoint's manifest, and its digest with them."""
    file = checkpoint / "manifest.json"
    manifest = {**json.loads(file.read_text()), **facts}
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(json.dumps(manifest))


def checkpoint(output, step):
    """The folder of a run's checkpoint."""
    return output / "checkpoints" / f"step-{step:08d}"


def manifest(checkpoint):
    """What the manifest of a checkpoint says."""
    return json.loads((checkpoint / "manifest.json").read_text())


def newest(output):
    """The newest checkpoint of a run."""
    return max(output.glob("checkpoints/step-*"))


def copy_until(run, step, output):
    """A run folder as a kill after the checkpoint of this step leaves it."""
    shutil.copytree(checkpoint(run, step), checkpoint(output, step))
    return output


def all_files(folder):
    """The bytes of what lies in a run folder, but for its lock."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def eval_losses(output):
    """The validation losses of a run by step, and the step of the smallest."""
    found = {line["step"]: line["eval_loss"] for line in lines(output, "eval_loss")}
    return found, min(found, key=found.get)


def status(output):
    """What status.json of a run says."""
    return json.loads((output / "status.json").read_text())


def wait_until(condition, run=None, seconds=300):
    """Waits for something, which a run does if one is given."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert run is None or run.poll() is None, run.stdout.read()
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def trained(output, number):
    """Whether a run has written so many lines about steps."""
    return (output / "metrics.jsonl").exists() and len(lines(output, "loss")) >= number


def copy_template(destination):
    """Copy what belongs to the template; cookiecutter would bake the caches of tools as well."""
    shutil.copytree(ROOT, destination, ignore=shutil.ignore_patterns(*NOT_TEMPLATE))
    return destination


@functools.cache
def template():
    """The clean copy that all projects are baked from."""
    folder = tempfile.mkdtemp(prefix="template")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copied = copy_template(Path(folder, "template"))
    for recipe in copied.glob("templates/*/*.yaml"):  # 5 s a run; see test_exported.py
        text = recipe.read_text(encoding="utf-8")
        recipe.write_text(text.replace("check_export: true", "check_export: false"), "utf-8")
    return copied


def bake(folder, pictures=True, **answers):
    """Bake a project into `folder` with these answers and the defaults for the others."""
    elsewhere = {"replay_dir": str(template().parent), "cookiecutters_dir": str(template().parent)}
    path = cookiecutter(
        str(template()),
        no_input=True,
        extra_context=answers,
        output_dir=str(folder),
        default_config=elsewhere,
    )
    return BakedProject(Path(path), pictures)


def edit(file, *changes):
    """Replaces texts that a file has once, given in pairs."""
    text = file.read_text(encoding="utf-8")
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, f"{file}: {text.count(old)} x {old!r}"
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


def with_ddp(project, folder, arguments):
    """A copy of a project whose train.py gives DDP these arguments."""
    copied = project.copied(folder)
    options = "accelerator_options(cfg"
    edit(copied.path / "train.py", f"{options})", f"{options}, {arguments})")
    return copied


def load_module(name, path):
    """A file as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_task(name):
    """train.py, a task of templates/ or examples/ under its name, or a module of the library."""
    path = ROOT / "templates" / name / "task.py"
    if not path.exists():
        path = ROOT / "examples" / f"{name}.py"
    if name == "train":
        path = ROOT / SOURCE / "train.py"
    if name not in sys.modules and path.exists():
        load_module(name, path)
    return importlib.import_module(name)


def prepare_task(task, cfg):
    """What a run gets of task.prepare_data, before its processes meet."""
    from samestep.prepared import prepared

    if hasattr(task, "check_config"):
        task.check_config(cfg)
    return prepared.prepare(task, cfg)


@contextlib.contextmanager
def train_module(task):
    """train.py as a module, beside the task of this path."""
    load_module("task", task)
    try:
        yield load_task("train")
    finally:
        del sys.modules["task"], sys.modules["train"]


def write_table(folder, rows, kind="jsonl", name="rows"):
    """Rows, given as dictionaries, as a file of this kind: jsonl, json, csv, tsv, also with .gz, or
    parquet."""
    path = folder / f"{name}.{kind}"
    if kind.endswith(".gz"):
        plain = write_table(folder, rows, kind.removesuffix(".gz"), name)
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet

        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, [*rows[0]], delimiter="\t" if kind == "tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return path


@pytest.fixture
def output(tmp_path):
    """The folder of a run that is to be made."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def run_once(tmp_path_factory):
    """Gives a function that trains once what several tests compare with; its run folder."""

    @functools.cache
    def run_once(train, project, hardware, processes, *flags):
        output = tmp_path_factory.mktemp("once") / "run"
        train(project, hardware, processes, *flags, "--output_dir", output)
        return output

    return run_once


@pytest.fixture(scope="session")
def quick(tiny):
    """Trains in the tiny project, in one process."""
    return functools.partial(tiny.train, 1)


@pytest.fixture(scope="module")
def small(request, tmp_path_factory):
    """A project with a language model of two layers; a file of tests says in SMALL which fields of
    the quick recipe are others."""
    baked = bake(tmp_path_factory.mktemp("small"), pictures=False, tracker="none")
    return write_recipe(baked, "small", **request.module.SMALL)


@pytest.fixture(scope="module")
def alone(small, run_once):
    """A run of this project, of one process in fp32."""
    from test_sharding import train

    return run_once(train, small, "cpu", 1)


@pytest.fixture(scope="module")
def whole(request, quick, tmp_path_factory):
    """An uninterrupted run of one process in the tiny project, with the flags WHOLE of a file."""
    output = tmp_path_factory.mktemp("whole") / "run"
    quick("--output_dir", output, *request.module.WHOLE)
    return output


@pytest.fixture(scope="module")
def kit(request):
    """The kit in tests/test_tasks.py for the task that a file of tests is named after, or KIT."""
    from test_tasks import BY_NAME

    own = request.module.__name__.removeprefix("test_")
    return BY_NAME[getattr(request.module, "KIT", own)]


@pytest.fixture(scope="module")
def baked(kit, tmp_path_factory):
    """A project with the task of a kit."""
    return bake(tmp_path_factory.mktemp(kit.name), task=kit.name, tracker="none")


@pytest.fixture(scope="module")
def task(kit):
    """The task file of a kit of tests/test_tasks.py, as a module."""
    return kit.task


@pytest.fixture
def config(kit, tmp_path):
    """Makes settings of a very small task, with the data and what is given by keywords."""
    return functools.partial(kit.config, tmp_path)


@pytest.fixture
def prepare(kit, tmp_path):
    """Prepares data with such settings: these, the prepared folder, and both parts."""
    return functools.partial(kit.prepare, tmp_path)


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """A project of the default answers, shared: tests write only to folders of their own."""
    return bake(tmp_path_factory.mktemp("default"))


@pytest.fixture(scope="session")
def projects(tmp_path_factory):
    """A project of each task, by its name, shared likewise."""
    folder = tmp_path_factory.mktemp("projects")
    tasks = [path.parent.name for path in (ROOT / "templates").glob("*/task.py")]
    return {task: bake(folder / task, task=task) for task in tasks}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A project whose task is that of tests/tasks/tiny.py, shared."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def make_tiny(folder, **answers):
    """A project whose task is that of tests/tasks/tiny.py, with a recipe of 12 quick steps."""
    baked = bake(folder, pictures=False, tracker="none", **answers)
    shutil.copy(ROOT / "tests" / "tasks" / "tiny.py", baked.path / "task.py")
    return write_recipe(baked, "tiny")


def write_recipe(project, name, **fields):
    """A project, after its recipe was replaced by one of tests/recipes with these fields."""
    recipe = yaml.safe_load((ROOT / "tests" / "recipes" / f"{name}.yaml").read_text("utf-8"))
    file = project.path / "configs" / "train" / "default.yaml"
    file.write_text(yaml.safe_dump({**recipe, **fields}))
    return project
