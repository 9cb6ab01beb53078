"""Checks what only a GPU can show, the most valuable first: correctness, then speed.

    make gpu                                # one NVIDIA GPU with bf16, an hour at most
    make gpu ARGS="--minutes 10"            # what has no time left is not run
    make gpu ARGS="--rows exact bench"      # the checks whose names contain these words
    make gpu ARGS="--device cpu"            # tiny models: does the program itself work?

results/gpu-DEVICE.json keeps the table, and the rows of earlier calls. The exit code is 1 if a
check failed. The folder for temporary files needs 20 GB. docs/gpu-checklist.md has what is to be
seen, and what needs more than one GPU.

MFU, the share of the device's peak, counts 6 (N - embeddings) + 12 L h S FLOPs a token, for N
parameters, L layers of width h, and rows of S tokens.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import compare
import work
from compare import HERE
from work import Work

NEEDED = "accelerate cookiecutter datasets psutil pydantic pytest rich torch transformers".split()
TASKS = ("causal_lm", "text_classification", "image_classification", "seq2seq", "preference")
DATA = "library.txt"  # the source of Python's library, 5 MB
LARGE = Work(2048, 18, 16, context=2048, batch=8, vocabulary=24_576, source=DATA)  # 1.08 B
MIDDLE = replace(LARGE, hidden=1024, layers=12)  # 214 M parameters
TINY = Work(64, 2, 4, context=64, batch=8, steps=3, rounds=2)
WARM_UP = 8  # steps before the timing, which compile
GOAL = "baked, 16 x 4"  # at least 0.55 of the peak; the goal is 0.6


@dataclass
class Speed:
    """One way to train the model of 1.08 B parameters."""

    peer: str  # plain, trainer or baked
    micro_batch: int = 8  # samples
    accumulation: int = 1
    compile: bool = True
    hardware: str = "single_gpu_bf16"  # accelerate's YAML, where there is a GPU
    flags: dict = field(default_factory=dict)  # of train.py


SMALL = Speed("baked", 2, 4)
SPEEDS = {
    GOAL: Speed("baked", 16, 4),
    "plain loop": Speed("plain"),
    "baked": Speed("baked"),
    "baked, 2 x 4": SMALL,
    "baked, 2 x 4, exact": replace(SMALL, flags={"exact": "true"}),
    "baked, 2 x 4, fp32": replace(SMALL, hardware="single_gpu"),
    "baked, 2 x 4, tf32": replace(SMALL, hardware="single_gpu", flags={"tf32": "true"}),
    "HF Trainer": Speed("trainer"),
    "baked, eager": Speed("baked", compile=False),
    "plain loop, eager": Speed("plain", compile=False),
    "HF Trainer, eager": Speed("trainer", compile=False),
}


@dataclass
class Row:
    """A line of the table; `result` is passed, failed or not run."""

    check: str
    result: str
    note: str = ""
    figure: float = 0.0  # 0: none
    unit: str = ""


# ---- Where the checks run ------------------------------------------------------------------------


@dataclass
class Place:
    device: str  # cuda or cpu
    project: Path
    deadline: float = 0.0

    def size(self, todo: Work) -> Work:
        """This work; on a CPU a tiny one."""
        return todo if self.device == "cuda" else replace(TINY, batch=todo.batch)

    def environment(self, **extra: str) -> dict[str, str]:
        """The variables of a process. It sees one GPU: Trainer would use all that it sees."""
        env = compare.environment(COLUMNS="250", **extra)
        if self.device == "cuda":
            del env["ACCELERATE_USE_CPU"], env["OMP_NUM_THREADS"]
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
            env["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
        return env

    def run(self, *command: object, processes: int = 1, until=bool, **extra: str) -> None:
        """Runs a Python program; raises RuntimeError with its last line where it failed.

        Several processes are nodes that share the GPU. All are killed once `until()` holds.
        """
        import psutil

        words, runs, env = [sys.executable, *map(str, command)], [], self.environment(**extra)
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
                        raise TimeoutError
                    time.sleep(0.02)
            finally:  # what stays would keep the GPU
                for run in [run for run in runs if run.poll() is None]:
                    for each in [*psutil.Process(run.pid).children(True), run]:
                        each.kill()
                    run.wait()
            if any(run.returncode for run in runs) and not until():
                log.seek(0)
                lines = log.read().strip().splitlines() or ["no word"]
                full = [line for line in lines if "out of memory" in line.lower()]
                raise RuntimeError((full or lines)[-1][:200])

    def launch(self, *words: object, hardware: str = "single_gpu_bf16", **extra: str) -> None:
        """Runs a program of the project under an accelerate YAML."""
        config = self.project / "configs" / "accelerate"
        config /= f"{hardware if self.device == 'cuda' else 'cpu'}.yaml"
        accelerate = ["-m", "accelerate.commands.launch", "--quiet", "--config_file", config]
        self.run(*accelerate, *words, **extra)

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
        self.run(*words, processes=processes, until=until, **env)
        files = sorted(output.glob("model/*.safetensors"))
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]

    def train(self, name: str, **settings: object) -> list[dict]:
        """The lines of metrics.jsonl of a run of 214 M parameters, but that of its start."""
        output = self.project / "runs" / name
        flags = work.flags(self.size(MIDDLE), output_dir=output, **settings)
        self.launch("train.py", *flags)
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "started" not in line]


def judged(check: str, good: bool, note: str, figure: float = 0.0, unit: str = "") -> Row:
    return Row(check, "passed" if good else "failed", note, figure, unit)


# ---- Checks: each yields rows --------------------------------------------------------------------


def tests(here: Place) -> Iterator[Row]:
    """The tests marked gpu. They see one GPU, so those of two are skipped."""
    workers = ["-n", min(6, os.cpu_count() // 2)] if find_spec("xdist") else []
    here.run("-m", "pytest", "-q", "-m", "gpu", *workers, HERE.parent / "tests" / "test_gpu.py")
    yield Row("tests", "passed")


def exact(here: Place, precision: str) -> Iterator[Row]:
    """One SHA-256 of the weights from one process and from several that share the GPU."""
    settings, found = {"max_steps": 24, "exact": "true", "micro_batch_size": 2}, {}
    for processes in (1, 2, 4) if here.device == "cuda" else (1, 2):
        name = f"exact-{precision}-{processes}"
        found[processes] = here.share(name, precision, processes, **settings)
    note = ", ".join(f"{processes} x {digest}" for processes, digest in found.items())
    yield judged(f"exact, {precision}", len({*found.values()}) == 1, note)


def killed(here: Place, name: str, precision: str, processes: int = 1, **more) -> Iterator[Row]:
    """A job that is killed and started again has the weights of one that was not killed."""
    settings = {"max_steps": 40, "save_every": 5, "deterministic": "true", "micro_batch_size": 4}
    train = partial(here.share, precision=precision, processes=processes, **settings, **more)
    whole = train(f"{name}-whole")
    for step in (5, 15):
        train(f"{name}-killed", kill_at=step)
    again = train(f"{name}-killed")
    yield judged(f"kills, {name}", whole == again, f"{processes} x {whole}, with 2 kills {again}")


def other_precision(here: Place) -> Iterator[Row]:
    """The same steps of each task in fp32 and in bf16: losses within a tenth."""
    for task in TASKS if here.device == "cuda" else TASKS[:1]:
        project = compare.bake(here.project / "runs" / task, task=task, tracker="none")
        mine, losses = replace(here, project=project), []
        for name in ("single_gpu", "single_gpu_bf16"):
            output = project / "runs" / name
            words = ["--config", "configs/train/smoke.yaml", "--output_dir", output]
            mine.launch("train.py", *words, hardware=name)
            lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
            losses.append([line["loss"] for line in lines if "grad_norm" in line])
        away = max(abs(b / a - 1) for a, b in zip(*losses, strict=True))
        yield judged(f"{task}, bf16", away < 0.1, f"losses within {away:.2%}", away)


def async_save(here: Place) -> Iterator[Row]:
    """Training waits a quarter of a save or less, and the files have the same bytes."""
    settings = {"max_steps": 240, "save_every": 80, "keep_checkpoints": 1, "deterministic": "true"}
    waits, files = [], []
    for each in ("false", "true"):
        lines = here.train(f"async-{each}", async_save=each, **settings)
        waits.append(min([line["save_seconds"] for line in lines if "save_seconds" in line][1:]))
        manifest = max(here.project.glob(f"runs/async-{each}/checkpoints/step-*/manifest.json"))
        files.append(json.loads(manifest.read_text())["files"])
    good = files[0] == files[1] and (waits[1] <= waits[0] / 4 or here.device == "cpu")
    yield judged("async_save, wait", good, f"{waits[0]:.2f} s without", waits[1], "s")


def hardware(here: Place, verb: str) -> Iterator[Row]:
    """The figures of a verb of samestep hardware."""
    here.launch("-m", "samestep", "hardware", verb)
    found = json.loads((here.project / "runs/hardware/hardware.json").read_text())[verb]
    yield Row(verb, "passed", "; ".join(found["lines"]))
    for name, values in found["figures"].items():
        what, _, unit = name.rpartition(", ")
        yield Row(what, "passed", "", min(values), unit)


def speed(here: Place, name: str) -> Iterator[Row]:
    """Tokens a second, the share of the peak, and the peak of memory."""
    row = SPEEDS[name]
    todo = compare.prepare(here.project, here.size(LARGE), here.project / name)
    batch = row.micro_batch * row.accumulation
    todo = replace(todo, batch=batch, micro_batches=row.accumulation)
    env = {"BENCH_WORK": todo.to_json(), "BENCH_ROW": json.dumps(asdict(row))}
    here.launch(__file__, hardware=row.hardware, **env)
    found = json.loads(Path(todo.output, "report.json").read_text())
    tokens = todo.batch * todo.context / median(found["seconds"])
    note, good = f"{found['memory'] / 1e9:.1f} GB", True
    if found["peak"]:
        share = tokens * flops_a_token(todo) / found["peak"]
        note = f"{share:.1%} of the peak, {note}"
        good = name != GOAL or share >= 0.55
    yield judged(name, good, note, tokens, "tokens/s")


# In this order; each with the minutes that it may take.
CHECKS: dict[str, tuple] = {
    "check": (3, partial(hardware, verb="check")),
    "tests": (20, tests),
    "exact, fp32": (4, partial(exact, precision="fp32")),
    "exact, bf16": (4, partial(exact, precision="bf16")),
    "kills, bf16": (4, partial(killed, name="bf16", precision="bf16", processes=2)),
    **{name: (8, partial(speed, name=name)) for name in [*SPEEDS][:7]},
    "bench": (4, partial(hardware, verb="bench")),
    "precision": (8, other_precision),
    "kills, compiled": (5, partial(killed, name="compiled", precision="bf16", compile="true")),
    "kills, fp16": (4, partial(killed, name="fp16", precision="fp16")),
    "async_save": (6, async_save),
    **{name: (8, partial(speed, name=name)) for name in [*SPEEDS][7:]},
}


# ---- A process that is timed ---------------------------------------------------------------------


def measure(row: Speed, todo: Work):
    """Times steps; it yields before each micro-batch, and at the end leaves the process."""
    import torch

    from samestep.report.peaks import peaks_of

    gpu = torch.cuda.is_available()
    peaks = peaks_of(torch.device("cuda" if gpu else "cpu"))

    def now() -> float:
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(WARM_UP * row.accumulation):
        yield
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(todo.rounds):
        began = now()
        for _ in range(todo.steps * row.accumulation):
            yield
        seconds.append((now() - began) / todo.steps)
    memory = torch.cuda.max_memory_allocated() if gpu else 0
    found = {"seconds": seconds, "memory": memory, "peak": 1e12 * peaks.get("bf16", 0)}
    Path(todo.output, "report.json").write_text(json.dumps(found))
    os._exit(0)


def flops_a_token(todo: Work) -> float:
    layer = 13 * todo.hidden**2 + 2 * todo.hidden  # attention 4, feed-forward 9, two norms
    weights = todo.layers * layer + todo.hidden + todo.vocabulary * todo.hidden  # and the head
    return 6 * weights + 12 * todo.layers * todo.hidden * todo.context


def worker() -> None:
    """Trains as a row of SPEEDS says, by a peer of peers.py: in bf16 on a GPU."""
    import torch

    import clock
    import peers

    row = Speed(**json.loads(os.environ["BENCH_ROW"]))
    todo, gpu = Work(**json.loads(os.environ["BENCH_WORK"])), torch.cuda.is_available()
    clock.attach(measure(row, todo))
    if row.peer == "plain":
        peers.plain(todo, "cuda" if gpu else "cpu", row.compile)
    elif row.peer == "trainer":
        peers.trainer(todo, use_cpu=not gpu, bf16=gpu, torch_compile=row.compile)
    else:
        peers.baked(todo, compile=str(row.compile).lower(), **row.flags)


# ---- The table -----------------------------------------------------------------------------------


def run_check(name: str, here: Place, end: float) -> list[Row]:
    """The rows of a check, which has its own limit and ends before `end`."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    (minutes, check), rows, now = CHECKS[name], [], time.monotonic()
    here = replace(here, deadline=min(now + 60 * minutes, end))
    try:
        if now >= end:
            raise TimeoutError
        rows.extend(check(here))
    except TimeoutError:
        late = Row(name, "not run", "no time was left")
        rows.append(late if here.deadline == end else Row(name, "failed", "too long"))
    except Exception as error:  # the rows before it are kept
        rows.append(Row(name, "failed", f"{type(error).__name__}: {error}"[:200]))
    return rows


def show(report: dict, rows: list[Row]) -> str:
    """The table, below the device, the versions and the date."""
    cells = []
    for row in rows:
        figure = f"{row.figure:,.4g} {row.unit}" if row.figure else ""
        cells.append([row.check, ": ".join(filter(None, [row.result, row.note])), figure])
    about = compare.about(report)
    return f"{about}\n\n{compare.markdown(['check', 'result', 'figure'], cells)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=60, help="only what fits into them")
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
    end = time.monotonic() + 60 * asked.minutes
    sources = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sources))
    report = compare.about_machine()
    if asked.device == "cuda":
        report["device"] = torch.cuda.get_device_name()
        report["versions"]["CUDA"] = torch.version.cuda
    asked.output.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", f"gpu {report['device']}".lower()).strip("-")
    file = asked.output.resolve() / f"{name}.json"
    kept = json.loads(file.read_text())["rows"] if file.exists() else {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="checks", ignore_cleanup_errors=True) as folder:
        here = Place(asked.device, compare.bake(Path(folder)))
        library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        texts = "\n".join(path.read_text("utf-8", errors="replace") for path in library)
        (here.project / DATA).write_text(texts)
        for name in CHECKS:
            if any(word in name for word in asked.rows):
                new = run_check(name, here, end)
                rows += new
                kept |= {row.check: {**asdict(row), "date": report["date"]} for row in new}
                file.write_text(json.dumps({**report, "rows": kept}, indent=1) + "\n")
    report["load"].append(os.getloadavg()[0])
    print(show(report, rows), file, sep="\n")
    return int(any(row.result == "failed" for row in rows))


if __name__ == "__main__":
    if "BENCH_ROW" in os.environ:
        worker()
    else:
        sys.exit(main())
