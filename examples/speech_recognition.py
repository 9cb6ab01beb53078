"""Speech recognition (CTC, Wav2Vec2): characters from sound; character error rate.

make train ARGS="--max_steps 300 --learning_rate 2e-3"
make train ARGS="--task.data recordings --task.model_name_or_path facebook/wav2vec2-large-lv60"

Layers are not dropped, and SpecAugment is replaced by `augment`, whose silence belongs to the
sample: so each weight has a gradient in each step, and needs no --find_unused_parameters true.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import datasets
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCTC, AutoProcessor, Wav2Vec2Config
from transformers import Wav2Vec2CTCTokenizer as Tokenizer
from transformers import Wav2Vec2FeatureExtractor as FeatureExtractor
from transformers import Wav2Vec2Processor as Processor

from samestep import DataConfig, ModelConfig, load_splits, map_rows, pretrained

UNIT, BLANK = "characters", "<pad>"
load_processor = cache(AutoProcessor.from_pretrained)


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = ""
    """Rows {audio, text}, audio being a file, or {array, sampling_rate}: a folder with
    metadata.jsonl, a .jsonl or .parquet file, or a dataset on the Hub. Empty: tones that spell
    digits."""
    silence: float = 0.05
    """Fraction of a training sample that is made silent, in spans of 10 % of that."""


def tone_rows() -> Iterator[dict]:
    """Each digit is a tone of its own, of 80 to 140 ms at 8 kHz, in noise."""
    draw = np.random.default_rng(0)
    for _ in range(1000):
        digits, parts = draw.integers(0, 10, draw.integers(2, 7)), []
        for digit in digits:
            time = np.arange(draw.integers(640, 1120)) / 8000
            parts.append(np.sin(2 * np.pi * 400 * 1.2**digit * time))
            parts.append(np.zeros(draw.integers(160, 480)))
        sound = np.concatenate(parts)
        sound = sound + draw.normal(0, 0.05, len(sound))
        audio = {"array": sound.astype("float32"), "sampling_rate": 8000}
        yield {"audio": audio, "text": "".join(map(str, digits))}


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Rows {input_values, labels}: the sound, and the ids of the characters."""
    if cfg.model_name_or_path:
        extractor = pretrained.load(FeatureExtractor, cfg)
    else:
        extractor = FeatureExtractor(sampling_rate=8000, return_attention_mask=True)
    rate = extractor.sampling_rate

    def read(row: dict) -> dict:
        audio, text = row["audio"], row["text"]
        if not (isinstance(audio, dict) and "array" in audio):  # a file
            if not find_spec("torchcodec"):
                raise ValueError("to read files of sound, pip install torchcodec")
            given = audio if isinstance(audio, dict) else {"path": audio, "bytes": None}
            audio = datasets.Audio(rate).decode_example(given)
        sound = np.asarray(audio["array"], np.float32)
        is_sound = sound.ndim == 1 and np.isfinite(sound).all()
        if not is_sound or len(sound) < 500 * len(text) or audio["sampling_rate"] != rate:
            wanted = f"a text, and 500 samples or more at {rate} Hz for each character"
            raise ValueError(f"sound of the shape {sound.shape} for {text!r:.60}; give {wanted}")
        values = extractor(sound, sampling_rate=rate)["input_values"][0]
        return {"input_values": values, "text": text}

    sound, text = datasets.List(datasets.Value("float32")), datasets.Value("large_string")
    options = {"features": {"input_values": sound, "text": text}, "paths": ["audio"]}
    splits = load_splits(cfg, ["audio", "text"], read, made_up=tone_rows, **options)
    letters = {*"".join(text for rows in splits.values() for text in rows["text"])} - {" "}
    if (folder / "vocab.json").exists():  # that of a run that resumes
        tokenizer = Tokenizer.from_pretrained(folder)
    else:
        names = [BLANK, "<unk>", "|", *sorted(letters)]
        (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
        tokenizer = Tokenizer(folder / "vocab.json", bos_token=None, eos_token=None)
        with contextlib.suppress(ValueError):  # letters in the order of a head, if there is one
            tokenizer = pretrained.load(Tokenizer, cfg) if cfg.model_name_or_path else tokenizer
    tokenizer.add_tokens(sorted(letters - {*tokenizer.get_vocab()}))
    Processor(extractor, tokenizer).save_pretrained(folder)
    encode = lambda row: {"labels": tokenizer(row["text"])["input_ids"]}  # noqa: E731
    return map_rows(splits, encode, keep=["input_values"])


def rows_depend(cfg: TaskConfig) -> bool:
    """Models whose features have group norm (wav2vec2-base) were pretrained with zeros behind short
    sounds, and without a mask: what stands beside a row in its micro-batch changes its loss."""
    return getattr(pretrained.config_of(cfg), "feat_extract_norm", "layer") == "group"


def augment(row: dict, generator: torch.Generator, cfg: TaskConfig) -> dict:
    """Ten spans of the sound, at random places, are silent."""
    sound = torch.tensor(row["input_values"])
    length = round(len(sound) * cfg.silence / 10)
    for start in torch.randint(len(sound) - length, (10,), generator=generator).tolist():
        sound[start : start + length] = 0
    return {**row, "input_values": sound.numpy()}


def collate(rows: list[dict], data) -> dict:
    """input_values, float32 (B, T), attention_mask, if the model takes one, and labels, int64 (B,
    C), -100 for padding."""
    sounds = [{"input_values": row["input_values"]} for row in rows]
    batch = load_processor(data.folder).feature_extractor.pad(sounds, return_tensors="pt")
    labels = pad_sequence([torch.tensor(row["labels"]) for row in rows], True, -100)
    return {**batch, "labels": labels}


def count(batch: dict) -> int:
    return int((batch["labels"] >= 0).sum())


def build_model(cfg: TaskConfig, data) -> torch.nn.Module:
    tokenizer = load_processor(data.folder).tokenizer
    options = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    options |= {"ctc_loss_reduction": "sum", "layerdrop": 0.0, "mask_time_prob": 0.0}
    if cfg.model_name_or_path:
        options["ignore_mismatched_sizes"] = True  # new letters give a new head
        model = pretrained.load_model(AutoModelForCTC, cfg, ("lm_head",), **options)
        model.freeze_feature_encoder()
        return model
    options |= {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "hidden_size": 64}
    options |= {"conv_dim": [64] * 3, "conv_stride": [8, 5, 4], "conv_kernel": [16, 10, 8]}
    options |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    options |= {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    dropouts = ("hidden", "activation", "attention", "feat_proj", "final")
    options |= {f"{name}_dropout": 0.0 for name in dropouts}
    return AutoModelForCTC.from_config(Wav2Vec2Config(**options))


def loss_sum(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """The negative log-likelihood of the texts, in nats."""
    return model(**batch).loss


def distance(one: list, other: list) -> int:
    """The fewest characters to insert, delete or replace."""
    row = [*range(len(other) + 1)]
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for k, b in enumerate(other, 1):
            before, row[k] = row[k], min(row[k] + 1, row[k - 1] + 1, before + (a != b))
    return row[-1]


def eval_sums(model: torch.nn.Module, batch: dict) -> dict:
    """The loss, characters, and edits from the likeliest characters to the text."""
    output = model(**batch)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_values"]))
    lengths = model._get_feat_extract_output_lengths(mask.sum(1).long())
    edits, blank = 0, model.config.pad_token_id
    rows = zip(output.logits.argmax(-1), lengths.tolist(), batch["labels"].tolist(), strict=True)
    for ids, length, labels in rows:
        own = [i for i in ids[:length].unique_consecutive().tolist() if i != blank]
        edits += distance(own, [i for i in labels if i >= 0])
    sums = {"loss": output.loss, "edits": torch.tensor(edits)}
    return sums | {"characters": torch.tensor(count(batch))}


def metrics(sums: dict) -> dict:
    loss, edits = (float(sums[name] / sums["characters"]) for name in ("loss", "edits"))
    return {"loss": loss, "cer": edits}


export = pretrained.export  # the model, with what prepare_data has saved
