"""Writes the model card: the README.md beside a trained model, with usage, scores and settings."""

import json
import re
from pathlib import Path

import yaml

from samestep.base.console import one_line

# The pipelines of transformers, by a part of the model's class name in config.json.
PIPELINES = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
}
TEXT_TO_TEXT = "text2text-generation"  # encoder-decoders; transformers 5 has no pipeline for them


def pipeline_task(folder: Path) -> str | None:
    """The transformers pipeline for the model in a folder, such as "text-generation".

    None if it is not a model of transformers. A folder with only a LoRA adapter counts as
    text generation.
    """
    if (folder / "adapter_config.json").is_file():
        return "text-generation"
    try:
        if not (folder / "config.json").is_file():  # a named pipe would block
            return None
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name, is_encoder_decoder = config["architectures"][0], config.get("is_encoder_decoder")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    known = PIPELINES if isinstance(name, str) else {}
    task = next((task for end, task in known.items() if end in name), None)
    generates = task in (None, "text-generation")  # a classifier may have a decoder, too
    return TEXT_TO_TEXT if is_encoder_decoder and generates else task


def escape_markdown(text: object) -> str:
    """Text from outside as one line without Markdown formatting."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", one_line(text, 100))


def classifier_example(config: dict) -> str:
    """Example code for a classifier of pairs, or for a regression, whose score needs scaling."""
    is_pair, scale = config.get("text_pair"), config.get("label_std")
    given = '{"text": "a text", "text_pair": "its pair"}' if is_pair else '"a text"'
    if scale is not None:  # the pipeline returns a list for a text, but not for a pair
        score = f'answer({given}){"" if is_pair else "[0]"}["score"]'
        comment = "# the model answers in standard deviations from the mean"
        return f"\n{comment}\nnumber = {score} * {scale!r} + {config.get('label_mean', 0.0)!r}"
    return f"\nanswer({given})" if is_pair else ""


def seq2seq_example(final: Path, config: dict) -> str:
    """Code that loads an encoder-decoder and generates the target of a text."""
    name, source = repr(str(final)), repr(f"{config.get('source_prefix', '')}a text")
    return f"""from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained({name})
tokenizer = AutoTokenizer.from_pretrained({name})
tokens = model.generate(**tokenizer({source}, truncation=True, return_tensors="pt"))
print(tokenizer.decode(tokens[0], skip_special_tokens=True))"""


def write_card(folder: Path, final: Path, run_info: dict) -> None:
    """Writes the card of the model in a folder that will be renamed to `final`.

    `run_info` holds step (of the model), steps (of the run), scores (floats by name), config
    (resolved), data (samples, fingerprint) and versions.
    """
    config, data = run_info["config"], run_info["data"]
    task, header = pipeline_task(folder), {}
    if task:
        header["library_name"] = "transformers"
        header["pipeline_tag"] = task
    if (folder / "adapter_config.json").exists():
        header["library_name"] = "peft"
    if base := config["task"].get("model_name_or_path"):
        header["base_model"] = one_line(base)
    rows = [
        f"| {escape_markdown(name)} | {value:.5g} |" for name, value in run_info["scores"].items()
    ]
    settings = yaml.safe_dump(config, sort_keys=False, allow_unicode=True).strip()
    if not settings.replace("\n", "").isprintable():  # such as marks that reverse text
        settings = yaml.safe_dump(config, sort_keys=False).strip()
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", settings))])
    processor = "image_processor" if task == "image-classification" else "tokenizer"
    background = config["task"].get("background") if task == "image-classification" else None
    example = "from transformers import pipeline\n\n"
    example += f'answer = pipeline("{task}", {str(final)!r}, {processor}={str(final)!r})'
    if task in ("text-classification", TEXT_TO_TEXT):
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if task == TEXT_TO_TEXT:
            example = seq2seq_example(final, model)
        else:
            example += classifier_example(model)
    steps = f"{run_info['step']:,} steps"
    if run_info["step"] < run_info["steps"]:
        steps += f" (the best evaluation in {run_info['steps']:,})"
    source = escape_markdown(config["task"].get("data") or "the data of task.py")
    parts = [
        f"---\n{yaml.safe_dump(header)}---" if header else "",
        f"# {escape_markdown(config['project'])}: {escape_markdown(final.parent.name)}",
        f"Trained for {steps} of {config['global_batch_size']} samples, out of "
        f"{data['samples']:,}, from {source} "
        f"(data fingerprint {data['fingerprint']}).",
        f"```python\n{example}\n```" if task else "",
        f"Training put transparent images on {escape_markdown(background)}, and samestep predict "
        "does the same; `pipeline` ignores transparency: put such images on that colour first."
        if background
        else "",
        "## Evaluation\n\n| metric | value |\n| --- | --- |\n" + "\n".join(rows),
        f"## Settings\n\n{fence}yaml\n{settings}\n{fence}",
        "## Versions\n\n"
        + ", ".join(f"{n} {number}" for n, number in run_info["versions"].items()),
    ]
    text = "\n\n".join(part for part in parts if part)
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")
