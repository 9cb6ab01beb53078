"""The end of a run: the exported model, the status, and what the task reports."""

import os
from pathlib import Path

import torch

from samestep.base import run_folder
from samestep.base.console import one_line, say
from samestep.checkpoint import checkpoints, weights
from samestep.processes.ranks import as_user_error, attempt, catch
from samestep.processes.shutdown import STOPPED
from samestep.report import curves, model_card, tracking
from samestep.training import exported
from samestep.training.log import RunLog
from samestep.training.run import Run
from samestep.training.saving import Saver


def export(run: Run, model: torch.nn.Module, step: int, scores: dict) -> torch.nn.Module | None:
    """Saves the model of this step with its card, of `eval_only` its scores alone.

    Returns the model with all its weights, on the main process. All processes must call it.
    """
    whole = weights.gather_model(run.accelerator, run.ranks, model, run.new_model)
    if run.cfg.eval_only:
        say("  ".join(f"{name} {number:.5g}" for name, number in scores.items()))
    with run.ranks.fail_together(), as_user_error():
        if run.accelerator.is_main_process and run.cfg.eval_only:
            line = {"step": step, "checkpoint": str(run.point.checkpoint), **scores}
            tracking.write_json_object(run.output / "evaluation" / "metrics.json", line)
        elif run.accelerator.is_main_process:
            run.start.lock.check_folder()
            folder = run.output / "model"
            run.asked = exported.ask_trained(run, whole)
            about = {"step": step, "steps": run.last_step, "scores": scores}
            about |= {"hardware": run.hardware, **run.start.manifest}
            with checkpoints.replaced_folder(folder) as fresh:
                run.task.export(whole.eval(), fresh, run.cfg.task, run.start.prepared)
                model_card.write_card(fresh, folder, about)
    return whole


def finish(
    run: Run, log: RunLog, saver: Saver, whole: torch.nn.Module | None, sums: dict | None, step: int
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
        attempt("no report", report, run, saver, whole, sums, run.output / "evaluation")
        return code
    run_folder.write_status(run.output, state, exit_code=code, **run.point.facts)
    if sums:
        shown = attempt("no report", report, run, saver, whole, sums, run.output)
        attempt("the tracker has no report", log.lines.show, shown or {}, step)
        attempt("the export was not checked", check_export, run)
        picture, problem = catch(curves.draw, [run.output], run.output / "curves.png")
        picture = picture or f"no picture: {one_line(problem)}"
        say(f"model: {run.output / 'model'}  curves: {picture}")
    else:
        say(f"stopped after step {step}; the same command continues the run")
    attempt("the tracker was not closed", tracking.end_tracker, run.accelerator)
    return code


def check_export(run: Run) -> None:
    """Asks the exported model what the trained one was asked; the card and the status say so."""
    if not run.asked:
        return
    line, same = exported.check(run, run.output / "model", run.asked)
    say(f"checked: {line}" if same else f"warning: {line}")
    text = model_card.escape_markdown(line, 400)
    model_card.set_section(run.output / "model", "Check", text)
    facts = {"exit_code": 0, "export_check": "passed" if same else line}
    run_folder.write_status(run.output, "finished", **run.point.facts, **facts)


def report(run: Run, saver: Saver, whole: torch.nn.Module, sums: dict, output: Path) -> dict:
    """Prints what the task shows of an evaluation, texts and pictures; returns it."""
    if not hasattr(run.task, "report"):
        return {}
    output.mkdir(exist_ok=True)
    device = run.accelerator.device
    if run.ranks.layout.sharded:  # gathered on the CPU; the other processes have left their cores
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        if device.type == "cuda":
            saver.state.optimizer.state.clear()  # training is over
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(device)
            size = sum(each.nbytes for each in [*whole.parameters(), *whole.buffers()])
            if size + total // 10 < free:  # the tenth is for what the report computes
                whole.to(device)
    shown = run.task.report(whole.eval(), sums, output, run.cfg.task, run.start.prepared) or {}
    for name, value in shown.items():
        say(f"{name}: {value}")
    return dict(shown)
