"""The gradients of one batch, from the backward passes of its losses to the all-reduce."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from lightning_axosparse.distributed.gradient_reducer import GradientReducer
from lightning_axosparse.pipeline.backward.gradient_hooks import GradientHooks
from lightning_axosparse.strategy.compat.gradients import (
    StashedGradients,
    scale_loss,
    starts_accumulation,
)


class BatchGradients:
    """Computes the gradients of one batch, calls the user's hooks, and averages over replicas.

    Args:
        module: the user's module.
        precision: scales the loss.
        reducer: all-reduces gradients over the replicas; None: they stay local.
        stashed: the gradients of earlier batches.
        hooks: the user's gradient hooks.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        precision: Precision,
        reducer: GradientReducer | None,
        stashed: StashedGradients,
        hooks: GradientHooks,
    ) -> None:
        self._trainer, self._module, self._precision = module.trainer, module, precision
        self._reducer, self._stashed, self._hooks = reducer, stashed, hooks
        self.share = 1.0
        """The weight of this replica's loss, if replicas train on parts of one batch."""

    def differentiate(self, loss: Tensor) -> None:
        """Differentiate the weighted loss of a micro-batch as Lightning would."""
        loss = loss / self._trainer.accumulate_grad_batches
        loss = loss if self.share == 1 else loss * self.share
        self._module.backward(scale_loss(self._precision, loss))

    def begin_last(self, deferred: Collection[nn.Parameter] = ()) -> None:
        """From now on, all-reduce gradients as soon as they are final.

        Args:
            deferred: parameters whose gradients are final only after :meth:`mark_final`.
        """
        if self._reducer is not None:
            self._reducer.prepare(self._earlier, {*deferred, *self._hooks.parameters})

    @property
    def _earlier(self) -> MutableMapping[nn.Parameter, Tensor | None] | None:
        """The gradients of earlier batches, unless `zero_grad` is going to clear them."""
        return None if starts_accumulation(self._trainer) else self._stashed.earlier

    def mark_final(self, parameter: nn.Parameter) -> None:
        """Include the final gradient of a deferred parameter in the all-reduce."""
        if self._reducer is not None and parameter not in self._hooks.parameters:
            self._reducer.mark_final(parameter)

    def call_hooks(self, sharing: dict[nn.Parameter, Any]) -> None:
        """Call the user's hooks with the gradients of the batch.

        Args:
            sharing: the parameters with hooks, and the ranks that have each a part of the gradient.
        """
        for parameter, group in reversed(sharing.items()):  # about the order of backward passes
            self._hooks.call(parameter, self._earlier or {}, group)

    def finish(self, waits: bool) -> None:
        """All-reduce the other gradients."""
        if self._reducer is not None:
            self._reducer.finish(waits)
