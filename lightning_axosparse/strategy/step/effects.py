"""Lets a step have its effects once a batch: logs, prints, metrics, attributes, loggers.

Runs on micro-batches compute layers, and nothing else of them counts: what they change is put back.
The run on the whole batch counts, on the last stage; the other ranks of the replica get what it has
logged, printed and changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_axosparse.pipeline.loss.operators import Note
from lightning_axosparse.pipeline.state.module_state import AttributePath, How, ModuleState, write
from lightning_axosparse.pipeline.state.values import SHARED
from lightning_axosparse.strategy.compat.callbacks import broadcasting_nothing, loggers_silenced
from lightning_axosparse.strategy.compat.internals import outputs_are_read
from lightning_axosparse.strategy.compat.logging import LogCall, StepLog, combined
from lightning_axosparse.strategy.compat.metrics import PipelinedMetrics
from lightning_axosparse.support.object_trees import CannotPickle, put_together, take_apart
from lightning_axosparse.support.torch_internals import PausableOperatorMode
from lightning_axosparse.support.troubleshooting import see

LARGEST_MESSAGE = 2**20
"""Bytes of attributes that the last stage sends to the others after a batch."""


class Changed(NamedTuple):
    """An attribute that a step has changed; can be pickled.

    Attributes:
        place: the attribute.
        how: it has changed.
        rest: what it holds now, or of a list that was extended what is new, without tensors.
        tensors: these.
    """

    place: AttributePath
    how: How
    rest: bytes
    tensors: list[Tensor]


class StepEffects:
    """What runs of the steps of a module do besides computing layers.

    Args:
        module: the user's module.
        layers: its pipelined layers.
        metrics: its metrics.
        runs_alone: whether the run that counts is on one rank of several in a replica.

    Attributes:
        log: what the run that counts has logged and printed.
        parts: what runs on micro-batches have logged, where they log.
    """

    def __init__(
        self,
        module: LightningModule,
        layers: Sequence[nn.Module],
        metrics: PipelinedMetrics,
        runs_alone: bool,
    ) -> None:
        self._module, self._metrics, self._runs_alone = module, metrics, runs_alone
        self._has_ranks = module.trainer.world_size > 1
        self.log = StepLog(module)
        self.parts: list[list[LogCall]] = []
        within = {id(part) for layer in layers for part in layer.modules()}
        self._state = ModuleState(module, within)
        self._has_others = False

    def begin_batch(self) -> None:
        """Note the state from which every run of the step begins."""
        self._state.capture()
        self.log.calls, self.parts = [], []

    @property
    def reached(self) -> Collection[int]:
        """The objects that code outside the layers may change, by ``id``."""
        return self._state.reached

    @property
    def constants(self) -> list[Tensor]:
        """The tensors of the module, which are the same for all micro-batches."""
        return [*self._module.parameters(), *self._module.buffers(), *self._state.tensors]

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """Let nothing count of what a run does inside the context."""
        with self._rewound(), self.log.ignored(), self._metrics.skipped(), self._silenced():
            yield

    @contextmanager
    def read(self) -> Iterator[None]:
        """Let nothing count; but what is logged, or given to metrics, is read."""
        with self._rewound(), self._silenced(), self.log.recorded():
            with self._metrics.skipped(reads=True):
                yield

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Let all of it count that a run does inside the context, once for the batch."""
        alone = broadcasting_nothing(self._module.trainer) if self._runs_alone else nullcontext()
        try:
            with self.log.recorded(), self._metrics.counted(), alone:
                yield
        except Exception:  # What was printed may say why.
            self.log.print()
            raise
        except BaseException:  # It runs again.
            self._state.rewind()
            raise
        self.log.print()

    @contextmanager
    def of_part(self, note_of: Callable[[Tensor], Note]) -> Iterator[None]:
        """Record what a run on a micro-batch logs inside the context; nothing else counts.

        Args:
            note_of: says what a tensor is.
        """
        self._has_others = False
        with self._rewound(), self._metrics.skipped(), self._silenced() as written:
            with self.log.recorded(note_of):
                yield
        self._has_others |= bool(written or self.log.prints) or self._metrics.touched
        self.parts.append(self.log.calls)

    def combined(self, sizes: Sequence[int]) -> list[LogCall] | None:
        """What the batch logs, of what its micro-batches have; None if these do not make it up."""
        return combined(self.parts, sizes)

    def part_has_others(self, output: Any) -> bool:
        """Whether that run has done something else that counts, or has returned it."""
        returns = isinstance(output, Mapping) and len(output) > 1
        returns = returns and outputs_are_read(self._module.trainer, "training_step")
        return self._has_others or returns

    @contextmanager
    def _rewound(self) -> Iterator[None]:
        """Put back what a run changes on the module, outside the layers."""
        try:
            yield
        finally:
            self._has_others |= self._state.rewind()

    @property
    def modes(self) -> Sequence[PausableOperatorMode]:
        """What has to observe runs, so that it is known what they change."""
        return [self._state.writes()] if self._state.storages else []

    def _silenced(self) -> AbstractContextManager[Any]:
        trainer = self._module.trainer
        is_needed = trainer.loggers or self._has_ranks
        return loggers_silenced(trainer) if is_needed else nullcontext(())

    def changed(self) -> tuple[list[Changed], list[str]]:
        """What the run that counts has changed, for :meth:`apply` on other ranks.

        Returns:
            What was changed, and what to warn of, as it cannot be sent.
        """
        changed, warnings, left = list[Changed](), list[str](), LARGEST_MESSAGE
        found = self._state.changes() if self._runs_alone else {}
        for place, (how, value) in found.items():
            try:
                rest, taken = take_apart(value, (Tensor, *SHARED))
            except CannotPickle:
                rest, taken = b"", [None]
            size = len(rest) + sum(each.nbytes for each in taken if isinstance(each, Tensor))
            if size > left or not all(isinstance(each, Tensor) for each in taken):
                warnings.append(not_sent(place))
                continue
            left -= size
            # As copies, since of a view all that it is a part of would be sent.
            tensors = [tensor.detach().to("cpu", copy=True) for tensor in taken]
            changed.append(Changed(place, how, rest, tensors))
        return changed, warnings

    def apply(self, changed: Sequence[Changed]) -> None:
        """Change what the run that counts has changed on another rank."""
        for place, how, rest, tensors in changed:
            own = [tensor.to(self._module.device) for tensor in tensors]
            write(self._module, place, how, put_together(rest, own))


def not_sent(place: AttributePath) -> str:
    """What to say of an attribute that is too large to be sent to the other stages."""
    return (
        f"The step changes `{place}`, but what is new is larger than 1 MB, or an object that cannot"
        " be sent: only the rank of the last stage, which is the first one, has it. Log values or "
        "torchmetrics objects, which every rank receives, or read it where "
        "`trainer.is_global_zero`." + see("steps")
    )
