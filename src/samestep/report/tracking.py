"""Writes metrics to metrics.jsonl, the tracker and the screen, from the main process alone."""

import importlib.util
import json
import math
import os
import secrets
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from samestep.base import run_folder
from samestep.base.console import is_main, one_line, print_on_main
from samestep.base.files import named, replace_text
from samestep.state.checkpoints import flatten

if TYPE_CHECKING:  # importing them takes 2 s
    from accelerate import Accelerator


def nan_to_null(line: dict) -> dict:
    """The line with None in place of NaN and infinities, which JSON does not have."""
    return {
        n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in line.items()
    }


def _has_bar() -> bool:
    """Whether this is the main process, at a terminal with columns; a container's may have none."""
    try:
        return is_main() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:  # it is a file
        return False


class Tracker:
    """The trackers of an accelerator."""

    # In the file, not in the tracker.
    untracked = ("batch_hash", "sample_ids", "in_background", "state", "state_version", "worst")

    def __init__(self, accelerator: "Accelerator"):
        self.accelerator = accelerator
        # W&B drops lines whose `step=` a killed run has passed. It gets the step as a metric.
        self.passes_step = all(each.name != "wandb" for each in accelerator.trackers)

    def track(self, values: dict, step: int) -> None:
        """Sends values to the tracker: dicts as texts."""
        left_out = (*self.untracked, "step") if self.passes_step else self.untracked
        values = {name: value for name, value in values.items() if name not in left_out}
        values = {n: json.dumps(v) if isinstance(v, dict) else v for n, v in values.items()}
        self.accelerator.log(values, step=step if self.passes_step else None)


class Log(Tracker):
    """Writes lines of metrics to metrics.jsonl in `folder`, the tracker and the screen.

    With `shows_lines` they are printed where there is no progress bar.
    """

    shares = ("data_wait", "compute", "peer_wait", "peak_memory_gb")  # see speed.SpeedMeter
    # In the file, not on the screen.
    unshown = ("step", "samples", "epoch", "items", "computed_tokens_per_second")
    unshown += (*shares, *Tracker.untracked)

    def __init__(
        self, accelerator: "Accelerator", folder: Path, first_step: int, max_steps: int,
        shows_lines: bool,
    ):  # fmt: skip
        super().__init__(accelerator)
        self.folder, self.max_steps, self.shows_lines = folder, max_steps, shows_lines
        look: Any = {"unit": "step", "dynamic_ncols": True, "disable": not _has_bar()}
        self.bar = tqdm(total=max_steps, initial=first_step, **look)
        self.first: tuple[int, float] | None = None  # the first step, and when it was counted
        if is_main():
            self.file = open(folder / "metrics.jsonl", "ab+")
            if self.file.tell():
                self.file.seek(-1, os.SEEK_END)
                if self.file.read() != b"\n":  # a kill has cut off the last line
                    self.file.write(b"\n")
            if first_step and not self.passes_step:
                self.log_again(first_step)

    def advance(self, step: int, about: str) -> None:
        """Counts a step. After the first one it prints `about`, and how long the start took."""
        self.bar.update()
        if not self.first:
            self.first = (step, time.monotonic())
            if not self.shows_lines:
                return
            import psutil  # not needed to import Training

            seconds = time.time() - psutil.Process().create_time()
            print_on_main(f"{about}; first step {seconds:.1f} s after the start")

    def write(self, line: dict) -> None:
        """Writes a line, which includes its step, to the file, the tracker and the screen."""
        if not is_main():
            return
        with named(Path(self.file.name)):
            self.file.write(json.dumps(nan_to_null(line)).encode() + b"\n")
            self.file.flush()
        if "save_seconds" in line:  # a checkpoint must not be on the disk without its metrics
            os.fsync(self.file.fileno())
        if "started" in line:
            return
        self.track(line, line["step"])
        self.show_line(line)

    def log_again(self, last: int) -> None:
        """Sends W&B the lines of metrics.jsonl up to step `last` again, an online run those from
        the step that W&B has: a kill loses what was not yet written or sent, and a run may get its
        tracker later. Equal values of a step are one point in W&B's charts."""
        run = self.accelerator.get_tracker("wandb", unwrap=True)
        known = 0 if run.offline else run.summary.get("step", 0)
        for line in run_folder.read_metrics(self.folder):
            if known <= line["step"] <= last and "started" not in line:
                self.track(line, line["step"])

    def show_line(self, line: dict) -> None:
        """Shows a line on the screen. On a terminal the training loss is in the bar alone."""
        if "loss" in line:
            rate = next(show(n, v) for n, v in line.items() if n.endswith("_per_second"))
            numbers = f"loss {line['loss']:.4g}, lr {line['lr']:.3g}, {rate}"
            self.bar.set_postfix_str(numbers, refresh=False)
        is_shown = self.bar.disable or {"eval_loss", "event"} & line.keys()
        if self.shows_lines and is_shown and line.get("event") != "changed":  # said at the start
            self.say_line(line)

    def say_line(self, line: dict) -> None:
        """Prints a line; that of the training loss tells the time left."""
        step, words = line["step"], [f"step {line['step']}/{self.max_steps}"]
        for name, value in line.items():
            if name.partition("/")[0] not in self.unshown:
                words.append(show(name, value))
        if "loss" in line and self.first and self.first[0] < step < self.max_steps:
            first, began = self.first
            left = (time.monotonic() - began) / (step - first) * (self.max_steps - step)
            words.append(f"{tqdm.format_interval(left)} left")
        print_on_main("  ".join(words))

    def close(self) -> None:
        self.bar.close()
        if is_main():
            os.fsync(self.file.fileno())
            self.file.close()


def show(name: str, value: object) -> str:
    """A name and its value, in a few digits, for the screen."""
    if name.endswith("_per_second"):
        return f"{value:,.0f} {name.removesuffix('_per_second').replace('_', ' ')}/s"
    return f"{name} {value}" if isinstance(value, str) else f"{name} {value:.5g}"


def check_tracker(tracker: str) -> None:
    """Raises ValueError if the tracker is not installed."""
    if tracker != "none" and not importlib.util.find_spec(tracker):
        raise ValueError(
            f"tracker is {tracker}, which is not installed; run pip install {tracker}, or give "
            "--tracker none"
        )


def start_tracker(accelerator: "Accelerator", config: dict) -> None:
    """Starts the tracker on the main process, and prints where to look.

    A resumed run continues the same run of the tracker. Raises ValueError for what W&B refuses.
    """
    tracker, project, output = config["tracker"], config["project"], Path(config["output_dir"])
    if tracker == "none" or not is_main():
        return
    config = flatten(config)
    if tracker == "wandb":
        _start_wandb(accelerator, config, output)
    elif tracker == "trackio":
        options = {"name": one_line(output.name, 100), "resume": "allow"}
        accelerator.init_trackers(project, config, {"trackio": options})
        print_on_main(f"trackio: `trackio show --project {shlex.quote(project)}` shows the run")
    else:  # without a name it logs into the run folder, and TensorBoard shows the folder's name
        accelerator.init_trackers("")
        accelerator.log({"config": "".join(f"    {n}: {v}\n" for n, v in config.items())})
        runs = shlex.quote(str(output.parent))
        print_on_main(f"TensorBoard: `tensorboard --logdir {runs}` shows the runs")


def _start_wandb(accelerator: "Accelerator", config: dict, output: Path) -> None:
    """Starts W&B: online with a key, else offline. It asks nothing, and an outage ends no run."""
    import wandb

    upload, file = config["upload_code"], output / "wandb_run_id"
    if not file.exists():
        replace_text(file, secrets.token_hex(4))
    # Of a killed run W&B's file lacks the last second, and not the last 15.
    os.environ.setdefault("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", "1")
    settings = {"silent": True, "init_timeout": 30, "disable_git": not upload, "save_code": upload}
    options = {"id": file.read_text(), "resume": "allow", "name": one_line(output.name, 100)}
    given: Any = {"wandb": {**options, "dir": output, "settings": wandb.Settings(**settings)}}
    mode = os.environ.get("WANDB_MODE")
    try:
        if not mode:
            has_key = not config["offline"] and wandb.login(prompt=False, verify=False)
            mode = "online" if has_key else "offline"
        given["wandb"]["mode"] = mode
        try:
            accelerator.init_trackers(config["project"], config, given)
        except wandb.errors.AuthenticationError:
            raise
        except wandb.errors.CommError as error:
            print_on_main(f"W&B: {one_line(error, 200)}")
            accelerator.trackers.clear()
            wandb.teardown()  # otherwise the id counts as in use
            given["wandb"]["mode"] = "offline"
            accelerator.init_trackers(config["project"], config, given)
    except wandb.errors.Error as error:
        raise ValueError(f"W&B: {one_line(error, 200)}") from None
    run = accelerator.get_tracker("wandb", unwrap=True)
    run.define_metric("*", step_metric="step")
    shown, runs = (shlex.quote(str(path)) for path in [*Path(run.dir).parents][:2])
    # One by one: a folder that a kill has left incomplete ends the sync of those after it.
    sync = f'for run in {runs}/offline-run-*; do wandb sync "$run"; done'
    hint = f"`wandb leet {shown}` shows the run\nwith a key, `{sync}` uploads it"
    print_on_main(f"W&B is offline: {hint}" if run.offline else f"W&B: {run.url}")
