"""Answers from a trained model.

    python -m samestep predict "When a function is called,"       continues or classifies a text
    python -m samestep predict photo.jpg more/*.png               classifies images
    python -m samestep predict --file texts.txt                   reads one input a line
    cat texts.txt | python -m samestep predict --json             prints a JSON object a line
    printf 'a text\\tits pair\\n' | python -m samestep predict     takes two texts, with a tab
    python -m samestep predict --chat                             talks with a model of chats
    python -m samestep predict --chat --file chats.jsonl          answers the last message of each
    python -m samestep predict "3 March 1999"                     writes the target text (seq2seq)

train.py saves the model in runs/NAME/model; its config.json names the task. Line n of the output
answers line n of the input, and a blank line stays blank.
"""

import argparse
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from samestep.base.console import escaped, one_line, protect_output
from samestep.programs import make_parser
from samestep.report.model_card import TEXT_TO_TEXT, pipeline_task
from samestep.text import chats

# transformers takes 4 s to import. It is imported once the arguments have been checked.

WRITERS = ("text-generation", TEXT_TO_TEXT)
EMPTY = "(empty: the model ends its answer at once)"
KEPT = "\n\t\u200c\u200d"  # of a text that a model continues; joiners are part of words and emoji


# ---- Input ---------------------------------------------------------------------------------------


def find_model(given: Path | None) -> tuple[Path, str]:
    """The model's folder, and the name of its task in transformers; raises ValueError."""
    trained = filter(Path.is_dir, Path("runs").glob("*/model"))
    newest = sorted(trained, key=lambda path: path.stat().st_mtime)
    folder = given or (newest or [Path("runs/default/model")])[-1]
    if not folder.is_dir():
        raise ValueError(f"there is no model in {folder}; train first, or give --model")
    if task := pipeline_task(folder):
        return folder, task
    if pipeline_task(folder / "model"):
        raise ValueError(f"{folder} is the folder of a run; give --model {folder / 'model'}")
    problem = "holds no model of transformers; load it with the code that saved it"
    raise ValueError(f"{folder} {problem}")


def read_inputs(arguments: argparse.Namespace) -> list[str]:
    """The inputs on the command line, or else the lines of a file or of standard input."""
    if arguments.inputs and arguments.file:
        raise ValueError("give inputs or --file, not both")
    if arguments.inputs:
        return arguments.inputs
    is_piped = arguments.file in (None, "-")
    name = "standard input" if is_piped else arguments.file
    try:
        with open(0 if is_piped else name, encoding="utf-8-sig") as lines:
            inputs = [line.removesuffix("\n") for line in lines]
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"cannot read {name}: it is not UTF-8") from None
    if not any(map(str.strip, inputs)):
        raise ValueError("there is no input; give texts or paths, --file, or standard input")
    return inputs


def read_chat(text: str, arguments: argparse.Namespace) -> list[dict]:
    """The messages up to the one to answer: of a line of a .jsonl file, or the text alone."""
    messages: Any = [{"role": "user", "content": text}]
    if (arguments.file or "").endswith(".jsonl"):
        row, names = json.loads(text), chats.read_names(arguments.roles)
        given = row.get("messages") or row["conversations"] if isinstance(row, dict) else row
        messages = chats.read_messages(given, names)
        if messages[-1]["role"] == "assistant":  # a chat to train on: the model writes its own
            messages = messages[:-1]
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return system + messages


def model_input(text: str, pipe: Any, arguments: argparse.Namespace) -> Any:
    """What the pipeline takes for an input. Raises ValueError for one that it cannot take."""
    if pipe.task == "image-classification":  # given paths, it would fetch URLs and read any format
        from PIL import ImageOps

        from samestep.images.images import flatten, open_image

        try:
            with open_image(text) as image:
                image.load()
        except Exception as error:  # each decoder has errors of its own
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"cannot read {text}: {reason}") from None
        background = getattr(pipe.model.config, "background", "")  # as in training
        return flatten(ImageOps.exif_transpose(image), background) if background else image
    if arguments.chat:
        try:
            return read_chat(text, arguments)
        except (ValueError, TypeError, LookupError) as error:
            form = '{"messages": [{"role": "user", "content": "..."}]}'
            problem = f"is no chat{f': {error}' * isinstance(error, ValueError)}"
            raise ValueError(f"{one_line(text, 60)} {problem}; write {form}") from None
    if getattr(pipe.model.config, "text_pair", False):
        first, tab, second = text.partition("\t")
        if not tab:
            wanted = "the model answers to pairs: two texts with a tab between them"
            raise ValueError(f"{one_line(text, 60)} has no tab, but {wanted}")
        return {"text": first, "text_pair": second}
    return text


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
    if task not in WRITERS:
        top_k = min(arguments.top, model.config.num_labels)
        options = {"truncation": True} if task == "text-classification" else {}
        return {"top_k": top_k, "batch_size": arguments.batch, **options}
    from transformers import GenerationConfig

    settings = GenerationConfig.from_dict(model.generation_config.to_dict())
    continues, samples = task == "text-generation", arguments.temperature != 0
    tokens = arguments.tokens or (None if continues else settings.max_new_tokens) or 50
    settings.update(max_length=None, max_new_tokens=tokens, do_sample=samples)
    if samples:
        settings.update(temperature=arguments.temperature)
    elif continues:  # the penalty keeps small models out of loops
        settings.update(repetition_penalty=1.2)
    return {"generation_config": settings} | ({"return_full_text": False} if continues else {})


def load_pipeline(folder: Path, task: str) -> Any:
    """A pipeline with the model in a folder; an adapter is loaded together with its base model.

    Raises ValueError if weights are missing: transformers would fill them with random numbers.
    """
    import transformers

    from samestep.data.hub import is_local_name

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Without trust_remote_code, transformers asks whether to run code that came with the model.
    options: dict[str, Any] = {"trust_remote_code": False}
    auto: Any = transformers.AutoModelForCausalLM
    if (folder / "config.json").is_file():
        config = transformers.AutoConfig.from_pretrained(str(folder), **options)
        auto = getattr(transformers, config.architectures[0], auto)
    else:
        adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        base = str(adapter.get("base_model_name_or_path"))
        if is_local_name(base) and not os.path.isdir(base):
            raise ValueError(f"the model that its adapters belong to is gone: no folder {base}")
    model, info = auto.from_pretrained(str(folder), output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"its files lack {len(missing)} of its weights: {missing[0]}, ...")
    # For an adapter, transformers would take the processor of the base model.
    processor = "image_processor" if task == "image-classification" else "tokenizer"
    make: Any = SourceToTarget if task == TEXT_TO_TEXT else transformers.pipeline
    return make(task, model, **{processor: str(folder)}, **options)


def format_answer(given: str, pipe: Any, result: list[dict], arguments: argparse.Namespace) -> str:
    """The line for an input and what a pipeline answers: a text, a number, or classes."""
    config, kind = pipe.model.config, "classes"
    answer: Any = result
    if pipe.task in WRITERS:
        kind, answer = "text", result and result[0]["generated_text"]
    elif config.problem_type == "regression":
        scale, mean = getattr(config, "label_std", 1.0), getattr(config, "label_mean", 0.0)
        kind, answer = "value", result and result[0]["score"] * scale + mean
    if arguments.json:
        return json.dumps({"input": given, kind: answer}, allow_nan=False)
    if answer is None:
        return ""
    if kind == "text" and not answer.strip():
        answer = EMPTY
    if pipe.task == "text-generation":
        return escaped(answer if arguments.chat else f"{given}{answer}", KEPT)
    given = escaped(given) if pipe.task == "image-classification" else one_line(given, 60)
    if kind == "value":
        return f"{given}: {answer:.6g}"
    if kind == "classes":
        answer = "  ".join(f"{one_line(each['label'], 60)} {each['score']:.3f}" for each in answer)
    return f"{given}: {one_line(answer, 100_000)}"


def ask(pipe: Any, given: list, options: dict) -> list:
    """What the pipeline answers to these inputs, or to a chat. Raises ValueError."""
    try:
        return pipe(given, **options)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        if pipe.task in WRITERS and not isinstance(error, ValueError):
            problem += "; give shorter texts or fewer --tokens"
        raise ValueError(f"{pipe.model.name_or_path} cannot answer: {problem}") from None


def talk(pipe: Any, options: dict, arguments: argparse.Namespace) -> None:
    """Answers message after message at a terminal; each answer knows those before."""
    print("A message a line; an empty line begins a new chat, Ctrl-D ends it.", file=sys.stderr)
    chat: list[dict] = []
    for line in sys.stdin:
        if not line.strip():
            chat = []
            continue
        chat += read_chat(line.strip(), arguments)[1 if chat and arguments.system else 0 :]
        result = ask(pipe, chat, options)
        chat.append({"role": "assistant", "content": result[0]["generated_text"]})
        print(format_answer(line.strip(), pipe, result, arguments), flush=True)


def predict(arguments: argparse.Namespace) -> None:
    """Reads the inputs, loads the model, prints the answers; raises ValueError."""
    folder, task = find_model(arguments.model)
    if arguments.system and not arguments.chat:
        raise ValueError("--system is a message of a chat; give --chat too")
    talks = arguments.chat and not (arguments.inputs or arguments.file) and sys.stdin.isatty()
    inputs = [] if talks else read_inputs(arguments)
    try:
        pipe = load_pipeline(folder, task)
        options = pipeline_options(task, arguments, pipe.model)
    except Exception as error:  # each of the many libraries below has errors of its own
        raise ValueError(f"cannot load {folder}: {error}") from None
    if arguments.chat and not (task == "text-generation" and pipe.tokenizer.chat_template):
        raise ValueError(f"{folder} has no chat template; leave out --chat")
    if talks:
        talk(pipe, options, arguments)
    size = max(arguments.batch, 1)
    for start in range(0, len(inputs), size):
        batch = inputs[start : start + size]
        given = [model_input(text, pipe, arguments) for text in batch if text.strip()]
        results = iter(ask(pipe, given, options) if given else [])
        for text in batch:  # a blank input stays blank
            result = next(results) if text.strip() else None
            print(format_answer(text, pipe, result, arguments), flush=True)


def main() -> None:
    """Runs the program; bad input is one line and exit code 2."""
    # Ctrl-C, and a reader that has seen enough, as `head` has, end it at once, without a traceback.
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    protect_output()
    warnings.simplefilter("ignore")
    parser = make_parser("predict", __doc__)
    add = parser.add_argument
    add("inputs", nargs="*", help="texts or paths of images; default: --file")
    add("--model", type=Path, help="folder; default: the newest runs/*/model")
    add("--file", help="file with one input a line; -: standard input")
    add("--json", action="store_true", help="print a JSON object a line")
    add("--top", type=int, default=3, help="classes to name (default: 3)")
    add("--tokens", type=int, help="tokens to add (default: 50, or what an encoder-decoder names)")
    add("--temperature", type=float, default=0, help="0, the default: the likeliest token")
    add("--chat", action="store_true", help="inputs are messages; lines of a .jsonl file, chats")
    add("--task.roles", dest="roles", default="", help="--chat: other names, as for train.py")
    add("--system", help="--chat: a system message before each chat")
    add("--batch", type=int, default=16, help="inputs at once (default: 16)")
    try:
        predict(parser.parse_args())
    except (ValueError, OSError) as error:
        parser.error(str(error))
