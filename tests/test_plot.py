"""samestep plot, without training: what it reads, what it draws, what it says of bad input."""

import functools
import json
import math

import pytest

from conftest import BakedProject
from refusals import check_ended, table
from samestep.report import curves


def training(step, loss, **more):
    return {"step": step, "loss": loss, "lr": 1e-3, "tokens_per_second": 2e4, **more}


def curve(last=2.0, steps=60):
    """A falling training loss, and evaluations that end with the loss `last`."""
    lines = [training(step, 3 - step / steps) for step in range(1, steps + 1)]
    return lines + [{"step": steps // 2, "eval_loss": 2.5}, {"step": steps, "eval_loss": last}]


def write(run, lines):
    """Makes a run folder; a line is an object or, to be written as it is, a text."""
    run.mkdir(parents=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (run / "metrics.jsonl").write_text("\n".join(texts), errors="surrogateescape")
    return run


def test_the_last_line_of_a_step_counts_and_torn_lines_do_not(tmp_path):
    lines = [
        {"note": "started"},
        training(10, 3.0),
        training(20, 2.5),
        {"step": 20, "eval_loss": 2.6},
        training(30, 2.0),
        training(20, 2.4),  # killed and resumed: 20 again, and then its evaluation
        {"step": 20, "eval_loss": 2.7},
        training(30, 1.9),
        *("", "[]", "\x00\x00", '{"step": 20, "lo'),
    ]
    train, evals = curves.read_metrics(write(tmp_path / "a", lines))
    assert {step: row["loss"] for step, row in train.items()} == {10: 3.0, 20: 2.4, 30: 1.9}
    assert {step: row["eval_loss"] for step, row in evals.items()} == {20: 2.7}


def test_the_curves_are_those_of_the_lines(tmp_path, monkeypatch):
    """Panels of the loss, the learning rate, the rate, and of four scores at most."""
    figures = []
    monkeypatch.setattr(curves, "save_figure", lambda figure, path: figures.append(figure))
    lines = curve(last=2.0)
    lines[-1] |= {"unigram_loss": 2.8, **{f"score_{name}": 1 for name in "abcdef"}}
    curves.draw([write(tmp_path / "a", lines)], tmp_path / "a.png")
    panels = figures[0].axes
    scores = [f"score {name}" for name in "abcd"]
    assert [each.get_ylabel() for each in panels] == ["loss", "lr", "tokens / s", *scores]
    drawn = panels[0].get_lines()
    assert [line.get_label() for line in drawn] == ["a", "a, validation"]
    assert [*drawn[0].get_ydata()] == [line["loss"] for line in lines[:60]]
    assert [*drawn[1].get_ydata()] == [2.5, 2.0]


@pytest.mark.filterwarnings("error")
def test_odd_data_are_drawn(tmp_path):
    odd = [2.0, math.nan, math.inf, None, "x", *[None] * 50]
    lines = [training(i, x) for i, x in enumerate(odd)]
    lines += [{"step": 60, "eval_loss": math.nan, "$\\frac_{\ud800\u4e2d\n_baseline": 1.5}]
    run = write(tmp_path / "_a$\\b$c", lines)
    curves.draw([run, write(tmp_path / "b", curve())], tmp_path / "both.png")


def test_the_path_is_printed_or_one_line_says_what_is_wrong(tmp_path):
    project = BakedProject(tmp_path, pictures=True)
    plot = functools.partial(project.run, "python", "-m", "samestep", "plot", check=False)
    for name in "ab":
        write(tmp_path / "runs" / name, curve())
    write(tmp_path / "runs" / "started", [{"note": "no step yet"}])
    for runs, figure in ((["runs/a"], "runs/a/curves.png"), (["runs/a", "runs/b"], "curves.png")):
        result = plot(*runs)
        assert (result.returncode, result.stdout, result.stderr) == (0, figure + "\n", "")
        assert (tmp_path / figure).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for words, said in table("plot"):
        check_ended(plot(*words.split()), said, "samestep plot: ")
