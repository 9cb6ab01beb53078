"""How the processes of a run share samples and weights.

Under DDP, FSDP2 and ZeRO each process computes micro-batches of its own: it is a replica of the
model, as far as samples are concerned. Processes of one tensor- or context-parallel group, or the
stages of a pipeline, compute the same micro-batches together, and are one replica. All that depends
on these numbers reads them here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

# The launcher sets ACCELERATE_USE_ and one of these names for a YAML that shards models.
SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")  # from the outermost to the innermost


@dataclass(frozen=True)
class Layout:
    """The processes as a grid, in the order of `AXES`: neighbours share a tensor-parallel group."""

    processes: int = 1
    rank: int = 0
    kinds: tuple[str, ...] = ()  # those of SHARDED
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1
    stages: int = 1  # of a pipeline: neighbours, too

    @property
    def replica_size(self) -> int:
        """Processes that compute the same micro-batch: one replica."""
        return self.tp * self.cp * self.sp * self.stages

    @property
    def replicas(self) -> int:
        """Replicas that compute micro-batches of their own."""
        return self.processes // self.replica_size

    @property
    def replica(self) -> int:
        """The number of this process's replica."""
        return self.rank // self.replica_size

    @property
    def peers(self) -> list[int]:
        """Return the processes that hold the same weights, or parts of them: those of a stage."""
        first = self.rank // self.tp % self.stages * self.tp
        starts = range(first, self.processes, self.tp * self.stages)
        return [rank for start in starts for rank in range(start, start + self.tp)]

    @property
    def replica_name(self) -> str:
        """What a replica is called."""
        return "processes" if self.replica_size == 1 else f"groups of {self.replica_size} processes"

    @property
    def counts_items(self) -> bool:
        """Return whether the items of this process count, for its replica, in sums over all."""
        return self.rank % self.replica_size == 0

    @property
    def counts_losses(self) -> bool:
        """Return whether this process's losses count, in sums over all processes.

        A context-parallel group adds the losses of its parts of the rows, and stages of a pipeline
        have zeros before the last; the processes of a tensor-parallel group have the same ones.
        """
        return self.rank % self.tp == 0

    @property
    def averaged(self) -> int:
        """Processes over whose gradients DDP, FSDP and ZeRO take the mean."""
        return self.processes // self.tp

    @property
    def sharded(self) -> bool:
        """Whether a process holds only a part of the weights, so that all compute in step."""
        return bool(self.kinds) or self.stages > 1

    @property
    def in_step(self) -> int:
        """Replicas that share the weights of one copy of the model; 0: each has its own."""
        return self.replicas // self.dp_replicate if self.sharded else 0

    @property
    def fsdp(self) -> bool:
        """Whether FSDP shards the weights."""
        return "FSDP" in self.kinds

    @property
    def deepspeed(self) -> bool:
        """Whether DeepSpeed holds the optimizer, and steps in `backward`."""
        return "DEEPSPEED" in self.kinds


def layout_of(processes: int, rank: int, kinds: tuple[str, ...], axes: Mapping[str, Any]) -> Layout:
    """The layout of so many processes, with the sizes of `axes` that are not 1, and of `stages`.

    Raises ValueError if the processes do not fit the sizes.
    """
    sizes = {name: int(axes.get(name) or 1) for name in AXES}
    product = math.prod(sizes.values())
    if "PARALLELISM_CONFIG" in kinds and product != processes:
        named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
        raise ValueError(
            f"parallelism_config needs {product} processes ({named or 'all sizes are 1'}), and "
            f"num_processes is {processes}; make them equal"
        )
    stages = int(axes.get("stages") or 1)
    if stages > 1:
        together = stages * sizes["tp"]
        if kinds or processes % together:
            raise ValueError(
                f"{stages} stages need a YAML that shards nothing, such as multi_gpu_bf16.yaml, "
                f"and a multiple of {together} processes; num_processes is {processes}"
            )
    return Layout(processes, rank, kinds, **sizes, stages=stages)


def layout_of_accelerator(accelerator: Accelerator) -> Layout:
    """The layout of an Accelerator, whatever has launched or configured it."""
    kind, config = accelerator.distributed_type.value, accelerator.parallelism_config
    kinds = tuple(each for each in SHARDED[:3] if each == kind)
    axes = {}
    if config and config.total_size > 1:
        kinds += ("PARALLELISM_CONFIG",)
        axes = {name: getattr(config, f"{name}_size", 1) for name in AXES}
    return layout_of(accelerator.num_processes, accelerator.process_index, kinds, axes)
