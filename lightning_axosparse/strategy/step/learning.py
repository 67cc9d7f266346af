"""Learns how steps behave on the batches of a loader, and decides whether by parts is right.

Batches 1, 2, 4, 8, ... of a loader are compared with their micro-batches, as are the first batches
of training epochs, and batches whose steps call other functions than before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_axosparse.pipeline.crossing.message import Crossing, StageReads, crossing_of
from lightning_axosparse.pipeline.joining import SampleLayouts
from lightning_axosparse.pipeline.stage_forward import PipelinedLayers
from lightning_axosparse.pipeline.stage_step import Batch, Rerun
from lightning_axosparse.strategy.compat.lockstep import position
from lightning_axosparse.strategy.step.comparison import Comparison, ComparisonResult
from lightning_axosparse.strategy.step.open_pipeline import OpenPipeline
from lightning_axosparse.support.troubleshooting import see

Loss: TypeAlias = Literal["auto", "whole", "parts"]

_LEAST_BETWEEN = 8
"""Least number of batches between comparisons at the beginning of epochs, which may be short."""
_MOST_PROGRAMS = 8
"""Number of times that steps may call other functions before by parts is given up."""


@dataclass
class LoaderSteps:
    """The known behaviour of the steps on the batches of a loader.

    Attributes:
        reads: the values of other stages that each stage has read in a probe.
        crossing: the values that each stage sends; None if unknown: all values.
        layouts: the layouts of samples in layer outputs.
        draws: whether the step draws random numbers outside the layers.
        by_parts: whether losses are differentiated by parts.
        has_other_effects: whether the step has other effects than to log means and return a loss.
        functions: hashes of the functions that the steps of compared micro-batches have called;
            None if they could not be compared.
        batches: number of batches so far.
    """

    reads: dict[int, StageReads] = field(default_factory=dict)
    crossing: Crossing | None = None
    layouts: SampleLayouts = field(default_factory=SampleLayouts)
    draws: bool = False
    by_parts: bool = False
    has_other_effects: bool = False
    functions: set[int] | None = field(default_factory=set)
    batches: int = 0
    _compared: int = 0
    _changes: int = 0

    def begin_batch(self, begins_epoch: bool) -> bool:
        """Count a batch, and return whether it is to be compared."""
        self.batches += 1
        number, since = self.batches, self.batches - self._compared
        is_due = number & (number - 1) == 0 or (begins_epoch and since >= _LEAST_BETWEEN)
        if is_due:
            self._compared = number
        return is_due

    def add_reads(self, reads: dict[int, StageReads]) -> None:
        """Add the values that stages have read in a probe."""
        for stage, each in reads.items():
            known = self.reads.setdefault(stage, each)
            known.read |= each.read
            known.side_outputs |= each.side_outputs
            known.is_complete |= each.is_complete
        self.crossing = crossing_of(self.reads)

    def changes_too_often(self) -> bool:
        """Count a change of the functions that steps call; return whether there were too many."""
        self._changes += 1
        return self._changes > _MOST_PROGRAMS


class StepLearner:
    """Runs probes and comparisons, and reports their results to the user.

    Args:
        trainer: the Trainer.
        loss: how losses are differentiated: whole, by parts, or as a comparison shows.
        free: returns the bytes that this rank may still allocate.
        tolerance: largest relative difference of values that count as equal.
    """

    def __init__(
        self, trainer: pl.Trainer, loss: Loss, free: Callable[[], int], tolerance: float
    ) -> None:
        self._trainer, self._loss = trainer, loss
        self._free, self._tolerance = free, tolerance
        self._reported: set[str] = set()

    def begin_batch(self, run: OpenPipeline, known: LoaderSteps, step: Batch, trains: bool) -> None:
        """Probe which values stages read, and compare a batch that is due."""
        is_due = known.begin_batch(trains and self._trainer.fit_loop.batch_idx == 0)
        if not step.microbatches:
            return
        if known.crossing is None and run.pipeline.is_divided:
            with run.layers_rewound(run.stage_module.stages):
                known.add_reads(run.pipeline.probe(replace(step, layouts=known.layouts)))
        if is_due and len(step.microbatches) > 1:
            self._compare(run, known, step, trains)

    def run_again(
        self, run: OpenPipeline, known: LoaderSteps, step: Batch, rerun: Rerun, problem: str
    ) -> None:
        """Prepare for a batch to run again, after its effects were dropped.

        Args:
            run: the pipeline of the run.
            known: the known behaviour of the loader's steps.
            step: the batch.
            rerun: the reason.
            problem: why to differentiate the whole loss from now on; else empty.
        """
        run.effects.begin_batch()
        known.draws |= rerun is Rerun.DRAWS
        known.has_other_effects |= rerun is Rerun.HAS_OTHER_EFFECTS
        if rerun is Rerun.READS:
            known.crossing = None
        elif rerun is Rerun.CALLS_OTHERS and known.changes_too_often():
            problem = "its steps call other functions again and again"
        elif rerun is Rerun.CALLS_OTHERS:
            self._compare(run, known, step, True)
        if problem:
            known.by_parts = False
            self._report_whole(step, problem)

    def _compare(self, run: OpenPipeline, known: LoaderSteps, step: Batch, trains: bool) -> None:
        """Compare a batch with its micro-batches."""
        shares_passes = run.stage_module.groups.experts is not None
        may_part = trains and self._loss == "auto" and not shares_passes
        step = replace(step, crossing=known.crossing)
        result = Comparison(run, step, self._tolerance).compare(self._free, may_part)
        run.effects.begin_batch()
        if result.layers is not None and run.pipeline.is_divided:
            raise self._layers_differ(result, step)
        known.layouts.known.update(result.layouts)
        known.draws |= result.draws
        known.has_other_effects |= result.has_other_effects
        if known.functions is not None:
            known.functions.update(result.functions)
        run.layer_state.learn(result.counted, result.rewritten)
        for text in result.warnings:
            self.warn(text)
        if trains and run.pipeline.is_divided:
            self._warn_of_backward_hooks(run.stage_module.layers)
        if result.problem and not (result.is_too_large and known.functions is None):
            name, where = step.step.__name__, self._where(step)
            self._report(
                f"{name} could not be compared in {where}: {result.problem}." + see("losses")
            )
        if may_part and (known.batches == 1 or known.by_parts):
            self._decide(run, known, step, result)

    def _decide(
        self, run: OpenPipeline, known: LoaderSteps, step: Batch, result: ComparisonResult
    ) -> None:
        """Decide how the loss is differentiated from now on."""
        if result.is_too_large:  # Rely on the tracker alone.
            known.by_parts, known.functions = True, None
            return
        reason = result.problem or result.reason
        if result.layers is not None:
            reason = reason or f"{result.layers[1]} compares samples"
        if result.has_other_effects and not run.pipeline.is_divided:
            reason = reason or "it does more than to log means and return a loss"
        known.by_parts = not reason
        if reason:
            self._report_whole(step, reason)

    def _report_whole(self, step: Batch, reason: str) -> None:
        self._report(
            f"From {self._where(step)} on, the loss is differentiated once a batch, and stages hold"
            f" all {len(step.microbatches)} micro-batches until then: {reason}." + see("losses")
        )

    def _where(self, step: Batch) -> str:
        loop, epoch, index = position(self._trainer)
        return f"{step.step.__name__}, {loop} epoch {epoch}, batch {index}"

    def _report(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            rank_zero_info(text)

    def warn(self, text: str) -> None:
        """Warn once."""
        if text not in self._reported:
            self._reported.add(text)
            rank_zero_warn(text)

    def _warn_of_backward_hooks(self, pipelined: PipelinedLayers) -> None:
        for name, layer in zip(pipelined.names, pipelined.layers, strict=True):
            for inner, part in layer.named_modules(prefix=name):
                if part._backward_hooks or part._backward_pre_hooks:
                    self.warn(
                        f"Backward hooks of {inner!r} are called for each micro-batch, with its "
                        "gradients, so losses and weights may differ from those of one process."
                        + see("steps")
                    )

    def _layers_differ(self, result: ComparisonResult, step: Batch) -> MisconfigurationException:
        """Return the error of layers whose outputs differ for micro-batches."""
        assert result.layers is not None
        _, name, by = result.layers
        much = "of other shapes or kinds" if by == float("inf") else f"that differs by {by:.1%}"
        return MisconfigurationException(
            f"In {self._where(step)}, {name} gives something {much} for {len(step.microbatches)} "
            "micro-batches than for the whole batch: it, or a layer or code between layers before "
            "it, compares samples with each other, or uses a statistic or a count of the batch. "
            "AxoSparseStrategy(microbatches=1) is exact; GroupNorm or LayerNorm need no statistics "
            "of the batch; a loss of such values belongs behind the layers, where the step sees the"
            " whole batch." + see("losses")
        )
