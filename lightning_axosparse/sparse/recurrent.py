"""Computes ``torch.lstm`` and ``torch.gru``, layer by layer, without making sparse weights dense.

The functions take the arguments with which the forward of ``nn.LSTM`` and ``nn.GRU`` calls torch's.
They run if all operands are plain float32 tensors on a CPU and the weights keep so few entries that
it is faster, or ``compute="sparse"`` (``kept_recurrent.chosen``). Otherwise, and where an LSTM
projects its hidden states, torch's own functions run on dense weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_axosparse.sparse import kept_recurrent
from lightning_axosparse.sparse.kept_recurrent import Steps, Weights
from lightning_axosparse.sparse.materialize import autocast_dtype
from lightning_axosparse.sparse.recurrent_cells import GRU, LSTM, Cell, State
from lightning_axosparse.support.torch_internals import batched


class _Stack(NamedTuple):
    """What torch's functions are told of the layers, in the order of their arguments."""

    parameters: list[Tensor]
    has_biases: bool
    number: int
    dropout: float
    training: bool
    bidirectional: bool

    @property
    def directions(self) -> int:
        return 1 + self.bidirectional

    @property
    def weights(self) -> list[Weights]:
        """The parameters by layer, and in it by direction."""
        size = 4 if self.has_biases else 2
        firsts = range(0, len(self.parameters), size)
        return [Weights(*self.parameters[first : first + size]) for first in firsts]


def lstm(*arguments: Any, **named: Any) -> Any:
    """Compute ``torch.lstm``.

    Returns:
        Outputs, last hidden and last cell states; NotImplemented if torch's function must run.
    """
    return NotImplemented if named else _recurrent(LSTM, arguments)


def gru(*arguments: Any, **named: Any) -> Any:
    """Compute ``torch.gru``.

    Returns:
        Outputs and last hidden states; NotImplemented if torch's function must run.
    """
    return NotImplemented if named else _recurrent(GRU, arguments)


def _recurrent(cell: type[Cell], arguments: tuple[Any, ...]) -> Any:
    if len(arguments) != 9:
        return NotImplemented
    if isinstance(arguments[3], bool):
        inputs, first, *others, batch_first = arguments
        steps = inputs.transpose(0, 1) if batch_first and inputs.dim() == 3 else inputs
        sizes = [steps.shape[1]] * len(steps)
    else:  # a packed sequence
        steps, batch_sizes, first, *others = arguments
        sizes = batch_sizes.tolist()
    state, stack = (first,) if isinstance(first, Tensor) else tuple(first), _Stack(*others)
    plain = _plain(steps, state, stack.parameters) and _fits(cell, steps, sizes, state, stack)
    if not plain or not kept_recurrent.chosen(cell, stack.weights):
        return NotImplemented
    outputs, last = _run(cell, steps.reshape(-1, steps.shape[-1]), sizes, state, stack)
    if steps.dim() == 3:
        outputs = outputs.view(*steps.shape[:2], outputs.shape[1])
        outputs = outputs.transpose(0, 1) if batch_first else outputs
    return outputs, *last


def _plain(inputs: Any, state: tuple[Any, ...], parameters: list[Any]) -> bool:
    """Return whether all are tensors of one dtype on a CPU, of which weights alone are sparse."""
    operands = inputs, *state
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in operands) or batched(inputs):
        return False
    if autocast_dtype(inputs.device) not in (None, inputs.dtype):
        return False
    return all(t.is_cpu and t.dtype == inputs.dtype for t in (*operands, *parameters))


def _fits(cell: type[Cell], inputs: Tensor, sizes: list[int], state: State, stack: _Stack) -> bool:
    """Return whether shapes are those of layers without projections; torch's errors name others."""
    width, units, directions = inputs.shape[-1], state[0].shape[-1], stack.directions
    of_layers = [width] + [directions * units] * (stack.number - 1)
    rows = cell.gates * units
    expected = [
        shape
        for width in of_layers
        for _ in range(directions)
        for shape in ((rows, width), (rows, units), *[(rows,)] * (2 * stack.has_biases))
    ]
    states = [(stack.number * directions, sizes[0] if sizes else 0, units)] * cell.states
    return (
        inputs.numel() > 0
        and [tuple(parameter.shape) for parameter in stack.parameters] == expected
        and [tuple(part.shape) for part in state] == states
    )


def _run(
    cell: type[Cell], rows: Tensor, sizes: list[int], first: State, stack: _Stack
) -> tuple[Tensor, State]:
    """Compute the rows of all steps, layer by layer.

    Args:
        cell: LSTM or GRU.
        rows: the inputs of the first step's sequences, then those of the next, ``(rows, width)``.
        sizes: the number of sequences of each step.
        first: the first states, ``(layers * directions, sequences, units)`` each.
        stack: the layers.

    Returns:
        The last layer's outputs, and the last states of all layers.
    """
    states = list(zip(*(part.unbind() for part in first), strict=True))
    weights, directions, last = stack.weights, stack.directions, []
    for layer in range(stack.number):
        outputs = []
        for direction in range(directions):
            number, steps = layer * directions + direction, Steps(sizes, bool(direction))
            read = kept_recurrent.run(cell, steps, rows, states[number], weights[number])
            outputs.append(read[0])
            last.append(read[1])
        rows = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
        if stack.dropout and stack.training and layer < stack.number - 1:
            rows = torch.dropout(rows, stack.dropout, True)
    return rows, tuple(torch.stack(parts) for parts in zip(*last, strict=True))
