"""diff, receipt and audit: what two runs differ in, and whether a run is the one of a receipt."""

import json
import shutil

import pytest

from conftest import ROOT, BakedProject, edit, lines, make_tiny, reseal
from samestep.ask import receipt
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
OPTIMIZER = ("train.py", "fused=True)", "fused=True, eps=1e-3)")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose rows lie in a file, with runs/one: exact, with dropout, on one process."""
    project = make_tiny(tmp_path_factory.mktemp("audit"))
    (project.path / "rows.txt").write_text("\n".join(map(str, range(48))))
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
    assert "4 of 4 weights differ, the first: 0.bias" in printed
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
    assert "for as many processes only" in project.ask("receipt", "runs/two")
    file = clone.path / "receipt.json"
    shutil.copy(project.path / "runs" / "two" / "receipt.json", file)
    assert "made of: processes: 1 -> 2; --anyway tries it" in refused(clone, "--processes", "2")
    found = receipt.read(file)
    before = found["hardware"]["torch"]
    found["hardware"] |= {"torch": "1.0", "datasets": "1.0"}
    file.write_text(json.dumps(found | {"sha256": receipt.digest_of(found)}))
    assert f"made of: torch: 1.0 -> {before}; --anyway" in refused(clone)


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
