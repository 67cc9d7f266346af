"""Logging: ``self.log`` in each micro-batch becomes one call for the batch, on every rank."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _get_default_dtype,
    _Metadata,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_axosparse.pipeline.reductions import ReductionTracker, Weighting, shares

_LOG_SIGNATURE = inspect.signature(LightningModule.log)


def silence_sync_advice() -> None:
    """Stop Lightning from advising ``sync_dist=True`` where one replica has nothing to synchronise.

    It takes the stages of a pipeline, which log the same values, for replicas.
    """
    warnings.filterwarnings(
        "ignore",
        message=r"It is recommended to use `self\.log\(.*sync_dist=True",
        category=PossibleUserWarning,
    )


@dataclass(frozen=True)
class LoggedValue:
    """What one name was logged with over a whole batch; can be pickled.

    Attributes:
        name: the first argument of ``self.log``.
        value: scalar tensor on the CPU; for a metric object its value for this batch, on the CPU
            (``None`` if it was only updated).
        metric: attribute path of the metric object that was logged, or None.
        options: the other arguments of ``self.log`` that the user gave.
        is_exact: whether the value is that of the whole batch, and not only a mean of what the
            micro-batches had.
        counts_samples: whether the micro-batches' values were their numbers of samples, and have
            been added up.
    """

    name: str
    value: Any
    metric: str | None
    options: Mapping[str, Any]
    is_exact: bool = True
    counts_samples: bool = False


@dataclass(frozen=True)
class LogCall:
    """One call of ``self.log`` inside a micro-batch of ``size`` samples; can be pickled.

    ``origin`` is the attribute path of the metric that returned the value, with its key there;
    ``counts_samples`` whether the value is the int ``size``, such as ``len(batch)``; ``weighting``
    how it counts among those of the batch's micro-batches, and ``share`` the micro-batch's share of
    the batch, if the user has a rule for it.
    """

    name: str
    value: Any
    origin: tuple[str, str | None] | None
    logged_metric: str | None
    options: Mapping[str, Any]
    size: int
    weighting: Weighting
    share: float | None = None
    counts_samples: bool = False


class MicrobatchLog:
    """Stands in front of ``module.log``: records inside a micro-batch, passes through outside.

    One batch goes like this; the last three lines run on every rank, with what the last stage
    combined, to which it may have added what others recorded of the same batch::

        for microbatch in microbatches:
            with log.microbatch(size):
                training_step(microbatch)
        log.add(received)
        values = broadcast(log.combine(metrics.batch_value))
        log.replay(values)
        log.clear()

    A micro-batch that leaves the context by an exception leaves no record: a stage whose step is
    cut short at its edge thereby contributes nothing, in its own process or in a shared one.

    Args:
        module: the LightningModule; ``log_dict`` calls ``self.log`` and needs nothing of its own.
        tracker: knows from which reductions the values of the running step came.
    """

    def __init__(self, module: LightningModule, tracker: ReductionTracker) -> None:
        self._module = module
        self._tracker = tracker
        self._open: list[LogCall] | None = None
        self._size = 0
        self._share: float | None = None
        self._microbatches: list[list[LogCall]] = []
        self._metrics: dict[str, Metric] | None = None
        self._inexact: set[str] = set()
        self._other_ints: set[str] = set()
        self._told_counts: set[str] = set()

    def attach(self) -> None:
        """Put the recorder in front of the module's ``log``."""
        object.__setattr__(self._module, "log", self._log)

    def detach(self) -> None:
        """Give the module its own ``log`` back."""
        vars(self._module).pop("log", None)

    @contextmanager
    def microbatch(self, size: int, share: float | None = None) -> Iterator[None]:
        """Record, instead of executing, the calls of ``self.log`` inside the context.

        Args:
            size: samples in this micro-batch: the weight of its values in a mean.
            share: its weight instead, by a rule of the user's, for values of which the tracker
                does not know more.
        """
        self._open, self._size, self._share = [], size, share
        try:
            yield
            self._microbatches.append(self._open)
        finally:
            self._open = None

    def recorded(self) -> list[list[LogCall]]:
        """The calls in each micro-batch so far, their values on the CPU."""
        return [
            [replace(call, value=_on_cpu(call.value)) for call in calls]
            for calls in self._microbatches
        ]

    def add(self, microbatches: Sequence[list[LogCall]]) -> None:
        """Take in what another rank has :meth:`recorded` of the rest of this batch."""
        self._microbatches.extend(microbatches)

    def combine(
        self, batch_value: Callable[[Metric], Any] = lambda metric: None
    ) -> list[LoggedValue]:
        """One value a name for the whole batch, as the recorded calls' ``reduce_fx`` says.

        A mean weighs micro-batches by the denominator of the value, if it is the result of a mean;
        else by ``batch_size`` where the user gave one, or by their size. What a step added up over
        its samples is added up.
        What a metric returned is not averaged where ``batch_value`` knows the metric's value for
        the batch: the macro accuracy of a batch is not the mean of its micro-batches' accuracies.

        Args:
            batch_value: the exact value of a metric for the batch, or None if it is unknown.

        Returns:
            The values in the order in which their names were first logged; ``[]`` if no micro-batch
            reached the end of its step here.
        """
        calls: dict[tuple[str, int], list[LogCall]] = {}
        for microbatch in self._microbatches:
            occurrences: dict[str, int] = {}
            for call in microbatch:
                nth = occurrences[call.name] = occurrences.get(call.name, 0) + 1
                calls.setdefault((call.name, nth), []).append(call)
        return [self._combined(group, batch_value) for group in calls.values()]

    def replay(self, values: Sequence[LoggedValue]) -> None:
        """Call the module's own ``log`` with each value, so that callbacks and loggers see it."""
        log = type(self._module).log
        device = self._module.device
        for logged in values:
            self._tell(logged)
            value = apply_to_collection(logged.value, Tensor, lambda t: t.to(device))
            if logged.metric is None:
                log(self._module, logged.name, value, **logged.options)
                continue
            metric = cast(Metric, self._module.get_submodule(logged.metric))
            metric._forward_cache = value
            options = {"metric_attribute": logged.metric, **logged.options}
            log(self._module, logged.name, metric, **options)

    def _tell(self, logged: LoggedValue) -> None:
        """Say once that a name's values are added up, or do not combine."""
        if not logged.is_exact and logged.name not in self._inexact:
            self._inexact.add(logged.name)
            rank_zero_warn(
                f"`self.log({logged.name!r}, ...)` is given a statistic of all samples of the "
                "batch (such as an exponential of a mean, or a maximum), but in a pipeline a "
                "step sees one micro-batch. What is logged is the mean over micro-batches: log "
                "a torchmetrics object, or another `reduce_fx`, for the exact value."
            )
        if logged.counts_samples and logged.name not in self._told_counts:
            self._told_counts.add(logged.name)
            rank_zero_info(
                f"{logged.name!r} is logged with the number of samples of each micro-batch: it is"
                " added up to the batch's. If it is something else, log it as a float."
            )

    def clear(self) -> None:
        """Forget what was recorded."""
        self._microbatches.clear()
        self._metrics = None

    def _log(self, *args: Any, **kwargs: Any) -> None:
        if self._open is None:
            type(self._module).log(self._module, *args, **kwargs)
            return
        options = _LOG_SIGNATURE.bind(self._module, *args, **kwargs).arguments
        del options["self"]
        self._open.append(self._call(options.pop("name"), options.pop("value"), options))

    def _call(self, name: str, value: Any, options: dict[str, Any]) -> LogCall:
        if options.get("sync_dist_group") is not None:
            raise MisconfigurationException(
                f"`self.log({name!r}, ..., sync_dist_group=...)` is not possible in a pipeline,"
                " whose stages belong to different groups. Leave it out: values are synchronised"
                " over the replicas."
            )
        options["reduce_fx"] = _reduction(name, options.get("reduce_fx", "mean"))
        if isinstance(value, Metric):
            path = self._path(name, value)
            cache = value._forward_cache
            return LogCall(name, cache, (path, None), path, options, self._size, Weighting())
        origin = self._origin(value)
        return LogCall(
            name,
            _scalar(name, value),
            origin,
            None,
            options,
            self._size,
            Weighting.of(self._tracker.of(value)),
            self._share,
            counts_samples=type(value) is int and value == self._size,
        )

    def _path(self, name: str, metric: Metric) -> str:
        for path, known in self._known_metrics().items():
            if known is metric:
                return path
        raise MisconfigurationException(
            f"The metric logged as {name!r} ({type(metric).__name__}) is not part of the"
            " LightningModule, so that the other stages cannot find it. Make it an attribute"
            " (`self.accuracy = ...`), or put several into an `nn.ModuleDict` or a"
            " MetricCollection."
        )

    def _origin(self, value: Any) -> tuple[str, str | None] | None:
        """The metric whose ``forward`` just returned this very object, if there is one."""
        if not isinstance(value, Tensor):
            return None
        for path, metric in self._known_metrics().items():
            cache: Any = metric._forward_cache
            if cache is value:
                return path, None
            if isinstance(cache, dict):
                for key, entry in cache.items():
                    if entry is value:
                        return path, key
        return None

    def _combined(
        self, calls: Sequence[LogCall], batch_value: Callable[[Metric], Any]
    ) -> LoggedValue:
        first = calls[0]
        options = dict(first.options)
        if options.get("batch_size") is not None:
            options["batch_size"] = sum(_samples(call) for call in calls)
        value, counts = self._exact(first, batch_value), self._counts_samples(calls)
        is_exact = True
        if value is None:
            value = _reduced(calls, "sum" if counts else options["reduce_fx"])
            is_exact = options["reduce_fx"] != "mean" or not _is_statistic(calls)
        value = _on_cpu(value)
        return LoggedValue(first.name, value, first.logged_metric, options, is_exact, counts)

    def _counts_samples(self, calls: Sequence[LogCall]) -> bool:
        """Whether a name has only ever been logged with the number of samples at hand.

        An epoch or a step, which may be equal to it once, begins at zero.
        """
        name = calls[0].name
        if not all(call.counts_samples for call in calls):
            self._other_ints.add(name)
        is_mean = calls[0].options["reduce_fx"] == "mean"
        return len(calls) > 1 and is_mean and name not in self._other_ints

    def _exact(self, call: LogCall, batch_value: Callable[[Metric], Any]) -> Any:
        if call.origin is None:
            return None
        path, key = call.origin
        value = batch_value(cast(Metric, self._module.get_submodule(path)))
        return value if key is None or value is None else value[key]

    def _known_metrics(self) -> dict[str, Metric]:
        # Looked up once a batch: users may add metrics at any epoch, and a walk costs milliseconds.
        if self._metrics is None:
            modules = self._module.named_modules()
            self._metrics = {path: m for path, m in modules if isinstance(m, Metric)}
        return self._metrics


def _reduction(name: str, reduce_fx: Any) -> str:
    """The name of a reduction, which unlike a function can be sent to another rank."""
    reduction: str = _Metadata(fx="step", name=name, reduce_fx=reduce_fx).reduce_fx.__name__
    return reduction


def _scalar(name: str, value: Any) -> Tensor:
    """The value as Lightning would store it: detached, one element, float32 or wider."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"`self.log({name!r}, ...)` was called with a tensor of shape {tuple(value.shape)},"
                " but it must have a single element. You can log its `.mean()`."
            )
        scalar = value.detach().clone().reshape(())
        return scalar if scalar.dtype is torch.float64 else scalar.to(_get_default_dtype())
    try:
        return torch.tensor(value, dtype=_get_default_dtype())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"`self.log({name!r}, {value!r})` was called, but `{type(value).__name__}` values"
            " cannot be logged. Log a number, a tensor with one element, or a metric."
        ) from error


def _on_cpu(value: Any) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().cpu())


def _reduced(calls: Sequence[LogCall], reduction: str) -> Any:
    """Reduce the micro-batches' scalars; of anything else (a metric's dict) keep the last."""
    values = [call.value for call in calls]
    if not all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
        return values[-1]
    stacked = torch.stack([value.detach().reshape(()) for value in values]).cpu()
    kinds = {call.weighting.kind for call in calls}
    if kinds <= {"sum", "empty"}:
        return stacked.sum()
    # Means make up that of the batch: `reduction` is what joins the batches of an epoch.
    if reduction != "mean" and "mean" not in kinds:
        return getattr(torch, reduction)(stacked)
    dtype = stacked.dtype if stacked.is_floating_point() else _get_default_dtype()
    sizes = [float(_weight(call)) for call in calls]
    weights = torch.tensor(shares([c.weighting for c in calls], sizes), dtype=torch.float64)
    # A micro-batch of no weight (all its tokens masked) has a mean over nothing, which is NaN.
    counts = weights > 0 if weights.any() else weights == 0
    weights, stacked = weights[counts], stacked[counts]
    if not weights.any():
        return stacked.double().mean().to(dtype)
    return (stacked.double() @ weights / weights.sum()).to(dtype)


def _is_statistic(calls: Sequence[LogCall]) -> bool:
    """Whether micro-batches have different values, of which the batch's does not follow."""
    statistic = any(call.weighting.kind == "statistic" for call in calls)
    return statistic and len({float(call.value) for call in calls}) > 1


def _weight(call: LogCall) -> float:
    if call.share is not None:
        return call.share
    return _samples(call)


def _samples(call: LogCall) -> int:
    size = call.options.get("batch_size")
    return call.size if size is None else size
