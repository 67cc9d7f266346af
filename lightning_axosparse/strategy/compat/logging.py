"""Records the log calls and prints of a step, and repeats them on every rank, once a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities.memory import recursive_detach
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_axosparse.pipeline.crossing.skip_tensors import unnumbered
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.torch_internals import version_of
from lightning_axosparse.support.troubleshooting import see


class LogCall(NamedTuple):
    """One call of ``self.log`` that Lightning has checked; can be pickled.

    Attributes:
        name: the first argument.
        value: a tensor on the CPU, or the last value of a metric object.
        options: the other arguments; ``metric_attribute`` is the path of a metric object.
    """

    name: str
    value: Any
    options: Mapping[str, Any]


class StepLog:
    """Records the log calls and prints of runs of a module's steps.

    Args:
        module: the module.
        refuse_inside: refuses an action if a layer is being computed.

    Attributes:
        calls: the log calls of the last recorded run.
        prints: for each print, a function that does it.
    """

    def __init__(self, module: LightningModule, refuse_inside: Callable[[str], None]) -> None:
        self._module, self._refuse_inside = module, refuse_inside
        self.calls: list[LogCall] = []
        self.prints: list[Callable[[], None]] = []
        self._logged: list[tuple[Tensor, int] | None] = []
        """For each call of ``self.log``, the tensor in the step, and its version then."""
        self._checked: list[tuple[Any, LogCall]] = []
        """Calls of ``self.log`` in this batch that Lightning has checked: arguments and record."""

    def begin_batch(self) -> None:
        """Forget the calls of the last batch."""
        self.calls, self._checked = [], []

    def recorded(self) -> AbstractContextManager[None]:
        """Record log calls and prints inside the context, instead of executing them.

        Lightning checks the arguments of ``self.log``, in the user's line.
        """
        self.calls, self.prints, self._logged = [], [], []
        functions: dict[str, Any] = {"print": self._print, "log": self._log}
        results = cast(Any, self._module.trainer)._results
        # There are no results in prediction, where Lightning refuses to log.
        owners = vars(self._module), {} if results is None else vars(results)
        return _replaced((owners[0], functions), (owners[1], {"log": self._record}))

    def ignored(self) -> AbstractContextManager[None]:
        """Ignore log calls and prints inside the context."""
        return _replaced((vars(self._module), {"log": self._ignore, "print": _ignore}))

    def _ignore(self, name: str, *args: Any, **options: Any) -> None:
        self._refuse_inside(f"logs {name!r}")

    def print(self) -> None:
        """Execute the recorded prints; Lightning prints on the first rank."""
        for each in self.prints:
            each()

    def replay(self, calls: Sequence[LogCall]) -> None:
        """Execute log calls, for callbacks and loggers."""
        module = self._module
        for name, value, options in calls:
            value = apply_to_collection(value, Tensor, lambda tensor: tensor.to(module.device))
            if options["metric_attribute"] is not None:
                metric = cast(Metric, module.get_submodule(options["metric_attribute"]))
                metric._forward_cache = value
                value = metric
            # The user's override of ``log`` has run before the recording.
            LightningModule.log(module, name, value, **options)

    def logs_only(self, loss: Tensor) -> bool:
        """Whether all log calls of the recorded run were of this tensor."""
        if self._logged and self._is_overridden:
            return False  # It may log something else.
        of_loss = loss.data_ptr(), version_of(loss)
        return all(
            logged is not None and (logged[0].data_ptr(), logged[1]) == of_loss
            for logged in self._logged
        )

    @property
    def _is_overridden(self) -> bool:
        return type(self._module).log is not LightningModule.log

    def _log(self, *args: Any, **options: Any) -> None:
        """Log a value, which only the runs that count do."""
        with unnumbered():
            self._log_value(*args, **options)

    def _log_value(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value, of which Lightning makes a copy."""
        self._refuse_inside(f"logs {name!r}")
        is_scalar = isinstance(value, Tensor) and value.numel() == 1
        # Detached, it keeps the memory, but not the graph.
        self._logged.append((value.detach(), version_of(value)) if is_scalar else None)
        given = name, args, options
        checked = next((call for each, call in self._checked if each == given), None)
        if is_scalar and checked is not None:  # By another micro-batch; a check takes 0.5 ms.
            copy = value.detach().squeeze().to("cpu", copy=True)
            self.calls.append(checked._replace(value=copy))
            return
        count = len(self.calls)
        type(self._module).log(self._module, name, value, *args, **options)
        if is_scalar and len(self.calls) == count + 1 and not self._is_overridden:
            self._checked.append((given, self.calls[-1]))

    def _record(
        self,
        fx: str,
        name: str,
        value: Any,
        sync_dist_fn: Any,
        sync_dist_group: Any,
        **options: Any,
    ) -> None:
        """Record a call with which Lightning would add a value to the results of the loop."""
        if sync_dist_group is not None:
            raise MisconfigurationException(
                f"`self.log({name!r}, ..., sync_dist_group=...)` is not possible in a pipeline,"
                " whose stages belong to different groups. Leave it out: values are synchronised"
                " over the replicas." + see("logging")
            )
        # None is the default, True: an explicit True is a request that Lightning may warn of.
        options["logger"] = None if options["logger"] else False
        value = value._forward_cache if isinstance(value, Metric) else value
        self.calls.append(LogCall(name, recursive_detach(value, to_cpu=True), options))

    def _print(self, *values: Any, **options: Any) -> None:
        module = self._module
        with unnumbered():
            texts = list(map(str, values))  # Values may change before they are printed.
        self.prints.append(partial(type(module).print, module, *texts, **options))


def advising_where(replicas_differ: Callable[[], bool]) -> AbstractContextManager[None]:
    """Return a context in which Lightning advises ``sync_dist=True`` only where replicas differ.

    With one replica it drops the argument, and then would advise it for every value of an epoch.
    """
    return patched(
        result,
        "_distributed_is_initialized",
        lambda: replicas_differ() and _distributed_is_initialized(),
    )


@contextmanager
def _replaced(*replaced: tuple[dict[str, Any], Mapping[str, Any]]) -> Iterator[None]:
    """Replace attributes of objects inside the context; then restore their own, or remove them."""
    own = [{n: attributes[n] for n in attributes.keys() & names} for attributes, names in replaced]
    for attributes, functions in replaced:
        attributes.update(functions)
    try:
        yield
    finally:
        for (attributes, functions), before in zip(replaced, own, strict=True):
            for name in functions:
                del attributes[name]
            attributes.update(before)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def with_loss(parts: Sequence[Sequence[LogCall]], loss: Tensor) -> list[LogCall]:
    """Return the log calls of a batch, of which each logs the loss.

    Args:
        parts: the calls of each micro-batch, which are alike.
        loss: the loss of the batch.
    """
    of_batch = list[LogCall]()
    for calls in zip(*parts, strict=True):
        options = dict(calls[0].options)
        if options["batch_size"] is not None:
            options["batch_size"] = sum(call.options["batch_size"] for call in calls)
        of_batch.append(LogCall(calls[0].name, recursive_detach(loss, to_cpu=True), options))
    return of_batch


def of_batch(
    calls: Sequence[LogCall],
    parts: Sequence[tuple[Sequence[LogCall], float]],
    size: tuple[int, int],
    replicas: int,
) -> list[LogCall]:
    """Return the log calls of a batch of which several replicas have parts.

    Args:
        calls: those of this replica.
        parts: those of each replica with samples, and its share of these.
        size: the number of samples of this replica's part, and of the batch.
        replicas: how many times Lightning adds each value that it sums with ``sync_dist``.
    """
    numbered = [(_numbered(of_part), share) for of_part, share in parts]
    combined = list[LogCall]()
    for key, call in _numbered(calls).items():
        own = [(of_part[key], share) for of_part, share in numbered if key in of_part]
        value, options = call.value, dict(call.options)
        if own and isinstance(value, Tensor) and options["metric_attribute"] is None:
            values = torch.stack([each.value.to(value.dtype) for each, _ in own])
            value = _reduced(values, [share for _, share in own], options["reduce_fx"])
            if options["sync_dist"] and options["reduce_fx"] in ("sum", sum, torch.sum):
                value = value / replicas
        if options["batch_size"] is not None:
            sizes = [each.options["batch_size"] for each, _ in own]
            options["batch_size"] = _size_of_batch(options["batch_size"], sizes, size)
        combined.append(LogCall(call.name, value, options))
    return combined


def _numbered(calls: Sequence[LogCall]) -> dict[tuple[str, int], LogCall]:
    """Return log calls by their names, and how often there were others of the name before."""
    numbered: dict[tuple[str, int], LogCall] = {}
    counts: dict[str, int] = {}
    for call in calls:
        counts[call.name] = counts.get(call.name, -1) + 1
        numbered[call.name, counts[call.name]] = call
    return numbered


def _size_of_batch(own: int, of_parts: Sequence[int], size: tuple[int, int]) -> int:
    """Return ``batch_size`` for the batch: a number of samples, a constant, or another count."""
    samples, of_batch = size
    if own == samples:
        return of_batch
    return own if len(set(of_parts)) <= 1 else sum(of_parts)


def _reduced(values: Tensor, shares: Sequence[float], by: Any) -> Tensor:
    """Reduce the values of parts of a batch, which have shares of its samples."""
    name = str(getattr(by, "__name__", by)).lower()
    if name in _REDUCTIONS:
        return _REDUCTIONS[name](values, 0)
    values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    weights = values.new_tensor(shares)
    mean: Tensor = torch.tensordot(weights / weights.sum(), values, 1)
    return mean


_REDUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "min": torch.amin,
    "max": torch.amax,
}
"""How values of several steps are reduced by name; others are averaged."""


def alike(calls: Sequence[LogCall], others: Sequence[LogCall]) -> bool:
    """Whether two micro-batches log the same, but for values and numbers of samples."""
    one, other = (
        [(c.name, {**c.options, "batch_size": c.options["batch_size"] is None}) for c in each]
        for each in (calls, others)
    )
    return one == other
