"""Several machines in one run: two network namespaces, each with a host name of its own."""

import contextlib
import json
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from conftest import ROOT, SOURCE, TRAIN, BakedProject, latest, lines, preloaded
from refusals import cases, check_ended
from same import check_same_curve
from samestep.processes import alike, ranks
from samestep.state import consistency
from test_exact import SOON

# ---- What all processes must have in common ------------------------------------------------------

FACTS = {"torch": "2.13", "code task.py": "1", "learning_rate": "0.1"}


@pytest.mark.parametrize("changes, said", cases("differences"))
def test_a_difference_names_the_machines(changes, said):
    found = [FACTS | each for each in changes]
    processes = SimpleNamespace(gather=lambda _: [*zip("abc", found, strict=True)])
    with pytest.raises(ranks.UserError, match=said) if said else contextlib.nullcontext():
        alike.check_same(processes, FACTS)


def test_devices_may_differ_but_not_with_exact():
    versions = {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.0", "cpu": "AVX2"}
    manifest = {"hardware": versions, "data": {"fingerprint": "1"}, "config": {"seed": 0}}
    manifest |= {"code": consistency.hash_project(ROOT / SOURCE), "library": "0123"}
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
manifest["code"] = consistency.hash_project(Path.cwd())
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
        alike.check_same(SimpleNamespace(gather=lambda _: [*zip("ab", facts, strict=True)]), {})

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
