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
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.lightning_suite.expectations import BY_CHANCE, EXPECTED, Outcomes, judge, parse
from tests.lightning_suite.modes import MODES, Mode
from tests.lightning_suite.plugin import MODE, OUTCOMES, UNFINISHED
from tests.ranks import REPOSITORY, warm_python

FOLDERS = ("trainer", "callbacks", "checkpointing", "loops", "models", "core", "tuner")
ON_RANKS = ("--timeout", "60", "--timeout-method", "thread")
"""A rank that waits for another one is inside MPI, where only the end of its process ends it."""


def main() -> int:
    """Run the modes and folders that the command line names; all by default."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("folders", nargs="*", default=FOLDERS)
    options.add_argument("-m", "--mode", action="append", choices=[m for m in MODES if _ours(m)])
    options.add_argument(
        "-k",
        "--keep",
        type=Path,
        help="folder of outcomes and pytest's logs: what is there is not run again",
    )
    given = options.parse_args()
    suite = os.environ.get("LIGHTNING_TESTS")
    if suite is None:
        options.error("LIGHTNING_TESTS has to name the folder tests/tests_pytorch of Lightning")
    with tempfile.TemporaryDirectory() as folder:
        return compare(Suite(suite, given.keep or Path(folder)), given.mode, given.folders)


def compare(suite: Suite, modes: list[str] | None, folders: list[str]) -> int:
    """Compare modes with those that they name; 0 where no test did what nobody expects."""
    expected, fine = parse(EXPECTED.read_text()), True
    for mode in (MODES[name] for name in modes or MODES):
        if mode.compared_with is None:
            continue
        reference = MODES[mode.compared_with]
        before = suite.run(reference, folders)
        if mode.ranks == 1:
            ours = suite.run(mode, folders)
        else:
            passed = [test for test, (outcome, _) in before.items() if outcome == "passed"]
            ours = suite.run_on_ranks(mode, passed)
        fail, vary = (expected.get(mode.name + which, {}) for which in ("", BY_CHANCE))
        verdict = judge(ours, before, fail, folders, vary)
        print(f"{mode.name}: {verdict} in {reference.name}", flush=True)
        fine = fine and bool(verdict)
    return 0 if fine else 1


def _ours(name: str) -> bool:
    return MODES[name].compared_with is not None


@dataclass(frozen=True)
class Suite:
    """Lightning's tests, and what they did.

    Attributes:
        tests: the folder tests/tests_pytorch of Lightning.
        kept: the folder of outcomes and logs, one of each per mode and folder or file of tests.
    """

    tests: str
    kept: Path

    def run(self, mode: Mode, folders: list[str]) -> Outcomes:
        """Run folders of the suite in one process each; the outcome of each test."""
        outcomes: dict[str, list[str]] = {}
        for folder in folders:
            if not self._outcomes(mode, folder).exists():
                print(f"  {mode.name}: {folder} ...", flush=True)
                found = self._pytest([sys.executable], mode, folder, [folder])
                self._outcomes(mode, folder).write_text(json.dumps(found))
            outcomes |= json.loads(self._outcomes(mode, folder).read_text())
        return outcomes

    def run_on_ranks(self, mode: Mode, tests: list[str]) -> Outcomes:
        """Run tests on ranks that all run the same one; the first rank's outcomes.

        The tests of a file share a job. One that ends its job, or hangs, has failed, and the tests
        behind it get another.
        """
        mpiexec = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(mode.ranks)]
        outcomes: dict[str, list[str]] = {}
        for file, group in groupby(tests, lambda test: test.split("::")[0]):
            kept = self._outcomes(mode, file)
            done = json.loads(kept.read_text()) if kept.exists() else {}
            left = [test for test in group if test not in done]
            while left:
                print(f"  {mode.name}: {file} ({len(left)}) ...", flush=True)
                done |= self._pytest([*mpiexec, *warm_python()], mode, file, left)
                done.setdefault(left[0], UNFINISHED)
                left = [test for test in left if test not in done]
                kept.write_text(json.dumps(done))
            outcomes |= done
        return outcomes

    def _outcomes(self, mode: Mode, path: str) -> Path:
        folder = self.kept / mode.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{path.replace('/', '.')}.json"

    def _pytest(
        self, start: list[str], mode: Mode, name: str, paths: list[str]
    ) -> dict[str, list[str]]:
        """Run pytest on a copy of the suite, in which tests may leave what they like."""
        with tempfile.TemporaryDirectory() as folder:
            tests = Path(folder) / "tests"
            # The tests look for files that others have left beside them.
            if mode.ranks == 1:
                shutil.copytree(self.tests, tests / "tests_pytorch")
            else:
                tests.mkdir()
                (tests / "tests_pytorch").symlink_to(Path(self.tests).resolve())
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
            with self._outcomes(mode, name).with_suffix(".log").open("a") as log:
                subprocess.run(
                    command,
                    cwd=tests,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            found = json.loads(outcomes.read_text()) if outcomes.exists() else {}
        return {test.removeprefix("tests_pytorch/"): outcome for test, outcome in found.items()}


if __name__ == "__main__":
    sys.exit(main())
