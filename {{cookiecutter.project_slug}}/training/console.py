"""What is printed: once, on one line, and without failing, wherever it goes."""

import io
import os
import select
import sys
import unicodedata

from tqdm import tqdm

IS_MAIN = os.environ.get("RANK", "0") == "0"  # known before there is a process group


class Output(io.FileIO):
    """Standard output or error that a run outlives.

    The reader of a pipe may leave (`make train | head`) and the disk of a log may fill up: what
    cannot be written then goes nowhere, and the run goes on.
    """

    def write(self, data) -> int:
        try:
            while (written := super().write(data)) is None:  # a pipe that does not block is full
                select.select([], [self], [])
            return written
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def protect_output() -> None:
    """Makes printing safe: it never fails, whatever stands behind it and whatever is printed.

    Characters that the terminal's encoding lacks are escaped. A closed descriptor gets /dev/null,
    or the next file that is opened would take its number and get what is printed.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        if stream is not None:
            stream.flush()
        encoding = getattr(stream, "encoding", None) or "utf-8"
        raw = io.BufferedWriter(Output(number, "w", closefd=False))
        safe = {"encoding": encoding, "errors": "backslashreplace", "line_buffering": True}
        setattr(sys, name, io.TextIOWrapper(raw, **safe))


def escaped(text: str, kept: str = "") -> str:
    """Text in which nothing moves the cursor, hides or reverses what is shown.

    Control characters, marks of the direction of writing and halves of surrogate pairs become
    their codes, as \\x1b, but for those to be kept.
    """
    hidden = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return "".join(
        c.encode("unicode_escape").decode()
        if unicodedata.category(c) in hidden and c not in kept
        else c
        for c in text
    )


def one_line(text: object, longest: int = 300) -> str:
    """Text from outside (a label, a path, an error of a library) as one line that can be shown.

    Line breaks become spaces, control characters are escaped, and of a longer text the middle is
    left out. An error without a text is called by its type.
    """
    found = escaped(" ".join(str(text)[: 100 * longest].split()))  # of megabytes, the beginning
    if not found and isinstance(text, BaseException):
        found = type(text).__name__
    if len(found) > longest:
        end = longest // 3
        found = f"{found[: longest - end - 3]}...{found[-end:]}"
    return found


def say(text: str) -> None:
    """Prints once, not once per rank, and above the progress bar."""
    if IS_MAIN:
        tqdm.write(escaped(text, kept="\n"))
        sys.stdout.flush()
