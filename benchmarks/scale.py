"""Measures how a baked project prepares and reads text.

    make bench-scale                                  # in the template: tables and a .json
    python benchmarks/scale.py --megabytes 10 --rounds 1

`samestep prepare` of a project turns the same texts, as .jsonl, .csv, .jsonl.gz and one .txt, into
sequences of 512 tokens of the same tokenizer. The words are those of Python's sources, in a random
order, and one in twenty is new. MB/s per core are of CPU time, of all processes together, start-up
included. Memory is their peak together; a page that several share counts once.

Batches of 32 sequences then come from the rows of the project, of texts and of packed documents,
and from nanoGPT's get_batch.
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
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch

import compare
from compare import HERE, say

BATCH, LENGTH, VOCABULARY = 32, 512, 16_384
FILES = (".jsonl", ".csv", ".jsonl.gz", ".txt")


def write_texts(megabytes: float, path: str) -> None:
    """Texts of 50 to 1,000 words as a file of each kind; the .txt has one after the other."""
    library = [
        p for p in Path(sysconfig.get_path("stdlib")).rglob("*.py") if "site-p" not in str(p)
    ]
    text = "\n".join(file.read_text("utf-8", errors="ignore") for file in sorted(library))
    words = np.array(re.findall(r"\S+\s*", text), object)
    random, size = np.random.default_rng(0), 0
    with (
        open(f"{path}.jsonl", "w") as rows,
        gzip.open(f"{path}.jsonl.gz", "wt", 1) as packed,
        open(f"{path}.csv", "w", newline="") as table,
        open(f"{path}.txt", "w") as whole,
    ):
        csv.writer(table).writerow(["text"])
        while size < megabytes * 1e6:
            chosen = words[random.integers(0, len(words), random.integers(50, 1000))]
            for i in range(0, len(chosen), 20):
                chosen[i] = chosen[i][: len(chosen[i]) // 2] + str(random.integers(10**6)) + " "
            text = "".join(chosen)
            size += len(text.encode())
            for file in (rows, packed):
                file.write(json.dumps({"text": text}) + "\n")
            csv.writer(table).writerow([text])
            whole.write(text + "\n")


def save_model(texts: str, folder: Path) -> None:
    """A tokenizer of these texts, and the config of a model, as from_pretrained loads them."""
    from transformers import LlamaConfig

    from samestep.text import tokenizing

    folder.mkdir()
    with open(texts) as rows:
        own = (json.loads(row)["text"] for row in rows)
        tokenizing.learn_vocabulary(own, VOCABULARY, folder)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizing.END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH).save_pretrained(folder)


def prepare(project: Path, model: Path, data: str, cache: Path, *more: str) -> dict:
    """CPU seconds and peak memory in MB of a preparation, and the folder that it prints."""
    command = ["-m", "samestep", "prepare", f"--task.data={data}", f"--task.cache_dir={cache}"]
    command += [f"--task.model_name_or_path={model}", f"--task.context_length={LENGTH}", *more]
    used, peak = cpu_of_children(), 0.0
    env = compare.environment(TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, *command], cwd=project, env=env, stdout=log)
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(0.1)
        log.seek(0)
        printed = log.read()
    if process.returncode:
        sys.exit(f"{data} failed:\n{printed[-3000:]}")
    (folder,) = re.findall(r"prepared in (.*): [\d,]+ rows to", printed)
    return {"cpu": cpu_of_children() - used, "peak": peak, "folder": folder}


def cpu_of_children() -> float:
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


def time_batches(folders: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds of a batch of random sequences, in each round."""
    import task
    from samestep.project.prepared import load

    random, views, ways = np.random.default_rng(0), {}, {}
    for name, folder in folders.items():
        data = load(Path(folder))
        views[name] = task.views(task.TaskConfig(context_length=LENGTH), data)[0]
        ways[name] = lambda v=views[name]: task.collate(
            v.__getitems__(random.integers(len(v), size=BATCH))
        )
    rows = views["texts"]
    tokens = f"{folder}/tokens"
    np.concatenate([rows[i]["input_ids"] for i in range(len(rows))]).astype(np.uint16).tofile(
        tokens
    )

    def get_batch() -> tuple:
        data = np.memmap(tokens, dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - LENGTH, (BATCH,))
        x = torch.stack([torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in ix])
        y = [torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in ix]
        return x, torch.stack(y)

    ways["nanoGPT's get_batch"] = get_batch
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.process_time()
            for _ in range(200):
                way()
            if number:  # the first round maps the files
                found[name].append(5 * (time.process_time() - began))
    return found


def describe(report: dict) -> str:
    """The tables in Markdown, and a sentence about the machine."""
    rows = []
    for name, runs in report["prepare"].items():
        speed = report["megabytes"] / median(run["cpu"] for run in runs)
        rows.append([name, f"{speed:.2f}", f"{max(run['peak'] for run in runs):,.0f}"])
    prepared = compare.markdown([f"{report['megabytes']} MB", "MB/s per core", "peak MB"], rows)
    rows = [[name, f"{median(times):.2f}"] for name, times in report["batches"].items()]
    batches = compare.markdown([f"batch of {BATCH} x {LENGTH}", "CPU ms"], rows)
    return "\n\n".join([prepared, batches, compare.about(report)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("--name", default="scale", help="name of the files of results")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/")
    asked = parser.parse_args()
    asked.output = asked.output.resolve()
    torch.set_num_threads(1)
    folder, here = Path(tempfile.mkdtemp(prefix="bench")), os.getcwd()
    compare.PACKAGES = ("torch", "transformers", "tokenizers", "datasets")
    report: dict = {**compare.about_machine(), "load": [os.getloadavg()[0]]}
    report |= {"megabytes": asked.megabytes, "prepare": {}}
    try:
        project, model = compare.bake(folder), folder / "model"
        write_texts(asked.megabytes, f"{folder}/texts")
        write_texts(4, f"{folder}/vocabulary")
        save_model(f"{folder}/vocabulary.jsonl", model)
        for number in range(asked.rounds):
            for ending in FILES:
                say(f"round {number + 1} of {asked.rounds}: {ending}")
                found = prepare(
                    project, model, f"{folder}/texts{ending}", folder / f"{number}{ending}"
                )
                report["prepare"].setdefault(ending, []).append(found)
        packed = prepare(
            project, model, f"{folder}/vocabulary.jsonl", folder / "fit", "--task.packing=best_fit"
        )
        os.chdir(project)
        sys.path.insert(0, str(project))
        folders = {"texts": report["prepare"][".jsonl"][-1]["folder"], "packed": packed["folder"]}
        report["batches"] = time_batches(folders, asked.rounds)
    finally:
        os.chdir(here)
        shutil.rmtree(folder, ignore_errors=True)
    compare.publish(json.loads(json.dumps(report)), describe, asked, "make bench-scale")


if __name__ == "__main__":
    main()
