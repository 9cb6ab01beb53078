"""Any launcher: what samestep env prints for a YAML, and a process that no launcher has started."""

import os
import shutil
import subprocess
import sys

import pytest
import yaml

from conftest import ROOT, SOURCE, THREADS, lines, status
from refusals import cases, check_ended, refused, table
from same import check_same
from samestep.base import launching
from samestep.launch import launched
from samestep.processes import mesh
from samestep.programs import env
from test_hardware import SHIPPED, launched_env
from test_hardware import machine as machine  # the fixture
from test_sharding import ON_CPU

FOLDER = ROOT / SOURCE / "configs" / "accelerate"
NOT_OURS = {"MASTER_ADDR", "MASTER_PORT", "_", "PWD", "OLDPWD", "SHLVL"}


@pytest.fixture
def restored(monkeypatch):
    """samestep env replaces the environment of its process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def environment(lines, **before):
    """The environment after a shell has read these lines."""
    before = {"PATH": os.environ["PATH"], **before}
    command = ["sh", "-c", f"eval \"$1\" && exec {sys.executable} -c '{SHOW}'", "sh", lines]
    ended = subprocess.run(command, env=before, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return yaml.safe_load(ended.stdout)


SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.mark.parametrize("name", SHIPPED)
def test_the_lines_are_what_accelerate_launch_sets(machine, restored, name):
    path = FOLDER / f"{name}.yaml"
    expected = launched_env(path)
    options = ["--config_file", str(path), "--num_cpu_threads_per_process", "1"]
    found = environment("\n".join(env.shell_lines(options)), **os.environ)
    expected = {n: text for n, text in expected.items() if n not in NOT_OURS}
    if "deepspeed" in name:  # launched_env leaves it empty
        expected["ACCELERATE_CONFIG_DS_FIELDS"] = found["ACCELERATE_CONFIG_DS_FIELDS"]
    assert {n: found.get(n) for n in expected} == expected
    assert {*found} - {*expected} <= {launching.EXPORTED, "LC_CTYPE", *NOT_OURS}


def lines_of(monkeypatch, capsys, *words, **before):
    """What samestep env prints in an environment with these variables more; its exit code."""
    for name, text in before.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(sys, "argv", ["samestep env", *map(str, words)])
    code = env.main()
    return code, *capsys.readouterr()


def test_a_value_is_quoted_for_the_shell(restored):
    text = "it's $HOME `id` \\ \" \n é;&| *"
    words = ["--config_file", str(FOLDER / "fsdp2.yaml")]
    words += [f"--fsdp_transformer_layer_cls_to_wrap={text}"]
    assert environment("\n".join(env.shell_lines(words)))["FSDP_TRANSFORMER_CLS_TO_WRAP"] == text


def test_another_yaml_leaves_nothing_behind(monkeypatch, capsys, restored):
    """FSDP, hidden GPUs and threads of the first are gone, and what was there before is back."""
    mine = {"CUDA_VISIBLE_DEVICES": "3", "FSDP_VERSION": "1", "ACCELERATE_A.B": "odd", "A": "it's"}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code, first, _ = lines_of(monkeypatch, capsys, FOLDER / "cpu_multi.yaml", **mine)
    after = environment(first, **mine)
    assert code == 0 and "FSDP_VERSION" not in after and after["A"] == "it's"
    assert after["CUDA_VISIBLE_DEVICES"] == "-1,-1" and after["OMP_NUM_THREADS"] == "1"
    os.environ.pop("OMP_NUM_THREADS", None)
    _, second, _ = lines_of(monkeypatch, capsys, FOLDER / "single_gpu_bf16.yaml", **after)
    last = environment(second, **after)
    assert last["CUDA_VISIBLE_DEVICES"] == "3" and last["ACCELERATE_MIXED_PRECISION"] == "bf16"
    # What samestep launch does in this shell.
    clean = launching.without_yaml(last)
    assert clean.get("CUDA_VISIBLE_DEVICES") == "3" and "OMP_NUM_THREADS" not in clean
    assert not [name for name in clean if name.startswith(("SAMESTEP_", *launching.PREFIXES))]


def test_a_yaml_of_accelerate_config(tmp_path, monkeypatch, capsys, restored):
    """Rank, address and port are the launcher's; what the recipe decides is told by train.py."""
    path = tmp_path / "a yaml's $name.yaml"
    shutil.copy(ROOT / "tests" / "accelerate_config.yaml", path)
    mine = {"MASTER_ADDR": "mine", "PYTHONPATH": "a b"}
    code, printed, errors = lines_of(monkeypatch, capsys, path, **mine)
    found = environment(printed, **mine)
    assert (code, errors) == (0, "") and found.items() >= mine.items()
    assert found["CUDA_VISIBLE_DEVICES"] == "0,1" and found["ACCELERATE_DEBUG_MODE"] == "true"
    assert not {"MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"} & {*found}
    for name, text in found.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match="ACCELERATE_DYNAMO_BACKEND is INDUCTOR: leave it out of"):
        launched.check_launched(mesh.Layout())
    with pytest.raises(ValueError, match="start train.py by torchrun or samestep launch, or call"):
        launched.check_words(["accelerate", "launch", "train.py"])
    # The same lines again.
    assert environment(lines_of(monkeypatch, capsys, path)[1], **found) == found


@pytest.mark.parametrize("text, said", table("env"))
def test_a_wrong_yaml_is_one_line_to_eval(tmp_path, monkeypatch, capsys, restored, text, said):
    path = tmp_path / "hardware.yaml"
    path.write_text(text)
    code, printed, errors = lines_of(monkeypatch, capsys, path)
    check_ended([code, "", errors], said, f"samestep env: {path}: ")
    command = ["sh", "-c", 'set -e; eval "$1"; echo not reached', "sh", printed]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    # Without set -e the next command says it again.
    after = environment(printed.replace("\nfalse", ""))
    monkeypatch.setenv(launching.FAILED, after[launching.FAILED])
    with pytest.raises(ValueError, match="samestep env failed in this shell: .*; call it again"):
        launched.check_started()


@pytest.mark.parametrize("words", ["", "none.yaml", f"{FOLDER}/cpu.yaml --num_procesess 2"])
def test_wrong_words_are_one_line(monkeypatch, capsys, restored, words):
    said = {"": "samestep env: name a YAML, such as configs/accelerate/cpu.yaml; see --help"}
    said["none.yaml"] = "samestep env: none.yaml: No such file or directory"
    code, _, errors = lines_of(monkeypatch, capsys, *words.split())
    check_ended([code, "", errors], said.get(words, "--num_procesess"))


# ---- A process that no launcher has started ------------------------------------------------------

STARTED = cases("environments")["started"]
SBATCH, ELASTIC = (STARTED[name]["env"] for name in ("srun", "torchelastic"))
MASTER = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize("name", STARTED)
def test_a_process_that_no_launcher_has_started(monkeypatch, name):
    variables, said = STARTED[name].values()
    for name in (*launched.OF_SEVERAL, "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    if not said:
        return launched.check_started()
    with refused(said) as error:
        launched.check_started()
    assert "torchrun, accelerate launch or samestep launch" in str(error.value)


def test_it_ends_in_one_line_and_a_check_is_made(tiny, output):
    flags = ["--output_dir", output, "--max_steps", 2]
    several = {"PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "2"}
    said = "train.py: WORLD_SIZE is 2, and no launcher has set RANK: start "
    check_ended(*tiny.ends(1, *flags, env=several), begin=said)
    assert not output.exists()
    tiny.train(1, *flags, "--check", env=several)
    tiny.train(1, *flags, env=SBATCH | MASTER | ELASTIC)
    assert status(output)["state"] == "finished"


ITSELF = """
import os, sys
if __name__ == "__main__":
    found = map(os.environ.get, SHOWN)
    print(os.getpid(), sys.argv, sys.path[0] == os.path.realpath("tools"), *found)
    sys.exit(7)
"""
SHOWN = ["ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS"]


def test_a_single_process_becomes_the_program(tmp_path):
    """By exec: torch reads the number of threads when it is imported."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "program.py").write_text(f"SHOWN = {SHOWN}\n{ITSELF}")
    words = ["--config_file", str(FOLDER / "cpu.yaml"), "--mixed_precision", "bf16"]
    words += ["--num_cpu_threads_per_process", "2", "tools/program.py", "--flag", "a b"]
    run = subprocess.Popen(
        [sys.executable, "-m", "samestep", "launch", *words],
        cwd=tmp_path,
        env=os.environ | THREADS,
        stdout=subprocess.PIPE,
        text=True,
    )
    printed = run.communicate(timeout=100)[0]
    argv = ["tools/program.py", "--flag", "a b"]
    assert (run.returncode, printed) == (7, f"{run.pid} {argv} True bf16 True 2\n")


# ---- Two launchers -------------------------------------------------------------------------------

RUN = 'set -e; eval "$(python -m samestep env "$@")"; eval "exec $TORCHRUN"'


SMALL = {"micro_batch_size": 1, "max_steps": 3}


@pytest.mark.slow
@pytest.mark.parametrize("hardware, processes", [("cpu_multi", 2), ("fsdp2", 2)])
def test_a_yaml_means_the_same_under_torchrun(small, tmp_path, hardware, processes):
    """Losses, bytes and hardware.yaml; exact, so that no sum depends on when a message came."""
    path = f"configs/accelerate/{hardware}.yaml"
    program = ["train.py"] if hardware == "cpu_multi" else [str(ON_CPU), "train.py"]
    flags = ["--exact", "true", "--config", "configs/train/default.yaml", "--output_dir"]
    options = ["--mixed_precision", "no"]
    launch = ["accelerate", "launch", "--config_file", path, *options]
    small.run(*launch, "--num_processes", processes, *program, *flags, tmp_path / "accelerate")
    words = " ".join([*program, *flags, str(tmp_path / "torchrun")])
    torchrun = f"torchrun --nproc-per-node {processes} {words}"
    small.run("sh", "-c", RUN, "sh", path, *options, TORCHRUN=torchrun)
    outputs = [tmp_path / "accelerate", tmp_path / "torchrun"]
    check_same(*outputs)
    assert len(lines(outputs[0], "loss")) == 3
    first, second = (yaml.safe_load((each / "hardware.yaml").read_text()) for each in outputs)
    assert first == second and first["processes"] == processes
    assert first["sharding"] == ("FSDP2" if hardware == "fsdp2" else "none")
