"""One step of the project's own train.py: python -m samestep.hardware.own_loop FLAGS

smoke starts it on each process, and compares what it logs with gradients of its own. A stop is
requested from the beginning, so the run ends after one step, without an evaluation.
"""

import time

from samestep.processes import shutdown
from samestep.processes.ranks import Ranks
from samestep.start.startup import RunStart, find_project


def main() -> None:
    """Runs train.py's main for a step; exits with 75."""
    train, _ = find_project()

    def one_step(start: RunStart, ranks: Ranks, stop: shutdown.StopRequest) -> int:
        stop.since = time.monotonic()
        return train.main(start, ranks, stop)

    shutdown.run(one_step, train.prepare)


if __name__ == "__main__":
    main()
