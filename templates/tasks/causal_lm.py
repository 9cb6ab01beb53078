"""What is trained: a language model, on texts, on prompts with completions, or on chats.

train.py calls these functions. samestep/settings/contract.py says what each gets and returns:

    prepare_data(cfg)                     what happens once, before training: download, tokenise
    views(cfg, data)                      (train, validation)
    collate(rows)  count(batch)           a batch of rows; the number of its items in the loss
    build_model(cfg, data)                the model
    loss_sum(model, batch)                the loss, summed over the terms
    eval_sums(model, batch)  metrics(sums)   what evaluation adds up; the numbers from it
    export(model, output, cfg, data)      saves the trained model

and, if they are there: identity, check_shared_rows, report, test_inputs.
`data` is what prepare_data returned: here, the folder of the prepared data. A whole task around
a plain nn.Module: python -m samestep example plain_module
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from samestep.base import fields
from samestep.base.fields import (
    EXPORT,
    IGNORE_INDEX,
    NOTHING,
    ROUNDING,
    SHAPE,
    Dropout,
    Heads,
    Layers,
    Width,
)
from samestep.data import cache, demo_data
from samestep.data.sources import DataConfig, by_source, check_data_config, split_data
from samestep.models import next_token, pretrained
from samestep.models.attention import restored
from samestep.models.lora import LoraFields, add_adapters, check_adapters
from samestep.models.pretrained import ModelConfig
from samestep.streaming.streaming import StreamFields
from samestep.streaming.token_streams import StreamedTokens, check_token_streaming, prepare_index
from samestep.text import chats, corpus, packing, row_formats, token_rows, tokenizing, unit_files
from samestep.text.token_rows import TokenRows

# transformers takes 4 s to import and datasets 1 s: both wait for the function that needs them.

Batch = dict[str, torch.Tensor]
UNIT = "tokens"
test_inputs = corpus.test_inputs  # that the check of the export asks
Length = Annotated[int, Field(ge=2, le=2**20)]
Vocabulary = Annotated[int, Field(ge=257, le=2**20)]
LossChunk = Annotated[int, Field(ge=16, le=2**30)]


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(DataConfig, StreamFields, LoraFields, ModelConfig):
    data: str | list[dict[str, int | str]] = "pydoc"
    """Rows to train on: a .jsonl, .json, .csv, .tsv or .parquet file, a .txt file, which is one
    text, a folder of such files, or a data set on the Hub. Or data that every machine has: manual
    (of Python and its library, 1.7 MB), pydoc (of the language alone, 0.4 MB), stdlib (Python's own
    source, 5 MB), docstrings (prompts or chats: what does this function do?). Several with their
    weights: a.jsonl:2,b.jsonl:1, or a list of {path: a.jsonl, weight: 2}."""
    rows: Literal["auto", "text", "prompt", "chat"] = "auto"
    """What a row is. text: a text. prompt: a prompt and its completion, the loss. chat: messages
    with role and content (ShareGPT: from and value), or instruction, input and output (Alpaca); the
    assistant's are the loss. auto: the names of the columns decide; docstrings are prompts."""
    file_extensions: str = ""
    """Endings of more files that are texts, such as .md,.py; they are read as .txt files are."""
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
    """Answers of a chat that are learnt. (A message with weight 0 or train: false never is.)"""
    roles: str = ""
    """Other names in messages: speaker=role,text=content,prompter=user,bot=assistant."""
    chat_template: str = ""
    """A file with a Jinja template for messages; empty: the tokenizer's own, or a plain one."""
    context_length: Length = 64
    """Tokens in a row. A row packed by best_fit may hold more than the model sees at once; each
    text in it may not."""
    packing: Literal["auto", "stream", "best_fit"] = "auto"
    """How rows of context_length tokens are filled. stream: with one text after the other, cut
    where a row ends. best_fit: with whole texts that do not see each other. auto: stream for texts,
    best_fit for prompts and chats."""
    overlong: Literal["split", "truncate"] = "split"
    """best_fit: a text that is too long continues in another row, or its end is cut off."""
    vocab_size: Vocabulary = field(default=1024, metadata=SHAPE)
    """New model: size of its byte-level BPE vocabulary, which is learnt from the training texts."""
    vocabulary: str = field(default="", metadata=NOTHING)
    """New model: the model folder of a run, whose vocabulary is kept; empty: it is learnt."""
    hidden_size: Width = field(default=128, metadata=SHAPE)
    """New model: its width, a multiple of 2 x num_heads."""
    num_layers: Layers = field(default=3, metadata=SHAPE)
    """New model: transformer layers."""
    num_heads: Heads = 4
    """New model: attention heads in a layer."""
    dropout: Dropout = 0.0
    """New model: dropout on the attention weights, the only dropout of Llama."""
    loss_chunk: LossChunk = field(default=4096, metadata=ROUNDING)
    """Most tokens whose logits exist at once, on each device: bounds the memory that a large
    vocabulary takes. The result stays the same to rounding."""
    sample_prompt: str = field(default="When a function is called,", metadata=EXPORT)
    """Beginning of a text, or a user's message, that the trained model continues or answers."""


def uses_best_fit(cfg: TaskConfig) -> bool:
    """Whether rows hold whole texts, which do not see each other."""
    return cfg.rows in ("prompt", "chat") or cfg.packing == "best_fit"


def check_config(cfg: TaskConfig) -> None:
    """Raises ValueError for fields that do not fit each other; `rows` may still be auto."""
    check_data_config(cfg, demo_data.TEXTS)
    check_token_streaming(cfg)
    for _, own in by_source(cfg):
        row_formats.check_format_fields(own)
    check_adapters(cfg)
    stream = cfg.rows in ("auto", "text")
    apart = cfg.attn_implementation != "flash_attention_2" or not uses_best_fit(cfg)
    rules = [
        ("packing", stream or cfg.packing != "stream", "best_fit for prompts and chats"),
        ("attn_implementation", apart, "sdpa or eager, to keep packed texts apart"),
    ]
    fields.check_fields(cfg, rules)
    is_read = cfg.rows == "auto" or uses_best_fit(cfg)
    fields.check_ignored_fields(cfg, [("overlong", is_read, "unless task.packing is best_fit")])
    if not cfg.model_name_or_path:
        # Rotary embeddings turn the dimensions of a head in pairs.
        fields.check_width(cfg, 2 * cfg.num_heads, "2 x num_heads")


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig) -> Path:
    """Splits, tokenises and packs the rows, once; the folder of the result.
    A field that shapes it is named here; else what was prepared with another value is taken.
    Replaces `rows` auto by the kind that the rows have, so that config.yaml of a run names it.
    """
    check_config(cfg)
    pretrained.check_unread(cfg)
    if cfg.streaming:
        return prepare_index(cfg)
    formats = corpus.recognize(cfg)
    check_config(cfg)
    best_fit = uses_best_fit(cfg)
    longest = corpus.max_text_length(cfg, best_fit)
    return cache.prepare(
        cfg,
        "context_length packing overlong train_on roles vocab_size model_name_or_path revision",
        lambda folder: corpus.build(cfg, formats, folder, longest, best_fit),
        row_formats.endings_of(cfg),
        more=[(data, each.kind, each.columns) for data, each in formats.items()],
        files=filter(None, [chats.template_path(cfg), tokenizing.vocabulary_path(cfg)]),
        shipped=demo_data.text_files,
    )


def identity(cfg: TaskConfig, data: Path) -> str:
    """The vocabulary of a new model, which is learnt from the data."""
    return "" if cfg.model_name_or_path else cache.short_digest(data / tokenizing.FILE)


def views(cfg: TaskConfig, data: Path) -> tuple[Any, TokenRows]:
    """Memory-mapped rows of context_length tokens; validation rows have two numbers more."""
    own = split_data(cfg.data)
    train = StreamedTokens(data, cfg) if cfg.streaming else TokenRows(data, "train", own)
    return train, TokenRows(data, "validation", own)


def check_context_parallel(cfg: TaskConfig, data: Path) -> None:
    """Raises ValueError for rows of which GPUs cannot have a part each: see context_parallel.yaml.
    Dropout would draw the same masks for each part."""
    where = "under context parallelism"
    rules = [
        ("rows", cfg.rows == "text", f"text {where}: rows packed by best_fit hold several texts"),
        ("packing", cfg.packing != "best_fit", f"stream {where}"),
        ("attn_implementation", cfg.attn_implementation == "sdpa", f"sdpa {where}"),
        ("dropout", bool(cfg.model_name_or_path) or not cfg.dropout, f"0 {where}"),
        ("lora_dropout", not cfg.lora_dropout, f"0 {where}"),
    ]
    fields.check_fields(cfg, rules)


def collate(rows: list[dict]) -> Batch:
    """input_ids and labels, int64 (B, context_length): each label is the token after its input.
    Rows packed by best_fit have position_ids too, which begin again at 0 with each text."""
    return token_rows.stack(rows)


def count(batch: Batch) -> int:
    return int((batch["labels"] != IGNORE_INDEX).sum())


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, data: Path) -> torch.nn.Module:
    """The model to start from, or a new Llama; with lora_rank, adapters beside frozen weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer = corpus.load_tokenizer(cfg, data)
    if cfg.model_name_or_path:
        model: Any = pretrained.load_model(AutoModelForCausalLM, cfg)
    else:
        config = LlamaConfig(
            vocab_size=pretrained.embedding_rows(tokenizer),
            hidden_size=cfg.hidden_size,
            intermediate_size=3 * cfg.hidden_size,
            num_hidden_layers=cfg.num_layers,
            num_attention_heads=cfg.num_heads,
            max_position_embeddings=cfg.context_length,
            attention_dropout=cfg.dropout,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        model = pretrained.new_model(AutoModelForCausalLM, config, cfg)
        pretrained.suppress_unused(model, tokenizer)
    if most_texts := unit_files.read_facts(data)["most_texts"]:
        packing.check_model_separates_texts(model)
    next_token.prepare(model, cfg.context_length, cfg.loss_chunk, most_texts)
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # it sets temperature or top_p without do_sample, and could not be saved
        model.generation_config.do_sample = True
    # Not in the config: Llama never trains the embedding of its pad token, which ends texts too.
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return add_adapters(model, cfg, "CAUSAL_LM") if cfg.lora_rank else model


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy of the counted tokens, in nats."""
    return next_token.loss_sum(model, batch)


# ---- Evaluation and export -----------------------------------------------------------------------


@torch.no_grad()
def eval_sums(model: torch.nn.Module, batch: Batch) -> Batch:
    """The losses of the model and of a unigram model, and the tokens and bytes they are sums of."""
    terms = {name: batch[name] for name in ("unigram_loss", "bytes")}
    terms |= {"loss": loss_sum(model, batch), "tokens": batch["labels"] != IGNORE_INDEX}
    return {name: values.sum() for name, values in terms.items()}


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
def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, data: Path) -> dict[str, str]:
    """Texts that the model writes after the sample prompt, and after prompts that are held out."""
    tokenizer = corpus.load_tokenizer(cfg, data)
    held_out = json.loads((data / "prompts.json").read_text(encoding="utf-8"))
    sample = row_formats.question_tokens(cfg.sample_prompt, cfg.rows, tokenizer)
    longest, texts = getattr(model.config, "max_position_embeddings", None) or 1024, {}
    for name, prompt in {"sample": sample, **held_out}.items():
        tokens = torch.tensor([prompt[-longest // 2 :]], device=model.device)
        settings = {"max_new_tokens": min(longest - tokens.shape[1], 100), "do_sample": False}
        # Greedy, as sampling would draw random numbers; the penalty prevents loops.
        settings |= {"attention_mask": torch.ones_like(tokens), "repetition_penalty": 1.2}
        with restored(model):
            answer = model.generate(input_ids=tokens, **settings)
        texts[name] = tokenizer.decode(answer[0], skip_special_tokens=True).rstrip()
    return texts


def export(model: Any, output: Path, cfg: TaskConfig, data: Path) -> None:
    """Saves files that AutoModelForCausalLM and AutoTokenizer load."""
    with pretrained.quiet(), restored(model):
        corpus.load_tokenizer(cfg, data).save_pretrained(output)
        if cfg.lora_rank and cfg.merge_lora:
            model = model.merge_and_unload()  # the bare model, with adapters in its weights
        model.save_pretrained(output)
