"""Questions to a run: the rows of a step, the steps of a row, a step computed again."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import datasets
import numpy as np
import pytest

from conftest import ASK, kill_after, lines, reseal, status
from samestep.ask.recorded_rows import Part
from samestep.step.order import hash64, permute
from test_mixture import SOURCES

ACCEPT = ["--accept_changes", "--lr_schedule", "constant"]


@pytest.fixture(scope="module")
def killed(tiny, quick, tmp_path_factory):
    """A run that was killed after step 4, and resumed."""
    output = tmp_path_factory.mktemp("ask") / "killed"
    quick("--output_dir", output, before=kill_after(output, 4), codes=[-9])
    quick("--output_dir", output)
    assert [line["step"] for line in lines(output, "started")] == [0, 4]
    return output


def test_a_permutation_has_its_inverse():
    for size in (1, 2, 3, 7, 10, 97, 1000, 12345):
        places, key = np.arange(size, dtype=np.uint64), hash64(5, size)
        assert (permute(permute(places, size, key), size, key, back=True) == places).all()


# Every row of a run: the steps that have it, against those that are computed backwards.
BRUTE = """
import json
from collections import defaultdict
from samestep.ask.recorded_run import RecordedRun
from samestep.ask.recorded_rows import RecordedRows
record = RecordedRun(sys.argv.pop())
data, seen = RecordedRows(record, []), defaultdict(list)
for step in range(1, record.last + 1):
    for row in data.ids(step):
        seen[row].append(step)
digest = record.history[0]["data"]
computed = {row: data.steps_of(row, digest) for row in range(len(data.part(1).view))}
wrong = [row for row in computed if sorted(seen[row]) != computed[row]]
print(json.dumps([len(record.history), len(computed), sum(map(len, seen.values())), wrong]))
sys.exit()
"""


def test_when_is_the_inverse_of_rows(tiny, quick, tmp_path):
    """Of a mixture whose weights, and a batch whose size changes."""
    flags = ["--output_dir", tmp_path / "run", "--task.samples", 60, *ACCEPT]
    quick(*flags, "--max_steps", 4, before=SOURCES.replace("WEIGHT", "2"))
    after = SOURCES.replace("WEIGHT", "9")
    quick(*flags, "--max_steps", 8, before=after)
    quick(*flags, "--max_steps", 24, "--global_batch_size", 12, "--seed", 3, before=after)
    samples = 8 * 8 + 16 * 12
    printed = tiny.ask("rows", tmp_path / "run", before=after)
    assert f"24 of 24 lines of metrics.jsonl, {samples} samples" in printed
    found = tiny.ask(tmp_path / "run", before=after + BRUTE)
    assert json.loads(found) == [3, 60, samples, []]


def test_rows_that_differ_are_said(tiny, killed, tmp_path):
    output = shutil.copytree(killed, tmp_path / "run")
    text = (output / "metrics.jsonl").read_text()
    line = lines(output, "loss")[5]
    (output / "metrics.jsonl").write_text(text.replace(line["batch_hash"], "0" * 16))
    printed = tiny.ask("rows", output, "--verify", code=1)
    assert "11 of 12 lines" in printed and "NOT those of steps 6 to 6" in printed
    assert "0 of 1 line of" in tiny.ask("rows", output, "--step", 6, code=1)


def test_each_answer_is_one_json_object(tiny, killed, tmp_path):
    """On standard output, with the exit code; of an error its line."""

    def answer(*words, code=0):
        result = tiny.run("python", "-c", ASK, "", *map(str, words), "--json", check=False)
        found = json.loads(result.stdout)
        assert (result.returncode, found.pop("exit_code")) == (code, code), result.stderr
        assert found.pop("command") == words[0] and result.stderr
        return found

    found = answer("rows", killed, "--step", 7)
    assert (len(found["rows"]), found["lines"], found["wrong_steps"]) == (8, 1, [])
    row = found["rows"][0]["row"]
    assert 7 in answer("when", killed, row)["rows"][0]["steps"]
    assert answer("diff", killed, killed) == {"first_step": None, "causes": []}
    assert {"step", "what"} == answer("replay", killed)["steps"][0].keys()
    found = answer("replay", killed, "--step", 7)
    assert row in [each["row"] for each in found["rows"]] and found["logged"] and found["layers"]
    found = answer("receipt", killed, "--output", tmp_path / "r.json")
    assert found == {"path": str(tmp_path / "r.json"), "steps": [4, 8, 12], "exact": False}
    found = answer("audit", tmp_path / "r.json", "--steps", "0:9", code=2)
    assert found == {"error": "--steps 0:9: give A:B of the steps 0, 4, 8, 12"}
    assert "only --check answers" in tiny.train(1, "--json", codes=[2])
    for flags, code in ([], 0), (["--seeed", 1], 2):
        words = ["train.py", "--check", "--json", "--output_dir", killed, *flags]
        result = tiny.run("python", *map(str, words), check=False)
        found = json.loads(result.stdout)
        assert found.pop("command") == "train.py" and found.pop("exit_code") == code
        assert found["checkpoint"].endswith("00000012") if not code else "seed?" in found["error"]


def test_a_step_of_a_run_that_was_killed_is_computed_again(tiny, killed):
    """Without a row the loss is that of the others: there is no dropout."""
    tiny.check_asked(killed, 7)
    first = int(tiny.ask("rows", killed, "--step", 7).splitlines()[1].split()[0])
    assert re.search(r"until step 12: (\d+, )*7\b", tiny.ask("when", killed, first))
    printed = tiny.ask("replay", killed, "--step", 7, "--without", first, "--gradients")
    loss, items = re.search(r"step 7 alone: loss (\S+),.* (\d+) items", printed).groups()
    alone, norm, own = re.search(rf"^ +(\S+) norm (\S+) +(\d+) +{first} ", printed, re.M).groups()
    left = float(re.findall(r"^ +loss +\S+ +(\S+)", printed, re.M)[-1])
    assert f"and without {first}\n" in printed and float(norm) > 0
    wanted = float(loss) * int(items) - float(alone) * int(own)
    assert left * (int(items) - int(own)) == pytest.approx(wanted, rel=1e-3)
    two = tiny.ask("replay", killed, "--step", 7, "--processes", 2)
    assert "2 x cpu" in two and "computed twice: equal" in two
    assert all(float(apart) < 1e-6 for apart in re.findall(r"(\S+) apart", two))


def test_the_row_behind_a_spike_is_found(tiny, quick, tmp_path):
    """Its step stands out, though a line tells of two steps; there it has the largest loss."""
    flags = ["--task.poisoned", 20, "--task.poison", "500", "--learning_rate", 1e-4]
    output = tmp_path / "run"
    quick(*flags, "--max_steps", 40, "--log_every", 2, "--save_every", 10, "--output_dir", output)
    steps = re.findall(r"(?<=: )[\d, ]+$", tiny.ask("when", output, 20), re.M)[0].split(", ")
    found = tiny.ask("replay", output)
    told = re.findall(r"step +(\d+): loss", found)
    assert len(told) == 3 and {*told} <= {*steps}
    printed = tiny.ask("replay", output, "--step", told[0])
    rows = printed.partition("rows by the loss of each alone")[2].splitlines()
    assert rows[1].split()[2] == "20"


def test_a_run_that_ends_by_nan_names_its_step_and_its_rows(tiny, quick, tmp_path):
    flags = ["--task.poisoned", 20, "--max_skipped_steps", 1, "--output_dir", tmp_path / "run"]
    last = quick(*flags, codes=[2]).strip().splitlines()[-1]
    step, rows = re.search(r"Step (\d+), whose rows are ([\d, ]+): python -m", last).groups()
    assert last.endswith(f"python -m samestep replay {tmp_path / 'run'} --step {step}")
    assert "20" in rows.split(", ")
    assert status(tmp_path / "run")["noticed"]["skipped"]["step"] == int(step)
    printed = tiny.check_asked(tmp_path / "run", step)
    assert re.search(r"^ +nan +\d+ +20 ", printed, re.M)
    assert f"step {step:>8}: skipped" in tiny.ask("replay", tmp_path / "run")


NORM = """
import task, torch
old = task.build_model
def build(cfg):
    model = old(cfg)
    model[0].norm = torch.nn.BatchNorm1d(8)
    model[0].register_forward_pre_hook(lambda layer, given: layer.norm(*given))
    return model
task.build_model = build
"""


def test_a_question_changes_no_statistics(tiny, quick, tmp_path):
    """Of BatchNorm: the lines after the step that is asked about are those of the run."""
    flags = ["--max_steps", 6, "--log_every", 3, "--output_dir", tmp_path / "run"]
    quick(*flags, before=NORM)
    tiny.check_asked(tmp_path / "run", 5, before=NORM)


SHARDED = ("ZeRO-2", "FSDP2, cp 2", "stages 2")


def test_what_cannot_be_asked_is_one_line(tiny, quick, killed, tmp_path):
    def refused(said, *words, before=""):
        printed = tiny.ask(*words, before=before, code=2)
        assert printed.count("\n") == 1 and said in printed, printed

    replay = ("replay", killed, "--step", 7)
    refused("tells of steps 1 to 12; give one", "rows", killed, "--step", 13)
    refused("no folder of a run", "when", tmp_path, 3)
    refused("row 37: there are 37 rows", "when", killed, 37)
    refused("--without 99 is not a row of the step", *replay, "--without", 99)
    refused("asks about a step; give --step", "replay", killed, "--without", 3)
    other = "import task\ntask.torch.randn = task.torch.rand"
    refused("the data have changed since step 7", *replay, before=other)
    depend = "import task\ntask.rows_depend = True"
    first = tiny.ask("rows", killed, "--step", 7).splitlines()[1].split()[0]
    said = "rows_depend: rows of this task mean nothing"
    refused(said, *replay, "--without", first, before=depend)
    assert "rows_depend" in tiny.ask(*replay, before=depend)
    output = shutil.copytree(killed, tmp_path / "run")
    checkpoint = output / "checkpoints" / "step-00000012"
    hardware = json.loads((checkpoint / "manifest.json").read_text())["hardware"]
    for sharding in SHARDED:
        reseal(checkpoint, hardware=hardware | {"sharding": sharding})
        refused("cannot be replayed", "replay", output, "--step", 12)
    (entry,) = json.loads((checkpoint / "manifest.json").read_text())["history"]
    reseal(checkpoint, hardware=hardware, history=[entry | {"step": 4, "samples": 32}])
    refused("tells of steps 5 to 12", "rows", output, "--step", 4)
    assert "known from step 5 on" in tiny.ask("when", output, 3)
    reseal(checkpoint, history=[])
    refused("made it, without a history", "rows", output)


def test_a_run_of_a_stranger_executes_nothing_and_is_one_line(tiny, killed, tmp_path):
    """Its settings would kill what trains again; its files are not what a run writes."""

    def change(**facts):
        run = shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run = shutil.copytree(killed, tmp_path / "run")
        for path in (run / "checkpoints").iterdir():
            manifest = json.loads((path / "manifest.json").read_text())
            parts = {name: manifest[name] | new for name, new in facts.items() if name != "entry"}
            (entry,) = manifest["history"]
            reseal(path, **parts, history=[entry | facts.get("entry", {})])
        return run

    def refused(said, *words):
        printed = tiny.ask(*words, code=2)
        assert said in printed and printed.count("\n") == 1 and printed[:-1].isprintable()

    given = json.loads((killed / "checkpoints" / "step-00000008" / "manifest.json").read_text())
    task = given["config"]["task"] | {"signal_at": 3}
    output = change(config={"task": task, "tracker": "wandb", "output_dir": str(killed)})
    tiny.check_asked(output, 7)
    dotted = change(config={"task": {}, **{f"task.{name}": task[name] for name in task}})
    tiny.check_asked(dotted, 7)
    replay = ("replay", output, "--step", 7)
    change(entry={"prepared": "../../evil"})
    refused("prepared: String should match", *replay)
    refused("prepared: String should match", "rows", output)
    change(entry={"global_batch_size": 10**12})
    refused("global_batch_size: Input should be less", "when", output, 3)
    change(hardware={"processes": -1})
    refused("processes: Input should be greater", *replay)
    files = {"pipe": {"bytes": -1, "sha256": ""}}  # who reads one waits for its writer
    for path in (change(files=files) / "checkpoints").iterdir():
        os.mkfifo(path / "pipe")
    refused("has no valid checkpoint", "receipt", output)
    change(hardware={"sharding": "\x1b[2J\n"})
    refused(r"was trained with \x1b[2J", *replay)
    change(config={"task": task, "\x1b[2J": 1})
    refused(r"there is no field \x1b[2J", "rows", output)
    assert "\x1b" not in tiny.ask("diff", killed, output)
    for text in ("", "- 1", "seed: 1\nseed: 2", "a: &a [1]\nb: *a", "!!python/name:os.system", "["):
        change()
        (output / "config.yaml").write_text(text)
        refused(f"{output}/config.yaml", "diff", killed, output)
    change()
    (output / "metrics.jsonl").write_text('{"step": 1, "loss": 1, "grad_norm": "\\u001b"}\n')
    refused("KeyError: 'batch_hash'", "rows", output)
    (output / "hardware.yaml").write_text("processes: 1")
    refused("hardware.yaml: environment: missing", "receipt", output)


def test_padding_is_no_text():
    part = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: str(ids.tolist())))
    ids, labels = np.array([5, 0, 7, 0, 0, 0]), np.array([-100, 0, 7, 0, -100, -100])
    assert Part.text(part, {"input_ids": ids, "labels": labels}) == "[5, 0, 7, 0]"
    assert Part.text(part, {"input_ids": ids, "labels": labels[:2]}) == str(ids.tolist())
    parts = {"input_ids": [[5], [7, 8]]}  # as of choices
    assert Part.text(part, parts) == "[5, 7, 8]"


def test_a_text_is_not_found_over_rows_that_are_not_cut(monkeypatch):
    table = datasets.Dataset.from_dict({"input_ids": [0, 1]})
    rows = SimpleNamespace(dataset=table, is_stream=False, sources=[])
    monkeypatch.setattr(Part, "text", lambda _, row: ("a cat", "sat")[row["input_ids"]])
    assert [*map(Part(rows, None).find, ("cat sat", "sat"))] == [[], [1]]
