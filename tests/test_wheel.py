"""The library as a package: its version, what indexes and installers read of it, its types."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.metadata import Metadata
from packaging.version import Version

import samestep
from conftest import ROOT, SOURCE, copy_template, edit
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
