"""Runs a program of the template in forks of this process, which has imported it already."""

import io
import os
import sys
import tempfile
import traceback
from types import SimpleNamespace


def run(module, folder, *arguments, stdin=b"", stdout=None, encoding="utf-8"):
    """Exit code, stdout and stderr of main() in a folder; `stdout`: a file for what it prints."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
        with tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            child = os.fork()
            if child == 0:
                files = (given, open(stdout, "wb") if stdout else out, err)
                for number, file in enumerate(files):
                    os.dup2(file.fileno(), number)
                sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb"))
                sys.stdout = open(1, "w", encoding=encoding, closefd=False)
                sys.stderr = open(
                    2, "w", encoding=encoding, errors="backslashreplace", closefd=False
                )
                sys.argv = [f"samestep {module.__name__.rpartition('.')[2]}", *map(str, arguments)]
                code = 0
                try:
                    os.chdir(folder)
                    code = module.main() or 0
                    sys.stdout.flush()
                except SystemExit as end:
                    code = end.code or 0
                except BaseException:
                    traceback.print_exc()
                    code = 1
                sys.stderr.flush()
                os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = [file.seek(0) or file.read().decode(errors="replace") for file in (out, err)]
    return SimpleNamespace(returncode=code, stdout=texts[0], stderr=texts[1])


def refused(result, said):
    """Whether a program ended with one line, on stderr alone, that says these words."""
    line = result.stderr.removesuffix("\n")
    alone = (result.returncode, result.stdout) == (2, "") and line.isprintable()
    return alone and ": " in line[:20] and len(line) < 400 and said in line
