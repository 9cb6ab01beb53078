"""Runs programs in forks of this process, which has imported what takes their time: 3 s less each.

A line of standard input holds the processes to run together, with folder, environment, arguments of
Python and standard input for each, and the seconds that they may take; it is answered with the exit
code, stdout and stderr of each. The library is imported here, and nothing of a project.
"""

import atexit
import contextlib
import gc
import io
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import types

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as preflight does, before torch

import accelerate  # noqa: F401
import accelerate.commands.launch  # noqa: F401
import accelerate.utils.deepspeed  # noqa: F401
import datasets  # noqa: F401
import matplotlib.backends.backend_agg  # noqa: F401
import matplotlib.figure  # noqa: F401
import pydantic.type_adapter
import sacrebleu.metrics  # noqa: F401
import scipy.io  # noqa: F401
import sklearn.metrics  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.distributed  # noqa: F401
import torch.profiler  # noqa: F401
import torch.utils.data  # noqa: F401
import transformers.convert_slow_tokenizer  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import samestep


def begin(folder, env, arguments, given, files):
    """The process id of a fork that runs `python *arguments`, and reads what is given."""
    if child := os.fork():
        return child
    code = 1
    try:
        with tempfile.TemporaryFile() as stdin:
            stdin.write(given.encode("latin-1"))
            stdin.seek(0)
            for number, file in enumerate((stdin, *files)):
                os.dup2(file.fileno(), number)
        sys.stdin = open(0, closefd=False)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        os.fsync = os.fstat  # kills are none of the machine; see tests/test_checkpoints.py
        if "NO_PICTURE" in env:
            matplotlib.figure.Figure.__init__ = refuse
        try:
            execute(*arguments)
            code = 0
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            try:
                sys.excepthook(*sys.exc_info())
            except SystemExit as end:
                code = end.code
        threading._shutdown()  # as at the end of a program
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def refuse(*_, **__):
    """In the place of what makes a figure: drawing takes longer than a short run trains."""
    raise RuntimeError("NO_PICTURE is set")


def execute(what, *rest):
    """Runs a file, the code after -c, or the module after -m, as Python does."""
    sys.argv, sys.path[0] = [what, *rest], os.getcwd()
    trains = what == "train.py" or "\nimport train\n" in "".join(rest[:1])
    if not trains or os.path.isdir("samestep"):  # it may change the library, or has its own
        for name in [each for each in sys.modules if each.partition(".")[0] == "samestep"]:
            del sys.modules[name]
    if what == "-m":
        sys.argv = [*rest]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(what, run_name="__main__")


def kill(*children):
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def run(cases, seconds):
    """The exit code, stdout and stderr of each case; all are killed when the time is over."""
    files = [(tempfile.TemporaryFile(), tempfile.TemporaryFile()) for _ in cases]
    children = [begin(*case, pair) for case, pair in zip(cases, files, strict=True)]
    timer = threading.Timer(seconds, kill, children)
    timer.start()
    states = [os.waitpid(child, 0)[1] for child in children]
    timer.cancel()
    timer.join()  # a fork takes no thread along
    answers = []
    for state, pair in zip(states, files, strict=True):
        texts = [file.seek(0) or file.read().decode(errors="replace") for file in pair]
        answers.append([os.waitstatus_to_exitcode(state), *texts])
    return answers


def warm_up():
    """Imports the library, fills the caches of pydantic and matplotlib, and keeps collections away
    from all this."""
    for name in samestep.contents():
        getattr(samestep, name)
    sys.modules.pop("samestep.base.preflight", None)  # it looks at the project
    pydantic.type_adapter.TypeAdapter(int)
    figure = matplotlib.figure.Figure(layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([1, 10], [1, 2], label="a")
    axes.set_title("a", loc="left")
    figure.legend(loc="outside upper left", frameon=False)
    figure.savefig(io.BytesIO(), format="png")
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    warm_up()
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), flush=True)
