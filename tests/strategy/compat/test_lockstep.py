"""LoopCheck: what ranks compare at both ends of a loop, without ranks."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.process_groups import ProcessGroups
from lightning_axosparse.strategy.compat.lockstep import (
    LoopCheck,
    LoopPosition,
    validate_positions,
)
from tests.parity.cases import Net, loader, trainer
from tests.ranks import run_ranks

FIRST = LoopPosition("rank 0", 0, "training of epoch 3 ends", "training", 4, (), False)
INFINITE = float("inf")


def test_ranks_that_agree_go_on() -> None:
    validate_positions([FIRST, replace(FIRST, who="rank 1")])
    validate_positions([replace(FIRST, lengths=(INFINITE,)), replace(FIRST, lengths=(INFINITE,))])


def test_ranks_at_different_places() -> None:
    other = replace(FIRST, who="rank 1", occasion="training ends", batches=None, stops=True)
    with pytest.raises(MisconfigurationException) as refusal:
        validate_positions([FIRST, other])
    assert "rank 0: training of epoch 3 ends after 4 batches\n" in str(refusal.value)
    assert "rank 1: training ends, trainer.should_stop is set" in str(refusal.value)


def test_numbers_of_batches_that_differ() -> None:
    with pytest.raises(MisconfigurationException, match=r"rank 1.* after 3 batches"):
        validate_positions([FIRST, replace(FIRST, who="rank 1", batches=3)])


def test_a_length_that_is_known_on_one_rank_only() -> None:
    known, unknown = replace(FIRST, lengths=(4, 2)), replace(FIRST, lengths=(4, INFINITE))
    with pytest.raises(MisconfigurationException) as refusal:
        validate_positions([known, unknown])
    assert "loader length 4, 2" in str(refusal.value)
    assert "loader length 4, unknown" in str(refusal.value)


def test_replicas_may_evaluate_different_numbers_of_batches() -> None:
    ranks = [
        replace(FIRST, loop="test", evaluation_group=rank, batches=3 + rank)
        for rank in (0, 0, 1, 1)
    ]
    validate_positions(ranks)
    with pytest.raises(MisconfigurationException, match="unequal numbers of test batches"):
        validate_positions([*ranks, replace(ranks[0], batches=9)])


def test_a_users_copy_of_the_callbacks_has_the_same_process_groups() -> None:
    check = LoopCheck(ProcessGroups(Grid(1, 1)))
    assert deepcopy([check])[0] is check


def test_it_is_the_first_callback_until_the_context_ends() -> None:
    run, check, added = trainer(), LoopCheck(ProcessGroups(Grid(1, 1))), Callback()
    before = list(run.callbacks)
    with check.added_to(run):
        assert run.callbacks == [check, *before]
        run.callbacks = [added, *run.callbacks]
    assert run.callbacks == [added, *before]
    with check.added_to(run):
        run.callbacks = before
    assert run.callbacks == before


FAILS_AFTER = 3


class Failing(Net):
    """Fails after three steps, on one rank or on all of them."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self.rank = rank

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == FAILS_AFTER and self.rank in (None, self.global_rank):
            raise LookupError("the user's own")


class Keeps(OnExceptionCheckpoint):
    """Keeps its file when a run has ended well."""

    def teardown(self, *_: Any, **__: Any) -> None:
        pass


class Saves(Callback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_exception(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.file)


class FailsToSave(Callback):
    def on_exception(self, *_: Any) -> None:
        raise OSError("no space")


class WritesLate(AtomicCheckpointIO):
    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        time.sleep(2)
        super().save_checkpoint(*args, **options)


def fit(
    module: Net, strategy: AxoSparseStrategy, devices: int, *callbacks: Callback, **options: Any
) -> None:
    run = trainer(strategy, devices, callbacks=[*callbacks], enable_checkpointing=True, **options)
    run.fit(module, loader(1))


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, Tensor]:
    """The weights with which one process fails."""
    torch.manual_seed(0)
    with pytest.raises(LookupError):
        fit(Failing(), AxoSparseStrategy(), 1, Keeps(tmp_path, "alone"))
    state: dict[str, Tensor] = torch.load(tmp_path / "alone.ckpt", weights_only=False)["state_dict"]
    return state


@pytest.mark.parametrize("plugins", [[], [AsyncCheckpointIO(WritesLate())]])
def test_ranks_that_fail_together_save_the_whole_model(
    tmp_path: Path, expected: Any, plugins: list[Any]
) -> None:
    torch.manual_seed(0)
    callbacks = [
        Keeps(tmp_path, "started"),
        ModelCheckpoint(tmp_path, "monitored", save_on_exception=True),
    ]
    with (
        pytest.raises(LookupError, match="the user's own"),
        pytest.warns(UserWarning, match="was not written by the process that has started"),
    ):
        fit(Failing(), AxoSparseStrategy(2, 4), 2, *callbacks, plugins=plugins)
    for name in ("started", "monitored"):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=False)
        assert saved["global_step"] == FAILS_AFTER
        torch.testing.assert_close(saved["state_dict"], expected)


def test_a_rank_that_fails_alone_leaves_files_as_they_were(tmp_path: Path) -> None:
    before = tmp_path / "before.ckpt"
    before.write_text("of an earlier run")
    with (
        pytest.raises(LookupError, match=r"(?s)the user's own.*\nOn rank 1 "),
        pytest.warns(UserWarning, match="the weights from before"),
    ):
        fit(Failing(rank=1), AxoSparseStrategy(2, 4), 2, Saves(before))
    assert before.read_text() == "of an earlier run"
    assert [file.name for file in tmp_path.iterdir()] == ["before.ckpt"]


class FailsToSetUp(Net):
    def setup(self, stage: str) -> None:
        if self.global_rank == 1:
            raise LookupError("the user's own")


def test_a_rank_that_fails_before_the_run_leaves_none_waiting(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=r"(?s)the user's own.*\nOn rank 1 "):
        fit(FailsToSetUp(), AxoSparseStrategy(2, 4), 2, Keeps(tmp_path, "failed"))
    assert not list(tmp_path.iterdir())


def fail_under_mpiexec(folder: Path, *callbacks: Callback) -> None:
    torch.manual_seed(0)
    fit(Failing(), AxoSparseStrategy(2, 4), 2, Keeps(folder, "given"), *callbacks)


def test_ranks_of_mpiexec_save_and_say_why_they_end(tmp_path: Path, expected: Any) -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(2, fail_under_mpiexec, tmp_path)
    for rank in range(2):
        assert f"Failed on rank {rank} (stage {1 - rank} of replica 0)" in str(failure.value)
    saved = torch.load(tmp_path / "given.ckpt", weights_only=False)
    torch.testing.assert_close(saved["state_dict"], expected)


def test_a_callback_that_cannot_save_hides_no_exception(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(2, fail_under_mpiexec, tmp_path, FailsToSave())
    for words in ("LookupError: the user's own", "OSError: no space"):
        assert words in str(failure.value)


class Prepares(Net):
    """Writes a file in ``prepare_data``, on rank 1 later, or fails there."""

    def __init__(self, folder: Path, fails: bool) -> None:
        super().__init__()
        self.folder, self.fails = folder, fails

    def prepare_data(self) -> None:
        time.sleep(0.5 * self.global_rank)
        if self.fails and self.global_rank == 1:
            raise LookupError("no such data")
        (self.folder / f"rank-{self.global_rank}").touch()

    def setup(self, stage: str) -> None:
        self.prepared = len(list(self.folder.iterdir()))


def prepare(folder: Path, fails: bool) -> int:
    module = Prepares(folder, fails)
    callbacks = [Keeps(folder, "failed")] if fails else []
    fit(module, AxoSparseStrategy(2, 2), 1, *callbacks, num_nodes=2)
    return module.prepared


def test_nodes_wait_for_the_data_of_each_other(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MPIR_CVAR_NUM_CLIQUES", "2")  # MPICH takes the ranks for two nodes.
    assert run_ranks(2, prepare, tmp_path, False) == [2, 2]
    with pytest.raises(AssertionError, match="LookupError: no such data"):
        run_ranks(2, prepare, tmp_path, True)
    assert not (tmp_path / "failed.ckpt").exists()
