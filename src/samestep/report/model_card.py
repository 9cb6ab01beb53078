"""Writes the model card: the README.md beside a trained model, with usage, scores and settings."""

import re
import textwrap
from pathlib import Path

import yaml

from samestep.base.console import one_line, plural
from samestep.base.files import read_json_object

# The pipelines of transformers, by a part of the model's class name in config.json.
_PIPELINES = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
}
TEXT_TO_TEXT = "text2text-generation"  # encoder-decoders; transformers 5 has no pipeline for them
_SOURCE_TO_TARGET = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained({name!r})
tokenizer = AutoTokenizer.from_pretrained({name!r})
tokens = model.generate(**tokenizer({source!r}, truncation=True, return_tensors="pt"))
print(tokenizer.decode(tokens[0], skip_special_tokens=True))"""


def pipeline_task(folder: Path) -> str | None:
    """The transformers pipeline for the model in a folder, such as "text-generation".

    None: it is no model of transformers. A LoRA adapter alone counts as text generation.
    """
    if (folder / "adapter_config.json").is_file():
        return "text-generation"
    if not (name := architecture(folder)):
        return None
    task = next((task for end, task in _PIPELINES.items() if end in name), None)
    generates = task in (None, "text-generation")  # a classifier may have a decoder, too
    encodes = read_json_object(folder / "config.json").get("is_encoder_decoder")
    return TEXT_TO_TEXT if encodes and generates else task


def architecture(folder: str | Path) -> str:
    """Return the class that the config of an exported model names; empty: there is none."""
    names = read_json_object(Path(folder) / "config.json").get("architectures")
    return str(names[0]) if names and isinstance(names, list) else ""


def escape_markdown(text: object, longest: int = 100) -> str:
    """Text from outside as one line without Markdown formatting."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", one_line(text, longest))


def describe_use(task: str, folder: Path, name: str) -> str:
    """Python code that uses the model, as Markdown."""
    reader = "image_processor" if task == "image-classification" else "tokenizer"
    cut = ", truncation=True" if task == "text-classification" else ""
    code = "from transformers import pipeline\n\n"
    code += f"answer = pipeline({task!r}, {name!r}, {reader}={name!r}{cut})"
    if task == TEXT_TO_TEXT:
        prefix = read_json_object(folder / "config.json").get("source_prefix", "")
        code = _SOURCE_TO_TARGET.format(name=name, source=f"{prefix}a text")
    if (folder / "adapter_config.json").exists():  # transformers gives them those of the base
        code = code.replace("import pipeline", "import GenerationConfig, pipeline")
        code += f"\nanswer.model.generation_config = GenerationConfig.from_pretrained({name!r})"
    return f"```python\n{code}\n```"


def write_card(folder: Path, final: Path, run_info: dict) -> None:
    """Writes the card of the model in a folder that will be renamed to `final`.

    `run_info` holds step (of the model), steps (of the run), scores (floats by name), config
    (resolved), data (samples, fingerprint), devices (a line) and hardware (with versions).
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    config, data, scores = (run_info[name] for name in ("config", "data", "scores"))
    task, base = pipeline_task(folder), config["task"].get("model_name_or_path")
    library = "peft" if (folder / "adapter_config.json").exists() else "transformers"
    source = one_line(config["task"].get("data") or "the data of task.py", 100)
    kind = task or "other"
    results = [EvalResult(kind, "unknown", source, one_line(n, 100), x) for n, x in scores.items()]
    header = ModelCardData(
        license="unknown",  # its owner's to say, and that of the base model
        library_name=library if task else None,
        pipeline_tag=task,
        base_model=one_line(base) if base else None,
        model_name=one_line(final.parent.name, 100),
        eval_results=results,
    )
    rows = [f"| {escape_markdown(metric)} | {value:.5g} |" for metric, value in scores.items()]
    steps = plural(run_info["step"], "step")
    if run_info["step"] < run_info["steps"]:
        steps += f" (the best checkpoint in {run_info['steps']:,})"
    number = f", out of {data['samples']:,}" if data["samples"] else " of a stream"
    facts = [f"{name} {value}" for name, value in run_info["hardware"].items() if name != "devices"]
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {escape_markdown(config['project'])}: {escape_markdown(final.parent.name)}",
        f"Trained for {steps} of {config['global_batch_size']} samples{number}, from "
        f"{escape_markdown(source)} (data fingerprint {data['fingerprint']}).",
        describe_use(task, folder, str(final)) if task else "",
        "\n".join(["## Evaluation\n\n| metric | value |\n| --- | --- |", *rows]),
        "## Settings",
        textwrap.indent(yaml.safe_dump(config, sort_keys=False), "    "),
        f"## Hardware and versions\n\n{run_info['devices']}\n\n{', '.join(facts)}\n",
    ]
    ModelCard("\n\n".join(filter(None, parts))).save(folder / "README.md")
