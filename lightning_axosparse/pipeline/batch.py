"""A batch with the step that runs on it, and its fingerprint, which stages compare.

Every stage loads the batch itself. If samples are selected or transformed at random, differently on
each rank, the layers of one stage would be trained with the labels of another. So each activation
message carries the fingerprint of the batch, and the receiving stage compares it with its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.batch_layout import copied_batch, is_plain, nodes
from lightning_axosparse.pipeline.crossing.message import Crossing, SentValues
from lightning_axosparse.pipeline.crossing.step_run import StepRun
from lightning_axosparse.pipeline.joining import SampleLayouts
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.rng import PipelineRNG, SampledNumbers
from lightning_axosparse.pipeline.stage_forward import PipelinedLayers
from lightning_axosparse.support.torch_internals import PausableOperatorMode
from lightning_axosparse.support.troubleshooting import see

_SAMPLED = 4096
"""Number of evenly spread elements of a tensor on which a checksum depends."""


class BatchFingerprint(NamedTuple):
    """The fingerprint of a batch.

    Attributes:
        checksum: of the values of the whole batch, not of a micro-batch.
        place: position of the batch in the run, in words.
    """

    checksum: int = 0
    place: str = "the batch"

    def validate(self, received: int, stage: int) -> None:
        """Check that the previous stage computes the same batch.

        Raises:
            MisconfigurationException: if the fingerprints differ.
        """
        if received == self.checksum:
            return
        raise MisconfigurationException(
            f"In {self.place}, ranks that share a batch were given different ones (checksums: "
            f"stage {stage - 1}: {received:08x}, stage {stage}: {self.checksum:08x}), so the "
            "layers of one would be trained with the labels of another. "
            "Something that picks or transforms the samples is random in its own way on each rank: "
            "give the sampler, the dataset or the transform a seed that does not depend on the "
            "rank, and call `lightning.seed_everything(seed, workers=True)` if loader workers draw "
            "at random." + see("batches")
        )


class LossBackward(Protocol):
    """Differentiates the losses of a batch: ``strategy.step.train_step.BatchGradients``."""

    def differentiate(self, loss: Tensor) -> None:
        """Differentiate the loss of the batch, or the weighted loss of a micro-batch."""

    def begin_last(self, deferred: Collection[nn.Parameter] = ()) -> None:
        """Prepare for the last backward pass of this process, which makes gradients final.

        Args:
            deferred: parameters whose gradients are final only after :meth:`mark_final`.
        """

    def mark_final(self, parameter: nn.Parameter) -> None:
        """Mark the gradient of one of the deferred parameters as final."""


class Effects(Protocol):
    """The effects of runs: logs, metrics, attributes (``strategy.step.effects.StepEffects``)."""

    written: Sequence[object]
    """Paths of the tensors outside the layers to which runs have written."""

    @property
    def modes(self) -> Sequence[PausableOperatorMode]:
        """The modes that have to observe runs."""

    def discarded(self) -> AbstractContextManager[None]:
        """Return a context that undoes all effects of the run in it."""

    def read(self) -> AbstractContextManager[None]:
        """Return a context that undoes all effects, but reads the values that are logged."""

    def counted(self) -> AbstractContextManager[None]:
        """Return the context of the run whose effects count, once for the batch."""

    def behind_layers(self) -> AbstractContextManager[None]:
        """Return the context of that run after its last layer, if layers are on other ranks."""

    def of_part(self) -> AbstractContextManager[None]:
        """Return a context that records the log calls of a run, and undoes its other effects."""

    def only_logs_loss(self, output: Any, loss: Tensor) -> bool:
        """Whether that run did no more than to return a loss, and to log it as the others did."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch and the step that is run on it, shared by all stages of this process.

    Attributes:
        step: the user's step, called as ``step(part, *args, **kwargs)``.
        args: its arguments besides the batch.
        kwargs: its keyword arguments.
        precision: makes the context in which the step runs.
        layers: the layers of all stages.
        rng: seeds the random numbers of the step.
        whole: the whole batch.
        microbatches: its micro-batches.
        fingerprint: fingerprint of the whole batch, which every message carries.
        effects: undoes the effects of runs, or lets them count.
        backward: differentiates the losses; None in evaluation.
        crossing: the values that each stage sends; None if unknown: all values.
        layouts: the layouts of samples in inputs and outputs of the layers.
        mixes: whether the code before the layers mixes samples.
        numbers: the random numbers of the step, by stage; empty if it draws none.
        of_pass: makes the context of a pass through a stage; with None, of a run without layers.
        may_fail: whether the batch runs undivided if a run on a micro-batch raises an error.
        failures: texts of such errors.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    layers: PipelinedLayers
    rng: PipelineRNG
    whole: MicroBatch
    microbatches: Sequence[MicroBatch]
    fingerprint: BatchFingerprint
    effects: Effects
    backward: LossBackward | None = None
    crossing: Crossing | None = None
    layouts: SampleLayouts = field(default_factory=SampleLayouts)
    mixes: bool = False
    numbers: Mapping[int, SampledNumbers] = field(default_factory=dict)
    of_pass: Callable[[int | None], AbstractContextManager[None]] = lambda stage: nullcontext()
    may_fail: bool = False
    failures: list[str] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        """The number of samples in each micro-batch."""
        return [part.size for part in self.microbatches]

    @property
    def may_read_more(self) -> bool:
        """Whether a value that was not sent may be there when the batch runs again."""
        return self.crossing is not None or len(self.microbatches) > 1

    def sent(self, stage: int) -> SentValues:
        """Return the values that a stage sends."""
        return SentValues() if self.crossing is None else self.crossing[stage]

    def call(
        self,
        run: StepRun,
        part: MicroBatch,
        *,
        stage: int | None = None,
        counts: bool = False,
    ) -> Any:
        """Call the user's step in a run, and return its output.

        In evaluation it may call no layer at all, alike on all stages.

        Args:
            run: the run.
            part: the micro-batch, or the whole batch; unless it counts, the step gets a copy of it.
            stage: the stage through which the run passes; None for a run without layers.
            counts: whether it is the run whose effects count.
        """
        modes, numbers = self.effects.modes, self.numbers.get(run.stage)
        drawn: AbstractContextManager[None] = nullcontext()
        if numbers is not None:
            modes = [numbers, *modes]
            drawn = numbers.of(part.begin, part.begin + part.size, counts)
        value = part.batch if counts else copied_batch(part.batch)
        self.rng.begin_run()
        running = self.layers.running(run, modes, self.effects.written)
        with self.of_pass(stage), drawn, running, self.precision():
            output = self.step(value, *self.args, **self.kwargs)
            self.layers.end_step(run, output, may_call_none=self.backward is None)
        return output


def checksum(batch: object) -> int:
    """Return the CRC-32 of values, types and shapes in a batch, in order; 0 if it has no values.

    Of large tensors and arrays it includes some thousand evenly spread elements, which takes tens
    of microseconds a tensor.
    """
    crc = 0
    for _, leaf in nodes(batch, stop={}):
        for data in _bytes(leaf):
            crc = zlib.crc32(data, crc)
    return crc


def _bytes(leaf: Any) -> Iterator[bytes]:
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
        yield f"{leaf.dtype}{tuple(leaf.shape)}".encode()
        spread = leaf.detach().reshape(-1)[:: max(1, leaf.numel() // _SAMPLED)]
        yield spread.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        yield f"{leaf.dtype}{leaf.shape}".encode()
        yield leaf.reshape(-1)[:: max(1, leaf.size // _SAMPLED)].tobytes()
    elif is_plain(leaf) and leaf is not None:  # Others may be shown with their address.
        yield repr(leaf).encode()
