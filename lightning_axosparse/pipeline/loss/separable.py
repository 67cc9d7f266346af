"""Finds out whether a loss is a mean or a sum over samples.

Only such a loss can be differentiated micro-batch by micro-batch. While a step runs on one, a
tracker notes of each tensor outside the layers what it is (``loss.operators``). So it is found
which way to try. Whether it gives the loss and the gradient of the whole batch is compared
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
    known,
    made_of,
)
from lightning_axosparse.pipeline.rng import SampledNumbers
from lightning_axosparse.support.torch_internals import (
    PausableOperatorMode,
    memory_of,
    mutated_tensors,
    tensors_in,
    tree_leaves,
)


class SampleTracker(PausableOperatorMode):
    """Follows what a step makes of the samples of a micro-batch, outside the layers.

    Args:
        constants: tensors of the module.

    Attributes:
        samples: of the micro-batch.
        functions: a hash of the operators that were called, and of what held for all values.
        program: the same, and of the numbers that they were given.
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
        """The memory of tensors of the module."""
        return {memory_of(each)[0] for each in self._tensors}

    def begin(self, samples: int, numbers: SampledNumbers | None = None) -> None:
        """Begin to follow a run of the step on a micro-batch.

        Args:
            samples: of the micro-batch.
            numbers: gives it its random numbers; None if it draws others than the batch.
        """
        self.samples, self._numbers = samples, numbers
        self._forget("")
        self.begin_end()

    def begin_end(self) -> None:
        """Take in that the step goes on behind the last layer."""
        self.functions, self.program = 0, 0

    def add(self, tensor: Tensor, layout: object) -> None:
        """Say how the samples lie in something that a layer gives, or that is in the batch."""
        if isinstance(layout, Axis) and layout.dim == 0 and layout.views == 1:
            self._notes[memory_of(tensor)] = tensor, ROWS
        elif layout == "alike":
            self._notes[memory_of(tensor)] = tensor, CONSTANT

    def of_tensor(self, tensor: Tensor) -> Note:
        """What a tensor is."""
        key = memory_of(tensor)
        noted = self._notes.get(key)
        if noted is not None:
            return noted[1]
        is_constant = isinstance(tensor, nn.Parameter) or key[0] in self._constants
        return CONSTANT if is_constant else Unknown(self._problem)

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator, and note what it makes."""
        operator, leaves = known(func), tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        notes = [self.of_tensor(tensor) for tensor in given]
        if func is not torch.ops.aten.detach.default:  # It computes nothing.
            numbers = [n for n in (args if given else leaves) if isinstance(n, (int, float))]
            numbers = [n for n in numbers if n == n]  # NaN is never the same number.
            self.functions = hash((self.functions, func))
            self.program = hash((self.program, func, *numbers))
        written = set[int]()
        if operator.writes:
            written = {memory_of(tensor)[0] for tensor in mutated_tensors(func, args, kwargs)}
        if written and not written.isdisjoint(self._constants):
            self._forget(f"torch.{operator.name} writes to a tensor of the module")
        output = func(*args, **kwargs)
        made = [output] if isinstance(output, Tensor) else tensors_in(output)
        found = [memory_of(tensor) for tensor in made]
        if len(found) == 1 and found[0] in self._notes and not written:
            return output  # It is the same tensor.
        note = self._noted(Call(operator, args, kwargs, given, notes, output, self.samples))
        note = Unknown(self._problem) if self._problem else note
        for key in [key for key in self._notes if key[0] in written] if written else ():
            if note not in (ROWS, FILLED) or self._notes[key][1] != ROWS:
                del self._notes[key]
        self._notes.update({key: (each, note) for key, each in zip(found, made, strict=True)})
        return output

    def _forget(self, problem: str) -> None:
        """Drop what is known, and for a reason what the step is going to make as well."""
        self._problem, self._notes = problem, {}

    def _noted(self, call: Call) -> Note:
        """What an operator makes."""
        name, numbers = call.operator.name, self._numbers
        if call.operator.draws and numbers and not numbers.problem and not numbers.dim:
            return CONSTANT if numbers.dim is None else ROWS
        if name == "local_scalar_dense":
            self._take(call.notes[0], call.output)
        elif name == "lift_fresh":  # It is made of numbers: those of samples differ.
            self.program = hash((self.program, str(call.output.tolist())))
            return FILLED if call.output.dim() == 0 else CONSTANT
        return made_of(call)

    def _take(self, note: Note, value: Any) -> None:
        """Take in that the step takes a number out of a tensor."""
        if note == EXTREME:  # Where micro-batches agree on it, so does the batch.
            self.functions = hash((self.functions, value if isinstance(value, bool) else 0))
        elif isinstance(value, bool) and note not in (CONSTANT, FILLED):
            self._forget("it decides by values of the samples")
        elif note not in (CONSTANT, FILLED):
            self._problem = "it takes numbers out of samples before the loss is computed"
