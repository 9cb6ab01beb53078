"""Estimates what a device holds and sends while it trains: the tables of docs/hardware.md.

    python -m samestep.hardware.memory
    python -m samestep.hardware.memory --tokens 16384 --loss_chunk 1024

`samestep hardware recommend` takes the bytes of the weights' states from here, for any model. The
tables are for causal_lm in bf16. GB are 10^9 bytes. The estimates leave out the allocator's gaps,
and about 1 GB of CUDA and NCCL.
"""

import argparse
from dataclasses import dataclass

CARDS = (24, 80, 141)  # GB
USABLE = 0.92  # of a card
COUNTS = (2, 4, 8, 16, 32, 64)  # GPUs


# ---- Weights, gradients and optimizer states -----------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters, on which the bytes of all states depend."""

    parameters: int
    trained: int  # the others are frozen, as beside the adapters of LoRA
    unit: int  # of the largest unit that FSDP gathers: a block, or all that is in no block
    unit_trained: int

    @property
    def states(self) -> float:
        """Bytes of fp32 weights, gradients, and AdamW's two moments."""
        return 4 * self.parameters + (4 + 8) * self.trained


def whole(sizes: Sizes, precision: str = "bf16", checkpointing: bool = False) -> float:
    """Bytes on a device that holds the model: its states, and autocast's copies of the weights.

    It caches those of trained weights. Of a frozen one only the backward pass keeps a copy, and
    with checkpointing none beyond its layer.
    """
    frozen = sizes.parameters - sizes.trained
    if checkpointing:
        frozen = sizes.unit - sizes.unit_trained
    return sizes.states + (0 if precision == "fp32" else 2) * (sizes.trained + frozen)


def gathered(sizes: Sizes, precision: str = "bf16") -> float:
    """Bytes that FSDP gathers: the largest unit twice, its gradient, and that again in fp32."""
    width = 4 if precision == "fp32" else 2
    return 2 * width * sizes.unit + (width + 4) * sizes.unit_trained


def sharded(sizes: Sizes, gpus: int, precision: str = "bf16") -> float:
    """Bytes on each of so many GPUs that share the model by FSDP2; by ZeRO-3 if it is fp32."""
    return sizes.states / gpus + gathered(sizes, precision)


def zero2(sizes: Sizes, gpus: int) -> float:
    """Bytes on each of so many GPUs under DeepSpeed's ZeRO-2: whole weights, parts of the rest."""
    return (4 + 2) * sizes.parameters + (4 + 4 + 8) * sizes.trained / gpus


# ---- Language models -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A decoder with gated MLPs, as Llama and Qwen are."""

    layers: int
    width: int
    mlp: int  # width of the MLP
    keys: int  # width of keys, and of values
    vocabulary: int
    tied: bool  # input and output embeddings are one matrix

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        return self.width * (2 * self.width + 2 * self.keys + 3 * self.mlp)

    @property
    def ends(self) -> int:
        """Parameters of the embeddings."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.ends

    @property
    def sizes(self) -> Sizes:
        """If all weights are trained."""
        unit = max(self.layer, self.ends)
        return Sizes(self.parameters, self.parameters, unit, unit)

    @property
    def lora(self) -> Sizes:
        """If only adapters are trained."""
        unit, total = max(self.layer, self.ends), self.parameters + self.adapters
        return Sizes(total, self.adapters, unit, self.adapters // self.layers)

    @property
    def adapters(self) -> int:
        """Parameters of LoRA of rank 16 on all matrices of the layers."""
        sides = 4 * self.width + 2 * (self.width + self.keys) + 3 * (self.width + self.mlp)
        return 16 * self.layers * sides


MODELS = {
    "0.5B": Model(24, 896, 4864, 128, 151_936, True),  # Qwen2.5-0.5B
    "1B": Model(16, 2048, 8192, 512, 128_256, True),  # Llama-3.2-1B
    "7B": Model(32, 4096, 11008, 4096, 32_000, False),  # Llama-2-7B
    "70B": Model(80, 8192, 28672, 1024, 128_256, False),  # Llama-3.1-70B
}


def layer_activations(model: Model, tokens: int) -> float:
    """Bytes that a layer keeps for its backward pass, with fused attention."""
    return tokens * (30 * model.width + 8 * model.mlp)


def activations(model: Model, tokens: int, checkpointing: bool) -> float:
    """Bytes that a micro-batch of so many tokens keeps; with checkpointing, inputs of layers."""
    one = layer_activations(model, tokens)
    return 2 * model.layers * tokens * model.width + one if checkpointing else model.layers * one


def logits(model: Model, tokens: int, chunk: int) -> float:
    """Bytes of the logits that exist at once, in bf16 and fp32, and of their gradient."""
    return 12 * min(tokens, chunk) * model.vocabulary


def traffic(model: Model, tokens: int) -> list[float]:
    """Bytes that a GPU of many sends: a step of DDP, and a micro-batch of FSDP2, TP and CP."""
    ddp = 2 * 4 * model.parameters  # a ring adds up fp32 gradients, and hands the sums out
    fsdp = (2 + 2 + 4) * model.parameters  # weights twice in bf16, gradients once in fp32
    tp = 4 * 2 * 2 * tokens * model.width * model.layers  # four sums of bf16 activations a layer
    cp = 3 * 2 * 2 * tokens * model.keys * model.layers  # keys and values: there, again, and back
    return [ddp, fsdp, tp, cp]


def smallest(model: Model, card: int, work: dict[bool, float]) -> str:
    """The first way to train all weights on cards of this size, without and with checkpointing."""
    limit = USABLE * card * 1e9
    for checkpointing in (False, True):
        if whole(model.sizes) + work[checkpointing] <= limit:
            return "1 GPU" + ", checkpointing" * checkpointing
    for gpus in COUNTS:
        for checkpointing in (False, True):
            if sharded(model.sizes, gpus) + work[checkpointing] <= limit:
                return f"FSDP2 on {gpus}" + ", checkpointing" * checkpointing
    return "none of these"


def tables(tokens: int, chunk: int) -> str:
    """Memory, the smallest machines, and communication, as Markdown."""
    heads = ["model", "parameters", "activations", "checkpointed", "logits", "1 GPU", "LoRA"]
    heads += ["FSDP2 on 2", "on 8", "on 32", "offload: GPU", "host"]
    fits = ["model", *(f"{card} GB" for card in CARDS)]
    sent = [
        "model",
        "DDP, a step",
        "FSDP2, a micro-batch",
        "TP, a micro-batch",
        "CP, a micro-batch",
    ]
    lines, choices, links = ([head, ["---"] * len(head)] for head in (heads, fits, sent))
    for name, model in MODELS.items():
        end = logits(model, tokens, chunk)
        work = {c: activations(model, tokens, c) + end for c in (False, True)}
        states = [whole(model.sizes), whole(model.lora, checkpointing=True)]
        states += [sharded(model.sizes, n) for n in (2, 8, 32)]
        states.append(gathered(model.sizes))
        sizes = [
            work[False] - end,
            work[True] - end,
            end,
            *(state + work[True] for state in states),
        ]
        sizes.append(model.sizes.states)
        numbers = [f"{size / 1e9:,.1f}" if size < 1e11 else f"{size / 1e9:,.0f}" for size in sizes]
        lines.append([name, f"{model.parameters / 1e9:.2f} x 10^9", *numbers])
        choices.append([name, *(smallest(model, card, work) for card in CARDS)])
        links.append([name, *(f"{size / 1e9:,.1f}" for size in traffic(model, tokens))])
    parts = (lines, choices, links)
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in part) for part in parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m samestep.hardware.memory", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tokens", type=int, default=4096, help="in a micro-batch of a GPU")
    parser.add_argument(
        "--loss_chunk", type=int, default=4096, help="task.loss_chunk of the recipe"
    )
    given = parser.parse_args()
    print(tables(given.tokens, given.loss_chunk))
