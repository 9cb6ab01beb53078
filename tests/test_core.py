"""The core in a script of one's own: what stands apart from train.py and task.py."""

import subprocess
import sys

IMPORTED = """
import sys
from samestep.core import Training
found = {name.split(".")[0] for name in sys.modules} & {"pydantic", "psutil"}
found |= {"accelerate.commands.launch", "samestep.project"} & {*sys.modules}
print(found or "nothing")
"""


def test_the_core_loads_nothing_of_train_py_and_no_launcher():
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True)
    assert done.stdout == "nothing\n", done.stdout + done.stderr
