"""Data sets of the Hugging Face Hub, pinned to a commit."""

import os
import re
from typing import Any

from samestep.base.console import one_line
from samestep.base.fields import is_local_name

# datasets takes 1 s to import: the functions that need it import it.

# What is downloaded stays there, since offline it is all there is: a preparation has a cache of its
# own, which is removed.
_CACHE = os.environ.get("HF_DATASETS_CACHE")
COMMIT = re.compile("[0-9a-f]{40}")


def is_hub_name(data: str) -> bool:
    """Whether this names a data set on the Hub: OWNER/NAME or NAME, and no local file or folder.

    A name that ends like a file (rows.csv) counts as a missing file.
    """
    if os.path.lexists(os.path.expanduser(data)) or re.search(r"\.[A-Za-z]{2,7}$", data):
        return False
    return bool(re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", data)) and not is_local_name(data)


def load_split(name: str, config: str, split: str, revision: str, field: str) -> Any:
    """A split of a data set on the Hub, downloaded once: a `datasets.Dataset`.

    Raises ValueError unless `revision` is a commit; the message gives the newest one.
    """
    import datasets

    if not COMMIT.fullmatch(revision):
        raise _unknown_commit(name, revision or "main")
    datasets.disable_progress_bars()
    cache_dir = _CACHE or os.path.join(datasets.config.HF_CACHE_HOME, "datasets")
    how = {"split": split, "revision": revision, "cache_dir": cache_dir}
    try:
        found = datasets.load_dataset(name, config or None, **how)
        if not any(revision in each["filename"] for each in found.cache_files):
            raise ValueError("the Hub cannot be reached, and this disk has another commit of it")
    except Exception as error:  # each library underneath has its own
        if isinstance(error, datasets.exceptions.DatasetGenerationError):  # says nothing itself
            error = error.__cause__ or error
        where = f"{name}, config {config or 'default'}, split {split}"
        text = f"cannot load {where} from the Hub: {one_line(error)}"
        raise ValueError(f"task.{field}: {text}") from None
    return found


def _unknown_commit(name: str, revision: str) -> ValueError:
    """An error that gives the newest commit of a branch."""
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(name, revision=revision).sha
    except Exception as error:
        text = "is neither here nor on the Hub, or the Hub cannot be reached"
        return ValueError(f"task.data: {name} {text}: {one_line(error)}")
    text = f"write --task.data_revision {commit}, which is {revision} of {name} now"
    return ValueError(f"task.data_revision: data sets on the Hub change; {text}")
