"""Checks what only a GPU can show, the most valuable first, and compares it with stored figures.

    make gpu                                     # one NVIDIA GPU with bf16, an hour at most
    make gpu ARGS="--rows async_save bench"      # the checks whose names contain these words
    make gpu ARGS="--device cpu"                 # tiny models: does the program itself work?
    python benchmarks/checklist.py               # the same, in an environment of your own

results/gpu-DEVICE.json keeps the table, and the rows of earlier calls. Speeds and seconds that are
more than 10 % worse than the stored ones are marked. The exit code is 1 if a check failed. The
folder for temporary files needs 20 GB. docs/gpu-checklist.md has what needs more than one GPU.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import psutil

import compare
import gpu
import work
from compare import HERE

SECONDS = 3600  # of a call
TASKS = ("causal_lm", "text_classification", "image_classification", "seq2seq", "preference")
GOAL, LEAST = "baked, 16 x 4", 0.55  # of the peak; the goal is 0.6
# Rows of gpu.py. Some are held against another one: at least so many times its speed, and at most
# so many GB more. exact keeps three sets of gradients of 4.3 GB in place of one.
PLAIN, FP32, SMALL = "plain loop, compiled", "baked, in fp32", gpu.SMALL.name
FIRST = {GOAL: (), PLAIN: (), gpu.COMPILED.name: (PLAIN, 0.98, 1)}
SECOND = {FP32: (), "baked, in tf32": (FP32, 1.2, 1), "baked, in fp16": ()}
SECOND |= {SMALL: (), "baked, 2 x 4, exact": (SMALL, 0.8, 10)}
OTHERS = {row.name: () for row in gpu.ROWS if row.name not in {*FIRST, *SECOND}}
MIDDLE = replace(gpu.LARGE, hidden=1024, layers=12, batch=8)  # 214 M parameters
OUTCOME = re.compile(r"^\S+?::(\S+) (PASSED|FAILED|ERROR|SKIPPED)(?: \((.*)\))?", re.MULTILINE)


@dataclass
class Row:
    """A line of the table."""

    check: str
    result: str  # passed, failed, skipped or not run
    note: str = ""
    figure: float = 0.0  # 0: none
    unit: str = ""
    stored: float = 0.0  # the figure of an earlier call

    @property
    def verdict(self) -> str:
        """How the figure has changed, if it is a speed or a time."""
        if self.result == "failed" or not (self.figure and self.stored and self.unit[-1:] == "s"):
            return "FAILED" if self.result == "failed" else ""
        ratio = self.figure / self.stored
        gain = (ratio if self.unit.endswith("/s") else 1 / ratio) - 1
        return f"{gain:+.0%}" + " WORSE" * (gain < -0.1)


@dataclass
class Place:
    """Where the checks run."""

    device: str  # cuda or cpu
    project: Path  # before it is baked, the folder for it
    deadline: float = 0.0  # of the check that runs now
    output: Path = HERE / "results"

    @property
    def gpus(self) -> int:
        """GPUs that this program sees; all rows but those of scaling use the first one."""
        import torch

        return torch.cuda.device_count()

    def size(self, size: work.Size) -> work.Size:
        """This size; on a CPU a tiny one."""
        return size if self.device == "cuda" else replace(gpu.TINY, batch=size.batch)

    def row(self, check: str, figure: float, unit: str, note: str = "", **faults: bool) -> Row:
        """A figure. It fails if one of the faults holds, which a CPU is allowed."""
        bad = [name.replace("_", " ") for name, holds in faults.items() if holds]
        bad = bad if self.device == "cuda" else []
        note = "; ".join(filter(None, [*bad, note]))
        return Row(check, "failed" if bad else "passed", note, figure, unit)

    def run(self, *command: object, all_gpus: bool = False) -> tuple[str, str]:
        """What a Python program printed, and in one line why it failed; empty if it did not."""
        words, code = [sys.executable, *map(str, command)], None
        env = gpu.environment(self.device, COLUMNS="250")
        if all_gpus and self.device == "cuda":
            every = ",".join(map(str, range(self.gpus)))
            env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", every)
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            run = subprocess.Popen(words, cwd=self.project, env=env, stdout=log, stderr=log)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = run.wait(self.deadline - time.monotonic())
            finally:  # what stays would keep the GPU
                if run.poll() is None:
                    run.send_signal(signal.SIGSTOP)  # it must start no other now
                    for each in [*psutil.Process(run.pid).children(True), run]:
                        with contextlib.suppress(psutil.Error):
                            each.kill()
            log.seek(0)
            text = log.read()
        if code == 0:
            return text, ""
        print(text[-30_000:], file=sys.stderr, flush=True)
        last = (text.strip().splitlines() or ["no word"])[-1]
        return text, "it took too long" if code is None else last[:200]

    def launch(self, *words: object, gpu: str = "single_gpu_bf16") -> None:
        """Runs a program of the project under an accelerate YAML; raises RuntimeError."""
        hardware = gpu if self.device == "cuda" else "cpu"
        launch = ["-m", "accelerate.commands.launch", "--quiet", "--config_file"]
        _, reason = self.run(*launch, f"configs/accelerate/{hardware}.yaml", *words)
        if reason:
            raise RuntimeError(reason)

    def train(self, name: str, **settings: object) -> list[dict]:
        """The lines of metrics.jsonl of a run."""
        output = self.project / "runs" / name
        self.launch("train.py", *work.flags(self.size(MIDDLE), output_dir=output, **settings))
        return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


# ---- Checks: each yields rows --------------------------------------------------------------------


def bake(here: Place) -> Iterator[Row]:
    here.project = compare.bake(here.project)
    yield Row("project", "passed")


def tests(here: Place) -> Iterator[Row]:
    """The tests marked gpu. They see one GPU, so those of two are skipped."""
    file = HERE.parent / "tests" / "test_gpu.py"
    text, reason = here.run("-m", "pytest", "-v", "-m", "gpu", file)
    why = dict(re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+) - (.*)", text, re.MULTILINE))
    for name, outcome, note in OUTCOME.findall(text):
        result = outcome.lower().replace("error", "failed")
        yield Row(name.removeprefix("test_"), result, note or why.get(name, ""))
    if reason and not why:  # it has not come to its end
        raise RuntimeError(reason)


def speeds(here: Place, rows: dict[str, tuple]) -> Iterator[Row]:
    """Rows of gpu.py; on a CPU one."""
    rows = rows if here.device == "cuda" else dict([*rows.items()][:1])
    output = here.project / "speeds"
    _, reason = here.run(
        HERE / "gpu.py", "--device", here.device, "--output", output, "--rows", *rows
    )
    report = next((json.loads(file.read_text()) for file in output.glob("*.json")), {"rows": {}})
    for name, bound in rows.items():
        found = report["rows"].get(name, {"failed": reason})
        if "failed" in found:
            full = "out of memory" in found["failed"].lower()
            yield Row(name, "skipped" if full else "failed", found["failed"])
            continue
        speed, kinds, logged = found["tokens_per_second"][0], found["kinds"], found.get("logged")
        share = speed * report["flops_a_token"][0] / report["peak"]
        other, least, most = bound or ("", 0, math.inf)
        base = report["rows"].get(other, {})
        than, more = base.get("tokens_per_second", [0])[0], found["memory"] - base.get("memory", 0)
        faults = {
            "below_the_goal": name == GOAL and share < LEAST,
            "too_slow": speed < least * than,
            "too_much_memory": than > 0 and more > 1e9 * most,
            "no_kernel_of_attention_or_of_matmul": not (kinds["attention"] and kinds["matmul"]),
            "the_loss_is_not_finite": bool(logged) and logged["loss"] is None,
        }
        note = f"{share:.1%} of the peak, {found['memory'] / 1e9:.1f} GB"
        note += f", {speed / than:.2f} x {other} and {more / 1e9:+.1f} GB" if than else ""
        yield here.row(name, speed, "tokens/s", note, **faults)
        if name in FIRST and logged and "mfu" in logged and report["peak"] != report["matmul"]:
            ratio = logged["mfu"] / logged["tokens_per_second"] * speed / share
            yield here.row(f"{name}: mfu / formula", ratio, "", wrong=abs(ratio - 1) > 0.1)


def async_save(here: Place) -> Iterator[Row]:
    """How long training waits for a save but the first, and whether it saves the same bytes."""
    settings = {"max_steps": 240, "save_every": 80, "keep_checkpoints": 1, "deterministic": "true"}
    waits, files = [], []
    for each in ("false", "true"):
        lines = here.train(f"async-{each}", async_save=each, **settings)
        waits.append(min([line["save_seconds"] for line in lines if "save_seconds" in line][1:]))
        manifest = max(here.project.glob(f"runs/async-{each}/checkpoints/step-*/manifest.json"))
        files.append(json.loads(manifest.read_text())["files"])
    faults = {"too_slow": waits[1] > waits[0] / 4, "other_bytes": files[0] != files[1]}
    yield here.row("async_save, wait", waits[1], "s", f"{waits[0]:.2f} s without", **faults)


def compiled(here: Place) -> Iterator[Row]:
    """How long the first step takes where compiled code is kept."""
    settings = {"compile": "true", "log_every": 1, "max_steps": 8}
    lines = [here.train(f"compiled-{n}", **settings)[0] for n in (1, 2)]
    tokens = MIDDLE.batch * here.size(MIDDLE).context
    first, again = (tokens / line["tokens_per_second"] for line in lines)
    note, slow = f"{first:.1f} s at the first start", again > first / 2
    yield here.row("compiled, first step of a second start", again, "s", note, too_slow=slow)


def hardware(here: Place, verb: str) -> Iterator[Row]:
    """The figures of a verb of samestep hardware; the formula of recommend beside a run's peak."""
    flags = work.flags(here.size(replace(gpu.LARGE, batch=8))) if verb == "recommend" else []
    here.launch("-m", "samestep", "hardware", verb, *flags)
    found = json.loads((here.project / "runs/hardware/hardware.json").read_text())[verb]
    yield Row(verb, "passed", "; ".join(found["lines"]))
    for name, values in found["figures"].items():
        what, _, unit = name.rpartition(", ")
        yield here.row(what, min(values), unit)
    if verb == "recommend":
        (formula,) = found["figures"]["memory, GB"]
        output = here.project / "runs" / "memory"
        size = here.size(replace(gpu.LARGE, batch=8))
        here.launch("train.py", *work.flags(size, output_dir=output, max_steps=10, log_every=5))
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        ratio = formula / max(line.get("peak_memory_gb", 0) for line in lines)
        yield here.row("memory, formula / peak", ratio, "", wrong=abs(ratio - 1) > 0.25)


def everything(here: Place) -> Iterator[Row]:
    """All phases in one command, as `make hardware` runs them; bench has the figures."""
    _, reason = here.run("-m", "samestep", "hardware", "--seconds", 0.2, "--processes", 1)
    yield Row("hardware, all phases", "failed" if reason else "passed", reason)


def other_precision(here: Place) -> Iterator[Row]:
    """The same steps of each task in fp32 and in bf16."""
    default = here.project
    try:
        for task in TASKS if here.device == "cuda" else TASKS[:1]:
            here.project = compare.bake(default / "runs" / task, task=task, tracker="none")
            losses = []
            for name in ("single_gpu", "single_gpu_bf16"):
                output = here.project / "runs" / name
                words = ["--config", "configs/train/smoke.yaml", "--output_dir", output]
                here.launch("train.py", *words, gpu=name)
                lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
                losses.append([line["loss"] for line in lines if "grad_norm" in line])
            away = max(abs(b / a - 1) for a, b in zip(*losses, strict=True))
            note = f"losses of bf16 within {away:.2%}"
            yield here.row(f"{task}, bf16", away, "", note, other_losses=not away < 0.1)
    finally:
        here.project = default


def scaling(here: Place) -> Iterator[Row]:
    """Strong and weak scaling over all GPUs that this program sees; on a CPU over two processes."""
    count = here.gpus if here.device == "cuda" else 2
    if count < 2:
        yield Row("scaling", "skipped", "there is one GPU")
        return
    numbers = [n for n in (1, 2, 4, 8, 16) if n < count] + [count]
    small = [] if here.device == "cuda" else ["--steps", 10, "--rounds", 1, "--batch", 16]
    hardware = "multi_gpu_bf16" if here.device == "cuda" else "cpu_multi"
    words = ["--hardware", hardware, "--processes", *numbers, "--output", here.output, *small]
    _, reason = here.run(HERE / "scaling.py", "--name", "scaling-gpu", *words, all_gpus=True)
    if reason:
        raise RuntimeError(reason)
    for row in json.loads((here.output / "scaling-gpu.json").read_text())["rows"]:
        name, note = f"{row['scaling']} scaling, {row['devices']}", f"{row['efficiency']:.0%}"
        yield here.row(name, row["items/s"], "items/s", f"efficiency {note}")


# In this order; each with the minutes that it may take.
CHECKS = {
    "project": (2, bake),
    "check": (3, partial(hardware, verb="check")),
    "tests": (20, tests),
    "goal": (15, partial(speeds, rows=FIRST)),
    "tf32, fp16, exact": (12, partial(speeds, rows=SECOND)),
    "async_save": (6, async_save),
    "bench": (4, partial(hardware, verb="bench")),
    "recommend": (4, partial(hardware, verb="recommend")),
    "hardware, all phases": (4, everything),
    "precision": (8, other_precision),
    "scaling": (10, scaling),
    "compiled": (6, compiled),
    "others": (30, partial(speeds, rows=OTHERS)),
}


def about(device: str) -> dict:
    """Name and versions. This process leaves the GPU to the others."""
    import torch

    found = compare.about_machine()
    versions = {name: found["versions"][name] for name in ("torch", "accelerate", "transformers")}
    if device == "cuda":
        first = gpu.environment(device)["CUDA_VISIBLE_DEVICES"]
        command = ["nvidia-smi", "-i", first, "--query-gpu=name,driver_version"]
        text = subprocess.check_output([*command, "--format=csv,noheader"], text=True)
        found["device"], versions["driver"] = text.strip().split(", ")
        versions["CUDA"] = torch.version.cuda
    return {**found, "versions": versions}


def show(report: dict, rows: list[Row]) -> str:
    """The table, below the device, the versions and the date."""
    from rich import box, markup
    from rich.table import Table

    def figure(value: float, unit: str) -> str:
        return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}" * (value > 0)

    table = Table("check", "result", "figure", "stored", "verdict", box=box.MARKDOWN)
    for row in rows:
        result = ": ".join(filter(None, [row.result, row.note]))
        figures = [figure(value, row.unit) for value in (row.figure, row.stored)]
        table.add_row(*map(markup.escape, (row.check, result, *figures, row.verdict)))
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return f"{report['device']}; {versions}; {report['date']}\n\n{compare.markdown(table)}"


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", nargs="+", default=[""], help="checks whose names contain these")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of results")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here; try --device cpu", file=sys.stderr)
        return 2
    report, rows, end = about(asked.device), [], time.monotonic() + SECONDS
    file = gpu.results_file(asked.output, f"gpu {report['device']}")
    kept = json.loads(file.read_text())["rows"] if file.exists() else {}
    folder = Path(tempfile.mkdtemp(prefix="checks"))
    os.environ["TMPDIR"] = str(folder)  # what ends in the middle leaves its files there
    here = Place(asked.device, folder, output=asked.output.resolve())
    try:
        for name, (minutes, check) in CHECKS.items():
            if name != "project" and not any(word in name for word in asked.rows):
                continue
            print(f"{name} ...", file=sys.stderr, flush=True)
            new, now = [], time.monotonic()
            here.deadline = min(end, now + 60 * minutes)
            try:
                new.extend(check(here) if now < end else [Row(name, "not run: the hour is over")])
            except Exception as error:  # the rows before it are kept
                new.append(Row(name, "failed", f"{type(error).__name__}: {error}"[:200]))
            for row in new:
                old = kept.get(row.check, {})
                row.stored = old.get("figure") or old.get("stored") or 0.0
                kept[row.check] = {**asdict(row), "verdict": row.verdict, "date": report["date"]}
            rows += new
            file.write_text(json.dumps({**report, "rows": kept}, indent=1) + "\n")
            if here.project == folder:  # nothing was baked
                break
            shutil.rmtree(here.project / "runs", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        print(show(report, rows), file, sep="\n")
    return int(any(row.verdict == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
