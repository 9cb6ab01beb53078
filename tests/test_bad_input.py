"""Bad input: one line that says what is wrong and where, exit code 2, and nothing is lost."""

import enum
import importlib
import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
import yaml
from pydantic import AfterValidator, BaseModel

from conftest import ROOT, SOURCE, train_module
from samestep.settings import accelerate_yaml, config
from samestep.start import startup

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
    "--output_dir s3://key:secret@bucket/run": "output_dir is s3://bucket/run, a URL; give a",
    "--output_dir train.py": "give another",
    "--learning_rat 3": "no field learning_rat; did you mean learning_rate?",
    "--lr 1": "no field lr; it is learning_rate here",
    "--bf16": "no field bf16; the accelerate YAML decides it, as mixed_precision",
    "--seed": "--seed: expected one argument",
    "--task.sample_prompt ---hi": "one argument; write --task.sample_prompt=VALUE",
    "--task.completion_column prompt": "completion_column is 'prompt' but must be another than",
    "--seed 1 --seed=1": "seed is given twice",
    "faster": "there is no field faster",
    "--task.class_path spy.Spy": "there is no field task.class_path",
    "--config none.yaml": "none.yaml: No such file or directory",
    "--config configs": "configs: Is a directory",
    "--seed one": "seed: Input should be a valid integer, unable to",
    "--learning_rate nan": "learning_rate: Input should be a finite number; got 'nan'",
    f"--max_steps {2**63}": "max_steps: Input should be less than or equal to 1000000",
    "--profile_steps [5,3]": "give the first and the last of at most 100 steps",
    "--profile_steps [5,9,4]": "give the first and the last of at most 100 steps",
    "--timeout 31536001": "Input should be less than or equal to 31536000; got",
    "--beta2 0.99999999": "beta2: Input should be less than or equal to 0.9999999",
    "--lr_schedule spy.Spy": "lr_schedule: Input should be 'cosine', 'linear', 'con",
    "--task.validation_fraction 1": "validation_fraction: Input should be less than 1",
    "--task.num_heads 3": "task.hidden_size is 128 but must be",
    "--upload_code true": "upload_code is True, but nothing reads it with tracker none",
    "--decay_fraction 0.5": "nothing reads it with lr_schedule cosine",
    "--num_epochs 2 --max_steps 9": "both given; give one of them",
    "--max_steps 0": "one must be above 0",
    "--tracker trackio": "trackio, which is not installed; run pip",
    "--exact true --compile true --micro_batch_size 8": "exact does not go with compile",
    "--device_shares [0]": "device_shares",
    f"{TWO} --device_shares [3,2,1]": "device_shares has 3 numbers, and there are 2 processes",
    f"{TWO} --exact true": "exact: 32 samples in micro-batches of 32 cannot be dealt to 2 processes"
    "; give a micro_batch_size of 16 or 8 or 4, or start at most 1",
    "--exact true --micro_batch_size 5": "dealt to 1 process; give a micro_batch_size of 4 or 2 or",
    "--config_file configs/accelerate/single_gpu.yaml": "it needs 1 GPU on this machine, which has "
    + "0; "
    + ("use cpu.yaml" if torch.version.cuda else f"torch {torch.__version__} is built without CU"),
}
RECIPES = {
    "learning_rat: 3\n": "bad.yaml: line 1: there is no field learning_rat",
    "seed: 1\nseed: 2\n": "bad.yaml: line 2: seed is given twice",
    "seed: 1\n~: 2\n": "bad.yaml: line 2: there is no field ~",
    "task.data: a\ntask:\n  data: b\n": "bad.yaml: line 3: task.data is given twice",
    "- seed: 1\n": "expected lines of the form 'field: value'",
    "seed: [1\n": "bad.yaml: line 2: expected",
    "seed: {class_path: spy.Spy}\n": "valid integer; got a mapping",
    "task: {class_path: spy.Spy}\n": "there is no field task.class_path",
    "task:\n  data: {class_path: spy.Spy}\n": "task.data: Input should be a valid string, or "
    "Input should be a valid list; got a mapping",
    "# mine\n\nseed:\n": "bad.yaml: line 3: seed: Input should be a valid integer; got nothing",
    "<<: {seed: 1}\n": "line 1: a key must be a name, not <<",
    "a: &a [x, x]\nb: [*a, *a]\n": "line 1: & and * (anchors",
    "seed: !!python/object/apply:spy.Spy []\n": "& and * (anchors, aliases) and !",
    "config: other.yaml\n": "give it as a flag, --config",
    "check: true\n": "give it as a flag, --check",
    "reference_batch_size: 8\n": "nothing reads it with lr_scaling none; leave it out, or give",
}
YAMLS = {
    "": "expected lines of the form 'key: value'",
    NO_GPU + "num_process: 2\n": "hardware.yaml had unknown keys (['num_process']), please try",
    NO_GPU + "num_processes: 2\n": "is given twice",
    NO_GPU + "dynamo_config: {dynamo_backend: 1}\n": "remove it; the recipe's field compile",
    "distributed_type: NO\nnum_processes: 2\n": "distributed_type NO starts 1 process, not 2",
    ON_CPU + "mixed_precision: no\n": "mixed_precision is False; give one of no, fp8,",
    ON_CPU + "mixed_precision: fp16\n": "fp16 needs a GPU; write 'no'",
    "num_processes: 1\n": "distributed_type",
    "distributed_type: MULTI_CPU\nnum_processes: 2\n": "MULTI_CPU starts 1 process, not 2",
    "distributed_type: MULTI_GPU\ngpu_ids: '-1'\n": "num_processes is missing; give a multiple",
    MANY + "2\nuse_cpu: true\n": "use_cpu does not go with MULTI_GPU",
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
    "too little data": (data("a b c"), "which do not fill a sequence of"),
    "bad JSON": (data('{"text": "a"}\n{"text": \n', "d.jsonl"), "d.jsonl, line 2"),
    "row without text": (data('{"txt": "a"}\n', "d.jsonl"), "d.jsonl has the columns txt, but"),
    "truncated Parquet": (data(b"PAR1" + b"\0" * 50, "d.parquet"), "cannot read d.parquet"),
}


REAL = [  # cases that are run by train.py itself, with --check and without
    "--learning_rat 3",
    "--exact true --compile true --micro_batch_size 8",
    "recipe that is not UTF-8",
    "bad JSON",
    f"YAML {ON_CPU + 'mixed_precision: fp16' + chr(10)!r}",
]


@pytest.fixture(scope="module")
def place(project, tmp_path_factory):
    """A copy of a project, and flags for each case after its files have been written."""
    copied = type(project)(tmp_path_factory.mktemp("bad") / "project")
    shutil.copytree(project.path, copied.path)
    (copied.path / "spy.py").write_text("open('imported', 'w')\nclass Spy:\n    pass\n")

    def flags(name):
        words, number = CASES[name][0], [*CASES].index(name)
        words, written = words if isinstance(words, tuple) else (words, {})
        for file, content in written.items():
            content = content if isinstance(content, bytes) else content.encode()
            (copied.path / file).write_bytes(content)
        words = [*words, "--task.cache_dir", f"cache/{number}"]
        words += ["--check"] if "--config_file" in words else []
        words += [] if "--tracker" in words else ["--tracker", "none"]
        return words + ([] if "--output_dir" in words else ["--output_dir", f"runs/{number}"])

    yield copied, flags
    assert not (copied.path / "imported").exists()  # whatever was named


@pytest.fixture(scope="module")
def train():
    """train.py as a module, with the default task."""
    with train_module(ROOT / "templates" / "tasks" / "causal_lm.py") as module:
        yield module


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line(place, train, monkeypatch, capsys, name):
    project, flags = place
    monkeypatch.chdir(project.path)
    monkeypatch.setenv("HOME", str(project.path))
    monkeypatch.setattr(sys, "argv", ["train.py", *flags(name)])
    if "trackio" in name:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError) as error:
        train.prepare()
    assert CASES[name][1] in str(error.value) and len(str(error.value)) < 500
    assert [line for line in capsys.readouterr().out.splitlines() if line[:6] != "Prepar"] == []


@pytest.mark.parametrize("name", REAL)
def test_the_line_is_all_that_is_printed_and_the_exit_code_is_2(place, name):
    project, flags = place
    flags = [word for word in flags(name) if word != "--check"]
    ways = [["--check"]] if "--config_file" in flags else [["--check"], []]
    for code, printed, errors in project.forked({"flags": [*flags, *way]} for way in ways):
        assert code == 2, printed + errors
        assert errors.startswith("train.py: ") and errors.count("\n") == 1, errors
        assert CASES[name][1] in errors and len(errors) < 500
        assert [line for line in printed.splitlines() if not line.startswith("Prepar")] == []


def check_even(number):
    if number % 2:
        raise ValueError("it must be even")
    return number


@dataclass
class Own:
    """Fields of an owner's task, of types that the shipped ones do not have."""

    hidden: list[int] = field(default_factory=lambda: [64])
    name: str | None = "a"
    depth: int | Literal["auto"] = "auto"
    width: int | str = 4
    bits: Literal[4, 8] = 8
    even: Annotated[int, AfterValidator(check_even)] = 2
    scale: tuple[float, float] = (0.0, 1.0)
    weights: dict[str, float] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    extra: Any = None
    source: str | list[dict[str, Any]] = ""
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
    "width": ("8", 8),
    "bits": ("4", 4),
    "even": ("4.0", 4),
    "scale": ("[1, 2.5]", (1.0, 2.5)),
    "weights": ('{"a": 1e3}', {"a": 1000.0}),
    "tags": ("[yes, 007, 2024-01-01]", ["yes", "007", "2024-01-01"]),
    "extra": ("{class_path: [os.system, 10]}", {"class_path": ["os.system", 10]}),
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


PATHS = ["a #1/b", " a", '"a"', "*.jsonl", "@a", "a: v2", "null", "[old] a", "{0}.jsonl", "a{0}"]


@pytest.mark.parametrize("text", PATHS)
def test_a_flag_that_may_be_a_text_is_one_as_it_is_written(tmp_path, text):
    assert parsed(tmp_path, "", "--own.source", text).source == text
    entries = [{"path": "a", "weight": 2}]
    assert parsed(tmp_path, "", "--own.source", " [{path: a, weight: 2}]\n").source == entries


def test_odd_characters_of_a_text_come_back_from_config_yaml(tmp_path):
    for text in ("a\u2028b", "\xa0", "\ufeff", "\t\x9f"):
        written = yaml.safe_dump({"own": {"name": text}}, allow_unicode=True)
        assert parsed(tmp_path, written).name == text


def test_a_recipe_may_begin_with_a_mark_and_have_lines_of_windows(tmp_path):
    assert parsed(tmp_path, "\ufeff# mine\r\nown:\r\n  depth: 5\r\n").depth == 5
    with pytest.raises(ValueError, match=r"own.yaml: line 3: own.depth: Input should"):
        parsed(tmp_path, "\ufeff# mine\r\nown:\r\n  depth: x\r\n")


def test_the_password_of_a_url_is_in_no_line(tmp_path):
    address = "s3://me:secret@b"
    for text in (f"own.depth: {address}", f"{address}: 1", f"own.hidden: [{address}]"):
        with pytest.raises(ValueError) as error:
            parsed(tmp_path, text)
        assert "s3://b" in str(error.value) and "secret" not in str(error.value)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(BaseModel):
    width: int = 1


@dataclass
class Odd:
    """Fields of types that YAML does not have."""

    folder: Path = Path("a")
    color: Color = Color.RED
    size: Size | None = None
    points: list[tuple[int, float]] = field(default_factory=list)


def test_config_yaml_gives_back_paths_options_and_models(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("{folder: b/c, color: blue, size: {width: 3}, points: [[1, 2e-3]]}")
    cfg, *_ = config.parse_config(Odd, ["--config", str(path)], "")
    assert cfg == Odd(Path("b/c"), Color.BLUE, Size(width=3), [(1, 0.002)])
    path.write_text(yaml.safe_dump(startup.resolved_config(cfg)))
    assert config.parse_config(Odd, ["--config", str(path)], "")[0] == cfg
    path.write_text("size: {wdth: 3}")
    with pytest.raises(ValueError, match="size: Extra inputs are not permitted; got '3'"):
        config.parse_config(Odd, ["--config", str(path)], "")


BOMB = "[&a [1, 1], &b [*a, *a], &c [*b, *b]]"
REFUSED = [
    ("hidden", BOMB, "& and * (anchors"),
    ("weights", "{a: 1, a: 2}", "a is given twice"),
    ("weights", "{a: {b: 1}}", "own.weights: Input should be a valid number; got a mapping"),
    ("hidden", "[1, 2.5]", "unable to parse string as an integer; got '2.5'"),
    ("hidden", "3", "own.hidden: Input should be a valid list; got '3'"),
    ("bits", "5", "own.bits: Input should be 4 or 8; got '5'"),
    ("even", "3", "own.even: Value error, it must be even; got '3'"),
    ("scale", "[1]", "own.scale: Field required; got a list"),
    ("depth", "deep", "as an integer, or Input should be 'auto'; got 'deep'"),
    ("extra", "[!!python/name:os.system]", "& and * (anchors, aliases) and !"),
    ("kind", "os.system", "own.kind: Input should be a type; got 'os.system'"),
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


TORCH = f"torch {torch.__version__}"
ON_GPUS = [  # a YAML, GPUs, what torch says of them, processes or what is said, what is printed
    (SHIPPED["single_gpu_bf16"], 2, {"bf16": False}, 1, "single_gpu_fp16.yaml\n"),
    (SHIPPED["multi_gpu_bf16"], 2, {"bf16": False}, 2, "multi_gpu_fp16.yaml\n"),
    (SHIPPED["single_gpu_bf16"], 2, {}, 1, ""),
    (SHIPPED["single_gpu_fp16"], 2, {"bf16": False}, 1, ""),
    (SHIPPED["cpu"], 1, {"driver": "too old"}, 1, ""),
    (SHIPPED["multi_gpu"], 0, {"driver": "none"}, f"has 0; use cpu.yaml ({TORCH}: none)", ""),
    (MANY + "2\n", 1, {}, "it needs 2 GPUs on this machine, which has 1; set num_processes to", ""),
]


@pytest.mark.parametrize("text, number, torch_says, expected, printed", ON_GPUS)
def test_gpus_that_lack_something(gpus, capsys, text, number, torch_says, expected, printed):
    answer = gpus(text, number=number, **torch_says)
    assert answer == expected if isinstance(expected, int) else expected in answer
    line = f"Tesla T4 only emulates bf16, slowly; faster is {printed}"
    assert capsys.readouterr().out == (line if printed else "")


@dataclass
class Schedule:
    lr_schedule: str = "cosine"
    decay_fraction: float = 0.2


def test_a_flag_may_switch_off_what_reads_a_field_of_the_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("lr_schedule: wsd\ndecay_fraction: 0.5\n")
    flags = ["--config", str(tmp_path / "mine.yaml"), "--lr_schedule", "linear"]
    config.parse_config(Schedule, flags, "")
    with pytest.raises(ValueError, match="nothing reads it with lr_schedule linear"):
        config.parse_config(Schedule, [*flags, "--decay_fraction", "0.1"], "")


@pytest.mark.slow
def test_help_names_every_flag_and_no_other(project):
    printed = project.run("python", "train.py", "--help")
    assert printed.stderr == "" and "\n--config configs/train/default.yaml" in printed.stdout
    assert "\n--task.data " in printed.stdout and "--task " not in printed.stdout
    assert "\n--eval_every 100    (minimum: 0, type: integer or const: epoch" in printed.stdout


@pytest.mark.slow
def test_help_without_docstrings(project):
    """PYTHONOPTIMIZE=2 strips them; those of fields are in the source."""
    for command in (["train.py", "--help"], ["-m", "samestep"]):
        printed = project.run("python", *command, PYTHONOPTIMIZE="2")
        assert printed.stderr == ""
    for words in (["train.py", "--seed", "x"], ["-m", "samestep", "prepare", "--seed", "x"]):
        ended = project.run("python", *words, check=False, PYTHONOPTIMIZE="2")
        assert ended.returncode == 2 and "seed: Input should be" in ended.stderr
    printed = project.run("python", "train.py", "--help", PYTHONOPTIMIZE="2").stdout
    assert "usage: accelerate launch" in printed and "Peak learning rate." in printed


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
        "before": "from unittest import mock; from samestep.processes import rendezvous, ranks\n"
        "ranks.PROCESSES = 2; rendezvous.join = lambda: mock.Mock(wait=lambda _: None)",
    }
    ((code, printed, errors),) = tiny.forked([case])
    assert code == 2 and printed == "" and errors.count("\n") == 1
    assert errors.startswith("train.py: 2 processes were launched, but accelerate sees 1; check")


CPU_MULTI = ["--config_file", "configs/accelerate/cpu_multi.yaml"]
MACHINES = [*CPU_MULTI, "--num_machines", "2", "--num_processes=4", "--main-process-ip", "10.0.0.1"]
LAUNCHED = [  # options of the launcher, flags, the exit code of the check, what is said
    (["--config_file", "configs/accelerate/multi_gpu.yaml"], [], 2, "which has 0"),
    (CPU_MULTI, ["--sed", "1"], 2, "no field sed"),
    (MACHINES[:-2], ["--check"], 2, "give main_process_ip"),
    ([*MACHINES, "--machine_rank", "2"], ["--check"], 2, "machine_rank is 2; give one from 0 to 1"),
    (MACHINES, ["--check"], 0, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize("options, flags, code, said", LAUNCHED)
def test_launch_ends_with_the_code_of_the_check(project, tmp_path, options, flags, code, said):
    """Before any launcher runs."""
    words = [*options, "train.py", *flags, "--output_dir", tmp_path / "run", "--tracker", "none"]
    result = project.run("python", "-m", "samestep", "launch", *words, check=False)
    assert result.returncode == code and said in result.stderr, result.stderr
    assert result.stderr.count("\n") == bool(code)


@pytest.mark.parametrize(
    "program, env, said",
    [
        ("train.py", {"WORLD_SIZE": "4"}, "WORLD_SIZE is '4' and RANK is not set, which no launch"),
        ("-m samestep prepare", {"WORLD_SIZE": "2", "RANK": "1"}, "and MASTER_ADDR is not set"),
        ("-m samestep launch", {"LOCAL_RANK": "3"}, "which no launcher does: unset LOCAL_RANK"),
    ],
)
def test_an_environment_that_no_program_can_work_in_is_one_line(project, program, env, said):
    result = project.run("python", *program.split(), "-B", check=False, **env)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"{program.removeprefix('-m ')}: ") and said in result.stderr


@pytest.mark.parametrize("words, code", [(["--help"], 0), (["-h"], 0), ([], 2)])
def test_a_launch_without_a_program(tiny, words, code):
    result = tiny.run("python", "-m", "samestep", "launch", *words, check=False)
    said = "samestep launch: name a program, such as train.py; see --help\n"
    assert (result.returncode, result.stderr) == (code, said if code else "")
    assert ("samestep launch --config_file configs" in result.stdout) == (code == 0)


@pytest.mark.parametrize("more", [[], ["--check"]])
def test_a_misspelt_flag_of_the_launcher_is_found_before_the_check_is_through(tiny, tmp_path, more):
    output = ["--output_dir", tmp_path / "run", "--task.prepare_seconds", 3000]
    words = ["python", "-m", "samestep", "launch", "--num_procesess", 2, "train.py", *output, *more]
    result = tiny.run(*words, check=False)
    assert result.returncode == 2 and not (tmp_path / "run" / "status.json").exists()
    line = (
        "samestep launch: unrecognized arguments: --num_procesess; see accelerate launch --help\n"
    )
    assert result.stderr == line
