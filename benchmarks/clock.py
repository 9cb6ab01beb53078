"""Stops, times and counts a peer from outside of its loop.

All peers read their batches through an iterator of torch's DataLoader, once a step. That is where
this module counts their first steps, and then lets them wait for compare.py to say how many steps
to go on. A prefetched batch shifts the moment, not the time between two of them.
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
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from work import Size

aten = torch.ops.aten
CPU_ATTENTION = {  # torch has no FLOP formula for the kernels of the CPU
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
        sdpa_backward_flop_count(g.shape, q.shape, k.shape, v.shape)
    ),
}


# ---- Counting ------------------------------------------------------------------------------------


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
        if name in CPU_ATTENTION:
            self.flops += CPU_ATTENTION[name](*args, **(kwargs or {}))
        elif name in flop_registry:
            self.flops += flop_registry[name](*args, **(kwargs or {}), out_val=result)
        if name is aten.nll_loss_forward and torch._C._current_graph_task_id() == -1:
            terms = int((args[1] != args[4]).sum())
            self.losses.append((float(result[0].sum()) * (terms if args[3] == 1 else 1), terms))
        return result


# ---- Stopping and timing -------------------------------------------------------------------------


def control(commands, answers, counted: int) -> Iterator:
    """Counts the first steps, then obeys lines: "N": time N steps; "end": exit.

    It yields once before each batch, so between two steps.
    """

    def answer(**values) -> None:
        print(json.dumps(values), file=answers, flush=True)

    if counted:
        counter, before = Counter(), 0
        last = min(10, counted - 1)  # steps; ten have one line of metrics among them
        with counter:
            for step in range(counted):
                if step == counted - last:
                    before = counter.flops
                yield
        answer(flops=(counter.flops - before) / last, losses=counter.losses)
    while (command := commands.readline().strip()) not in ("", "end"):
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(int(command)):
            yield
        answer(seconds=time.perf_counter() - began, cpu=time.process_time() - cpu_began)
    os._exit(0)


def attach(steps: Iterator, micro_batches: int = 1) -> None:
    """Advances `steps` before the first of so many batches that this process reads for a step."""
    fetch, numbers = _BaseDataLoaderIter.__next__, itertools.count()

    def advance_and_fetch(loader):
        if next(numbers) % micro_batches == 0:
            next(steps)
        return fetch(loader)

    _BaseDataLoaderIter.__next__ = advance_and_fetch


def install(size: Size) -> None:
    """Lets lines on stdin control this process, with answers on stdout; what it prints itself goes
    to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    attach(control(sys.stdin, answers, size.counted), size.micro_batches)
