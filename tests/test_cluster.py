"""The files of cluster/: there if chosen, valid, and run without a cluster."""

import os
import subprocess
import sys

import pytest
import yaml
from torch.distributed.elastic.utils.distributed import get_free_port

from conftest import bake, make_tiny, status

FILES = {
    "none": [],
    "slurm": ["slurm.sbatch"],
    "all": ["kubernetes.yaml", "skypilot.yaml", "slurm.sbatch"],
}


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """The tiny project with all files of clusters, and the Python of the tests as its own."""
    project = make_tiny(tmp_path_factory.mktemp("cluster"), cluster="all")
    python = project.path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return project


def newest(output):
    return max(output.glob("checkpoints/step-*"))


@pytest.mark.parametrize("cluster", FILES)
def test_files_are_those_of_the_cluster(tmp_path, cluster):
    project = bake(tmp_path, cluster=cluster, project_slug="my_own-project").path
    assert (project / "cluster").exists() == (cluster != "none")
    assert sorted(path.name for path in project.glob("cluster/*")) == FILES[cluster]
    readme = (project / "README.md").read_text(encoding="utf-8")
    for name in FILES["all"]:
        assert (f"cluster/{name}" in readme) == (name in FILES[cluster])
    if cluster != "none":
        assert os.access(project / "cluster" / "slurm.sbatch", os.X_OK)
        subprocess.run(["bash", "-n", project / "cluster" / "slurm.sbatch"], check=True)
    if cluster == "all":  # whose names have no underscores
        for item in yaml.safe_load_all((project / "cluster" / "kubernetes.yaml").read_text()):
            assert item["metadata"]["name"] == "my-own-project"


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
    changes |= {"--main_process_ip": "127.0.0.1", "--main_process_port": get_free_port()}
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


def test_skypilot_starts_again_what_was_stopped_and_nothing_else(clustered):
    task = yaml.safe_load((clustered.path / "cluster" / "skypilot.yaml").read_text())
    recovery = task["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [75] and recovery["max_restarts_on_errors"] == 0
    assert task["file_mounts"]["/runs"]["mode"] == "MOUNT_CACHED"


@pytest.mark.slow
def test_the_scripts_of_skypilot_run(clustered, tmp_path):
    """`setup` and `run`, with what SkyPilot exports to them."""
    task = yaml.safe_load((clustered.path / "cluster" / "skypilot.yaml").read_text())
    flags = f"--output_dir {tmp_path / 'run'} --max_steps 2"
    env = {**task["envs"], "HARDWARE": "cpu_multi", "FLAGS": flags}
    env |= {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"}
    env |= {"SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": "2"}
    setup = task["setup"].replace("make setup\n", "")
    assert "checked: " in clustered.run("bash", "-c", setup, **env).stdout
    run = task["run"].replace("29500", str(get_free_port()))
    clustered.run("bash", "-c", run, **env)
    assert status(tmp_path / "run")["state"] == "finished"


# Takes the place of a program that ends with the codes in a file, one a start.
NEXT_CODE = '#!/bin/sh\nread code rest < codes; echo "$rest" > codes; exit "$code"\n'


def put_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_the_script_of_skypilot_repeats_a_crash_but_no_mistake(clustered, tmp_path):
    task = yaml.safe_load((clustered.path / "cluster" / "skypilot.yaml").read_text())
    put_program(tmp_path / ".venv" / "bin" / "python", NEXT_CODE)
    env = {**os.environ, **task["envs"], "SKYPILOT_NODE_IPS": "127.0.0.1"}
    env |= {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    for codes, code, left in [("1 1 0 9", 0, "9"), ("1 2 9", 2, "9"), ("137 1 1 1 9", 1, "9")]:
        (tmp_path / "codes").write_text(f"{codes}\n")
        run = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=env)
        assert run.returncode == code and (tmp_path / "codes").read_text() == f"{left}\n"


# ---- Slurm ---------------------------------------------------------------------------------------


def test_the_script_of_slurm_repeats_what_was_stopped_and_one_crash(clustered, tmp_path):
    """A start ends with 75, 1, 1, 2 or 0."""
    path = clustered.path / "cluster" / "slurm.sbatch"
    lines = path.read_text(encoding="utf-8").splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert {"--requeue", "--open-mode=append", "--ntasks-per-node=1"} < options
    put_program(tmp_path / "bin" / "srun", NEXT_CODE)
    put_program(tmp_path / "bin" / "scontrol", '#!/bin/sh\necho "$@" >> requeued; exit 1\n')
    env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "CRASHES": "1", "MAIN": "a"}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(tmp_path)}
    (tmp_path / "codes").write_text("75 1 1 2 0\n")
    found = []
    for _ in range(5):
        (tmp_path / "requeued").write_text("")
        code = subprocess.run(["bash", path], env=env, capture_output=True).returncode
        found.append((code, (tmp_path / "requeued").read_text()))
    again = "requeue 7\n"
    assert found == [(75, again), (1, again), (1, ""), (2, ""), (0, "")]
