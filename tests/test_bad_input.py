"""Bad input: one line that says what is wrong and where, exit code 2, and nothing is lost."""

import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch

from conftest import ROOT, SOURCE, forks
from samestep.settings import accelerate_yaml, config

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
    "run folder in the data": (
        ["--task.data", "docs", "--output_dir", "docs/run"],
        "output_dir docs/run lies in task.data, docs, where files of the run would count as data",
    ),
    "run folder in a part of the data": (
        ["--task.data", "README.md:2,docs:1", "--output_dir", "docs/a/run"],
        "output_dir docs/a/run lies in task.data, docs",
    ),
    "run folder in the validation data": (
        ["--task.validation_data", ".", "--output_dir", "runs/here"],
        "output_dir runs/here lies in task.validation_data, ., where",
    ),
    "prepared data in the validation data": (
        ["--task.validation_data", ".", "--output_dir", ".runs/here"],
        "lies in task.validation_data: give another",
    ),
    "run folder that is a URL": (
        ["--output_dir", "s3://key:secret@bucket/run"],
        "output_dir is s3://bucket/run, a URL; give a folder",
    ),
    "run folder of nobody": (["--output_dir", "~no-one/x"], "output_dir is ~no-one/x: there is no"),
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
    "list for a number in a recipe": (recipe("seed: [1]\n"), "seed: expected a whole number"),
    "mapping for a number in a recipe": (recipe("seed: {a: 1}\n"), "got a mapping"),
    "nothing for a number in a recipe": (recipe("seed:\n"), "got nothing"),
    "nothing for text in a recipe": (recipe("project: null\n"), "expected text; got nothing"),
    "empty text for a number": (["--seed="], "seed: expected a whole number, at least 0; got ''"),
    "truth for a number": (["--seed", "true"], "got 'true'"),
    "whole number with a point": (["--seed", "1.0"], "seed: expected a whole number"),
    "underscores in a number": (["--seed", "1_000"], "got '1_000'"),
    "minutes and seconds for a number": (["--max_steps", "1:30"], "got '1:30'"),
    "hexadecimal number": (recipe("seed: 0x10\n"), "got '0x10'"),
    "digits of another script": (["--seed", "\u0663"], "seed: expected a whole number"),
    "number of 10,000 digits": (recipe(f"seed: {'9' * 10_000}\n"), "expected a number below 2**63"),
    "fraction of 400 digits": (["--learning_rate", "9" * 400], "float32 holds"),
    "more than float32 holds": (["--max_grad_norm", "1e39"], "float32 holds, up to 3.4e38"),
    "more than float32 holds in the task": (["--task.dropout", "1e39"], "task.dropout: expected"),
    "flag twice": (["--seed", "1", "--seed=1"], "--seed is given twice"),
    "switch twice": (["--compile", "--compile"], "--compile is given twice"),
    "recipe twice": (["--config", CPU, "--config", CPU], "--config is given twice"),
    "flag for a section": (["--task", "task.yaml"], "give them one by one, as --task."),
    "JSON for a section": (["--task", '{"data": "a", "data": "b"}'], "give them one by one"),
    "duplicate in a flow": (recipe("task: {data: a, data: b}\n"), "data is given twice"),
    "duplicate in JSON": (recipe('{"seed": 1, "seed": 2}'), "seed is given twice"),
    "dotted beside nested": (
        recipe("task.data: a\ntask:\n  data: b\n"),
        "task.data is given twice, in line 1 and line 3",
    ),
    "section that is a list": (recipe("task: [1]\n"), "task: expected lines of the form"),
    "section that is text": (recipe("task: text\n"), "task: expected lines of the form"),
    "key that is a list": (recipe("? [a, b]\n: 1\n"), "line 1: a key must be a name"),
    "key that is a mapping": (recipe("seed: 1\n? {a: b}\n: 1\n"), "line 2: a key must be a name"),
    "key that is a number": (recipe("1: 2\n"), "there is no field 1"),
    "key that is null": (recipe("task: {null: 3}\n"), "there is no field task.null"),
    "key that is true": (recipe("yes: 1\n"), "there is no field yes"),
    "key that is empty": (recipe("'': 1\n"), "there is no field without a name"),
    "merge key": (recipe("<<: {seed: 1}\n"), "line 1: a key must be a name, not <<"),
    "two documents": (recipe("seed: 1\n---\nseed: 2\n"), "line 2: found another document"),
    "tag of Python": (recipe("seed: !!python/name:os.system\n"), "line 1: the tag "),
    "binary tag": (recipe("project: !!binary aGk=\n"), "line 1: the tag "),
    "set": (recipe("task: !!set {data}\n"), "line 1: the tag "),
    "date for a number": (recipe("seed: 2024-13-45\n"), "got '2024-13-45'"),
    "anchor": (recipe("seed: &a 1\nmax_steps: *a\n"), "line 1: & and * (anchors"),
    "aliases that multiply": (
        recipe("a: &a [x, x]\n" + "".join(f"{c}: &{c} [*a, *a]\n" for c in "bcdefghij")),
        "line 1: & and * (anchors",
    ),
    "deep nesting": (recipe("seed: " + "[" * 5000), "nested deeper than 20"),
    "deep blocks": (recipe("- " * 5000), "nested deeper than 20"),
    "large recipe": (recipe("seed: 1\n" + "# much\n" * 20_000), "more than 100,000 bytes"),
    "endless recipe": (["--config", "/dev/zero"], "/dev/zero: this is a pipe or a device"),
    "recipe with a NUL": (recipe("seed: \0\n"), "bad.yaml: unacceptable character #x0000"),
    "text with a NUL": (recipe('output_dir: "a\\0b"\n'), "output_dir: expected UTF-8 without NUL"),
    "half of a surrogate pair": (recipe('project: "\\ud800"\n'), "expected UTF-8 without NUL"),
    "long path of a recipe": (["--config", "x" * 5000], "File name too long"),
    "recipe in a recipe": (recipe("config: other.yaml\n"), "give it as a flag, --config"),
    "accept_changes in a recipe": (recipe("accept_changes: false\n"), "flag, --accept_changes"),
    "check in a recipe": (recipe("check: true\n"), "give it as a flag, --check"),
    "eval_only in a recipe": (recipe("eval_only: true\n"), "give it as a flag, --eval_only"),
    "config_file in a recipe": (recipe("config_file: x\n"), "give it as a flag, --config_file"),
    "unread upload": (["--upload_code", "true"], "with tracker none nothing reads it"),
    "unread flag": (["--decay_fraction", "0.5"], "with lr_schedule cosine nothing reads it"),
    "unread field": (recipe("reference_batch_size: 8\n"), "with lr_scaling none nothing reads it"),
    "unread end of the schedule": (
        ["--lr_schedule", "constant", "--final_lr_fraction", "0"],
        "with lr_schedule constant nothing reads it",
    ),
    "NaN": (["--learning_rate", "nan"], "learning_rate"),
    "infinity": (["--learning_rate", "inf"], "learning_rate"),
    "NaN in the task": (["--task.dropout", "nan"], "task.dropout"),
    "negative learning rate": (["--learning_rate", "-1"], "learning_rate"),
    "share above one": (["--beta2", "1.5"], "beta2"),
    "decay rate of one": (["--beta1", "1"], "beta1: expected a number from 0 to 0.9999999"),
    "decay rate of one in float32": (["--beta2", "0.99999999"], "beta2: expected a number from"),
    "time-out beyond a year": (["--timeout", "31536001"], "from 1 to 31,536,000; got"),
    "huge batch": (["--global_batch_size", str(10**12)], "from 1 to 10,000,000; got"),
    "huge micro-batch": (["--micro_batch_size", str(10**12)], "from 1 to 10,000,000; got"),
    "many workers": (["--num_workers", "100000"], "from 0 to 256 or null; got"),
    "steps beyond 2**63": (["--max_steps", str(2**63)], "expected a number below 2**63"),
    "task's number beyond 2**63": (["--task.num_layers", str(-(2**63))], "below 2**63"),
    "zero batch": (["--global_batch_size", "0"], "global_batch_size"),
    "seed too large": (["--seed", str(2**63)], "expected a number below 2**63"),
    "unknown schedule": (["--lr_schedule", "cosin"], "expected one of 'cosine', 'linear'"),
    "unknown tracker": (["--tracker", "mlflow"], "expected one of 'wandb', 'trackio'"),
    "steps and epochs": (["--num_epochs", "2", "--max_steps", "9"], "gives both max_steps and"),
    "neither steps nor epochs": (["--max_steps", "0"], "one must be above 0"),
    "heads that do not divide": (["--task.num_heads", "3"], "task.hidden_size is 128 but must be"),
    "vocabulary too small": (
        ["--task.vocab_size", "10"],
        "vocab_size: expected a whole number from 257",
    ),
    "everything held out": (["--task.validation_fraction", "1"], "above 0 and below 1"),
    "missing data": (["--task.data", "none.txt"], "nothing to read at none.txt"),
    "missing data of a run": (["--task.data", "runs/none"], "nothing to read at runs/none"),
    "missing data in a folder": (["--task.data", "configs/none"], "nothing to read at configs/"),
    "data in an unknown format": (data(b"a", "data.docx"), "nothing to read at data.docx"),
    "empty data": (data(b""), "data.txt: the text is empty; --task.incomplete_rows skip leaves"),
    "nothing but empty data": (
        (["--task.data", "data.txt", "--task.incomplete_rows", "skip"], {"data.txt": b""}),
        "there is no text in data.txt",
    ),
    "data that is not UTF-8": (data(b"\xff\xfe\x00" * 9), "cannot read data.txt"),
    "too little data": (data("a b c"), "which do not fill a row"),
    "bad JSON": (data('{"text": "a"}\n{"text": \n', "d.jsonl"), "d.jsonl, line 2"),
    "row without text": (data('{"txt": "a"}\n', "d.jsonl"), "d.jsonl has the columns txt, but"),
    "all rows empty": (data('{"text": " "}\n' * 9, "d.jsonl"), "line 1: the text is empty; --task"),
    "truncated Parquet": (data(b"PAR1" + b"\0" * 50, "d.parquet"), "cannot read d.parquet"),
    "output_dir that is a file": (["--output_dir", "train.py"], "give another"),
    "output_dir below a file": (["--output_dir", "train.py/x"], "Not a directory; give another"),
    "output_dir that is read-only": (["--output_dir", "/proc/x"], "give another"),
    "resume path that is missing": (["--resume", "none"], "none has no manifest.json; give auto"),
    "resume path that is a file": (["--resume", "train.py"], "has no manifest.json; give auto"),
    "missing tracker": (["--tracker", "trackio"], "trackio, which is not installed; run pip"),
    "W&B key of the wrong form": (
        with_env(["--tracker", "wandb"], WANDB_API_KEY="short"),
        "W&B: ",
    ),
    "fewer samples than processes": (
        ["--config_file", "configs/accelerate/cpu_multi.yaml", "--global_batch_size", "1"],
        "global_batch_size is 1, fewer samples than the 2 processes; give at least 2, or start at "
        "most 1",
    ),
    "exact with fewer micro-batches than processes": (
        ["--config_file", "configs/accelerate/cpu_multi.yaml", "--exact", "true"],
        "exact: 32 samples in micro-batches of 32 cannot be dealt to 2 processes; give a "
        "micro_batch_size of 16 or 8 or 4, or start at most 1",
    ),
    "exact with a micro-batch that does not divide the step": (
        ["--exact", "true", "--micro_batch_size", "5"],
        "exact: 32 samples in micro-batches of 5 cannot be dealt to 1 process; give a "
        "micro_batch_size of 4 or 2 or 8",
    ),
    "exact with a micro-batch above the step": (
        ["--exact", "true", "--micro_batch_size", "40"],
        "exact: 32 samples in micro-batches of 40 cannot be dealt to 1 process; give a "
        "micro_batch_size of 32 or 16 or 8",
    ),
    "exact with compile": (
        ["--exact", "true", "--compile", "true", "--micro_batch_size", "8"],
        "exact does not go with compile",
    ),
    "a share too many": (
        ["--config_file", "configs/accelerate/cpu_multi.yaml", "--device_shares", "[3, 2, 1]"],
        "device_shares has 3 numbers, and there are 2 processes; give one number for each, or auto",
    ),
    "a share of zero": (["--device_shares", "[0]"], "device_shares"),
    "a word for shares": (["--device_shares", "equl"], "device_shares"),
    "missing YAML": (["--config_file", "none.yaml"], "none.yaml: No such file"),
    "YAML that is no YAML": (hardware("a: [\n"), "hardware.yaml: "),
    "YAML that is empty": (hardware(""), "expected lines of the form 'key: value'"),
    "YAML with an unknown key": (
        hardware(NO_GPU + "num_process: 2\n"),
        "no key num_process; did you mean num_processes?",
    ),
    "YAML with a duplicate key": (hardware(NO_GPU + "num_processes: 2\n"), "is given twice"),
    "YAML with a key that is a number": (hardware(NO_GPU + "1: 2\n"), "there is no key 1"),
    "YAML with a key that is a list": (hardware(NO_GPU + "? [1]\n: 2\n"), "a key must be a name"),
    "YAML with aliases": (hardware("a: [&a [1], *a]\n"), "line 1: & and * (anchors"),
    "YAML with deep nesting": (hardware("[" * 5000), "nested deeper than 20"),
    "YAML with a tag": (hardware(NO_GPU + "debug: !!bool true\n"), "the tag "),
    "YAML with a date that is none": (hardware(NO_GPU + "debug: 2024-13-45\n"), "month must be"),
    "YAML with a number of 10,000 digits": (
        hardware(NO_GPU + f"machine_rank: {'9' * 10_000}\n"),
        "invalid number or date",
    ),
    "YAML with a number for text": (
        hardware(NO_GPU + "main_process_ip: 10\n"),
        "main_process_ip is 10; give text, in quotes",
    ),
    **{
        f"gpu_ids {ids}": (
            hardware(f"{NO_GPU}gpu_ids: {ids}\n"),
            f'gpu_ids is {shown}; give all, or numbers in quotes, such as "{example}"',
        )
        for ids, shown, example in [
            ("1", "1", "1"),
            ("0", "0", "0"),
            ("[0, 1]", "[0, 1]", "0,1"),
            ("''", "", "0,1"),
            ("All", "All", "0,1"),
            ("0;1", "0;1", "0,1"),
            ("0,", "0,", "0,1"),
        ]
    },
    "gpu_ids that accelerate finds too few": (
        hardware("distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: '-1'\n"),
        "gpu_ids is -1; name at least 2 GPUs",
    ),
    "gpu_ids for some of the processes": (
        hardware("distributed_type: MULTI_GPU\nnum_processes: 3\ngpu_ids: '0, 1'\n"),
        "gpu_ids is 0, 1; name at least 3 GPUs",
    ),
    **{
        f"YAML with {key}: {value}": (
            hardware(f"distributed_type: 'NO'\n{key}: {value}\n"),
            "; give true or false",
        )
        for key, value in [
            ("use_cpu", "'no'"),
            ("use_cpu", "1"),
            ("use_cpu", "null"),
            ("debug", "'no'"),
            ("same_network", "'false'"),
            ("enable_cpu_affinity", "[true]"),
        ]
    },
    **{
        f"YAML with port {port}": (
            hardware(NO_GPU + f"main_process_port: {port}\n"),
            f"main_process_port is {port}; 0 picks a free one",
        )
        for port in (-1, 65536)
    },
    "YAML that compiles": (
        hardware(NO_GPU + "use_cpu: true\ndynamo_config: {dynamo_backend: 1}\n"),
        "dynamo_config: remove it; the recipe's field compile decides",
    ),
    "several machines without an address": (
        hardware("distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 2\n"),
        "num_machines is 2; give main_process_ip, the address of machine 0",
    ),
    "YAML with text for a mapping": (hardware(NO_GPU + "fsdp_config: x\n"), "give a mapping"),
    "YAML with a word for a port": (hardware(NO_GPU + "main_process_port: x\n"), "whole number"),
    "YAML for the cloud": (
        hardware(NO_GPU + "compute_environment: AMAZON_SAGEMAKER\n"),
        "compute_environment must be LOCAL_MACHINE",
    ),
    "YAML without num_processes": (
        hardware("distributed_type: MULTI_GPU\ngpu_ids: '-1,-1'\n"),
        "num_processes is missing; give a number",
    ),
    "machines that cannot share the processes": (
        hardware("distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2\n"),
        "num_processes is 3; give a number that num_machines, 2, divides",
    ),
    "YAML without an end": (["--config_file", "/dev/zero"], "this is a pipe or a device"),
    **{
        f"launcher's {name} {number!r}": (
            with_env(["--config_file", CPU], **{f"LAUNCH_{name}": number}),
            f"is {number}; give a whole number from 1",
        )
        for name, number in [
            ("PROCESSES", "0"),
            ("PROCESSES", "abc"),
            ("PROCESSES", "-1"),
            ("PROCESSES", "1e3"),
            ("MACHINES", "0"),
            ("MACHINES", "\u0663"),
        ]
    },
    "YAML without a type": (hardware("num_processes: 1\n"), "distributed_type"),
    "YAML with an unknown type": (hardware("distributed_type: DDP\n"), "DDP"),
    "YAML with NO for a type": (hardware("distributed_type: NO\n"), "write 'NO' in quotes"),
    "YAML with a word for a number": (
        hardware("distributed_type: 'NO'\nnum_processes: two\n"),
        "num_processes is 'two'; give a whole number",
    ),
    "YAML with a number in quotes": (
        hardware("distributed_type: 'NO'\nnum_processes: '2'\n"),
        "num_processes is '2'; give a whole number",
    ),
    "YAML with an unknown precision": (
        hardware(NO_GPU + "use_cpu: true\nmixed_precision: fp15\n"),
        "mixed_precision is fp15; give one of no,",
    ),
    **{
        f"YAML with precision {word}": (
            hardware(NO_GPU + f"use_cpu: true\nmixed_precision: {word}\n"),
            f"mixed_precision is {shown}; give one of no,",
        )
        for word, shown in [("no", "False"), ("''", ""), ("8", "8"), ("[bf16]", "['bf16']")]
    },
    "fp8 that nothing provides": (
        hardware(NO_GPU + "use_cpu: true\nmixed_precision: fp8\n"),
        "mixed_precision fp8 needs torchao (pip install torchao); install it, or use bf16",
    ),
    "fp16 on a CPU": (
        hardware(NO_GPU + "use_cpu: true\nmixed_precision: fp16\n"),
        "fp16 needs a GPU; write 'no'",
    ),
    "type that starts only one process": (
        hardware("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n"),
        "distributed_type MULTI_CPU starts only one process",
    ),
    "several processes and use_cpu": (
        hardware("distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n"),
        "use_cpu does not go with distributed_type MULTI_GPU",
    ),
    "sharding and use_cpu": (
        hardware("distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\n"),
        "use_cpu does not go with distributed_type FSDP",
    ),
    "more GPUs than there are": (
        hardware("distributed_type: MULTI_GPU\nnum_processes: 99\n"),
        "it needs 99 GPUs on this machine, which has ",
    ),
    "a GPU, with a CPU build of torch": (
        ["--config_file", "configs/accelerate/single_gpu.yaml"],
        f"it needs 1 GPU on this machine, which has 0; torch {torch.__version__} is built without "
        "CUDA and ROCm: use cpu.yaml, or, where there is a GPU, run make setup again"
        if not torch.version.cuda
        else "it needs 1 GPU on this machine, which has 0; use cpu.yaml",
    ),
}


def parts(case):
    """Flags, files and environment of a case, some of which may be left out."""
    return (*case, {}, {})[:3] if isinstance(case, tuple) else (case, {}, {})


@pytest.fixture(scope="module")
def answer(project, tmp_path_factory):
    """Exit codes, stdouts and stderrs of a case: checked and, without a YAML, trained."""
    path = tmp_path_factory.mktemp("bad") / "project"
    shutil.copytree(project.path, path)
    with forks(type(project)(path)) as fork:

        def run(name):
            (flags, files, env), i = parts(CASES[name][0]), list(CASES).index(name)
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
            ways = [["--check"]] if "--config_file" in flags else [["--check"], []]
            return [fork({**each, "flags": [*flags, *way]}) for way in ways]

        yield run


def test_there_are_enough_cases():
    assert len(CASES) >= 140


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line(answer, name):
    """With --check and without; the check prints nothing else, and neither shows a traceback."""
    for code, printed, errors in answer(name):
        assert code == 2, printed + errors
        assert errors.startswith("train.py: ") and errors.count("\n") == 1, errors
        assert CASES[name][1] in errors and len(errors) < 500
        printed = [line for line in printed.splitlines() if not line.startswith("Prepar")]
        assert printed == []


# What a module is named by, wherever a recipe or a flag can name anything.
IMPORTS = {
    "class_path": recipe("task: {class_path: spy.Spy}\n"),
    "class_path with init_args": recipe("task:\n  class_path: spy.Spy\n  init_args: {data: a}\n"),
    "class alone": recipe("task: spy.Spy\n"),
    "dotted class_path": recipe("task.class_path: spy.Spy\n"),
    "class_path of all": recipe("class_path: spy.Spy\ninit_args: {}\n"),
    "class_path in text": recipe("task:\n  data: {class_path: spy.Spy}\n"),
    "class_path for a number": recipe("seed: {class_path: spy.Spy}\n"),
    "class_path for truth": recipe("compile: {class_path: spy.Spy}\n"),
    "class_path for a choice": recipe("tracker: [{class_path: spy.Spy}]\n"),
    "tag": recipe("task: !!python/object/apply:spy.Spy []\n"),
    "tag in the hardware": hardware("debug: !!python/object/apply:spy.Spy []\n"),
    "flag": ["--task", "spy.Spy"],
    "flag with JSON": ["--task", '{"class_path": "spy.Spy"}'],
    "flag of class_path": ["--task.class_path", "spy.Spy"],
    "flag of init_args": ["--task", "spy.Spy", "--task.init_args.data", "a"],
    "flag of help": ["--task.help", "spy.Spy"],
    "flag of help with =": ["--task.help=spy.Spy"],
    "flag for a number": ["--seed", '{"class_path": "spy.Spy"}'],
    "flag for a choice": ["--lr_schedule", "spy.Spy"],
}


@pytest.mark.slow
def test_nothing_that_is_given_is_imported(tiny, tmp_path):
    """A module that leaves a file behind leaves none, checked or trained."""
    left = tmp_path / "left"
    names, cases = [], []
    for name, case in IMPORTS.items():
        flags, files, _ = parts(case)
        before = "import os, sys\nfrom pathlib import Path\n"
        before += f"os.chdir({str(tmp_path)!r}); sys.path.insert(0, {str(tmp_path)!r})\n"
        before += "".join(f"Path({n!r}).write_text({text!r})\n" for n, text in files.items())
        flags = flags if files else [*flags, "--config", "empty.yaml"]
        flags = [*flags, "--config", "empty.yaml"] if "--config_file" in flags else flags
        for way in ([], ["--check"]):
            names.append(name)
            cases.append({"flags": [*flags, "--output_dir", "run", *way], "before": before})
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "spy.py").write_text(f"open({str(left)!r}, 'w')\nclass Spy:\n    pass\n")
    for name, (code, printed, errors) in zip(names, tiny.forked(cases), strict=True):
        assert code == 2 and printed == "" and errors.count("\n") == 1, (name, printed, errors)
    assert not left.exists() and not (tmp_path / "run").exists()


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
    ("hidden", f"['{BOMB}']", "expected a whole number; got '[&a"),
    ("extra", BOMB, "& and * (anchors"),
    ("weights", "{a: 1, a: 2}", "a is given twice"),
    ("weights", "{a: {b: 1}}", "expected a number; got a mapping"),
    ("hidden", "[1, 2.5]", "expected a whole number; got '2.5'"),
    ("hidden", "[" * 5000, "nested deeper than 20"),
    ("hidden", "3", "expected a list; got '3'"),
    ("scale", "[1]", "expected a list of 2; got a list"),
    ("depth", "deep", "expected a whole number or one of 'auto'; got 'deep'"),
    ("extra", "!!python/name:os.system", "the tag "),
    ("kind", "os.system", "can only be set in the code; got 'os.system'"),
]


@pytest.mark.parametrize("name, text, said", REFUSED)
def test_fields_of_other_types_with_wrong_values(tmp_path, name, text, said):
    for arguments in ([f"own.{name}: {text}"], ["", f"--own.{name}", text]):
        with pytest.raises(ValueError) as error:
            parsed(tmp_path, *arguments)
        assert said in str(error.value) and len(str(error.value)) < 500


def test_a_number_for_a_list_is_answered_with_the_list_of_it(tmp_path):
    """As it is written on a command line, in quotes, and in a recipe."""
    for arguments, said in ((["", "--own.hidden", "3"], '"[3]"'), (["own.hidden: 3"], "[3]")):
        with pytest.raises(ValueError) as error:
            parsed(tmp_path, *arguments)
        assert str(error.value).endswith(f"own.hidden: expected a list; got '3'; write {said}")


def test_a_pipe_is_no_recipe(tmp_path):
    """It may never begin."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="this is a pipe or a device; give a file"):
        config.parse_config(Outer, ["--config", str(tmp_path / "pipe")], "")
    with pytest.raises(ValueError, match="this is a pipe or a device; give a file"):
        accelerate_yaml.read_hardware(tmp_path / "pipe")


# ---- GPUs, as torch would report them -----------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch, tmp_path, capsys):
    """A function: what the check returns or raises for a YAML on a machine with so many GPUs."""

    def check(text, number=1, bf16=True, driver=None, **env):
        def start_cuda():
            if driver:
                raise RuntimeError(driver)

        def has_bf16(including_emulation=True):
            return including_emulation or bf16

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
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


MANY = "distributed_type: MULTI_GPU\nnum_processes: 2\n"
SHIPPED = {
    path.stem: path.read_text() for path in (ROOT / SOURCE / "configs/accelerate").glob("*.yaml")
}  # tests/test_hardware.py has those that shard, and those of several machines


def test_a_gpu_that_emulates_bf16_is_named_with_the_yaml_for_it(gpus, capsys):
    for name, other in (("single_gpu", "single"), ("multi_gpu", "multi")):
        processes = gpus(SHIPPED[f"{name}_bf16"], number=2, bf16=False)
        assert processes == (1 if other == "single" else 2)
        line = f"Tesla T4 only emulates bf16, slowly; faster is {other}_gpu_fp16.yaml\n"
        assert capsys.readouterr().out == line
    for name, bf16 in (("single_gpu_bf16", True), ("single_gpu_fp16", False), ("cpu", False)):
        assert gpus(SHIPPED[name], bf16=bf16) == 1
        assert capsys.readouterr().out == ""


def test_a_driver_that_is_too_old_is_one_line(gpus):
    said = gpus(SHIPPED["single_gpu"], driver="The NVIDIA driver on your system\nis too old")
    version = torch.__version__
    assert (
        said == f"torch {version} cannot use the GPU: The NVIDIA driver on your system is too old"
    )
    assert gpus(SHIPPED["cpu"], driver="too old") == 1
    assert gpus(SHIPPED["multi_gpu"], number=0, driver="no NVIDIA driver") == (
        "it needs 2 GPUs on this machine, which has 0; use cpu.yaml (torch "
        f"{version}: no NVIDIA driver)"
    )


def test_gpu_ids_are_gpus_of_this_machine(gpus):
    assert gpus(NO_GPU + "gpu_ids: '4'\n", number=4) == (
        "gpu_ids is 4; the GPUs of this machine are 0 to 3"
    )
    assert gpus(NO_GPU + "gpu_ids: '4'\n", number=4, CUDA_VISIBLE_DEVICES="4,5,6,7") == 1
    assert gpus(MANY, number=1) == (
        "it needs 2 GPUs on this machine, which has 1; set num_processes to 1"
    )


@pytest.mark.parametrize(
    "text",
    [
        *(NO_GPU + f"gpu_ids: {ids}\n" for ids in ("all", "'0'", "'1'", "null", "GPU-8c8e")),
        *(MANY + f"gpu_ids: {ids}\n" for ids in ("all", "'0,1'", "'0, 1'", "'-1,-1'")),
        MANY + "gpu_ids: MIG-8c8e,MIG-8c8f\nmain_process_port: 0\nsame_network: false\n",
        MANY + "main_process_ip: 10.0.0.1\nmain_process_port: 65535\nnum_machines: 2\n",
        NO_GPU + "use_cpu: true\ndebug: true\ndowncast_bf16: 'no'\nmixed_precision: null\n",
        *(
            SHIPPED[name]
            for name in SHIPPED
            if name.startswith(("cpu", "single", "multi_gpu", "mps"))
        ),
    ],
)
def test_what_passes_the_check_passes_the_launcher(gpus, text, tmp_path):
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    number = 2 if "MULTI_GPU" in text else 1
    assert gpus(text, number=2) == number
    path = str(tmp_path / "hardware.yaml")
    words = ["--config_file", path, "--num_cpu_threads_per_process", "1", "train.py"]
    args = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))[0]
    env = (
        prepare_multi_gpu_env(args) if args.multi_gpu else prepare_simple_launcher_cmd_env(args)[1]
    )
    assert args.multi_gpu == (number == 2) and all(isinstance(value, str) for value in env.values())


@dataclass
class Schedule:
    lr_schedule: str = "cosine"
    decay_fraction: float = 0.2
    check: bool = field(default=False, metadata={"saved": False})


WSD, COSINE = (
    "lr_schedule: wsd\ndecay_fraction: 0.5\n",
    "lr_schedule: cosine\ndecay_fraction: 0.5\n",
)


@pytest.mark.parametrize(
    "text, flags, fine",
    [
        (WSD, [], True),
        (WSD, ["--lr_schedule", "linear"], True),  # the recipe can stay as it is
        (COSINE, [], True),  # it names all fields, as the config.yaml of a run does
        (COSINE, ["--decay_fraction", "0.1"], False),
        (COSINE, ["--lr_schedule", "wsd", "--decay_fraction", "0.1"], True),
        ("decay_fraction: 0.5\n", [], False),
        ("decay_fraction: 0.5\n", ["--lr_schedule", "wsd"], True),
        ("", ["--decay_fraction", "0.2"], False),
    ],
)
def test_fields_that_nothing_reads(tmp_path, text, flags, fine):
    (tmp_path / "mine.yaml").write_text(text)
    with nullcontext() if fine else pytest.raises(ValueError, match="decay_fraction is given, but"):
        config.parse_config(Schedule, ["--config", str(tmp_path / "mine.yaml"), *flags], "")


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
    assert "starts from the beginning; 400 steps" in checked.stdout.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
def test_data_that_may_not_be_read(project, tmp_path):
    (tmp_path / "data.txt").write_text(WORDS)
    (tmp_path / "data.txt").chmod(0)
    flags = ["--task.data", tmp_path / "data.txt", "--output_dir", tmp_path / "run"]
    result = project.run("python", "train.py", *flags, check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "Permission denied" in result.stderr


@pytest.mark.slow
def test_checkpoints_in_the_way(tiny, tmp_path):
    """resume: never over checkpoints, none that is valid, and a manifest of something else."""
    output = tmp_path / "run"
    tiny.train(1, "--output_dir", output, "--max_steps", 4)
    manifest = output / "checkpoints" / "step-00000004" / "manifest.json"
    whole = manifest.read_text()
    base = ["--output_dir", output, "--max_steps", 4]

    def saved():  # the lock says who was there last
        files = [p for p in output.rglob("*") if p.is_file() and p.name != "lock"]
        return {p: p.read_bytes() for p in files}

    def refused(said, text, *flags):
        manifest.write_text(text)
        before = saved()
        for more in ([], ["--check"]):
            ((code, printed, errors),) = tiny.forked([{"flags": [*base, *flags, *more]}])
            assert code == 2 and errors.count("\n") == 1 and said in errors and printed == ""
        assert before == saved()

    refused("holds checkpoints and resume is never", whole, "--resume", "never")
    refused("no checkpoint in ", whole[:-20])
    refused("no checkpoint in ", json.dumps({**json.loads(whole), "config": None}))
    manifest.write_text(whole)
    assert "is finished" in tiny.train(1, *base)


def test_world_size_that_disagrees_with_accelerate(tiny, tmp_path):
    """As when each of two processes believes that it is alone."""
    case = {
        "flags": ["--output_dir", tmp_path / "run"],
        "before": "import os; from samestep.processes import network, ranks; ranks.PROCESSES = 2\n"
        "os.environ['RANK'] = '0'; network.try_cpus = lambda *_: (None, [])",
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
        (["--config_file", "configs/accelerate/cpu.yaml", "--num_processes", "3", "train.py"],
         "starts only one process"),
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
        ([*address, "--machine_rank", "2"], 2, "machine_rank is 2; give the number of this"),
        (address, 0, ""),
    ]:  # fmt: skip
        words = [*machines, *more, "train.py", "--check", "--output_dir", "runs/machines"]
        result = project.run("python", "-m", "samestep", "launch", *words, check=False)
        assert result.returncode == code and said in result.stderr, result.stderr
        assert result.stderr.count("\n") == bool(code)
    result = project.run("python", "-m", "samestep", "launch", "--config_file", CPU, check=False)
    assert result.returncode == 2 and "name a program, such as train.py" in result.stderr


def test_the_makefile_calls_the_launcher(project):
    assert "-m samestep launch --config_file" in (ROOT / SOURCE / "Makefile").read_text()


LEFT_OVER = [  # program, environment, words of the line
    ("train.py", {"WORLD_SIZE": "4"}, "WORLD_SIZE is '4' and RANK is not set"),
    ("prepare", {"RANK": "1"}, "RANK is '1' and WORLD_SIZE is not set, which no launcher does"),
    ("hardware", {"WORLD_SIZE": "2", "RANK": "1"}, "and MASTER_ADDR is not set, which no"),
    ("launch", {"LOCAL_RANK": "3"}, "which no launcher does: unset LOCAL_RANK"),
    ("train.py", {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which no launcher does: unset"),
    *((name, {"PYTHONOPTIMIZE": "2"}, "PYTHONOPTIMIZE=2 and -OO remove") for name in (
        "train.py", "prepare", "predict", "plot", "launch", "hardware",
    )),
]  # fmt: skip


@pytest.mark.parametrize("program, env, said", LEFT_OVER)
def test_an_environment_that_no_program_can_work_in_is_one_line(project, program, env, said):
    words = ["train.py"] if program == "train.py" else ["-m", "samestep", program]
    program = program if program == "train.py" else f"samestep {program}"
    result = project.run("python", *words, "-B", check=False, **env)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"{program}: ") and said in result.stderr


def test_an_environment_of_one_process_is_no_mistake(project):
    project.run("python", "train.py", "--help", WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")


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


def test_a_launch_without_a_program_is_wrong_input(tiny):
    result = tiny.run("python", "-m", "samestep", "launch", "--num_processes", 2, check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("samestep launch: name a program, such as train.py")
