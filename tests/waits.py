"""Counts what makes the CPU wait for a GPU, on a machine without one."""

import contextlib

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Operators whose result, or its shape, the CPU has to know.
READS = {
    aten._local_scalar_dense.default,  # item(), bool(), int(), float()
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
}
PUTTING = {aten.index_put.default, aten.index_put_.default}
COPIES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}


def waits_in(function, args):
    """Whether the CPU has to know a value, or the shape of the result. A mask is one that it reads,
    unless all that is put there is one number."""
    number = function in PUTTING and args[2].numel() == 1
    if function not in {aten.index.Tensor, *PUTTING} or number:
        return function in READS
    return any(each is not None and each.dtype == torch.bool for each in args[1])


class Operators(TorchDispatchMode):
    """Notes the operators that a GPU would have to answer."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if waits_in(function, args):
            self.found.append(str(function))
        return function(*args, **kwargs or {})


class Copies(TorchFunctionMode):
    """Notes copies to the host that on a CPU reach no operator."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in COPIES:
            self.found.append(function.__name__)
        return function(*args, **kwargs or {})


@contextlib.contextmanager
def host_waits():
    """A list that grows by a name for each wait inside the block, those of a backward included."""
    found = []
    with Copies(found), Operators(found):
        yield found
