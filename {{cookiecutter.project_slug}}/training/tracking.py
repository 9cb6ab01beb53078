"""Where numbers go: metrics.jsonl, the tracker and the screen, from the main process alone."""

import contextlib
import importlib.util
import io
import json
import math
import os
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from tqdm import tqdm

from training.checkpoints import flatten
from training.console import IS_MAIN, one_line, say

if TYPE_CHECKING:  # they take 2 s to import, for which plot.py and predict.py would wait
    import torch
    from accelerate import Accelerator


def nan_to_null(line: dict) -> dict:
    """The line with None for numbers that JSON does not have: NaN and infinities."""
    return {
        n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in line.items()
    }


def write_json_object(path: Path, line: dict) -> None:
    """Writes a JSON object into a file of its own."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(nan_to_null(line)) + "\n", encoding="utf-8")


class Log:
    """Writes lines of metrics, from the main process alone."""

    silence = 10  # seconds between lines about the training loss on a terminal, evaluations apart
    untracked = ("batch_hash", "sample_ids")
    unsaid = ("samples", "epoch", "data_wait", *untracked)  # in the file, not on the screen

    def __init__(self, accelerator: "Accelerator", config: dict, first_step: int, max_steps: int):
        self.accelerator, self.first_step, self.max_steps = accelerator, first_step, max_steps
        # W&B drops lines whose `step=` a killed run had passed; there, step is one more metric.
        self.passes_step = config["tracker"] != "wandb"
        self.bar = tqdm(
            total=max_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=None if IS_MAIN else True,
        )
        self.held, self.said = [], -math.inf  # a line that is not on the screen, and since when
        if IS_MAIN:
            path = Path(config["output_dir"]) / "metrics.jsonl"
            self.file = open(path, "ab+")
            if self.file.tell():
                self.file.seek(-1, os.SEEK_END)
                self.file.write(
                    b"" if self.file.read() == b"\n" else b"\n"
                )  # a kill tore that line

    def advance(self, step: int, about: str, result: "torch.Tensor") -> None:
        """Counts a step; early in a run, says how long it will take, waiting for `result` then.

        The first step, which warms up, is no measure of the others.
        """
        self.bar.update()
        first, last = self.first_step + 1, self.max_steps
        if step == first:
            result.item()
            self.warm = time.perf_counter()
            self.ready = time.time() - psutil.Process().create_time()
        if step == min(first + 3, last):
            result.item()
            left = (time.perf_counter() - self.warm) / max(step - first, 1) * (last - step)
            say(f"{about}; first step {self.ready:.1f} s after the start; about {left:.0f} s to go")

    def write(self, line: dict) -> None:
        """Writes a line of numbers, with its step."""
        if not IS_MAIN:
            return
        self.file.write(json.dumps(nan_to_null(line)).encode() + b"\n")
        self.file.flush()
        if "save_seconds" in line:  # what a checkpoint continues is on the disk as it is
            os.fsync(self.file.fileno())
        self.track(
            {name: v for name, v in line.items() if name not in self.untracked}, line["step"]
        )
        self.show_line(line)

    def show_line(self, line: dict) -> None:
        """Shows a line on the screen, where it is due; in a log file all but those of saving.

        At a terminal the bar shows the training loss, and a line of it stays every few seconds, and
        with each evaluation.
        """
        due = [line] if {"eval_loss", "event"} & line.keys() else []
        if "loss" in line:
            rate, number = next((n, v) for n, v in line.items() if n.endswith("_per_second"))
            speed = f"{number:,.0f} {rate.removesuffix('_per_second')}/s"
            numbers = f"loss {line['loss']:.4g}, lr {line['lr']:.3g}, {speed}"
            self.bar.set_postfix_str(numbers, refresh=False)
            self.held = [line]
        waited = time.monotonic() - self.said
        if self.held and (due or self.bar.disable or waited > self.silence):
            due, self.held, self.said = self.held + due, [], time.monotonic()
        for each in due:
            shown = {name: v for name, v in each.items() if name not in self.unsaid}
            texts = {n: v if isinstance(v, str) else f"{v:.5g}" for n, v in shown.items()}
            say("  ".join(f"{name} {text}" for name, text in texts.items()))

    def track(self, values: dict, step: int) -> None:
        """Sends values to the tracker alone."""
        if self.passes_step:
            values = {name: value for name, value in values.items() if name != "step"}
        self.accelerator.log(values, step=step if self.passes_step else None)

    def show(self, shown: dict, step: int) -> None:
        """Sends texts, and pictures by their paths, to the tracker."""
        pictures = {name: value for name, value in shown.items() if isinstance(value, Path)}
        texts = {name: value for name, value in shown.items() if name not in pictures}
        if texts:
            self.track({**texts, "step": step}, step)
        for tracker in self.accelerator.trackers if pictures else []:
            if tracker.name == "tensorboard":
                import numpy as np
                from PIL import Image

                for name, path in pictures.items():
                    values = {name: np.asarray(Image.open(path).convert("RGB"))[None]}
                    tracker.log_images(values, step=step, dataformats="NHWC")
            else:  # W&B, and Trackio, which has the same calls
                library = importlib.import_module(tracker.name)
                images = {name: library.Image(str(path)) for name, path in pictures.items()}
                self.track({**images, "step": step}, step)

    def close(self) -> None:
        """Closes the file and the bar; the tracker is closed by accelerator.end_training."""
        self.bar.close()
        if IS_MAIN:
            os.fsync(self.file.fileno())
            self.file.close()


def check_tracker(tracker: str, project: str) -> None:
    """Raises ValueError where the tracker is not installed, or W&B refuses its key or the name."""
    if tracker != "none" and not importlib.util.find_spec(tracker):
        raise ValueError(
            f"tracker is {tracker}, which is not installed; pip install {tracker}, or give "
            "--tracker none"
        )
    if tracker == "wandb" and IS_MAIN:
        log_in_to_wandb()
        if re.search(r"[/\\#?%:]", project) or not 0 < len(project) <= 128:
            raise ValueError(
                f"project is {one_line(project, 60)!r}; W&B takes 1 to 128 characters, none of "
                "them / \\ # ? % or :"
            )


def log_in_to_wandb() -> bool:
    """Whether runs go to W&B's server: there is a key, and the environment does not say else."""
    import wandb

    try:
        return not os.environ.get("WANDB_MODE") and wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError as error:
        raise ValueError(f"W&B: {' '.join(str(error).split())}") from None


def start_tracker(accelerator: "Accelerator", config: dict) -> None:
    """Starts the tracker on the main process, and says where to look.

    A continued run goes on as the same run.
    """
    tracker, project, output = config["tracker"], config["project"], Path(config["output_dir"])
    if tracker == "none" or not IS_MAIN:
        return
    config = flatten(config)
    if tracker == "wandb":
        start_wandb(accelerator, config, output)
    elif tracker == "trackio":
        options = {"name": one_line(output.name, 100), "resume": "allow"}
        with without_stdout():
            accelerator.init_trackers(project, config, {"trackio": options})
        say(f"trackio: `trackio show --project {project}` shows the run")
    else:  # in the run folder itself, so that TensorBoard calls the run as the folder is called
        accelerator.init_trackers("")
        accelerator.log({"config": "".join(f"    {n}: {v}\n" for n, v in config.items())})
        say(f"TensorBoard: `tensorboard --logdir {output.parent}` shows the runs")


def without_stdout() -> contextlib.redirect_stdout:
    """Trackio prints a dozen lines about itself when a run begins, and when it ends."""
    return contextlib.redirect_stdout(io.StringIO())


def end_tracker(accelerator: "Accelerator") -> None:
    """Closes the tracker, which sends what it has not sent yet."""
    with without_stdout():
        if any(tracker.name == "trackio" for tracker in accelerator.trackers):
            importlib.import_module("trackio").finish()  # or it does, and says so, at the exit
        accelerator.end_training()


def start_wandb(accelerator: "Accelerator", config: dict, output: Path) -> None:
    """Starts W&B: online with a key, else offline; nobody is asked, and no outage ends a run."""
    import wandb

    upload, file = config["upload_code"], output / "wandb_run_id"
    known = file.read_bytes().strip() if file.exists() else b""
    if not re.fullmatch(rb"[\w-]{1,64}", known):
        if known:
            say(f"{file} holds no id of W&B: the run goes on there as a new one")
        known = secrets.token_hex(4).encode()
        file.write_bytes(known)
    options = {
        "mode": os.environ.get("WANDB_MODE") or ("online" if log_in_to_wandb() else "offline"),
        "id": known.decode(),
        "resume": "allow",
        "name": one_line(output.name, 100),
        "dir": output,
        "settings": wandb.Settings(
            silent=True, init_timeout=30, disable_git=not upload, save_code=upload
        ),
    }
    try:
        accelerator.init_trackers(config["project"], config, {"wandb": options})
    except wandb.errors.CommError as error:
        say(f"W&B: {' '.join(str(error).split())[:200]}")
        accelerator.trackers.clear()
        wandb.teardown()  # or the id counts as in use
        options["mode"] = "offline"
        accelerator.init_trackers(config["project"], config, {"wandb": options})
    run = accelerator.get_tracker("wandb", unwrap=True)
    run.define_metric("*", step_metric="step")
    folder = Path(run.dir).parent
    hint = f"`wandb leet {folder}` shows the run, `wandb sync {folder}` uploads it"
    say(f"W&B is offline: {hint}" if run.offline else f"W&B: {run.url}")
