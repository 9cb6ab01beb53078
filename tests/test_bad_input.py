"""Bad input: one line that says what is wrong and where, exit code 2, and nothing is lost."""

import json
import os
import shutil

import pytest
import torch

from conftest import ROOT, SOURCE

CPU = "configs/accelerate/cpu.yaml"


def recipe(text):
    """Flags for a recipe with this text, and what writes it."""
    return ["--config", "bad.yaml"], {"bad.yaml": text}


def data(content, name="data.txt"):
    """Flags for a data file with this content, and what writes it."""
    return ["--task.data", name], {name: content}


def hardware(text, *flags):
    """Flags for an accelerate YAML with this text, and what writes it."""
    return ["--config_file", "hardware.yaml", *flags], {"hardware.yaml": text}


def with_env(flags, **env):
    return flags, {}, env


NO_GPU = "distributed_type: 'NO'\nnum_processes: 1\n"
WORDS = "one two three four five six seven eight nine ten\n" * 50

# Name: (flags, files to write, environment), what the line says.
CASES = {
    "unknown flag": (["--learning_rat", "3"], "no field learning_rat; did you mean learning_rate?"),
    "abbreviated flag": (["--learning_r", "3"], "no field learning_r; did you mean learning_rate?"),
    "unknown flag of the task": (["--task.dat", "x"], "no field task.dat; did you mean task.data?"),
    "field of the task without task.": (["--dropout", "0"], "did you mean task.dropout?"),
    "flag without a value": (["--seed"], "--seed: expected one argument"),
    "word that is no flag": (["faster"], "there is no field faster"),
    "unknown key": (recipe("learning_rat: 3\n"), "bad.yaml: there is no field learning_rat"),
    "unknown key of the task": (recipe("task:\n  dat: x\n"), "did you mean task.data?"),
    "duplicate key": (recipe("seed: 1\nseed: 2\n"), "seed is given twice, in line 1 and line 2"),
    "duplicate key of the task": (recipe("task:\n  data: a\n  data: b\n"), "data is given twice"),
    "key of the hardware in a recipe": (recipe("num_processes: 2\n"), "no field num_processes"),
    "recipe that is a list": (recipe("- seed: 1\n"), "expected lines of the form 'field: value'"),
    "recipe that is no YAML": (recipe("seed: [1\n"), "bad.yaml: "),
    "recipe that is not UTF-8": (recipe(b"seed: \xff\n"), "bad.yaml: "),
    "missing recipe": (["--config", "none.yaml"], "none.yaml: No such file or directory"),
    "recipe that is a folder": (["--config", "configs"], "configs: Is a directory"),
    "word for a number": (["--seed", "one"], "seed"),
    "fraction for a number": (["--max_steps", "2.5"], "max_steps"),
    "float notation for a number": (["--max_steps", "1e3"], "max_steps"),
    "word for true or false": (["--compile", "perhaps"], "compile"),
    "list for a number in a recipe": (recipe("seed: [1]\n"), "seed"),
    "NaN": (["--learning_rate", "nan"], "learning_rate"),
    "infinity": (["--learning_rate", "inf"], "learning_rate"),
    "NaN in the task": (["--task.dropout", "nan"], "task.dropout"),
    "negative learning rate": (["--learning_rate", "-1"], "learning_rate"),
    "share above one": (["--beta2", "1.5"], "beta2"),
    "zero batch": (["--global_batch_size", "0"], "global_batch_size"),
    "seed too large": (["--seed", str(2**63)], "give a number below 2**63"),
    "unknown schedule": (["--lr_schedule", "cosin"], "expected one of 'cosine', 'linear'"),
    "unknown tracker": (["--tracker", "mlflow"], "expected one of 'wandb', 'trackio'"),
    "steps and epochs": (["--num_epochs", "2"], "give --max_steps 0 to train by epochs"),
    "neither steps nor epochs": (["--max_steps", "0"], "one must be 0"),
    "heads that do not divide": (["--task.num_heads", "3"], "task.hidden_size is 128 but must be"),
    "vocabulary too small": (["--task.vocab_size", "10"], "task.vocab_size is 10 but must be"),
    "everything held out": (["--task.validation_fraction", "1"], "between 0 and 1"),
    "missing data": (["--task.data", "none.txt"], "nothing to read at none.txt"),
    "data in an unknown format": (data(b"a", "data.docx"), "nothing to read at data.docx"),
    "empty data": (data(b""), "there is no text in data.txt"),
    "data that is not UTF-8": (data(b"\xff\xfe\x00" * 9), "cannot read data.txt"),
    "too little data": (data("a b c"), "which do not fill a row"),
    "bad JSON": (data('{"text": "a"}\n{"text": \n', "d.jsonl"), "d.jsonl, line 2"),
    "row without text": (data('{"txt": "a"}\n', "d.jsonl"), "d.jsonl, line 1: no column text"),
    "all rows empty": (data('{"text": " "}\n' * 9, "d.jsonl"), "there is no text in d.jsonl"),
    "truncated Parquet": (data(b"PAR1" + b"\0" * 50, "d.parquet"), "cannot read d.parquet"),
    "output_dir that is a file": (["--output_dir", "train.py"], "give another"),
    "output_dir below a file": (["--output_dir", "train.py/x"], "Not a directory; give another"),
    "output_dir that is read-only": (["--output_dir", "/proc/x"], "give another"),
    "resume path that is missing": (["--resume", "none"], "none has no manifest.json; give auto"),
    "resume path that is a file": (["--resume", "train.py"], "has no manifest.json; give auto"),
    "missing tracker": (["--tracker", "trackio"], "trackio, which is not installed; pip install"),
    "W&B key of the wrong form": (
        with_env(["--tracker", "wandb"], WANDB_API_KEY="short"),
        "W&B: ",
    ),
    "batch that processes cannot share": (
        ["--config_file", "configs/accelerate/cpu_multi.yaml", "--global_batch_size", "5"],
        "global_batch_size is 5, which 2 processes cannot share equally; give 4 or 6",
    ),
    "missing YAML": (["--config_file", "none.yaml"], "none.yaml: No such file"),
    "YAML that is no YAML": (hardware("a: [\n"), "hardware.yaml: "),
    "YAML that is empty": (hardware(""), "expected lines of the form 'key: value'"),
    "YAML with an unknown key": (
        hardware(NO_GPU + "num_process: 2\n"),
        "no key num_process; did you mean num_processes?",
    ),
    "YAML with a duplicate key": (hardware(NO_GPU + "num_processes: 2\n"), "is given twice"),
    "YAML without a type": (hardware("num_processes: 1\n"), "distributed_type"),
    "YAML with an unknown type": (hardware("distributed_type: DDP\n"), "DDP"),
    "YAML with NO for a type": (hardware("distributed_type: NO\n"), "write 'NO' in quotes"),
    "YAML with a word for a number": (
        hardware("distributed_type: 'NO'\nnum_processes: two\n"),
        "num_processes is two; give a whole number",
    ),
    "YAML with an unknown precision": (
        hardware(NO_GPU + "use_cpu: true\nmixed_precision: fp15\n"),
        "mixed_precision is fp15; give one of no,",
    ),
    "fp16 on a CPU": (
        hardware(NO_GPU + "use_cpu: true\nmixed_precision: fp16\n"),
        "fp16 needs a GPU; write 'no'",
    ),
    "type that starts one process alone": (
        hardware("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n"),
        "distributed_type MULTI_CPU starts one process alone",
    ),
    "more GPUs than there are": (
        hardware("distributed_type: MULTI_GPU\nnum_processes: 99\n"),
        "it takes 99 GPUs of this machine, which has ",
    ),
}


def parts(case):
    """Flags, files and environment of a case, some of which may be left out."""
    return (*case, {}, {})[:3] if isinstance(case, tuple) else (case, {}, {})


@pytest.fixture(scope="module")
def answers(project, tmp_path_factory):
    """Exit code, stdout and stderr of each case, checked and, where no YAML is in it, trained."""
    path = tmp_path_factory.mktemp("bad") / "project"
    shutil.copytree(project.path, path)
    bad = type(project)(path)
    cases = []
    for i, (case, _) in enumerate(CASES.values()):
        flags, files, env = parts(case)
        write = [f"from pathlib import Path\nPath({n!r}).write_bytes({c!r})" for n, c in (
            (name, content if isinstance(content, bytes) else content.encode())
            for name, content in files.items()
        )]  # fmt: skip
        if "trackio" in flags:
            write = ["import importlib.util as u\nu.find_spec = lambda name: None"]
        flags = [*flags, "--task.cache_dir", f"cache/{i}"]
        flags += [] if "--tracker" in flags else ["--tracker", "none"]
        flags += [] if "--output_dir" in flags else ["--output_dir", f"runs/{i}"]
        each = {"before": "\n".join(write), "env": {"HOME": str(path), **env}}
        cases += [{**each, "flags": [*flags, "--check"]}, {**each, "flags": flags}]
    results = bad.forked(cases)
    return dict(zip(CASES, zip(results[::2], results[1::2], strict=True), strict=True))


def test_there_are_enough_cases():
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line(answers, name):
    """With --check and without; the check prints nothing else, and neither shows a traceback."""
    for code, printed, errors in answers[name]:
        assert code == 2, printed + errors
        assert errors.startswith("train.py: ") and errors.count("\n") == 1, errors
        assert CASES[name][1] in errors and len(errors) < 500
        printed = [line for line in printed.splitlines() if not line.startswith("Prepar")]
        assert printed == []


def test_good_input_is_one_line_too_and_a_check_trains_nothing(project, tmp_path):
    flags = ["--output_dir", tmp_path / "run", "--tracker", "none"]
    checked = project.run("python", "train.py", *flags, "--check", "--config_file", CPU)
    assert checked.stderr == "" and checked.stdout.endswith("\n")
    assert "starts from the beginning; 400 steps" in checked.stdout.splitlines()[-1]
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["lock"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
def test_data_that_may_not_be_read(project, tmp_path):
    (tmp_path / "data.txt").write_text(WORDS)
    (tmp_path / "data.txt").chmod(0)
    flags = ["--task.data", tmp_path / "data.txt", "--output_dir", tmp_path / "run"]
    result = project.run("python", "train.py", *flags, check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "Permission denied" in result.stderr


def test_checkpoints_in_the_way(tiny, tmp_path):
    """resume: never over checkpoints, none that is valid, and a manifest of something else."""
    output = tmp_path / "run"
    tiny.train(1, "--output_dir", output, "--max_steps", 4)
    manifest = output / "checkpoints" / "step-00000004" / "manifest.json"
    whole = manifest.read_text()
    base = ["--output_dir", output, "--max_steps", 4]

    def refused(said, text, *flags):
        manifest.write_text(text)
        before = {p: p.read_bytes() for p in output.rglob("*") if p.is_file()}
        for more in ([], ["--check"]):
            ((code, printed, errors),) = tiny.forked([{"flags": [*base, *flags, *more]}])
            assert code == 2 and errors.count("\n") == 1 and said in errors and printed == ""
        assert before == {p: p.read_bytes() for p in output.rglob("*") if p.is_file()}

    refused("holds checkpoints and resume is never", whole, "--resume", "never")
    refused("no checkpoint in ", whole[:-20])
    refused("no checkpoint in ", json.dumps({**json.loads(whole), "config": None}))
    manifest.write_text(whole)
    assert "is finished" in tiny.train(1, *base)


def test_world_size_that_disagrees_with_accelerate(tiny, tmp_path):
    """As when each of two processes believes that it is alone."""
    case = {
        "flags": ["--output_dir", tmp_path / "run"],
        "before": "import process as p; p.PROCESSES = 2",
    }
    ((code, printed, errors),) = tiny.forked([case])
    assert code == 2 and printed == "" and errors.count("\n") == 1
    assert errors.startswith("train.py: 2 processes were launched, but accelerate sees 1; check")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_make_train_prints_that_line_alone(project, tmp_path):
    """launch.py ends with the code of the check, before any launcher runs."""
    for flags, said in [
        (["--config_file", "configs/accelerate/multi_gpu.yaml", "train.py"], "which has 0"),
        (["--config_file", "configs/accelerate/cpu_multi.yaml", "train.py", "--sed", "1"], "seed"),
        (["--config_file", "configs/accelerate/cpu.yaml", "--num_processes", "3", "train.py"],
         "starts one process alone"),
    ]:  # fmt: skip
        more = ["--output_dir", tmp_path / "run", "--tracker", "none"]
        result = project.run("python", "launch.py", *flags, *more, check=False)
        assert result.returncode == 2 and result.stdout == "", result.stdout + result.stderr
        assert said in result.stderr and result.stderr.count("\n") == 1
    result = project.run("python", "launch.py", "--config_file", CPU, check=False)
    assert result.returncode == 1 and "name a program, such as train.py" in result.stderr


def test_the_makefile_calls_the_launcher(project):
    assert "launch.py --config_file" in (ROOT / SOURCE / "Makefile").read_text()
