"""Runs Lightning's suite in each mode, and fails for what nobody expects.

LIGHTNING_TESTS=/path/to/tests/tests_pytorch python -m tests.lightning_suite [-m MODE] [FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from tests.lightning_suite.expectations import EXPECTED, Outcomes, judge, parse
from tests.lightning_suite.modes import MODES, Mode
from tests.lightning_suite.plugin import MODE, OUTCOMES, UNFINISHED
from tests.ranks import REPOSITORY, warm_python

FOLDERS = ("trainer", "callbacks", "checkpointing", "loops", "models", "core", "tuner")
ON_RANKS = ("--timeout", "30", "--timeout-method", "thread")
"""A rank that waits for another one is inside MPI, where only the end of its process ends it."""


def main() -> int:
    """Run the modes and folders that the command line names; all by default."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("folders", nargs="*", default=FOLDERS)
    options.add_argument("-m", "--mode", action="append", choices=[m for m in MODES if _ours(m)])
    given = options.parse_args()
    suite = os.environ.get("LIGHTNING_TESTS")
    if suite is None:
        options.error("LIGHTNING_TESTS has to name the folder tests/tests_pytorch of Lightning")
    expected, fine = parse(EXPECTED.read_text()), True
    done: dict[str, Outcomes] = {}
    for mode in (MODES[name] for name in given.mode or filter(_ours, MODES)):
        reference = MODES[mode.compared_with]
        if reference.name not in done:
            done[reference.name] = run(reference, suite, given.folders)
        before = done[reference.name]
        if mode.ranks == 1:
            ours = run(mode, suite, given.folders)
        else:
            passed = [test for test, (outcome, _) in before.items() if outcome == "passed"]
            ours = run_on_ranks(mode, suite, passed)
        done[mode.name] = ours
        verdict = judge(ours, before, expected.get(mode.name, {}), given.folders)
        print(f"{mode.name}: {verdict} in {reference.name}", flush=True)
        fine = fine and bool(verdict)
    return 0 if fine else 1


def _ours(name: str) -> bool:
    return MODES[name].compared_with is not None


def run(mode: Mode, suite: str, folders: list[str]) -> Outcomes:
    """Run folders of the suite in one process each; the outcome of each test."""
    outcomes: dict[str, list[str]] = {}
    for folder in folders:
        print(f"  {mode.name}: {folder} ...", flush=True)
        outcomes |= _pytest([sys.executable], mode, suite, [folder])
    return outcomes


def run_on_ranks(mode: Mode, suite: str, tests: list[str]) -> Outcomes:
    """Run tests on ranks that all run the same one; the first rank's outcomes.

    The tests of a file share a job. One that ends its job, or hangs, has failed, and the tests
    behind it get another.
    """
    mpiexec = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(mode.ranks)]
    outcomes: dict[str, list[str]] = {}
    for file, group in groupby(tests, lambda test: test.split("::")[0]):
        left = list(group)
        while left:
            print(f"  {mode.name}: {file} ({len(left)}) ...", flush=True)
            outcomes |= _pytest([*mpiexec, *warm_python()], mode, suite, left)
            outcomes.setdefault(left[0], UNFINISHED)
            left = [test for test in left if test not in outcomes]
    return outcomes


def _pytest(start: list[str], mode: Mode, suite: str, paths: list[str]) -> dict[str, list[str]]:
    """Run pytest on a copy of the suite, in which tests may leave what they like."""
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder) / "tests"
        # The tests look for files that others have left beside them.
        if mode.ranks == 1:
            shutil.copytree(suite, tests / "tests_pytorch")
        else:
            tests.mkdir()
            (tests / "tests_pytorch").symlink_to(Path(suite).resolve())
        outcomes = Path(folder) / "outcomes.json"  # Tests may not leave files in their folder.
        paths_of = [str(tests), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths_of),
            "OMP_NUM_THREADS": "1",
            MODE: mode.name,
            OUTCOMES: str(outcomes),
        }
        command = [
            *(*start, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-q"),
            *(ON_RANKS if mode.ranks > 1 else ("--timeout", "120")),
            *("-p", "no:cacheprovider", "-p", "tests.lightning_suite.plugin"),
            *("--continue-on-collection-errors", *(f"tests_pytorch/{path}" for path in paths)),
        ]
        log = subprocess.DEVNULL
        subprocess.run(command, cwd=tests, env=environment, stdout=log, stderr=log, check=False)
        found = json.loads(outcomes.read_text()) if outcomes.exists() else {}
    return {test.removeprefix("tests_pytorch/"): outcome for test, outcome in found.items()}


if __name__ == "__main__":
    sys.exit(main())
