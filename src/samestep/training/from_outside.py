"""Asks an exported model what the trained one was asked. It knows transformers, nothing of ours.

Run as a program it reads a JSON object from standard input: `folder`, `task` (a key of CLASSES),
`trust_remote_code`, `dtype` (of the trained weights; null for an adapter, whose base model has its
own), `rounding` (the run's dtype for products: a key of TOLERANCES) and `asked`. Each of these has
`given`, a text, messages, texts by name or the path of an image, and what `ask` gave for it.
It prints {"dtype", "difference"}; or {"problem"}, in words, where the answers are not the same.
"""

import json
import sys
from typing import Any

import torch

# Largest difference of logits or log-probabilities, as a part of the largest logit.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
CLASSES = {
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "text-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}


class Different(Exception):
    """How the exported model is not the trained one."""


@torch.no_grad()
def ask(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a model says of one row of inputs, (1, T): a classifier the logits of its labels; one
    that writes the log-probability of each token of the prompt, after those before it."""
    prompt, labels = [], []
    if "input_ids" in inputs:
        ids = inputs["input_ids"].long()
        inputs = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        prompt = ids[0].tolist()
    writes = model.can_generate()
    if writes and model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    logits = model(**inputs).logits[0].float()
    if writes:
        numbers = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    else:
        numbers, labels = logits, [model.config.id2label[i] for i in range(len(logits))]
    largest = float(logits.abs().max())
    return {"prompt": prompt, "labels": labels, "numbers": numbers.tolist(), "largest": largest}


def make_inputs(processor: Any, given: Any) -> tuple[dict[str, torch.Tensor], str]:
    """The model's inputs for what was given, and what of the export has made them."""
    if isinstance(given, list):
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return processor.apply_chat_template(given, **options), "chat template"
    if hasattr(processor, "image_mean"):
        from transformers.image_utils import load_image

        return processor(load_image(given), return_tensors="pt"), "image processor"
    texts = given if isinstance(given, dict) else {"text": given}
    return processor(**texts, truncation=True, return_tensors="pt"), "tokenizer"


def compare(found: dict, asked: dict, what: str, tolerance: float) -> float:
    """The largest difference between the answers of both models; raises Different."""
    given = f"{asked['given']!r:.80}"
    if found["prompt"] != asked["prompt"]:
        raise Different(f"its {what} makes other tokens of {given}")
    if found["labels"] != asked["labels"]:
        raise Different(f"its labels are {', '.join(found['labels'])!r:.80}, and were others")
    pairs = zip(found["numbers"], asked["numbers"], strict=True)
    difference = max((abs(own - wanted) for own, wanted in pairs), default=0.0)
    if not difference <= tolerance * max(1.0, asked["largest"]):
        number = "a logit" if found["labels"] else "a log-probability"
        raise Different(f"{number} differs by {difference:.2g} for {given}")
    return difference


def check(
    folder: str, task: str, dtype: str | None, rounding: str, asked: list, **options: Any
) -> dict[str, Any]:
    """Loads the exported model, on the CPU, and asks it; raises Different."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = getattr(transformers, CLASSES[task]).from_pretrained(folder, **options)
    kind = "AutoImageProcessor" if task == "image-classification" else "AutoTokenizer"
    processor = getattr(transformers, kind).from_pretrained(folder, **options)
    found = str(model.dtype).removeprefix("torch.")
    if dtype not in (None, found):
        raise Different(f"it is loaded in {found}, and was trained in {dtype}")
    tolerance, differences = max(TOLERANCES[rounding], TOLERANCES.get(found, 1.0)), []
    for each in asked:
        inputs, what = make_inputs(processor, each["given"])
        differences.append(compare(ask(model, dict(inputs)), each, what, tolerance))
    return {"dtype": found, "difference": max(differences)}


def main() -> None:
    """Prints what `check` finds, or what is wrong: errors of the libraries below too."""
    sys.path[:] = [path for path in sys.path if path]  # modules of the project are not in reach
    try:
        found = check(**json.load(sys.stdin))
    except Exception as error:
        kind = "" if isinstance(error, Different) else f"{type(error).__name__}: "
        found = {"problem": f"{kind}{error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
