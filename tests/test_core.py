"""The core in a script of one's own: what stands apart from train.py and task.py."""

import ast
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

import samestep
from conftest import ROOT, SOURCE, BakedProject, digest, edit, lines, newest, preloaded, status
from samestep.base import run_folder
from samestep.base.errors import UserError
from samestep.processes import stop
from samestep.training import script as own_script

MISTAKES_SCRIPT, MASKED = (ROOT / "tests" / f"own_{name}.py" for name in ("mistakes", "masked"))
EXAMPLE = ROOT / "examples" / "own_script.py"
CPU_MULTI = ROOT / SOURCE / "configs" / "accelerate" / "cpu_multi.yaml"

IMPORTED = """
import sys
from samestep import Training
found = {name.split(".")[0] for name in sys.modules} & {"pydantic", "psutil"}
found |= {"accelerate.commands.launch", "samestep.launch"} & {*sys.modules}
print(found or "nothing")
"""


def test_the_core_loads_nothing_of_train_py_and_no_launcher():
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True)
    assert done.stdout == "nothing\n", done.stdout + done.stderr


def test_the_table_of_contents_is_that_of_the_docs_and_each_name_is_there():
    """train.py imports from it alone, and docs/library.md lists it."""
    names = samestep.contents()
    for name in names:
        assert getattr(samestep, name) is not None
    page = (ROOT / SOURCE / "docs" / "library.md").read_text(encoding="utf-8")
    section = page.partition("## Names for you")[2].partition("\n## ")[0]
    table = "".join(line for line in section.splitlines() if line.startswith("| "))
    assert {*re.findall(r"`(\w+)`", table)} == {*names} and 40 < len(names) < 60
    train = ast.parse((ROOT / SOURCE / "train.py").read_text(encoding="utf-8"))
    modules = [node.module for node in train.body if isinstance(node, ast.ImportFrom)]
    assert [each for each in modules if each.startswith("samestep")] == ["samestep"]
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        samestep.Trainer  # noqa: B018


# ---- Mistakes ------------------------------------------------------------------------------------

# Processes, and words of the last line of the first process that fails.
MISTAKES = {
    "mean": (1, "the loss is "),
    "vector": (1, "the loss is a tensor, float32, of shape (2, 1); give"),
    "no_backward": (1, "step.backward was called 0 times for a batch; call it once"),
    "two_backwards": (1, "step.backward was called 2 times for a batch; call it once"),
    "accumulate": (1, "the loop computes a batch outside of `with accelerator.accumulate(model)`"),
    "step_inside": (1, "optimizer.step() in step 1, whose gradient is not added up: first"),
    "zero_grad_inside": (1, "optimizer.zero_grad() in the loop over the batches deletes the"),
    "scheduler_inside": (1, "the loop over the batches changes a scheduler, or what is registered"),
    "two_steps": (1, "optimizer.step() in step 1, whose gradient is used: first"),
    "no_step": (1, "the end of the loop's body in step 1, whose gradient is clipped: first"),
    "no_clip": (1, "optimizer.step() in step 1, whose gradient is added up: first"),
    "break_inside": (1, "step.clip in step 2, whose gradient is not added up: first"),
    "collate_own_generator": (1, "a generator of its own; draw from torch, np.random or random"),
    "scheduler": (1, "no checkpoint would hold StepLR, the learning rate scheduler of this"),
    "late_scheduler": (1, "no checkpoint would hold StepLR, the learning rate scheduler of this"),
    "lbfgs": (1, "LBFGS computes the loss itself, several times a step: give an optimizer whose"),
    "unprepared": (1, "Training takes what accelerator.prepare(model, optimizer) returns"),
    "compiled": (1, "torch.compile has wrapped the model: call model.compile() before"),
    "odd_state": (1, "bag is a object"),
    "settings={'global_batch_size': 2}": (1, "is 8, and in settings 2; give the same"),
    "sum": (1, "the loss is 3.4"),
    "stream": (1, "rows are a IterableDataset; give a dataset with len() and [i]"),
    "count": (1, "rows together, but "),
    "micro_batch_size=0": (1, "micro_batch_size is 0; give a whole number, at least 1"),
    "seed=None": (1, "seed is None; give a whole number, at least 0"),
    "settings=['lr']": (1, "settings are a list; give a dict, as vars(args)"),
    "targets_differ": (2, "the rows are others on another process"),
    "seed_differs": (2, "seed is 0 on process 0 and 1 on process 1; give all of them"),
    "inner_model": (2, "after step 1 process 1 has other weights than process 0"),
    "main_alone": (2, "process 1 has other weights than process 0"),
    "exception": (2, "KeyError: 'a bug of the script'"),
}


def script(processes, *arguments, seconds=120, program=(MISTAKES_SCRIPT,), **env):
    """Exit code, stdout and stderr of each process of a script of one's own."""
    on_cpu = {"ACCELERATE_USE_CPU": "true"}
    envs = [{**each, **on_cpu, **env} for each in BakedProject(ROOT).envs(processes)]
    return preloaded(ROOT, envs, [*program, *arguments], seconds)


def words_of(ended):
    """What the processes of a script that ended well have printed."""
    assert {code for code, *_ in ended} == {0}, ended
    return "".join(printed for _, printed, _ in ended)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of four steps without a mistake on so many processes, and what was printed."""

    @functools.cache
    def run(processes):
        folder = tmp_path_factory.mktemp("plain")
        return folder, words_of(script(processes, "nothing", folder))

    return run


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said_and_nothing_of_it_is_saved(tmp_path, mistake):
    processes, said = MISTAKES[mistake]
    program = MASKED if mistake in ("sum", "stream") else MISTAKES_SCRIPT
    ended = script(processes, mistake, tmp_path, 4, program=[program])
    lines = [line for _, _, errors in ended for line in errors.splitlines() if ": " in line]
    if mistake == "exception":
        assert {code for code, *_ in ended} == {1} and said in "".join(lines), ended
    else:
        assert [code for code, *_ in ended] == [2] * processes, ended
        said = [line for line in lines if line.startswith(program.name) and said in line]
        assert len(said) == processes and "Traceback" not in str(ended), ended
    saved = {path.name for path in tmp_path.glob("checkpoints/*")}
    late = {"exception", "break_inside", "main_alone"}  # after the save of step 2, or before it
    assert saved <= ({"step-00000002"} if mistake in late else set())
    if (tmp_path / "status.json").exists():
        about = status(tmp_path)
        assert (about["state"], about["exit_code"]) == ("failed", ended[0][0])


def test_a_mean_is_refused_in_half_precision_and_where_a_run_resumes(plain, tmp_path):
    ((code, _, errors),) = script(1, "mean", tmp_path, ACCELERATE_MIXED_PRECISION="bf16")
    assert code == 2 and "the loss is " in errors
    shutil.copytree(plain(1)[0], tmp_path / "run")
    ((code, _, errors),) = script(1, "mean", tmp_path / "run", 6)
    assert code == 2 and "the loss is " in errors


# Facts of an Accelerator, whether exact is asked for, and words of the line.
SETUPS = [
    ({"tp_size": 2}, False, "not with tensor or context parallelism"),
    ({"native": {"tp_size": 2, "pp_size": None}}, False, "not with tp_size or pp_size"),
    ({"kind": "FSDP", "mixed_precision": "fp16", "policy": {}}, False, "precision takes bf16"),
    ({"kind": "FSDP", "policy": {"reduce_dtype": None}}, False, "adds gradients in float32"),
    ({"kind": "FSDP", "policy": {"output_dtype": torch.bfloat16}}, False, "precision takes bf16"),
    ({"kind": "FSDP", "mixed_precision": "bf16"}, True, "combined with half precision under FSDP2"),
    ({"kind": "FSDP", "offload": CPUOffloadPolicy()}, True, "be combined with offload"),
    ({"kind": "FSDP", "fused": True}, True, "combined with fused=True under FSDP2 on CPUs"),
    ({"mixed_precision": "fp8"}, True, "exact cannot be combined with fp8"),
    ({"device": torch.device("mps")}, True, "exact cannot be combined with an Apple GPU"),
    ({"compiled": True}, True, "exact cannot be combined with compile"),
]


@pytest.mark.parametrize("facts, exact, said", SETUPS)
def test_a_setup_that_training_cannot_take_is_one_line(monkeypatch, facts, exact, said):
    model, policy, config = torch.nn.Linear(1, 1), None, None
    if facts.get("compiled"):
        model.compile()
    if "policy" in facts:
        given = {"reduce_dtype": torch.float32, "output_dtype": torch.float32, **facts["policy"]}
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **given)
    if "native" in facts:
        model.config = SimpleNamespace(distributed_config=SimpleNamespace(**facts["native"]))
    if "tp_size" in facts:
        config = SimpleNamespace(total_size=2, tp_size=2)
        monkeypatch.setenv("WORLD_SIZE", "2")
    offload = facts.get("offload", OffloadPolicy())
    plugin = SimpleNamespace(mixed_precision_policy=policy, cpu_offload=offload)
    accelerator = SimpleNamespace(
        _models=[model], _optimizers=[0], unwrap_model=lambda module: module, is_fsdp2=True,
        process_index=0,
        distributed_type=SimpleNamespace(value=facts.get("kind", "NO")),
        num_processes=2 if config else 1,
        parallelism_config=config, mixed_precision=facts.get("mixed_precision", "no"),
        device=facts.get("device", torch.device("cpu")), state=SimpleNamespace(fsdp_plugin=plugin),
    )  # fmt: skip
    optimizer = AcceleratedOptimizer.__new__(AcceleratedOptimizer)
    optimizer.optimizer = torch.optim.SGD(model.parameters(), fused=facts.get("fused", False))
    with pytest.raises(UserError, match=re.escape(said)):
        own_script.check_prepared(accelerator, model, optimizer)
        assert exact
        own_script.prepare_exact(accelerator, model, optimizer)


def test_ten_steps_that_are_not_finite_end_the_run(tmp_path):
    for mistake in ("always_nan", "nan_gradient"):
        ((code, _, errors),) = script(1, mistake, tmp_path / mistake, 20)
        assert code == 2 and "was not finite in 10 steps in a row, up to step 10" in errors
    assert newest(tmp_path / "always_nan").name == "step-00000008"


def test_a_save_or_a_restore_that_failed_leaves_nothing(tmp_path):
    for steps in (4, 6):
        ((code, _, errors),) = script(1, "full_disk", tmp_path, steps)
        assert code == 0, errors


# The runs one after another, with the steps until which they train, and the last checkpoint; and
# the run that ends with the same bytes.
IN_PARTS = {
    # Its learning rate of 0 is none that the code has changed.
    "warm_up": ([("warm_up", 2, 2), ("warm_up", 4, 4)], ("warm_up", 4)),
    # Further steps in the same process, after which the lock is taken again.
    "again": ([("again", 4, 6)], ("nothing", 6)),
    "break": ([("break", 4, 2), ("save_and_break", 4, 3), ("nothing", 4, 4)], ("nothing", 4)),
}


@pytest.mark.parametrize("case", IN_PARTS)
def test_a_run_in_parts_ends_as_a_whole_one(tmp_path, case):
    parts, whole = IN_PARTS[case]
    for mistake, steps, saved in parts:
        printed = words_of(script(1, mistake, tmp_path / "run", steps))
        assert newest(tmp_path / "run").name == f"step-{saved:08}"
        stopped = "stopped" if "break" in mistake else "finished"
        assert status(tmp_path / "run")["state"] == stopped
    expected = words_of(script(1, whole[0], tmp_path / "whole", whole[1]))
    assert printed.splitlines()[-1] == expected.splitlines()[-1]
    assert digest(newest(tmp_path / "run")) == digest(newest(tmp_path / "whole"))


# What changes nothing at all, and what only has to work.
SAME = ["no_zero_grad", "weights_differ", "collate_texts", "accumulation"]
HARMLESS = ["collate_draws", "nan", "frozen", "half"]


def test_what_is_harmless_gives_the_weights_of_the_plain_script(plain, tmp_path):
    """zero_grad that is forgotten, weights that process 0 alone has, texts in a batch, and
    gradient_accumulation_steps of the Accelerator change nothing."""
    expected = plain(2)[1].splitlines()[-1]
    for mistake in [*SAME, *HARMLESS]:
        found = words_of(script(2, mistake, tmp_path / mistake)).splitlines()[-1]
        assert found.startswith("weights ") and (found == expected) == (mistake in SAME), mistake


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_evaluate_counts_each_row_once(tmp_path, processes):
    """41 rows, in batches of two. Neither it nor the loop ends the eval mode of a part."""
    found = words_of(script(processes, "evaluate", tmp_path))
    assert re.search(r"^rows 41\.0 errors [\d.]+$", found, re.MULTILINE)


# What is trained, what is started then, and words of the line.
REFUSED = [
    ("kept_rate", "other_rate", "optimizer group 0 lr: 0.01 -> 0.02"),
    ("frozen", "unequal_frozen", "was trained with other frozen weights"),
    ("nothing", "settings", "was made with other settings (lr: 0.01 -> 0.02"),
]


@pytest.mark.parametrize("first, then, said", REFUSED)
def test_another_run_in_the_same_folder_is_refused(tmp_path, first, then, said):
    words_of(script(1, first, tmp_path))
    ((code, _, errors),) = script(1, then, tmp_path, 6)
    assert code == 2 and said in errors


def test_steps_of_another_size_go_on_at_the_next_sample(tmp_path):
    """Two steps of 8 rows, four of 4, one of 8: the rows of five steps of 8, in their order."""
    printed = ""
    for mistake, steps in (("nothing", 2), ("small_steps", 6), ("accept_changes", 7)):
        printed += words_of(script(1, mistake, tmp_path / "run", steps))
    whole = words_of(script(1, "nothing", tmp_path / "whole", 5))
    ids, expected = (re.findall(r"^ids .*$", each, re.MULTILINE) for each in (printed, whole))
    assert len(expected) == 20 and ids == expected
    about = json.loads((newest(tmp_path / "run") / "manifest.json").read_text())
    assert (about["step"], about["samples"]) == (7, 40)
    starts = [(each["step"], each["samples"]) for each in about["history"]]
    assert starts == [(0, 0), (2, 16), (6, 32)]


def test_a_run_whose_checkpoints_are_gone_does_not_start_again_by_itself(plain, tmp_path):
    shutil.copy(plain(1)[0] / "status.json", tmp_path)
    before = (tmp_path / "status.json").read_text()
    ((code, _, errors),) = script(1, "nothing", tmp_path)
    assert code == 2 and "status.json says that step 4 was saved; put its folder back" in errors
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "status.json").read_text() == before


# ---- The same result, however it is launched -----------------------------------------------------

# As accelerate launch sets it for a YAML.
FSDP2 = {
    "ACCELERATE_USE_CPU": "false",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}
POLICY = (
    "accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="
    "torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
    "reduce_dtype=torch.float32, cast_forward_inputs=False))"
)
# 8 of 40 steps of the example, in four micro-batches.
FLAGS = ["--exact", "--max_steps", "8", "--micro_batch_size", "4", "--folder"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The example on one process."""
    folder = tmp_path_factory.mktemp("alone")
    words_of(script(1, *FLAGS, folder, program=[EXAMPLE]))
    return folder, losses_of(folder)


def losses_of(folder):
    """The losses by step."""
    return [line["loss"] for line in lines(folder, "loss")]


SHARDED = [ROOT / "tests" / "sharded_on_cpu.py", EXAMPLE]


@pytest.mark.parametrize(
    "processes, program, env", [(2, [EXAMPLE], {}), (3, [EXAMPLE], {}), (2, SHARDED, FSDP2)]
)
def test_exact_has_one_sha_on_any_number_of_processes(alone, tmp_path, processes, program, env):
    """With FSDP2, too."""
    folder, losses = alone
    words_of(script(processes, *FLAGS, tmp_path, program=program, **env))
    assert len(losses) == 8 and losses_of(tmp_path) == losses
    assert digest(newest(tmp_path)) == digest(newest(folder))


def test_a_run_of_a_script_can_be_asked(tiny, alone, tmp_path):
    """Its rows by number, and a step by its own command, from the beginning and a checkpoint."""
    folder, _ = alone
    command = ["--", "python", EXAMPLE, *FLAGS, tmp_path / "unused"]
    assert "computed twice: equal" in tiny.check_asked(folder, 5, command)
    row = tiny.ask("rows", folder, "--step", 5).splitlines()[1].split()[0]
    assert re.search(r"until step 8: (\d+, )*5\b", tiny.ask("when", folder, row))
    printed = tiny.ask("replay", folder, "--step", 5, "--without", row, *command)
    assert f"and without {row}" in printed and f"row {row}" in printed
    assert "was trained by a script" in tiny.ask("replay", folder, "--step", 5, code=2)
    assert not (tmp_path / "unused").exists()


OTHERWISE = {
    "FSDP2 in half precision takes bf16": {"ACCELERATE_MIXED_PRECISION": "bf16"},
    "FSDP ignores classifier.weight, classifier.bias, and would not reduce their gradients": {
        "FSDP_IGNORED_MODULES": "classifier", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"
    },
}  # fmt: skip


@pytest.mark.parametrize("said", OTHERWISE)
def test_fsdp2_that_would_train_otherwise_is_refused(tmp_path, said):
    """accelerate's own bf16, and weights that each process would train alone."""
    ended = script(2, *FLAGS[1:], tmp_path, program=SHARDED, **FSDP2 | OTHERWISE[said])
    assert [code for code, *_ in ended] == [2, 2] and said in str(ended)


AUTOCAST = """
def under_autocast(accelerator, model, batch):
    with accelerator.autocast():
        return model(**batch).loss


"""


def test_fsdp2_in_bf16_works_as_that_line_says(alone, tmp_path):
    program, loss = tmp_path / "script.py", "model(**batch).loss"
    shutil.copy(EXAMPLE, program)
    edit(program, "= Accelerator()", f"= Accelerator(fsdp_plugin={POLICY})")
    edit(
        program,
        loss,
        "under_autocast(accelerator, model, batch)",
        "def main",
        f"{AUTOCAST}def main",
    )
    program.write_text(f"import accelerate, torch.distributed.fsdp\n{program.read_text()}")
    bf16 = {**FSDP2, "ACCELERATE_MIXED_PRECISION": "bf16"}
    program = [SHARDED[0], program]
    words_of(script(2, *FLAGS[1:], tmp_path, program=program, **bf16))
    half, whole = losses_of(tmp_path), alone[1]
    assert half != whole and half == pytest.approx(whole, abs=0.01)


def test_bf16_has_one_sha_of_its_own(alone, tmp_path):
    for processes in (1, 2):
        flags = [*FLAGS, tmp_path / str(processes)]
        words_of(script(processes, *flags, program=[EXAMPLE], ACCELERATE_MIXED_PRECISION="bf16"))
    one, two = (digest(newest(tmp_path / str(processes))) for processes in (1, 2))
    assert one == two != digest(newest(alone[0]))


def test_what_is_drawn_registered_or_fetched_by_workers_changes_no_byte(tmp_path):
    """A collator that masks, an average of the weights, OneCycleLR: on one process, on two, on
    three with workers, and on two after four steps on one. One batch has no item in its loss."""
    starts = {"one": [(1, 6)], "two": [(2, 6)], "moved": [(1, 4), (2, 6)], "workers": [(3, 6)]}
    found = set()
    for name, parts in starts.items():
        printed = ""
        for processes, steps in parts:
            printed += words_of(script(processes, name, tmp_path / name, steps, program=[MASKED]))
        losses = re.findall(r"^loss .*$", printed, re.MULTILINE)
        assert len(losses) == 6 and "nan" not in printed
        found.add((digest(newest(tmp_path / name)), *losses))
    assert len(found) == 1
    (path,) = newest(tmp_path / "one").glob("*.safetensors")
    assert b"registered.0.module.bert" in path.read_bytes()


# ---- Kills and signals ---------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_run_that_is_killed_resumes_to_the_same_bytes(plain, tmp_path, processes):
    """By SIGKILL to one process; the others end. Without exact and find_unused_parameters."""
    ended = script(processes, "SIGKILL", tmp_path)
    assert ended[-1][0] == -signal.SIGKILL and {code for code, *_ in ended[:-1]} <= {1}
    assert newest(tmp_path).name == "step-00000002"
    assert "continuing from" in words_of(script(processes, "nothing", tmp_path))
    assert digest(newest(tmp_path)) == digest(newest(plain(processes)[0]))


def test_a_signal_saves_the_step_and_exits_with_75(plain, tmp_path):
    """All processes, for a signal to one of them."""
    ended = script(2, "SIGTERM", tmp_path)
    assert [code for code, *_ in ended] == [75, 75]
    assert "stopped after step" in ended[0][1]
    assert status(tmp_path)["state"] == "stopped" and status(tmp_path)["exit_code"] == 75
    assert newest(tmp_path).name in ("step-00000003", "step-00000004")  # all agree a step later
    words_of(script(2, "nothing", tmp_path))
    assert digest(newest(tmp_path)) == digest(newest(plain(2)[0]))
    assert status(tmp_path)["state"] == "finished"


# ---- Launchers -----------------------------------------------------------------------------------


def test_a_variable_that_somebody_exports_is_no_launcher(monkeypatch):
    """Else the run would stop where its shell ends."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert stop.launcher_process() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "id")
    assert stop.launcher_process() == os.getppid()


NOTEBOOK = """
import runpy, sys
import samestep.training.training
from accelerate import notebook_launcher
def train():
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
notebook_launcher(train, num_processes=2)
"""
LAUNCHERS = {
    "accelerate": ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"],
    "accelerate, 2": [*["-m", "accelerate.commands.launch", "--config_file"], CPU_MULTI],
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"],
    "notebook_launcher": ["-c", NOTEBOOK],
}


def start(launcher, *flags):
    """The example by a launcher."""
    env = BakedProject(ROOT).env(ACCELERATE_USE_CPU="true")
    command = [sys.executable, *LAUNCHERS[launcher], EXAMPLE, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*map(str, command)], env=env, start_new_session=True, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launcher_gives_the_same_sha(alone, tmp_path, launcher):
    run = start(launcher, *FLAGS, tmp_path)
    printed = run.communicate(timeout=140)[0]
    assert run.returncode == 0, printed
    assert digest(newest(tmp_path)) == digest(newest(alone[0]))


@pytest.mark.slow
def test_a_launcher_that_is_killed_with_all_its_processes_loses_nothing(tmp_path):
    """Twice, after a checkpoint; whatever step they are in."""
    flags = ["--exact", "--micro_batch_size", "4", "--folder"]
    for after in ("11 ", "21 ", None):
        run = start("torchrun", *flags, tmp_path / "run")
        if after:
            for line in run.stdout:
                if line.startswith(after):
                    break
            os.killpg(run.pid, signal.SIGKILL)
        printed = run.communicate(timeout=140)[0]
    assert run.returncode == 0 and "continuing from" in printed, printed
    words_of(script(1, *flags, tmp_path / "whole", program=[EXAMPLE]))
    assert digest(newest(tmp_path / "run")) == digest(newest(tmp_path / "whole"))


# ---- Scores and the log of a script --------------------------------------------------------------

SCORED = ROOT / "tests" / "own_scored.py"


def scored(processes, folder, moment="", *words, code=0):
    """The script tests/own_scored.py, and what it prints of the best step."""
    ended = script(processes, folder, moment, *words, program=[SCORED])
    assert ended[-1][0] == code, ended
    return re.findall(r"^best .*$", "".join(printed for _, printed, _ in ended), re.MULTILINE)


def logged(folder):
    """The lines of metrics.jsonl that count, without times."""
    names = ("step", "loss", "grad_norm", "lr", "items", "batch_hash", "half", "eval_loss")
    read = run_folder.read_metrics(folder)
    kept = [line for line in read if {"loss", "eval_loss"} & line.keys()]
    return [{name: line[name] for name in names if name in line} for line in kept]


@pytest.mark.parametrize(
    "processes, moment, words",
    [
        (1, "SIGKILL log 6", ()),
        (1, "SIGKILL save 6", ()),
        (1, "SIGKILL evaluate 6", ()),
        (1, "SIGKILL score 6", ("async",)),
        (2, "SIGTERM evaluate 6", ()),
        (1, "SIGTERM score 6", ("async",)),
        (2, "SIGTERM score 9", ()),
        (1, "SIGTERM evaluate 6", ("late",)),
    ],
)
def test_a_script_has_the_same_log_and_best_after_any_end(tmp_path, processes, moment, words):
    """A signal in an evaluation saves the step, and the evaluation is made up for."""
    whole, half = tmp_path / "whole", tmp_path / "half"
    best = scored(processes, whole, "", *words)
    code = 75 if "SIGTERM" in moment else -signal.SIGKILL
    scored(processes, half, moment, *words, code=code)
    saved = 0
    if "SIGTERM" in moment:
        about = status(half)
        assert (about["state"], about["exit_code"]) == ("stopped", 75)
        # A step that was fetched before the signal is computed.
        saved = {"SIGTERM evaluate 6": 6, "SIGTERM score 6": 7}.get(moment, 9) + ("late" in words)
        assert about["saved"] == saved
    assert scored(processes, half, moment, *words) == best != []
    found, expected = logged(half), logged(whole)
    if saved == 7:  # of which it writes a line
        found, expected = ([e for e in log if "eval_loss" in e] for log in (found, expected))
    assert found == expected
    assert [line["half"] for line in logged(whole) if "half" in line] == [1, 2, 3, 4, 4.5]
    assert status(half)["state"] == "finished"


def test_a_disk_without_room_is_said_before_the_first_step(tmp_path):
    full = tmp_path / "script.py"
    patch = "import shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=100)\n"
    full.write_text(patch + SCORED.read_text())
    ((code, printed, errors),) = script(1, tmp_path / "run", "", program=[full])
    assert code == 2 and "a checkpoint needs 0.0 MB" in errors and "free some space" in errors
    assert logged(tmp_path / "run") == []
