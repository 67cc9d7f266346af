"""The search of the early-bird paper: compares masks at intervals, until they have settled."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from lightning.pytorch import Trainer
from torch.distributed import ProcessGroup

from lightning_axosparse.callbacks.times import WHEN, Progress, When
from lightning_axosparse.distributed.process_groups import all_gather, broadcast_from_first, gather
from lightning_axosparse.pruning.masks import DISTANCES, Distance, MaskBits, mask_distance
from lightning_axosparse.support.arguments import NONE, integer, number, one_of

SEARCH_ARGUMENTS = {
    "every": WHEN,
    "draw_by": WHEN | NONE,
    "distance": one_of(*DISTANCES),
    "threshold": number("a number in (0, 1]", lambda threshold: 0 < threshold <= 1),
    "window": integer(2),
}
"""The valid values of the arguments of :class:`MaskSearch`."""


class MaskSearch:
    """Compares new masks with earlier ones, and decides when the ticket is drawn.

    Arguments are those of ``EarlyBirdTicket``.

    Attributes:
        distances: number of optimizer steps -> the largest distance of the masks after these steps
            to the window, from the second masks on.
    """

    def __init__(
        self, every: When, draw_by: When | None, distance: Distance, threshold: float, window: int
    ) -> None:
        self.every, self.draw_by = every, draw_by
        self.distance, self.threshold, self.window = distance, threshold, window
        self.distances: dict[int, float] = {}
        self._masks: deque[MaskBits] = deque(maxlen=window)
        """The newest masks of the parameters of this rank."""
        self.is_whole = True
        """Whether they are those of all stages, as between runs."""

    def is_due(self, trainer: Trainer, before: Progress, now: Progress) -> bool:
        """Return whether masks were due after ``before``, up to ``now``."""
        passed = now.times(self.every, trainer) > before.times(self.every, trainer)
        return passed or self._is_late(trainer, now)

    def add(
        self,
        masks: MaskBits,
        counted: Collection[str],
        stages: ProcessGroup | None,
        replicas: ProcessGroup | None,
    ) -> float | None:
        """Add new masks, and return their largest distance to the others of the window.

        Collective; the oldest masks leave a full window, and the first have no distance. All
        replicas get that of the first one: their weights may differ in the last bit. ``counted``
        and ``stages`` are as for :func:`mask_distance`; ``replicas`` are the ranks of a stage.
        """
        others = list(self._masks)[1 - self.window :]
        distances = [mask_distance(self.distance, masks, o, counted, stages) for o in others]
        self._masks.append(masks)
        self.is_whole = False
        return max(broadcast_from_first(distances, replicas), default=None)

    def is_over(
        self, trainer: Trainer, now: Progress, distance: float | None, on_step: bool
    ) -> bool:
        """Log the distance of the newest masks to the window, and return whether to draw them."""
        settled = False
        if distance is not None:
            self.distances[now.steps] = distance
            module = trainer.lightning_module
            module.log("mask_distance", distance, on_step=on_step, on_epoch=not on_step)
            settled = len(self._masks) == self.window and distance < self.threshold
        return settled or self._is_late(trainer, now)

    def _is_late(self, trainer: Trainer, now: Progress) -> bool:
        return self.draw_by is not None and now.times(self.draw_by, trainer) > 0

    def clear(self) -> None:
        """Drop all masks."""
        self._masks.clear()

    def not_settled(self) -> str:
        """Return the reason, in words, why no ticket was drawn."""
        last = f"{[*self.distances.values()][-1]:.3f}" if self.distances else "none"
        return (
            f"the masks have not settled (last mask_distance: {last}, threshold: "
            f"{self.threshold}, window: {self.window})"
        )

    def share_masks(self, counted: Collection[str], stages: ProcessGroup | None) -> None:
        """Give every rank the masks of all stages, for a run on another grid; collective."""
        gathered = all_gather(self._counted(counted), stages)
        merged = [MaskBits.merged(masks) for masks in zip(*gathered, strict=True)]
        self._masks.clear()
        self._masks.extend(merged)
        self.is_whole = True

    def whole_masks(self) -> list[dict[str, Any]]:
        """Return the masks, where they are those of all stages."""
        return [masks.state_dict() for masks in self._masks]

    def gather_masks(
        self, counted: Collection[str], stages: ProcessGroup | None
    ) -> list[dict[str, Any]]:
        """Return the masks of all stages on the first one, an empty list on others; collective."""
        parts = gather(self._counted(counted), stages)
        return [MaskBits.merged(masks).state_dict() for masks in zip(*parts, strict=True)]

    def _counted(self, counted: Collection[str]) -> list[MaskBits]:
        return [masks.only(name for name in masks if name in counted) for masks in self._masks]

    def state_dict(self) -> dict[str, Any]:
        """Return the distances. :meth:`gather_masks` has the window, which is on several ranks."""
        return {"distances": dict(self.distances), "window": []}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the distances, and the masks of all stages."""
        self.distances = dict(state["distances"])
        self._masks.clear()
        self._masks.extend(MaskBits.from_state_dict(masks) for masks in state["window"])
        self.is_whole = True
