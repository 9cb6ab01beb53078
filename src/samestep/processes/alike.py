"""Checks that all processes run the same and hold the same weights."""

import hashlib
import socket

import torch

from samestep.base.console import one_line, print_on_main
from samestep.base.errors import UserError, some
from samestep.processes.ranks import Ranks
from samestep.processes.sharding import full_tensor, local

LOADED = "module "  # begins the name of a fact that some processes may lack
_ALIKE = 1e-3  # largest relative difference of the sums of weights on devices of several kinds


def check_same(ranks: Ranks, facts: dict[str, str]) -> None:
    """Raises UserError on all processes, which names machines and differences, if there are any."""
    if not ranks.differ(repr(sorted(facts.items()))):
        return
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
    kind = kind_of_device(next(model.parameters()).device)
    if not ranks.layout.sharded and ranks.differ(kind):
        kinds = {*ranks.gather(kind)}
        print_on_main(
            f"{len(kinds)} kinds of devices ({'; '.join(sorted(kinds))}): their weights are "
            f"compared by their sums, to {_ALIKE}"
        )


def check_alike(ranks: Ranks, model: torch.nn.Module, when: str) -> None:
    """Raises UserError unless all processes have the same weights, frozen ones, too, where each has
    all of them: a checkpoint takes a part from each. `when`: for its line.

    The copies of a sharded model are compared part by part. On devices of one kind weights are the
    same bit for bit; kinds are compared by their sums.
    """
    layout = ranks.layout
    # Neighbours hold the parts of one copy of the model.
    parts = layout.processes // layout.dp_replicate if layout.sharded else 1
    if parts == layout.processes or layout.deepspeed or layout.stages > 1:
        return
    weights = [local(p.detach()) for p in model.parameters()]
    kind, bits = kind_of_device(weights[0].device), hash_bits(weights)
    copy, part = divmod(layout.rank, parts)
    if not ranks.differ(f"{part} {kind} {bits}", copy, layout.processes // parts):
        return
    trained = [local(p.detach()) for p in model.parameters() if p.requires_grad]
    sizes = torch.stack([p.abs().sum(dtype=torch.float64) for p in trained or weights])
    found = ranks.gather((kind, bits, float(sizes.sum())))
    first: dict[tuple, tuple] = {}  # of each part and kind
    for rank, each in enumerate(found):
        part = rank % parts
        _, digest, size = first.setdefault((part, each[0]), each)
        far = abs(size - found[part][2]) > _ALIKE * found[part][2]
        if digest != each[1] or far:
            raise UserError(
                f"{when} process {rank} has other weights than process {part}, and nothing "
                "was saved: call the model that accelerator.prepare has returned, not the one "
                "inside, and let no process change weights alone"
            )


def check_equal(ranks: Ranks, digests: dict[str, str], when: str) -> None:
    """Raises UserError unless these are the same on all processes of a stage; the line has the
    first name."""
    layout = ranks.layout
    peers = layout.peers
    text = f"{peers[0]} {sorted(digests.items())}"
    if not ranks.differ(text, peers.index(layout.rank), len(peers)):
        return
    everywhere = ranks.gather(digests)
    for rank, other in enumerate(everywhere):
        number = rank // layout.tp % layout.stages * layout.tp  # the first of its stage
        for name in sorted({*everywhere[number], *other}):
            if everywhere[number].get(name) != other.get(name):
                raise UserError(
                    f"{when} {name} differs between process {number} and process {rank}, and a "
                    "checkpoint has one for all: compute it from what is the same on all "
                    "processes, such as weights after optimizer.step() or numbers that "
                    "accelerator.gather returns"
                )


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it has a memory of values, as sparse, quantized and nested tensors have not."""
    is_odd = tensor.is_quantized or tensor.is_nested or tensor.is_meta
    return tensor.layout == torch.strided and not is_odd


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The values, and their places, of a tensor that is not dense."""
    if tensor.is_meta:
        return []
    if tensor.is_nested:
        return [*tensor.unbind()]
    if tensor.is_quantized:
        return [tensor.dequantize()]
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    in_places = tensor.to_sparse_coo()
    return [in_places._indices(), in_places._values()]


def _as_integers(values: torch.Tensor) -> torch.Tensor:
    """The bits of all values as integers, (numel,)."""
    if not is_dense(values):
        parts = [_as_integers(part).view(torch.uint8) for part in _dense_parts(values)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.detach().contiguous().flatten().view(_BITS[values.element_size()])


def bit_sums(values: torch.Tensor) -> torch.Tensor:
    """Integer sums of the bits of 64 slices, which are the same on any device, in any order.
    Processes that share a tensor must call it together."""
    bits = _as_integers(full_tensor(values.detach()))
    return torch.stack([part.sum(dtype=torch.int64) for part in bits.chunk(64)])


def bit_digest(values: torch.Tensor) -> torch.Tensor:
    """Two integers, (2,) int64: the sum of the bits of this process's values, and the sum of the
    bits times their places. They are the same on any device, and see the order of values."""
    bits = _as_integers(local(values.detach()))
    on_cpu = bits.device.type == "cpu"
    size = 1 << 16 if on_cpu else 1 << 24  # of a piece: as a cache holds, or as a device computes
    places = torch.arange(min(size, bits.numel()), device=bits.device)
    total = weighted = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), size):
        piece = bits[start : start + size].long()
        own = places[: piece.numel()]
        first = piece.sum()
        total = total + first
        # int64 wraps around; CUDA has no dot of integers.
        by_place = torch.dot(piece, own) if on_cpu else (piece * own).sum()
        weighted = weighted + by_place + first * start
    return torch.stack([total, weighted])


def hash_bits(tensors: list[torch.Tensor]) -> str:
    """Hash this process's values of tensors, with their types and shapes, in hex."""
    kinds = [(str(t.dtype), () if t.is_nested else (*t.shape,)) for t in tensors]
    digest = hashlib.sha256(repr(kinds).encode())
    if tensors:
        digests = torch.stack([bit_digest(tensor).cpu() for tensor in tensors])
        digest.update(digests.numpy().tobytes())
    return digest.hexdigest()
