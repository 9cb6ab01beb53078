"""The end of a run: the exported model and its check, the status, and what the task reports.

The check is a process of its own that knows nothing of the project: it asks the exported model what
the trained one was asked in the run. The task says what to ask: its function `test_inputs`.
"""

import json
import os
import pickle
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.base import run_folder
from samestep.base.console import one_line, print_on_main
from samestep.base.errors import attempt, catch
from samestep.base.files import replace_text
from samestep.base.workers import count_cores
from samestep.checkpoint import checkpoints, weights
from samestep.models import dtypes
from samestep.models.attention import restored
from samestep.processes.ranks import as_user_error
from samestep.processes.shutdown import STOPPED
from samestep.report import model_card, tracking
from samestep.training import from_outside
from samestep.training.log import RunLog
from samestep.training.run import Run
from samestep.training.saving import Saver

ASKED = 4  # rows of the validation data that the task makes test inputs of
# Left out of the check's environment: what makes a process one of several, and its share of cores.
OF_LAUNCHERS = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "TORCHELASTIC_", "OMP_NUM_")
OF_LAUNCHERS += ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_")


def export(run: Run, model: torch.nn.Module, step: int, scores: dict) -> torch.nn.Module | None:
    """Saves the model of this step with its card, of `eval_only` its scores alone.

    Returns the model with all its weights, on the main process. All processes must call it.
    """
    full_model = weights.gather_model(run.accelerator, run.ranks, model, run.new_model)
    if run.cfg.eval_only:
        print_on_main("  ".join(f"{name} {number:.5g}" for name, number in scores.items()))
    with run.ranks.fail_together(), as_user_error():
        if run.accelerator.is_main_process and run.cfg.eval_only:
            line = {"step": step, "checkpoint": str(run.resume_point.checkpoint), **scores}
            folder = run.output / "evaluation"
            folder.mkdir(exist_ok=True)
            replace_text(folder / "metrics.json", json.dumps(tracking.nan_to_null(line)) + "\n")
        elif run.accelerator.is_main_process:
            run.start.lock.check_folder()
            folder = run.output / "model"
            if run.cfg.check_export and hasattr(run.task, "test_inputs"):
                # The export may change the model: LoRA's adapters are merged then.
                asked, problem = catch(ask_trained, run, full_model)
                run.asked = asked or problem
            about = {"step": step, "steps": run.last_step, "scores": scores}
            about |= {"hardware": run.hardware, **run.start.manifest}
            with checkpoints.replaced_folder(folder) as fresh:
                trained = dtypes.trained_weights(full_model).values()
                in_float32 = any(each.dtype == torch.float32 for each in trained)
                run.task.export(full_model.eval(), fresh)
                if in_float32:
                    dtypes.name_dtype(fresh)
                model_card.write_card(fresh, folder, about)
    return full_model


def finish(
    run: Run,
    log: RunLog,
    saver: Saver,
    full_model: torch.nn.Module | None,
    sums: dict | None,
    step: int,
) -> int:
    """Writes how the run ended, and shows what the task reports of the model; the exit code.

    `sums`: of the evaluation of the exported model, that of this step; None: the run was stopped.
    A report may take longer than the timeout: the others leave, and nothing waits for them.
    """
    run.accelerator.state.destroy_process_group()
    code, state = (0, "finished") if sums else (STOPPED, "stopped")
    if not run.accelerator.is_main_process:
        return code
    if run.cfg.eval_only:
        attempt("no report", report, run, saver, full_model, sums, run.output / "evaluation")
        return code
    run_folder.write_status(run.output, state, exit_code=code, **run.resume_point.facts)
    if sums:
        shown = attempt("no report", report, run, saver, full_model, sums, run.output)
        attempt("the tracker has no report", log.lines.show, shown or {}, step)
        if run.asked:
            attempt("the export was not checked", check_export, run, run.output / "model")
        from samestep.report import curves  # matplotlib, which other processes and checks need not

        picture, problem = catch(curves.draw, [run.output], run.output / "curves.png")
        picture = picture or f"no picture: {one_line(problem)}"
        print_on_main(f"model: {run.output / 'model'}  curves: {picture}")
    else:
        print_on_main(f"stopped after step {step}; the same command continues the run")
    attempt("the tracker was not closed", tracking.end_tracker, run.accelerator)
    return code


def report(run: Run, saver: Saver, full_model: torch.nn.Module, sums: dict, output: Path) -> dict:
    """Prints what the task shows of an evaluation, texts and pictures; returns it."""
    if not hasattr(run.task, "report"):
        return {}
    output.mkdir(exist_ok=True)
    device = run.accelerator.device
    if run.ranks.layout.sharded:  # gathered on the CPU; the other processes have left their cores
        torch.set_num_threads(count_cores())
        if device.type == "cuda":
            saver.state.optimizer.state.clear()  # training is over
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(device)
            size = sum(each.nbytes for each in [*full_model.parameters(), *full_model.buffers()])
            if size + total // 10 < free:  # the tenth is for what the report computes
                full_model.to(device)
    shown = run.task.report(full_model.eval(), sums, output) or {}
    shown = {name: value for name, value in shown.items() if value is not None}  # it failed
    for name, value in shown.items():
        print_on_main(f"{name}: {value}")
    return shown


# ---- The check of the export ---------------------------------------------------------------------


def ask_trained(run: Run, model: Any) -> list[dict]:
    """What the trained model answers; raises ValueError where there is nothing to ask."""
    rows = [run.start.views[1][i] for i in range(min(ASKED, len(run.start.views[1])))]
    asked: list[dict[str, Any]] = []
    with restored(model.eval()):
        for given, tensors in run.task.test_inputs(rows):
            inputs = {name: torch.as_tensor(np.asarray(v)) for name, v in tensors.items()}
            if "input_ids" in inputs:
                inputs = {name: values.long() for name, values in inputs.items()}
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            inputs = {name: values.to(model.device) for name, values in inputs.items()}
            asked.append({"given": given, **from_outside.ask(model, inputs)})
    if not asked:
        raise ValueError("task.test_inputs gives nothing to ask")
    return asked


def check_export(run: Run, folder: Path) -> None:
    """Asks the exported model what the trained one was asked; the card and the status say so."""
    found, problem = catch(ask_exported, run, folder)
    if problem:
        line = f"the exported model could not be confirmed: {one_line(problem)}"
        result = line
        print_on_main(f"warning: {line}")
    else:
        line = (
            f"transformers {metadata.version('transformers')} loads it in {found['dtype']}, without"
            f" the project, and gives the same logits for {len(run.asked)} inputs (largest "
            f"difference {found['difference']:.1g} of the largest one)"
        )
        if found["stop"]:
            line += f"; it stops after {one_line(found['stop'], 40)}"
        result = "passed"
        print_on_main(f"checked: {line}")
    card = folder / "README.md"
    section = f"\n## Check\n\n{model_card.escape_markdown(line, 400)}\n"
    replace_text(card, card.read_text(encoding="utf-8") + section)
    facts = {**run.resume_point.facts, "exit_code": 0, "export_check": result}
    run_folder.write_status(run.output, "finished", **facts)


def ask_exported(run: Run, folder: Path) -> dict:
    """What the program from_outside.py finds, in a process of its own; raises what is wrong."""
    if isinstance(run.asked, Exception):
        raise run.asked
    rounding = "float16" if run.cfg.tf32 else run.asked[0]["dtype"]
    if (folder / "adapter_config.json").exists():  # the base model has a dtype of its own
        for each in run.asked:
            del each["dtype"]
    facts = {"folder": str(folder), "task": model_card.pipeline_task(folder), "rounding": rounding}
    facts["trust_remote_code"] = getattr(run.cfg.task, "trust_remote_code", False)
    env = {n: v for n, v in os.environ.items() if not n.startswith(OF_LAUNCHERS)}
    ended = subprocess.run(
        [sys.executable, from_outside.__file__],
        input=pickle.dumps({**facts, "asked": run.asked}),
        env=env | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        timeout=run.cfg.timeout,
    )
    if ended.returncode:
        raise ValueError(f"it ended with {ended.returncode}: {ended.stderr.decode()[-300:]}")
    found = json.loads(ended.stdout.splitlines()[-1])  # code from the Hub may print, too
    if isinstance(found, str):
        raise ValueError(found)
    return found
