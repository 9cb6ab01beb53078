"""state_hash.py on its own: the hash of a state however its tensors are cut, and the chain."""

import hashlib
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from conftest import before_calls
from samestep.state import state_hash

SHAPES = {"model.a": (5, 4), "model.b": (), "state.a.exp_avg": (5, 4), "model.c": (3, 2, 4)}
SHAPES |= {"model.d": (70, 30), "state.d.exp_avg": (7, 1100), "model.e": (3000,)}
SHAPES |= {"model.f": (31, 1024)}  # a row is a leaf: parts begin with a right half
DTYPES = {"model.b": torch.float64, "model.c": torch.bfloat16}


MANIFEST = {"step": 3, "samples": 24, "others": {"group.0": 1}}


def tensors():
    draw = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in SHAPES.items():
        found[name] = torch.randn(shape, generator=draw).to(DTYPES.get(name, torch.float32))
    return found | {"model.empty": torch.empty(0, 3), "registered.0.n": torch.ones(2)}


def write(folder, whole, cuts):
    """Files as `write_share` writes them; `cuts`: the dimension that is cut into three files."""
    folder.mkdir()
    for rank in range(3):
        parts, places = {}, {}
        for name, values in whole.items():
            if name in cuts:
                part = values.tensor_split(3, cuts[name])[rank].contiguous()
                before = sum(
                    each.shape[cuts[name]] for each in values.tensor_split(3, cuts[name])[:rank]
                )
                offsets = [before if i == cuts[name] else 0 for i in range(values.dim())]
            elif rank == len(name) % 3:
                part, offsets = values, [0] * values.dim()
            else:
                continue
            parts[name] = part
            places[name] = {"saved_offsets": offsets, "shape": [*values.shape], "dtype": "x"}
        metadata = {state_hash.PLACES: json.dumps(places)}
        save_file(parts, folder / f"rank-{rank:05}.safetensors", metadata)
    return [path.name for path in folder.iterdir()]


def hash_of(folder, files, shares=1):
    """As if `shares` processes had a part of the files each: they join what they know."""
    trees = {}
    for share in range(shares):
        own = state_hash.read_trees(folder, files[share::shares])
        for name, tree in own.items():
            trees[name] = trees[name].merge(tree) if name in trees else tree
    found = state_hash._close(trees, folder)
    return found, state_hash.state_of(found, MANIFEST)


def expected_hash(values, dtype):
    """RFC 6962's MTH over leaves of 2^k rows, of 4,096 bytes at most, or of one row."""
    content = values.reshape(-1).view(torch.uint8).numpy().tobytes()
    row = len(content) // max(len(values), 1) if values.dim() else len(content)
    size = row << max((4096 // max(row, 1)).bit_length() - 1, 0)

    def tree(leaves):
        if len(leaves) < 2:
            return hashlib.sha256(b"\0" + leaves[0] if leaves else b"").digest()
        half = 1 << (len(leaves) - 1).bit_length() - 1
        return hashlib.sha256(b"\1" + tree(leaves[:half]) + tree(leaves[half:])).digest()

    root = tree([content[i : i + size] for i in range(0, len(content), size or 1)])
    return hashlib.sha256(f"{dtype} {[*values.shape]} ".encode() + root).hexdigest()


@pytest.mark.parametrize(
    "cuts", [{}, {"model.a": 0, "state.a.exp_avg": 1, "model.c": 2, "model.d": 0, "model.f": 0}]
)
@pytest.mark.parametrize("shares", [1, 3])
def test_a_state_has_one_hash_however_it_is_cut(tmp_path, cuts, shares):
    whole = tensors()
    files = write(tmp_path / "run", whole, cuts)
    found, state = hash_of(tmp_path / "run", files, shares)
    assert found == state_hash.hash_tensors(tmp_path / "run", files)
    before, expected = {}, {}
    for name, values in whole.items():
        content = values.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = {"float32": "F32", "float64": "F64", "bfloat16": "BF16"}[str(values.dtype)[6:]]
        before[name] = [dtype, [*values.shape], hashlib.sha256(content).hexdigest()]
        expected[name] = [*before[name][:2], expected_hash(values, dtype)]
    assert found == expected
    entries = [[name, name.partition(".")[0], *expected[name]] for name in sorted(expected)]
    rest = {"others": {"group.0": 1}, "step": 3, "samples": 24}
    rest |= dict.fromkeys(("lanes", "trains", "added_groups"))
    text = json.dumps([entries, rest], sort_keys=True)
    assert state == hashlib.sha256(text.encode()).hexdigest()
    found = state_hash.hash_tensors(tmp_path / "run", files, version=1)
    assert found == before == state_hash.hash_tensors(tmp_path / "run", files, version=2)
    del before["registered.0.n"]  # the first version counted weights and moments alone
    text = json.dumps(dict(sorted(before.items())))
    first = state_hash.state_of(found, MANIFEST, version=1)
    assert first == hashlib.sha256(text.encode()).hexdigest()


def test_what_is_state_counts_and_numbers_that_may_differ_between_processes_do_not():
    scheduler = {"dict": [["last_epoch", 3], ["gamma", 0.5]]}
    others = {"registered.0": {"dict": [["calls", 3], ["name", "a"]]}, "registered.1": scheduler}
    others |= {"attribute.model.calls": 3, "attribute.model.rate": 0.5, "group.0": {"dict": []}}
    base = MANIFEST | {"others": others, "hashed_attributes": ["model.rate"]}
    state = state_hash.state_of({}, base)
    for name, value, counts in [
        ("attribute.model.calls", 4, False),
        ("attribute.model.rate", 0.6, True),
        ("registered.0", {"dict": [["calls", 4], ["name", "a"]]}, False),
        ("registered.0", {"dict": [["calls", 3], ["name", "b"]]}, True),
        ("registered.1", {"dict": [["last_epoch", 3], ["gamma", 0.6]]}, True),
        ("group.0", {"dict": [["lr", 0.1]]}, True),
    ]:
        changed = base | {"others": others | {name: value}}
        assert (state_hash.state_of({}, changed) != state) == counts, name
    for name, value in (("step", 4), ("samples", 25), ("trains", ["a"]), ("lanes", [1])):
        assert state_hash.state_of({}, base | {name: value}) != state


@pytest.mark.parametrize("first", [0, 4])
def test_parts_that_do_not_tile_their_tensor_are_refused(tmp_path, first):
    """A resumed run would keep its first values in the gap. The second ends past the tensor."""
    files = write(tmp_path / "run", tensors(), {"model.a": 0})
    path = tmp_path / "run" / "rank-00001.safetensors"
    with safe_open(path, "pt") as opened:
        parts = {name: opened.get_tensor(name) for name in opened.keys()}
        places = json.loads(opened.metadata()[state_hash.PLACES])
    places["model.a"]["saved_offsets"] = [first, 0]
    save_file(parts, path, {state_hash.PLACES: json.dumps(places)})
    with pytest.raises(ValueError, match="do not make whole tensors"):
        hash_of(tmp_path / "run", files)


WRONG = {
    "lost": "del share.parts[name], share.places[name]",
    "moved": "share.places[name]['saved_offsets'][0] += 1",
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_save_without_whole_tensors_ends_the_run(tiny, tmp_path, processes, wrong):
    """No process wrote the weight, or one wrote it elsewhere."""
    code = f"share, name = given[0], 'model.0.weight'\nif name in share.parts: {WRONG[wrong]}"
    before = before_calls("samestep.state.tensor_files.write_share", code)
    flags = ["--max_steps", 4, "--save_every", 2, "--output_dir", tmp_path / "run"]
    printed = tiny.train(processes, *flags, before=before, codes=[2])
    assert "/.step-00000002.partial do not make whole tensors\n" in printed
    assert "step 3/4" not in printed and [*tmp_path.glob("run/checkpoints/step-*")] == []


def test_each_value_shape_and_name_counts(tmp_path):
    states = set()
    for number in range(5):
        whole = tensors()
        if number == 1:
            whole["model.c"][2, 1, 3] += 1
        if number == 2:
            whole["model.a"] = whole["model.a"].view(4, 5)
        if number == 3:
            whole["model.d"] = whole.pop("model.c")
        if number == 4:
            whole["state.a.exp_avg"] = whole["state.a.exp_avg"].view(torch.int32)
        folder = tmp_path / str(number)
        states.add(hash_of(folder, write(folder, whole, {"model.a": 1}))[1])
    assert len(states) == 5


def test_the_chain_names_all_entries_before(tmp_path):
    entries, previous = [], ""
    for step, state in ((3, "a"), (6, "b"), (9, "c")):
        entries.append({"step": step, "state": state, "previous": previous})
        previous = state_hash.chain_hash(entries[-1])
    entries[0]["state"] = "d"
    assert state_hash.chain_hash(entries[0]) != entries[1]["previous"]
    assert len({each["previous"] for each in entries}) == 3
    assert state_hash.chain_hash({"step": 3, "state": "", "previous": ""}) == ""
    alone = SimpleNamespace()  # DeepSpeed's files have no hash, and nothing is asked
    assert state_hash.describe_state(tmp_path, None, alone, {}) == {"state": ""}
