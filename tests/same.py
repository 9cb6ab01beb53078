"""Whether runs are the same: to the bit, by `samestep diff` and all files, or to rounding."""

import json
from argparse import Namespace

import pytest
import torch

from conftest import digest, lines, manifest, newest, read_checkpoint, status
from samestep.ask import diff

TIMES = "data_wait compute peer_wait slowest peak_memory_gb mfu".split()
# Keys of lines that follow from times, or from when a run was started, stopped and saved.
NO_NUMBERS = {"shares", "started", "changes", "save_seconds", "commit_seconds", "mirror_seconds"}


def timeless(output):
    """The lines of metrics.jsonl about steps, without times."""
    for line in lines(output, "step"):
        if not NO_NUMBERS & line.keys():
            yield {
                k: v for k, v in line.items() if k not in TIMES and not k.endswith("_per_second")
            }


def curve(output):
    """{step: {name: number}}, of each step the last."""
    found = {}
    for line in timeless(output):
        found.setdefault(line["step"], {}).update(line)
    return found


def check_same_curve(one, other, rel=1e-6, norm=None):
    """Samples and rates of each step are equal, losses to `rel`, and gradients to `norm`."""
    first, second = curve(one), curve(other)
    assert first.keys() == second.keys() != set(), (first.keys(), second.keys())
    limits = {"loss": rel, "eval_loss": rel, "grad_norm": norm or 10 * rel}
    for step, line in first.items():
        for key in ("samples", "epoch", "lr", "batch_hash", "rows"):
            assert line.get(key) == second[step].get(key), (step, key)
        for key, limit in limits.items():
            found, expected = line.get(key), second[step].get(key)
            if None in (found, expected):  # no such line, or the step was skipped
                assert found == expected, (step, key)
            else:
                atol = 1e-12 if limit else 0  # 0: to the bit
                assert found == pytest.approx(expected, rel=limit, abs=atol), (step, key)


def check_close(one, other, rel=0.0, atol=0.0):
    """The tensors of two checkpoints agree, relative to the largest number of each, or within."""
    mine, theirs = read_checkpoint(one), read_checkpoint(other)
    assert mine.keys() == theirs.keys()
    for name, values in mine.items():
        limit = atol or rel * values.abs().max().item()
        torch.testing.assert_close(values, theirs[name], rtol=0, atol=limit, msg=name)


def digests(output):
    """The last step, the SHA-256 of its weights and moments, and its state in the manifest."""
    last = newest(output)
    return [last.name, digest(last), manifest(last)["state"]]


def exported_files(output):
    """The files of the exported weights."""
    files = [*output.glob("model/*.safetensors"), *output.glob("model/weights.pt")]
    return {file.name: file.read_bytes() for file in files}


def check_same(whole, *others, exports=True):
    """Each of the others ends with the bytes of a whole run, and no line has other numbers: from
    where it began, and also in the steps that it took twice. `exports`: of the same step."""
    for run in others:
        assert digests(run) == digests(whole), (run, whole)
        assert diff.diff(Namespace(runs=[run, whole], answer={})) == 0, (run, whole)
        finished = {status(each)["state"] for each in (run, whole)} == {"finished"}
        if finished and exports:
            assert exported_files(run) == exported_files(whole), f"other weights in {run}/model"
        found, wanted = (
            {json.dumps(line): line for line in timeless(each)} for each in (run, whole)
        )
        assert found.keys() <= wanted.keys(), (run, found.keys() - wanted.keys())
        first = min(line["step"] for line in lines(run, "loss"))
        for text in wanted.keys() - found.keys():  # a run that was stopped has evaluated less
            line = wanted[text]
            assert line["step"] < first or "loss" not in line and not finished, (run, text)
