"""EarlyBirdTicket: watches the magnitude masks settle, draws the ticket, has the weights pruned."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_axosparse.adapters.requirements import refuse_beside_pruning, unless_made_later
from lightning_axosparse.arguments import (
    COUNT,
    NONE,
    PATH,
    PATTERNS,
    checked,
    instance_of,
    number,
    one_of,
    whole,
)
from lightning_axosparse.callbacks.requirements import refuse_model
from lightning_axosparse.pruning.distance import DISTANCES, Distance
from lightning_axosparse.pruning.masks import Scope, magnitude_masks, prunable
from lightning_axosparse.pruning.packed import PackedMasks
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.pruning.together import all_gather, from_first, gather
from lightning_axosparse.sparse.optimizer import refuse_matrix_optimizers
from lightning_axosparse.sparse.reading import POLICIES, best_policy

_NEEDED = (
    "inter_group",
    "data_group",
    "held_parameters",
    "counted_parameters",
    "microbatches",
    "sparsify",
)


class EarlyBirdTicket(Callback):
    """Find an early-bird ticket while training, and go on with the pruned weights stored sparse.

    At the end of each training epoch the weights of least magnitude are masked, over all stages of
    the pipeline together, and the masks are compared with those of the epochs before (You et al.,
    ICLR 2020). When the last ``window`` masks agree, the ticket is drawn, once and identically on
    all ranks, and the strategy turns the pruned weights, their gradients and their optimizer state
    into the kept entries alone (SAMO; Singh & Bhatele, IPDPS 2023). The largest distance to the
    window is logged as ``mask_distance``.

    Args:
        pruning_ratio: share of the weights to prune, in (0, 1). Weights are all parameters with at
            least two dimensions.
        scope: "global": one magnitude threshold for the whole model; "layer": the same ratio in
            every parameter.
        distance: "overlap": share of the kept weights that changed, meaningful at every ratio;
            "hamming": share of all mask entries that changed, as in the paper.
        threshold: the ticket is drawn when the newest mask is closer than this to each other mask
            of the window. 0.1 is the paper's, for which both distances agree at ratio 0.5.
        window: number of epochs whose masks must agree, at least 2; the paper takes 5.
        draw_by_epoch: draw after this many epochs at the latest, settled or not; None: only when
            the masks have settled.
        exclude: patterns (as in :mod:`fnmatch`) of parameter names to leave dense, such as
            ``"*.embedding.weight"``.
        ticket: a ticket, or the file of one, to adopt when fit starts, with no search.
        policy: "sparse" makes dense weights at every use, least memory; "samo" keeps them, in the
            dtype that products run in, and makes them once an optimizer step (SAMO); "auto" takes
            "samo" in 16 bits with several micro-batches a step, else "sparse".

    Attributes:
        ticket: the ticket once it is drawn or adopted, else None. Every rank has the whole of it,
            at one bit a weight.
        distances: the largest distance to the window at the end of each epoch, from the second on.

    Raises:
        MisconfigurationException: for arguments out of range.
    """

    @checked(
        MisconfigurationException,
        pruning_ratio=number("a number in (0, 1)", lambda ratio: 0 < ratio < 1),
        scope=one_of("global", "layer"),
        distance=one_of(*DISTANCES),
        threshold=number("a number in (0, 1]", lambda threshold: 0 < threshold <= 1),
        window=whole(2),
        draw_by_epoch=COUNT | NONE,
        exclude=PATTERNS,
        ticket=instance_of("a Ticket", Ticket) | PATH | NONE,
        policy=one_of("auto", *POLICIES),
    )
    def __init__(
        self,
        pruning_ratio: float = 0.8,
        scope: Scope = "global",
        distance: Distance = "overlap",
        threshold: float = 0.1,
        window: int = 5,
        draw_by_epoch: int | None = None,
        exclude: Sequence[str] = (),
        ticket: Ticket | str | os.PathLike[str] | None = None,
        policy: Literal["auto", "sparse", "samo"] = "auto",
    ) -> None:
        self.policy = policy
        self.pruning_ratio = pruning_ratio
        self.scope = scope
        self.distance = distance
        self.threshold = threshold
        self.draw_by_epoch = draw_by_epoch
        self.exclude = tuple(exclude)
        self.ticket = Ticket.load(ticket) if isinstance(ticket, str | os.PathLike) else ticket
        self.distances: list[float] = []
        self._window: deque[PackedMasks] = deque(maxlen=window)
        self._compared: int | None = None
        """Epochs whose end is behind this callback; None outside of training."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work, before any weights are touched."""
        self.refuse_unfit(trainer)

    def refuse_unfit(self, trainer: Trainer) -> None:
        """Refuse what cannot work: in the caller, where that starts the ranks, and on each.

        Raises:
            MisconfigurationException: for a strategy, a module or callbacks that do not fit.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        refuse_beside_pruning(trainer.callbacks)  # type: ignore[attr-defined]
        missing = [name for name in _NEEDED if not hasattr(type(trainer.strategy), name)]
        if missing:
            raise MisconfigurationException(
                "EarlyBirdTicket needs strategy='axosparse' (AxoSparseStrategy); "
                f"{type(trainer.strategy).__name__} cannot store weights sparse."
            )
        with unless_made_later(trainer.lightning_module):
            refuse_model(trainer.lightning_module, self.exclude, self.ticket)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adopt the ticket that is there: given by the user, or drawn before a resume."""
        refuse_model(pl_module, self.exclude, self.ticket)
        for optimizer in trainer.optimizers:
            refuse_matrix_optimizers(optimizer)
        if self.ticket is not None:
            self._prune(trainer, self.ticket)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make up for the end of an epoch that came after the checkpoint of its last batch.

        Lightning goes on with the next epoch then, without ``on_train_epoch_end`` of that one.
        """
        resumed, self._compared = self._compared, trainer.current_epoch
        if resumed is not None and resumed < trainer.current_epoch:
            self._end_epoch(trainer, pl_module, trainer.current_epoch - 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare this epoch's masks with the window, and draw the ticket when they agree."""
        self._end_epoch(trainer, pl_module, trainer.current_epoch)
        self._compared = trainer.current_epoch + 1

    def _end_epoch(self, trainer: Trainer, pl_module: LightningModule, epoch: int) -> None:
        if self.ticket is not None:
            return
        masks = self._masks(trainer, pl_module)
        distances = self._distances_to_window(trainer, masks)
        self._window.append(masks)
        if distances:
            self.distances.append(max(distances))
            pl_module.log("mask_distance", self.distances[-1], sync_dist=True)
        settled = len(self._window) == self._window.maxlen and max(distances) < self.threshold
        late = self.draw_by_epoch is not None and epoch + 1 >= self.draw_by_epoch
        if settled or late:
            self._draw(trainer, pl_module, masks, epoch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so when the masks never settled."""
        self._compared = None
        if self.ticket is None:
            last = f"{self.distances[-1]:.3f}" if self.distances else "none"
            rank_zero_warn(
                f"No ticket was drawn in {trainer.current_epoch} epochs: the masks have not "
                f"settled (last mask_distance: {last}, threshold: {self.threshold}, window: "
                f"{self._window.maxlen}). The weights are dense. Set draw_by_epoch, a larger "
                "threshold or a smaller window, or train longer."
            )

    def state_dict(self) -> dict[str, Any]:
        """The ticket and the distances so far; :meth:`on_save_checkpoint` adds the window."""
        return {
            "compared": self._compared,
            "ticket": None if self.ticket is None else self.ticket.state_dict(),
            "distances": list(self.distances),
            "window": [],
        }

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the masks of the window, of all stages, to this callback's state on the first."""
        if self.ticket is not None or not self._window:
            return
        strategy: Any = trainer.strategy
        counted = strategy.counted_parameters()
        parts = gather([_part(masks, counted) for masks in self._window], strategy.inter_group)
        if parts is not None:
            window = [PackedMasks.merged(masks) for masks in zip(*parts, strict=True)]
            state = checkpoint["callbacks"][self.state_key]
            state["window"] = [masks.state_dict() for masks in window]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was written, on this or another grid."""
        if state_dict["ticket"] is not None:
            ticket = Ticket.from_state_dict(state_dict["ticket"])
            if self.ticket not in (None, ticket):
                raise MisconfigurationException(
                    "The checkpoint holds another ticket than the one given as `ticket=`. Resume "
                    "without `ticket=`, or start a new run from the weights alone."
                )
            self.ticket = ticket
        self._compared = state_dict.get("compared")
        self.distances = list(state_dict["distances"])
        self._window.clear()
        self._window.extend(PackedMasks.from_state_dict(state) for state in state_dict["window"])

    def _masks(self, trainer: Trainer, module: LightningModule) -> PackedMasks:
        """The magnitude masks of the parameters held here, as of now."""
        strategy: Any = trainer.strategy
        masks = magnitude_masks(
            strategy.held_parameters(),
            strategy.counted_parameters(),
            prunable(module, self.exclude),
            self.pruning_ratio,
            self.scope,
            strategy.inter_group,
        )
        return PackedMasks(masks)

    def _distances_to_window(self, trainer: Trainer, masks: PackedMasks) -> list[float]:
        """How far ``masks`` are from each mask of the window but the oldest of a full one.

        The first replica decides for all: their weights may differ in the last bit.
        """
        strategy: Any = trainer.strategy
        counted = strategy.counted_parameters()
        distance = DISTANCES[self.distance]
        others = list(self._window)[1 - (self._window.maxlen or 0) :]
        found = [distance(masks, other, counted, strategy.inter_group) for other in others]
        return from_first(found, strategy.data_group)

    def _draw(
        self, trainer: Trainer, module: LightningModule, masks: PackedMasks, epoch: int
    ) -> None:
        """Make the first replica's masks, at the end of ``epoch``, the ticket, on all ranks."""
        strategy: Any = trainer.strategy
        part = _part(masks, strategy.counted_parameters())
        parts = all_gather(from_first(part, strategy.data_group), strategy.inter_group)
        self.ticket = Ticket(
            PackedMasks.merged(parts).only(prunable(module, self.exclude)),
            pruning_ratio=self.pruning_ratio,
            scope=self.scope,
            epoch=epoch,
            step=trainer.global_step,
            distance=self.distance,
            distances=tuple(self.distances),
        )
        self._window.clear()
        self._prune(trainer, self.ticket)
        rank_zero_info(f"Early-bird ticket drawn: {self.ticket}")

    def _prune(self, trainer: Trainer, ticket: Ticket) -> None:
        strategy: Any = trainer.strategy
        policy = self.policy
        if policy == "auto":
            passes = strategy.microbatches * trainer.accumulate_grad_batches
            policy = best_policy(str(trainer.precision).startswith(("16", "bf16")), passes)
        strategy.sparsify(ticket.part(strategy.held_parameters()), policy)


def _part(masks: PackedMasks, counted: Collection[str]) -> PackedMasks:
    """The masks that this rank answers for."""
    return masks.only(name for name in masks if name in counted)
