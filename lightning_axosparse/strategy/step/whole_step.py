"""Runs Lightning's steps on whole batches, if a rank has the whole module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch.plugins.precision import Precision

from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.pipeline.choice import InFlightLimit
from lightning_axosparse.strategy.compat.gradients import (
    gradients_are_seen,
    restore_precision,
    surround_backward,
)
from lightning_axosparse.strategy.compat.lockstep import position
from lightning_axosparse.strategy.stages.stage_module import StageModule
from lightning_axosparse.support.trace import clock

StepContext = Callable[[], AbstractContextManager[None]]
"""Makes the context of a step, such as ``Precision.train_step_context``."""


class WholeStepRunner:
    """Runs steps as Lightning does on one device, and averages gradients over replicas.

    There is nothing to pipeline, so Lightning's own logging, metrics, closures and manual
    optimization work as they are. With ``steps_in_parts`` the optimizer itself waits for each part
    of the gradients before it uses it, by :meth:`SharedParameters.wait_for`.
    """

    def __init__(
        self, precision: Precision, steps_in_parts: bool, stage_module: StageModule
    ) -> None:
        self.limit = InFlightLimit(1)
        self.peak_in_flight = {0: 1}
        self._precision, self._stage_module = precision, stage_module
        self._trainer = stage_module.module.trainer
        self._waits = not steps_in_parts or gradients_are_seen(self._trainer)
        surround_backward(precision, self._differentiates)

    def close(self) -> None:
        """Give the precision plugin its own backward pass back."""
        restore_precision(self._precision)

    def run_step(
        self, user_step: Callable[..., Any], precision: StepContext, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a step of the module in the context of ``precision``; Lightning differentiates."""
        with this_rank().step(*position(self._trainer)), clock.span("forward"), precision():
            return user_step(*args, **kwargs)

    @contextmanager
    def _differentiates(self) -> Iterator[None]:
        """All-reduce each gradient as soon as the backward pass in the context has computed it."""
        self._stage_module.follow_changes()
        reducer = self._stage_module.shared.step_reducer
        with this_rank().step(*position(self._trainer)):
            if reducer is not None:
                reducer.prepare()
            with clock.span("backward"):
                yield
            if reducer is not None:
                reducer.finish(self._waits)
