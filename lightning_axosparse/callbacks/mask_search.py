"""The search of the early-bird paper: compares masks at intervals, until they have settled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_axosparse.callbacks.times import WHEN, Progress, When
from lightning_axosparse.pruning.masks import DISTANCES, Distance, MaskWindow
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
        window: the newest masks.
    """

    def __init__(
        self, every: When, draw_by: When | None, distance: Distance, threshold: float, window: int
    ) -> None:
        self.every, self.draw_by = every, draw_by
        self.distance, self.threshold = distance, threshold
        self.distances: dict[int, float] = {}
        self.window = MaskWindow(window, distance)

    def is_due(self, trainer: Trainer, before: Progress, now: Progress) -> bool:
        """Return whether masks were due after ``before``, up to ``now``."""
        passed = now.times(self.every, trainer) > before.times(self.every, trainer)
        return passed or self._is_late(trainer, now)

    def log(self, trainer: Trainer, now: Progress, distance: float | None, on_step: bool) -> None:
        """Store and log the distance of the newest masks to the window; the first have none."""
        if distance is not None:
            self.distances[now.steps] = distance
            module = trainer.lightning_module
            module.log("mask_distance", distance, on_step=on_step, on_epoch=not on_step)

    def is_over(self, trainer: Trainer, now: Progress, distance: float | None) -> bool:
        """Return whether to draw the newest masks, which have this distance to the window."""
        settled = self.window.full and distance is not None and distance < self.threshold
        return settled or self._is_late(trainer, now)

    def _is_late(self, trainer: Trainer, now: Progress) -> bool:
        return self.draw_by is not None and now.times(self.draw_by, trainer) > 0

    def not_settled(self) -> str:
        """Return the reason, in words, why no ticket was drawn."""
        last = f"{[*self.distances.values()][-1]:.3f}" if self.distances else "none"
        return (
            f"the masks have not settled (last mask_distance: {last}, threshold: "
            f"{self.threshold}, window: {self.window.size})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the distances. The window is left out: its masks are on several ranks."""
        return {"distances": dict(self.distances), "window": []}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the distances, and the masks of all stages."""
        self.distances = dict(state["distances"])
        self.window.load_state(state["window"])
