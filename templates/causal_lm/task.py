"""What is trained: a language model, on texts, on prompts with completions, or on chats.

train.py calls these functions; docs/task.md says what each gets and returns. One that names `data`
gets what prepare_data returned, loaded from its folder, data.folder.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import datasets
import torch
from pydantic import Field

from samestep.base.fields import MODEL, NOTHING, ROUNDING
from samestep.data.sources import StreamConfig
from samestep.models import next_token, pretrained
from samestep.models.lora import LoraFields, add_adapters, save_model
from samestep.models.pretrained import ModelConfig
from samestep.text import formats, sequences, tokenizing
from samestep.text.row_streams import RowStream

# transformers takes 4 s to import: it waits for the functions that need it.

Batch = dict[str, torch.Tensor]
UNIT = "tokens"
Length = Annotated[int, Field(ge=2, le=2**20)]
Vocabulary = Annotated[int, Field(ge=257, le=2**20)]
Chunk = Annotated[int, Field(ge=0, le=2**30)] | Literal["auto"]
Size = Annotated[int, Field(ge=1, le=65_536)]


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(StreamConfig, LoraFields, ModelConfig):
    data: str = "manual"
    """Rows to train on: a .jsonl, .json, .csv, .tsv, .parquet, .txt or .md file, also compressed
    (.gz), a folder of such files, or a dataset on the Hub. Or bundled: manual (texts of Python's
    manual and library, 1.7 MB), docstrings (prompts or chats).
    Several with their weights: a.jsonl:2,b.jsonl:1."""
    rows: Literal["auto", "text", "prompt", "chat"] = "auto"
    """Dataset format. text: a document. prompt: a prompt and its completion, each a text or
    messages. chat: messages with role and content (ShareGPT: from and value), or instruction, input
    and output (Alpaca). Completions, or the assistant's messages, are in the loss. auto: the names
    of the columns decide; docstrings are prompts."""
    text_column: str = "text"
    """Column of the text."""
    prompt_column: str = "prompt"
    """Column of the prompt."""
    completion_column: str = "completion"
    """Column of the completion."""
    messages_column: str = "messages"
    """Column of the messages. The default also finds conversations, and the columns of Alpaca."""
    tools_column: str = "tools"
    """Column of the tools that a chat may call, a list of JSON schemas; empty: not read."""
    train_on: Literal["all", "last"] = "all"
    """Messages of the assistant in the loss. (One with weight 0 or train: false never is.)"""
    chat_template: str = ""
    """A file with a Jinja template for messages; empty: the tokenizer's own, or a plain one."""
    context_length: Length = 64
    """Tokens in a sequence. One packed by best_fit may hold more than the model sees at once; each
    document in it may not."""
    packing: Literal["auto", "stream", "best_fit", "none", "if_many"] = "auto"
    """How sequences are filled. stream: with one document after the other, cut where a sequence
    ends. best_fit: with whole documents that do not see each other. none: with one document. auto:
    stream for texts, best_fit for prompts and chats. if_many: the same, but none for prompts and
    chats that would fill fewer than 32 sequences."""
    overlong: Literal["split", "truncate"] = "split"
    """best_fit: a document that is too long continues in another sequence, or is truncated."""
    vocab_size: Vocabulary = 1024
    """New model: size of its byte-level BPE vocabulary, trained on the training split."""
    vocabulary: str = ""
    """New model: the model folder of a run, whose tokenizer is kept; empty: it is trained."""
    hidden_size: Size = field(default=128, metadata=MODEL)
    """New model: its width, a multiple of 2 x num_heads."""
    num_layers: Size = field(default=3, metadata=MODEL)
    """New model: transformer layers."""
    num_heads: Size = field(default=4, metadata=MODEL)
    """New model: attention heads in a layer."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = field(default=0.0, metadata=MODEL)
    """New model: dropout on the attention weights, the only dropout of Llama."""
    loss_chunk: Chunk = field(default="auto", metadata=ROUNDING | MODEL)
    """Maximum number of tokens whose logits exist at once, on each device: bounds the memory that a
    large vocabulary takes. 0: all of a micro-batch. auto: 4096, where the model's logits allow it.
    The result stays the same to rounding."""
    sample_prompt: str = field(default="", metadata=NOTHING | MODEL)
    """Beginning of a text, or a user's message, that the trained model continues or answers; empty:
    those of two rows that are held out."""


check_config = formats.check_config  # fields that do not fit each other


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Sequences of context_length tokens: `input_ids`; where they hold whole documents `loss_mask`
    and `lengths`; and those to evaluate on `bytes` and `unigram_loss`, sums over their tokens.
    `file` and `line` say where the first document of a sequence stands."""
    rows = formats.read_rows(cfg)  # sets cfg.rows, if it is auto
    packed = formats.is_packed(cfg)
    tokenizer = tokenizing.prepare_tokenizer(cfg, folder, rows["train"], "context_length", packed)
    size = rows["train"].data.nbytes
    tokens = rows.map(
        tokenizing.tokenize,
        fn_kwargs={"tokenizer": tokenizer, "with_masks": packed},
        batched=True,
        batch_size=min(100, 1 + 2 * 10**6 * len(rows["train"]) // size),  # 2 MB at most
        remove_columns=rows["train"].column_names,
        num_proc=cfg.num_proc(size // 10**6),
    )
    return sequences.make_sequences(tokens, cfg, tokenizer)


def views(cfg: TaskConfig, data: Any) -> tuple[Any, Any]:
    """Sequences with labels, and positions of packed documents; of a stream to train on made when
    they are read."""
    validation = sequences.Sequences(data["validation"], cfg)
    if cfg.streaming:
        return RowStream(cfg, data.folder), validation
    return sequences.Sequences(data["train"], cfg), validation


# input_ids and labels, int64 (B, context_length): labels are the inputs, or -100. Packed documents
# have position_ids too, which begin again at 0 with each.
collate = torch.utils.data.default_collate


def count(batch: Batch) -> int:
    return int(next_token.counted(batch).sum())


check_context_parallel = formats.check_context_parallel


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, data: Any) -> torch.nn.Module:
    """The pretrained model, or a new Llama; with lora_rank, adapters beside frozen weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(data.folder)
    config = LlamaConfig(  # of a new model
        vocab_size=len(tokenizer),
        hidden_size=cfg.hidden_size,
        intermediate_size=3 * cfg.hidden_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        max_position_embeddings=cfg.context_length,
        attention_dropout=cfg.dropout,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = pretrained.build_generator(AutoModelForCausalLM, cfg, config, tokenizer)
    next_token.prepare(model, cfg.loss_chunk, packed=formats.is_packed(cfg))
    return add_adapters(model, cfg, "CAUSAL_LM") if cfg.lora_rank else model


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy of the tokens in the loss, in nats: each from those before it."""
    return next_token.loss_sum(model, batch)


# ---- Evaluation and export -----------------------------------------------------------------------


@torch.no_grad()
def eval_sums(model: torch.nn.Module, batch: Batch) -> Batch:
    """The losses of the model and of a unigram model, and the tokens and bytes they are sums of."""
    sums = {name: batch[name].sum() for name in ("unigram_loss", "bytes")}
    return sums | {"loss": loss_sum(model, batch), "tokens": next_token.counted(batch).sum()}


def metrics(sums: Batch) -> dict[str, float]:
    """Losses are in nats a token; bits per byte alone compare between vocabularies."""
    total = {name: float(value) for name, value in sums.items()}
    loss = total["loss"] / total["tokens"]
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),  # exp overflows above 709
        "bits_per_byte": total["loss"] / math.log(2) / max(total["bytes"], 1),
        "unigram_loss": total["unigram_loss"] / total["tokens"],  # from token frequencies alone
    }


@torch.no_grad()
def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, data: Any) -> dict[str, str]:
    """Texts that the model writes after the sample prompt, or after prompts that are held out."""
    return formats.write_samples(model, cfg, data)


test_inputs = formats.test_inputs  # that the check of the export gives to both models


def export(model: Any, output: Path, cfg: TaskConfig, data: Any) -> None:
    """Saves files that AutoModelForCausalLM and AutoTokenizer load."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data.folder)
    save_model(model, tokenizer, output, merge=cfg.lora_rank > 0 and cfg.merge_lora)
