"""The library as a package: its version, what indexes and installers read of it, its types;
and as a part of a project, where eject copies its sources.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.metadata import Metadata
from packaging.version import Version

import samestep
from conftest import ROOT, SOURCE, bake, copy_template, edit
from refusals import check_ended
from test_bake import imports

# Imports that have another name than the package.
PACKAGES = {"PIL": "pillow", "pydantic_core": "pydantic", "sklearn": "scikit-learn"}
PACKAGES |= {"yaml": "pyyaml"}
OWN = {"samestep", "task", "train"}  # a project's own files; only examples import them


def write_wheel(template, *options):
    """Write the wheel of a template into its folder `out`; its path."""
    command = [sys.executable, "local_extensions/wheel.py", "out", *options]
    printed = subprocess.check_output(command, cwd=template, text=True)
    return template / printed.strip()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheel of these sources and that of a release: each unpacked, and its metadata."""
    found = []
    for options in ([], ["--release"]):
        template = copy_template(tmp_path_factory.mktemp("wheel") / "template")
        folder = template.parent / "unpacked"
        zipfile.ZipFile(write_wheel(template, *options)).extractall(folder)
        (info,) = folder.glob("*.dist-info")
        found.append((folder, Metadata.from_email((info / "METADATA").read_bytes())))
    return found


def test_the_version_of_the_wheel_names_its_content(tmp_path):
    """Otherwise an installer would take the wheel for one that is installed."""
    template = copy_template(tmp_path / "template")
    found = []
    for name, old, new in (
        ("src/samestep/base/files.py", "import os\n", "import os\n"),
        ("src/samestep/base/files.py", "import os\n", "import os\n# Mine.\n"),
        (f"{SOURCE}/pyproject.toml", '"psutil>=7.0"', '"psutil>=7.1"'),
    ):
        edit(template / name, old, new)
        wheel = write_wheel(template)
        assert os.listdir(template / "out") == [wheel.name]
        found.append((wheel.name, wheel.read_bytes()))
    assert write_wheel(template).read_bytes() == found[-1][1]
    assert len({name for name, _ in found}) == len({content for _, content in found}) == 3


def test_the_wheel_says_its_version_license_and_types(wheels):
    """And __version__ is what is installed; that of a release is one that an index takes."""
    for folder, metadata in wheels:
        code = "import samestep; print(samestep.__version__, samestep.__file__)"
        command = [sys.executable, "-S", "-c", code]
        printed = subprocess.check_output(command, cwd=folder, text=True).split()
        assert printed == [str(metadata.version), str(folder / "samestep" / "__init__.py")]
        (installed,) = importlib.metadata.distributions(path=[str(folder)])
        assert installed.version == str(metadata.version)
        assert (metadata.name, metadata.license_expression) == ("samestep", "MIT")
        assert metadata.summary.startswith("The library under train.py") and metadata.description
        (info,) = folder.glob("*.dist-info")
        assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
        assert (folder / "samestep" / "py.typed").read_bytes() == b""
    sources, release = [metadata.version for _, metadata in wheels]
    assert sources.local and not release.local and Version(sources.public) == release
    assert wheels[0][1].requires_dist == wheels[1][1].requires_dist


def test_types_of_what_a_project_imports_say_what_may_be_none():
    """mypy checks these modules with strict_optional; `make test-all` runs it."""
    files = [ROOT / SOURCE / "train.py", *ROOT.glob("templates/*/task.py")]
    names = set().union(*map(imports, files))
    for name, module in samestep.contents().items():
        if f"samestep.{name}" in names:
            names |= {module, f"{module}.{name}"}
    places = {name: ROOT.joinpath("src", *name.split(".")).with_suffix(".py") for name in names}
    modules = {name for name, place in places.items() if place.is_file()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    (override,) = settings["overrides"]
    assert override["strict_optional"] is True
    assert len(modules) > 20 and {*override["module"]} == modules


def packages(path, at_once=False):
    """The packages that a file imports, or those that it imports at its start."""
    tops = {name.partition(".")[0] for name in imports(path, at_once)}
    return {PACKAGES.get(name, name) for name in tops - {*sys.stdlib_module_names} - OWN}


def test_the_wheel_requires_what_it_imports(wheels):
    """With lower bounds; what some tasks, trackers and launchers need are extras."""
    folder, metadata = wheels[0]
    required, extra = {}, {}
    for requirement in metadata.requires_dist:
        assert str(requirement.specifier).startswith(">=")
        (extra if requirement.marker else required)[requirement.name] = requirement
    at_once, later = set(), set()
    for path in folder.rglob("*.py"):
        later |= packages(path)
        if "examples" not in path.parts:
            at_once |= packages(path, at_once=True)
    assert len(at_once) > 10 and at_once <= required.keys()
    assert len(later) > len(at_once) and later <= required.keys() | extra.keys()


SAMESTEP = ("python", "-m", "samestep")


@pytest.fixture(scope="module")
def ejected(tmp_path_factory):
    """A project whose owner has ejected the library, and changed a line of it."""
    project = bake(tmp_path_factory.mktemp("ejected"), tracker="none")
    (project.path / ".samestep.partial" / "old").mkdir(parents=True)  # of a copy that was cut short
    said = project.run(*SAMESTEP, "eject").stdout
    assert said.startswith("samestep/ has the library's ") and said.count("\n") == 1
    assert not (project.path / "samestep" / "old").exists()
    console = project.path / "samestep" / "base" / "console.py"
    edit(console, "tqdm.write(escaped(text", "tqdm.write('mine: ' + escaped(text")
    return project


def test_eject_overwrites_nothing_and_is_listed(ejected):
    check_ended(ejected.run(*SAMESTEP, "eject", check=False), begin="samestep eject: ")
    assert not (ejected.path / ".samestep.partial").exists()
    listed = ejected.run(*SAMESTEP).stdout
    assert "launch     trains: becomes train.py" in listed and "eject " in listed


@pytest.mark.slow
def test_what_was_ejected_is_what_runs(ejected):
    flags = ["--config", "configs/train/smoke.yaml", "--max_steps", 3, "--output_dir", "runs/a"]
    assert "mine: step 3/3  eval_loss" in ejected.train(1, *flags)
    launch = ["accelerate", "launch", "--quiet", "--config_file", "configs/accelerate/cpu.yaml"]
    assert "mine: runs/a is finished" in ejected.run(*launch, "train.py", *flags).stdout


@pytest.mark.slow
def test_a_library_that_the_project_does_not_ask_for_is_refused(ejected, tmp_path):
    """After git pull or make update, without make setup: before any import of it can fail."""
    project = bake(tmp_path, tracker="none")
    (wheel,) = project.path.glob("vendor/*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "library")
    path = {"PYTHONPATH": str(tmp_path / "library")}
    settings = project.path / "pyproject.toml"
    version = wheel.name.split("-")[1]
    commands = (["train.py", "--help"], ["-m", "samestep", "plot", "--help"])
    assert [project.run("python", *words, **path).returncode for words in commands] == [0, 0]
    settings.write_text(settings.read_text().replace(version, "1.0.0+0123abcd"))
    said = f"pyproject.toml asks for samestep 1.0.0+0123abcd, and {version} is installed; run make"
    for words in commands:
        check_ended(project.run("python", *words, check=False, **path), said)
    # One that lies beside train.py is the project's own.
    shutil.copytree(ejected.path / "samestep", project.path / "samestep")
    assert project.run("python", *commands[0], **path).returncode == 0
