"""The library under train.py and task.py: the same result on any hardware, after any kill.

These are the names for you, in the order in which one meets them; each is imported when it is asked
for. `from samestep import Training` works, and so does `samestep.core.training.Training`.
"""

import importlib
from typing import Any

__version__ = "2.0.0.dev0"

CONTENTS = {
    # In a script of your own
    "core.training": ["Training"],
    "base.errors": ["UserError", "Failed"],
    # The settings of train.py and of a task
    "project.run_config": ["RunConfig"],
    "project.config": ["BatchSize", "DecayRate", "Interval", "ONE_COMMAND", "parse_config"],
    "base.fields": [
        "ClosedUnitInterval", "MODEL", "NOTHING", "NonNegativeFloat", "NonNegativeInt",
        "PositiveInt", "ROUNDING",
    ],
    # train.py, from its start to its end
    "project": ["device", "shutdown"],
    "project.startup": ["RunStart", "prepare_run"],
    "core.ranks": ["Ranks"],
    "project.run": ["Run"],
    "project.dtypes": ["split_by_decay"],
    "core.exact": ["step_gradients"],
    "project.loading": ["EvalLoader", "TrainLoader"],
    "project.saving": ["Saver"],
    "project.probes": ["probe_task"],
    "project.log": ["RunLog"],
    "core.batches": ["seed_micro_batch"],
    "core.monitor": ["skip_unless_finite"],
    "core.sums": ["EvaluationSums"],
    "project.ending": ["export", "finish"],
    # The data of a task
    "data.sources": ["DataConfig", "StreamConfig"],
    "data": ["labels"],
    "data.plain": ["load_splits"],
    "images": ["image_data", "image_rows"],
    "text": ["formats", "labelled", "pairs", "preferences", "sequences", "tokenizing"],
    # The model of a task
    "models.pretrained": ["ModelConfig"],
    "models": ["attention", "classification", "next_token", "pretrained"],
    "models.attention": ["always_mask"],
    "models.lora": ["LoraFields", "add_adapters", "save_model"],
    # Checkpoints and sharded weights
    "core.tensor_files": ["TensorReader"],
    "core.sharding": ["full_tensor", "local"],
}  # fmt: skip
__all__ = [name for names in CONTENTS.values() for name in names]  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """A name of the contents, which is imported now."""
    for module, names in CONTENTS.items():
        if name in names:
            found = importlib.import_module(f"samestep.{module}")
            if not hasattr(found, name):  # a module of a package
                return importlib.import_module(f"samestep.{module}.{name}")
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
