"""Which PyTorch is installed where, and what `make` says; tools are stand-ins, no download.

tests/golden/make.txt has what is typed on each machine and what comes of it: lines that are
printed, after + what is installed, after ? what nvidia-smi is asked.
"""

import os
import re
import shutil
import subprocess

import pytest

from conftest import ROOT, SOURCE, template

TOOLS = ROOT / "tests" / "stand_ins"
GOLDEN = ROOT / "tests" / "golden" / "make.txt"
RECIPES = ("configs/train/default.yaml", "configs/train/smoke.yaml")
PROJECT = """
[project]
dependencies = [
    "torch>=2.13",
]
"""


@pytest.fixture
def answer(tmp_path):
    """What comes of a command in a project whose tools are stand-ins."""
    for name in ("Makefile", "install.sh"):
        shutil.copy(template() / SOURCE / name, tmp_path)
    shutil.copytree(template() / SOURCE / "configs" / "accelerate", tmp_path / "configs/accelerate")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    for name in ("vendor/samestep-1.0.0+0-py3-none-any.whl", *RECIPES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    log = tmp_path / "log"
    env = {"PATH": f"{TOOLS}:/usr/bin:/bin", "MORE": str(TOOLS / "more"), "FAKE_LOG": str(log)}

    def answer(command):
        log.write_text("")
        options = {"cwd": tmp_path, "env": env, "stderr": subprocess.STDOUT, "text": True}
        result = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, **options)
        printed = re.sub(r"^make: .*\n", "", result.stdout, flags=re.M)
        printed = re.sub(r"^Makefile:\d+", "Makefile", printed, flags=re.M)
        printed = re.sub(r"done, \S+ in", "done, SIZE in", printed)
        printed += log.read_text() + f"exit code {result.returncode}\n" * bool(result.returncode)
        return f"$ {command}\n{printed}"

    return answer


MACHINES = re.split(r"\n(?=== )", GOLDEN.read_text(encoding="utf-8").strip())


@pytest.mark.parametrize("number", range(len(MACHINES)))
def test_golden_of_what_is_installed_and_said(answer, number):
    title, *lines = MACHINES[number].splitlines(keepends=True)
    commands = [line[2:].strip() for line in lines if line.startswith("$ ")]
    found = (title + "".join(map(answer, commands))).strip()
    if os.environ.get("UPDATE_GOLDEN"):
        MACHINES[number] = found
        GOLDEN.write_text("\n\n".join(map(str.strip, MACHINES)) + "\n", encoding="utf-8")
    assert found == MACHINES[number].strip()
