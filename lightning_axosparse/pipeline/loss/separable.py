"""Determines whether a loss is a mean or a sum over samples.

Only such a loss can be differentiated by parts. While a step runs on a micro-batch, a tracker
records how each tensor outside the layers depends on the samples (``loss.operators``). The result
only suggests by parts: a comparison checks whether loss and gradients are those of the whole batch
(``strategy.step.comparison``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.joining import Axis
from lightning_axosparse.pipeline.loss.operators import (
    CONSTANT,
    EXTREME,
    FILLED,
    ROWS,
    Call,
    Note,
    Unknown,
    operator_of,
    output_note,
)
from lightning_axosparse.pipeline.rng import SampledNumbers
from lightning_axosparse.support.torch_internals import (
    PausableOperatorMode,
    memory_key,
    mutated_tensors,
    tensors_in,
    tree_leaves,
)


class SampleTracker(PausableOperatorMode):
    """Records how tensors outside the layers depend on the samples of a micro-batch.

    Args:
        constants: tensors of the module.

    Attributes:
        samples: number of samples in the micro-batch.
        functions: hash of the operators that were called, and of the results of ``all`` or ``any``
            over samples.
        program: the same, with the numbers among the operators' arguments.
    """

    def __init__(self, constants: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._tensors = constants
        self._notes: dict[Any, tuple[Tensor, Note]] = {}
        self.samples, self.functions, self.program = 0, 0, 0
        self._numbers: SampledNumbers | None = None
        self._problem = ""

    @cached_property
    def _constants(self) -> set[int]:
        """The numbers of the storages of the module's tensors."""
        return {memory_key(each)[0] for each in self._tensors}

    def begin(self, samples: int, numbers: SampledNumbers | None = None) -> None:
        """Begin a run of the step on a micro-batch.

        Args:
            samples: number of samples in the micro-batch.
            numbers: the source of its part of the batch's random numbers; None if it draws its own.
        """
        self.samples, self._numbers = samples, numbers
        self._forget("")
        self.begin_end()

    def begin_end(self) -> None:
        """Begin the end of the step: hash only the operators behind the last layer."""
        self.functions, self.program = 0, 0

    def add(self, tensor: Tensor, layout: object) -> None:
        """Add an output of a layer, or a tensor of the batch, by its layout of samples."""
        if isinstance(layout, Axis) and layout.dim == 0 and layout.views == 1:
            self._notes[memory_key(tensor)] = tensor, ROWS
        elif layout == "alike":
            self._notes[memory_key(tensor)] = tensor, CONSTANT

    def note_of(self, tensor: Tensor) -> Note:
        """Return the note of a tensor."""
        key = memory_key(tensor)
        noted = self._notes.get(key)
        if noted is not None:
            return noted[1]
        is_constant = isinstance(tensor, nn.Parameter) or key[0] in self._constants
        return CONSTANT if is_constant else Unknown(self._problem)

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator and record the note of its output."""
        operator, leaves = operator_of(func), tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        notes = [self.note_of(tensor) for tensor in tensors]
        if func is not torch.ops.aten.detach.default:  # It computes nothing.
            numbers = [n for n in (args if tensors else leaves) if isinstance(n, (int, float))]
            numbers = [n for n in numbers if n == n]  # NaN is never the same number.
            self.functions = hash((self.functions, func))
            self.program = hash((self.program, func, *numbers))
        written = set[int]()
        if operator.writes:
            written = {memory_key(tensor)[0] for tensor in mutated_tensors(func, args, kwargs)}
        if written and not written.isdisjoint(self._constants):
            self._forget(f"torch.{operator.name} writes to a tensor of the module")
        output = func(*args, **kwargs)
        outputs = [output] if isinstance(output, Tensor) else tensors_in(output)
        keys = [memory_key(tensor) for tensor in outputs]
        if len(keys) == 1 and keys[0] in self._notes and not written:
            return output  # It is the same tensor.
        note = self._output_note(Call(operator, args, kwargs, tensors, notes, output, self.samples))
        note = Unknown(self._problem) if self._problem else note
        for key in [key for key in self._notes if key[0] in written] if written else ():
            if note not in (ROWS, FILLED) or self._notes[key][1] != ROWS:
                del self._notes[key]
        self._notes.update({key: (each, note) for key, each in zip(keys, outputs, strict=True)})
        return output

    def _forget(self, problem: str) -> None:
        """Drop all notes; with a ``problem``, later tensors are unknown for this reason."""
        self._problem, self._notes = problem, {}

    def _output_note(self, call: Call) -> Note:
        """Return the note of an operator's output, with the cases that concern the whole step."""
        name, numbers = call.operator.name, self._numbers
        if call.operator.draws and numbers and not numbers.problem and not numbers.dim:
            return CONSTANT if numbers.dim is None else ROWS
        if name == "local_scalar_dense":
            self._read_number(call.notes[0], call.output)
        elif name == "lift_fresh":  # A tensor of Python numbers: those of samples differ.
            self.program = hash((self.program, str(call.output.tolist())))
            return FILLED if call.output.dim() == 0 else CONSTANT
        return output_note(call)

    def _read_number(self, note: Note, value: Any) -> None:
        """Record that the step reads a Python number from a tensor."""
        if note == EXTREME:  # Where micro-batches agree on it, so does the batch.
            self.functions = hash((self.functions, value if isinstance(value, bool) else 0))
        elif isinstance(value, bool) and note not in (CONSTANT, FILLED):
            self._forget("it decides by values of the samples")
        elif note not in (CONSTANT, FILLED):
            self._problem = "it takes numbers out of samples before the loss is computed"
