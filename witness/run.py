"""Runs tests and tools of others on this library, and prints a line of each: docs/witnesses.md.

python witness/run.py [NAME ...]     all, or those that are named

CS336 and ACCELERATE, in the environment, are clones of repositories that no package has.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
REGRESSION = str(HERE / "regression.py")
PYTHON = [sys.executable]
ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def call(*command, codes=(0,), **more) -> str:
    """Return what a command prints; end with its last lines if it fails."""
    words = [str(word) for word in command]
    given = {"env": ENVIRONMENT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **more}
    ended = subprocess.run(words, text=True, **given)
    if ended.returncode not in codes:
        sys.exit(f"{' '.join(words)}\n{ended.stdout[-4000:]}")
    return ended.stdout


def fit(folder, *flags, processes=1) -> list[str]:
    """Run regression.py; return its last words."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    launcher = launcher if processes > 1 else []
    printed = call(*PYTHON, *launcher, REGRESSION, "--folder", folder, *flags)
    return re.findall(r"^(?:baseline|weights): (.*)$", printed, re.M)


def accelerate_check(work):
    """The training check of accelerate.test_utils.scripts.test_script, its sizes and tolerance."""
    found = []
    for processes in (1, 2, 3):
        for kind in ("plain", "seedable", "plain --bf16"):
            flags = "--sampler", *kind.split(), "--batch", 8 * processes
            folder = work / f"{kind}-{processes}"
            found.append(fit(folder, *flags, processes=processes)[0])
    same = sum(each == "same bits" for each in found)
    yield (
        f"1, 2, 3 processes, two samplers and bf16: {len(found)} of 9 within 1e-6 of its plain "
        f"loop, {same} the same bits"
    )
    flags = "--sampler", "plain", "--batch", 24, "--exact"
    ends = {fit(work / f"exact-{n}", *flags, processes=n)[1] for n in (1, 2, 3)}
    yield f"exact on 1, 2, 3 processes: {'the same bits' if len(ends) == 1 else ends}"


def resume(work, flags, after, prefix="checkpoints/step-", more=()) -> str:
    """Train; train again from the checkpoint of a step; say how the weights differ."""
    whole, again = work / "whole", work / "again"
    first = fit(whole, *flags)[-1]
    shutil.copytree(whole, again)
    for path in again.glob(f"{prefix}*"):
        if int(path.name.split("-")[1]) > after:
            shutil.rmtree(path)
    second = fit(again, *flags, *more)[-1]
    pairs = zip(first.split(), second.split(), strict=True)
    delta = max(abs(float.fromhex(a) - float.fromhex(b)) for a, b in pairs)
    return f"delta {delta:.1g}"


RESUMES = {  # the test of transformers: its settings, and the step that is resumed
    "test_resume_training_with_randomness, every step": (["--noise"], 15),
    "test_resume_training_with_randomness, every epoch": (["--noise", "--save_every", "16"], 16),
    "test_can_resume_training": ([], 5),
    "test_can_resume_training, over an epoch": ([], 15),
    "test_resume_training_with_gradient_accumulation": (["--micro_batch", "4"], 5),
    "test_resume_training_with_frozen_params": (["--frozen", "--batch", "4"], 5),
}


def transformers_resume(work):
    """Resume tests of transformers' Trainer, one of which it skips."""
    for number, (name, (flags, after)) in enumerate(RESUMES.items()):
        yield f"{name}: {resume(work / str(number), flags, after)}"
    found = resume(work / "size", [], 5, more=["--micro_batch", "4"])
    yield f"test_resume_training_with_different_batch_size, micro-batches of 8, then 4: {found}"
    found = resume(work / "trainer", ["--trainer"], 15, "checkpoint-")
    yield f"the skipped test, every step, on HF Trainer itself: {found}"


def chaos(work):
    """The kills of ckpt-chaos: its own trainings by others, and a script on Training."""
    words = [*PYTHON, "-m", "ckpt_chaos"]
    for target, package in (("hf_trainer", "transformers"), ("lightning_trainer", "lightning")):
        bench = "bench", target, "--jobs", 1, "--work", work / target
        found = call(*words, *bench, codes=(0, 1)).strip().split("\n")[-1]
        yield f"bench {target}, {package} {version(package)}: {found}"
    options = ["--max-points", "20", "--ckpt-ignore-size", "--work", work / "own"]
    options += ["--checkpoint-glob", "{out}/checkpoints/step-*"]
    options += ["--step-regex", r"continuing from \S*step-0*(\d+)"]
    options += ["--result-file", "{out}/model/model.safetensors", "--"]
    script = HERE.parent / "examples" / "own_script.py", "--max_steps", 20, "--folder", "{out}"
    found = call(*words, "run", *options, *PYTHON, *script, codes=(0, 1)).strip().split("\n")[-1]
    yield f"run examples/own_script.py: {found}"


def port(work):
    """What accelerate's compare_against_test finds new in its example, ported to Training."""
    ported = call(*PYTHON, HERE / "port.py", os.environ["ACCELERATE"])
    evaluated = re.findall(r"^step (\d+): ", ported, re.M)
    yield f"{ported.strip().splitlines()[-1]}; it trained to step {evaluated[-1]}"


def dpo(work):
    """Ten steps of DPO from one model: TRL's DPOTrainer beside the task `preference`."""
    import torch

    answers = "--no-input", "--default-config", "--output-dir", work, "task=preference"
    call(*PYTHON, "-m", "cookiecutter", HERE.parent, *answers, "tracker=none")
    project = work / "my_training"
    base = "--max_steps", 60, "--output_dir", "runs/base", "--eval_every", 0, "--save_every", 0
    call(*PYTHON, "train.py", *base, cwd=project)
    for loss in ("sigmoid", "ipo"):
        sides = []
        for side in ("ours", "trl"):
            call(*PYTHON, HERE / "dpo.py", side, loss, work / loss, cwd=project)
            sides.append(torch.load(work / loss / f"{side}.pt"))
        found = []
        for name in ("loss", "rewards", "grad_norm"):
            ours, theirs = (torch.tensor(side[name]).double() for side in sides)
            apart = float((ours - theirs).abs().max() / theirs.abs().max())
            found.append(f"{name} {apart:.1e}")
        yield f"{loss}, the largest difference of ten steps: {', '.join(found)}"


def cs336(work):
    """The tests of assignment 2 that need no GPU, answered by cs336_adapters.py."""
    path = Path(os.environ["CS336"]).resolve()
    shutil.copytree(path / "tests", work / "tests")
    shutil.copy(HERE / "cs336_adapters.py", work / "tests" / "adapters.py")
    found = [work, path / "cs336-basics", ENVIRONMENT.get("PYTHONPATH", "")]
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, found))}
    suites = [f"tests/test_{name}.py" for name in ("ddp", "fsdp", "sharded_optimizer")]
    words = [*PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-rpf", "--tb=short", *suites]
    printed = call(*words, codes=(0, 1), cwd=work, env=environment)
    yield from re.findall(r"^PASSED .*$", printed, re.M)
    for name, text in re.findall(r"^_+ (test\S+) _+$(.*?)(?=^_+ test|^=)", printed, re.M | re.S):
        yield f"FAILED {name}: {re.findall(r'^E +(.*Error: .*)$', text, re.M)[-1]}"
    yield printed.strip().splitlines()[-1].strip("= ")


WITNESSES = {  # its function, the package whose version counts, and the variable with its clone
    "transformers": (transformers_resume, "transformers", ""),
    "accelerate": (accelerate_check, "accelerate", ""),
    "dpo": (dpo, "trl", ""),
    "port": (port, "accelerate", "ACCELERATE"),
    "cs336": (cs336, "torch", "CS336"),
    "chaos": (chaos, "ckpt-chaos", ""),
}


def main():
    unknown = set(sys.argv[1:]) - set(WITNESSES)
    if unknown:
        sys.exit(f"no witness is called {', '.join(unknown)}: {', '.join(WITNESSES)}")
    for name in sys.argv[1:] or WITNESSES:
        witness, package, variable = WITNESSES[name]
        if variable and not os.environ.get(variable):
            print(f"{name}: left out, since no package has it: make witness {variable}=CLONE")
            continue
        with tempfile.TemporaryDirectory() as folder:
            for line in witness(Path(folder)):
                print(f"{name}, {package} {version(package)}: {line}", flush=True)


if __name__ == "__main__":
    main()
