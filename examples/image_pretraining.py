"""Masked autoencoder (ViT-MAE): pixels of hidden patches; what is hidden belongs to the sample.

make train ARGS="--max_steps 200 --learning_rate 3e-3"
make train ARGS="--task.data images --task.model_name_or_path facebook/vit-mae-base"
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import datasets
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, ViTMAEConfig, ViTMAEForPreTraining

from samestep import DataConfig, ModelConfig, load_splits, pretrained

UNIT = "images"
load_config = cache(AutoConfig.from_pretrained)
load_processor = cache(AutoImageProcessor.from_pretrained)


@dataclass
class TaskConfig(DataConfig, ModelConfig):
    data: str = ""
    """Rows {image}: a folder of images, a .parquet file, or a dataset on the Hub. Empty: the digits
    inside scikit-learn."""


def digit_rows() -> Iterator[dict]:
    from sklearn.datasets import load_digits

    for values in load_digits().images:
        yield {"image": Image.fromarray((values * 15.9).astype("uint8")).resize((32, 32))}


def prepare_data(cfg: TaskConfig, folder: Path) -> datasets.DatasetDict:
    """Rows {image}, those for validation with `noise`, by the number of the row."""
    splits = load_splits(cfg, ["image"], made_up=digit_rows, images=["image"])
    if cfg.model_name_or_path:
        config, processor = pretrained.config_of(cfg), pretrained.load(AutoImageProcessor, cfg)
    else:
        from transformers import ViTImageProcessorPil

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        own = {f"decoder_{name}": value for name, value in sizes.items()}
        layers = {"num_hidden_layers": 4, "decoder_num_hidden_layers": 2}
        config = ViTMAEConfig(image_size=32, patch_size=8, **sizes, **own, **layers)
        processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    noise = torch.Generator().manual_seed
    splits["validation"] = splits["validation"].map(
        lambda row, i: {"noise": draw_noise(config, noise(i)).tolist()}, with_indices=True
    )
    return splits


def draw_noise(config: ViTMAEConfig, generator: torch.Generator) -> torch.Tensor:
    """A number for each patch: those with the largest are hidden."""
    return torch.rand((config.image_size // config.patch_size) ** 2, generator=generator)


def augment(row: dict, generator: torch.Generator, data) -> dict:
    return {**row, "noise": draw_noise(load_config(data.folder), generator)}


def collate(rows: list[dict], data) -> dict:
    """pixel_values, float32 (B, 3, S, S), and noise, float32 (B, patches)."""
    images = [row["image"] for row in rows]
    batch = load_processor(data.folder)(images, return_tensors="pt")
    noise = torch.stack([torch.as_tensor(row["noise"]).float() for row in rows])
    return {"pixel_values": batch["pixel_values"], "noise": noise}


def count(batch: dict) -> int:
    return len(batch["noise"])


def build_model(cfg: TaskConfig, data) -> torch.nn.Module:
    if cfg.model_name_or_path:
        return pretrained.load_model(ViTMAEForPreTraining, cfg)
    model = ViTMAEForPreTraining(load_config(data.folder))
    # transformers 5.24 leaves the fixed embeddings of the positions at zero.
    model.vit.embeddings.patch_embeddings.projection._is_hf_initialized = False
    model.vit.embeddings.initialize_weights()
    model.decoder.initialize_weights(model.vit.embeddings.patch_embeddings.num_patches)
    return model


def loss_sum(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """The mean squared error of the hidden pixels of each image: all have as many."""
    return model(**batch).loss.float() * count(batch)


def eval_sums(model: torch.nn.Module, batch: dict) -> dict:
    """The loss, and sums of the hidden pixels and their squares."""
    output = model(**batch)
    pixels = model.patchify(batch["pixel_values"])[output.mask.bool()]
    sums = {"loss": output.loss.float() * count(batch), "images": torch.tensor(count(batch))}
    moments = [torch.ones_like(pixels).sum(), pixels.sum(), pixels.square().sum()]
    return sums | {"moments": torch.stack(moments).double()}


def metrics(sums: dict) -> dict:
    """The loss, and how much of the variance of the hidden pixels the model explains."""
    number, total, squares = sums["moments"].tolist()
    loss = float(sums["loss"] / sums["images"])
    return {"loss": loss, "explained": 1 - loss / (squares / number - (total / number) ** 2)}


export = pretrained.export  # the model, with what prepare_data has saved
