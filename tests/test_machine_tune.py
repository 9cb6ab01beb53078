"""`hardware tune`: its search, the YAMLs that it writes, its trials; and comparing reports."""

import dataclasses
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from conftest import load_task, make_tiny, wait_until
from samestep.hardware import report, search, trials, written

Settings, Trial = search.Settings, trials.Trial
START = Settings("bf16", False, False, 8)
FULL = Trial(problem=trials.FULL)
OWN = "# mine\nmax_steps: 3\n"


def space(**changes):
    values = {"start": START, "precisions": ["bf16", "no"], "sizes": [2, 4, 8, 16, 32]}
    return search.Space(**values | changes)


def searched(speed, **changes):
    """The best settings and all trials in order; `speed` gives a speed, or a Trial."""
    tried = {}

    def try_out(settings):
        found = speed(settings)
        return found if isinstance(found, Trial) else Trial(speed=found)

    return search.search(try_out, space(**changes), tried), tried


def speed_of(settings):
    """Half precision doubles the speed, compilation adds a half, checkpointing costs a third."""
    speed = 100 * (2 if settings.precision != "no" else 1) * (1.5 if settings.compile else 1)
    return speed * (0.67 if settings.gradient_checkpointing else 1)


# ---- The search ----------------------------------------------------------------------------------


def test_search_tries_each_setting_on_the_best():
    growing = lambda s: speed_of(s) * (1.2 if s.micro_batch_size >= 16 else 1)  # noqa: E731
    best, tried = searched(growing)
    assert best == Settings("bf16", True, False, 16)
    assert list(map(str, tried)) == [
        "bf16, micro-batch 8",
        "fp32, micro-batch 8",
        "bf16, compile, micro-batch 8",
        "bf16, compile, checkpointing, micro-batch 8",
        "bf16, compile, micro-batch 16",
        "bf16, compile, micro-batch 32",  # no faster: the last
    ]


def test_differences_within_noise_choose_the_simpler():
    gains = {"compile": 1.01, "gradient_checkpointing": 1.005}

    def nearly(settings):
        speed = 100 + 0.5 * (settings.micro_batch_size > 8) + 0.5 * (settings.precision != "no")
        for name, gain in gains.items():
            speed *= gain if getattr(settings, name) else 1
        return speed

    best, _ = searched(nearly)
    assert best == Settings("no", False, False, 8)
    # Also where the recipe begins with the less simple.
    best, _ = searched(nearly, start=Settings("bf16", True, True, 8))
    assert best == Settings("no", False, False, 8)


def test_memory_is_the_limit_so_checkpointing_is_tried():
    def limited(settings):
        if settings.micro_batch_size > 8 and not settings.gradient_checkpointing:
            return FULL
        return 10.0 * settings.micro_batch_size * (0.8 if settings.gradient_checkpointing else 1)

    best, tried = searched(limited)
    assert best == Settings("no", False, True, 32)
    assert [str(each) for each, trial in tried.items() if trial.problem] == ["fp32, micro-batch 16"]


def test_nothing_fits_until_less_is_asked():
    def limited(settings):
        needed = settings.micro_batch_size * (0.5 if settings.gradient_checkpointing else 1)
        return FULL if needed > 2 or settings.precision == "no" else 10.0

    best, tried = searched(limited)
    assert best == Settings("bf16", False, False, 4) or best.micro_batch_size <= 4
    assert [str(each) for each in tried][:5] == [
        "bf16, micro-batch 8",
        "fp32, micro-batch 8",
        "bf16, checkpointing, micro-batch 8",
        "bf16, micro-batch 4",
        "bf16, checkpointing, micro-batch 4",
    ]
    best, tried = searched(lambda settings: FULL)
    assert best is None
    assert len(tried) == 2 + 1 + 2 * 2  # precisions, then checkpointing at 8, and both at 4 and 2


def test_all_trials_fail():
    best, tried = searched(lambda settings: Trial(problem="no such file", code=1))
    assert best is None and len(tried) == 2
    with pytest.raises(ValueError, match="no such file"):
        searched(lambda settings: Trial(problem="no such file", code=2))


def config(**changes):
    values = {"global_batch_size": 96, "micro_batch_size": 8, "device_shares": "equal"}
    switches = ("exact", "compile", "gradient_checkpointing", "async_save", "deterministic")
    values |= dict.fromkeys(switches, False) | {"gradient_compression": "none"} | changes
    kind = dataclasses.make_dataclass("Config", [(n, type(v), v) for n, v in values.items()])
    return kind()


def hardware(processes=1, precision="bf16", kind="cuda", capability=(8, 0), kinds=()):
    layout = load_task("samestep.settings.mesh").Layout(processes, kinds=kinds)
    return trials.Hardware(Path("x.yaml"), precision, kind, "a card", capability, layout, {})


def test_space_of_a_recipe_and_a_machine():
    found = search.find_space(config(), hardware())
    assert found.precisions == ["bf16", "no"]
    assert found.sizes == [1, 2, 4, 8, 16, 32, 48, 96]
    assert found.start == START and found.compile and not found.skipped
    found = search.find_space(config(), hardware(4))
    assert found.sizes == [1, 2, 4, 8, 12, 24]
    found = search.find_space(config(exact=True), hardware())
    assert found.sizes == [8] and not found.compile
    assert "exact fixes them" in found.skipped[0] and "exact does not go with" in found.skipped[1]
    old = search.find_space(config(), hardware(capability=(7, 5)))
    assert old.precisions == ["bf16", "no", "fp16"]
    old = search.find_space(config(), hardware(2, "no", capability=(7, 5), kinds=("FSDP",)))
    assert old.precisions == ["no"] and "fp16" in old.skipped[0]
    with pytest.raises(ValueError, match="exact"):
        search.find_space(config(exact=True, compile=True), hardware())


def test_lines_of_a_trial(tmp_path):
    assert trials.cut_lines(20) == (4, 2, 5)
    assert trials.cut_lines(3) == (1, 5, 3)
    file = tmp_path / "metrics.jsonl"
    torn = '{"step": 1, "tokens_per_second": 3.0}\n{"step": 1, "event": "x"}\n{"step": 2, "tok'
    file.write_text(torn)
    assert [each["step"] for each in trials.read_lines(file, "tokens_per_second")] == [1]
    assert trials.read_lines(tmp_path / "none", "tokens_per_second") == []
    text = "Traceback\ntrain.py: it is full\nsamestep launch: process 0 was ended\n\nbye\n"
    assert trials.last_line(text) == "samestep launch: process 0 was ended"
    assert trials.last_line("a\nValueError: b\n") == "ValueError: b"
    text = "a\ntorch._inductor.exc.InductorError: no compiler\n\nSet TORCHDYNAMO_VERBOSE=1\n"
    assert trials.last_line(text) == "torch._inductor.exc.InductorError: no compiler"


FAKE = """
import json, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).parent
kind, count = (folder / "recipe.yaml").read_text().split()
with open(folder / "run" / "metrics.jsonl", "w") as file:
    for n in range(int(count)):
        line = {"step": n, "tokens_per_second": 10.0 * n, "peak_memory_gb": 2 - n / 10}
        print(json.dumps(line), file=file)
if kind == "fails":
    print("train.py: the memory is full: no room\\nsamestep launch: bye")
    sys.exit(1)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
time.sleep(99)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "speed", "problem"),
    [
        ("runs 8", 60.0, ""),  # of lines 5 to 7, after five of warm-up
        ("hangs 6", 50.0, ""),  # the time is over after one of three
        ("hangs 2", 0.0, "2 of 8 lines of metrics within 1 s"),
        ("fails 6", 0.0, "out of memory"),
    ],
)
def test_a_trial_ends_with_all_its_processes(tmp_path, monkeypatch, recipe, speed, problem):
    program = tmp_path / "samestep" / "__main__.py"
    program.parent.mkdir()
    program.write_text(FAKE)
    (program.parent / "__init__.py").touch()
    (tmp_path / "recipe.yaml").write_text(recipe)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    trial = trials.run_trial(tmp_path, hardware(), "tokens", 3, 1)
    assert (trial.speed, trial.problem, trial.memory) == (speed, problem, 2.0)
    assert not marked(tmp_path)


# ---- What is written -----------------------------------------------------------------------------


def test_own_files_stay(tmp_path):
    path = tmp_path / "folder" / "tuned.yaml"
    written.write_headed(path, "tune", "a: 1\n")
    written.write_headed(path, "tune", "a: 2\n")
    assert path.read_text().endswith("\n\na: 2\n")
    path.write_text(OWN)
    with pytest.raises(ValueError, match="rename it"):
        written.refuse_foreign(path)
    with pytest.raises(ValueError, match="rename it"):
        written.write_headed(path, "tune", "a: 3\n")
    assert path.read_text() == OWN
    assert [each.name for each in path.parent.iterdir()] == ["tuned.yaml"]


def test_accelerate_yaml_keeps_its_comments(tmp_path):
    path = tmp_path / "a.yaml"
    rest = "# Where.\na: x\n\n# How.\nmixed_precision: bf16  # yes\n"
    path.write_text(f"# One GPU.\n#\n# make train\n\n{rest}")
    text = written.accelerate_with(path, mixed_precision="no", num_processes=8)
    assert text == "# Where.\na: x\n\n# How.\nmixed_precision: 'no'  # yes\n\nnum_processes: 8\n"
    path.write_text("# Where.\na: x\n\nb: y\n")
    assert written.accelerate_with(path) == "# Where.\na: x\n\nb: y\n"


@dataclasses.dataclass
class Small:
    max_steps: int = 8
    num_epochs: float = 0.0
    lr_schedule: str = "cosine"
    final_lr_fraction: float = 0.1
    resume: str = dataclasses.field(default="auto", metadata={"saved": False})
    micro_batch_size: int = 4


UNREAD = "max_steps: 3\nfinal_lr_fraction: 0.2\n"
WHOLE = (
    "max_steps: 3\nnum_epochs: 0.0\nlr_schedule: %s\nfinal_lr_fraction: 0.2\nmicro_batch_size: 2\n"
)


@pytest.mark.parametrize(
    "text, flags, expected",
    [
        # An older heading goes; comments, and flags of all runs, stay.
        (
            "# Written by samestep hardware x\n# y\n\n# Mine.\nmax_steps: 3 # 3\n",
            ["--num_epochs", "2", "--resume", "never"],
            "# Mine.\nmax_steps: 0 # 3\n\nnum_epochs: 2.0\n\nmicro_batch_size: 2\n",
        ),
        ("{max_steps: 3}", [], "{micro_batch_size: 2, max_steps: 3}"),
        # Nothing reads final_lr_fraction any more; and lines that start further right.
        (UNREAD, ["--lr_schedule", "constant"], WHOLE % "constant"),
        (UNREAD.replace("max", "  max").replace("final", "  final"), [], WHOLE % "cosine"),
    ],
)
def test_recipe_with_other_values(tmp_path, text, flags, expected):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    found = written.recipe_with(Small, ["--config", str(path), *flags], micro_batch_size=2)
    assert found == expected


# ---- Reports -------------------------------------------------------------------------------------


def section(*values, unit="GB/s", **conditions):
    figures = [report.Figure(f"copy {n}", value, unit, "0") for n, value in enumerate(values)]
    found = report.Section("bench", figures=figures)
    found.conditions = {"device": "A", "processes": 2} | conditions
    return found


def older(*values, **changes):
    return {"format": report.FORMAT, "bench": section(*values, **changes).as_json()}


def test_compare_says_what_got_slower():
    lines, worse = report.compare(section(90, 80, 110, 7), older(100, 100, 100), 0.1)
    assert lines == [
        "copy 0 (0): 90 GB/s, was 100: 10% slower",
        "copy 1 (0): 80 GB/s, was 100: 20% slower",
        "copy 2 (0): 110 GB/s, was 100: 10% faster",
        "copy 3 (0): 7 GB/s, not in the older report",
    ]
    assert worse == lines[1:2]
    lines, worse = report.compare(section(90, unit="ms"), older(100, 5, unit="ms"), 0.1)
    gone = "copy 1 (0): only in the older report"
    assert lines == ["copy 0 (0): 90 ms, was 100: 11% faster", gone] and worse == [gone]


def test_compare_finds_figures_that_broke():
    _, worse = report.compare(section(float("nan"), 0, 5), older(1, 1, 5), 0.1)
    assert len(worse) == 2
    _, worse = report.compare(section(0.0, 5, unit="s"), older(1, 5, unit="s"), 0.1)
    assert len(worse) == 1
    with pytest.raises(ValueError, match="none of these figures"):
        report.compare(section(1, 1), older(float("nan"), 0), 0.1)


def test_compare_refuses_other_things():
    with pytest.raises(ValueError, match="device was A and is B; processes was 2 and is 8"):
        report.compare(section(1, device="B", processes=8), older(1), 0.1)
    with pytest.raises(ValueError, match="no speeds of bench"):
        report.compare(section(1), {"format": report.FORMAT}, 0.1)
    with pytest.raises(ValueError, match="no speeds of bench"):
        report.compare(section(1), older(1, unit="GB"), 0.1)


@pytest.mark.parametrize("text", ["0", "-0.1", "nan", "inf", "10", "much", ""])
def test_wrong_thresholds(text):
    with pytest.raises(report.argparse.ArgumentTypeError, match="between 0 and 1"):
        report.threshold(text)


def broken_reports():
    good = older(1.0)
    yield from ("", "{", "[]", "null", '"x"', "1", "[" * 5000, json.dumps({"format": 0}))
    for figures in (None, [1], [{}], 3):
        yield json.dumps({**good, "bench": {**good["bench"], "figures": figures}})
    for name, value in (("value", "1"), ("unit", 1), ("where", [1]), ("size", {}), ("value", None)):
        changed = {**good["bench"]["figures"][0], name: value}
        yield json.dumps({**good, "bench": {**good["bench"], "figures": [changed]}})
    yield json.dumps({**good, "bench": 3})


def test_broken_reports_are_kept(tmp_path):
    path = tmp_path / "hardware.json"
    texts = list(broken_reports())
    for text in texts:
        path.write_text(text)
        with pytest.raises(ValueError, match="hardware.json"):
            report.load(path)
        report.save(tmp_path, section(1.0))
        assert report.load(path)["bench"]["figures"][0]["value"] == 1.0
    names = {f"hardware.json.broken{n if n > 1 else ''}" for n in range(1, len(texts) + 1)}
    assert {each.name for each in tmp_path.iterdir()} == names | {"hardware.json"}
    assert sorted((tmp_path / name).read_text() for name in names) == sorted(texts)


def test_two_reports_at_once(tmp_path):
    verbs = [f"verb{n}" for n in range(8)]
    threads = [
        threading.Thread(target=report.save, args=(tmp_path, report.Section(verb)))
        for verb in verbs
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert {*report.load(tmp_path / "hardware.json")} == {"format", *verbs}


# ---- For real ------------------------------------------------------------------------------------

STEPS = ("--steps", "4")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A tiny project of its own, in which tune may write."""
    return make_tiny(tmp_path_factory.mktemp("tuned"))


def hardware_py(project, *words, **options):
    """Runs samestep hardware without a C++ compiler, so that tune tries no compilation."""
    path = str(Path(sys.executable).parent)
    return project.run("python", "-m", "samestep", "hardware", *words, PATH=path, **options)


def marked(folder):
    """The processes of trials in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            found += [process] * (str(folder) in process.environ().get(trials.MARK, ""))
        except psutil.Error:
            continue
    return found


def nothing_left(project):
    """Whether trials have left neither a process nor a folder."""
    return not (project.path / ".cache" / "tune").exists() and not marked(project.path.resolve())


def figures(project, verb="tune", folder="runs/hardware"):
    content = json.loads((project.path / folder / "hardware.json").read_text())
    return {each["name"]: each for each in content[verb]["figures"]}


@pytest.mark.slow
@pytest.mark.parametrize("yaml", ["cpu", "cpu_multi"])
def test_tuned_pair_trains(tuned, yaml):
    words = (*STEPS, "--config_file", f"configs/accelerate/{yaml}.yaml", "--num_epochs", "2")
    printed = hardware_py(tuned, "tune", *words).stdout
    assert "next: make train HARDWARE=tuned RECIPE=tuned" in printed
    assert "compile: on a CPU it needs a C++ compiler" in printed
    found = figures(tuned)
    assert {"fp32, micro-batch 2", "bf16, micro-batch 2"} <= {*found}
    assert all(each["value"] > 0 for each in found.values())
    assert found["fp32, micro-batch 2"]["unit"] == "samples/s"
    assert found["fp32, micro-batch 2: peak memory"]["unit"] == "GB"
    assert nothing_left(tuned)
    pair = ["configs/train/tuned.yaml", "configs/accelerate/tuned.yaml"]
    texts = [(tuned.path / each).read_text() for each in pair]
    recipe, hardware = map(load_task("yaml").safe_load, texts)
    assert recipe["num_epochs"] == 2 and recipe["global_batch_size"] == 8
    assert not recipe["max_steps"] and recipe["log_every"] == 1
    assert hardware["num_processes"] == (2 if yaml == "cpu_multi" else 1)
    assert "output_dir" not in recipe and "tracker" not in recipe
    words = ("train.py", "--config", pair[0])
    assert "checked" in tuned.run("python", *words, "--check", "--config_file", pair[1]).stdout
    output = f"runs/after_{yaml}"
    tuned.run(
        "python",
        "-m",
        "samestep",
        "launch",
        "--config_file",
        pair[1],
        *words,
        "--output_dir",
        output,
    )
    assert json.loads((tuned.path / output / "status.json").read_text())["state"] == "finished"


@pytest.mark.slow
def test_out_of_memory_is_a_row_and_slower_is_told(tmp_path):
    project = make_tiny(tmp_path)
    with open(project.path / "task.py", "a") as file:
        file.write(
            "\n\ndef limited(model, batch, inner=loss_sum):\n"
            "    if len(batch['x']) > 2:\n        raise MemoryError('no room')\n"
            "    return inner(model, batch)\n\n\nloss_sum = limited\n"
        )
    # The older report is where the new one will be. Its speed was never seen.
    file = project.path / "runs" / "hardware" / "hardware.json"
    file.parent.mkdir(parents=True)
    fast = report.Figure("bf16, micro-batch 2", 1e12, "samples/s")
    older = {"format": 1, "tune": report.Section("tune", figures=[fast]).as_json()}
    file.write_text(json.dumps(older))
    words = ("tune", *STEPS, "--micro_batch_size", "8", "--compare", file)
    ended = hardware_py(project, *words, check=False)
    assert "fp32, micro-batch 8: failed: out of memory" in ended.stdout
    assert ended.returncode == 1
    assert "was 1,000,000,000,000: 100% slower\n" in ended.stdout
    assert "1 of 1 figures" in ended.stdout or "1 of 2 figures" in ended.stdout
    assert "bf16, micro-batch 2" in figures(project)
    text = (project.path / "configs" / "train" / "tuned.yaml").read_text()
    assert "micro_batch_size: 2\n" in text
    # Of something else: refused before any trial.
    older["tune"]["conditions"] = {"recipe": "another"}
    file.write_text(json.dumps(older))
    ended = hardware_py(project, *words, check=False)
    assert ended.returncode == 2 and "recipe was another and is" in ended.stderr
    assert "micro-batch" not in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_nothing(tuned, number):
    before = {path: path.read_bytes() for path in tuned.path.glob("configs/*/tuned.yaml")}
    command = [
        "python",
        "-m",
        "samestep",
        "hardware",
        "tune",
        "--steps",
        "100000",
        "--task.row_seconds",
        "0.01",
    ]
    yaml = "configs/accelerate/cpu_multi.yaml"
    run = subprocess.Popen(
        [*command, "--config_file", yaml, "--num_workers", "1"],
        cwd=tuned.path,
        env=tuned.env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        pattern = ".cache/tune/*/run/config.yaml"  # written once the processes have met
        wait_until(lambda: any(tuned.path.glob(pattern)), run, 120)
        if number == signal.SIGKILL:
            second = hardware_py(tuned, "tune", check=False)
            assert (second.returncode, second.stderr.count("another tune runs")) == (2, 1)
        run.send_signal(number)
        printed = run.communicate(timeout=60)[0]
    finally:
        run.terminate()
    if number == signal.SIGKILL:  # the next tune ends its trial
        fails = ("--task.fail_where", "prepare_data", "--task.fail_rank", "0")
        assert marked(tuned.path.resolve())
        assert hardware_py(tuned, "tune", *fails, check=False).returncode == 2
        assert nothing_left(tuned)
        return
    assert run.returncode == 1
    assert printed.endswith("samestep hardware: stopped by a signal; no YAML was written\n")
    assert "Traceback" not in printed
    assert nothing_left(tuned)
    assert before == {path: path.read_bytes() for path in tuned.path.glob("configs/*/tuned.yaml")}


@pytest.mark.slow
def test_wrong_input_is_one_line(tuned, tmp_path):
    own = tmp_path / "own"
    own.write_text("x")
    cases = [
        (["--config_file", "configs/accelerate/none.yaml"], "No such file"),
        (["--config_file", "configs/accelerate/multi_node.yaml"], "one machine only"),
        (["--config_file", "configs/accelerate/fsdp2.yaml"], "GPU"),
        (["--learning_rat", "3"], "did you mean learning_rate"),
        (["--check"], "--check; leave it out"),
        (["--task.fail_where", "prepare_data", "--task.fail_rank", "0"], "prepare_data"),
        (["--task.fail_where", "build_model", "--task.fail_rank", "0"], "build_model"),
        (["--report", str(own / "inside")], "Not a directory"),
        (["--compare", "configs/train/default.yaml"], "is no hardware.json"),
    ]
    for words, expected in cases:
        ended = hardware_py(tuned, "tune", *STEPS, *words, check=False)
        assert ended.returncode == 2, (words, ended.stdout, ended.stderr)
        assert expected in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr
        assert nothing_left(tuned)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = ["python", "-m", "samestep", "hardware", "tune"]
    several = [subprocess.Popen(command, cwd=tuned.path, env=e, **pipes) for e in tuned.envs(2)]
    printed = [each.communicate(timeout=60) for each in several]
    assert [each.returncode for each in several] == [2, 2]
    assert "".join(err for _, err in printed).count("python -m samestep hardware tune") == 1


@pytest.mark.slow
def test_own_tuned_yaml_stays(tmp_path):
    project = make_tiny(tmp_path)
    path = project.path / "configs" / "accelerate" / "tuned.yaml"
    path.write_text(OWN)
    ended = hardware_py(project, "tune", check=False)
    assert ended.returncode == 2 and "rename it" in ended.stderr
    assert "micro-batch" not in ended.stdout and path.read_text() == OWN
