"""What operators make of the samples of a micro-batch, by their names.

While a step runs on a micro-batch, each tensor outside the layers is one of the following:

    ROWS        values of samples, which lie along the first dimension, each computed from its own
    Total       added up over samples, or averaged over a denominator
    EXTREME     whether all, or any, values are true; the least and the largest of them
    CONSTANT    the same for all micro-batches: parameters, buffers, numbers
    FILLED      one number in all places, however many there are
    Unknown     anything else: samples are compared, counted, sorted, drawn at random

What an operator makes of them says its rule; the table of all rules is at the end.
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
    is_pointwise,
    is_random,
    is_view,
    name_of,
    tensors_in,
)


class Total(NamedTuple):
    """What was made of values of all samples.

    Attributes:
        kind: whether the batch has the sum of micro-batches, or the mean by their denominators.
        counts: these denominators.
    """

    kind: Literal["sum", "mean"]
    counts: frozenset[float] = frozenset()


class Unknown(NamedTuple):
    """What cannot be followed, and why."""

    reason: str = ""


UNKNOWN = Unknown()
ROWS: Literal["rows"] = "rows"
EXTREME: Literal["extreme"] = "extreme"
CONSTANT: Literal["constant"] = "constant"
FILLED: Literal["filled"] = "filled"

Note: TypeAlias = Total | Unknown | Literal["rows", "extreme", "constant", "filled"]


class Call(NamedTuple):
    """A call of an operator on a micro-batch of some samples, and what it was given."""

    operator: Operator
    args: Any
    kwargs: Any
    given: Sequence[Tensor]
    notes: Sequence[Note]
    output: Any
    samples: int

    def argument(self, *names: str) -> Any:
        """The argument of one of these names, or its default."""
        return argument(self.operator.function, names, self.args, self.kwargs)

    def dims(self) -> list[int]:
        """The dimensions along which it mixes entries."""
        dims = self.argument("dim", "dims")
        count = max(tensor.dim() for tensor in [self.given[0], *tensors_in(self.output)])
        dims = range(count) if dims is None or dims == [] else dims
        return [dim % max(1, count) for dim in ([dims] if isinstance(dims, int) else dims)]

    def are_constant(self, first: int = 0, end: int | None = None) -> bool:
        """Whether some of its tensors are."""
        return all(note in (CONSTANT, FILLED) for note in self.notes[first:end])

    def rows(self, count: int | None = None) -> Note | None:
        """ROWS if its first tensors are aligned rows, and others the same for all samples."""
        pairs = list(zip(self.given[:count], self.notes[:count], strict=True))
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
    """Sums of totals, and one total times a constant."""
    totals = [note for note in call.notes if isinstance(note, Total)]
    rounds = call.given[0].is_floating_point() and not call.output.is_floating_point()
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
        # Something small keeps a denominator from being zero.
        if others or (number and not 0 < number <= 1e-5):
            return None
    return Total(kind, frozenset().union(*(total.counts for total in totals)))


def _quotient(call: Call) -> Note | None:
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
    """Rows, or a denominator that a minimum leaves as it is, as it does that of the batch."""
    before, after = call.given[0], call.output
    is_count = call.notes == [Total("sum")] and not before.requires_grad and after is not before
    keeps = is_count and call.argument("max") is None and torch.equal(before, after)
    return Total("sum") if keeps else call.rows()


def _equal(call: Call) -> Note | None:
    """Whether all values hold, by how many of them do."""
    is_count = call.notes == [Total("sum")] and not call.given[0].is_floating_point()
    return EXTREME if is_count and call.args[1] % call.samples == 0 else call.rows()


def _extreme(call: Call) -> Note | None:
    return EXTREME if call.notes == [ROWS] and call.argument("dim") is None else _along(call)


def _along(call: Call) -> Note | None:
    return None if 0 in call.dims() else call.rows()


def _reduced(call: Call) -> Note | None:
    dims, shape = call.dims(), call.given[0].shape
    if isinstance(call.notes[0], Total):
        return call.notes[0]
    if call.notes != [ROWS] or 0 not in dims:
        return call.rows()
    is_mean = call.operator.name == "mean"
    return _mean(math.prod(shape[dim] for dim in dims)) if is_mean else Total("sum")


def _loss(call: Call) -> Note | None:
    """Losses with a reduction; of classes torch also returns the denominator."""
    has_count = not isinstance(call.output, Tensor)
    is_alone = call.notes[:2] == [ROWS, ROWS] if has_count else call.rows(2) == ROWS
    if not is_alone or not call.are_constant(2):  # Such as weights that were counted in samples.
        return None
    count = call.output[1] if has_count else max(tensor.numel() for tensor in call.given[:2])
    return (ROWS, _mean(float(count)), Total("sum"))[call.argument("reduction")]


def _view(call: Call) -> Note | None:
    """Rows if the first dimension still spans all samples, and whole ones."""
    if call.notes[0] != ROWS:
        return call.notes[0]
    whole = call.given[0]
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
    """Operators on the samples in one tensor, whose others are constant."""
    place = 1 if call.operator.name in ("addmm", "embedding") else 0
    is_alone = call.are_constant(0, place) and call.are_constant(place + 1)
    if not is_alone or call.notes[place] != ROWS:
        return None
    return ROWS if len(call.given[place]) == len(tensors_in(call.output)[0]) else None


def _indexed(call: Call) -> Note | None:
    """Rows of a table, or rows that a mask chooses."""
    if call.args[1][0] is None or len(call.given) != 2 or call.notes[1] != ROWS:
        return None
    is_mask = call.given[1].dtype is torch.bool
    return ROWS if (call.notes[0] == ROWS if is_mask else call.are_constant(0, 1)) else None


def _filled(call: Call) -> Note | None:
    """One number; also what is to be filled."""
    return FILLED if call.are_constant(1) else None


def _unknown(call: Call) -> None:
    """Operators that are not in the table."""


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
"""What operators make of samples. Those that torch knows to be pointwise, or views, are besides."""

_RULE_OF = {name: rule for rule, names in _RULES.items() for name in names.split()}


class Operator(NamedTuple):
    """An operator.

    Attributes:
        function: torch's.
        name: the same where it works in place.
        rule: what it makes of samples.
        draws: whether it draws random numbers.
        writes: whether it changes an argument in place.
        spreads: whether it makes one number in all places of one.
    """

    function: Any
    name: str
    rule: Rule
    draws: bool
    writes: bool
    spreads: bool


@cache
def known(function: Any) -> Operator:
    """What is known of an operator."""
    name, draws = name_of(function).removeprefix("aten::").strip("_"), is_random(function)
    default = _view if is_view(function) else Call.rows if is_pointwise(function) else _unknown
    rule = _unknown if draws else _RULE_OF.get(name, default)
    spreads = is_pointwise(function) or rule in (_view, _linear)
    return Operator(function, name, rule, draws, function._schema.is_mutable, spreads)


def made_of(call: Call) -> Note:
    """What an operator makes of what it was given."""
    operator = call.operator
    if {*call.notes} <= {CONSTANT, FILLED} and operator.rule is not _filled and not operator.draws:
        return FILLED if operator.spreads and {*call.notes} == {FILLED} else CONSTANT
    note = operator.rule(call)
    if note is not None:
        return note
    for each in call.notes:
        if isinstance(each, Unknown) and each.reason:
            return each
    does = "draws random numbers" if operator.draws else "is not known to treat each sample alone"
    return Unknown(f"torch.{operator.name} {does}")
