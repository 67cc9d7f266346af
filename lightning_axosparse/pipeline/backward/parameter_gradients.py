"""Completes the gradients of parameters after backward passes: deferred products, the user's hooks.

Products that make the gradients of weights are queued until a stage has time for them. Gradient
hooks are called once a batch, with the gradient of all of it: torch calls them in every backward
pass, of which a pipeline has one for each micro-batch, and stages that keep the same parameter have
each a part of its gradient; a hook that clips or normalizes has to see the sum, as on one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_axosparse.distributed.gradient_reducer import GradientReducer
from lightning_axosparse.support.torch_internals import gradient_hooks, hooked, storage_id


class WeightProduct(NamedTuple):
    """What one call of a layer adds to the gradients of its parameters.

    Attributes:
        parameters: the parameters, first the weight.
        tensors: what is kept until the product is computed.
        compute: computes the term of each parameter; it is given whether a term may be in scratch
            memory, which the next product may take.
    """

    parameters: Sequence[nn.Parameter]
    tensors: Sequence[Tensor]
    compute: Callable[[bool], Sequence[Tensor]]


class WeightGradientQueue:
    """The products of one stage's weights in one batch that have still to be computed.

    The terms of a parameter are added in the order of the micro-batches, those of one micro-batch
    after they were summed, so gradients are those of autograd to the bit.

    Args:
        on_final: called with a parameter whose gradient of the batch is complete, once all
            backward passes have ended.
    """

    def __init__(self, on_final: Callable[[nn.Parameter], None]) -> None:
        self._on_final = on_final
        self._products: dict[tuple[int, nn.Parameter], list[WeightProduct]] = {}
        self._left: Counter[int] = Counter()
        self._backwards_ended = False
        self._begun: set[nn.Parameter] = set()
        self.reordered = False
        """Whether a parameter got terms from elsewhere before its products were computed."""

    def add(self, microbatch: int, product: WeightProduct) -> None:
        """Queue a product of a micro-batch's backward pass."""
        key = microbatch, product.parameters[0]
        if key not in self._products:
            self._products[key] = []
            self._left[microbatch] += 1
        self._products[key].append(product)

    def holds(self, microbatch: int) -> bool:
        """Whether a product of this micro-batch is still to be computed."""
        return self._left[microbatch] > 0

    def bytes_of(self, microbatch: int) -> int:
        """Bytes of memory that are kept for this micro-batch."""
        storages = {
            storage_id(tensor.untyped_storage()): tensor.untyped_storage().nbytes()
            for (number, _), products in self._products.items()
            if number == microbatch
            for product in products
            for tensor in product.tensors
        }
        return sum(storages.values())

    def end_backwards(self) -> None:
        """Compute weight by weight from now on, in the order of the last backward pass.

        So the all-reduce of the first gradients runs beside the products of the others.
        """
        last = {weight: place for place, (_, weight) in enumerate(self._products)}
        ordered = sorted(self._products.items(), key=lambda item: last[item[0][1]])
        self._products, self._backwards_ended = dict(ordered), True

    def compute_next(self) -> None:
        """Compute the first products in the queue: those of one layer and one micro-batch."""
        key = next(iter(self._products))
        products = self._products.pop(key)
        self._left[key[0]] -= 1
        parameters = products[0].parameters
        if parameters[0] not in self._begun:
            self._begun.add(parameters[0])
            self.reordered |= any(parameter.grad is not None for parameter in parameters)
        # The first term becomes the gradient.
        in_scratch = parameters[0].grad is not None
        with torch.no_grad():
            for parameter, term in zip(parameters, _sum(products, in_scratch), strict=True):
                _accumulate(parameter, term)
        following = next(iter(self._products), None)
        if self._backwards_ended and (following is None or following[1] is not key[1]):
            for parameter in parameters:
                self._on_final(parameter)


def _sum(products: Sequence[WeightProduct], in_scratch: bool) -> Sequence[Tensor]:
    first, *others = products
    total = first.compute(in_scratch)
    for other in others:
        # The next product may take the same scratch memory.
        total = [term.clone() for term in total]
        for term, more in zip(total, other.compute(in_scratch), strict=True):
            term += more
    return total


def _accumulate(parameter: nn.Parameter, term: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.add_(term)
    elif term.dtype == parameter.dtype and term.stride() == parameter.stride():
        parameter.grad = term
    else:
        parameter.grad = torch.empty_like(parameter).copy_(term)


class GradientHooks:
    """The gradient hooks of some parameters, in one batch.

    Args:
        parameters: those of this rank, in the same order on all ranks that keep them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._hooks = {each: _users(each) for each in hooked(parameters, besides=GradientReducer)}

    @property
    def parameters(self) -> Mapping[nn.Parameter, Any]:
        """The parameters that have hooks."""
        return self._hooks

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keep backward passes inside the context from calling the hooks."""
        for hooks in self._hooks.values():
            for registered, own in hooks:
                for key in own:
                    del registered[key]
        try:
            yield
        finally:
            for hooks in self._hooks.values():
                for registered, own in hooks:
                    registered.update(own)

    @torch.no_grad()
    def call(
        self,
        parameter: nn.Parameter,
        earlier: MutableMapping[nn.Parameter, Tensor | None],
        sharing: dist.ProcessGroup | None,
    ) -> None:
        """Call the hooks of a parameter, whose ``grad`` is what this rank has of the batch.

        Afterwards ``grad`` is what the hooks have made of it.

        Args:
            parameter: one of :attr:`parameters`.
            earlier: gradients of earlier batches that ``grad`` is to be added to. Hooks that run
                after torch has done so see the sum, and the entry is None then.
            sharing: the ranks that have each a part of this batch's gradient; the hooks see the sum
                on all of them, and the first one alone keeps it. None where it is whole.
        """
        parameter.grad = _sum_over(parameter, sharing)
        if parameter.grad is None:
            return
        (_, before), (_, after) = self._hooks[parameter]
        for hook in before.values():
            changed = hook(parameter.grad)
            parameter.grad = parameter.grad if changed is None else changed
        if after and (sum_before := earlier.get(parameter)) is not None:
            parameter.grad, earlier[parameter] = sum_before + parameter.grad, None
        for hook in after.values():
            hook(parameter)
        if sharing is not None and dist.get_rank(sharing) > 0 and parameter.grad is not None:
            parameter.grad.zero_()


def _users(parameter: nn.Parameter) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """The hooks of a parameter, before and after its gradient is accumulated.

    Returns:
        For both, torch's dict and those in it that are the user's.
    """
    return [
        (hooks, {key: hook for key, hook in hooks.items() if not _is_the_reducers(hook)})
        for hooks in gradient_hooks(parameter)
    ]


def _is_the_reducers(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), GradientReducer)


def _sum_over(parameter: nn.Parameter, sharing: dist.ProcessGroup | None) -> Tensor | None:
    """The sum of a parameter's gradients over some ranks; None where none of them has one."""
    gradient = parameter.grad
    if sharing is None:
        return gradient
    flat = parameter.new_zeros(parameter.numel() + 1)
    if gradient is not None:
        flat[:-1], flat[-1] = gradient.reshape(-1), 1
    dist.all_reduce(flat, group=sharing)
    return flat[:-1].view(parameter.shape) if flat[-1] else None
