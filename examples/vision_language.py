"""Vision-language model (LLaVA and others): chats with images; the loss is that of the answers.

make train ARGS="--max_steps 600 --learning_rate 2e-3 --task.train_vision true"
make train ARGS="--task.data chats --task.model_name_or_path llava-hf/llava-1.5-7b-hf"
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GPT2Tokenizer,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
)

from samestep import DataConfig, ModelConfig, load_splits, map_rows, pretrained, tokenizing
from samestep.text import chats

UNIT = "tokens"
TEMPLATE = """{% for message in messages %}{{ message.role }}:
{% for part in message.content %}
{%- if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}
{{- '<|endoftext|>' }}{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"""
load_processor = cache(AutoProcessor.from_pretrained)


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = ""
    """Rows {images, messages}, whose content is a list of {type: image} and {type: text, text}: a
    .parquet file, a folder of such, or a dataset on the Hub. Empty: drawn shapes."""
    train_vision: bool = False
    """Train the vision tower, too. LLaVA reads its last layer but one: on several processes add
    --find_unused_parameters true."""
    lora_rank: int = 0
    """Rank of LoRA's adapters in the attention of the language model; 0: all its weights train."""


def drawn_rows() -> Iterator[dict]:
    draw = random.Random(0)
    for _ in range(800):
        color, shape = draw.choice(["red", "green", "blue"]), draw.choice(["ellipse", "rectangle"])
        image, x, y = Image.new("RGB", (32, 32)), draw.randrange(12), draw.randrange(12)
        getattr(ImageDraw.Draw(image), shape)([x, y, x + 18, y + 18], color)
        asked = {"Which color has it?": color, "Which shape is it?": shape}
        asked["What do you see?"] = f"A {color} {shape}."
        question, answer = draw.choice([*asked.items()])
        content = [{"type": "image", "text": None}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        messages += [{"role": "assistant", "content": [{"type": "text", "text": answer}]}]
        yield {"images": [image], "messages": messages}


def read(row: dict) -> dict:
    """messages, whose contents are lists of parts."""
    messages, asked = [], 0
    for message in row["messages"]:
        content = message["content"]
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [{"type": part["type"], "text": part.get("text")} for part in content]
        asked += sum(part["type"] == "image" for part in parts)
        if wrong := [each for each in parts if each["type"] != "image" and not each["text"]]:
            raise ValueError(f"the part {wrong[0]} of a message is neither an image nor a text")
        messages.append({"role": message["role"], "content": parts})
    if asked != len(row["images"]) or "assistant" not in [each["role"] for each in messages[1:]]:
        wanted = f"{asked} images, and an answer of the role assistant"
        raise ValueError(f"{len(row['images'])} images for {messages!r:.90}; give {wanted}")
    return {"messages": messages}


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Rows {images, input_ids, labels}; labels are -100 but for the answers."""
    splits = load_splits(cfg, ["images", "messages"], read, made_up=drawn_rows, images=["images"])
    if (folder / "tokenizer.json").exists():  # of a run that resumes
        processor = AutoProcessor.from_pretrained(folder)
    elif cfg.model_name_or_path:
        processor = pretrained.load(AutoProcessor, cfg)
    else:
        texts = map(str, splits["train"].select_columns("messages"))
        options = {"vocab_size": 500, "new_special_tokens": ["<image>"]}
        tokenizer = GPT2Tokenizer(pad_token="<pad>").train_new_from_iterator(texts, **options)
        images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)
        options = {"patch_size": 8, "vision_feature_select_strategy": "default"}
        options |= {"num_additional_image_tokens": 1, "chat_template": TEMPLATE}
        processor = LlavaProcessor(images, tokenizer, **options)
    processor.save_pretrained(folder)

    def encode(row: dict) -> list[dict]:
        """Several samples where the template changes an answer when others follow."""
        found, chat = [], {"messages": row["messages"]}
        for text, answers in chats.render_chat(chat, row["place"], processor):
            images = row["images"][: text.count(processor.image_token)]
            ids, labels = tokenizing.tokenize_images(text, answers, images, processor)
            found.append({"input_ids": ids, "labels": labels, "shown": len(images)})
        return found

    return map_rows(splits, encode, keep=["images"])


def collate(rows: list[dict], data) -> dict:
    """input_ids, attention_mask and labels, int64 (B, T); pixel_values of all images."""
    processor = load_processor(data.folder)
    images = [image for row in rows for image in row["images"][: row["shown"]]]
    batch = dict(processor.image_processor(images, return_tensors="pt")) if images else {}
    for name, padding in (("input_ids", processor.tokenizer.pad_token_id), ("labels", -100)):
        batch[name] = pad_sequence([torch.tensor(row[name]) for row in rows], True, padding)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = torch.arange(batch["labels"].shape[1]) < lengths[:, None]
    return batch | {"attention_mask": mask.long()}


def count(batch: dict) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def build_model(cfg: TaskConfig, data) -> torch.nn.Module:
    if cfg.model_name_or_path and cfg.lora_rank:
        model = pretrained.load(AutoModelForImageTextToText, cfg, dtype="auto")
    elif cfg.model_name_or_path:
        model = pretrained.load_model(AutoModelForImageTextToText, cfg)
    else:
        processor = load_processor(data.folder)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        vision = CLIPVisionConfig(**sizes, num_hidden_layers=3, image_size=32, patch_size=8)
        sizes |= {"vocab_size": len(processor.tokenizer), "num_hidden_layers": 2}
        own = processor.tokenizer
        ends = {"eos_token_id": own.eos_token_id, "pad_token_id": own.pad_token_id}
        text, token = LlamaConfig(**sizes, **ends), processor.image_token_id
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=token)
        model = AutoModelForImageTextToText.from_config(config)
    for name, weight in model.named_parameters():
        if "vision_tower" in name or ".visual." in name:
            weight.requires_grad_(cfg.train_vision)
    if cfg.lora_rank:
        from peft import LoraConfig, get_peft_model

        target = r".*language_model.*\.(q|k|v|o)_proj"
        return get_peft_model(model, LoraConfig(r=cfg.lora_rank, target_modules=target))
    return model


def logits_of(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Of each token but the first, from those before it: float32 (B, T - 1, vocabulary)."""
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    return model(**inputs, use_cache=False).logits[:, :-1].float()


def loss_sum(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Cross entropy of the answers' tokens, in nats."""
    labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits_of(model, batch).flatten(0, 1), labels, reduction="sum")


def eval_sums(model: torch.nn.Module, batch: dict) -> dict:
    """The loss, its tokens, and rows of which each token is the likeliest."""
    logits, labels = logits_of(model, batch), batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    right = ((logits.argmax(-1) == labels) | (labels == -100)).all(1).sum()
    sums = {"loss": loss, "tokens": torch.tensor(count(batch)), "right": right}
    return sums | {"rows": torch.tensor(len(labels))}


def metrics(sums: dict) -> dict:
    """exact_match: chats of whose answers each token is the likeliest after those before it."""
    exact_match = float(sums["right"] / sums["rows"])
    return {"loss": float(sums["loss"] / sums["tokens"]), "exact_match": exact_match}


def export(model, output: Path, cfg: TaskConfig, data) -> None:
    model = model.merge_and_unload() if cfg.lora_rank else model
    model.save_pretrained(output)
    load_processor(data.folder).save_pretrained(output)
