"""Evaluates a trained language model by lm-evaluation-harness (make setup EXTRAS=eval).

    python -m samestep evaluate runs/default/model --tasks cloze.yaml
    python -m samestep evaluate runs/default/model --tasks lambada_openai hellaswag --limit 100
    python -m samestep evaluate runs/lora/model --tasks chats.yaml --chat

`python -m samestep example cloze` writes cloze.yaml, a task on rows of your own, which needs no
network. The numbers go to metrics.json beside the model, into its card, and to the tracker of its
run.
"""

import argparse
import importlib.util
import logging
import math
import os
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from samestep.base.console import one_line, protect_output
from samestep.base.files import read_json_object, read_text
from samestep.programs import make_parser
from samestep.programs.predict import find_model, load_pipeline
from samestep.report import curves, model_card, tracking


def find_tasks(given: list[str]) -> tuple[list[str], list[Path]]:
    """The names of tasks, and the folders of those that are files; raises ValueError."""
    names, folders = [], []
    for each in given:
        path = Path(each)
        if path.suffix not in (".yaml", ".yml"):
            names.append(each)
            continue
        try:
            task = yaml.load(read_text(path), Loader=yaml.BaseLoader)  # the harness has own tags
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"cannot read the task {path}: {one_line(error)}") from None
        if not isinstance(task, dict) or not isinstance(task.get("task"), str):
            raise ValueError(f"{path} names no task; write `task: NAME` in it")
        names.append(task["task"])
        folders.append(path.parent)
    return names, folders


def run_tasks(pipe: Any, names: list[str], folders: list[Path], options: dict) -> dict:
    """The numbers of each task and group by name, with their standard errors."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=pipe.model, tokenizer=pipe.tokenizer, batch_size=options.pop("batch"))
    # Reading the harness's own tasks takes seconds.
    manager = TaskManager(include_path=folders, include_defaults=len(folders) < len(names))
    found = simple_evaluate(
        model, tasks=names, task_manager=manager, log_samples=False, bootstrap_iters=1000, **options
    )
    numbers: dict[str, dict[str, float]] = {}
    for name, scores in found["results"].items():
        known = {n: v for n, v in scores.items() if isinstance(v, int | float) and math.isfinite(v)}
        # The harness marks scores without a filter.
        numbers[name] = {n.removesuffix(",none"): float(value) for n, value in known.items()}
    return numbers


def track(run: Path, scores: dict[str, float]) -> None:
    """Sends scores to the tracker of a run, at the last step of its metrics."""
    config = yaml.safe_load(read_text(run / "config.yaml"))
    if config["tracker"] == "none":
        return
    from accelerate import Accelerator

    tracking.check_tracker(config["tracker"], config["offline"])
    accelerator = Accelerator(log_with=config["tracker"], project_dir=str(run))
    tracking.start_tracker(accelerator, config)
    step = int(max(chain(*curves.read_metrics(run))))
    accelerator.log({**scores, "step": step}, step=None if config["tracker"] == "wandb" else step)
    tracking.end_tracker(accelerator)


def evaluate(arguments: argparse.Namespace) -> None:
    """Evaluates, prints and keeps the numbers; raises ValueError."""
    if not importlib.util.find_spec("lm_eval"):
        raise ValueError("lm-evaluation-harness is not installed; run make setup EXTRAS=eval")
    folder, task = find_model(arguments.model)
    if task != "text-generation":
        raise ValueError(f"{folder} holds no language model, which the harness evaluates")
    names, folders = find_tasks(arguments.tasks)
    options = {"batch": arguments.batch, "limit": arguments.limit}
    options |= {"apply_chat_template": arguments.chat}
    try:
        found = run_tasks(load_pipeline(folder, task), names, folders, options)
    except Exception as error:  # the harness has no errors of its own
        raise ValueError(f"cannot evaluate {folder}: {type(error).__name__}: {error}") from None
    file = folder / "metrics.json"
    tracking.write_json_object(file, {**read_json_object(file), **found})
    scores = {
        f"{task}/{name}": value for task, each in found.items() for name, value in each.items()
    }
    model_card.set_section(folder, "lm-evaluation-harness", model_card.score_table(scores))
    print("  ".join(f"{name} {value:.5g}" for name, value in scores.items()))
    if (folder.parent / "config.yaml").is_file():
        track(folder.parent, scores)


def main() -> None:
    """Runs the program; bad input is one line and exit code 2."""
    protect_output()
    parser = make_parser("evaluate", __doc__)
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="folder; default: the newest runs/*/model")
    add("--tasks", nargs="+", required=True, help="files of tasks, or names that the harness knows")
    add("--batch", type=int, default=8, help="inputs at once (default: 8)")
    add("--limit", type=int, help="rows of each task; default: all")
    add("--chat", action="store_true", help="each prompt is a message, in the chat template")
    arguments = parser.parse_args()
    try:
        evaluate(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
