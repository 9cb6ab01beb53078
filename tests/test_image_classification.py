"""The task image_classification: what it reads, that nothing but the seed shapes a batch, and what
it answers to bad input.
"""

import io
import pickle
import re
import types
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch._utils import ExceptionWrapper

from conftest import lines, write_table
from refusals import cases
from same import check_same
from samestep.base.errors import UserError
from samestep.contract import contract
from samestep.data import images, inputs
from samestep.images import image_rows
from samestep.prepared import prepared
from samestep.step.samples import SampleDataset
from test_tasks import COLORS, STEPS, picture, refusal


def folders(root, each=8, kinds=("png",)):
    """A folder of images for each color."""
    for name, color in COLORS.items():
        (root / name).mkdir(parents=True)
        for i in range(each):
            picture(color, i).save(root / name / f"{i}.{kinds[i % len(kinds)]}")
    return root


def table(root, each=8):
    """The same images, with a table that names them."""
    files = sorted(folders(root / "images", each).rglob("*.png"))
    rows = [{"image": str(f.relative_to(root)), "label": f.parent.name} for f in files]
    return write_table(root, rows, "csv")


def hub_rows(*_):
    """Images and labels as `datasets` has them."""
    images = [picture(color, i) for color in COLORS.values() for i in range(8)]
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(COLORS))}
    columns = {"image": images, "label": [c for c in range(3) for _ in range(8)]}
    return datasets.Dataset.from_dict(columns, datasets.Features(kinds))


def names_of(prepared):
    return prepared["train"].features["label"].names


@pytest.mark.parametrize("kind", ["folder", "csv", "parquet", "hub"])
def test_images_lie_in_folders_tables_or_on_the_hub(prepare, tmp_path, monkeypatch, kind):
    """A broken Exif block spoils none."""
    monkeypatch.chdir(tmp_path)
    fields = {}
    if kind == "folder":
        data = folders(Path("a"), 8, ("png", "jpg", "JPEG", "bmp", "webp"))
        with Image.open(data / "red" / "0.png") as image:
            image.save(data / "red" / "0.png", exif=b"Exif\0\0garbage!")
        (data / ".ipynb_checkpoints").mkdir()
        picture((0, 0, 0)).save(data / ".ipynb_checkpoints" / "1.png")
    elif kind == "csv":
        data = table(tmp_path)
    elif kind == "parquet":
        data = tmp_path / "a.parquet"
        hub_rows().to_parquet(data)
    else:
        monkeypatch.setattr(inputs, "load_split", hub_rows)
        data, fields = "somebody/colors", {"data_revision": "0" * 40}
    _, prepared, parts = prepare(data, **fields)
    assert names_of(prepared) == sorted(COLORS)
    assert sum(map(len, parts)) == 24 and min(map(len, parts)) >= 1
    for part in pickle.loads(pickle.dumps(parts)):
        for i in range(len(part)):
            image, color = part[i]["image"], COLORS[sorted(COLORS)[part[i]["label"]]]
            assert image.shape == (12, 12, 3) and image.dtype == np.uint8
            assert np.abs(image.mean((0, 1)) - np.array(color) - 9.5).max() < 8


def test_the_middle_of_an_upright_image_is_what_is_seen():
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 255
    assert (images.middle(Image.fromarray(wide), 10) == 255).all()
    image = Image.fromarray(np.vstack([np.full((9, 18), 255), np.zeros((9, 18))]).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    file = io.BytesIO()
    image.save(file, "png", exif=exif)
    turned = images.middle(file.getvalue(), 6)
    assert turned[:, 0].max() < 40 and turned[:, -1].min() > 215
    icon = Image.new("LA", (12, 12))  # all is black, and most of it transparent: on white
    icon.paste((0, 255), (0, 0, 6, 6))
    stored = images.middle(icon, 12)
    assert (stored[:5, :5] <= 12).all() and (stored[8:, 8:] >= 254).all()


PROCESSORS = cases("processors")


@pytest.mark.parametrize("kind, settings, said", PROCESSORS)
def test_pixels_are_those_of_the_image_processor_of_the_model(task, tmp_path, kind, settings, said):
    """Of all colors, however it normalizes; one that does anything else is refused."""
    own = getattr(transformers, f"{kind}ImageProcessorPil")(**settings)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    own.save_pretrained(tmp_path / "model")
    cfg = task.TaskConfig(model_name_or_path=str(tmp_path / "model"))
    data = types.SimpleNamespace(folder=tmp_path)
    if said:
        with pytest.raises(ValueError, match=said):
            task.image_data.prepare_processor(cfg, tmp_path)
        return
    task.image_data.prepare_processor(cfg, tmp_path)
    for color in np.random.default_rng(0).integers(0, 256, (9, 1, 1, 3)).astype(np.uint8):
        image = np.tile(color, (60, 60, 1))
        theirs = own(Image.fromarray(image), return_tensors="pt")["pixel_values"]
        mine = task.image_data.pixel_values([{"image": image}], cfg, data)
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_unreadable_images_are_refused_or_left_out(kit, config, prepare, tmp_path, capsys):
    root = folders(tmp_path / "a")
    (root / "red" / "0.png").write_bytes(b"no image")
    half = root / "green" / "3.png"
    half.write_bytes(half.read_bytes()[:200])
    _, _, parts = prepare(root, incomplete_rows="skip")
    printed = capsys.readouterr().out
    assert f"left out: {root}/red/0.png: its format is none of JPEG" in printed
    assert f"Preparing data: left out: {half}: " in printed and sum(map(len, parts)) == 24 - 2
    (root / "red" / "0.png").unlink()
    said = refusal(kit, config(root))
    assert re.match(f"task.data: {half}.*; --task.incomplete_rows skip leaves such", said)


def test_one_changed_image_of_many_is_another_digest(prepare, tmp_path):
    """Also of one that a table names."""
    data = table(tmp_path, 40)
    _, first, parts = prepare(data)
    image = tmp_path / "images" / "red" / "17.png"
    pixels = np.array(Image.open(image))
    pixels[3, 4, 1] ^= 64
    Image.fromarray(pixels).save(image)
    _, second, others = prepare(data)
    assert first.folder != second.folder
    assert [part.digest() for part in parts] != [part.digest() for part in others]
    assert prepare(data)[1].folder == second.folder


def test_a_table_is_read_once_for_the_images_that_it_names(config, tmp_path, monkeypatch):
    data = table(tmp_path)
    cfg = config(data)
    Path(cfg.cache_dir).mkdir()
    found = image_rows.named_files(cfg)
    assert sorted(found) == sorted(map(str, (tmp_path / "images").rglob("*.png")))
    with monkeypatch.context() as patch:
        patch.delattr(image_rows, "Input")
        assert image_rows.named_files(cfg) == found
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:-1]))
    assert image_rows.named_files(cfg) == found[:-1]


def test_a_run_that_resumes_keeps_its_classes(task, config, prepare, tmp_path):
    root = folders(tmp_path / "a")
    _, first, _ = prepare(root)
    kept = tmp_path / "identity"
    kept.mkdir()
    prepared.copy_identity(first.folder, kept)
    for i in range(8, 12):
        picture(COLORS["red"], i).save(root / "red" / f"{i}.png")
    grown = prepared.prepare(task, config(root), kept)
    assert names_of(grown) == names_of(first) and sum(map(len, grown.values())) == 28
    assert prepared.identity_of(grown.folder) == prepared.identity_of(first.folder)
    (root / "red").rename(root / "a new one")
    with pytest.raises(ValueError, match="class 'a new one' is not in the run that resumes, which"):
        prepared.prepare(task, config(root), kept)


def test_an_image_that_changes_during_training_is_named(task, prepare, tmp_path):
    cfg, prepared, (train, _) = prepare(folders(tmp_path / "a"))
    bound = contract.bind(task, cfg, prepared)
    rows, places = SampleDataset(train, bound, seed=0), [*range(len(train))]
    path = Path(train.dataset[3]["place"])
    content = path.read_bytes()
    other = picture(COLORS["green"], 77)
    for damage in (lambda: other.save(path), path.unlink):
        damage()
        with pytest.raises(UserError) as error:
            rows.__getitems__(places)
        said = str(error.value)
        assert said.startswith(f"task.data: {path}: ") and "\n" not in said
        assert said.endswith(
            "; put back the image that was prepared, and the same command continues"
        )
    worker = ExceptionWrapper(error._excinfo, where="in DataLoader worker process 0")
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):  # without its traceback
        worker.reraise()
    path.write_bytes(content)
    assert len(rows.__getitems__(places)) == len(train)


# ---- Batches and metrics -------------------------------------------------------------------------


def test_without_crops_and_flips_rows_stay_as_they_are(task, prepare, tmp_path):
    cfg, prepared, (train, _) = prepare("digits")
    bound = contract.bind(task, cfg, prepared)
    rows = [train[i] for i in range(8)]
    plain = bound.collate(rows)["pixel_values"]
    same = [bound.augment(row, torch.Generator().manual_seed(i)) for i, row in enumerate(rows)]
    assert torch.equal(bound.collate(same)["pixel_values"], plain)
    assert plain.min() == -1 and plain.max() == 1 and plain.is_contiguous()
    cfg.channels_last = cfg.flip = True
    batch = bound.collate(rows)["pixel_values"]
    assert batch.is_contiguous(memory_format=torch.channels_last) and torch.equal(batch, plain)
    draws = [torch.Generator().manual_seed(i) for i in range(200)]
    flips = [bound.augment(rows[0], draw)["image"] for draw in draws]
    image = rows[0]["image"]
    mirrored = sum(np.array_equal(each, image[:, ::-1]) for each in flips)
    assert 70 < mirrored < 130 and any(np.array_equal(each, image) for each in flips)


def test_labels_are_smoothed_and_images_mixed(task, prepare):
    cfg, prepared, (train, _) = prepare("digits", label_smoothing=0.1)
    bound = contract.bind(task, cfg, prepared)
    model = bound.build_model().eval()
    rows = [bound.augment(train[i], torch.Generator().manual_seed(i)) for i in range(8)]
    labels = torch.tensor([train[i]["label"] for i in range(8)])
    batch = bound.collate(rows)
    wanted = torch.nn.functional.cross_entropy(
        model(batch["pixel_values"]).logits, labels, reduction="sum", label_smoothing=0.1
    )
    assert task.loss_sum(model, batch).item() == pytest.approx(wanted.item(), rel=1e-6)
    assert task.count(batch) == 8

    cfg, prepared, (train, _) = prepare("digits", mixup=1.0)
    bound = contract.bind(task, cfg, prepared)
    rows = [train[i] for i in range(len(train))]
    squares = {row["image"].tobytes(): row["label"] for row in rows}
    shares = []
    for i, row in enumerate(rows[:60]):
        mixed = bound.augment(row, torch.Generator().manual_seed(i))
        label = mixed["label"]
        assert label.sum() == pytest.approx(1) and (label > 0).sum() <= 2
        if (label > 0).sum() == 2:  # of the pixels that are left, one image has all
            own = label[row["label"]]
            shares.append(own)
            other = (mixed["image"] - own * row["image"].astype(float)) / (1 - own)
            near = [np.frombuffer(each, np.uint8) for each, c in squares.items() if label[c] > 0]
            error = min(np.abs(each - other.ravel()).max() for each in near)
            assert error <= 1.01 / (1 - own)
    assert len(shares) > 30 and np.min(shares) < 0.1 and np.max(shares) > 0.9


# ---- Runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_digits_are_learned(baked, tmp_path):
    flags = ["--max_steps", 300, "--warmup_steps", 30, "--eval_every", 0, "--save_every", 0]
    printed = baked.train(1, *flags, "--output_dir", tmp_path)
    score = lines(tmp_path, "eval_loss")[-1]
    assert score["accuracy"] > 0.93 and score["macro_f1"] > 0.93
    assert "precision" in printed and "BatchNorm" not in printed
    assert (tmp_path / "confusion.png").stat().st_size > 10_000


@pytest.mark.slow
def test_folders_of_photos_train_as_the_recipe_of_imagenet_says(baked, tmp_path):
    """To the last byte on any number of processes."""
    for split, each in (("train", 12), ("val", 3)):
        folders(tmp_path / "photos" / split, each, ("jpg",))
    flags = ["--config", "configs/train/resnet50.yaml", "--task.data", tmp_path / "photos"]
    flags += ["--task.hidden_size", 64, "--task.stages", "[1,1,1,1]", "--task.image_size", 32]
    flags += ["--warmup_steps", 1, "--task.channels_last", "false"]
    flags += ["--num_epochs", 0, *STEPS, "--max_steps", 3, "--num_workers", 1]
    flags += ["--learning_rate", 1e-4, "--output_dir"]
    for processes in (1, 2):
        baked.train(processes, *flags, tmp_path / f"{processes}", "--exact", "true")
    check_same(tmp_path / "1", tmp_path / "2")
    batched = [*flags, tmp_path / "norms", "--task.architecture", "resnet_batchnorm"]
    assert "warning: the model has BatchNorm" in baked.train(1, *batched)
