"""The files of cluster/: there if chosen, valid, and run for real where this machine can."""

import os
import re
import subprocess
import sys
import time

import pytest
import yaml

import slurm as slurm_daemons
from conftest import bake, digest, make_tiny, newest, status, trained
from slurm import free_ports

ALL = ["kubernetes.yaml", "skypilot.yaml", "slurm.sbatch"]
FILES = {"none": [], "slurm": ["slurm.sbatch"], "all": ALL}


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """The tiny project with all files of clusters, and the Python of the tests as its own."""
    project = make_tiny(tmp_path_factory.mktemp("cluster"), cluster="all")
    python = project.path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return project


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
        sky = yaml.safe_load((project / "cluster" / "skypilot.yaml").read_text())
        assert sky["name"] == f"my-own-{'a' * 42}"  # at most 50 characters, the last no hyphen


# ---- Kubernetes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifests(clustered):
    text = (clustered.path / "cluster" / "kubernetes.yaml").read_text()
    return {item["kind"]: item for item in yaml.safe_load_all(text)}


def test_kubernetes_takes_the_file(clustered):
    pytest.importorskip("kubernetes_validate")
    command = [sys.executable, "-m", "kubernetes_validate", "--strict"]
    command.append(str(clustered.path / "cluster" / "kubernetes.yaml"))
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.count(" passed ") == 3, result


def test_pods_meet_and_end_as_the_exit_codes_say(manifests):
    job, service = manifests["Job"]["spec"], manifests["Service"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["clusterIP"] == "None" and pod["restartPolicy"] == "Never"
    assert service["spec"]["selector"] == {"job-name": manifests["Job"]["metadata"]["name"]}
    name = service["metadata"]["name"]
    assert pod["subdomain"] == name
    arguments = dict(word[2:].split("=", 1) for word in container["args"] if "=" in word)
    assert arguments["main_process_ip"] == f"{name}-0.{name}"
    assert int(arguments["num_machines"]) == job["completions"] == job["parallelism"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(arguments["num_processes"]) == gpus * job["completions"]
    rules = job["podFailurePolicy"]["rules"]
    codes = {
        rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule
    }
    assert codes == {"FailJob": [2], "Ignore": [75]}
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert manifests["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.slow
def test_the_command_of_the_pods_trains(clustered, manifests, tmp_path):
    """Two pods are two launchers; here they have no network of their own, and no GPU."""
    (container,) = manifests["Job"]["spec"]["template"]["spec"]["containers"]
    changes = {"--config_file": "configs/accelerate/cpu_multi.yaml", "--num_processes": 2}
    changes |= {"--main_process_ip": "127.0.0.1", "--main_process_port": free_ports(1)[0]}
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


# ---- SkyPilot ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sky(clustered):
    return yaml.safe_load((clustered.path / "cluster" / "skypilot.yaml").read_text())


def test_skypilot_starts_again_what_was_stopped_and_nothing_else(sky):
    recovery = sky["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [75] and recovery["max_restarts_on_errors"] == 0
    assert sky["file_mounts"]["/runs"]["mode"] == "MOUNT_CACHED"


@pytest.mark.slow
def test_the_scripts_of_skypilot_run(clustered, sky, tmp_path):
    """`setup` and `run`, with what SkyPilot exports to them."""
    flags = f"--output_dir {tmp_path / 'run'} --max_steps 2"
    env = {**sky["envs"], "HARDWARE": "cpu_multi", "FLAGS": flags}
    env |= {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"}
    env |= {"SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": "2"}
    setup = sky["setup"].replace("make setup\n", "")
    assert "checked: " in clustered.run("bash", "-c", setup, **env).stdout
    clustered.run("bash", "-c", sky["run"].replace("29500", str(*free_ports(1))), **env)
    assert status(tmp_path / "run")["state"] == "finished"


# Takes the place of a program that ends with the codes in a file, one a start.
NEXT_CODE = '#!/bin/sh\nread code rest < codes; echo "$rest" > codes; exit "$code"\n'


def put_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_the_script_of_skypilot_repeats_a_crash_but_no_mistake(sky, tmp_path):
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
    found = []
    for _ in range(5):
        (tmp_path / "requeued").write_text("")
        script = ["bash", clustered.path / "cluster" / "slurm.sbatch"]
        code = subprocess.run(script, env=env, capture_output=True).returncode
        found.append((code, (tmp_path / "requeued").read_text()))
    again = "requeue 7\n"
    assert found == [(75, again), (1, again), (1, ""), (2, ""), (0, "")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    try:
        with slurm_daemons.started(tmp_path_factory.mktemp("slurm")) as running:
            yield running
    except slurm_daemons.NotHere as reason:
        pytest.skip(str(reason))


@pytest.fixture
def submit(slurm, clustered, tmp_path):
    """Gives a function that submits cluster/slurm.sbatch as it is: the job, and what it prints."""
    jobs = []

    def submit(*flags, **env):
        env = clustered.env(HARDWARE="cpu_multi", MAIN="127.0.0.1", **env)
        options = ["--cpus-per-task=1", "--gpus-per-node=1", "--time=30"]
        output = tmp_path / f"job{len(jobs)}.txt"
        command = ["sbatch", "--parsable", *options, f"--output={output}", "cluster/slurm.sbatch"]
        jobs.append(slurm.run(*command, *flags, cwd=clustered.path, **env))
        return jobs[-1], output

    yield submit
    for job in jobs:
        slurm.run("scancel", job)


def wait_for_job(slurm, job, condition, output, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition(slurm.job(job)):
        assert time.monotonic() < deadline, f"{slurm.job(job)}\n{output.read_text()}"
        time.sleep(0.5)


def ended(fields):
    return fields["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


@pytest.mark.slow
def test_slurm_stops_requeues_and_finishes_a_run(slurm, submit, tiny, tmp_path):
    """Told USR1, as before its time limit; the weights are those of an undisturbed run."""
    output = tmp_path / "run"
    flags = ["--max_steps", 150, "--eval_every", 0, "--save_every", 100, "--task.dropout", 0.1]
    slow = ["--task.row_seconds", 0.02, "--tracker", "wandb"]
    job, printed = submit("--output_dir", output, *flags, *slow)
    wait_for_job(slurm, job, lambda _: trained(output, 20), printed)
    slurm.run("scancel", "--signal=USR1", job)
    wait_for_job(slurm, job, ended, printed)
    text, fields = printed.read_text(), slurm.job(job)
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
