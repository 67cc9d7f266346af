"""Records what a step logs and prints, and repeats it on every rank, once for the batch."""

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
        value: a tensor on the CPU, or what a metric object has returned last.
        options: the other arguments; ``metric_attribute`` is the path of a metric object.
        note: what the value is, where it was logged for a micro-batch.
    """

    name: str
    value: Any
    options: Mapping[str, Any]
    note: Note = UNKNOWN


class StepLog:
    """Records what runs of a module's steps log and print.

    Attributes:
        calls: what was logged.
        prints: functions that print what was printed.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.calls: list[LogCall] = []
        self.prints: list[Callable[[], None]] = []
        self._note: Note = UNKNOWN

    def recorded(
        self, note_of: Callable[[Tensor], Note] | None = None
    ) -> AbstractContextManager[None]:
        """Record what is logged and printed inside the context, and do nothing else with it.

        Lightning checks the arguments of ``self.log``, in the line of the user.

        Args:
            note_of: says what a tensor is that is logged for a micro-batch.
        """
        self.calls, self.prints, self._note = [], [], UNKNOWN
        functions: dict[str, Any] = {"print": self._print}
        if note_of is not None:
            functions["log"] = partial(self._noted, note_of)
        results = cast(Any, self._module.trainer)._results
        # There are no results in prediction, where Lightning refuses to log.
        owners = vars(self._module), {} if results is None else vars(results)
        return _replaced((owners[0], functions), (owners[1], {"log": self._record}))

    def ignored(self) -> AbstractContextManager[None]:
        """Do nothing, inside the context, with what is logged and printed."""
        return _replaced((vars(self._module), {"log": _ignore, "print": _ignore}))

    def print(self) -> None:
        """Print what was printed; Lightning does so on the first rank."""
        for each in self.prints:
            each()

    def replay(self, calls: Sequence[LogCall]) -> None:
        """Log what was logged, for callbacks and loggers."""
        module = self._module
        for name, value, options, _ in calls:
            value = apply_to_collection(value, Tensor, lambda tensor: tensor.to(module.device))
            if options["metric_attribute"] is not None:
                metric = cast(Metric, module.get_submodule(options["metric_attribute"]))
                metric._forward_cache = value
                value = metric
            # An override of the user's has run before it was recorded.
            LightningModule.log(module, name, value, **options)

    def _noted(
        self, note_of: Callable[[Tensor], Note], name: str, value: Any, *args: Any, **options: Any
    ) -> None:
        """Log a value of a micro-batch; what an override makes of it is not known."""
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
        """Record what Lightning would add to the results of the loop."""
        if sync_dist_group is not None:
            raise MisconfigurationException(
                f"`self.log({name!r}, ..., sync_dist_group=...)` is not possible in a pipeline,"
                " whose stages belong to different groups. Leave it out: values are synchronised"
                " over the replicas." + see("logging")
            )
        # It is True by default, but given it is a request that Lightning may warn of.
        options["logger"] = None if options["logger"] else False
        value = value._forward_cache if isinstance(value, Metric) else value
        value = recursive_detach(value, to_cpu=True)
        self.calls.append(LogCall(name, value, options, self._note))
        self._note = UNKNOWN

    def _print(self, *values: Any, **options: Any) -> None:
        module = self._module
        texts = map(str, values)  # Values may change until then.
        self.prints.append(partial(type(module).print, module, *texts, **options))


@contextmanager
def _replaced(*replaced: tuple[dict[str, Any], Mapping[str, Any]]) -> Iterator[None]:
    """Let objects, of which these are the attributes, have others inside the context."""
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
    """The calls of a batch, of those of its micro-batches.

    Args:
        parts: the calls of each micro-batch.
        sizes: samples of each.

    Returns:
        None if they do not make them up: only means and sums over samples do.
    """
    names = [[call.name for call in part] for part in parts]
    if any(each != names[0] for each in names):
        return None
    made = list[LogCall]()
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
        made.append(LogCall(calls[0].name, value, options))
    return made


def alike(
    made: Sequence[LogCall],
    expected: Sequence[LogCall],
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
    return len(made) == len(expected) and all(
        (own.name, own.options) == (other.name, other.options)
        and differ(own.value, other.value) <= tolerance
        for own, other in zip(made, expected, strict=True)
    )
