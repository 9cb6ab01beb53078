"""Measures what `exact` costs a baked project, and what `device_shares` gain it.

    make bench-steps                                  # in the template: tables, a .json
    python benchmarks/steps.py --sizes small --processes 1 2 --machines --rounds 2 --steps 2

All runs of a comparison wait for their turns, as in compare.py.

exact: seconds a step with and without it, with the same micro-batches.
memory: the peak of a process, for a model whose gradients are larger than all else in a step.
shares: a process is slowed by real work: it computes its loss several times, and multiplies all
but the first by 0. More processes than cores would slow each other; there the time of a device is
a sleep in the forward and the backward pass.

If process r takes t_r seconds for a micro-batch, the best cut is the n with the smallest
max(n_r t_r). t_r is measured with the process alone, so the exchange, and what else processes cost
each other, are not in it. The list is a run with device_shares: n. It pays for these, too.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import os
import runpy
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import compare
import work
from compare import HERE, Run, say
from work import SIZES, Size, Work

MEMORY = "memory"
SIZES = SIZES | {
    MEMORY: Size(512, 8, 8, context=32, batch=8),
    "work": Size(128, 2, 4, context=64, batch=24),
    "sleep": Size(32, 1, 2, context=32, batch=28),
}
EXACT = ("false", "true")
MICRO_BATCH = {"small": 2, "large": 2}  # samples; 1 in the others
# Columns that a table leaves out: the peak of a small model is mostly not its own.
HIDDEN = {
    "exact": ("rounds", "gradients, MB", "peak, MB", "`exact` adds"),
    "memory": ("rounds", "step", "ms a step", "with `exact`", "wall time", "CPU time"),
    "shares": ("rounds", "seconds a micro-batch, alone"),
}
# Of each machine: its size; of each process: how often it computes a loss, seconds that it sleeps.
MACHINES = {
    "1, 2 x slower": ("work", [1, 2], [0, 0]),
    "1, 3 x slower": ("work", [1, 3], [0, 0]),
    "1 : 2 : 4": ("sleep", [1, 1, 1], [0.036, 0.018, 0.009]),
}


# ---- A process -----------------------------------------------------------------------------------


def train() -> None:
    """train.py of a baked project, unchanged; the task's loss is slowed as BENCH_TASK says."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    import clock

    todo, given = Work.read(), json.loads(os.environ["BENCH_TASK"])
    times, seconds = given["times"][todo.rank], given["seconds"][todo.rank]

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context, loss):
            time.sleep(seconds / 3)
            return loss.clone()

        @staticmethod
        def backward(context, gradient):
            time.sleep(seconds * 2 / 3)
            return gradient

    def slow_loss_sum(model, batch):
        loss = loss_sum(model, batch)
        for _ in range(times - 1):
            loss = loss + 0 * loss_sum(model, batch)
        return Sleep.apply(loss) if seconds else loss

    def attach(steps) -> None:
        """Advances `steps` before each update of the weights; hashes them after the last."""
        count = itertools.count()

        def before_update(optimizer, *_):
            if next(count) == given["last"]:
                digest, size = hashlib.sha256(), 0
                for weight in (p for group in optimizer.param_groups for p in group["params"]):
                    digest.update(weight.detach().numpy())
                    size += weight.nbytes
                found = [digest.hexdigest(), size]
                Path(todo.output, f"weights-{todo.rank}").write_text(json.dumps(found))
            next(steps)

        register_optimizer_step_pre_hook(before_update)

    clock.install(attach)
    os.chdir(todo.project)
    sys.path[0] = todo.project
    import task
    from samestep.project import device

    ddp = json.loads(os.environ.get("BENCH_DDP", "{}"))
    device.accelerator_options = functools.partial(device.accelerator_options, **ddp)
    loss_sum, task.loss_sum = task.loss_sum, slow_loss_sum
    flags = work.flags(todo.size, **given["flags"])
    sys.argv = ["train.py", *flags, "--output_dir", f"{todo.output}/run"]
    runpy.run_path("train.py", run_name="__main__")


# ---- Runs ----------------------------------------------------------------------------------------


class Trained(Run):
    """A run of the project; `times` and `seconds` of its processes are those of MACHINES.

    `flags` differ from those of work.py. After `last` steps the weights are hashed.
    """

    def __init__(self, todo: Work, name: str, last: int, times, seconds=(), env=(), **flags):
        self.output, size = f"{todo.output}/{name}", Path(todo.output).name
        flags = {"micro_batch_size": MICRO_BATCH.get(size, 1)} | flags
        given = {"times": times, "seconds": seconds or [0] * len(times), "flags": flags}
        env = dict(env) | {"BENCH_TASK": json.dumps(given | {"last": last})}
        todo = Work(todo.size, todo.project, todo.data, self.output)
        super().__init__(name, todo, len(times), program="steps.py", **env)

    def weights(self) -> list:
        """SHA-256 and bytes of the weights after the last step, on all processes."""
        (found,) = {path.read_text() for path in Path(self.output).glob("weights-*")}
        return json.loads(found)

    def peak(self) -> int:
        """The largest peak of a process's memory, in bytes."""
        status = [Path(f"/proc/{each.pid}/status").read_text() for each, *_ in self.ranks]
        return max(1024 * int(text.split("VmHWM:")[1].split()[0]) for text in status)


@contextlib.contextmanager
def running():
    """A dictionary of runs, which end with it."""
    runs: dict[str, Trained] = {}
    try:
        yield runs
    finally:
        for run in runs.values():
            run.end()


def take_turns(runs: dict[str, Trained], rounds: int, steps: int) -> dict[str, dict]:
    """For each run: seconds and CPU seconds a step, in each round."""
    found: dict[str, dict] = {name: {"seconds": [], "cpu": []} for name in runs}
    for number in range(rounds):
        order = [*runs]
        for name in order[number % len(order) :] + order[: number % len(order)]:
            runs[name].train(1)  # its data comes back into the caches
            timed = runs[name].train(steps)
            for key, values in found[name].items():
                values.append(timed[key])
    return found


def one(digests: set[str]) -> str:
    """The only one, or the end of the program."""
    if len(digests) > 1:
        sys.exit(f"exact has trained different weights: {digests}")
    return digests.pop()


# ---- exact ---------------------------------------------------------------------------------------


def measure_exact(todo: Work, processes: int, rounds: int, steps: int, env=()) -> dict:
    """Seconds a step without `exact` and with it, and what else a row of the table has."""
    name, times = Path(todo.output).name, [1] * processes
    say(f"{name}, {processes} x CPU")
    with running() as runs:
        for exact in EXACT:
            flags = {"last": 1 + rounds * (1 + steps), "times": times, "env": env, "exact": exact}
            runs[exact] = Trained(todo, f"{processes}-{exact}", **flags)
        for run in runs.values():
            run.train(1)
        plain, exact = take_turns(runs, rounds, steps).values()
        peaks = [run.peak() / 1e6 for run in runs.values()]
        digest, gradients = runs["true"].weights()
    ratios = {
        key: compare.middle([b / a for a, b in zip(plain[key], exact[key], strict=True)])
        for key in plain
    }
    return {
        "step": name,
        "processes": str(processes),
        "micro-batches of each": str(todo.size.batch // MICRO_BATCH.get(name, 1) // processes),
        "ms a step": f"{1e3 * median(plain['seconds']):.1f}",
        "with `exact`": f"{1e3 * median(exact['seconds']):.1f}",
        "wall time": "{:.3f} ({:.3f} to {:.3f})".format(*ratios["seconds"]),
        "CPU time": f"{ratios['cpu'][0]:.3f}",
        "gradients, MB": f"{gradients / 1e6:.0f}",
        "peak, MB": f"{peaks[0]:.0f}",
        "`exact` adds": f"{peaks[1] - peaks[0]:.0f}",
        "SHA-256": digest,
        "rounds": [plain, exact],
    }


def measure_memory(todo: Work, processes: int) -> dict:
    """The same for two steps, with peaks that are the memory in use."""
    # Freed blocks of any size go back to the system at once.
    return measure_exact(todo, processes, 1, 1, {"MALLOC_MMAP_THRESHOLD_": "65536"})


# ---- device_shares -------------------------------------------------------------------------------


def best_cut(count: int, alone: list[float]) -> tuple[float, list[int]]:
    """Seconds of a step of `count` micro-batches, and how many of them each process computes."""
    cuts = itertools.product(range(1, count), repeat=len(alone))
    whole = (cut for cut in cuts if sum(cut) == count)
    return min((max(n * t for n, t in zip(cut, alone, strict=True)), [*cut]) for cut in whole)


def measure_shares(
    todo: Work, machine: str, exact: str, settled: int, rounds: int, steps: int
) -> list[dict]:
    """Samples a second for each way to assign the steps, beside the best cut and the best list."""
    say(f"{machine}, exact {exact}")
    _, times, sleeps = MACHINES[machine]
    count, last = todo.size.batch, settled + rounds * (1 + steps)
    folder = f"{machine}-{exact}".replace(" ", "")
    with running() as alone, running() as runs:

        def start(shares: str) -> Trained:
            flags = {"exact": exact, "device_shares": shares}
            return Trained(todo, f"{folder}-{shares[:5]}", last, times, sleeps, **flags)

        for r, (work_times, sleep) in enumerate(zip(times, sleeps, strict=True)):
            name = f"alone {r}"
            alone[name] = Trained(todo, f"{folder}-{r}", 0, [work_times], [sleep], exact=exact)
        runs |= {"equal": start("equal"), "auto": start("auto")}
        for run in alone.values():
            run.train(1)
        before = take_turns(alone, 2, 1)
        taken = [min(each["seconds"]) / count for each in before.values()]
        listed = best_cut(count, taken)[1]
        runs["list"] = start(json.dumps(listed))
        for run in runs.values():
            run.train(settled)
        found = take_turns(runs, rounds, steps)
        after = take_turns(alone, 2, 1)
        text = Path(runs["auto"].output, "run", "metrics.jsonl").read_text()
        digests = {name: run.weights()[0] for name, run in runs.items()}
    if exact == "true":
        one({*digests.values()})
    (assigned,) = (line for line in map(json.loads, text.splitlines()) if "shares" in line)
    seconds = {name: median(each["seconds"]) for name, each in found.items()}
    taken = [median(before[r]["seconds"] + after[r]["seconds"]) / count for r in alone]
    best = best_cut(count, taken)[0]
    shares = {"list": " + ".join(map(str, listed)), "auto": assigned["shares"]}
    return [
        {
            "devices": machine,
            "`exact`": exact,
            "`device_shares`": name,
            "micro-batches": shares.get(name, ""),
            "samples/s": f"{count / seconds[name]:.1f}",
            "of the best cut": f"{best / seconds[name]:.2f}",
            "of the list": f"{seconds['list'] / seconds[name]:.2f}",
            "SHA-256": digests[name],
            "rounds": found,
            "seconds a micro-batch, alone": taken,
        }
        for name in runs
    ]


# ---- Showing -------------------------------------------------------------------------------------


def describe(report: dict) -> str:
    """Tables in Markdown, and a sentence about the machine."""
    from rich import box
    from rich.table import Table

    text = []
    for table, rows in report["tables"].items():
        columns = [name for name in (rows or [{}])[0] if name not in HIDDEN[table]]
        shown = Table(*columns, box=box.MARKDOWN)
        for row in rows:
            shown.add_row(*(row[name][: 8 if name == "SHA-256" else None] for name in columns))
        text += [compare.markdown(shown)] * bool(rows)
    return "\n\n".join([*text, compare.about(report)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", choices=MICRO_BATCH, default=[*MICRO_BATCH])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4], help="of exact")
    parser.add_argument("--memory", nargs="*", type=int, default=[1, 2], help="processes")
    parser.add_argument("--machines", nargs="*", choices=MACHINES, default=[*MACHINES])
    parser.add_argument("--exact", nargs="+", choices=EXACT, default=[*EXACT], help="of machines")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, help="steps in a round")
    parser.add_argument("--settled", type=int, default=3, help="steps before shares are timed")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("--name", default="steps", help="name of the file of results")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench"))
    tables: dict[str, list] = {"exact": [], "memory": [], "shares": []}
    report = {**compare.about_machine(), "load": [os.getloadavg()[0]], "tables": tables}
    try:
        say("baking a project")
        project = compare.bake(folder)
        names = {*asked.sizes, *(MACHINES[name][0] for name in asked.machines)}
        names |= {MEMORY} if asked.memory else set()
        todo = {name: compare.prepare(project, SIZES[name], folder / name) for name in names}
        for name in asked.sizes:
            steps = asked.steps or SIZES[name].steps
            for processes in asked.processes:
                tables["exact"].append(measure_exact(todo[name], processes, asked.rounds, steps))
            one({row["SHA-256"] for row in tables["exact"] if row["step"] == name})
        tables["memory"] = [measure_memory(todo[MEMORY], number) for number in asked.memory]
        for name, exact in itertools.product(asked.machines, asked.exact):
            size, steps = todo[MACHINES[name][0]], asked.steps or 4
            tables["shares"] += measure_shares(
                size, name, exact, asked.settled, asked.rounds, steps
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    compare.publish(report, describe, asked, "make bench-steps")


if __name__ == "__main__":
    train() if "BENCH_TASK" in os.environ else main()
