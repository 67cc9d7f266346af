"""Rules for how the output of an operator depends on the samples of a micro-batch.

While a step runs on a micro-batch, each tensor outside the layers has one of these notes:

    ROWS        one row a sample along the first dimension, computed from that sample alone
    Total       a sum over samples, or a mean over a denominator
    EXTREME     whether all, or any, values are true; the smallest or the largest of them
    CONSTANT    the same for all micro-batches: parameters, buffers, numbers
    FILLED      one number in all entries, whatever the shape
    Unknown     anything else: samples are compared, counted, sorted, drawn at random

An operator's rule gives the note of its output by those of its inputs: for a loss
``((x - y) ** 2).mean()`` of two ROWS of shape (4, 3), ``sub`` and ``pow`` give ROWS, and ``mean``
a Total with denominator 12. The table of all rules is at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_axosparse.support.torch_internals import (
    argument,
    is_mutable,
    is_pointwise,
    is_random,
    is_view,
    name_of,
    tensors_in,
)


class Total(NamedTuple):
    """The note of a sum or a mean over samples.

    Attributes:
        kind: whether the batch has the sum of its micro-batches' values, or their weighted mean.
        denominators: of a mean; several where means are added up.
    """

    kind: Literal["sum", "mean"]
    denominators: frozenset[float] = frozenset()


class Unknown(NamedTuple):
    """The note of a tensor that cannot be tracked, with the reason."""

    reason: str = ""


UNKNOWN = Unknown()
ROWS: Literal["rows"] = "rows"
EXTREME: Literal["extreme"] = "extreme"
CONSTANT: Literal["constant"] = "constant"
FILLED: Literal["filled"] = "filled"

Note: TypeAlias = Total | Unknown | Literal["rows", "extreme", "constant", "filled"]


class Call(NamedTuple):
    """A call of an operator on a micro-batch of ``samples``.

    ``tensors`` are the tensors among its arguments, and ``notes`` their notes.
    """

    operator: Operator
    args: Any
    kwargs: Any
    tensors: Sequence[Tensor]
    notes: Sequence[Note]
    output: Any
    samples: int

    def argument(self, *names: str) -> Any:
        """Return the argument of one of these names, or its default."""
        return argument(self.operator.function, names, self.args, self.kwargs)

    def dims(self) -> list[int]:
        """Return the dimensions along which entries are combined."""
        dims = self.argument("dim", "dims")
        count = max(tensor.dim() for tensor in [self.tensors[0], *tensors_in(self.output)])
        dims = range(count) if dims is None or dims == [] else dims
        return [dim % max(1, count) for dim in ([dims] if isinstance(dims, int) else dims)]

    def are_constant(self, first: int = 0, end: int | None = None) -> bool:
        """Whether the tensors from ``first`` to ``end`` are the same for all micro-batches."""
        return all(note in (CONSTANT, FILLED) for note in self.notes[first:end])

    def rows(self, count: int | None = None) -> Note | None:
        """Return ROWS if some tensors are aligned rows and the others the same for all samples."""
        pairs = list(zip(self.tensors[:count], self.notes[:count], strict=True))
        dims, lengths = max(tensor.dim() for tensor, _ in pairs), set()
        for tensor, note in pairs:
            if note == ROWS and tensor.dim() == dims:
                lengths.add(len(tensor))
            elif note == CONSTANT and tensor.dim() == dims > 0:
                if len(tensor) > 1 and tensor.stride(0):
                    return None
            elif note not in (CONSTANT, FILLED):
                return None
        return ROWS if len(lengths) == 1 else None


Rule: TypeAlias = Callable[[Call], Note | None]


def _mean(count: float) -> Total:
    return Total("mean", frozenset([float(count)]))


def _linear(call: Call) -> Note | None:
    """A sum of totals, or one total times a constant."""
    totals = [note for note in call.notes if isinstance(note, Total)]
    rounds = call.tensors[0].is_floating_point() and not call.output.is_floating_point()
    if not totals or rounds:
        return call.rows()
    kind, last = totals[0].kind, call.args[-1]
    others = [note for note in call.notes if not isinstance(note, Total)]
    if any(total.kind != kind for total in totals) or {*others} - {CONSTANT, FILLED}:
        return None
    if call.operator.name == "mul":
        return totals[0] if len(totals) == 1 else None
    if kind == "sum":
        number = last if isinstance(last, (int, float)) else 0
        # A small number may keep a denominator from being zero.
        if others or (number and not 0 < number <= 1e-5):
            return None
    return Total(kind, frozenset().union(*(total.denominators for total in totals)))


def _quotient(call: Call) -> Note | None:
    """A quotient; a sum divided by a number of samples or entries is a mean."""
    above, below = call.notes[0], call.args[1]
    if not isinstance(above, Total) or call.kwargs:  # It may round.
        return call.rows()
    if not isinstance(below, Tensor):
        is_samples = above.kind == "sum" and below >= call.samples and below % call.samples == 0
        return _mean(below) if is_samples else above
    is_count = call.notes[1] == Total("sum") and below.numel() == 1 and not below.requires_grad
    if above.kind == "sum" and is_count:
        return _mean(float(below))
    return above if call.are_constant(1) else None


def _clamped(call: Call) -> Note | None:
    """Rows, or a denominator that a minimum does not change, and so does not in the batch."""
    before, after = call.tensors[0], call.output
    is_count = call.notes == [Total("sum")] and not before.requires_grad and after is not before
    keeps = is_count and call.argument("max") is None and torch.equal(before, after)
    return Total("sum") if keeps else call.rows()


def _equal(call: Call) -> Note | None:
    """A comparison of rows, or of the number of true values with all, which is ``all()``."""
    is_count = call.notes == [Total("sum")] and not call.tensors[0].is_floating_point()
    return EXTREME if is_count and call.args[1] % call.samples == 0 else call.rows()


def _extreme(call: Call) -> Note | None:
    """A reduction of all entries to an extreme, or of each row."""
    return EXTREME if call.notes == [ROWS] and call.argument("dim") is None else _along(call)


def _along(call: Call) -> Note | None:
    """An operator that combines entries within each row."""
    return None if 0 in call.dims() else call.rows()


def _reduced(call: Call) -> Note | None:
    """A sum or a mean."""
    dims, shape = call.dims(), call.tensors[0].shape
    if isinstance(call.notes[0], Total):
        return call.notes[0]
    if call.notes != [ROWS] or 0 not in dims:
        return call.rows()
    is_mean = call.operator.name == "mean"
    return _mean(math.prod(shape[dim] for dim in dims)) if is_mean else Total("sum")


def _loss(call: Call) -> Note | None:
    """A loss with a reduction; for losses of classes, torch also returns the denominator."""
    has_count = not isinstance(call.output, Tensor)
    is_alone = call.notes[:2] == [ROWS, ROWS] if has_count else call.rows(2) == ROWS
    if not is_alone or not call.are_constant(2):  # Class weights may be counted in samples.
        return None
    count = call.output[1] if has_count else max(tensor.numel() for tensor in call.tensors[:2])
    return (ROWS, _mean(float(count)), Total("sum"))[call.argument("reduction")]


def _view(call: Call) -> Note | None:
    """Rows if the first dimension still spans all samples, and does not divide one."""
    if call.notes[0] != ROWS:
        return call.notes[0]
    whole = call.tensors[0]
    span, stride = len(whole) * whole.stride(0), whole.stride(0)
    for part in tensors_in(call.output):
        step = part.stride(0) if part.dim() else 0
        spans = step and len(part) * step == span
        keeps = spans and not (stride % step and span // call.samples % step)
        if call.samples == 1:  # Any dimension may span it.
            keeps = part.dim() > 0 and (len(part) == len(whole) or part.numel() == whole.numel())
        if not keeps:
            return None
    return ROWS


def _joined(call: Call) -> Note | None:
    return _linear(call) or _along(call)


def _batched(call: Call) -> Note | None:
    """An operator on each row of one tensor, with constant others."""
    place = 1 if call.operator.name in ("addmm", "embedding") else 0
    is_alone = call.are_constant(0, place) and call.are_constant(place + 1)
    if not is_alone or call.notes[place] != ROWS:
        return None
    return ROWS if len(call.tensors[place]) == len(tensors_in(call.output)[0]) else None


def _indexed(call: Call) -> Note | None:
    """Rows of a table, or rows selected by a mask."""
    if call.args[1][0] is None or len(call.tensors) != 2 or call.notes[1] != ROWS:
        return None
    is_mask = call.tensors[1].dtype is torch.bool
    return ROWS if (call.notes[0] == ROWS if is_mask else call.are_constant(0, 1)) else None


def _filled(call: Call) -> Note | None:
    """A new tensor, or one that is overwritten, with one number in all entries."""
    return FILLED if call.are_constant(1) else None


def _unknown(call: Call) -> None:
    """An operator that is not in the table."""


_RULES: dict[Rule, str] = {
    _filled: "zeros ones full scalar_tensor zero fill zeros_like ones_like full_like new_zeros "
    "new_ones new_full empty empty_like new_empty",
    _linear: "add sub rsub mul neg clone to_copy",
    _quotient: "div",
    _clamped: "clamp clamp_min",
    _equal: "eq",
    _reduced: "sum mean",
    _extreme: "all any is_all_true is_any_true aminmax",
    _along: "amax amin argmax argmin max min median var std prod norm linalg_vector_norm "
    "logsumexp softmax log_softmax cumsum flip roll sort topk gather scatter",
    _loss: "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits nll_loss_forward nll_loss2d_forward",
    _batched: "mm addmm embedding convolution avg_pool2d constant_pad_nd native_group_norm "
    "native_layer_norm cdist_forward",
    _joined: "cat stack",
    _indexed: "index",
    _view: "unsafe_view",
    Call.rows: "copy log_sigmoid_forward masked_select",
}
"""The operators of each rule, besides those that torch marks as pointwise or as views."""

_RULE_OF = {name: rule for rule, names in _RULES.items() for name in names.split()}


class Operator(NamedTuple):
    """An operator of torch and its rule.

    Attributes:
        function: torch's overload.
        name: without namespace and overload; the same for the in-place variant.
        rule: gives the note of the output.
        draws: whether it draws random numbers.
        writes: whether it changes an argument in place.
        spreads: whether FILLED inputs give a FILLED output.
    """

    function: Any
    name: str
    rule: Rule
    draws: bool
    writes: bool
    spreads: bool


@cache
def operator_of(function: Any) -> Operator:
    """Look up the rule of an operator."""
    name, draws = name_of(function).removeprefix("aten::").strip("_"), is_random(function)
    default = _view if is_view(function) else Call.rows if is_pointwise(function) else _unknown
    rule = _unknown if draws else _RULE_OF.get(name, default)
    spreads = is_pointwise(function) or rule in (_view, _linear)
    return Operator(function, name, rule, draws, is_mutable(function), spreads)


def output_note(call: Call) -> Note:
    """Return the note of an operator's output."""
    operator = call.operator
    if {*call.notes} <= {CONSTANT, FILLED} and operator.rule is not _filled and not operator.draws:
        return FILLED if operator.spreads and {*call.notes} == {FILLED} else CONSTANT
    note = operator.rule(call)
    if note is not None:
        return note
    for each in call.notes:
        if isinstance(each, Unknown) and each.reason:
            return each
    action = "draws random numbers" if operator.draws else "is not known to treat each sample alone"
    return Unknown(f"torch.{operator.name} {action}")
