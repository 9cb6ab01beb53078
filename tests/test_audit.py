"""diff, receipt and audit: what two runs differ in, and whether a run is the one of a receipt."""

import dataclasses
import json
import shutil

import pytest

from conftest import ROOT, BakedProject, edit, lines, make_tiny, reseal
from samestep.ask import receipt
from samestep.ask.start_again import is_received
from samestep.data.sources import DataConfig
from samestep.models.pretrained import ModelConfig
from samestep.settings.config import fields_of
from samestep.settings.run_config import RunConfig
from samestep.state import state_hash

EXACT = ("--exact", "true", "--task.dropout", "0.1")
ROWS = """
def files(cfg):
    return ["rows.txt"]


def prepare_data(cfg, folder):
    from datasets import Dataset, DatasetDict

    rows = []
    for seed in map(int, Path("rows.txt").read_text().split()):
        row = {**Numbers(cfg, seed, 1, 0.0)[0], "seed": seed}
        rows.append({name: torch.as_tensor(value).tolist() for name, value in row.items()})
    return DatasetDict(train=Dataset.from_list(rows[:37]), test=Dataset.from_list(rows[37:]))


def views(cfg, data):
    return data["train"].with_format("torch"), data["test"].with_format("torch")
"""
CACHE = """    cache_dir: str = field(default=".cache/data", metadata={"changes": "nothing"})
    samples: int = 37"""
OPTIMIZER = ("train.py", "fused=True)", "fused=True, eps=1e-3)")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose rows lie in a file, with runs/one: exact, with dropout, on one process."""
    project = make_tiny(tmp_path_factory.mktemp("audit"))
    (project.path / "rows.txt").write_text("\n".join(map(str, range(48))))
    edit(project.path / "task.py", "    samples: int = 37", CACHE)
    with open(project.path / "task.py", "a") as file:
        file.write(ROWS)
    project.train(1, *EXACT, "--output_dir", "runs/one")
    assert "states of steps 4 to 12, exact" in project.ask("receipt", "runs/one")
    return project


@pytest.fixture
def clone(project, tmp_path):
    """The project without its runs, but for the receipt."""
    ignored = shutil.ignore_patterns("runs", ".cache")
    copied = BakedProject(shutil.copytree(project.path, tmp_path / "clone", ignore=ignored))
    shutil.copy(project.path / "runs" / "one" / "receipt.json", copied.path)
    return copied


def refused(project, *words):
    return project.ask("audit", "receipt.json", *words, code=2)


def test_a_receipt_has_the_chain_of_all_saves_and_nothing_of_this_machine(project, tmp_path):
    hidden = ("--task.prepare_host", "/home/somebody")
    hidden += ("--keep_checkpoints", "1", "--eval_every", "0")
    project.train(1, *EXACT, *hidden, "--output_dir", tmp_path / "run")
    project.ask("receipt", str(tmp_path / "run"))
    found = receipt.read(tmp_path / "run" / "receipt.json")
    logged = {line["step"]: line["state"] for line in lines(tmp_path / "run", "state")}
    assert {save["step"]: save["state"] for save in found["saves"]} == logged
    assert [*logged] == [4, 8, 12]
    assert [save["step"] for save in found["saves"] if "weights" in save] == [12]  # 4, 8 are gone
    newest = tmp_path / "run" / "checkpoints" / "step-00000012" / "manifest.json"
    assert found["chain"] == state_hash.chain_hash(json.loads(newest.read_text()))
    assert "prepare_host" not in found["config"]["task"] and found["config"]["seed"] == 0
    text = (tmp_path / "run" / "receipt.json").read_text()
    assert "/home" not in text and str(tmp_path) not in text and len(text) < 12_000


PUBLIC = [("data", "hf://datasets/a/b"), ("data", "rows/a.jsonl"), ("max_tokens", 3), ("lr", 1e-3)]
SECRET = [("task.api_key", "x"), ("task.hub_token", "x"), ("data", ["a", "~/b"])]
SECRET += [("data", {"a": "/b"}), ("data", "file:///a"), ("data", "https://me:pw@host/a")]
SECRET += [("note", "hf_" + 20 * "a")]


def test_paths_and_secrets_are_not_public():
    assert [each for each in PUBLIC + SECRET if receipt.is_public(*each)] == PUBLIC


def test_a_receipt_is_of_the_run_since_its_last_change(project, tmp_path):
    output = ("--output_dir", tmp_path / "run")
    project.train(1, *EXACT, *output, "--max_steps", "8")
    project.train(1, *EXACT, *output, "--accept_changes", "true", "--learning_rate", "0.02")
    project.ask("receipt", str(tmp_path / "run"))
    found = receipt.read(tmp_path / "run" / "receipt.json")
    assert [save["step"] for save in found["saves"]] == [8, 12]
    manifest = tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json"
    assert found["previous"] == state_hash.chain_hash(json.loads(manifest.read_text()))
    printed = project.ask("audit", tmp_path / "run" / "receipt.json", "--steps", "0:12", code=2)
    assert "--steps 0:12: give A:B of the steps 8, 12" in printed


def test_a_state_without_a_hash_has_no_receipt(project, tmp_path):
    run = shutil.copytree(project.path / "runs" / "one", tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    for path in (run / "checkpoints").iterdir():
        reseal(path, state="", previous="", hardware={"sharding": "ZeRO-2"})
    assert "support DDP and FSDP2, not ZeRO-2" in project.ask("receipt", str(run), code=2)
    shutil.rmtree(run / "checkpoints")
    assert "has no valid checkpoint" in project.ask("receipt", str(run), code=2)


def test_a_clone_audits_from_the_beginning_on_two_processes_and_from_a_checkpoint(project, clone):
    printed = clone.ask("audit", "receipt.json", "--steps", "0:8", "--processes", "2")
    assert "differs, and may: processes: 1 -> 2" in printed
    states = [save["state"][:16] for save in receipt.read(clone.path / "receipt.json")["saves"]]
    assert f"step      4: equal {states[0]}" in printed and f"8: equal {states[1]}" in printed
    assert "=> the same run, to the bit" in printed
    run = str(project.path / "runs" / "one")
    printed = clone.ask("audit", "receipt.json", "--steps", "8:12", "--run", run)
    assert f"step     12: equal {states[2]}" in printed and "step      8" not in printed
    assert not (clone.path / "runs").exists()


def test_an_edited_optimizer_is_refused_and_anyway_names_the_first_weight(clone):
    edit(clone.path / OPTIMIZER[0], *OPTIMIZER[1:])
    assert "made of: code of train.build_optimizer; --anyway" in refused(clone)
    printed = clone.ask("audit", "receipt.json", "--anyway", code=1)
    assert "differs, and must not: code of train.build_optimizer" in printed
    assert "step      4: NOT EQUAL" in printed and "step      8" not in printed
    assert "differs: 4 of 4 weights, first 0.bias" in printed
    assert "=> NOT the run of the receipt" in printed


def test_other_data_and_what_is_no_receipt_are_refused(project, clone):
    numbers = (clone.path / "rows.txt").read_text().split()
    (clone.path / "rows.txt").write_text("\n".join(["999", *numbers[1:]]))
    assert "made of: other data (fingerprint); --anyway tries it" in refused(clone)
    assert "to resume after step 4 give --run" in refused(clone, "--steps", "4:8")
    for steps in ("0:9", "8:4", "a"):
        said = f"--steps {steps}: give A:B of the steps 0, 4, 8, 12"
        assert said in refused(clone, "--steps", steps)
    other = str(project.path / "runs")
    assert "is no folder of a run" in refused(clone, "--steps", "4:8", "--run", other)
    file = clone.path / "receipt.json"
    text, state = file.read_text(), receipt.read(file)["saves"][0]["state"]
    changed = state.replace(state[0], "0" if state[0] != "0" else "1", 1)
    for old, new in ((state, changed), ('"learning_rate": 0.01', '"learning_rate": 0.02')):
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
        assert "receipt.json was changed: its digest is another" in refused(clone)
    file.write_text("[]")
    assert "receipt.json is no receipt" in refused(clone)


def test_a_version_and_processes_of_a_run_that_is_not_exact_are_refused(project, clone):
    project.train(1, "--output_dir", "runs/two", env={"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert "not exact: audit it on 1 process, as here" in project.ask("receipt", "runs/two")
    file = clone.path / "receipt.json"
    shutil.copy(project.path / "runs" / "two" / "receipt.json", file)
    assert "made of: processes: 1 -> 2; --anyway tries it" in refused(clone, "--processes", "2")
    found = receipt.read(file)
    before = found["hardware"]["torch"]
    found["hardware"] |= {"torch": "1.0", "datasets": "1.0"}
    file.write_text(json.dumps(found | {"sha256": receipt.digest_of(found)}))
    assert f"made of: torch: 1.0 -> {before}; --anyway" in refused(clone)


def forge(file, keys, value):
    """Writes a receipt with this value at a place, and the chain and the digest of what it holds
    then; a place that does not fit has those of before."""
    found = json.loads(file.read_text())
    place = found
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    previous = found["previous"]
    for save in found["saves"]:
        previous = state_hash.chain_hash({**save, "previous": previous})
    found["chain"] = previous
    del found["sha256"]
    file.write_text(json.dumps(found | {"sha256": receipt.digest_of(found)}))


DATA = "data data_config data_split data_revision validation_data validation_split group_column"
DATA += " validation_fraction validation_rows incomplete_rows"
RECEIVED = {  # of the fields of a recipe those that a receipt may give
    RunConfig: "device_shares find_unused_parameters tf32 deterministic",
    DataConfig: DATA,
    ModelConfig: "model_name_or_path revision attn_implementation",
}
ESCAPE = "\x1b]0;title\x07\n=> the same run, to the bit"
DYNAMO = "ACCELERATE_DYNAMO_BACKEND"
FORGED = [  # a place in a receipt, what stands there, and what is said of it
    (["saves", 0, "state"], "ab" * 31, "state: String should match"),
    (["saves", 0, "step"], 8, "what it says of step 8 is none of a run"),
    (["saves", 1, "step"], 3, "what it says of step 3 is none of a run"),
    (["saves", 0, "step"], -4, "step: Input should be greater"),
    (["saves", 0, "weights"], 3, "TypeError"),
    (["previous"], "11" * 32, "--steps 0:4: give A:B of the steps 4, 8, 12"),
    (["receipt"], 2, "receipt: Input should be 1"),
    (["optimizer"], {}, "optimizer: Input should be a valid list"),
    (["code", "train.py", f"train.{ESCAPE}"], "0", r"code of train.\x1b]0;title\x07"),
    (["hardware", "processes"], 0, "processes: Input should be greater"),
    (["hardware", "processes"], 10**5, "trained on 100000 processes; give --processes"),
    (["hardware", "precision"], ESCAPE, r"a precision of \x1b]0;title\x07 => the same run"),
    (["environment", DYNAMO], f"../{ESCAPE}", rf"{DYNAMO} is ../\x1b]0;title\x07"),
    (["config", "micro_batch_size"], -4, "micro_batch_size: Input should be greater"),
    (["config", "learning_rate"], 1e999, "is no receipt"),
    (["config", "task", "samples"], [[]], "task.samples: Input should be a valid integer"),
    (["config", "config"], "/etc/passwd", "there is no field config"),
    (["config", "task.samples"], 5, "task.samples is given twice"),
    (["config", ESCAPE], 1, r"there is no field \x1b]0;title\x07"),
]
DAMAGED = [  # a text in a receipt, another in its place, and what is said of it
    ('"chain": "', '"chain": "0', "chain: String should match"),
    ('"begins"', '"names": [], "begins"', "is no receipt"),  # twice
    ('"learning_rate": 0.01', '"learning_rate": NaN', "is no receipt"),
    ('"learning_rate": 0.01', f'"learning_rate": {"9" * 5000}', "is no receipt"),
    ('"learning_rate": 0.01', f'"learning_rate": {"[" * 50_000}', "is no receipt"),
    ('"saves"', '"save"', "saves: missing"),
    ('"names"', '"\udcff"', "is no receipt"),  # no UTF-8
]


# Audits the receipts 0.json, 1.json, ... one after the other.
EACH = """
from samestep.__main__ import main
for number in range(int(sys.argv.pop())):
    sys.argv = ["samestep", "audit", f"{number}.json", "--steps", "0:4"]
    try:
        print("code", main())
    except SystemExit as end:
        print("code", end.code)
sys.exit()
"""


def test_a_forged_receipt_is_one_line(clone):
    cases = FORGED + DAMAGED
    for number, (keys, value, _) in enumerate(cases):
        file = clone.path / f"{number}.json"
        text = (clone.path / "receipt.json").read_text()
        if isinstance(keys, str):
            assert text.count(keys) == 1
            file.write_text(text.replace(keys, value), errors="surrogateescape")
        else:
            file.write_text(text)
            forge(file, keys, value)
    printed = clone.ask(str(len(cases)), before=EACH)
    assert printed.count("code 2") == len(cases) == printed.count("samestep audit: "), printed
    told = [line for line in printed.split("\n") if line.startswith("samestep audit: ")]
    for line, (*_, said) in zip(told, cases, strict=True):
        assert said in line and line.isprintable()
    assert not any(line.startswith(("Traceback", "=> ")) for line in printed.split("\n"))


def test_what_executes_or_writes_is_given_here_alone(clone, tmp_path):
    """A receipt's own would kill the run, delete what lies in a cache, and fill another disk."""
    kept = tmp_path / "victim" / "important.partial"
    kept.mkdir(parents=True)
    file = clone.path / "receipt.json"
    task = json.loads(file.read_text())["config"]["task"]
    for keys, value in [
        (["config", "output_dir"], str(tmp_path / "victim" / "run")),
        (["config", "task"], {n: task[n] for n in task if n != "cache_dir"}),
        (["config", "task", "signal_at"], 3),
        (["config", "task.cache_dir"], "../victim"),  # a dotted name is no other way
        (["environment", "ACCELERATE_USE_DEEPSPEED"], "true"),
        (["environment", "LD_PRELOAD"], "evil.so"),
    ]:
        forge(file, keys, value)
    assert "=> the same run" in clone.ask("audit", file.name, "--steps", "0:4")
    assert [*(tmp_path / "victim").iterdir()] == [kept]
    words = ("audit", file.name, "--steps", "0:4", "--task.cache_dir", "../victim")
    assert "=> the same run" in clone.ask(*words)  # the auditor's own
    assert not kept.exists()


@pytest.mark.parametrize("kind", [RunConfig, DataConfig, ModelConfig])
def test_no_receipt_gives_what_executes_writes_or_sends(kind):
    given = {name for name, (_, field) in fields_of(kind).items() if is_received(name, field)}
    assert given == {*RECEIVED[kind].split()}
    assert not is_received("loader", dataclasses.field(metadata={"received": False}))


def test_an_own_script_is_audited_by_its_command(clone):
    shutil.copy(ROOT / "tests" / "own_mistakes.py", clone.path / "mine.py")
    clone.run("python", "-m", "mine", "none", "runs/mine")
    clone.ask("receipt", "runs/mine")
    words = ("audit", "runs/mine/receipt.json", "--run", "runs/mine", "--steps")
    printed = clone.ask(*words, "2:4", "--", "python", "mine.py", "none", "runs/mine")
    assert "step      4: equal" in printed and "=> the same run, to the bit" in printed
    printed = clone.ask(*words, "0:4", "--", "python", "mine.py", "settings", "runs/mine", code=2)
    assert "made of: lr: 0.01 -> 0.02; --anyway tries it" in printed
    printed = clone.ask(*words[:2], "--", "python", "mine.py", "none", "runs/mine", code=2)
    assert "give --run, the folder below this one where the command writes" in printed
    assert "=> the same run" in clone.ask("diff", "runs/mine", "runs/mine")


@pytest.mark.parametrize(
    "flags, processes, edits, code, texts",
    [
        (("--seed", "1"), 1, (), 1, ["settings   seed: 0 -> 1", "rows       differ until step 1",
            "=> they differ from the line of step 1 on: seed: 0 -> 1"]),
        ((), 1, (OPTIMIZER,), 1, ["code       code of train.build_optimizer",
            "code       optimizer 0 eps: 1e-08 -> 0.001", "rows       equal in 12 lines",
            "state      differs first at step 4: 4 of 4 weights, first 0.bias",
            "from the line of step 2 on: optimizer 0 eps"]),
        ((), 1, (("rows.txt", "\n20\n", "\n999\n"),), 1, ["data       other data (fingerprint)",
            "1 rows differ; the first: row 20 [], trained on in step ", "seed=20", "seed=999"]),
        ((), 2, (), 0, ["hardware   processes: 1 -> 2", "loss       equal to the bit in 12 lines",
            "state      equal at 3 steps", "=> the same run, in spite of processes: 1 -> 2"]),
    ],
)  # fmt: skip
def test_diff_names_the_first_difference_and_its_cause(
    project, clone, flags, processes, edits, code, texts
):
    shutil.copytree(project.path / ".cache", clone.path / ".cache")
    for name, *change in edits:
        edit(clone.path / name, *change)
    clone.train(processes, *EXACT, *flags, "--output_dir", "runs/b")
    printed = clone.ask("diff", project.path / "runs" / "one", "runs/b", code=code)
    assert all(text in printed for text in texts), printed
