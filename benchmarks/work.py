"""The work that all peers do: the same model, samples, loss and optimizer settings.

A peer gets it as a `Work`, from the environment variable BENCH_WORK. The samples are those of the
baked project, in its order, saved as tensors. So the losses of all peers are the same to rounding,
and clock.py checks that.
"""

import json
import os
from dataclasses import asdict, dataclass

# torch and transformers are imported late: what a peer does not need must not count in its start-up
# time.

LEARNING_RATE, BETAS, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-3, (0.9, 0.99), 0.1, 1.0
LOG_EVERY = 10  # steps between lines of metrics
SEED = 0


@dataclass
class Size:
    """A Llama and its batch. The width of its feed-forward layers is 3 x hidden."""

    hidden: int
    layers: int
    heads: int
    context: int  # tokens in a sample
    batch: int  # samples in an optimizer step, over all processes
    counted: int = 0  # steps in which clock.py counts, before the timing begins
    steps: int = 20  # steps that are timed in a round
    rounds: int = 3
    vocabulary: int = 1024
    data: str = "manual"
    micro_batches: int = 1  # of a process in a step


SIZES = {
    "small": Size(64, 2, 4, context=64, batch=8, counted=21, steps=10, rounds=40, micro_batches=2),
    "large": Size(480, 5, 8, context=128, batch=8, counted=2, steps=2, rounds=10),
}


def flags(size: Size, **changes) -> list[str]:
    """The same work as flags of a baked project's train.py, with some of them changed."""
    settings = {
        "seed": SEED,
        "max_steps": 1_000_000,  # the benchmark ends the run
        "global_batch_size": size.batch,
        "micro_batch_size": size.batch // size.micro_batches,
        "learning_rate": LEARNING_RATE,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_schedule": "constant",
        "warmup_steps": 0,
        "eval_every": 0,
        "save_every": 0,
        "log_every": LOG_EVERY,
        "tracker": "none",
        "task.data": size.data,
        "task.context_length": size.context,
        "task.vocab_size": size.vocabulary,
        "task.hidden_size": size.hidden,
        "task.num_layers": size.layers,
        "task.num_heads": size.heads,
    }
    settings |= changes
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


@dataclass
class Work:
    """What one process of a peer is told."""

    size: Size
    project: str  # folder of the baked project
    data: str  # folder of its samples, rows.pt, and their numbers in its order, order.npy
    output: str  # folder for what the peer writes

    @property
    def processes(self) -> int:
        return int(os.environ.get("WORLD_SIZE", 1))

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", 0))

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch."""
        return self.size.batch // self.processes // self.size.micro_batches

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Work":
        values = json.loads(text)
        return cls(**{**values, "size": Size(**values["size"])})


def build_dataset(work: Work):
    """The samples in the order of training: read them from the first to the last."""
    import numpy as np
    import torch
    from torch.utils.data import StackDataset, Subset

    rows = torch.load(f"{work.data}/rows.pt")  # input_ids and labels, int64 (N, context)
    return Subset(StackDataset(**rows), np.load(f"{work.data}/order.npy").tolist())


def build_model(size: Size):
    """A model that takes a batch and returns {"loss": mean cross entropy}."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.context,
    )
    return LlamaForCausalLM(config)


def build_optimizer(model):
    """AdamW; biases and norms have no weight decay."""
    import torch

    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
