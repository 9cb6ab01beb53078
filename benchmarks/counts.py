"""Counts what a process receives, opens and asks for, by phase, on more and more processes.

    python benchmarks/counts.py                          # W = 2, 4, 8, 16 under DDP and FSDP2
    python benchmarks/counts.py --against CHECKOUT       # beside another state of the library

W gloo processes of this machine train 150 layers of 16 x 16 for ten steps with `Training`, save at
steps 5 and 10, and resume. Counted is the most that any of them has: calls of torch.distributed,
the bytes that they bring (an object that all gather counts W times), files of tensors that it opens
to read, and keys in the largest request to the store where processes meet. The gradients that DDP
and FSDP2 exchange are not counted.
"""

import argparse
import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import compare

PHASES = {"meet": 1, "start": 1, "steps": 10, "save": 2, "resume": 1}  # how often each happens
COLUMNS = ("calls", "bytes", "files", "keys")


def size_of(name: str, given: tuple) -> int:
    """The bytes that a call of torch.distributed has brought to this process."""
    if name in ("all_reduce", "broadcast", "all_to_all_single"):
        return given[0].nbytes
    if name in ("broadcast_object_list", "recv_object_list"):
        return len(pickle.dumps(given[0]))
    values = {"all_gather_object": given[0], "gather_object": given[1:2] and given[1]}.get(name)
    return sum(len(pickle.dumps(value)) for value in values or ())


class Counts:
    """What this process does, by phase and kind. It stands in for functions of the libraries."""

    def __init__(self) -> None:
        import safetensors
        import torch.distributed as dist

        self.phase, self.found, self.keys = "", Counter(), 0
        for name in dir(dist):
            kinds = ("all_reduce", "broadcast", "all_to_all_single")
            if name in kinds or (name.endswith(("object", "object_list")) and name[0] != "_"):
                setattr(dist, name, self.counting(name, getattr(dist, name)))
        safetensors.safe_open = self.counting("files", safetensors.safe_open)
        sys.addaudithook(self.note_open)
        check = dist.Store.check

        class Store(dist.PrefixStore):
            def check(store, keys: list[str]) -> bool:  # noqa: N805
                self.keys = max(self.keys, len(keys))
                return check(store, keys)

        dist.PrefixStore = Store

    def note_open(self, event: str, given: tuple) -> None:
        is_file = event == "open" and str(given[0]).endswith(".safetensors")
        if is_file and given[1] in ("r", "rb"):
            self.found[self.phase, "files"] += 1

    def counting(self, name: str, call: Any) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            result = call(*given, **named)
            if name == "files":
                self.found[self.phase, "files"] += 1
                return result
            self.found[self.phase, "calls"] += 1
            self.found[self.phase, "bytes"] += size_of(name, given)
            return result

        return counted

    def by_phase(self) -> dict[str, dict[str, float]]:
        self.found["meet", "keys"] = self.keys
        kinds = {
            phase: {c: self.found[phase, c] / n for c in COLUMNS} for phase, n in PHASES.items()
        }
        return {phase: kinds[phase] for phase in PHASES}


def train(counts: Counts, layout: str, folder: Path) -> None:
    """Trains, or resumes, as one of the processes."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    import samestep

    package = samestep.Ranks.__module__.rpartition(".")[0]
    place = "launch" if package.endswith("processes") else "project"  # of an older library
    rendezvous = importlib.import_module(f"samestep.{place}.rendezvous")
    counts.phase = "meet"
    rendezvous.form_group(300, rendezvous.join(lambda _: os._exit(1)))
    counts.phase, plugin = "", None
    if layout == "FSDP2":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(150)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    rows = [{"x": torch.randn(16, generator=torch.Generator().manual_seed(i))} for i in range(64)]
    is_resumed = (folder / "checkpoints").exists()
    accelerator.wait_for_everyone()
    counts.phase = "resume" if is_resumed else "start"
    size = 64 // accelerator.num_processes
    training = samestep.Training(
        accelerator, model, optimizer, rows, folder=folder, seed=0, global_batch_size=64,
        micro_batch_size=size, settings={},
    )  # fmt: skip
    training.resume()
    counts.phase, save = "steps", training.save

    def counted_save() -> None:
        counts.phase = "save"
        save()
        counts.phase = "steps"

    training.save = counted_save
    for step in training.steps(0 if is_resumed else 10, save_every=5):
        for batch in step:
            with accelerator.accumulate(model):
                step.backward(model(batch["x"]).square().sum())
        step.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
    counts.phase = ""
    accelerator.wait_for_everyone()


def child(layout: str, processes: int, folder: Path) -> None:
    """Forks the processes of a run, then those that resume it; prints the most of each count."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"}
    counts = Counts()
    if layout == "FSDP2":  # as in the tests, whose CPU stands in for a GPU
        os.environ |= {"ACCELERATE_USE_CPU": "false"}
        sys.path.append(str(compare.HERE.parent / "tests"))
        importlib.import_module("sharded_on_cpu")
    for name in ("accelerate", "samestep.training.training", "samestep.core.training"):
        if importlib.util.find_spec(name.rpartition(".")[0] or name):
            importlib.import_module(name)
    for start in range(2):
        os.environ["MASTER_PORT"] = str(port + start)
        forked = []
        for rank in range(processes):
            if number := os.fork():
                forked.append(number)
                continue
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            code = 1
            try:
                train(counts, layout, folder / "run")
                (folder / f"{start}-{rank}.json").write_text(json.dumps(counts.by_phase()))
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        if any([os.waitpid(number, 0)[1] for number in forked]):
            sys.exit("a process has failed")
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    most = {p: {c: max(each[p][c] for each in found) for c in COLUMNS} for p in PHASES}
    print(json.dumps(most))


def measure(asked: argparse.Namespace, folder: Path) -> dict:
    """The counts of each state of the library, layout and number of processes."""
    found: dict = {}
    places = {"now": compare.HERE.parent} | ({"before": asked.against} if asked.against else {})
    for name, checkout in places.items():
        for layout in asked.layouts:
            for processes in asked.processes:
                place = folder / f"{name}-{layout}-{processes}"
                place.mkdir()
                words = [__file__, "--child", layout, str(processes), str(place)]
                env = compare.environment(PYTHONPATH=str(checkout.resolve() / "src"))
                run = subprocess.run(
                    [sys.executable, *words], env=env, capture_output=True, text=True
                )
                if run.returncode:
                    sys.exit(run.stdout + run.stderr)
                counted = json.loads(run.stdout.splitlines()[-1])
                found.setdefault(f"{layout}, {name}", {})[processes] = counted
    return {"counts": found}


def describe(report: dict) -> str:
    """A row for each phase and count, with how much the last number of processes adds."""
    rows = []
    for name, found in report["counts"].items():
        for phase in PHASES:
            for column in COLUMNS:
                counted = [each[phase][column] for each in found.values()]
                if any(counted):
                    grows = f"{counted[-1] / counted[-2]:.2f}" if counted[-2:-1] > [0] else "-"
                    rows.append([name, phase, column, *(f"{n:,.0f}" for n in counted), grows])
    sizes = [f"W = {processes}" for processes in next(iter(report["counts"].values()))]
    return compare.markdown(["", "phase", "count", *sizes, "grows"], rows)


def main() -> None:
    parser = compare.parser_of(__doc__, "counts")
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--layouts", nargs="+", default=["DDP", "FSDP2"])
    parser.add_argument("--against", type=Path, help="another checkout")
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
        return
    compare.publish(parser.parse_args(), measure, describe)


if __name__ == "__main__":
    main()
