"""Finds out, operator by operator, whether a loss is a mean or a sum over samples.

Only such a loss can be differentiated micro-batch by micro-batch. While a step runs on one, each
tensor outside the layers is one of the following; what an operator makes of them follows from its
arguments, and of an operator that is not listed here it is unknown:

    Rows        values of samples, each computed from its own sample alone
    Total       added up over samples, or averaged over a denominator
    CONSTANT    the same for all micro-batches: parameters, buffers, numbers
    unknown     anything else: samples are compared, counted, sorted, drawn at random

So it is found which way to try. Whether it gives the loss and the gradient of the whole batch is
compared (``strategy.step.comparison``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.joining import Axis
from lightning_axosparse.pipeline.rng import SampledNumbers
from lightning_axosparse.support.torch_internals import (
    PausableOperatorMode,
    is_pointwise,
    is_random,
    mutated_arguments,
    name_of,
    storage_id,
    tensors_in,
)


class Rows(NamedTuple):
    """Values of samples.

    Attributes:
        dim: the dimension along which the samples lie.
        views: how often all samples follow one another in it.
        chosen: a number for the mask that has chosen some of the rows; 0 if all are there.
    """

    dim: int
    views: int = 1
    chosen: int = 0


class Total(NamedTuple):
    """What was made of values of all samples.

    Attributes:
        kind: whether the batch has the sum of micro-batches, or the mean by their denominators.
        counts: these denominators.
        has_constant: whether something was added that is the same in all micro-batches.
        divisor: what is counted, where a minimum was put to a denominator.
        entries: how many entries it has if all of them are 0 or 1; else 0.
    """

    kind: Literal["sum", "mean"]
    counts: frozenset[float] = frozenset()
    has_constant: bool = False
    divisor: float | None = None
    entries: int = 0


VOTE: Literal["vote"] = "vote"
"""Whether something holds for all, or any, values: where micro-batches agree, so does the batch."""

BOUND: Literal["bound"] = "bound"
"""The least or largest of all values, of which the same is true."""

CONSTANT: Literal["constant"] = "constant"
FILLED: Literal["filled"] = "filled"
"""The same for all micro-batches; and one number in all places, however many there are."""

Note = Rows | Total | Literal["vote", "bound", "constant", "filled"] | None


class InexactError(BaseException):
    """Ends a step that cannot be differentiated by parts; no ``except Exception`` swallows it."""


class Call(NamedTuple):
    """A call of an operator."""

    tracker: SampleTracker
    args: Any
    kwargs: Any
    given: Sequence[Tensor]
    notes: Sequence[Note]
    output: Any

    def argument(self, place: int, name: str, default: Any) -> Any:
        """An argument; torch leaves out those that equal their defaults."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def dims(self, place: int, default: Any = None) -> list[int]:
        """The dimensions that an argument names; by default all."""
        dims, count = self.argument(place, "dim", default), self.given[0].dim()
        dims = range(count) if dims is None or dims == [] else dims
        return [dim % max(1, count) for dim in ([dims] if isinstance(dims, int) else dims)]

    def rows(self, dims: int | None = None, among: slice = slice(None)) -> Rows | None:
        """The rows that operands have in common, in a result of so many dimensions."""
        tensors, notes = self.given[among], self.notes[among]
        dims = max(tensor.dim() for tensor in tensors) if dims is None else dims
        pairs = list(zip(tensors, notes, strict=True))
        found = {
            (note._replace(dim=note.dim + dims - tensor.dim()), tensor.shape[note.dim])
            for tensor, note in pairs
            if isinstance(note, Rows)
        }
        if len(found) != 1:
            return None
        rows = found.pop()[0]
        for tensor, note in pairs:
            dim = rows.dim - (dims - tensor.dim())
            spreads = dim < 0 or tensor.shape[dim] == 1 or tensor.stride(dim) == 0
            if not (isinstance(note, Rows) or note == FILLED or (note == CONSTANT and spreads)):
                return None
        return rows


class SampleTracker(PausableOperatorMode):
    """Follows what a step makes of the samples of a micro-batch, outside the layers.

    Args:
        constants: tensors of the module.
        may_guess: whether it goes on where a loss cannot be followed.

    Attributes:
        samples: of the micro-batch.
        functions: a hash of the operators that were called.
        program: the same, and of the numbers that they were given.
        votes: a hash of what held for all, or any, values, and of what was called since then.
    """

    def __init__(self, constants: Sequence[Tensor] = (), may_guess: bool = False) -> None:
        super().__init__()
        self._may_guess = may_guess
        self._constants = {_key(each)[0] for each in constants}
        self._notes: dict[Any, tuple[Tensor, Note]] = {}
        self._masks: dict[Any, int] = {}
        self._reasons: dict[Any, str] = {}
        self.samples, self.functions, self.program, self.votes = 0, 0, 0, 0
        self._numbers: SampledNumbers | None = None
        self._extracted = ""
        self._is_end, self._has_voted = False, False

    def forget(self) -> None:
        """Drop the tensors that were followed."""
        self._notes, self._masks, self._reasons = {}, {}, {}

    def begin(self, samples: int, numbers: SampledNumbers | None = None) -> None:
        """Begin to follow a run of the step on a micro-batch.

        Args:
            samples: of the micro-batch.
            numbers: gives it its random numbers; None if it draws others than the batch.
        """
        self.samples, self._numbers, self._extracted = samples, numbers, ""
        self.begin_end()
        self._is_end, self._has_voted = False, False
        self.forget()

    def begin_end(self) -> None:
        """Take in that the step goes on behind the last layer."""
        self.functions, self.program, self.votes, self._is_end = 0, 0, 0, True

    def add(self, tensor: Tensor, layout: object) -> None:
        """Say how the samples lie in something that a layer gives, or that is in the batch."""
        if isinstance(layout, Axis):
            self._notes[_key(tensor)] = tensor, Rows(layout.dim, layout.views)
        elif layout == "alike":
            self._notes[_key(tensor)] = tensor, CONSTANT

    def of_tensor(self, tensor: Tensor) -> Note:
        """What a tensor is."""
        return self._of(tensor, _key(tensor))

    def _of(self, tensor: Tensor, key: Any) -> Note:
        if key in self._notes:
            return self._notes[key][1]
        is_constant = isinstance(tensor, nn.Parameter) or key[0] in self._constants
        return CONSTANT if is_constant else None

    def reason(self, tensor: Tensor) -> str:
        """Why it is not known what a tensor is."""
        return self._reasons.get(_key(tensor), "it is made of something else than samples")

    def mask_number(self, mask: Tensor) -> int:
        """A number that tells apart what different masks have chosen."""
        return self._masks.setdefault(_key(mask), len(self._masks) + 1)

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator, and note what it makes."""
        given = tensors_in((args, kwargs))
        keys = [_key(tensor) for tensor in given]
        notes = [self._of(*each) for each in zip(given, keys, strict=True)]
        numbers = [each for each in args if isinstance(each, (int, float))]
        numbers = [each for each in numbers if each == each]  # NaN is never the same number.
        if func is not torch.ops.aten.detach.default:  # It computes nothing.
            self.functions = hash((self.functions, func))
            self.program = hash((self.program, func, *numbers))
            if self._has_voted:
                self.votes = hash((self.votes, func, *numbers))
        written = [t for t in mutated_arguments(func, args, kwargs) if isinstance(t, Tensor)]
        writes = any(_key(each)[0] in self._constants for each in written)
        if writes and not self._may_guess:
            raise InexactError(f"{_name(func)} writes to a tensor of the module")
        output = func(*args, **kwargs)
        made = tensors_in(output)
        of_made = [_key(tensor) for tensor in made]
        note = self._noted(func, Call(self, args, kwargs, given, notes, output))
        is_alias = len(made) == 1 and of_made[0] in keys and not written
        if self._extracted and isinstance(note, Total) and not is_alias:
            note = None  # What was made of that number cannot be followed.
        if note is None:
            unknown = (self._reasons.get(k) for k, n in zip(keys, notes, strict=True) if not n)
            reason = next(filter(None, unknown), "") or self._extracted or _reason(func)
            self._reasons.update(dict.fromkeys(of_made, reason))
        for tensor in written:  # What shares its memory is something else now.
            memory = _key(tensor)[0]
            keeps = isinstance(note, Rows) or note == FILLED
            for key in [key for key in self._notes if key[0] == memory]:
                if not (keeps and isinstance(self._notes[key][1], Rows)):
                    del self._notes[key]
        count = 1 if isinstance(note, Total) else len(made)
        for key, tensor in zip(of_made[:count], made, strict=False):
            self._notes[key] = tensor, note
        return output

    def _noted(self, func: Any, call: Call) -> Note:
        name = _name(func).removeprefix("torch.")
        constant = all(note in (CONSTANT, FILLED) for note in call.notes)
        if name == "local_scalar_dense":
            self._take(call, constant)
            return None
        if is_random(func):
            return self._drawn(call)
        if name in _FILLING and all(note in (CONSTANT, FILLED) for note in call.notes[1:]):
            if not call.notes:
                self.program = hash((self.program, call.output.shape))
            return FILLED
        is_view = bool(call.given) and isinstance(call.output, Tensor)
        is_view = is_view and _key(call.output)[0] == _key(call.given[0])[0]
        is_data = name == "lift_fresh" and call.notes == [None]
        if is_data or (constant and not name.startswith(("empty", "new_empty"))):
            if is_data or not call.notes:  # Of numbers: those of samples differ in micro-batches.
                data = [t.tolist() for t in tensors_in(call.output) if t.numel() <= 4096]
                self.program = hash((self.program, str(data)))
            spreads = is_view or is_pointwise(func) or _RULES.get(name) is _alike
            is_filled = spreads and bool(call.notes) and all(n == FILLED for n in call.notes)
            is_number = is_data and call.output.dim() == 0
            return FILLED if is_filled or is_number else CONSTANT
        rule = _RULES.get(name) or (_pointwise if is_pointwise(func) else None)
        if rule is None and is_view:
            rule = _view
        return None if rule is None else rule(call)

    def _take(self, call: Call, constant: bool) -> None:
        """Take in that the step takes a number out of a tensor."""
        if call.notes in ([VOTE], [BOUND]):
            self._has_voted = True
            self.votes = hash((self.votes, call.output if call.notes == [VOTE] else 0))
        elif isinstance(call.output, bool) and self._is_end and not constant:
            if not self._may_guess:
                raise InexactError("it decides by values of the samples")
        elif not constant:
            self._extracted = "it takes numbers out of samples before the loss is computed"

    def _drawn(self, call: Call) -> Note:
        """What random numbers are, of which the batch has as many as its micro-batches."""
        numbers = self._numbers
        if numbers is None or numbers.problem or not isinstance(call.output, Tensor):
            return None
        return CONSTANT if numbers.dim is None else Rows(numbers.dim)


def _key(tensor: Tensor) -> Any:
    """The memory that a tensor is: torch makes several objects of one tensor."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    memory = storage_id(tensor.untyped_storage())
    return memory, tensor.storage_offset(), tensor.shape, tensor.stride()


def _name(func: Any) -> str:
    return "torch." + name_of(func).removeprefix("aten::").strip("_")


def _reason(func: Any) -> str:
    if is_random(func):
        return f"{_name(func)} draws random numbers"
    return f"{_name(func)} is not known to treat each sample alone"


def _pointwise(call: Call) -> Note:
    total = next((note for note in call.notes if isinstance(note, Total)), None)
    if total is not None or not isinstance(call.output, Tensor):
        return None
    return call.rows(call.output.dim())


def _linear(call: Call) -> Note:
    """Sums and differences: of totals, too."""
    totals = [note for note in call.notes if isinstance(note, Total)]
    if not totals or any(isinstance(n, Rows) or n in (None, VOTE) for n in call.notes):
        return _pointwise(call)
    first, number = totals[0], call.args[-1] if isinstance(call.args[-1], (int, float)) else 0
    if any(total.kind != first.kind for total in totals):
        return None
    if len(totals) == 1 and 0 < number <= 1e-5 and first.kind == "sum":
        return first  # Something small that keeps a denominator from being zero.
    if len({total.divisor for total in totals}) > 1:
        return None
    constant = len(totals) < len(call.notes) or bool(number)
    counts = frozenset[float]().union(*(total.counts for total in totals))
    constant |= any(total.has_constant for total in totals)
    if constant and first.divisor is not None and counts != {first.divisor}:
        return None
    return _scaled(Total(first.kind, counts, constant, first.divisor))


def _product(call: Call) -> Note:
    totals = [note for note in call.notes if isinstance(note, Total)]
    others = [note for note in call.notes if not isinstance(note, Total)]
    if not totals:
        return _pointwise(call)
    alone = len(totals) == 1 and all(note in (CONSTANT, FILLED) for note in others)
    return _scaled(totals[0]) if alone else None


def _scaled(total: Total) -> Total:
    """What is left of a total where it is multiplied: a sum counts no longer."""
    return total if total.kind == "mean" else total._replace(divisor=None, entries=0)


def _quotient(call: Call) -> Note:
    above, below = call.notes[0], call.args[1]
    if not isinstance(above, Total) or not isinstance(call.args[0], Tensor):
        return _pointwise(call)
    divisor = call.notes[1] if isinstance(below, Tensor) else None
    if isinstance(divisor, Total):
        if above.kind == "mean" or above.has_constant or not _is_count(below, divisor):
            return None
        return Total("mean", frozenset([float(below)]), divisor=divisor.divisor)
    samples = call.tracker.samples
    is_number = not isinstance(below, Tensor) and above.kind == "sum" and not above.has_constant
    if is_number and below >= samples and below % samples == 0:
        return Total("mean", frozenset([float(below)]))
    is_constant = not isinstance(below, Tensor) or divisor in (CONSTANT, FILLED)
    return _scaled(above) if is_constant else None


def _is_count(tensor: Tensor, note: Note) -> bool:
    is_sum = isinstance(note, Total) and note.kind == "sum" and not note.has_constant
    return is_sum and tensor.numel() == 1 and not tensor.requires_grad


def _clamp(call: Call) -> Note:
    note, least = call.notes[0], call.argument(1, "min", None)
    if not isinstance(note, Total):
        return _pointwise(call)
    if not _is_count(call.given[0], note) or not isinstance(least, (int, float)) or least > 1:
        return None
    return note._replace(divisor=float(call.given[0]))


def _reduction(kind: Literal["sum", "mean"] | None, place: int = 1) -> Callable[[Call], Note]:
    """The rule of operators that reduce dimensions; with a kind also that of the samples."""

    def rule(call: Call) -> Note:
        note, dims = call.notes[0], call.dims(place)
        if isinstance(note, Total):
            return _scaled(note) if kind else None
        if not isinstance(note, Rows):
            return None
        if note.dim not in dims:
            keeps = tensors_in(call.output)[0].dim() == call.given[0].dim()
            return note if keeps else note._replace(dim=note.dim - sum(d < note.dim for d in dims))
        if kind == "sum" and call.given[0].dtype is torch.bool:
            return Total("sum", entries=math.prod(call.given[0].shape[dim] for dim in dims))
        if kind == "mean":
            count = math.prod(call.given[0].shape[dim] for dim in dims)
            return Total("mean", frozenset([float(count)]))
        return Total("sum") if kind else None

    return rule


def _vote(call: Call) -> Note:
    dims = call.argument(1, "dim", None)
    return VOTE if dims is None and isinstance(call.notes[0], Rows) else _reduction(None)(call)


def _bounds(call: Call) -> Note:
    is_all = isinstance(call.notes[0], Rows) and call.kwargs.get("dim") is None
    return BOUND if is_all else _reduction(None)(call)


def _equal(call: Call) -> Note:
    """Whether all values hold, by their number."""
    note, number = call.notes[0], call.args[1]
    entries = note.entries if isinstance(note, Total) else 0
    return VOTE if entries and entries == number else _pointwise(call)


def _along(place: int) -> Callable[[Call], Note]:
    """The rule of operators that mix entries along dimensions, not that of the samples."""

    def rule(call: Call) -> Note:
        rows = call.rows(call.given[0].dim())
        return None if rows is None or rows.dim in call.dims(place, -1) else rows

    return rule


def _loss(call: Call) -> Note:
    """Losses of two aligned tensors, with a reduction."""
    rows = call.rows(among=slice(2))
    reduction = next((a for a in call.args[2:] if type(a) is int), call.kwargs.get("reduction", 1))
    if rows is None or any(note not in (CONSTANT, FILLED) for note in call.notes[2:]):
        return None
    count = float(max(tensor.numel() for tensor in call.given[:2]))
    return (rows, Total("mean", frozenset([count])), Total("sum"))[reduction]


def _nll(call: Call) -> Note:
    rows, reduction = call.notes[0], call.argument(3, "reduction", 1)
    if not isinstance(rows, Rows) or rows.dim or call.notes[1] != rows:
        return None
    if any(note not in (CONSTANT, FILLED) for note in call.notes[2:]):
        return None  # Weights of classes that were counted in the samples.
    counts = frozenset([float(call.output[1])] if reduction == 1 else [])
    return (rows, Total("mean", counts), Total("sum"))[reduction]


def _view(call: Call) -> Note:
    """Other shapes of the same memory: the samples are along the dimension that spans them all."""
    note, tensor, output = call.notes[0], call.given[0], call.output
    if not isinstance(note, Rows):
        return note
    if note.chosen:
        same = [d for d, n in enumerate(output.shape) if n == tensor.shape[note.dim]]
        return note._replace(dim=same[0]) if len(same) == 1 else None
    if call.tracker.samples == note.views == 1:
        return _view_of_one(note, tensor, output)
    stride = tensor.stride(note.dim)
    span = tensor.shape[note.dim] * stride
    of_sample = span // note.views // call.tracker.samples
    for dim, (length, step) in enumerate(zip(output.shape, output.stride(), strict=True)):
        if step and length * step == span and of_sample % step == 0:
            return note._replace(dim=dim)
        if step and note.views > 1 and length * step == span // note.views and step <= stride:
            return Rows(dim)
    return None


def _view_of_one(note: Rows, tensor: Tensor, output: Tensor) -> Note:
    """The same of one sample, which any dimension may span: where it stands among the others."""
    own = tensor.shape[note.dim], tensor.stride(note.dim)
    lengths = list(zip(output.shape, output.stride(), strict=True))
    found = [dim for dim, each in enumerate(lengths) if each == own]
    if output.numel() == tensor.numel() and output.dim() != tensor.dim():
        before = math.prod(tensor.shape[: note.dim])
        found = [dim for dim in range(output.dim()) if math.prod(output.shape[:dim]) == before]
    return note._replace(dim=found[0]) if found else None


def _split(call: Call) -> Note:
    """Parts of a tensor, all of which are views of it with the same samples."""
    notes = {_view(call._replace(output=part)) for part in call.output}
    return notes.pop() if len(notes) == 1 else None


def _joined(call: Call) -> Note:
    if all(isinstance(note, Total) for note in call.notes):
        return _linear(call._replace(args=(None,)))
    rows, stacks = call.rows(), call.output.dim() > call.given[0].dim()
    dim = call.argument(1, "dim", 0) % call.output.dim()
    if rows is None:
        return None
    if rows.dim != dim or stacks:
        return rows._replace(dim=rows.dim + (stacks and dim <= rows.dim))
    alike = not rows.chosen and len({tensor.shape for tensor in call.given}) == 1
    is_views = alike and all(note == rows for note in call.notes)
    return rows._replace(views=rows.views * len(call.given)) if is_views else None


def _matrix(call: Call) -> Note:
    """A product with a constant, or of the matrices of each sample."""
    left, right = call.notes[-2:]
    dims = call.output.dim()
    if any(note not in (CONSTANT, FILLED) for note in call.notes[:-2]):
        return None
    if isinstance(left, Rows) and right in (CONSTANT, FILLED):
        return None if left.dim == dims - 1 else left
    return left if dims == 3 and left == right == Rows(0) else None


def _each(dims: int) -> Callable[[Call], Note]:
    """The rule of operators on the last dimensions of the first argument."""

    def rule(call: Call) -> Note:
        note, *others = call.notes
        alone = isinstance(note, Rows) and note.dim < call.given[0].dim() - dims
        return note if alone and all(other in (CONSTANT, FILLED) for other in others) else None

    return rule


def _padded(call: Call) -> Note:
    return _each(len(call.args[1]) // 2)(call)


def _embedded(call: Call) -> Note:
    return call.notes[1] if call.notes[0] == CONSTANT else None


def _gathered(call: Call) -> Note:
    """Entries of each row, or of a table of single entries."""
    table, rows = call.notes
    return rows if table == CONSTANT and call.given[0].dim() == 1 else _along(1)(call)


def _indexed(call: Call) -> Note:
    """Rows of a table, rows that a mask chooses, or one entry of each row."""
    note, *of_indices = call.notes
    places = [place for place, index in enumerate(call.args[1]) if index is not None]
    index = call.args[1][places[0]]
    if note == CONSTANT and len(places) == 1 and isinstance(of_indices[0], Rows):
        found = of_indices[0]
        return None if index.dtype is torch.bool else found._replace(dim=found.dim + places[0])
    if index.dtype is torch.bool and isinstance(note, Rows) and of_indices == [note]:
        return Rows(0, chosen=call.tracker.mask_number(index)) if places == [0] else None
    if note == Rows(0) and places == [0, 1] and of_indices == [CONSTANT, Rows(0)]:
        in_order = index.tolist() == list(range(call.tracker.samples))
        return note if in_order and len(call.given[0]) == len(index) else None
    return None


def _masked(call: Call) -> Note:
    rows = call.rows()
    return None if rows is None else Rows(0, chosen=call.tracker.mask_number(call.given[1]))


def _alike(call: Call) -> Note:
    return call.notes[0]


_FILLING = ("zeros", "ones", "full", "scalar_tensor", "zero", "fill", "zeros_like", "ones_like",
            "full_like", "new_zeros", "new_ones", "new_full")  # fmt: skip
"""Operators that fill a tensor with one number."""

_RULES: dict[str, Callable[[Call], Note]] = {
    **dict.fromkeys(("add", "sub", "rsub"), _linear),
    **dict.fromkeys(("mul", "neg"), _product),
    **dict.fromkeys(("clamp", "clamp_min"), _clamp),
    **dict.fromkeys(("sum", "nansum", "count_nonzero"), _reduction("sum")),
    **dict.fromkeys(("amax", "amin", "logsumexp", "var", "std", "prod"), _reduction(None)),
    **dict.fromkeys(("all", "any", "is_all_true", "is_any_true"), _vote),
    **dict.fromkeys(("argmax", "argmin", "max", "min", "median"), _reduction(None)),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _reduction(None, 2)),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "flip", "sort"), _along(1)),
    **dict.fromkeys(("scatter", "fft_r2c"), _along(1)),
    **dict.fromkeys(("topk", "roll"), _along(2)),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"), _loss),
    **dict.fromkeys(("binary_cross_entropy_with_logits", "soft_margin_loss"), _loss),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    **dict.fromkeys(("split", "split_with_sizes", "unbind"), _split),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _matrix),
    **dict.fromkeys(("native_group_norm", "native_layer_norm"), _each(1)),
    **dict.fromkeys(("convolution", "avg_pool2d"), _each(2)),
    **dict.fromkeys(("masked_fill", "where", "copy"), _pointwise),
    **dict.fromkeys(("clone", "to_copy", "lift_fresh", "log_sigmoid_forward"), _alike),
    "aminmax": _bounds,
    "div": _quotient,
    "eq": _equal,
    "gather": _gathered,
    "mean": _reduction("mean"),
    "embedding": _embedded,
    "index": _indexed,
    "masked_select": _masked,
    "cdist_forward": _matrix,
    "constant_pad_nd": _padded,
}
_RULES["unsafe_view"] = _view
