"""The base of callbacks that prune weights: computes masks, draws the ticket, and prunes by it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_axosparse.callbacks.ticket_callback import (
    TicketCallback,
    misconfigured,
    strategy_of,
)
from lightning_axosparse.distributed.process_groups import all_gather, broadcast_from_first
from lightning_axosparse.pruning.masks import MaskBits
from lightning_axosparse.pruning.rule import SCORES, MaskRule, Score, Which
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.sparse.backend import (
    COMPUTES,
    Backend,
    Compute,
    Processor,
    most_cautious,
    this_processor,
)
from lightning_axosparse.sparse.module.optimizer_state import validate_elementwise_optimizers
from lightning_axosparse.sparse.ops.measure import measured_processor
from lightning_axosparse.sparse.ops.products import max_density
from lightning_axosparse.sparse.store.materialize import copy_pays
from lightning_axosparse.strategy.validation import (
    ignore_if_layers_follow,
    optimizers_before_setup,
    validate_one_optimizer,
)
from lightning_axosparse.support.arguments import (
    FRACTION,
    FUNCTION,
    NONE,
    PATH,
    Kind,
    instance_of,
    number,
    one_of,
)
from lightning_axosparse.support.troubleshooting import first_few, see

_LOW_DENSITY = 0.02
"""Weights of a smaller density are named in a warning when the ticket is drawn."""

_WHICH_TABLE = Kind(
    "a table such as {'embedding': False, '*.head.weight': True}",
    lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(key, str) and type(chosen) is bool for key, chosen in value.items())
    ),
)

PRUNING_ARGUMENTS = {
    "pruning_ratio": number("a number in (0, 1)", lambda ratio: 0 < ratio < 1),
    "score": one_of("auto", *SCORES) | FUNCTION,
    "floor": FRACTION,
    "which": _WHICH_TABLE | FUNCTION | NONE,
    "ticket": instance_of("a Ticket", Ticket) | PATH | NONE,
    "compute": one_of(*COMPUTES),
}
"""The valid values of the arguments of :class:`WeightPruning`."""


class WeightPruning(TicketCallback):
    """Prunes the entries of lowest score, over all stages, and stores the weights sparse.

    Masks are identical on all ranks. Of pruned weights, the strategy stores only the unpruned
    values, with their gradients and optimizer state (SAMO; Singh & Bhatele, IPDPS 2023). Arguments
    are those of ``GradualPruning``.
    """

    ticket_class = Ticket
    ticket: Ticket | None
    refusal = "cannot store weights sparse"
    prunes_at_start: Literal[True] = True
    """The strategy may initialize weights sparse by :attr:`ticket`, if there is one."""

    def __init__(
        self,
        pruning_ratio: float,
        score: Literal["auto", "magnitude", "saliency"] | Score,
        floor: float,
        which: Which | None,
        ticket: Ticket | str | os.PathLike[str] | None,
        compute: Compute,
    ) -> None:
        super().__init__(ticket)
        self.pruning_ratio, self.compute = pruning_ratio, compute
        with misconfigured():
            self._rule = MaskRule(
                pruning_ratio,
                score,
                floor,
                dict(which) if isinstance(which, Mapping) else which,
            )
        self._processor: Processor | None = None
        """The processor by which all ranks choose how to multiply; None before the first masks."""

    def _validate_before_launch(self, trainer: Trainer) -> None:
        with ignore_if_layers_follow(trainer.lightning_module):
            self._validate_model(trainer.lightning_module)
            if trainer.strategy.launcher is not None and self.ticket is None:
                optimizers = optimizers_before_setup(trainer.lightning_module)
                with misconfigured():
                    self._rule.resolved(trainer.lightning_module, optimizers)

    @misconfigured()
    def _validate_model(self, module: nn.Module) -> None:
        """Check that the ticket, or the rule by which one is drawn, fits the model."""
        if self.ticket is not None:
            self.ticket = self.ticket.fitted_to(module)
        else:
            self._rule.sizes(module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prune by the ticket if there is one: given by the user, or drawn before a resume."""
        self._validate_model(pl_module)
        if self.ticket is None:
            automatic = self._rule.score == "auto"
            with misconfigured():
                self._rule = self._rule.resolved(pl_module, trainer.optimizers)
            if automatic and self._rule.score == "magnitude":
                rank_zero_info(
                    "Entries are ranked by magnitude: saliency needs the optimizer's second moment "
                    "of all pruned weights, which SGD does not estimate and frozen weights lack."
                )
        validate_one_optimizer(trainer.optimizers, type(self).__name__)
        for optimizer in trainer.optimizers:
            validate_elementwise_optimizers(optimizer)
        if self.ticket is not None:
            self._prune(trainer, self.ticket)
            strategy_of(trainer).use_freed_memory()

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state, the processor, and the names of untrained weights."""
        untrained = sorted(self._rule.untrained)
        return {**super().state_dict(), "processor": self._processor, "untrained": untrained}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._processor = state["processor"]
        self._rule = replace(self._rule, untrained=frozenset(state["untrained"]))

    def _masks(self, trainer: Trainer, ratio: float) -> MaskBits:
        """Compute the masks of the parameters that this rank counts."""
        strategy = strategy_of(trainer)
        self._leave_untrained(trainer)
        return MaskBits(
            replace(self._rule, ratio=ratio).masks(
                trainer.lightning_module,
                trainer.optimizers,
                strategy.counted_parameters(),
                strategy.inter_group,
                strategy.stored_weights(),
            )
        )

    def _leave_untrained(self, trainer: Trainer) -> None:
        """Leave weights dense that no step has trained on any rank; collective."""
        strategy, sizes = strategy_of(trainer), self._rule.sizes(trainer.lightning_module)
        counted = strategy.counted_parameters()
        local_names = [name for name in sizes if name in counted]
        local = self._rule.without_moments(local_names, strategy.stored_weights())
        untrained = {name for names in all_gather(local, strategy.world_group) for name in names}
        if not untrained or untrained == sizes.keys():
            return
        self._rule = replace(self._rule, untrained=self._rule.untrained | untrained)
        rank_zero_warn(
            f"{first_few(sorted(untrained))}: left dense, because no step has trained it. If a "
            "later step will, set a later start, or score='magnitude'." + see("pruning")
        )

    def _ticket_of(self, trainer: Trainer, masks: MaskBits, ratio: float) -> Ticket:
        """Gather the first replica's masks of all stages as a ticket; collective."""
        strategy = strategy_of(trainer)
        counted = strategy.counted_parameters()
        local = masks.only(name for name in masks if name in counted)
        local = broadcast_from_first(local, strategy.data_group)
        gathered = MaskBits.merged(all_gather(local, strategy.inter_group))
        return Ticket(
            gathered.only(self._rule.sizes(trainer.lightning_module)),
            pruning_ratio=ratio,
            score=self._rule.score_name,
            step=trainer.global_step,
        )

    def _draw(self, trainer: Trainer, ticket: Ticket) -> None:
        """Prune by a ticket from now on."""
        strategy = strategy_of(trainer)
        self.ticket, self.drawn_at, self._is_drawn = ticket, trainer.global_step, True
        stages = strategy.parameter_stages()
        self._prune(trainer, ticket)
        strategy.use_freed_memory()
        rank_zero_info(
            f"Ticket drawn after {ticket.step} steps: {ticket.sparsity:.1%} of the "
            f"{ticket.counts[1]:,} entries of {len(ticket.masks)} weights are pruned."
        )
        self._warn_of_low_densities(ticket)
        self._warn_of_imbalance(ticket, stages)

    def _prune(self, trainer: Trainer, ticket: Ticket) -> None:
        strategy = strategy_of(trainer)
        measured = measured_processor() if strategy.root_device.type == "cpu" else None
        local = most_cautious(filter(None, (measured or this_processor(), self._processor)))
        self._processor = most_cautious(all_gather(local, strategy.world_group))
        backend = Backend(self.compute, self._processor)
        if self.compute == "auto" and self._copy_pays(trainer, ticket, backend):
            backend = Backend("samo", self._processor)
        strategy.sparsify(ticket.part(strategy.local_parameters()), backend)

    def _copy_pays(self, trainer: Trainer, ticket: Ticket, backend: Backend) -> bool:
        strategy = strategy_of(trainer)
        sixteen_bit = str(trainer.precision).startswith(("16", "bf16"))
        passes = strategy.microbatches * trainer.accumulate_grad_batches
        density = 1 - ticket.sparsity
        is_sparse = density <= min(max_density(backend, torch.bfloat16).values())
        return copy_pays(sixteen_bit, passes, is_sparse and strategy.root_device.type == "cpu")

    def _warn_of_low_densities(self, ticket: Ticket) -> None:
        bound = min(_LOW_DENSITY, 1 - ticket.sparsity)
        low = [name for name, pruned in ticket.layer_sparsity().items() if 1 - pruned < bound]
        if low:
            rank_zero_warn(
                f"The ticket keeps less than {bound:.1%} of {first_few(low)}: their scores were "
                "lower than those of other weights. If these weights matter, set a higher floor, "
                "another score, or leave them dense with which={'PATTERN': False}." + see("tickets")
            )

    def _warn_of_imbalance(self, ticket: Ticket, stages: Mapping[str, Collection[int]]) -> None:
        unpruned: Counter[int] = Counter()
        for name, mask in ticket.masks.items():
            if len(stages[name]) == 1:  # Other weights are on several stages.
                unpruned[min(stages[name])] += int(mask.sum())
        if not unpruned:
            return
        most = max(unpruned, key=unpruned.__getitem__)
        least = min(unpruned, key=unpruned.__getitem__)
        if unpruned[most] > 2 * unpruned[least]:
            rank_zero_warn(
                f"The ticket keeps {unpruned[most]} entries in stage {most}, but "
                f"{unpruned[least]} in stage {least}, so their memory and time differ, too. Divide "
                "the layers for this ticket with balance=[...], or set a higher floor."
                + see("tickets")
            )
