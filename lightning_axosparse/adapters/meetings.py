"""Meetings: all ranks compare where they are at both ends of each of Lightning's loops.

A rank that is elsewhere, or has another number of batches, would take part in the wrong collective
or leave the others waiting. Ranks meet in a group of their own, where nothing else can be mistaken
for a meeting; that is once before and once after all batches of a loop, and never in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import RunningStage

from lightning_axosparse.groups import Groups
from lightning_axosparse.whereabouts import here

_LOOPS = {
    RunningStage.TRAINING: "training",
    RunningStage.SANITY_CHECKING: "sanity check",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "predict",
}


def position(trainer: pl.Trainer) -> tuple[str, int, int]:
    """The running loop, the index of the epoch, and of the batch that was drawn last."""
    stage = trainer.state.stage
    assert stage is not None
    if stage == RunningStage.TRAINING:
        return _LOOPS[stage], trainer.current_epoch, trainer.fit_loop.batch_idx
    loop: Any = trainer._active_loop
    return _LOOPS[stage], trainer.current_epoch, loop.batch_progress.current.ready - 1


@dataclass(frozen=True)
class Attendance:
    """What a rank says of itself at a meeting.

    Attributes:
        who: the rank, in words.
        feed: the ranks with this number are given the same batches.
        occasion: what is met for.
        loop: the loop that begins or ends.
        batches: number of batches that the loop had; None where it has only begun.
        lengths: number of batches of each of its loaders, ``inf`` where unknown.
        stops: whether ``trainer.should_stop`` is set.
    """

    who: str
    feed: int
    occasion: str
    loop: str
    batches: int | None
    lengths: tuple[float, ...]
    stops: bool

    def __str__(self) -> str:
        words = f"{self.who}: {self.occasion}"
        if self.batches is not None:
            words += f" after {self.batches} batches"
        if self.lengths:
            numbers = ", ".join("unknown" if n == float("inf") else f"{n:g}" for n in self.lengths)
            words += f", loader length {numbers}"
        return words + (", trainer.should_stop is set" if self.stops else "")


def refuse_apart(ranks: Sequence[Attendance]) -> None:
    """Refuse to go on where ranks are at different places, or have different numbers of batches.

    Replicas may evaluate different numbers of batches, as in Lightning's own ``ddp``.

    Raises:
        MisconfigurationException: on every rank, with what each says.
    """
    listed = "".join(f"\n- {rank}" for rank in ranks)
    if len({rank.occasion for rank in ranks}) > 1:
        raise MisconfigurationException(
            "The ranks have gone separate ways, as if a loop were over on some only. Let "
            "`trainer.should_stop`, `on_train_batch_start` and all else that ends or starts a loop "
            f"decide the same on every rank (`trainer.strategy.broadcast` shares a value):{listed}"
        )
    if ranks[0].loop != "training":
        feeds = {rank.feed for rank in ranks}
        alike = [[rank for rank in ranks if rank.feed == feed] for feed in feeds]
    else:
        alike = [list(ranks)]
    for group in alike:
        if len({(rank.batches, rank.lengths) for rank in group}) > 1:
            raise MisconfigurationException(
                f"The ranks have unequal numbers of {ranks[0].loop} batches. Give every stage the "
                "same loader and every replica a loader of the same length (a DistributedSampler "
                "does; `limit_train_batches=` cuts what has no length), and end an epoch on all "
                f"ranks or none:{listed}"
            )


class Meetings(Callback):
    """Calls the ranks together where a loop begins and where it ends.

    Args:
        groups: the process groups of the job.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def __deepcopy__(self, memo: dict[int, Any]) -> Meetings:
        # Users copy the Trainer's callbacks, but process groups cannot be copied.
        return self

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare the lengths of the training loaders."""
        self._begin(trainer, [trainer.num_training_batches])

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare how many batches were trained on."""
        self._end(trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare whether training is over."""
        self._meet(trainer, "training ends", None, ())

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare the lengths of the validation loaders."""
        sanity = trainer.sanity_checking
        self._begin(trainer, trainer.num_sanity_val_batches if sanity else trainer.num_val_batches)

    def on_test_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare the lengths of the test loaders."""
        self._begin(trainer, trainer.num_test_batches)

    def on_predict_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare the lengths of the predict loaders."""
        self._begin(trainer, trainer.num_predict_batches)

    def on_validation_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare how many batches were validated on."""
        self._end(trainer)

    def on_test_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare how many batches were tested on."""
        self._end(trainer)

    def on_predict_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare how many batches were predicted."""
        self._end(trainer)

    def _begin(self, trainer: pl.Trainer, lengths: Sequence[float]) -> None:
        loop, epoch, _ = position(trainer)
        self._meet(trainer, f"{loop} of epoch {epoch} begins", None, lengths)

    def _end(self, trainer: pl.Trainer) -> None:
        loop, epoch, _ = position(trainer)
        batches = here().end_loop(loop, epoch)
        self._meet(trainer, f"{loop} of epoch {epoch} ends", batches, ())

    def _meet(
        self,
        trainer: pl.Trainer,
        occasion: str,
        batches: int | None,
        lengths: Sequence[float],
    ) -> None:
        here().ended, here().stops = True, trainer.should_stop
        loop, _, _ = position(trainer)
        mine = Attendance(
            here().who, here().feed, occasion, loop, batches, tuple(lengths), trainer.should_stop
        )
        refuse_apart(self._groups.meet(mine))
