"""Measures how a baked project prepares and reads text.

    make bench-scale                                       # in the template: tables, a .json
    python benchmarks/scale.py --megabytes 2 --rounds 1    # does the program itself work?
    python benchmarks/scale.py --against CHECKOUT          # beside another state of the template

`samestep prepare` turns the same texts, as .jsonl, .csv, .jsonl.gz and one .txt, into sequences of
512 tokens. Their words are those of Python's sources in a random order, and one in twenty is new.
MB/s per core are of the CPU time of its one process, start-up included; memory is its peak. Then 32
random rows of the project are read, of texts and of packed documents, also into tensors by a
DataLoader, beside nanoGPT's get_batch: each round in a process of their own.
"""

import argparse
import contextlib
import gzip
import json
import os
import re
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from subprocess import PIPE

import datasets
import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, RandomSampler

import compare

FILES, BATCH, LENGTH, BATCHES = (".jsonl", ".csv", ".jsonl.gz", ".txt"), 32, 512, 200


def write_texts(megabytes: float, path: Path) -> None:
    """Texts of 50 to 1,000 words as a file of each kind; the .txt has one after the other."""
    sources = [file.read_text("utf-8") for file in sorted(Path(os.__file__).parent.glob("*.py"))]
    words = np.array(re.findall(r"\S+\s*", "\n".join(sources)), object)
    random, texts, size = np.random.default_rng(0), [], 0
    while size < megabytes * 1e6:
        chosen = words[random.integers(len(words), size=random.integers(50, 1000))]
        chosen[::20] = [f"{word[:3]}{random.integers(10**6)} " for word in chosen[::20]]
        texts.append("".join(chosen))
        size += len(texts[-1])
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"text": texts})
    rows.to_json(f"{path}.jsonl")
    rows.to_csv(f"{path}.csv", index=False)
    Path(f"{path}.jsonl.gz").write_bytes(gzip.compress(Path(f"{path}.jsonl").read_bytes(), 1))
    Path(f"{path}.txt").write_text("\n".join(texts))


def run(checkout: Path, project: Path, *words: str) -> tuple[str, float, float]:
    """What a program prints, its CPU seconds, and its peak memory in MB."""
    env = compare.environment(PYTHONPATH=f"{checkout}/src{os.pathsep}{compare.HERE}")
    began, peak = sum(os.times()[2:4]), 0
    process = psutil.Popen([sys.executable, *words], cwd=project, env=env, stdout=PIPE, text=True)
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            used = process.memory_full_info()
            peak = max(peak, getattr(used, "pss", used.rss))  # pss: of shared pages its part
        time.sleep(0.1)
    printed = process.stdout.read()
    if process.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{printed}")
    return printed, sum(os.times()[2:4]) - began, peak / 1e6


def time_batches(texts: str, packed: str) -> None:
    """In a project: prints CPU milliseconds of a batch of random sequences."""
    import task
    from samestep.prepared.prepared import load

    torch.set_num_threads(1)
    random, ways, times = np.random.default_rng(0), {}, {}
    for name, folder in {"packed documents": packed, "texts": texts}.items():
        rows = task.views(task.TaskConfig(context_length=LENGTH), load(Path(folder)))[0]
        ways[f"rows of {name}"] = lambda rows=rows: rows.__getitems__(
            random.integers(len(rows), size=BATCH).tolist()
        )
        sampler = RandomSampler(rows, replacement=True, num_samples=2 * BATCHES * BATCH)
        loader = DataLoader(rows, BATCH, sampler=sampler, collate_fn=task.collate)
        ways[f"DataLoader, {name}"] = iter(loader).__next__
    ids = np.concatenate([rows[i]["input_ids"] for i in range(len(rows))])
    ids.astype(np.uint16).tofile("tokens.bin")

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap("tokens.bin", dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - LENGTH, (BATCH,))
        x = [torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in ix]
        y = [torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in ix]
        return torch.stack(x), torch.stack(y)

    ways["nanoGPT's get_batch"] = get_batch
    for name, way in 2 * [*ways.items()]:  # the first time to warm up
        began = time.process_time()
        for _ in range(BATCHES):
            way()
        times[name] = 1e3 * (time.process_time() - began) / BATCHES
    print(json.dumps(times))


def measure(asked: argparse.Namespace, folder: Path) -> dict:
    """What each round found, of this checkout and of the other."""
    write_texts(asked.megabytes, folder / "texts")
    write_texts(4, folder / "short")
    found: dict = {"megabytes": asked.megabytes, "prepared": {}, "batches": {}}
    places = {"": (compare.HERE.parent, compare.bake(folder / "here"))}
    if asked.against:
        other = asked.against.resolve()
        places["before, "] = other, compare.bake(folder / "before", other)

    def prepare(name: str, data: str, *more: str) -> tuple[str, float, float]:
        words = [f"--task.data={folder / data}", f"--task.cache_dir={tempfile.mkdtemp(dir=folder)}"]
        words += [f"--task.context_length={LENGTH}", *more]
        printed, *used = run(*places[name], "-m", "samestep", "prepare", *words)
        return re.findall(r"prepared in (.*): [\d,]+ rows to", printed)[0], *used

    vocabulary = f"--task.vocabulary={prepare('', 'short.jsonl', '--task.vocab_size=16384')[0]}"
    for number in range(asked.rounds):
        compare.say(f"round {number + 1} of {asked.rounds}")
        for ending, name in product(FILES, places):
            _, *used = prepare(name, f"texts{ending}", vocabulary)
            found["prepared"].setdefault(f"{name}{ending}", []).append(used)
        for name in places:
            texts = prepare(name, "short.txt", vocabulary)[0]
            packed = prepare(name, "short.jsonl", "--task.packing=best_fit", vocabulary)[0]
            code = f"import scale; scale.time_batches({texts!r}, {packed!r})"
            for way, milliseconds in json.loads(run(*places[name], "-c", code)[0]).items():
                found["batches"].setdefault(f"{name}{way}", []).append(milliseconds)
    return found


def describe(report: dict) -> str:
    """The tables in Markdown."""
    rows = []
    for name, runs in report["prepared"].items():
        speed = report["megabytes"] / median(cpu for cpu, _ in runs)
        rows.append([name, f"{speed:.2f}", f"{max(peak for _, peak in runs):,.0f}"])
    columns = [f"{report['megabytes']:g} MB of text", "MB/s per core", "peak memory, MB"]
    batches = [[name, f"{median(times):.2f}"] for name, times in report["batches"].items()]
    second = compare.markdown([f"batch of {BATCH} x {LENGTH}", "CPU ms"], batches)
    return f"{compare.markdown(columns, rows)}\n\n{second}"


def main() -> None:
    parser = compare.parser_of(__doc__, "scale")
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    compare.publish(parser.parse_args(), measure, describe)


if __name__ == "__main__":
    main()
