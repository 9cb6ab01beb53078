"""Plain texts read from shards: their tokens are those of the texts by hand, a shard is tokenised
once, and the promises of prepared data hold.
"""

import functools
import pickle
import random
import shutil
from multiprocessing.pool import ThreadPool

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from conftest import digest, lines, load_task, trained, wait_until
from samestep.streaming import shards, token_streams
from samestep.text import corpus, units

lm = load_task("causal_lm")
WORDS = "the quick brown fox jumps over a lazy dog and runs far away".split()
SMALL = {"context_length": 16, "vocab_size": 300, "hidden_size": 16, "num_layers": 1}
SMALL |= {"num_heads": 2, "streaming": True, "shuffle_window": 2}


def make_texts(shards=6, number=40):
    """Texts of some words for each shard; a shard has longer ones than the one before."""
    draw = random.Random(0)
    return [
        [" ".join(draw.choices(WORDS, k=draw.randint(1, 10 + 5 * shard))) for _ in range(number)]
        for shard in range(shards)
    ]


TEXTS = make_texts()


def write(folder, texts=TEXTS):
    """Shards of such texts."""
    folder.mkdir(parents=True)
    for number, part in enumerate(texts):
        columns = {"text": part or pyarrow.array([], "string"), "n": range(len(part))}
        parquet.write_table(pyarrow.table(columns), folder / f"{number:03}.parquet")
    return folder


@pytest.fixture
def config(tmp_path):
    def make(data, **fields):
        fields = {**SMALL, "cache_dir": str(tmp_path / "cache"), **fields}
        return lm.TaskConfig(data=str(data), **fields)

    return make


def by_hand(texts, tokenizer):
    """A stream of these texts: one token both ends a text and begins the next."""
    end = [tokenizer.eos_token_id]
    ids = [tokenizer(text, add_special_tokens=False).input_ids + end for text in texts]
    return sum(ids, end)


def numbers(row):
    return row["input_ids"].tolist(), row["labels"].tolist()


@pytest.mark.parametrize("scheme", ["file://", ""])
def test_rows_are_those_of_the_texts_by_hand(config, tmp_path, scheme):
    """Of shards with more rows than estimated and with fewer; the last one is padded."""
    cfg = config(f"{scheme}{write(tmp_path / 'rows')}")
    prepared = lm.prepare_data(cfg)
    train, validation = lm.views(cfg, prepared)
    tokenizer, length = corpus.load_tokenizer(cfg, prepared), cfg.context_length
    kept = {shard.name: [] for shard in train.shards}
    more = 0
    for i in range(len(train)):
        kept[train.shards[train.locate(i)[0]].name].append(numbers(train[i]))
    for name, rows in kept.items():
        tokens = by_hand(TEXTS[int(name[:3])], tokenizer)
        found = -(-(len(tokens) - 1) // length)
        more += np.sign(found - len(rows))
        padded = tokens + [0] * length
        labels = tokens + [-100] * length
        for i, row in enumerate(rows):
            start = i * found // len(rows) * length
            inputs = [*padded[start : min(start + length, len(tokens) - 1)]]
            inputs += [0] * (length - len(inputs))
            assert row == (inputs, labels[start + 1 : start + length + 1])
    assert abs(more) < len(kept)
    held = min({f"{i:03}.parquet" for i in range(6)} - kept.keys())
    tokens = by_hand(TEXTS[int(held[:3])], tokenizer)
    assert numbers(validation[1]) == (tokens[16:32], tokens[17:33])
    assert validation[1]["bytes"] == len(tokenizer.decode(tokens[17:33], skip_special_tokens=True))
    again = pickle.loads(pickle.dumps(train))
    assert [*map(numbers, again.__getitems__([5, 0]))] == [numbers(train[5]), numbers(train[0])]


@pytest.mark.parametrize("begin", [[], [7]])
def test_tokens_are_those_of_prepared_texts(config, tmp_path, monkeypatch, begin):
    """Of a tokenizer with and without a begin-of-text token; a text that spells one stays text."""
    cfg = config(write(tmp_path / "rows"))
    prepared = lm.prepare_data(cfg)
    monkeypatch.setattr(corpus.tokenizing, "begin_tokens", lambda tokenizer: begin)
    texts = [f"{corpus.END_OF_TEXT} {text}" for part in TEXTS for text in part]
    encoder = token_streams.make_encoder(cfg, prepared)
    tokenizer = corpus.load_tokenizer(cfg, prepared)
    maker = corpus.RowMaker(tokenizer, "text", 16, 16, "split", False, "<u2")
    rows = [({"text": text}, "") for text in texts]
    wanted = [ids for ids, _ in maker.tokenize(units.Batch(rows, [], False, 0))]
    wanted = np.concatenate([*[maker.start] * maker.shares_ends, *wanted])
    monkeypatch.setattr(token_streams, "BATCH", 100)
    found = np.concatenate([*token_streams.tokenize(texts, encoder)])
    assert maker.shares_ends == (not begin) and found.tolist() == wanted.tolist()


def test_places_are_one_identity_and_lengths_share_tokens(config, tmp_path):
    data, files = write(tmp_path / "a"), tmp_path / "cache" / "shards"
    first = lm.cache.content_digest(lm.prepare_data(config(data)))
    assert lm.cache.content_digest(lm.prepare_data(config(f"file://{data}"))) == first
    other = config(data, context_length=32)
    prepared = lm.prepare_data(other)
    assert lm.cache.content_digest(prepared) != first
    cfg = config(data)
    for each in (cfg, other):
        train, _ = lm.datasets(each, lm.prepare_data(each))
        train.__getitems__(range(len(train)))
    assert len([*files.glob("*.tokens")]) == len(train.shards)


def test_a_shard_is_tokenised_once_and_copies_stay_bounded(config, tmp_path, monkeypatch):
    texts = [[" ".join(WORDS) + f" {number} {i}" for i in range(200)] for number in range(9)]
    data, files = write(tmp_path / "rows", texts), tmp_path / "cache" / "shards"
    cfg, made, tokenize = config(data, shuffle_window=1), [], token_streams.tokenize
    prepared = lm.prepare_data(cfg)

    def count(*arguments):
        made.append(arguments)
        return tokenize(*arguments)

    monkeypatch.setattr(token_streams, "tokenize", count)
    readers = [lm.views(cfg, prepared)[0] for _ in range(3)]
    with ThreadPool(3) as pool:
        found = pool.map(lambda each: [numbers(each.read(i)) for i in range(len(each))], readers)
    assert found[0] == found[1] == found[2] and len(made) == len(readers[0].shards) == 7
    assert not [*files.glob("*.parquet")]
    sizes = [file.stat().st_size for file in files.glob("*.tokens")]
    cfg.shard_cache_gb = 3.5 * max(max(sizes), *readers[0].cache.texts.bytes) / 1e9
    for file in files.glob("*.tokens"):
        file.unlink()
    train, _ = lm.views(cfg, prepared)
    for i in range(0, len(train), 20):
        train.read(i)
        used = [file.stat().st_size for file in files.iterdir()]
        assert max(sizes) <= sum(used) <= 1e9 * cfg.shard_cache_gb
    assert len(made) == 14


def test_a_store_that_fails_within_a_shard_is_read_on(tmp_path, monkeypatch):
    """No row is lost, and none comes twice."""
    shard, *_ = shards.list_shards(str(write(tmp_path / "rows")), "data")
    failures = [30, 30, 0, 5]

    def read_some(table, *_):
        stop = failures.pop() if failures else -1
        for number, batch in enumerate(table.iter_batches(1, columns=["text"])):
            if number == stop:
                raise OSError("reset")
            yield batch

    monkeypatch.setattr(shards, "batches", read_some)
    monkeypatch.setattr(shards, "WAITS", (0, 0))
    rows = [read()["text"] for read in shards.rows_of(shard, str(tmp_path), {"text": "text"})]
    assert rows == TEXTS[0] and not failures
    failures += [7, 7, 7]
    with pytest.raises(ConnectionError, match="000.parquet: the store failed 3 times, .*reset"):
        [*shards.rows_of(shard, str(tmp_path), {"text": "text"})]


def reads(**fields):
    return lambda folder: (write(folder), fields)


def texts_of(*parts, **fields):
    return lambda folder: (write(folder, [[*part] for part in parts]), fields)


def changed(folder):
    """Shards, and what changes one after the index was made."""
    write(folder)
    return folder, {"then": lambda: shutil.copy(folder / "001.parquet", folder / "002.parquet")}


def half(folder):
    """A shard without its end."""
    path = write(folder) / "003.parquet"
    path.write_bytes(path.read_bytes()[:500])
    return folder, {}


ROWS = ["some words " * 20] * 5


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (reads(rows="prompt"), "rows is 'prompt' but must be text while task.streaming is true"),
        (reads(packing="best_fit"), "packing is 'best_fit' but must be stream while task.stre"),
        (reads(file_extensions=".md"), "task.file_extensions .*while task.streaming is true"),
        (reads(prompt_column="question"), "task.prompt_column .* where task.rows is text"),
        (reads(data="a:2,b:1"), "but must be one folder or URL of shards"),
        (reads(data="manual"), "manual is not a folder or URL of shards"),
        (reads(context_length=5000), "task.context_length: a shard of .* has about [0-9,]+ tokens"),
        (texts_of(ROWS, ROWS, text_column="body"), "no column body among text, n"),
        (texts_of(ROWS, [*ROWS, " "], ROWS), "row 5: the text is empty; --task.incomplete_r"),
        (texts_of(ROWS, [b"\xff"] * 5, ROWS), "row 0: the text is b'.xff' but must be text"),
        (changed, "002.parquet: it has changed since the start; start again"),
        (half, "task.data: cannot read .*003.parquet: .*magic bytes"),
        (texts_of(ROWS, [], []), "has rows in one shard alone"),
        (texts_of([], []), "task.data: no rows in"),
    ],
)
def test_what_cannot_be_streamed_is_one_line(config, tmp_path, make, problem):
    data, fields = make(tmp_path / "rows")
    then = fields.pop("then", lambda: None)
    cfg = config(**{"data": data, **fields})
    with pytest.raises(ValueError, match=problem) as error:
        prepared = lm.prepare_data(cfg)
        then()
        train, _ = lm.views(cfg, prepared)
        train.__getitems__(range(len(train)))
    assert "\n" not in str(error.value)


FLAGS = "--task.streaming true --task.shuffle_window 2 --task.context_length 16 --log_every 1"
FLAGS += " --task.hidden_size 16 --task.num_layers 1 --task.num_heads 2 --task.vocab_size 300"
FLAGS += " --global_batch_size 8 --warmup_steps 2 --max_steps 12 --save_every 4"
FLAGS += " --keep_checkpoints 0"


def losses(output):
    return [(line["step"], line["loss"], line["batch_hash"]) for line in lines(output, "loss")]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return write(tmp_path_factory.mktemp("shelf") / "rows", make_texts(8, 20))


@pytest.mark.slow
def test_processes_and_micro_batches_change_nothing(project, tmp_path, shelf):
    flags, found = [*FLAGS.split(), "--task.data", shelf], []
    flags += ["--task.cache_dir", tmp_path / "cache"]
    for processes, size in ((1, 8), (2, 2)):
        output = tmp_path / f"run-{processes}"
        project.train(processes, *flags, "--micro_batch_size", size, "--output_dir", output)
        found.append((losses(output), lines(output, "eval_loss")[0]))
    (one, scores), (two, others) = found
    assert [each[::2] for each in one] == [each[::2] for each in two] and len(one) == 12
    assert [each[1] for each in one] == pytest.approx([each[1] for each in two], rel=1e-5)
    assert scores["eval_loss"] == pytest.approx(others["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(project, tmp_path, shelf):
    flags = [*FLAGS.split(), "--task.data", shelf, "--task.cache_dir", tmp_path / "cache"]
    flags += ["--micro_batch_size", 2, "--num_workers", 1]
    whole, output = tmp_path / "whole", tmp_path / "killed"
    project.train(2, *flags, "--output_dir", whole)
    runs = project.start(2, *flags, "--output_dir", output)
    wait_until(functools.partial(trained, output, 6), runs[0])
    for run in runs:
        run.kill()
        run.wait()
    project.train(2, *flags, "--output_dir", output)
    last = "checkpoints/step-00000012"
    assert digest(whole / last) == digest(output / last)
    assert losses(whole)[-1] == losses(output)[-1]
