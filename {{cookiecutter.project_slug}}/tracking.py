"""Where numbers go: metrics.jsonl, the tracker and the screen, from the main process alone."""

import importlib.util
import json
import math
import os
import secrets
import sys
import time
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from tqdm import tqdm

from checkpoints import flat

IS_MAIN = os.environ.get("RANK", "0") == "0"  # known before there is a process group


def say(text: str) -> None:
    """Prints once, not once per rank, and above the progress bar."""
    if IS_MAIN:
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except BrokenPipeError:  # `make train | head`: who reads has left, and the run goes on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Log:
    """Writes lines of metrics, from the main process alone."""

    untracked = ("batch_hash", "sample_ids")
    unsaid = ("samples", "epoch", "data_wait", *untracked)  # in the file, not on the screen

    def __init__(self, accelerator: Accelerator, config: dict, first_step: int, max_steps: int):
        self.accelerator, self.first_step, self.max_steps = accelerator, first_step, max_steps
        # W&B drops lines whose `step=` a killed run had passed; there, step is one more metric.
        self.passes_step = config["tracker"] != "wandb"
        self.bar = tqdm(
            total=max_steps, initial=first_step, unit="step", disable=None if IS_MAIN else True
        )
        if IS_MAIN:
            path = Path(config["output_dir"]) / "metrics.jsonl"
            torn = path.exists() and not path.read_bytes().endswith(b"\n")
            self.file = open(path, "a", encoding="utf-8")
            self.file.write("\n" if torn else "")  # ends the line at which a run was killed

    def advance(self, step: int, about: str, result: torch.Tensor) -> None:
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
        odd = {n: None for n, v in line.items() if isinstance(v, float) and not math.isfinite(v)}
        self.file.write(json.dumps(line | odd) + "\n")
        self.file.flush()
        self.track(
            {name: v for name, v in line.items() if name not in self.untracked}, line["step"]
        )
        if "eval_loss" in line or "event" in line or (self.bar.disable and "loss" in line):
            shown = {name: v for name, v in line.items() if name not in self.unsaid}
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
            self.file.close()


def check(tracker: str) -> None:
    """Raises ValueError where the tracker is not installed, or W&B refuses its key."""
    if tracker != "none" and not importlib.util.find_spec(tracker):
        raise ValueError(
            f"tracker is {tracker}, which is not installed; pip install {tracker}, or give "
            "--tracker none"
        )
    if tracker == "wandb" and IS_MAIN:
        log_in_to_wandb()


def log_in_to_wandb() -> bool:
    """Whether runs go to W&B's server: there is a key, and the environment does not say else."""
    import wandb

    try:
        return not os.environ.get("WANDB_MODE") and wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError as error:
        raise ValueError(f"W&B: {' '.join(str(error).split())}") from None


def start_tracker(accelerator: Accelerator, config: dict) -> None:
    """Starts the tracker on the main process, and says where to look.

    A continued run goes on as the same run.
    """
    tracker, project, output = config["tracker"], config["project"], Path(config["output_dir"])
    if tracker == "none" or not IS_MAIN:
        return
    config = flat(config)
    if tracker == "wandb":
        start_wandb(accelerator, config, output)
    elif tracker == "trackio":
        options = {"name": output.name, "resume": "allow"}
        accelerator.init_trackers(project, config, {"trackio": options})
        say(f"trackio: `trackio show --project {project}` shows the run")
    else:
        accelerator.init_trackers(project, config)
        say(f"TensorBoard: `tensorboard --logdir {output / project}` shows the run")


def start_wandb(accelerator: Accelerator, config: dict, output: Path) -> None:
    """Starts W&B: online with a key, else offline; nobody is asked, and no outage ends a run."""
    import wandb

    upload, run_id = config["upload_code"], output / "wandb_run_id"
    if not run_id.exists():
        run_id.write_text(secrets.token_hex(4), encoding="utf-8")
    options = {
        "mode": os.environ.get("WANDB_MODE") or ("online" if log_in_to_wandb() else "offline"),
        "id": run_id.read_text(encoding="utf-8").strip(),
        "resume": "allow",
        "name": output.name,
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
