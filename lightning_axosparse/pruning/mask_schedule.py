"""Says when and how much masks change while dense weights train under them, before the draw."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

from lightning_axosparse.support.troubleshooting import see


@dataclass(frozen=True)
class MaskSchedule:
    """The optimizer steps after which masks change: ``begin``, and every so many, before ``end``.

    Attributes:
        begin: optimizer steps before the first masks.
        every: optimizer steps from masks to the next ones.
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
                f"that is None), after {self.begin}: masks change in between." + see("tickets")
            )

    def changes_after(self, steps: int) -> bool:
        """Return whether masks change after so many optimizer steps."""
        return self.begin <= steps < self.end and (steps - self.begin) % self.every == 0

    def progress(self, steps: int) -> float:
        """Return how far the schedule has come: 0 at its beginning, 1 from its end on."""
        return min(max((steps - self.begin) / (self.end - self.begin), 0.0), 1.0)


def cubic_ratio(ratio: float, progress: float) -> float:
    """Return the pruning ratio on the way to ``ratio``: fast at first, then slower.

    After Zhu & Gupta, *To prune, or not to prune* (2017, arXiv 1710.01878), from a ratio of 0.
    """
    return float(ratio * (1 - (1 - progress) ** 3))


def cosine_fraction(fraction: float, progress: float) -> float:
    """Return the fraction of the kept entries to drop: ``fraction`` at first, 0 at the end.

    After Evci et al., *Rigging the Lottery* (ICML 2020, arXiv 1911.11134).
    """
    return fraction / 2 * (1 + cos(pi * progress))
