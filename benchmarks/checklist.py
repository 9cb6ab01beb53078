"""Checks what only a GPU can show, the most valuable first, and compares it with stored figures.

    make gpu                                     # one NVIDIA GPU with bf16, an hour at most
    make gpu ARGS="--minutes 10"                 # what a GPU shows in ten minutes
    make gpu ARGS="--rows async_save bench"      # the checks whose names contain these words
    make gpu ARGS="--device cpu"                 # tiny models: does the program itself work?
    python benchmarks/checklist.py --minutes 10  # the same, without make, .venv or a network

--minutes does the most important, correctness first and side by side, speed last and alone; what
has no time left is not run. results/gpu-DEVICE.json keeps the table, and the rows of earlier calls.
Speeds and seconds that are more than 10 % worse than the stored ones are marked. The exit code is 1
if a check failed. The folder for temporary files needs 20 GB. docs/gpu-checklist.md has what needs
more than one GPU.
"""

import argparse
import contextlib
import hashlib
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import compare
import gpu
import work
from compare import HERE

NEEDED = "accelerate cookiecutter datasets psutil pydantic pytest rich torch transformers".split()
TOO_LONG, NO_TIME, KILLED = "it took too long", "no time was left", "killed"
TASKS = ("causal_lm", "text_classification", "image_classification", "seq2seq", "preference")
GOAL, LEAST = "baked, 16 x 4", 0.55  # of the peak; the goal is 0.6
# Rows of gpu.py. Some are held against another one: at least so many times its speed, and at most
# so many GB more. exact keeps three sets of gradients of 4.3 GB in place of one.
PLAIN, FP32, SMALL = "plain loop, compiled", "baked, in fp32", gpu.SMALL.name
FIRST = {GOAL: (), PLAIN: (), gpu.COMPILED.name: (PLAIN, 0.98, 1)}
SECOND = {SMALL: (), "baked, 2 x 4, exact": (SMALL, 0.8, 10)}
SECOND |= {FP32: (), "baked, in tf32": (FP32, 1.2, 1), "baked, in fp16": ()}
OTHERS = {row.name: () for row in gpu.ROWS if row.name not in {*FIRST, *SECOND}}
MIDDLE = replace(gpu.LARGE, hidden=1024, layers=12, batch=8)  # 214 M parameters
OUTCOME = re.compile(r"^\S+?::(.+?) (PASSED|FAILED|ERROR|SKIPPED)(?: \((.*)\))?", re.MULTILINE)
OF_XDIST = re.compile(r"^\[gw\d+\] \[.*?\] (\w+) (.+?) *$", re.MULTILINE)


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
    short: bool = False  # within --minutes
    deadline: float = 0.0  # of the check that runs here
    late: str = TOO_LONG  # or NO_TIME: what it means if that passes
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

    def run(self, *command: object, processes=1, until=bool, all_gpus=False, **extra: str):
        """What a Python program printed, and in one line why it failed; empty if it did not.

        Several processes are nodes that share the GPU. They are killed once `until()` holds.
        """
        import psutil

        words, runs = [sys.executable, *map(str, command)], []
        env = gpu.environment(self.device, COLUMNS="250", **extra)
        if all_gpus and self.device == "cuda":
            every = ",".join(map(str, range(self.gpus)))
            env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", every)
        if processes > 1:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(compare.free_port())}
            env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            try:
                for rank in range(processes):
                    env |= {"RANK": str(rank), "GROUP_RANK": str(rank)} if processes > 1 else {}
                    run = subprocess.Popen(words, cwd=self.project, env=env, stdout=log, stderr=log)
                    runs.append(run)
                while None in [run.poll() for run in runs] and not until():
                    if time.monotonic() > self.deadline:
                        break
                    time.sleep(0.02)
            finally:  # what stays would keep the GPU
                left = [run for run in runs if run.poll() is None]
                for run in left:
                    run.send_signal(signal.SIGSTOP)  # it must start no other now
                    for each in [*psutil.Process(run.pid).children(True), run]:
                        with contextlib.suppress(psutil.Error):
                            each.kill()
                    run.wait()
            log.seek(0)
            text = log.read()
        if left and until():
            return text, KILLED
        if not any(run.returncode for run in runs):
            return text, ""
        print(text[-30_000:], file=sys.stderr, flush=True)
        last = (text.strip().splitlines() or ["no word"])[-1]
        return text, self.late if left else last[:200]

    def launch(self, *words: object, gpu: str = "single_gpu_bf16") -> None:
        """Runs a program of the project under an accelerate YAML; raises RuntimeError."""
        hardware = gpu if self.device == "cuda" else "cpu"
        launch = ["-m", "accelerate.commands.launch", "--quiet", "--config_file"]
        _, reason = self.run(*launch, f"configs/accelerate/{hardware}.yaml", *words)
        if reason:
            raise RuntimeError(reason)

    def share(self, name: str, precision: str, processes=1, kill_at=0, **settings: object) -> str:
        """SHA-256 of the model of the smoke recipe, from processes that share the GPU.

        With `kill_at` they are killed once a checkpoint of this step is there.
        """
        output, wanted = self.project / "runs" / name, f"step-{kill_at:08d}"

        def until() -> bool:
            found = output.glob("checkpoints/step-*") if kill_at else []
            return any(folder.name >= wanted for folder in found)

        settings |= {"config": "configs/train/smoke.yaml", "output_dir": output, "log_every": 1}
        settings |= {"eval_every": 0, "task.dropout": 0.1}
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        env = {"ACCELERATE_MIXED_PRECISION": {"fp32": "no"}.get(precision, precision)}
        words = [HERE / "one_gpu.py", "train.py", *words]
        _, reason = self.run(*words, processes=processes, until=until, **env)
        if reason != (KILLED if kill_at else ""):
            raise RuntimeError(reason or "it ended before it was killed")
        files = sorted(output.glob("model/*.safetensors"))
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]

    def train(self, name: str, size: work.Size = MIDDLE, **settings: object) -> list[dict]:
        """The lines of metrics.jsonl of a run, but that of its start."""
        output = self.project / "runs" / name
        self.launch("train.py", *work.flags(self.size(size), output_dir=output, **settings))
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "started" not in line]


# ---- Checks: each yields rows --------------------------------------------------------------------


def failed(check: str, reason: str) -> Row:
    """A check without a result; it has not failed if no time was left for it."""
    return Row(check, "not run" if reason == NO_TIME else "failed", reason)


def tests(here: Place) -> Iterator[Row]:
    """The tests marked gpu. They see one GPU, so those of two are skipped."""
    file = HERE.parent / "tests" / "test_gpu.py"
    workers = ["-n", min(6, os.cpu_count() // 2)] if find_spec("xdist") else []
    text, reason = here.run("-m", "pytest", "-v", "-m", "gpu", *workers, file)
    text = OF_XDIST.sub(r"\2 \1", text)
    why = dict(re.findall(r"^(?:FAILED|ERROR) \S+?::(.+?) - (.*)", text, re.MULTILINE))
    for name, outcome, note in OUTCOME.findall(text):
        result = outcome.lower().replace("error", "failed")
        yield Row(name.removeprefix("test_"), result, note or why.get(name, ""))
    if reason and not why:  # it has not come to its end
        raise RuntimeError(reason)


def exact(here: Place, precision: str) -> Iterator[Row]:
    """One SHA-256 of the weights from one process and from several that share the GPU."""
    settings, found = {"max_steps": 24, "exact": "true", "micro_batch_size": 2}, {}
    for processes in (1, 2, 4) if here.device == "cuda" else (1, 2):
        name = f"exact-{precision}-{processes}"
        found[processes] = here.share(name, precision, processes, **settings)
    note = ", ".join(f"{processes} x {digest}" for processes, digest in found.items())
    yield Row(f"exact, {precision}", "failed" if len({*found.values()}) > 1 else "passed", note)


def killed(here: Place, name: str, precision: str, processes: int = 1, **more) -> Iterator[Row]:
    """A job that is killed and started again has the weights of one that was not killed."""
    kills = (5, 15) if here.device == "cuda" else (5,)
    settings = {"max_steps": 40, "save_every": 5, "deterministic": "true", "micro_batch_size": 4}
    train = partial(here.share, precision=precision, processes=processes, **settings, **more)
    whole = train(f"{name}-whole")
    for step in kills:
        train(f"{name}-killed", kill_at=step)
    again = train(f"{name}-killed")
    note = f"{processes} x {whole}, with {len(kills)} kills {again}"
    yield Row(f"kills, {name}", "passed" if whole == again else "failed", note)


def speeds(here: Place, rows: dict[str, tuple]) -> Iterator[Row]:
    """Rows of gpu.py, whose data is prepared once; on a CPU one."""
    rows = rows if here.device == "cuda" else dict([*rows.items()][:1])
    output, words = here.project / "speeds", ["--steps", 6] if here.short else []
    words += ["--device", here.device, "--folder", here.project / "gpu", "--output", output]
    _, reason = here.run(HERE / "gpu.py", *words, "--rows", *rows)
    report = next((json.loads(file.read_text()) for file in output.glob("*.json")), {"rows": {}})
    for name, bound in rows.items():
        found = report["rows"].get(name, {"failed": reason})
        if "failed" in found:
            full = "out of memory" in found["failed"].lower()
            yield Row(name, "skipped", found["failed"]) if full else failed(name, found["failed"])
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
    size = replace(gpu.LARGE, batch=gpu.BATCH)
    flags = work.flags(here.size(size)) if verb == "recommend" else []
    here.launch("-m", "samestep", "hardware", verb, *flags)
    found = json.loads((here.project / "runs/hardware/hardware.json").read_text())[verb]
    yield Row(verb, "passed", "; ".join(found["lines"]))
    for name, values in found["figures"].items():
        what, _, unit = name.rpartition(", ")
        yield here.row(what, min(values), unit)
    if verb == "recommend":
        (formula,) = found["figures"]["memory, GB"]
        lines = here.train("memory", size, max_steps=10, log_every=5)
        ratio = formula / max(line.get("peak_memory_gb", 0) for line in lines)
        yield here.row("memory, formula / peak", ratio, "", wrong=abs(ratio - 1) > 0.25)


def everything(here: Place) -> Iterator[Row]:
    """All phases in one command, as `make hardware` runs them; bench has the figures."""
    _, reason = here.run("-m", "samestep", "hardware", "--seconds", 0.2, "--processes", 1)
    yield Row("hardware, all phases", "failed" if reason else "passed", reason)


def other_precision(here: Place) -> Iterator[Row]:
    """The same steps of each task in fp32 and in bf16."""
    for task in TASKS if here.device == "cuda" else TASKS[:1]:
        project = compare.bake(here.project / "runs" / task, task=task, tracker="none")
        mine, losses = replace(here, project=project), []
        for name in ("single_gpu", "single_gpu_bf16"):
            output = project / "runs" / name
            words = ["--config", "configs/train/smoke.yaml", "--output_dir", output]
            mine.launch("train.py", *words, gpu=name)
            lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
            losses.append([line["loss"] for line in lines if "grad_norm" in line])
        away = max(abs(b / a - 1) for a, b in zip(*losses, strict=True))
        note = f"losses of bf16 within {away:.2%}"
        yield here.row(f"{task}, bf16", away, "", note, other_losses=not away < 0.1)


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
    "check": (3, partial(hardware, verb="check")),
    "tests": (20, tests),
    "exact, fp32": (4, partial(exact, precision="fp32")),
    "exact, bf16": (4, partial(exact, precision="bf16")),
    "kills, bf16": (4, partial(killed, name="bf16", precision="bf16", processes=2)),
    "kills, compiled": (5, partial(killed, name="compiled", precision="bf16", compile="true")),
    "kills, fp16": (4, partial(killed, name="fp16", precision="fp16")),
    "data": (5, partial(speeds, rows={})),  # for the rows of gpu.py; needs no GPU
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
# With --minutes: those of a list run side by side, in at most half of the time that is left.
SHORT = [["data", "tests", "check", "precision"], ["goal"], ["bench"], ["tf32, fp16, exact"]]
SHORT[0] += [name for name in CHECKS if name.startswith(("exact", "kills"))]


def about(device: str) -> dict:
    """Name and versions. This process leaves the GPU to the others."""
    import torch

    found = compare.about_machine()
    versions = {name: found["versions"][name] for name in ("torch", "accelerate", "transformers")}
    if device == "cuda":
        ask = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
        text = subprocess.check_output(ask, env=gpu.environment(device), text=True)
        found["device"], versions["driver"] = text.strip(), "not known"
        if shutil.which("nvidia-smi"):
            ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            versions["driver"] = subprocess.check_output(ask, text=True).split()[0]
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


def run_check(name: str, here: Place, end: float) -> list[Row]:
    """The rows of a check, which has its own limit and ends before `end`."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    (minutes, check), rows, now = CHECKS[name], [], time.monotonic()
    limit = now + 60 * minutes
    here = replace(here, deadline=min(limit, end), late=TOO_LONG if limit < end else NO_TIME)
    try:
        rows.extend(check(here) if now < end else [failed(name, NO_TIME)])
    except Exception as error:  # the rows before it are kept
        late = str(error) == NO_TIME
        rows.append(failed(name, NO_TIME if late else f"{type(error).__name__}: {error}"[:200]))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, help="only what fits into them")
    parser.add_argument("--rows", nargs="+", default=[""], help="checks whose names contain these")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of results")
    asked = parser.parse_args()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"not installed here: {', '.join(missing)}; install them first", file=sys.stderr)
        return 2
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here; try --device cpu", file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * (asked.minutes or 60)
    sources = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sources))
    report, output = about(asked.device), asked.output.resolve()
    file = gpu.results_file(output, f"gpu {report['device']}")
    kept = json.loads(file.read_text())["rows"] if file.exists() else {}
    folder = Path(tempfile.mkdtemp(prefix="checks"))
    os.environ["TMPDIR"] = str(folder)  # what ends in the middle leaves its files there
    here = Place(asked.device, folder, short=bool(asked.minutes), output=output)
    groups = SHORT if asked.minutes else [[name] for name in CHECKS]
    names = {name for name in CHECKS if any(word in name for word in asked.rows)}
    names -= {"kills, compiled", "kills, fp16"} if asked.device == "cpu" else set()
    groups = [found for group in groups if (found := [name for name in group if name in names])]
    rows = []
    try:
        here.project = compare.bake(folder)
        for group in groups:
            now = time.monotonic()
            halved = asked.minutes and group is not groups[-1]
            until = now + (end - now) / 2 if halved else end
            with ThreadPoolExecutor(len(group)) as pool:
                found = [pool.submit(run_check, name, here, until) for name in group]
            new = [row for each in found for row in each.result()]
            for row in new:
                old = kept.get(row.check, {})
                row.stored = old.get("figure") or old.get("stored") or 0.0
                kept[row.check] = {**asdict(row), "verdict": row.verdict, "date": report["date"]}
            rows += new
            file.write_text(json.dumps({**report, "rows": kept}, indent=1) + "\n")
            shutil.rmtree(here.project / "runs", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        print(show(report, rows), file, sep="\n")
    return int(any(row.verdict == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
