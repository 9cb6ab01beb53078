"""How much memory training a model needs, and which YAML trains it on the devices that are here.

The formula is that of docs/hardware.md. It leaves out gaps of the allocator, and about 1 GB of CUDA
and NCCL. Where there is a GPU, a step on it is measured.
"""

import gc
import math
from collections.abc import Sequence
from typing import NamedTuple

import psutil
import torch
from accelerate.utils import find_executable_batch_size, send_to_device

from samestep.base.console import one_line, print_on_main
from samestep.hardware.devices import Devices
from samestep.hardware.project import Project
from samestep.hardware.report import Figure, Section

USABLE = 0.92  # of a memory
SHARED_BY = (2, 4, 8)  # GPUs, whether they are here or not
LOOKED_AT = 1000  # rows, for the longest


class Sizes(NamedTuple):
    """Numbers of parameters, on which the bytes of all states depend."""

    parameters: int
    trained: int  # the others are frozen, as beside the adapters of LoRA
    unit: int  # of the largest unit that FSDP gathers: a block, or all that is in no block
    unit_trained: int

    @property
    def states(self) -> float:
        """Bytes of fp32 weights, gradients, and AdamW's two moments."""
        return 4 * self.parameters + (4 + 8) * self.trained

    def replicated(self, precision: str = "bf16", checkpointing: bool = False) -> float:
        """Bytes on a device that stores the whole model: its states, and autocast's copies.

        Autocast caches copies of trained weights. Of a frozen one only the backward pass keeps a
        copy, and with checkpointing none beyond its layer.
        """
        frozen = self.parameters - self.trained
        if checkpointing:
            frozen = self.unit - self.unit_trained
        return self.states + (0 if precision == "no" else 2) * (self.trained + frozen)

    def gathered(self) -> float:
        """Bytes that FSDP gathers in bf16: the largest unit twice, its gradient, that in fp32."""
        return 2 * 2 * self.unit + (2 + 4) * self.unit_trained

    def sharded(self, gpus: int) -> float:
        """Bytes on each of so many GPUs that share the model by FSDP2."""
        return self.states / gpus + self.gathered()


class Shape(NamedTuple):
    """The sizes of a transformer, on which its activations depend."""

    layers: int
    width: int
    mlp: int
    vocabulary: int

    def activations(self, tokens: int, checkpointing: bool = False, loss_chunk: int = 0) -> float:
        """Bytes that autograd saves for so many tokens, with the logits and their gradient."""
        layer = tokens * (30 * self.width + 8 * self.mlp)
        logits = 12 * self.vocabulary * min(tokens, loss_chunk or tokens)
        if checkpointing:
            return 2 * self.layers * tokens * self.width + layer + logits
        return self.layers * layer + logits


def count_parameters(model: torch.nn.Module) -> Sizes:
    """Numbers of parameters; FSDP gathers a block, or all outside of the blocks, at a time."""

    def count(parameters: Sequence[torch.Tensor]) -> tuple[int, int]:
        trained = [p.numel() for p in parameters if p.requires_grad]
        return sum(p.numel() for p in parameters), sum(trained)

    names = getattr(model, "_no_split_modules", None) or ()
    blocks = [each for each in model.modules() if type(each).__name__ in names]
    inner = {id(p) for block in blocks for p in block.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inner]
    units = [rest, *([*block.parameters()] for block in blocks)]
    return Sizes(*count([*model.parameters()]), *max(map(count, units)))


def shape_of(model: torch.nn.Module) -> Shape | None:
    """The sizes of a language model of transformers; None for others: no formula is known."""
    config = getattr(model, "config", None)
    names = ("num_hidden_layers", "hidden_size", "vocab_size")
    found = [getattr(config, name, None) for name in names]
    if None in found:
        return None
    layers, width, vocabulary = found
    return Shape(layers, width, getattr(config, "intermediate_size", 4 * width), vocabulary)


def build_without_weights(project: Project) -> torch.nn.Module:
    """The project's model without memory; with it, if its code looks at numbers."""
    try:
        with torch.device("meta"):
            return project.build_model()
    except Exception as error:  # code of the task may do anything
        print_on_main(f"the model is built, 4 bytes per parameter: {one_line(error, 150)}")
        return project.build_model()


def gigabytes(size: float) -> str:
    """Bytes in words; small models get more digits."""
    return f"{size / 1e9:,.{0 if size >= 1e11 else 1 if size >= 1e9 else 3}f} GB"


def memory_of(used: Devices) -> float:
    """Bytes of the smallest device."""
    if used.kind == "cuda":
        numbers = range(used.count)
        return min(torch.cuda.get_device_properties(i).total_memory for i in numbers)
    if used.kind == "mps":
        return torch.mps.recommended_max_memory()
    return psutil.virtual_memory().total


def measure(project: Project, used: Devices, checkpointing: bool, size: int) -> tuple[int, int]:
    """The largest micro-batch of at most `size` samples with which two steps fit into the first
    GPU, and their peak bytes; 0, 0: none does."""
    dtype = torch.float16 if used.precision == "fp16" else torch.bfloat16
    longest = project.rows.sort(range(max(size, min(len(project.rows), LOOKED_AT))))

    @find_executable_batch_size(starting_batch_size=size)
    def train(size: int) -> tuple[int, int]:
        torch.cuda.reset_peak_memory_stats()
        model = project.build_model(checkpointing).to("cuda")
        optimizer = project.build_optimizer(model, project.cfg)
        batch = send_to_device(project.batch(longest[-size:]), "cuda")
        for _ in range(2):  # the moments come with the first
            with torch.autocast("cuda", dtype, enabled=used.precision != "no"):
                loss = project.task.loss_sum(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return size, torch.cuda.max_memory_allocated()

    try:
        return train()
    except RuntimeError as error:  # no size is left
        if "No executable batch size" not in str(error):
            raise
        return 0, 0
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def run(used: Devices, project: Project) -> Section:
    """Estimates, measures where there is a GPU, and decides."""
    cfg, section = project.cfg, Section("recommend")
    model = build_without_weights(project)
    sizes, shape = count_parameters(model), shape_of(model)
    memory, host = memory_of(used), psutil.virtual_memory().total
    size = min(cfg.micro_batch_size, max(cfg.global_batch_size // used.count, 1))
    batch = project.batch(project.rows.sort(range(min(len(project.rows), LOOKED_AT)))[-1:])
    tokens = batch["input_ids"].shape[1] if "input_ids" in batch else 0
    chunk = getattr(cfg.task, "loss_chunk", 0)

    def activations(samples: int, checkpointing: bool) -> float:
        if not shape or not tokens:
            return 0
        return shape.activations(samples * tokens, checkpointing, chunk)

    section.facts = {
        "parameters": f"{sizes.parameters:,}, of which {sizes.trained:,} are trained",
        "weights, gradients, moments": gigabytes(sizes.states),
        "activations": "no formula for this model",
        "device": f"{used.count} x {used.kind} with {gigabytes(memory)}; host {gigabytes(host)}",
    }
    if shape and tokens:
        section.facts["activations"] = (
            f"{gigabytes(activations(1, False))} for a sample of {tokens} tokens, with "
            f"checkpointing {gigabytes(activations(1, True))}"
        )
    section.facts["memory of a GPU, micro-batch of 1"] = {
        f"{way}{', checkpointing' if checkpointing else ''}": gigabytes(need)
        for checkpointing in (False, True)
        for way, need in ways(sizes, used.precision, checkpointing, activations(1, checkpointing))
    }
    return section


def ways(sizes: Sizes, precision: str, checkpointing: bool, more: float) -> list[tuple]:
    """Each way to train, and the bytes on a GPU."""
    whole = sizes.replicated(precision, checkpointing)
    shared = [(f"FSDP2 on {gpus}", sizes.sharded(gpus) + more) for gpus in SHARED_BY]
    host = f"FSDP2, {gigabytes(sizes.states)} in the host's memory"
    return [("one GPU, DDP", whole + more), *shared, (host, sizes.gathered() + more)]
