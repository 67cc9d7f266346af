"""Defines what LSTM and GRU compute in a step, and backward, apart from the two matrix products.

Gates lie in the order of torch's weights. With the hidden state h, the cell state c and the
products x of the inputs and y of the hidden state, biases included:

    LSTM   i, f, o = sigmoid(x + y); g = tanh(x + y); c' = f c + i g; h' = o tanh(c')
    GRU    r, z = sigmoid(x + y); n = tanh(x + r y); h' = (1 - z) n + z h

The gradients of a step are products of the gradient of its state with factors that do not depend on
it, so the factors of all steps are computed together.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

State = tuple[Tensor, ...]
"""The hidden states of some sequences and, of an LSTM, their cell states: ``(n, units)`` each."""


class Cell(Protocol):
    """A kind of recurrent layer.

    Attributes:
        gates: the rows of a weight that a unit has.
        states: the tensors of a state.
    """

    gates: int
    states: int

    @staticmethod
    def step(from_inputs: Tensor, from_hidden: Tensor, state: State) -> tuple[State, State]:
        """Compute one step, differentiably.

        Args:
            from_inputs: the product of the inputs, ``(n, gates * units)``.
            from_hidden: that of the hidden state, likewise.
            state: the state before.

        Returns:
            The state after the step, and what :meth:`factors` needs of it.
        """

    @staticmethod
    def factors(before: State, after: State, kept: State) -> State:
        """Compute the factors of the gradients, for steps that lie one after another.

        Args:
            before: the states before the steps.
            after: those after them.
            kept: what :meth:`step` returned for this.
        """

    @staticmethod
    def step_back(gradient: State, factors: State) -> tuple[Tensor | None, State]:
        """Multiply one step's factors by the gradient of its state, some of them in place.

        The first becomes the gradient of the hidden state's product, ``(n, gates, units)``.

        Returns:
            What is added to the gradient of the hidden state before, beside that of the product,
            and the gradient of the other states before.
        """

    @staticmethod
    def for_inputs(factors: State) -> Tensor:
        """Return the gradient of the inputs' product from the factors that steps have changed."""


class LSTM:
    """Long short-term memory."""

    gates, states = 4, 2

    @staticmethod
    def step(from_inputs: Tensor, from_hidden: Tensor, state: State) -> tuple[State, State]:
        """See :class:`Cell`."""
        i, f, g, o = (from_inputs + from_hidden).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cell = torch.addcmul(f * state[1], i, g)
        return (o * cell.tanh(), cell), (i, f, g, o)

    @staticmethod
    def factors(before: State, after: State, kept: State) -> State:
        """See :class:`Cell`; the others lead from h' to c', and from c' to c."""
        i, f, g, o = kept
        seen = after[1].tanh()
        gates = i.new_empty(len(i), 4, i.shape[1])
        torch.mul(_sigmoid_slope(i), g, out=gates[:, 0])
        torch.mul(_sigmoid_slope(f), before[1], out=gates[:, 1])
        torch.mul(_tanh_slope(g), i, out=gates[:, 2])
        torch.mul(_sigmoid_slope(o), seen, out=gates[:, 3])
        return gates, _tanh_slope(seen).mul_(o), f

    @staticmethod
    def step_back(gradient: State, factors: State) -> tuple[Tensor | None, State]:
        """See :class:`Cell`."""
        hidden, cell = gradient
        gates, to_cell, f = factors
        cell = torch.addcmul(cell, hidden, to_cell)
        gates[:, :3].mul_(cell.unsqueeze(1))
        gates[:, 3].mul_(hidden)
        return None, (cell.mul_(f),)

    @staticmethod
    def for_inputs(factors: State) -> Tensor:
        """See :class:`Cell`; it is that of the hidden state's product."""
        return factors[0].flatten(1)


class GRU:
    """Gated recurrent unit."""

    gates, states = 3, 1

    @staticmethod
    def step(from_inputs: Tensor, from_hidden: Tensor, state: State) -> tuple[State, State]:
        """See :class:`Cell`."""
        (hidden,) = state
        units = hidden.shape[1]
        x, x_new = from_inputs.split([2 * units, units], 1)
        y, y_new = from_hidden.split([2 * units, units], 1)
        r, z = (x + y).sigmoid().chunk(2, 1)
        n = torch.addcmul(x_new, r, y_new).tanh()
        return (torch.lerp(n, hidden, z),), (r, z, n, y_new)

    @staticmethod
    def factors(before: State, after: State, kept: State) -> State:
        """See :class:`Cell`; the others lead from h' to the inputs' product for n, and to h."""
        r, z, n, y_new = kept
        gates = n.new_empty(len(n), 3, n.shape[1])
        new = _tanh_slope(n).mul_(1 - z)
        torch.mul(_sigmoid_slope(r).mul_(y_new), new, out=gates[:, 0])
        torch.mul(_sigmoid_slope(z), before[0] - n, out=gates[:, 1])
        torch.mul(new, r, out=gates[:, 2])
        return gates, new, z

    @staticmethod
    def step_back(gradient: State, factors: State) -> tuple[Tensor | None, State]:
        """See :class:`Cell`."""
        (hidden,) = gradient
        gates, new, z = factors
        gates.mul_(hidden.unsqueeze(1))
        new.mul_(hidden)
        return hidden * z, ()

    @staticmethod
    def for_inputs(factors: State) -> Tensor:
        """See :class:`Cell`; for n it is without the factor r."""
        gates, new, _ = factors
        return torch.cat((gates[:, :2].flatten(1), new), 1)


def _sigmoid_slope(value: Tensor) -> Tensor:
    """Return the derivative of a sigmoid from its value."""
    return torch.addcmul(value, value, value, value=-1)


def _tanh_slope(value: Tensor) -> Tensor:
    """Return the derivative of a hyperbolic tangent from its value."""
    return torch.addcmul(value.new_ones(()), value, value, value=-1)
