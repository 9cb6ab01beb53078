"""What is trained: a language model, on texts, on prompts with completions, or on chats.

train.py calls these functions. training/contract.py says what each gets and returns:

    prepare_data(cfg)                     what happens once, before training: download, tokenise
    datasets(cfg, prepared)               (train, validation)
    collate(rows)  count(batch)           a batch of rows; the number of its loss terms
    build_model(cfg, prepared)            the model
    loss_sum(model, batch)                the loss, summed over the terms
    eval_sums(model, batch)  metrics(sums)   what evaluation adds up; the numbers from it
    export(model, output, cfg, prepared)  saves the trained model

and, if they are there: identity, digest, augment, sizes, report. `prepared` is what prepare_data
returned. examples/task.py is a whole task around a plain nn.Module.
"""

import ast
import json
import math
import re
import sysconfig
import tokenize
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from tasklib import cache, chats, pretrained, sources
from tasklib.child import run_in_child
from tasklib.fields import NOTHING, SHAPE, check_fields, check_ignored_fields
from tasklib.messages import one_line
from tasklib.pretrained import ModelConfig
from tasklib.sources import DataConfig
from tasklib.tables import TABLES, Row

# transformers takes 4 s to import and datasets 1 s: both wait for the function that needs them.

Batch = dict[str, torch.Tensor]
END_OF_TEXT = "<|endoftext|>"
IGNORED = -100  # the label that cross entropy leaves out
UNIT = "tokens"
ENDINGS = (".txt", *TABLES)
SHIPPED = {"pydoc": "pydoc_data/topics.py", "stdlib": "*.py", "docstrings": "*.py"}
CALLED = {"text": "documents", "prompt": "prompts", "chat": "chats"}  # rows


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = "pydoc"
    """Rows to train on: a .jsonl, .json, .csv, .tsv or .parquet file, a .txt file, which is one
    text, a folder of such files, or a data set on the Hub. Or what every machine has: pydoc
    (Python's manual, 0.4 MB), stdlib (Python's own source, 5 MB), docstrings (prompts or chats:
    what a function of it does)."""
    rows: Literal["auto", "text", "prompt", "chat"] = "auto"
    """What a row is. text: a text. prompt: a prompt and its completion, which alone is learnt.
    chat: messages with role and content (ShareGPT: from and value), or instruction, input and
    output (Alpaca); the assistant's messages alone are learnt. auto: what the names of its columns
    say; docstrings are prompts then."""
    text_column: str = "text"
    """Column of the text."""
    prompt_column: str = "prompt"
    """Column of the prompt."""
    completion_column: str = "completion"
    """Column of the completion."""
    messages_column: str = "messages"
    """Column of the messages; this default stands for conversations too, or those of Alpaca."""
    tools_column: str = "tools"
    """Column of the tools that a chat may call, a list of JSON schemas, if there is one; empty: not
    to be read."""
    chat_template: str = ""
    """A file with a Jinja template for messages; empty: the tokenizer's own, or a plain one."""
    context_length: int = 64
    """Tokens in a row. Packed by best_fit it may hold more than the model can see at once: what is
    longer than that is too long."""
    packing: Literal["auto", "stream", "best_fit"] = "auto"
    """How rows of context_length tokens are filled. stream: with one text after the other, cut
    where a row ends. best_fit: with whole texts that do not see each other. auto: stream for texts,
    best_fit for prompts and chats."""
    too_long: Literal["split", "cut"] = "split"
    """best_fit: what is too long goes on in another row, or loses its end."""
    vocab_size: int = field(default=1024, metadata=SHAPE)
    """New model: size of its byte-level BPE vocabulary, which is learnt from the training texts."""
    hidden_size: int = field(default=128, metadata=SHAPE)
    """New model: its width."""
    num_layers: int = field(default=3, metadata=SHAPE)
    """New model: transformer layers."""
    num_heads: int = 4
    """New model: attention heads in a layer."""
    dropout: float = 0.0
    """New model: dropout on the attention weights, the only one that Llama has."""
    lora_rank: int = field(default=0, metadata=SHAPE)
    """Train adapters of this rank beside the frozen weights of model_name_or_path; 0: train all."""
    lora_alpha: float = 0.0
    """Factor of the adapters, times the rank; 0: twice the rank."""
    lora_dropout: float = 0.0
    """Dropout before the adapters."""
    lora_targets: str = field(default="all-linear", metadata=SHAPE)
    """Modules that get adapters: all-linear, or names with commas between them: q_proj,v_proj."""
    merge_lora: bool = field(default=False, metadata=NOTHING)
    """Save the whole model, with the adapters added to its weights, instead of adapters alone."""
    sample_prompt: str = field(default="When a function is called,", metadata=NOTHING)
    """Beginning of the text, or the message, that the trained model answers."""


def best_fit(cfg: TaskConfig) -> bool:
    """Whether rows hold whole texts, which do not see each other."""
    return cfg.rows in ("prompt", "chat") or cfg.packing == "best_fit"


def check(cfg: TaskConfig) -> None:
    """Refuse settings that cannot work, as far as they are known: `rows` may still be auto."""
    sources.check_data_config(cfg, SHIPPED)
    unit = 2 * max(1, cfg.num_heads)  # rotary embeddings turn the dimensions of a head in pairs
    nearest = max(1, (min(cfg.hidden_size, 2**16) + unit // 2) // unit) * unit
    new, auto, text = not cfg.model_name_or_path, cfg.rows == "auto", cfg.rows == "text"
    shipped = cfg.data in SHIPPED
    kinds = "prompt or chat" if cfg.data == "docstrings" else "text"
    fits = auto or not shipped or text != (cfg.data == "docstrings")
    flash = cfg.attn_implementation == "flash_attention_2"
    rules = [
        ("context_length", 2 <= cfg.context_length <= 2**20, "from 2 to 1,048,576"),
        ("packing", text or auto or cfg.packing != "stream", "best_fit for prompts and chats"),
        ("rows", fits, f"{kinds} where task.data is {cfg.data}"),
        (
            "attn_implementation",
            not (flash and best_fit(cfg)),
            "sdpa or eager, to keep packed texts apart",
        ),
        ("lora_rank", 0 <= cfg.lora_rank <= 4096, "from 0 to 4,096"),
        (
            "lora_rank",
            not (cfg.lora_rank and new),
            "0, unless task.model_name_or_path is a model to adapt",
        ),
        ("lora_alpha", 0 <= cfg.lora_alpha <= 1e6, "from 0 to 1,000,000"),
        ("lora_dropout", 0 <= cfg.lora_dropout < 1, "at least 0 and below 1"),
    ]
    if new:
        rules += [
            (
                "vocab_size",
                257 <= cfg.vocab_size <= 2**20,
                "from 257, for 256 bytes and end of text, to 1,048,576",
            ),
            ("num_layers", 1 <= cfg.num_layers <= 1000, "from 1 to 1,000"),
            ("num_heads", 1 <= cfg.num_heads <= 1024, "from 1 to 1,024"),
            ("hidden_size", cfg.hidden_size <= 2**16, "at most 65,536"),
            ("hidden_size", cfg.hidden_size == nearest, f"a multiple of 2 x num_heads, {nearest}"),
            ("dropout", 0 <= cfg.dropout < 1, "at least 0 and below 1"),
        ]
    check_fields(cfg, rules)
    if new:
        width = cfg.hidden_size
        pretrained.check_memory(width * (2 * cfg.vocab_size + 13 * cfg.num_layers * width))
    columns = {
        "text": "text_column",
        "prompt": "prompt_column completion_column",
        "chat": "messages_column tools_column",
    }
    check_ignored_fields(
        cfg,
        [
            *((names, not shipped, f"where task.data is {cfg.data}") for names in columns.values()),
            *(
                (names, auto or cfg.rows == kind, f"where task.rows is {cfg.rows}")
                for kind, names in columns.items()
            ),
            ("too_long", auto or best_fit(cfg), "unless task.packing is best_fit"),
            (
                "lora_alpha lora_dropout lora_targets merge_lora",
                cfg.lora_rank,
                "unless task.lora_rank is more than 0",
            ),
        ],
    )


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig) -> Path:
    """Split, tokenise and pack the rows, once, into `prepared_folder(cfg)`."""
    check(cfg)
    pretrained.check_unread(cfg)
    settle(cfg)
    longest_text(cfg)
    return cache.prepare_once(cfg, lambda: prepared_folder(cfg), lambda folder: build(cfg, folder))


def settle(cfg: TaskConfig) -> None:
    """Replace auto by what the rows are, before anything depends on it.

    So a run's config.yaml says what they were; processes do not ask each other, as they find the
    same columns.
    """
    cfg.columns, cfg.names = {}, []
    if cfg.data not in SHIPPED:
        cfg.rows, cfg.columns, cfg.names = chats.recognise(cfg, ENDINGS)
    elif cfg.rows == "auto":
        cfg.rows = "prompt" if cfg.data == "docstrings" else "text"
    check(cfg)


def identity(cfg: TaskConfig, folder: Path) -> str:
    """The vocabulary of a new model, which is learnt from the data."""
    return "" if cfg.model_name_or_path else cache.short_digest(folder / "tokenizer.json")


def digest(cfg: TaskConfig, folder: Path) -> str:
    return cache.content_digest(folder)


def datasets(cfg: TaskConfig, folder: Path) -> tuple[Any, Any]:
    """Memory-mapped rows of context_length tokens; validation rows have two more columns."""
    from datasets import load_from_disk

    parts = [load_from_disk(folder / part) for part in ("train", "validation")]
    return parts[0].with_format("torch"), parts[1].with_format("torch")


def collate(rows: list[Batch]) -> Batch:
    """input_ids and labels, int64 (B, context_length): each label is the token after its input.

    Of texts packed by best_fit also position_ids, which begin again with each.
    """
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {n: v if v.is_floating_point() else v.long() for n, v in batch.items()}


def count(batch: Batch) -> int:
    return int((batch["labels"] != IGNORED).sum())


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig, folder: Path) -> torch.nn.Module:
    """A model to start from, or a new Llama, with what `report` and `export` need besides it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer = load_tokenizer(cfg, folder)
    if cfg.model_name_or_path:
        model: Any = pretrained.load_model(AutoModelForCausalLM, cfg)
    else:
        config = LlamaConfig(
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
        model = pretrained.new_model(AutoModelForCausalLM, config, cfg)
    if best_fit(cfg):
        check_apart(model)
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # some say how to sample, but not that they do, and could not be saved
        model.generation_config.do_sample = True
    # Not in the config: Llama never trains the embedding of its pad token, and ours is END_OF_TEXT.
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    if cfg.lora_rank:
        model = add_adapters(model, cfg)
    return model


@torch.no_grad()
def check_apart(model: Any) -> None:
    """Raises ValueError for a model in which a packed text sees the one before it."""
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    rows = [torch.tensor([[*first, 3, 5, 7, 9]]) for first in ([3, 4, 5, 6], [7, 8, 9, 10])]
    try:
        given = {"position_ids": places, "use_cache": False}
        found = [model.eval()(input_ids=row, **given).logits[:, 4:] for row in rows]
        apart = torch.allclose(*found, atol=1e-5)
    except TypeError:  # it takes no positions
        apart = False
    if not apart:
        raise ValueError(
            f"task.model_name_or_path: models of the type {model.config.model_type} cannot keep "
            "packed texts apart; take another model, or texts with --task.packing stream"
        )


def add_adapters(model: torch.nn.Module, cfg: TaskConfig) -> torch.nn.Module:
    """The model with LoRA (Hu and others, 2021): its own weights frozen, small new ones beside."""
    from peft import LoraConfig, get_peft_model

    targets = [name.strip() for name in cfg.lora_targets.split(",")]
    tied = getattr(model.config, "tie_word_embeddings", False)
    if tied and cfg.merge_lora and {"lm_head", "embed_tokens", "wte"} & {*targets}:
        raise ValueError(
            "task.lora_targets: input and output embeddings of this model are the same weights, so "
            "that adapters of one cannot be merged; take it out, or leave out task.merge_lora"
        )
    lora = LoraConfig(
        r=cfg.lora_rank,
        lora_alpha=cfg.lora_alpha or 2 * cfg.lora_rank,
        lora_dropout=cfg.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )
    try:
        with pretrained.quiet():
            return get_peft_model(model, lora, revision=cfg.revision)
    except ValueError as error:
        raise ValueError(f"task.lora_targets: {one_line(error)}") from None


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy of the counted tokens, in nats."""
    # transformers keeps packed texts apart where their positions begin again. It looks for that in
    # every batch, and the CPU waits for the device to answer, unless there is a cache. (Gradient
    # checkpointing switches the cache off.)
    packed = "position_ids" in batch
    inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    logits = model(**inputs, use_cache=not packed).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


# ---- Evaluation and export -----------------------------------------------------------------------


@torch.no_grad()
def eval_sums(model: torch.nn.Module, batch: Batch) -> Batch:
    """The loss, that of a unigram model, and the tokens and bytes that both are summed over."""
    terms = {name: batch[name] for name in ("unigram_loss", "bytes")}
    terms |= {"loss": loss_sum(model, batch), "tokens": batch["labels"] != IGNORED}
    return {name: values.sum() for name, values in terms.items()}


def metrics(sums: Batch) -> dict[str, float]:
    """Losses are in nats a token, so that only bits per byte compare between vocabularies."""
    total = {name: float(value) for name, value in sums.items()}
    loss = total["loss"] / total["tokens"]
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),  # exp overflows above 709
        "bits_per_byte": total["loss"] / math.log(2) / max(total["bytes"], 1),
        "unigram_loss": total["unigram_loss"] / total["tokens"],  # token frequencies, nothing else
    }


@torch.no_grad()
def report(model: Any, sums: Batch, output: Path, cfg: TaskConfig, folder: Path) -> dict[str, str]:
    """Texts of the model: what it makes of the sample prompt, and of prompts held out."""
    tokenizer = load_tokenizer(cfg, folder)
    held_out = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    prompts = {"sample": prompt_of(cfg.sample_prompt, cfg, tokenizer), **held_out}
    longest, shown = getattr(model.config, "max_position_embeddings", None) or 1024, {}
    for name, prompt in prompts.items():
        tokens = torch.tensor([prompt[-longest // 2 :]], device=model.device)
        # Greedy, since sampling would use up random numbers; the penalty keeps it out of loops.
        answer = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=min(longest - tokens.shape[1], 100),
            do_sample=False,
            repetition_penalty=1.2,
        )
        shown[name] = tokenizer.decode(answer[0], skip_special_tokens=True).rstrip()
    return shown


def export(model: Any, output: Path, cfg: TaskConfig, folder: Path) -> None:
    """Files that AutoModelForCausalLM and AutoTokenizer load."""
    with pretrained.quiet():
        load_tokenizer(cfg, folder).save_pretrained(output)
        if cfg.lora_rank and cfg.merge_lora:
            model = model.merge_and_unload()  # the bare model, with adapters in its weights
        model.save_pretrained(output)


# ---- Preparation ---------------------------------------------------------------------------------


def prepared_folder(cfg: TaskConfig) -> Path:
    """Its name depends on all that shapes the data: settings, files and code."""
    names = """rows columns context_length packing too_long vocab_size model_name_or_path
        revision""".split()
    files = [*pretrained.used_files(cfg), *filter(None, [chats.template_file(cfg)])]
    used = cache.hash_input_files(cfg, ENDINGS, *files, shipped=shipped_files(cfg.data))
    settings = [getattr(cfg, name) for name in names]
    shaped_by = [chats, shipped_files, shipped_rows, questions, longest_text]
    shaped_by += [load_tokenizer, build, read, check_text, begin_of, encode, prompt_of]
    shaped_by += [learn_vocabulary, token_bytes, pack_stream, pack_best_fit]
    return cache.cache_folder(cfg, settings, used, shaped_by)


def shipped_files(data: str) -> list[Path] | None:
    """The files of the text that every machine has; None: `data` is a path or a name."""
    if data not in SHIPPED:
        return None
    return sorted(Path(sysconfig.get_path("stdlib")).glob(SHIPPED[data]))


def shipped_rows(cfg: TaskConfig) -> Iterator[Row]:
    """Topics of Python's manual, files of its library, or functions there that say what they do."""
    if cfg.data != "pydoc":
        for file in shipped_files(cfg.data):
            with tokenize.open(file) as source:  # heeds the coding line of what is not UTF-8
                text = source.read()
            if cfg.data == "docstrings":
                yield from ((row, str(file)) for row in questions(text, cfg.rows))
            elif text.strip():
                yield {"text": text}, str(file)
        return
    from pydoc_data.topics import topics

    seen: set[str] = set()
    # Some topics are part of a longer one, as "with" is of "compound".
    for text in sorted(topics.values(), key=len, reverse=True):
        lines = set(text.splitlines())
        if len(lines - seen) > len(lines) / 2:
            yield {"text": text}, "pydoc"
        seen |= lines


def questions(source: str, rows: str) -> Iterator[dict]:
    """What the functions in a source do, by the first lines of their docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            prompt, answer = f"def {node.name}({ast.unparse(node.args)}):", text.splitlines()[0]
            if rows == "prompt":
                yield {"prompt": f'{prompt}\n    """', "completion": f'{answer}"""'}
            else:
                asked = {"role": "user", "content": f"What does this do? {prompt}"}
                yield {"messages": [asked, {"role": "assistant", "content": answer}]}


def longest_text(cfg: TaskConfig) -> int:
    """Tokens that the model sees at once; the config of a model to start from is read for that."""
    if not cfg.model_name_or_path:
        return cfg.context_length
    from transformers import AutoConfig

    most = getattr(pretrained.load(AutoConfig, cfg), "max_position_embeddings", None)
    most = most if isinstance(most, int) and most > 0 else cfg.context_length
    right = best_fit(cfg) or cfg.context_length <= most
    check_fields(cfg, [("context_length", right, f"at most {most}, which the model can see")])
    return min(most, cfg.context_length)


def load_tokenizer(cfg: TaskConfig, folder: Path) -> Any:
    """The tokenizer of the model to start from, or the one in the folder of prepared data."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if cfg.model_name_or_path:
        tokenizer = pretrained.load(AutoTokenizer, cfg)
        lacks = "end-of-text token" if tokenizer.eos_token is None else "tokenizer.json"
        if not tokenizer.is_fast or tokenizer.eos_token is None:
            name = one_line(cfg.model_name_or_path, 100)
            raise ValueError(
                f"task.model_name_or_path: the tokenizer of {name} has no {lacks}; give another "
                "model"
            )
    else:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            bos_token=END_OF_TEXT,
            eos_token=END_OF_TEXT,
            model_max_length=cfg.context_length,
        )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if cfg.chat_template:
        tokenizer.chat_template = chats.read_template(cfg)
    elif cfg.rows == "chat":
        tokenizer.chat_template = tokenizer.chat_template or chats.CHAT_TEMPLATE
    return tokenizer


def build(cfg: TaskConfig, folder: Path) -> dict[str, str]:
    """Save the packed rows of training and validation, with the vocabulary if it is new.

    Gives their digest.
    """
    import numpy as np
    from datasets import Dataset, disable_progress_bars

    train, validation = read(cfg)
    if not cfg.model_name_or_path:
        run_in_child(learn_vocabulary, train, cfg, folder)
    tokenizer = load_tokenizer(cfg, folder)
    parts, seen = {}, set()
    for part, rows in (("train", train), ("validation", validation)):
        encoded = [text for row in rows for text in encode(row, cfg, tokenizer, seen)]
        parts[part] = (
            pack_best_fit(encoded, cfg, part) if best_fit(cfg) else pack_stream(encoded, cfg)
        )
    share = parts["train"]["used"].sum() / parts["train"]["labels"].size
    size = f"{len(parts['train']['labels']):,} rows of {cfg.context_length} tokens to train on"
    print(f"Prepared: {size}, {share:.1%} of them useful, the rest padding", flush=True)

    # Not of the unigram loss: logarithms differ in the last bit from machine to machine.
    content = cache.hash_columns(parts)
    labels = parts["train"]["labels"]
    frequency = 1 + np.bincount(labels[labels != IGNORED], minlength=len(tokenizer))
    nats, sizes = -np.log(frequency / frequency.sum()), token_bytes(tokenizer)
    labels = parts["validation"]["labels"]
    for name, values in (("bytes", sizes), ("unigram_loss", nats)):
        parts["validation"][name] = np.where(labels == IGNORED, 0, values[labels]).sum(1)
    disable_progress_bars()
    for part, columns in parts.items():
        del columns["used"]
        Dataset.from_dict(columns).save_to_disk(folder / part)
    prompts = {}
    for number, (row, _) in enumerate(validation[: 0 if cfg.rows == "text" else 2], 1):
        prompts[f"held out {number}"] = prompt_of(row, cfg, tokenizer)
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    return {"content": content}


# ---- Preparation: rows ---------------------------------------------------------------------------


def read(cfg: TaskConfig) -> tuple[list[Row], list[Row]]:
    """The rows to train and to evaluate on, all of them such that they can be encoded."""
    shipped = shipped_rows(cfg) if cfg.data in SHIPPED else None
    train, validation = sources.read_splits(cfg, cfg.columns, ENDINGS, shipped, chats.OPTIONAL)
    check_row = chats.check_chat if cfg.rows == "chat" else check_text
    field = "validation_data" if cfg.validation_data else "validation_split"
    train = sources.keep_valid_rows(train, cfg, "data", check_row)
    validation = validation and sources.keep_valid_rows(validation, cfg, field, check_row)
    if not train or validation == []:
        empty = field if train else "data"
        raise ValueError(f"task.{empty}: there is no text in {one_line(getattr(cfg, empty), 100)}")
    tools = sum("tools" in row for row, _ in [*train, *(validation or [])])
    if cfg.tools_column not in ("", "tools") and not tools:
        name = one_line(cfg.tools_column, 60)
        raise ValueError(f"task.tools_column: no row has tools in a column {name}")
    name = one_line(cfg.data, 100)
    what = f"{len(train) + len(validation or []):,} {CALLED[cfg.rows]} of {name}"
    what += f", {tools:,} with tools" * bool(tools)
    print(f"Preparing data: {what}{chats.taken(cfg.columns, cfg.names)}", flush=True)
    if validation is not None:
        held = [[json.dumps(row, default=str) for row, _ in part] for part in (train, validation)]
        sources.warn_of_overlap(*held)
        return train, validation
    if len(train) == 1 and cfg.rows == "text":
        row, place = train[0]
        cut = int(len(row["text"]) * (1 - cfg.validation_fraction))
        return [({"text": row["text"][:cut]}, place)], [({"text": row["text"][cut:]}, place)]
    if len(train) == 1:
        raise ValueError(f"task.data: {name} has one row; add rows, to hold one out")
    if cfg.rows == "text":
        key = lambda row: row[0]["text"]  # noqa: E731
    else:
        key = lambda row: json.dumps(row[0], default=str)  # noqa: E731  Parquet has dates
    train, validation = sources.hold_out(train, cfg.validation_fraction, key)
    if not validation:
        raise ValueError(f"task.data: all rows of {name} are equal; add others, to hold some out")
    return train, validation


def check_text(row: dict) -> None:
    """Raises ValueError for a row without text, or without a completion."""
    for role, value in row.items():
        if value is None or (role != "prompt" and not str(value).strip()):
            raise sources.IncompleteRow(f"the {role} is empty")
        if not isinstance(value, str):
            raise ValueError(f"the {role} is {one_line(repr(value), 60)} but must be text")


def begin_of(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: one token or none."""
    return [i for i in tokenizer("").input_ids[:1] if i == tokenizer.bos_token_id]


def encode(row: Row, cfg: TaskConfig, tokenizer: Any, seen: set) -> list[tuple[array, array]]:
    """The tokens of a row's texts, and for each token whether it is to be learnt: 1 or 0."""
    (values, place), end = row, tokenizer.eos_token_id
    plain = {"add_special_tokens": False, "verbose": False}
    if cfg.rows == "text":
        tokens = array("i", begin_of(tokenizer) or [end])
        for cut in range(0, len(values["text"]), 1_000_000):  # bounds the memory of one call
            piece = values["text"][cut : cut + 1_000_000]
            # A text that spells a special token must not end there.
            tokens.extend(tokenizer(piece, split_special_tokens=True, **plain).input_ids)
        tokens.append(end)
        return [(tokens, array("b", [1]) * len(tokens))]
    begin, close = [], []
    if cfg.rows == "prompt":
        begin, close = begin_of(tokenizer), [end]
        text = values["prompt"] + values["completion"]
        texts = [(text, [(len(values["prompt"]), len(text))])]
    else:
        texts = chats.render(values, place, tokenizer, seen)
    found = []
    for text, answers in texts:
        encoded = tokenizer(text, return_offsets_mapping=True, **plain)
        learnt = [
            any(last > start and first < stop for start, stop in answers)
            for first, last in encoded["offset_mapping"]
        ]
        learnt = [False] * len(begin) + learnt + [True] * len(close)
        found.append((array("i", begin + encoded["input_ids"] + close), array("b", learnt)))
    return found


def prompt_of(row: dict | str, cfg: TaskConfig, tokenizer: Any) -> list[int]:
    """The tokens after which the model is to answer: of a row, or of a text or message."""
    begin, text = begin_of(tokenizer), row
    if cfg.rows == "text":
        begin = begin or [tokenizer.eos_token_id]
    elif cfg.rows == "prompt":
        text = row if isinstance(row, str) else row["prompt"]
    else:
        begin, asked, tools = [], [{"role": "user", "content": row}], []
        if not isinstance(row, str):
            turns = [i for i, m in enumerate(row["messages"]) if i and m["role"] == "assistant"]
            asked, tools = row["messages"][: turns[0]], row.get("tools", [])
        place = "task.sample_prompt"
        text = chats.chat_text(asked, tools, place, tokenizer, add_generation_prompt=True)
    tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return [*begin, *tokens] or [tokenizer.eos_token_id]


# ---- Preparation: tokens -------------------------------------------------------------------------


def learn_vocabulary(rows: list[Row], cfg: TaskConfig, folder: Path) -> None:
    """Save a byte-level BPE of the training rows: no text is unknown to it."""
    from tokenizers import ByteLevelBPETokenizer

    def texts() -> Iterator[str]:
        for row, _ in rows:
            yield from chats.texts(row) if cfg.rows == "chat" else row.values()

    tokenizer = ByteLevelBPETokenizer()
    some = sources.break_long_words(texts())
    tokenizer.train_from_iterator(some, cfg.vocab_size - 1, show_progress=False)
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(folder / "tokenizer.json"))


def token_bytes(tokenizer: Any) -> Any:
    """int array (vocabulary,): bytes of text that a token stands for, none for special ones."""
    import numpy as np

    sizes = np.zeros(len(tokenizer), np.int64)
    byte_level = "ByteLevel" in tokenizer.backend_tokenizer.to_str().partition('"decoder"')[2][:500]
    for token, i in tokenizer.get_vocab().items():
        if byte_level:
            sizes[i] = len(token)  # a character stands for a byte
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):
            sizes[i] = 1
        else:
            sizes[i] = len(token.replace("▁", " ").encode())  # of SentencePiece, for a space
    sizes[tokenizer.all_special_ids] = 0
    return sizes


def pack_stream(encoded: list[tuple[array, array]], cfg: TaskConfig) -> dict[str, Any]:
    """Columns of rows that are filled with one text after the other; only the last has padding."""
    import numpy as np

    length, tokens = cfg.context_length, array("i")
    for row, _ in encoded:  # where texts begin with the end of another, one such token is enough
        tokens.extend(row[1:] if tokens and row[0] == tokens[-1] else row)
    if len(tokens) <= length:
        problem = f"{len(tokens)} tokens to train or evaluate on, which do not fill a row"
        name = one_line(cfg.data, 100)
        raise ValueError(
            f"task.data: {name} has {problem} of {length + 1}; add text, or lower "
            "task.context_length"
        )
    tokens.extend([IGNORED] * ((1 - len(tokens)) % length))
    flat = np.array(tokens)
    inputs, labels = flat[:-1].reshape(-1, length), flat[1:].reshape(-1, length)
    return {"input_ids": inputs.clip(0), "labels": labels, "used": (labels != IGNORED).sum(1)}


def pack_best_fit(encoded: list[tuple], cfg: TaskConfig, part: str) -> dict[str, Any]:
    """Columns of rows that hold whole texts, each put where the least room is left for it.

    Best-fit decreasing: longest first. What is too long is split or cut; pieces of which nothing is
    to be learnt are left out. Both are counted and said.
    """
    import numpy as np

    length, longest, pieces, empty, long = cfg.context_length, longest_text(cfg), [], 0, 0
    for tokens, learnt in encoded:
        long += len(tokens) > longest + 1
        starts = range(0, max(len(tokens) - 1, 1), longest)
        for start in starts[: 1 if cfg.too_long == "cut" else None]:
            piece = slice(start, start + longest + 1)  # a last token is only a label
            if any(learnt[piece][1:]):
                pieces.append((tokens[piece], learnt[piece]))
            else:
                empty += 1
    if long or empty:
        print(
            f"Prepared {part}: {long:,} of {len(encoded):,} texts are longer than {longest} tokens "
            f"(the most that a row or the model holds) and were {cfg.too_long}"
            + f"; {empty:,} pieces without anything to learn were left out"
            * bool(empty),
            flush=True,
        )
    if not pieces:
        raise ValueError(
            f"task.context_length: no answer of {part} begins within {longest} tokens; raise it, "
            "or give --task.too_long split"
        )
    pieces.sort(key=lambda piece: -len(piece[0]))  # stable: the same on every machine
    bins: list[list[tuple]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set where a bin with room for r tokens is
    for piece in pieces:
        need = len(piece[0]) - 1
        fitting = rooms >> need
        if fitting:
            room = need + (fitting & -fitting).bit_length() - 1
            place = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, place = length, len(bins)
            bins.append([])
        bins[place].append(piece)
        by_room.setdefault(room - need, []).append(place)
        rooms |= 1 << (room - need)

    columns = {
        name: np.zeros((len(bins), length), np.int32) for name in ("input_ids", "position_ids")
    }
    columns["labels"] = np.full((len(bins), length), IGNORED, np.int32)
    used = np.zeros(len(bins), np.int64)
    for place, members in enumerate(bins):
        for tokens, learnt in members:
            row, size = np.array(tokens), len(tokens) - 1
            where = (place, slice(used[place], used[place] + size))
            columns["input_ids"][where] = row[:-1]
            columns["position_ids"][where] = range(size)
            columns["labels"][where] = np.where(np.array(learnt)[1:], row[1:], IGNORED)
            used[place] += size
    return {**columns, "used": used}
