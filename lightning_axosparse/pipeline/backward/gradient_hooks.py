"""Calls the user's gradient hooks once a batch, with the gradient of all of it.

torch calls them in every backward pass, of which a pipeline has one for each micro-batch; and
stages that keep the same parameter have each a part of its gradient. A hook that clips or
normalizes has to see the sum, as on one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_axosparse.distributed.gradient_reducer import GradientReducer
from lightning_axosparse.support.torch_internals import gradient_hooks, hooked


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
