"""Answers from a trained model, a line of JSON for each input.

    python -m samestep predict "When a function is called,"       continues or classifies a text
    python -m samestep predict photo.jpg more/*.png               classifies images
    cat texts.txt | python -m samestep predict                    takes a line for an input

Where a model takes two texts, a tab stands between them. The first error ends it. For a chat:
pip install "transformers[serving]", `transformers serve runs/NAME/model`, and in another shell
`transformers chat runs/NAME/model`.
"""

import argparse
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from samestep.base.console import one_line
from samestep.data.images import open_image, upright
from samestep.end.export_check import load
from samestep.programs import make_parser
from samestep.report.model_card import TEXT_TO_TEXT, pipeline_task


def _load_pipeline(folder: str, task: str) -> Any:
    """Load a model, an adapter with its base model, as a pipeline of transformers.

    Raises ValueError if weights are missing: transformers would fill them with random numbers.
    """
    import transformers  # takes 4 s, once the arguments have been checked

    # transformers would ask whether to run a model's own code, and look for a lost base on the Hub.
    safe: Any = {"trust_remote_code": False, "local_files_only": True}
    model, info = load(folder, task, output_loading_info=True, **safe)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"its files lack {len(missing)} of its weights: {missing[0]}, ...")
    make: Any = transformers.pipeline
    if task == "image-classification":
        processor = transformers.AutoImageProcessor.from_pretrained(folder, **safe)
        return make(task, model, image_processor=processor)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **safe)
    if task == TEXT_TO_TEXT:  # transformers 5 has no pipeline for it
        return SimpleNamespace(task=task, model=model.eval(), tokenizer=tokenizer)
    options = {"truncation": True} if task == "text-classification" else {}
    return make(task, model, tokenizer=tokenizer, **options)


def ask(given: str, pipe: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """The text, the value or the classes that the model answers."""
    config = pipe.model.config
    limit = {"max_new_tokens": arguments.tokens} if arguments.tokens is not None else {}
    if pipe.task == TEXT_TO_TEXT:
        source = getattr(config, "source_prefix", "") + given
        inputs = pipe.tokenizer(source, truncation=True, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        (tokens,) = pipe.model.generate(**inputs, do_sample=False, **limit)
        return {"text": pipe.tokenizer.decode(tokens, skip_special_tokens=True)}
    if pipe.task == "text-generation":
        options = {"max_new_tokens": 50, "do_sample": False, "return_full_text": False}
        return {"text": pipe(given, **options | limit)[0]["generated_text"]}

    asked: Any = given
    if pipe.task == "image-classification":  # given a path, it would fetch URLs
        with open_image(given) as image:
            asked = upright(image)  # as in training
    elif getattr(config, "text_pair", False):
        first, tab, second = given.partition("\t")
        if not tab:
            raise ValueError("it has no tab, but the model takes two texts with a tab between them")
        asked = {"text": first, "text_pair": second}
    (classes,) = pipe([asked], top_k=arguments.top)
    if config.problem_type == "regression":
        scale, mean = getattr(config, "label_std", 1.0), getattr(config, "label_mean", 0.0)
        return {"value": classes[0]["score"] * scale + mean}
    return {"classes": classes}


def main() -> None:
    """Runs the program; bad input is one line and exit code 2."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    parser = make_parser("predict", __doc__)
    add = parser.add_argument
    add("inputs", nargs="*", help="texts or paths of images; default: standard input")
    add("--model", type=Path, help="folder; default: the newest runs/*/model")
    add("--top", type=int, default=3, help="classes to name (default: 3)")
    add("--tokens", type=int, help="maximum tokens of an answer (default: the model's own, or 50)")
    arguments = parser.parse_args()
    trained = sorted(Path("runs").glob("*/model"), key=os.path.getmtime)
    folder = arguments.model or [Path("runs/default/model"), *trained][-1]
    task = pipeline_task(folder)
    if not task:
        parser.error(f"{folder} holds no model of transformers; train first, or give --model")
    failed = "cannot read standard input"
    try:
        inputs = arguments.inputs
        if not inputs:  # utf-8-sig: without a byte order mark
            inputs = Path("/dev/stdin").read_text("utf-8-sig").removesuffix("\n").split("\n")
        failed = f"cannot load {folder}"
        pipe = _load_pipeline(str(folder), task)
        if not arguments.model:
            print(f"model: {folder}", file=sys.stderr)
        for given in inputs:
            failed = f"no answer to {one_line(given, 100)}"
            answer = {"input": given, **ask(given, pipe, arguments)}
            print(json.dumps(answer, allow_nan=False), flush=True)  # ValueError for a NaN
    except Exception as error:  # each of the many libraries below has errors of its own
        parser.error(f"{failed}: {type(error).__name__}: {error}")
