"""The files of cluster/: there if chosen, valid, and run for real where this machine can.

Several machines in one run: two network namespaces, each with a host name of its own.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

import slurm
from conftest import (
    ROOT,
    SOURCE,
    TRAIN,
    BakedProject,
    bake,
    digest,
    latest,
    lines,
    make_tiny,
    newest,
    preloaded,
    status,
    trained,
    wait_until,
)
from refusals import cases, check_ended
from same import check_same_curve
from samestep.processes import alike, ranks
from samestep.state import consistency
from test_exact import SOON

ALL = ["kubernetes.yaml", "skypilot.yaml", "slurm.sbatch"]
FILES = {"none": [], "slurm": ["slurm.sbatch"], "all": ALL}
# Takes the place of a program that ends with the codes in a file, one a start.
NEXT_CODE = '#!/bin/sh\nread code rest < codes; echo "$rest" > codes; exit "$code"\n'


def put_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """The tiny project with all files of clusters, and the Python of the tests as its own."""
    project = make_tiny(tmp_path_factory.mktemp("cluster"), cluster="all")
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    put_program(project.path / ".venv" / "bin" / "python", python)
    return project


@pytest.fixture(scope="module")
def manifests(clustered):
    text = (clustered.path / "cluster" / "kubernetes.yaml").read_text()
    return {item["kind"]: item for item in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def sky(clustered):
    return yaml.safe_load((clustered.path / "cluster" / "skypilot.yaml").read_text())


@pytest.mark.parametrize("cluster", FILES)
def test_files_are_those_of_the_cluster(tmp_path, cluster):
    slug = f"my_own-{'a' * 42}_b"  # _ is the 50th character
    project = bake(tmp_path, cluster=cluster, project_slug=slug).path
    assert (project / "cluster").exists() == (cluster != "none")
    assert sorted(path.name for path in project.glob("cluster/*")) == FILES[cluster]
    readme = (project / "README.md").read_text(encoding="utf-8")
    for name in ALL:
        assert (f"cluster/{name}" in readme) == (name in FILES[cluster])
    assert cluster == "none" or os.access(project / "cluster" / "slurm.sbatch", os.X_OK)
    if cluster == "all":  # whose names have no underscores
        for item in yaml.safe_load_all((project / "cluster" / "kubernetes.yaml").read_text()):
            assert item["metadata"]["name"] == slug.replace("_", "-")
        text = (project / "cluster" / "skypilot.yaml").read_text()
        assert yaml.safe_load(text)["name"] == f"my-own-{'a' * 42}"  # at most 50, the last no -


def test_pods_meet_and_end_as_the_exit_codes_say(manifests):
    job, name = manifests["Job"]["spec"], manifests["Service"]["metadata"]["name"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    selector = {"job-name": manifests["Job"]["metadata"]["name"]}
    assert manifests["Service"]["spec"]["selector"] == selector
    assert pod["restartPolicy"] == "Never" and pod["subdomain"] == name
    arguments = dict(word[2:].split("=", 1) for word in container["args"] if "=" in word)
    assert arguments["main_process_ip"] == f"{name}-0.{name}"
    assert int(arguments["num_machines"]) == job["completions"] == job["parallelism"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(arguments["num_processes"]) == gpus * job["completions"]
    rules = [rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules}
    assert codes == {"FailJob": [2], "Ignore": [75]}
    assert manifests["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.slow
def test_the_command_of_the_pods_trains(clustered, manifests, tmp_path):
    """Two pods are two launchers; here they have no network of their own, and no GPU."""
    (container,) = manifests["Job"]["spec"]["template"]["spec"]["containers"]
    changes = {"--config_file": "configs/accelerate/cpu_multi.yaml", "--num_processes": 2}
    changes |= {"--main_process_ip": "127.0.0.1", "--main_process_port": slurm.free_ports(1)[0]}
    changes |= {"--output_dir": tmp_path / "run"}
    runs = []
    for pod in ("0", "1"):
        words = [word.replace("$(JOB_COMPLETION_INDEX)", pod) for word in container["args"]]
        words = [word for word in words if not word.startswith("--task.")]  # of another task
        for name, value in changes.items():
            words = [f"{name}={value}" if word.startswith(f"{name}=") else word for word in words]
        command = [sys.executable, *container["command"][1:], *words, "--max_steps=2"]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        runs.append(subprocess.Popen(command, cwd=clustered.path, env=clustered.env(), **pipe))
    printed = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], printed
    assert "2 x cpu" in printed[0] and status(tmp_path / "run")["state"] == "finished"


@pytest.mark.slow
def test_the_scripts_of_skypilot_run(clustered, sky, tmp_path):
    """`setup` and `run`, with what SkyPilot exports to them."""
    flags = f"--output_dir {tmp_path / 'run'} --max_steps 2"
    env = {**sky["envs"], "HARDWARE": "cpu_multi", "FLAGS": flags}
    env |= {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"}
    env |= {"SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": "2"}
    setup = sky["setup"].replace("make setup\n", "")
    assert "checked: " in clustered.run("bash", "-c", setup, **env).stdout
    clustered.run("bash", "-c", sky["run"].replace("29500", str(*slurm.free_ports(1))), **env)
    assert status(tmp_path / "run")["state"] == "finished"


def test_skypilot_repeats_a_stop_and_a_crash_but_no_mistake(sky, tmp_path):
    """A stop by a new job, a crash in its script."""
    recovery = sky["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [75] and recovery["max_restarts_on_errors"] == 0
    put_program(tmp_path / ".venv" / "bin" / "python", NEXT_CODE)
    env = {**os.environ, **sky["envs"], "SKYPILOT_NODE_IPS": "127.0.0.1"}
    env |= {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    for codes, code, left in [("1 1 0 9", 0, "9"), ("1 2 9", 2, "9"), ("137 1 1 1 9", 1, "9")]:
        (tmp_path / "codes").write_text(f"{codes}\n")
        run = subprocess.run(["bash", "-c", sky["run"]], cwd=tmp_path, env=env)
        assert run.returncode == code and (tmp_path / "codes").read_text() == f"{left}\n"


# ---- Slurm ---------------------------------------------------------------------------------------


def test_the_script_of_slurm_repeats_what_was_stopped_and_one_crash(clustered, tmp_path):
    """A start ends with 75, 1, 1, 2 or 0."""
    put_program(tmp_path / "bin" / "srun", NEXT_CODE)
    put_program(tmp_path / "bin" / "scontrol", '#!/bin/sh\necho "$@" >> requeued; exit 1\n')
    env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "CRASHES": "1", "MAIN": "a"}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(tmp_path)}
    (tmp_path / "codes").write_text("75 1 1 2 0\n")
    script, again = ["bash", clustered.path / "cluster" / "slurm.sbatch"], "requeue 7\n"
    for expected in [(75, again), (1, again), (1, ""), (2, ""), (0, "")]:
        (tmp_path / "requeued").write_text("")
        code = subprocess.run(script, env=env, capture_output=True).returncode
        assert (code, (tmp_path / "requeued").read_text()) == expected


@pytest.mark.slow
def test_slurm_stops_requeues_and_finishes_a_run(clustered, tiny, tmp_path):
    """Told USR1, as before its time limit; the weights are those of an undisturbed run."""
    output, printed = tmp_path / "run", tmp_path / "job.txt"
    flags = ["--max_steps", 150, "--eval_every", 0, "--save_every", 100, "--task.dropout", 0.1]
    command = ["sbatch", "--parsable", "--cpus-per-task=1", "--gpus-per-node=1", "--time=30"]
    command += [f"--output={printed}", "cluster/slurm.sbatch", "--output_dir", output, *flags]
    command += ["--task.row_seconds", 0.02, "--tracker", "wandb"]
    env = clustered.env(HARDWARE="cpu_multi", MAIN="127.0.0.1")
    with slurm.started(tmp_path / "slurm") as running:
        job = running.run(*command, cwd=clustered.path, **env)
        wait_until(lambda: trained(output, 20))
        running.run("scancel", "--signal=USR1", job)
        wait_until(lambda: running.job(job)["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT"))
        text, fields = printed.read_text(), running.job(job)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), text
    assert text.count(" start 1 on n[1-2]") == text.count(" start 2 on n[1-2]") == 1
    assert " ended with 75" in text and " ended with 0" in text
    (stopped,) = re.findall(r"stopped after step (\d+);", text)
    assert f"continuing from {output}/checkpoints/step-{int(stopped):08d}" in text
    runs = [path.name.rpartition("-")[2] for path in (output / "wandb").glob("offline-run-*")]
    assert runs == [(output / "wandb_run_id").read_text()] * 2
    undisturbed = tmp_path / "undisturbed"
    tiny.train(2, *flags, "--output_dir", undisturbed)
    assert digest(newest(output)) == digest(newest(undisturbed))


# ---- What all processes must have in common ------------------------------------------------------

FACTS = {"torch": "2.13", "code task.py": "1", "learning_rate": "0.1"}


@pytest.mark.parametrize("changes, said", cases("differences"))
def test_a_difference_names_the_machines(changes, said):
    found = [FACTS | each for each in changes]
    texts = {repr(sorted(each.items())) for each in found}
    gathered = [*zip("abc", found, strict=True)]
    processes = SimpleNamespace(gather=lambda _: gathered, differ=lambda _: len(texts) > 1)
    with pytest.raises(ranks.UserError, match=said) if said else contextlib.nullcontext():
        alike.check_same(processes, FACTS)


def test_devices_may_differ_but_not_with_exact():
    versions = {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.0", "cpu": "AVX2"}
    manifest = {"hardware": versions, "data": {"fingerprint": "1"}, "config": {"seed": 0}}
    code = consistency.hash_project(ROOT / SOURCE, consistency.OWN)
    manifest |= {"code": code, "library": "0123"}
    facts = consistency.collect_facts(manifest, False)
    code = {name: facts.pop(name) for name in [*facts] if name.startswith("code ")}
    assert "code train.py" in code and facts.pop("library samestep") == "0123"
    assert facts == {"python": "3.11", "torch": "2.13.0", "seed": "0", "data fingerprint": "1"}
    facts = consistency.collect_facts(manifest, True)
    assert (facts["python"], facts["cpu"]) == ("3.11.7", "AVX2")


PROGRAM = """
import helper, json, sys
from pathlib import Path
sys.path.insert(0, "elsewhere")
from samestep.state import consistency
manifest = {"hardware": {"python": "3.11.7"}, "data": {}, "config": {}, "library": "0123"}
manifest["code"] = consistency.hash_project(Path.cwd(), consistency.OWN)
print(json.dumps(consistency.collect_facts(manifest, False)))
"""
# Texts of the program, of a module that it imports, and of one that it does not.
COPIES = [("1", "", "1"), ("1", "import json", "1"), ("2", "import json", "2")]


def test_the_program_and_modules_beside_it_are_compared(tmp_path):
    """Of another program than train.py too; what one process alone has loaded is no difference."""
    found = []
    for number, (program, helper, unused) in enumerate(COPIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        texts = {"train": "", "task": "", "helper": helper, "unused": unused}
        for name, text in (texts | {"train_pipeline": f"{PROGRAM}'{program}'"}).items():
            (folder / f"{name}.py").write_text(text)
        project = BakedProject(folder)
        ((_, printed, errors),) = preloaded(folder, [project.env()], ["train_pipeline.py"], 60)
        assert not errors
        found.append(json.loads(printed))
    assert {"code task.py", "module helper.py", "module train_pipeline.py"} <= {*found[0]}
    assert "module unused.py" not in found[0]

    def compare(*facts):
        gathered = [*zip("ab", facts, strict=True)]
        given = SimpleNamespace(gather=lambda _: gathered, differ=lambda _: True)
        alike.check_same(given, {})

    for pair, name, other in (((1, 2), "train_pipeline", "helper"), ((0, 1), "helper", "pipeline")):
        with pytest.raises(ranks.UserError, match=f"module {name}.py is ") as error:
            compare(*(found[i] for i in pair))
        assert other not in str(error.value)
    del found[0]["module helper.py"]
    compare(*found[:2])


def test_a_process_that_does_not_begin_is_named(tiny, tmp_path):
    """And its main process prints nothing, since it is not there."""
    env = tiny.envs(2)[1]
    words = ["-c", TRAIN, SOON, "--output_dir", tmp_path / "run", "--timeout", 2]
    ((code, _, errors),) = preloaded(tiny.path, [env], words, seconds=60)
    said = "train.py: waited 2 s for process 0 to begin; all meet at "
    check_ended([code, "", errors], begin=said, code=1)


# ---- Two machines --------------------------------------------------------------------------------


NODES = ROOT / "tests" / "nodes.sh"
NAMES = [f"node{i}-{os.getpid()}" for i in range(2)]


def train(project, *flags, other=None, interface="eth0"):
    """Trains on both nodes; exit codes and output of each. `other`: the project on node1."""
    launch = ["python", "-m", "samestep", "launch", "--num_machines", "2"]
    launch += ["--config_file", "configs/accelerate/cpu_multi.yaml", "--num_processes", "2"]
    launch += ["--main_process_ip", "10.77.0.1", "--main_process_port", "29500"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env, runs = project.env(GLOO_SOCKET_IFNAME=interface), []
    for i, folder in enumerate([project.path, other or project.path]):
        command = [NODES, "enter", NAMES[i], f"node{i}", folder, project.path, *launch]
        command = [*map(str, command), "--machine_rank", str(i), "train.py", *latest(flags)]
        runs.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, **pipes))
    try:
        printed = [run.communicate(timeout=300)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    return [run.returncode for run in runs], printed


@pytest.fixture(scope="module")
def nodes():
    made = subprocess.run([NODES, "add", *NAMES], capture_output=True, text=True)
    if made.returncode:
        subprocess.run([NODES, "remove", *NAMES], capture_output=True)
        pytest.skip(f"no network namespaces (of iproute2, util-linux): {made.stderr.strip()}")
    yield
    subprocess.run([NODES, "remove", *NAMES], check=True)


@pytest.fixture
def copy(tiny, tmp_path):
    """Another copy of the tiny project."""
    return shutil.copytree(tiny.path, tmp_path / "copy")


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_is_a_line(tiny, nodes, copy):
    codes, printed = train(tiny, "--output_dir", "runs/own", other=copy)
    (line,) = re.findall("^train.py: .*", "".join(printed), re.MULTILINE)
    assert codes == [2, 2], printed
    assert f"output_dir {tiny.path}/runs/own on node1 is not the folder that node0 writes" in line
    assert {each.name for each in (tiny.path / "runs" / "own").glob("*")} <= {"lock"}


@pytest.mark.slow
def test_a_broken_network_is_a_line(tiny, nodes, tmp_path):
    """The launchers meet through eth0; gloo is told to take another interface."""
    flags = ["--output_dir", tmp_path / "run", "--timeout", 8]
    codes, printed = train(tiny, *flags, interface="dead0")
    (line,) = re.findall("^train.py: .*", "".join(printed), re.MULTILINE)
    assert codes == [1, 1] and "Traceback" not in "".join(printed), printed
    assert "reach the main process at 10.77.0.1:29500, but not each other" in line
    assert "node1 at " in line and "GLOO_SOCKET_IFNAME is dead0" in line


@pytest.mark.slow
def test_two_machines_train_as_two_processes(tiny, nodes, copy, tmp_path):
    """Each with a copy of the project, and a run folder that both see. The one that is ready waits
    for the one that prepares."""
    flags = ["--output_dir", tmp_path / "run", "--task.prepare_seconds", 14]
    flags += ["--task.prepare_host", "node0"]
    codes, printed = train(tiny, *flags, other=copy)
    assert codes == [0, 0], printed
    line = "waiting for node0, which prepares data\n"
    assert [text.count(line) for text in printed] == [0, 1]
    tiny.train(2, "--output_dir", tmp_path / "processes")
    check_same_curve(tmp_path / "run", tmp_path / "processes", rel=0)
    assert len(lines(tmp_path / "run", "loss")) == 12
