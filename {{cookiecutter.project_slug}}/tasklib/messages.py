"""Text from outside (a label, a path, an error of a library) on one line of a message."""

import os


def one_line(text: object, longest: int = 300) -> str:
    """The text with line breaks as spaces, and codes for characters that a terminal may obey.

    The middle of a longer text is left out. An error without a text becomes its type.
    """
    line = " ".join(str(text)[: 100 * longest].split())
    if not line and isinstance(text, BaseException):
        line = type(text).__name__
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if len(line) > longest:
        end = longest // 3
        line = f"{line[: longest - end - 3]}...{line[-end:]}"
    return line


def say(text: str) -> None:
    """Prints a line from the main process alone."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
