"""Cutting: how the batches of each of the Trainer's loaders become micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_axosparse.adapters import loaders
from lightning_axosparse.groups import Groups
from lightning_axosparse.pipeline.batch_layout import (
    ASK,
    BatchLayout,
    Path,
    collated,
    inferred,
    observed,
    spelled,
)
from lightning_axosparse.pipeline.microbatch import (
    MicroBatch,
    even_parts,
    one_size,
    samples,
    split,
    weigh,
)

SplitBatch = Callable[[Any, int], "list[Any]"]
Evidence = BatchLayout | Literal["default_collate"] | ValueError | None


class Cutter:
    """Cuts batches into micro-batches as their loader shows that they can be.

    Where ``default_collate`` makes the batches, everything has the batch dimension first. With any
    other collate function, or hooks that change batches, it is what differs between batches of two
    and of three samples. Where neither can be seen, all first dimensions must agree.

    Args:
        trainer: the running Trainer.
        microbatches: micro-batches wanted per batch and replica.
        split_batch: the user's own function; None to decide here.
    """

    def __init__(
        self, trainer: pl.Trainer, microbatches: int, split_batch: SplitBatch | None
    ) -> None:
        self._trainer, self._split_batch = trainer, split_batch
        self._microbatches = microbatches
        self._known: dict[tuple[object, int], _Known] = {}

    def cut_to_train(self, batch: Any, rest: Sequence[Any], groups: Groups) -> list[MicroBatch]:
        """Cut a training batch into as many micro-batches as are wanted.

        Args:
            batch: the batch, the same on all ranks of the feed.
            rest: the other arguments of the step.
            groups: of the job; replicas that share batches get equally many parts.
        """
        return self._cut(batch, rest, groups, lambda samples, wanted: wanted)

    def cut_to_evaluate(self, batch: Any, rest: Sequence[Any], groups: Groups) -> list[MicroBatch]:
        """Cut a batch into equal micro-batches, about as many as are wanted; arguments as above."""
        sharing = groups.grid.sharing
        return self._cut(
            batch, rest, groups, lambda samples, wanted: even_parts(samples, wanted, sharing)
        )

    def _cut(
        self, batch: Any, rest: Sequence[Any], groups: Groups, parts: Callable[[int, int], int]
    ) -> list[MicroBatch]:
        sharing = groups.grid.sharing
        wanted = -(-self._microbatches // sharing) * sharing
        if wanted == 1:
            return [MicroBatch(batch, samples(batch), 1.0)]
        if self._split_batch is not None:
            return weigh(self._split_batch(batch, wanted), batch)
        layout, count = self._loader(rest, groups).layout(batch)
        return split(batch, parts(count, wanted), layout)

    def _loader(self, rest: Sequence[Any], groups: Groups) -> _Known:
        """What is known of the loader that the running loop takes its batches from."""
        origin = loaders.source(self._trainer, rest)
        key = origin.loop, origin.index
        known = self._known.get(key)
        if known is None or not _same(known.loaders, origin.loaders):
            # All ranks ask, so that what datasets do stays the same everywhere; one decides.
            evidence = groups.broadcast_to_feed(_evidence(self._trainer, origin), 0)
            known = _Known(origin.name, origin.loaders, evidence, origin.batch_size)
            self._known[key] = known
        return known


@dataclass
class _Known:
    """What is known of a loader's batches."""

    name: str
    loaders: tuple[Any, ...]
    evidence: Evidence
    batch_size: int | None
    _inferred: BatchLayout | None = None
    _sizes: dict[Path, int] = field(default_factory=dict)
    _told: bool = False

    def layout(self, batch: Any) -> tuple[BatchLayout, int]:
        """How to cut a batch, and the number of its samples."""
        layout = self._find(batch)
        sizes = layout.sizes(batch)
        _refuse_shared(sizes, self._sizes)
        self._sizes = sizes
        self._tell(layout)
        return layout, one_size(sizes)

    def _find(self, batch: Any) -> BatchLayout:
        if isinstance(self.evidence, ValueError):
            raise self.evidence
        if self.evidence == "default_collate":
            return collated(batch)
        for layout in (self.evidence, self._inferred):
            if isinstance(layout, BatchLayout) and layout.fits(batch):
                return layout
        self._inferred = inferred(batch, self.batch_size)
        return self._inferred

    def _tell(self, layout: BatchLayout) -> None:
        """Say once what is cut."""
        if self._told:
            return
        self._told = True
        rank_zero_info(f"Micro-batches of {self.name} batches: {layout}.")
        if layout.objects and layout.dims:
            names = ", ".join(spelled(path) for path in layout.objects)
            rank_zero_warn(
                f"Every micro-batch is handed {names} whole: no batch dimension is known of such an"
                f" object. If it holds something for each sample: {ASK}"
            )


def _evidence(trainer: pl.Trainer, origin: loaders.Source) -> Evidence:
    """What the loaders of a batch show about its batch dimensions; None if nothing."""
    if loaders.collates_as_usual(trainer, origin):
        return "default_collate"
    batches = loaders.sample_batches(trainer, origin, (2, 3))
    if batches is None:
        return None
    try:
        return observed(*batches)
    except ValueError as error:
        return error


def _refuse_shared(sizes: dict[Path, int], before: dict[Path, int]) -> None:
    """Refuse a batch in which leaves that were cut alike are no longer of one length."""
    if len(set(sizes.values())) < 2:
        return
    kept = [spelled(path) for path, size in sizes.items() if before.get(path) == size]
    if kept and len(kept) < len(sizes):
        raise ValueError(
            f"{', '.join(kept)} kept its length while the rest of the batch changed, so it has no "
            "entry for each sample and should not have been cut: what was computed from the "
            f"batches before this one is wrong. {ASK}"
        )


def _same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(
        one is other for one, other in zip(some, others, strict=True)
    )
