"""Counts what a process receives, opens and asks for, by phase, on more and more processes.

    python benchmarks/counts.py                # of the library on PYTHONPATH: W = 2, 4, 8, 16

W gloo processes of this machine train 150 layers of 16 x 16 for ten steps with `Training`, under
DDP and FSDP2, save at steps 5 and 10, and resume. Counted is the most that any of them has: calls
of torch.distributed, the bytes that they bring (an object that all gather counts W times), files of
tensors that it opens to read, and keys in the largest request to the store where processes meet.
The gradients that DDP and FSDP2 exchange are not counted.
"""

import argparse
import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import compare

PHASES = {"meet": 1, "start": 1, "steps": 10, "save": 2, "resume": 1}  # how often each happens
COLUMNS = ("calls", "bytes", "files", "keys")
TENSORS = ("all_reduce", "broadcast", "all_to_all_single")
OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "recv_object_list")
found: Counter = Counter()  # of this process, by phase and column
phase = ""


def counting(name: str, call: Any) -> Any:
    """A function of a library, whose calls are counted."""

    def counted(*given: Any, **named: Any) -> Any:
        result = call(*given, **named)
        found[phase, "files" if name == "safe_open" else "calls"] += 1
        if name in TENSORS:
            found[phase, "bytes"] += given[0].nbytes
        elif name in OBJECTS:
            values = given[0] if name != "gather_object" else given[1] or ()
            found[phase, "bytes"] += sum(len(pickle.dumps(value)) for value in values)
        elif name == "check":
            found[phase, "calls"] -= 1
            found[phase, "keys"] = max(found[phase, "keys"], len(given[1]))
        return result

    return counted


def note_open(event: str, given: tuple) -> None:
    if event == "open" and given[1] in ("r", "rb") and str(given[0]).endswith(".safetensors"):
        found[phase, "files"] += 1


def train(layout: str, folder: Path) -> None:
    """Trains, or resumes, as one of the processes."""
    global phase
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from samestep import Training
    from samestep.launch import rendezvous

    phase = "meet"
    rendezvous.form_group(300, rendezvous.join(lambda _: os._exit(1)))
    phase, plugin = "", None
    if layout == "FSDP2":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(150)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    rows = [{"x": torch.randn(16, generator=torch.Generator().manual_seed(i))} for i in range(64)]
    is_resumed = (folder / "checkpoints").exists()
    accelerator.wait_for_everyone()
    phase = "resume" if is_resumed else "start"
    size = 64 // accelerator.num_processes
    training = Training(accelerator, model, optimizer, rows, folder=folder, seed=0,
                        global_batch_size=64, micro_batch_size=size)  # fmt: skip
    training.resume()
    phase = "steps"
    for step in training.steps(0 if is_resumed else 10):
        for batch in step:
            with accelerator.accumulate(model):
                step.backward(model(batch["x"]).square().sum())
        step.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step.number % 5 == 0:
            phase = "save"
            training.save()
            phase = "steps"
    phase = ""
    accelerator.wait_for_everyone()


def fork(layout: str, processes: int, folder: Path) -> None:
    """Forks the processes of a run, then those that resume it; each writes its counts."""
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}
    import safetensors
    import torch.distributed as dist

    for name in (*TENSORS, *OBJECTS, "send_object_list"):
        setattr(dist, name, counting(name, getattr(dist, name)))
    safetensors.safe_open = counting("safe_open", safetensors.safe_open)
    check = counting("check", dist.PrefixStore.check)
    dist.PrefixStore = type("Store", (dist.PrefixStore,), {"check": lambda *given: check(*given)})
    sys.addaudithook(note_open)
    if layout == "FSDP2":  # as in the tests, where the CPU stands in for a GPU
        os.environ["ACCELERATE_USE_CPU"] = "false"
        sys.path.append(str(compare.HERE.parent / "tests"))
        importlib.import_module("sharded_on_cpu")
    importlib.import_module("samestep.training.training")
    for start in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            os.environ["MASTER_PORT"] = str(server.getsockname()[1])
        forked = []
        for rank in range(processes):
            forked.append(os.fork())
            if not forked[-1]:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                train(layout, folder / "run")
                counts = {p: {c: found[p, c] / n for c in COLUMNS} for p, n in PHASES.items()}
                (folder / f"{start}-{rank}.json").write_text(json.dumps(counts))
                os._exit(0)
        for _ in range(processes):
            if os.wait()[1]:
                os.killpg(0, 9)


def measure(asked: argparse.Namespace, folder: Path) -> dict:
    """The most of each count, by layout and number of processes."""
    counts: dict = {layout: {} for layout in asked.layouts}
    for layout, size in [(each, size) for each in asked.layouts for size in asked.processes]:
        place = folder / f"{layout}-{size}"
        place.mkdir()
        words = [sys.executable, __file__, "--fork", layout, str(size), str(place)]
        subprocess.run(words, env=compare.environment(), check=True, process_group=0)
        each = [json.loads(path.read_text()) for path in place.glob("*.json")]
        most = {p: {c: max(one[p][c] for one in each) for c in COLUMNS} for p in PHASES}
        counts[layout][size] = most
    return {"counts": counts}


def describe(report: dict) -> str:
    """A row for each phase and count, with the ratio of the last two numbers of processes."""
    rows = []
    for layout, counts in report["counts"].items():
        for phase, column in [(phase, column) for phase in PHASES for column in COLUMNS]:
            each = [counted[phase][column] for counted in counts.values()]
            if each[-1]:
                shown = [f"{n:,.0f}" for n in each]
                rows.append([layout, phase, column, *shown, f"{each[-1] / (each[-2] or 1):.2f}"])
    return compare.markdown(["", "phase", "count", *counts, "grows"], rows)


def main() -> None:
    parser = compare.parser_of(__doc__, "counts")
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--layouts", nargs="+", default=["DDP", "FSDP2"])
    if sys.argv[1:2] == ["--fork"]:
        fork(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        compare.publish(parser.parse_args(), measure, describe)


if __name__ == "__main__":
    main()
