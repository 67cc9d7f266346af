"""Calls the user's gradient hooks once a batch, with the gradient of the whole batch.

torch calls them in the backward pass of every micro-batch, and stages that share a parameter have
each a part of its gradient. A hook that clips or normalizes has to see the sum, as on one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_axosparse.distributed.gradient_reducer import GradientReducer
from lightning_axosparse.support.torch_internals import gradient_hooks, with_gradient_hooks


class GradientHooks:
    """The gradient hooks of parameters in one batch.

    Args:
        parameters: the parameters of this rank, in the same order on all ranks that share them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._hooks = {
            each: _user_hooks(each)
            for each in with_gradient_hooks(parameters, besides=GradientReducer)
        }

    @property
    def parameters(self) -> Mapping[nn.Parameter, Any]:
        """The parameters that have hooks."""
        return self._hooks

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Remove the hooks inside the context, so that backward passes do not call them."""
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
        """Call the hooks of a parameter whose ``grad`` is that of the batch, or this rank's part.

        Afterwards ``grad`` is the gradient that the hooks return.

        Args:
            parameter: one of :attr:`parameters`.
            earlier: gradients of earlier batches, to which ``grad`` is to be added. Hooks that
                torch calls after accumulation see the sum; the entry is set to None then.
            sharing: the ranks that have each a part of this batch's gradient. Their hooks see the
                sum, and only the first one keeps it. None if this rank has the whole gradient.
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


def _user_hooks(parameter: nn.Parameter) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Return the hooks of a parameter that run before, and after, its gradient is accumulated.

    Returns:
        For both, torch's dict of hooks, and the user's hooks in it.
    """
    return [
        (hooks, {key: hook for key, hook in hooks.items() if not _is_of_reducer(hook)})
        for hooks in gradient_hooks(parameter)
    ]


def _is_of_reducer(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), GradientReducer)


def _sum_over(parameter: nn.Parameter, sharing: dist.ProcessGroup | None) -> Tensor | None:
    """Return the sum of a parameter's gradients over ranks; None if none of them has one."""
    gradient = parameter.grad
    if sharing is None:
        return gradient
    flat = parameter.new_zeros(parameter.numel() + 1)
    if gradient is not None:
        flat[:-1], flat[-1] = gradient.reshape(-1), 1
    dist.all_reduce(flat, group=sharing)
    return flat[:-1].view(parameter.shape) if flat[-1] else None
