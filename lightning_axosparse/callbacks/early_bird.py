"""The callback that finds an early-bird ticket: prunes weights once, when masks have settled."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer

from lightning_axosparse.callbacks.mask_search import SEARCH_ARGUMENTS, MaskSearch
from lightning_axosparse.callbacks.ticket_callback import strategy_of
from lightning_axosparse.callbacks.times import Progress, When
from lightning_axosparse.callbacks.weight_pruning import PRUNING_ARGUMENTS, WeightPruning
from lightning_axosparse.pruning.masks import Distance
from lightning_axosparse.pruning.rule import Score, Which
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.sparse.backend import Compute
from lightning_axosparse.support.arguments import checked
from lightning_axosparse.support.troubleshooting import see


class EarlyBirdTicket(WeightPruning):
    """Prunes weights once, when the masks by which it would prune have settled.

    This is the method of You et al. (ICLR 2020), on single weights. At intervals of ``every`` the
    entries of highest score are selected, as by ``GradualPruning``, but nothing is pruned. The
    largest distance between the newest masks and the earlier ones of the window is logged as
    ``mask_distance``. When the last ``window`` masks agree, the newest are the ticket, and the
    weights are stored sparse from then on. Pruning gradually costs less quality, but weights are
    sparse later (``docs/tickets.md``).

    ``every`` and ``draw_by`` are optimizer steps (an int), a share of the run (a float), or epochs
    (such as "3 epochs"). Masks that are due after the last batch of an epoch are computed when the
    epoch has been validated.

    Args:
        pruning_ratio: fraction of the entries of all pruned weights to prune, in (0, 1).
        every: how often masks are compared. Masks change less over shorter intervals, so a shorter
            interval needs a smaller ``threshold``.
        draw_by: the latest time of the draw, even if the masks still change; None: only when they
            agree.
        distance: how masks are compared. "hamming": fraction of all mask entries that changed, as
            in the paper. "relative": fraction of the unpruned entries that changed, divided by the
            fraction that changes between independent random masks, so 1 means unrelated masks at
            every pruning ratio.
        threshold: the ticket is drawn when the distance of the newest masks to all others of the
            window is smaller than this.
        window: number of masks that must agree, at least 2; the paper uses 5, one per epoch, with
            the hamming distance and a threshold of 0.1.
        score: see ``GradualPruning``.
        floor: see ``GradualPruning``.
        which: see ``GradualPruning``.
        ticket: see ``GradualPruning``.
        compute: see ``GradualPruning``.

    Attributes:
        ticket: the ticket once it is drawn or given, else None. Every rank has the whole ticket, at
            one bit per weight.
        distances: number of optimizer steps -> the largest distance of the masks after these steps
            to the window, from the second masks on.
        drawn_at: number of optimizer steps before the draw; None if this run has drawn no ticket.

    Raises:
        MisconfigurationException: if an argument is out of range.
    """

    search: MaskSearch

    @checked(MisconfigurationException, **SEARCH_ARGUMENTS, **PRUNING_ARGUMENTS)
    def __init__(
        self,
        pruning_ratio: float = 0.8,
        every: When = 1 / 32,
        draw_by: When | None = 0.9,
        distance: Distance = "relative",
        threshold: float = 0.5,
        window: int = 5,
        score: Literal["auto", "magnitude", "saliency"] | Score = "auto",
        floor: float = 0.05,
        which: Which | None = None,
        ticket: Ticket | str | os.PathLike[str] | None = None,
        compute: Compute = "auto",
    ) -> None:
        super().__init__(pruning_ratio, score, floor, which, ticket, compute)
        self.search = MaskSearch(every, draw_by, distance, threshold, window)

    def _act(self, trainer: Trainer, before: Progress, now: Progress, on_step: bool) -> None:
        search, strategy = self.search, strategy_of(trainer)
        if not search.is_due(trainer, before, now):
            return
        masks, counted = self._masks(trainer, self.pruning_ratio), strategy.counted_parameters()
        distance = search.add(masks, counted, strategy.inter_group, strategy.data_group)
        if search.is_over(trainer, now, distance, on_step):
            ticket = self._ticket_of(trainer, masks, self.pruning_ratio)
            search.clear()
            ticket = replace(ticket, distance=search.distance, distances=search.distances)
            self._draw(trainer, ticket)

    def _not_drawn(self, steps: int) -> str:
        return (
            f"No ticket was drawn in {steps} optimizer steps: {self.search.not_settled()}. The "
            "weights are dense. Set draw_by, a larger threshold, a shorter interval (every) or a "
            "smaller window, or train longer." + see("tickets")
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if no ticket was drawn, and give every rank the masks of all stages."""
        super().on_train_end(trainer, pl_module)
        if self.ticket is None:
            strategy = strategy_of(trainer)
            self.search.share_masks(strategy.counted_parameters(), strategy.inter_group)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Gather the masks of all stages into the checkpoint, which the first rank writes."""
        if self.ticket is None:
            search, strategy = self.search, strategy_of(trainer)
            checkpoint["callbacks"][self.state_key]["window"] = (
                search.whole_masks()
                if search.is_whole
                else search.gather_masks(strategy.counted_parameters(), strategy.inter_group)
            )
