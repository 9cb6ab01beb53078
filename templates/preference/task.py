"""What is trained: a language model that prefers one answer to another (DPO, IPO, SimPO, ...).

train.py calls these functions; docs/task.md says what each gets and returns. One that names `data`
gets what prepare_data returned, loaded from its folder, data.folder.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import datasets
import torch
import torch.nn.functional as F
from pydantic import Field
from torch.nn.utils.rnn import pad_sequence

from samestep.base.fields import MODEL, ROUNDING
from samestep.data.sources import DataConfig
from samestep.models import next_token, pretrained
from samestep.models import preferences as references
from samestep.models.lora import LoraFields, add_adapters, save_model
from samestep.models.pretrained import ModelConfig
from samestep.text import preferences, tokenizing

# transformers takes 4 s to import: it waits for the functions that need it.

Batch = dict[str, torch.Tensor]
UNIT = "pairs"
Length = Annotated[int, Field(ge=2, le=2**20)]
Vocabulary = Annotated[int, Field(ge=257, le=2**20)]
Chunk = Annotated[int, Field(ge=0, le=2**30)] | Literal["auto"]
Size = Annotated[int, Field(ge=1, le=65_536)]
Beta = Annotated[float, Field(ge=1e-6, le=1000)]
Factor = Annotated[float, Field(ge=0, le=1000)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(DataConfig, LoraFields, ModelConfig):
    data: str = "docstrings"
    """Pairs: a .jsonl, .json, .csv, .tsv or .parquet file, also compressed (.gz), a folder of
    such files, or a dataset on the Hub. Or docstrings, which are bundled: of a function's
    docstring the first line is preferred to all of it. Several with their weights:
    a.jsonl:2,b.jsonl:1."""
    prompt_column: str = "prompt"
    """Column of the prompt, a text or messages. It may be missing: then it is what both answers
    begin with."""
    chosen_column: str = "chosen"
    """Column of the answer that is preferred: text, or messages with role and content."""
    rejected_column: str = "rejected"
    """Column of the other answer."""
    tools_column: str = "tools"
    """Column of the tools that a chat may call, a list of JSON schemas; empty: not read."""
    chat_template: str = ""
    """A file with a Jinja template for messages; empty: the tokenizer's own, or a plain one."""
    max_length: Length = 1024
    """Maximum number of tokens of a prompt with an answer. A prompt of more than half of them loses
    its beginning, and then the answer its end."""

    # Loss
    loss_type: Literal["sigmoid", "ipo", "hinge", "simpo"] = field(
        default="sigmoid", metadata=MODEL
    )
    """sigmoid: DPO. ipo and simpo take means over an answer's tokens; simpo has no reference."""
    beta: Beta = field(default=0.1, metadata=MODEL)
    """Weight of the log-ratios in the loss: a higher one keeps the model closer to its reference.
    simpo: 2 to 10."""
    label_smoothing: Fraction = field(default=0.0, metadata=MODEL)
    """sigmoid: the share of pairs that are the wrong way round, below 0.5 (conservative DPO)."""
    simpo_gamma: Factor = field(default=0.5, metadata=MODEL)
    """simpo: the margin that is aimed at, between the means of the two answers times beta."""
    rpo_alpha: Factor = field(default=0.0, metadata=MODEL)
    """Weight of the cross entropy of the chosen answer, a mean over its tokens, beside the loss."""
    loss_chunk: Chunk = field(default="auto", metadata=ROUNDING | MODEL)
    """Maximum number of tokens whose logits exist at once, on each device. 0: all of a micro-batch.
    auto: 4096, where the model's logits allow it. The result stays the same to rounding."""

    # New model
    vocab_size: Vocabulary = 1024
    """Size of its byte-level BPE vocabulary, trained on the training split."""
    hidden_size: Size = field(default=128, metadata=MODEL)
    """Its width, a multiple of 2 x num_heads."""
    num_layers: Size = field(default=3, metadata=MODEL)
    """Its transformer layers."""
    num_heads: Size = field(default=4, metadata=MODEL)
    """Attention heads in a layer."""


check_config = preferences.check_config  # fields that do not fit each other


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Token ids of each prompt with its chosen and rejected answer, and masks of the answers."""
    pairs = preferences.load_pairs(cfg)
    tokenizer = tokenizing.prepare_tokenizer(cfg, folder, pairs["train"], "max_length")
    return preferences.tokenize_pairs(pairs, tokenizer, cfg)


def views(cfg: TaskConfig, data: Any) -> tuple[Any, Any]:
    """Rows {chosen_input_ids, chosen_loss_mask, rejected_input_ids, rejected_loss_mask}."""
    return preferences.view(data["train"], cfg), preferences.view(data["validation"], cfg)


def collate(rows: list[dict]) -> Batch:
    """input_ids and labels, int64 (B, 2, T): the prompt with the chosen answer, and with the
    rejected one. Labels are the inputs, or -100 for prompts and padding."""
    inputs, labels = [], []
    for row in rows:
        for name in ("chosen", "rejected"):
            ids = torch.as_tensor(row[f"{name}_input_ids"].astype("i8"))
            inputs.append(ids)
            labels.append(ids.where(torch.from_numpy(row[f"{name}_loss_mask"] > 0), -100))
    # Attention is causal: no token sees the padding, which stands at the end.
    padded = {"input_ids": pad_sequence(inputs, True), "labels": pad_sequence(labels, True, -100)}
    return {name: values.unflatten(0, (len(rows), 2)) for name, values in padded.items()}


def count(batch: Batch) -> int:
    return len(batch["labels"])


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, data: Any) -> torch.nn.Module:
    """The pretrained model, or a new Llama; and its reference: a frozen copy, or no adapters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(data.folder)
    config = LlamaConfig(  # of a new model
        vocab_size=len(tokenizer),
        hidden_size=cfg.hidden_size,
        intermediate_size=3 * cfg.hidden_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        max_position_embeddings=cfg.max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    settings = pretrained.without_dropout(cfg)  # the log-ratios would be noise
    model = pretrained.build_generator(AutoModelForCausalLM, cfg, config, tokenizer, **settings)
    next_token.prepare(model, cfg.loss_chunk)
    if cfg.lora_rank:
        model = add_adapters(model, cfg, "CAUSAL_LM")
    elif cfg.loss_type != "simpo":
        references.add_reference(model)
    model.objective = cfg  # of pair_losses; a function that names cfg among its arguments gets it
    return model


def pair_losses(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses (B,); rewards of both answers (B, 2); their mean log-probabilities, in nats (B, 2)."""
    cfg, lengths = model.objective, next_token.counted(batch).sum(2).clamp(min=1)
    has_reference = cfg.loss_type != "simpo"
    own, theirs, router = references.answer_log_probabilities(model, batch, has_reference)
    means, ratios = own / lengths, own - theirs if has_reference else own / lengths
    rewards = cfg.beta * ratios
    margins = rewards[:, 0] - rewards[:, 1]
    if cfg.loss_type == "sigmoid":
        right, wrong = F.logsigmoid(margins), F.logsigmoid(-margins)
        losses = -(1 - cfg.label_smoothing) * right - cfg.label_smoothing * wrong
    elif cfg.loss_type == "hinge":
        losses = F.relu(1 - margins)
    elif cfg.loss_type == "ipo":
        chosen, rejected = (ratios / lengths).unbind(1)
        losses = (chosen - rejected - 1 / (2 * cfg.beta)) ** 2
    else:
        losses = -F.logsigmoid(margins - cfg.simpo_gamma)
    return losses - cfg.rpo_alpha * means[:, 0] + router, rewards, means


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return pair_losses(model, batch)[0].sum()


# ---- Evaluation and export -----------------------------------------------------------------------


@torch.no_grad()
def eval_sums(model: Any, batch: Batch) -> Batch:
    """Sums over the pairs."""
    losses, rewards, means = pair_losses(model, batch)
    sums = {"loss": losses.sum(), "rewards": rewards.sum(0), "means": means.sum(0)}
    sums["right"] = (rewards[:, 0] > rewards[:, 1]).sum()
    sums["pairs"] = torch.ones_like(losses).sum()
    return sums


def metrics(sums: Batch) -> dict[str, float]:
    """Means over the pairs; the margin of the rewards is the distance from the reference."""
    mean = {name: (value / sums["pairs"]).tolist() for name, value in sums.items()}
    (chosen, rejected), (chosen_logp, rejected_logp) = mean["rewards"], mean["means"]
    scores = {"loss": mean["loss"], "accuracy": mean["right"], "margin": chosen - rejected}
    scores |= {"chosen_reward": chosen, "rejected_reward": rejected}
    scores |= {"chosen_logp": chosen_logp, "rejected_logp": rejected_logp}
    return scores


@torch.no_grad()
def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, data: Any) -> dict[str, str]:
    """What the reference and the trained model answer to two prompts that are held out."""
    return preferences.write_samples(model, cfg, data)


test_inputs = preferences.test_inputs  # that the check of the export gives to both models


def export(model: Any, output: Path, cfg: TaskConfig, data: Any) -> None:
    """Saves files that AutoModelForCausalLM and AutoTokenizer load."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data.folder)
    with references.without_reference(model):
        save_model(model, tokenizer, output, merge=cfg.lora_rank > 0 and cfg.merge_lora)
