"""Prints once for all processes, in single lines, and never fails."""

import io
import os
import select
import sys
import unicodedata

from tqdm import tqdm

IS_MAIN = os.environ.get("RANK", "0") == "0"  # works before the process group exists


class Output(io.FileIO):
    """Standard output or error whose failure does not end a run.

    The reader of a pipe may exit (`make train | head`), or the disk of a log may fill up. From then
    on output is discarded, and the run continues.
    """

    def write(self, data) -> int:
        try:
            while (written := super().write(data)) is None:  # a non-blocking pipe is full
                select.select([], [self], [])
            return written
        except OSError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.fileno())
            os.close(devnull)
            return len(data)


def protect_output() -> None:
    """Makes printing safe, whatever is printed and wherever it goes.

    Characters that the terminal's encoding lacks are escaped. A closed descriptor is opened on
    /dev/null: otherwise the next file to be opened would get its number, and the output.
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
        options = {"encoding": encoding, "errors": "backslashreplace", "line_buffering": True}
        setattr(sys, name, io.TextIOWrapper(raw, **options))


def escaped(text: str, kept: str = "") -> str:
    """Text that cannot move the cursor, or hide or reverse other text.

    Control characters, marks of the writing direction and halves of surrogate pairs become escape
    codes such as \\x1b, except the characters in `kept`.
    """
    hidden = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return "".join(
        c.encode("unicode_escape").decode()
        if unicodedata.category(c) in hidden and c not in kept
        else c
        for c in text
    )


def one_line(text: object, longest: int = 300) -> str:
    """Text from outside (a label, a path, an error of a library) as one printable line.

    Line breaks become spaces, and control characters are escaped. A text of more than `longest`
    characters loses its middle. An error without a text is shown by its type.
    """
    line = escaped(" ".join(str(text)[: 100 * longest].split()))  # the text may have megabytes
    if not line and isinstance(text, BaseException):
        line = type(text).__name__
    if len(line) > longest:
        end = longest // 3
        line = f"{line[: longest - end - 3]}...{line[-end:]}"
    return line


def say(text: str) -> None:
    """Prints text above the progress bar, on the main process only."""
    if IS_MAIN:
        tqdm.write(escaped(text, kept="\n"))
        sys.stdout.flush()
