"""Splits the batches of each of the Trainer's loaders into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_debug, rank_zero_warn
from torch import Tensor

from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.process_groups import ProcessGroups, all_gather
from lightning_axosparse.pipeline.batch_layout import (
    BatchLayout,
    collated,
    inferred,
    path_text,
)
from lightning_axosparse.pipeline.by_parts import LossWeights, Reduction
from lightning_axosparse.pipeline.microbatch import (
    MicroBatch,
    counted,
    one_size,
    samples,
    split,
)
from lightning_axosparse.strategy.compat.loaders import Source, collates_as_usual
from lightning_axosparse.support.arguments import short_repr
from lightning_axosparse.support.troubleshooting import see

SplitBatch = Callable[[Any, int], "list[Any]"]

_ASK = (
    "For micro-batches, give AxoSparseStrategy(split_batch=...) a function (batch, microbatches) "
    "-> list of micro-batches."
)


class Share(NamedTuple):
    """What counts of a replica that has a part of a batch, in multiples of one replica's share.

    For 3 samples on 2 replicas, ``samples`` is 2/3 and 4/3.

    Attributes:
        samples: the number of its samples.
        loss: the weight of its loss.
        size: the numbers of samples of its part and of the batch.
    """

    samples: float = 1.0
    loss: float = 1.0
    size: tuple[int, int] = (0, 0)


class BatchSplitter:
    """Splits batches into micro-batches along their first dimension.

    Batches of ``default_collate`` have the batch dimension first. With any other collate function,
    or hooks that change batches, all first dimensions must agree.

    Replicas that share experts have equally many micro-batches, as each computes tokens of the
    others: as many as the smallest of their batches allows. So no micro-batch is empty or repeats
    samples, which could give NaN or change statistics and logged values.

    Micro-batches have at least ``fewest_samples``; smaller batches stay whole.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        microbatches: int,
        split_batch: SplitBatch | None,
        fewest_samples: int = 1,
    ) -> None:
        self._trainer, self._split_batch = trainer, split_batch
        self._microbatches, self._fewest_samples = microbatches, fewest_samples
        self._known: dict[tuple[object, int], _LoaderBatches] = {}

    def own_part(
        self, batch: Any, origin: Source, grid: Grid, reduction: Reduction | None
    ) -> tuple[Any, Share]:
        """Return this replica's part of a batch, if several replicas get the same batch.

        If there are fewer samples than replicas, or nothing in a part counts, its replica gets
        another one's part, with shares of 0: its loss would not be a number.

        Args:
            batch: the batch of the loader.
            origin: the source of the batch.
            grid: the grid of ranks.
            reduction: what the loss is; None: it is weighted as a mean over samples.
        """
        replicas, index = grid.replicas_per_batch, grid.part_of_batch
        if replicas == 1:
            return batch, Share()
        layout, count = self._loader(origin).layout(batch, replicas)
        if not layout.dims:  # All train on it, and the values of one count.
            return batch, Share(0.0 if index else float(replicas))
        parts = split(batch, replicas, layout)
        weights = LossWeights(reduction or "mean", parts).of
        if index >= len(parts) or not weights[index]:
            return parts[weights.index(max(weights))].batch, Share(0.0, 0.0)
        own = parts[index]
        shares = own.size * replicas / count, weights[index] * replicas
        return own.batch, Share(*shares, (own.size, count))

    def microbatches_of(
        self, batch: Any, origin: Source, groups: ProcessGroups
    ) -> list[MicroBatch]:
        """Split a batch into the wanted number of micro-batches, if it is large enough.

        Replicas that share experts get equally many; collective over these. Replicas with parts of
        one batch together get the wanted number, so that micro-batches are as large as before the
        regrid.
        """
        wanted = -(-self._microbatches // groups.grid.replicas_per_batch)
        if wanted == 1:
            return [MicroBatch(batch, samples(batch))]
        if self._split_batch is not None:
            return counted(self._equally_many_parts(batch, wanted, groups), batch)
        layout, count = self._loader(origin).layout(batch, wanted)
        counts, fewest = all_gather(count, groups.experts), self._fewest_samples
        return split(batch, min(wanted, max(1, min(counts) // fewest)), layout)

    def _equally_many_parts(self, batch: Any, wanted: int, groups: ProcessGroups) -> Any:
        """Call the user's function; replicas that share experts get equally many parts."""
        parts = self._parts(batch, wanted)
        numbers = all_gather(len(parts), groups.experts)
        if len(set(numbers)) > 1:
            parts = self._parts(batch, min(numbers))
            numbers = all_gather(len(parts), groups.experts)
        if len(set(numbers)) > 1:
            raise MisconfigurationException(
                f"split_batch={short_repr(self._split_batch)} made {', '.join(map(str, numbers))} "
                "micro-batches of the batches of replicas that share experts, but all have to make "
                "equally many, as each computes tokens of the others. Let it return as many as it "
                "is asked for, or use microbatches=1." + see("expert-parallel")
            )
        return parts

    def _parts(self, batch: Any, wanted: int) -> Any:
        """Call the user's function, and check its result."""
        parts: Any = self._split_batch and self._split_batch(batch, wanted)
        if not isinstance(parts, Sequence | Tensor) or isinstance(parts, str) or len(parts) == 0:
            raise ValueError(
                f"split_batch={short_repr(self._split_batch)} returned {short_repr(parts)} for "
                f"{wanted} micro-batches. It has to return a list of parts of the batch, each of "
                "the batch's type." + see("batches")
            )
        return parts

    def _loader(self, origin: Source) -> _LoaderBatches:
        """Return the record of a loader."""
        known = self._known.get(origin.key)
        if known is None or [*map(id, known.loaders)] != [*map(id, origin.loaders)]:
            is_usual = collates_as_usual(self._trainer, origin)
            known = _LoaderBatches(origin.name, origin.loaders, is_usual, origin.batch_size)
            self._known[origin.key] = known
        return known


@dataclass
class _LoaderBatches:
    """A loader, and the layout of its batches."""

    name: str
    loaders: tuple[Any, ...]
    collates_as_usual: bool
    batch_size: int | None
    _inferred: BatchLayout | None = None
    _logged: bool = False
    _warned: bool = False

    def layout(self, batch: Any, wanted: int) -> tuple[BatchLayout, int]:
        """Return the layout by which to split a batch, and the number of its samples.

        A batch of which it is not clear where samples are stays whole.
        """
        try:
            layout = self._layout(batch)
            samples = one_size(layout.sizes(batch))
        except ValueError as error:
            self._warn_of_whole(wanted, str(error))
            return BatchLayout({}), 1
        self._log(layout, batch, wanted)
        return layout, samples

    def _layout(self, batch: Any) -> BatchLayout:
        if self.collates_as_usual:
            return collated(batch)
        if self._inferred is None or not self._inferred.fits(batch):
            self._inferred = inferred(batch, self.batch_size)
        return self._inferred

    def _warn_of_whole(self, wanted: int, why: str) -> None:
        """Warn once that batches stay whole."""
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{self.name.capitalize()} batches stay whole, so microbatches={wanted} has no "
                f"effect and stages wait for one another: {why}. {_ASK}" + see("batches")
            )

    def _log(self, layout: BatchLayout, batch: Any, wanted: int) -> None:
        """Log the layout once."""
        if self._logged:
            return
        self._logged = True
        rank_zero_debug(f"Micro-batches of {self.name} batches: {layout}.")
        names = ", ".join(path_text(path) for path in layout.objects)
        if layout.objects and not layout.dims:
            kind = f"a {type(batch).__module__}.{type(batch).__name__}"
            content = kind if layout.objects == ((),) else f"nothing but {names} of unknown kind"
            self._warn_of_whole(wanted, f"a batch is {content}, so samples cannot be cut out of it")
        elif layout.objects:
            rank_zero_warn(
                f"Every micro-batch gets the whole {names}: such an object has no known batch "
                f"dimension. If it holds something for each sample: {_ASK}" + see("batches")
            )
