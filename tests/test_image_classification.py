"""The task image_classification: what it reads, that nothing but the seed shapes a batch, and what
it answers to bad input.
"""

import errno
import io
import json
import os
import pickle
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch._utils import ExceptionWrapper

import reference
from conftest import bake, lines, load_task

COLORS = {"blue": (30, 60, 200), "green": (40, 180, 60), "red": (220, 40, 30)}
TINY = ["--task.hidden_size", "64", "--task.num_layers", "1", "--task.patch_size", "16"]
SHORT = ["--global_batch_size", "16", "--warmup_steps", "2", "--log_every", "1", *TINY]
CUT = [*SHORT, "--max_steps", "6", "--task.flip", "true", "--max_grad_norm", "0"]
CONTINUED = [*SHORT, "--max_steps", "8", "--save_every", "4", "--keep_checkpoints", "0"]
CONTINUED += ["--task.dropout", "0.1"]


@pytest.fixture(scope="module")
def baked(tmp_path_factory):
    return bake(tmp_path_factory.mktemp("images"), task="image_classification", tracker="none")


@pytest.fixture(scope="module")
def task():
    """The task file, with the modules of the project that it imports."""
    return load_task("image_classification")


@pytest.fixture
def config(task, tmp_path):
    """Settings of a very small task, with the data given as keywords."""

    def make(data="digits", **fields):
        small = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_layers": 1}
        small |= {"min_crop": 1.0, "cache_dir": str(tmp_path / "cache")}
        return task.TaskConfig(data=str(data), **{**small, **fields})

    return make


def picture(color, number=0, size=(12, 12)):
    """An image of one color, and a little noise that is its own."""
    noise = np.random.default_rng([number, *color]).integers(0, 20, (*size, 3))
    return Image.fromarray((np.array(color) + noise).astype(np.uint8))


def folders(root, each=8, kinds=("png",)):
    """A folder of images for each color."""
    for name, color in COLORS.items():
        (root / name).mkdir(parents=True)
        for i in range(each):
            picture(color, i).save(root / name / f"{i}.{kinds[i % len(kinds)]}")
    return root


def table(root, kind, each=8):
    """The same images, with a table that names or holds them."""
    folders(root / "images", each)
    files = sorted((root / "images").rglob("*.png"))
    rows = [(str(file.relative_to(root)), file.parent.name) for file in files]
    path = root / f"rows.{kind.split()[0]}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps({"image": i, "label": c}) for i, c in rows))
    elif kind == "csv":
        path.write_text("image,label\n" + "".join(f"{i},{c}\n" for i, c in rows))
    else:
        import pyarrow as pa
        import pyarrow.parquet

        images = [image for image, _ in rows]
        if kind == "parquet of bytes":
            images = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
        columns = {"image": images, "label": [label for _, label in rows]}
        pa.parquet.write_table(pa.table(columns), path)
    return path


def names(prepared):
    return json.loads((prepared / "labels.json").read_text())


def check_colors(task, cfg, count):
    """Whether both parts together have all images, each with the color of its class."""
    prepared = task.prepare_data(cfg)
    parts = task.datasets(cfg, prepared)
    assert names(prepared) == sorted(COLORS)
    assert sum(map(len, parts)) == count and min(map(len, parts)) >= 3
    for part in parts:
        for i in range(len(part)):
            image, label, _ = part[i]
            color = COLORS[sorted(COLORS)[label]]
            assert image.shape == (8, 8, 3) and image.dtype == np.uint8
            assert np.abs(image.mean((0, 1)) - np.array(color) - 9.5).max() < 8


# ---- Reading -------------------------------------------------------------------------------------


KINDS = ["jsonl", "csv", "parquet", "parquet of bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_tables_name_or_hold_images(task, config, tmp_path, kind):
    check_colors(task, config(table(tmp_path, kind)), 24)


def test_a_folder_of_images_for_each_class(task, config, tmp_path, monkeypatch):
    folders(tmp_path / "a", 10, ("png", "jpg", "JPEG", "bmp", "webp"))
    (tmp_path / "a" / ".ipynb_checkpoints").mkdir()
    picture((0, 0, 0)).save(tmp_path / "a" / ".ipynb_checkpoints" / "1.png")
    check_colors(task, config(tmp_path / "a"), 30)
    monkeypatch.chdir(tmp_path)
    check_colors(task, config("a"), 30)
    folders(tmp_path / "b", 4)
    cfg = config(tmp_path / "a", validation_data=str(tmp_path / "b"))
    check_colors(task, cfg, 42)
    prepared = task.prepare_data(cfg)
    assert list(map(len, task.datasets(cfg, prepared))) == [30, 12]


def test_images_on_both_sides_are_told(task, config, tmp_path, capsys):
    """In other files, and of other formats: what counts are the pixels that the model sees."""
    folders(tmp_path / "a", 10)
    folders(tmp_path / "b", 4)
    own = next((tmp_path / "a").rglob("*.png"))
    shutil.copy(own, tmp_path / "b" / own.parent.name / "again.png")
    task.prepare_data(config(tmp_path / "a", validation_data=str(tmp_path / "b")))
    said = [line for line in capsys.readouterr().out.splitlines() if "training rows too" in line]
    both = {path.read_bytes() for path in (tmp_path / "a").rglob("*.png")}
    number = sum(path.read_bytes() in both for path in (tmp_path / "b").rglob("*.png"))
    assert number >= 1 and len(said) == 1 and f" {number:,} of 13 validation rows" in said[0]


def test_a_data_set_of_the_hub(task, config, tmp_path, monkeypatch):
    import datasets

    images = [picture(color, i) for color in COLORS.values() for i in range(8)]
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(COLORS))}
    columns = {"image": images, "label": [c for c in range(3) for _ in range(8)]}
    hub = datasets.Dataset.from_dict(columns, datasets.Features(kinds))
    monkeypatch.setattr(task.image_data.hub, "load_hub_split", lambda *_: hub)
    check_colors(task, config("somebody/colors", data_revision="0" * 40), 24)


def test_the_middle_of_an_upright_image_is_stored(task):
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 255
    assert task.images.square(Image.fromarray(wide), 10)[:, 1:-1].min() > 200
    image = Image.fromarray(np.vstack([np.full((9, 18), 255), np.zeros((9, 18))]).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    file = io.BytesIO()
    image.save(file, "png", exif=exif)
    turned = task.images.square({"bytes": file.getvalue()}, 6)
    assert turned[:, 0].max() < 40 and turned[:, -1].min() > 215
    palette = picture(COLORS["red"]).convert("P")
    assert (
        task.images.square(palette, 6).shape
        == task.images.square(palette.convert("LA"), 6).shape
        == (6, 6, 3)
    )


def icon(number, kind, size=12):
    """A file in which all is black, and shape is in what is transparent: a square in a corner."""
    alpha = np.zeros((size, size), np.uint8)
    alpha[: number + 2, : number + 2] = 255
    black = Image.new("RGB", (size, size))
    black.putalpha(Image.fromarray(alpha))
    file, options = io.BytesIO(), {}
    if kind in ("P", "P of bytes", "GIF", "animated GIF"):
        black = Image.fromarray(1 - alpha // 255)
        black.putpalette([0] * 12)
        options["transparency"] = bytes([255, 0, 9]) if kind == "P of bytes" else 1
        if kind == "animated GIF":
            options |= {"save_all": True, "append_images": [Image.fromarray(alpha)]}
    elif kind in ("LA", "RGBA"):
        black = black.convert(kind)
    elif kind == "RGB with tRNS":
        black = Image.fromarray(np.stack([np.zeros_like(alpha), 255 - alpha, alpha * 0], -1))
        options["transparency"] = (0, 255, 0)
    black.save(file, kind[-4:].strip() if "GIF" in kind or kind == "WEBP" else "PNG", **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "kind",
    ["RGBA", "LA", "P", "P of bytes", "RGB with tRNS", "GIF", "animated GIF", "WEBP"],
)
def test_what_is_transparent_is_put_on_the_background(task, kind):
    for background, color in [("white", (255, 255, 255)), ("#00f", (0, 0, 255))]:
        stored = task.images.square({"bytes": icon(4, kind)}, 12, background)
        assert (stored[:5, :5] <= 12).all() and (np.abs(stored[8:, 8:] - color) <= 1).all()


def test_transparent_images_are_counted_and_their_ground_is_part_of_the_data(
    task, config, tmp_path, capsys
):
    for name in ("a", "b"):
        (tmp_path / "icons" / name).mkdir(parents=True)
        for i in range(5):
            (tmp_path / "icons" / name / f"{i}.png").write_bytes(
                icon(i + 5 * (name == "b"), "RGBA")
            )
    picture(COLORS["red"]).convert("RGBA").save(tmp_path / "icons" / "a" / "opaque.png")
    found = []
    for background in ("white", "navy"):
        cfg = config(tmp_path / "icons", background=background)
        prepared = task.prepare_data(cfg)
        printed = capsys.readouterr().out
        assert f"Preparing data: 10 of 11 images are transparent: put on {background}\n" in printed
        parts = task.datasets(cfg, prepared)
        assert len({part[i][0].tobytes() for part in parts for i in range(len(part))}) == 11
        found.append((prepared, task.cache.content_digest(prepared)))
        assert task.build_model(cfg, prepared).config.to_dict()["background"] == background
    assert not {*found[0]} & {*found[1]}


def test_samples_are_of_all_classes_even_where_rows_are_in_their_order(task, tmp_path, monkeypatch):
    seen = {"side": 4, "mean": [0.5] * 3, "std": [0.5] * 3, "channels_last": False}
    rows = [(np.zeros((4, 4, 3), np.uint8), i // 100, seen) for i in range(800)]

    class Model(torch.nn.Module):  # takes all for class 0
        device = "cpu"

        def forward(self, pixel_values):
            return type("Answer", (), {"logits": torch.eye(8)[[0] * len(pixel_values)]})

    figures = []
    monkeypatch.setattr(
        "samestep.base.pictures.save_figure", lambda figure, path: figures.append(figure)
    )
    task.draw_samples(Model(), rows, [f"kind {i}" for i in range(8)], tmp_path / "samples.png")
    titles = [axes.get_title() for axes in figures[0].axes]
    true = [title.partition("true ")[2] for title in titles]
    assert len(titles) == 16 and {*true[:7]} == {*true[7:14]} == {f"kind {i}" for i in range(1, 8)}
    assert "of 256 predictions are wrong (of 800 validation images)" in figures[0].get_suptitle()


def test_equal_images_are_in_one_part_and_each_class_is_in_both(task, config, tmp_path):
    folders(tmp_path / "a", 20)
    for i in range(20):
        shutil.copy(tmp_path / "a" / "red" / f"{i}.png", tmp_path / "a" / "red" / f"copy{i}.png")
    cfg = config(tmp_path / "a", validation_fraction=0.2)
    prepared = task.prepare_data(cfg)
    seen = [
        {part[i][0].tobytes() for i in range(len(part))} for part in task.datasets(cfg, prepared)
    ]
    assert not seen[0] & seen[1] and len(seen[0] | seen[1]) == 60
    labels = [part.labels[part.numbers] for part in task.datasets(cfg, prepared)]
    assert np.bincount(labels[1]).tolist() == [4, 4, 8]


def test_a_disk_without_room_is_known_before_anything_is_written(
    task, config, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(ValueError, match=r"^task.cache_dir: .* has 0.0 MB left"):
        task.prepare_data(config(folders(tmp_path / "a")))


def test_unreadable_images_are_refused_or_named_and_left_out(task, config, tmp_path, capsys):
    root = folders(tmp_path / "a", 16)
    for i in range(12):
        (root / "red" / f"{i}.png").write_bytes(b"no image")
    whole = (root / "green" / "3.png").read_bytes()
    (root / "green" / "3.png").write_bytes(whole[: len(whole) // 2])
    deep = np.full((9, 9), 40_000, np.uint16)
    Image.fromarray(deep).save(root / "blue" / "0.png")
    with pytest.raises(ValueError) as error:
        task.prepare_data(config(root))
    message = str(error.value)
    assert message.startswith(f"task.data: cannot read {root}/blue/0.png: its pixels have more")
    assert (
        "of 48 images 14 cannot" in message
        and "--task.corrupt skip" in message
        and "\n" not in message
    )
    capsys.readouterr()
    cfg = config(root, corrupt="skip")
    prepared = task.prepare_data(cfg)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 12 and printed[-1] == "and 4 more"
    assert printed[2].startswith(f"left out: {root}/green/3.png: ")
    assert printed[3] == f"left out: {root}/red/0.png: not an image"
    assert sum(map(len, task.datasets(cfg, prepared))) == 34


# ---- Decoded, or from the files ------------------------------------------------------------------


@pytest.fixture
def later(task, monkeypatch):
    """Lets the two seconds pass within which what changed is not in the memo of digests."""
    now = task.cache.time.time_ns
    monkeypatch.setattr(task.cache.time, "time_ns", lambda: now() + 3_000_000_000)


def content_of(task, cfg):
    """The digest of the data, its folder, and all rows of both parts."""
    prepared = task.prepare_data(cfg)
    parts = task.datasets(cfg, prepared)
    rows = [[(part[i][0].tobytes(), part[i][1]) for i in range(len(part))] for part in parts]
    return task.cache.content_digest(prepared), prepared, rows


@pytest.mark.parametrize("kind", ["digits", "folders", "skip", *KINDS])
def test_rows_are_the_same_decoded_and_from_the_files(task, config, tmp_path, kind, capsys):
    fields = {"stored_size": 9, "corrupt": "skip" if kind == "skip" else "refuse"}
    data = "digits"
    if kind in ("folders", "skip"):
        data = folders(tmp_path / "a", 12, ("png", "jpg", "webp", "gif"))
        (data / "red" / "0.png").write_bytes(icon(5, "RGBA"))
    elif kind in KINDS:
        data = table(tmp_path, kind, 12)
    if kind == "skip":
        (data / "blue" / "0.png").write_bytes(b"no image")
        (data / "red" / "11.gif").write_bytes(b"no image")
    if kind == "digits":
        fields["corrupt"] = "refuse"
    kept = content_of(task, config(data, **fields))
    printed = capsys.readouterr().out
    decoded = content_of(task, config(data, decoded_gb=0, **fields))
    assert kept[0] == decoded[0] and kept[2] == decoded[2] and kept[1] != decoded[1]
    assert ("left out" in printed) == (kind == "skip")
    assert "are more than task.decoded_gb, 0: decoded whenever they" in capsys.readouterr().out
    assert {path.name for path in kept[1].iterdir()} == {
        "images.npy", "labels.json", "labels.npy", "train.npy", "validation.npy", "index",
    }  # fmt: skip
    assert not (decoded[1] / "images.npy").exists()
    train, _ = task.datasets(config(data, decoded_gb=0, **fields), decoded[1])
    assert len(pickle.dumps(train)) < 10_000
    again = pickle.loads(pickle.dumps(train))
    assert [again[i][0].tobytes() for i in range(3)] == [row for row, _ in kept[2][0][:3]]


def test_the_limit_is_the_size_of_the_squares(task, config, tmp_path):
    root = folders(tmp_path / "a")  # 24 squares of 8 x 8 x 3 bytes
    for limit, kept in ((24 * 192 / 1e9, True), (24 * 192 / 1e9 - 1e-12, False)):
        prepared = task.prepare_data(config(root, decoded_gb=limit))
        assert (prepared / "images.npy").exists() == kept


def test_encoded_images_lie_in_files_of_bounded_size(task, config, tmp_path, monkeypatch):
    monkeypatch.setattr(task.image_store.pieces, "FILE_SIZE", 1000)
    path = table(tmp_path, "parquet of bytes", 12)
    images = {file.read_bytes() for file in (tmp_path / "images").rglob("*.png")}
    shutil.rmtree(tmp_path / "images")  # the table has them
    prepared = task.prepare_data(config(path, decoded_gb=0))
    stored = [file.stat().st_size for file in prepared.glob("sources-*.bin")]
    assert len(stored) > 5 and max(stored) <= 1000 and sum(stored) == sum(map(len, images))
    found = task.image_store.pieces.Pieces(prepared, "sources")
    assert {found[i] for i in range(len(found))} == images


@pytest.mark.parametrize("damage", ["gone", "other", "half"])
def test_an_image_that_changes_during_training_is_named(task, config, tmp_path, damage):
    from samestep.step import batches

    cfg = config(folders(tmp_path / "a"), decoded_gb=0)
    train, _ = task.datasets(cfg, task.prepare_data(cfg))
    rows = batches.SampleDataset(train, task, seed=0)
    path = next(p for p in map(train.originals.place, train.numbers) if "green" in p)
    content = (tmp_path / path).read_bytes()
    if damage == "gone":
        (tmp_path / path).unlink()
    elif damage == "other":
        picture(COLORS["green"], 77).save(path)
    else:
        (tmp_path / path).write_bytes(content[: len(content) // 2])
    positions = list(range(len(train)))
    with pytest.raises(batches.UserError) as error:
        rows.__getitems__(positions)
    said = str(error.value)
    assert said.startswith(f"task.data: {path}: ") and "\n" not in said
    assert said.endswith("; put back the image that was prepared, and the same command continues")
    worker = ExceptionWrapper(error._excinfo, where="in DataLoader worker process 0")
    with pytest.raises(batches.UserError, match=f"^{re.escape(said)}$"):  # without its traceback
        worker.reraise()
    (tmp_path / path).write_bytes(content)
    assert len(rows.__getitems__(positions)) == len(train)


def test_a_failing_disk_is_no_fault_of_the_data(task, config, tmp_path, monkeypatch):
    cfg = config(folders(tmp_path / "a"), decoded_gb=0)
    train, _ = task.datasets(cfg, task.prepare_data(cfg))

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(task.image_store, "square", fail)
    with pytest.raises(OSError, match="Input/output error"):  # a crash, which is tried again
        train[0]


@pytest.mark.parametrize("seed", range(20))
def test_images_are_held_out_as_other_rows_are(task, seed):
    random = np.random.default_rng(seed)
    count, groups = random.integers(1, 200, 2)
    known = random.integers(0, 256, (groups, 32)).astype(np.uint8)
    hashes, classes = known[random.integers(0, groups, count)], random.integers(0, 9, count)
    fraction = random.choice([0.01, 0.1, 0.5, 0.9])
    chosen = task.image_store.hold_out(hashes, classes, fraction)
    keys = [each.tobytes().hex() for each in hashes]
    parts = reference.hold_out(range(count), fraction, lambda i: keys[i], lambda i: classes[i])
    assert np.flatnonzero(~chosen).tolist() == sorted(parts[0])
    assert np.flatnonzero(chosen).tolist() == sorted(parts[1])


def test_a_disk_that_gets_full_is_no_fault_of_an_image(task, config, tmp_path, monkeypatch):
    monkeypatch.setattr(task.image_store.os, "pwrite", lambda *_: 0)
    with pytest.raises(ValueError, match="^task.cache_dir: cannot write .*: No space left"):
        task.prepare_data(config(folders(tmp_path / "a"), corrupt="skip"))


# ---- Many files ----------------------------------------------------------------------------------


@pytest.fixture
def asked(task, monkeypatch):
    """The paths whose status was asked for, and those of files that were read."""
    stat, read, paths = os.stat, task.cache.hash_file, {"stat": [], "read": []}

    def noted_stat(path, *arguments, **fields):
        paths["stat"].append(str(path))
        return stat(path, *arguments, **fields)

    def noted_read(path):
        paths["read"].append(str(path))
        return read(path)

    monkeypatch.setattr(os, "stat", noted_stat)
    monkeypatch.setattr(task.cache, "hash_file", noted_read)

    def take(below):
        found = {}
        for name, all_of_them in paths.items():
            found[name] = [p for p in all_of_them if p.startswith(str(below)) and p[-4:] == ".png"]
            all_of_them.clear()
        return found

    return take


@pytest.mark.parametrize("kind", ["folders", "csv"])
def test_a_ready_cache_asks_about_no_file_of_many(
    task, config, tmp_path, later, asked, monkeypatch, kind
):
    monkeypatch.setattr(task.cache, "MANY_FILES", 10)
    data = folders(tmp_path / "a", 20) if kind == "folders" else table(tmp_path, "csv", 20)
    images = tmp_path / ("a" if kind == "folders" else "images")
    cfg = config(data)
    first = task.prepare_data(cfg)
    assert len({*asked(images)["read"]}) == 60
    assert task.prepare_data(cfg) == first and asked(images) == {"stat": [], "read": []}
    assert len(json.loads((tmp_path / "cache" / "digests.json").read_text())) < 10

    digest = task.cache.content_digest(first)
    (images / "red" / ".note").write_text("hidden")
    assert task.cache.content_digest(task.prepare_data(cfg)) == digest
    read = asked(images)["read"]
    assert len(read) == 20 and all("red" in path for path in read)  # of one folder alone
    assert task.prepare_data(cfg) == first

    picture(COLORS["blue"], 99).save(images / "new.png")
    (images / "new.png").replace(images / "red" / "3.png")
    changed = task.prepare_data(cfg)
    assert task.cache.content_digest(changed) != digest
    new = task.cache.content_digest(changed)
    picture(COLORS["blue"], 98).save(images / "red" / "3.png")  # in place: not seen
    assert task.cache.content_digest(task.prepare_data(cfg)) == new
    os.utime(images / "red")
    assert task.cache.content_digest(task.prepare_data(cfg)) not in (digest, new)
    (images / "red" / "4.png").rename(images / "red" / "44.png")
    if kind == "folders":
        assert len({task.prepare_data(cfg), first, changed}) == 3
    else:
        with pytest.raises(ValueError, match="red/4.png: .Errno 2. No such file"):
            task.prepare_data(cfg)


def test_folders_that_have_just_changed_are_read_again(task, config, tmp_path, asked, monkeypatch):
    monkeypatch.setattr(task.cache, "MANY_FILES", 10)
    root = folders(tmp_path / "a", 20)
    monkeypatch.setattr(task.cache, "prepare_once", lambda cfg, name_folder, *_: name_folder())
    cfg = config(root)
    first = task.prepare_data(cfg)
    asked(root)
    picture(COLORS["blue"], 99).save(root / "red" / "3.png")  # in place, a moment later
    assert task.prepare_data(cfg) != first and len(asked(root)["read"]) == 60


def test_a_folder_of_which_a_table_names_little_is_not_read(
    task, config, tmp_path, later, asked, monkeypatch
):
    monkeypatch.setattr(task.cache, "MANY_FILES", 10)
    path = table(tmp_path, "csv", 20)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:16]) + "images/red/1.png,x")
    task.prepare_data(config(path))
    assert len({*asked(tmp_path / "images" / "red")["read"]}) == 1
    assert len({*asked(tmp_path / "images" / "green")["read"]}) == 0


# ---- Batches -------------------------------------------------------------------------------------


def augmented(task, dataset, seed):
    rows = [task.augment(dataset[i], torch.Generator().manual_seed(seed + i)) for i in range(8)]
    return task.collate(rows)["pixel_values"]


def test_augmentation_depends_on_its_generator_alone(task, config):
    cfg = config(min_crop=0.5, flip=True, image_size=12)
    prepared = task.prepare_data(cfg)
    train, validation = task.datasets(cfg, prepared)
    assert train[0][0].shape == (12, 12, 3)  # digits have no more to show
    folder = task.TaskConfig(data="photos", min_crop=0.5, image_size=12)
    assert task.image_data.stored_side(folder, False) == 14
    torch.manual_seed(1)
    once = augmented(task, train, 5)
    torch.manual_seed(2)
    assert torch.equal(once, augmented(task, pickle.loads(pickle.dumps(train)), 5))
    assert len(pickle.dumps(train)) < 10_000
    other = augmented(task, train, 500)
    assert once.shape == (8, 3, 12, 12) and all(
        not torch.equal(a, b) for a, b in zip(once, other, strict=True)
    )
    batch = task.collate([validation[i] for i in range(4)])
    assert batch["pixel_values"].shape == (4, 3, 12, 12) and task.count(batch) == 4
    assert batch["pixel_values"].is_contiguous() and batch["labels"].dtype == torch.int64


def test_without_crops_and_flips_rows_stay_as_they_are(task, config):
    cfg = config()
    prepared = task.prepare_data(cfg)
    train, _ = task.datasets(cfg, prepared)
    plain = task.collate([train[i] for i in range(8)])
    assert torch.equal(augmented(task, train, 0), plain["pixel_values"])
    assert plain["pixel_values"].min() == -1 and plain["pixel_values"].max() == 1
    seen = train.view | {"channels_last": True, "flip": True}
    rows = [(image, label, seen) for image, label, _ in (train[i] for i in range(8))]
    batch = task.collate(rows)
    assert batch["pixel_values"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch["pixel_values"], plain["pixel_values"])
    flips = [task.augment(rows[0], torch.Generator().manual_seed(i))[0] for i in range(200)]
    mirrored = sum(np.array_equal(image, rows[0][0][:, ::-1]) for image in flips)
    assert 70 < mirrored < 130 and any(np.array_equal(image, rows[0][0]) for image in flips)


# ---- Models and metrics --------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["vit", "resnet"])
def test_metrics_are_those_of_scikit_learn_over_all_images(task, config, architecture, tmp_path):
    from sklearn import metrics

    size = {"hidden_size": 64} if architecture == "resnet" else {}
    cfg = config(architecture=architecture, **size)
    prepared = task.prepare_data(cfg)
    _, rows = task.datasets(cfg, prepared)
    torch.manual_seed(0)
    model = task.build_model(cfg, prepared).eval()
    rows = [rows[i] for i in range(len(rows))]
    cuts = [task.eval_sums(model, task.collate(rows[i : i + 50])) for i in range(0, len(rows), 50)]
    sums = {name: sum(cut[name].double() for cut in cuts) for name in cuts[0]}
    scores = task.metrics(sums)
    batch = task.collate(rows)
    with torch.no_grad():
        answer = model(**batch)
    assert scores["loss"] == pytest.approx(answer.loss.item(), rel=1e-5)
    assert task.loss_sum(model, batch).item() == pytest.approx(scores["loss"] * len(rows), rel=1e-5)
    guesses = answer.logits.argmax(1)
    assert scores["accuracy"] == pytest.approx(metrics.accuracy_score(batch["labels"], guesses))
    wanted = metrics.f1_score(batch["labels"], guesses, average="macro", zero_division=0)
    assert scores["macro_f1"] == pytest.approx(wanted)
    shown = task.report(model, sums, tmp_path, cfg, prepared)
    wanted = metrics.precision_recall_fscore_support(batch["labels"], guesses, zero_division=0)
    table = [line.split() for line in shown["classes"].splitlines()[2:]]
    assert [name for name, *_ in table] == [str(i) for i in range(10)]
    for row, *numbers in zip(table, *wanted, strict=True):
        assert [float(word) for word in row[1:]] == pytest.approx(numbers, abs=5e-4)
    for name in ("confusion", "samples"):
        with Image.open(shown[name]) as drawn:
            assert min(drawn.size) > 500


def test_pictures_of_many_classes_with_odd_names(task, config, tmp_path):
    matrix = np.random.default_rng(0).integers(0, 3, (120, 120)).astype(float)
    odd = [f"$class_{i} with a long name {'x' * 60}" for i in range(120)]
    shown = task.classification.report_table(torch.tensor(matrix), odd, tmp_path)
    with Image.open(shown["confusion"]) as drawn:
        assert 1000 < max(drawn.size) < 4000
    assert "the 30 of 120 classes with the most mistakes" in shown["classes"]
    assert len(shown["classes"].splitlines()) == 32


def test_a_folder_of_splits_is_known_by_its_names(task, config, tmp_path, capsys):
    for split in ("train", "val", "test"):
        for name, color in COLORS.items():
            (tmp_path / "a" / split / name).mkdir(parents=True)
            for number in range(4):
                shade = [value * (8 - number) // 8 for value in color]
                picture(shade).save(tmp_path / "a" / split / name / f"{split}_{number}.png")
    given = {"validation_data": str(tmp_path / "a/val")}
    (tmp_path / "a/test/red/odd.png").write_text("no image")
    folders = [
        task.prepare_data(config(tmp_path / "a")),
        task.prepare_data(config(tmp_path / "a/train", **given)),
    ]
    digests = [task.cache.content_digest(folder) for folder in folders]
    assert digests[0] == digests[1]
    rows = len(COLORS) * 4
    said = f"{rows} files to train on, {rows} to evaluate on; not read: {rows + 1} for test"
    assert said in capsys.readouterr().out


def test_a_class_named_train_is_a_class(task, config, tmp_path):
    for name, color in zip(("bus", "train", "car"), COLORS.values(), strict=False):
        (tmp_path / "a" / name).mkdir(parents=True)
        for number in range(4):
            shade = [value * (8 - number) // 8 for value in color]
            picture(shade).save(tmp_path / "a" / name / f"test_{number}.png")
    folder = task.prepare_data(config(tmp_path / "a"))
    assert json.loads((folder / "labels.json").read_text()) == ["bus", "car", "train"]


# ---- Bad input -----------------------------------------------------------------------------------


BAD = [
    ("missing", {}, "nothing to read at"),
    ("empty", {"empty": None}, "nothing to read at"),
    ("a", {"a/red/1.png": "red"}, "two classes"),
    ("a", {"a/1.png": "red", "a/red/1.png": "red"}, "it should be {root}/a/CLASS/1.png"),
    ("a", {"a/new/red/1.png": "red"}, "not in the folder of its class"),
    ("a", {"a/train/red/1.png": "red", "a/train/red/2.png": "blue"}, "2 images of 1 classes (red)"),
    ("a", {"a/val/red/1.png": "red", "a/test/blue/1.png": "blue"}, "and none to train on; name"),
    ("a", {"a/red/1.png": "red", "a/blue/1.png": "blue"}, "no images to evaluate on"),
    ("a.csv", {"a.csv": "image,label\n1.png,\n"}, "a.csv, line 2: 1.png: the label is empty"),
    ("a.csv", {"a.csv": "image,label\n ,a\n"}, "a.csv, line 2: the image is empty; --task.incompl"),
    (
        "a.jsonl",
        {"a.jsonl": '{"image": "1.png", "label": null}'},
        "line 1: 1.png: the label is empty",
    ),
    ("a.csv", {"a.csv": "file,label\n1.png,a\n"}, "--task.image_column"),
    ("a.csv", {"a.csv": "image,label\n"}, "a.csv has 0 images of 0 classes (none); give at least"),
    ("a.csv", {"a.csv": "image,label\n" + "no/1.png,a\nno/2.png,b\n" * 600}, "no/1.png: [Errno 2]"),
    ("a.csv", {"a.csv": "image,label\nno.png,a\nno.png,b\n"}, "line 2: no.png: [Errno 2]"),
    (
        "a.jsonl",
        {"a.jsonl": '{"image": 5, "label": 1.5}'},
        "a.jsonl, line 1: the label is 1.5; give text",
    ),
    ("a.jsonl", {"a.jsonl": '{"image": 5, "label": "a"}'}, "line 1: the image is 5; give a path"),
    ("a.jsonl", {"a.jsonl": '{"image": "1.png", "label": NaN}'}, "the label is empty; --task.inc"),
    ("a.parquet", {"a.parquet": "PAR1 but truncated"}, "cannot read"),
]


@pytest.mark.parametrize("data, files, said", BAD)
def test_bad_data_is_answered_in_one_line(task, config, tmp_path, data, files, said):
    for name, content in files.items():
        path = tmp_path / name
        (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
        if content in COLORS:
            picture(COLORS[content]).save(path)
        elif content:
            path.write_text(content)
    with pytest.raises(ValueError) as error:
        task.prepare_data(config(tmp_path / data))
    message = str(error.value)
    assert message.startswith("task.") and said.format(root=tmp_path) in message
    assert "\n" not in message and str(tmp_path) in message


def test_a_class_that_training_does_not_know_is_refused(task, config, tmp_path):
    folders(tmp_path / "a")
    (tmp_path / "b" / "pink").mkdir(parents=True)
    picture((250, 150, 150)).save(tmp_path / "b" / "pink" / "1.png")
    with pytest.raises(ValueError) as error:
        task.prepare_data(config(tmp_path / "a", validation_data=str(tmp_path / "b")))
    message = str(error.value)
    assert message.startswith(f"task.validation_data: {tmp_path}/b/pink/1.png: class 'pink'")
    assert "blue, green, red" in message and "\n" not in message


def test_a_class_without_a_readable_training_image_is_refused(task, config, tmp_path):
    folders(tmp_path / "a", 2)
    folders(tmp_path / "b", 2)
    for i in range(2):
        (tmp_path / "a" / "red" / f"{i}.png").write_bytes(b"no image")
    given = {"validation_data": str(tmp_path / "b"), "corrupt": "skip"}
    with pytest.raises(ValueError, match="/b/red/0.png: class 'red' is not in the training data"):
        task.prepare_data(config(tmp_path / "a", **given))


@pytest.mark.parametrize(
    "field, value",
    [
        ("image_size", 10), ("hidden_size", 18), ("validation_data", "somewhere"),
        ("background", "no such"), ("background", "#ffffff80"), ("background", ""),
        ("background", "rgb(300, 0, 0)"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_before_anything_is_read(task, config, field, value):
    with pytest.raises(ValueError, match=f"^task.{field} is .* but must be"):
        task.prepare_data(config(**{field: value}))
    with pytest.raises(ValueError, match="^task.hidden_size is 96 but must be a multiple of 64"):
        task.prepare_data(config(architecture="resnet", hidden_size=96))


def test_a_folder_without_a_model_is_refused_at_once(task, config, tmp_path):
    with pytest.raises(ValueError, match="^task.model_name_or_path: .* holds no model"):
        task.prepare_data(config(model_name_or_path=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="has no preprocessor_config.json, as models of images do"):
        task.prepare_data(config(model_name_or_path=str(tmp_path)))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ValueError, match="^task.model_name_or_path: cannot load") as error:
        task.prepare_data(config(model_name_or_path=str(tmp_path)))
    assert "\n" not in str(error.value)


def test_the_hub_is_asked_once_for_a_model_that_is_not_here(task, config, monkeypatch):
    import huggingface_hub

    asked = []

    def unreachable(_, name, revision, timeout):
        asked.append((name, revision))
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a request was made"))
    with pytest.raises(ValueError, match="owner/x .* nor on the Hub, or the .*: no network$"):
        task.prepare_data(config(model_name_or_path="owner/x", revision="v1"))
    assert asked == [("owner/x", "v1")]


@pytest.mark.parametrize(
    "name, said",
    [
        ("runs/default/model", "there is no folder runs/default/model; run make train first"),
        ("./runs/default", "there is no folder ./runs/default; run make train first"),
        ("runs/mine", "there is no folder runs/mine; give an existing one, or OWNER/NAME of the"),
        ("/no/such", "there is no folder /no/such; give an existing one"),
        ("~/no-such", "there is no folder ~/no-such; give"), ("../x", "there is no folder ../x; "),
        ("a/b/c", "there is no folder a/b/c; "), ("owner/", "there is no folder owner/; "),
        ("here/x", "there is no folder here/x; "), ("a--b", "there is no folder a--b; "),
        ("two words", "there is no folder two words; "),
        ("here/file", "here/file is a file; give the folder that it is in"),
        ("owner/x", r"owner/x \(revision main\) is not in the local cache, and HF_HUB_OFFLINE f"),
    ],
)  # fmt: skip
def test_no_request_is_made_for_a_model_that_is_missing(
    task, config, tmp_path, monkeypatch, name, said
):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").touch()
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: name == "owner/x")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a request was made"))
    with pytest.raises(ValueError, match=f"^task.model_name_or_path: {said}"):
        task.prepare_data(config(model_name_or_path=name))


# ---- Runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(baked, tmp_path_factory):
    """What runs of one process printed, by their name; their folders are runs/NAME."""
    from transformers import ConvNextImageProcessor, ResNetConfig, ResNetForImageClassification

    folder = tmp_path_factory.mktemp("norms")
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    ResNetForImageClassification(config).save_pretrained(folder / "resnet")
    ConvNextImageProcessor(size={"shortest_edge": 16}).save_pretrained(folder / "resnet")
    colors = folders(folder / "colors", 10)
    (colors / "white").mkdir()
    for i in range(10):
        picture((230, 230, 230), i).save(colors / "white" / f"{i}.png")

    model = "--task.model_name_or_path"
    learnt = ["--max_steps", "300", "--warmup_steps", "30", "--eval_every", "0"]
    half = "import shutil; shutil.copytree(*(f'runs/{n}/checkpoints/step-00000004' for n in NAMES))"
    cases = {
        "trained": [*learnt, "--save_every", "0"],
        "tuned": ["--max_steps", "2", "--learning_rate", "0", model, "runs/trained/model"],
        "alone": CUT,
        "workers": [*CUT, "--num_workers", "2"],
        "whole": CONTINUED,
        "half": [*CONTINUED, "--task.decoded_gb", "0"],  # the other setting, the same run
        "norms": [*SHORT, "--max_steps", "2", model, folder / "resnet", "--task.data", colors],
    }
    before = {"half": half.replace("NAMES", "('whole', 'half')")}
    results = baked.forked(
        [
            {"flags": [*flags, "--output_dir", f"runs/{name}"], "before": before.get(name, "")}
            for name, flags in cases.items()
        ]
    )
    assert [code for code, *_ in results] == [0] * len(cases), results
    return {name: out + err for name, (_, out, err) in zip(cases, results, strict=True)}


@pytest.mark.slow
def test_the_digits_are_learnt(baked, runs):
    output, printed = baked.path / "runs" / "trained", runs["trained"]
    score = lines(output, "eval_loss")[-1]
    assert score["accuracy"] > 0.93 and score["macro_f1"] > 0.93
    assert "precision" in printed and "BatchNorm" not in printed
    for name in ("confusion.png", "samples.png"):
        assert (output / name).stat().st_size > 10_000


@pytest.mark.slow
def test_a_pipeline_agrees_with_the_evaluation(baked, task, runs, tmp_path, monkeypatch):
    from transformers import pipeline
    from transformers.utils import logging

    logging.set_verbosity_error()
    output = baked.path / "runs" / "trained"
    monkeypatch.chdir(baked.path)
    cfg = task.TaskConfig(stored_size=32)  # as in the default recipe
    prepared = task.prepare_data(cfg)
    _, rows = task.datasets(cfg, prepared)
    files = []
    for i in range(len(rows)):
        files.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(rows[i][0]).save(files[-1])
    answer = pipeline("image-classification", str(output / "model"))
    guesses = [found[0]["label"] for found in answer(files, batch_size=16)]
    right = sum(guess == str(row[1]) for guess, row in zip(guesses, rows, strict=True))
    assert right / len(rows) == pytest.approx(lines(output, "eval_loss")[-1]["accuracy"])
    inputs = answer.image_processor([Image.open(files[0])], return_tensors="pt")["pixel_values"]
    assert torch.allclose(inputs, task.collate([rows[0]])["pixel_values"], atol=1e-5)

    result = baked.run(
        "python", "-m", "samestep", "predict", "--model", output / "model", "--json", *files[:3]
    )
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["classes"][0]["label"] for each in found] == guesses[:3]


def test_workers_give_the_same_bits_and_epochs_differ(task, config):
    from samestep.step import batches

    cfg = config(min_crop=0.5, flip=True)
    prepared = task.prepare_data(cfg)
    train, _ = task.datasets(cfg, prepared)
    size = len(train)
    rows = batches.SampleDataset(train, task, seed=3)

    def pixels_of(workers, shares, rank):
        plan = batches.StepPlan(64, 16, shares, rank)
        sampler = batches.StepBatchSampler(plan, size - 64, size + 64)
        loader = batches.make_loader(rows, sampler, task, workers, pin_memory=False)
        pixels = [batch["pixel_values"] for batch, _ in loader]
        return [pixels[step * shares[rank] :][: shares[rank]] for step in range(2)]

    alone = pixels_of(0, (4,), 0)
    shared = zip(*(pixels_of(2, (3, 1), rank) for rank in range(2)), strict=True)
    for whole, parts in zip(alone, shared, strict=True):
        assert len(whole) == 4
        for mine, theirs in zip(whole, sum(parts, []), strict=True):
            assert torch.equal(mine, theirs)
    places = {i: p for p, i in enumerate(rows.ids(range(size)))}
    later = dict(zip(rows.ids(range(size, 2 * size)), range(size, 2 * size), strict=True))
    pairs = [(places[i], later[i]) for i in range(20)]
    for first, second in pairs:
        (a, one), (b, two) = rows.__getitems__([first, second])
        assert a == b and one[1] == two[1] and not np.array_equal(one[0], two[0])


@pytest.mark.slow
def test_fine_tuning_goes_on_from_a_trained_model(baked, runs):
    first, then = (
        lines(baked.path / "runs" / name, "eval_loss")[-1] for name in ("trained", "tuned")
    )
    assert then["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-6)
    assert "new weights" not in runs["tuned"]


@pytest.mark.slow
def test_batch_norm_is_warned_of_and_a_new_head_is_named(baked, runs):
    assert runs["norms"].count("warning: the model has BatchNorm") == 1
    assert "new weights for classifier.1.bias, classifier.1.weight" in runs["norms"]
    found = json.loads((baked.path / "runs/norms/model/config.json").read_text())
    assert sorted(found["label2id"]) == ["blue", "green", "red", "white"]


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_pictures_and_texts_of_an_evaluation_go_to_the_tracker(baked, tmp_path, tracker):
    output = tmp_path / "run"
    flags = ["--max_steps", "2", "--eval_every", "0", "--tracker", tracker, "--project", "pictures"]
    env = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    baked.train(1, *SHORT, *flags, "--output_dir", output, **env)
    drawn = (output / "confusion.png").read_bytes()
    if tracker == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = max(output.rglob("events.*"), key=lambda path: path.stat().st_size)
        found = EventAccumulator(str(events)).Reload()
        assert {"confusion", "samples"} <= {*found.Tags()["images"]}
        with Image.open(output / "confusion.png") as picture:
            assert found.Images("confusion")[0].width == picture.width
        assert any(tag.startswith("classes") for tag in found.Tags()["tensors"])
    elif tracker == "wandb":
        media = [path.read_bytes() for path in (output / "wandb").rglob("confusion_*.png")]
        assert media == [drawn]
    else:
        assert len([*(tmp_path / "trackio").rglob("*.png")]) == 2
