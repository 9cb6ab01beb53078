"""Text as tokens: tokenizers to load or to learn, and loss masks.

A tokenised text is two arrays of equal length: its token ids, and its loss mask, which is 1 for a
token that is a loss term and 0 for context.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from samestep.base.fields import check_fields
from samestep.data.rows import NOTES, NUMBERS
from samestep.data.views import lengths_of, rows_of
from samestep.models import pretrained
from samestep.models.pretrained import ModelConfig
from samestep.text import chats

# transformers takes 4 s to import: it waits for the function that needs it.

Tokens = tuple[np.ndarray, np.ndarray]  # ids, loss mask: int32 (T,), uint8 (T,)
FILE = "tokenizer.json"
_SAMPLE = 50_000_000  # bytes of text that a tokenizer is trained on
_TEXTS = ("text", "text_pair", "text_target", "prompt", "completion", "chosen", "rejected")
_CHATS = ("chat", "tools", "is_chat")  # more columns of rows with messages
PAD, END_OF_TEXT = "<pad>", "<|endoftext|>"  # of a new tokenizer
_NEEDS = {  # attributes of a tokenizer, and their names in messages
    "eos_token": "end-of-text token",
    "pad_token": "pad token",
    "is_fast": FILE,
}
_UNUSED = ("mask", "image", "audio", "video")  # tokens that no text has
SHORT = 5_000  # characters of a part of a text: long ones take twice the time
AT_ONCE = 200  # parts that are tokenized at once: encodings take 40 times the memory of a text
_SPACED = re.compile(r"[^\W_](?= [^\W_])")  # where all tokenizers separate, if they separate words


# ---- Models to start from ------------------------------------------------------------------------


def most_tokens(cfg: ModelConfig) -> int:
    """Tokens that the model to start from sees at once; 2**30 where there is no limit."""
    config = pretrained.config_of(cfg)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return 2**30
    return limit - _unused_positions(config, limit)


def _unused_positions(config: Any, limit: int) -> int:
    """Positions that no token of a text gets: RoBERTa counts them from that of padding, plus 1."""
    import torch
    from transformers import AutoModel

    with contextlib.suppress(Exception), torch.device("meta"), pretrained.quiet():
        for name, module in AutoModel.from_config(config).named_modules():
            is_table = isinstance(module, torch.nn.Embedding) and name.endswith(
                "position_embeddings"
            )
            if is_table and module.num_embeddings == limit and module.padding_idx is not None:
                return module.padding_idx + 1
    return 0


def check_lengths(cfg: ModelConfig, *names: str) -> None:
    """Raises ValueError for a length that is more than the model to start from can see."""
    most = most_tokens(cfg)
    wanted = f"at most {most}, which the model can see"
    check_fields(cfg, [(name, getattr(cfg, name) <= most, wanted) for name in names])


def _check_embeddings(cfg: ModelConfig, tokenizer: Any) -> None:
    """Raise ValueError for tokens without a row in the embeddings of the pretrained model.

    A mask token and those of other inputs may lack one, as in BART (cnn) and Gemma 3 (1b): no text
    has them.
    """
    rows = getattr(pretrained.config_of(cfg).get_text_config(), "vocab_size", None)
    unused = {getattr(tokenizer, f"{name}_token", None) for name in _UNUSED}
    ids = [number for token, number in tokenizer.get_vocab().items() if token not in unused]
    needed = max(ids) + 1
    if isinstance(rows, int) and needed > rows:
        raise ValueError(
            f"task.model_name_or_path: the tokenizer of {cfg.model_name_or_path} has {needed} "
            f"tokens, and the model embeddings of {rows}; save the model again after "
            f"model.resize_token_embeddings({needed})"
        )


# ---- Tokenizers ----------------------------------------------------------------------------------


def prepare_tokenizer(
    cfg: Any, folder: Path, rows: Any, length: str, is_packed: bool = False, *,
    ends: bool = False, needs: Sequence[str] = ("eos_token", "is_fast"),
) -> Any:  # fmt: skip
    """Load the tokenizer in `folder`, which a run that resumes keeps; else save one there.

    That of cfg.model_name_or_path, with its own special tokens; that of the run that cfg.vocabulary
    names; or a new one, trained on the texts of `rows`. The end-of-text token is the pad token
    where there is none. Rows of chats need a template: cfg.chat_template, the tokenizer's, or ours.

    length      the field with the maximum number of tokens of a row.
    is_packed   whether a row is documents that do not see each other: it may be longer than what a
                pretrained model can see.
    ends        whether a new tokenizer puts its end-of-text token after each text.
    needs       keys of _NEEDS: what the tokenizer must have.

    Raises ValueError for a tokenizer without one of `needs`, and for a pretrained model that cannot
    see the length, or has fewer embeddings than tokens.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not is_packed:
        check_lengths(cfg, length)
    template = chats.read_template(getattr(cfg, "chat_template", ""))
    default = chats.CHAT_TEMPLATE if chats.is_chat(rows[0]) else ""
    kept = getattr(cfg, "vocabulary", "")
    if (folder / FILE).exists():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
        if template in ("", tokenizer.chat_template):
            return tokenizer
    elif kept:
        tokenizer = AutoTokenizer.from_pretrained(os.path.expanduser(kept))
    elif cfg.model_name_or_path:
        tokenizer = pretrained.load(AutoTokenizer, cfg)
        _check_embeddings(cfg, tokenizer)
    else:
        print("Preparing data: training a tokenizer", flush=True)
        learn_vocabulary(texts_of(rows), cfg.vocab_size, folder, ends)
        options: dict[str, Any] = {"bos_token": END_OF_TEXT}
        if ends:
            names = ["input_ids", "attention_mask"]
            options = {"pad_token": PAD, "model_input_names": names}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / FILE),
            eos_token=END_OF_TEXT,
            model_max_length=getattr(cfg, length),
            **options,
        )
    tokenizer.chat_template = template or tokenizer.chat_template or default or None
    last = pretrained.answer_ends(tokenizer)
    if default and not last:
        what = "the chat template ends answers without a special token of the tokenizer"
        why = "the trained model will not stop; write {{ eos_token }} after the content"
        print(f"Preparing data: warning: {what}: {why}", flush=True)
    if last and "eos_token" in needs and not tokenizer.eos_token:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(last[0])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if languages_of(tokenizer) and not hasattr(cfg, "source_lang"):
        print(f"Preparing data: each text is marked as {tokenizer.src_lang}", flush=True)
    for name in needs:
        if not getattr(tokenizer, name):
            raise ValueError(
                f"task.model_name_or_path: the tokenizer of {cfg.model_name_or_path} has no "
                f"{_NEEDS[name]}; give another model"
            )
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def plain_tokenizer(cfg: Any, folder: Path, texts: Iterable[str], **options: Any) -> Any:
    """Load the tokenizer in `folder`, which a run that resumes keeps, or that of the pretrained
    model, or train one with the special tokens of RoBERTa on these texts; and save it there.

    For a task.py with transformers' own collators. Raises ValueError for a max_length that the
    pretrained model cannot see.
    """
    from transformers import AutoTokenizer, RobertaTokenizer

    if (folder / FILE).exists():
        return AutoTokenizer.from_pretrained(folder, **options)
    if cfg.model_name_or_path:
        check_lengths(cfg, "max_length")
        tokenizer = pretrained.load(AutoTokenizer, cfg, **options)
        _check_embeddings(cfg, tokenizer)
    else:
        tokenizer = RobertaTokenizer(**options).train_new_from_iterator(texts, 1000)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return tokenizer


def languages_of(tokenizer: Any) -> list[str]:
    """The languages whose codes a tokenizer writes into texts, as NLLB's; empty: it writes none."""
    if not hasattr(tokenizer, "src_lang"):
        return []
    codes = getattr(tokenizer, "lang_code_to_id", None)
    if not codes:
        own = {getattr(tokenizer, name) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
        codes = [each for each in tokenizer.all_special_tokens if each not in own]
    return sorted(each.strip("_") for each in codes)  # __en__ of SeamlessM4T


def language_id(tokenizer: Any, language: str) -> int:
    """The token of a language: eng_Latn, or __en__ for M2M100."""
    found = [tokenizer.convert_tokens_to_ids(each) for each in (f"__{language}__", language)]
    return next(each for each in found if each not in (None, tokenizer.unk_token_id))


@cache
def load_tokenizer(folder: Path) -> Any:
    """The tokenizer that prepare_data has saved in a folder; read once, so that each batch can be
    padded by it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def texts_of(rows: Any) -> Iterator[str]:
    """Give the texts of rows that are evenly spread over a split, of about _SAMPLE bytes together:
    what a tokenizer is trained on. Those of messages are contents, and tool calls and tools as
    JSON."""
    names = [name for name in (*_TEXTS, *_CHATS) if name in rows.column_names]
    chosen = rows.select_columns(names)
    for row in chosen.select(range(0, len(rows), max(1, chosen.data.nbytes // _SAMPLE))):
        if not chats.is_chat(row):
            yield from (row[name] for name in names if name in _TEXTS)
            continue
        if "chat" in row:
            chat = json.loads(row["chat"])
        else:
            parts = (json.loads(row[name]) for name in ("prompt", "chosen", "rejected"))
            chat = {"messages": [*chain(*parts)], "tools": json.loads(row["tools"])}
        for message in chat["messages"]:
            yield message["content"]
            for call in message.get("tool_calls", []):
                yield json.dumps(call["function"], ensure_ascii=False)
        for tool in chat.get("tools", []):
            yield json.dumps(tool, ensure_ascii=False)


def say_lengths(rows: Any, lengths: dict[str, int]) -> None:
    """Prints the mean and the maximum number of tokens in columns of a DatasetDict. `lengths`: for
    each column that at which rows were truncated."""
    for split, part in rows.items():
        for name, most in lengths.items():
            found = lengths_of(part, name)
            text = f"{name} of {found.mean():.0f} tokens on average, {found.max():,} at most"
            if full := int((found == most).sum()):
                text += f"; {full:,} have {most:,}, where rows are truncated"
            print(f"Prepared {split}: {text}", flush=True)


def break_long_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts with a space after every 1,000 characters without one, for BPE training.

    Its time grows with the square of a word's length: a word of 3 MB would take hours.
    """
    for text in texts:
        yield re.sub(r"(\S{1000})(?=\S)", r"\1 ", text)


def learn_vocabulary(texts: Iterable[str], size: int, folder: Path, ends: bool = False) -> None:
    """Saves a byte-level BPE of the texts, to which no text is unknown, in `folder`.

    `size` is the number of tokens. The last is special, END_OF_TEXT; with `ends` it follows each
    text, also each of a pair, and PAD is the one before it.
    """
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing

    special = [PAD, END_OF_TEXT] if ends else [END_OF_TEXT]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(break_long_words(texts), size - len(special), show_progress=False)
    tokenizer.add_special_tokens(special)
    if ends:
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single=f"$A {END_OF_TEXT}",
            pair=f"$A {END_OF_TEXT} $B:1 {END_OF_TEXT}:1",
            special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
        )
    (folder / FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


# ---- Tokens and loss masks -----------------------------------------------------------------------


@cache
def id_type(tokenizer: Any) -> Any:
    """The smallest type for the token ids, of which the largest may be more than the number."""
    return np.uint16 if max(tokenizer.get_vocab().values()) < 2**16 else np.uint32


def begin_tokens(tokenizer: Any) -> list[int]:
    """The begin-of-text token where the tokenizer puts one before a text; else an empty list."""
    return [i for i in tokenizer("").input_ids[:1] if i == tokenizer.bos_token_id]


def tokenize_texts(texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    """The token ids of texts, int32, without special tokens: text that spells one stays text.

    A long text goes through the tokenizer in parts of at least SHORT characters, or nearly, that
    end between a word and a space, where tokenizers separate; but whole through one that writes a
    space before whatever it gets.
    """
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ids = [tokenizer(each, **options).input_ids for each in ("Two words", "Two", " words")]
    separates = ids[0] == ids[1] + ids[2]
    parts: list[str] = []
    firsts = [0]  # of each text its first part, and an end
    for each in texts:
        start = 0
        while separates and (match := _SPACED.search(each, start + SHORT - 100)):
            parts.append(each[start : match.end()])
            start = match.end()
        parts.append(each[start:])
        firsts.append(len(parts))
    found: list[np.ndarray] = []
    for first in range(0, len(parts), AT_ONCE):
        encoded = tokenizer(parts[first : first + AT_ONCE], return_attention_mask=False, **options)
        found += [np.array(each, np.int32) for each in encoded.input_ids]
    return [np.concatenate(found[i:j]) for i, j in pairwise(firsts)]


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


def tokenize_images(
    text: str, answers: list[tuple[int, int]], images: list, processor: Any
) -> tuple[list[int], list[int]]:
    """Token ids of a text with images, in whose places the processor puts tokens, and labels: -100
    but for the answers, which are those of `tokenize_answers`.

    Raises ValueError for a processor that changes text, and where no word is in the loss.
    """
    ids = [*processor(text=text, images=images or None).input_ids[0]]
    options = {"return_offsets_mapping": True, "verbose": False}
    encoded = processor.tokenizer(text, **options)
    plain, labels = encoded["input_ids"], []
    for token, (first, last) in zip(plain, encoded["offset_mapping"], strict=True):
        is_answer = any(last > start and first < stop for start, stop in answers)
        labels.append(token if is_answer else -100)
    found, at = [-100] * len(ids), 0
    marks = [i for i, token in enumerate(plain) if token == processor.image_token_id]
    for first, end in zip([0, *(i + 1 for i in marks)], [*marks, len(plain)], strict=True):
        size = end - first
        starts = range(at, len(ids) - size + 1) if end < len(plain) else [len(ids) - size]
        fits = [i for i in starts if ids[i : i + size] == plain[first:end]]
        if not fits or (not first and fits[0]):
            raise ValueError("the processor changes the text beside images: not supported")
        found[fits[0] : fits[0] + size], at = labels[first:end], fits[0] + size
    if not {*found} - {-100, *processor.tokenizer.all_special_ids}:
        raise ValueError("nothing but an end mark would be in the loss")
    return ids, found


def tokenize(batch: dict[str, list], tokenizer: Any, with_masks: bool) -> dict[str, list]:
    """Documents as token ids, for `map`: input_ids, the numbers of their row (source, file, line)
    and, `with_masks`, loss_mask.

    Texts begin and end with the tokens that the tokenizer puts there, or at least with its end of
    text; special tokens in them are text. Of prompts and chats the completions, or the messages of
    the assistant, are in the loss. A chat gives several documents where the template changes a turn
    when others follow. Raises ValueError for a template that fails or leaves out a part.
    """
    names = [name for name in batch if name not in NOTES]
    rows = rows_of({name: batch[name] for name in names})
    found: list[tuple[Tokens, int]] = []  # each with the number of its row
    if names == ["text"]:
        begin, end = begin_tokens(tokenizer), [tokenizer.eos_token_id]
        begin = begin or (end if with_masks else [])
        for i, ids in enumerate(tokenize_texts(batch["text"], tokenizer)):
            tokens = np.concatenate([begin, ids, end]).astype(np.int32)
            found.append(((tokens, np.ones(len(tokens), np.uint8)), i))
    else:
        places = batch.get("place") or ["a row"] * len(rows)
        for i, (row, place) in enumerate(zip(rows, places, strict=True)):
            if "chat" in row:
                texts = chats.render_chat(json.loads(row["chat"]), place, tokenizer)
                found += [(tokenize_answers(*each, tokenizer), i) for each in texts]
            else:
                found.append((tokenize_prompt(row, tokenizer), i))
    dtype = id_type(tokenizer)
    result: dict[str, list] = {"input_ids": [ids.astype(dtype) for (ids, _), _ in found]}
    batch = {"source": [0] * len(rows), **batch}  # rows of a task's own have none
    for name in NUMBERS:
        if name in batch:
            result[name] = [batch[name][i] for _, i in found]
    if with_masks:
        result["loss_mask"] = [mask for (_, mask), _ in found]
    return result


def tokenize_prompt(row: dict, tokenizer: Any) -> Tokens:
    """A prompt with its completion and the end-of-text token, which are the items in the loss."""
    whole = row["prompt"] + row["completion"]
    ids, mask = tokenize_answers(whole, [(len(row["prompt"]), len(whole))], tokenizer)
    begin = begin_tokens(tokenizer)
    ids = np.array([*begin, *ids, tokenizer.eos_token_id], np.int32)
    return ids, np.array([*[0] * len(begin), *mask, 1], np.uint8)
