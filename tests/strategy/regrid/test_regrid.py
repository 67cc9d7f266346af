from __future__ import annotations

import warnings
from typing import Any

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.strategy.regrid.regrid import Regridded, bubble
from tests.parity.cases import Net, loader, trainer
from tests.ranks import run_ranks


def test_a_move_prints_both_grids_and_their_bubbles() -> None:
    old = Grid(4, 4)
    moved = Regridded(old, old.shortened(2), epoch=3, seconds=0.5, microbatches=16)
    assert moved.bubbles == (3 / 19, 1 / 9)
    assert "2 stages x 2 replicas instead of 4 x 1" in str(moved)
    assert "11.1% instead of 15.8%" in str(moved)
    assert bubble(1, 8) == 0


class CountsStages(Net):
    """Notes the number of stages in the first batch of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.stages.append(self.trainer.strategy.grid.g_inter)


# A ticket that is drawn in epoch 1, never, and too late for another epoch.
DRAWN_BY: list[int | None] = [2, None, 3]


def grids_and_warnings() -> list[tuple[list[int], list[str]]]:
    """The number of stages in each of three epochs, and what is warned of ``regrid``."""
    found = []
    for epoch in DRAWN_BY:
        callbacks = (
            []
            if epoch is None
            else [
                EarlyBirdTicket(
                    0.5, method="early-bird", every="1 epoch", draw_by=f"{epoch} epochs"
                )
            ]
        )
        run = trainer(AxoSparseStrategy(g_inter=2, regrid=1), 2, callbacks=callbacks)
        module = CountsStages()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.fit(module, loader(1, batches=2))
        said = [str(warning.message) for warning in caught]
        found.append((module.stages, [text for text in said if text.startswith("regrid=")]))
    return found


def test_a_run_moves_in_the_epoch_after_the_draw_and_warns_if_there_was_none() -> None:
    for rank, ((moved, no_word), (stayed, words), (late, none)) in enumerate(
        run_ranks(2, grids_and_warnings)
    ):
        assert (moved, no_word) == ([2, 2, 1], [])
        assert stayed == late == [2, 2, 2]
        assert none == []
        assert len(words) == (1 if rank == 0 else 0)
        assert all("regrid=1 changed nothing" in text for text in words)
        assert all("EarlyBirdTicket" in text for text in words)
