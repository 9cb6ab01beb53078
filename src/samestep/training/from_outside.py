"""Asks an exported model what the trained one was asked. It knows transformers, nothing of ours.

Run as a program it reads a JSON object from standard input: `folder`, `task` (a pipeline's name),
`trust_remote_code`, `dtype` (of the trained weights; null for an adapter, whose base model has its
own), `rounding` (the run's dtype for products: a key of TOLERANCES) and `asked`. Each of these has
`given`, which a pipeline takes, `prompt`, the tokens that the run made of it, and what `ask` gave.
It prints {"dtype", "difference"}; or {"problem"}, in words, where the answers are not the same.
"""

import json
import sys
from typing import Any

import torch

# Largest difference of logits or log-probabilities, as a part of the largest logit.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
TEXT_TO_TEXT = "text2text-generation"
NEW_TOKENS = 16  # at most, of an answer


class Different(Exception):
    """How the exported model is not the trained one."""


# ---- Asking a model ------------------------------------------------------------------------------


@torch.no_grad()
def ask(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a model answers to one row of inputs, (1, T): of a classifier its logits by label; of a
    model that writes the tokens by its own search, without chance, and their log-probabilities."""
    if not model.can_generate():
        logits = model(**inputs).logits[0].tolist()
        return {"logits": {model.config.id2label[i]: each for i, each in enumerate(logits)}}
    longest = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    room = NEW_TOKENS
    if not model.config.is_encoder_decoder:
        room = min(room, longest - inputs["input_ids"].shape[1])
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=room)[0].tolist()
    logits, targets = of_tokens(model, inputs, tokens)
    return {"tokens": tokens, "room": room, "log_probs": chosen(logits, targets)}


@torch.no_grad()
def of_tokens(model: Any, inputs: dict, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Logits (N, V) at the tokens of an answer, and these tokens, without those of the prompt."""
    start, before = 1, torch.tensor([tokens[:-1]], device=model.device)
    if model.config.is_encoder_decoder:
        logits = model(**inputs, decoder_input_ids=before).logits
    else:
        start, logits = inputs["input_ids"].shape[1], model(input_ids=before).logits
    return logits[0, start - 1 :].float(), tokens[start:]


def chosen(logits: torch.Tensor, tokens: list[int]) -> list[float]:
    """The log-probability of each of N tokens; logits are (N, V)."""
    places = torch.tensor(tokens, device=logits.device)[:, None]
    return logits.log_softmax(-1).gather(1, places)[:, 0].tolist()


# ---- The exported model --------------------------------------------------------------------------


class SourceToTarget:
    """Writes targets: transformers 5 has no pipeline for encoder-decoders."""

    task = TEXT_TO_TEXT

    def __init__(self, folder: str, **options: Any):
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        self.model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, **options)

    def __call__(self, text: str, **options: Any) -> list[dict]:
        inputs = self.tokenizer(text, truncation=True, return_tensors="pt")
        return [{"generated_token_ids": self.model.generate(**inputs, **options)[0].tolist()}]


def load(task: str, folder: str, **options: Any) -> Any:
    """The pipeline that the model card names, on the CPU."""
    import transformers

    pipeline: Any = transformers.pipeline
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if task == TEXT_TO_TEXT:
        return SourceToTarget(folder, **options)
    processor = "image_processor" if task == "image-classification" else "tokenizer"
    return pipeline(task, folder, **{processor: folder}, device="cpu", **options)


def compare_text(pipe: Any, asked: dict, tolerance: float) -> float:
    """The largest difference of log-probabilities in an answer. Raises Different."""
    given, wanted, options = asked["given"], asked["tokens"], {}
    if isinstance(given, list):
        what, options = "chat template", {"add_generation_prompt": True, "return_dict": True}
        prompt = pipe.tokenizer.apply_chat_template(given, **options)["input_ids"]
    else:
        what, prompt = "tokenizer", pipe.tokenizer(given, truncation=True)["input_ids"]
    if prompt != asked["prompt"]:
        raise Different(f"its {what} makes other tokens of {given!r:.80}")
    ids = torch.tensor([prompt])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    logits, targets = of_tokens(pipe.model, inputs, wanted)
    pairs = zip(chosen(logits, targets), asked["log_probs"], strict=True)
    difference = max((abs(a - b) for a, b in pairs), default=0.0)
    limit = tolerance * max(1.0, float(logits.abs().max()))
    if not difference <= limit:
        raise Different(f"a log-probability differs by {difference:.2g} after {given!r:.80}")
    options = {"return_tensors": True} if pipe.task == "text-generation" else {}
    options |= {"do_sample": False, "max_new_tokens": asked["room"]}
    written = pipe(given, **options)[0]["generated_token_ids"]
    for i, (token, own) in enumerate(zip(wanted, written, strict=False)):
        if token != own:  # the same, if these two were as likely up to rounding
            row = logits[i - len(wanted) + len(targets)]
            if abs(float(row[token] - row[own])) <= limit:
                return difference
            raise Different(f"it writes another text after {given!r:.80}")
    if len(written) != len(wanted):
        raise Different(f"it writes another text after {given!r:.80}")
    return difference


def compare_logits(pipe: Any, asked: dict, tolerance: float) -> float:
    """The largest difference of logits; raises Different."""
    options: dict = {"truncation": True} if pipe.task == "text-classification" else {}
    wanted = asked["logits"]
    options |= {"top_k": len(wanted), "function_to_apply": "none"}
    own = {each["label"]: each["score"] for each in pipe(asked["given"], **options)}
    if own.keys() != wanted.keys():
        raise Different(f"its labels are {', '.join(own)!r:.80}, not {', '.join(wanted)!r:.80}")
    difference = max(abs(own[label] - wanted[label]) for label in wanted)
    if not difference <= tolerance * max(1.0, *map(abs, wanted.values())):
        raise Different(f"a logit differs by {difference:.2g} for {asked['given']!r:.80}")
    return difference


def check(
    folder: str, task: str, dtype: str | None, rounding: str, asked: list, **options: Any
) -> dict[str, Any]:
    """Loads the exported model and asks it; raises Different."""
    pipe = load(task, folder, **options)
    found = str(pipe.model.dtype).removeprefix("torch.")
    if dtype not in (None, found):
        raise Different(f"it is loaded in {found}, and was trained in {dtype}")
    tolerance = max(TOLERANCES[rounding], TOLERANCES.get(found, 1.0))
    compare = compare_text if pipe.model.can_generate() else compare_logits
    return {"dtype": found, "difference": max(compare(pipe, each, tolerance) for each in asked)}


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
