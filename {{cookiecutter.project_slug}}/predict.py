"""Answers from a trained model.

    python predict.py "When a function is called,"           a text, continued or classified
    python predict.py photo.jpg more/*.png                   images, classified
    python predict.py --file texts.txt                       one input a line
    cat texts.txt | python predict.py --json                 the same; an object of JSON a line
    printf 'a text\\tits pair\\n' | python predict.py         two texts, with a tab between them
    python predict.py --model runs/mine/model --chat "Hi"    a model that was trained on chats
    python predict.py "3 March 1999"                         the target text of an encoder-decoder

The model is the one that train.py saves at the end, in runs/NAME/model; its config.json says what
it is for. A blank line is answered by a blank one: line n of the answers is that of line n.
"""

import argparse
import io
import json
import os
import re
import signal
import stat
import sys
import warnings
from pathlib import Path
from typing import TextIO

from training.console import escaped, one_line
from training.model_card import TEXT_TO_TEXT, pipeline_task

# transformers takes 4 s to import: after the arguments are known to be right.

MOST = 100_000  # classes, tokens, inputs at once
# Control characters but tabs and line ends; marks that reverse the direction of writing.
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Parser(argparse.ArgumentParser):
    """argparse, except that a mistake is one line."""

    def error(self, message: str) -> None:
        stop(message)

    def print_help(self, file: TextIO | None = None) -> None:
        write(self.format_help())


def parse() -> argparse.Namespace:
    """The arguments, checked; a wrong one ends the program with one line."""
    about, _, rest = __doc__.partition("\n\n")
    parser = Parser(
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
    parser.add_argument(
        "--tokens", type=int, help="tokens to add (default: 50, or what an encoder-decoder names)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--chat", action="store_true", help="inputs are messages of a user")
    parser.add_argument("--batch", type=int, default=16, help="inputs at once (default: 16)")
    arguments = parser.parse_args()
    for name in ("top", "tokens", "batch"):
        if getattr(arguments, name) is not None and not 1 <= getattr(arguments, name) <= MOST:
            stop(f"--{name} is {getattr(arguments, name)}; give a number from 1 to {MOST:,}")
    # Logits divided by less may overflow, divided by more they are all the same.
    if arguments.temperature and not 0.01 <= arguments.temperature <= 100:
        stop(f"--temperature is {arguments.temperature:g}; give 0, or a number from 0.01 to 100")
    return arguments


# ---- Output --------------------------------------------------------------------------------------


def emit(text: str, stream: TextIO) -> OSError | None:
    """Prints a line; where the stream takes no more, gives the reason, and lets the rest go."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # else Python tries at its end
        return error
    return None


def write(text: str) -> None:
    """Prints a line of answers; ends the program where standard output takes no more."""
    error = emit(text, sys.stdout)
    if isinstance(error, BrokenPipeError):  # the reader has seen enough, as `head` has
        sys.exit()
    if error:
        stop(f"cannot write to standard output: {error.strerror}")


def stop(problem: str) -> None:
    """Ends the program with one line, and the exit code of wrong input."""
    emit(f"predict.py: {one_line(problem)}", sys.stderr)
    sys.exit(2)


# ---- Input ---------------------------------------------------------------------------------------


def model_folder(given: Path | None) -> tuple[Path, str]:
    """The model's folder, and what transformers calls its task."""
    trained = filter(Path.is_dir, Path("runs").glob("*/model"))
    newest = sorted(trained, key=lambda path: path.stat().st_mtime)
    folder = given or (newest or [Path("runs/default/model")])[-1]
    try:
        if not folder.is_dir():
            stop(f"there is no model in {folder}; train first, or name one with --model")
        task = pipeline_task(folder)
        if not task and pipeline_task(folder / "model"):
            stop(f"{folder} is the folder of a run; give --model {folder / 'model'}")
        if not task:
            stop(f"{folder} holds no model of transformers; load it with the code that saved it")
        for path in folder.rglob("*"):  # transformers would wait for a named pipe
            if not (path.is_file() or path.is_dir()):
                stop(f"{path} is neither a file nor a folder; remove it, or train again")
        if not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir()):
            stop(f"{folder} holds no weights (model.safetensors); copy it whole, or train again")
    except OSError as error:
        stop(f"cannot read --model {folder}: {error.strerror}")
    return folder, task


def read_inputs(arguments: argparse.Namespace) -> list[str]:
    """The inputs: of the command line, else the lines of a file, else of standard input."""
    if arguments.inputs and arguments.file:
        stop("give inputs or --file, not both")
    if arguments.inputs:
        return arguments.inputs
    name = arguments.file if arguments.file not in (None, "-") else "standard input"
    try:
        if name == arguments.file:
            content = read_file(name)
        else:
            if sys.stdin and sys.stdin.isatty():
                emit("One input a line; Ctrl-D ends them.", sys.stderr)
            content = sys.stdin.buffer.read() if sys.stdin else b""
        text = io.StringIO(content.decode("utf-8-sig"), newline=None)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        stop(f"cannot read {name}: line {line} is not UTF-8")
    except OSError as error:
        stop(f"cannot read {name}: {error.strerror or error}")
    lines = [line.removesuffix("\n") for line in text]
    if not any(map(str.strip, lines)):
        stop("there is no input: give texts or paths, --file, or lines to read")
    return lines


def read_file(path: str) -> bytes:
    """What a file holds, or what a pipe gives; a named pipe that nobody writes to is empty."""
    kind = os.stat(path).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
        raise OSError("it is a folder or a device; give a file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else it waits for a writer
    os.set_blocking(descriptor, True)
    with open(descriptor, "rb") as file:
        return file.read()


def decoded(path: str):
    """A Pillow image of a path, its file closed again."""
    from tasklib.images import open_image

    with open_image(path) as image:
        image.load()
        return image


def check_images(paths: list[str]) -> None:
    """Ends the program at the first file that is no image."""
    for path in filter(str.strip, paths):
        try:
            decoded(path)
        except Exception as error:  # each decoder has its own
            stop(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")


def check_texts(texts: list[str]) -> None:
    """Ends the program at the first text that is not UTF-8, as words of a command line may be."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            stop(f"{text} is not UTF-8; give it in UTF-8")


def check_template(tokenizer, texts: list[str]) -> None:
    """Ends the program where the chat template, which is a program too, fails or does not end."""
    from tasklib.child import time_limit

    for text in texts:
        try:
            with time_limit(10):
                chat = [{"role": "user", "content": text}]
                tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            given = one_line(text, 60)
            stop(f"the chat template of this model cannot take {given}: {one_line(error, 200)}")


# ---- Answers -------------------------------------------------------------------------------------


class SourceToTarget:
    """The targets that an encoder-decoder writes, called like a pipeline of transformers."""

    task = TEXT_TO_TEXT

    def __init__(self, task: str, model, tokenizer: str, **options):
        from transformers import AutoTokenizer

        self.model = model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer, **options)

    def __call__(self, texts: list[str], **options) -> list:
        prefix = getattr(self.model.config, "source_prefix", "")
        given = [prefix + text for text in texts]
        encoded = self.tokenizer(given, padding=True, truncation=True, return_tensors="pt")
        inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        found = self.tokenizer.batch_decode(
            self.model.generate(**inputs, **options), skip_special_tokens=True
        )
        return [[{"generated_text": text}] for text in found]


def options_of(task: str, arguments: argparse.Namespace, model) -> dict:
    """What the pipeline of this task is told."""
    if task not in ("text-generation", TEXT_TO_TEXT):
        classes = model.config.num_labels
        cut = {"truncation": True} if task == "text-classification" else {}
        return {"top_k": min(arguments.top, classes), "batch_size": arguments.batch, **cut}
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


def load_model(folder: Path):
    """The model of a folder; raises ValueError where its files lack weights, which would be random.

    Of an adapter, that is the model of its base with the adapter.
    """
    import transformers

    auto, options = transformers.AutoModelForCausalLM, {"trust_remote_code": False}
    if (folder / "config.json").is_file():
        about = transformers.AutoConfig.from_pretrained(str(folder), **options)
        auto = getattr(transformers, about.architectures[0], auto)
    model, facts = auto.from_pretrained(str(folder), output_loading_info=True, **options)
    if missing := sorted(facts["missing_keys"]):
        raise ValueError(f"its files lack {len(missing)} of its weights: {missing[0]}, ...")
    return model


def line_of(given: str, task: str, kind: str, answer, as_json: bool) -> str:
    """An answer as a line: text, a number, or classes with their probabilities; None is blank."""
    if as_json:
        found = {"input": given, kind: answer}
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        shown = text.isprintable() and sys.stdout.encoding.lower() == "utf-8"
        return text if shown else json.dumps(found)
    if answer is None:
        return ""
    if task == TEXT_TO_TEXT:
        answer = one_line(answer, 100_000)
    elif kind == "text":  # with its line ends
        return HIDDEN.sub(lambda c: c[0].encode("unicode_escape").decode(), f"{given}{answer}")
    if task == "image-classification":
        given = escaped(given)  # a path is shown whole
    elif len(given := one_line(given[:1000], 10_000)) > 60:
        given = f"{given[:57]}..."
    if kind == "value":
        return f"{given}: {answer:.6g}"
    if kind == "text":
        return f"{given}: {answer}"
    classes = [f"{one_line(each['label'], 60)} {each['score']:.3f}" for each in answer]
    return f"{given}: {'  '.join(classes)}"


def answers(pipe, inputs: list[str], arguments: argparse.Namespace, options: dict) -> list[str]:
    """The lines that a pipeline of transformers answers these inputs with."""
    asked = given = [text for text in inputs if text.strip()]
    config, kind = pipe.model.config, "classes"
    if pipe.task == "image-classification":  # opened here: it would take URLs and any format
        from PIL import ImageOps

        given = [decoded(path) for path in asked]
        if ground := getattr(config, "background", ""):  # as in training; pipelines ignore alpha
            from tasklib.images import flatten

            given = [flatten(ImageOps.exif_transpose(image), ground) for image in given]
    elif arguments.chat:
        given = [[{"role": "user", "content": text}] for text in asked]
    elif getattr(config, "text_pair", False):
        parts = [text.partition("\t") for text in asked]
        given = [{"text": text, "text_pair": pair} for text, _, pair in parts]
    found = iter(pipe(given, **options) if given else [])
    lines = []
    for text in inputs:
        result = next(found) if text.strip() else None
        if pipe.task in ("text-generation", TEXT_TO_TEXT):
            kind = "text"
            result = result and result[0]["generated_text"]
        elif config.problem_type == "regression":
            scale, mean = getattr(config, "label_std", 1.0), getattr(config, "label_mean", 0.0)
            kind = "value"
            result = result and result[0]["score"] * scale + mean
        lines.append(line_of(text, pipe.task, kind, result, arguments.json))
    return lines


def main() -> None:
    """Reads, loads, answers."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, without a traceback
    for name in ("stdout", "stderr"):
        if not getattr(sys, name):  # closed; else the next file that is opened takes its number
            setattr(sys, name, open(os.devnull, "w"))
        getattr(sys, name).reconfigure(errors="backslashreplace")
    warnings.simplefilter("ignore")
    arguments = parse()
    folder, task = model_folder(arguments.model)
    inputs = read_inputs(arguments)
    (check_images if task == "image-classification" else check_texts)(inputs)
    from transformers import pipeline
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Named, or it would be that of the model which adapters were made for.
        reads = "image_processor" if task == "image-classification" else "tokenizer"
        # Untold, transformers asks whether to run code that came with the model.
        options = {reads: str(folder), "trust_remote_code": False}
        make = SourceToTarget if task == TEXT_TO_TEXT else pipeline
        answer = make(task, load_model(folder), **options)
        options = options_of(task, arguments, answer.model)
    except Exception as error:  # each of many libraries below has its own
        stop(f"cannot load {folder}: {error}")
    if arguments.chat and not (task == "text-generation" and answer.tokenizer.chat_template):
        stop(f"{folder} has no chat template; leave out --chat")
    if getattr(answer.model.config, "text_pair", False):
        for text in inputs:
            if text.strip() and "\t" not in text:
                about = f"{folder} answers to pairs: two texts with a tab between them"
                stop(f"{one_line(text, 60)} has no tab, but {about}")
    if arguments.chat:
        check_template(answer.tokenizer, inputs)
    for start in range(0, len(inputs), arguments.batch):
        part = inputs[start : start + arguments.batch]
        try:
            lines = answers(answer, part, arguments, options)
        except Exception as error:
            about = "; give shorter texts or fewer --tokens" * task.endswith("generation")
            stop(f"{folder} cannot answer: {type(error).__name__}: {error}{about}")
        for line in lines:
            write(line)


if __name__ == "__main__":
    main()
