"""Keeps gradients that ``training_step`` makes until Lightning's ``backward``, for hooks to see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.pipeline.shard.remote_gradients import RemoteGradients
from lightning_axosparse.strategy.compat.hooks import RankLocalCallback, callbacks_of, overrides

_MODULE_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)
_CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_CLEARING_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad")


class StashedGradients:
    """Keeps the gradients of a batch from ``training_step`` to ``backward``.

    Lightning's closure calls ``training_step``, then ``zero_grad``, then ``backward``. So the
    gradients of a batch are computed apart from those of earlier batches, and added in ``backward``
    to what ``zero_grad`` has left. Gradients that ``zero_grad`` is going to clear, and that nothing
    sees before, are freed when the step begins, so that there is one set of them at a time.

    Args:
        trainer: the running Trainer.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._frees = not clearing_is_seen(trainer)
        self._fresh: dict[nn.Parameter, Tensor | None] = {}
        self.earlier: dict[nn.Parameter, Tensor | None] = {}
        """Inside a step, the gradients of earlier batches; None where one was added in already."""

    @contextmanager
    def around_step(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Compute gradients of ``parameters`` inside the context."""
        self.earlier = {parameter: parameter.grad for parameter in parameters}
        for parameter in self.earlier:
            parameter.grad = None
        if self._frees and starts_accumulation(self._trainer):
            self.earlier.update(dict.fromkeys(self._cleared() & self.earlier.keys()))
        yield
        self._fresh = {parameter: parameter.grad for parameter in self.earlier}
        for parameter, gradient in self.earlier.items():
            parameter.grad = gradient
        self.earlier = {}

    def _cleared(self) -> set[nn.Parameter]:
        """The parameters whose gradients ``zero_grad`` clears."""
        groups = [group for each in self._trainer.optimizers for group in each.param_groups]
        return {parameter for group in groups for parameter in group["params"]}

    def restore(self) -> None:
        """Add the gradients of the batch to what ``zero_grad`` has left."""
        for parameter, gradient in self._fresh.items():
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad = parameter.grad + gradient
        self._fresh = {}


def starts_accumulation(trainer: pl.Trainer) -> bool:
    """Whether Lightning calls ``zero_grad`` in the current batch."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


def gradients_are_seen(trainer: pl.Trainer) -> bool:
    """Whether anything reads gradients between the backward pass and the optimizer step.

    Clipping and loss scaling do, and so may hooks of the module or of a callback, and a module that
    optimizes by hand.
    """
    return (
        bool(trainer.gradient_clip_val)
        or not trainer.lightning_module.automatic_optimization
        or getattr(trainer.precision_plugin, "scaler", None) is not None
        or overrides(trainer.lightning_module, *_MODULE_HOOKS)
        or any(overrides(callback, *_CALLBACK_HOOKS) for callback in callbacks_of(trainer))
    )


def clearing_is_seen(trainer: pl.Trainer) -> bool:
    """Whether anything sees the gradients that ``zero_grad`` clears, or clears them differently.

    Hooks of the module or of a callback may, and optimizers with a ``zero_grad`` of their own.
    """
    return (
        overrides(trainer.lightning_module, *_CLEARING_HOOKS)
        or any(overrides(callback, "on_before_zero_grad") for callback in callbacks_of(trainer))
        or any(type(each).zero_grad is not Optimizer.zero_grad for each in trainer.optimizers)
    )


class GradientNorms(RankLocalCallback):
    """Lets hooks know the norms of all stages' gradients; collective where a hook may read them.

    Args:
        trainer: the running Trainer, with its callbacks.
        gradients: those of other stages.
    """

    def __init__(self, trainer: pl.Trainer, gradients: RemoteGradients) -> None:
        self._gradients = gradients
        module = trainer.lightning_module
        owners = (module, *callbacks_of(trainer))
        self._after_backward = any(overrides(each, "on_after_backward") for each in owners)
        self._before_step = overrides(module, "configure_gradient_clipping") or any(
            overrides(each, "on_before_optimizer_step") for each in owners
        )

    def on_after_backward(self, *_: Any) -> None:
        """Measure what the hooks of this name may read."""
        if self._after_backward:
            self._gradients.measure()

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Measure what the hooks of this name, and the module's own clipping, may read."""
        if self._before_step:
            self._gradients.measure()
