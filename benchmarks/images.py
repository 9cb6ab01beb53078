"""Compares how fast a baked project and torchvision's ImageFolder load images.

    python benchmarks/images.py                       # in the template: a table, a .json
    python benchmarks/images.py --images 300 --rounds 2 --batches 2 --workers 0

torchvision is not among benchmarks/requirements.txt: built for another PyTorch, it keeps
transformers from being imported. Install the build for your PyTorch.

The images are JPEG files of 500 x 375 pixels, about as large as those of ImageNet. All loaders give
normalised float32 batches (64, 3, 224, 224). The project cuts a square of 256 pixels from the
middle, then a random crop with 80 to 100 % of its area; "same crop" does this with torchvision's
transforms, "RandomResizedCrop" crops the whole image as people usually do. Turns are interleaved:
in a round each loader gives some batches, one after the other. Before its turn is timed, what its
workers have read ahead is thrown away.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler

import compare
from compare import HERE, say

BATCH, SIDE, MEAN, STD = 64, 224, [0.5] * 3, [0.5] * 3
KEPT, DECODED = "project, squares in the cache", "project, decoded from the files"
SAME, USUAL = "ImageFolder, same crop", "ImageFolder, RandomResizedCrop"


# ---- Work ----------------------------------------------------------------------------------------


def draw_images(root: Path, number: int) -> float:
    """Writes images of ten classes, each with details of all sizes; their mean size in kB."""
    size = 0
    for i in range(number):
        random, pixels = np.random.default_rng(i), np.zeros((375, 500, 3))
        for scale in (4, 8, 16, 32, 64, 128, 375):
            noise = random.integers(0, 256, (scale, scale * 4 // 3, 3), dtype=np.uint8)
            layer = Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC)
            pixels += (np.asarray(layer) - 128.0) * (4 / scale) ** 0.4
        file = root / f"class-{i % 10}" / f"{i:06}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8)).save(file, quality=90)
        size += file.stat().st_size
    return size / number / 1e3


def import_torchvision() -> tuple:
    """torchvision's data sets and transforms, also where it was built for another torch.

    Then its compiled operators are missing, none of which is used here; it asks for two of them.
    """
    try:
        from torchvision import datasets, transforms
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_torchvision.kept = library  # the operators go with it
        from torchvision import datasets, transforms
    return datasets, transforms


def loaders(project: Path, data: Path, workers: int) -> dict[str, Iterator]:
    """Endless batches of each loader."""
    os.chdir(project)
    if str(project) not in sys.path:
        sys.path.insert(0, str(project))
    import task
    from samestep.core import batches
    from samestep.project.startup import read_data

    datasets, transforms = import_torchvision()
    found: dict[str, Callable] = {}
    for name, limit in ((KEPT, 100), (DECODED, 0)):
        own = task.TaskConfig(data=str(data), image_size=SIDE, decoded_gb=limit)
        _, bound, (train, _), _ = read_data(SimpleNamespace(task=own), task)
        rows = batches.SampleDataset(train, bound, seed=0)
        sampler = batches.StepBatchSampler(batches.StepPlan(BATCH, BATCH), 0, BATCH * 100_000)
        found[name] = iter(batches.make_loader(rows, sampler, bound, workers, torch.device("cpu")))
    bicubic = {"interpolation": transforms.InterpolationMode.BICUBIC}
    crop = [transforms.RandomResizedCrop(SIDE, (0.8, 1.0), **bicubic)]
    middle = [transforms.Resize(256, **bicubic), transforms.CenterCrop(256)]
    tensor = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    for name, steps in ((SAME, middle + crop), (USUAL, crop)):
        rows = datasets.ImageFolder(data, transforms.Compose(steps + tensor))
        sampler = RandomSampler(rows, num_samples=BATCH * 100_000)
        found[name] = iter(DataLoader(rows, BATCH, sampler=sampler, num_workers=workers))
    return found


def measure(found: dict[str, Iterator], workers: int, rounds: int, batches: int) -> dict:
    """For each loader and round: images a second, and milliseconds of this process's CPU each."""
    rates: dict[str, dict] = {name: {"rate": [], "cpu": []} for name in found}
    names = [*found]
    for number in range(rounds):
        say(f"{workers} workers: round {number + 1} of {rounds}")
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for _ in range(2 * workers + 1):
                next(found[name])
            began, cpu_began = time.perf_counter(), time.process_time()
            for _ in range(batches):
                batch = next(found[name])
            images = batches * BATCH
            rates[name]["rate"].append(images / (time.perf_counter() - began))
            rates[name]["cpu"].append(1e3 * (time.process_time() - cpu_began) / images)
            pixels = batch[0]["pixel_values"] if isinstance(batch[0], dict) else batch[0]
            assert pixels.shape == (BATCH, 3, SIDE, SIDE) and pixels.dtype == torch.float32
    return rates


# ---- Showing -------------------------------------------------------------------------------------


def describe(report: dict) -> str:
    """The table in Markdown, and a sentence about the machine."""
    from rich import box
    from rich.table import Table

    columns, alone = ["loader"], 0 in report["rates"]
    columns += ["CPU ms an image", f"of {SAME}"] * alone
    for workers in report["rates"]:
        columns += [f"images/s, {workers} workers", f"of {SAME}"]
    shown = Table(*columns, box=box.MARKDOWN)

    def cells(rates: dict, name: str, key: str, digits: int) -> list[str]:
        pairs = zip(rates[name][key], rates[SAME][key], strict=True)
        middle, low, high = compare.middle([mine / theirs for mine, theirs in pairs])
        found = f"{median(rates[name][key]):.{digits}f}"
        return [found, f"{middle:.2f} ({low:.2f} to {high:.2f})"]

    for name in next(iter(report["rates"].values())):
        row = [name, *(cells(report["rates"][0], name, "cpu", 2) if alone else [])]
        for rates in report["rates"].values():
            row += cells(rates, name, "rate", 0)
        shown.add_row(*row)
    about = f"{report['images']:,} JPEG files of 500 x 375 pixels, {report['kb']:.0f} kB each. "
    return f"{compare.markdown(shown)}\n\n{about}{compare.about(report)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=6, help="in a turn")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("--name", default="images", help="name of the file of results")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/")
    asked = parser.parse_args()
    asked.output = asked.output.resolve()
    torch.set_num_threads(1)
    folder, here = Path(tempfile.mkdtemp(prefix="bench")), os.getcwd()
    compare.PACKAGES = ("torch", "torchvision", "pillow")
    report: dict = {**compare.about_machine(), "load": [os.getloadavg()[0]], "rates": {}}
    try:
        say("baking a project, drawing images")
        project = compare.bake(folder, task="image_classification")
        report |= {"images": asked.images, "kb": draw_images(folder / "images", asked.images)}
        for workers in asked.workers:
            found = loaders(project, folder / "images", workers)
            report["rates"][workers] = measure(found, workers, asked.rounds, asked.batches)
            del found
    finally:
        os.chdir(here)
        shutil.rmtree(folder, ignore_errors=True)
    compare.publish(report, describe, asked, "python benchmarks/images.py")


if __name__ == "__main__":
    main()
