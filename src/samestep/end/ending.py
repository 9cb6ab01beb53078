"""The end of a run: the exported model and its check, the status, and what the task reports.

The check loads the exported model by transformers, and compares it with the trained one: see
export_check.py. The task may give what to compare them with: its function `test_inputs`.
"""

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.base.console import one_line, print_on_main
from samestep.base.errors import attempt, catch
from samestep.base.files import replace_text
from samestep.contract import dtypes
from samestep.end import export_check
from samestep.report import model_card, tracking
from samestep.run.run import Run
from samestep.state import checkpoints
from samestep.step.model import gather_model
from samestep.training.training import Training

_TESTED = 4  # rows of the validation data that the task makes test inputs of


def _export(run: Run, model: torch.nn.Module, step: int, scores: dict) -> torch.nn.Module | None:
    """Save the model of this step with its card.

    Returns the model with all its weights, on the main process. All processes must call it.
    """
    full_model = gather_model(run.accelerator, run.ranks, model, run.new_model)
    with run.ranks.fail_together():
        if run.accelerator.is_main_process:
            assert full_model is not None
            run.start.lock.check_folder()
            folder = run.output / "model"
            if run.cfg.check_export and hasattr(run.task, "test_inputs"):
                # The export may change the model: LoRA's adapters are merged then.
                run.tested = catch(ask_trained, run, full_model)
            about = {"step": step, "steps": run.max_steps, "scores": scores}
            about |= {**run.manifest, "devices": run.hardware}
            with checkpoints.replaced_folder(folder) as fresh:
                trained = dtypes.trained_weights(full_model).values()
                in_float32 = any(weight.dtype == torch.float32 for weight in trained)
                run.task.export(full_model.eval(), fresh)
                if in_float32:
                    dtypes.name_dtype(fresh)
                model_card.write_card(fresh, folder, about)
    return full_model


def write_evaluation(training: Training, scores: dict) -> int:
    """End `eval_only`: write a checkpoint's scores and the task's report; return the exit code."""
    run: Run = training.run
    print_on_main("  ".join(f"{name} {number:.5g}" for name, number in scores.items()))
    full_model = gather_model(run.accelerator, run.ranks, training.exported, run.new_model)
    folder = run.output / "evaluation"
    with run.ranks.fail_together():
        if run.accelerator.is_main_process:
            line = {"step": training.step, "checkpoint": str(run.point.checkpoint), **scores}
            folder.mkdir(exist_ok=True)
            replace_text(folder / "metrics.json", json.dumps(tracking.nan_to_null(line)) + "\n")
    if run.leave():
        attempt("no report", report, training, full_model, folder)
    return 0


def finish(training: Training, evaluate: Callable[[Training], dict]) -> int:
    """Export the last model or the best, write how the run ended, and show what the task reports of
    the model; return the exit code. `evaluate(training)` gives the scores of the model."""
    run: Run = training.run
    training.complete()
    exported = training.load_best() if run.cfg.export == "best" else training.step
    scores = training.scores
    if exported != training.step or run.sums is None:  # it has not just been evaluated
        scores = evaluate(training)
    assert scores is not None
    run.advise(training)
    training.close()
    full_model = _export(run, training.exported, exported, scores)
    if any(run.ranks.nodes):  # the main process is soon alone
        run.mirror.upload()
    if not run.leave():
        return 0
    assert full_model is not None
    training.write_status("finished", exit_code=0, exported=exported)
    shown = attempt("no report", report, training, full_model, run.output)
    texts = {name: value for name, value in (shown or {}).items() if isinstance(value, str)}
    lines = tracking.Tracker(training.accelerator)
    attempt("the tracker has no report", lines.track, {**texts, "step": exported}, exported)
    if run.cfg.check_export:
        result = attempt("the export was not checked", check_export, run, full_model)
        training.write_status("finished", exit_code=0, exported=exported, export_check=result)
    from samestep.report import curves  # matplotlib, which other processes and checks need not

    picture, problem = catch(curves.draw, [run.output], run.output / "curves.png")
    picture = picture or f"no picture: {one_line(problem)}"
    print_on_main(f"model: {run.output / 'model'}  curves: {picture}")
    run.end_tracking()
    if run.mirror.url and not run.mirror.upload(alone=True):  # the same command uploads it
        run.mirror.check()
        training.write_status("finished", exit_code=1, exported=exported)
        return 1
    return 0


def report(training: Training, full_model: torch.nn.Module, output: Path) -> dict:
    """Print what the task shows of the newest evaluation, texts and pictures; return it."""
    run: Run = training.run
    if not hasattr(run.task, "report"):
        return {}
    output.mkdir(exist_ok=True)
    device = run.accelerator.device
    if run.ranks.layout.sharded and device.type == "cuda":  # gathered on the CPU
        training.optimizer.state.clear()  # training is over
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        size = sum(tensor.nbytes for tensor in [*full_model.parameters(), *full_model.buffers()])
        if size + total // 10 < free:  # the tenth is for what the report computes
            full_model.to(device)
    shown = run.task.report(full_model.eval(), run.sums, output) or {}
    shown = {name: value for name, value in shown.items() if value is not None}  # it failed
    for name, value in shown.items():
        print_on_main(f"{name}: {value}")
    return shown


# ---- The check of the export ---------------------------------------------------------------------


def ask_trained(run: Run, model: Any) -> list[dict]:
    """Ask the trained model the task's test inputs; raise ValueError if there are none.

    In the vocabulary of export_check.compare_outputs.
    """
    rows = [run.validation[i] for i in range(min(_TESTED, len(run.validation)))]
    expected: list[dict[str, Any]] = []
    model.eval()
    for given, tensors in run.task.test_inputs(rows):
        inputs = {name: torch.as_tensor(np.asarray(v)) for name, v in tensors.items()}
        if "input_ids" in inputs:
            inputs = {name: values.long() for name, values in inputs.items()}
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        there = {name: values.to(model.device) for name, values in inputs.items()}
        outputs = export_check.ask(model, there)
        expected.append({"given": given, "inputs": inputs, **outputs})
    if not expected:
        raise ValueError("task.test_inputs gives no input")
    return expected


def check_export(run: Run, model: torch.nn.Module) -> str:
    """Compare the exported model with the trained one; write the result to the card; return it."""
    folder = run.output / "model"
    line, problem = catch(_verify_export, run, model, folder)
    result = "passed"
    if problem:
        result = line = f"the exported model could not be confirmed: {one_line(problem)}"
        print_on_main(f"warning: {line}")
    elif line:
        line = f"transformers {metadata.version('transformers')} {line}"
        print_on_main(f"checked: {line}")
    else:
        result = line = (
            "export not checked: task.py has no function test_inputs, and model/ is of no class of "
            "transformers"
        )
        print_on_main(line)
    card = folder / "README.md"
    section = f"\n## Check\n\n{model_card.escape_markdown(line, 400)}\n"
    replace_text(card, card.read_text(encoding="utf-8") + section)
    return result


def _verify_export(run: Run, model: torch.nn.Module, folder: Path) -> str:
    """Say what is the same in the exported model; empty: nothing to compare. Raise what is not."""
    expected, problem = run.tested
    if problem:
        raise problem
    if not expected:
        return export_check.compare_tensors(str(folder), model)
    rounding = "float16" if run.cfg.tf32 else expected[0]["dtype"]
    if (folder / "adapter_config.json").exists():  # the base model has a dtype of its own
        for outputs in expected:
            del outputs["dtype"]
    trusted = {"trust_remote_code": getattr(run.cfg.task, "trust_remote_code", False)}
    result = export_check.compare_outputs(str(folder), expected, rounding, **trusted)
    line = (
        f"loads it in {result['dtype']}, and gives the same logits for {len(expected)} inputs "
        f"(largest difference {result['difference']:.1g} of the largest one)"
    )
    return line + (f"; it stops after {one_line(result['stop'], 40)}" if result["stop"] else "")
