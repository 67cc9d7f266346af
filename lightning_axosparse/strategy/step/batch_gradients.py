"""The gradients of one batch, from the losses of its micro-batches to their all-reduce."""

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
    """Makes, reduces and shows to hooks the gradients of one batch.

    Without a ``reducer``, which averages them over replicas, they stay local. ``stashed`` are those
    of earlier batches, ``hooks`` those of the user's parameters.
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
        self._factor = 1.0
        self.share = 1.0
        """What the loss counts, where replicas train on parts of a batch."""

    def differentiate(self, loss: Tensor) -> None:
        """Differentiate the weighted loss of a micro-batch as Lightning would."""
        loss = loss / self._trainer.accumulate_grad_batches
        loss = loss if self.share == 1 else loss * self.share
        self._module.backward(scale_loss(self._precision, loss))

    def begin_last(self, factor: float, deferred: Collection[nn.Parameter] = ()) -> None:
        """From now on, all-reduce gradients as soon as they are final.

        Args:
            factor: what the gradients of the whole batch are to be multiplied by.
            deferred: parameters whose gradients are final only when :meth:`mark_final` says so.
        """
        self._factor = factor
        if self._reducer is not None:
            hooked = self._hooks.parameters
            self._reducer.arm(factor, self._earlier, deferred, hooked)

    @property
    def _earlier(self) -> MutableMapping[nn.Parameter, Tensor | None] | None:
        """The gradients of earlier batches, unless `zero_grad` is going to clear them."""
        return None if starts_accumulation(self._trainer) else self._stashed.earlier

    def mark_final(self, parameter: nn.Parameter) -> None:
        """All-reduce with the gradient of this parameter, which was deferred."""
        if self._reducer is not None and parameter not in self._hooks.parameters:
            self._reducer.mark_final(parameter)

    def call_hooks(self, sharing: dict[nn.Parameter, Any]) -> None:
        """Let the user's hooks see the gradients of the batch.

        Args:
            sharing: the parameters with hooks, and the ranks that have each a part of the gradient.
        """
        for parameter, group in reversed(sharing.items()):  # about the order of backward passes
            if parameter.grad is not None and self._factor != 1:
                parameter.grad.mul_(self._factor)
            self._hooks.call(parameter, self._earlier or {}, group)

    def finish(self, parameters: Collection[nn.Parameter], waits: bool) -> None:
        """All-reduce the other gradients of these parameters, and rescale those that stay local."""
        reducer = self._reducer
        if reducer is not None:
            reducer.start_rest()
            if waits:
                reducer.wait_for(parameters)
        if self._factor != 1:
            hooked = self._hooks.parameters
            for parameter in parameters:
                reduced = reducer is not None and parameter in reducer.parameters
                if parameter.grad is not None and not reduced and parameter not in hooked:
                    parameter.grad.mul_(self._factor)
