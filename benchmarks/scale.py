"""Measures how a baked project prepares and reads text, from little to much of it.

    make bench-scale                                  # in the template: tables, a plot, a .json
    python benchmarks/scale.py --megabytes 10 --rounds 1 --batches 50
    python benchmarks/scale.py --megabytes 10 100 1000

Three ways turn the same text into the tokens of the same tokenizer: `prepare` of the project, on
all cores, from a .jsonl of many texts, from a .csv and a .jsonl.gz of these, each of which one core
reads, and from a .txt that is one text; the way of transformers' run_clm.py, `datasets` and its
map, on one core; and `tokenizers` alone, on one core, which keeps nothing but a file of token ids.
In a round they take turns. The words are those of Python's sources, as frequent as there, in a
random order, and one in twenty is new.

MB/s per core is megabytes of text a second of CPU time, of all processes together. Start-up counts
neither there nor in all: it is what the same way takes for 0.1 MB. Memory is the peak of all
processes together; a page that several share counts once. Again: `prepare` once more, which
finds the prepared data; most of it is the start of Python.

Batches of 32 rows of 512 tokens then come in turns from the rows of the project and from the Arrow
table of run_clm's way, in torch format. Last, an order of up to 10^9 rows is read from position 0
and from later ones, up to 10^12: its rows cost nothing, so the time is that of finding them.
"""

import argparse
import csv
import gzip
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, RandomSampler

import compare
from compare import HERE, say

BATCH, LENGTH, VOCABULARY = 32, 512, 16_384
TINY = 0.1  # MB
PROJECT, RUN_CLM, BARE = "project", "run_clm", "tokenizers"
CSV, PACKED, TEXT = f"{PROJECT}, .csv", f"{PROJECT}, .jsonl.gz", f"{PROJECT}, one .txt"
FILES = {CSV: ".csv", PACKED: ".jsonl.gz", TEXT: ".txt"}  # other ways read the .jsonl
MOST = {RUN_CLM: 10, BARE: 100, CSV: 100, PACKED: 100}  # MB
END = "<|endoftext|>"
ROWS, POSITIONS = [10**3, 10**5, 10**7, 10**9], [0, 10**6, 10**9, 10**12]


# ---- Text ----------------------------------------------------------------------------------------


def read_words() -> np.ndarray:
    """The words of Python's sources, each with the space after it; object (N,)."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [file for file in library.rglob("*.py") if "site-packages" not in file.parts]
    text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in sorted(files))
    return np.array(re.findall(r"\S+\s*", text), object)


def write_texts(words: np.ndarray, megabytes: float, path: Path) -> None:
    """Writes texts of 50 to 1,000 words into PATH.jsonl, .jsonl.gz and .csv, and one after the
    other into PATH.txt."""
    random, size = np.random.default_rng(0), 0
    with (
        open(f"{path}.jsonl", "w") as rows,
        gzip.open(f"{path}.jsonl.gz", "wt", 1) as packed,
        open(f"{path}.csv", "w", newline="") as table,
        open(f"{path}.txt", "w") as whole,
    ):
        csv.writer(table).writerow(["text"])
        while size < megabytes * 1e6:
            text = words[random.integers(0, len(words), random.integers(50, 1000))]
            others = words[random.integers(0, len(words), len(text))]
            for i in range(0, len(text), 20):
                text[i] = text[i][: len(text[i]) // 2] + others[i][len(others[i]) // 2 :]
            text = "".join(text)
            size += len(text.encode())
            for file in (rows, packed):
                file.write(json.dumps({"text": text}) + "\n")
            csv.writer(table).writerow([text])
            whole.write(text + "\n")


def read_texts(path: str) -> Iterator[str]:
    with open(path) as rows:
        for row in rows:
            yield json.loads(row)["text"]


def save_model(texts: str, folder: Path) -> None:
    """A tokenizer of these texts, and the config of a model, as from_pretrained loads them."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    options = {"special_tokens": [END], "show_progress": False}
    bpe.train_from_iterator(read_texts(texts), VOCABULARY, **options)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END)
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH).save_pretrained(folder)


# ---- Other ways, each in a process of its own ----------------------------------------------------


def run_clm(model: str, data: str, folder: str) -> None:
    """What run_clm.py does with a .jsonl; prints the file of the result."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def group_texts(examples: dict) -> dict:
        joined = {name: list(chain(*lists)) for name, lists in examples.items()}
        total = len(joined["input_ids"]) // LENGTH * LENGTH
        result = {
            name: [values[i : i + LENGTH] for i in range(0, total, LENGTH)]
            for name, values in joined.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    rows = load_dataset("json", data_files=data, split="train", cache_dir=folder)
    tokens = rows.map(lambda row: tokenizer(row["text"]), batched=True, remove_columns=["text"])
    print(tokens.map(group_texts, batched=True).cache_files[0]["filename"])


def bare(model: str, data: str, folder: str) -> None:
    """A file of token ids, from `tokenizers` alone."""
    from tokenizers import Tokenizer

    tokenizer, texts = Tokenizer.from_file(f"{model}/tokenizer.json"), []
    end = tokenizer.token_to_id(END)
    with open(f"{folder}/tokens", "wb") as file:
        for text in read_texts(data):
            texts.append(text)
            if len(texts) == 200:
                write_tokens(tokenizer, texts, end, file)
                texts = []
        write_tokens(tokenizer, texts, end, file)


def write_tokens(tokenizer, texts: list[str], end: int, file) -> None:
    for encoded in tokenizer.encode_batch(texts):
        file.write(np.array([*encoded.ids, end], np.uint16))


# ---- Preparing -----------------------------------------------------------------------------------


def prepare(way: str, project: Path, model: Path, data: str, folder: Path) -> dict:
    """Seconds, CPU seconds and peak memory in MB of a way, and the last line that it prints."""
    folder.mkdir(exist_ok=True)
    if way in (RUN_CLM, BARE):
        command = [str(HERE / "scale.py"), "--way", way, str(model), data, str(folder)]
    else:
        fields = {"data": data, "model_name_or_path": model, "cache_dir": folder}
        fields["context_length"] = LENGTH
        command = ["-m", "samestep", "prepare"]
        command += [f"--task.{name}={value}" for name, value in fields.items()]
    log, used, began = folder / "log.txt", cpu_of_children(), time.perf_counter()
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=project,
            env=compare.environment(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1"),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(0.1)
    if process.returncode:
        sys.exit(f"{way} failed:\n{log.read_text()[-3000:]}")
    seconds, cpu = time.perf_counter() - began, cpu_of_children() - used
    last = log.read_text().strip().splitlines()[-1:]
    return {"seconds": seconds, "cpu": cpu, "peak": peak, "printed": "".join(last)}


def cpu_of_children() -> float:
    """CPU seconds of the processes that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory(pid: int) -> float:
    """MB of a process and its descendants; on Linux each page once, elsewhere the resident ones."""
    total = 0
    try:
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            found = each.memory_full_info()
            total += getattr(found, "pss", found.rss)
    except psutil.Error:  # it has ended meanwhile
        return 0.0
    return total / 1e6


def time_preparation(asked, project: Path, folder: Path, words: np.ndarray) -> tuple[dict, dict]:
    """For each size, way and round what `prepare` found; and the results that are kept."""
    model, found, kept = folder / "model", {}, {}
    ways = [PROJECT, *FILES, RUN_CLM, BARE]
    for size in [TINY, *sorted(asked.megabytes)]:
        data = folder / f"texts-{size}"
        write_texts(words, size, data)
        measured = [way for way in ways if size <= MOST.get(way, size)]
        found[size] = {way: [] for way in measured}
        rounds = asked.rounds if size <= 50 else 1
        for number in range(rounds):
            turn = number % len(measured)
            for way in measured[turn:] + measured[:turn]:
                say(f"{size} MB: round {number + 1} of {rounds}, {way}")
                output = folder / re.sub(r"\W+", "-", f"{way} {size} {number}")
                source = f"{data}{FILES.get(way, '.jsonl')}"
                found[size][way].append(prepare(way, project, model, source, output))
                kept[way] = found[size][way][-1]["printed"]
                if way in (PROJECT, TEXT):  # what is prepared is found again
                    again = prepare(way, project, model, source, output)["seconds"]
                    found[size][way][-1]["again"] = again
        for ending in FILES.values():
            Path(f"{data}{ending}").unlink()
    return found, kept


# ---- Reading -------------------------------------------------------------------------------------


class Nothing(torch.utils.data.Dataset):
    """Any number of rows, each the same."""

    def __init__(self, rows: int):
        self.rows, row = rows, np.arange(LENGTH)
        self.row = {"input_ids": row, "labels": row}

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self.row


def time_batches(asked, task, prepared: str, table: str) -> dict[str, list[float]]:
    """Milliseconds of a batch of random rows, in each round."""
    from datasets import Dataset

    from samestep.project.prepared import load

    cfg = task.TaskConfig(context_length=LENGTH)
    sources = {
        PROJECT: task.views(cfg, load(Path(prepared)))[0],
        RUN_CLM: Dataset.from_file(table).with_format("torch"),
    }
    found: dict[str, list[float]] = {name: [] for name in sources}
    loaders = {}
    for name, data in sources.items():
        sampler = RandomSampler(data, num_samples=10**6 * BATCH)
        loaders[name] = iter(DataLoader(data, BATCH, sampler=sampler))
    for number in range(asked.rounds + 1):
        for name, loader in loaders.items():
            began = time.process_time()
            for _ in range(asked.batches):
                batch = next(loader)
            if number:  # the first round maps the files
                found[name].append(1e3 * (time.process_time() - began) / asked.batches)
            assert batch["input_ids"].shape == (BATCH, LENGTH)
    return found


def time_order(asked, task) -> dict[str, dict[str, list[list[float]]]]:
    """For rows and positions, in each round: milliseconds until the first batch, and of a batch."""
    from samestep.core import batches

    places = [(rows, 0) for rows in ROWS] + [(ROWS[-1], position) for position in POSITIONS[1:]]
    found: dict[str, dict] = {"rows": {}, "positions": {}}
    plan = batches.StepPlan(BATCH, BATCH)
    for number in range(asked.rounds + 1):
        for rows, position in places:
            began, first = time.process_time(), position // BATCH * BATCH
            data = batches.SampleDataset(Nothing(rows), task, seed=0)
            sampler = batches.StepBatchSampler(plan, first, first + 10**6 * BATCH)
            loader = iter(batches.make_loader(data, sampler, task, 0, torch.device("cpu")))
            next(loader)
            started = time.process_time()
            steps = max(asked.batches, 2 * data.order.block // BATCH)  # two blocks of positions
            for _ in range(steps):
                next(loader)
            ended = time.process_time()
            if number:
                times = [1e3 * (started - began), 1e3 * (ended - started) / steps]
                if position == 0:
                    found["rows"].setdefault(rows, []).append(times)
                if rows == ROWS[-1]:
                    found["positions"].setdefault(position, []).append(times)
    return found


# ---- Showing -------------------------------------------------------------------------------------


def speeds(report: dict, size: str, way: str) -> list[tuple[float, float]]:
    """MB/s per core, and in all, of each round: without the start."""
    start = {key: median(run[key] for run in report["prepare"][str(TINY)][way])
             for key in ("cpu", "seconds")}  # fmt: skip
    more = float(size) - TINY
    return [
        (more / (run["cpu"] - start["cpu"]), more / (run["seconds"] - start["seconds"]))
        for run in report["prepare"][size][way]
    ]


def sizes(report: dict) -> list[str]:
    return [size for size in report["prepare"] if size != str(TINY)]


def describe(report: dict) -> str:
    """The tables in Markdown, and a sentence about the machine."""
    from rich import box
    from rich.table import Table

    columns = ("MB of text", "", "MB/s per core", f"of {BARE}", "MB/s in all", "peak memory, MB")
    shown = Table(*columns, "again, s", box=box.MARKDOWN)
    for size in sizes(report):
        found = report["prepare"][size]
        for way, runs in found.items():
            own, share = speeds(report, size, way), ""
            if BARE in found:
                pairs = zip(own, speeds(report, size, BARE), strict=True)
                share = f"{median(mine[0] / theirs[0] for mine, theirs in pairs):.2f}"
            core, whole = (f"{median(values):.2f}" for values in zip(*own, strict=True))
            peak = f"{max(run['peak'] for run in runs):,.0f}"
            again = [f"{run['again']:.1f}" for run in runs if "again" in run]
            shown.add_row(size, way, core, share, whole, peak, min(again, default="", key=float))
    parts = [compare.markdown(shown)]
    if report["batches"]:
        shown = Table("batch of 32 x 512", "CPU ms", "of run_clm's table", box=box.MARKDOWN)
        for name, times in report["batches"].items():
            pairs = zip(times, report["batches"][RUN_CLM], strict=True)
            share = median(mine / theirs for mine, theirs in pairs)
            shown.add_row(name, f"{median(times):.2f}", f"{share:.3f}")
        parts.append(compare.markdown(shown))
    shown = Table("rows", "position", "CPU ms to the first batch", "a batch", box=box.MARKDOWN)
    order = report["order"]
    places = [(rows, "0", order["rows"][rows]) for rows in order["rows"]]
    most = [*order["rows"]][-1]
    places += [(most, place, times) for place, times in order["positions"].items() if place != "0"]
    for rows, place, times in places:
        cells = [f"{median(each):.2f}" for each in zip(*times, strict=True)]
        shown.add_row(f"{int(rows):,}", f"{int(place):,}", *cells)
    return "\n\n".join([*parts, compare.markdown(shown), compare.about(report)])


def plot(report: dict, file: Path) -> None:
    """Memory and speed by the size of the text; the time of a batch by rows and positions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {PROJECT: "#c2410c", TEXT: "#fb923c", CSV: "#a16207", PACKED: "#fde047"}
    colors |= {RUN_CLM: "#475569", BARE: "#94a3b8"}
    figure, (memory, speed, order) = pyplot.subplots(1, 3, figsize=(10, 2.8))
    for way, color in colors.items():
        found = [size for size in sizes(report) if way in report["prepare"][size]]
        peaks = [max(run["peak"] for run in report["prepare"][size][way]) for size in found]
        core = [median(each for each, _ in speeds(report, size, way)) for size in found]
        memory.plot([float(size) for size in found], peaks, "o-", color=color, label=way)
        speed.plot([float(size) for size in found], core, "o-", color=color)
    for axis, title in ((memory, "peak memory, MB"), (speed, "MB/s per core")):
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("MB of text", fontsize=8)
        axis.set_xscale("log")
    memory.legend(fontsize=7, frameon=False)
    for name, style in (("rows", "o-"), ("positions", "s--")):
        found = {int(n): t for n, t in report["order"][name].items() if int(n)}
        order.plot([*found], [median(b for _, b in t) for t in found.values()], style, label=name)
    order.set_title("CPU ms a batch of 32 x 512", fontsize=9)
    order.set_xlabel("rows of data, or position in the run", fontsize=8)
    order.set_xscale("log")
    order.legend(fontsize=7, frameon=False)
    for axis in (memory, speed, order):
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])  # 0, and markers at the top whole
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", nargs="+", type=int, default=[10, 100])
    parser.add_argument("--rounds", type=int, default=3, help="up to 50 MB; above, one")
    parser.add_argument("--batches", type=int, default=200, help="in a turn")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("--name", default="scale", help="name of the files of results")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/")
    parser.add_argument("--way", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way:
        {RUN_CLM: run_clm, BARE: bare}[asked.way[0]](*asked.way[1:])
        return
    asked.output = asked.output.resolve()
    torch.set_num_threads(1)
    folder, here = Path(tempfile.mkdtemp(prefix="bench")), os.getcwd()
    compare.PACKAGES = ("torch", "transformers", "tokenizers", "datasets")
    report: dict = {**compare.about_machine(), "load": [os.getloadavg()[0]]}
    try:
        say("baking a project, learning a vocabulary")
        project, words = compare.bake(folder), read_words()
        write_texts(words, min(8, *asked.megabytes), folder / "vocabulary")
        save_model(f"{folder}/vocabulary.jsonl", folder / "model")
        report["prepare"], kept = time_preparation(asked, project, folder, words)
        say("reading")
        os.chdir(project)
        sys.path.insert(0, str(project))
        import task

        prepared = re.search(r"prepared in (.*): [\d,]+ rows to", kept[PROJECT])[1]
        report["batches"] = time_batches(asked, task, prepared, kept[RUN_CLM])
        report["order"] = time_order(asked, task)
    finally:
        os.chdir(here)
        shutil.rmtree(folder, ignore_errors=True)
    report = json.loads(json.dumps(report))  # with the keys of the file
    compare.publish(report, describe, asked, "make bench-scale")
    plot(report, asked.output / f"{asked.name}.png")


if __name__ == "__main__":
    main()
