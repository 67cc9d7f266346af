"""Follows what a step takes from its micro-batch: means with their denominators, and sums.

The loss of a batch is rarely the plain mean of its micro-batches' losses: a cross entropy divides
by the tokens that are not padding, so a micro-batch is weighted by its tokens. While a step runs, a
``TorchFunctionMode`` notes each reduction over samples, and what is computed from its result, as a
:data:`~lightning_axosparse.pipeline.loss.terms.Term`:

    what the step does with its micro-batch                     what is noted
    mean-reducing loss of ``torch.nn.functional``, ``mean()``   a mean with its denominator
    ``sum()``, or a loss with ``reduction="sum"``               a sum
    any function of such values, of numbers and of parameters   a call of it
    anything else                                               a number of which nothing is known

It finds denominators, and does not judge: whether micro-batches make up their batch is compared in
the first batch (``strategy.step.check``).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parameter import Parameter

from lightning_axosparse.pipeline.crossing.placeholder import Placeholder
from lightning_axosparse.pipeline.loss.terms import Call, Leaf, Term, leaves
from lightning_axosparse.sparse.store.weight import SparseWeight
from lightning_axosparse.support.torch_internals import (
    PausableMode,
    tensors_in,
    tree_leaves,
    tree_map_only,
)

_OURS = re.compile(rf"{__name__.partition('.')[0]}\.(?!examples\.)")
"""The modules of this package; those of the examples are as a user's."""


@cache
def _is_ours(module: str | None) -> bool:
    return _OURS.match(str(module)) is not None


_Place = tuple[CodeType, int, int, int]
"""The instruction that has called a function, the number of its tensor, and the dimension."""


class SampleDims:
    """Tells by their sizes which dimensions of tensors are those of samples.

    The same code makes tensors of the whole batch and of its micro-batches. A dimension that does
    not grow with them is not that of the samples: it may be that of classes or of experts. One that
    does has entries of samples, also where it joins their tokens. Code is the same if the same
    instruction of the user's has called, by the frames of the call.

    Attributes:
        samples: how many the micro-batch has whose step runs.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._others: set[_Place] = set()
        """Those that had another size than there were samples."""
        self._sizes: dict[_Place, dict[int, set[int]]] = {}
        """By the number of samples."""
        self._varying: set[_Place] = set()
        self._asked = 0

    def begin_call(self) -> None:
        """Begin with the tensors of a function."""
        self._asked = 0

    def of(self, tensor: Tensor) -> list[int]:
        """The dimensions of a tensor that may have one entry for each sample."""
        found = []
        for dim, place in enumerate(self._places(tensor)):
            if tensor.shape[dim] != self.samples:
                self._others.add(place)
            if place not in self._others:
                found.append(dim)
        return found

    def is_of_samples(self, tensor: Tensor) -> bool:
        """Whether a tensor has values of each sample, or of parts of samples such as tokens.

        While it has been seen of micro-batches of one size alone, this is assumed of a dimension
        that has a multiple of their samples.
        """
        is_found = False
        for dim, place in enumerate(self._places(tensor)):
            size, sizes = tensor.shape[dim], self._sizes.setdefault(place, {})
            others = [seen for samples, seen in sizes.items() if samples != self.samples]
            if others and not any(size in seen for seen in others):
                self._varying.add(place)
            sizes.setdefault(self.samples, set()).add(size)
            may_be = not others and size % self.samples == 0
            is_found |= may_be or place in self._varying
        return is_found

    def _places(self, tensor: Tensor) -> list[_Place]:
        if not tensor.dim():
            return []
        caller, asked = users_frame(sys._getframe(1)), self._asked
        self._asked += 1
        return [(caller.f_code, caller.f_lasti, asked, dim) for dim in range(tensor.dim())]


def is_ours(caller: FrameType | None) -> bool:
    """Whether code of this package has called a function, besides other modes that hand it on."""
    while caller is not None and caller.f_code.co_name == "__torch_function__":
        caller = caller.f_back
    return caller is not None and _is_ours(caller.f_globals.get("__name__"))


def users_frame(caller: FrameType) -> FrameType:
    """The innermost frame of a call that is neither of this package nor of torch."""
    while caller.f_back is not None:
        package = str(caller.f_globals.get("__name__")).partition(".")[0]
        if package != "torch" and not is_ours(caller):
            break
        caller = caller.f_back
    return caller


class ReductionTracker(PausableMode):
    """Follows the reductions in a step; to be entered by :meth:`microbatch`.

    It costs four microseconds or more for each torch function that is called outside the layers.
    Inside ``torch.compile`` and ``torch.func`` transforms, where values cannot be read, it notes
    nothing.

    Args:
        buffers: those of the module; like its parameters they are the same for all micro-batches.

    Attributes:
        programs: a hash of the functions that each step has called, since this was cleared.
        dims: knows the dimensions of samples; what it has seen holds for the whole run.
    """

    def __init__(self, buffers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._buffers = {id(buffer): buffer for buffer in buffers}
        self._program = 0
        self.programs: set[int] = set()
        self.dims = SampleDims()
        self._keeps_sources = False
        self._sources: dict[int, tuple[Leaf, Tensor]] = {}
        # Tensors are kept, so that no other one gets the id of one.
        self._terms: dict[int, tuple[Tensor, Term]] = {}
        self._numbers: dict[float, Term] = {}
        self._constants: dict[int, Tensor] = {}
        self._scaled: dict[int, tuple[Tensor, Tensor, Callable[..., Any], Term]] = {}

    @contextmanager
    def microbatch(self, samples: int, keeps_sources: bool = False) -> Iterator[None]:
        """Follow the step of one micro-batch; what was noted is kept until the next one.

        Args:
            samples: number of samples in the micro-batch.
            keeps_sources: whether :meth:`sources` will be asked for.
        """
        self.dims.samples, self._program, self._keeps_sources = samples, 0, keeps_sources
        self.forget()
        with self:
            yield
        self.programs.add(self._program)

    def of(self, value: Any) -> Term:
        """How a tensor, or a number taken from one, was computed."""
        if isinstance(value, Tensor):
            noted = self._terms.get(id(value))
            return noted[1] if noted else self._unreduced(value)
        return self._noted_number(value) or Leaf(value)

    def sources(self, term: Term) -> list[Tensor]:
        """The numbers in a term on which parameters depend, as they can be differentiated."""
        return [self._sources[id(leaf)][1] for leaf in leaves(term) if leaf.differentiable]

    def forget(self) -> None:
        """Drop the values of the last micro-batch."""
        self._terms, self._numbers, self._constants, self._scaled = {}, {}, {}, {}
        self._sources = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_passive = self._is_paused or Placeholder in types or torch.compiler.is_compiling()
        if is_passive or is_ours(sys._getframe(1)):
            return func(*args, **kwargs)
        if func.__name__ != "__get__":
            self._program = hash((self._program, func))
        terms = None
        self.dims.begin_call()
        # This is done in every call of a function, so it makes no generators.
        operands = tree_leaves([*args, *kwargs.values()])
        if self._terms and not self._terms.keys().isdisjoint(map(id, operands)):
            # Before the call, which may change its arguments.
            operand = partial(self._operand, name=func.__name__.strip("_"))
            terms = tree_map_only((Tensor, int, float), operand, (args, kwargs))
        output = func(*args, **kwargs)
        if type(output) in _NO_VALUES:
            return output
        # A transform or a fake tensor does not let its values be read.
        with suppress(RuntimeError):
            self._note(func, args, kwargs, terms, operands, output)
        return output

    def _note(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        terms: tuple[Any, Any] | None,
        operands: list[Any],
        output: Any,
    ) -> None:
        if terms is not None and not any(each is _SAMPLES for each in tree_leaves(terms)):
            self._note_call(func, terms, output)
            return
        if terms is None and self._are_constant(operands):
            self._constants.update({id(each): each for each in tensors_in(output)})
            return
        if not isinstance(output, Tensor):
            return
        if terms is not None:
            self._note_scaled(func, args, terms[0], output)
        term: Term | None = None
        if func in _losses():
            defaults = _losses()[func]
            given = dict(zip(defaults, args, strict=False))
            term = self._of_loss(func, {**defaults, **given, **kwargs}, output)
        elif func in _REDUCING:
            term = self._reduced(func, args, kwargs, output)
        if term is not None:
            self._terms[id(output)] = output, term

    def _note_call(self, func: Callable[..., Any], terms: tuple[Any, Any], output: Any) -> None:
        """Note what was computed from noted values alone."""
        terms = _with_count(func, terms)
        if isinstance(output, Tensor):
            self._terms[id(output)] = output, Call(output.detach(), func, *terms)
        elif type(output) in (int, float) and func.__name__.strip("_") in _NUMBERS:
            self._numbers[output] = Call(output, func, *terms)
        elif isinstance(output, (tuple, list)):
            for index, each in enumerate(output):
                if isinstance(each, Tensor):
                    entry = Call(each.detach(), _entry, (index, func, *terms))
                    self._terms[id(each)] = each, entry

    def _note_scaled(
        self, func: Callable[..., Any], args: tuple[Any, ...], terms: Any, output: Tensor
    ) -> None:
        """Note values of samples that are multiplied with a noted number, or divided by one."""
        name = func.__name__.strip("_")
        if len(args) != 2 or name not in _PRODUCTS | _QUOTIENTS:
            return
        samples, scale = args[0], terms[1]
        if terms[0] is not _SAMPLES and name in _PRODUCTS:
            samples, scale = args[1], terms[0]
        is_scale = isinstance(scale, (Leaf, Call)) and not getattr(scale.value, "shape", ())
        if is_scale and isinstance(samples, Tensor):
            self._scaled[id(output)] = output, samples, func, scale

    def _leaf(self, value: Tensor, kind: Any = None, count: float = 0.0) -> Leaf:
        """A number, or several, that the step has taken from samples or from parameters."""
        # A copy, and a node of its own in the graph: `loss += penalty` changes both.
        copy = value.detach() if kind == "same" else value.detach().clone()
        leaf = Leaf(copy, kind, count, value.requires_grad and value.is_floating_point())
        if self._keeps_sources and leaf.differentiable:
            is_given = isinstance(value, (Parameter, SparseWeight))
            self._sources[id(leaf)] = leaf, value if is_given else value.clone()
        return leaf

    def _unreduced(self, value: Tensor) -> Leaf:
        """What is known of a tensor that was not noted."""
        return self._leaf(value, "same" if self._is_constant(value) else None)

    def _operand(self, value: Any, name: str) -> Any:
        """The term of what a function was given; ``_SAMPLES`` for what belongs to samples."""
        if isinstance(value, Tensor):
            noted = self._terms.get(id(value))
            if noted is not None:
                return noted[1]
            if name in _CASTS:  # Of this one no more is taken than its dtype.
                return Leaf(value.detach().new_zeros(()), "same")
            if self._is_constant(value) or not self.dims.is_of_samples(value):
                return self._unreduced(value)
            return _SAMPLES
        if type(value) in (int, float) and name in _ARITHMETIC:
            return self._number(value, name)
        return value

    def _noted_number(self, value: Any) -> Term | None:
        """How a number of Python was computed, if it was taken from a tensor."""
        noted = self._numbers.get(value) if type(value) in (int, float) else None
        # Another float may be equal by chance: 1.0 is many a quotient of numbers.
        is_same = noted is not None and (noted.value is value or type(noted.value) is int)
        return noted if is_same else None

    def _number(self, value: float, name: str) -> Term:
        """The term of a number of Python that a function was given."""
        noted = self._noted_number(value)
        if name not in _QUOTIENTS or value < 1 or value % 1:
            return noted or Leaf(value)
        if noted is None and value == 1:
            noted = self._numbers.get(0)  # `max(1, count)` of a micro-batch without any
        return Call(value, at_least_one, (noted,)) if noted else Leaf(value, operand=True)

    def _is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer, or was computed from nothing else."""
        if id(tensor) in self._constants or id(tensor) in self._buffers:
            return True
        # Asking whether something is a Parameter runs Python code of torch.
        return type(tensor) is not Tensor and isinstance(tensor, (Parameter, SparseWeight))

    def _are_constant(self, values: list[Any]) -> bool:
        """Whether there are such tensors among some values, and no others that may vary."""
        is_constant = False
        for each in values:
            if isinstance(each, Tensor):
                if self._is_constant(each):
                    is_constant = True
                elif each.dim() or each.requires_grad:
                    return False
        return is_constant

    def _reduced(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Tensor,
    ) -> Term | None:
        """What a function that adds up or averages has made of values of samples."""
        source = args[0] if args else kwargs.get("input")
        if func in _SCATTERING and output.dim() == 1:  # It counts, or adds up, by an index.
            source = args[-1] if isinstance(args[-1], Tensor) else kwargs.get("src")
        if not isinstance(source, Tensor) or source.dim() == 0 or self._is_constant(source):
            return None
        dims = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
        everything = dims is None or output.dim() == 0 or func in _COUNTING
        if not everything and not self._along_samples(dims, source):
            return None
        if self.dims.of(output) or (func in _SCATTERING and self.dims.is_of_samples(output)):
            return None
        kind = _REDUCING[func]
        count = source.numel() / (1 if everything else max(1, output.numel()))
        if func in (torch.nanmean, Tensor.nanmean):
            count = float((~source.isnan()).sum())
        if id(source) in self._scaled and everything and func not in _COUNTING:
            _, samples, scaling, scale = self._scaled[id(source)]
            plain = self._leaf(func(samples, *args[1:], **kwargs), kind, count)
            return Call(output.detach(), scaling, (plain, scale))
        return self._leaf(output, kind, count)

    def _of_loss(
        self, func: Callable[..., Any], arguments: Mapping[str, Any], output: Tensor
    ) -> Leaf | None:
        """The reduction of a loss function of ``torch.nn.functional``."""
        reduction = arguments["reduction"]
        is_deprecated = any(arguments.get(name) is not None for name in ("size_average", "reduce"))
        if is_deprecated or reduction == "none":
            return None
        first = next(value for value in arguments.values() if isinstance(value, Tensor))
        kind = "sum" if reduction == "sum" else "mean"
        return self._leaf(output, kind, _denominator(func, arguments, first))

    def _along_samples(self, dims: Any, source: Tensor) -> bool:
        """Whether the dimension of the samples, the first or by its size the second, is reduced."""
        found = dims if isinstance(dims, (list, tuple)) else [dims]
        reduced = {dim % source.dim() for dim in found if isinstance(dim, int)}
        shape, samples = list(source.shape), self.dims.samples
        is_second = 1 in self.dims.of(source) and shape.count(shape[1]) == 1
        is_second = is_second and (samples == 1 or shape[0] % samples > 0)
        return (1 if is_second and samples > 1 else 0) in reduced


def at_least_one(count: float) -> float:
    """What a sum is divided by, if ``count`` may be zero."""
    return max(1, count)


_NO_VALUES = (bool, type(None), torch.Size, torch.device, torch.dtype)
"""Types of what functions return that was not computed from samples."""

_SAMPLES = object()
"""Stands for an argument that belongs to samples."""

_SCATTERING: set[Callable[..., Any]] = {
    *(torch.scatter_add, Tensor.scatter_add, Tensor.scatter_add_),
    *(torch.index_add, Tensor.index_add, Tensor.index_add_),
}
_COUNTING: set[Callable[..., Any]] = {
    *(torch.bincount, Tensor.bincount, torch.histc, Tensor.histc),
    *_SCATTERING,
}
"""Functions that add up all entries, whatever else they are given."""

_REDUCING: dict[Callable[..., Any], Literal["mean", "sum"]] = {
    **dict.fromkeys((torch.mean, Tensor.mean, torch.nanmean, Tensor.nanmean), "mean"),
    **dict.fromkeys((torch.sum, Tensor.sum, torch.nansum, Tensor.nansum), "sum"),
    **dict.fromkeys((torch.count_nonzero, Tensor.count_nonzero, *_COUNTING), "sum"),
}

# By the names of torch's functions, without underscores: `__radd__`, `add_` and `add` are one.
_PRODUCTS = {"mul", "rmul", "imul", "multiply"}
_QUOTIENTS = {"div", "truediv", "itruediv", "idiv", "divide", "true_divide"}
_NUMBERS = {"item", "float", "int"}
_CASTS = {"to", "type_as"}
_ARITHMETIC = {
    *_PRODUCTS,
    *_QUOTIENTS,
    *("add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "rdiv", "rtruediv", "pow", "rpow"),
    *("clamp", "clamp_min", "clamp_max", "addcmul", "addcdiv"),
}


@cache
def _losses() -> dict[Callable[..., Any], dict[str, Any]]:
    """The losses of ``torch.nn.functional``: functions with an argument ``reduction``.

    Returns:
        By function, its parameters in order with their defaults.
    """
    functions = [f for f in vars(functional).values() if inspect.isfunction(f)]
    parameters = {function: inspect.signature(function).parameters for function in functions}
    return {
        function: {name: parameter.default for name, parameter in of.items()}
        for function, of in parameters.items()
        if "reduction" in of
    }


def _denominator(func: Callable[..., Any], arguments: Mapping[str, Any], first: Tensor) -> float:
    """The denominator of a mean loss, up to a factor that all micro-batches have in common."""
    target: Any = arguments.get("target")
    weight = arguments.get("weight")
    if "target_lengths" in arguments:
        return float(len(arguments["target_lengths"]))
    if "ignore_index" in arguments and not target.is_floating_point():
        counts = target != arguments["ignore_index"]
        return float(counts.sum() if weight is None else weight.double()[target[counts]].sum())
    if weight is not None and func in _WEIGHTED_MEANS:
        return float(weight.double().sum())
    return float(first.numel())


_WEIGHTED_MEANS = (functional.mse_loss, functional.l1_loss, functional.huber_loss)
"""The losses whose mean divides by the sum of ``weight``, not by the number of elements."""


def _with_count(func: Callable[..., Any], terms: tuple[Any, Any]) -> tuple[Any, Any]:
    """The terms of a quotient; a number that is the number of entries of a sum is a count."""
    args, kwargs = terms
    if func.__name__.strip("_") not in _QUOTIENTS or len(args) != 2:
        return terms
    above, below = args
    if not (isinstance(above, Leaf) and isinstance(below, Leaf) and above.kind == "sum"):
        return terms
    counts = type(below.value) is int and below.value == above.count
    return ((above, replace(below, kind="sum")), kwargs) if counts else terms


def _entry(index: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """One of several results of a function."""
    return func(*args, **kwargs)[index]
