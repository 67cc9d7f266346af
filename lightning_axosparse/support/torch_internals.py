"""Functions that use torch's private API; no other module does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
)
from torch.utils import _pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from lightning_axosparse.support.patched import patched

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_P = ParamSpec("_P")
_R = TypeVar("_R")

tree_map = _pytree.tree_map
SUPPORTED_NODES = _pytree.SUPPORTED_NODES
tree_map_with_path = _pytree.tree_map_with_path
tree_leaves_with_path = _pytree.tree_leaves_with_path
path_name = _pytree.keystr
"""The path to a leaf as text."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a subclass that torch functions treat as a plain tensor."""

plain_torch_functions = torch._C.DisableTorchFunctionSubclass
"""A context in which torch functions treat subclasses as plain tensors."""

grouped_mm: Any = torch._grouped_mm
"""The function that ``torch.nn.functional.grouped_mm`` calls, with which subclasses are called."""


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a pytree, as torch's own function does, in a fraction of its time."""
    leaves, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        kind = type(node)
        if kind is tuple or kind is list:
            waiting += node[::-1]
        elif kind is dict:
            waiting += reversed(node.values())
        elif kind in _pytree.SUPPORTED_NODES:
            leaves += _pytree.tree_leaves(node)
        elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
            waiting += node[::-1]
        else:
            leaves.append(node)
    return leaves


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves of a pytree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def tree_map_only(wanted: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    """Replace the leaves of one or several types, as torch's own function does, but faster."""
    kind = type(tree)
    if kind is dict:
        return {key: tree_map_only(wanted, function, child) for key, child in tree.items()}
    if kind is tuple or kind is list:
        return kind([tree_map_only(wanted, function, child) for child in tree])
    if kind in _pytree.SUPPORTED_NODES:
        return _pytree.tree_map_only(wanted, function, tree)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*[tree_map_only(wanted, function, child) for child in tree])
    return function(tree) if isinstance(tree, wanted) else tree


def never_compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that torch.compile does not compile, nor the functions that it calls."""
    uncompiled: Callable[_P, _R] = torch.compiler.disable(function)
    return uncompiled


def not_compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that torch.compile does not compile; it compiles those that this calls."""
    uncompiled: Callable[_P, _R] = torch.compiler.disable(function, recursive=False)
    return uncompiled


def fake_mode() -> Any:
    """Return a mode that can make tensors fake, for which operators compute only shapes."""
    # Imported here, because it takes a while.
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which no ``TorchDispatchMode`` observes the operators that run."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def dispatch_mode_is_active() -> bool:
    """Return whether a ``TorchDispatchMode`` observes the operators that run."""
    return _get_current_dispatch_mode() is not None


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was changed in place; 0 for one made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def parametrize_again(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Give a new module the attributes of a parametrized one of its class, and parametrize it."""
    vars(module).update(attributes)
    parametrize._inject_new_class(module)
    parametrizations: Any = module.parametrizations
    for name in parametrizations:
        parametrize._inject_property(module, name)


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set how often autograd considers tensors changed in place, see :func:`version_of`."""
    if tensors:
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Returns a number that two storages share exactly if they are the same memory."""


def mutated_tensors(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the tensors among the arguments that ``operator`` changes in place."""
    schema = getattr(operator, "_schema", None)  # Higher-order operators have none.
    if schema is None or not schema.is_mutable:
        return []
    passed = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    return tensors_in(
        [passed.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    )


def gradient_hooks(tensor: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks that run before and after a leaf's gradient is accumulated.

    These are torch's own dicts: a hook that is removed from them is not called.
    """
    before, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return {} if before is None else before, {} if after is None else after


def with_gradient_hooks(tensors: Iterable[Tensor], besides: type | tuple[()] = ()) -> list[Any]:
    """Return the tensors that have gradient hooks besides methods of the class ``besides``."""
    selected: list[Any] = []
    for tensor in tensors:  # This runs in every step, so it calls no further function.
        if tensor._backward_hooks:
            selected.append(tensor)
            continue
        for hook in (tensor._post_accumulate_grad_hooks or {}).values():
            if not isinstance(getattr(hook, "__self__", None), besides):
                selected.append(tensor)
                break
    return selected


def move_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Move the gradient hooks of ``source`` to ``target``; their handles stay valid."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks, present = getattr(source, name), getattr(target, name)
        if hooks:
            hooks.update({} if present is None else present)
            setattr(target, name, hooks)
            setattr(source, name, None)


@contextmanager
def backward_passes_by(run: Callable[..., Any]) -> Iterator[None]:
    """Call ``run`` in place of torch's own function for each backward pass inside the context.

    Args:
        run: called with torch's own function and its arguments: outputs, their gradients,
            ``keep_graph``, ``create_graph``, and inputs, which are empty for all leaves.
    """
    own = torch.autograd._engine_run_backward
    with patched(torch.autograd, "_engine_run_backward", partial(run, own)):
        yield


def graph_nodes(
    outputs: Iterable[Tensor | None], function: type[torch.autograd.Function]
) -> list[Any]:
    """Return the nodes that belong to ``function`` in the autograd graphs of ``outputs``."""
    nodes = [None if output is None else output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return [node for node in seen if isinstance(node, function._backward_cls)]


def is_tensor_parallel(hook: object) -> bool:
    """Return whether a module's hook comes from ``parallelize_module``."""
    return getattr(hook, "__module__", "").startswith("torch.distributed.tensor")


def forget_parallelized(module: nn.Module) -> None:
    """Remove from a module the hooks and the mark of ``parallelize_module``, to call it again."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if is_tensor_parallel(hook):
                del hooks[key]
    vars(module).pop("_distribute_module_applied", None)


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a ``DTensor``."""
    if type(tensor) is Tensor:
        return False
    # Imported here, because few runs need it.
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def await_collective(value: object) -> None:
    """Wait for a collective whose result nothing has read yet, if ``value`` is one.

    Torch keeps such results in memory until something waits for them.
    """
    if not isinstance(value, Tensor) or type(value) is Tensor:
        return
    # Imported here, because few runs need it.
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(value, AsyncCollectiveTensor):
        value.wait()


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is the result of ``torch.compile``, or was compiled in place."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def forward_mode() -> bool:
    """Return whether forward-mode differentiation or ``torch.jit.trace`` is active."""
    return forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None


batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Returns whether a tensor is a batch of ``autograd.grad(is_grads_batched=True)``."""

in_func_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Returns whether code runs inside a transform of ``torch.func``, such as ``vmap``."""


def transformed() -> bool:
    """Return whether :func:`forward_mode` or :func:`in_func_transform` is true."""
    return in_func_transform() or forward_mode()


def observed() -> bool:
    """Return whether a mode observes torch functions; it does not see nodes of autograd."""
    if not torch._C._is_torch_function_mode_enabled():
        return False
    # A default device is a mode, too, but observes nothing.
    return any(not isinstance(m, DeviceContext) for m in _get_current_function_mode_stack())


def apply_untransformed(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call ``function.apply`` without the Python code for transforms, none of which may be active.

    That code takes a third of the time of a call.
    """
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def backward_transformed(gradient: Tensor) -> bool:
    """Return whether the backward pass of ``gradient`` is transformed or differentiated itself."""
    return torch.is_grad_enabled() or batched(gradient) or transformed()


def parse_conversion(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and the dtype in the arguments of a call of ``Tensor.to``."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def swap_values(tensor: Tensor, other: Tensor) -> None:
    """Exchange the contents of two tensors; the Python objects stay the same.

    Unlike ``tensor.data = other``, it works between the meta device and another one.

    Raises:
        RuntimeError: if an autograd graph refers to one of them.
    """
    torch._C._swap_tensor_impl(tensor, other)


def onednn_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``left @ right + bias`` of float32 matrices on a CPU with any strides, by oneDNN."""
    run = torch.ops.mkldnn._linear_pointwise.default
    product: Tensor = run(left, right.t(), bias, "none", [], "")
    return product


@contextmanager
def new_subclasses_observed(observe: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``observe`` with each new parameter, or tensor of another subclass, inside the context.

    No operator makes them that a ``TorchDispatchMode`` could observe.
    """
    make = torch.Tensor._make_subclass

    def observed(*args: Any, **kwargs: Any) -> Tensor:
        tensor: Tensor = make(*args, **kwargs)
        observe(tensor)
        return tensor

    with patched(torch.Tensor, "_make_subclass", staticmethod(observed)):
        yield


@cache
def is_random(operator: Any) -> bool:
    """Return whether ``operator`` draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def makes_tensors(operator: Any) -> bool:
    """Return whether ``operator`` returns tensors."""
    return any("Tensor" in str(returned.type) for returned in operator._schema.returns)


def name_of(operator: Any) -> str:
    """Return the name of ``operator`` without its overload, such as ``aten::normal_``."""
    name: str = operator._schema.name
    return name


def takes_device(operator: Any) -> bool:
    """Return whether ``operator`` has an argument for the device of its result."""
    return any(argument.name == "device" for argument in operator._schema.arguments)


class _DeferredStorage(torch.UntypedStorage):
    """A storage on the meta device whose bytes are computed when torch.save writes them."""

    compute: Callable[[], Tensor]

    def cpu(self) -> torch.UntypedStorage:
        """Return a storage with the bytes of the tensor, and no others."""
        storage = self.compute().contiguous().untyped_storage()
        return storage if storage.nbytes() == self.nbytes() else storage.clone()


def reduced_for_save(
    shape: torch.Size, dtype: torch.dtype, compute: Callable[[], Tensor]
) -> tuple[Any, ...]:
    """Return a CPU tensor's result of ``__reduce_ex__``, with values computed by torch.save."""
    size = shape.numel() * dtype.itemsize
    storage = _DeferredStorage(size, device="meta")  # type: ignore[no-untyped-call]
    storage.compute = compute
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    typed._fake_device = "cpu"  # type: ignore[assignment]
    stride = torch.empty(shape, device="meta").stride()
    hooks: OrderedDict[str, Any] = OrderedDict()
    arguments = typed, 0, tuple(shape), stride, False, hooks
    return torch._utils._rebuild_tensor_v2, arguments


def writes_unreturned(operator: Any) -> bool:
    """Return whether ``operator`` writes to an argument that it does not return."""
    schema = operator._schema
    written = [arg for arg in schema.arguments if arg.alias_info and arg.alias_info.is_write]
    return bool(written) and not any(result.alias_info for result in schema.returns)


def entered_modes() -> Sequence[TorchFunctionMode]:
    """Return the modes that observe torch functions now, the outermost one first."""
    return list(_get_current_function_mode_stack())


class _Pausable:
    """A mode that can be paused, by :class:`paused`."""

    may_leave = True
    """Whether the mode is left while it is paused, if it is the innermost one."""
    _is_paused = False

    def pause(self) -> None:
        """Called when a pause begins."""

    def resume(self) -> None:
        """Called when a pause ends."""

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function or run an operator; subclasses override this."""
        return func(*args, **kwargs)


class PausableMode(_Pausable, TorchFunctionMode):
    """A mode that observes the torch functions of a step, except while it is paused."""

    _has_left = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._is_paused or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return self.observe(func, args, kwargs or {})

    def leave(self) -> None:
        """Leave the mode before its context ends, unless code has entered another one inside it."""
        if torch.overrides._get_current_function_mode() is self:
            self.__exit__(None, None, None)
            self._has_left = True

    def __exit__(self, *error: Any) -> None:
        if not self._has_left:
            super().__exit__(*error)  # type: ignore[no-untyped-call]


class PausableOperatorMode(_Pausable, TorchDispatchMode):
    """A mode that observes the operators that run, except while it is paused.

    It observes operators inside higher-order operators, too.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        return self.observe(func, args, kwargs or {})

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, as otherwise torch.compile would never compile code that first runs in the mode."""
        return True


class paused:
    """A context in which some modes observe nothing; they are in the order in which they began."""

    # A class, as a generator takes longer, and a step enters it for each layer and micro-batch.
    def __init__(self, modes: Sequence[PausableMode | PausableOperatorMode]) -> None:
        self._modes = [mode for mode in modes if not mode._is_paused]
        self._left: list[bool] = []

    @never_compiled
    def __enter__(self) -> None:
        for mode in reversed(self._modes):
            # A mode that is entered costs a microsecond for each torch function.
            innermost = _get_current_function_mode(), _get_current_dispatch_mode()
            leaves = mode.may_leave and mode in innermost
            if leaves:
                mode.__exit__(None, None, None)
            self._left.append(leaves)
            mode._is_paused = True
            mode.pause()

    @never_compiled
    def __exit__(self, *error: object) -> None:
        for mode, left in zip(self._modes, reversed(self._left), strict=True):
            mode.resume()
            if left:
                mode.__enter__()  # type: ignore[no-untyped-call]
            mode._is_paused = False
