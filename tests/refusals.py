"""Tables of cases, in YAML; and bad input, which is answered in one line (tests/refusals)."""

import contextlib
from pathlib import Path

import pytest
import yaml


def table(name):
    """What is given and what the line says: the rows of tests/refusals/NAME.yaml."""
    file = Path(__file__).with_name("refusals") / f"{name}.yaml"
    said = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [(given, line) for line, given in said.items()]


def cases(name):
    """The cases of tests/cases/NAME.yaml: a list, or by their names."""
    file = Path(__file__).with_name("cases") / f"{name}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def check_line(line, said, begin, most=500):
    assert line.startswith(begin) and said in line, line
    assert line.isprintable() and len(line) < most, line


@contextlib.contextmanager
def refused(said="", begin=""):
    """What runs inside of it ends with a ValueError of one line that begins so and says this."""
    with pytest.raises(ValueError) as error:
        yield error
    check_line(str(error.value), said, begin)


def check_ended(ended, said="", begin="", code=2):
    """A program ended with this exit code, and a line on stderr is all that it printed."""
    if not isinstance(ended, list):
        ended = [ended.returncode, ended.stdout, ended.stderr]
    assert ended[:2] == [code, ""], ended
    assert ended[2].endswith("\n"), ended
    check_line(ended[2][:-1], said, begin, most=400)
