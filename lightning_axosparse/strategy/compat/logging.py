"""Combines the calls of ``self.log`` and ``self.print`` in the micro-batches into one per batch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _get_default_dtype,
    _Metadata,
)
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_axosparse.pipeline.loss.combination import Rule, combine
from lightning_axosparse.pipeline.loss.reductions import ReductionTracker
from lightning_axosparse.pipeline.loss.terms import Call, Term
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.torch_internals import paused
from lightning_axosparse.support.troubleshooting import see

_LOG_SIGNATURE = inspect.signature(LightningModule.log)

LogKey = tuple[str, int]
"""A name, and how often it was logged before in the same step, plus one."""


@dataclass(frozen=True)
class LoggedValue:
    """The value of one logged name for a whole batch; can be pickled.

    Attributes:
        name: the first argument of ``self.log``.
        value: scalar tensor on the CPU; for a metric object its value for this batch, on the CPU
            (``None`` if it was only updated).
        metric: attribute path of the metric object that was logged, or None.
        options: the other arguments of ``self.log`` that the user gave.
    """

    name: str
    value: Any
    metric: str | None
    options: Mapping[str, Any]

    def combined_by(self, calls: Sequence[LogCall], rule: Rule | None) -> LoggedValue:
        """The same name with the value that calls have by a rule; a metric's value is exact."""
        if rule is None or calls[0].origin is not None:
            return self
        return replace(self, value=_on_cpu(combined_calls(calls, rule)))


@dataclass(frozen=True)
class LogCall:
    """One call of ``self.log`` inside a micro-batch; can be pickled.

    Attributes:
        name: the first argument of ``self.log``.
        value: scalar tensor, or what a metric object returned.
        origin: attribute path of the metric that returned the value, and the value's key there.
        logged_metric: attribute path of the metric object that was logged, or None.
        options: the other arguments of ``self.log``.
        weight: of the value in a mean of which no denominator is known.
        term: how the value was computed; None if it is no number.
    """

    name: str
    value: Any
    origin: tuple[str, str | None] | None
    logged_metric: str | None
    options: Mapping[str, Any]
    weight: float
    term: Term | None


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
    """

    def __init__(self, module: LightningModule, tracker: ReductionTracker) -> None:
        self._module = module
        self._tracker = tracker
        self._open: list[LogCall] | None = None
        self._size = 0
        self._weight: float | None = None
        self._microbatches: list[list[LogCall]] = []
        self._metrics: dict[str, Metric] | None = None

    def attached(self) -> AbstractContextManager[None]:
        """Replace the module's ``log`` inside the context."""
        return patched(self._module, "log", self._log)

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
            [
                replace(call, value=_on_cpu(call.value), term=call.term and call.term.to("cpu"))
                for call in calls
            ]
            for calls in self._microbatches
        ]

    def add(self, microbatches: Sequence[list[LogCall]]) -> None:
        """Add what another rank has :meth:`recorded` of the rest of this batch."""
        self._microbatches.extend(microbatches)

    def calls(self) -> dict[LogKey, list[LogCall]]:
        """The calls of all micro-batches under each name, in the order of the first ones."""
        found: dict[LogKey, list[LogCall]] = {}
        for microbatch in self._microbatches:
            occurrences: dict[str, int] = {}
            for call in microbatch:
                nth = occurrences[call.name] = occurrences.get(call.name, 0) + 1
                found.setdefault((call.name, nth), []).append(call)
        return found

    def combine(
        self,
        batch_value: Callable[[Metric], Any] = lambda metric: None,
        rules: Mapping[LogKey, Rule | None] = MappingProxyType({}),
    ) -> list[LoggedValue]:
        """Combine the recorded calls into one value per name for the whole batch.

        What was computed from means and sums is computed from those of the batch. Where that is not
        known, ``reduce_fx`` joins the values; a mean is weighted by ``batch_size`` where the user
        gave one, or by the samples of the micro-batches.

        What a metric returned is not averaged where ``batch_value`` knows the metric's value for
        the batch: the macro accuracy of a batch is not the mean of its micro-batches' accuracies.

        Args:
            batch_value: the exact value of a metric for the batch, or None if it is unknown.
            rules: how the values under a name combine, where the first batch has shown it.

        Returns:
            The values in the order in which their names were first logged; ``[]`` if no micro-batch
            reached the end of its step here.
        """
        return [
            self._combined(calls, batch_value, rules.get(key))
            for key, calls in self.calls().items()
        ]

    def replay(self, values: Sequence[LoggedValue]) -> None:
        """Call the module's own ``log`` with each value, for callbacks and loggers."""
        log = type(self._module).log
        device = self._module.device
        for logged in values:
            value = apply_to_collection(logged.value, Tensor, lambda t: t.to(device))
            if logged.metric is None:
                log(self._module, logged.name, value, **logged.options)
                continue
            metric = cast(Metric, self._module.get_submodule(logged.metric))
            metric._forward_cache = value
            options = {"metric_attribute": logged.metric, **logged.options}
            log(self._module, logged.name, metric, **options)

    def clear(self) -> None:
        """Forget what was recorded."""
        self._microbatches.clear()
        self._metrics = None

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        trainer = self._module._trainer
        if self._open is None or (trainer is not None and trainer.predicting):  # which it refuses
            type(self._module).log(self._module, name, value, *args, **kwargs)
            return
        options = kwargs
        if args or not _LOG_SIGNATURE.parameters.keys() >= kwargs.keys():
            # What does not fit is an error here, where the user has written it.
            options = _LOG_SIGNATURE.bind(self._module, name, value, *args, **kwargs).arguments
            for own in ("self", "name", "value"):
                del options[own]
        with paused([self._tracker]):
            self._open.append(self._call(name, value, options))

    def _call(self, name: str, value: Any, options: dict[str, Any]) -> LogCall:
        if options.get("sync_dist_group") is not None:
            raise MisconfigurationException(
                f"`self.log({name!r}, ..., sync_dist_group=...)` is not possible in a pipeline,"
                " whose stages belong to different groups. Leave it out: values are synchronised"
                " over the replicas." + see("logging")
            )
        options["reduce_fx"] = _reduction(options.get("reduce_fx", "mean"))
        weight = self._weight
        if weight is None:
            given = options.get("batch_size")
            weight = float(self._size if given is None else given)
        if isinstance(value, Metric):
            path, cache = self._path(name, value), value._forward_cache
            return LogCall(name, cache, (path, None), path, options, weight, None)
        term, scalar, origin = self._tracker.of(value), _scalar(name, value), self._origin(value)
        return LogCall(name, scalar, origin, None, options, weight, term)

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
        self,
        calls: Sequence[LogCall],
        batch_value: Callable[[Metric], Any],
        rule: Rule | None,
    ) -> LoggedValue:
        first = calls[0]
        options = dict(first.options)
        if options.get("batch_size") is not None:
            options["batch_size"] = sum(call.options["batch_size"] for call in calls)
        value = self._exact(first, batch_value)
        if value is None:
            value = combined_calls(calls, rule)
        return LoggedValue(first.name, _on_cpu(value), first.logged_metric, options)

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


@cache
def _reduction(reduce_fx: Any) -> str:
    """The name of a reduction, which unlike a function can be sent to another rank."""
    reduction: str = _Metadata(fx="step", name="", reduce_fx=reduce_fx).reduce_fx.__name__
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


def combined_calls(calls: Sequence[LogCall], rule: Rule | None) -> Any:
    """The value of a batch, as a tensor; of anything else than numbers that of the last call."""
    terms = [call.term for call in calls if call.term is not None]
    if len(terms) < len(calls) or len(calls) == 1:
        return calls[-1].value
    reduction, weights = calls[0].options["reduce_fx"], [call.weight for call in calls]
    is_known = any(isinstance(term, Call) or term.kind for term in terms)
    if rule is None and reduction in ("sum", "max", "min") and not is_known:
        rule = reduction
    dtype = calls[0].value.dtype
    return torch.as_tensor(combine(terms, weights, rule), dtype=dtype).reshape(())


@dataclass(frozen=True)
class PrintCall:
    """One call of ``self.print``; can be sent to another rank.

    Attributes:
        texts: of the values.
        options: the other keyword arguments.
        stream: the name in ``sys`` of its ``file``, if it was given one.
    """

    texts: tuple[str, ...]
    options: dict[str, Any]
    stream: str | None

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the call, on this rank."""
        file = {} if self.stream is None else {"file": getattr(sys, self.stream)}
        return {**self.options, **file}


class MicrobatchPrint:
    """Replaces ``module.print``: records inside a micro-batch, and calls the original outside.

    Code behind the layers runs on the last stage alone, code before them on every stage, and all of
    it once a micro-batch. So the last stage's calls count, and of the micro-batches' first calls
    one, of their second calls one, and so on: that of the first micro-batch that has it.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._open: list[PrintCall] | None = None
        self._microbatches: list[list[PrintCall]] = []

    def attached(self) -> AbstractContextManager[None]:
        """Replace the module's ``print`` inside the context."""
        return patched(self._module, "print", self._print)

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Record, instead of executing, the calls of ``self.print`` inside the context.

        What an error would keep from being printed is printed here.
        """
        self._open = opened = list[PrintCall]()
        try:
            yield
            self._microbatches.append(opened)
        except Exception:
            for call in [*self.combined(), *opened]:
                print(*call.texts, **call.arguments)
            raise
        finally:
            self._open = None

    def combined(self) -> list[PrintCall]:
        """The calls of the batch; none if no micro-batch reached the end of its step here."""
        return [
            next(call for call in calls if call is not None)
            for calls in zip_longest(*self._microbatches)
        ]

    def replay(self, calls: list[PrintCall]) -> None:
        """Call the module's own ``print``, which prints on the first rank."""
        for call in calls:
            type(self._module).print(self._module, *call.texts, **call.arguments)

    def clear(self) -> None:
        """Forget what was recorded."""
        self._microbatches.clear()

    def _print(self, *values: Any, file: Any = None, **options: Any) -> None:
        if self._open is None:
            file_given = {} if file is None else {"file": file}
            type(self._module).print(self._module, *values, **options, **file_given)
            return
        streams = {None: None, sys.stdout: "stdout", sys.stderr: "stderr"}
        if file not in streams:
            raise MisconfigurationException(
                f"`self.print(..., file={file!r})` in a step of a pipeline prints on the first rank"
                " what the last stage says, which sends no files: use sys.stdout or sys.stderr, or"
                " write to the file where a batch ends (on_train_batch_end)." + see("logging")
            )
        self._open.append(PrintCall(tuple(map(str, values)), options, streams[file]))
