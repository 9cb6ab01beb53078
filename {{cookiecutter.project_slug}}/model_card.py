"""The README.md beside a trained model: what it is, what it learnt from, how good it is."""

import platform
import re
from importlib import metadata
from pathlib import Path

import yaml

from predict import task_of

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft")


def write(folder: Path, place: Path, facts: dict) -> None:
    """Writes the card of the model in the folder, which is going to be called `place`.

    `facts`: step, scores (a dict of floats), config (the run's, resolved) and data (samples,
    fingerprint).
    """
    config, data = facts["config"], facts["data"]
    task, about = task_of(folder), {}
    if task:
        about["library_name"] = "transformers"
        about["pipeline_tag"] = task
    if (folder / "adapter_config.json").exists():
        about["library_name"] = "peft"
    if start := config["task"].get("model_name_or_path"):
        about["base_model"] = start
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    rows = [f"| {name} | {value:.5g} |" for name, value in facts["scores"].items()]
    settings = yaml.safe_dump(config, sort_keys=False, allow_unicode=True).strip()
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", settings))])
    reads = ", image_processor" if task == "image-classification" else ", tokenizer"
    use = f'answer = pipeline("{task}", "{place}"{reads}="{place}")'
    parts = [
        f"---\n{yaml.safe_dump(about)}---" if about else "",
        f"# {config['project']}: {place.parent.name}",
        f"Trained for {facts['step']:,} steps of {config['global_batch_size']} samples, out of "
        f"{data['samples']:,}, from {config['task'].get('data') or 'the data of task.py'} (data "
        f"fingerprint {data['fingerprint']}).",
        f"```python\nfrom transformers import pipeline\n\n{use}\n```" if task else "",
        "## Evaluation\n\n| metric | value |\n| --- | --- |\n" + "\n".join(rows),
        f"## Settings\n\n{fence}yaml\n{settings}\n{fence}",
        "## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    text = "\n\n".join(part for part in parts if part)
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")
