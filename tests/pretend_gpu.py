"""Runs a program of a project as if it had GPUs. The CPU computes: real numbers, branches for GPUs.

    accelerate launch --config_file configs/accelerate/single_gpu_bf16.yaml pretend_gpu.py train.py

Each tensor's memory lies on one of two sides, the GPU's or the CPU's. An operator that takes both
fails, as it does on a GPU. NCCL is gloo. Kernels, speed and memory are not shown.

Two modes look at what runs. One sees functions of Python: it answers for `device`, and moves
tensors between the sides. The other sees operators, those of the backward pass included.
"""

import contextlib
import os
import runpy
import sys
import threading
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

NAME, CAPABILITY, MEMORY = "NVIDIA H100 80GB HBM3", (9, 0), 85 * 10**9
RANK, COUNT = (int(os.environ.get(f"LOCAL_{n}", i)) for i, n in enumerate(("RANK", "WORLD_SIZE")))
# What `samestep hardware` starts has as many as that itself.
COUNT = int(os.environ.setdefault("PRETEND_GPUS", str(COUNT)))
aten, Tensor = torch.ops.aten, torch.Tensor
# Operators that take tensors of both sides: copies, and indices, which may lie on the CPU.
BOTH_SIDES = {aten.copy_, aten._foreach_copy_, aten.set_, aten.index, aten.index_put_}


# ---- The two sides -------------------------------------------------------------------------------


def memory_of(tensor):
    """The storage of a tensor, or None."""
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # without memory
        return None


def on_gpu(tensor):
    """True, False, or None for memory whose origin no mode has seen."""
    return getattr(memory_of(tensor), "on_gpu", None)


def tensors_in(value):
    """The tensors in arguments or results; torch's tree_leaves takes a third of a run."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])


def put(result, side, only_new=False):
    """Says on which side the tensors in a result lie."""
    for each in tensors_in(result):
        memory = memory_of(each)
        if memory is not None and not (only_new and on_gpu(each) is not None):
            memory.on_gpu = side
    return result


def is_gpu(device):
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def as_cpu(value):
    return torch.device("cpu") if is_gpu(value) else value


# ---- The modes -----------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Keeps the sides of memory apart."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it calls operators on its parts
        kwargs = kwargs or {}
        if is_gpu(kwargs.get("device")):  # autograd's hooks are called without the outer mode
            return put(function(*args, **{**kwargs, "device": torch.device("cpu")}), True)
        tensors = [*tensors_in((args, kwargs))]
        sides = [on_gpu(each) for each in tensors]
        gpu, packet = any(sides), function.overloadpacket
        if gpu and packet not in BOTH_SIDES:
            joins = packet in (aten.cat, aten.stack)
            for each, side in zip(tensors, sides, strict=True):
                if side is False and (each.dim() or joins):  # the GPU takes numbers of the CPU
                    raise RuntimeError(
                        "Expected all tensors to be on the same device, but found cuda and cpu: "
                        f"{function}, the one on the CPU has shape {tuple(each.shape)}"
                    )
        result = function(*args, **kwargs)
        known = [side for side in sides if side is not None]
        if known:
            put(result, gpu, only_new=True)
        return result


class Functions(TorchFunctionMode):
    """Answers for devices, and moves tensors between the sides."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if isinstance(function, torch._ops.OpOverload):  # comes from the other mode
            return function(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None:
            answer = self.about(function, name, first)
            if answer is not NotImplemented:
                return answer
        if function is Tensor.backward:  # which calls hooks, and computes anew
            with self:
                engine = torch.autograd.graph._engine_run_backward
                given = kwargs.get("gradient")
                grads = (torch.ones_like(first) if given is None else given,)
                kept = {"allow_unreachable": True, "accumulate_grad": True}
                return engine((first,), grads, False, False, (), **kept)
        if name == "pin_memory":
            result = put(first.clone(), False)
            result.untyped_storage().pinned = True
            return result
        kwargs.pop("pin_memory", None)
        if name in ("to", "cuda", "cpu") and first is not None:
            return self.move(function, name, args, kwargs)
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = as_cpu(device)
        if is_gpu(device) and kwargs.get("generator") is not None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        tensors = [*tensors_in((args, kwargs))]
        result = function(*args, **kwargs)
        if device is not None:
            return put(result, is_gpu(device))
        return result if tensors else put(result, False, only_new=True)

    def about(self, function, name, tensor):
        """What is asked about a tensor; NotImplemented for a function that computes."""
        side = on_gpu(tensor)
        if function == Tensor.device.__get__:
            return torch.device("cuda", RANK) if side else function(tensor)
        if function == Tensor.is_cuda.__get__:
            return bool(side)
        if name == "is_pinned":
            return hasattr(tensor.untyped_storage(), "pinned")
        if function is Tensor.get_device:
            return RANK if side else -1
        if side and name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return NotImplemented

    def move(self, function, name, args, kwargs):
        """`to`, `cuda` and `cpu`: a copy where the side changes."""
        tensor, words = args[0], [*args[1:], *kwargs.values()]
        before = on_gpu(tensor)
        devices = [each for each in words if isinstance(each, str | torch.device)]
        devices += [torch.device("cuda") for each in words if type(each) is int and name == "to"]
        others = [each for each in words if isinstance(each, Tensor)]
        after = is_gpu(devices[0]) if devices else on_gpu(others[0]) if others else before
        after = {"cuda": True, "cpu": False}.get(name, after)
        if name == "cuda":
            result = tensor
        else:
            args = [as_cpu(each) for each in args]
            result = function(*args, **{k: as_cpu(each) for k, each in kwargs.items()})
        if after == before:
            return result
        shared = result is tensor or result.data_ptr() == tensor.data_ptr()
        return put(result.clone() if shared else result, after)


def inside(function, *modes):
    """Calls a function inside of modes: they belong to a thread, and are off in what they call."""

    def call(*args, **kwargs):
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            return function(*args, **kwargs)

    return call


# ---- What CUDA answers ---------------------------------------------------------------------------


class Event:
    """An event, and a stream: all that is asked of a GPU is done at once."""

    def __init__(self, *_, **__):
        self.moment = None

    def record(self, *_):
        self.moment = time.perf_counter()

    def query(self):
        return True

    def elapsed_time(self, other):
        return 1000 * (other.moment - self.moment)

    def wait(self, *_):
        pass

    synchronize = wait_event = wait_stream = wait
    __enter__ = __exit__ = wait

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event


def give(value):
    """A function that returns this."""
    return lambda *_, **__: value


def answer_as_cuda():
    """Replaces what asks for CUDA, or would run on it."""
    about = SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=MEMORY, warp_size=32,
        multi_processor_count=132, gcnArchName="", uuid=f"GPU-{RANK}",
    )  # fmt: skip
    values = {
        "is_available": True, "is_initialized": True, "_is_in_bad_fork": False,
        "is_current_stream_capturing": False, "device_count": COUNT, "current_device": RANK,
        "get_device_capability": CAPABILITY, "get_device_name": NAME,
        "get_device_properties": about, "mem_get_info": (MEMORY - 10**9, MEMORY),
        "memory_allocated": 10**9, "max_memory_allocated": 5 * 10**9,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "current_stream": Event(),
        "stream": Event(), "cudart": SimpleNamespace(cudaHostRegister=give(0)),
    }  # fmt: skip
    nothing = "init _lazy_init set_device reset_peak_memory_stats empty_cache set_rng_state"
    values |= dict.fromkeys([*nothing.split(), "manual_seed", "manual_seed_all"])
    for name, value in values.items():
        setattr(torch.cuda, name, give(value))
    torch.cuda.Event = torch.cuda.Stream = torch.Event = Event
    torch.cuda.synchronize = torch.accelerator.synchronize = give(None)
    torch.cuda.device = contextlib.nullcontext
    torch.cuda.is_bf16_supported = give(True)
    for name in ("is_available", "device_count"):
        setattr(torch.accelerator, name, give(values[name]))
    torch.accelerator.current_device_index = give(RANK)
    torch.accelerator.set_device_index = give(None)
    torch.accelerator.current_accelerator = give(torch.device("cuda"))
    torch._C._get_accelerator = give(torch.device("cuda"))
    torch.cuda.nccl.version = give((2, 27, 5))
    torch.version.cuda = "13.0"
    group = torch._C._group_tensors_by_device_and_dtype

    def by_side(lists, with_indices=False):
        """Groups that say cuda; all tensors of a call lie on one side."""
        device = lists[0][0].device
        return {(device, kind): v for (_, kind), v in group(lists, with_indices).items()}

    torch._C._group_tensors_by_device_and_dtype = by_side
    # What autograd has saved is compared with what is computed again, the devices too.
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    checks["default"] = inside(checks["default"], Functions)
    torch.optim.Optimizer._accelerator_graph_capture_health_check = give(None)
    with_words(torch.autocast, "device_type")
    with_words(torch.amp.GradScaler, "device")


def with_words(kind, word):
    """Lets a class be made for "cuda", and makes it for the CPU."""
    real = kind.__init__

    def init(self, device="cuda", *args, **kwargs):
        device = kwargs.pop(word, device)
        real(self, str(as_cpu(device)), *args, **kwargs)

    kind.__init__ = init


def replace_nccl():
    """Lets gloo do what NCCL would do; DDP is told nothing of devices."""
    dist.is_nccl_available = give(True)
    real_init, real_group, real_barrier = dist.init_process_group, dist.new_group, dist.barrier

    def init(backend=None, *args, device_id=None, **kwargs):
        real_init("gloo" if backend else None, *args, **kwargs)

    def new_group(*args, device_id=None, **kwargs):
        return real_group(*args, **{**kwargs, "backend": "gloo"})

    dist.init_process_group = dist.distributed_c10d.init_process_group = init
    dist.new_group = dist.distributed_c10d.new_group = new_group
    dist.barrier = lambda *args, device_ids=None, **kwargs: real_barrier(*args, **kwargs)
    ddp = torch.nn.parallel.DistributedDataParallel
    real = ddp.__init__

    def ddp_init(self, module, device_ids=None, output_device=None, **kwargs):
        real(self, module, **kwargs)

    ddp.__init__ = ddp_init


def mark_parameters():
    """A parameter is on the CPU unless it is made of memory on the GPU."""
    real = torch.nn.Parameter.__new__

    def new(cls, data=None, requires_grad=True):
        return put(real(cls, data, requires_grad), False, only_new=True)

    torch.nn.Parameter.__new__ = new


def pretend_in_children():
    """What `samestep hardware` starts has such GPUs, and measures with the sizes for CPUs."""
    from samestep.hardware import bench, devices

    devices.PREFIX[:] = [__file__]
    bench.SIZES["cuda"] = bench.SIZES["cpu"]


def pretend():
    """Begins it, for this process."""
    answer_as_cuda()
    replace_nccl()
    mark_parameters()
    threading.Thread.run = inside(threading.Thread.run, Functions, Operators)
    DTensor.__torch_dispatch__ = inside(DTensor.__torch_dispatch__, Functions)
    Functions().__enter__()
    Operators().__enter__()


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.getcwd())
    pretend()
    if sys.argv[0] == "-m":
        pretend_in_children()
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
