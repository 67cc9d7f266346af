"""Runs one layer of LSTM or GRU, in one direction, on the kept values of its weights.

The inputs of all steps are multiplied at once, the hidden states step by step. Backward, a step
again multiplies by the weight of hidden states alone; gradients of the inputs, weights and biases
are computed for all steps at once. ``benchmarks/overhead/recurrent.py`` measures it against torch's
layer on weights that are made dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_axosparse.sparse.kept_products import readable
from lightning_axosparse.sparse.linear import KeptProduct
from lightning_axosparse.sparse.materialize import DenseForm
from lightning_axosparse.sparse.recurrent_cells import GRU, LSTM, Cell, State
from lightning_axosparse.sparse.weight import SparseWeight
from lightning_axosparse.support.torch_internals import backward_transformed


class Limits(NamedTuple):
    """What layers must have to take less time here.

    Attributes:
        most_kept: the largest share of kept entries.
        fewest_units: the units of the smallest layers.
        fewest_in_inference: the same in ``torch.inference_mode``, where torch's loop is short. Not
            without gradients: recomputed layers must run in the same way both times.
    """

    most_kept: float
    fewest_units: int
    fewest_in_inference: int


LIMITS: dict[type[Cell], Limits] = {LSTM: Limits(0.25, 512, 512), GRU: Limits(0.3, 1, 512)}
"""torch's LSTM is one call of a library, its GRU is a loop over steps as here."""


class Weights(NamedTuple):
    """The parameters of a layer in one direction, under torch's names; matrices may be sparse."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None


@dataclass(frozen=True)
class Steps:
    """The steps of some sequences, whose rows lie one step after another in each tensor.

    Attributes:
        sizes: sequences that have a step; they are the first ones, and no more than one step
            before.
        reverse: whether the last step is computed first.
    """

    sizes: list[int]
    reverse: bool

    @property
    def order(self) -> Sequence[int]:
        """The steps in the order in which they are computed."""
        steps = range(len(self.sizes))
        return steps[::-1] if self.reverse else steps

    def before(self, first: Tensor, states: Tensor) -> Tensor:
        """Return the states before each step; ``states`` are those after it."""
        after, state, found = states.split(self.sizes), first, {}
        for step in self.order:
            found[step] = _first(state, self.sizes[step])
            state = _with_first(after[step], state)
        return torch.cat([found[step] for step in range(len(after))])


def chosen(cell: type[Cell], layers: Sequence[Weights]) -> bool:
    """Return whether layers that are computed together are to run here.

    A step must not make a weight dense, which would take longer than its product. The weights of
    inputs have one product for all steps, so they may: kept in narrow rows, or kept whole.

    Args:
        cell: LSTM or GRU.
        layers: their weights, at least one of which is sparse.
    """
    matrices = [weight for layer in layers for weight in layer[:2]]
    sparse = [weight for weight in matrices if isinstance(weight, SparseWeight)]
    recurrent = [layer.hh for layer in layers]
    if any(w.dtype != torch.float32 or w.dense_copy is not None for w in sparse):
        return False
    if not all(readable(w.entries, w.kept) for w in recurrent if isinstance(w, SparseWeight)):
        return False
    if any(weight.ways.compute != "auto" for weight in sparse):
        return all(weight.ways.compute == "sparse" for weight in sparse)
    if any(weight.ways.processor == "unmeasured" for weight in sparse):
        return False
    most, *fewest = LIMITS[cell]
    few = all(_share([weight]) <= most for weight in recurrent) and _share(matrices) <= most
    return few and recurrent[0].shape[1] >= fewest[torch.is_inference_mode_enabled()]


def run(
    cell: type[Cell], steps: Steps, inputs: Tensor, state: State, weights: Weights
) -> tuple[Tensor, State]:
    """Compute the hidden states of all steps.

    Args:
        cell: LSTM or GRU.
        steps: how the rows of the inputs are steps of sequences.
        inputs: ``(rows, width)``.
        state: the sequences' first state, ``(steps.sizes[0], units)`` each.
        weights: those of the layer.

    Returns:
        The hidden states, ``(rows, units)``, and each sequence's last state.
    """
    if torch.is_grad_enabled():
        outputs, *last = _Recurrence.apply(cell, steps, inputs, *state, *weights)  # type: ignore[no-untyped-call]
        return outputs, tuple(last)
    results, last_state = _forward(cell, steps, inputs, state, weights)
    return torch.cat([result[0] for result in results]), last_state


class _Recurrence(torch.autograd.Function):
    """The hidden states, and the last state, as a function of inputs, first state and weights."""

    @staticmethod
    def forward(
        ctx: Any, cell: type[Cell], steps: Steps, inputs: Tensor, *operands: Any
    ) -> tuple[Tensor, ...]:
        state, weights = operands[: cell.states], Weights(*operands[cell.states :])
        results, last = _forward(cell, steps, inputs, state, weights)
        rows = [torch.cat(parts) for parts in zip(*results, strict=True)]
        ctx.cell, ctx.steps = cell, steps
        # Not saved as activations are, which may be offloaded: the parameters stay anyway.
        ctx.sparse = [w if isinstance(w, SparseWeight) else None for w in weights]
        dense = [None if isinstance(w, SparseWeight) else w for w in weights]
        ctx.save_for_backward(inputs, *state, *dense, *rows)
        ctx.set_materialize_grads(False)
        return rows[0], *last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, *saved = ctx.saved_tensors
        cell, steps = ctx.cell, ctx.steps
        number = cell.states
        state, dense, rows = saved[:number], saved[number : number + 4], saved[number + 4 :]
        weights = Weights(*(s if d is None else d for s, d in zip(ctx.sparse, dense, strict=True)))
        call = _Call(cell, steps, inputs, tuple(state), weights, ctx.needs_input_grad[2:])
        if any(g is not None and backward_transformed(g) for g in gradients):
            return None, None, *call.differentiable_gradients(gradients)
        return None, None, *call.gradients(rows, gradients)


@dataclass(frozen=True)
class _Call:
    """A call whose gradients are computed: those of inputs, state and weights that are wanted."""

    cell: type[Cell]
    steps: Steps
    inputs: Tensor
    state: State
    weights: Weights
    wanted: tuple[bool, ...]

    def gradients(
        self, rows: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Compute them from what forward made of all steps, and the gradients of its results."""
        cell, weights, number = self.cell, self.weights, self.cell.states
        before = tuple(map(self.steps.before, self.state, rows))
        factors = cell.factors(before, tuple(rows[:number]), tuple(rows[number:]))
        for_state = self._through_steps(factors, gradients)
        for_hidden, for_inputs = factors[0].flatten(1), cell.for_inputs(factors)
        from_inputs, from_hidden = _product(weights.ih), _product(weights.hh)
        inputs, *_, ih, hh, bias_ih, bias_hh = self.wanted
        return [
            from_inputs.input_gradient(for_inputs) if inputs else None,
            *for_state,
            from_inputs.weight_gradient(for_inputs, self.inputs) if ih else None,
            from_hidden.weight_gradient(for_hidden, before[0]) if hh else None,
            for_inputs.sum(0) if bias_ih else None,
            for_hidden.sum(0) if bias_hh else None,
        ]

    def _through_steps(self, factors: State, gradients: Sequence[Tensor | None]) -> State:
        """Change the factors to gradients, and return those of the first state."""
        sizes, product = self.steps.sizes, _product(self.weights.hh)
        for_outputs, *for_last = gradients
        gradient = tuple(
            torch.zeros_like(part) if last is None else last
            for part, last in zip(self.state, for_last, strict=True)
        )
        added = None if for_outputs is None else for_outputs.split(sizes)
        by_step = list(zip(*(factor.split(sizes) for factor in factors), strict=True))
        for step in reversed(self.steps.order):
            hidden, *cells = [_first(part, sizes[step]) for part in gradient]
            if added is not None:
                hidden = hidden + added[step]
            past, others = self.cell.step_back((hidden, *cells), by_step[step])
            hidden = product.input_gradient(by_step[step][0].flatten(1))
            if past is not None:
                hidden += past
            gradient = tuple(map(_with_first, (hidden, *others), gradient))
        return gradient

    def differentiable_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute them as differentiable functions of all operands, by differentiating forward."""
        with torch.enable_grad():
            # Views, because a state may be computed from the inputs.
            inputs = self.inputs.view_as(self.inputs)
            state = tuple(part.view_as(part) for part in self.state)
            weights = Weights(*(None if w is None else w.view_as(w) for w in self.weights))  # type: ignore[arg-type]
            results, last = _forward(self.cell, self.steps, inputs, state, weights)
            outputs = torch.cat([result[0] for result in results]), *last
            given = [number for number, gradient in enumerate(gradients) if gradient is not None]
            operands: Any = zip((inputs, *state, *weights), self.wanted, strict=True)
            found = torch.autograd.grad(
                [outputs[number] for number in given],
                [operand for operand, wanted in operands if wanted],
                [gradients[number] for number in given],
                create_graph=True,
                allow_unused=True,
            )
        remaining = iter(found)
        return [next(remaining) if wanted else None for wanted in self.wanted]


def _forward(
    cell: type[Cell], steps: Steps, inputs: Tensor, state: State, weights: Weights
) -> tuple[list[State], State]:
    """Compute the last state and, for each step, that after it and what gradients need of it."""
    from_inputs = _product(weights.ih).forward(inputs, weights.bias_ih).split(steps.sizes)
    product, results = _product(weights.hh), {}
    for step in steps.order:
        active = tuple([_first(part, steps.sizes[step]) for part in state])
        from_hidden = product.forward(active[0], weights.bias_hh)
        after, kept = cell.step(from_inputs[step], from_hidden, active)
        state = tuple(map(_with_first, after, state))
        results[step] = *after, *kept
    return [results[step] for step in range(len(results))], state


class _Product(Protocol):
    """The product with the transposed of a weight, and its gradients."""

    def forward(self, inputs: Tensor, bias: Tensor | None) -> Tensor: ...

    def input_gradient(self, gradient: Tensor) -> Tensor: ...

    def weight_gradient(self, gradient: Tensor, inputs: Tensor) -> Tensor: ...


class _DenseProduct(NamedTuple):
    weight: Tensor

    def forward(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(inputs, self.weight, bias)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        return gradient @ self.weight

    def weight_gradient(self, gradient: Tensor, inputs: Tensor) -> Tensor:
        return gradient.t() @ inputs


class _SparseProduct(NamedTuple):
    weight: SparseWeight
    product: KeptProduct

    def forward(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return self.product.forward(inputs, self.weight.kept, bias)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        return self.product.input_gradient(gradient, gradient, self.weight.kept)

    def weight_gradient(self, gradient: Tensor, inputs: Tensor) -> Tensor:
        kept = self.product.values_gradient(gradient, inputs, self.weight.kept)
        geometry = torch.empty(self.weight.shape, dtype=kept.dtype, device="meta")
        return SparseWeight(kept, self.weight.entries, geometry)


def _product(weight: Tensor) -> _Product:
    """Return the product with kept values; where it must be differentiable, with the weight."""
    if not isinstance(weight, SparseWeight) or torch.is_grad_enabled():
        return _DenseProduct(weight)
    weight.check_unchanged()
    form = DenseForm(weight.dtype, ways=weight.ways)
    return _SparseProduct(weight, KeptProduct(weight.entries, form, by_rows=True))


def _first(rows: Tensor, number: int) -> Tensor:
    return rows if rows.size(0) == number else rows[:number]


def _with_first(first: Tensor, rows: Tensor) -> Tensor:
    """Return ``rows`` with other first ones."""
    number = first.size(0)
    return first if rows.size(0) == number else torch.cat((first, rows[number:]))


def _share(weights: Sequence[Tensor]) -> float:
    """Return the share of their entries that weights keep."""
    kept = (w.entries.nnz if isinstance(w, SparseWeight) else w.numel() for w in weights)
    return sum(kept) / sum(weight.numel() for weight in weights)
