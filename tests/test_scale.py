"""What a process does among many: who writes and reads what, what is joined, how it is counted."""

import itertools
import math
import queue
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as place_of
from torch.distributed.tensor.placement_types import _StridedShard

from samestep.processes.mesh import Layout
from samestep.processes.ranks import Ranks
from samestep.state import checkpoints, tensor_files
from test_benchmarks import run


class Mesh:
    def __init__(self, ranks, rank):
        self.mesh, self.rank = ranks, rank

    def get_coordinate(self):
        return (self.mesh == self.rank).nonzero()[0].tolist()


CUTS = [
    ((4,), [Shard(0)]),
    ((3, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 3, 2), [Replicate(), Shard(0), Shard(1)]),
]


@pytest.mark.parametrize("sizes, placements", CUTS)
@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (2, 3), (1, 1)])
def test_who_writes_a_value_is_computed_as_torch_cuts_it(sizes, placements, shape):
    """On each process alike; in each block those that have values of it, and no others."""
    count, found = math.prod(sizes), {}
    ranks = torch.arange(count).view(sizes)
    for rank in range(count):
        mesh = Mesh(ranks, rank)
        holders = tensor_files._holders_of(mesh, tuple(placements), Layout(count, rank))
        cuts, distance = tensor_files._cuts_of(mesh, tuple(placements))
        assert rank in holders
        found[rank] = (
            (holders[-1] - distance, cuts),
            place_of(shape, sizes, mesh.get_coordinate(), placements),
        )
        parts = [found[peer][1] for peer in holders if peer in found]
        assert all(part == parts[0] for part in parts)
    index = found[0][0]
    assert all(each == index for each, _ in found.values())
    for block in itertools.product(*(itertools.combinations(range(n + 1), 2) for n in shape)):
        offsets, size = [a for a, _ in block], [b - a for a, b in block]
        writers = [*tensor_files.find_ranks(*index, shape, offsets, size)]
        expected = set()
        for part, first in (about for _, about in found.values()):
            spans = zip(first, part, block, strict=True)
            if all(max(f, a) < min(f + n, b) for f, n, (a, b) in spans):
                expected.add((*first,))
        assert {(*found[writer][1][1],) for writer in writers} == expected
        assert len(writers) == len(expected)


class Threads(Ranks):
    """Processes that are threads."""

    def __init__(self, rank, count, channels):
        self.layout, self.channels = Layout(count, rank), channels

    def _send(self, value, rank):
        self.channels[self.layout.rank, rank].put(value)

    def _receive(self, rank):
        return self.channels[rank, self.layout.rank].get(timeout=60)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11])
def test_each_name_is_joined_once_on_any_number_of_processes(count):
    channels = {pair: queue.Queue() for pair in itertools.product(range(count), repeat=2)}
    joined, whole = {}, {}

    def work(rank):
        ranks = Threads(rank, count, channels)
        values = {f"all {i}": [rank] for i in range(40)} | {f"of {rank}": [rank]}
        joined[rank] = ranks.join(values, lambda one, other: one + other)
        whole[rank] = ranks.union(joined[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    names = [name for values in joined.values() for name in values]
    assert sorted(names) == sorted({*names}) and max(map(len, joined.values())) <= 2 + 80 / count
    expected = {f"all {i}": [*range(count)] for i in range(40)}
    expected |= {f"of {rank}": [rank] for rank in range(count)}
    assert {name: sorted(value) for name, value in whole[0].items()} == expected


def test_a_damaged_file_is_seen_by_all_that_hash_a_share(tmp_path):
    files = [f"file-{i}" for i in range(5)]
    for name in files:
        (tmp_path / name).write_text(name)
    saved = checkpoints.describe_files(tmp_path, files)
    (tmp_path / "file-3").write_text("FILE-3")
    reasons = []
    for rank in range(3):
        ranks = SimpleNamespace(place_in_node=(rank, 3), nodes=[0] * 3, layout=Layout(3, rank))
        ranks.sum_over_ranks, ranks.gather = lambda *each: [*each], lambda reason: ["", reason]
        reasons.append(checkpoints.verify_together(tmp_path, saved, ranks))
    assert reasons == [f"{tmp_path / 'file-3'} is not the file that was saved", "", ""]


@pytest.mark.slow
def test_any_process_has_its_part_of_the_whole(tmp_path):
    flags = ["--sizes", 1, 3, 8, "--micro_batches", 64, "--values", 16]
    result, report = run("any_rank.py", *flags, "--output", tmp_path)
    assert len({tuple(row[:2]) for row in report["found"].values()}) == 1
    assert result.stdout.count("| once |") == 3


@pytest.mark.slow
def test_counts_of_four_processes_are_not_twice_those_of_two(tmp_path):
    flags = ["--processes", 2, 4, "--layouts", "DDP"]
    two, four = run("counts.py", *flags, "--output", tmp_path)[1]["counts"]["DDP"].values()
    assert two["meet"]["keys"] == four["meet"]["keys"] == 1
    assert two["save"]["files"] == four["save"]["files"] == 2
    for phase in ("start", "save", "resume"):
        assert 0 < four[phase]["bytes"] < 1.5 * two[phase]["bytes"]
