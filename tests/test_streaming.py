"""Streams: the same samples on any number of processes, from wherever a run resumes."""

import itertools
import json
import pickle
import shutil
import types
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from conftest import bake, copy_until, lines, prepare_task, write_table
from same import check_same
from samestep.data import files
from samestep.step.loader import StepBatchSampler, make_loader
from samestep.step.plan import StepPlan
from samestep.step.samples import SampleDataset
from samestep.text import lanes, tokenizing
from test_invariance import SLOW
from test_tasks import chat

WORDS = "a tall old man sold red apples and then ran home to his small house by the sea".split()
SHARDS, STEP, LANES = 9, 24, 4
KIT = "causal_lm"
FIELDS = {"streaming": True, "lanes": LANES}


def texts_of(number):
    """The texts of a shard, of any number."""
    draw = np.random.default_rng(number)
    return [" ".join(draw.choice(WORDS, draw.integers(3, 60))) for _ in range(30 + 8 * number)]


def write_shards(folder, count, kind="jsonl", row=None, each=60):
    """Shards of texts, or of so many rows each, which `row` makes by their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        rows = [{"text": text} for text in texts_of(number)]
        if row:
            rows = [row(n) for n in range(each * number, each * number + each)]
        write_table(folder, rows, kind, f"part-{number}")
    return folder


class Numbers(lanes.ShardStream):
    """Samples that are numbers: shard s has 10 s + i for i below s + 3, three to a block."""

    def blocks(self, shard):
        first, size = 10 * int(shard), int(shard) + 3
        return (list(range(first + i, first + min(i + 3, size))) for i in range(0, size, 3))

    def samples(self, block):
        return block

    def digest(self):
        return " ".join(self.shards)


def numbers(first=0, last=None, count=LANES):
    stream = Numbers([str(n) for n in range(7)], count)
    stream.begin(5, 12, first, last)
    return stream


def last_of(found, position):
    """The last sample of each lane before a position, which begins a step."""
    share = 12 // LANES
    return [found[position - 12 + (lane + 1) * share - 1][0] for lane in range(LANES)]


def test_an_epoch_has_each_sample_once_and_another_order_next():
    stream = numbers(count=1)
    total = sum(n + 3 for n in range(7))
    epochs = [stream.__getitems__([*range(e * total, (e + 1) * total)]) for e in range(3)]
    rows = [[row for _, row in each] for each in epochs]
    assert sorted(rows[0]) == sorted(rows[1]) == sorted(rows[2]) and len({*rows[0]}) == total
    assert rows[0] != rows[1] != rows[2]
    ids = [i for each in epochs for i, _ in each]
    assert len({*ids}) == 3 * total
    assert [lanes.unpack_id(i)[0] for i in ids] == [e for e in range(3) for _ in range(total)]


def test_lanes_go_on_after_any_step():
    whole = numbers().__getitems__([*range(600)])
    for step in range(1, 50, 7):
        resumed = numbers(12 * step, last_of(whole, 12 * step))
        assert resumed.__getitems__([*range(12 * step, 600)]) == whole[12 * step :]


def test_any_part_of_a_step_is_read_alone():
    whole = numbers().__getitems__([*range(240)])
    for part in ([0, 5], [5, 12], [3, 4]):
        own = [p for p in range(240) if part[0] <= p % 12 < part[1]]
        assert numbers().__getitems__(own) == [whole[p] for p in own]
    again = numbers()
    again.__getitems__([100])
    assert again.__getitems__([7]) == [whole[7]]  # from the beginning


def test_lanes_that_do_not_fit():
    for count, step, said in (
        (8, 16, "task.lanes is 8, and 7 shards are to be trained on; give at most 7"),
        (5, 12, "task.lanes is 5, which does not divide global_batch_size, 12; give 4"),
    ):
        with pytest.raises(ValueError, match=said):
            Numbers([str(n) for n in range(7)], count).begin(0, step)


def test_an_id_that_is_too_large_is_refused():
    assert lanes.unpack_id(lanes.pack_id(3, 70_000, 9, 65_535)) == [3, 70_000, 9, 65_535]
    assert lanes.pack_id(511, 2**18 - 1, 2**20 - 1, 2**16 - 1) == 2**63 - 1
    with pytest.raises(ValueError, match="at most 65,536 for each place"):
        lanes.pack_id(0, 0, 0, 65_536)


# ---- Texts ---------------------------------------------------------------------------------------


@pytest.fixture
def prepared(prepare):
    """Prepares shards as the fixture `prepare` does rows."""
    return lambda data, **fields: prepare(data, **{**FIELDS, **fields})


TASK = types.SimpleNamespace(collate=torch.utils.data.default_collate, count=len)


def steps_of(stream, shares, workers, steps, first=0, last=None):
    """The ids of each step, whose micro-batches of 3 samples processes compute in these shares."""
    found = [[] for _ in range(steps)]
    for rank in range(len(shares)):
        rows = SampleDataset(stream, None, 5)
        stream.begin(5, STEP, first * STEP, last)
        plan = StepPlan(STEP, 3, shares, rank)
        sampler = StepBatchSampler(plan, first * STEP, (first + steps) * STEP)
        loader = make_loader(rows, sampler, TASK, workers, torch.device("cpu"))
        for number, (_, _, _, ids, *_) in enumerate(loader):
            found[number // len(plan.run())] += ids.tolist()
    return found


def test_samples_depend_on_nothing_but_the_data(prepared, tmp_path):
    """For two kinds of shards, processes, shares and workers; and resumed inside of a shard."""
    found = []
    kinds = {
        "parquet": [((8,), 0), ((5, 3), 0), ((4, 4), 2)],
        "jsonl.gz": [((3, 3, 2), 0), ((8,), 2)],
    }
    for kind, cuts in kinds.items():
        data = write_shards(tmp_path / kind, SHARDS, kind)
        _, _, (stream, validation) = prepared(data)
        assert len(validation) > 10
        for shares, workers in cuts:
            found.append(steps_of(stream, shares, workers, 20))
        whole = found[-1]
        share = STEP // LANES
        last = [whole[16][(lane + 1) * share - 1] for lane in range(LANES)]
        found.append(whole[:17] + steps_of(stream, (3, 3, 2), 0, 3, 17, last))
    assert all(each == found[0] for each in found)
    places = {tuple(lanes.unpack_id(i)[1:3]) for step in found[0] for i in step}
    assert len({shard for shard, _ in places}) >= LANES


def test_chats_go_on_inside_of_a_shard(prepared, tmp_path):
    fields, row = ROWS["chats"]
    data = write_shards(tmp_path / "rows", 6, row=row)
    _, _, (stream, _) = prepared(data, context_length=64, **fields)
    whole, share = steps_of(stream, (8,), 0, 9), STEP // LANES
    last = [whole[2][(lane + 1) * share - 1] for lane in range(LANES)]
    assert steps_of(stream, (4, 4), 0, 6, 3, last) == whole[3:]


def test_sequences_are_those_of_the_texts(prepared, tmp_path):
    data = write_shards(tmp_path / "data", 3)
    cfg, prepared_data, (stream, _) = prepared(data, lanes=1)
    tokenizer = tokenizing.load_tokenizer(prepared_data.folder)
    (shard, *_), held, _ = files.split_shards(cfg)
    assert len(held) == 1
    number = int(shard.name[5])
    blocks = [*stream.blocks(shard.path)]
    assert [text for block in blocks for text in block["text"]] == texts_of(number)
    rows = [row for block in blocks for row in stream.samples(block)]
    ids = np.concatenate([row["input_ids"] for row in rows])
    assert (ids == np.concatenate([row["labels"] for row in rows])).all()
    assert tokenizer.decode(ids[:200]).startswith(texts_of(number)[0] + "<|endoftext|>")


def messages(number):
    return chat(f"what is {number}", f"it is {number}, {'so ' * (number % 5)}")["messages"]


ROWS = {  # of each kind the fields of the task, and a row by its number
    "prompts": ({}, lambda n: {"prompt": f"add {n} ", "completion": f"{n + n} words"}),
    "messages": ({}, lambda n: {"prompt": messages(n)[:1], "completion": messages(n)[1:]}),
    "chats": ({"overlong": "truncate"}, lambda n: {"conversations": messages(n)}),
    "texts": ({"packing": "best_fit"}, lambda n: {"text": f"text {n} " * (n % 7 + 1)}),
}


def documents_of(row):
    """What a row holds, in a form that compares: of a packed one its documents."""
    if "position_ids" not in row:
        yield [(name, np.asarray(row[name]).tolist()) for name in sorted(row)]
        return
    begins = [*np.flatnonzero(row["position_ids"] == 0), len(row["position_ids"])]
    for first, last in itertools.pairwise(begins):
        if last - first > 1:  # padding has position 0
            yield [(name, row[name][first:last].tolist()) for name in ("input_ids", "labels")]


@pytest.mark.parametrize("kind", ROWS)
def test_a_stream_has_the_samples_of_prepared_rows(task, tmp_path, kind):
    fields, row = ROWS[kind]
    (tmp_path / "train").mkdir()
    write_shards(tmp_path / "all", 4, row=row)
    fields = fields | {"vocab_size": 300, "cache_dir": str(tmp_path / "cache")}
    fields |= {"context_length": 64}
    streamed = task.TaskConfig(data=str(tmp_path / "all"), streaming=True, lanes=1, **fields)
    train, held, _ = files.split_shards(streamed)
    for shard in train:
        shutil.copy(shard.path, tmp_path / "train")
    given = {"data": str(tmp_path / "train"), "validation_data": held[0].path}
    found = []
    for cfg in (streamed, task.TaskConfig(**given, **fields)):
        data = prepare_task(task, cfg)
        rows, validation = task.views(cfg, data)
        if cfg.streaming:
            rows = pickle.loads(pickle.dumps(rows))  # as a spawned worker gets it
            blocks = [block for shard in rows.shards for block in rows.blocks(shard)]
            rows = [sample for block in blocks for sample in rows.samples(block)]
        for view in (rows, validation):
            found.append(sorted(d for i in range(len(view)) for d in documents_of(view[i])))
    assert found[0] == found[2] and found[1] == found[3]
    assert len(found[0]) >= 180 and len(found[1]) >= 60


def test_a_store(prepared, tmp_path):
    data = write_shards(tmp_path / "data", 4, "parquet")
    fsspec.filesystem("memory").put(str(data), "/texts", recursive=True)
    found = []
    for place in (data, "memory://texts"):
        stream, _ = prepared(place, lanes=2)[2]
        stream.begin(1, 4)
        samples = stream.__getitems__([*range(40)])
        found.append([(i, row["input_ids"].tolist()) for i, row in samples])
    assert found[0] == found[1]


def test_shards_are_known_by_their_names(task, tmp_path):
    """Those for validation are evaluated on, or one; those for a test are never read."""
    for names, wanted in [
        ("train-0 train-1 validation-0 test-0", [["train-0", "train-1"], ["validation-0"]]),
        ("a b test-0", [["a"], ["b"]]),
    ]:
        folder = tmp_path / str(len(names))
        folder.mkdir()
        for name in names.split():
            write_table(folder, [{"text": "x"}], name=name)
        cfg = task.TaskConfig(data=str(folder), streaming=True, validation_fraction=0.01)
        train, held, _ = files.split_shards(cfg)
        found = [[each.name.removesuffix(".jsonl") for each in part] for part in (train, held)]
        assert sorted(found) == wanted


def test_a_long_text_is_several(prepared, tmp_path):
    """A block has so few sequences that their numbers fit."""
    (tmp_path / "data").mkdir()
    for name, number in (("a", 9), ("b", 250_000), ("c", 9)):
        text = json.dumps({"text": "a tall man " * number}) + "\n"
        (tmp_path / "data" / f"{name}.jsonl").write_text(text)
    fields = {"lanes": 1, "validation_data": str(tmp_path / "data" / "a.jsonl")}
    _, _, (stream, _) = prepared(tmp_path / "data" / "b.jsonl", **fields)
    blocks = [*stream.blocks(stream.shards[0])]
    assert [len(block["text"]) for block in blocks] == [1, 1, 1]
    assert "".join(text for block in blocks for text in block["text"]) == "a tall man " * 250_000


# ---- Runs ----------------------------------------------------------------------------------------

SMALL = ["--task.streaming", "true", "--task.lanes", LANES]
SMALL += ["--task.vocab_size", 300, "--task.hidden_size", 16, "--task.num_heads", 2]
SMALL += ["--task.num_layers", 1, "--max_steps", 9, "--log_every", 1, "--eval_every", 0]
SMALL += ["--save_every", 3, "--global_batch_size", 24, "--micro_batch_size", 6, "--exact", "true"]
SMALL += ["--warmup_steps", 2, "--keep_checkpoints", 0, "--check_export", "false"]
FLAGS = [*SMALL, "--task.context_length", 16]
SAVED = "checkpoints/step-00000014/manifest.json"


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """A project with shards, and an uninterrupted run of one process."""
    project = bake(
        tmp_path_factory.mktemp("streams"), task="causal_lm", pictures=False, tracker="none"
    )
    write_shards(project.path / "texts", SHARDS, "parquet")
    project.train(1, *FLAGS, "--task.data", "texts", "--output_dir", "runs/whole")
    return project


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_resumes_inside_of_a_shard(streamed, tmp_path, processes):
    """With exact the same bytes, also on another number of processes."""
    whole = streamed.path / "runs" / "whole"
    output = copy_until(whole, 3, tmp_path / "run")
    flags = [*FLAGS, "--task.data", "texts", "--output_dir", output, "--num_workers", 1]
    streamed.train(processes, *flags)
    check_same(whole, output)
    assert len(lines(output, "loss")) == 6 and "epoch" not in lines(output, "loss")[0]
    if processes == 1:
        row = streamed.ask("rows", output, "--step", 5).splitlines()[1]
        told = streamed.ask("when", whole, row.split()[0])
        assert "a stream: reads the samples until step 9 again" in told
        assert "\n  1 time until step 9: 5\n" in told
    streamed.check_asked(output, 5)


@pytest.mark.slow
def test_measured_shares_read_each_lane_from_where_it_stood(streamed, tmp_path):
    flags = [*FLAGS, "--task.data", "texts", "--micro_batch_size", 1, "--max_steps", 16]
    flags += ["--save_every", 14, "--num_workers", 1, "--output_dir"]
    one, two = tmp_path / "one", tmp_path / "two"
    streamed.train(1, *flags, one)
    streamed.train(2, *flags, two, "--device_shares", "auto", before=SLOW)
    assert lines(two, "shares")
    check_same(one, two)
    found, wanted = (json.loads((run / SAVED).read_text())["lanes"] for run in (two, one))
    assert found == wanted


def test_an_empty_shard_of_chats_is_passed_over_or_named(prepared, tmp_path, capsys):
    _, row = ROWS["chats"]
    data = write_shards(tmp_path / "all", 4, row=row, each=30)
    (data / "part-2.jsonl").write_text("")
    (data / "README.md").write_text("About these rows.")
    fields = {"lanes": 1, "context_length": 64}
    fields["validation_data"] = str(write_table(tmp_path, [row(n) for n in range(30)], name="held"))
    stream, _ = prepared(data, **fields)[2]
    said = "4 shards to train on, 1 to evaluate on, 1 not read (the first: README.md)"
    assert said in capsys.readouterr().out
    found = [sum(map(len, map(stream.samples, stream.blocks(each)))) for each in stream.shards]
    assert sorted(found)[0] == 0 < 5 < sorted(found)[1] and len(found) == 4
    fields["validation_data"] = str(data / "part-2.jsonl")
    with pytest.raises(ValueError, match="validation_data: there are no rows in .*part-2.jsonl"):
        prepared(data, **fields)


def test_a_row_that_cannot_be_used_ends_the_run_where_it_is_met(prepared, tmp_path, capsys):
    """With its place; or it is left out, as of prepared rows."""
    _, row = ROWS["chats"]
    data = write_shards(tmp_path / "data", 3, row=row)
    fields = {"lanes": 1, "context_length": 64, "rows": "chat"}
    _, _, (stream, _) = prepared(data, **fields)
    path = Path(stream.shards[0])
    content = path.read_text() + "\n"
    for wrong, said in (
        ('{"conversations": [', "jsonl: line 61, character 21: Expecting value"),
        ('{"conversations": []}', "line 61: there are no messages; --task.incomplete_rows skip"),
    ):
        path.write_text(f"{content}{wrong}\n")
        with pytest.raises(ValueError, match=f"task.data: .*part-.*{said}"):
            [*stream.blocks(str(path))]
    _, _, (stream, _) = prepared(data, incomplete_rows="skip", **fields)
    capsys.readouterr()
    assert sum(len(block["chat"]) for block in stream.blocks(str(path))) == 60
    assert capsys.readouterr().out == ""  # each process that reads the shard would print it


def test_what_does_not_go_with_a_stream(streamed, tmp_path):
    for more, said in (
        (["--eval_every", "epoch"], "a stream has no end that is known: give max_steps"),
        (["--task.cache_dir", "texts/cache"], "lies in task.data: give another"),
        (["--exact", "false", "--micro_batch_size", "auto"], "be combined with a stream"),
    ):
        flags = [*FLAGS, "--task.data", "texts", *more, "--output_dir", tmp_path / "x"]
        assert said in streamed.train(1, *flags, "--check", codes=[2])


def test_other_shards_are_another_run(streamed, tmp_path):
    shutil.copytree(streamed.path / "runs" / "whole", tmp_path / "run")
    shutil.copytree(streamed.path / "texts", tmp_path / "texts")
    path = next((tmp_path / "texts").glob("*-3*"))
    table = pyarrow.parquet.read_table(path).slice(1)
    pyarrow.parquet.write_table(table, path, row_group_size=64)
    flags = [*FLAGS, "--max_steps", 12, "--output_dir", tmp_path / "run"]
    flags += ["--task.data", tmp_path / "texts", "--check"]
    assert "data fingerprint: " in streamed.train(1, *flags, codes=[2])
