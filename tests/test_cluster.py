"""The files of cluster/: there if chosen, valid, and run for real where this machine can."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import yaml

import slurm as slurm_daemons
from conftest import ROOT, bake, digest, lines, make_tiny, status
from slurm import free_ports

FILES = {
    "none": [],
    "slurm": ["slurm.sbatch"],
    "kubernetes": ["kubernetes.yaml"],
    "skypilot": ["skypilot.yaml"],
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
    if cluster in ("slurm", "all"):
        assert os.access(project / "cluster" / "slurm.sbatch", os.X_OK)
        subprocess.run(["bash", "-n", project / "cluster" / "slurm.sbatch"], check=True)
    if cluster in ("kubernetes", "all"):  # whose names have no underscores
        for item in yaml.safe_load_all((project / "cluster" / "kubernetes.yaml").read_text()):
            assert item["metadata"]["name"] == "my-own-project"


def test_files_of_another_cluster_go_when_it_is_baked_over(tmp_path):
    project = bake(tmp_path, cluster="slurm").path
    (project / "cluster" / "mine.yaml").write_text("mine: 1\n")
    again = [sys.executable, "-m", "cookiecutter", str(ROOT), "--no-input", "--default-config"]
    again += ["--overwrite-if-exists", "--output-dir", str(tmp_path), "cluster=none"]
    subprocess.run(again, check=True, capture_output=True, env=os.environ | {"HOME": str(tmp_path)})
    assert [path.name for path in project.glob("cluster/*")] == ["mine.yaml"]


# ---- Kubernetes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifests(clustered):
    text = (clustered.path / "cluster" / "kubernetes.yaml").read_text()
    return {item["kind"]: item for item in yaml.safe_load_all(text)}


def test_kubernetes_takes_the_file(clustered):
    pytest.importorskip("kubernetes_validate")
    command = [sys.executable, "-m", "kubernetes_validate", "--strict"]
    for version in ([], ["-k", "1.31"]):
        words = [*command, *version, str(clustered.path / "cluster" / "kubernetes.yaml")]
        result = subprocess.run(words, capture_output=True, text=True)
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
        command = [sys.executable, *container["command"][1:], *words]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        runs.append(subprocess.Popen(command, cwd=clustered.path, env=clustered.env(), **pipe))
    printed = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], printed
    assert "2 x cpu" in printed[0] and status(tmp_path / "run")["state"] == "finished"


# ---- SkyPilot ------------------------------------------------------------------------------------

PARSE = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
((path, storage),) = task.storage_mounts.items()
recovery = resources.job_recovery
print(json.dumps([task.num_nodes, resources.use_spot, recovery, path, storage.mode.value]))
"""


@pytest.fixture(scope="session")
def skypilot():
    """A Python that has SkyPilot: it is large, and has an environment of its own."""
    python = ROOT / ".venv" / "skypilot" / "bin" / "python"
    if not python.exists():
        python.parent.parent.parent.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
        command = [python, "-m", "pip", "install", "--quiet", "skypilot>=0.14"]
        installed = subprocess.run(command, capture_output=True, text=True)
        if installed.returncode:
            shutil.rmtree(python.parent.parent)
            pytest.skip(f"SkyPilot cannot be installed: {installed.stderr[-300:]}")
    return python


@pytest.mark.slow
def test_skypilot_takes_the_file(clustered, skypilot, tmp_path):
    command = [skypilot, "-c", PARSE, clustered.path / "cluster" / "skypilot.yaml"]
    env = os.environ | {"HOME": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    nodes, spot, recovery, path, mode = json.loads(result.stdout.splitlines()[-1])
    assert (nodes, spot, path, mode) == (1, True, "/runs", "MOUNT_CACHED")
    assert recovery["recover_on_exit_codes"] == [75] and recovery["max_restarts_on_errors"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, code, starts",
    [([], 0, 1), (["--max_steps", -1], 2, 1), (["--task.signal_at", 20], 1, 2)],
)
def test_the_scripts_of_skypilot_run(clustered, tmp_path, flags, code, starts):
    """`setup` and `run`, with what SkyPilot exports to them; 20: a row that kills its process."""
    task = yaml.safe_load((clustered.path / "cluster" / "skypilot.yaml").read_text())
    flags = " ".join(map(str, ["--output_dir", tmp_path / "run", *flags]))
    env = {**task["envs"], "HARDWARE": "cpu_multi", "FLAGS": flags}
    env |= {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"}
    env |= {"SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": "2"}
    port = str(*free_ports(1))
    setup = task["setup"].replace("make setup\n", "")
    checked = clustered.run("bash", "-c", setup, check=False, **env)
    assert checked.returncode == (2 if code == 2 else 0), checked
    assert "for start in 1 2 3 4; do" in task["run"]
    run = task["run"].replace("1 2 3 4", "1 2").replace("29500", port)  # a start takes 10 s
    ran = clustered.run("bash", "-c", run, check=False, **env)
    assert ran.returncode == code, ran
    assert ran.stdout.count("checked: ") == (0 if code == 2 else starts)
    assert ran.stderr.count("train.py: ") == (code == 2), ran.stderr


# ---- Slurm ---------------------------------------------------------------------------------------


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

    def submit(*flags, options=(), **env):
        env = clustered.env(HARDWARE="cpu_multi", MAIN="127.0.0.1", **env)
        options = ["--cpus-per-task=1", "--gpus-per-node=1", "--time=30", *options]
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
    flags = ["--max_steps", 300, "--eval_every", 0, "--save_every", 100, "--task.dropout", 0.1]
    job, printed = submit(
        "--output_dir", output, *flags, "--task.row_seconds", 0.01, "--tracker", "wandb"
    )
    wait_for_job(
        slurm,
        job,
        lambda _: (output / "metrics.jsonl").exists() and len(lines(output, "loss")) > 20,
        printed,
    )
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


@pytest.mark.slow
def test_slurm_does_not_repeat_what_the_user_must_correct(slurm, submit, tmp_path):
    job, printed = submit("--output_dir", tmp_path / "run", "--max_steps", -1)
    wait_for_job(slurm, job, ended, printed)
    fields, text = slurm.job(job), printed.read_text()
    assert (fields["ExitCode"], fields["Restarts"]) == ("2:0", "0"), text
    assert text.count("max_steps") == 2 and "Traceback" not in text  # on each machine


@pytest.mark.slow
def test_slurm_prepares_before_it_trains(slurm, submit, clustered, tmp_path):
    """The two commands at the top of the file: the second job waits for the first."""
    text = (clustered.path / "cluster" / "slurm.sbatch").read_text()
    command, dependency = re.search(r'--wrap "(.+)"\)\n.*--dependency "(\w+):\$job"', text).groups()
    prepared = tmp_path / "prepared.txt"
    options = ["--parsable", "--cpus-per-task=1", f"--output={prepared}", "--wrap"]
    command += " --task.prepare_seconds 5"
    first = slurm.run("sbatch", *options, command, cwd=clustered.path, **clustered.env())
    flags = ["--output_dir", tmp_path / "run"]
    second, printed = submit(*flags, options=[f"--dependency={dependency}:{first}"])
    assert slurm.job(second)["JobState"] == "PENDING"
    wait_for_job(slurm, second, ended, printed)
    assert slurm.job(second)["JobState"] == "COMPLETED", printed.read_text()
    assert prepared.read_text() == "prepared: 37 rows to train on, 11 to evaluate on\n"


@pytest.mark.slow
def test_slurm_repeats_a_crash_so_many_times(slurm, submit, clustered, tmp_path):
    """A row kills its process whenever it is read."""
    flags = ["--output_dir", tmp_path / "run", "--task.signal_at", 20]
    job, printed = submit(*flags, CRASHES="1")
    wait_for_job(slurm, job, ended, printed)
    fields, text = slurm.job(job), printed.read_text()
    assert (fields["ExitCode"], fields["Restarts"]) == ("1:0", "1"), text
    assert text.count(" ended with 1\n") == 2 and "was ended by SIGKILL" in text
