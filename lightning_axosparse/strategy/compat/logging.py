"""Records what a step logs and prints, and repeats it on every rank, once for the batch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_axosparse.pipeline.loss.operators import UNKNOWN, Note
from lightning_axosparse.pipeline.loss.weights import LossWeights
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.troubleshooting import see

_LOG_SIGNATURE = inspect.signature(LightningModule.log)


def _no_note(value: Tensor) -> Note:
    """Nothing is known of a value; a function of the module, as users pickle what refers to it."""
    return UNKNOWN


@dataclass(frozen=True)
class LogCall:
    """One call of ``self.log``; can be pickled.

    Attributes:
        name: the first argument.
        value: a number, a tensor on the CPU, or what a metric object has returned last.
        metric: attribute path of the metric object that was logged; None for a value.
        options: the other arguments that the user gave.
        note: what the value is, where it was logged for a micro-batch.
    """

    name: str
    value: Any
    metric: str | None
    options: Mapping[str, Any]
    note: Note = UNKNOWN


@dataclass(frozen=True)
class PrintCall:
    """One call of ``self.print``; can be pickled.

    Attributes:
        texts: of the values.
        options: the other keyword arguments.
        stream: the name in ``sys`` of its ``file``, if it was given one.
    """

    texts: tuple[str, ...]
    options: dict[str, Any]
    stream: str | None


class StepLog:
    """Replaces ``module.log`` and ``module.print``: records them in runs of a step.

    Outside of :meth:`recorded` and :meth:`ignored` the module's own ones are called.

    Attributes:
        calls: what was recorded.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.calls: list[LogCall | PrintCall] = []
        self._records = False
        self._take: Callable[[Any], None] | None = None
        self._note_of: Callable[[Tensor], Note] = _no_note
        self._paths: dict[int, str] | None = None

    def attached(self) -> AbstractContextManager[Any]:
        """Replace the module's ``log`` and ``print`` inside the context."""
        stack = ExitStack()
        stack.enter_context(patched(self._module, "log", self._log))
        stack.enter_context(patched(self._module, "print", self._print))
        return stack

    @contextmanager
    def recorded(self, note_of: Callable[[Tensor], Note] = _no_note) -> Iterator[None]:
        """Record, instead of executing, the calls inside the context.

        Args:
            note_of: says what a tensor is that is logged for a micro-batch.
        """
        self.calls, self._records, self._note_of = [], True, note_of
        try:
            yield
        finally:
            self._records = False

    def ignored(
        self, take: Callable[[Any], None] = lambda values: None
    ) -> AbstractContextManager[None]:
        """Do nothing for the calls inside the context but ``take`` their values."""
        return patched(self, "_take", take)

    def replay(self, calls: Sequence[LogCall | PrintCall]) -> None:
        """Call the module's own ``log`` and ``print``, for callbacks, loggers and rank 0."""
        module, device = self._module, self._module.device
        for call in calls:
            if isinstance(call, PrintCall):
                file = {} if call.stream is None else {"file": getattr(sys, call.stream)}
                type(module).print(module, *call.texts, **call.options, **file)
                continue
            value = apply_to_collection(call.value, Tensor, lambda t: t.to(device))
            if call.metric is None:
                type(module).log(module, call.name, value, **call.options)
                continue
            metric = cast(Metric, module.get_submodule(call.metric))
            metric._forward_cache = value
            options = {"metric_attribute": call.metric, **call.options}
            type(module).log(module, call.name, metric, **options)

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        module = self._module
        trainer = module._trainer
        is_refused = trainer is not None and trainer.predicting  # by Lightning
        if is_refused or not (self._records or self._take):
            type(module).log(module, name, value, *args, **kwargs)
            return
        options = kwargs
        if args or not _LOG_SIGNATURE.parameters.keys() >= kwargs.keys():
            # What does not fit is an error here, where the user has written it.
            options = dict(_LOG_SIGNATURE.bind(module, name, value, *args, **kwargs).arguments)
            for own in ("self", "name", "value"):
                del options[own]
        if self._take is not None:
            self._take(value)
            return
        self.calls.append(self._call(name, value, options))

    def _call(self, name: str, value: Any, options: dict[str, Any]) -> LogCall:
        if options.get("sync_dist_group") is not None:
            raise MisconfigurationException(
                f"`self.log({name!r}, ..., sync_dist_group=...)` is not possible in a pipeline,"
                " whose stages belong to different groups. Leave it out: values are synchronised"
                " over the replicas." + see("logging")
            )
        options["reduce_fx"] = _reduction(options.get("reduce_fx", "mean"))
        if isinstance(value, Metric):
            cached: Any = value._forward_cache
            return LogCall(name, _on_cpu(cached), self._path(name, value), options)
        _validate(name, value)
        note = self._note_of(value) if isinstance(value, Tensor) else UNKNOWN
        return LogCall(name, _on_cpu(value), None, options, note)

    def _path(self, name: str, metric: Metric) -> str:
        if self._paths is None or id(metric) not in self._paths:
            modules = self._module.named_modules()
            self._paths = {id(m): path for path, m in modules if isinstance(m, Metric)}
        if id(metric) in self._paths:
            return self._paths[id(metric)]
        raise MisconfigurationException(
            f"The metric logged as {name!r} ({type(metric).__name__}) is not part of the"
            " LightningModule, so that the other stages cannot find it. Make it an attribute"
            " (`self.accuracy = ...`), or put several into an `nn.ModuleDict` or a"
            " MetricCollection." + see("logging")
        )

    def _print(self, *values: Any, file: Any = None, **options: Any) -> None:
        if not (self._records or self._take):
            given = {} if file is None else {"file": file}
            type(self._module).print(self._module, *values, **options, **given)
            return
        streams = {None: None, sys.stdout: "stdout", sys.stderr: "stderr"}
        if file not in streams:
            raise MisconfigurationException(
                f"`self.print(..., file={file!r})` in a step of a pipeline prints on the first rank"
                " what the last stage says, which sends no files: use sys.stdout or sys.stderr, or"
                " write to the file where a batch ends (on_train_batch_end)." + see("logging")
            )
        if self._take is None:
            self.calls.append(PrintCall(tuple(map(str, values)), options, streams[file]))


def combined(
    parts: Sequence[Sequence[LogCall | PrintCall]], sizes: Sequence[int]
) -> list[LogCall | PrintCall] | None:
    """The calls of a batch, of those of its micro-batches.

    Args:
        parts: the calls of each micro-batch.
        sizes: samples of each.

    Returns:
        None if they do not make them up: only means and sums over samples do.
    """
    first = parts[0]
    names = [[call.name for call in part if isinstance(call, LogCall)] for part in parts]
    if any(len(own) < len(part) or own != names[0] for own, part in zip(names, parts, strict=True)):
        return None
    made: list[LogCall | PrintCall] = []
    for number in range(len(first)):
        calls = cast("list[LogCall]", [part[number] for part in parts])
        weights = LossWeights(sizes)
        for call in calls:
            weights.add(call.note)
        if weights.problem or not all(isinstance(call.value, Tensor) for call in calls):
            return None
        options = dict(calls[0].options)
        if options.get("batch_size") is not None:
            options["batch_size"] = sum(call.options["batch_size"] for call in calls)
        value = weights.combined([call.value for call in calls])
        made.append(replace(calls[0], value=value, options=options, note=UNKNOWN))
    return made


def alike(
    made: Sequence[LogCall | PrintCall],
    expected: Sequence[LogCall | PrintCall],
    differ: Callable[[Tensor, Tensor], float],
    tolerance: float,
) -> bool:
    """Whether the calls that micro-batches make up are those of the batch.

    Args:
        made: those.
        expected: those of the batch.
        differ: measures how much tensors differ, relative to their size.
        tolerance: the largest relative difference.
    """
    if len(made) != len(expected):
        return False
    for own, other in zip(made, expected, strict=True):
        if not (isinstance(own, LogCall) and isinstance(other, LogCall)):
            return False
        if replace(own, value=None) != replace(other, value=None, note=UNKNOWN):
            return False
        if not differ(own.value, torch.as_tensor(other.value)) <= tolerance:
            return False
    return True


@cache
def _reduction(reduce_fx: Any) -> str:
    """The name of a reduction, which unlike a function can be sent to another rank."""
    reduction: str = _Metadata(fx="step", name="", reduce_fx=reduce_fx).reduce_fx.__name__
    return reduction


def _validate(name: str, value: Any) -> None:
    """Check a value where the user has logged it."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"`self.log({name!r}, ...)` was called with a tensor of shape {tuple(value.shape)},"
                " but it must have a single element. You can log its `.mean()`." + see("logging")
            )
        return
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values"
            " cannot be logged. Log a number, a tensor with one element, or a metric."
            + see("logging")
        ) from error


def _on_cpu(value: Any) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().clone().cpu())
