"""Asks an exported model what the trained one was asked. It knows transformers, nothing of ours.

Run as a program it reads a JSON object from standard input: `folder`, `task` (a pipeline's name),
`trust_remote_code`, `dtype` (of the trained weights; null for an adapter, whose base model has its
own), `rounding` (the run's dtype for products: a key of TOLERANCES) and `asked`. Each of these has
`given` (a text, two texts, a chat, the path of a picture), `prompt`, the tokens that the run made
of it, and what `ask` gave. It prints {"dtype", "difference"}; or {"problem"}, in words, where the
answers are not the same.
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
NEW_TOKENS = 16  # at most, of an answer


class Different(Exception):
    """How the exported model is not the trained one."""


@torch.no_grad()
def ask(model: Any, inputs: dict[str, torch.Tensor], names: list | None = None) -> dict[str, Any]:
    """What a model answers to one row of inputs, (1, T): the labels of a classifier as `names`, and
    its logits as `numbers`; of a model that writes the tokens by its own search, without chance,
    and the log-probabilities of the new ones. `scale` is the largest logit.

    `names`: the tokens of an answer, whose log-probabilities are wanted.
    """
    if not model.can_generate():
        logits = model(**inputs).logits[0].float()
        numbers, names = logits, [model.config.id2label[i] for i in range(len(logits))]
    else:
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        start, room, config = 1, NEW_TOKENS, model.config
        if not config.is_encoder_decoder:
            start = inputs["input_ids"].shape[1]
            longest = getattr(config, "max_position_embeddings", None) or sys.maxsize
            room = min(room, longest - start)
        if names is None:
            names = model.generate(**inputs, do_sample=False, max_new_tokens=room)[0].tolist()
        before = torch.tensor([names[:-1]], device=model.device)
        inputs = {**inputs, "decoder_input_ids": before}
        inputs = inputs if config.is_encoder_decoder else {"input_ids": before}
        logits = model(**inputs).logits[0, start - 1 :].float()
        tokens = torch.tensor(names[start:], device=model.device)[:, None]
        numbers = logits.log_softmax(-1).gather(1, tokens)[:, 0]
    return {"names": names, "numbers": numbers.tolist(), "scale": float(logits.abs().max())}


def inputs_of(reader: Any, given: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the exported tokenizer or image processor makes of what is given."""
    if not hasattr(reader, "apply_chat_template"):
        from transformers.image_utils import load_image

        return reader(load_image(given), return_tensors="pt").to(dtype)
    if isinstance(given, list):
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return reader.apply_chat_template(given, **options)
    texts = given if isinstance(given, dict) else {"text": given}
    return reader(**texts, truncation=True, return_tensors="pt")


def compare(model: Any, inputs: dict, asked: dict, tolerance: float) -> float:
    """The largest difference of the answer's numbers. Raises Different."""
    given, wanted, writes = f"{asked['given']!r:.80}", asked["names"], model.can_generate()
    if "prompt" in asked and asked["prompt"] != inputs["input_ids"][0].tolist():
        what = "chat template" if isinstance(asked["given"], list) else "tokenizer"
        raise Different(f"its {what} makes other tokens of {given}")
    found = ask(model, inputs, wanted if writes else None)
    if found["names"] != wanted:
        labels = [", ".join(each)[:80] for each in (found["names"], wanted)]
        raise Different(f"its labels are {labels[0]}, not {labels[1]}")
    pairs = zip(found["numbers"], asked["numbers"], strict=True)
    difference = max((abs(a - b) for a, b in pairs), default=0.0)
    limit = tolerance * max(1.0, found["scale"])
    if not difference <= limit:
        raise Different(f"an answer differs by {difference:.2g} after {given}")
    if not writes or (own := ask(model, inputs))["names"] == wanted:
        return difference
    # Another text is the same answer if, where they part, both tokens were as likely.
    parts = [a != b for a, b in zip(own["names"], wanted, strict=False)]
    place = parts.index(True) - len(wanted) + len(found["numbers"]) if any(parts) else None
    if place is None or abs(own["numbers"][place] - found["numbers"][place]) > limit:
        raise Different(f"it writes another text after {given}")
    return difference


def check(
    folder: str, task: str, dtype: str | None, rounding: str, asked: list, **options: Any
) -> dict[str, Any]:
    """Loads the exported model on the CPU and asks it; raises Different."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = "AutoImageProcessor" if task == "image-classification" else "AutoTokenizer"
    reader: Any = getattr(transformers, kind).from_pretrained(folder, **options)
    model: Any = getattr(transformers, CLASSES[task]).from_pretrained(folder, **options).eval()
    found = str(model.dtype).removeprefix("torch.")
    if dtype not in (None, found):
        raise Different(f"it is loaded in {found}, and was trained in {dtype}")
    tolerance = max(TOLERANCES[rounding], TOLERANCES.get(found, 1.0))
    difference = 0.0
    for each in asked:
        inputs = inputs_of(reader, each["given"], model.dtype)
        difference = max(difference, compare(model, inputs, each, tolerance))
    return {"dtype": found, "difference": difference}


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path]  # modules of the project are not in reach
    try:
        result = check(**json.load(sys.stdin))
    except Exception as error:  # also those of the libraries below
        kind = "" if isinstance(error, Different) else f"{type(error).__name__}: "
        result = {"problem": f"{kind}{error}"}
    print(json.dumps(result))
