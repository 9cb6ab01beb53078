"""What is trained: a small Llama that learns to continue text. Its data, model, loss and metrics.

train.py calls the names below and nothing else. Rewrite this file for a task of your own: around a
plain nn.Module and a Dataset it takes about 60 lines and nothing from transformers.

TaskConfig               A dataclass: each field is a flag --task.FIELD, its docstring the help.
prepare_data(cfg)        What has to happen once: download, tokenise. All processes call it at the
                         same time, before they can talk to each other. Settings and data that
                         cannot work should end here, in a ValueError of one line: what is wrong,
                         where, what to write instead.
datasets(cfg)            (train, validation), map-style: len(), [i] and, where that is faster,
                         __getitems__([i, j, ...]). Row i is the same in every process and run.
collate(rows)            A batch of these B rows: a dict of CPU tensors, B their first dimension.
count(batch)             int: its loss terms, from the labels alone. UNIT names them: throughput is
                         logged as UNIT_per_second; without it, as samples_per_second.
build_model(cfg)         nn.Module with new weights, on the CPU; torch is already seeded.
loss_sum(model, batch)   Scalar float32: the sum, not the mean, of the loss over count(batch) terms;
                         train.py divides by the count of the whole step. Call model(...) itself,
                         which accelerate has wrapped; the batch is on its device.
eval_sums(model, batch)  dict of tensors of any shape, added up over all batches in float64.
metrics(sums)            dict of floats from these totals: "loss", logged as eval_loss, and others.
export(model, folder)    Saves the trained model, unwrapped and in eval mode, in the folder, which
                         exists. Returns a dict of texts worth showing to people.
"""

import hashlib
import json
import math
import shutil
import sysconfig
import tokenize
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

# transformers takes 4 s to import and datasets 1 s: both wait for the function that needs them.

Batch = dict[str, torch.Tensor]
END_OF_TEXT = "<|endoftext|>"
IGNORED = -100  # the label that cross entropy leaves out
UNIT = "tokens"


# ---- Config --------------------------------------------------------------------------------------


@dataclass
class TaskConfig:
    data: str = "pydoc"
    """Text to learn: pydoc (the manual inside Python, 0.4 MB), stdlib (Python's own source, 5 MB)
    or the path of a .txt, .jsonl (field text) or .parquet (column text) file or a folder of them.
    Each topic, source file, .txt file or row is one document."""
    validation_fraction: float = 0.1
    """Share of the documents held out for evaluation; of a single document, its end."""
    context_length: int = 64
    """Tokens that the model sees at once."""
    vocab_size: int = 1024
    """Size of the byte-level BPE vocabulary, which is learnt from the training documents."""
    hidden_size: int = 128
    """Width of the model."""
    num_layers: int = 3
    """Transformer layers."""
    num_heads: int = 4
    """Attention heads in a layer."""
    dropout: float = 0.0
    """Dropout on the attention weights, the only one that Llama has."""
    sample_prompt: str = "When a function is called,"
    """Beginning of the text that the trained model continues."""
    cache_dir: str = ".cache/data"
    """Where prepared data is kept, one folder for each combination of data and settings."""


def check(cfg: TaskConfig) -> None:
    """Refuse settings that cannot work before anything is read."""
    unit = 2 * max(1, cfg.num_heads)  # rotary embeddings turn the dimensions of a head in pairs
    nearest = max(1, round(cfg.hidden_size / unit)) * unit
    for name, right, wanted in [
        ("validation_fraction", 0 < cfg.validation_fraction < 1, "between 0 and 1"),
        ("context_length", cfg.context_length >= 2, "at least 2"),
        ("vocab_size", cfg.vocab_size >= 257, "at least 257, for 256 bytes and end of text"),
        ("num_layers", cfg.num_layers >= 1, "at least 1"),
        ("num_heads", cfg.num_heads >= 1, "at least 1"),
        ("hidden_size", cfg.hidden_size == nearest, f"a multiple of 2 x num_heads, say {nearest}"),
        ("dropout", 0 <= cfg.dropout < 1, "at least 0 and below 1"),
    ]:
        if not right:
            raise ValueError(f"task.{name} is {getattr(cfg, name)} but must be {wanted}")


# ---- Data ----------------------------------------------------------------------------------------


def prepare_data(cfg: TaskConfig) -> None:
    """Split, tokenise and pack the text, once, into `prepared_folder(cfg)`."""
    check(cfg)
    folder = prepared_folder(cfg)
    if folder.exists():
        return
    from filelock import FileLock

    unfinished = folder.with_suffix(".unfinished")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.exists():  # else another process was first
                shutil.rmtree(unfinished, ignore_errors=True)  # left by one that was killed
                build(cfg, unfinished)
                unfinished.rename(folder)
    except OSError as error:
        raise ValueError(f"task.cache_dir: cannot write {folder}: {error}") from None


def datasets(cfg: TaskConfig) -> tuple[Any, Any]:
    """Memory-mapped rows of context_length + 1 tokens; validation rows have two more columns."""
    from datasets import load_from_disk

    parts = [load_from_disk(prepared_folder(cfg) / part) for part in ("train", "validation")]
    return parts[0].with_format("torch"), parts[1].with_format("torch")


def collate(rows: list[Batch]) -> Batch:
    """input_ids and labels, int64 (B, context_length): each label is the token after its input."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    tokens = batch.pop("tokens")
    batch["input_ids"] = tokens[:, :-1].clamp(min=0)  # padding is IGNORED too, which is no token
    batch["labels"] = tokens[:, 1:].contiguous()
    return batch


def count(batch: Batch) -> int:
    return int((batch["labels"] != IGNORED).sum())


# ---- Model and loss ------------------------------------------------------------------------------


def build_model(cfg: TaskConfig) -> torch.nn.Module:
    """A Llama, with what `export` needs besides its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(prepared_folder(cfg) / "tokenizer.json"),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=cfg.context_length,
    )
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
    model: Any = LlamaForCausalLM(config)
    # Not in the config: Llama never trains the embedding of its pad token, and ours is END_OF_TEXT.
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.tokenizer, model.sample_prompt = tokenizer, cfg.sample_prompt
    return model


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy of the counted tokens, in nats."""
    # Without a cache, transformers searches each batch for packed sequences, and the CPU waits for
    # the device to answer. (Gradient checkpointing switches the cache off.)
    logits = model(input_ids=batch["input_ids"], use_cache=True).logits.float()
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
        "bits_per_byte": total["loss"] / math.log(2) / total["bytes"],
        "unigram_loss": total["unigram_loss"] / total["tokens"],  # token frequencies, nothing else
    }


def export(model: Any, folder: Path) -> dict[str, str]:
    """Files that AutoModelForCausalLM and AutoTokenizer load, and a sample of the model's text."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    length = model.config.max_position_embeddings
    prompt = model.tokenizer(END_OF_TEXT + model.sample_prompt, return_tensors="pt").input_ids
    prompt = prompt[:, : length // 2].to(model.device)
    # Greedy, since sampling would use up random numbers; the penalty keeps it out of loops.
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_length=length, repetition_penalty=1.2
    )
    return {"sample": model.tokenizer.decode(tokens[0], skip_special_tokens=True).rstrip()}


# ---- Preparation ---------------------------------------------------------------------------------


def prepared_folder(cfg: TaskConfig) -> Path:
    """Its name stands for all that shapes the data: settings, files and the code from here on."""
    settings = [cfg.data, cfg.validation_fraction, cfg.context_length, cfg.vocab_size]
    files = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in sources(cfg.data)]
    code = Path(__file__).read_text(encoding="utf-8").partition("# ---- Preparation")[2]
    fingerprint = hashlib.sha256(json.dumps([settings, files, code]).encode()).hexdigest()
    return Path(cfg.cache_dir).expanduser() / fingerprint[:16]


def sources(data: str) -> list[Path]:
    """The files that hold the text."""
    shipped = {"pydoc": "pydoc_data/topics.py", "stdlib": "*.py"}
    if data in shipped:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob(shipped[data]))
    else:
        path = Path(data).expanduser()
        files = [file for file in sorted(path.rglob("*")) or [path] if file.is_file()]
        files = [file for file in files if file.suffix.lower() in (".txt", ".jsonl", ".parquet")]
    if not files:
        choices = "pydoc, stdlib or PATH, a .txt, .jsonl or .parquet file or a folder of them"
        raise ValueError(f"task.data: nothing to read at {data}; pass --task.data {choices}")
    return files


def documents_in(file: Path, data: str) -> Iterator[str]:
    """The documents of one file. What is wrong with it becomes one line that says where."""
    place = str(file)
    try:
        if data == "pydoc":
            yield from distinct_topics()
        elif data == "stdlib":
            with tokenize.open(file) as source:  # heeds the coding line of what is not UTF-8
                yield source.read()
        elif file.suffix.lower() == ".txt":
            yield file.read_bytes().decode()
        elif file.suffix.lower() == ".jsonl":
            for number, line in enumerate(file.read_bytes().splitlines(), 1):
                place = f"{file}, line {number}"
                if line.strip():
                    yield text_of(json.loads(line))
        else:
            from pyarrow.parquet import read_table

            table = read_table(file)
            if "text" not in table.column_names:
                raise ValueError(f"no column text among {', '.join(table.column_names)}")
            yield from map(text_of, table.select(["text"]).to_pylist())
    except (OSError, ValueError) as error:  # a ValueError is: not UTF-8, not JSON, not Parquet
        reason = " ".join(str(error).split())
        raise ValueError(f"task.data: cannot read {place}: {reason}") from None


def text_of(row: Any) -> str:
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError(f"no text, a string, in {row!r:.80}")
    # JSON can spell half of a surrogate pair, which is no character.
    return row["text"].encode(errors="replace").decode()


def distinct_topics() -> Iterator[str]:
    """pydoc's topics but for those that are part of a longer one, as "with" is of "compound"."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for text in sorted(topics.values(), key=len, reverse=True):
        lines = set(text.splitlines())
        if len(lines - seen) > len(lines) / 2:
            yield text
        seen |= lines


def hold_out(documents: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Split by a hash of the text, so that order and machine do not matter; equal texts are one."""
    ranked = sorted(set(documents), key=lambda text: hashlib.sha256(text.encode()).digest())
    if len(ranked) == 1:
        cut = int(len(ranked[0]) * (1 - fraction))
        return [ranked[0][:cut]], [ranked[0][cut:]]
    held_out = min(max(1, round(fraction * len(ranked))), len(ranked) - 1)
    return ranked[held_out:], ranked[:held_out]


def build(cfg: TaskConfig, folder: Path) -> None:
    """Learn the vocabulary and save it beside the packed rows of training and validation."""
    import numpy as np
    from datasets import Dataset, disable_progress_bars
    from tokenizers import ByteLevelBPETokenizer

    documents = [t for f in sources(cfg.data) for t in documents_in(f, cfg.data) if t.strip()]
    if not documents:
        raise ValueError(f"task.data: there is no text in {cfg.data}")
    print(f"Preparing data: {len(documents):,} documents of {cfg.data}", flush=True)
    train, validation = hold_out(documents, cfg.validation_fraction)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(train, cfg.vocab_size - 1, show_progress=False)
    end = tokenizer.get_vocab_size()  # END_OF_TEXT, added last, so that no text can contain it

    def pack(documents: list[str]) -> np.ndarray:
        """Rows of context_length + 1 tokens; the last token of one is the first of the next."""
        length, tokens = cfg.context_length, array("i", [end])
        for text in documents:
            for cut in range(0, len(text), 1_000_000):  # bounds the memory that encoding takes
                tokens.extend(tokenizer.encode(text[cut : cut + 1_000_000]).ids)
            tokens.append(end)
        if len(tokens) <= length:
            problem = f"{len(tokens)} tokens to train or evaluate on, which do not fill a row"
            raise ValueError(f"task.data: {cfg.data} has {problem} of {length + 1}: add text")
        tokens.extend([IGNORED] * ((1 - len(tokens)) % length))
        return np.lib.stride_tricks.sliding_window_view(np.array(tokens), length + 1)[::length]

    train_rows, validation_rows = pack(train), pack(validation)
    labels = train_rows[:, 1:]
    frequency = 1 + np.bincount(labels[labels != IGNORED], minlength=end + 1)
    nats = -np.log(frequency / frequency.sum())
    sizes = np.array([len(tokenizer.id_to_token(id)) for id in range(end)] + [0])  # bytes
    labels = validation_rows[:, 1:]
    columns = {
        "tokens": validation_rows,
        "bytes": np.where(labels == IGNORED, 0, sizes[labels]).sum(1),
        "unigram_loss": np.where(labels == IGNORED, 0, nats[labels]).sum(1),
    }
    disable_progress_bars()
    Dataset.from_dict({"tokens": train_rows}).save_to_disk(folder / "train")
    Dataset.from_dict(columns).save_to_disk(folder / "validation")
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(folder / "tokenizer.json"))
