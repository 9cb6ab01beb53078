"""Texts for a language model, read from shards and tokenised while it trains: see streaming.py.

The texts of a shard become one file of token ids, one text after the other, once for all processes
of a machine, when the order of the run comes near the shard. The files lie in the cache of shards.

The order needs the rows of all shards before that. They are estimated: from the bytes of a shard
and the tokens that a byte has in a sample. A shard with more rows than estimated leaves some out,
one with fewer gives some twice, always the same ones.
"""

import copy
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from samestep.base.console import one_line
from samestep.base.fields import check_fields, check_ignored_fields
from samestep.base.files import replace_text
from samestep.base.workers import count_cores
from samestep.data import cache, demo_data
from samestep.models import pretrained
from samestep.streaming import shards, streaming
from samestep.streaming.shards import Reader, Shard
from samestep.streaming.text_streams import take_sample
from samestep.text import corpus, row_formats, tokenizing
from samestep.text.token_rows import row_of_stream
from samestep.text.unit_files import FACTS, read_facts

SHARDS, TEXTS = 4, 500  # of the sample: shards, and texts of each
THREADS = 16  # that tokenise a shard: more would wait for Python, which takes a fifth of the time
BATCH = 100_000  # characters that a thread tokenises at a time, and of a text in the sample


def check_token_streaming(cfg: Any) -> None:
    """Raises ValueError for data that is not streamed, and for rows that are not plain texts.

    Makes `rows` auto text.
    """
    streaming.check_streaming(cfg, demo_data.TEXTS)
    if not cfg.streaming:
        return
    where = "while task.streaming is true"
    rules = [
        ("rows", cfg.rows in ("auto", "text"), f"text {where}"),
        ("packing", cfg.packing != "best_fit", f"stream {where}"),
    ]
    check_fields(cfg, rules)
    check_ignored_fields(cfg, [("file_extensions", False, where)])
    cfg.rows = "text"


# ---- Index ---------------------------------------------------------------------------------------


def prepare_index(cfg: Any) -> Path:
    """The folder of the index, with the vocabulary of a new model, the validation rows as
    token_rows.TokenRows reads them, and tokens.json: the shards with their estimated rows."""
    corpus.max_text_length(cfg, False)  # raises ValueError
    vocabulary = tokenizing.vocabulary_path(cfg)

    def build(folder: Path, names: set[str]) -> list[Path]:
        texts = ShardTexts(folder, "train", cfg)
        if vocabulary:
            replace_text(folder / tokenizing.FILE, vocabulary.read_text(encoding="utf-8"))
        elif not cfg.model_name_or_path:
            print("Preparing data: learning a vocabulary from a sample", flush=True)
            ends = [corpus.END_OF_TEXT]
            shards_of = (texts.walk(number) for number in texts.by_hash())
            # A list, since errors of a child have another form.
            sample = [*take_sample([text] for some in shards_of for text in some)]
            tokenizing.learn_vocabulary(sample, cfg.vocab_size, folder, last=ends)
        encoder = make_encoder(cfg, folder)
        facts = {"length": cfg.context_length, "dtype": encoder.dtype}
        facts |= {"packed": False, "most_texts": 0, **estimate_rows(texts, encoder)}
        facts["parts"] = {"validation": [write_validation(cfg, folder, encoder, facts)]}
        code = json.dumps([encoder.tokenizer.backend_tokenizer.to_str(), *encoder[1:]])
        facts["tokenizer"] = hashlib.sha256(code.encode()).hexdigest()
        np.save(folder / "bytes.npy", tokenizing.token_bytes(encoder.tokenizer))
        (folder / "prompts.json").write_text("{}", encoding="utf-8")
        (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        return [folder / FACTS, folder / "validation.tokens"]

    used = [*pretrained.used_files(cfg), *([vocabulary] if vocabulary else [])]
    settings = [cfg.context_length, cfg.vocab_size, cfg.model_name_or_path]
    settings += [pretrained.commit_of(cfg), *cache.hash_files(used, cfg).items()]
    return streaming.prepare(cfg, columns_of(cfg), [], settings, None, build)


def columns_of(cfg: Any) -> dict:
    return {"text": cfg.text_column}


class Encoder(NamedTuple):
    """How texts become tokens: as those of `stream` packing in corpus.RowMaker."""

    tokenizer: Any
    start: list[int]  # tokens before the first text
    begin: list[int]  # before each
    end: list[int]  # after each
    dtype: str


def make_encoder(cfg: Any, folder: Path) -> Encoder:
    # Its threads do not survive a fork; those of `tokenize` need not.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Calls with other options change a tokenizer while others use it: this copy gets none.
    tokenizer = copy.deepcopy(corpus.load_tokenizer(cfg, folder))
    end = [tokenizer.eos_token_id]
    start = tokenizing.begin_tokens(tokenizer) or end
    tokenizing.tokenize_texts([""], tokenizer)
    dtype = "<u2" if len(tokenizer) < 2**16 else "<u4"
    shared = start == end
    return Encoder(tokenizer, start * shared, start * (not shared), end, dtype)


def tokenize(texts: Iterable[str], encoder: Encoder) -> Iterator[np.ndarray]:
    """Token ids of texts, one after the other, in arrays of a few MB; on all cores."""

    def encode(some: list[str]) -> np.ndarray:
        found = tokenizing.tokenize_texts(some, encoder.tokenizer)
        ids = [np.array([*encoder.begin, *each, *encoder.end], encoder.dtype) for each in found]
        return np.concatenate(ids)

    texts, number = iter(texts), min(count_cores(), THREADS)
    yield np.array(encoder.start, encoder.dtype)
    with ThreadPool(number) as pool:
        while batches := [some for _ in range(number) if (some := [*take(texts)])]:
            yield from pool.map(encode, batches)


def take(texts: Iterator[str]) -> Iterator[str]:
    """The next texts, of BATCH characters or more."""
    size = 0
    while size < BATCH and (text := next(texts, None)) is not None:
        size += len(text)
        yield text


def estimate_rows(texts: "ShardTexts", encoder: Encoder) -> dict[str, Any]:
    """Writes tokens.json. Returns what the estimate rests on, and saves the unigram losses.

    Raises ValueError for shards that hold less than a row.
    """
    facts = json.loads((texts.folder / "train.json").read_text(encoding="utf-8"))
    length = texts.cfg.context_length
    counts, found = np.ones(len(encoder.tokenizer), np.int64), []
    chosen = [number for number in texts.by_hash() if texts.rows[number]][:SHARDS]
    for number in chosen:
        places = range(0, int(texts.rows[number]), -(-int(texts.rows[number]) // TEXTS))
        some = [*texts.walk(number, places.step)]
        cut = [text[:BATCH] for text in some]
        ids = np.concatenate([*tokenize(cut, encoder)])[len(encoder.start) :]
        counts += np.bincount(ids, minlength=len(counts))
        size = len(ids) * sum(map(len, some)) // max(sum(map(len, cut)), 1)
        found.append((size * int(texts.rows[number]) // len(places), facts["bytes"][number]))
    tokens, size = (sum(each) for each in zip(*found, strict=True))
    if tokens < len(chosen) * length:
        raise ValueError(
            f"task.context_length: a shard of {one_line(texts.cfg.data, 100)} has about "
            f"{tokens // len(chosen):,} tokens, which do not fill a row of {length:,}; lower "
            "it, or write larger shards"
        )
    held = np.where(texts.rows > 0, texts.bytes, 0).tolist()
    rows = [-(-each * tokens // (size * length)) for each in held]
    width = length * np.dtype(encoder.dtype).itemsize
    facts |= {"used": sum(rows), "rows": rows, "bytes": [each * width for each in rows]}
    (texts.folder / "tokens.json").write_text(json.dumps(facts), encoding="utf-8")
    np.save(texts.folder / "unigram_loss.npy", -np.log(counts / counts.sum()))
    off = [own * size / (each * tokens) - 1 for own, each in found]
    print(
        f"Preparing data: about {sum(rows):,} rows of {length:,} tokens to train on, an "
        f"estimate, from which {len(chosen)} shards differ by {min(off):+.1%} to {max(off):+.1%}; "
        "a shard with more rows leaves some out, one with fewer gives some twice",
        flush=True,
    )
    return {"tokens": tokens, "bytes": size, "texts": sum(int(texts.rows[n]) for n in chosen)}


def write_validation(cfg: Any, folder: Path, encoder: Encoder, facts: dict) -> list:
    """Writes the tokens of the validation rows: of given shards all; of those that are held out as
    many as the fields allow, of texts that lie evenly in them.

    Returns the name, rows and files, as TokenRows reads them. Raises ValueError for too few.
    """
    texts = ShardTexts(folder, "validation", cfg)
    is_given, total = texts.field == "validation_data", int(texts.ends[-1])
    wanted = 1 + cfg.context_length * cfg.validation_rows
    step = 1 if is_given else max(1, total * facts["tokens"] // facts["texts"] // wanted)

    size, target = 0, folder / "validation.tokens"
    with open(target, "wb") as file:
        walks = (texts.walk(number, step) for number in range(len(texts.shards)))
        for ids in tokenize(chain.from_iterable(walks), encoder):
            size += len(ids)
            file.write(ids.tobytes())
            if size >= wanted and not is_given:
                break
    rows = -(-(size - 1) // cfg.context_length)
    rows = rows if is_given else min(rows, cfg.validation_rows)
    if size <= cfg.context_length:
        raise ValueError(
            f"task.{texts.field}: {size:,} tokens to evaluate on do not fill a row of "
            f"{cfg.context_length + 1:,}; lower task.context_length, or write larger shards"
        )
    print(
        f"Preparing data: {rows:,} rows of {cfg.context_length:,} tokens to evaluate on", flush=True
    )
    return ["validation", rows, [[target.name, size]]]


# ---- Rows ----------------------------------------------------------------------------------------


class ShardTexts(streaming.ShardPart):
    """The texts of a part."""

    def __init__(self, folder: Path, part: str, cfg: Any):
        super().__init__(folder, part, cfg, columns_of(cfg))

    def complete(self, values: dict) -> str:
        row_formats.check_text(values)
        return values["text"]

    def walk(self, number: int, step: int = 1) -> Iterator[str]:
        """The texts of a shard, or each step-th, without those that may be left out."""
        rows = shards.rows_of(self.shards[number], self.data, self.columns)
        for place, read in enumerate(rows):
            if place % step == 0 and (text := self.read_row(read, number, place)) is not None:
                yield text


class StreamedTokens(streaming.ShardRows):
    """Training rows: those of token_rows.TokenRows, shard by shard."""

    def __init__(self, folder: Path, cfg: Any):
        self.facts = read_facts(folder)
        super().__init__(folder, "tokens", cfg, columns_of(cfg))

    def make_cache(self) -> "TokenCache":
        return TokenCache(self.folder, self.cfg, self.facts["tokenizer"])

    def make_reader(self, number: int, file: BinaryIO) -> Reader:
        """Rows of a tokenised shard, memory-mapped: as many as the order counts."""
        length, rows = self.facts["length"], int(self.rows[number])
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        tokens = np.frombuffer(content, self.facts["dtype"])
        found = -(-(len(tokens) - 1) // length)

        def read(row: int) -> dict[str, np.ndarray]:
            start = row * found // rows * length
            return row_of_stream(tokens[start : start + length + 1], length)

        return read


class TokenCache(streaming.ShardCache):
    """Shards as files of token ids: copies that are made of the texts of `ShardTexts`."""

    def __init__(self, folder: Path, cfg: Any, tokenizer: str):
        self.texts, self.tokenizer = ShardTexts(folder, "train", cfg), tokenizer
        super().__init__(cfg, self.texts.data, self.texts.columns)
        self.numbers = {shard.name: number for number, shard in enumerate(self.texts.shards)}
        self.encoder = make_encoder(cfg, folder)

    def path(self, shard: Shard) -> Path:
        """Of the tokens, which other lengths of rows share."""
        name = f"{super().path(shard).stem} {self.tokenizer} {self.texts.cfg.incomplete_rows}"
        return self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.tokens"

    def write(self, shard: Shard, target: Path) -> None:
        with open(target, "wb") as file:
            for ids in tokenize(self.texts.walk(self.numbers[shard.name]), self.encoder):
                file.write(ids.tobytes())
            written = file.tell()
        if written <= np.dtype(self.encoder.dtype).itemsize:  # of a token, no label
            name = one_line(shard.path, 150)
            raise ValueError(f"cannot read {name}: it has no text; leave it out")
