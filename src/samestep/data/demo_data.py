"""Bundled datasets, with which a new project trains at once and offline.

Texts for language models come from Python itself: manual is that of the language, with the
docstrings of its library; docstrings are pairs of a function's head and the first line of its
docstring. Sources and targets are dates in eight forms, and their ISO form. Texts with a class are
the functions of Python's library, images with a class the digits of scikit-learn.
"""

import ast
import io
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

_LIBRARY = Path(sysconfig.get_path("stdlib"))
_NOT_DOCUMENTED = {"site-packages", "dist-packages", "idlelib", "lib2to3", "test"}


# ---- Texts for language models -------------------------------------------------------------------


def _read_source(file: Path) -> str:
    with tokenize.open(file) as source:  # decodes files that declare another encoding
        return source.read()


def manual_rows() -> Iterator[dict]:
    """The topics of Python's manual, longest first, without those that a longer one contains; and
    the docstrings of its library, without those of a line."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for text in sorted(topics.values(), key=len, reverse=True):
        lines = set(text.splitlines())
        if len(lines - seen) > len(lines) / 2:  # "with", for example, is a part of "compound"
            yield {"text": text}
        seen |= lines
    for file in sorted([*_LIBRARY.glob("*.py"), *_LIBRARY.glob("*/*.py")]):
        if file.parent.name not in _NOT_DOCUMENTED:
            for node in ast.walk(ast.parse(_read_source(file))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    text = ast.get_docstring(node) or ""
                    if len(text) > 80:
                        yield {"text": text}


def docstring_rows(kind: str) -> Iterator[dict]:
    """A prompt, a chat or a pair, as `kind` says, for each function of Python's library with a
    docstring: what does this function do?

    A pair prefers the first line of a short docstring to all of it.
    """
    for file in sorted(_LIBRARY.glob("*.py")):
        for node in ast.walk(ast.parse(_read_source(file))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                head, answer = f"def {node.name}({ast.unparse(node.args)}):", text.splitlines()[0]
                prompt = f'{head}\n    """'
                if kind == "prompt":
                    yield {"prompt": prompt, "completion": f'{answer}"""'}
                elif kind == "chat":
                    question = {"role": "user", "content": f"What does this do? {head}"}
                    yield {"messages": [question, {"role": "assistant", "content": answer}]}
                elif answer != text and len(text) < 300:
                    whole = textwrap.indent(text, "    ").strip() + '\n    """'
                    yield {"prompt": prompt, "chosen": f'{answer}"""', "rejected": whole}


# ---- Dates ---------------------------------------------------------------------------------------

_FIRST_DATE, _DAYS = date(1900, 1, 1), 73_049  # to the end of 2099
_DATE_FORMS = ("%d %B %Y", "%B %d, %Y", "%b %d %Y", "%d/%b/%Y", "%d.%m.%Y", "%m/%d/%Y")
_DATE_FORMS += ("%A, %d %B %Y", "%a %d %b %Y")


def date_rows(number: int = 12_000) -> Iterator[dict]:
    """Dates from 1900 to 2099 in these forms, with their ISO form; each date comes once."""
    for i in range(number):
        # The step and the number of days have no common divisor, so no day comes twice.
        day = _FIRST_DATE + timedelta(i * 40_503 % _DAYS)
        source = day.strftime(_DATE_FORMS[i % len(_DATE_FORMS)])
        yield {"source": source, "target": day.isoformat()}


# ---- Texts with a class --------------------------------------------------------------------------

# Packages and modules of Python's library, 3.11 and later, by purpose.
_AREAS = {
    **{name: name for name in "asyncio email importlib multiprocessing xml".split()},
    "testing": "unittest doctest",
    "numbers": "_pydecimal colorsys fractions numbers random statistics",
    "debugging": "bdb cProfile dis inspect pdb profile pstats trace traceback",
    "archives": "_compression bz2 gzip lzma tarfile zipfile",
}


def area_rows() -> Iterator[dict]:
    """The functions of three lines and more in these areas."""
    files = []
    for area, names in _AREAS.items():
        for name in names.split():
            found = [_LIBRARY / f"{name}.py", *sorted((_LIBRARY / name).rglob("*.py"))]
            files += [(area, file) for file in found if file.is_file()]
    for area, file in files:
        if {"test", "tests"} & {*file.relative_to(_LIBRARY).parts}:
            continue
        text = _read_source(file)
        lines = text.split("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own = lines[node.lineno - 1 : node.end_lineno]
                if len(own) >= 3:
                    yield {"text": textwrap.dedent("\n".join(own)), "label": area}


# ---- Images with a class -------------------------------------------------------------------------


def digit_rows() -> Iterator[dict]:
    """The 1,797 images of scikit-learn, 8 x 8 pixels in 17 grey levels, and their classes.

    As BMP, which has the same bytes everywhere: they decide which are held out.
    """
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * 255 / 16).round().astype("uint8")
    for image, label in zip(images, digits.target.tolist(), strict=True):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "BMP")
        yield {"image": {"bytes": file.getvalue()}, "label": label}
