"""The pytest plugin inside Lightning's suite: puts a mode in force, and records what tests did."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest
import torch

from lightning_axosparse.distributed.mpi.environment import placement, world_communicator
from tests.lightning_suite.modes import MODES

MODE, OUTCOMES = "LIGHTNING_SUITE_MODE", "LIGHTNING_SUITE_OUTCOMES"
"""The environment's names of the mode, and of the file to which outcomes are written."""

LEFT_OUT = ("ddp", "fsdp", "gpu", "standalone", "tpu", "deepspeed")
"""Tests whose name or file has one of these words are about another strategy or device."""

UNFINISHED = ["failed", "the ranks ended, or waited for each other"]
"""The outcome of a test that ended its job."""

PATIENCE = 3
"""Seconds for which a rank whose test has failed waits for the others to end theirs."""

_outcomes: dict[str, list[str]] = {}


@pytest.fixture(autouse=True)
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    mode = MODES[os.environ[MODE]]
    if mode.ranks > 1:
        _await_others()
        _note(request.node.nodeid, UNFINISHED)
        _seed()
    with pytest.MonkeyPatch.context() as patch:
        mode.apply(patch)
        yield


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test, which its ranks share."""
    if MODES[os.environ[MODE]].ranks == 1:
        return tmp_path_factory.mktemp("test")
    test = sha1(request.node.nodeid.encode()).hexdigest()
    folder = Path(os.environ[OUTCOMES]).with_name("tmp") / test
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pytest_configure() -> None:
    """Seed the ranks alike, as parameters of tests are drawn when they are collected."""
    if MODES[os.environ[MODE]].ranks > 1:
        _seed()


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Leave out what is about other strategies and devices."""
    left_out = [i for i in items if any(word in i.nodeid.lower() for word in LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the outcome; what fails before or after a test counts as its failure."""
    before = _outcomes.get(report.nodeid, UNFINISHED)
    # Ranks that run a test alone leave nothing behind, so it does not matter what they have open.
    counts = MODES[os.environ[MODE]].ranks == 1 or report.when != "teardown"
    if counts and (report.when == "call" or report.outcome != "passed"):
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        if before[0] != "failed" or before == UNFINISHED:
            _note(report.nodeid, [outcome, _last_line(report)])


def pytest_sessionfinish() -> None:
    """Let the ranks of a job end together, so that none ends another's test."""
    if MODES[os.environ[MODE]].ranks > 1:
        _await_others()


def _await_others() -> None:
    """Wait until all ranks have ended their test, so that none meets the others in the next one.

    If it has failed here, the others may wait for this rank for ever, and the job is ended.
    """
    failed = bool(_outcomes) and next(reversed(_outcomes.values()))[0] == "failed"
    everyone, started = world_communicator().Ibarrier(), monotonic()
    while not everyone.Test():
        if failed and monotonic() - started > PATIENCE:
            world_communicator().Abort(1)
        sleep(0.01)


def _seed() -> None:
    """Let ranks draw the same models and data."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def _note(test: str, outcome: list[str]) -> None:
    """Write an outcome at once, as ranks may not come to the end."""
    _outcomes[test] = outcome
    if placement().rank == 0:
        Path(os.environ[OUTCOMES]).write_text(json.dumps(_outcomes))


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr or "")
    return text.strip().split("\n")[0][:200]
