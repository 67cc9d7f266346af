"""Adapts Lightning's own callbacks and loggers to the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.call import _call_teardown_hook
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_axosparse.strategy.compat.internals import callbacks_of
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.torch_internals import is_dtensor
from lightning_axosparse.support.troubleshooting import see


def parameters_told_apart_by_identity() -> AbstractContextManager[None]:
    """Return a context in which finetuning callbacks compare parameters by identity.

    Lightning compares their values, which tensors on the meta device do not have; it also treats
    two parameters with the same values, such as zero biases, as one.
    """
    return patched(BaseFinetuning, "filter_on_optimizer", staticmethod(_not_in_optimizer))


def _not_in_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in params if parameter not in known]


_WRITING = ("write_on_batch_end", "write_on_epoch_end")


@contextmanager
def without_writing(trainer: Trainer) -> Iterator[None]:
    """Turn prediction writers off inside the context; their other hooks are called."""
    writers = [each for each in callbacks_of(trainer) if isinstance(each, BasePredictionWriter)]
    with ExitStack() as stack:
        for writer, name in product(writers, _WRITING):
            stack.enter_context(patched(writer, name, _write_nothing))
        yield


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    """Another stage writes it."""


def validating_together(trainer: Trainer) -> AbstractContextManager[None]:
    """Return a context in which the first rank whose interval is over decides to validate.

    With ``val_check_interval`` in units of time, Lightning reads the clock of each rank.
    """
    if trainer._val_check_time_interval is None:  # type: ignore[attr-defined]
        return nullcontext()
    loop = trainer.fit_loop.epoch_loop
    decide = partial(_decide_together, trainer, loop._should_check_val_fx)
    return patched(loop, "_should_check_val_fx", decide)


def _decide_together(trainer: Trainer, decide: Any, data_fetcher: Any) -> bool:
    return trainer.strategy.reduce_boolean_decision(decide(data_fetcher), all=False)


def run_until_tuned(trainer: Trainer, function: Callable[[], Any]) -> Any:
    """Call a method of the Trainer; ``Tuner.lr_find`` ends ``fit`` by an exception.

    Returns:
        Its result; None if the tuner has ended it.
    """
    try:
        return function()
    except _TunerExitException:
        _call_teardown_hook(trainer)
        trainer._teardown()
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None
        return None


def weight_averages(trainer: pl.Trainer) -> list[nn.Module]:
    """Return the averaged models of callbacks, whose tensors have the names of the module's."""
    averages = [
        callback._average_model
        for callback in callbacks_of(trainer)
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging)
    ]
    return [
        average.module if isinstance(average, AveragedModel) else average
        for average in averages
        if average is not None
    ]


class _SilentLogger(DummyLogger):
    """Writes nothing; its folder is that of another logger.

    The names of the methods and attributes with which code wants to write are added to ``written``.
    """

    def __init__(self, logger: Logger, written: set[str]) -> None:
        super().__init__()
        has_log_dir = isinstance(logger, (TensorBoardLogger, CSVLogger))  # as `Trainer.log_dir`
        self._folder = logger.log_dir if has_log_dir else logger.save_dir
        self._written = written

    @property
    @override
    def save_dir(self) -> str | None:
        return self._folder

    @property
    @override
    def experiment(self) -> Any:
        self._written.add("experiment")
        return super().experiment

    @override
    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self._written.add("log_metrics")


@contextmanager
def loggers_silenced(trainer: pl.Trainer) -> Iterator[set[str]]:
    """Replace loggers inside the context by silent ones.

    Yields:
        The names of the methods and attributes with which code in the context wants to write.
    """
    written: set[str] = set()
    silent = [_SilentLogger(logger, written) for logger in trainer.loggers]
    with patched(trainer, "_loggers", silent), broadcasting_nothing(trainer):
        yield written


@contextmanager
def graph_written(trainer: pl.Trainer) -> Iterator[None]:
    """Let TensorBoard loggers write the module's graph now, and not inside the context.

    Lightning lets them write it after setup, when this rank has only its own layers.
    """
    module = trainer.lightning_module
    is_whole = not any(p.is_meta or is_dtensor(p) for p in module.parameters())
    with ExitStack() as stack:
        for logger in trainer.loggers:
            if not (isinstance(logger, TensorBoardLogger) and logger._log_graph):
                continue
            if is_whole:
                logger.log_graph(module)
            else:
                rank_zero_warn(
                    "`TensorBoardLogger(log_graph=True)` writes no graph, because no rank has all "
                    "layers when the run begins. Write the graph of a whole module in a script of "
                    "its own: `logger.log_graph(module)`." + see("logging")
                )
            stack.enter_context(patched(logger, "_log_graph", False))
        yield


def broadcasting_nothing(trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Return a context in which ``trainer.log_dir``, which a step may read, is not broadcast.

    Stages run a step at different times, and not equally often.
    """
    return patched(trainer.strategy, "broadcast", _own_value)


def _own_value(value: Any, src: int = 0) -> Any:
    return value
