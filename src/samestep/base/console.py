"""Prints once for all processes, in single lines, and never fails."""

import io
import os
import re
import select
import sys
import unicodedata
from typing import Any

from tqdm import tqdm


def read_place() -> tuple[int, int]:
    """The rank of this process and the number of processes, as a launcher sets them: both."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def is_main() -> bool:
    """Whether this is the main process: before there is a process group, and without one, too."""
    return read_place()[0] == 0


class Output(io.FileIO):
    """Standard output or error whose failure does not end a run.

    The reader of a pipe may exit (`make train | head`), or the disk of a log may fill up. From then
    on output is discarded, and the run continues.
    """

    def write(self, data: Any) -> int:
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
        text = io.TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, text)
    if asks_for_json():
        sys.stdout = sys.stderr


def asks_for_json() -> bool:
    """Whether --json was given to this program; what stands after -- is another's."""
    words = sys.argv[1:]
    return "--json" in words[: words.index("--") if "--" in words else None]


def print_json(exit_code: int, **answer: Any) -> None:
    """With --json prints the answer of a command as one object: `command`, `exit_code`, `error` or
    what it has found. Its lines for a person are on standard error; NaN is null."""
    from pydantic_core import to_json

    if asks_for_json() and is_main():
        command = os.path.basename(sys.argv[0]).removeprefix("samestep ")
        found = {"command": command, "exit_code": exit_code, **answer}
        text = to_json(found, indent=1, inf_nan_mode="null", fallback=str)
        with io.BufferedWriter(Output(1, "w", closefd=False)) as file:
            file.write(text + b"\n")


def plural(number: int, noun: str) -> str:
    """A number and its noun: 1 step, 2,000 steps, 2 processes."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{ending}"


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


# Credentials of a URL: user:secret@ and the query, but for what names a version of a file.
_SECRETS = (
    r"[^\s/?#@:]*:[^\s/?#]*",
    r"(?<=s3://)[^\s/?#@:]+:[^\s?#@]+",  # may hold slashes
    r"(?<=http://)[^\s/?#]*",  # elsewhere a text without a colon is a container, as in abfs://
    r"(?<=https://)[^\s/?#]*",
)
# In github:// it is owner:repository.
USER = re.compile(rf"\b(?!github:)([a-z][\w+.-]*)://({'|'.join(_SECRETS)})@", re.IGNORECASE)
_QUERY = re.compile(r"(\b[a-z][\w+.-]*://[^\s?'\"<>]*)\?([^\s'\"<>)`]*[^\s'\"<>)`\].,:;])", re.I)
VERSIONS = ("generation", "ref", "revision", "snapshot", "version", "versionid")


def without_credentials(text: str) -> str:
    """The text without what URLs in it hold to open a door: it may be stored and shown."""

    def keep_version(match: re.Match) -> str:
        kept = [each for each in match[2].split("&") if each.partition("=")[0].lower() in VERSIONS]
        return f"{match[1]}?{'&'.join(kept)}" if kept else match[1]

    return _QUERY.sub(keep_version, USER.sub(r"\1://", text)) if "://" in text else text


def one_line(text: object, longest: int = 300) -> str:
    """Text from outside (a label, a path, an error of a library) as one printable line.

    Line breaks become spaces, control characters are escaped, and credentials of URLs are cut out.
    A text above `longest` characters loses its middle. An error without text is shown by its type.
    """
    # The text may have megabytes.
    line = escaped(without_credentials(" ".join(str(text)[: 100 * longest].split())))
    if not line and isinstance(text, BaseException):
        line = type(text).__name__
    if len(line) > longest:
        end = longest // 3
        line = f"{line[: longest - end - 3]}...{line[-end:]}"
    return line


def print_on_main(text: str) -> None:
    """Prints text above the progress bar, on the main process only."""
    if is_main():
        tqdm.write(escaped(text, kept="\n"))
        sys.stdout.flush()
