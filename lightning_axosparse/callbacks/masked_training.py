"""Changes masks of dense weights while they train: gradual pruning, SET and RigL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from lightning_axosparse.callbacks.moments import Moment, When, total_steps
from lightning_axosparse.distributed.process_groups import all_gather, broadcast_from_first
from lightning_axosparse.pruning.bitmask import MaskBits
from lightning_axosparse.pruning.mask_schedule import (
    MaskSchedule,
    cosine_fraction,
    cubic_ratio,
)
from lightning_axosparse.pruning.masked_weights import MaskedWeights
from lightning_axosparse.pruning.regrowth import Growth, regrown
from lightning_axosparse.support.troubleshooting import see

MaskedMethod = Literal["gradual", "set", "rigl"]
"""How masks change before the draw."""

_DROPPED = 0.3
"""Of the kept entries, what SET and RigL drop at first."""

_GROWTH: dict[str, Growth] = {"set": "random", "rigl": "gradient"}


class MaskedTraining:
    """Dense weights under masks that change by a schedule, on each rank.

    Masks change at the start of a step, before its forward pass; those of RigL when its gradients
    are there. All ranks have the masks that the first replica computes.

    Args:
        method: "gradual", "set" or "rigl".
        ratio: fraction of the entries that is pruned in the end.
        every: how often masks change.
        begin: when the first masks hold; None: after ``every``.
        end: when the ticket is drawn.

    Attributes:
        masks: the masks of the whole model; None before the first.

    Raises:
        MisconfigurationException: if the times are not optimizer steps or shares of the run, or
            the last comes before the others.
    """

    def __init__(
        self,
        method: MaskedMethod,
        ratio: float,
        every: When,
        begin: When | None,
        end: When | None,
    ) -> None:
        for name, when in (("every", every), ("draw_after", begin), ("draw_by", end)):
            if isinstance(when, str) or (when is None and name == "draw_by"):
                raise MisconfigurationException(
                    f"{name}={when!r} with method={method!r}: give it as optimizer steps (an int) "
                    "or a share of the run (a float), between which masks change by a schedule."
                    + see("tickets")
                )
        assert end is not None
        first = every if begin is None else begin
        if type(first) is type(end) and first >= end:  # type: ignore[operator]
            raise MisconfigurationException(
                f"draw_by={end} must come after draw_after={begin} (every={every}, if that is "
                f"None): with method={method!r} masks change in between." + see("tickets")
            )
        self.masks: MaskBits | None = None
        self._method, self._ratio = method, ratio
        self._every, self._begin, self._end = every, begin, end
        self._changed = -1
        """Optimizer steps before the last change."""
        self._seed: int | None = None
        self._weights: MaskedWeights | None = None

    def schedule(self, trainer: Trainer) -> MaskSchedule:
        """Return the steps of this run after which masks change.

        Raises:
            MisconfigurationException: if the draw does not come after the first masks, or the run
                has no end of which there are shares.
        """
        total = partial(total_steps, trainer)
        every, end = (Moment.of(when, total).count for when in (self._every, self._end))
        begin = every if self._begin is None else Moment.of(self._begin, total).count
        try:
            return MaskSchedule(begin, every, end)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error

    def resume(self, trainer: Trainer) -> None:
        """Go on under the masks of a checkpoint, if there are any."""
        if self.masks is not None:
            self._hold(trainer, self.masks)

    def begin_step(self, trainer: Trainer, score: Callable[[float], MaskBits]) -> None:
        """Change the masks if that is due before the forward pass.

        Args:
            trainer: the running Trainer.
            score: computes the masks of the parameters that this rank counts, by the pruning ratio.
        """
        schedule, steps = self.schedule(trainer), trainer.global_step
        if steps == self._changed or not schedule.changes_after(steps):
            return
        if self._method == "gradual":
            ratio = cubic_ratio(self._ratio, schedule.progress(steps))
        elif self.masks is None:
            ratio = self._ratio
        else:
            return
        self._hold(trainer, agreed_masks(trainer.strategy, score(ratio)))
        self._changed = steps

    def on_gradients(self, trainer: Trainer) -> None:
        """Drop and regrow entries if that is due, then mask the gradients of this step."""
        assert self.masks is not None
        assert self._weights is not None
        schedule, steps = self.schedule(trainer), trainer.global_step
        due = steps != self._changed and schedule.changes_after(steps)
        if due and self._method in _GROWTH:
            strategy: Any = trainer.strategy
            counted = strategy.counted_parameters()
            grown = regrown(
                {n: p for n, p in strategy.held_parameters().items() if n in counted},
                self.masks,
                cosine_fraction(_DROPPED, schedule.progress(steps)),
                _GROWTH[self._method],
                hash((self._seed, steps)),
                strategy.inter_group,
            )
            self._hold(trainer, agreed_masks(strategy, MaskBits(grown)))
            self._changed = steps
        self._weights.mask_gradients()

    def final(self, score: Callable[[float], MaskBits]) -> MaskBits:
        """Return the masks of the ticket, at least those that this rank counts."""
        if self._method == "gradual" or self.masks is None:
            return score(self._ratio)
        return self.masks

    def release(self, trainer: Trainer) -> None:
        """Let go of the weights: the ticket is drawn, or the run has ended."""
        strategy: Any = trainer.strategy
        strategy.on_gradients = self._weights = None

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers and uint8 tensors, for ``torch.load(weights_only=True)``."""
        masks = None if self.masks is None else self.masks.state_dict()
        return {"masks": masks, "changed": self._changed, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        masks = state["masks"]
        self.masks = None if masks is None else MaskBits.from_state_dict(masks)
        self._changed, self._seed = state["changed"], state["seed"]

    def _hold(self, trainer: Trainer, masks: MaskBits) -> None:
        """Train under these masks from now on."""
        strategy: Any = trainer.strategy
        if self._seed is None:
            self._seed = strategy.broadcast(torch.initial_seed())
        held = strategy.held_parameters()
        self.masks = masks
        self._weights = MaskedWeights(held, masks.only(held), trainer.optimizers)
        strategy.on_gradients = partial(self.on_gradients, trainer)


def agreed_masks(strategy: Any, masks: MaskBits) -> MaskBits:
    """Return the masks of all stages, as the first replica has them, on all ranks; collective.

    Args:
        strategy: the running strategy.
        masks: at least the masks of the parameters that this rank counts.
    """
    counted = strategy.counted_parameters()
    part = masks.only(name for name in masks if name in counted)
    part = broadcast_from_first(part, strategy.data_group)
    return MaskBits.merged(all_gather(part, strategy.inter_group))
