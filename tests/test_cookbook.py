"""The recipes of docs/cookbook.md: each applies, does what it says, and survives a break."""

import functools
import re
import shutil
import subprocess

import pytest
import torch

from conftest import (
    ROOT,
    SOURCE,
    BakedProject,
    checkpoint,
    copy_until,
    lines,
    load_module,
    make_tiny,
    read_checkpoint,
    read_weights,
    status,
)
from refusals import cases
from same import check_same, digests, exported_files
from test_bake import check_ruff

COOKBOOK = ROOT / SOURCE / "docs" / "cookbook.md"
# The tiny task with a head called as those of real models, and with other rows to evaluate on.
MORE = """

numbered, Tiny, tiny_views = build_model, TaskConfig, views


@dataclass
class TaskConfig(Tiny):
    validation_data: str = ""


def views(cfg: TaskConfig) -> tuple:
    train, validation = tiny_views(cfg)
    is_other = cfg.validation_data == "data/other.jsonl"
    return train, Numbers(cfg, 900, 13, 0.0) if is_other else validation


def build_model(cfg: TaskConfig) -> torch.nn.Module:
    model = numbered(cfg)
    model._modules["classifier"] = model._modules.pop("3")
    return model
"""


@functools.cache
def recipes():
    """The diff of each recipe, by its heading."""
    sections = re.split(r"^## (.+)$", COOKBOOK.read_text(encoding="utf-8"), flags=re.M)[1:]
    found = {}
    for heading, text in zip(sections[::2], sections[1::2], strict=True):
        for code in re.findall(r"^```diff\n(.*?)^```$", text, flags=re.M | re.S):
            found[heading] = code
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A project with a task for the recipes."""
    baked = make_tiny(tmp_path_factory.mktemp("base"))
    task = baked.path / "task.py"
    task.write_text(task.read_text() + MORE)
    return baked


def apply(base, patch, folder):
    """A copy of a project after a patch, applied as its reader would."""
    project = BakedProject(shutil.copytree(base.path, folder))
    # Or git would take the project for a part of whatever repository stands around it.
    env = project.env(GIT_CEILING_DIRECTORIES=str(folder.parent))
    command = ["git", "apply", "--whitespace=error", "-"]
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True}
    result = subprocess.run(command, input=patch, **options)
    assert result.returncode == 0, result.stderr
    return project


RUNS = cases("recipes")


def cook(base, heading, folder):
    """The project after a recipe, and a function that trains in it."""
    project, before = apply(base, recipes()[heading], folder / "project"), ""
    if heading == "A learning rate for each layer":  # layers are called 0 and 3
        before = "import task; task.build_model = task.numbered"
    return project, functools.partial(project.train, before=before)


def weights(output, step):
    return read_weights(checkpoint(output, step))


def continued(whole, step, output):
    """The run `whole` as it was when it died some time after the checkpoint of this step."""
    copy_until(whole, step, output)
    shutil.copy(whole / "metrics.jsonl", output)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("heading", RUNS)
def test_a_recipe_continues_with_the_same_bytes_and_on_two_processes(base, tmp_path, heading):
    (_, train), (flags, step, keys) = cook(base, heading, tmp_path), RUNS[heading]
    flags = flags.split()
    whole, half, two = tmp_path / "whole", tmp_path / "half", tmp_path / "two"
    train(1, "--output_dir", whole, *flags)
    train(1, "--output_dir", continued(whole, step, half), *flags)
    check_same(whole, half)
    if keys is None:
        return
    train(2, "--output_dir", two, *flags)
    if not keys:
        check_same(whole, two)
    for key in keys:
        pairs = zip(lines(whole, key), lines(two, key), strict=True)
        rel = 1e-4 if key == "noise_scale" else 1e-6  # which is made of small differences
        assert all(b[key] == pytest.approx(a[key], rel=rel) for a, b in pairs)


def eval_loss(project, state):
    """The loss of these weights on the validation rows."""
    task = load_module("tiny_task", project.path / "task.py")
    model = task.build_model(task.TaskConfig())
    model.load_state_dict(state)
    dataset = task.views(task.TaskConfig())[1]
    batch = task.collate([dataset[i] for i in range(len(dataset))])
    return task.metrics(task.eval_sums(model.eval(), batch))["loss"]


# ---- The page ------------------------------------------------------------------------------------


def test_every_recipe_applies_and_leaves_a_clean_project(base, tmp_path):
    assert len(recipes()) == 8
    for number, patch in enumerate(recipes().values()):
        project = apply(base, patch, tmp_path / str(number))
        assert (project.path / "train.py").read_bytes() != (base.path / "train.py").read_bytes()
    check_ruff(tmp_path)


# ---- The recipes ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_average_is_evaluated_and_exported(base, tmp_path):
    heading, whole = "An average of the weights (EMA)", tmp_path / "whole"
    project, train = cook(base, heading, tmp_path)
    flags = RUNS[heading][0].split()
    train(1, "--output_dir", whole, *flags)
    # By hand, in float64, from the weights after each step.
    averages = [weights(whole, 1)]
    for step in range(2, 13):
        now, last = weights(whole, step), averages[-1]
        averages.append({n: 0.7 * last[n].double() + 0.3 * now[n].double() for n in now})
    exported = torch.load(whole / "model" / "weights.pt")
    for name, value in averages[-1].items():
        torch.testing.assert_close(exported[name].double(), value, rtol=1e-5, atol=1e-7)
        assert (exported[name] != weights(whole, 12)[name]).any()
    for line in lines(whole, "eval_loss"):
        average = {n: v.float() for n, v in averages[line["step"] - 1].items()}
        assert line["eval_loss"] == pytest.approx(eval_loss(project, average), rel=1e-5)
        last = eval_loss(project, weights(whole, line["step"]))
        assert line["eval_loss"] != pytest.approx(last, rel=1e-3)
    saved = read_checkpoint(checkpoint(whole, 12))
    assert sum(name.startswith("registered.0.module.model.") for name in saved) == len(exported)
    number = lines(whole, "eval_loss")[-1]["eval_loss"]
    assert f"eval_loss {number:.5g} " in train(1, "--output_dir", whole, *flags, "--eval_only")


@pytest.mark.slow
def test_early_stopping_ends_the_run_and_a_resumed_one_at_the_same_step(base, tmp_path):
    _, train = cook(base, "Early stopping", tmp_path)
    flags = ["--eval_every", 1, "--save_every", 5, "--learning_rate", 0.2, "--max_steps", 14]
    flags += ["--lr_schedule", "constant", "--keep_checkpoints", 0, "--task.samples", 5]
    flags += ["--seed", 1, "--patience", 4, "--export", "best"]
    whole, half = tmp_path / "whole", tmp_path / "half"
    train(1, "--output_dir", whole, *flags)
    losses = [line["eval_loss"] for line in lines(whole, "eval_loss")]
    stop, best = len(losses), losses.index(min(losses))
    assert 5 < stop == best + 5 < 14 and stop % 5, f"choose other settings: {losses}"
    assert lines(whole, "loss")[-1]["step"] == stop and checkpoint(whole, stop).exists()
    assert status(whole)["state"] == "finished" and status(whole)["exit_code"] == 0
    exported = torch.load(whole / "model" / "weights.pt")
    assert all((exported[n] == v).all() for n, v in weights(whole, best + 1).items())

    # A run that was killed after step 5 repeats steps; what was logged of them does not count.
    continued(whole, 5, half)
    shutil.copytree(checkpoint(whole, best + 1), checkpoint(half, best + 1))
    with open(half / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "eval_loss": 0.0}\n')
    train(1, "--output_dir", half, *flags)
    assert digests(half) == digests(whole) and exported_files(half) == exported_files(whole)
    assert lines(half, "loss")[-1]["step"] == stop
