"""Runs on few rows: a warm-up that is a part, the steps that min_steps chooses, advised flags."""

import math
from types import SimpleNamespace

import pytest

from samestep.settings import config, length


def settings(**given):
    """A config with the fields that decide the length of a run."""
    fields = {"num_epochs": 3.0, "global_batch_size": 16, "min_steps": 60, "warmup_steps": 0.03}
    fields |= {"learning_rate": 2e-5, "output_dir": "runs/a", "task": SimpleNamespace()}
    return SimpleNamespace(**{**fields, **given})


def test_a_warm_up_is_a_number_or_a_part():
    """As lr_at of train.py counts it, rounded up; another value is an error."""
    for text, steps in (("0", 0), ("1", 1), ("1.0", 1), ("20", 20), ("0.07", 7), ("0.999", 100)):
        value = config.convert(config.Warmup, text)
        assert length.warmup_of(settings(warmup_steps=value), 100) == steps, text
    assert length.warmup_of(settings(), 1) == 1
    for text in ("-1", "-0.1", "1.5", "nan", "inf", "a", ""):
        with pytest.raises(ValueError, match="Input should be"):
            config.convert(config.Warmup, text)


@pytest.mark.parametrize(
    "rows, given, size, epochs",
    [
        (49, {}, 4, 5),  # 61.25 steps
        (45, {"num_epochs": 1.0}, 4, 6),
        (180, {}, 8, 3),
        (320, {}, 16, 3),  # 60 steps: they are enough
        (310, {}, 8, 3),
        (27, {"global_batch_size": 64}, 4, 9),
        (5, {}, 4, 10),  # as far as it goes
        (1, {}, 4, 10),
        (49, {"global_batch_size": 2}, 2, 3),
        (10, {"global_batch_size": 3, "num_epochs": 2.5}, 3, 10),
        (10, {"num_epochs": 30.0}, 4, 30),
        (49, {"min_steps": 0}, 16, 3),
    ],
)
def test_few_rows_get_smaller_steps_and_then_more_passes(rows, given, size, epochs):
    cfg = settings(**given)
    before = (cfg.global_batch_size, cfg.num_epochs)
    said = length.choose_steps(cfg, rows)
    assert (cfg.global_batch_size, cfg.num_epochs) == (size, epochs)
    assert bool(said) == (before != (size, epochs))
    if said:
        assert said[0].startswith(f"{rows} rows, {epochs:g} epochs of {rows / size:.3g} steps of ")
    assert not length.choose_steps(cfg, rows)  # a resume chooses the same


def flags_in(line):
    """The flags that a line advises, by name."""
    words = line.split(" give ")[1].split()
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("rows", [1, 2, 20, 49, 1000])
@pytest.mark.parametrize("given", [{"warmup_steps": 50}, {}, {"num_epochs": 0.0}])
def test_the_flags_of_a_line_give_a_run_that_is_long_enough(rows, given):
    """Of one of fewer than 20 steps, and of one whose rate never reaches its peak."""
    cfg = settings(**given)
    *said, line = length.remarks_on_length(cfg, rows, 19)
    assert said == (["warmup_steps 0.03: 1 of 19 steps"] if cfg.warmup_steps < 1 else [])
    assert ("rises to the end: warmup_steps is 50" in line) == (cfg.warmup_steps == 50)
    advised = flags_in(line)
    steps = int(advised.get("--max_steps", 0))
    if not steps:
        steps = math.ceil(int(advised["--num_epochs"]) * rows / int(advised["--global_batch_size"]))
    assert steps >= 100
    cfg.warmup_steps = float(advised.get("--warmup_steps", cfg.warmup_steps))
    assert length.warmup_of(cfg, steps) < steps / 20
    assert len(length.remarks_on_length(cfg, rows, steps)) == 1  # that the warm-up is a part


@pytest.mark.parametrize(
    "task, parameters, rate",
    [
        ({}, 9e5, 2e-4), ({}, 6e7, 1e-4), ({}, 5e8, 5e-5), ({}, 1e9, 3e-5), ({}, 7e9, 2e-5),
        ({"lora_rank": 8}, 9e5, 2e-3), ({"lora_rank": 8}, 7e9, 2e-4), ({"lora_rank": 0}, 7e9, 2e-5),
        ({"beta": 0.1}, 9e5, 5e-5), ({"beta": 0.1}, 5e8, 5e-6),
        ({"lora_rank": 8, "beta": 0.1}, 5e8, 5e-5),
    ],
)  # fmt: skip
def test_a_loss_that_hardly_fell_is_said_with_a_rate(task, parameters, rate):
    cfg = settings(task=SimpleNamespace(**task), learning_rate=1e-6)
    for after in (1.96, 2.0, 2.4):
        line = length.remarks_on_loss(cfg, 49, 62, (2.0, after), parameters)[0]
        advised = flags_in(line)
        assert float(advised["--learning_rate"]) == pytest.approx(rate)
        assert advised["--output_dir"] == "runs/a-2" and "--num_epochs" in advised
    slow = length.remarks_on_loss(cfg, 49, 62, (2.0, 1.6), parameters)
    assert bool(slow) == (rate > 3e-6)  # the rate is less than a third
    assert not length.remarks_on_loss(cfg, 49, 62, (2.0, 1.4), parameters)
    cfg.learning_rate = rate
    assert not length.remarks_on_loss(cfg, 49, 62, (2.0, 1.89), parameters)
    assert not length.remarks_on_loss(cfg, 49, 62, (2.0, math.nan), parameters)
    (line,) = length.remarks_on_loss(cfg, 9000, 1000, (2.0, 1.96), parameters)  # it is long enough
    higher = min(3 * rate, 5e-3 if task.get("lora_rank") else 1e-3)
    assert flags_in(line) == {"--learning_rate": f"{higher:g}", "--output_dir": "runs/a-2"}
