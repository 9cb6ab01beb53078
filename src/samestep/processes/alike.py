"""Checks that all processes run the same and hold the same weights."""

import hashlib
import socket

import torch

from samestep.base.console import one_line, print_on_main
from samestep.base.errors import UserError, some
from samestep.processes.ranks import Ranks
from samestep.processes.sharding import full_tensor

LOADED = "module "  # begins the name of a fact that some processes may lack
_ALIKE = 1e-3  # largest relative difference of the sums of weights on devices of several kinds


def check_same(ranks: Ranks, facts: dict[str, str]) -> None:
    """Raises UserError on all processes, which names machines and differences, if there are any."""
    everywhere = ranks.gather((socket.gethostname(), facts))
    one_machine = len({host for host, _ in everywhere}) == 1
    differences = []
    for name in dict.fromkeys(name for _, each in everywhere for name in each):
        places: dict[str, dict[str, None]] = {}  # by value
        for rank, (host, each) in enumerate(everywhere):
            if name in each or not name.startswith(LOADED):
                place = f"process {rank}" if one_machine else host
                places.setdefault(each.get(name, "missing"), {})[place] = None
        if len(places) > 1:
            longest = 20 if name.startswith("data ") else 300  # 20: of a digest
            shown = [f"{one_line(v, longest)} on {some([*on], 3)}" for v, on in places.items()]
            differences.append(f"{name} is {' and '.join(shown)}")
    if not differences:
        return
    if one_machine and all(text.startswith("data ") for text in differences):
        raise UserError(
            "the rows are others on another process, which reads the same files; the order of a "
            "set differs: sort it, or make the rows once, as in prepare_data"
        )
    more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
    raise UserError(
        f"the processes do not run the same: {'; '.join(differences[:5])}{more}; give all of them "
        "the same code, settings, data and versions"
    )


def kind_of_device(device: torch.device) -> str:
    """Devices of one kind compute the same bits from the same numbers."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"cpu {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def say_kinds(ranks: Ranks, model: torch.nn.Module) -> None:
    """Says at the start how weights will be compared, if devices are of several kinds."""
    kinds = {*ranks.gather(kind_of_device(next(model.parameters()).device))}
    if len(kinds) > 1 and not ranks.layout.sharded:
        print_on_main(
            f"{len(kinds)} kinds of devices ({'; '.join(sorted(kinds))}): their weights are "
            f"compared by their sums, to {_ALIKE}"
        )


def check_alike(ranks: Ranks, model: torch.nn.Module, when: str) -> None:
    """Raises UserError unless all processes have the same trained weights, where each has all of
    them: a checkpoint takes a part from each. `when`: for its line.

    On devices of one kind they are the same bit for bit; kinds are compared by their sums.
    """
    if ranks.layout.processes == 1 or ranks.layout.sharded:
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    bits = torch.cat([bit_sums(p) for p in trained]).cpu().numpy().tobytes()
    sizes = torch.stack([p.detach().abs().sum(dtype=torch.float64) for p in trained])
    kind = kind_of_device(trained[0].device)
    found = ranks.gather((kind, hashlib.sha256(bits).hexdigest(), float(sizes.sum())))
    first: dict[str, tuple] = {}  # of each kind
    for rank, each in enumerate(found):
        _, digest, size = first.setdefault(each[0], each)
        far = abs(size - found[0][2]) > _ALIKE * found[0][2]
        if digest != each[1] or far:
            raise UserError(
                f"{when} process {rank} has other weights than process 0, and nothing "
                "was saved: call the model that accelerator.prepare has returned, not the one "
                "inside, and let no process change weights alone"
            )


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sums(values: torch.Tensor) -> torch.Tensor:
    """Integer sums of the bits of 64 slices, which are the same on any device, in any order.
    Processes that share a tensor must call it together."""
    values = full_tensor(values.detach())
    numbers = torch.view_as_real(values) if values.is_complex() else values
    bits = numbers.flatten().view(_BITS[numbers.element_size()])
    return torch.stack([part.sum(dtype=torch.int64) for part in bits.chunk(64)])
