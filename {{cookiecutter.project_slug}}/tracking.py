"""Where numbers go: metrics.jsonl, the tracker and the screen, from the main process alone."""

import json
import math
import os
import secrets
import sys
from pathlib import Path

from accelerate import Accelerator
from tqdm import tqdm

from checkpoints import flat

IS_MAIN = os.environ.get("RANK", "0") == "0"  # known before there is a process group


def say(text: str) -> None:
    """Prints once, not once per rank, and above the progress bar."""
    if IS_MAIN:
        tqdm.write(text)
        sys.stdout.flush()


class Log:
    """Writes lines of metrics, from the main process alone."""

    unsaid = ("samples", "epoch", "data_wait", "batch_hash")  # in the file, not on the screen

    def __init__(self, accelerator: Accelerator, config: dict, first_step: int, max_steps: int):
        self.accelerator = accelerator
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

    def write(self, line: dict) -> None:
        """Writes a line of numbers, with its step."""
        if not IS_MAIN:
            return
        valid = {n: v if isinstance(v, str) or math.isfinite(v) else None for n, v in line.items()}
        self.file.write(json.dumps(valid) + "\n")
        self.file.flush()
        self.track({name: v for name, v in line.items() if name != "batch_hash"}, line["step"])
        if "eval_loss" in line or self.bar.disable:
            shown = {name: v for name, v in line.items() if name not in self.unsaid}
            say("  ".join(f"{name} {v:.5g}" for name, v in shown.items()))

    def track(self, values: dict, step: int) -> None:
        """Sends values to the tracker alone."""
        if self.passes_step:
            values = {name: value for name, value in values.items() if name != "step"}
        self.accelerator.log(values, step=step if self.passes_step else None)

    def close(self) -> None:
        """Closes the file and the bar; the tracker is closed by accelerator.end_training."""
        self.bar.close()
        if IS_MAIN:
            self.file.close()


def start_tracker(accelerator: Accelerator, config: dict) -> None:
    """Starts the tracker on the main process, and says where to look.

    A continued run goes on as the same run. Raises ValueError for a key that W&B refuses.
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

    try:
        key = "WANDB_MODE" not in os.environ and wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError as error:
        raise ValueError(f"W&B: {error}") from None
    upload, run_id = config["upload_code"], output / "wandb_run_id"
    if not run_id.exists():
        run_id.write_text(secrets.token_hex(4), encoding="utf-8")
    options = {
        "mode": os.environ.get("WANDB_MODE") or ("online" if key else "offline"),
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
