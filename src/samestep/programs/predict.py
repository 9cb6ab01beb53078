"""Answers from a trained model.

    python -m samestep predict "When a function is called,"       continues or classifies a text
    python -m samestep predict photo.jpg more/*.png               classifies images
    cat texts.txt | python -m samestep predict --json             a line each: a JSON object a line
    printf 'a text\\tits pair\\n' | python -m samestep predict     takes two texts, with a tab

Line n of the output answers line n of the input. A blank line stays blank. So does one without an
answer: its error is named, and the exit code is 2. For a chat: pip install "transformers[serving]",
`transformers serve runs/NAME/model`, and in another shell `transformers chat runs/NAME/model`.
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

from samestep.base.console import escaped, one_line, protect_output
from samestep.images.images import flatten, open_image, upright
from samestep.programs import make_parser
from samestep.project.export_check import load
from samestep.report.model_card import TEXT_TO_TEXT, pipeline_task

KEPT = "\n\t\u200c\u200d"  # of a text that a model continues; joiners are part of words and emoji


def load_pipeline(folder: Path, task: str) -> Any:
    """Load a model, an adapter with its base model, as a pipeline of transformers.

    Raises ValueError if weights are missing: transformers would fill them with random numbers.
    """
    import transformers  # takes 4 s, once the arguments have been checked

    # transformers would ask whether to run a model's own code, and look for a lost base on the Hub.
    options: Any = {"trust_remote_code": False, "local_files_only": True}
    model, info = load(str(folder), task, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"its files lack {len(missing)} of its weights: {missing[0]}, ...")
    make: Any = transformers.pipeline
    if task == "image-classification":
        processor = transformers.AutoImageProcessor.from_pretrained(str(folder), **options)
        return make(task, model, image_processor=processor)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **options)
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
            asked, problem = upright(image)
        if problem:
            told = f"{one_line(given, 100)} is not turned: broken EXIF block: {problem}"
            print(f"samestep predict: {told}", file=sys.stderr)
        if getattr(config, "background", None):  # as in training
            asked = flatten(asked, config.background)
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


def predict(arguments: argparse.Namespace) -> int:
    """Read the inputs, load the model, print the answers; gives the exit code."""
    trained = sorted(Path("runs").glob("*/model"), key=os.path.getmtime)
    folder = arguments.model or [Path("runs/default/model"), *trained][-1]
    task = pipeline_task(folder)
    if not task:
        raise ValueError(f"{folder} holds no model of transformers; train first, or give --model")
    inputs = arguments.inputs
    if not inputs:  # utf-8-sig: without a byte order mark
        inputs = Path("/dev/stdin").read_text("utf-8-sig").removesuffix("\n").split("\n")
    if not any(map(str.strip, inputs)):
        raise ValueError("there is no input; give texts or paths, or standard input")
    try:
        pipe = load_pipeline(folder, task)
    except Exception as error:  # each of the many libraries below has errors of its own
        raise ValueError(f"cannot load {folder}: {error}") from None
    code = 0
    for given in inputs:
        try:
            answer = ask(given, pipe, arguments) if given.strip() else {}
            json.dumps(answer, allow_nan=False)  # raises for a score that is NaN
        except Exception as error:
            answer = {}
            code = 2
            told = f"no answer to {one_line(given, 100)}: {type(error).__name__}: {one_line(error)}"
            print(f"samestep predict: {told}", file=sys.stderr)
        if arguments.json:
            print(json.dumps({"input": given, **answer}), flush=True)
        elif task == "text-generation" and answer:
            print(escaped(given + answer["text"], KEPT), flush=True)
        else:
            print(f"{one_line(given, 100)}: {show(**answer)}" if answer else "", flush=True)
    return code


def show(text: str = "", value: float | None = None, classes: list | tuple = ()) -> str:
    """The answer as one line."""
    if value is not None:
        return f"{value:.6g}"
    words = [f"{one_line(each['label'], 60)} {each['score']:.3f}" for each in classes]
    return one_line(text or "  ".join(words), 100_000)


def main() -> int:
    """Runs the program; bad input is one line and exit code 2."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    protect_output()
    warnings.simplefilter("ignore")
    parser = make_parser("predict", __doc__)
    add = parser.add_argument
    add("inputs", nargs="*", help="texts or paths of images; default: standard input")
    add("--model", type=Path, help="folder; default: the newest runs/*/model")
    add("--json", action="store_true", help="print a JSON object a line")
    add("--top", type=int, default=3, help="classes to name (default: 3)")
    add("--tokens", type=int, help="maximum tokens of an answer (default: the model's own, or 50)")
    arguments = parser.parse_args()
    try:
        return predict(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
