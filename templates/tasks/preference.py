"""What is trained: a language model that prefers one answer to another (DPO, IPO, SimPO, ...).

train.py calls these functions. samestep/settings/contract.py says what each gets and returns:

    prepare_data(cfg)                     what happens once, before training: download, tokenise
    views(cfg, data)                      (train, validation)
    collate(rows)  count(batch)           a batch of rows; the number of its items in the loss
    build_model(cfg, data)                the model
    loss_sum(model, batch)                the loss, summed over the terms
    eval_sums(model, batch)  metrics(sums)   what evaluation adds up; the numbers from it
    export(model, output, cfg, data)      saves the trained model

and, if they are there: identity, report, test_inputs.
`data` is what prepare_data returned: here, the folder of the prepared data. A whole task around
a plain nn.Module: python -m samestep example plain_module
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch.nn.utils.rnn import pad_sequence

from samestep.base import fields
from samestep.base.fields import (
    IGNORE_INDEX,
    ROUNDING,
    SHAPE,
    Dropout,
    Heads,
    Layers,
    Width,
)
from samestep.data import cache, demo_data
from samestep.data.sources import DataConfig, check_data_config, split_data
from samestep.data.tables import TABLES
from samestep.models import next_token, pretrained
from samestep.models import preferences as references
from samestep.models.attention import restored
from samestep.models.lora import LoraFields, add_adapters, check_adapters
from samestep.models.pretrained import ModelConfig
from samestep.text import chats, preferences, tokenizing
from samestep.text.row_files import RowFiles

# transformers takes 4 s to import: it waits for the functions that need it.

Batch = dict[str, torch.Tensor]
UNIT = "pairs"
Length = Annotated[int, Field(ge=2, le=2**20)]
Vocabulary = Annotated[int, Field(ge=257, le=2**20)]
LossChunk = Annotated[int, Field(ge=16, le=2**30)]
Beta = Annotated[float, Field(ge=1e-6, le=1000)]
Factor = Annotated[float, Field(ge=0, le=1000)]


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(DataConfig, LoraFields, ModelConfig):
    data: str | list[dict[str, int | str]] = "docstrings"
    """Pairs: a .jsonl, .json, .csv, .tsv or .parquet file, also compressed (.gz, .zst), a folder of
    such files, or a data set on the Hub. Or docstrings, which every machine has: of a function's
    docstring the first line is preferred to all of it. Several with their weights:
    a.jsonl:2,b.jsonl:1, or a list of {path: a.jsonl, weight: 2}."""
    prompt_column: str = "prompt"
    """Column of the prompt, a text or messages. It may be missing: then it is what both answers
    begin with."""
    chosen_column: str = "chosen"
    """Column of the answer that is preferred: text, or messages with role and content."""
    rejected_column: str = "rejected"
    """Column of the other answer."""
    tools_column: str = "tools"
    """Column of the tools that a chat may call, a list of JSON schemas; empty: not read."""
    roles: str = ""
    """Other names in messages: speaker=role,text=content,prompter=user,bot=assistant."""
    chat_template: str = ""
    """A file with a Jinja template for messages; empty: the tokenizer's own, or a plain one."""
    max_length: Length = 1024
    """Most tokens of a prompt with an answer. A prompt of more than half of them loses its
    beginning, and then the answer its end."""

    # Loss
    loss_type: Literal["sigmoid", "ipo", "hinge", "simpo"] = "sigmoid"
    """sigmoid: DPO. ipo and simpo take means over an answer's tokens; simpo has no reference."""
    beta: Beta = 0.1
    """Weight of the log-ratios in the loss: a higher one keeps the model closer to its reference.
    simpo: 2 to 10."""
    label_smoothing: Dropout = 0.0
    """sigmoid: the share of pairs that are the wrong way round, below 0.5 (conservative DPO)."""
    simpo_gamma: Factor = 0.5
    """simpo: the margin that is aimed at, between the means of the two answers times beta."""
    rpo_alpha: Factor = 0.0
    """Weight of the cross entropy of the chosen answer, a mean over its tokens, beside the loss."""
    loss_chunk: LossChunk = field(default=4096, metadata=ROUNDING)
    """Most tokens whose logits exist at once, on each device. The result stays to rounding."""

    # New model
    vocab_size: Vocabulary = field(default=1024, metadata=SHAPE)
    """Size of its byte-level BPE vocabulary, which is learnt from the training rows."""
    hidden_size: Width = field(default=128, metadata=SHAPE)
    """Its width, a multiple of 2 x num_heads."""
    num_layers: Layers = field(default=3, metadata=SHAPE)
    """Its transformer layers."""
    num_heads: Heads = 4
    """Attention heads in a layer."""


def check_config(cfg: TaskConfig) -> None:
    """Raises ValueError for fields that do not fit each other, before any row is read."""
    check_data_config(cfg, ["docstrings"])
    check_adapters(cfg)
    chats.read_names(cfg.roles)
    names = (cfg.prompt_column, cfg.chosen_column, cfg.rejected_column)
    rules = [
        ("rejected_column", len({*names}) == 3, "another column than the prompt's and the chosen"),
        ("label_smoothing", cfg.label_smoothing < 0.5, "below 0.5: swap the columns instead"),
    ]
    fields.check_fields(cfg, rules)
    own = {each.data for each in split_data(cfg.data)} != {"docstrings"}
    columns = "prompt_column chosen_column rejected_column tools_column roles chat_template"
    where = f"where task.loss_type is {cfg.loss_type}"
    ignored = [
        (columns, own, "where task.data is docstrings"),
        ("label_smoothing", cfg.loss_type == "sigmoid", where),
        ("simpo_gamma", cfg.loss_type == "simpo", where),
    ]
    fields.check_ignored_fields(cfg, ignored)
    if not cfg.model_name_or_path:
        # Rotary embeddings turn the dimensions of a head in pairs.
        fields.check_width(cfg, 2 * cfg.num_heads, "2 x num_heads")


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig) -> Path:
    """Splits and tokenises the pairs, once; the folder of the result.

    A field that shapes it is named here; else what was prepared with another value is taken.
    """
    check_config(cfg)
    pretrained.check_unread(cfg)
    tokenizing.check_lengths(cfg, "max_length")
    names = ("prompt", "chosen", "rejected", "tools")
    columns = {name: getattr(cfg, f"{name}_column") for name in names}
    columns = {name: column for name, column in columns.items() if column}
    return cache.prepare(
        cfg,
        """prompt_column chosen_column rejected_column tools_column roles max_length vocab_size
        model_name_or_path revision""",
        lambda folder: preferences.build(cfg, folder, columns, {"docstrings": docstrings}),
        TABLES,
        files=filter(None, [chats.template_path(cfg)]),
        shipped={"docstrings": demo_data.text_files("docstrings")}.get,
    )


def docstrings() -> Any:
    """The pairs that every machine has: the first line of a docstring before all of it."""
    return demo_data.text_rows("docstrings", "pair")


def identity(cfg: TaskConfig, data: Path) -> str:
    """The vocabulary of a new model, which is learnt from the data."""
    return "" if cfg.model_name_or_path else cache.short_digest(data / tokenizing.FILE)


def views(cfg: TaskConfig, data: Path) -> tuple[RowFiles, RowFiles]:
    """Memory-mapped rows: the tokens of chosen and rejected, each with its prompt; chosen_is_answer
    and rejected_is_answer, 1 for an answer's tokens; and length, the tokens of both."""
    return tuple(RowFiles(data, part, split_data(cfg.data)) for part in ("train", "validation"))


def collate(rows: list[dict]) -> Batch:
    """input_ids and labels, int64 (B, 2, T): the prompt with the chosen answer, and with the
    rejected one. Each label is the token after its input; those of prompts are IGNORE_INDEX."""
    inputs, labels = [], []
    for row in rows:
        for name in preferences.ANSWERS:
            ids = torch.as_tensor(row[name]).long()
            is_answer = torch.as_tensor(row[name + preferences.MASK]).bool()
            inputs.append(ids[:-1])
            labels.append(ids[1:].where(is_answer[1:], IGNORE_INDEX))
    # Attention is causal: no token sees the padding, which stands at the end.
    padded = {"input_ids": pad_sequence(inputs, True), "labels": pad_sequence(labels, True, -100)}
    return {name: values.unflatten(0, (len(rows), 2)) for name, values in padded.items()}


def count(batch: Batch) -> int:
    return len(batch["labels"])


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, data: Path) -> torch.nn.Module:
    """The model to start from, or a new Llama; and its reference: a frozen copy, or no adapters."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer = preferences.load_tokenizer(cfg, data)
    if cfg.model_name_or_path:
        model: Any = pretrained.load_model(AutoModelForCausalLM, cfg)
    else:
        config = LlamaConfig(
            vocab_size=pretrained.embedding_rows(tokenizer),
            hidden_size=cfg.hidden_size,
            intermediate_size=3 * cfg.hidden_size,
            num_hidden_layers=cfg.num_layers,
            num_attention_heads=cfg.num_heads,
            max_position_embeddings=cfg.max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        model = pretrained.new_model(AutoModelForCausalLM, config, cfg)
        pretrained.suppress_unused(model, tokenizer)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    references.disable_dropout(model)  # the log-ratios would be noise
    next_token.prepare(model, cfg.max_length, cfg.loss_chunk, most_texts=0)
    if cfg.lora_rank:
        model = add_adapters(model, cfg, "CAUSAL_LM")
    elif cfg.loss_type != "simpo":
        references.add_reference(model)
    model.objective = cfg  # loss_sum gets a model and a batch alone
    return model


def pair_losses(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses (B,); rewards of both answers (B, 2); their mean log-probabilities, in nats (B, 2)."""
    cfg, lengths = model.objective, (batch["labels"] != IGNORE_INDEX).sum(2).clamp(min=1)
    own, *reference = references.answer_log_probabilities(model, batch, cfg.loss_type != "simpo")
    means, ratios = own / lengths, own - reference[0] if reference else own / lengths
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
    return losses - cfg.rpo_alpha * means[:, 0], rewards, means


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return pair_losses(model, batch)[0].sum()


# ---- Evaluation and export -----------------------------------------------------------------------


@torch.no_grad()
def eval_sums(model: Any, batch: Batch) -> Batch:
    """Sums over the pairs, and of the divergence from the reference over the answers' tokens."""
    losses, rewards, means = pair_losses(model, batch)
    sums = {"loss": losses.sum(), "rewards": rewards.sum(0), "means": means.sum(0)}
    sums["right"] = (rewards[:, 0] > rewards[:, 1]).sum()
    sums["pairs"] = torch.ones_like(losses).sum()
    if model.objective.loss_type != "simpo":
        sums["tokens"] = (batch["labels"] != IGNORE_INDEX).sum()
        sums["kl"] = references.divergence(model, batch)
    return sums


def metrics(sums: Batch) -> dict[str, float]:
    """Means over the pairs; kl, from the reference, is in nats a token of an answer."""
    mean = {name: (value / sums["pairs"]).tolist() for name, value in sums.items()}
    (chosen, rejected), (chosen_logp, rejected_logp) = mean["rewards"], mean["means"]
    scores = {"loss": mean["loss"], "accuracy": mean["right"], "margin": chosen - rejected}
    scores |= {"chosen_reward": chosen, "rejected_reward": rejected}
    scores |= {"chosen_logp": chosen_logp, "rejected_logp": rejected_logp}
    return scores | ({"kl": mean["kl"] / mean["tokens"]} if "kl" in mean else {})


@torch.no_grad()
def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, data: Path) -> dict[str, str]:
    """What the reference and the trained model answer to two prompts that are held out."""
    _, held_out = views(cfg, data)
    prompts = [preferences.prompt_of(held_out[i]) for i in range(min(2, len(held_out)))]
    return preferences.answers(model, prompts, preferences.load_tokenizer(cfg, data))


test_inputs = preferences.test_inputs  # that the check of the export asks


def export(model: Any, output: Path, cfg: TaskConfig, data: Path) -> None:
    """Saves files that AutoModelForCausalLM and AutoTokenizer load."""
    with pretrained.quiet(), restored(model), references.without_reference(model):
        preferences.load_tokenizer(cfg, data).save_pretrained(output)
        if cfg.lora_rank and cfg.merge_lora:
            model = model.merge_and_unload()  # the bare model, with adapters in its weights
        model.save_pretrained(output)
