"""Asks an exported model what the trained one was asked. It knows transformers, nothing of ours.

Run as a program it reads the arguments of `check` from standard input, as `pickle` writes them, and
prints what it returns, or why it failed, as JSON.
"""

import contextlib
import functools
import json
import pickle
import sys
from typing import Any

import torch

# Largest difference of logits, as a part of the largest one, by the dtype of products.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
CLASSES = {
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "text-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}


@torch.no_grad()
def ask(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a model makes of one row of inputs, (1, T): about a thousand of its logits."""
    kinds = {each.dtype for each in model.parameters() if each.is_floating_point()}
    dtype = functools.reduce(torch.promote_types, kinds)  # frozen weights may be in half precision
    about: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    if "input_ids" in inputs:
        about["tokens"] = inputs["input_ids"][0].tolist()
    if not model.can_generate():
        about["labels"] = [*model.config.id2label.values()]
    else:
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        if model.config.is_encoder_decoder:
            inputs["labels"] = inputs["input_ids"]
    logits = model(**inputs).logits.float().flatten()
    return {**about, "logits": logits[:: 1 + len(logits) // 1000].tolist()}


def read_inputs(reader: Any, given: Any) -> Any:
    """What the exported tokenizer or image processor makes of what is given."""
    if not hasattr(reader, "apply_chat_template"):
        return reader(given, return_tensors="pt")
    if isinstance(given, list):
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return reader.apply_chat_template(given, **options)
    texts = given if isinstance(given, dict) else {"text": given}
    return reader(**texts, truncation=True, return_tensors="pt")


def load(folder: Any, task: str, **options: Any) -> Any:
    """What from_pretrained gives for a folder with its own generation config: adapters would get
    that of their base model, which may stop at other tokens."""
    import transformers

    with contextlib.suppress(OSError):  # there is none
        options["generation_config"] = transformers.GenerationConfig.from_pretrained(folder)
    return getattr(transformers, CLASSES[task]).from_pretrained(folder, **options)


def check_stop(model: Any, reader: Any) -> str:
    """The special token that a chat template writes after an answer; empty: there is none.

    Raises ValueError if the model, made to generate that token alone, does not stop.
    """
    if not model.can_generate() or not reader.chat_template:
        return ""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "90000009"}]
    text = reader.apply_chat_template(chat, tokenize=False).rpartition("90000009")[2]
    ids = reader(text, add_special_tokens=False).input_ids
    ends = [each for each in ids if each in reader.added_tokens_decoder][:1]
    end, options = reader.decode(ends), {"max_new_tokens": 4, "do_sample": False}
    options["prefix_allowed_tokens_fn"] = lambda *_: ends
    if ends and model.generate(torch.tensor([ends]), **options).shape[1] != 2:
        what = f"it does not stop at {end}, with which its chat template ends an answer"
        eos = f"eos_token_id of its generation_config is {model.generation_config.eos_token_id}"
        raise ValueError(f"{what}: {eos}, not {ends[0]}")
    return end


def check(folder: str, task: str, rounding: str, asked: list, **options: Any) -> dict[str, Any]:
    """Load an exported model on the CPU, and compare what it answers; raises ValueError.

    Each of `asked` has what `ask` gave for the trained model, and what was `given`: a text, two
    texts, a chat, an image.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = "AutoImageProcessor" if task == "image-classification" else "AutoTokenizer"
    reader: Any = getattr(transformers, kind).from_pretrained(folder, **options)
    model = load(folder, task, **options).eval()
    answers = [ask(model, read_inputs(reader, each["given"]).to(model.dtype)) for each in asked]
    for each, answer in zip(asked, answers, strict=True):
        for name in {"dtype", "tokens", "labels"} & each.keys():
            if answer[name] != each[name]:
                found, trained = f"{answer[name]!s:.80}", f"{each[name]!s:.80}"
                raise ValueError(f"its {name} of {each['given']!r:.60} are {found}, not {trained}")
        pairs = zip(answer["logits"], each["logits"], strict=True)
        each["difference"] = max(abs(a - b) for a, b in pairs) / max(1, *map(abs, answer["logits"]))
        if not each["difference"] <= max(TOLERANCES[rounding], TOLERANCES[answer["dtype"]]):
            problem = f"its logits differ by {each['difference']:.2g}"
            raise ValueError(f"{problem} of the largest one after {each['given']!r:.60}")
    largest = max(each["difference"] for each in asked)
    stop = check_stop(model, reader)
    return {"dtype": answers[0]["dtype"], "difference": largest, "stop": stop}


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    try:
        result: Any = check(**pickle.load(sys.stdin.buffer))
    except Exception as error:  # also those of the libraries below
        result = f"{type(error).__name__}: {error}"
    print(json.dumps(result))
