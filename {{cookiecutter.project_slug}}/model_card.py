"""The README.md beside a trained model: what it is, what it learnt from, how good it is."""

import re
from pathlib import Path

import yaml

from predict import task_of
from tracking import one_line


def plain(text: object) -> str:
    """Text from outside as one line that Markdown shows as it is."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", one_line(text, 100))


def write(folder: Path, place: Path, facts: dict) -> None:
    """Writes the card of the model in the folder, which is going to be called `place`.

    `facts`: step, scores (a dict of floats), config (the run's, resolved), data (samples,
    fingerprint) and versions.
    """
    config, data = facts["config"], facts["data"]
    task, about = task_of(folder), {}
    if task:
        about["library_name"] = "transformers"
        about["pipeline_tag"] = task
    if (folder / "adapter_config.json").exists():
        about["library_name"] = "peft"
    if start := config["task"].get("model_name_or_path"):
        about["base_model"] = one_line(start)
    rows = [f"| {plain(name)} | {value:.5g} |" for name, value in facts["scores"].items()]
    settings = yaml.safe_dump(config, sort_keys=False, allow_unicode=True).strip()
    if not settings.replace("\n", "").isprintable():  # as marks that reverse the text
        settings = yaml.safe_dump(config, sort_keys=False).strip()
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", settings))])
    reads = ", image_processor" if task == "image-classification" else ", tokenizer"
    use = f'answer = pipeline("{task}", {str(place)!r}{reads}={str(place)!r})'
    parts = [
        f"---\n{yaml.safe_dump(about)}---" if about else "",
        f"# {plain(config['project'])}: {plain(place.parent.name)}",
        f"Trained for {facts['step']:,} steps of {config['global_batch_size']} samples, out of "
        f"{data['samples']:,}, from {plain(config['task'].get('data') or 'the data of task.py')} "
        f"(data fingerprint {data['fingerprint']}).",
        f"```python\nfrom transformers import pipeline\n\n{use}\n```" if task else "",
        "## Evaluation\n\n| metric | value |\n| --- | --- |\n" + "\n".join(rows),
        f"## Settings\n\n{fence}yaml\n{settings}\n{fence}",
        "## Versions\n\n" + ", ".join(f"{n} {number}" for n, number in facts["versions"].items()),
    ]
    text = "\n\n".join(part for part in parts if part)
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")
