"""Represents a tensor of another stage: it has a name and a shape, but reading its values raises.

Hooks may ask all parameters of a module for something, such as a norm. Those of other stages have
no values on this rank. What only arranges them works: shapes, copies, an average that stays where
the parameter is. What needs a value raises one error, which says where the value is to be had.

An optimizer steps this rank's parameters, while hooks see those of all stages in its groups: a sum
over ``optimizer.param_groups`` is what a sum over ``module.parameters()`` is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.support.torch_internals import (
    parse_conversion,
    plain_torch_functions,
    tensors_in,
    tree_leaves,
    tree_map_only,
)
from lightning_axosparse.support.troubleshooting import see

NORMS = (1.0, 2.0, torch.inf)
"""The norms of a gradient that stages tell each other."""


class RemoteTensor(Tensor):
    """A meta tensor for one that another stage keeps, and for what is computed of it.

    Attributes:
        origin: name of the tensor in the module.
        near: the device on which the tensors of this rank are.
        norms: by the exponent, the known norms of all of the values; emptied when they change.
    """

    origin: str
    near: torch.device
    norms: dict[float, float]

    @classmethod
    def of(cls, meta: Tensor, name: str, near: torch.device) -> RemoteTensor:
        """Let a meta tensor replace the tensor ``name`` of another stage."""
        remote = meta.as_subclass(cls)
        remote.origin, remote.near, remote.norms = name, near, {}
        return remote

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with plain_torch_functions():
                return func(*args, **kwargs)
        remotes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        if func == _DEVICE:
            # Where code that asks a parameter for its device makes tensors beside it.
            return remotes[0].near
        if func in _MOVES:
            return _moved(func, *args, **kwargs)
        if _changes_lists_in_place(func) and all(isinstance(each, cls) for each in args[0]):
            # The device of the stand-ins, meta, may have been given to numbers that are read here.
            for each in args[0]:
                each.norms.clear()
            return None
        norm = _known_norm(func, *args, **kwargs)
        if norm is not None:
            return norm
        try:
            with plain_torch_functions():
                result = func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            raise RuntimeError(_MESSAGE.format(name=remotes[0].origin)) from error
        made = tensors_in(result)
        if not made:
            return result
        if not (_makes_new(func) or all(tensor.is_meta for tensor in made)):
            # Some kernels take the values of a meta tensor for none at all.
            raise RuntimeError(_MESSAGE.format(name=remotes[0].origin))
        if _changes_in_place(func):
            for remote in remotes:
                remote.norms.clear()

        def derived(tensor: Tensor) -> Tensor:
            if not tensor.is_meta or isinstance(tensor, cls):
                return tensor
            remote = cls.of(tensor, remotes[0].origin, remotes[0].near)
            if func in _KEEPING_VALUES:
                remote.norms = remotes[0].norms
            return remote

        return tree_map_only(Tensor, derived, result)

    def another(self) -> RemoteTensor:
        """One for another tensor of the same name and shape, of which no norm is known."""
        meta: Tensor = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return self.of(meta, self.origin, self.near)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        copied = self.another()
        copied.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            # A parameter of a subclass of Tensor has that class.
            copied = cast(RemoteTensor, torch.nn.Parameter(copied, self.requires_grad))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(_MESSAGE.format(name=self.origin))


_MESSAGE = (
    "{name!r} belongs to another stage of the pipeline: on this rank it has a shape, but no "
    "values. In hooks, iterate `trainer.strategy.whole_parameters()` in place of "
    "`named_parameters()`, on every rank and to its end, for values and gradients; for a file of "
    "all weights call `trainer.save_checkpoint`. In place of a penalty in the loss, give the "
    "optimizer its `weight_decay`." + see("values-between-layers")
)
_TENSOR: Any = Tensor
# A property of this class would let torch itself take the tensor for one with memory.
_DEVICE = _TENSOR.device.__get__
# What optimizers and hooks ask of each parameter in every step.
_WITHOUT_VALUES = {
    *(_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad_fn.__get__, _TENSOR.is_leaf.__get__),
    *(_TENSOR.requires_grad.__get__, _TENSOR.requires_grad.__set__, _TENSOR.requires_grad_),
    *(_TENSOR.shape.__get__, _TENSOR.dtype.__get__, _TENSOR.dim, _TENSOR.numel),
}
_KEEPING_VALUES = {
    _TENSOR.data.__get__,
    Tensor.detach,
    Tensor.clone,
    Tensor.flatten,
    Tensor.float,
    Tensor.double,
}


_MOVES = {Tensor.to: None, Tensor.cpu: "cpu", Tensor.cuda: "cuda"}
"""What moves a tensor to a device, which is that of the argument if it is not given here."""


def _moved(func: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A tensor moved as ``func`` does, of which it or the one to be like is on another stage."""
    if _MOVES[func] is not None:
        args, kwargs = (_MOVES[func],), {}
    copies = kwargs.pop("copy", False)
    likes = [each for each in (*args, *kwargs.values()) if isinstance(each, RemoteTensor)]
    device, dtype = parse_conversion(*args, **kwargs)
    device = likes[0].near if likes else device
    if not isinstance(tensor, RemoteTensor):
        return tensor.to(device, dtype, copy=copies)
    converted = tensor.type(dtype or tensor.dtype)
    if device in (None, tensor.near) and not copies:
        return converted
    moved = cast(RemoteTensor, converted.clone() if converted is tensor else converted)
    moved.near = device or tensor.near
    return moved


def _changes_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _changes_lists_in_place(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "").startswith("_foreach_") and _changes_in_place(func)


def _makes_new(func: Callable[..., Any]) -> bool:
    """Whether a function takes the shape of a tensor alone, and returns others of that shape."""
    name = getattr(func, "__name__", "")
    return name.startswith("new_") or name.endswith("_like")


def _known_norm(
    func: Callable[..., Any], remote: Any = None, *args: Any, **kwargs: Any
) -> Tensor | None:
    """What a function returns, if it is a norm of all values and known."""
    if func not in (Tensor.norm, torch.norm, torch.linalg.vector_norm):
        return None
    order = args[0] if args else kwargs.pop("p", kwargs.pop("ord", 2.0))
    options = (*args[1:], *kwargs.values())
    if not isinstance(remote, RemoteTensor) or not all(o is None or o is False for o in options):
        return None
    order = 2.0 if order in (None, "fro") else float(order)
    if order not in remote.norms:
        return None
    return torch.tensor(remote.norms[order], dtype=remote.dtype, device=remote.near)


def own_param_groups(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Leave only this rank's parameters in an optimizer's groups, inside the context."""
    return replaced_params(optimizer, lambda p: None if isinstance(p, RemoteTensor) else p)


@contextmanager
def replaced_params(
    optimizer: Optimizer, replacement: Callable[[Tensor], Tensor | None]
) -> Iterator[None]:
    """Replace parameters in an optimizer's groups inside the context; by None to leave them out."""
    whole = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        found = map(replacement, group["params"])
        group["params"] = [each for each in found if each is not None]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


@contextmanager
def following_parameters(module: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Give optimizers, after the context, what then has their parameters' names in a module."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    yield
    parameters = dict(module.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [parameters[names[p]] if p in names else p for p in group["params"]]


def closure_called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Call the closure that a step of an optimizer was given, if any, before the step.

    Returns:
        The keyword arguments for the step, of which a closure returns that loss, once.
    """
    closure = kwargs.pop("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return kwargs
    losses = [closure()]

    def called_before() -> Any:
        if not losses:
            raise MisconfigurationException(
                "The optimizer calls its closure more than once a step, as SAM and LBFGS do. "
                "Between the calls it changes weights by the gradients of all parameters, but this "
                "rank steps only some of them. Use an optimizer that takes one step a batch, or "
                "AxoSparseStrategy(g_inter=1) without shard_optimizer." + see("optimizers")
            )
        return losses.pop()

    return {**kwargs, "closure": called_before}


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
