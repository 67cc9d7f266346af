"""Represents a tensor of another stage: it has a name and a shape, but reading its values raises.

Hooks may use all parameters of a module, for example for a norm. Those of other stages have no
values on this rank. Functions that need none work: shapes, copies, an average that nothing reads
here. Functions that need a value raise one error, which says how to get the value.

An optimizer steps this rank's parameters, but hooks see those of all stages in its groups, so that
a sum over ``optimizer.param_groups`` equals a sum over ``module.parameters()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.support.torch_internals import (
    TorchDispatchMode,
    is_random,
    parse_conversion,
    plain_torch_functions,
    storage_id,
    tensors_in,
    tree_leaves,
    tree_map_only,
)
from lightning_axosparse.support.troubleshooting import see

NORMS = (1.0, 2.0, torch.inf)
"""The exponents of the norms of gradients that stages send each other."""


class RemoteValueError(MisconfigurationException, RuntimeError):
    """Code reads values of a tensor that another stage stores."""

    @classmethod
    def of(cls, name: str) -> RemoteValueError:
        """Return the error for the tensor ``name``."""
        return cls(
            f"{name!r} belongs to another stage of the pipeline: on this rank it has a shape, but "
            "no values. A step has to call each layer itself, not another of its methods. In "
            "hooks, iterate `trainer.strategy.whole_parameters()` in place of `named_parameters()`"
            ", on every rank and to its end, for values and gradients; for a file of all weights "
            "call `trainer.save_checkpoint`. In place of a penalty in the loss, give the optimizer "
            "its `weight_decay`." + see("values-between-layers")
        )


class RemoteTensor(Tensor):
    """A meta tensor in place of one that another stage stores, or of one computed from it.

    Attributes:
        origin: name of the tensor in the module.
        local_device: the device of this rank's tensors.
        norms: the known norms of the values, by exponent; cleared when the values change.
    """

    origin: str
    local_device: torch.device
    norms: dict[float, float]
    _written: ClassVar[set[int] | None] = None
    """The storages of the remote tensors that were written to, while anybody asks for them."""

    @classmethod
    def of(cls, meta: Tensor, name: str, local_device: torch.device) -> RemoteTensor:
        """Let a meta tensor replace the tensor ``name`` of another stage."""
        remote = meta.as_subclass(cls)
        remote.origin, remote.local_device, remote.norms = name, local_device, {}
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
            # Code creates tensors on the device of a parameter.
            return remotes[0].local_device
        if func in _MOVES:
            return _moved(func, *args, **kwargs)
        if _changes_lists_in_place(func) and all(isinstance(each, cls) for each in args[0]):
            # Not called: numbers among its arguments may be on the meta device, too.
            for each in args[0]:
                each.norms.clear()
                each._note_write()
            return None
        norm = _known_norm(func, *args, **kwargs)
        return cls._called(func, args, kwargs, remotes) if norm is None else norm

    @classmethod
    def _called(
        cls,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        remotes: Sequence[RemoteTensor],
    ) -> Any:
        """Call a function on ``remotes``; raise an error if it needs their values."""
        device = remotes[0].local_device
        draws = _RealDraws(device) if _may_draw(func) else nullcontext()
        try:
            with plain_torch_functions(), draws:
                result = func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            raise RemoteValueError.of(remotes[0].origin) from error
        results = tensors_in(result)
        if not results:
            return result
        if not (_makes_new(func) or all(tensor.is_meta for tensor in results)):
            # Some kernels treat a meta tensor as one without elements.
            raise RemoteValueError.of(remotes[0].origin)
        if _changes_in_place(func):
            for remote in remotes:
                remote.norms.clear()
            for changed in args[:1]:
                if isinstance(changed, cls):
                    changed._note_write()

        def as_remote(tensor: Tensor) -> Tensor:
            if not tensor.is_meta or isinstance(tensor, cls):
                return tensor
            remote = cls.of(tensor, remotes[0].origin, remotes[0].local_device)
            if func in _PRESERVING_VALUES:
                remote.norms = remotes[0].norms
            return remote

        return tree_map_only(Tensor, as_remote, result)

    def _note_write(self) -> None:
        if RemoteTensor._written is not None:
            with plain_torch_functions():
                RemoteTensor._written.add(storage_id(self.untyped_storage()))

    @staticmethod
    @contextmanager
    def noting_writes() -> Iterator[set[int]]:
        """Return, with the context, the storages of the remote tensors that are written to in it.

        A write through ``x.data`` counts, which does not change the version of ``x``.
        """
        RemoteTensor._written = written = set[int]()
        try:
            yield written
        finally:
            RemoteTensor._written = None

    def without_norms(self) -> RemoteTensor:
        """Return a remote tensor of the same name and shape, with no known norms."""
        meta: Tensor = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return self.of(meta, self.origin, self.local_device)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        copied = self.without_norms()
        copied.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            # A parameter of a subclass of Tensor has that class.
            copied = cast(RemoteTensor, torch.nn.Parameter(copied, self.requires_grad))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RemoteValueError.of(self.origin)


class _RealDraws(TorchDispatchMode):
    """Lets functions of meta tensors draw the random numbers that those of real ones draw.

    Else a hook that adds noise to all parameters would give each rank other numbers for its own.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_random(func):
            given = tree_map_only(Tensor, self._zeros, (args, kwargs))
            func(*given[0], **given[1])
        return func(*args, **kwargs)

    def _zeros(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.clone()
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)


@cache
def _may_draw(func: Callable[..., Any]) -> bool:
    """Whether a function may draw random numbers: one of torch's operators, or of several."""
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return False
    operator = getattr(torch.ops.aten, name, None)
    if operator is None:
        return name.endswith("_")
    return any(is_random(getattr(operator, overload)) for overload in operator.overloads())


_TENSOR: Any = Tensor
# If this were a property of the class, torch itself would treat the tensor as one with memory.
_DEVICE = _TENSOR.device.__get__
# Called for each parameter in every step by optimizers and hooks, so they are called directly.
_WITHOUT_VALUES = {
    *(_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad_fn.__get__, _TENSOR.is_leaf.__get__),
    *(_TENSOR.requires_grad.__get__, _TENSOR.requires_grad.__set__, _TENSOR.requires_grad_),
    *(_TENSOR.shape.__get__, _TENSOR.dtype.__get__, _TENSOR.dim, _TENSOR.numel),
}
_PRESERVING_VALUES = {
    _TENSOR.data.__get__,
    Tensor.detach,
    Tensor.clone,
    Tensor.flatten,
    Tensor.float,
    Tensor.double,
}


_MOVES = {Tensor.to: None, Tensor.cpu: "cpu", Tensor.cuda: "cuda"}
"""Functions that move a tensor, and the device; None if it is an argument."""


def _moved(func: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Move a tensor as ``func`` does, if it or a tensor among the arguments is remote."""
    if _MOVES[func] is not None:
        args, kwargs = (_MOVES[func],), {}
    copies = kwargs.pop("copy", False)
    likes = [each for each in (*args, *kwargs.values()) if isinstance(each, RemoteTensor)]
    device, dtype = parse_conversion(*args, **kwargs)
    device = likes[0].local_device if likes else device
    if not isinstance(tensor, RemoteTensor):
        return tensor.to(device, dtype, copy=copies)
    converted = tensor.type(dtype or tensor.dtype)
    if device in (None, tensor.local_device) and not copies:
        return converted
    moved = cast(RemoteTensor, converted.clone() if converted is tensor else converted)
    moved.local_device = device or tensor.local_device
    return moved


def _changes_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _changes_lists_in_place(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "").startswith("_foreach_") and _changes_in_place(func)


def _makes_new(func: Callable[..., Any]) -> bool:
    """Whether a function only reads the shape of a tensor, to return new ones of that shape."""
    name = getattr(func, "__name__", "")
    return name.startswith("new_") or name.endswith("_like")


def _known_norm(
    func: Callable[..., Any], remote: Any = None, *args: Any, **kwargs: Any
) -> Tensor | None:
    """Return the result of a function if it is a known norm of all values; else None."""
    if func not in (Tensor.norm, torch.norm, torch.linalg.vector_norm):
        return None
    order = args[0] if args else kwargs.pop("p", kwargs.pop("ord", 2.0))
    options = (*args[1:], *kwargs.values())
    if not isinstance(remote, RemoteTensor) or not all(o is None or o is False for o in options):
        return None
    order = 2.0 if order in (None, "fro") else float(order)
    if order not in remote.norms:
        return None
    return torch.tensor(remote.norms[order], dtype=remote.dtype, device=remote.local_device)


def local_param_groups(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Return a context in which an optimizer's groups have only this rank's parameters."""
    return replaced_params(optimizer, lambda p: None if isinstance(p, RemoteTensor) else p)


@contextmanager
def replaced_params(
    optimizer: Optimizer, replacement: Callable[[Tensor], Tensor | None]
) -> Iterator[None]:
    """Replace parameters in an optimizer's groups inside the context; by None to leave them out."""
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        replaced = map(replacement, group["params"])
        group["params"] = [each for each in replaced if each is not None]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters


@contextmanager
def updating_param_groups(module: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Replace parameters in optimizers by those of the same names after the context."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    yield
    parameters = dict(module.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # An optimizer may have parameters that the module no longer has.
            group["params"] = [parameters.get(names.get(p, ""), p) for p in group["params"]]


def call_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Call the closure of a step of an optimizer, if any, before the step.

    Returns:
        The keyword arguments for the step, with a closure that returns the loss, once.
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


class LocalSteps:
    """Lets an optimizer step only this rank's parameters, until :meth:`remove`.

    Hooks that run inside the closure of a step see all parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._inside = ExitStack()
        self._hooks = [
            optimizer.register_step_pre_hook(self._enter),
            optimizer.register_step_post_hook(self._leave),
        ]

    def remove(self) -> None:
        """Let the optimizer step all parameters in its groups."""
        self._leave()
        for hook in self._hooks:
            hook.remove()

    def _enter(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = call_closure(args, kwargs)
        self._inside.enter_context(local_param_groups(optimizer))
        return (optimizer,), kwargs

    def _leave(self, *_: Any) -> None:
        self._inside.close()
