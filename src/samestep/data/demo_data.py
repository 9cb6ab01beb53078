"""Data that every machine has, with which a new project trains at once and offline.

Texts for language models come from Python itself: pydoc is the manual of the language, manual has
the docstrings of the library too, stdlib is the library's source, docstrings are pairs of a
function's head and the first line of its docstring. Sources and targets are dates as people write
them in five languages, and their ISO form. Texts with a class are the functions of Python's
library, images with a class the digits of scikit-learn.
"""

import ast
import io
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

Row = tuple[dict[str, Any], str]  # with where it comes from

# ---- Texts for language models -------------------------------------------------------------------

# Names of the texts, and their files below Python's library.
TEXTS = {
    "manual": ["*.py", "*/*.py"],
    "pydoc": ["pydoc_data/topics.py"],
    "stdlib": ["*.py"],
    "docstrings": ["*.py"],
}
_NOT_DOCUMENTED = {"site-packages", "dist-packages", "idlelib", "lib2to3", "test"}


def _text_files(name: str) -> list[Path]:
    """The files of these texts, sorted."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [file for pattern in TEXTS[name] for file in library.glob(pattern)]
    return sorted(file for file in files if file.parent.name not in _NOT_DOCUMENTED)


def _read_source(file: Path) -> str:
    with tokenize.open(file) as source:  # decodes files that declare another encoding
        return source.read()


def text_rows(name: str, kind: str) -> Iterator[Row]:
    """The rows of texts in TEXTS; `kind` is text, of docstrings prompt, chat or pair."""
    if name in ("manual", "pydoc"):
        yield from _topic_rows()
    for file in _text_files(name) if name != "pydoc" else []:
        text = _read_source(file)
        if name == "stdlib":
            yield from [({"text": text}, str(file))] if text.strip() else []
        else:
            rows = _library_rows(text) if name == "manual" else docstring_rows(text, kind)
            yield from ((row, str(file)) for row in rows)


def _library_rows(source: str) -> Iterator[dict]:
    """The docstrings of a module, its classes and functions, without those of a line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) > 80:
                yield {"text": text}


def _topic_rows() -> Iterator[Row]:
    """The topics of Python's manual, longest first, without those that a longer one contains."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for text in sorted(topics.values(), key=len, reverse=True):
        lines = set(text.splitlines())
        if len(lines - seen) > len(lines) / 2:  # "with", for example, is a part of "compound"
            yield {"text": text}, "pydoc"
        seen |= lines


def docstring_rows(source: str, kind: str) -> Iterator[dict]:
    """A prompt or a chat for each function with a docstring: what does this function do?

    A pair prefers the first line of a short docstring to all of it.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            head, answer = f"def {node.name}({ast.unparse(node.args)}):", text.splitlines()[0]
            prompt = f'{head}\n    """'
            if kind == "prompt":
                yield {"prompt": prompt, "completion": f'{answer}"""'}
            elif kind == "pair":
                if answer != text and len(text) < 300:
                    whole = textwrap.indent(text, "    ").strip() + '\n    """'
                    yield {"prompt": prompt, "chosen": f'{answer}"""', "rejected": whole}
            else:
                question = {"role": "user", "content": f"What does this do? {head}"}
                yield {"messages": [question, {"role": "assistant", "content": answer}]}


# ---- Dates ---------------------------------------------------------------------------------------

_FIRST_DATE, _LAST_DATE = date(1900, 1, 1), date(2099, 12, 31)
_MONTHS = {
    "en": "January February March April May June July August September October November December",
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre "
    "diciembre",
    "it": "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre "
    "dicembre",
}
_DATE_FORMS = [
    "{day} {en} {year}",
    "{en} {day}, {year}",
    "{en:.3} {day} {year}",
    "{day}/{en:.3}/{year}",
    "{day:02}.{month:02}.{year}",
    "{day}{suffix} of {en}, {year}",
    "the {day_words} of {en} {year_words}",
    "the {day_words} of {en}, {year_words}",
    "{day}. {de} {year}",
    "{day} {fr} {year}",
    "{day} de {es} de {year}",
    "{day} {it} {year}",
]
_CARDINALS = """zero one two three four five six seven eight nine ten eleven twelve thirteen
    fourteen fifteen sixteen seventeen eighteen nineteen""".split()
_TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()
_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth"}
_ORDINALS |= {"nine": "ninth", "twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"}


def date_rows(number: int = 12_000) -> Iterator[Row]:
    """Dates from 1900 to 2099 as people write them, with their ISO form; each date comes once."""
    for i in range(number):
        # The step and the number of days have no common divisor, so no day comes twice.
        day = _FIRST_DATE + timedelta(i * 40_503 % ((_LAST_DATE - _FIRST_DATE).days + 1))
        source = _DATE_FORMS[i % len(_DATE_FORMS)].format(**_date_words(day))
        yield {"source": source, "target": day.isoformat()}, f"dates, row {i + 1}"


def _date_words(day: date) -> dict[str, str | int]:
    """The fields of _DATE_FORMS: numbers, names of the month, and numbers in words."""
    century, rest = divmod(day.year, 100)
    year = f"{_cardinal(century)} {_cardinal(rest)}"
    if rest < 10:
        year = f"{_cardinal(century)} {f'oh {_cardinal(rest)}' if rest else 'hundred'}"
    if day.year // 10 == 200:
        year = f"two thousand{f' and {_cardinal(rest)}' if rest else ''}"
    before, hyphen, last = _cardinal(day.day).rpartition("-")
    teen = 11 <= day.day <= 13
    return {
        "day": day.day,
        "month": day.month,
        "year": day.year,
        "suffix": {1: "st", 2: "nd", 3: "rd"}.get(0 if teen else day.day % 10, "th"),
        "day_words": before + hyphen + _ORDINALS.get(last, f"{last}th"),
        "year_words": year,
        **{language: names.split()[day.month - 1] for language, names in _MONTHS.items()},
    }


def _cardinal(number: int) -> str:
    """A number below 100 in English words."""
    if number < 20:
        return _CARDINALS[number]
    tens, unit = divmod(number, 10)
    return _TENS[tens] + (f"-{_CARDINALS[unit]}" if unit else "")


# ---- Texts with a class --------------------------------------------------------------------------

# Packages and modules of Python's library, 3.11 and later, by purpose.
_AREAS = {
    **{name: name for name in "asyncio email importlib multiprocessing xml".split()},
    "testing": "unittest doctest",
    "numbers": "_pydecimal colorsys fractions numbers random statistics",
    "debugging": "bdb cProfile dis inspect pdb profile pstats trace traceback",
    "archives": "_compression bz2 gzip lzma tarfile zipfile",
}


def _area_files() -> Iterator[tuple[str, Path]]:
    """The files of each area, without tests."""
    library = Path(sysconfig.get_path("stdlib"))
    for area, names in _AREAS.items():
        for name in names.split():
            for file in [library / f"{name}.py", *sorted((library / name).rglob("*.py"))]:
                inside = file.relative_to(library).parts
                if file.is_file() and not {"test", "tests"} & {*inside}:
                    yield area, file


def area_rows() -> Iterator[Row]:
    """The functions of three lines and more in these areas."""
    for area, file in _area_files():
        text = _read_source(file)
        lines = text.split("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own = lines[node.lineno - 1 : node.end_lineno]
                if len(own) >= 3:
                    yield {"text": textwrap.dedent("\n".join(own)), "label": area}, str(file)


# ---- Images with a class -------------------------------------------------------------------------


def digit_rows() -> Iterator[Row]:
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
        yield {"image": {"bytes": file.getvalue()}, "label": label}, "digits"
