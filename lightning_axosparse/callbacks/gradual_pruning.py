"""The callback that prunes weights gradually, to a ratio that rises while training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer

from lightning_axosparse.callbacks.ticket_callback import Period, misconfigured
from lightning_axosparse.callbacks.times import TIME, Progress, Time, When, in_steps
from lightning_axosparse.callbacks.weight_pruning import PRUNING_ARGUMENTS, WeightPruning
from lightning_axosparse.pruning.rule import MaskSchedule, Score, Which, cubic_ratio
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.sparse.backend import Compute
from lightning_axosparse.support.arguments import checked
from lightning_axosparse.support.troubleshooting import see


class GradualPruning(WeightPruning):
    """Prunes weights gradually while training, and stores them sparse.

    From ``start`` to ``end`` the pruning ratio rises by a cubic schedule (Zhu & Gupta, 2017). At
    intervals of ``every`` the entries of highest score are selected, over all stages of the
    pipeline, identically on all ranks; the others are pruned, and stay pruned. Of pruned weights,
    the strategy stores only the unpruned values, with their gradients and optimizer state (SAMO;
    Singh & Bhatele, IPDPS 2023). The masks at ``end`` are the ticket.

    ``start``, ``end`` and ``every`` are optimizer steps (an int) or a share of the run (a float).
    Masks that are due after the last batch of an epoch are computed when the epoch has been
    validated.

    Args:
        pruning_ratio: fraction of the entries of all pruned weights to prune, in (0, 1).
        start: when the ratio begins to rise.
        end: when the ratio is reached, and the ticket is drawn.
        every: how often the ratio rises.
        score: "saliency": magnitude times the fourth root of the optimizer's second moment (Optimal
            Brain Damage), for Adam and its kin, RMSprop, Adadelta and Adagrad; "magnitude"; "auto":
            saliency where the optimizer has a second moment, else magnitude. Or a function of a
            weight and its optimizer state that returns a tensor of the weight's shape; it is called
            several times and has to return the same values.
        floor: all weights are ranked together, but each keeps at least this fraction, in [0, 1], of
            the entries that it would keep if all weights were pruned by the same fraction, so no
            layer becomes empty. With a ratio of 0.8 and a floor of 0.05, each keeps at least 1 % of
            its entries. With 1, all are pruned by the same fraction. A warning names weights with
            hardly any entries when the ticket is drawn.
        which: the weights to prune: a table of kinds ("weight", "embedding", "head", "norm",
            "bias", "other") and patterns of names (as in :mod:`fnmatch`), such as
            ``{"embedding": False, "*.lora_*": False}``, or a function ``(name, parameter) ->
            bool``. By default all weights, embeddings and heads, no norms and biases
            (:func:`lightning_axosparse.pruning.rule.prunable`).
        ticket: a ticket, or the file or checkpoint with one, to prune by from the start of fit; no
            other is drawn.
        compute: how pruned linear layers and convolutions run. On CPU "sparse" multiplies with the
            unpruned values, and "dense" with weights that are made dense at every use. "samo" keeps
            dense weights in the dtype of the products and updates them once per optimizer step
            (SAMO); the others store no dense weights, and need the least memory. "auto" chooses the
            fastest of them. It chooses "samo" only in 16 bits, with several micro-batches per step
            and too many unpruned values for "sparse". In 16 bits the choice depends on the
            processor: if ranks, or a run and the one that it resumes, have different processors,
            the one on which "sparse" gains least decides.

    Attributes:
        ticket: the ticket once it is drawn or given, else None. Every rank has the whole ticket, at
            one bit per weight.
        drawn_at: number of optimizer steps before the draw; None if this run has drawn no ticket.

    Raises:
        MisconfigurationException: if an argument is out of range, or ``end`` does not come after
            ``start``.
    """

    @checked(MisconfigurationException, start=TIME, end=TIME, every=TIME, **PRUNING_ARGUMENTS)
    def __init__(
        self,
        pruning_ratio: float = 0.8,
        start: Time = 0.25,
        end: Time = 0.9,
        every: Time = 1 / 32,
        score: Literal["auto", "magnitude", "saliency"] | Score = "auto",
        floor: float = 0.05,
        which: Which | None = None,
        ticket: Ticket | str | os.PathLike[str] | None = None,
        compute: Compute = "auto",
    ) -> None:
        super().__init__(pruning_ratio, score, floor, which, ticket, compute)
        if type(start) is type(end) and start >= end:
            raise MisconfigurationException(
                f"end={end} must come after start={start}: weights are pruned in between."
                + see("tickets")
            )
        self.start, self.end, self.every = start, end, every
        self._pruned: Ticket | None = None
        """The masks by which weights are pruned now; None before ``start`` and after the draw."""

    @property
    def period(self) -> Period:
        """The period of the training."""
        return super().period if self._pruned is None else "pruning"

    @property
    def _times(self) -> tuple[When | None, ...]:
        return self.start, self.end, self.every

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prune by the ticket if there is one, else by the masks of the checkpoint, if any."""
        super().on_fit_start(trainer, pl_module)
        if self._pruned is not None:
            self._prune(trainer, self._pruned)

    def _act(self, trainer: Trainer, before: Progress, now: Progress, on_step: bool) -> None:
        schedule = self._schedule(trainer)
        steps = range(max(before.steps, schedule.start) + 1, now.steps + 1)
        if now.steps >= schedule.end:
            masks = self._masks(trainer, self.pruning_ratio)
            self._draw(trainer, self._ticket_of(trainer, masks, self.pruning_ratio))
            self._pruned = None
        elif any(map(schedule.changes_after, steps)):
            ratio = cubic_ratio(self.pruning_ratio, schedule.progress(now.steps))
            self._pruned = self._ticket_of(trainer, self._masks(trainer, ratio), ratio)
            self._prune(trainer, self._pruned)

    def _schedule(self, trainer: Trainer) -> MaskSchedule:
        """Return the optimizer steps of this run after which the ratio rises."""
        start, every, end = (in_steps(time, trainer) for time in (self.start, self.every, self.end))
        if type(self.start) is type(self.end):  # In a short run both may round to the same step.
            start = min(start, end - 1)
        with misconfigured():
            return MaskSchedule(start, every, end)

    def _not_drawn(self, steps: int) -> str:
        ratio = 0.0 if self._pruned is None else self._pruned.pruning_ratio
        return (
            f"No ticket was drawn in {steps} optimizer steps: end={self.end} has not been reached. "
            f"{ratio:.0%} of the entries are pruned. Set an earlier end, or train longer."
            + see("tickets")
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the ticket, or the masks by which weights are pruned now."""
        pruned = None if self._pruned is None else self._pruned.state_dict()
        return {**super().state_dict(), "pruned": pruned}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        pruned = None if self.ticket is not None else state["pruned"]
        self._pruned = None if pruned is None else Ticket.from_state_dict(pruned)
