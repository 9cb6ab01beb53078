"""One step of the project's own train.py: python -m samestep.hardware.own_loop FILE FLAGS

smoke starts it on each process, and compares what it logs with gradients of its own. A stop is
requested from the beginning, so the run ends after one step, with a checkpoint and without an
evaluation. FILE gets digests of what the optimizer holds before and after the step.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from samestep.processes import shutdown
from samestep.processes.ranks import Ranks
from samestep.start.startup import RunStart, find_project
from samestep.step.sharding import local


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """16 hex digits of the SHA-256 of types, shapes and bytes; of a DTensor, of this part."""
    found = hashlib.sha256()
    for values in map(local, tensors):
        found.update(f"{values.dtype} {tuple(values.shape)}".encode())
        bits = values.detach().cpu().contiguous().flatten().view(torch.uint8)
        found.update(bits.numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    """Runs train.py's main for a step; exits with 75."""
    file, states = Path(sys.argv.pop(1)), {}
    train, _ = find_project()

    def note(when: str, optimizer: torch.optim.Optimizer) -> None:
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        held = [optimizer.state.get(p, {}) for p in weights]
        moments = [each[name] for each in held for name in sorted(each)]
        states[when] = [digest(weights), digest(filter(torch.is_tensor, moments))]
        file.write_text(json.dumps(states))

    register_optimizer_step_pre_hook(lambda optimizer, *_: note("before", optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: note("after", optimizer))

    def one_step(start: RunStart, ranks: Ranks, stop: shutdown.StopRequest) -> int:
        stop.since = time.monotonic()
        return train.main(start, ranks, stop)

    shutdown.run(one_step, train.prepare)


if __name__ == "__main__":
    main()
