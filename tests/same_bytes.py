"""Trains each task for a few steps, and compares with what another version of this project made.

    python tests/same_bytes.py /tmp/before                          in the older version
    python tests/same_bytes.py /tmp/after --before /tmp/before      here: trains and continues

Weights, metrics (without times) and manifests must be equal, also of runs that go on from a
checkpoint of the older version. Exit code 1 if something differs.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1"}
from conftest import bake, digest, lines

SHORT = "--max_steps 6 --save_every 3 --eval_every 3 --log_every 1 --keep_checkpoints 0".split()
CHATS = "--task.data docstrings --task.rows chat --task.context_length 256".split()
LORA = "--task.model_name_or_path base --task.lora_rank 4 --export best".split()
EXACT = "--exact true --micro_batch_size 4".split()
ALL = "causal_lm text_classification image_classification seq2seq preference".split()
CASES = {  # task, processes, flags
    **{task: (task, 1, []) for task in ALL},
    **{f"{task}-2": (task, 2, []) for task in ALL},
    "causal_lm-exact": ("causal_lm", 1, EXACT),
    "causal_lm-exact-2": ("causal_lm", 2, EXACT),
    "text_classification-exact-2": ("text_classification", 2, EXACT),
    "chats": ("causal_lm", 1, CHATS),
    "chats-2": ("causal_lm", 2, CHATS),
    "lora": ("causal_lm", 1, LORA),
    "lora-2": ("causal_lm", 2, LORA),
}
SAVED = "checkpoints/step-00000003"
TIMES = ("_per_second", "data_wait", "compute", "peer_wait", "memory", "seconds")


def result(output):
    """What a run has left after step 3: weights, manifests, metrics."""
    found = {}
    for path in (output / "model").glob("*.safetensors"):
        found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(output.glob("checkpoints/*/manifest.json")):
        manifest = json.loads(path.read_text())
        for name in ("sha256", "versions", "files"):
            del manifest[name]
        del manifest["config"]["output_dir"]
        found |= {path.parent.name: digest(path.parent), f"{path.parent.name} manifest": manifest}
    for line in lines(output, "step"):
        if line["step"] > 3:
            numbers = {k: v for k, v in line.items() if not any(word in k for word in TIMES)}
            found.setdefault(f"metrics of step {line['step']}", []).append(numbers)
    return found


def train_all(folder, before=None):
    """The result of each case; with `before` they go on from the checkpoints in that folder."""
    projects, results = {}, {}
    for name, (task, processes, flags) in CASES.items():
        if task not in projects:
            projects[task] = bake(folder / "projects" / task, task=task, tracker="none")
        output = folder / name
        if before:
            shutil.copytree(before / name / SAVED, output / SAVED)
        given = ["--config", "configs/train/smoke.yaml", *SHORT, *flags, "--output_dir", output]
        printed = projects[task].train(processes, *given)
        assert not before or "continuing from" in printed, printed
        results[name] = result(output)
        if name == "causal_lm":
            shutil.copytree(output / "model", projects[task].path / "base")
        print(name, file=sys.stderr)
    return results


def compare(old, new):
    """Prints what differs, and returns how much."""
    different = [
        (name, key) for name in old for key in old[name] if old[name][key] != new[name].get(key)
    ]
    for name, key in different:
        was, now = old[name][key], new[name].get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            names = {*was, *now}
            was, now = (
                {n: each.get(n) for n in names if was.get(n) != now.get(n)} for each in (was, now)
            )
        print(f"{name}: {key} differs: {was} before, {now} now")
    return len(different)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    results = train_all(folder)
    (folder / "results.json").write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if options.before:
        old = json.loads((options.before / "results.json").read_text())
        different = compare(old, results)
        different += compare(old, train_all(folder / "continued", options.before.resolve()))
        print(f"{len(results)} runs, trained and continued: {different} differences")
        sys.exit(different > 0)


if __name__ == "__main__":
    main()
