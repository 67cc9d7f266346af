"""Combines the calls of ``self.log`` in the micro-batches into one per batch, on every rank."""

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

from lightning_axosparse.pipeline.reductions import ReductionTracker
from lightning_axosparse.pipeline.weighting import Weighting, mean_weights
from lightning_axosparse.support.troubleshooting import see

_LOG_SIGNATURE = inspect.signature(LightningModule.log)

_ADVICE: dict[str, tuple[Callable[[str], None], str]] = {
    "statistic": (
        rank_zero_warn,
        "is given a statistic of all samples of the batch (such as an exponential of a mean, a "
        "maximum, or similarities between samples), but in a pipeline a step sees one micro-batch. "
        "What is logged is the mean over micro-batches: log a torchmetrics object, or another "
        "`reduce_fx`, for the exact value.",
    ),
    "unseen": (
        rank_zero_warn,
        "is given a value that was not computed by torch from the samples, such as a quotient of "
        "several `.item()`, and that differs between micro-batches. What is logged is its mean "
        "over samples: log a tensor, pass `batch_size=` as its weight, or log a torchmetrics "
        "object for the exact value.",
    ),
    "samples": (
        rank_zero_info,
        "is given the number of samples of each micro-batch: it is added up to the batch's. If it "
        "is something else, log it as a float.",
    ),
    "one": (
        rank_zero_info,
        "is given the integer 1 by micro-batches of one sample each, and is logged as 1. If it is "
        "the number of samples, pass `reduce_fx='sum'`, which adds it up.",
    ),
    "same": (
        rank_zero_info,
        "is given the same number by each micro-batch, with `reduce_fx='sum'`: it is added up "
        "over micro-batches. If it counts batches, log it in `on_train_batch_end`.",
    ),
}
"""What the user is told about a value that may not be the batch's, and by which function."""


@contextmanager
def sync_advice_silenced() -> Iterator[None]:
    """Silence Lightning's advice to use ``sync_dist=True``, where there is one data-parallel rank.

    Lightning takes the stages of a pipeline, which log the same values, for replicas.
    """
    before = list(warnings.filters)
    warnings.filterwarnings(
        "ignore",
        message=r"It is recommended to use `self\.log\(.*sync_dist=True",
        category=PossibleUserWarning,
    )
    ours = [entry for entry in warnings.filters if entry not in before]
    try:
        yield
    finally:
        # Not `catch_warnings`, which would drop the filters that the user's hooks have added.
        warnings.filters[:] = [entry for entry in warnings.filters if entry not in ours]  # type: ignore[index]


@dataclass(frozen=True)
class LoggedValue:
    """The value of one logged name for a whole batch; can be pickled.

    Attributes:
        name: the first argument of ``self.log``.
        value: scalar tensor on the CPU; for a metric object its value for this batch, on the CPU
            (``None`` if it was only updated).
        metric: attribute path of the metric object that was logged, or None.
        options: the other arguments of ``self.log`` that the user gave.
        advice: key of :data:`_ADVICE`: what to tell the user about how the micro-batches' values
            were combined; None for nothing.
    """

    name: str
    value: Any
    metric: str | None
    options: Mapping[str, Any]
    advice: str | None = None


@dataclass(frozen=True)
class LogCall:
    """One call of ``self.log`` inside a micro-batch of ``size`` samples; can be pickled.

    Attributes:
        name: the first argument of ``self.log``.
        value: scalar tensor, or what a metric object returned.
        origin: attribute path of the metric that returned the value, and the value's key there.
        logged_metric: attribute path of the metric object that was logged, or None.
        options: the other arguments of ``self.log``.
        size: samples of the micro-batch.
        weighting: how the value is weighted among those of the other micro-batches.
        weight: the micro-batch's weight in the batch, if the user gave ``microbatch_weight``.
        counts_samples: whether the value is the int ``size``, such as ``len(batch)``.
    """

    name: str
    value: Any
    origin: tuple[str, str | None] | None
    logged_metric: str | None
    options: Mapping[str, Any]
    size: int
    weighting: Weighting
    weight: float | None = None
    counts_samples: bool = False


class MicrobatchLog:
    """Replaces ``module.log``: records inside a micro-batch, and calls the original outside.

    The last three lines run on every rank, with the values that the last stage combined; where
    replicas share a batch, it first adds what the others recorded::

        for microbatch in microbatches:
            with log.microbatch(size):
                training_step(microbatch)
        log.add(received)
        values = broadcast(log.combine(metrics.batch_value))
        log.replay(values)
        log.clear()

    A micro-batch that leaves the context by an exception is not recorded. So a stage before the
    last one, which ends its step by an exception, records nothing, also where stages share a
    process.

    Args:
        module: the LightningModule; its ``log_dict`` calls ``self.log``.
        tracker: knows from which reductions the values of the running step came.
    """

    def __init__(self, module: LightningModule, tracker: ReductionTracker) -> None:
        self._module = module
        self._tracker = tracker
        self._open: list[LogCall] | None = None
        self._size = 0
        self._weight: float | None = None
        self._microbatches: list[list[LogCall]] = []
        self._metrics: dict[str, Metric] | None = None
        self._advised: set[tuple[str, str]] = set()
        self._sample_counts: set[str] = set()
        self._other_ints: set[str] = set()
        self._replaced: dict[str, Any] = {}

    def attach(self) -> None:
        """Replace the module's ``log``."""
        attributes = vars(self._module)
        self._replaced = {name: attributes[name] for name in attributes.keys() & {"log"}}
        object.__setattr__(self._module, "log", self._log)

    def detach(self) -> None:
        """Give the module its own ``log`` back."""
        vars(self._module).pop("log", None)
        vars(self._module).update(self._replaced)

    @contextmanager
    def microbatch(self, size: int, weight: float | None = None) -> Iterator[None]:
        """Record, instead of executing, the calls of ``self.log`` inside the context.

        Args:
            size: samples in this micro-batch: the weight of its values in a mean.
            weight: its weight instead, from the user's ``microbatch_weight``, for values whose
                reduction the tracker does not know.
        """
        self._open, self._size, self._weight = [], size, weight
        try:
            yield
            self._microbatches.append(self._open)
        finally:
            self._open = None

    def recorded(self) -> list[list[LogCall]]:
        """The calls of each micro-batch so far, with their values on the CPU."""
        return [
            [replace(call, value=_on_cpu(call.value)) for call in calls]
            for calls in self._microbatches
        ]

    def add(self, microbatches: Sequence[list[LogCall]]) -> None:
        """Add what another rank has :meth:`recorded` of the rest of this batch."""
        self._microbatches.extend(microbatches)

    def combine(
        self, batch_value: Callable[[Metric], Any] = lambda metric: None
    ) -> list[LoggedValue]:
        """Combine the recorded calls into one value per name for the whole batch.

        With ``reduce_fx="mean"`` micro-batches are weighted by the denominator of the value, if it
        is the result of a mean; else by ``batch_size`` where the user gave one, or by their size.
        What a step summed over its samples is summed.

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
        """Call the module's own ``log`` with each value, for callbacks and loggers."""
        log = type(self._module).log
        device = self._module.device
        for logged in values:
            self._advise(logged)
            value = apply_to_collection(logged.value, Tensor, lambda t: t.to(device))
            if logged.metric is None:
                log(self._module, logged.name, value, **logged.options)
                continue
            metric = cast(Metric, self._module.get_submodule(logged.metric))
            metric._forward_cache = value
            options = {"metric_attribute": logged.metric, **logged.options}
            log(self._module, logged.name, metric, **options)

    def _advise(self, logged: LoggedValue) -> None:
        """Tell the user once per name how its values are combined, where that may be wrong."""
        if logged.advice is None or (logged.name, logged.advice) in self._advised:
            return
        self._advised.add((logged.name, logged.advice))
        say, text = _ADVICE[logged.advice]
        say(f"`self.log({logged.name!r}, ...)` {text}" + see("logging"))

    def clear(self) -> None:
        """Forget what was recorded."""
        self._microbatches.clear()
        self._metrics = None

    def _log(self, *args: Any, **kwargs: Any) -> None:
        trainer = self._module._trainer
        if self._open is None or (trainer is not None and trainer.predicting):  # which it refuses
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
                " over the replicas." + see("logging")
            )
        options["reduce_fx"] = _reduction(name, options.get("reduce_fx", "mean"))
        if isinstance(value, Metric):
            path = self._path(name, value)
            cache = value._forward_cache
            return LogCall(name, cache, (path, None), path, options, self._size, Weighting())
        return LogCall(
            name,
            _scalar(name, value),
            self._origin(value),
            None,
            options,
            self._size,
            self._weighting(value, options["reduce_fx"]),
            self._weight,
            counts_samples=type(value) is int and value == self._size,
        )

    def _weighting(self, value: Any, reduction: str) -> Weighting:
        weighting = Weighting.of(self._tracker.of(value))
        is_number = weighting.kind == "unknown" and not isinstance(value, Tensor)
        if reduction == "mean" and is_number and self._tracker.is_mean_of_samples(value):
            return Weighting("mean", float(self._size), divided_by_samples=True)
        return weighting

    def _path(self, name: str, metric: Metric) -> str:
        for path, known in self._known_metrics().items():
            if known is metric:
                return path
        raise MisconfigurationException(
            f"The metric logged as {name!r} ({type(metric).__name__}) is not part of the"
            " LightningModule, so that the other stages cannot find it. Make it an attribute"
            " (`self.accuracy = ...`), or put several into an `nn.ModuleDict` or a"
            " MetricCollection." + see("logging")
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
        value, advice = self._exact(first, batch_value), None
        if value is None and self._may_count_samples(calls):
            if any(call.size > 1 for call in calls):
                self._sample_counts.add(first.name)
            # Of samples one by one, an integer 1 is rather a flag or an index than their number.
            advice = "samples" if first.name in self._sample_counts else "one"
            value = _reduced(calls, "sum" if advice == "samples" else "mean")
        elif value is None:
            value = _reduced(calls, options["reduce_fx"])
            advice = _advice(calls, options["reduce_fx"])
        return LoggedValue(first.name, _on_cpu(value), first.logged_metric, options, advice)

    def _may_count_samples(self, calls: Sequence[LogCall]) -> bool:
        """Whether a name has only ever been logged with the micro-batch's number of samples.

        The index of an epoch or a step, which may be equal to it once, begins at zero.
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
    """The value as Lightning stores it: detached, one element, float32 or wider."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"`self.log({name!r}, ...)` was called with a tensor of shape {tuple(value.shape)},"
                " but it must have a single element. You can log its `.mean()`." + see("logging")
            )
        scalar = value.detach().clone().reshape(())
        return scalar if scalar.dtype is torch.float64 else scalar.to(_get_default_dtype())
    try:
        return torch.tensor(value, dtype=_get_default_dtype())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values"
            " cannot be logged. Log a number, a tensor with one element, or a metric."
            + see("logging")
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
    if kinds == {"constant"}:
        return stacked[0]
    # Means are averaged over a batch whatever `reduction` does with the batches of an epoch.
    if reduction != "mean" and "mean" not in kinds:
        return getattr(torch, reduction)(stacked)
    dtype = stacked.dtype if stacked.is_floating_point() else _get_default_dtype()
    sizes = [float(_weight(call)) for call in calls]
    weights = torch.tensor(mean_weights([c.weighting for c in calls], sizes), dtype=torch.float64)
    # A micro-batch of no weight (all its tokens masked) has a mean over nothing, which is NaN.
    counts = weights > 0 if weights.any() else weights == 0
    weights, stacked = weights[counts], stacked[counts]
    if not weights.any():
        return stacked.double().mean().to(dtype)
    return (stacked.double() @ weights / weights.sum()).to(dtype)


def _advice(calls: Sequence[LogCall], reduction: str) -> str | None:
    """The advice to give where the batch's value may not follow from the micro-batches' values."""
    kinds = {call.weighting.kind for call in calls}
    if len(calls) == 1 or not all(isinstance(call.value, Tensor) for call in calls):
        return None
    varies = len({float(call.value) for call in calls}) > 1
    if reduction == "sum":
        return "same" if kinds == {"unknown"} and not varies else None
    if reduction != "mean" or not varies:
        return None
    if "statistic" in kinds:
        return "statistic"
    return "unseen" if any(_is_unseen(call) for call in calls) else None


def _is_unseen(call: LogCall) -> bool:
    """Whether weighting the value by its samples is a guess."""
    is_weighted = call.weight is not None or call.options.get("batch_size") is not None
    return call.weighting.kind == "unknown" and not is_weighted


def _weight(call: LogCall) -> float:
    if call.weight is not None:
        return call.weight
    return _samples(call)


def _samples(call: LogCall) -> int:
    size = call.options.get("batch_size")
    return call.size if size is None else size
