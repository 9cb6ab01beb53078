"""Computes what each of up to 16,384 processes does, one after the other, by the library's code.

    python benchmarks/any_rank.py                              # ten minutes
    python benchmarks/any_rank.py --sizes 1 3 8 --micro_batches 64 --values 16

For each number of processes: a step's rows, the sum of its gradients with exact, and the files of a
checkpoint under FSDP2 and DDP; each row and each value once, one sum for all. Then what a save of
900 tensors brings to the main process, and its CPU seconds without the hash of its own values.
"""

import argparse
import hashlib
import pickle
import time
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

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

SHAPES = [(4096, 4096)] * 6 + [(11008, 4096)] + [(4096,)] * 2  # of a hundred layers


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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
    return digest(np.sort(rows).tobytes()), digest(total.total()[0].numpy().tobytes())


def check_files(processes: int) -> None:
    """Checks that the processes write each value once, sharded and not."""
    written, shapes = {}, {"few": (3, 2), "matrix": (2 * processes + 1, 2)}
    for rank in range(processes):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
        mesh, tensors = DeviceMesh("cpu", torch.arange(processes)), {}
        for name, shape in shapes.items():
            tensors[name] = zeros(shape, device_mesh=mesh, placements=[Shard(0)])
            tensors[f"{name}, whole"] = torch.zeros(shape)
        share = take_share(tensors, SimpleNamespace(layout=Layout(processes, rank)))
        for name, place in share.places.items():
            first = place["saved_offsets"][0]
            written.setdefault(name, []).extend(range(first, first + len(share.parts[name])))
        dist.destroy_process_group()
    for name, rows in written.items():
        assert sorted(rows) == [*range(shapes[name.partition(",")[0]][0])], name


class Main(Ranks):
    """The main process of many: what others send it follows from the rows that each has."""

    def __init__(self, processes: int):
        self.layout, self.received, self.step = Layout(processes, 0), [], 1
        self.extra = processes - (1 << processes.bit_length() - 1)
        self.shapes = {f"state.layers.{i // 9}.{i % 9}.exp_avg": SHAPES[i % 9] for i in range(900)}

    def trees(self, ranks: range) -> dict[str, Tree]:
        """What neighbors know together of the tensors that are left: digests are made up."""
        trees = {}
        for name, shape in self.shapes.items():
            if zlib.crc32(name.encode()) & (self.step - 1):
                continue  # another process has it by now
            tree = trees[name] = Tree("F32", [*shape], 4)
            each = -(-shape[0] // self.layout.processes) * (tree.size // shape[0])
            low, high = (min(rank * each, tree.size) for rank in (ranks.start, ranks.stop))
            last = tree.count if high == tree.size else high // tree.leaf
            for node in nodes_of(range(-(-low // tree.leaf), last)):
                tree.nodes[node] = hashlib.sha256(f"{name} {node}".encode()).digest()
            inside = min(-(-low // tree.leaf) * tree.leaf, high)
            for begin, end in ((low, inside), (max(inside, last * tree.leaf), high)):
                if begin < end:
                    tree.pieces[begin // tree.leaf] = [(begin, bytes(end - begin))]
        return trees

    def _send(self, value: object, rank: int) -> None:
        pickle.dumps(value)

    def _receive(self, rank: int) -> object:
        began, step = time.process_time(), self.step
        ranks = range(1, 2)  # one that has no other to exchange with
        if self.received or not self.extra:
            ranks = range(step + min(step, self.extra), 2 * step + min(2 * step, self.extra))
            self.step = 2 * step
        self.received.append(pickle.dumps(self.trees(ranks)))
        self.began += time.process_time() - began
        return pickle.loads(self.received[-1])

    def save(self) -> tuple[float, float]:
        """The MB that a save brings, and CPU seconds."""
        own, self.began = self.trees(range(1)), time.process_time()
        self.join(own, Tree.merge)
        rows = max(rows for rows, *_ in SHAPES)
        writers = -(-rows // -(-rows // self.layout.processes))
        files = {f"rank-{i:05}": (0, 10**9 + i, digest(b"%d" % i)[:32]) for i in range(writers)}
        tensors = {name: ["F32", [*s], digest(name.encode())] for name, s in self.shapes.items()}
        self.received += [pickle.dumps(files), pickle.dumps(tensors)]
        [pickle.loads(content) for content in self.received[-2:]]
        return sum(map(len, self.received)) / 1e6, time.process_time() - self.began


def measure(asked: argparse.Namespace, _: Path) -> dict:
    """A row for each number of processes."""
    draw = torch.Generator().manual_seed(0)
    exponents = torch.randint(-15, 15, (asked.micro_batches, 1), generator=draw)
    gradients = torch.randn(asked.micro_batches, asked.values, generator=draw) * 2.0**exponents
    found = {}
    for processes in asked.sizes:
        check_files(processes)
        found[processes] = [*compute_step(processes, gradients), *Main(processes).save()]
    assert len({tuple(row[:2]) for row in found.values()}) == 1, found
    return {"found": found}


def describe(report: dict) -> str:
    rows = []
    for processes, (_, total, megabytes, seconds) in report["found"].items():
        rows.append([processes, "once", total[:12], f"{megabytes:.2f} MB", f"{seconds:.2f} s"])
    columns = ["processes", "each row, each value", "sum", "a save brings", "and takes (CPU)"]
    return compare.markdown(columns, rows)


def main() -> None:
    parser = compare.parser_of(__doc__, "any_rank")
    sizes = [1, 2, 3, 7, 128, 1000, 10000, 16384]
    parser.add_argument("--sizes", nargs="+", type=int, default=sizes)
    parser.add_argument("--micro_batches", type=int, default=16384)
    parser.add_argument("--values", type=int, default=1000, help="of a gradient")
    compare.publish(parser.parse_args(), measure, describe)


if __name__ == "__main__":
    main()
