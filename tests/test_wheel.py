"""The library as a package: its version, what indexes and installers read of it, its types."""

import ast
import importlib.metadata
import itertools
import os
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version

import samestep
from conftest import ROOT, SOURCE, bake, copy_template

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
    template = copy_template(tmp_path / "template")

    def wheel():
        path = write_wheel(template)
        assert os.listdir(template / "out") == [path.name]
        return path.name, path.read_bytes()

    first = wheel()
    assert wheel() == first
    file = template / "src" / "samestep" / "base" / "files.py"
    file.write_text(file.read_text() + "# Mine.\n")
    second = wheel()
    # Otherwise an installer would take the wheel for one that is installed.
    settings = template / "{{cookiecutter.project_slug}}" / "pyproject.toml"
    text = settings.read_text()
    assert '"psutil>=7.0"' in text
    settings.write_text(text.replace('"psutil>=7.0"', '"psutil>=7.1"'))
    third = wheel()
    assert len({first[0], second[0], third[0]}) == len({first[1], second[1], third[1]}) == 3


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
    names = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    module = node.module
                    if module == "samestep":
                        module = samestep.contents()[alias.name]
                    names |= {module, f"{module}.{alias.name}"}
    source = ROOT / "src"
    modules = {
        name for name in names if source.joinpath(*name.split(".")).with_suffix(".py").is_file()
    }
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    (override,) = settings["overrides"]
    assert override["strict_optional"] is True
    assert len(modules) > 20 and {*override["module"]} == modules


def test_urls_come_from_the_template(tmp_path, wheels):
    assert not wheels[0][1].project_urls
    template = copy_template(tmp_path / "template")
    file = template / "pyproject.toml"
    text = file.read_text()
    assert "\n[project.urls]\n" in text
    urls = '\n[project.urls]\nrepository = "https://example.org/x"\n'
    file.write_text(text.replace("\n[project.urls]\n", urls))
    with zipfile.ZipFile(write_wheel(template)) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        assert "Project-URL: repository, https://example.org/x\n" in archive.read(name).decode()


def imported_packages(path):
    """The packages that a file imports at once, and those that it imports later or perhaps."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [set(), set()]
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        tops = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names} - OWN
        found[node not in tree.body] |= {PACKAGES.get(name, name) for name in tops}
    return found


def test_the_wheel_requires_what_it_imports(wheels):
    """With lower bounds; what some tasks, trackers and launchers need are extras."""
    folder, metadata = wheels[0]
    required, extra = {}, {}
    for requirement in metadata.requires_dist:
        assert str(requirement.specifier).startswith(">=")
        (extra if requirement.marker else required)[requirement.name] = requirement
    at_once, later = set(), set()
    for path in folder.rglob("*.py"):
        first, second = imported_packages(path)
        later |= first | second
        if "examples" not in path.parts:
            at_once |= first
    assert len(at_once) > 10 and at_once <= required.keys()
    assert len(later) > len(at_once) and later <= required.keys() | extra.keys()


def test_a_project_of_each_task_requires_what_the_wheel_does(wheels, tmp_path):
    _, metadata = wheels[0]
    extras = {*metadata.provides_extra}
    for task in ("causal_lm", "image_classification"):
        path = bake(tmp_path / task, task=task, tracker="wandb").path
        project = tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert metadata.requires_python == project["requires-python"]
        chosen = {"extra": ""}, {"extra": task.replace("_", "-")}, {"extra": "wandb"}
        assert {each["extra"] for each in chosen} - {""} < extras
        needed = {
            (each.name, str(each.specifier))
            for each, env in itertools.product(metadata.requires_dist, chosen)
            if each.marker is None or each.marker.evaluate(env)
        }
        declared = map(Requirement, project["dependencies"])
        found = {(each.name, str(each.specifier)) for each in declared}
        assert needed == {each for each in found if each[0] != "samestep"}
