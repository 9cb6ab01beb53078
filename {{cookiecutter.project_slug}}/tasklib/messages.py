"""Text from outside (a label, a path, an error of a library) on one line of a message."""

import os
import re

# Credentials of a URL: user:secret@ and the query, but for what names a version of a file. What
# stands before an @ without a colon is a container in abfs://, github:// has owner:repository.
USER = re.compile(
    r"\b(?!github:)([a-z][\w+.-]*)://((?<=s3://)[^\s/?#@:]+:[^\s?#@]+|[^\s/?#@:]*:[^\s/?#]*|"
    r"((?<=http://)|(?<=https://))[^\s/?#]*)@",
    re.IGNORECASE,
)
QUERY = re.compile(r"(\b[a-z][\w+.-]*://[^\s?'\"<>]*)\?([^\s'\"<>)`]*[^\s'\"<>)`\].,:;])", re.I)
VERSIONS = ("generation", "ref", "revision", "snapshot", "version", "versionid")


def without_credentials(text: str) -> str:
    """The text without what URLs in it hold to open a door: it may be stored and shown."""

    def keep_version(match: re.Match) -> str:
        kept = [each for each in match[2].split("&") if each.partition("=")[0].lower() in VERSIONS]
        return "?".join([match[1], *["&".join(kept)] * bool(kept)])

    return QUERY.sub(keep_version, USER.sub(r"\1://", text)) if "://" in text else text


def one_line(text: object, longest: int = 300) -> str:
    """The text with line breaks as spaces, and codes for characters that a terminal may obey.

    Credentials of URLs and the middle of a longer text are left out. An error without a text
    becomes its type.
    """
    line = without_credentials(" ".join(str(text)[: 100 * longest].split()))
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
