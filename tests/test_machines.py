"""Several machines in one run: two network namespaces, each with a host name of its own."""

import contextlib
import json
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from conftest import ROOT, SOURCE, TRAIN, BakedProject, latest, lines, preloaded
from test_exact import SOON

# ---- What all processes must have in common ------------------------------------------------------

FACTS = {"torch": "2.13", "code task.py": "1", "learning_rate": "0.1"}


@pytest.mark.parametrize(
    "changes, said",
    [
        ([{}, {}, {}], ""),
        ([{}, {}, {"torch": "2.12"}], "torch is 2.13 on a, b and 2.12 on c; give"),
        ([{}, {"learning_rate": "1"}, {"code task.py": "2"}],
         "code task.py is 1 on a, b and 2 on c; learning_rate is 0.1 on a, c and 1 on b; give"),
        ([{"data x": f"{'a' * 30}{i}{'b' * 30}"} for i in "122"], "data x is a+...b+ on a and a+"),
    ],
)  # fmt: skip
def test_a_difference_names_the_machines(changes, said):
    from samestep.core import checks, ranks

    found = [{k: v for k, v in (FACTS | each).items() if v} for each in changes]
    processes = SimpleNamespace(gather=lambda _: [*zip("abc", found, strict=True)])
    with pytest.raises(ranks.UserError, match=said) if said else contextlib.nullcontext():
        checks.check_same(processes, FACTS)


def test_devices_may_differ_but_not_with_exact():
    from samestep.project import consistency

    versions = {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.0", "cpu": "AVX2"}
    manifest = {"hardware": versions, "data": {"fingerprint": "1"}, "config": {"seed": 0}}
    manifest |= {"code": consistency.hash_project(ROOT / SOURCE), "library": "0123"}
    facts = consistency.collect_facts(manifest, False)
    code = {name: facts.pop(name) for name in [*facts] if name.startswith("code ")}
    assert "code train.py" in code and facts.pop("library samestep") == "0123"
    assert facts == {"python": "3.11", "torch": "2.13.0", "seed": "0", "data fingerprint": "1"}
    facts = consistency.collect_facts(manifest, True)
    assert (facts["python"], facts["cpu"]) == ("3.11.7", "AVX2")


def test_the_program_and_modules_beside_it_are_compared(tmp_path):
    """Of another program than train.py too; what one process alone has loaded is no difference."""
    from samestep.core import checks, ranks

    manifest = {"hardware": {"python": "3.11.7"}, "data": {}, "config": {}, "library": "0123"}
    program = "import helper, json, sys; from pathlib import Path\n"
    program += "sys.path.insert(0, 'elsewhere')\nfrom samestep.project import consistency\n"
    program += f"manifest = {manifest} | {{'code': consistency.hash_project(Path.cwd())}}\n"
    program += "facts = consistency.collect_facts(manifest, False)\n"
    program += "print(json.dumps(facts))\n"
    found = []
    for number in "112":
        folder = tmp_path / str(len(found))
        folder.mkdir()
        for name in ("train.py", "task.py", "unused.py"):
            (folder / name).write_text(number if name == "unused.py" else "")
        (folder / "helper.py").write_text("" if len(found) else "import json")
        (folder / "train_pipeline.py").write_text(program + f"'{number}'")
        project = BakedProject(folder)
        ((_, printed, errors),) = preloaded(folder, [project.env()], ["train_pipeline.py"], 60)
        assert not errors
        found.append(json.loads(printed))
    assert {"code task.py", "module helper.py", "module train_pipeline.py"} <= {*found[0]}
    assert "module unused.py" not in found[0]
    names = ["module train_pipeline.py", "module helper.py"]
    for pair, differ in (((1, 2), names[:1]), ((0, 1), names[1:])):
        given = [found[i] for i in pair]
        processes = SimpleNamespace(gather=lambda _, given=given: [*zip("ab", given, strict=True)])
        with pytest.raises(ranks.UserError) as error:
            checks.check_same(processes, {})
        assert [name for name in names if f"{name} is " in str(error.value)] == differ
    del given[0]["module helper.py"]
    checks.check_same(processes, {})


def test_an_interface_that_is_not_there_is_named(tiny, tmp_path):
    env = {"GLOO_SOCKET_IFNAME": "no-such"}
    printed = tiny.train(2, "--output_dir", tmp_path / "run", codes=[1], env=env)
    assert "Unable to find address for: no-such" in printed and "Traceback" not in printed
    assert printed.count("GLOO_SOCKET_IFNAME is no-such: ") == 1


def test_a_process_that_does_not_begin_is_named(tiny, tmp_path):
    """And its main process prints nothing, since it is not there."""
    env = tiny.envs(2)[1]
    words = ["-c", TRAIN, SOON, "--output_dir", tmp_path / "run", "--timeout", 2]
    ((code, _, errors),) = preloaded(tiny.path, [env], words, seconds=60)
    said = "train.py: waited 2 s for process 0 to begin; all meet at "
    assert code == 1 and errors.startswith(said) and errors.count("\n") == 1


# ---- Two machines --------------------------------------------------------------------------------


def without_namespaces():
    """Why there can be no network namespaces here; "" where there can."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "no ip or unshare: apt-get install iproute2 util-linux"
    name = f"try{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Machines:
    """node0 and node1. Their interface eth0 joins them; what is sent through dead0 is lost."""

    def __init__(self):
        self.names = [f"node{i}-{os.getpid()}" for i in range(2)]
        for name in self.names:
            self.ip("netns", "add", name)
        ends = [["netns", name, "name", "eth0"] for name in self.names]
        self.ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for i, name in enumerate(self.names):
            self.ip("-n", name, "link", "add", "dead0", "type", "veth", "peer", "dead1")
            for network, device in (("77", "eth0"), ("78", "dead0")):
                self.ip("-n", name, "address", "add", f"10.{network}.0.{i + 1}/24", "dev", device)
            for device in ("lo", "eth0", "dead0", "dead1"):
                self.ip("-n", name, "link", "set", device, "up")

    @staticmethod
    def ip(*words):
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    def start(self, i, project, *flags, folder=None, interface="eth0"):
        """A launcher on a machine; `folder`: what lies there in the place of the project."""
        enter = (
            'echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" "$3" && cd "$3" && shift 3 '
            '&& exec "$@"'
        )
        command = ["ip", "netns", "exec", self.names[i], "unshare", "--uts", "--mount"]
        command += ["sh", "-c", enter, "sh", f"node{i}", folder or project.path, project.path]
        command += ["python", "-m", "samestep", "launch"]
        command += ["--config_file", "configs/accelerate/cpu_multi.yaml"]
        command += ["--num_machines", "2", "--num_processes", "2", "--machine_rank", i]
        command += ["--main_process_ip", "10.77.0.1", "--main_process_port", "29500"]
        command += ["train.py", *latest(flags)]
        return subprocess.Popen(
            [*map(str, command)],
            env=project.env(GLOO_SOCKET_IFNAME=interface),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def train(self, project, *flags, other=None, interface="eth0"):
        """Trains on both; exit codes and output of each. `other`: the project on node1."""
        runs = [
            self.start(i, project, *flags, folder=folder, interface=interface)
            for i, folder in enumerate([None, other])
        ]
        try:
            printed = [run.communicate(timeout=300)[0] for run in runs]
        finally:
            for run in runs:
                run.kill()
        return [run.returncode for run in runs], printed

    def clean(self):
        for name in self.names:
            if pids := self.ip("netns", "pids", name).stdout.split():
                subprocess.run(["kill", "-9", *pids])
            self.ip("netns", "delete", name)


@pytest.fixture(scope="module")
def machines():
    reason = without_namespaces()
    if reason:
        pytest.skip(reason)
    made = Machines()
    yield made
    made.clean()


def own_lines(printed):
    """What the project says of an error, on both machines; not what gloo logs."""
    return [line for text in printed for line in text.splitlines() if line.startswith("train.py: ")]


@pytest.fixture
def copy(tiny, tmp_path):
    """Another copy of the tiny project."""
    return shutil.copytree(tiny.path, tmp_path / "copy")


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_is_a_line(tiny, machines, copy):
    codes, printed = machines.train(tiny, "--output_dir", "runs/own", other=copy)
    (line,) = own_lines(printed)
    assert codes == [2, 2], printed
    assert f"output_dir {tiny.path}/runs/own on node1 is not the folder that node0 writes" in line
    assert {each.name for each in (tiny.path / "runs" / "own").glob("*")} <= {"lock"}


@pytest.mark.slow
def test_a_broken_network_is_a_line(tiny, machines, tmp_path):
    """The launchers meet through eth0; gloo is told to take another interface."""
    flags = ["--output_dir", tmp_path / "run", "--timeout", 8]
    codes, printed = machines.train(tiny, *flags, interface="dead0")
    (line,) = own_lines(printed)
    assert codes == [1, 1] and "Traceback" not in "".join(printed), printed
    assert "reach the main process at 10.77.0.1:29500, but not each other" in line
    assert "node1 at " in line and "GLOO_SOCKET_IFNAME is dead0" in line


@pytest.mark.slow
def test_two_machines_train_as_two_processes(tiny, machines, copy, tmp_path):
    """Each with a copy of the project, and a run folder that both see. The one that is ready waits
    for the one that prepares."""
    flags = ["--output_dir", tmp_path / "run", "--task.prepare_seconds", 14]
    flags += ["--task.prepare_host", "node0"]
    codes, printed = machines.train(tiny, *flags, other=copy)
    assert codes == [0, 0], printed
    line = "waiting for node0, which prepares data\n"
    assert [text.count(line) for text in printed] == [0, 1]
    tiny.train(2, "--output_dir", tmp_path / "processes")
    trained = [lines(tmp_path / name, "loss") for name in ("run", "processes")]
    losses = [[line["loss"] for line in run] for run in trained]
    assert losses[0] == losses[1] and len(losses[0]) == 12
