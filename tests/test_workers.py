"""A process of its own for what may hang: it ends with its parent, and its error is one line."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from conftest import ROOT, SOURCE
from samestep.base import workers


def test_a_signal_ends_the_learning_of_a_vocabulary_and_leaves_no_child(tmp_path):
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT / SOURCE)!r})
from samestep.base import workers
def stop(*_):
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
def learn():
    print(os.getpid(), flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as deaf as a library
    while True:
        pass
workers.run_in_child(learn)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child = int(process.stdout.readline())
    code = None
    while code is None:  # Python loses an exception of a hook of fork; shutdown.py repeats it
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=1)
    assert code == 75
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_what_goes_wrong_in_a_child_is_one_line(tmp_path):
    def write():
        (tmp_path / "done").write_text("it is")

    def fail():
        raise RuntimeError("two\nlines")

    workers.run_in_child(write)
    assert (tmp_path / "done").read_text() == "it is"
    with pytest.raises(ValueError, match="^task.data: two lines; give fewer or other rows$"):
        workers.run_in_child(fail)
    with pytest.raises(ValueError, match="ended with SIGKILL, perhaps for lack of memory"):
        workers.run_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with contextlib.suppress(ChildProcessError):
        assert os.waitpid(-1, os.WNOHANG) == (0, 0)
