"""Learns how steps behave on the batches of a loader.

Of the batches of a loader that can be divided, 1, 2, 4, 8, ... are compared with their
micro-batches, as are the first ones of training epochs. A batch that cannot runs undivided.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_debug, rank_zero_warn

from lightning_axosparse.pipeline.batch import Batch
from lightning_axosparse.pipeline.by_parts import Reduction
from lightning_axosparse.pipeline.crossing.message import Crossing, StageReads, crossing_of
from lightning_axosparse.pipeline.joining import SampleLayouts
from lightning_axosparse.pipeline.rerun import Rerun
from lightning_axosparse.pipeline.rng import DrawnSamples
from lightning_axosparse.pipeline.stage_forward import PipelinedLayers
from lightning_axosparse.strategy.compat.lockstep import position
from lightning_axosparse.strategy.step.comparison import Comparison, ComparisonResult
from lightning_axosparse.strategy.step.open_pipeline import OpenPipeline
from lightning_axosparse.strategy.validation import norms_outside
from lightning_axosparse.support.troubleshooting import see

_MANY_UNDIVIDED = 3

_LEAST_BETWEEN = 8
"""Least number of batches between comparisons at the beginning of epochs, which may be short."""


@dataclass
class LoaderSteps:
    """The known behaviour of the steps on the batches of a loader.

    Attributes:
        reads: the values of other stages that each stage has read in a probe.
        crossing: the values that each stage sends; None if unknown: all values.
        layouts: the layouts of samples in inputs and outputs of the layers.
        mixes: whether the code before the layers mixes samples.
        draws: whether the step draws random numbers outside the layers.
        drawn: where samples lie in these; None if no batch could be compared.
        has_other_effects: whether the step does more than to return a loss and to log it.
        is_undivided: whether all batches run as one micro-batch.
        batches: number of batches so far that can be divided.
        undivided: number of those that had to run as one micro-batch, as it was seen in them.
    """

    reads: dict[int, StageReads] = field(default_factory=dict)
    crossing: Crossing | None = None
    layouts: SampleLayouts = field(default_factory=SampleLayouts)
    mixes: bool = False
    draws: bool = False
    drawn: Sequence[DrawnSamples] | None = None
    has_other_effects: bool = False
    is_undivided: bool = False
    batches: int = 0
    undivided: int = 0
    _compared: int = 0

    @property
    def reads_numbers(self) -> bool:
        """Whether Python reads numbers from values between layers."""
        return any(each.numbers for each in self.reads.values())

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
            known.numbers |= each.numbers
        self.crossing = crossing_of(self.reads)


class StepLearner:
    """Runs probes and comparisons, and reports their results to the user.

    Args:
        trainer: the Trainer.
        reduction: how the user says that the loss of a batch follows from its samples; None if it
            is differentiated whole.
        free: returns the bytes that this rank may still allocate.
        tolerance: largest relative difference of values that count as equal.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        reduction: Reduction | None,
        free: Callable[[], int],
        tolerance: float,
    ) -> None:
        self._trainer, self._reduction = trainer, reduction
        self._free, self._tolerance = free, tolerance
        self._reported: set[str] = set()

    def begin_batch(self, run: OpenPipeline, known: LoaderSteps, step: Batch) -> Batch:
        """Probe which values stages read, and compare a batch that is due.

        Returns:
            The batch, with one micro-batch if it cannot be divided.
        """
        if not step.microbatches:
            return step
        if known.is_undivided:
            step = undivided(step)
        is_first = known.crossing is None and run.pipeline.is_divided
        if is_first:
            self._probe(run, known, step)
        trains = self._trainer.training
        declared = self._reduction if trains and not known.reads_numbers else None
        if trains and self._reduction is not None and known.reads_numbers:
            self.warn(
                f"AxoSparseStrategy(loss={self._reduction!r}) saves no memory, as Python reads "
                "numbers from values between layers (`if x.max() > 1`, `x.std().item()`). They "
                "are compared with those of the whole batch, whose loss is differentiated once."
                + see("losses")
            )
        # Without stages and by a whole loss, the batch passes as a whole.
        runs_parts = run.pipeline.is_divided or declared is not None
        if len(step.microbatches) == 1 or not runs_parts:
            if is_first:
                self._learn_state(run, known, step)
            return step
        if known.begin_batch(trains and self._trainer.fit_loop.batch_idx == 0):
            self._compare(run, known, step, declared)
        return undivided(step) if known.is_undivided else step

    def run_again(self, run: OpenPipeline, known: LoaderSteps, step: Batch, rerun: Rerun) -> Batch:
        """Prepare for a batch to run again, after its effects were dropped.

        Returns:
            The batch, with one micro-batch if it cannot be divided.
        """
        run.effects.begin_batch()
        known.draws |= rerun is Rerun.DRAWS
        known.mixes |= rerun is Rerun.MIXES
        known.has_other_effects |= rerun is Rerun.HAS_OTHER_EFFECTS
        if rerun is Rerun.READS:
            if known.crossing is None:  # All values were sent.
                return undivided(step)
            known.crossing = None
        if rerun is Rerun.HAS_OTHER_EFFECTS and not run.pipeline.is_divided:
            self.warn(
                f"training_step does more than to return a loss and to log it, so AxoSparseStrategy"
                f"(loss={self._reduction!r}) saves no memory on one stage: batches pass as a whole."
                + see("losses")
            )
        if rerun not in (Rerun.SAMPLES, Rerun.FAILS):
            return step
        if run.stage_module.groups.experts is not None:
            raise MisconfigurationException(
                "Replicas that share experts run the same passes, but a batch of one of them "
                f"cannot be divided in {self._where(step)}: {rerun.value}. "
                "AxoSparseStrategy(microbatches=1) is exact." + see("expert-parallel")
            )
        if rerun is Rerun.FAILS:
            known.is_undivided |= known.batches == 1
            self._warn_of_failure(known, step)
        self._count_undivided(known, rerun)
        return undivided(step)

    def _compare(
        self, run: OpenPipeline, known: LoaderSteps, step: Batch, declared: Reduction | None
    ) -> None:
        """Compare a batch with its micro-batches, and its loss, if that is declared."""
        drawn: Mapping[int, Sequence[DrawnSamples]] = {}
        may_probe, with_graph = run.pipeline.is_divided, False
        while True:
            result, seen = self._compared(run, known, step, declared, drawn, with_graph)
            if result.guessed_wrong and not drawn:
                drawn = seen
            elif result.mixes and not known.mixes:
                known.mixes = True
            elif result.reads_more and may_probe:
                self._probe(run, known, step)
                may_probe = False
            elif result.raises and not with_graph and self._trainer.training:
                with_graph = True
            else:
                break
        if result.layers is not None:
            self._report_layers(known, result, step)
        if result.loss:
            raise self._loss_differs(run, result, step)
        for key, layouts in result.layouts.items():
            known.layouts.narrow(key, layouts)
        known.layouts = replace(known.layouts, one_view=result.is_too_large)
        known.draws |= result.draws
        run.layer_state.learn(result.counted, result.rewritten)
        for text in result.warnings:
            self.warn(text)
        self._warn_of_backward_hooks(run.stage_module.layers)
        if result.is_too_large:
            self.warn(
                f"{step.step.__name__} is not compared with its micro-batches, as {result.problem}."
                " So it is taken for granted that layers compute each sample by itself, and that "
                "the rows of their outputs are in the order of samples." + see("losses")
            )
        elif result.problem:
            name, where = step.step.__name__, self._where(step)
            rank_zero_debug(f"{name} could not be compared in {where}: {result.problem}.")

    def _compared(
        self,
        run: OpenPipeline,
        known: LoaderSteps,
        step: Batch,
        declared: Reduction | None,
        drawn: Mapping[int, Sequence[DrawnSamples]],
        with_graph: bool,
    ) -> tuple[ComparisonResult, Mapping[int, Sequence[DrawnSamples]]]:
        """Compare; return also where samples lie in random numbers, by stage."""
        comparison = Comparison(run, _compared_with(known, step), self._tolerance, drawn)
        result = comparison.compare(self._free, declared, with_graph)
        run.effects.begin_batch()
        outside = comparison.drawn_outside
        if result.problem:
            known.drawn = None
        elif known.drawn is None or outside != known.drawn[: len(outside)]:
            known.drawn = outside  # Else other batches draw more.
        return result, comparison.drawn

    @staticmethod
    def _probe(run: OpenPipeline, known: LoaderSteps, step: Batch) -> None:
        """Find out which values of other stages the step reads."""
        with run.layers_rewound(run.stage_module.stages):
            known.add_reads(run.pipeline.probe(replace(step, layouts=known.layouts)))

    def _learn_state(self, run: OpenPipeline, known: LoaderSteps, step: Batch) -> None:
        """Learn what layers and their hooks count, of a batch that passes as a whole."""
        comparison = Comparison(run, _compared_with(known, step), self._tolerance, {})
        result = comparison.compare(self._free, None)
        run.effects.begin_batch()
        run.layer_state.learn(result.counted, result.rewritten)

    def _warn_of_failure(self, known: LoaderSteps, step: Batch) -> None:
        """Warn of the first error in a run on a micro-batch, on the rank that has raised it."""
        if step.failures and not known.undivided:
            warnings.warn(
                f"A run of {self._where(step)}, on one of {len(step.microbatches)} micro-batches, "
                f"raised {step.failures[0]}\nSo the batch runs as one micro-batch, on one stage "
                "after the other. The result is exact, but stages wait for each other."
                + see("batches"),
                stacklevel=2,
            )

    def _count_undivided(self, known: LoaderSteps, rerun: Rerun) -> None:
        """Count a batch that runs as one micro-batch, and warn if there are many."""
        known.undivided += 1
        if known.undivided == _MANY_UNDIVIDED:
            self.warn(
                f"{_MANY_UNDIVIDED} of {known.batches} batches had to run as one micro-batch, on "
                f"one stage after the other, since {rerun.value}. Results are exact, but "
                "stages wait for each other." + see("losses")
            )

    def _where(self, step: Batch) -> str:
        loop, epoch, index = position(self._trainer)
        return f"{step.step.__name__}, {loop} epoch {epoch}, batch {index}"

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

    def _loss_differs(
        self, run: OpenPipeline, result: ComparisonResult, step: Batch
    ) -> MisconfigurationException:
        """Return the error of a loss that does not follow from micro-batches as declared."""
        norms = norms_outside(run.stage_module.module, run.stage_module.layers.layers)
        by = f" {norms[0]!r} normalizes by the statistics of a micro-batch." if norms else ""
        return MisconfigurationException(
            f"AxoSparseStrategy(loss={self._reduction!r}) is not right in {self._where(step)}: "
            f'{result.loss}.{by} loss="whole" is exact for every loss; a mean over tokens needs a '
            "function that returns their number for a micro-batch." + see("losses")
        )

    def _report_layers(self, known: LoaderSteps, result: ComparisonResult, step: Batch) -> None:
        """Report that layers compute something else for micro-batches than for the batch.

        From this batch on, no batch is divided then.

        Raises:
            MisconfigurationException: if earlier batches may have been wrong, as they were divided
                and other values do not show in them.
        """
        assert result.layers is not None
        _, gives, by = result.layers
        apart = "other shapes or kinds" if by == float("inf") else f"a difference of {by:.1%}"
        text = (
            f"In {self._where(step)}, {gives} something else for {len(step.microbatches)} "
            f"micro-batches than for the whole batch ({apart}): it, or a layer or code between "
            "layers before it, compares samples with each other, or uses a statistic or a count of "
            "the batch."
        )
        if known.batches > 1 and not result.is_unjoined:
            raise MisconfigurationException(
                f"{text} Earlier batches may have been computed differently, too. "
                "AxoSparseStrategy(microbatches=1) is exact." + see("losses")
            )
        known.is_undivided = True
        self.warn(
            f"{text} So batches run as one micro-batch, on one stage after the other. Results are "
            "exact, but stages wait for each other. GroupNorm or LayerNorm need no statistics of "
            "the batch; a loss of such values belongs behind the layers, where the step sees the "
            "whole batch." + see("losses")
        )


def _compared_with(known: LoaderSteps, step: Batch) -> Batch:
    """Add what is known to a batch that is to be compared."""
    layouts = replace(known.layouts, compares=True)
    return replace(step, crossing=known.crossing, layouts=layouts, mixes=known.mixes, failures=[])


def undivided(step: Batch) -> Batch:
    """Return a batch with one micro-batch."""
    return replace(step, microbatches=[step.whole])
