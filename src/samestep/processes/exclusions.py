"""What cannot be combined: one table, for train.py and for any script.

Each pair would change the numbers, hang, or fail in a library's code: docs/hardware.md says why.
"""

from samestep.base.errors import UserError

# Of the first and any of the others one is left out.
_EXCLUDED = {
    "exact": (
        *("compile", "offload", "fp8", "DeepSpeed"),
        *("tensor parallelism", "context parallelism", "stages", "an Apple GPU"),
        *("half precision under FSDP2", "fused=True under FSDP2 on CPUs"),
    ),
    "compile": ("DeepSpeed", "context parallelism", "stages"),
    "device_shares": ("sharded weights",),
    "async_save": ("DeepSpeed",),
    "fp16": ("sharded weights", "a CPU"),
    "fp8": ("DeepSpeed", "tensor parallelism", "context parallelism", "stages"),
    "micro_batch_size auto": (  # a step that began to communicate cannot be computed again
        *("exact", "a stream", "device_shares", "SyncBatchNorm", "static_graph"),
        *("tensor parallelism", "context parallelism", "stages", "DeepSpeed"),
    ),
}


def check(there: dict[str, bool]) -> None:
    """Raises UserError for two things that cannot be combined. `there`: by names of the table."""
    for name, others in _EXCLUDED.items():
        for other in others:
            if there.get(name) and there.get(other):
                remedy = "leave one of them out"
                if name == "micro_batch_size auto":
                    remedy = "give a number, such as the one that auto found in another run"
                raise UserError(f"{name} cannot be combined with {other}; {remedy}")
