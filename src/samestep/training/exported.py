"""The check of an export: a process of its own that knows nothing of the project asks the exported
model what the trained one was asked in the run.

The task says what to ask: its function `questions`. Without it, nothing is checked.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from samestep.base.begin import LAUNCHED
from samestep.base.console import one_line
from samestep.models.attention import restored
from samestep.processes.ranks import catch
from samestep.report.model_card import pipeline_task
from samestep.training import from_outside
from samestep.training.run import Run

ASKED = 4  # rows of the validation data that the task makes questions of
# Left out of its environment: what makes a process one of several, and its share of the cores.
OF_LAUNCHERS = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "TORCHELASTIC_", "OMP_NUM_", *LAUNCHED)


def ask_trained(run: Run, model: torch.nn.Module) -> dict:
    """What the trained model answers, for `check`; {} where there is nothing to ask.

    To be called before the export, which may change the model: LoRA's adapters are merged then.
    """
    if not run.cfg.check_export or not hasattr(run.task, "questions"):
        return {}
    asked, problem = catch(answers_of, run, model)
    if problem or not asked["asked"]:
        return {"problem": one_line(problem or "task.questions gives nothing to ask")}
    return asked


def answers_of(run: Run, model: Any) -> dict:
    rows = [run.start.data[1][i] for i in range(min(ASKED, len(run.start.data[1])))]
    asked: list[dict[str, Any]] = []
    model.eval()
    with restored(model):
        for given, tensors in run.task.questions(rows, run.cfg.task, run.start.prepared):
            inputs = {name: torch.as_tensor(np.asarray(v)) for name, v in tensors.items()}
            each: dict[str, Any] = {"given": given}
            if "input_ids" in inputs:
                inputs = {name: values.long() for name, values in inputs.items()}
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
                each["prompt"] = inputs["input_ids"][0].tolist()
            inputs = {name: values.to(model.device) for name, values in inputs.items()}
            asked.append({**each, **from_outside.ask(model, inputs)})
    size = sum(p.nbytes for p in model.parameters())
    return {"asked": asked, "dtype": str(model.dtype).removeprefix("torch."), "bytes": size}


def check(run: Run, folder: Path, asked: dict) -> tuple[str, bool]:
    """A line with what was checked, or with what is wrong, and whether the answers are the same."""
    found = asked if "problem" in asked else compare(run, folder, asked)
    if problem := found.get("problem"):
        return f"the exported model could not be confirmed: {one_line(problem)}", False
    import transformers

    chats = isinstance(asked["asked"][0]["given"], list)
    kind = "chats, by its chat template" if chats else "inputs"
    return (
        f"transformers {transformers.__version__} loads it in {found['dtype']}, without the "
        f"project, and gives the same answers to {len(asked['asked'])} {kind} (largest difference "
        f"{found['difference']:.1g})"
    ), True


def compare(run: Run, folder: Path, asked: dict) -> dict:
    """What the program from_outside.py finds. It has a process and all cores to itself."""
    free = psutil.virtual_memory().available
    if asked["bytes"] > 0.8 * free:
        return {"problem": f"it has {asked['bytes']:,} bytes, and {free:,} of memory are free"}
    adapter = (folder / "adapter_config.json").exists()
    env = {n: v for n, v in os.environ.items() if not n.startswith(OF_LAUNCHERS)}
    env |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as temporary:
        for i, each in enumerate(asked["asked"]):
            if hasattr(each["given"], "save"):  # a picture of Pillow
                path = Path(temporary, f"{i}.png")
                each["given"].save(path)
                each["given"] = str(path)
        facts = {
            "folder": str(folder),
            "task": pipeline_task(folder),
            "trust_remote_code": getattr(run.cfg.task, "trust_remote_code", False),
            "dtype": None if adapter else asked["dtype"],
            "rounding": "float16" if run.cfg.tf32 else asked["dtype"],
            "asked": asked["asked"],
        }
        program = [sys.executable, "-c", Path(from_outside.__file__).read_text(encoding="utf-8")]
        options = {"capture_output": True, "text": True, "timeout": run.cfg.timeout}
        try:
            ended = subprocess.run(program, input=json.dumps(facts), env=env, **options)
        except subprocess.TimeoutExpired:
            return {"problem": f"the check took more than {run.cfg.timeout} s"}
    if ended.stdout:
        return json.loads(ended.stdout.splitlines()[-1])
    return {"problem": f"the check ended with {ended.returncode}: {ended.stderr.strip()[-300:]}"}
