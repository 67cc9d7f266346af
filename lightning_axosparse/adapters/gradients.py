"""Gradients that exist before Lightning expects them: the step itself makes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from torch import Tensor, nn


class ParkedGradients:
    """Carries gradients made inside ``training_step`` past ``zero_grad``.

    Lightning's closure calls ``training_step``, then ``zero_grad``, then ``backward``. Where it
    will call ``zero_grad``, fresh gradients are set aside until ``backward``; where it accumulates,
    they are added to the old ones at once, in the order of one process.
    """

    def __init__(self) -> None:
        self._fresh: dict[nn.Parameter, Tensor | None] = {}

    @contextmanager
    def around_step(
        self, parameters: Iterable[nn.Parameter], trainer: pl.Trainer
    ) -> Iterator[None]:
        """Make gradients of ``parameters`` inside the context."""
        if not starts_accumulation(trainer):
            yield
            return
        old = {parameter: parameter.grad for parameter in parameters}
        for parameter in old:
            parameter.grad = None
        yield
        self._fresh = {parameter: parameter.grad for parameter in old}
        for parameter, gradient in old.items():
            parameter.grad = gradient

    def bring_back(self) -> None:
        """Add the fresh gradients to what ``zero_grad`` has left."""
        for parameter, gradient in self._fresh.items():
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad = parameter.grad + gradient
        self._fresh = {}


def starts_accumulation(trainer: pl.Trainer) -> bool:
    """Whether Lightning calls ``zero_grad`` in the current batch."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
