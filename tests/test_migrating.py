"""A run of version 1 moves to this version, as docs/migrating.md says."""

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

from conftest import ROOT, BakedProject, bake, lines

VERSION_1 = "dc4e4127eb"  # the last commit of version 1


def version_1(folder):
    """The repository as it was, if git knows it here."""
    command = ["git", "-C", ROOT, "archive", VERSION_1]
    result = subprocess.run(command, capture_output=True)
    if result.returncode:
        pytest.skip(f"this clone has no commit {VERSION_1}")
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.slow
def test_a_run_that_was_killed_moves_and_ends(tmp_path):
    old = version_1(tmp_path / "version 1")
    program = "from conftest import bake; import sys; print(bake(sys.argv[1], task='causal_lm'))"
    paths = {"PYTHONPATH": f"{old / 'src'}:{old / 'tests'}"}
    before = BakedProject(tmp_path)
    before.run(sys.executable, "-c", program, tmp_path, **paths)
    (project,) = tmp_path.glob("my_training")
    flags = ["--tracker", "none", "--save_every", 5, "--eval_every", 10, "--max_steps"]
    BakedProject(project).run(sys.executable, "train.py", *flags, 20, **paths)
    run = project / "runs" / "default"
    shutil.rmtree(run / "checkpoints" / "step-00000020")  # as if it was killed before
    shutil.rmtree(run / "model")

    moved = bake(tmp_path / "new", task="causal_lm")
    shutil.copytree(run, moved.path / "runs" / "default")
    page = (ROOT / "docs" / "migrating.md").read_text("utf-8")
    (code,) = re.findall(r"python3 - runs/default <<'END'\n(.*?)^END$", page, re.M | re.S)
    moved.run(sys.executable, "-c", code, "runs/default")
    printed = moved.train(1, *flags, 20, "--accept_changes")
    assert "continuing from runs/default/checkpoints/step-00000015" in printed
    output = moved.path / "runs" / "default"
    first, last = (lines(each, "loss")[-1]["loss"] for each in (run, output))
    assert last == pytest.approx(first, rel=0.02)  # other sequences of the same texts
    files = run / "tokenizer.json", output / "model" / "tokenizer.json"
    kept, exported = (json.loads(path.read_text("utf-8"))["model"]["vocab"] for path in files)
    assert kept == exported
