"""Some of the steps on two real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock
from zlib import crc32

import pytest

from lightning_axosparse.distributed.mpi.environment import all_arrive
from lightning_axosparse.strategy.mpi_strategy import MPIStrategy
from tests.corpus.harness import (
    Entry,
    Observation,
    allowed_outcomes,
    entries,
    judge,
    observe,
    pipeline,
)
from tests.ranks import run_ranks

PATIENCE = 20.0
"""Seconds for which a rank that has refused a step waits for the other to do so, too."""

OF_RANKS = (
    "AnnealsBetaLikePyTorchVAE",
    "AuxiliaryVarianceOfALayer",
    "ComputesAMetricTwice",
    "CountsInPlaceBeforeItsLayers",
    "FollowsAnExtremeLater",
    "GivesLayersABuffer",
    "HasAMemoryInADict",
    "HasAMemoryOfAllLayers",
    "KeepsMetricsOutsideItsModules",
    "KeepsOutputsInADeque",
    "KeepsTheBest",
    "LogsOnTheFirstRank",
    "MinimizesSharpness",
    "NeedsAHookFromTheSecondBatchOn",
    "NeedsAnEarlierOutputFromTheSecondBatchOn",
    "PaddedTransformer",
    "ReadsAStemThatTheFirstLayerChanges",
    "RecomputesReentrantly",
    "RegistersHooksInItsFirstStep",
    "SetsAWeightFromAnother",
    "SpectralNormOfOld",
    "SumsInNumpy",
    "TeacherOfOneLayer",
    "WritesToTheLoggerItself",
    "divides_by_the_world",
    "gathers_from_all_ranks",
    "scales_the_batch_in_place",
    "takes_the_labels_out_of_the_batch",
)
"""Steps that could be right by loopback alone."""

ON_THE_FIRST_RANK = ("WritesToTheLoggerItself",)
"""Steps compared on the first rank alone, which is the one that writes to loggers."""

CHOSEN = {
    name: which
    for name, which in entries("hostile", "ordinary").items()
    if name in OF_RANKS or (which.cause != "everyday" and crc32(name.encode()) % 5 == 2)
}
"""Chosen by their names, so that new steps do not change which others run here.

Steps that one rank alone refuses end the job of all: they cannot be among these.
"""


def observations(names: list[str]) -> dict[str, Observation]:
    """What each entry does on this rank."""
    known = entries("hostile", "ordinary")
    return {name: observe_on_rank(number, known[name]) for number, name in enumerate(names)}


def observe_on_rank(number: int, which: Entry) -> Observation:
    """Train an entry; where all ranks refuse it alike, the job goes on."""
    ends = MPIStrategy.on_exception

    def end_unless_all_refuse(strategy: MPIStrategy, exception: BaseException) -> None:
        if not all_arrive((number,), PATIENCE):
            ends(strategy, exception)

    with mock.patch.object(MPIStrategy, "on_exception", end_unless_all_refuse):
        return observe(which, pipeline(which), 2)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Observation]]:
    return run_ranks(2, observations, list(CHOSEN))


@pytest.mark.parametrize("name", CHOSEN)
def test_a_step_is_right_or_said_on_ranks(name: str, ranks: Any) -> None:
    which = CHOSEN[name]
    plain = observe(which)
    first = ranks[0][name]
    for found in ranks[:1] if name in ON_THE_FIRST_RANK else ranks:
        # Warnings are printed on the first rank.
        seen = replace(found[name], said=first.said, noted=first.noted)
        outcome = judge(which, plain, seen)
        assert outcome.kind in allowed_outcomes(which), outcome
