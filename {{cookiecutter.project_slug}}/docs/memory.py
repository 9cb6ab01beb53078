"""Estimates what a GPU holds and sends while it trains a language model: the tables of hardware.md.

    python docs/memory.py
    python docs/memory.py --tokens 16384 --loss_chunk 1024

For causal_lm in bf16. GB are 10^9 bytes. The estimates leave out the allocator's gaps, and about
1 GB of CUDA and NCCL.
"""

import argparse
from dataclasses import dataclass

CARDS = (24, 80, 141)  # GB
USABLE = 0.92  # of a card
COUNTS = (2, 4, 8, 16, 32, 64)  # GPUs


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


def whole(model: Model) -> float:
    """Bytes on a GPU that holds the model: weights, gradients, two moments, and bf16 copies."""
    return (4 + 4 + 8 + 2) * model.parameters


def lora(model: Model) -> float:
    """Bytes on a GPU that holds the model, of which only adapters train."""
    return (4 + 2) * model.parameters + 18 * model.adapters


def gathered(model: Model) -> float:
    """Bytes that FSDP gathers: the largest unit twice in bf16, its gradient in bf16 and fp32."""
    return (2 + 2 + 2 + 4) * max(model.layer, model.ends)


def sharded(model: Model, gpus: int) -> float:
    """Bytes on each of so many GPUs that share the model by FSDP2."""
    return 16 * model.parameters / gpus + gathered(model)


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
        if whole(model) + work[checkpointing] <= limit:
            return "1 GPU" + ", checkpointing" * checkpointing
    for gpus in COUNTS:
        for checkpointing in (False, True):
            if sharded(model, gpus) + work[checkpointing] <= limit:
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
        states = [whole(model), lora(model), *(sharded(model, n) for n in (2, 8, 32))]
        states.append(gathered(model))
        sizes = [
            work[False] - end,
            work[True] - end,
            end,
            *(state + work[True] for state in states),
        ]
        sizes.append(16 * model.parameters)
        numbers = [f"{size / 1e9:,.1f}" if size < 1e11 else f"{size / 1e9:,.0f}" for size in sizes]
        lines.append([name, f"{model.parameters / 1e9:.2f} x 10^9", *numbers])
        choices.append([name, *(smallest(model, card, work) for card in CARDS)])
        links.append([name, *(f"{size / 1e9:,.1f}" for size in traffic(model, tokens))])
    parts = (lines, choices, links)
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in part) for part in parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="in a micro-batch of a GPU")
    parser.add_argument(
        "--loss_chunk", type=int, default=4096, help="task.loss_chunk of the recipe"
    )
    given = parser.parse_args()
    print(tables(given.tokens, given.loss_chunk))
