"""The library under train.py and task.py: the same result on any hardware, after any kill.

Below are the names for you, in the order in which one meets them. Each is imported when it is asked
for, since nobody needs all of them: `from samestep import Training` loads no task, no recipe.
"""

# ruff: isort: skip_file

import ast
import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "2.0.0.dev0"

if TYPE_CHECKING:  # the table of contents: `contents` reads it
    # A script of your own
    from samestep.training.training import Training as Training
    from samestep.base.errors import UserError as UserError
    from samestep.base.errors import Failed as Failed

    # The fields of a recipe and of a task
    from samestep.settings.run_config import RunConfig as RunConfig
    from samestep.base.fields import MODEL as MODEL
    from samestep.base.fields import NOTHING as NOTHING
    from samestep.base.fields import ROUNDING as ROUNDING
    from samestep.settings.config import BatchSize as BatchSize
    from samestep.base.fields import ClosedUnitInterval as ClosedUnitInterval
    from samestep.settings.config import DecayRate as DecayRate
    from samestep.settings.config import Interval as Interval
    from samestep.base.fields import NonNegativeFloat as NonNegativeFloat
    from samestep.base.fields import NonNegativeInt as NonNegativeInt
    from samestep.base.fields import PositiveInt as PositiveInt
    from samestep.settings.config import Warmup as Warmup

    # train.py, from its start to its end
    from samestep.launch import shutdown as shutdown
    from samestep.run.startup import prepare_run as prepare_run
    from samestep.run.startup import RunStart as RunStart
    from samestep.processes.ranks import Ranks as Ranks
    from samestep.run.run import Run as Run
    from samestep.launch import device as device
    from samestep.contract.dtypes import split_by_decay as split_by_decay
    from samestep.end.ending import write_evaluation as write_evaluation
    from samestep.end.ending import finish as finish

    # The data of a task
    from samestep.data.plain import load_splits as load_splits
    from samestep.data.plain import map_rows as map_rows
    from samestep.data.sources import DataConfig as DataConfig
    from samestep.data.sources import StreamConfig as StreamConfig
    from samestep.data import labels as labels
    from samestep.images import image_data as image_data
    from samestep.images import image_rows as image_rows
    from samestep.text import formats as formats
    from samestep.text import labelled as labelled
    from samestep.text import pairs as pairs
    from samestep.text import preferences as preferences
    from samestep.text import sequences as sequences
    from samestep.text import tokenizing as tokenizing

    # The model of a task
    from samestep.models.pretrained import ModelConfig as ModelConfig
    from samestep.models.lora import LoraFields as LoraFields
    from samestep.models.lora import add_adapters as add_adapters
    from samestep.models.lora import save_model as save_model
    from samestep.models import pretrained as pretrained
    from samestep.models import next_token as next_token
    from samestep.models import classification as classification

    # Checkpoints, and weights that are sharded
    from samestep.state.tensor_files import TensorReader as TensorReader
    from samestep.processes.sharding import send_weights as send_weights
    from samestep.processes.sharding import full_tensor as full_tensor
    from samestep.processes.sharding import local as local


@functools.cache
def contents() -> dict[str, str]:
    """The module of each name of the table of contents."""
    found = {}
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("samestep"):
            found[node.names[0].name] = str(node.module)
    return found


def __getattr__(name: str) -> Any:
    """A name of the contents, which is imported now."""
    if name not in contents():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(contents()[name])
    if hasattr(module, name):
        return getattr(module, name)
    return importlib.import_module(f"{module.__name__}.{name}")
