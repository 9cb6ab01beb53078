"""Stops, times and counts a peer from outside of its loop.

All peers read their batches through an iterator of torch's DataLoader, once a micro-batch. That is
where this module counts their first steps, and then lets them wait for compare.py to say how many
steps to go on. A prefetched batch shifts the moment, not the time between two of them.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.flop_counter import flop_registry

from work import Work

aten = torch.ops.aten
attention = aten._scaled_dot_product_flash_attention
backward = aten._scaled_dot_product_flash_attention_backward
FLOPS = {
    **flop_registry,  # torch has no formula for the kernels of the CPU
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[backward],
}


class Counter(TorchDispatchMode):
    """Counts FLOPs, items in the loss, and losses.

    The loss is read where all losses of tokens pass, in nll_loss_forward.
    """

    def __init__(self):
        super().__init__()
        self.flops = 0
        self.losses: list[tuple[float, int]] = []  # of each loss: sum, items in the loss

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket
        if name in FLOPS:
            self.flops += FLOPS[name](*args, **(kwargs or {}), out_val=result)
        if name is aten.nll_loss_forward and torch._C._current_graph_task_id() == -1:
            terms = int((args[1] != args[4]).sum())
            self.losses.append((float(result[0].sum()) * (terms if args[3] == 1 else 1), terms))
        return result


def control(commands, answers, counted: int) -> Iterator:
    """Counts the first steps, then obeys lines: each says how many steps to time.

    It yields once before each step. FLOPs are those of a step after the first.
    """
    with Counter() as counter:
        yield
        first = counter.flops
        for _ in range(counted - 1):
            yield
    found = {"flops": (counter.flops - first) / (counted - 1), "losses": counter.losses}
    print(json.dumps(found), file=answers, flush=True)
    for command in iter(commands.readline, ""):
        began = time.perf_counter()
        for _ in range(int(command)):
            yield
        print(json.dumps(time.perf_counter() - began), file=answers, flush=True)
    os._exit(0)


def attach(steps: Iterator, micro_batches: int = 1) -> None:
    """Advances `steps` before the first of so many batches that this process reads for a step."""
    fetch, numbers = _BaseDataLoaderIter.__next__, itertools.count()

    def advance_and_fetch(loader):
        if next(numbers) % micro_batches == 0:
            next(steps)
        return fetch(loader)

    _BaseDataLoaderIter.__next__ = advance_and_fetch


def install(work: Work) -> None:
    """Lets lines on stdin control this process, with answers on stdout; what it prints itself goes
    to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    attach(control(sys.stdin, answers, work.counted), work.micro_batches)
