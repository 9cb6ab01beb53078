"""The data of a run: prepared, bound to the functions of task.py, and its views tried twice."""

import copy
import sys
from pathlib import Path
from typing import Any, NamedTuple

from samestep.contract import contract
from samestep.step import seeds
from samestep.step.inputs import Stream
from samestep.step.samples import check_repeated, choose_probes, hash_batch, read_samples

IDENTITY = "identity"  # folder of a run with what its data wrote, such as a tokenizer


class Samples(NamedTuple):
    """Of the views to train and to evaluate on."""

    fingerprints: list[str]  # of a batch of 64 samples
    probes: list[list[tuple]]  # samples to try the task on


def read_data(
    cfg: Any, task: Any, run: Path | None = None, stored: str = ""
) -> tuple[Any, Any, tuple, Samples]:
    """The prepared data, the functions of task.py with it, its views, and samples of these.

    `run`: the folder of the run that resumes. It keeps its identity, such as its tokenizer: grown
    data would give another one, which the weights do not know. `stored`: the name of prepared data
    that is taken, if it is there, although files may have changed since.

    The way from task.views to a batch is built twice; ValueError unless 64 samples are the same.
    Rows that draw are read once more, since they may keep what they drew.
    """
    contract.check_functions(task)
    if hasattr(task, "check_config"):
        task.check_config(cfg.task)
    data = None
    if hasattr(task, "prepare_data"):
        from samestep.prepared import prepared

        data = prepared.prepare(task, cfg.task, run / IDENTITY if run else None, stored)
    if hasattr(task, "check_config"):  # with the fields that prepare_data has set
        task.check_config(cfg.task)
    built = []
    # The first call may change the splits that it gets.
    for number, given in enumerate((copy.copy(data), data)):
        views: Any = None  # its rows are not kept
        bound = contract.bind(task, cfg.task, given)
        seeds.seed_everything(0)  # an unseeded split is the same in every process and run
        views = contract.read_views(bound, given)
        if isinstance(views[0], Stream):
            views[0].begin(cfg.seed, cfg.global_batch_size)
        seeds.seed_everything(1 + number)
        train, drew = read_samples(views[0], bound, 1 + number, training=True)
        validation, _ = read_samples(views[1], bound, 1 + number)
        fingerprints = [hash_batch(views[0], bound, train)]
        fingerprints += [hash_batch(views[1], bound, validation)]
        built.append(fingerprints)
    draws = [drew, read_samples(views[0], bound, 2, training=True)[1] if drew else drew]
    check_repeated(built, draws)
    probes = [choose_probes(each, bound) for each in (train, validation)]
    return data, bound, views, Samples(fingerprints, probes)


def run_of(cfg: Any) -> Path | None:
    """The folder of the run whose checkpoints this one resumes from; None: it begins."""
    output = Path(cfg.output_dir)
    is_own = any((output / "checkpoints").glob("step-*"))
    if cfg.resume not in ("auto", "never") and (cfg.eval_only or not is_own):
        given = Path(cfg.resume)
        runs = [each.parent.parent for each in (given.absolute(), given.resolve())]
        return next((each for each in runs if (each / IDENTITY).is_dir()), None)
    return output if is_own and cfg.resume != "never" else None


def digest_view(view: Any) -> str:
    """A digest of all rows of a view, by their values and order; empty: it is not known."""
    if callable(getattr(view, "digest", None)):
        return view.digest()
    library = sys.modules.get("datasets")  # None: then no row is one of it
    if not library or not isinstance(view, library.Dataset):
        return ""
    from samestep.data import views

    shown = view.format  # a transform makes other rows, and may be any function
    if shown["type"] == "custom":
        return ""
    names = view.column_names if shown["output_all_columns"] else shown["columns"]
    return views.digest(view, names or ())
