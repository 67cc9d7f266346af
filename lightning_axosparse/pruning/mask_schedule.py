"""Says when and how much the pruning ratio rises before the draw."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_axosparse.support.troubleshooting import see


@dataclass(frozen=True)
class MaskSchedule:
    """The optimizer steps after which weights are pruned: ``begin``, and every so many more.

    Attributes:
        begin: optimizer steps before the ratio begins to rise.
        every: optimizer steps from one pruning to the next.
        end: optimizer steps before the draw.

    Raises:
        ValueError: if it ends before it begins.
    """

    begin: int
    every: int
    end: int

    def __post_init__(self) -> None:
        if self.begin >= self.end:
            raise ValueError(
                f"draw_by, after {self.end} optimizer steps, must come after draw_after (every, if "
                f"that is None), after {self.begin}: weights are pruned in between."
                + see("tickets")
            )

    def changes_after(self, steps: int) -> bool:
        """Return whether weights are pruned after so many optimizer steps, before the draw."""
        return self.begin <= steps < self.end and (steps - self.begin) % self.every == 0

    def progress(self, steps: int) -> float:
        """Return how far the schedule has come: 0 at its beginning, 1 from its end on."""
        return min(max((steps - self.begin) / (self.end - self.begin), 0.0), 1.0)


def cubic_ratio(ratio: float, progress: float) -> float:
    """Return the pruning ratio on the way to ``ratio``: fast at first, then slower.

    After Zhu & Gupta, *To prune, or not to prune* (2017, arXiv 1710.01878), from a ratio of 0.
    """
    return float(ratio * (1 - (1 - progress) ** 3))
