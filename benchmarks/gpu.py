"""Measures how much of a GPU a baked project uses, with each of its optimisations on and off.

    python benchmarks/gpu.py                  # 1.08 B parameters, all rows
    python benchmarks/gpu.py --rows baked     # the rows whose names contain this word
    python benchmarks/gpu.py --device cpu     # a tiny model: does the program itself work?

`make gpu` runs it, in pieces (checklist.py). Each row is a process of its own, started by
`accelerate launch`. HF Trainer and a loop in plain PyTorch do the same work. A row that fails, for
example for want of memory, says so; results/ keeps the rows of earlier calls on the same device.
The folder for temporary files needs 15 GB.

MFU, the share of the device's peak, counts 6 (N - embeddings) + 12 L h S FLOPs a token, for N
parameters, L layers of width h, and rows of S tokens. The causal mask makes half of the attention
needless; without that half it is 6 (N - embeddings) + 6 L h S, and the same speed reads lower.
"""

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import compare
import work
from samestep.report.peaks import PEAKS
from work import Size, Work

HERE = Path(__file__).resolve().parent
LARGE = Size(2048, 18, 16, context=2048, batch=0, vocabulary=24_576, data="stdlib")
TINY = Size(64, 2, 4, context=64, batch=0, steps=3, rounds=2)
WARM_UP, PROFILED = 8, 2  # steps before the timing, which compile; steps after it
BATCH = 8  # samples in a step for which data is prepared: its order is long enough for all rows
# Names of kernels, or of operators on a CPU; the first kind that matches counts.
KINDS = {
    "attention": r"flash|fmha|sdpa|attention|softmax_warp",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm",
    "loss": r"nll|cross_entropy|log_?softmax|logsumexp",
    "matmul": r"gemm|nvjet|cutlass|cublas|wgmma|xmma|aten::(mm|addmm|bmm|linear)$|triton_tem",
    "elementwise and norms": r"",
}


@dataclass
class Row:
    """One way to do the work."""

    name: str
    peer: str  # a function below
    compile: bool = False
    micro_batch: int = 8  # samples
    accumulation: int = 1
    flags: dict = field(default_factory=dict)  # of the baked project's train.py
    hardware: str = "single_gpu_bf16"  # accelerate's YAML, where there is a GPU
    changes: tuple = ()  # functions below that change the project before it runs


COMPILED = Row("baked, compiled", "baked", compile=True)
SMALL = Row("baked, 2 x 4", "baked", micro_batch=2, accumulation=4)
ROWS = [
    Row("plain loop, eager", "plain"),
    Row("plain loop, compiled", "plain", compile=True),
    Row("HF Trainer, eager", "trainer"),
    Row("HF Trainer, compiled", "trainer", compile=True),
    Row("baked, eager", "baked"),
    COMPILED,
    replace(COMPILED, name="baked, whole logits", flags={"task.loss_chunk": 0}),
    replace(COMPILED, name="baked, 16 x 4", micro_batch=16, accumulation=4),
    replace(
        COMPILED,
        name="baked, max-autotune",
        micro_batch=16,
        accumulation=4,
        changes=("max_autotune",),
    ),
    replace(SMALL, name="baked, in fp32", hardware="single_gpu"),
    replace(SMALL, name="baked, in tf32", hardware="single_gpu", flags={"tf32": "true"}),
    replace(
        SMALL, name="baked, in fp16", hardware="single_gpu_fp16", flags={"task.loss_chunk": 256}
    ),
    SMALL,
    replace(SMALL, name="baked, 2 x 4, exact", flags={"exact": "true"}),
]


# ---- What a row may change -----------------------------------------------------------------------
# The project has no switches for these; the benchmark replaces functions of its modules.


def max_autotune() -> None:
    """torch.compile measures kernels for matrix products instead of taking the default ones."""
    import torch._inductor.config

    torch._inductor.config.max_autotune = True


# ---- Peers: one process, started by `accelerate launch` ------------------------------------------


def plain(row: Row, todo: Work) -> None:
    """A loop in PyTorch alone, in bf16 on a GPU."""
    import torch
    from torch.utils.data import DataLoader

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = work.build_model(todo.size).to(device)
    optimizer = work.build_optimizer(model)
    forward = torch.compile(model) if row.compile else model
    bf16 = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    loader = DataLoader(
        work.build_dataset(todo), batch_size=row.micro_batch, pin_memory=device == "cuda"
    )
    for turn, batch in enumerate(loader, 1):
        batch = {name: values.to(device, non_blocking=True) for name, values in batch.items()}
        with bf16:
            loss = forward(**batch)["loss"]
        (loss / row.accumulation).backward()
        if turn % row.accumulation == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()


def trainer(row: Row, todo: Work) -> None:
    """Trainer of transformers, in bf16 on a GPU."""
    import torch
    from transformers import Trainer, TrainingArguments

    model, gpu = work.build_model(todo.size), torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=todo.output,
        use_cpu=not gpu,
        bf16=gpu,
        torch_compile=row.compile,
        per_device_train_batch_size=row.micro_batch,
        gradient_accumulation_steps=row.accumulation,
        train_sampling_strategy="sequential",
        max_grad_norm=work.MAX_GRAD_NORM,
        lr_scheduler_type="constant",
        logging_steps=work.LOG_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(
        model,
        arguments,
        train_dataset=work.build_dataset(todo),
        optimizers=(work.build_optimizer(model), None),
    ).train()


def baked(row: Row, todo: Work) -> None:
    """train.py of a baked project."""
    os.chdir(todo.project)
    sys.path[0] = todo.project
    for name in row.changes:
        globals()[name]()
    flags = {"compile": str(row.compile).lower(), "micro_batch_size": row.micro_batch, **row.flags}
    words = work.flags(todo.size)
    for name, value in flags.items():
        if f"--{name}" in words:
            words[words.index(f"--{name}") + 1] = str(value)
        else:
            words += [f"--{name}", str(value)]
    sys.argv = ["train.py", *words, "--output_dir", f"{todo.output}/run"]
    runpy.run_path("train.py", run_name="__main__")


# ---- Measuring, inside the process of a row ------------------------------------------------------


def measure(row: Row, todo: Work, file: Path):
    """Times and profiles; it yields before each micro-batch, and at the end leaves the process."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    gpu, size = torch.cuda.is_available(), todo.size

    def now() -> float:
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(WARM_UP * row.accumulation):
        yield None
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(size.rounds):
        began = now()
        for _ in range(size.steps * row.accumulation):
            yield None
        seconds.append((now() - began) / size.steps)
    memory = torch.cuda.max_memory_allocated() if gpu else 0
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu]
    began = now()
    with profile(activities=activities) as trace:
        for _ in range(PROFILED * row.accumulation):
            yield None
        profiled = (now() - began) / PROFILED
    kinds = time_by_kind(trace, gpu)
    found = {"seconds": seconds, "memory": memory, "profiled_seconds": profiled, "kinds": kinds}
    file.write_text(json.dumps(found))
    os._exit(0)


def time_by_kind(trace, gpu: bool) -> dict[str, float]:
    """Seconds a step of each kind of kernel; on a CPU, of each kind of operator."""
    from torch.autograd import DeviceType

    found = dict.fromkeys(KINDS, 0.0)
    for event in trace.key_averages():
        if gpu and (event.device_type != DeviceType.CUDA or event.is_user_annotation):
            continue
        if not gpu and not event.key.startswith("aten::"):
            continue
        kind = next(k for k, words in KINDS.items() if re.search(words, event.key, re.IGNORECASE))
        spent = event.self_device_time_total if gpu else event.self_cpu_time_total
        found[kind] += spent / 1e6 / PROFILED
    return found


def probe(device: str) -> dict:
    """The device's name, and the FLOP/s of a large matrix product: bf16 on a GPU, fp32 on a CPU."""
    import torch

    gpu = device == "cuda"
    size, dtype = (8192, torch.bfloat16) if gpu else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(5):
            a @ b
        if gpu:
            torch.cuda.synchronize()
        best = max(best, 5 * 2 * size**3 / (time.perf_counter() - began))
    name = torch.cuda.get_device_name() if gpu else compare.about_machine()["device"]
    return {"device": name, "matmul": best, "cuda": torch.version.cuda}


# ---- Rows ----------------------------------------------------------------------------------------


def results_file(folder: Path, name: str) -> Path:
    """The file for the results of a device, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def flops_a_token(size: Size, attention: int = 12) -> float:
    """6 (N - embeddings) + 12 L h S; with attention=6, without what the causal mask hides."""
    layer = 13 * size.hidden**2 + 2 * size.hidden  # attention 4, feed-forward 9, two norms
    weights = size.layers * layer + size.hidden + size.vocabulary * size.hidden  # and the head
    return 6 * weights + attention * size.layers * size.hidden * size.context


def environment(device: str, **extra: str) -> dict[str, str]:
    """The variables of a process. It sees one GPU: Trainer would use all that it sees."""
    env = compare.environment(**extra)
    if device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        del env["ACCELERATE_USE_CPU"], env["OMP_NUM_THREADS"]
        env["CUDA_VISIBLE_DEVICES"] = visible
    return env


def run_row(row: Row, todo: Work, device: str) -> dict:
    """The numbers of a row, or {"failed": why}."""
    size, project, folder = todo.size, Path(todo.project), Path(todo.output)
    hardware = row.hardware if device == "cuda" else "cpu"
    config = str(project / "configs" / "accelerate" / f"{hardware}.yaml")
    told = {"row": asdict(row), "report": str(folder / "report.json")}
    env = environment(device, BENCH_WORK=todo.to_json(), BENCH_ROW=json.dumps(told))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file"]
    command = [*launch, config, str(HERE / "gpu.py")]
    run = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    report = Path(told["report"])
    if not report.exists():
        lines = run.stdout.decode(errors="replace").strip().splitlines() or ["no word"]
        memory = [line for line in lines if "out of memory" in line.lower()]
        return {"failed": (memory or lines)[-1][:200]}
    found = json.loads(report.read_text())
    metrics = folder / "run" / "metrics.jsonl"  # of a baked project
    if metrics.exists():
        lines = map(json.loads, metrics.read_text().splitlines())
        found["logged"] = [line for line in lines if "loss" in line][-1]
    step = compare.middle(found["seconds"])
    tokens = size.batch * size.context
    return {**found, "tokens_per_second": [tokens / each for each in (step[0], step[2], step[1])]}


def worker() -> None:
    """One process of a row."""
    import warnings

    import clock

    warnings.simplefilter("ignore")
    told, todo = json.loads(os.environ["BENCH_ROW"]), Work.read()
    row = Row(**told["row"])
    clock.attach(measure(row, todo, Path(told["report"])))
    globals()[row.peer](row, todo)


def table(report: dict):
    """Rows with their speed, the share of the peak, and where the time of a step goes."""
    from rich import box
    from rich.table import Table

    columns = ["", "tokens/s", "range", "MFU", "half attention", "peak GB", *KINDS, "idle"]
    shown = Table(*columns, box=box.MARKDOWN)
    for name, found in report["rows"].items():
        if "failed" in found:
            shown.add_row(name, "failed", found["failed"])
            continue
        speed, low, high = found["tokens_per_second"]
        shares = [speed * each / report["peak"] for each in report["flops_a_token"]]
        parts = [each / found["profiled_seconds"] for each in found["kinds"].values()]
        parts.append(max(0.0, 1 - sum(parts)))
        shown.add_row(
            name,
            f"{speed:,.0f}",
            f"{low:,.0f} to {high:,.0f}",
            *(f"{share:.1%}" for share in shares),
            f"{found['memory'] / 1e9:.1f}",
            *(f"{part:.0%}" for part in parts),
        )
    return shown


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--rows", nargs="*", default=[""], help="rows whose names contain these")
    parser.add_argument("--steps", type=int, help="steps in a round")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("--folder", type=Path, help="keep the data here, for the next call")
    asked = parser.parse_args()
    gpu = asked.device == "cuda"
    if gpu and not torch.cuda.is_available():
        sys.exit("there is no GPU that torch sees; try --device cpu")
    size = LARGE if gpu else TINY
    size = replace(size, steps=asked.steps or size.steps)
    code = f"import gpu, json; print(json.dumps(gpu.probe('{asked.device}')))"
    command, env = [sys.executable, "-c", code], environment(asked.device)
    found = json.loads(subprocess.check_output(command, cwd=HERE, env=env).splitlines()[-1])
    device, measured = found["device"], found["matmul"]
    known = [numbers[2] for name, numbers in PEAKS.items() if gpu and name in device]  # bf16
    report = {**compare.about_machine(), **found, "size": asdict(size), "rows": {}}
    report["peak"] = known[0] * 1e12 if known and known[0] else measured
    report["flops_a_token"] = [flops_a_token(size), flops_a_token(size, attention=6)]
    file = results_file(asked.output, device)
    if file.exists():
        report["rows"] = json.loads(file.read_text())["rows"]
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="bench"))
    kept = folder / "work.json"
    rows = {row.name: row for word in asked.rows for row in ROWS if word in row.name}
    try:
        if not kept.exists():
            folder.mkdir(exist_ok=True)
            new = Path(tempfile.mkdtemp(dir=folder))
            todo = compare.prepare(compare.bake(new), replace(size, batch=BATCH), new / "data")
            kept.write_text(todo.to_json())
        todo = Work.from_json(kept.read_text())
        for row in rows.values():
            print(f"{row.name} ...", file=sys.stderr, flush=True)
            sized = replace(size, batch=row.micro_batch * row.accumulation)
            output = tempfile.mkdtemp(dir=folder)
            found = run_row(row, replace(todo, size=sized, output=output), asked.device)
            report["rows"][row.name] = found
            file.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        if not asked.folder:
            shutil.rmtree(folder, ignore_errors=True)

    print(compare.markdown(table(report)))
    whole, half = (each / 1e9 for each in report["flops_a_token"])
    source = "data sheet" if known else "measured here"
    print(
        f"{device}: peak {report['peak'] / 1e12:.3g} TFLOP/s ({source}), a large matrix product "
        f"{measured / 1e12:.3g}; {whole:.3g} GFLOP a token, {half:.3g} with half the attention; "
        f"{', '.join(f'{n} {v}' for n, v in report['versions'].items())}; {report['date']}\n{file}"
    )


if __name__ == "__main__":
    worker() if "BENCH_ROW" in os.environ else main()
