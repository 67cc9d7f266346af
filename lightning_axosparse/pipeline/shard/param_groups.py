"""Lets an optimizer step this rank's parameters, while hooks see those of all stages in its groups.

A sum over ``optimizer.param_groups`` is then what a sum over ``module.parameters()`` is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_axosparse.pipeline.shard.remote_tensor import RemoteTensor


@contextmanager
def own_param_groups(optimizer: Optimizer) -> Iterator[None]:
    """Leave only this rank's parameters in an optimizer's groups, inside the context."""
    whole = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if not isinstance(p, RemoteTensor)]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


@contextmanager
def following_parameters(module: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Give optimizers, after the context, what then has the names of their parameters in a module.

    Args:
        module: the module, whose parameters the context exchanges.
        optimizers: those that train it.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    yield
    parameters = dict(module.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [parameters[names[p]] if p in names else p for p in group["params"]]


def closure_called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Call the closure that a step of an optimizer was given, if any, before the step.

    Args:
        args: those of the step: the optimizer, and perhaps the closure.
        kwargs: likewise.

    Returns:
        The keyword arguments for the step, of which a closure returns the same loss again.
    """
    closure = kwargs.pop("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return kwargs
    loss = closure()
    return {**kwargs, "closure": lambda: loss}


class OwnSteps:
    """Lets an optimizer step this rank's parameters alone, until :meth:`remove`.

    Hooks that run inside the closure of a step see all parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._inside = ExitStack()
        self._hooks = [
            optimizer.register_step_pre_hook(self._enter),
            optimizer.register_step_post_hook(self._leave),
        ]

    def remove(self) -> None:
        """Let the optimizer step all that is in its groups."""
        self._leave()
        for hook in self._hooks:
            hook.remove()

    def _enter(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = closure_called(args, kwargs)
        self._inside.enter_context(own_param_groups(optimizer))
        return (optimizer,), kwargs

    def _leave(self, *_: Any) -> None:
        self._inside.close()
