"""Text as tokens: tokenizers to load or to learn, loss masks, the bytes that a token stands for.

A tokenised text is two arrays of equal length: its token ids, and its loss mask, which is 1 for a
token that is a loss term and 0 for context.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from samestep.base.console import one_line
from samestep.base.fields import check_fields, local_path
from samestep.base.files import replace_text
from samestep.base.workers import run_in_child
from samestep.data.columns import ListColumn
from samestep.data.sources import break_long_words
from samestep.models import pretrained
from samestep.models.pretrained import ModelConfig

# transformers takes 4 s to import: it waits for the function that needs it.

Tokens = tuple[np.ndarray, np.ndarray]  # ids, loss mask: int32 (T,), uint8 (T,)
FILE = "tokenizer.json"
SAMPLE = 50_000_000  # bytes of text that a tokenizer is trained on
END_OF_TEXT = "<|endoftext|>"  # of a new language model
AT_THE_END = {"last": [END_OF_TEXT]}
ENDS = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
NEEDS = {  # attributes of a tokenizer, and their names in messages
    "eos_token": "end-of-text token",
    "pad_token": "pad token",
    "is_fast": FILE,
}
SHORT = 5_000  # characters of a text that are tokenised at once: long ones take twice the time
SPACED = re.compile(r"[^\W_](?= [^\W_])")  # where all tokenizers separate, if they separate words


# ---- Models to start from ------------------------------------------------------------------------


def config_of(cfg: ModelConfig) -> Any:
    """The config of the model to start from; None: a new model."""
    if not cfg.model_name_or_path:
        return None
    from transformers import AutoConfig

    return pretrained.load(AutoConfig, cfg)


def most_tokens(cfg: ModelConfig) -> int:
    """Tokens that the model to start from sees at once; 2**30 where there is no limit."""
    limit = getattr(config_of(cfg), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else 2**30


def check_lengths(cfg: ModelConfig, *names: str) -> None:
    """Raises ValueError for a length that is more than the model to start from can see."""
    most = most_tokens(cfg)
    wanted = f"at most {most}, which the model can see"
    check_fields(cfg, [(name, getattr(cfg, name) <= most, wanted) for name in names])


# ---- Tokenizers ----------------------------------------------------------------------------------


def prepare_tokenizer(
    cfg: Any,
    folder: Path,
    texts: Iterable[str],
    template: str = "",
    default: str = "",
    *,
    special: dict[str, Any] = AT_THE_END,
    needs: Sequence[str] = ("eos_token", "is_fast"),
    **options: Any,
) -> Any:
    """The tokenizer in `folder`, which a run that resumes keeps; else one that is saved there.

    That of cfg.model_name_or_path, with its own special tokens; that of the run that cfg.vocabulary
    names; or a new one, trained on the texts, whose arguments are `options`, and for training it
    `special`. The end-of-text token is the pad token where there is none. It gets the chat
    template, or the default if it has none. Raises ValueError for one without one of `needs`, which
    are keys of NEEDS.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kept = vocabulary_path(cfg) if hasattr(cfg, "vocabulary") else None
    if (folder / FILE).exists():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if template in ("", tokenizer.chat_template):
            return tokenizer
    elif kept and (kept.parent / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(kept.parent)
    elif cfg.model_name_or_path:
        tokenizer = pretrained.load(AutoTokenizer, cfg)
    else:
        if kept:
            replace_text(folder / FILE, kept.read_text(encoding="utf-8"))
        else:
            print("Preparing data: training a tokenizer", flush=True)
            learn_vocabulary(texts, cfg.vocab_size, folder, **special)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / FILE), **options)
    tokenizer.chat_template = template or tokenizer.chat_template or default or None
    ends = pretrained.answer_ends(tokenizer)
    if default and not ends:
        what = "the chat template ends answers without a special token of the tokenizer"
        why = "the trained model will not stop; write {{ eos_token }} after the content"
        print(f"Preparing data: warning: {what}: {why}", flush=True)
    if ends and "eos_token" in needs and not tokenizer.eos_token:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    for name in needs:
        if not getattr(tokenizer, name):
            model = one_line(cfg.model_name_or_path, 100)
            raise ValueError(
                f"task.model_name_or_path: the tokenizer of {model} has no {NEEDS[name]}; give "
                "another model"
            )
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@cache
def load_tokenizer(folder: Path) -> Any:
    """The tokenizer that prepare_data has saved in a folder; read once, so that each batch can be
    padded by it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def spread_rows(rows: Any, names: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of these columns, evenly spread over a split, of about SAMPLE bytes together: what a
    tokenizer is trained on."""
    chosen = rows.select_columns(names)
    every = max(1, chosen.data.nbytes // SAMPLE)
    for start in range(0, len(rows), 1000):
        block = chosen[start : start + 1000]
        for number, values in enumerate(zip(*block.values(), strict=True), start):
            if number % every == 0:
                yield dict(zip(block, values, strict=True))


def say_lengths(rows: Any, lengths: dict[str, int]) -> None:
    """Prints the mean and the maximum number of tokens in columns of a DatasetDict. `lengths`: for
    each column that at which rows were truncated."""
    for split, part in rows.items():
        for name, most in lengths.items():
            found = ListColumn(part, name).lengths
            text = f"{name} of {found.mean():.0f} tokens on average, {found.max():,} at most"
            if full := int((found == most).sum()):
                text += f"; {full:,} have {most:,}, where rows are truncated"
            print(f"Prepared {split}: {text}", flush=True)


def vocabulary_path(cfg: Any) -> Path | None:
    """The file in the folder that cfg.vocabulary names; None: it names none. Raises ValueError."""
    path = local_path(cfg.vocabulary, "vocabulary") / FILE
    if not cfg.vocabulary:
        return None
    if cfg.model_name_or_path:
        raise ValueError("task.vocabulary: task.model_name_or_path has its own; leave it out")
    if not path.is_file():
        folder = one_line(cfg.vocabulary, 100)
        raise ValueError(f"task.vocabulary: {folder} has no {FILE}; give runs/NAME/model")
    return path


def learn_vocabulary(
    texts: Iterable[str],
    size: int,
    folder: Path,
    *,
    first: Sequence[str] = (),
    last: Sequence[str] = (),
    begin: str = "",
    end: str = "",
) -> None:
    """Saves a byte-level BPE of the texts, to which no text is unknown, in `folder`.

    `size` is the number of tokens, special ones included: those in `first` get the lowest ids,
    those in `last` the highest. The tokenizer puts the special tokens `begin` before and `end`
    after a text, and `end` between the texts of a pair too. Raises ValueError where it fails.
    """
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import BertProcessing, TemplateProcessing

    def train_and_save() -> None:
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(
            break_long_words(texts), size - len(last), special_tokens=[*first], show_progress=False
        )
        tokenizer.add_special_tokens([*last])
        if begin:  # what checkpoints know as the identity of their data: do not change it
            pairs = [(name, tokenizer.token_to_id(name)) for name in (end, begin)]
            tokenizer._tokenizer.post_processor = BertProcessing(*pairs)
        elif end:
            tokenizer._tokenizer.post_processor = TemplateProcessing(
                single=f"$A {end}",
                pair=f"$A {end} $B:1 {end}:1",
                special_tokens=[(end, tokenizer.token_to_id(end))],
            )
        replace_text(folder / FILE, tokenizer.to_str(pretty=True))

    # The library does not return to Python for seconds, and a signal would wait for it.
    run_in_child(train_and_save)


def token_bytes(tokenizer: Any) -> np.ndarray:
    """Bytes of text that each token stands for, 0 for special ones: int64 (vocabulary,)."""
    sizes = np.zeros(len(tokenizer), np.int64)
    byte_level = "ByteLevel" in tokenizer.backend_tokenizer.to_str().partition('"decoder"')[2][:500]
    for token, i in tokenizer.get_vocab().items():
        if byte_level:
            sizes[i] = len(token)  # a character stands for a byte
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):
            sizes[i] = 1
        else:
            sizes[i] = len(token.replace("▁", " ").encode())  # SentencePiece writes spaces so
    sizes[tokenizer.all_special_ids] = 0
    return sizes


# ---- Tokens and loss masks -----------------------------------------------------------------------


def begin_tokens(tokenizer: Any) -> list[int]:
    """The begin-of-text token where the tokenizer puts one before a text; else an empty list."""
    return [i for i in tokenizer("").input_ids[:1] if i == tokenizer.bos_token_id]


def tokenize_texts(
    texts: list[str], tokenizer: Any, before: str = "", after: str = ""
) -> list[list[int]]:
    """The token ids of texts, without special tokens: text that spells one stays text.

    `before` and `after`: what a file has around these texts. A long text goes through the tokenizer
    in parts of at least SHORT characters, or nearly, that end between a word and a space, where
    tokenizers separate; but whole through one that writes a space before whatever it gets.
    """
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ids = [tokenizer(each, **options).input_ids for each in ("Two words", "Two", " words")]
    separates = ids[0] == ids[1] + ids[2]
    parts: list[str] = []
    firsts = [0]  # of each text its first part, and an end
    for each in texts:
        rest, start = before + each + after, 0
        while separates and (match := SPACED.search(rest, start + SHORT - 100)):
            parts.append(rest[start : match.end()])
            start = match.end()
        parts.append(rest[start:])
        firsts.append(len(parts))
    encoded = tokenizer(parts, return_attention_mask=False, **options)
    found = encoded.input_ids
    for i, j in pairwise(firsts) if before or after else ():
        for k in {i, j - 1}:
            first = len(before) if k == i else 0
            end = len(parts[k]) - (len(after) if k == j - 1 else 0)
            tokens = zip(found[k], encoded[k].offsets, strict=True)
            found[k] = [token for token, (start, stop) in tokens if stop > first and start < end]
    return [[*chain(*found[i:j])] for i, j in pairwise(firsts)]


def tokenize_answers(text: str, answers: list[tuple[int, int]], tokenizer: Any) -> Tokens:
    """A text of which the answers alone are items in the loss; special tokens in it are special.

    `answers`: where each begins and ends in the text, in characters. A token that reaches into an
    answer belongs to it.
    """
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    encoded = tokenizer(text, **options)
    mask = [
        any(last > start and first < stop for start, stop in answers)
        for first, last in encoded["offset_mapping"]
    ]
    return np.array(encoded["input_ids"], np.int32), np.array(mask, np.uint8)
