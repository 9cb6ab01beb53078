"""Answers from a trained model.

    python -m samestep predict "When a function is called,"       continues or classifies a text
    python -m samestep predict photo.jpg more/*.png               classifies images
    python -m samestep predict --file texts.txt                   reads one input a line
    cat texts.txt | python -m samestep predict --json             prints a JSON object a line
    printf 'a text\\tits pair\\n' | python -m samestep predict     takes two texts, with a tab
    python -m samestep predict --model runs/mine/model --chat "Hi"    asks a model trained on chats
    python -m samestep predict "3 March 1999"                     writes the target text (seq2seq)

train.py saves the model in runs/NAME/model; its config.json names the task. Line n of the output
answers line n of the input, and a blank line stays blank.
"""

import argparse
import io
import json
import os
import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn, cast

from samestep.base.console import escaped, one_line
from samestep.report.model_card import TEXT_TO_TEXT, pipeline_task

# transformers takes 4 s to import. It is imported once the arguments have been checked.

MAX_NUMBER = 100_000  # classes, tokens, inputs at once
# Control characters except tabs and line ends, and marks that reverse the direction of writing.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def parse_arguments() -> argparse.Namespace:
    """The checked arguments; a wrong one ends the program with one line."""
    about, _, rest = __doc__.partition("\n\n")
    parser = Parser(
        prog="samestep predict",
        usage=rest.partition("\n\n")[0].strip(),
        description=about,
        allow_abbrev=False,
    )
    parser.add_argument("inputs", nargs="*", help="texts or paths of images; default: --file")
    parser.add_argument("--model", type=Path, help="folder; default: the newest runs/*/model")
    parser.add_argument("--file", help="file with one input a line; -: standard input")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")
    parser.add_argument("--top", type=int, help="classes to name (default: 3)")
    parser.add_argument(
        "--tokens", type=int, help="tokens to add (default: 50, or what an encoder-decoder names)"
    )
    parser.add_argument("--temperature", type=float, help="0, the default: the likeliest token")
    parser.add_argument("--chat", action="store_true", help="inputs are user messages")
    parser.add_argument("--batch", type=int, default=16, help="inputs at once (default: 16)")
    arguments = parser.parse_args()
    for name in ("top", "tokens", "batch"):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= MAX_NUMBER:
            fail(f"--{name} is {value}; give a number from 1 to {MAX_NUMBER:,}")
    # Logits may overflow when divided by less; divided by more, they are all the same.
    if arguments.temperature and not 0.01 <= arguments.temperature <= 100:
        fail(f"--temperature is {arguments.temperature:g}; give 0, or a number from 0.01 to 100")
    return arguments


# ---- Output --------------------------------------------------------------------------------------


def print_answer(text: str) -> None:
    """Prints an answer; ends the program if standard output cannot be written to."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        if isinstance(error, BrokenPipeError):  # the reader has seen enough, as `head` has
            sys.exit()
        fail(f"cannot write to standard output: {error.strerror}")


def fail(problem: str) -> NoReturn:
    """Prints one line, and exits with the code for wrong input."""
    print(f"samestep predict: {one_line(problem)}", file=sys.stderr)
    sys.exit(2)


# ---- Input ---------------------------------------------------------------------------------------


def find_model(given: Path | None) -> tuple[Path, str]:
    """The model's folder, and the name of its task in transformers."""
    trained = filter(Path.is_dir, Path("runs").glob("*/model"))
    newest = sorted(trained, key=lambda path: path.stat().st_mtime)
    folder = given or (newest or [Path("runs/default/model")])[-1]
    if not folder.is_dir():
        fail(f"there is no model in {folder}; train first, or give --model")
    task = pipeline_task(folder)
    if not task and pipeline_task(folder / "model"):
        fail(f"{folder} is the folder of a run; give --model {folder / 'model'}")
    if not task:
        fail(f"{folder} holds no model of transformers; load it with the code that saved it")
    if not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir()):
        fail(f"{folder} holds no weights (model.safetensors); copy all of it, or train again")
    return folder, task


def read_inputs(arguments: argparse.Namespace) -> list[str]:
    """The inputs on the command line, or else the lines of a file or of standard input."""
    if arguments.inputs and arguments.file:
        fail("give inputs or --file, not both")
    if arguments.inputs:
        return arguments.inputs
    name = arguments.file if arguments.file not in (None, "-") else "standard input"
    if name != arguments.file and sys.stdin.isatty():
        print("One input a line; Ctrl-D ends the input.", file=sys.stderr)
    try:
        is_file = name == arguments.file
        content = Path(name).read_bytes() if is_file else sys.stdin.buffer.read()
        text = io.StringIO(content.decode("utf-8-sig"), newline=None)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        fail(f"cannot read {name}: line {line} is not UTF-8")
    except OSError as error:
        fail(f"cannot read {name}: {error.strerror}")
    lines = [line.removesuffix("\n") for line in text]
    if not any(map(str.strip, lines)):
        fail("there is no input; give texts or paths, --file, or lines on standard input")
    return lines


def load_image(path: str) -> Any:
    """The decoded Pillow image of a file, which is closed again."""
    from samestep.images.images import open_image

    with open_image(path) as image:
        image.load()
        return image


def check_images(paths: list[str]) -> None:
    """Ends the program at the first file that cannot be read as an image."""
    for path in filter(str.strip, paths):
        try:
            load_image(path)
        except Exception as error:  # each decoder has errors of its own
            fail(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")


# ---- Answers -------------------------------------------------------------------------------------


class SourceToTarget:
    """The targets that an encoder-decoder writes, called like a pipeline of transformers."""

    task = TEXT_TO_TEXT

    def __init__(self, task: str, model: Any, tokenizer: str, **options: Any):
        from transformers import AutoTokenizer

        self.model = model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer, **options)

    def __call__(self, texts: list[str], **options: Any) -> list:
        prefix = getattr(self.model.config, "source_prefix", "")
        sources = [prefix + text for text in texts]
        encoded = self.tokenizer(sources, padding=True, truncation=True, return_tensors="pt")
        inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        targets = self.tokenizer.batch_decode(
            self.model.generate(**inputs, **options), skip_special_tokens=True
        )
        return [[{"generated_text": text}] for text in targets]


def pipeline_options(task: str, arguments: argparse.Namespace, model: Any) -> dict:
    """The options for calls of the pipeline of this task."""
    if task not in ("text-generation", TEXT_TO_TEXT):
        top_k = min(arguments.top or 3, model.config.num_labels)
        options = {"truncation": True} if task == "text-classification" else {}
        return {"top_k": top_k, "batch_size": arguments.batch, **options}
    from transformers import GenerationConfig

    settings = GenerationConfig.from_dict(model.generation_config.to_dict())
    continues = task == "text-generation"
    tokens = arguments.tokens or (None if continues else settings.max_new_tokens) or 50
    settings.update(max_length=None, max_new_tokens=tokens)
    if arguments.temperature:
        settings.update(do_sample=True, temperature=arguments.temperature)
    else:
        settings.update(do_sample=False)
        if continues:  # the penalty keeps small models out of loops
            settings.update(repetition_penalty=1.2)
    return {"generation_config": settings} | ({"return_full_text": False} if continues else {})


def load_model(folder: Path) -> Any:
    """The model in a folder; an adapter is loaded together with its base model.

    Raises ValueError if weights are missing: transformers would fill them with random numbers.
    """
    import transformers

    from samestep.data.hub import is_local_name

    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        base = str(adapter.get("base_model_name_or_path"))
        if is_local_name(base) and not os.path.isdir(base):
            raise ValueError(f"the model that its adapters belong to is gone: no folder {base}")
    auto: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"trust_remote_code": False}
    if (folder / "config.json").is_file():
        config = transformers.AutoConfig.from_pretrained(str(folder), **options)
        auto = getattr(transformers, config.architectures[0], auto)
    model, info = auto.from_pretrained(str(folder), output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"its files lack {len(missing)} of its weights: {missing[0]}, ...")
    return model


def format_answer(given: str, task: str, kind: str, answer: Any, as_json: bool) -> str:
    """The line for an answer: a text, a number, or classes with probabilities; None gives "".

    `kind` is text, value or classes.
    """
    if as_json:
        line = {"input": given, kind: answer}
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        printable = text.isprintable() and sys.stdout.encoding.lower() == "utf-8"
        return text if printable else json.dumps(line)
    if answer is None:
        return ""
    if task == TEXT_TO_TEXT:
        answer = one_line(answer, 100_000)
    elif kind == "text":  # keeps its line ends
        return CONTROL.sub(lambda c: c[0].encode("unicode_escape").decode(), f"{given}{answer}")
    if task == "image-classification":
        given = escaped(given)  # a path is not shortened
    elif len(given := one_line(given[:1000], 10_000)) > 60:
        given = f"{given[:57]}..."
    if kind == "value":
        return f"{given}: {answer:.6g}"
    if kind == "text":
        return f"{given}: {answer}"
    classes = [f"{one_line(each['label'], 60)} {each['score']:.3f}" for each in answer]
    return f"{given}: {'  '.join(classes)}"


def answer_inputs(
    pipe: Any, inputs: list[str], arguments: argparse.Namespace, options: dict
) -> list[str]:
    """The answers of a transformers pipeline, one line for each input; blank inputs stay blank."""
    texts = [text for text in inputs if text.strip()]
    model_inputs: list[Any] = texts
    config, kind = pipe.model.config, "classes"
    if pipe.task == "image-classification":  # given paths, it would fetch URLs and read any format
        from PIL import ImageOps

        model_inputs = [load_image(path) for path in texts]
        if background := getattr(config, "background", ""):  # as in training
            from samestep.images.images import flatten

            upright = map(ImageOps.exif_transpose, model_inputs)
            model_inputs = [flatten(image, background) for image in upright]
    elif arguments.chat:
        model_inputs = [[{"role": "user", "content": text}] for text in texts]
    elif getattr(config, "text_pair", False):
        parts = [text.partition("\t") for text in texts]
        model_inputs = [{"text": text, "text_pair": pair} for text, _, pair in parts]
    results = iter(pipe(model_inputs, **options) if model_inputs else [])
    lines = []
    for text in inputs:
        result = next(results) if text.strip() else None
        if pipe.task in ("text-generation", TEXT_TO_TEXT):
            kind = "text"
            result = result and result[0]["generated_text"]
        elif config.problem_type == "regression":
            scale, mean = getattr(config, "label_std", 1.0), getattr(config, "label_mean", 0.0)
            kind = "value"
            result = result and result[0]["score"] * scale + mean
        lines.append(format_answer(text, pipe.task, kind, result, arguments.json))
    return lines


def main() -> None:
    """Reads the inputs, loads the model, prints the answers."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, without a traceback
    for stream in (sys.stdout, sys.stderr):
        cast(io.TextIOWrapper, stream).reconfigure(errors="backslashreplace")
    warnings.simplefilter("ignore")
    arguments = parse_arguments()
    folder, task = find_model(arguments.model)
    writes = task in ("text-generation", TEXT_TO_TEXT)
    for name in ["top"] if writes else ["tokens", "temperature"]:
        if getattr(arguments, name):
            what = "writes text" if writes else "names classes or a number"
            fail(f"{folder} {what}, and --{name} is not read; leave it out")
    inputs = read_inputs(arguments)
    if task == "image-classification":
        check_images(inputs)
    from transformers import pipeline
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # For an adapter, transformers would take the processor of the base model.
        processor = "image_processor" if task == "image-classification" else "tokenizer"
        # Without trust_remote_code, transformers asks whether to run code that came with the model.
        options: dict[str, Any] = {processor: str(folder), "trust_remote_code": False}
        make: Any = SourceToTarget if task == TEXT_TO_TEXT else pipeline
        pipe = make(task, load_model(folder), **options)
        options = pipeline_options(task, arguments, pipe.model)
    except Exception as error:  # each of the many libraries below has errors of its own
        fail(f"cannot load {folder}: {error}")
    if arguments.chat and not (task == "text-generation" and pipe.tokenizer.chat_template):
        fail(f"{folder} has no chat template; leave out --chat")
    if getattr(pipe.model.config, "text_pair", False):
        for text in inputs:
            if text.strip() and "\t" not in text:
                pair = f"{folder} answers to pairs: two texts with a tab between them"
                fail(f"{one_line(text, 60)} has no tab, but {pair}")
    for start in range(0, len(inputs), arguments.batch):
        batch = inputs[start : start + arguments.batch]
        try:
            lines = answer_inputs(pipe, batch, arguments, options)
        except Exception as error:
            advice = "; give shorter texts or fewer --tokens" * task.endswith("generation")
            fail(f"{folder} cannot answer: {type(error).__name__}: {error}{advice}")
        for line in lines:
            print_answer(line)
