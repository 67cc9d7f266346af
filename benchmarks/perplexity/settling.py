"""Records how fast masks settle while a dense model trains: by ratio and by interval."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch import Callback

from lightning_axosparse.pruning.bitmask import MaskBits
from lightning_axosparse.pruning.mask_distance import relative_distance
from lightning_axosparse.pruning.mask_rule import MaskRule


@dataclass(frozen=True)
class Settling:
    """Dense training in which masks of several ratios are compared at several intervals.

    Attributes:
        ratios: fractions to prune.
        intervals: between two masks, as numbers of masks a run.
        window: masks that must agree.
    """

    ratios: tuple[float, ...] = (0.5, 0.8, 0.9)
    intervals: tuple[int, ...] = (16, 32, 64)
    window: int = 5

    def recorder(self) -> Recorder:
        return Recorder(self)

    def found(self, trainer: L.Trainer) -> dict[str, list[float]]:
        """Return the distances that the trainer's recorder found."""
        [recorder] = [each for each in trainer.callbacks if isinstance(each, Recorder)]
        return recorder.distances


class Recorder(Callback):
    """Compares masks as ``EarlyBirdTicket`` does, and draws none.

    Attributes:
        distances: "ratio/interval" -> the largest distance to the window each time, from the first
            full window on.
    """

    def __init__(self, settling: Settling) -> None:
        self.settling = settling
        pairs = [(ratio, count) for ratio in settling.ratios for count in settling.intervals]
        self._windows: dict[tuple[float, int], deque[MaskBits]] = {
            pair: deque(maxlen=settling.window) for pair in pairs
        }
        self.distances: dict[str, list[float]] = {f"{r}/{count}": [] for r, count in pairs}

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        steps = int(trainer.estimated_stepping_batches)
        for ratio in self.settling.ratios:
            due = [n for n in self.settling.intervals if trainer.global_step % (steps // n) == 0]
            if due:
                rule = MaskRule(ratio, "saliency", floor=0.05)
                self._compare(ratio, due, MaskBits(rule.masks(module, trainer.optimizers)))

    def _compare(self, ratio: float, due: Sequence[int], masks: MaskBits) -> None:
        for count in due:
            window = self._windows[ratio, count]
            window.append(masks)
            if len(window) == window.maxlen:
                others = list(window)[:-1]
                largest = max(relative_distance(masks, other, set(masks)) for other in others)
                self.distances[f"{ratio}/{count}"].append(round(largest, 4))
