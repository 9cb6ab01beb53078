"""How much memory training a model needs, and which YAML trains it on the devices that are here.

The formula stands in docs/memory.md of the template; about 1 GB of CUDA and NCCL comes on top.
"""

import itertools
import math
import os
import shlex
import sys
from typing import NamedTuple

import psutil
import torch

from samestep.base.console import one_line, print_on_main
from samestep.hardware.devices import Devices, Section, Wrong, short
from samestep.hardware.project import Project
from samestep.models.next_token import CHUNK

_USABLE = 0.92  # of a memory


class Sizes(NamedTuple):
    """Numbers of parameters, on which the bytes of weights, gradients and moments depend."""

    parameters: int
    trained: int  # the others are frozen, as beside the adapters of LoRA
    unit: int  # of the largest unit that FSDP gathers: a block, or all that is in no block

    def states(self) -> float:
        """Bytes of fp32 weights, gradients, and AdamW's two moments."""
        return 4 * self.parameters + (4 + 8) * self.trained

    def on_gpu(self, gpus: float, precision: str = "bf16", checkpointing: bool = False) -> float:
        """Bytes on each GPU that shares the states with others; infinity: the host has them."""
        if gpus > 1:  # FSDP gathers the largest unit twice, and its gradient
            return self.states() / gpus + 2 * 2 * self.unit + (2 + 4) * min(self.unit, self.trained)
        if precision == "no":
            return self.states()
        # Autocast has copies of weights; with checkpointing those of frozen ones live for a layer.
        frozen = self.parameters - self.trained
        if checkpointing:
            frozen = min(frozen, self.unit)
        return self.states() + 2 * (self.trained + frozen)


def count_parameters(model: torch.nn.Module) -> Sizes:
    """Numbers of parameters; FSDP gathers a block, or all outside of the blocks, at a time."""
    parameters = {*model.parameters()}
    blocks = getattr(model, "_no_split_modules", None) or ()
    units = [{*each.parameters()} for each in model.modules() if type(each).__name__ in blocks]
    units.append(parameters.difference(*units))
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    largest = max(sum(each.numel() for each in unit) for unit in units)
    return Sizes(sum(each.numel() for each in parameters), trained, largest)


def activations(config: object, tokens: int, checkpointing: bool, loss_chunk: int = 0) -> float:
    """Bytes that autograd saves for so many tokens of a transformer with this config, with the
    logits and their gradient; 0: no formula is known for it."""
    names = ("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size")
    layers, width, vocabulary, mlp = (getattr(config, name, None) for name in names)
    if not (layers and width and vocabulary):
        return 0
    layer = tokens * (34 * width + 8 * (mlp or 4 * width))
    saved = 4 * layers * tokens * width + layer if checkpointing else layers * layer
    return saved + 12 * vocabulary * min(tokens, loss_chunk or tokens)


def run(section: Section, used: Devices, project: Project, flags: list[str]) -> None:
    """Says what the model needs in each way to train it here, and the command of the first fit."""
    try:
        model = project.build_model(torch.device("meta"))
    except Exception as error:  # code of the task may look at numbers
        print_on_main(f"the model is built, 4 bytes per parameter: {one_line(error, 150)}")
        model = project.build_model(torch.device("cpu"))
    cfg, sizes, host = project.cfg, count_parameters(model), psutil.virtual_memory().total
    name, memory = used.kind, host // used.count  # processes without a GPU share it
    ways = {used.yaml.stem: 1.0}
    if used.kind == "cuda":
        cards = [torch.cuda.get_device_properties(number) for number in range(used.count)]
        name, memory = cards[0].name, min(card.total_memory for card in cards)
    if used.precision == "bf16":  # FSDP is not supported with fp16
        ways |= {"fsdp2": used.count} if used.count > 1 else {}
        ways["fsdp2_offload"] = math.inf
    size = min(cfg.micro_batch_size, max(cfg.global_batch_size // used.count, 1))
    rows = project.rows  # a batch is as long as its longest row, here of a thousand
    positions = range(64) if rows.is_stream else rows.sort(range(min(len(rows), 1000)))[-1:]
    batch = project.batch(positions)
    tokens = size * batch["input_ids"][0].numel() if "input_ids" in batch else 0
    section.facts = {
        "model": getattr(cfg.task, "model_name_or_path", "") or "that of the recipe, from scratch",
        "parameters": f"{sizes.parameters:,}, of which {sizes.trained:,} are trained",
        "weights, gradients, moments": f"{short(sizes.states() / 1e9)} GB",
        "devices": f"{used.count} x {name}, {short(memory / 1e9)} GB each",
        "micro-batch": f"{size} samples, {tokens:,} tokens in all",
    }
    if project.found:
        section.facts["micro_batch_size auto"] = f"found {project.found} samples in a run here"
    chunk = CHUNK if (given := getattr(cfg.task, "loss_chunk", 0)) == "auto" else given
    asked = cfg.gradient_checkpointing
    for (way, gpus), checkpointing in itertools.product(ways.items(), sorted({asked, True})):
        saved = activations(getattr(model, "config", None), tokens, checkpointing, chunk)
        need = sizes.on_gpu(gpus, used.precision, checkpointing) + saved
        section.facts[f"{way}, gradient checkpointing {checkpointing}"] = f"{short(need / 1e9)} GB"
        on_host = sizes.states() if gpus == math.inf else 0
        if need <= _USABLE * memory and on_host <= _USABLE * host and not section.figures:
            section.figures["memory, GB"] = [need / 1e9]
            own = ["--gradient_checkpointing", "true"] if checkpointing != asked else []
            yaml = f"--config_file configs/accelerate/{way}.yaml --num_processes {used.count}"
            command = f"{os.path.relpath(sys.executable)} -m samestep launch {yaml} train.py "
            section.lines = ["it fits:", command + shlex.join([*flags, *own])]
    if not saved:
        section.lines.insert(0, "no formula is known for the activations of this model: add them")
    if not section.figures:
        raise Wrong("nothing fits: lower --micro_batch_size, or take LoRA or more GPUs")
