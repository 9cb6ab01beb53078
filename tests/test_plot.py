"""samestep plot, without training: what it reads, what it draws, what it says of bad input."""

import json
import math
import struct
import subprocess
import sys

import pytest

import programs
from samestep.programs import plot
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


def size(png):
    """Width and height from the header; a file that is no PNG fails."""
    header = png.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:])


def command(folder, *arguments):
    return programs.run(plot, folder, *arguments)


# ---- Reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", ['{"step": 20, "lo', "\x00\x00", "[]"])
def test_the_last_line_of_a_step_counts_and_torn_lines_do_not(tmp_path, torn):
    lines = [
        {"note": "started"},
        training(10, 3.0),
        training(20, 2.5),
        {"step": 20, "eval_loss": 2.6},
        training(30, 2.0),
        training(20, 2.4),  # killed and resumed: 20 again, and then its evaluation
        {"step": 20, "eval_loss": 2.7},
        training(30, 1.9),
        "",
        torn,
    ]
    train, evals = curves.read_metrics(write(tmp_path / "a", lines))
    assert {step: row["loss"] for step, row in train.items()} == {10: 3.0, 20: 2.4, 30: 1.9}
    assert {step: row["eval_loss"] for step, row in evals.items()} == {20: 2.7}


def test_the_average_neither_lags_nor_spreads_gaps():
    straight = [100.0 - i for i in range(100)]
    averaged = curves.smooth(straight)
    assert averaged[:96] == pytest.approx(straight[:96])
    noisy = curves.smooth([(-1.0) ** i for i in range(100)])
    assert max(map(abs, noisy[10:90])) < 0.2
    gap = curves.smooth([*straight[:50], math.nan, *straight[51:]])
    assert [i for i, value in enumerate(gap) if math.isnan(value)] == [50]


# ---- Pictures ------------------------------------------------------------------------------------


def test_the_picture_shows_the_data_and_nothing_else_is_left(tmp_path):
    runs = [
        write(tmp_path / name / "a", curve(last))
        for name, last in zip("xyz", (2, 2.2, 2), strict=True)
    ]
    shown = [curves.draw([run], run / "curves.png").read_bytes() for run in runs]
    assert {size(run / "curves.png") for run in runs} == {(1920, 720)}
    assert shown[0] != shown[1] and shown[0] == shown[2]
    assert sorted(path.name for path in runs[0].iterdir()) == ["curves.png", "metrics.jsonl"]


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn."""
    found = []
    save = curves.save_figure
    monkeypatch.setattr(curves, "save_figure", lambda f, path: (found.append(f), save(f, path))[1])
    return found


def words_of(figure):
    """All the words in a picture."""
    return {text.get_text() for text in figure.findobj(lambda part: hasattr(part, "get_text"))}


def test_the_words_of_one_run(tmp_path, figures):
    """Means are told from what was logged, and only evaluations have dots."""
    lines = curve(last=2.0)
    lines[-1] |= {"unigram_loss": 2.8}
    curves.draw([write(tmp_path / "a", lines)], tmp_path / "a.png")
    words = words_of(figures[0])
    said = ["training, as logged", "training, smoothed", "validation 2.000"]
    said += ["unigram loss 2.800"]
    assert {"a", "loss", "learning rate", "tokens / s", "optimizer step", *said} <= words
    drawn = figures[0].axes[0].get_lines()
    assert [line.get_label() for line in drawn] == said
    assert [line.get_marker() for line in drawn] == ["None", "None", "o", "None"]
    losses = [line["loss"] for line in lines[:60]]
    assert [list(line.get_ydata()) for line in drawn[:2]] == [losses, curves.smooth(losses)]


def test_the_words_of_a_comparison(tmp_path, figures):
    runs = [
        write(tmp_path / "x" / "a", curve(last=2.0)),
        write(tmp_path / "y" / "a", curve(last=1.5)),
        write(tmp_path / "y" / "b", [{"step": 1, "loss": 3, "samples_per_second": 8}]),
    ]
    curves.draw(runs, tmp_path / "compared.png")
    words, ends = words_of(figures[0]), ["2.000", "1.500", "–"]
    told = [f"{last}   {curves.one_line(run, 50)}" for last, run in zip(ends, runs, strict=True)]
    assert {*told, "samples / s", "tokens / s"} <= words
    curves.draw([write(tmp_path / f"{i}", curve()) for i in range(12)], tmp_path / "a.png")
    for panel in figures[1].axes:
        looks = {(line.get_color(), line.get_linestyle()) for line in panel.get_lines()}
        assert len(looks) == 12


def scored(**scores):
    """Lines of a run with two evaluations, of these scores: (the first, the last)."""
    rows = [line | {name: pair[i] for name, pair in scores.items()}
            for i, line in enumerate(curve()[-2:])]  # fmt: skip
    return curve()[:-2] + rows


@pytest.mark.parametrize(
    ("scores", "panels"),
    [
        ({"accuracy": (0.5, 1.0), "unigram_loss": (0.9, 0.9)}, ["accuracy"]),
        ({"perplexity": (900.0, 30.0)}, ["perplexity"]),
        ({"accuracy": (0.5, math.nan), "$\\frac_{\udcff": (9, 1)}, 2),
        (
            {"f1": (0, 1), "f1/a": (0, 1), "eval_loss/a": (3, 1), "f1/b": (9, 9)},
            ["f1", "eval loss/a"],
        ),
        ({f"score {i}": (0, 1 / (i + 1)) for i in range(99)}, curves.MAX_SCORES),
    ],
)
def test_scores_have_panels(tmp_path, figures, scores, panels):
    run = write(tmp_path / "a", scored(**scores))
    curves.draw([run], run / "a.png")
    labels = [panel.get_ylabel() for panel in figures[0].axes]
    assert labels[0] == "loss" and labels[-2:] == ["learning rate", "tokens / s"]
    assert (labels[1:-2] if isinstance(panels, list) else len(labels) - 3) == panels
    both = [run, write(tmp_path / "b", scored(**scores))]
    assert size(curves.draw(both, tmp_path / "both.png"))[0] == 1920


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "lines",
    [
        [training(1, 3.0), {"step": 1, "eval_loss": 2, "$\\frac_{\ud800\u4e2d\n_baseline": 1.5}],
        [training(i, x) for i, x in enumerate([2.0, math.nan, math.inf, None, "x", *[None] * 50])]
        + [{"step": 60, "eval_loss": math.nan}],
        [{"step": 1, "loss": 1.0}],
    ],
)
def test_odd_data_are_drawn(tmp_path, lines):
    run = write(tmp_path / "_a$\\b$c", lines)
    compared = [run, write(tmp_path / "b", curve())]
    assert size(curves.draw([run], run / "curves.png"))[0] == 1920
    assert size(curves.draw(compared, tmp_path / "both.png"))[0] == 1920


# ---- Command line --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    write(folder / "runs" / "a", curve())
    write(folder / "runs" / "b", curve(last=1.5))
    write(folder / "runs" / "started", [{"note": "no step yet"}])
    return folder


def test_the_path_is_printed(folder):
    for arguments, picture in (
        (["runs/a"], "runs/a/curves.png"),
        (["runs/a", "runs/b"], "curves.png"),
        (["runs/a", "--output", "runs/one.png"], "runs/one.png"),
    ):
        result = command(folder, *arguments)
        assert (result.returncode, result.stdout, result.stderr) == (0, picture + "\n", "")
        assert size(folder / picture)[0] == 1920


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["runs/c"], "[Errno 2] No such file or directory: 'runs/c/metrics.jsonl'"),
        (["runs/started"], "runs/started/metrics.jsonl has no training line yet; the first comes"),
        (["runs/a", "--output", "no/x.png"], "--output no/x.png: there is no folder no"),
        (["runs/a", "--output", "runs"], "[Errno 21] Is a directory: "),
        (["runs/a", "--output", "x.xyz"], "Format 'xyz' is not supported (supported formats: "),
        (["runs/a", "--outpt", "x.png"], "unrecognized arguments: --outpt x.png"),
        ([], "the following arguments are required: run"),
    ],
)
def test_bad_input_gets_one_line(folder, arguments, line):
    result = command(folder, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"samestep plot: {line}")
    assert result.stderr.count("\n") == 1


def test_it_stands_alone():
    foreign = "{'torch', 'train', 'task', 'matplotlib.pyplot'}"
    code = f"import sys, samestep.programs.plot; print(*{foreign} & {{*sys.modules}})"
    result = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("\n", "")
