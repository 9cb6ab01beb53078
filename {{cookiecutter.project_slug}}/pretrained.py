"""Models of transformers: weights to start from, what they need, and what is saved in the end."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sources import one_line
from tracking import say

# transformers takes 4 s to import: it waits for the function that needs it.


@dataclass
class ModelConfig:
    """Fields that all tasks have for a model of transformers."""

    model_name_or_path: str = ""
    """Weights to start from: a model on the Hub, or a folder such as runs/default/model; empty: new
    weights, and a model of the sizes below."""
    revision: str = "main"
    """Of a model on the Hub: its branch, tag or commit."""
    trust_remote_code: bool = False
    """Of a model on the Hub: run the code that its owner has put there."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """How attention is computed; flash_attention_2 needs its package, a GPU, and bf16 or fp16."""


def used_files(cfg: ModelConfig) -> list[Path]:
    """The files that shape a tokenizer or an image processor, of a model in a folder here."""
    folder = Path(cfg.model_name_or_path).expanduser()
    if not cfg.model_name_or_path or not folder.is_dir():
        return []
    endings = (".json", ".jinja", ".txt", ".model")
    return [file for file in sorted(folder.iterdir()) if file.suffix in endings]


def load(auto: Any, cfg: ModelConfig, **options) -> Any:
    """`auto.from_pretrained` of the model that the fields name; a ValueError of one line."""
    name = cfg.model_name_or_path
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").exists():
        kind = "no model, since it has no config.json"
        if (folder / "adapter_config.json").exists():
            kind = "a LoRA adapter alone; merge it into its model, or train with --task.merge_lora"
        raise ValueError(f"task.model_name_or_path: {name} holds {kind}")
    where = str(folder) if folder.is_dir() else name
    options |= {"trust_remote_code": cfg.trust_remote_code}
    options |= {} if folder.is_dir() else {"revision": cfg.revision}
    try:
        with quiet():
            return auto.from_pretrained(where, **options)
    except Exception as error:  # each of many libraries below has its own
        raise ValueError(
            f"task.model_name_or_path: cannot load {name}: {one_line(error)}"
        ) from None


def load_model(auto: Any, cfg: ModelConfig, head: tuple[str, ...] = (), **options) -> Any:
    """A model in fp32, of which only weights that belong to the `head` may be new.

    Precision is the accelerate YAML's. Raises ValueError when other weights are missing.
    """
    import torch

    options |= {"dtype": torch.float32}
    if cfg.attn_implementation != "sdpa":  # transformers takes it by itself, where a model has it
        options["attn_implementation"] = cfg.attn_implementation
    model, facts = load(auto, cfg, output_loading_info=True, **options)
    fresh = {*facts["missing_keys"], *(each[0] for each in facts["mismatched_keys"])}
    alien = sorted(name for name in fresh if not any(part in name for part in head))
    if alien:
        raise ValueError(
            f"task.model_name_or_path: {cfg.model_name_or_path} is for something else: it has no "
            f"weights for {', '.join(alien[:3])}"
        )
    if fresh:
        say(f"{cfg.model_name_or_path}: new weights for {', '.join(sorted(fresh))}")
    return model


def new_model(auto: Any, config: Any, cfg: ModelConfig) -> Any:
    """A model with new weights; raises ValueError where it has no such attention."""
    options = {}
    if cfg.attn_implementation != "sdpa":
        options["attn_implementation"] = cfg.attn_implementation
    try:
        return auto.from_config(config, **options)
    except (ImportError, ValueError) as error:
        raise ValueError(f"task.attn_implementation: {one_line(error)}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and remarks, which every process would print."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.set_verbosity(level)
