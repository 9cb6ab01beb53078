"""examples/task.py, a task around a plain nn.Module: it trains, continues, exports."""

import shutil
import sys

import pytest
from safetensors.torch import load_file

from conftest import bake, digest, lines, served, status


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A project whose task.py is the example."""
    baked = bake(tmp_path_factory.mktemp("own"), tracker="none")
    code = (baked.path / "examples" / "task.py").read_text(encoding="utf-8")
    assert 40 <= len([line for line in code.splitlines() if line.strip()]) <= 60
    assert "transformers" not in code and "tasklib" not in code
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


def test_without_tasklib_the_model_is_exported_without_a_picture(tmp_path):
    """Nothing of tasklib is imported by this task.py, so its owner may delete all of it."""
    baked = bake(tmp_path, tracker="none")
    shutil.copy(baked.path / "examples" / "task.py", baked.path / "task.py")
    shutil.rmtree(baked.path / "tasklib")
    (baked.path / "configs" / "train" / "default.yaml").write_text("max_steps: 2\n")
    printed = baked.train(1, "--output_dir", "runs/a")
    assert "curves: no picture: No module named 'tasklib'" in printed
    assert (baked.path / "runs" / "a" / "model" / "model.safetensors").is_file()
