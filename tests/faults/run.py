"""Puts faults into copies of the repository, and prints which quick tests catch each.

A fault is a file NAME.patch beside this one: a sentence on what it breaks, lines `tests:` with the
tests to run (below tests/; of a file all, or one by its id), and a diff. Its hunks have no line
numbers: their old lines are searched for in the file, and must be there exactly once.

The same tests also run in a copy without a fault, where all of them must pass.
"""

import argparse
import concurrent.futures
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = (".git", ".venv", "demo", "runs", "wandb", "__pycache__", ".*_cache", ".cache")
SHOWN = 3  # tests in a row of the table


def read_fault(path: Path) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The tests to run, and the hunks: of each its file and its lines."""
    tests: list[str] = []
    hunks: list[tuple[str, list[str]]] = []
    header, *parts = re.split(r"^--- a/.*\n\+\+\+ b/", path.read_text("utf-8"), flags=re.MULTILINE)
    for line in header.splitlines():
        if line.startswith("tests: "):
            tests += line.split()[1:]
    for part in parts:
        file, *found = re.split(r"^@@.*\n", part, flags=re.MULTILINE)
        hunks += [(file.strip(), hunk.splitlines()) for hunk in found]
    return tests, hunks


def faulty_files(name: str, hunks: list[tuple[str, list[str]]]) -> dict[str, str]:
    """The texts of the files with the fault in them. Ends the program if its place is gone."""
    texts: dict[str, str] = {}
    for file, lines in hunks:
        if file not in texts:
            texts[file] = "\n" + (ROOT / file).read_text("utf-8") if (ROOT / file).exists() else ""
        old = "".join(f"\n{line[1:]}" for line in lines if not line.startswith("+")) + "\n"
        new = "".join(f"\n{line[1:]}" for line in lines if not line.startswith("-")) + "\n"
        if texts[file].count(old) != 1:
            found = f"{texts[file].count(old)} times in {file}, and not once"
            sys.exit(f"{name}.patch does not apply any more, rewrite it: this is {found}:{old}")
        texts[file] = texts[file].replace(old, new)
    return {file: text[1:] for file, text in texts.items()}


def failing_tests(name: str, files: dict[str, str], tests: list[str]) -> list[str]:
    """The tests that fail in a copy with these files; no slow ones run."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy, report = Path(folder, "copy"), Path(folder, "report.xml")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for file, text in files.items():
            (copy / file).write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-m", "not slow"]
        command += [f"--basetemp={folder}/tmp", f"--junitxml={report}"]
        command += [f"tests/{test}" for test in tests]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
        if run.returncode not in (0, 1):  # a test that is gone, nothing but slow ones, no import
            sys.exit(f"{name}: pytest ended with {run.returncode}:\n{run.stdout}{run.stderr}")
        failed = []
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            if {"failure", "error"} & {child.tag for child in case}:
                failed.append(f"{case.get('classname').split('.')[-1]}::{case.get('name')}")
    print(f"{name}: {len(failed)} tests fail", file=sys.stderr, flush=True)
    return failed


def main() -> None:
    known = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.patch"))}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="*", help="a fault, by its file's name; without one, all")
    args = parser.parse_args()
    if unknown := {*args.name} - {*known}:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    names = args.name or [*known]
    tests, hunks = zip(*(read_fault(known[name]) for name in names), strict=True)
    files = [faulty_files(*each) for each in zip(names, hunks, strict=True)]
    every = sorted({test for each in tests for test in each})
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        sound = pool.submit(failing_tests, "no fault", {}, every)
        results = [*pool.map(failing_tests, names, files, tests)]
    if broken := sound.result():
        sys.exit(f"these fail without a fault, so they show nothing: {', '.join(broken)}")
    versions = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    print(f"{time.strftime('%Y-%m-%d')}, {versions}, {os.cpu_count()} CPU cores\n")
    print("| fault | caught by | the first of these |\n| --- | --- | --- |")
    for name, failed in zip(names, results, strict=True):
        first = "<br>".join(failed[:SHOWN]) or "**no test**"
        print(f"| {name} | {len(failed)} | {first} |")
    missed = [name for name, failed in zip(names, results, strict=True) if not failed]
    print(f"\n{len(names) - len(missed)} of {len(names)} faults are caught.")
    if missed:
        sys.exit(f"caught by no quick test: {', '.join(missed)}")


if __name__ == "__main__":
    main()
