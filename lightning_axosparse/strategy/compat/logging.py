"""Records the log calls and prints of a step, and repeats them on every rank, once a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.memory import recursive_detach
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_axosparse.pipeline.loss.operators import UNKNOWN, Note
from lightning_axosparse.pipeline.loss.weights import LossWeights
from lightning_axosparse.support.torch_internals import without_dispatch_modes
from lightning_axosparse.support.troubleshooting import see


class LogCall(NamedTuple):
    """One call of ``self.log`` that Lightning has checked; can be pickled.

    Attributes:
        name: the first argument.
        value: a tensor on the CPU, or the last value of a metric object.
        options: the other arguments; ``metric_attribute`` is the path of a metric object.
        note: how the value depends on samples, if it was logged by parts.
    """

    name: str
    value: Any
    options: Mapping[str, Any]
    note: Note = UNKNOWN


class StepLog:
    """Records the log calls and prints of runs of a module's steps.

    Attributes:
        calls: the log calls of the last recorded run.
        prints: for each print, a function that does it.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.calls: list[LogCall] = []
        self.prints: list[Callable[[], None]] = []
        self._note: Note = UNKNOWN

    def recorded(
        self, note_of: Callable[[Tensor], Note] | None = None
    ) -> AbstractContextManager[None]:
        """Record log calls and prints inside the context, instead of executing them.

        Lightning checks the arguments of ``self.log``, in the user's line.

        Args:
            note_of: returns the note of a tensor that is logged for a micro-batch.
        """
        self.calls, self.prints, self._note = [], [], UNKNOWN
        functions: dict[str, Any] = {"print": self._print}
        if note_of is not None:
            functions["log"] = partial(self._log_of_part, note_of)
        results = cast(Any, self._module.trainer)._results
        # There are no results in prediction, where Lightning refuses to log.
        owners = vars(self._module), {} if results is None else vars(results)
        return _replaced((owners[0], functions), (owners[1], {"log": self._record}))

    def ignored(self) -> AbstractContextManager[None]:
        """Ignore log calls and prints inside the context."""
        return _replaced((vars(self._module), {"log": _ignore, "print": _ignore}))

    def print(self) -> None:
        """Execute the recorded prints; Lightning prints on the first rank."""
        for each in self.prints:
            each()

    def replay(self, calls: Sequence[LogCall]) -> None:
        """Execute log calls, for callbacks and loggers."""
        module = self._module
        for name, value, options, _ in calls:
            value = apply_to_collection(value, Tensor, lambda tensor: tensor.to(module.device))
            if options["metric_attribute"] is not None:
                metric = cast(Metric, module.get_submodule(options["metric_attribute"]))
                metric._forward_cache = value
                value = metric
            # The user's override of ``log`` has run before the recording.
            LightningModule.log(module, name, value, **options)

    def _log_of_part(
        self, note_of: Callable[[Tensor], Note], name: str, value: Any, *args: Any, **options: Any
    ) -> None:
        """Log a value of a micro-batch with its note, unless the user overrides ``log``."""
        kind = type(self._module)
        is_known = isinstance(value, Tensor) and kind.log is LightningModule.log
        self._note = note_of(value) if is_known else UNKNOWN
        with without_dispatch_modes():
            kind.log(self._module, name, value, *args, **options)

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
        value = recursive_detach(value, to_cpu=True)
        self.calls.append(LogCall(name, value, options, self._note))
        self._note = UNKNOWN

    def _print(self, *values: Any, **options: Any) -> None:
        module = self._module
        texts = map(str, values)  # Values may change before they are printed.
        self.prints.append(partial(type(module).print, module, *texts, **options))


@contextmanager
def _replaced(*replaced: tuple[dict[str, Any], Mapping[str, Any]]) -> Iterator[None]:
    """Replace attributes of objects inside the context."""
    for attributes, functions in replaced:
        attributes.update(functions)
    try:
        yield
    finally:
        for attributes, functions in replaced:
            for name in functions:
                del attributes[name]


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def combined(parts: Sequence[Sequence[LogCall]], sizes: Sequence[int]) -> list[LogCall] | None:
    """Combine the log calls of micro-batches to those of the batch.

    Args:
        parts: the calls of each micro-batch.
        sizes: number of samples in each micro-batch.

    Returns:
        The calls; None if a value is neither a mean nor a sum over samples.
    """
    names = [[call.name for call in part] for part in parts]
    if any(each != names[0] for each in names):
        return None
    of_batch = list[LogCall]()
    for calls in zip(*parts, strict=True):
        weights = LossWeights(sizes)
        for call in calls:
            weights.add(call.note)
        if weights.problem or not all(isinstance(call.value, Tensor) for call in calls):
            return None
        options = dict(calls[0].options)
        if options["batch_size"] is not None:
            options["batch_size"] = sum(call.options["batch_size"] for call in calls)
        value = weights.combined([call.value for call in calls])
        of_batch.append(LogCall(calls[0].name, value, options))
    return of_batch


def alike(
    calls: Sequence[LogCall],
    expected: Sequence[LogCall],
    differ: Callable[[Tensor, Tensor], float],
    tolerance: float,
) -> bool:
    """Whether the combined calls of micro-batches are those of the batch.

    Args:
        calls: the combined calls.
        expected: the calls of the batch.
        differ: returns the relative difference of two tensors.
        tolerance: the largest relative difference of values that count as equal.
    """
    return len(calls) == len(expected) and all(
        (own.name, own.options) == (other.name, other.options)
        and differ(own.value, other.value) <= tolerance
        for own, other in zip(calls, expected, strict=True)
    )
