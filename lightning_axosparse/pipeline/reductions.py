"""Tracks how a step reduces values over the samples of its micro-batch, to combine micro-batches.

The loss of a batch is rarely the plain mean of its micro-batches' losses. A cross entropy divides
by the tokens that are not padding, so a micro-batch is weighted by its tokens; sums are added up;
the variance of a batch is neither. While a step runs, a ``TorchFunctionMode`` records each
reduction and what is computed from its result, and so knows how the values of micro-batches
combine:

    what the step did with its micro-batch                      how micro-batches combine
    mean-reducing loss of ``torch.nn.functional``, ``mean()``   mean, weighted by its denominator
    ``sum()``, or a loss with ``reduction="sum"``               sum
    such a sum, divided by a count of the micro-batch           mean, weighted by that count
    sums and multiples by a constant of the above               as their terms
    a term computed from the module's parameters alone          the same for all: a constant
    anything else, such as ``exp`` or a product of the above    not at all: a statistic of the batch
    similarities between the samples                            the same
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from math import isclose, prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parameter import Parameter

from lightning_axosparse.pipeline.pausable_mode import PausableMode
from lightning_axosparse.sparse.weight import SparseWeight
from lightning_axosparse.support.torch_internals import tree_leaves

ReductionKind = Literal["mean", "sum", "statistic", "constant"]


class MeanDivisors(NamedTuple):
    """The numbers by which a sum over a micro-batch is divided to become a mean over it.

    Attributes:
        counts: numbers of its samples and entries.
        products: the same, where it is computed from the shape: a plain number.
        unclear: such a number that may also be a constant, such as the length of a sequence.
    """

    counts: frozenset[float] = frozenset()
    products: frozenset[float] = frozenset()
    unclear: frozenset[float] = frozenset()

    @classmethod
    def of(cls, source: Tensor, samples: int) -> MeanDivisors:
        """Those of a sum of all entries of ``source``, in a micro-batch of so many samples."""
        shape = list(source.shape)
        others = list(shape)
        along = others.pop(shape.index(samples) if samples in shape else 0)
        constants = {prod(some) for n in range(len(others) + 1) for some in combinations(others, n)}
        counts = {samples, source.numel(), len(source)}
        products = {along * constant for constant in constants} - counts - {1}
        found = counts, products - constants, products & constants
        return cls(*(frozenset(map(float, each)) for each in found))


NO_DIVISORS = MeanDivisors()


@dataclass(frozen=True, eq=False)
class Reduction:
    """One reduction over the samples of a micro-batch.

    Attributes:
        kind: how the results of several micro-batches combine.
        count: what a mean was divided by.
        value: the result, where it is a scalar.
        divisor: the constant that a sum was divided by; of a mean, the number of samples, if a sum
            was divided by that.
        among_samples: whether samples were compared with each other, as contrastive losses do.
        mean_divisors: the numbers whose quotient with a sum is a mean.
    """

    kind: ReductionKind
    count: float = 0.0
    value: Tensor | None = None
    divisor: float | None = None
    among_samples: bool = False
    mean_divisors: MeanDivisors = NO_DIVISORS

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added up, as over a micro-batch that is all padding."""
        return self.kind == "sum" and self.value is not None and not float(self.value)


Reductions = tuple[Reduction, ...]


class ReductionTracker(PausableMode):
    """Tracks the reductions in a step; to be entered by :meth:`microbatch`.

    It costs a microsecond for each torch function that is called outside the layers. Inside
    ``torch.compile`` and ``torch.func`` transforms, where values cannot be read, it tracks nothing.

    Args:
        buffers: those of the module; like its parameters they are the same for all micro-batches.
    """

    def __init__(self, buffers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._buffers = {id(buffer): buffer for buffer in buffers}
        self._samples = 0
        # The tensor is kept, so that no other one gets its id.
        self._found: dict[int, tuple[Tensor, Reductions]] = {}
        self._numbers: dict[float, tuple[float, Reductions]] = {}
        self._constants: dict[int, Tensor] = {}
        self._positions: dict[int, Tensor] = {}
        self._singles: dict[int, Tensor] = {}

    @contextmanager
    def microbatch(self, samples: int, batch: Any = None) -> Iterator[None]:
        """Track the step of one micro-batch; what was found is kept until the next one.

        Args:
            samples: number of samples in the micro-batch.
            batch: the micro-batch; a tensor in a list of one entry per sample belongs to a sample.
        """
        self._samples = samples
        self.forget()
        self._singles = {id(tensor): tensor for tensor in _of_single_samples(batch, samples)}
        with self:
            yield

    def of(self, value: Any) -> Reductions:
        """The reductions that a tensor, or a number taken from one, came from."""
        if isinstance(value, Tensor):
            is_constant = id(value) not in self._found and self._is_constant(value)
            constant = (Reduction("constant", value=_scalar(value)),) if is_constant else ()
            return constant or self._reduced(value)
        if not isinstance(value, (int, float)):
            return ()
        number, reductions = self._numbers.get(value, (None, ()))
        # Another float may be equal by chance: 1.0 is many a quotient of numbers.
        is_same = number is value or type(number) is type(value) is int
        return reductions if is_same else ()

    def _reduced(self, tensor: Tensor) -> Reductions:
        return self._found.get(id(tensor), (None, ()))[1]

    def is_mean_of_samples(self, value: float) -> bool:
        """Whether a number is a sum, taken as a number, over the number of samples."""
        totals = [
            number
            for number, reductions in self._numbers.values()
            if reductions and all(reduction.kind == "sum" for reduction in reductions)
        ]
        total = value * self._samples
        # A hundred times as much is a percentage.
        return any(isclose(total, scale * number) for number in totals for scale in (1, 100))

    def forget(self) -> None:
        """Drop the values of the last micro-batch."""
        self._found, self._numbers, self._constants = {}, {}, {}
        self._positions, self._singles = {}, {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self._is_paused or torch.compiler.is_compiling():
            return output
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        found = [each for each in outputs if isinstance(each, Tensor)]
        reductions: Reductions = ()
        if self._are_constant((*args, *kwargs.values())):
            self._constants.update({id(tensor): tensor for tensor in found})
            reductions = () if found else (Reduction("constant"),)
        elif func in _beginnings() or self._found or self._singles or self._positions:
            try:
                reductions = self._reductions(func, args, kwargs, output)
            except RuntimeError:  # A transform or a fake tensor does not let its values be read.
                reductions = ()
        if reductions and found:
            self._found.update({id(tensor): (tensor, reductions) for tensor in found})
        elif reductions and isinstance(output, (int, float)):
            self._numbers[output] = output, reductions
        return output

    def _is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer, or was computed from nothing else."""
        is_given = isinstance(tensor, (Parameter, SparseWeight)) or id(tensor) in self._buffers
        return is_given or id(tensor) in self._constants

    def _are_constant(self, values: Iterable[Any]) -> bool:
        """Whether there are such tensors among some values, and no others that may vary."""
        found = False
        for value in values:
            if isinstance(value, (list, tuple)):
                if any(isinstance(each, Tensor) for each in value):
                    if not self._are_constant(value):
                        return False
                    found = True
            elif isinstance(value, Tensor):
                if id(value) in self._found:
                    return False
                if self._is_constant(value):
                    found = True
                elif value.dim() or value.requires_grad:
                    return False
        return found

    def _reductions(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> Reductions:
        if self._follows_single(func, args, kwargs, out):
            return ()
        tracked = self._tracked(args, kwargs) if self._found else []
        if func in _losses():
            call = _losses()[func].bind(*args, **kwargs)
            among_samples = self._among_samples(call.arguments)
            if among_samples or not tracked:
                return _of_loss(call, out, self._samples, among_samples)
        self._note_positions(func, args, out)
        if not tracked:
            return self._first(func, args, kwargs, out)
        name = func.__name__.strip("_")
        if name in _QUOTIENTS and len(args) == 2:
            return self._quotient(args[0], args[1], out)
        if name in _PRODUCTS and len(tracked) == 1 and _are_scalars(args):
            return tracked[0]
        is_count = name in _BOUNDS and not getattr(out, "requires_grad", False)
        if name in _LINEAR or (is_count and all(r.kind == "sum" for r in tracked[0])):
            if name in _SHIFTS and _is_shifted(args, tracked):
                return (Reduction("statistic", value=_scalar(out)),)
            added = [self._unseen(arg) for arg in _flat(args)]
            return tuple(dict.fromkeys(r for found in (*tracked, *added) for r in found))
        return (Reduction("statistic", value=_scalar(out)),)

    def _tracked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Reductions]:
        """The reductions of each argument that came from any."""
        flat = _flat((*args, *kwargs.values()))
        found = [self._reduced(arg) for arg in flat if isinstance(arg, Tensor)]
        return [reductions for reductions in found if reductions]

    def _unseen(self, arg: Any) -> Reductions:
        """The reduction of a scalar that was reduced in a layer, or depends on parameters only."""
        if not isinstance(arg, Tensor) or arg.dim() or self._reduced(arg):
            return ()
        if self._is_constant(arg):
            return (Reduction("constant", value=arg.detach()),)
        return (Reduction("statistic", value=arg.detach()),) if arg.requires_grad else ()

    def _follows_single(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> bool:
        """Whether a value belongs to one sample, so that no function reduces it over samples.

        Steps that loop over the samples of a batch compute such values.
        """
        name = func.__name__.strip("_")
        if name in _TAKING and args and isinstance(args[0], Tensor) and args[0].dim():
            begins = _takes_along_first(name, args, kwargs) and self._is_first(args[0])
        else:
            begins = False
        if not begins and not (self._singles and self._uses_single(name, args, kwargs)):
            return False
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, Tensor):
                self._singles[id(tensor)] = tensor
        return True

    def _uses_single(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if name in _JOINING:
            return False
        values = (*args, *kwargs.values())
        return any(id(arg) in self._singles for arg in values) and not self._tracked(args, kwargs)

    def _note_positions(self, func: Callable[..., Any], args: tuple[Any, ...], out: Any) -> None:
        """Track the indices of samples, which contrastive losses use as classes."""
        if not isinstance(out, Tensor) or out.is_floating_point():
            return
        if func is torch.arange or any(id(arg) in self._positions for arg in _flat(args)):
            self._positions[id(out)] = out

    def _among_samples(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a loss uses the samples of the micro-batch as classes."""
        scores, target = arguments.get("input"), arguments.get("target")
        return (
            id(target) in self._positions
            and isinstance(scores, Tensor)
            and scores.dim() == 2
            and scores.shape[0] == scores.shape[1]
            and scores.shape[0] % self._samples == 0
        )

    def _first(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> Reductions:
        """The reduction by ``func`` of values that are not reduced yet."""
        if self._compares_samples(func, args, out):
            return (Reduction("statistic"),)
        kind = _REDUCING.get(func)
        if kind is None or not args or not isinstance(out, (Tensor, tuple)):
            return ()
        source, dims = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(source, Tensor) or source.dim() == 0 or self._is_constant(source):
            return ()
        if func in _ORDERING:
            dims = _ordered_along(func, args, kwargs)
            among = dims is None or _includes(dims, source.dim(), 0)
            return (Reduction("statistic"),) if among and len(source) >= self._samples else ()
        if not isinstance(out, Tensor):
            return ()
        if dims is None or out.dim() == 0:
            found = MeanDivisors.of(source, self._samples)
            count = float(source.numel())
            return (Reduction(kind, count, _scalar(out), mean_divisors=found),)
        if self._is_time_first(source) and _includes(dims, source.dim(), 1):
            is_clear = self._samples > 1
            return (Reduction(kind if is_clear else "statistic", float(self._samples)),)
        if not _includes(dims, source.dim(), 0) or len(source) < self._samples:
            return ()
        if kind == "mean":
            return (Reduction("mean", float(self._samples)),)
        is_sum = kind == "sum" and self._is_first(source)
        return (Reduction("sum" if is_sum else "statistic"),)

    def _compares_samples(self, func: Callable[..., Any], args: tuple[Any, ...], out: Any) -> bool:
        """Whether ``func`` returns a number for each pair of samples, or of views of them."""
        if func not in _COMPARING or not isinstance(out, Tensor) or out.dim() != 2:
            return False
        rows, columns = out.shape
        # Any number is a multiple of one sample: then there may be two views of it.
        if rows != columns or rows % self._samples or (self._samples == 1 and rows > 2):
            return False
        operands = [arg for arg in _flat(args) if isinstance(arg, Tensor)]
        if func in _BROADCASTING and any(each.shape[:2] == out.shape for each in operands):
            return False
        return not any(map(self._is_constant, operands))

    def _divided_by(self, divisor: Any) -> Reductions:
        """The reductions of a divisor; a number that equals a sum is taken for it."""
        if isinstance(divisor, Tensor):
            return self._reduced(divisor)
        _, reductions = self._numbers.get(divisor, (None, ()))
        return reductions if all(reduction.kind == "sum" for reduction in reductions) else ()

    def _is_first(self, tensor: Tensor) -> bool:
        """Whether the first dimension is, by its size, that of the samples."""
        is_first = len(tensor) == self._samples and list(tensor.shape).count(self._samples) == 1
        return is_first and not self._is_constant(tensor)

    def _is_time_first(self, tensor: Tensor) -> bool:
        """Whether the second dimension is, by its size, that of the samples.

        With one sample this is ambiguous: any dimension of size one may be second.
        """
        shape = list(tensor.shape)
        is_second = len(shape) > 1 and shape[1] == self._samples and shape.count(shape[1]) == 1
        return is_second and (self._samples == 1 or shape[0] % self._samples > 0)

    def _quotient(self, dividend: Any, divisor: Any, out: Any) -> Reductions:
        """A sum, or several, divided by a count is a mean; by a constant it stays a sum."""
        is_tensor = isinstance(dividend, Tensor)
        above, below = self._reduced(dividend) if is_tensor else (), self._divided_by(divisor)
        varies = isinstance(divisor, Tensor) and not self._is_constant(divisor)
        is_constant = not (varies and divisor.requires_grad)
        if not above or not _are_scalars([divisor]) or not is_constant:
            return (Reduction("statistic", value=_scalar(out)),)
        if len(below) == 1 and below[0].kind == "mean":
            if all(r.kind == "mean" and r.count == below[0].count for r in above):
                return (Reduction("mean", float(divisor) * below[0].count, _scalar(out)),)
        elif all(reduction.kind == "sum" for reduction in (*above, *below)):
            value = float(divisor)
            if len(below) == 1 and below[0].kind == "sum" and below[0].value is not None:
                # Not the divisor: `clamp(min=1)` makes a count of nothing one.
                count = float(below[0].value)
                is_number = not isinstance(divisor, Tensor)
                by_samples = count if is_number and value == count == self._samples else None
                return (Reduction("mean", count, _scalar(out), divisor=by_samples),)
            # One, where nothing was added up, may be `max(1, count)`.
            counted = value != 1 or not all(reduction.is_empty for reduction in above)
            if below or (counted and any(value in r.mean_divisors.counts for r in above)):
                by_samples = value if value == self._samples and not below else None
                return (Reduction("mean", value, _scalar(out), divisor=by_samples),)
            is_number = not isinstance(divisor, Tensor)
            if is_number and any(value in r.mean_divisors.products for r in above):
                return (Reduction("mean", value, _scalar(out)),)
            if is_number and any(value in r.mean_divisors.unclear for r in above):
                return (Reduction("statistic", value=_scalar(out)),)
            return tuple(replace(reduction, divisor=value) for reduction in above)
        return (Reduction("statistic", value=_scalar(out)),) if below else above


_REDUCING: dict[Callable[..., Any], ReductionKind] = {
    torch.mean: "mean",
    Tensor.mean: "mean",
    torch.sum: "sum",
    Tensor.sum: "sum",
    torch.count_nonzero: "sum",
    Tensor.count_nonzero: "sum",
    **{
        function: "statistic"
        for name in ("std", "var", "norm", "logsumexp", "amax", "amin", "max", "min", "median")
        for function in (getattr(torch, name), getattr(Tensor, name))
    },
    torch.linalg.norm: "statistic",
    torch.linalg.vector_norm: "statistic",
    torch.linalg.matrix_norm: "statistic",
    torch.bincount: "statistic",
    Tensor.bincount: "statistic",
}

_ORDERING: dict[Callable[..., Any], int | None] = {
    function: None if name == "softmax" else -1
    for name in ("sort", "topk", "argsort", "kthvalue", "softmax", "log_softmax")
    for function in (getattr(torch, name), getattr(Tensor, name), getattr(functional, name, None))
    if function is not None
}
"""Functions that compare the entries along a dimension."""

_REDUCING.update(dict.fromkeys(_ORDERING, "statistic"))

_BROADCASTING: set[Callable[..., Any]] = {
    functional.cosine_similarity,
    functional.pairwise_distance,
}
_COMPARING: set[Callable[..., Any]] = {
    *_BROADCASTING,
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm),
    *(torch.cdist, torch.einsum),
}
"""Functions by which a loss compares each sample of a batch with each other one."""

# By the names of torch's functions, without underscores: `__radd__`, `add_` and `add` are one.
_SUMS = {"add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "neg", "positive", "sum", "mean"}
_SHIFTS = _SUMS - {"sum", "mean", "neg", "positive"}
_SHAPES = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "expand", "stack", "cat", "concat"}
_COPIES = {"detach", "clone", "to", "type", "type_as", "cpu", "cuda", "contiguous", "requires_grad"}
_TAKING = {"getitem", "select", "unbind"}
_JOINING = {"stack", "cat", "concat", "hstack", "vstack", "pad_sequence"}
_NUMBERS = {"float", "double", "half", "bfloat16", "item", "int"}
_LINEAR = _SUMS | _SHAPES | _COPIES | _NUMBERS
_BOUNDS = {"clamp", "clamp_min", "maximum"}
_PRODUCTS = {"mul", "rmul", "imul", "multiply"}
_QUOTIENTS = {"div", "truediv", "itruediv", "idiv", "divide", "true_divide"}


@cache
def _losses() -> dict[Callable[..., Any], inspect.Signature]:
    """The losses of ``torch.nn.functional``: functions with an argument ``reduction``."""
    functions = [f for f in vars(functional).values() if inspect.isfunction(f)]
    signatures = {function: inspect.signature(function) for function in functions}
    return {f: s for f, s in signatures.items() if "reduction" in s.parameters}


@cache
def _beginnings() -> frozenset[Callable[..., Any]]:
    """The functions at which tracking of a value begins."""
    taking = torch.select, torch.unbind, Tensor.select, Tensor.unbind, Tensor.__getitem__
    return frozenset([*_losses(), *_REDUCING, *_COMPARING, *taking, torch.arange])


def _of_loss(
    call: inspect.BoundArguments, out: Any, samples: int, among_samples: bool
) -> Reductions:
    """The reduction of a loss function of ``torch.nn.functional``."""
    arguments = call.arguments
    reduction = arguments.get("reduction", "mean")
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        averages = arguments.get("size_average") is not False
        reduction = "none" if arguments.get("reduce") is False else "mean" if averages else "sum"
    if reduction == "none":
        return ()
    first = next(value for value in arguments.values() if isinstance(value, Tensor))
    count = _denominator(call, first)
    if reduction == "sum":
        found = MeanDivisors.of(first, samples)
        found = found._replace(counts=found.counts | {count})
        return (Reduction("sum", value=_scalar(out), mean_divisors=found),)
    return (Reduction("mean", count, _scalar(out), among_samples=among_samples),)


def _denominator(call: inspect.BoundArguments, first: Tensor) -> float:
    """The denominator of a mean loss, up to a factor that all micro-batches have in common."""
    arguments, parameters = call.arguments, call.signature.parameters
    target: Any = arguments.get("target")
    weight = arguments.get("weight")
    if "target_lengths" in arguments:
        return float(len(arguments["target_lengths"]))
    if "ignore_index" in parameters and not target.is_floating_point():
        ignored = arguments.get("ignore_index", parameters["ignore_index"].default)
        counts = target != ignored
        return float(counts.sum() if weight is None else weight.double()[target[counts]].sum())
    if weight is not None and call.signature in _weighted_means():
        return float(weight.double().sum())
    return float(first.numel())


@cache
def _weighted_means() -> list[inspect.Signature]:
    """The losses whose mean divides by the sum of ``weight``, not by the number of elements."""
    weighted = functional.mse_loss, functional.l1_loss, functional.huber_loss
    return [_losses()[function] for function in weighted]


def _of_single_samples(batch: Any, samples: int) -> list[Tensor]:
    """The tensors in lists that have one entry for each sample."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif not isinstance(batch, (list, tuple)):
        return []
    elif len(batch) == samples:
        leaves = [leaf for leaf in tree_leaves(list(batch)) if isinstance(leaf, Tensor)]
        if not all(leaf.dim() and len(leaf) == samples for leaf in leaves):
            return leaves
    return [tensor for entry in batch for tensor in _of_single_samples(entry, samples)]


def _flat(args: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for arg in args:
        flat += arg if isinstance(arg, (list, tuple)) else [arg]
    return flat


def _scalar(out: Any) -> Tensor | None:
    return out.detach() if isinstance(out, Tensor) and out.numel() == 1 else None


def _are_scalars(values: Sequence[Any]) -> bool:
    return all(
        value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))
        for value in values
    )


def _includes(dims: Any, dimensions: int, wanted: int) -> bool:
    found = dims if isinstance(dims, (list, tuple)) else [dims]
    return any(isinstance(dim, int) and dim % dimensions == wanted for dim in found)


def _takes_along_first(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``getitem``, ``select`` or ``unbind`` takes entries of the first dimension."""
    if name == "getitem":
        return type(args[1]) is int
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return isinstance(dim, int) and dim % args[0].dim() == 0


def _is_shifted(args: Sequence[Any], tracked: Sequence[Reductions]) -> bool:
    """Whether a constant is added to sums: it would be added once for every micro-batch.

    Constants that only avoid a division by zero are too small to matter.
    """
    if any(reduction.kind != "sum" for reductions in tracked for reduction in reductions):
        return False
    numbers = [arg for arg in args if isinstance(arg, (int, float))]
    return any(abs(number) > 1e-3 for number in numbers)


def _ordered_along(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    place = 2 if func.__name__ in ("topk", "kthvalue") else 1
    return kwargs.get("dim", args[place] if len(args) > place else _ORDERING[func])
