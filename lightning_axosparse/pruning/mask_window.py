"""Keeps the newest masks of a search, and measures whether they have settled."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.distributed import ProcessGroup

from lightning_axosparse.distributed.process_groups import broadcast_from_first, gather
from lightning_axosparse.pruning.bitmask import MaskBits
from lightning_axosparse.pruning.mask_distance import DISTANCES, Distance


class MaskWindow:
    """The newest masks of the parameters of this rank, at one bit an entry.

    Args:
        size: how many masks must agree, at least 2.
        distance: how masks are compared: "relative", "overlap" or "hamming".
    """

    def __init__(self, size: int, distance: Distance) -> None:
        self.size = size
        self._distance = DISTANCES[distance]
        self._masks: deque[MaskBits] = deque(maxlen=size)

    @property
    def full(self) -> bool:
        """Whether there are as many masks as must agree."""
        return len(self._masks) == self.size

    def add(
        self,
        masks: MaskBits,
        counted: Collection[str],
        stages: ProcessGroup | None,
        replicas: ProcessGroup | None,
    ) -> float | None:
        """Take in new masks; collective. The oldest leave a full window.

        All replicas get the distance of the first: their weights may differ in the last bit.

        Args:
            masks: the masks of the parameters of this rank.
            counted: the names of those that this rank counts, of all that a pipeline has.
            stages: the ranks whose stages make up the model; None if this rank has all of it.
            replicas: the ranks with the same stage; None if there are no others.

        Returns:
            The largest distance to the other masks of the window; None if there are none.
        """
        others = list(self._masks)[1 - self.size :]
        found = [self._distance(masks, other, counted, stages) for other in others]
        self._masks.append(masks)
        return max(broadcast_from_first(found, replicas), default=None)

    def clear(self) -> None:
        """Drop all masks."""
        self._masks.clear()

    def gather_state(
        self, counted: Collection[str], stages: ProcessGroup | None
    ) -> list[dict[str, Any]]:
        """Return the masks of all stages on the first one, an empty list on others; collective.

        Args:
            counted: as for :meth:`add`.
            stages: as for :meth:`add`.
        """
        own = [masks.only(name for name in masks if name in counted) for masks in self._masks]
        parts = gather(own, stages)
        return [MaskBits.merged(masks).state_dict() for masks in zip(*parts, strict=True)]

    def load_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`gather_state` returned."""
        self._masks.clear()
        self._masks.extend(MaskBits.from_state_dict(state) for state in states)
