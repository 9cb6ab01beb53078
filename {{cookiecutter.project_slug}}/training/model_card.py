"""The README.md beside a trained model: what it is, what it learnt from, how good it is."""

import json
import re
from pathlib import Path

import yaml

from training.console import one_line

# A part of a class's name in config.json, and what transformers calls such a task.
PIPELINES = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
}
TEXT_TO_TEXT = "text2text-generation"  # encoder-decoders; transformers 5 has no pipeline for them


def pipeline_task(folder: Path) -> str | None:
    """What transformers calls the task of the model in a folder; None: it is none of transformers.

    An adapter alone, of LoRA, is one of text generation here.
    """
    if (folder / "adapter_config.json").is_file():
        return "text-generation"
    try:
        if not (folder / "config.json").is_file():  # a named pipe would be waited for
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
    """Text from outside as one line that Markdown shows as it is."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", one_line(text, 100))


def classifier_example(config: dict) -> str:
    """Code that asks a classifier of pairs, or for a number, which it gives in another scale."""
    is_pair, scale = config.get("text_pair"), config.get("label_std")
    given = '{"text": "a text", "text_pair": "its pair"}' if is_pair else '"a text"'
    if scale is not None:  # the pipeline gives a list for a text, but not for a pair
        score = f'answer({given}){"" if is_pair else "[0]"}["score"]'
        about = "# the model answers in standard deviations from the mean"
        return f"\n{about}\nnumber = {score} * {scale!r} + {config.get('label_mean', 0.0)!r}"
    return f"\nanswer({given})" if is_pair else ""


def seq2seq_example(place: Path, config: dict) -> str:
    """Code that loads an encoder-decoder and generates the target of a text."""
    name, source = repr(str(place)), repr(f"{config.get('source_prefix', '')}a text")
    return f"""from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained({name})
tokenizer = AutoTokenizer.from_pretrained({name})
tokens = model.generate(**tokenizer({source}, truncation=True, return_tensors="pt"))
print(tokenizer.decode(tokens[0], skip_special_tokens=True))"""


def write_card(folder: Path, place: Path, facts: dict) -> None:
    """Writes the card of the model in the folder, which is going to be called `place`.

    `facts`: step, steps (of the whole run), scores (a dict of floats), config (the run's,
    resolved), data (samples, fingerprint) and versions.
    """
    config, data = facts["config"], facts["data"]
    task, about = pipeline_task(folder), {}
    if task:
        about["library_name"] = "transformers"
        about["pipeline_tag"] = task
    if (folder / "adapter_config.json").exists():
        about["library_name"] = "peft"
    if start := config["task"].get("model_name_or_path"):
        about["base_model"] = one_line(start)
    rows = [f"| {escape_markdown(name)} | {value:.5g} |" for name, value in facts["scores"].items()]
    settings = yaml.safe_dump(config, sort_keys=False, allow_unicode=True).strip()
    if not settings.replace("\n", "").isprintable():  # as marks that reverse the text
        settings = yaml.safe_dump(config, sort_keys=False).strip()
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", settings))])
    reads = ", image_processor" if task == "image-classification" else ", tokenizer"
    ground = config["task"].get("background") if task == "image-classification" else None
    use = "from transformers import pipeline\n\n"
    use += f'answer = pipeline("{task}", {str(place)!r}{reads}={str(place)!r})'
    if task in ("text-classification", TEXT_TO_TEXT):
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        is_classifier = task == "text-classification"
        use = use + classifier_example(model) if is_classifier else seq2seq_example(place, model)
    steps = f"{facts['step']:,} steps"
    if facts["step"] < facts["steps"]:
        steps += f" (the best evaluation in {facts['steps']:,})"
    source = escape_markdown(config["task"].get("data") or "the data of task.py")
    parts = [
        f"---\n{yaml.safe_dump(about)}---" if about else "",
        f"# {escape_markdown(config['project'])}: {escape_markdown(place.parent.name)}",
        f"Trained for {steps} of {config['global_batch_size']} samples, out of "
        f"{data['samples']:,}, from {source} "
        f"(data fingerprint {data['fingerprint']}).",
        f"```python\n{use}\n```" if task else "",
        f"Training put transparent images on {escape_markdown(ground)}, and so does predict.py; "
        "`pipeline` ignores transparency: put such images on that colour first."
        if ground
        else "",
        "## Evaluation\n\n| metric | value |\n| --- | --- |\n" + "\n".join(rows),
        f"## Settings\n\n{fence}yaml\n{settings}\n{fence}",
        "## Versions\n\n" + ", ".join(f"{n} {number}" for n, number in facts["versions"].items()),
    ]
    text = "\n\n".join(part for part in parts if part)
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")
