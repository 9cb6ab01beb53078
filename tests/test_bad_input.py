"""Bad input: one line that says what is wrong and where, exit code 2, and nothing is lost."""

import json
import shutil
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch

from conftest import ROOT, SOURCE
from samestep.settings import accelerate_yaml, config

CPU = "configs/accelerate/cpu.yaml"


def recipe(text):
    """Flags for a recipe with this text, and what writes it."""
    return ["--config", "bad.yaml"], {"bad.yaml": text}


def data(content, name="data.txt"):
    """Flags for a data file with this content, and what writes it."""
    return ["--task.data", name], {name: content}


def hardware(text):
    """Flags for an accelerate YAML with this text, and what writes it."""
    return ["--config_file", "hardware.yaml"], {"hardware.yaml": text}


ONE = "distributed_type: 'NO'\n"
NO_GPU, MANY = ONE + "num_processes: 1\n", "distributed_type: MULTI_GPU\nnum_processes: "
ON_CPU = NO_GPU + "use_cpu: true\n"
TWO = "--config_file configs/accelerate/cpu_multi.yaml"

FLAGS = {  # what is written, and what the line says
    "--task.data docs --output_dir docs/run": "docs/run lies in task.data, docs, where files of",
    "--task.data README.md:2,docs:1 --output_dir docs/a/run": "docs/a/run lies in task.data, docs",
    "--output_dir s3://key:secret@bucket/run": "output_dir is s3://bucket/run, a URL; give a",
    "--output_dir ~no-one/x": "output_dir is ~no-one/x, there is no",
    "--output_dir train.py": "give another",
    "--output_dir /proc/x": "give another",
    "--learning_rat 3": "no field learning_rat; did you mean learning_rate?",
    "--dropout 0": "did you mean task.dropout?",
    "--lr 1": "no field lr; it is learning_rate here",
    "--per_device_train_batch_size 8": "global_batch_size decides the result, micro_batch_size the",
    "--bf16": "no field bf16; the accelerate YAML decides it, as mixed_precision",
    "--seed": "--seed: expected one argument",
    "--seed 1 --seed=1": "--seed is given twice",
    "faster": "there is no field faster",
    "--task spy.Spy": "there is no field task; python train.py --help lists them",
    "--task.class_path spy.Spy": "there is no field task.class_path",
    "--config none.yaml": "none.yaml: No such file or directory",
    "--config configs": "configs: Is a directory; --config takes the path of a recipe",
    "--config_file none.yaml": "none.yaml: No such file",
    "--seed one": "seed: expected a whole number, at least 0; got 'one'",
    "--max_steps 1e3": "max_steps: expected a whole number",
    "--learning_rate nan": "learning_rate: expected a number, at least 0; got 'nan'",
    "--learning_rate inf": "learning_rate: expected a number, at least 0; got 'inf'",
    "--max_grad_norm 1e39": "max_grad_norm: expected a number, at least 0; got '1e39'",
    f"--max_steps {2**63}": "max_steps: expected a whole number, at least 0; got '9223",
    "--profile_steps [5,3]": "give the first and the last of at most 100 steps",
    "--profile_steps [5,9,4]": "give the first and the last of at most 100 steps",
    "--timeout 31536001": "from 1 to 31,536,000; got",
    "--compile perhaps": "compile: expected true or false",
    "--beta2 0.99999999": "beta2: expected a number from",
    "--lr_schedule spy.Spy": "expected one of 'cosine', 'linear'",
    "--task.validation_fraction 1": "above 0 and below 1",
    "--task.num_heads 3": "task.hidden_size is 128 but must be",
    "--upload_code true": "with tracker none nothing reads it",
    "--decay_fraction 0.5": "with lr_schedule cosine nothing reads it",
    "--num_epochs 2 --max_steps 9": "gives both max_steps and",
    "--max_steps 0": "one must be above 0",
    "--task.data none.txt": "nothing to read at none.txt",
    "--tracker trackio": "trackio, which is not installed; run pip",
    "--exact true --compile true --micro_batch_size 8": "exact does not go with compile",
    "--device_shares [0]": "device_shares",
    f"{TWO} --device_shares [3,2,1]": "device_shares has 3 numbers, and there are 2 processes",
    f"{TWO} --global_batch_size 1": "global_batch_size is 1, fewer samples than the 2 processes",
    f"{TWO} --exact true": "exact: 32 samples in micro-batches of 32 cannot be dealt to 2 processes"
    "; give a micro_batch_size of 16 or 8 or 4, or start at most 1",
    "--exact true --micro_batch_size 5": "dealt to 1 process; give a micro_batch_size of 4 or 2 or",
    "--config_file configs/accelerate/single_gpu.yaml": "it needs 1 GPU on this machine, which has "
    + "0; "
    + ("use cpu.yaml" if torch.version.cuda else f"torch {torch.__version__} is built without CU"),
}
RECIPES = {
    "learning_rat: 3\n": "bad.yaml: there is no field learning_rat",
    "seed: 1\nseed: 2\n": "bad.yaml: line 2: seed is given twice",
    "task.data: a\ntask:\n  data: b\n": "bad.yaml: task.data is given twice",
    "task: {data: a, data: b}\n": "data is given twice",
    "- seed: 1\n": "expected lines of the form 'field: value'",
    "task: [1]\n": "task: expected lines of the form",
    "task: {image_size: 64}\n": "there is no field task.image_size; did you mean task.hidden_si",
    "seed: [1\n": "bad.yaml: line 2: expected",
    "seed: 0x10\n": "got '0x10'",
    "seed: {class_path: spy.Spy}\n": "got a mapping",
    "task: {class_path: spy.Spy}\n": "there is no field task.class_path",
    "task:\n  data: {class_path: spy.Spy}\n": "task.data: expected text or a list; got a mapping",
    "task: spy.Spy\n": "task: expected lines of the form 'field: value'",
    "seed:\n": "got nothing",
    'output_dir: "a\\0b"\n': "output_dir: expected text; got 'a\\x00b'",
    "? [a, b]\n: 1\n": "line 1: a key must be a name",
    "<<: {seed: 1}\n": "line 1: a key must be a name, not <<",
    "a: &a [x, x]\nb: [*a, *a]\n": "line 1: & and * (anchors",
    "seed: !!python/object/apply:spy.Spy []\n": "& and * (anchors, aliases) and !",
    "seed: 1\n" + "# much\n" * 20_000: "has more than 100,000 bytes; give a YAML file",
    "config: other.yaml\n": "give it as a flag, --config",
    "check: true\n": "give it as a flag, --check",
    "reference_batch_size: 8\n": "with lr_scaling none nothing reads it; leave it out, or give",
    "max_steps: 3\nnum_epochs: 1\n": "the recipe gives both max_steps and num_epochs",
}
YAMLS = {
    "": "expected lines of the form 'key: value'",
    "debug: !!python/object/apply:spy.Spy []\n": "& and * (anchors, aliases) and !",
    NO_GPU + "num_process: 2\n": "no key num_process; did you mean num_processes?",
    NO_GPU + "num_processes: 2\n": "is given twice",
    NO_GPU + "dynamo_config: {dynamo_backend: 1}\n": "remove it; the recipe's field compile",
    NO_GPU + "fsdp_config: x\n": "give a mapping",
    ONE + "use_cpu: 'no'\n": "use_cpu is 'no'; give true or false",
    ONE + "use_cpu: 1\n": "use_cpu is 1; give true or false",
    ONE + "num_processes: two\n": "num_processes is 'two'; give a whole number",
    ONE + "num_processes: '2'\n": "num_processes is '2'; give a whole number",
    ONE + "main_process_ip: 10\n": "main_process_ip is 10; give text, in quotes",
    ONE + "gpu_ids: 1\n": "gpu_ids is 1; give text, in quotes",
    ON_CPU + "mixed_precision: no\n": "mixed_precision is False; give text, in quotes",
    ON_CPU + "mixed_precision: fp15\n": "mixed_precision is fp15; give one of no,",
    ON_CPU + "mixed_precision: fp8\n": "fp8 needs torchao (pip install torchao), or TE",
    ON_CPU + "mixed_precision: fp16\n": "fp16 needs a GPU; write 'no'",
    "num_processes: 1\n": "distributed_type",
    "distributed_type: DDP\n": "DDP",
    "distributed_type: NO\n": "distributed_type is False; give text, in quotes",
    "distributed_type: MULTI_CPU\nnum_processes: 2\n": "MULTI_CPU starts 1 process, not 2",
    "distributed_type: MULTI_GPU\ngpu_ids: '-1'\n": "num_processes is missing; give a multiple",
    MANY + "2\nuse_cpu: true\n": "use_cpu does not go with MULTI_GPU",
    MANY + "99\n": "it needs 99 GPUs on this machine, which has ",
    MANY + "4\nnum_machines: 2\n": "num_machines is 2; give main_process_ip, machine 0's",
    MANY + "3\nnum_machines: 2\n": "num_processes is 3; give a multiple of num_machines, 2",
}
# Name: (flags, files to write), what the line says.
CASES = {
    **{flags: (flags.split(), said) for flags, said in FLAGS.items()},
    **{f"recipe {text[:50]!r}": (recipe(text), said) for text, said in RECIPES.items()},
    **{f"YAML {text!r}": (hardware(text), said) for text, said in YAMLS.items()},
    "recipe that is not UTF-8": (recipe(b"seed: \xff\n"), "bad.yaml: "),
    "data in an unknown format": (data(b"a", "data.docx"), "nothing to read at data.docx"),
    "empty data": (data(b""), "data.txt: the text is empty; --task.incomplete_rows skip leaves"),
    "data that is not UTF-8": (data(b"\xff\xfe\x00" * 9), "cannot read data.txt"),
    "too little data": (data("a b c"), "which do not fill a row"),
    "bad JSON": (data('{"text": "a"}\n{"text": \n', "d.jsonl"), "d.jsonl, line 2"),
    "row without text": (data('{"txt": "a"}\n', "d.jsonl"), "d.jsonl has the columns txt, but"),
    "truncated Parquet": (data(b"PAR1" + b"\0" * 50, "d.parquet"), "cannot read d.parquet"),
}


def parts(case):
    """Flags and files of a case."""
    return case if isinstance(case, tuple) else (case, {})


@pytest.fixture(scope="module")
def answer(project, tmp_path_factory):
    """Exit codes, stdouts and stderrs of a case: checked and, without a YAML, trained."""
    path = tmp_path_factory.mktemp("bad") / "project"
    shutil.copytree(project.path, path)
    (path / "spy.py").write_text("open('imported', 'w')\nclass Spy:\n    pass\n")
    copied = type(project)(path)

    def run(name):
        (flags, files), i = parts(CASES[name][0]), list(CASES).index(name)
        write = [f"from pathlib import Path\nPath({n!r}).write_bytes({c!r})" for n, c in (
            (name, content if isinstance(content, bytes) else content.encode())
            for name, content in files.items()
        )]  # fmt: skip
        if "trackio" in flags:
            write = ["import importlib.util as u\nu.find_spec = lambda name: None"]
        flags = [*flags, "--task.cache_dir", f"cache/{i}"]
        flags += [] if "--tracker" in flags else ["--tracker", "none"]
        flags += [] if "--output_dir" in flags else ["--output_dir", f"runs/{i}"]
        each = {"before": "\n".join(write), "env": {"HOME": str(path)}}
        ways = [["--check"]] if "--config_file" in flags else [["--check"], []]
        return copied.forked({**each, "flags": [*flags, *way]} for way in ways)

    yield run
    assert not (path / "imported").exists()  # whatever was named


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line(answer, name):
    """With --check and without; the check prints nothing else, and neither shows a traceback."""
    for code, printed, errors in answer(name):
        assert code == 2, printed + errors
        assert errors.startswith("train.py: ") and errors.count("\n") == 1, errors
        assert CASES[name][1] in errors and len(errors) < 500
        printed = [line for line in printed.splitlines() if not line.startswith("Prepar")]
        assert printed == []


@dataclass
class Own:
    """Fields of an owner's task, of types that the shipped ones do not have."""

    hidden: list[int] = field(default_factory=lambda: [64])
    name: str | None = "a"
    depth: int | Literal["auto"] = "auto"
    scale: tuple[float, float] = (0.0, 1.0)
    weights: dict[str, float] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    extra: Any = None
    kind: type = int
    flag: bool = False


@dataclass
class Outer:
    own: Own = field(default_factory=lambda: Own(depth=3))


def parsed(tmp_path, text="", *flags):
    (tmp_path / "own.yaml").write_text(text)
    arguments = ["--config", str(tmp_path / "own.yaml"), *flags]
    return config.parse_config(Outer, arguments, "")[0].own


GIVEN = {  # a field: what is written, and what it is
    "hidden": ("[1, 2]", [1, 2]),
    "name": ("null", None),
    "depth": ("auto", "auto"),
    "scale": ("[1, 2.5]", (1.0, 2.5)),
    "weights": ('{"a": 1e3}', {"a": 1000.0}),
    "tags": ("[yes, 007, 2024-01-01]", ["yes", "007", "2024-01-01"]),
    "extra": ("{class_path: [os.system, 1]}", {"class_path": ["os.system", 1]}),
    "flag": ("true", True),
}


@pytest.mark.parametrize("name", GIVEN)
def test_fields_of_other_types(tmp_path, name):
    """A flag means what the same text means in a recipe; nothing else is changed."""
    text, value = GIVEN[name]
    expected = Own(**{"depth": 3, name: value})
    assert parsed(tmp_path, f"own: {{{name}: {text}}}") == expected
    assert parsed(tmp_path, f"own.{name}: {text}") == expected
    assert parsed(tmp_path, "", f"--own.{name}", text) == expected
    assert parsed(tmp_path, "own:", f"--own.{name}={text}") == expected


BOMB = "[&a [1, 1], &b [*a, *a], &c [*b, *b]]"
REFUSED = [
    ("hidden", BOMB, "& and * (anchors"),
    ("weights", "{a: 1, a: 2}", "a is given twice"),
    ("weights", "{a: {b: 1}}", "expected a number; got a mapping"),
    ("hidden", "[1, 2.5]", "expected a whole number; got '2.5'"),
    ("hidden", "3", "own.hidden: expected a list; got '3'; write [3]"),
    ("scale", "[1]", "expected a list of 2; got a list"),
    ("depth", "deep", "expected a whole number or one of 'auto'; got 'deep'"),
    ("extra", "!!python/name:os.system", "& and * (anchors, aliases) and !"),
    ("kind", "os.system", "can only be set in the code; got 'os.system'"),
]


@pytest.mark.parametrize("name, text, said", REFUSED)
def test_fields_of_other_types_with_wrong_values(tmp_path, name, text, said):
    for arguments in ([f"own.{name}: {text}"], ["", f"--own.{name}", text]):
        with pytest.raises(ValueError) as error:
            parsed(tmp_path, *arguments)
        assert said in str(error.value) and len(str(error.value)) < 500


# ---- GPUs, as torch would report them -----------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch, tmp_path, capsys):
    """A function: what the check returns or raises for a YAML on a machine with so many GPUs."""

    def check(text, number=1, bf16=True, driver=None):
        def start_cuda():
            if driver:
                raise RuntimeError(driver)

        def has_bf16(including_emulation=True):
            return including_emulation or bf16

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "init", start_cuda)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", has_bf16)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
        path = tmp_path / "hardware.yaml"
        path.write_text(text)
        try:
            return accelerate_yaml.read_hardware(path).processes
        except ValueError as error:
            return str(error).removeprefix(f"{path}: ")
        finally:
            monkeypatch.undo()

    return check


SHIPPED = {
    path.stem: path.read_text() for path in (ROOT / SOURCE / "configs/accelerate").glob("*.yaml")
}  # tests/test_hardware.py has those that shard, and those of several machines


def test_a_gpu_that_emulates_bf16_is_named_with_the_yaml_for_it(gpus, capsys):
    for name, processes, bf16, faster in [
        ("single_gpu_bf16", 1, False, "single_gpu_fp16"),
        ("multi_gpu_bf16", 2, False, "multi_gpu_fp16"),
        ("single_gpu_bf16", 1, True, ""),
        ("single_gpu_fp16", 1, False, ""),
        ("cpu", 1, False, ""),
    ]:
        assert gpus(SHIPPED[name], number=2, bf16=bf16) == processes
        line = f"Tesla T4 only emulates bf16, slowly; faster is {faster}.yaml\n"
        assert capsys.readouterr().out == (line if faster else "")


TORCH = f"torch {torch.__version__}"


@pytest.mark.parametrize(
    "text, number, driver, expected",
    [
        (SHIPPED["cpu"], 1, "too old", 1),
        (SHIPPED["single_gpu"], 1, "is\ntoo old", f"{TORCH} cannot use the GPU: is too old"),
        (
            SHIPPED["multi_gpu"],
            0,
            "no driver",
            "it needs 2 GPUs on this machine, which has 0; use cpu.yaml (" + TORCH + ": no driver)",
        ),
        (
            MANY + "2\n",
            1,
            None,
            "it needs 2 GPUs on this machine, which has 1; set num_processes to 1",
        ),
    ],
)
def test_gpus_that_are_missing_or_cannot_be_used_are_one_line(gpus, text, number, driver, expected):
    assert gpus(text, number=number, driver=driver) == expected


@dataclass
class Schedule:
    lr_schedule: str = "cosine"
    decay_fraction: float = 0.2


def test_a_flag_may_switch_off_what_reads_a_field_of_the_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("lr_schedule: wsd\ndecay_fraction: 0.5\n")
    flags = ["--config", str(tmp_path / "mine.yaml"), "--lr_schedule", "linear"]
    config.parse_config(Schedule, flags, "")
    with pytest.raises(ValueError, match="decay_fraction is set, but with lr_schedule linear"):
        config.parse_config(Schedule, [*flags, "--decay_fraction", "0.1"], "")


@pytest.mark.slow
def test_help_names_every_flag_and_no_other(project):
    printed = project.run("python", "train.py", "--help")
    assert printed.stderr == "" and "\n  --config CONFIG " in printed.stdout
    assert "\n  --task.data DATA " in printed.stdout and "--task " not in printed.stdout
    for group in ("Run:\n  --seed", "Optimizer:\n  --learning_rate", "Task: Data:\n"):
        assert f"\n{group}" in printed.stdout


def test_good_input_is_one_line_too_and_a_check_trains_nothing(project, tmp_path):
    flags = ["--output_dir", tmp_path / "run", "--tracker", "none"]
    checked = project.run("python", "train.py", *flags, "--check", "--config_file", CPU)
    assert checked.stderr == "" and checked.stdout.endswith("\n")
    assert "starts from the beginning; 600 steps" in checked.stdout.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--check"]])
def test_checkpoints_in_the_way_are_kept(tiny, tmp_path, more):
    """resume: never over checkpoints, none that is valid, and a manifest of something else."""
    output = tmp_path / "run"
    base = ["--output_dir", output, "--max_steps", 4]
    tiny.train(1, *base)
    manifest = output / "checkpoints" / "step-00000004" / "manifest.json"
    whole = manifest.read_text()
    for text, flags, said in [
        (whole, ["--resume", "never"], "holds checkpoints and resume is never"),
        (whole[:-20], [], "no checkpoint in "),
        (json.dumps({**json.loads(whole), "config": None}), [], "no checkpoint in "),
    ]:
        manifest.write_text(text)
        before = {p: p.read_bytes() for p in output.rglob("*") if p.is_file() and p.name != "lock"}
        ((code, printed, errors),) = tiny.forked([{"flags": [*base, *flags, *more]}])
        assert code == 2 and errors.count("\n") == 1 and said in errors and printed == ""
        assert all(path.read_bytes() == content for path, content in before.items())


def test_world_size_that_disagrees_with_accelerate(tiny, tmp_path):
    """As when each of two processes believes that it is alone."""
    case = {
        "flags": ["--output_dir", tmp_path / "run"],
        "before": "from unittest import mock; from samestep.processes import meeting, ranks\n"
        "ranks.PROCESSES = 2; meeting.join = lambda: mock.Mock(wait=lambda _: None)",
    }
    ((code, printed, errors),) = tiny.forked([case])
    assert code == 2 and printed == "" and errors.count("\n") == 1
    assert errors.startswith("train.py: 2 processes were launched, but accelerate sees 1; check")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_make_train_prints_that_line_alone(project, tmp_path):
    """launch ends with the code of the check, before any launcher runs."""
    for flags, said in [
        (["--config_file", "configs/accelerate/multi_gpu.yaml", "train.py"], "which has 0"),
        (["--config_file", "configs/accelerate/cpu_multi.yaml", "train.py", "--sed", "1"], "seed"),
    ]:  # fmt: skip
        more = ["--output_dir", tmp_path / "run", "--tracker", "none"]
        result = project.run("python", "-m", "samestep", "launch", *flags, *more, check=False)
        assert result.returncode == 2 and result.stdout == "", result.stdout + result.stderr
        assert said in result.stderr and result.stderr.count("\n") == 1
    machines = ["--config_file", "configs/accelerate/cpu_multi.yaml", "--num_machines", "2"]
    machines += ["--num_processes=4"]
    address = ["--main-process-ip", "10.0.0.1"]
    for more, code, said in [
        ([], 2, "give main_process_ip"),
        ([*address, "--machine_rank", "2"], 2, "machine_rank is 2; give one from 0 to 1"),
        (address, 0, ""),
    ]:  # fmt: skip
        words = [*machines, *more, "train.py", "--check", "--output_dir", "runs/machines"]
        result = project.run("python", "-m", "samestep", "launch", *words, check=False)
        assert result.returncode == code and said in result.stderr, result.stderr
        assert result.stderr.count("\n") == bool(code)


LEFT_OVER = [  # program, environment, words of the line
    ("train.py", {"WORLD_SIZE": "4"}, "WORLD_SIZE is '4' and RANK is not set"),
    ("prepare", {"RANK": "1"}, "RANK is '1' and WORLD_SIZE is not set, which no launcher does"),
    ("hardware", {"WORLD_SIZE": "2", "RANK": "1"}, "and MASTER_ADDR is not set, which no"),
    ("launch", {"LOCAL_RANK": "3"}, "which no launcher does: unset LOCAL_RANK"),
]  # fmt: skip


@pytest.mark.parametrize("program, env, said", LEFT_OVER)
def test_an_environment_that_no_program_can_work_in_is_one_line(project, program, env, said):
    words = ["train.py"] if program == "train.py" else ["-m", "samestep", program]
    program = program if program == "train.py" else f"samestep {program}"
    result = project.run("python", *words, "-B", check=False, **env)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"{program}: ") and said in result.stderr


@pytest.mark.parametrize("more", [[], ["--check"]])
def test_a_misspelt_flag_of_the_launcher_is_found_before_the_check_is_through(tiny, tmp_path, more):
    output = ["--output_dir", tmp_path / "run", "--task.prepare_seconds", 30]
    words = ["python", "-m", "samestep", "launch", "--num_procesess", 2, "train.py", *output, *more]
    result = tiny.run(*words, check=False, timeout=25)
    assert result.returncode == 2 and not (tmp_path / "run" / "status.json").exists()
    line = (
        "samestep launch: unrecognized arguments: --num_procesess; see accelerate launch --help\n"
    )
    assert result.stderr == line
