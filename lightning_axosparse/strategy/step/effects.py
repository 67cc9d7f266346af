"""Lets a step have its effects once a batch: logs, prints, metrics, attributes, settings.

Runs on micro-batches compute layers; their other effects are undone. The effects of the run on the
whole batch count, on the last stage, which sends its log calls, changed attributes and settings to
the other ranks of the replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_axosparse.pipeline.shard.remote_tensor import RemoteTensor
from lightning_axosparse.pipeline.stage_forward import PipelinedLayers
from lightning_axosparse.pipeline.state.module_state import (
    AttributePath,
    How,
    ModuleState,
    namespace_of,
    write,
)
from lightning_axosparse.pipeline.state.values import SHARED
from lightning_axosparse.strategy.compat.callbacks import broadcasting_nothing, loggers_silenced
from lightning_axosparse.strategy.compat.internals import has_hook
from lightning_axosparse.strategy.compat.lockstep import position
from lightning_axosparse.strategy.compat.logging import LogCall, StepLog, alike
from lightning_axosparse.strategy.compat.metrics import PipelinedMetrics
from lightning_axosparse.strategy.step.outer_settings import OuterSettings
from lightning_axosparse.support.object_trees import CannotPickle, put_together, take_apart
from lightning_axosparse.support.torch_internals import (
    PausableOperatorMode,
    plain_torch_functions,
    storage_id,
)
from lightning_axosparse.support.troubleshooting import see

LARGEST_MESSAGE = 2**20
"""Largest number of bytes of attributes that the last stage sends after a batch."""


class Changed(NamedTuple):
    """An attribute that a step has changed; can be pickled.

    Attributes:
        path: path to the attribute.
        how: the kind of change.
        rest: the pickled value without tensors; of an extended list the new items.
        tensors: the tensors in the value.
    """

    path: AttributePath
    how: How
    rest: bytes
    tensors: list[Tensor]


class StepEffects:
    """The effects of runs of a module's steps, besides computing layers.

    Args:
        module: the user's module.
        pipelined: its layers.
        metrics: its metrics.
        runs_alone: whether the replica has other ranks, which do not run the step on the batch.

    Attributes:
        log: the log calls and prints of the last recorded run.
        settings: the settings outside the module.
        written: paths of the tensors to which runs have written, since the batch began.
        part_calls: the log calls of each micro-batch, by parts.
    """

    def __init__(
        self,
        module: LightningModule,
        pipelined: PipelinedLayers,
        metrics: PipelinedMetrics,
        runs_alone: bool,
    ) -> None:
        self._module, self._metrics, self._runs_alone = module, metrics, runs_alone
        self._has_ranks = module.trainer.world_size > 1
        self.log = StepLog(module, pipelined.refuse_inside)
        self.part_calls: list[list[LogCall]] = []
        layers = pipelined.layers
        within = {id(part) for layer in layers for part in layer.modules()}
        self._state = ModuleState(module, within)
        self.written: Sequence[object] = self._state.written
        self.settings = OuterSettings(module)
        self._remote = [
            (tensor.origin, namespace_of(part, name), name)
            for layer in layers
            for part in layer.modules()
            for name, tensor in chain(
                part.named_parameters(recurse=False), part.named_buffers(recurse=False)
            )
            if isinstance(tensor, RemoteTensor)
        ]
        """Tensors of layers of other ranks: their names, and the dicts that have them, by name."""
        self._has_other_effects = False
        self._loop = "", -1
        """The loop of the last batch, and its epoch."""

    def begin_batch(self) -> None:
        """Capture the state with which every run of the step begins, and follow new metrics."""
        loop = position(self._module.trainer)[:-1]
        if self._state.capture() or loop != self._loop:  # Hooks of callbacks may have made some.
            self._loop = loop
            self._metrics.attach()
        self.settings.capture()
        self.log.begin_batch()
        self.part_calls = []

    @property
    def reached(self) -> Collection[int]:
        """The ids of the objects that code outside the layers may change."""
        return self._state.reached

    def discarded(self) -> AbstractContextManager[Any]:
        """Undo all effects of the run inside the context."""
        return self._undone(self.log.ignored())

    def read(self) -> AbstractContextManager[Any]:
        """Undo all effects, but read the values that are logged or given to metrics."""
        return self._undone(self.log.recorded(), reads=True)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Let the effects of the run inside the context count, once for the batch."""
        alone = broadcasting_nothing(self._module.trainer) if self._runs_alone else nullcontext()
        self.settings.begin_count()
        try:
            with self.log.recorded(), self._metrics.counted(), alone:
                yield
        except Exception:  # The prints may explain the error.
            self.log.print()
            raise
        except BaseException:  # The step runs again.
            self._state.rewind()
            self.settings.rewind()
            raise
        self.log.print()

    def behind_layers(self) -> AbstractContextManager[None]:
        """Refuse changes of the run that counts to layers of other ranks, which would be lost."""
        return self._refusing_changes() if self._remote else nullcontext()

    @contextmanager
    def _refusing_changes(self) -> Iterator[None]:
        before = [namespace.get(name) for _, namespace, name in self._remote]
        with RemoteTensor.noting_writes() as written:
            yield
        for tensor, (origin, namespace, name) in zip(before, self._remote, strict=True):
            if namespace.get(name) is not tensor or (written and _storage(tensor) in written):
                raise MisconfigurationException(
                    f"The step changes '{origin}' behind the layers. This layer is on another "
                    "rank, which runs the step only to the end of its stage: the change would be "
                    "lost. Make it in `on_train_batch_end`, which all ranks call, or in the layer."
                    + see("steps")
                )

    @contextmanager
    def of_part(self) -> Iterator[None]:
        """Record the log calls of a run on a micro-batch, and undo its other effects."""
        self._has_other_effects = False
        with self._undone(self.log.recorded()) as written:
            yield
        is_more = written or self.log.prints or self._metrics.touched or self.settings.has_frozen()
        self._has_other_effects |= bool(is_more)
        self.part_calls.append(self.log.calls)

    def only_logs_loss(self, output: Any, loss: Tensor) -> bool:
        """Whether that run did no more than to return a loss, and to log it as the others did.

        Args:
            output: the output of the step.
            loss: the loss in it.
        """
        returns = isinstance(output, Mapping) and len(output) > 1
        returns = returns and has_hook(self._module.trainer, "on_train_batch_end")
        is_more = self._has_other_effects or returns or not self.log.logs_only(loss)
        return not is_more and alike(self.part_calls[0], self.part_calls[-1])

    @contextmanager
    def _undone(self, log: AbstractContextManager[None], reads: bool = False) -> Iterator[Any]:
        """Undo the changes of a run to the module outside the layers, and its other effects.

        Args:
            log: the context for log calls and prints.
            reads: whether to read the values that are given to metrics.

        Yields:
            The names with which the run wants to write to loggers.
        """
        try:
            with log, self._metrics.skipped(reads), self._silenced() as written:
                yield written
        finally:
            self._has_other_effects |= self._state.rewind() | self.settings.rewind()

    @property
    def modes(self) -> Sequence[PausableOperatorMode]:
        """The modes that have to observe runs to see writes to tensors."""
        return [self._state.writes()] if self._state.storages else []

    def _silenced(self) -> AbstractContextManager[Any]:
        trainer = self._module.trainer
        is_needed = trainer.loggers or self._has_ranks
        return loggers_silenced(trainer) if is_needed else nullcontext(())

    def changed(self) -> tuple[list[Changed], list[str]]:
        """Return the changes of the run that counts, for :meth:`apply` on other ranks.

        Returns:
            The changed attributes, and warnings of those that cannot be sent.
        """
        changed, warnings, left = list[Changed](), list[str](), LARGEST_MESSAGE
        changes = self._state.changes() if self._runs_alone else {}
        whole = {path.place for path, (how, _) in changes.items() if how != "extended"}
        for path, (how, value) in changes.items():
            if path.is_below(whole):
                continue  # It is in a value that is sent whole, or no longer on the module.
            try:
                rest, taken = take_apart(value, (Tensor, *SHARED))
            except CannotPickle:
                rest, taken = b"", [None]
            size = len(rest) + sum(each.nbytes for each in taken if isinstance(each, Tensor))
            if size > left or not all(isinstance(each, Tensor) for each in taken):
                warnings.append(not_sent(path))
                continue
            left -= size
            # As copies, since a view would be sent with the whole tensor of which it is a part.
            tensors = [tensor.detach().to("cpu", copy=True) for tensor in taken]
            changed.append(Changed(path, how, rest, tensors))
        return changed, warnings

    def apply(self, changed: Sequence[Changed]) -> None:
        """Apply the changes of the run that counts, on another rank."""
        for path, how, rest, tensors in changed:
            own = [tensor.to(self._module.device) for tensor in tensors]
            write(self._module, path, how, put_together(rest, own))
            self._state.note_write(path)


def _storage(tensor: Tensor | None) -> int | None:
    with plain_torch_functions():
        return None if tensor is None else storage_id(tensor.untyped_storage())


def not_sent(path: AttributePath) -> str:
    """Return the warning about an attribute that is too large to be sent to the other stages."""
    return (
        f"The step changes `{path}`, but what is new is larger than 1 MB, or an object that cannot"
        " be sent: only the rank of the last stage, which is the first one, has it. Log values or "
        "torchmetrics objects, which every rank receives, or read it where "
        "`trainer.is_global_zero`." + see("steps")
    )
