"""A process of its own for what may hang: it ends with its parent, and its error is one line."""

import contextlib
import os
import signal

import pytest

from samestep.base import workers


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
