"""Computes what any process of up to 16,384 does, one after the other, by the library's functions.

    python benchmarks/any_rank.py                              # five minutes
    python benchmarks/any_rank.py --sizes 1 3 8 --micro_batches 64 --values 16

For each number of processes W a step's rows, the sum of its gradients with exact, and the files of
a checkpoint under FSDP2 and DDP: each row and each value once, one sum for all. Then what a save of
900 tensors brings to the main process, and its CPU seconds: of names and digests, without a network
and without the hash of its own values.
"""

import argparse
import hashlib
import pickle
import time
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Shard, zeros
from torch.testing._internal.distributed.fake_pg import FakeStore

import compare
from samestep.processes.mesh import Layout
from samestep.processes.ranks import Ranks
from samestep.state.state_hash import Tree
from samestep.state.tensor_files import take_share
from samestep.step.exact import TreeSum, nodes_of
from samestep.step.order import SampleOrder
from samestep.step.plan import plan_step

SIZES = [1, 2, 3, 7, 128, 1000, 10000, 16384]
SHAPES = [(4096, 4096)] * 6 + [(11008, 4096)] + [(4096,)] * 2  # of 900 tensors, in a hundred layers


def compute_step(processes: int, gradients: torch.Tensor) -> tuple[str, str]:
    """Digests of the sorted rows of a step, and of the sum of its gradients, of all processes."""
    count, rows, total = len(gradients), [], TreeSum()
    plan = plan_step(4 * count, 4, processes, exact=True)
    ids = SampleOrder(10 * count, seed=0).ids(range(4 * count))
    for rank in range(processes):
        own, tree = replace(plan, rank=rank), TreeSum()
        for number in own.run():
            rows += own.positions(ids, number).tolist()
            tree.add(number, [gradients[number].clone()])
        for first, size, sums in tree.nodes:
            total.add(first, sums, size)
    found = np.sort(rows).tobytes(), total.total()[0].numpy().tobytes()
    return tuple(hashlib.sha256(each).hexdigest()[:12] for each in found)


def check_files(processes: int) -> None:
    """Exits unless the processes write each value once, sharded and not."""
    written: dict[str, list[tuple[int, int]]] = {}
    shapes = {"matrix": (2 * processes + 1, 2), "few": (3, 2), "vector": (7 * processes - 1,)}
    for rank in range(processes):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
        mesh, tensors = DeviceMesh("cpu", torch.arange(processes)), {}
        for name, shape in shapes.items():
            tensors[name] = zeros(shape, device_mesh=mesh, placements=[Shard(0)])
            tensors[f"whole {name}"] = torch.zeros(shape)
        share = take_share(tensors, SimpleNamespace(layout=Layout(processes, rank)))
        for name, part in share.parts.items():
            place = share.places[name]["saved_offsets"][0], len(part)
            written.setdefault(name, []).append(place)
        dist.destroy_process_group()
    for name, shape in shapes.items():
        for places in (written[name], written[f"whole {name}"]):
            ends = np.cumsum([0] + [size for _, size in sorted(places)]).tolist()
            assert [first for first, _ in sorted(places)] == ends[:-1] and ends[-1] == shape[0]


class Alone(Ranks):
    """A process of many, all others of which are computed: what they send follows from who they
    are, since each process has the rows of FSDP2."""

    def __init__(self, rank: int, processes: int):
        self.layout, self.bytes, self.seconds, self.turns = Layout(processes, rank), 0, 0.0, 0
        self.shapes = {f"state.layers.{i // 9}.{i % 9}.exp_avg": SHAPES[i % 9] for i in range(900)}
        self.paired = 1 << processes.bit_length() - 1
        self.extra = processes - self.paired

    def trees(self, first: int, end: int, names: Any) -> dict[str, Tree]:
        """What neighbors know of these tensors together: digests are made up."""
        found = {}
        for name in names:
            tree = found[name] = Tree("F32", [*self.shapes[name]], 4)
            rows = self.shapes[name][0]
            low, high = (
                min(rank * -(-rows // self.layout.processes), rows) * (tree.size // rows)
                for rank in (first, end)
            )
            last = tree.count if high == tree.size else high // tree.leaf
            for node in nodes_of(range(-(-low // tree.leaf), last)):
                tree.nodes[node] = hashlib.sha256(f"{name} {node}".encode()).digest()
            inside = -(-low // tree.leaf) * tree.leaf
            for begin, stop in ((low, min(inside, high)), (max(inside, last * tree.leaf), high)):
                if begin < stop:
                    tree.pieces[begin // tree.leaf] = [(begin, bytes(stop - begin))]
        return found

    def _send(self, value: Any, _: int) -> None:
        pickle.dumps(value)

    def _receive(self, _: int) -> Any:
        rank, names, start = self.layout.rank, [*self.shapes], lambda p: p + min(p, self.extra)
        block, is_paired = (rank + 1, rank + 2), rank < 2 * self.extra
        if self.turns or not is_paired:
            step = 1 << self.turns - is_paired
            place = rank // 2 if is_paired else rank - self.extra
            names = [n for n in names if (zlib.crc32(n.encode()) ^ place) & (2 * step - 1) == 0]
            other = (place ^ step) // step * step
            block = start(other), start(other + step)
        began = time.process_time()
        content = pickle.dumps(self.trees(*block, names))
        self.seconds -= time.process_time() - began  # the others' time
        self.turns, self.bytes = self.turns + 1, self.bytes + len(content)
        return pickle.loads(content)


def measure_save(processes: int) -> tuple[float, float]:
    """The MB that a save brings to the main process, and its CPU seconds."""
    alone = Alone(0, processes)
    own = alone.trees(0, 1, alone.shapes)
    began = time.process_time()
    alone.join(own, Tree.merge)
    files = {f"rank-{rank:05}.safetensors": (0, 10**9 + rank, "0" * 64) for rank in range(processes)}
    tensors = {name: ["F32", [*shape], "0" * 64] for name, shape in alone.shapes.items()}
    contents = [pickle.dumps(each) for each in (files, tensors)]
    for content in contents:
        pickle.loads(content)
    seconds = time.process_time() - began + alone.seconds
    return (alone.bytes + sum(map(len, contents))) / 1e6, seconds


def measure(asked: argparse.Namespace, _: Path) -> dict:
    """A row for each number of processes."""
    draw = torch.Generator().manual_seed(0)
    exponents = torch.randint(-15, 15, (asked.micro_batches, 1), generator=draw)
    gradients = torch.randn(asked.micro_batches, asked.values, generator=draw) * 2.0**exponents
    found = {}
    for processes in asked.sizes:
        began = time.perf_counter()
        digests = compute_step(processes, gradients)
        check_files(processes)
        save = measure_save(processes)
        found[processes] = [*digests, *save, time.perf_counter() - began]
        compare.say(f"{processes}: {found[processes]}")
    assert len({tuple(row[:2]) for row in found.values()}) == 1, found
    return {"found": found}


def describe(report: dict) -> str:
    rows = [
        [n, "once", total, f"{megabytes:.2f} MB", f"{cpu:.2f} s", f"{seconds:.0f} s"]
        for n, (_, total, megabytes, cpu, seconds) in report["found"].items()
    ]
    columns = ["processes", "rows, values", "sum", "a save brings", "its CPU", "to compute all"]
    return compare.markdown(columns, rows)


def main() -> None:
    parser = compare.parser_of(__doc__, "any_rank")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--micro_batches", type=int, default=16384)
    parser.add_argument("--values", type=int, default=1000, help="of a gradient")
    compare.publish(parser.parse_args(), measure, describe)


if __name__ == "__main__":
    main()
