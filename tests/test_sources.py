"""Where data comes from: files, folders, the Hub; the part held out; a task of one's own."""

import os
import shutil

import fsspec
import pytest
import torch
import yaml

import hub
from conftest import ROOT, bake, load_task
from refusals import cases, check_ended, refused
from samestep.base.console import one_line
from samestep.contract import contract
from samestep.data import files, inputs, sources
from samestep.models import pretrained
from samestep.prepared import prepared_key
from samestep.step.plan import StepPlan
from samestep.step.samples import SampleDataset, StepBatchSampler
from samestep.text import tokenizing

TASKS = ["causal_lm", "text_classification", "image_classification", "seq2seq", "preference"]


# ---- Files ---------------------------------------------------------------------------------------


def test_a_run_of_characters_does_not_hold_up_a_vocabulary():
    text = "short " + "x" * 2500 + " end"
    assert list(tokenizing.break_long_words([text])) == [
        "short " + "x" * 1000 + " " + "x" * 1000 + " " + "x" * 500 + " end"
    ]


def write_files(folder, names):
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}\n')


def test_linked_folders_count_once_and_hidden_copies_do_not(tmp_path, monkeypatch):
    names = "data/a/1.txt elsewhere/2.txt data/.copies/3.txt data/a/._1.txt data/aa.txt"
    write_files(tmp_path, names)
    data = tmp_path / "data"
    (data / "b").symlink_to(tmp_path / "elsewhere")
    (data / "a" / "up").symlink_to(data)
    wanted = ["a/1.txt", "aa.txt", "b/2.txt"]
    for root in (str(data), "."):
        monkeypatch.chdir(data)
        found, others = files.list_files(root, "data", (".txt",))
        assert [each.name for each in found] == wanted and not others
        assert [each.path for each in found] == [os.path.join(root, name) for name in wanted]


def test_what_cannot_be_reached_is_never_left_out(tmp_path, monkeypatch):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "1.txt").write_text("a cat")
    cfg = sources.DataConfig(data="own", validation_data=str(tmp_path))
    (tmp_path / "dogs").symlink_to("none")
    with refused("dogs is a link to nothing", "task.validation_data: "):
        prepared_key.stamps_of(prepared_key.files_of(cfg))
    (tmp_path / "dogs").unlink()
    os.mkfifo(tmp_path / "dogs")
    with refused("dogs is no regular file"):
        prepared_key.stamps_of(prepared_key.files_of(cfg))
    for named in (str(tmp_path / "c*" / "*.txt"), {str(tmp_path / "cats" / "1.txt"): 2}):
        cfg = sources.DataConfig(data="own", validation_data=named)
        assert [*prepared_key.files_of(cfg).values()] == [str(tmp_path / "cats" / "1.txt")]
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("cats"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="cats"):
        files.list_files(str(tmp_path), "data", (".txt",))


def test_a_folder_without_a_file_that_can_be_read_is_refused_as_one_with_a_file_twice(tmp_path):
    write_files(tmp_path, "a.jsonl b.JSONL.gz c.jsonl.xz d.jsonl.zst e.JPG.gz LICENSE .hidden")
    with refused(", but 6 other files; pass --task.data PATH, a", "task.data: nothing to read at "):
        files.list_files(str(tmp_path), "data", (".txt",))
    (tmp_path / "a.jsonl.gz").write_text("")
    with refused("has a.jsonl.gz and the same without .gz; remove one"):
        files.list_files(str(tmp_path), "data", files.TABLES)


def test_a_bundled_dataset_is_not_taken_for_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    with refused("is a bundled dataset, and a file or folder here: rename it, or give ./digits"):
        sources.check_data_config(sources.DataConfig(data="digits"), ["digits"])
    sources.check_data_config(sources.DataConfig(data="./digits"), ["digits"])


@pytest.mark.parametrize("name", TASKS)
def test_shipped_recipes_have_no_field_that_nothing_reads(name, monkeypatch):
    task = load_task(name)
    monkeypatch.setattr(pretrained, "folder_of", lambda cfg: None)  # runs/default/model, later
    for recipe in (ROOT / "templates" / name).glob("*.yaml"):
        lines = [line for line in recipe.read_text().splitlines() if "{{" not in line]
        fields = yaml.safe_load("\n".join(lines)).get("task") or {}
        task.check_config(task.TaskConfig(**fields))


# ---- The Hub -------------------------------------------------------------------------------------


def small(data):
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 300}
    flags = ["--config", "configs/train/smoke.yaml", "--max_steps", "2", "--warmup_steps", "0"]
    return [*flags, "--task.data", data, *[f"--task.{k}={v}" for k, v in sizes.items()]]


@pytest.mark.slow
def test_data_and_model_of_the_hub_by_name_config_split_and_commit(tmp_path):
    project = bake(tmp_path, tracker="none")
    project.train(1, *small("manual"), "--output_dir", "runs/base")
    data = [hub.DATA, "--task.data_config", "easy", "--task.context_length", "16"]
    pinned = ["--task.data_revision", hub.COMMIT]
    model = ["--task.model_name_or_path", hub.MODEL, "--task.revision", hub.COMMIT]
    flags = [*small(data[0]), *data[1:], *pinned]
    with hub.serve(project.path / "runs" / "base" / "model") as (address, asked):
        env = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        env |= {name: "" for name in os.environ if name.lower().endswith("_proxy")}
        printed = project.train(1, *flags, *model, "--task.validation_split", "test", **env)
        assert "Prepared: 50 rows to train on, 10 to evaluate on" in printed
        assert any(path.startswith(f"{hub.MODEL}/resolve/{hub.COMMIT}/") for path in asked)
        assert (project.path / "runs" / "smoke" / "model" / "model.safetensors").exists()

        floating = f"write --task.data_revision {hub.COMMIT}, which is main of owner/rows"
        for given, said in (
            ([*small(data[0]), *data[1:]], floating),
            (small("owner/none"), "neither here nor on the Hub"),
        ):
            given += ["--check", "--output_dir", "runs/refused"]
            [(code, _, errors)] = project.ends(1, *given, **env)
            check_ended([code, "", errors], said)
    # All of it is on this disk now: the same command needs no network.
    flags += ["--task.validation_split", "test", "--output_dir", "runs/again"]
    shutil.rmtree(project.path / ".cache")
    again = project.train(1, *flags, HF_HOME=str(tmp_path / "hub"))
    assert "Prepared: 50 rows to train on, 10 to evaluate on" in again


# ---- A task of one's own -------------------------------------------------------------------------


def test_the_contract_describes_each_function_of_a_task():
    names = {name for name in vars(contract.Task) if name[0].islower()}
    assert names == {*contract.REQUIRED, *contract.OPTIONAL}


def test_sorting_moves_rows_within_a_step_alone():
    sizes = torch.randint(1, 100, (50,), generator=torch.Generator().manual_seed(0)).numpy()
    rows = SampleDataset(range(50), seed=1)
    rows.sizes = sizes
    for micro, shares in ((8, (2,)), (2, (5, 2, 1))):
        steps = [[], [], []]
        for rank, share in enumerate(shares):
            plan = StepPlan(16, micro, shares, rank)
            slices = list(StepBatchSampler(plan, 16, 64, rows.sort))
            assert [len(s) for s in slices] == [micro] * 3 * share
            for step in range(3):
                steps[step] += sum(slices[step * share : (step + 1) * share], [])
        for step, window in enumerate(steps):
            assert sorted(window) == list(range(16 + 16 * step, 32 + 16 * step))
            ordered = sizes[rows.ids(window)].tolist()
            assert ordered == sorted(ordered)


def test_a_weight_that_is_not_a_whole_number_of_at_least_1_is_refused():
    for weight in ("0", "0.5"):
        with refused(f"one of its sources is 'a:{weight}'; give each as PATH"):
            sources.split_data(f"a:{weight},b")
    for twice in ("a:2,a", "a.jsonl:2,./a.jsonl:1", "x/../b,b"):
        with refused("names a source twice; add its weights"):
            sources.split_data(twice)
    given = [each[:2] for each in sources.split_data("a:2,b.1, c")]
    assert given == [("a", 2), ("b.1", 1), ("c", 1)]


# ---- Splits --------------------------------------------------------------------------------------

TREES = cases("trees")
ENDINGS = (".txt", *files.TABLES, *files.IMAGES)


@pytest.mark.parametrize("name", TREES)
def test_files_and_splits_are_known_by_their_names_on_a_disk_and_in_a_store(tmp_path, capsys, name):
    names, read, said, in_store, *held_out = TREES[name].values()
    write_files(tmp_path, names)
    fsspec.filesystem("memory").put(f"{tmp_path}/", f"/{tmp_path.name}/", recursive=True)
    for data in [str(tmp_path), f"memory://{tmp_path.name}"][: 1 + in_store]:
        fields = {"validation_data": f"{data}/{held_out[0]}"} if held_out else {}
        found = inputs.find_inputs(sources.DataConfig(data=data, **fields), {}, ENDINGS)
        assert [" ".join(file.name for file in each.files) for each in found] == read
        printed = capsys.readouterr().out.replace(data, "DATA")
        assert printed == (f"Preparing data: {said}\n" if said else "")


def test_a_run_that_is_named_is_data(tmp_path):
    write_files(tmp_path, "status.json hardware.yaml metrics.jsonl model/config.json")
    assert len(files.list_folder(str(tmp_path))) == 4


@pytest.mark.parametrize("data", ["{}", "{}:2,{}:0"])
def test_a_line_that_is_cut_shows_no_part_of_a_secret(data):
    """Cut before the secret is taken out, a URL ends before its @, and looks like a path."""
    url = f"s3://user:{'SECRET' * 20}@bucket/rows"
    task = load_task("causal_lm")
    given = data.replace("{}", url)
    for more in ({}, {"data_config": "x"}, {"tools_column": "x"}):
        with pytest.raises(ValueError) as error:
            task.check_config(task.TaskConfig(data=given, **more))
        assert "SECRET" not in one_line(error.value)
