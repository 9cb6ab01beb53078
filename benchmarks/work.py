"""The work that all peers do: the same model, samples, loss and optimizer settings.

A peer gets it as a `Work`, from the environment variable BENCH_WORK. The samples are those of the
baked project, in its order, saved as tensors: the losses of all peers are the same to rounding, and
compare.py checks that. torch is imported late: gpu.py says first which packages are missing.
"""

import json
import os
from dataclasses import asdict, dataclass

LEARNING_RATE, BETAS, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-3, (0.9, 0.99), 0.1, 1.0
LOG_EVERY = 10  # steps between lines of metrics
SEED = 0


@dataclass
class Work:
    """A Llama and its batch, and what one process of a peer is told.

    The width of the feed-forward layers is 3 x hidden.
    """

    hidden: int
    layers: int
    heads: int
    context: int  # tokens in a sample
    batch: int  # samples in an optimizer step, over all processes
    counted: int = 0  # steps in which clock.py counts, before the timing begins
    steps: int = 20  # steps that are timed in a round
    rounds: int = 3
    vocabulary: int = 1024
    source: str = "manual"  # the project's task.data
    micro_batches: int = 1  # of a process in a step
    project: str = ""  # folder of the baked project
    data: str = ""  # folder of its samples, rows.pt, and their numbers in its order, order.npy
    output: str = ""  # folder for what the peer writes

    @property
    def processes(self) -> int:
        return int(os.environ.get("WORLD_SIZE", 1))

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch."""
        return self.batch // self.processes // self.micro_batches

    def to_json(self) -> str:
        return json.dumps(asdict(self))


SIZES = {
    "small": Work(64, 2, 4, context=64, batch=8, counted=21, steps=40, rounds=40, micro_batches=2),
    "large": Work(480, 5, 8, context=128, batch=8, counted=2, steps=2, rounds=10),
}


def flags(work: Work, **changes) -> list[str]:
    """The same work as flags of a baked project's train.py, with some of them changed."""
    settings = {
        "seed": SEED,
        "max_steps": 1_000_000,  # the benchmark ends the run
        "global_batch_size": work.batch,
        "micro_batch_size": work.batch // work.micro_batches,
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
        "task.data": work.source,
        "task.context_length": work.context,
        "task.vocab_size": work.vocabulary,
        "task.hidden_size": work.hidden,
        "task.num_layers": work.layers,
        "task.num_heads": work.heads,
    }
    settings |= changes
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def build_dataset(work: Work):
    """The samples in the order of training: read them from the first to the last."""
    import numpy as np
    import torch
    from torch.utils.data import StackDataset, Subset

    rows = torch.load(f"{work.data}/rows.pt")  # input_ids and labels, int64 (N, context)
    return Subset(StackDataset(**rows), np.load(f"{work.data}/order.npy").tolist())


def build_model(work: Work):
    """A model that takes a batch and returns {"loss": mean cross entropy}."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=work.vocabulary,
        hidden_size=work.hidden,
        intermediate_size=3 * work.hidden,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        max_position_embeddings=work.context,
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
