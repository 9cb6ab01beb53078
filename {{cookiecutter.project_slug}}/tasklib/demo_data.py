"""Data that every machine has, with which a new project trains at once and offline.

Texts for language models come from Python itself: pydoc is its manual, stdlib the source of its
library, docstrings pairs of a function's head and the first line of its docstring.
"""

import ast
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tasklib.tables import Row

# Names of the texts, and their files below Python's library.
TEXTS = {"pydoc": "pydoc_data/topics.py", "stdlib": "*.py", "docstrings": "*.py"}


def text_files(name: str) -> list[Path] | None:
    """The files of these texts, sorted; None for a name that is not in TEXTS."""
    if name not in TEXTS:
        return None
    return sorted(Path(sysconfig.get_path("stdlib")).glob(TEXTS[name]))


def text_rows(name: str, kind: str) -> Iterator[Row]:
    """The rows of texts in TEXTS; `kind` is text, of docstrings prompt or chat."""
    if name == "pydoc":
        yield from manual_rows()
        return
    for file in text_files(name):
        with tokenize.open(file) as source:  # decodes files that declare another encoding
            text = source.read()
        if name == "docstrings":
            yield from ((row, str(file)) for row in docstring_rows(text, kind))
        elif text.strip():
            yield {"text": text}, str(file)


def manual_rows() -> Iterator[Row]:
    """The topics of Python's manual, longest first, without those that a longer one contains."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for text in sorted(topics.values(), key=len, reverse=True):
        lines = set(text.splitlines())
        if len(lines - seen) > len(lines) / 2:  # "with", for example, is a part of "compound"
            yield {"text": text}, "pydoc"
        seen |= lines


def docstring_rows(source: str, kind: str) -> Iterator[dict]:
    """A prompt or a chat for each function with a docstring: what does this function do?"""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            head, answer = f"def {node.name}({ast.unparse(node.args)}):", text.splitlines()[0]
            if kind == "prompt":
                yield {"prompt": f'{head}\n    """', "completion": f'{answer}"""'}
            else:
                question = {"role": "user", "content": f"What does this do? {head}"}
                yield {"messages": [question, {"role": "assistant", "content": answer}]}
