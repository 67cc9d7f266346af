"""The callback that finds an early-bird ticket of channels, and removes the pruned ones."""

from __future__ import annotations

import os
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_debug, rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.callbacks.mask_search import SEARCH_ARGUMENTS, MaskSearch
from lightning_axosparse.callbacks.ticket_callback import (
    TicketCallback,
    misconfigured,
    strategy_of,
)
from lightning_axosparse.callbacks.times import Progress, When
from lightning_axosparse.distributed.process_groups import all_gather, broadcast_from_first
from lightning_axosparse.pruning.channel_ticket import (
    RATIO,
    ChannelTicket,
    channel_masks,
    validate_channelwise_optimizer,
)
from lightning_axosparse.pruning.channels import Channels, find_channels
from lightning_axosparse.pruning.masks import Distance, MaskBits
from lightning_axosparse.strategy.validation import ignore_if_layers_follow, optimizers_before_setup
from lightning_axosparse.support.arguments import (
    FRACTION,
    NONE,
    NOT_NEGATIVE,
    PATH,
    TEXT,
    checked,
    instance_of,
)
from lightning_axosparse.support.troubleshooting import see


class EarlyBirdChannels(TicketCallback):
    """Finds an early-bird ticket of channels while training, then shrinks the network to it.

    This is the method of You et al. (ICLR 2020), on network slimming (Liu et al., ICCV 2017): an L1
    penalty draws the scales of BatchNorms towards zero, and channels are ranked by their scales
    over all layers. When the last ``window`` masks of the channels agree, the newest are the
    ticket, identical on all ranks, and the pruned channels are removed: weights, gradients,
    optimizer state, statistics and the messages between stages shrink, and training goes on. The
    parameters stay the same objects.

    Which channels can be removed is found by tracing the network
    (:mod:`lightning_axosparse.pruning.channels`); layers of which none can be removed are logged at
    the level "debug", with the reason. The largest distance between the newest masks and the
    earlier ones of the window is logged as ``mask_distance``. ``every`` and ``draw_by`` are
    optimizer steps (an int), a share of the run (a float), or epochs ("3 epochs").

    Args:
        pruning_ratio: fraction to prune, in (0, 1), of all channels that can be removed.
        slimming: factor of the L1 penalty on the scales of these channels, until the draw. Its
            subgradient is added to their gradients before these are clipped.
        floor: each layer keeps at least this fraction, in [0, 1], of the channels that it would
            keep if all layers were pruned by the same fraction, and at least one. With a ratio of
            0.75 and a floor of 0.5, a layer with 64 channels keeps at least 8.
        network: name of the submodule whose ``forward`` is traced, such as "model"; None: the
            module itself.
        every: how often masks are computed and compared.
        draw_by: draw at this time at the latest, even if the masks still change; None: only when
            they agree.
        distance: "hamming": fraction of the channels whose mask changed, as in the paper;
            "relative": as for ``EarlyBirdTicket``.
        threshold: the ticket is drawn when the distance of the newest masks to all others of the
            window is smaller than this.
        window: number of masks that must agree, at least 2.
        ticket: a ticket, or the file or checkpoint with one, to use from the start of fit, without
            a search.

    Attributes:
        ticket: the ticket once it is drawn or given, else None; the same on every rank.
        distances: number of optimizer steps -> the largest distance of the masks after these steps
            to the window, from the second masks on.
        drawn_at: number of optimizer steps before the draw; None if this run has drawn no ticket.

    Raises:
        MisconfigurationException: if an argument is out of range.
    """

    ticket_class = ChannelTicket
    ticket: ChannelTicket | None
    refusal = "cannot remove channels"
    needs_whole_weights: Literal[True] = True
    """Ranks may not have parts of weights."""
    search: MaskSearch

    @checked(
        MisconfigurationException,
        pruning_ratio=RATIO,
        slimming=NOT_NEGATIVE,
        floor=FRACTION,
        network=TEXT | NONE,
        ticket=instance_of("a ChannelTicket", ChannelTicket) | PATH | NONE,
        **SEARCH_ARGUMENTS,
    )
    def __init__(
        self,
        pruning_ratio: float = 0.5,
        slimming: float = 1e-4,
        floor: float = 0.5,
        network: str | None = None,
        every: When = "1 epoch",
        draw_by: When | None = 0.5,
        distance: Distance = "hamming",
        threshold: float = 0.1,
        window: int = 5,
        ticket: ChannelTicket | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(ticket)
        self.search = MaskSearch(every, draw_by, distance, threshold, window)
        self.pruning_ratio, self.slimming, self.floor = pruning_ratio, slimming, floor
        self.network = network
        self._channels: Channels | None = None
        """The channels that can be removed; None before training, and if a ticket was given."""

    def _validate_before_launch(self, trainer: Trainer) -> None:
        with ignore_if_layers_follow(trainer.lightning_module):
            self._find_channels(trainer.lightning_module)
        if trainer.strategy.launcher is not None:
            _validate_optimizers(optimizers_before_setup(trainer.lightning_module))

    @misconfigured()
    def _find_channels(self, module: nn.Module) -> Channels | None:
        """Find the channels that a search may remove, or check that the ticket fits the module."""
        if self.ticket is None:
            return find_channels(module, self.network)
        self.ticket.validate(module)
        return None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shrink by the ticket if there is one: given by the user, or drawn before a resume."""
        self._channels = self._find_channels(pl_module)
        _validate_optimizers(trainer.optimizers)
        if self.ticket is not None:
            strategy_of(trainer).shrink(self.ticket)
        elif self._channels is not None:
            rank_zero_debug(str(self._channels))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Add the subgradient of the L1 penalty to the gradients of the scales."""
        if self.ticket is None and self.slimming:
            for scale in self._scales(trainer).values():
                if scale.grad is not None:
                    scale.grad.add_(scale.detach().sign(), alpha=self.slimming)

    def _not_drawn(self, steps: int) -> str:
        return (
            f"No ticket of channels was drawn in {steps} optimizer steps: "
            f"{self.search.not_settled()}. The network has all its channels. Set draw_by, a larger "
            "threshold or a smaller window, or train longer." + see("channels")
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the ticket, or the distances and the window of the search."""
        scales = () if self._channels is None else self._channels.scales
        return {**super().state_dict(), "window": self.search.gather_masks(scales, None)}

    def _act(self, trainer: Trainer, before: Progress, now: Progress, on_step: bool) -> None:
        if not self.search.is_due(trainer, before, now):
            return
        masks = self._masks(trainer)
        distance = self.search.add(masks, set(masks), None, None)  # Every rank has all masks.
        if self.search.is_over(trainer, now, distance, on_step):
            self._draw(trainer, masks)

    def _draw(self, trainer: Trainer, masks: MaskBits) -> None:
        assert self._channels is not None
        step, distances = trainer.global_step, self.distances
        ticket = ChannelTicket(masks, self.pruning_ratio, step, distances, channels=self._channels)
        strategy_of(trainer).shrink(ticket)
        self.ticket, self.drawn_at, self._is_drawn = ticket, step, True
        self.search.clear()
        unpruned, total = ticket.counts
        rank_zero_info(
            f"Ticket drawn after {step} steps: {total - unpruned:,} of the {total:,} channels of "
            f"{len(masks)} layers are pruned."
        )

    def _scales(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the scales of removable channels on this rank: name of a BatchNorm -> scales."""
        assert self._channels is not None
        held = strategy_of(trainer).local_parameters()
        weights = ((name, f"{name}.weight") for name in self._channels.scales)
        return {name: held[weight] for name, weight in weights if weight in held}

    def _masks(self, trainer: Trainer) -> MaskBits:
        """Compute the masks of all channels from the first replica's scales; collective."""
        assert self._channels is not None
        strategy = strategy_of(trainer)
        local = {name: scale.detach().cpu() for name, scale in self._scales(trainer).items()}
        gathered: dict[str, Tensor] = {}
        for part in all_gather(local, strategy.inter_group):
            gathered.update(part)
        gathered = broadcast_from_first(gathered, strategy.data_group)
        scales = {name: gathered[name] for name in self._channels.scales}
        return MaskBits(channel_masks(scales, self.pruning_ratio, self.floor))


@misconfigured()
def _validate_optimizers(optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        validate_channelwise_optimizer(optimizer)
