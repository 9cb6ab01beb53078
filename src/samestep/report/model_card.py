"""Writes the model card: the README.md beside a trained model, with usage, scores and settings."""

import re
from pathlib import Path

import yaml
from huggingface_hub import ModelCardData

from samestep.base.console import one_line
from samestep.base.files import read_json_object, replace_text

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
    config = read_json_object(folder / "config.json")
    names = config.get("architectures")
    if not names or not isinstance(names, list):
        return None
    name = str(names[0])
    task = next((task for end, task in PIPELINES.items() if end in name), None)
    generates = task in (None, "text-generation")  # a classifier may have a decoder, too
    return TEXT_TO_TEXT if config.get("is_encoder_decoder") and generates else task


def escape_markdown(text: object, longest: int = 100) -> str:
    """Text from outside as one line without Markdown formatting."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", one_line(text, longest))


def example_code(task: str, folder: Path, final: Path) -> str:
    """Python code that uses the model: the pipeline of transformers, where there is one."""
    name = repr(str(final))
    config = read_json_object(folder / "config.json")
    if task == TEXT_TO_TEXT:
        source = repr(f"{config.get('source_prefix', '')}a text")
        return f"""from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained({name})
tokenizer = AutoTokenizer.from_pretrained({name})
tokens = model.generate(**tokenizer({source}, truncation=True, return_tensors="pt"))
print(tokenizer.decode(tokens[0], skip_special_tokens=True))"""
    processor = "image_processor" if task == "image-classification" else "tokenizer"
    code = "from transformers import pipeline\n\n"
    code += f'answer = pipeline("{task}", {name}, {processor}={name})'
    is_pair, scale = config.get("text_pair"), config.get("label_std")
    given = '{"text": "a text", "text_pair": "its pair"}' if is_pair else '"a text"'
    if task == "text-classification" and scale is not None:
        # The pipeline returns a list for a text, but not for a pair.
        score = f'answer({given}){"" if is_pair else "[0]"}["score"]'
        code += "\n# the model answers in standard deviations from the mean"
        code += f"\nnumber = {score} * {scale!r} + {config.get('label_mean', 0.0)!r}"
    elif task == "text-classification" and is_pair:
        code += f"\nanswer({given})"
    return code


def score_table(scores: dict[str, float]) -> str:
    rows = [f"| {escape_markdown(name)} | {value:.5g} |" for name, value in scores.items()]
    return "\n".join(["| metric | value |", "| --- | --- |", *rows])


def write_card(folder: Path, final: Path, run_info: dict) -> None:
    """Writes the card of the model in a folder that will be renamed to `final`.

    `run_info` holds step (of the model), steps (of the run), scores (floats by name), config
    (resolved), data (samples, fingerprint), hardware (a line) and versions.
    """
    config, data = run_info["config"], run_info["data"]
    task, base = pipeline_task(folder), config["task"].get("model_name_or_path")
    library = "peft" if (folder / "adapter_config.json").exists() else "transformers"
    header = ModelCardData(
        license="unknown",  # its owner's to say, and that of the base model
        library_name=library if task else None,
        pipeline_tag=task,
        base_model=one_line(base) if base else None,
    )
    settings = yaml.safe_dump(config, sort_keys=False).strip()
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", settings))])
    steps = f"{run_info['step']:,} steps"
    if run_info["step"] < run_info["steps"]:
        steps += f" (the best evaluation in {run_info['steps']:,})"
    source = escape_markdown(config["task"].get("data") or "the data of task.py")
    versions = ", ".join(f"{name} {number}" for name, number in run_info["versions"].items())
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {escape_markdown(config['project'])}: {escape_markdown(final.parent.name)}",
        f"Trained for {steps} of {config['global_batch_size']} samples, out of "
        f"{data['samples']:,}, from {source} (data fingerprint {data['fingerprint']}).",
    ]
    if task:
        parts.append(f"```python\n{example_code(task, folder, final)}\n```")
    background = config["task"].get("background")
    if background and task == "image-classification":
        parts.append(
            f"Training put transparent images on {escape_markdown(background)}, and samestep "
            "predict does the same; `pipeline` ignores transparency: put such images on that "
            "colour first."
        )
    parts += [
        f"## Evaluation\n\n{score_table(run_info['scores'])}",
        f"## Settings\n\n{fence}yaml\n{settings}\n{fence}",
        f"## Hardware and versions\n\n{run_info['hardware']}\n\n{versions}",
    ]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def set_section(folder: Path, title: str, text: str) -> None:
    """Adds a section to the end of a model's card, in place of an older one with this title."""
    card = folder / "README.md"
    begin, *sections = card.read_text(encoding="utf-8").split("\n## ")
    kept = [each for each in sections if not each.startswith(f"{title}\n")]
    parts = [part.rstrip("\n") for part in (begin, *kept)]
    replace_text(card, "\n\n## ".join([*parts, f"{title}\n\n{text}\n"]))
