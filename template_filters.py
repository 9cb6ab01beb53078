"""What the template needs beyond Jinja: checked answers, quoted text, a task's source as it is."""

import difflib
import json
import keyword
import os
import re
import reprlib
import sys
import unicodedata
from pathlib import Path

import click
from cookiecutter.cli import main as cookiecutter_command
from cookiecutter.config import get_user_config
from cookiecutter.exceptions import FailedHookException
from cookiecutter.generate import is_copy_only_path
from jinja2.ext import Extension
from slugify import slugify

import library_wheel

ROOT = Path(__file__).resolve().parent
FOLDER = "{{cookiecutter.project_slug}}"
OWN = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
COOKED = {"cookiecutter": OWN}
QUESTIONS = [name for name in OWN if not name.startswith("_")]
# Read by cookiecutter itself: how it renders, and what it copies as it is.
SETTINGS = ["_copy_without_render", "_extensions", "_jinja2_env_vars", "_new_lines"]
LONGEST = {"project_name": 60, "project_slug": 60, "author_name": 100}
JINJA = re.compile(r"\{[{%#]")
# Distributions and modules that a project installs, directly or through others, and ones that its
# owner may add.
INSTALLED = """
    absl absl_py accelerate annotated_doc annotated_types anyio arrow ast_serialize attr
    attrs binaryornot bitsandbytes brotli certifi charset_normalizer click cloudpickle
    colorama contourpy cookiecutter coreweave_evaluations cruft cuda cuda_bindings
    cuda_pathfinder cuda_toolkit cwevals cycler datasets dateutil deepspeed diffusers dill
    distro docstring_parser dotenv evaluate exceptiongroup execnet filelock flash_attn
    fonttools fsspec functorch git gitdb gitpython google googleapis_common_protos
    gradio_client grpc grpcio h11 hf_transfer hf_xet httpcore httpcore2 httptools httpx
    httpx2 huggingface_hub idna importlib_resources iniconfig isympy jinja2 joblib
    jsonargparse jsonschema jsonschema_specifications kernels kiwisolver kubernetes_validate
    librt lxml markdown markdown_it markdown_it_py markupsafe matplotlib mdurl mpl_toolkits
    mpmath msgpack multipart multiprocess mypy mypy_extensions mypyc narwhals networkx numpy
    nvidia nvidia_ml_py opentelemetry opentelemetry_api
    opentelemetry_exporter_http_transport opentelemetry_exporter_otlp_common
    opentelemetry_exporter_otlp_proto_common opentelemetry_exporter_otlp_proto_http
    opentelemetry_proto opentelemetry_sdk opentelemetry_semantic_conventions orjson
    packaging pandas pathspec peft pil pillow pip platformdirs pluggy portalocker protobuf
    psutil py py_spy pyarrow pydantic pydantic_core pygments pylab pynvml pyparsing pytest
    pytest_xdist python_dateutil python_dotenv python_multipart python_slugify pytz pyyaml
    referencing regex requests rich rpds rpds_py ruff sacrebleu safetensors samestep
    scikit_learn scipy sentencepiece sentry_sdk setuptools shellingham six sklearn sky
    skypilot slugify smmap sniffio starlette sympy tabulate tensorboard
    tensorboard_data_server test text_unidecode threadpoolctl tiktoken timm tokenizers toml
    tomli torch torchao torchaudio torchgen torchvision tqdm trackio transformer_engine
    transformers triton truststore typer typing_extensions typing_inspection tzdata urllib3
    uvicorn uvloop wandb watchfiles websockets werkzeug wheel xdist xxhash yaml zstandard
""".split()
# Beginnings of the parts of torch's CUDA builds, such as nvidia_cudnn_cu13.
INSTALLED_PARTS = ("nvidia_cu", "nvidia_nccl", "nvidia_nv")
# The project's own programs and folders.
OWN_NAMES = {path.stem for path in (ROOT / FOLDER).iterdir() if not path.name.startswith(".")}
# A distribution of one of these names would hide or replace what the project imports.
TAKEN = {*sys.stdlib_module_names, *keyword.kwlist, *INSTALLED, *map(str.lower, OWN_NAMES)}


def default_slug(name):
    """Return a valid project slug for any name: `My Training` gives `my_training`."""
    slug = slugify(str(name), separator="_", max_length=LONGEST["project_slug"] - len("project_"))
    if not slug:
        return "my_training"
    if not slug[0].isalpha():
        return f"project_{slug}"
    return f"{slug}_project" if is_taken(slug) else slug


def is_taken(slug):
    """Return whether a distribution of this name would hide or replace another."""
    name = slug.replace("-", "_")
    return name in TAKEN or name.startswith(INSTALLED_PARTS)


def check_answers(answers):
    """Refuse what is wrong in a command or in the answers so far, as soon as they are there."""
    params = command_params()
    if params:
        check_command(params)
    check_each(answers)
    if params and "project_slug" in answers:
        output_dir, slug = os.path.abspath(params["output_dir"]), answers["project_slug"]
        check_folder(output_dir, slug)
        if Path(output_dir, slug).exists() and not params["overwrite_if_exists"]:
            advice = "Write another name, or add --overwrite-if-exists."
            refuse("project_slug", slug, "is a folder that exists already", advice)
    return ""


def command_params():
    """The options of cookiecutter's command line; empty under cruft or a Python program."""
    command = click.get_current_context(silent=True)
    return command.params if command and command.command is cookiecutter_command else {}


def check_context(context):
    """Refuse answers of any origin before the folder is made: a replay file skips the questions."""
    for question in QUESTIONS:
        if question not in context:
            refuse(question, None, "is no answer", "Write one.")
    check_each(context)
    for name in SETTINGS:
        if context.get(name) != OWN.get(name):
            advice = "Leave it out, or answer the questions again."
            refuse(name, context.get(name), "is not what this template says", advice)
    if not re.fullmatch("[0-9]{4}", str(context.get("__year"))):
        refuse("__year", context.get("__year"), "is not a year", "Leave it out.")
    if "_output_dir" in context:  # cruft does not say where
        check_folder(context["_output_dir"], context["project_slug"])
    return ""


def check_each(answers):
    """Refuse the first answer that no project can be made of, in one line."""
    for question, answer in answers.items():
        if question.startswith("_"):
            continue
        if question not in QUESTIONS:
            refuse("Answers", question, "is not a question", choose(question, QUESTIONS))
        if isinstance(OWN[question], list):
            if answer not in OWN[question]:
                refuse(question, answer, "is not a choice", choose(answer, OWN[question]))
            continue
        check_text(question, answer)
        if question == "project_slug":
            check_slug(answer)


def check_text(question, answer):
    """Refuse what cannot stand in a file name, TOML, YAML and Markdown alike."""
    if not isinstance(answer, str):
        refuse(question, answer, "is not text", "Write it in quotes.")
    if not answer.strip():
        refuse(question, answer, "holds no text", "Write some.")
    for character in answer:
        category = unicodedata.category(character)
        # C: control, zero-width and right-to-left marks, private, unassigned, halves of pairs, but
        # for the joiner of emoji. Zl, Zp: line and paragraph separators.
        if character != "\u200d" and (category[0] == "C" or category in ("Zl", "Zp")):
            name = unicodedata.name(character, "")
            problem = f"contains the character U+{ord(character):04X} {name}".rstrip()
            refuse(question, answer, problem, "Write one line of plain text.")
    if JINJA.search(answer):
        refuse(question, answer, "contains Jinja code", "Write it without {{, {% and {#.")
    longest = LONGEST.get(question, 100)
    if len(answer) > longest:
        refuse(question, answer, f"has {len(answer)} characters", f"Write at most {longest}.")


def check_slug(slug):
    """Refuse what cannot name a folder and a Python distribution."""
    advice = f"Write for example: {default_slug(slug)}"
    if not re.fullmatch(r"[a-z]([a-z0-9_-]*[a-z0-9])?", slug):
        problem = "is not a plain name (a-z, 0-9, _ and -; first a letter, last no _ or -)"
        refuse("project_slug", slug, problem, advice)
    if is_taken(slug):
        refuse("project_slug", slug, "is the name of a Python module or keyword", advice)


def check_folder(output_dir, slug):
    """Refuse a place where cookiecutter would stop half-way; it renders the path as Jinja too."""
    advice, keeps = "Choose another folder.", command_params().get("skip_if_file_exists")
    if JINJA.search(output_dir):
        refuse("--output-dir", output_dir, "contains Jinja code", advice)
    target = Path(output_dir, slug)
    for source in [ROOT / FOLDER, *(ROOT / FOLDER).rglob("*")]:
        path = target / source.relative_to(ROOT / FOLDER)
        kind, fits = ("folder", path.is_dir) if source.is_dir() else ("file", path.is_file)
        if os.path.lexists(path) and not fits():
            refuse("--output-dir", str(path), f"is not a {kind}", advice)
        # With that option cookiecutter asks only for what it renders, and the hook removes the
        # files of other clusters.
        name = source.relative_to(ROOT / FOLDER)
        kept = name.parts[:1] != ("cluster",) and not is_copy_only_path(str(name), COOKED)
        if keeps and path.is_file() and not kept:
            problem = "would be replaced or removed all the same"
            advice = "Leave the option out and commit your edits first, or use `cruft update`."
            refuse("--skip-if-file-exists", str(path), problem, advice)
    there = next(folder for folder in (target, *target.parents) if os.path.lexists(folder))
    problem = "" if os.access(there, os.W_OK | os.X_OK) else "Permission denied"
    try:
        target.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:
        problem = error.strerror
    if problem:
        refuse("--output-dir", str(target), f"cannot be made ({problem})", advice)


def check_command(params):
    """Refuse what cookiecutter's command line would leave out or change, and go on.

    It ignores an unknown question. Of a config file it only warns about a choice that does not
    exist, ignores all answers after that one, and makes text of numbers and dates. Who is asked
    sees what became of it.
    """
    for question in params["extra_context"] or {}:
        if question not in OWN:
            refuse("Answers", question, "is not a question", choose(question, QUESTIONS))
    if params["no_input"]:
        config = get_user_config(params["config_file"], params["default_config"])
        answers = config["default_context"] or {}
        check_each({name: answers[name] for name in QUESTIONS if name in answers})


def choose(wrong, names):
    """Advise one of some names, first one that is near, whatever was given instead."""
    given = wrong.casefold() if isinstance(wrong, str) else ""
    near = difflib.get_close_matches(given, map(str.casefold, names), n=1, cutoff=0.4)
    *others, last = sorted(names, key=lambda name: name.casefold() not in near)
    return f"Write {', '.join(others)} or {last}."


class Refused(SystemExit, FailedHookException):
    """Cookiecutter prints a FailedHookException as one line, Python a SystemExit (for cruft)."""


def refuse(question, answer, problem, advice):
    """Stop with one line, before anything is written, that standard output can show."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    short.maxlevel, short.maxlist, short.maxdict = 1, 2, 2
    line = f"{question}: {short.repr(answer)} {problem}. {advice}"
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    raise Refused(line.encode(encoding, "backslashreplace").decode(encoding))


def quoted(text):
    """Quote text for TOML and YAML. Jinja's `tojson` would break emoji in TOML."""
    return json.dumps(text, ensure_ascii=False)


def task_source(name):
    """Return a task's Python as it is: a Jinja `include` would render the braces in it."""
    path = ROOT / "templates" / "tasks" / f"{name}.py"
    return path.read_text(encoding="utf-8").removesuffix("\n")


def library_version(name):
    """Return the version of the library, which pyproject.toml pins."""
    return library_wheel.version()


def template_root(name):
    """Return the template's folder as hex digits: a hook finds there what writes the wheel."""
    return os.fsencode(ROOT).hex()


def own_templates():
    """Yield the unnamed templates that are the template's own, not somebody's answer."""
    yield from (text for text in OWN.values() if isinstance(text, str))
    yield from (hook.read_text(encoding="utf-8") for hook in (ROOT / "hooks").glob("*.py"))
    yield FOLDER


FILTERS = (
    *(check_answers, check_context, default_slug, library_version, quoted, task_source),
    template_root,
)


class TemplateFilters(Extension):
    """The filters above, and a guard: cookiecutter renders given answers as Jinja."""

    def __init__(self, environment):
        super().__init__(environment)
        for function in FILTERS:
            environment.filters[function.__name__] = function
        self.own_templates = set(own_templates())
        # `cruft update` bakes the old template and the new one in one process and would keep
        # the old module for both (cruft issue 253): let the next bake import it afresh.
        sys.modules.pop(__name__, None)
        sys.modules.pop(library_wheel.__name__, None)

    def preprocess(self, source, name, filename=None):
        """Refuse Jinja in an answer before it runs; files have a name, answers have none."""
        if source == FOLDER:  # rendered once all answers are there, before the folder is made
            return "{{ cookiecutter | check_context }}" + source
        if name is None and JINJA.search(source) and source not in self.own_templates:
            refuse("An answer", source, "contains Jinja code", "Write it without {{, {% and {#.")
        return source
