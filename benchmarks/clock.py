"""Stops, times and counts a peer from outside of its loop.

All peers read their batches through an iterator of torch's DataLoader, once a step. That is where
this module counts their first steps, and then lets them wait for compare.py to say how many steps
to go on. A prefetched batch shifts the moment, not the time between two of them.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
READS = {  # the CPU must know their result, or its shape
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
}
COPIES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
CPU_ATTENTION = {  # torch has no FLOP formula for the kernels of the CPU
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
        sdpa_backward_flop_count(g.shape, q.shape, k.shape, v.shape)
    ),
}


# ---- Counting ------------------------------------------------------------------------------------


def is_on_device(values) -> bool:
    """Whether one of these tensors would be on the GPU.

    On a CPU all tensors look alike. Those are followed that are parameters, gradients or batches,
    that were made with a `device`, or that were computed from such tensors.
    """
    return any(
        isinstance(each, torch.nn.Parameter) or hasattr(each, "on_device")
        for each in tree_iter(values)
        if torch.is_tensor(each)
    )


def mark_on_device(values) -> None:
    for each in tree_iter(values):
        if torch.is_tensor(each):
            each.on_device = True


class Counter(TorchDispatchMode):
    """Counts FLOPs, items in the loss, losses, host waits (values that the CPU waits for), and
    launches: operations on the device that are no views. A GPU has a kernel or more for each.

    The loss is read where all losses of tokens pass, in nll_loss_forward.
    """

    def __init__(self):
        super().__init__()
        self.flops, self.waits, self.launches = 0, 0, 0
        self.losses: list[tuple[float, int]] = []  # of each loss: sum, items in the loss

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket
        in_backward = torch._C._current_graph_task_id() != -1
        on_device = in_backward or is_on_device((args, kwargs))
        if on_device:
            mark_on_device(result)
            self.launches += not function.is_view
        if name in READS:  # int32: DDP's map of used weights, which lies in the host's memory
            self.waits += on_device and args[0].dtype != torch.int32
        if name in CPU_ATTENTION:
            self.flops += CPU_ATTENTION[name](*args, **(kwargs or {}))
        elif name in flop_registry:
            self.flops += flop_registry[name](*args, **(kwargs or {}), out_val=result)
        if name is aten.nll_loss_forward and not in_backward:
            terms = int((args[1] != args[4]).sum())
            self.losses.append((float(result[0].sum()) * (terms if args[3] == 1 else 1), terms))
        return result


class CopyCounter(TorchFunctionMode):
    """Counts copies to the host, and follows tensors, where the dispatcher does not see them."""

    def __init__(self, counter: Counter):
        super().__init__()
        self.counter = counter

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in COPIES:
            self.counter.waits += is_on_device(args)
        if (kwargs or {}).get("device") is not None or function is torch.Tensor.grad.__get__:
            mark_on_device(result)
        return result


# ---- Stopping and timing -------------------------------------------------------------------------


def control(commands, answers, counted: int) -> Iterator:
    """Counts the first steps, then obeys lines: "N": time N steps; "end": exit.

    It yields once before each batch, so between two steps.
    """
    started = []  # at the end of the first step: the time, and the CPU seconds until then
    register_optimizer_step_post_hook(
        lambda *_: started or started.extend([time.time(), time.process_time()])
    )

    def answer(**values) -> None:
        print(json.dumps(values), file=answers, flush=True)

    if counted:
        counter, before = Counter(), (0, 0, 0)
        modes = (CopyCounter(counter), counter)
        last = min(10, counted - 1)  # steps; ten have one line of metrics among them
        for mode in modes:
            mode.__enter__()
        for step in range(counted):
            if step == counted - last:
                before = (counter.flops, counter.waits, counter.launches)
            yield mark_on_device
        for mode in reversed(modes):
            mode.__exit__(None, None, None)
        after = (counter.flops, counter.waits, counter.launches)
        flops, waits, launches = ((b - a) / last for a, b in zip(before, after, strict=True))
        answer(flops=flops, waits=waits, launches=launches, losses=counter.losses)
    while (command := commands.readline().strip()) not in ("", "end"):
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(int(command)):
            yield None
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        answer(seconds=seconds, cpu=cpu, started=started)
    os._exit(0)


def attach(steps: Iterator, micro_batches: int = 1) -> None:
    """Advances `steps` before the first of so many batches that this process reads for a step.

    A function that it yields is called with each of them.
    """
    fetch, numbers, look_at = _BaseDataLoaderIter.__next__, itertools.count(), None

    def advance_and_fetch(loader):
        nonlocal look_at
        if next(numbers) % micro_batches == 0:
            look_at = next(steps)
        batch = fetch(loader)
        if look_at:
            look_at(batch)
        return batch

    _BaseDataLoaderIter.__next__ = advance_and_fetch


def install(attach: Callable = attach) -> None:
    """Lets the pipes of BENCH_PIPES control this process: commands, answers."""
    commands, answers = (int(number) for number in os.environ["BENCH_PIPES"].split(","))
    counted = int(os.environ["BENCH_COUNT"])
    attach(control(os.fdopen(commands), os.fdopen(answers, "w"), counted))
