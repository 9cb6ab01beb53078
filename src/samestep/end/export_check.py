"""Verifies an export: what transformers loads from its folder is the model that was trained.

If the task gives test inputs, both models have the same outputs for them. Otherwise both have the
same tensors.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch

from samestep.report.model_card import architecture, pipeline_task

# Largest difference of logits, as a part of the largest one, by the dtype of products.
_TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
CLASSES = {
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "text-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}


@torch.no_grad()
def ask(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return about a thousand logits of a model for one row of inputs, (1, ...), and more."""
    about: dict[str, Any] = {"dtype": str(model.dtype).removeprefix("torch.")}
    if "input_ids" in inputs:
        about["tokens"] = inputs["input_ids"][0].tolist()
    if not model.can_generate():
        about["labels"] = [*model.config.id2label.values()]
    elif "input_ids" in inputs:
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        if model.config.is_encoder_decoder:
            inputs["labels"] = inputs["input_ids"]
    outputs = model(**inputs)
    logits = (outputs["logits"] if "logits" in outputs else outputs[0]).float().flatten()
    return {**about, "logits": logits[:: 1 + len(logits) // 1000].tolist()}


def _read_inputs(reader: Any, given: Any) -> Any:
    """Let the exported tokenizer or image processor read what is given."""
    if not hasattr(reader, "apply_chat_template"):
        return reader(given, return_tensors="pt")
    if isinstance(given, list):
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return reader.apply_chat_template(given, **options)
    texts = given if isinstance(given, dict) else {"text": given}
    return reader(**texts, truncation=True, return_tensors="pt")


def load(folder: str, task: str | None, **options: Any) -> Any:
    """Load a folder by from_pretrained with its own generation config: adapters would get that of
    their base model, which may stop at other tokens."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with contextlib.suppress(OSError):  # there is none
        options["generation_config"] = transformers.GenerationConfig.from_pretrained(folder)
    name = CLASSES.get(task or "") or architecture(folder)
    return getattr(transformers, name).from_pretrained(folder, **options)


def _check_stop(model: Any, reader: Any) -> str:
    """Return the special token that a chat template writes after an answer; empty: none.

    Raises ValueError if the model, made to generate that token alone, does not stop.
    """
    if not model.can_generate() or not getattr(reader, "chat_template", None):
        return ""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "90000009"}]
    text = reader.apply_chat_template(chat, tokenize=False).rpartition("90000009")[2]
    ids = reader(text, add_special_tokens=False).input_ids
    ends = [token for token in ids if token in reader.added_tokens_decoder][:1]
    end, options = reader.decode(ends), {"max_new_tokens": 4, "do_sample": False}
    options["prefix_allowed_tokens_fn"] = lambda *_: ends
    if ends and model.generate(torch.tensor([ends]), **options).shape[1] != 2:
        what = f"it does not stop at {end}, with which its chat template ends an answer"
        eos = f"eos_token_id of its generation_config is {model.generation_config.eos_token_id}"
        raise ValueError(f"{what}: {eos}, not {ends[0]}")
    return end


def compare_outputs(folder: str, expected: list[dict], rounding: str, **options: Any) -> dict:
    """Load an exported model on the CPU, and compare its outputs; raise ValueError.

    expected: what `ask` gave for the trained model, its `inputs`, and what was `given`: a text, two
        texts, a chat, an image. If that is None, the loaded model gets the same inputs: there is no
        tokenizer or image processor to read anything.
    rounding: the dtype of its products. Returns the dtype, the largest difference as a part of the
    largest logit, and the token at which the model stops.
    """
    import transformers

    options["local_files_only"] = True
    reader, given = None, expected[0]["given"]
    if given is not None:
        is_text = isinstance(given, str | list | dict)
        kind = transformers.AutoTokenizer if is_text else transformers.AutoImageProcessor
        reader = kind.from_pretrained(folder, **options)
    model = load(folder, pipeline_task(Path(folder)), **options).eval()
    largest = 0.0
    for trained in expected:
        given, inputs = trained["given"], trained["inputs"]
        if given is not None:
            inputs = _read_inputs(reader, given).to(model.dtype)
        outputs = ask(model, inputs)
        for name in {"dtype", "tokens", "labels"} & trained.keys():
            if outputs[name] != trained[name]:
                shown, wanted = f"{outputs[name]!s:.80}", f"{trained[name]!s:.80}"
                raise ValueError(f"its {name} of {given!r:.60} are {shown}, not {wanted}")
        pairs = zip(outputs["logits"], trained["logits"], strict=True)
        difference = max(abs(a - b) for a, b in pairs) / max(1e-12, *map(abs, outputs["logits"]))
        if not difference <= max(_TOLERANCES[rounding], _TOLERANCES[outputs["dtype"]]):
            problem = f"its logits differ by {difference:.2g}"
            raise ValueError(f"{problem} of the largest one after {given!r:.60}")
        largest = max(largest, difference)
    stop = _check_stop(model, reader)
    return {"dtype": outputs["dtype"], "difference": largest, "stop": stop}


def compare_tensors(folder: str, model: torch.nn.Module) -> str:
    """Load an exported model by the class that its config names, on the CPU, and compare names,
    shapes and values of all its tensors with those of the trained one. Return a line; an empty one
    if that is no class of transformers, or none in the trained model.

    Raises ValueError unless one of the parts with this class, such as a student and its teacher, is
    the same.
    """
    import transformers

    name = architecture(folder)
    parts = [part for part in model.modules() if type(part).__name__ == name]
    if not parts or not hasattr(transformers, name):
        return ""
    after = load(folder, None, local_files_only=True).state_dict()
    problems = [_find_difference(part.state_dict(), after) for part in parts]
    if all(problems):
        raise ValueError(problems[0])
    return f"loads it as {name}, with the {len(after)} tensors of the trained model"


def _find_difference(trained: dict, loaded: dict) -> str:
    """Return the first difference of two dicts of tensors; a dtype with more digits is none."""
    for name in [*trained, *loaded]:
        if name not in loaded:
            return f"it has no {name}, which the trained model has"
        if name not in trained:
            return f"it has {name}, which the trained model has not"
        before, after = trained[name].cpu(), loaded[name]
        if before.shape != after.shape:
            return f"its {name} has the shape {[*after.shape]}, not {[*before.shape]}"
        dtype = torch.promote_types(before.dtype, after.dtype)
        if not torch.equal(before.to(dtype), after.to(dtype)):
            return f"its {name} has other values than that of the trained model"
    return ""
