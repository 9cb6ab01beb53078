"""Answers from a trained model.

    python predict.py "When a function is called,"           a text, continued or classified
    python predict.py photo.jpg more/*.png                   images, classified
    python predict.py --file texts.txt                       one input a line
    cat texts.txt | python predict.py --json                 the same; an object of JSON a line
    python predict.py --model runs/mine/model --chat "Hi"    a model that was trained on chats

What the model is, its folder says: the one that train.py saves at the end, in runs/NAME/model.
"""

import argparse
import json
import sys
from pathlib import Path

# transformers takes 4 s to import: after the arguments are known to be right.

# A part of a class's name in config.json, and what transformers calls such a task.
TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
}


def task_of(folder: Path) -> str | None:
    """What transformers calls the task of the model in a folder; None: it is none of transformers.

    An adapter alone, of LoRA, is one of text generation here.
    """
    if (folder / "adapter_config.json").exists():
        return "text-generation"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name = config["architectures"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    return next((task for end, task in TASKS.items() if end in name), None)


def parse() -> argparse.Namespace:
    """The arguments, checked; a wrong one ends the program with one line."""
    about, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="predict.py",
        usage=rest.partition("\n\n")[0].strip(),
        description=about,
        allow_abbrev=False,
    )
    parser.add_argument("inputs", nargs="*", help="texts, or paths of images; none: --file")
    parser.add_argument("--model", type=Path, help="its folder; default: the newest runs/*/model")
    parser.add_argument("--file", help="read inputs from here, one a line; -: standard input")
    parser.add_argument("--json", action="store_true", help="print an object of JSON a line")
    parser.add_argument("--top", type=int, default=3, help="classes to name (default: 3)")
    parser.add_argument("--tokens", type=int, default=50, help="tokens to add (default: 50)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--chat", action="store_true", help="inputs are messages of a user")
    parser.add_argument("--batch", type=int, default=16, help="inputs at once (default: 16)")
    arguments = parser.parse_args()
    for name in ("top", "tokens", "batch"):
        if getattr(arguments, name) < 1:
            stop(f"--{name} is {getattr(arguments, name)}; give a number from 1")
    if arguments.temperature < 0:
        stop(f"--temperature is {arguments.temperature:g}; give 0 or more")
    return arguments


def stop(problem: str) -> None:
    """Ends the program with one line, and the exit code of wrong input."""
    print(f"predict.py: {problem}", file=sys.stderr)
    sys.exit(2)


def model_folder(given: Path | None) -> tuple[Path, str]:
    """The model's folder, and what transformers calls its task."""
    newest = sorted(Path("runs").glob("*/model"), key=lambda path: path.stat().st_mtime)
    folder = given or (newest or [Path("runs/default/model")])[-1]
    if not folder.is_dir():
        stop(f"there is no model in {folder}; train first, or name one with --model")
    task = task_of(folder)
    if not task:
        stop(f"{folder} holds no model of transformers; load it with the code that saved it")
    return folder, task


def read_inputs(arguments: argparse.Namespace) -> list[str]:
    """The inputs: of the command line, else of a file, else of standard input."""
    if arguments.inputs and arguments.file:
        stop("give inputs or --file, not both")
    if arguments.inputs:
        return arguments.inputs
    try:
        if arguments.file in (None, "-"):
            if sys.stdin.isatty():
                print("One input a line; Ctrl-D ends them.", file=sys.stderr)
            lines = sys.stdin.buffer.read().decode().splitlines()
        else:
            lines = Path(arguments.file).read_bytes().decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {arguments.file or 'standard input'}: {error}")
    lines = [line for line in lines if line.strip()]
    return lines or stop("there is no input: give texts or paths, --file, or lines to read")


def check_images(paths: list[str]) -> None:
    """Ends the program at the first file that is no image."""
    from PIL import Image

    for path in paths:
        try:
            with Image.open(path) as image:
                image.load()
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            stop(f"{path} is no image that can be read: {error}")


def options_of(task: str, arguments: argparse.Namespace, model) -> dict:
    """What the pipeline of this task is told."""
    if task != "text-generation":
        classes = model.config.num_labels
        return {"top_k": min(arguments.top, classes), "batch_size": arguments.batch}
    from transformers import GenerationConfig

    settings = GenerationConfig.from_dict(model.generation_config.to_dict())
    settings.update(max_length=None, max_new_tokens=arguments.tokens)
    if arguments.temperature:
        settings.update(do_sample=True, temperature=arguments.temperature)
    else:  # the penalty keeps small models out of loops
        settings.update(do_sample=False, repetition_penalty=1.2)
    return {"generation_config": settings, "return_full_text": False}


def show(given: str, answer, as_json: bool) -> None:
    """Prints an answer: text, a number, or classes with their probabilities."""
    if as_json:
        kind = {str: "text", float: "value"}.get(type(answer), "classes")
        print(json.dumps({"input": given, kind: answer}, ensure_ascii=False))
    elif isinstance(answer, str):
        print(f"{given}{answer}")
    elif isinstance(answer, float):
        print(f"{given[:60]}: {answer:.4g}")
    else:
        classes = "  ".join(f"{each['label']} {each['score']:.3f}" for each in answer)
        print(f"{given[:60]}: {classes}")


def main() -> None:
    """Reads, loads, answers."""
    arguments = parse()
    folder, task = model_folder(arguments.model)
    inputs = read_inputs(arguments)
    if task == "image-classification":
        check_images(inputs)
    from transformers import pipeline
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Named, or it would be that of the model which adapters were made for.
        reads = "image_processor" if task == "image-classification" else "tokenizer"
        answer = pipeline(task, str(folder), **{reads: str(folder)})
    except Exception as error:  # each of many libraries below has its own
        stop(f"cannot load {folder}: {' '.join(str(error).split())}")
    if arguments.chat and not (task == "text-generation" and answer.tokenizer.chat_template):
        stop(f"{folder} has no chat template; leave out --chat")
    options = options_of(task, arguments, answer.model)
    given = [[{"role": "user", "content": text}] for text in inputs] if arguments.chat else inputs
    if task == "text-classification":
        options |= {"truncation": True}
    for text, result in zip(inputs, answer(given, **options), strict=True):
        if task == "text-generation":
            result = result[0]["generated_text"]
        elif answer.model.config.problem_type == "regression":
            result = result[0]["score"]
        show(text, result, arguments.json)


if __name__ == "__main__":
    main()
