"""A rank that others wait for in vain ends the job, with a message that says who and where."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lightning_axosparse import ExpertParallel, TensorParallel
from lightning_axosparse.strategy.launcher.failure import RankFailedError
from tests.faults import jobs
from tests.ranks import run_command, warm_python

BOUND = 120
"""Seconds; an unloaded machine takes some five."""

pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the watchdog print and act after three seconds instead of thirty."""
    monkeypatch.setenv("AXOSPARSE_NOTICE_SECONDS", "3")


@contextmanager
def fails(
    *words: str, error: tuple[type[Exception], ...] = (RankFailedError,)
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Assert that a job ends in time, with a message in which all of these are found."""
    started = time.monotonic()
    with pytest.raises(error) as failure:
        yield failure
    assert time.monotonic() - started < BOUND
    for word in words:
        assert re.search(word, str(failure.value)), f"{word}\nis not in\n{failure.value}"


@contextmanager
def stopped(folder: Path) -> Iterator[jobs.Stopped]:
    """A module of which one rank stops, which is killed in the end."""
    try:
        yield jobs.Stopped(folder)
    finally:
        os.kill(int((folder / "stopped").read_text()), signal.SIGKILL)


def test_nothing_goes_wrong() -> None:
    trainer = jobs.train(jobs.SetsCallbacks(), ranks=4, timeout=60)
    assert (trainer.global_step, trainer.callbacks) == (8, [])


def test_a_killed_rank_is_named() -> None:
    with fails(
        r"rank 1 \(stage 0 of replica 0\) on host \S+ was killed by SIGKILL",
        "in training batch 2 of epoch 0, before its first micro-batch",
    ):
        jobs.train(jobs.Killed())


@pytest.mark.parametrize(
    ("when", "where"),
    [
        (["Killed", "1"], "rank 1 .*in training batch 2 of epoch 0, before its first micro-b"),
        (["connecting"], "rank 0 .*waits for the other ranks of a process group to connect"),
    ],
)
def test_a_killed_rank_ends_the_others_where_the_launcher_does_not(
    when: list[str], where: str
) -> None:
    # As under srun without -K, the launcher does not see that the rank is gone.
    job = [*warm_python(), "-m", "tests.faults.jobs", *when]
    hidden = ["sh", "-c", '"$@"; sleep 100', "-", *job]
    mpiexec = Path(sys.executable).parent / "mpiexec"
    done = run_command([mpiexec, "-n", "2", *hidden], BOUND)
    assert done.returncode != 0
    assert re.search(r"rank 1 .*on host \S+ (was killed by SIGKILL|ended without)", done.stderr)
    assert re.search(where, done.stderr), done.stderr


def test_callbacks_save_after_a_sigterm_at_one_rank(tmp_path: Path) -> None:
    saves = OnExceptionCheckpoint(tmp_path)
    with fails("rank [01] .*failed: .*Rank 1 received SIGTERM"):
        jobs.train(jobs.Terminated(), callbacks=[saves])
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] == jobs.STUCK_AT + 1
    assert set(saved["state_dict"]) == set(jobs.Plain().state_dict())


@pytest.mark.parametrize("module", [jobs.Leaves, jobs.LeavesWell])
def test_a_rank_that_leaves_without_a_report_is_named(module: type[jobs.Leaves]) -> None:
    with fails(
        rf"rank 1 \(stage 0 of replica 0\).* (exit code {module.code} |Or it left).*os\._exit",
        "in training batch 2 of epoch 0",
    ):
        jobs.train(module())


def test_a_killed_proxy_is_named() -> None:
    with fails("^The proxy of mpiexec was killed, and its ranks with it"):
        jobs.train(jobs.KillsItsProxy())


def test_a_stopped_rank_does_not_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = (
        r"rank 0 \(stage 1 of replica 0\) on host \S+ has waited for [6-9] s",
        r"timeout=6 s",
        "No answer from rank 1 on host.* stopped",
        r"rank 0 .*waits for the activation of micro-batch 0 from rank 1",
        r"rank 1 .*in training batch 2 of epoch 0, before its first micro-batch",
    )
    with stopped(tmp_path) as module, fails(*words):
        jobs.train(module, timeout=timedelta(seconds=6))
    printed = capfd.readouterr().err
    assert re.search(r"rank 0 .*waits for .*, for [3-5] s now; timeout=6 s", printed)
    assert re.search(r"pipeline/engine\.py\", line \d+", printed)  # the stack of rank 0


TENSOR = {"model.0": ColwiseParallel(), "model.1": RowwiseParallel()}


@pytest.mark.parametrize(
    ("options", "exchange"),
    [
        ({"tensor_parallel": TensorParallel(2, TENSOR)}, r"`\w+` \(ranks that share layers\)"),
        (
            {"expert_parallel": ExpertParallel(2, "model.1.experts")},
            r"`all_?to_?all\w*` \(ranks with experts of a stage\)",
        ),
    ],
    ids=["tensor group", "tokens"],
)
def test_a_stopped_rank_is_named_with_the_exchange(
    options: dict[str, Any], exchange: str, tmp_path: Path
) -> None:
    words = (
        rf"rank 0 .*waits for {exchange} of ranks 0, 1",
        "No answer from rank 1 on host.* stopped",
        r"rank 1 .*in training batch 2 of epoch 0, micro-batch \d, forward pass",
    )
    with stopped(tmp_path) as module, fails(*words):
        experts = jobs.mixed(module) if "expert_parallel" in options else module
        jobs.train(experts, g_inter=1, timeout=timedelta(seconds=6), **options)


def test_a_rank_in_endless_user_code_shows_its_stack(capfd: pytest.CaptureFixture[str]) -> None:
    with fails(r"rank 0 .*timeout=6 s", r"rank 1 .*in training batch 2") as failure:
        jobs.train(jobs.Endless(), timeout=6)
    assert "No answer" not in str(failure.value)
    assert "in count_stars" in capfd.readouterr().err


@pytest.mark.parametrize(("ranks", "g_inter"), [(2, 2), (2, 1)])
def test_lengths_that_differ_raise_before_the_first_batch(ranks: int, g_inter: int) -> None:
    with fails(
        "unequal numbers of training batches",
        r"rank 0 .*loader length 4",
        r"rank 1 .*loader length 5",
        "limit_train_batches",
        error=(MisconfigurationException,),
    ):
        jobs.train(jobs.Plain(), jobs.Unequal(longer=1), ranks, g_inter)


def test_lengths_of_validation_loaders_may_differ_over_replicas_only() -> None:
    words = ("unequal numbers of validation batches", "rank 1 .*loader length 5")
    with fails(*words, error=(MisconfigurationException,)):
        jobs.train(jobs.Plain(), jobs.Unequal(longer=1, where="val"))
    run = jobs.train(jobs.Plain(), jobs.Unequal(longer=1, where="val"), g_inter=1)
    assert run.global_step == 8


@pytest.mark.parametrize(("longer", "g_inter"), [(0, 2), (1, 1)])
def test_streams_of_different_lengths(longer: int, g_inter: int) -> None:
    with fails(
        r"unequal numbers of|All ranks wait for one another",
        f"rank {1 - longer} .*over after 4 batches",
        f"rank {longer} .*(in training batch 4|after training batch 3)",
        error=(RankFailedError, MisconfigurationException),
    ):
        jobs.train(jobs.Plain(), jobs.Unequal(jobs.Stream, longer), 2, g_inter)


def test_one_rank_skips_the_rest_of_an_epoch() -> None:
    with fails(
        "on_train_batch_start.*-1",
        "rank 1 .*training of epoch 0 over after 2 batches",
        "rank 0 .*in training batch 2 of epoch 0",
        error=(RankFailedError, MisconfigurationException),
    ):
        jobs.train(jobs.SkipsTheRest())


@pytest.mark.parametrize(("faulty", "g_inter"), [(1, 2), (1, 1)])
def test_one_rank_wants_to_stop(faulty: int, g_inter: int) -> None:
    with fails(
        "should_stop",
        rf"rank {faulty} .*training of epoch 0 over after 3 batches, with trainer\.should_stop set",
        f"rank {1 - faulty} .*training batch [23] of epoch 0",
        error=(RankFailedError, MisconfigurationException),
    ):
        jobs.train(jobs.WantsToStop(faulty), g_inter=g_inter)


def test_one_replica_synchronises_what_it_logs() -> None:
    with fails(
        "sync_dist=True",
        r"rank 0 .*waits for `(barrier|allreduce)` \(logged values\) of ranks 0, 1",
        r"rank 1 .*waits for",
    ):
        jobs.train(jobs.LogsAlone(0), g_inter=1)
