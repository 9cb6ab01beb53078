"""The example around a plain nn.Module: it is written, trains, continues, exports."""

import shutil
import sys
import zipfile

import pytest
from safetensors.torch import load_file

from conftest import ROOT, bake, digest, lines, served, status

TASKS = [path.stem for path in (ROOT / "templates" / "tasks").glob("*.py")]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A project whose task.py is the example."""
    baked = bake(tmp_path_factory.mktemp("own"), tracker="none")
    (wheel,) = baked.path.glob("vendor/*.whl")
    library = tmp_path_factory.mktemp("library")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(library)
    example = ["python", "-m", "samestep", "example"]
    listed = baked.run(*example, PYTHONPATH=str(library)).stdout
    names = [line.split()[0] for line in listed.splitlines()]
    assert names == sorted([*TASKS, "cloze", "plain_module", "train_pipeline"])
    baked.run(*example, "plain_module", PYTHONPATH=str(library))
    assert "cloze.yaml is" in baked.run(*example, "cloze", PYTHONPATH=str(library)).stdout
    cloze = (ROOT / "templates" / "examples" / "cloze.yaml").read_bytes()
    assert (baked.path / "cloze.yaml").read_bytes() == cloze
    assert "says how" in baked.run(*example, "train_pipeline", PYTHONPATH=str(library)).stdout
    pipeline = (baked.path / "train_pipeline.py").read_text(encoding="utf-8")
    assert len(pipeline.splitlines()) <= 250
    again = baked.run(*example, "plain_module", check=False, PYTHONPATH=str(library))
    assert again.returncode == 2 and "plain_module.py is there already" in again.stderr
    code = (baked.path / "plain_module.py").read_text(encoding="utf-8")
    (baked.path / "plain_module.py").unlink()
    assert 40 <= len([line for line in code.splitlines() if line.strip()]) <= 60
    assert "transformers" not in code and "import samestep" not in code
    (baked.path / "task.py").write_text(code, encoding="utf-8")
    (baked.path / "configs" / "train" / "default.yaml").write_text(
        "max_steps: 60\nglobal_batch_size: 32\nmicro_batch_size: 8\nlearning_rate: 0.02\n"
        "warmup_steps: 5\nlog_every: 1\nsave_every: 20\neval_every: 20\nkeep_checkpoints: 0\n"
    )
    return baked


@pytest.mark.slow
def test_the_example_trains_resumes_and_exports(own, tmp_path):
    losses = []
    for processes in (1, 2):
        whole, continued = tmp_path / f"{processes}", tmp_path / f"{processes}-continued"
        kept = "checkpoints/step-00000020"
        with served(own, processes) as train:
            train("--output_dir", whole)
            shutil.copytree(whole / kept, continued / kept)
            assert "continuing from" in train("--output_dir", continued)
        last = "checkpoints/step-00000060"
        assert digest(continued / last) == digest(whole / last)

        scores = [line["eval_loss"] for line in lines(whole, "eval_loss")]
        assert len(scores) == 3 and scores[-1] < 0.05 < scores[0]  # the mean alone gives 0.5
        weights = load_file(whole / "model" / "model.safetensors")
        assert sum(v.numel() for v in weights.values()) == 64 * 3 + 1
        assert status(whole)["state"] == "finished"
        assert "## Evaluation" in (whole / "model" / "README.md").read_text()
        losses.append([line["loss"] for line in lines(whole, "loss")])
    assert losses[0][:20] == pytest.approx(losses[1][:20], rel=1e-5)


@pytest.mark.slow
def test_a_projects_own_tests_pass_with_the_example(own):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    assert "skipped" not in own.run(*command).stdout
