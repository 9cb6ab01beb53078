"""`samestep hardware`: what it finds out, faults that it names, and what it recommends."""

import shutil

import pytest


# ---- Smoke ---------------------------------------------------------------------------------------


def smoke(tiny, folder, *change, recipe=""):
    """Runs smoke in a copy of a project, with code at the end of task.py, or a change of train.py:
    the exit code, and what it printed."""
    project = type(tiny)(folder / "project")
    shutil.copytree(tiny.path, project.path, ignore=shutil.ignore_patterns("runs", ".cache"))
    if len(change) == 1:
        with open(project.path / "task.py", "a") as file:
            file.write(change[0])
    elif change:
        text = (project.path / "train.py").read_text()
        assert text.count(change[0]) == 1
        (project.path / "train.py").write_text(text.replace(*change))
    with open(project.path / "configs" / "train" / "default.yaml", "a") as file:
        file.write(recipe)
    result = project.run("python", "-m", "samestep", "hardware", "smoke", check=False)
    assert not list((project.path / "runs" / "hardware").glob(".smoke*"))
    return result.returncode, " ".join((result.stdout + result.stderr).split())


LOSS = "old = loss_sum\ndef loss_sum(model, batch):\n    return old(model, batch) * {} ** RANK\n"
RAISES = "def loss_sum(model, batch):\n    raise RuntimeError('broken')\n"
BACKWARD = "accelerator.backward(gradients.nan_if_not_finite(loss) * scale)"
BEGIN = "        gradients.start_step(train_loader.plan)\n"
SAME = BEGIN + "        micro_batches[0] = micro_batches[ranks.layout.rank]\n"
SHARE = "for number, batch in micro_batches:"
LEFT = "for number, batch in micro_batches[int(ranks.layout.rank == 1) :]:"
STEP = "        optimizer.step()\n"
OTHER = "        optimizer.param_groups[0]['lr'] *= 1 + ranks.layout.rank\n" + STEP
FAULTS = {  # code for task.py, or a change of train.py: what is said
    "a loss doubled on one device": ([LOSS.format(2)], "step 1: loss on 2 x cpu is "),
    "a doubled loss": ([BACKWARD, BACKWARD.replace("(grad", "(2 * grad")], "grad_norm on 1 x cpu"),
    "a wrong micro-batch": ([BEGIN, SAME], "step 1: loss on 2 x cpu is "),
    "a share left out": ([SHARE, LEFT], "train.py on 2 x cpu ended: "),
    "another update": ([STEP, OTHER], "step 2: loss on 2 x cpu is "),
    "an error in task.py": ([RAISES], "train.py on 1 x cpu ended: RuntimeError: broken (task.py, "),
    "an error in train.py": ([STEP, "        raise KeyError('x')\n"], "ended: KeyError: 'x' (train"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_smoke_names_what_is_wrong(tiny, tmp_path, fault):
    change, said = FAULTS[fault]
    recipe = "timeout: 5\n" if fault == "a share left out" else ""  # the other process waits
    code, printed = smoke(tiny, tmp_path, *change, recipe=recipe)
    assert code == 1 and "1 failed failed: " in printed, printed
    assert said in printed
