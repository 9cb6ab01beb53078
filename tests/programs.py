"""Runs a program of the template in forks of this process, which has imported it already."""

import os
import sys
import tempfile
import traceback
from types import SimpleNamespace


def run(module, folder, *arguments, stdin=b""):
    """Exit code, stdout and stderr of main() in a folder."""
    files = [tempfile.TemporaryFile() for _ in range(3)]
    files[0].write(stdin)
    files[0].seek(0)
    if (child := os.fork()) == 0:
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)
        sys.argv = [f"samestep {module.__name__.rpartition('.')[2]}", *map(str, arguments)]
        code = 1
        try:
            os.chdir(folder)
            code = module.main() or 0
            sys.stdout.flush()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = [file.seek(0) or file.read().decode(errors="replace") for file in files[1:]]
    return SimpleNamespace(returncode=code, stdout=texts[0], stderr=texts[1])
