"""Runs train.py for each case on standard input, in forks of this process: one import for all."""

import json
import os
import sys
import tempfile
import traceback

sys.path.insert(0, os.getcwd())
import torch._dynamo  # noqa: F401  what the first optimizer imports

import train


def run(case):
    """Exit code, stdout and stderr of one case."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))
            os.environ.update(case.get("env", {}))
            sys.argv = ["train.py", *case["flags"]]
            code = 1
            try:
                exec(case.get("before", ""), {})
                train.shutdown.run(train.main, train.prepare)
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [file.seek(0) or file.read().decode() for file in (out, err)]
        return [code, *texts]


if __name__ == "__main__":
    if "--serve" in sys.argv:  # a case a line, answered at once
        for line in sys.stdin:
            print(json.dumps(run(json.loads(line))), flush=True)
    else:
        print(json.dumps([run(case) for case in json.load(sys.stdin)]))
