"""LoRA (Hu et al., 2021): small trained adapters beside the frozen weights of a model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from samestep.base.console import one_line
from samestep.base.fields import MODEL, NOTHING, Dropout, check_fields, check_ignored_fields
from samestep.models import pretrained

Rank = Annotated[int, Field(ge=0, le=4096)]
_Alpha = Annotated[float, Field(ge=0, le=1_000_000)]


@dataclass
class LoraFields:
    """Fields of a task that can train adapters; the task has those of ModelConfig too."""

    lora_rank: Rank = field(default=0, metadata=MODEL)
    """Train adapters of this rank beside the frozen weights of model_name_or_path; 0: train all
    weights."""
    lora_alpha: _Alpha = field(default=0.0, metadata=MODEL)
    """Factor of the adapters, times the rank; 0: twice the rank."""
    lora_dropout: Dropout = field(default=0.0, metadata=MODEL)
    """Dropout before the adapters."""
    lora_targets: str = field(default="all-linear", metadata=MODEL)
    """Modules that get adapters: all-linear, or names with commas between them: q_proj,v_proj."""
    merge_lora: bool = field(default=False, metadata=NOTHING | MODEL)
    """Save the whole model, with the adapters added to its weights, instead of adapters alone."""


def check_adapters(cfg: Any) -> None:
    """Raises ValueError for adapters without a model to adapt, and for fields nothing reads."""
    fits = bool(cfg.model_name_or_path) or not cfg.lora_rank
    text = "0, unless task.model_name_or_path is a model to adapt"
    check_fields(cfg, [("lora_rank", fits, text)])
    fields = "lora_alpha lora_dropout lora_targets merge_lora"
    check_ignored_fields(cfg, [(fields, cfg.lora_rank, "unless task.lora_rank is more than 0")])


def add_adapters(model: Any, cfg: Any, task_type: str) -> Any:
    """The model with frozen weights and new adapters. `task_type` is one of peft's, "CAUSAL_LM"."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    targets = [name.strip() for name in cfg.lora_targets.split(",")]
    tied = getattr(model.config, "tie_word_embeddings", False)
    adapters = LoraConfig(
        r=cfg.lora_rank,
        lora_alpha=cfg.lora_alpha or 2 * cfg.lora_rank,
        lora_dropout=cfg.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type=task_type,
    )
    try:
        with pretrained.quiet():
            adapted = get_peft_model(model, adapters, revision=cfg.revision)
    except ValueError as error:
        raise ValueError(f"task.lora_targets: {one_line(error)}") from None
    ends = (adapted.get_input_embeddings(), adapted.get_output_embeddings())
    if tied and cfg.merge_lora and any(isinstance(each, BaseTunerLayer) for each in ends):
        raise ValueError(
            "task.lora_targets: this model ties its input and output embeddings, and an adapter of "
            "one of them cannot be merged; take it out, or leave out task.merge_lora"
        )
    return adapted


def save_model(model: Any, tokenizer: Any, output: Path, merge: bool = False) -> None:
    """Saves a model and its tokenizer as transformers does; `merge`: adapters in its weights. The
    config gets back what `build_generator` replaced, so the model must not train afterwards."""
    with pretrained.quiet():
        tokenizer.save_pretrained(output)
        model = model.merge_and_unload() if merge else model  # the bare model
        model.config.update(getattr(model, "own_settings", {}))
        model.save_pretrained(output)
        if model.can_generate():  # beside adapters peft saves none
            model.generation_config.save_pretrained(output)
