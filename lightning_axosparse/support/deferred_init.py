"""Records the initialization of tensors without memory, and repeats it later for some of them.

Operators that run in the context return tensors on the meta device and are recorded. Those that
draw random numbers also run once for real, into memory that is freed at once, so that later draws
are the same as without the context. To initialize a tensor, the operators that it depends on run
again, random ones from the generator's state at that time. So values are the same to the bit,
whichever of the tensors are initialized::

    with DeferredInit() as deferred:
        a, b = torch.rand(10**9), torch.rand(3)  # no memory
    deferred.initialize(b)  # draws three numbers, the same as if `a` had been drawn before
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_axosparse.support.torch_internals import (
    TorchDispatchMode,
    is_random,
    makes_tensors,
    mutated_tensors,
    name_of,
    new_subclasses_observed,
    storage_id,
    swap_values,
    takes_device,
    tensors_in,
    tree_leaves,
    tree_map,
    version_of,
    with_gradient_hooks,
    without_dispatch_modes,
)
from lightning_axosparse.support.troubleshooting import see

_META = torch.device("meta")

# Random operators that read nothing of the tensor they fill.
_FILL = frozenset(
    f"aten::{name}_"
    for name in ("uniform", "normal", "random", "exponential", "log_normal", "cauchy")
) | {"aten::geometric_", "aten::bernoulli_"}
# It changes the storage of a tensor, and no values of a storage.
_SET_STORAGE = "aten::set_"
_EMPTY = "aten::empty"


class _View(NamedTuple):
    """A deferred tensor as a view of a storage on the meta device, of which it has the number."""

    storage: int
    offset: int | torch.SymInt
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        storage = storage_id(tensor.untyped_storage())
        return cls(storage, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of this form in its own memory."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)

    def in_storage(self, storage: torch.UntypedStorage) -> Tensor:
        """Return this view of a storage with values."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class _Constant(NamedTuple):
    """An ordinary tensor that a recorded operator read, and its version at that time."""

    tensor: Tensor
    version: int

    def read(self) -> Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "A tensor was copied into a weight and changed afterwards, before the layers of "
                "this rank were made. Give `copy_` a clone, or fill a new tensor for each layer."
                + see("layers-made-later")
            )
        return self.tensor


class _Operation(NamedTuple):
    """A recorded operator.

    Attributes:
        run: the operator.
        arguments: its positional and keyword arguments, with a ``_View`` or a ``_Constant`` for
            each tensor.
        reads: numbers of the storages that it reads or changes.
        results: views of the tensors that it returned; None for those without a new storage.
        generator: the random generator from which it drew, and the generator's state before.
    """

    run: Callable[..., Any]
    arguments: tuple[Any, Any]
    reads: frozenset[int]
    results: list[_View | None]
    generator: tuple[torch.Generator, Tensor] | None


class DeferredInit(TorchDispatchMode):
    """A context in which new tensors have no memory, until :meth:`initialize_except` gives some.

    Python code sees a deferred tensor on the device on which it will be. Its values can be read at
    any time: ``item``, ``tolist`` and ``numpy`` compute them, and so does an operator whose result
    has a shape that depends on values, or that writes into a tensor from outside the context. An
    array of ``numpy`` is read-only. Tensors that code creates on the meta device stay there. Other
    threads are not in the context: their tensors have values at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._devices: dict[int, torch.device] = {}
        self._storages: list[torch.UntypedStorage] = []
        self._operations: list[_Operation] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        self._tensors = WeakIdKeyDictionary()
        self._disguise = _Disguise(self)
        self._contexts = ExitStack()

    def __enter__(self) -> DeferredInit:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._contexts.enter_context(self._disguise)
        self._contexts.enter_context(new_subclasses_observed(self.track))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._contexts.close()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """Return the device on which a deferred tensor will be; None for any other tensor."""
        if not tensor.is_meta:
            return None
        return self._devices.get(storage_id(tensor.untyped_storage()))

    def values(self, tensor: Tensor) -> Tensor:
        """Return the present values of a deferred tensor, in their own memory."""
        view = _View.of(tensor)
        return view.in_storage(self._replay({view.storage})[view.storage])

    def initialize(self, tensor: Tensor) -> None:
        """Give one deferred tensor its values, in its own memory."""
        if self.device_of(tensor) is not None:
            _give_values(tensor, self.values(tensor))

    def initialize_except(self, unwanted: Iterable[Tensor]) -> None:
        """Give all deferred tensors that still exist their values, except the ``unwanted``.

        Tensors stay the same objects, and views of one another. At most one unwanted tensor has
        values at a time, or as many as one operator reads.

        Raises:
            RuntimeError: if a tensor has a gradient hook, which would be lost.
        """
        left_out = {id(tensor) for tensor in unwanted}
        tensors = [tensor for tensor in self._tensors if id(tensor) not in left_out]
        wanted = [tensor for tensor in tensors if self.device_of(tensor) is not None]
        views = [_View.of(tensor) for tensor in wanted]
        storages = self._replay({view.storage for view in views})
        for tensor, view in zip(wanted, views, strict=True):
            _give_values(tensor, view.in_storage(storages[view.storage]))

    def track(self, tensor: Any) -> None:
        """Remember a tensor for as long as it exists."""
        if isinstance(tensor, Tensor):
            self._tensors[tensor] = None

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self._dispatched(operator, args, kwargs or {})
        for leaf in tree_leaves(result):
            self.track(leaf)
        return result

    def _dispatched(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        devices = [device for device in map(self.device_of, tensors) if device is not None]
        to_meta = takes_device(operator) and _is_meta(kwargs.get("device"))
        if not (devices or to_meta) and (tensors or not takes_device(operator)):
            return operator(*args, **kwargs)
        device = torch.device(kwargs.get("device") or (devices[0] if devices else "cpu"))
        if device == _META and self._disguise.asked_for_meta:
            return operator(*args, **kwargs)
        if name_of(operator) == _EMPTY and 0 in args[0]:
            # It has no values, and may be set to a storage with values, as torch.load does.
            return operator(*args, **kwargs)
        if device == _META:  # torch took the device from a deferred tensor.
            device = devices[0] if devices else torch.device("cpu")
            kwargs = {**kwargs, "device": device}
        mutated = mutated_tensors(operator, args, kwargs)
        if not (mutated or makes_tensors(operator)) or not all(map(self.device_of, mutated)):
            return self._run_with_values(operator, args, kwargs)
        try:
            result = self._run_on_meta(operator, args, kwargs)
        except (NotImplementedError, RuntimeError):
            # The shape of the result depends on values, or the operator raises with values, too.
            return self._run_with_values(operator, args, kwargs)
        self._record(operator, args, kwargs, mutated, result, device)
        return result

    def _run_with_values(self, operator: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(self._with_values, (args, kwargs))
        return operator(*args, **kwargs)

    def _with_values(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and self.device_of(leaf) is not None:
            return self.values(leaf)
        return leaf

    def _run_on_meta(self, operator: Any, args: Any, kwargs: Any) -> Any:
        def on_meta(leaf: Any) -> Any:
            has_values = isinstance(leaf, Tensor) and not leaf.is_meta
            return leaf.to(_META) if has_values else leaf

        args, kwargs = tree_map(on_meta, (args, kwargs))
        if takes_device(operator):
            kwargs = {**kwargs, "device": _META}
            kwargs.pop("pin_memory", None)
        return operator(*args, **kwargs)

    def _record(
        self,
        operator: Any,
        args: Any,
        kwargs: Any,
        mutated: Sequence[Tensor],
        result: Any,
        device: torch.device,
    ) -> None:
        """Record an operator that has run on the meta device, unless it only returned views."""
        results = [self._new_view(leaf, device) for leaf in tree_leaves(result)]
        changed = [] if name_of(operator) == _SET_STORAGE else mutated
        written = {storage_id(tensor.untyped_storage()) for tensor in changed}
        written |= {view.storage for view in results if view is not None}
        if not written:
            return
        generator_state = None
        if is_random(operator):
            generator = _generator(args, kwargs, device)
            generator_state = generator, generator.get_state()
            self._draw(operator, args, kwargs, mutated, device)
        arguments = tree_map(self._recorded_argument, (args, kwargs))
        tensors = filter(self.device_of, tensors_in((args, kwargs)))
        reads = frozenset(storage_id(tensor.untyped_storage()) for tensor in tensors)
        for storage in written:
            self._writers[storage].append(len(self._operations))
        self._operations.append(_Operation(operator, arguments, reads, results, generator_state))

    def _new_view(self, leaf: Any, device: torch.device) -> _View | None:
        """Register a tensor with a new storage as deferred, and return its view; else None."""
        if not isinstance(leaf, Tensor):
            return None
        view = _View.of(leaf)
        if view.storage in self._devices:
            return None
        self._devices[view.storage] = device
        # Its number could be used again, if the storage were freed.
        self._storages.append(leaf.untyped_storage())
        return view

    def _draw(
        self,
        operator: Any,
        args: Any,
        kwargs: Any,
        mutated: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        """Draw the random numbers of an operator, and forget them."""
        filled = {id(tensor) for tensor in mutated if name_of(operator) in _FILL}

        def argument(leaf: Any) -> Any:
            return _View.of(leaf).empty(device) if id(leaf) in filled else self._with_values(leaf)

        args, kwargs = tree_map(argument, (args, kwargs))
        operator(*args, **kwargs)

    def _recorded_argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self.device_of(leaf) is None and leaf.is_meta:
            raise RuntimeError(
                f"A tensor on the meta device, of shape {tuple(leaf.shape)}, is to give a weight "
                "its values, which it does not have. Make it without device='meta'."
                + see("layers-made-later")
            )
        if self.device_of(leaf) is None:
            return _Constant(leaf, version_of(leaf))
        return _View.of(leaf)

    def _replay(self, wanted: Collection[int]) -> dict[int, torch.UntypedStorage]:
        """Run the operators on which storages depend; return these storages with their values."""
        positions = self._needed(wanted)
        last_use = {
            storage: position for position in positions for storage in self._touched(position)
        }
        storages: dict[int, torch.UntypedStorage] = {}
        states: dict[torch.Generator, Tensor] = {}
        for position in positions:
            operation = self._operations[position]
            if operation.generator is not None:
                generator, state = operation.generator
                states.setdefault(generator, generator.get_state())
                generator.set_state(state)
            _rerun(operation, storages)
            for storage in self._touched(position):
                if last_use[storage] == position and storage not in wanted:
                    del storages[storage]
        for generator, state in states.items():
            generator.set_state(state)
        return storages

    def _touched(self, position: int) -> frozenset[int]:
        operation = self._operations[position]
        return operation.reads | {view.storage for view in operation.results if view is not None}

    def _needed(self, storages: Iterable[int]) -> list[int]:
        """Return the positions of the operators on which storages depend, in order."""
        needed: set[int] = set()
        pending = [(storage, len(self._operations)) for storage in storages]
        while pending:
            storage, end = pending.pop()
            for position in self._writers[storage]:
                if position < end and position not in needed:
                    needed.add(position)
                    pending += [(read, position) for read in self._operations[position].reads]
        return sorted(needed)


class _Disguise(TorchFunctionMode):
    """Shows deferred tensors to Python code on the device on which they will be, with values."""

    def __init__(self, deferred: DeferredInit) -> None:
        super().__init__()
        self._deferred = deferred
        self.asked_for_meta = False
        """Whether the arguments of the function that now runs name the meta device."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        device = None
        if function in _ASKS_DEVICE or function in _READS_VALUES:
            device = self._deferred.device_of(args[0])
        if device is None:
            return self._call(function, args, kwargs or {})
        if function in _ASKS_DEVICE:
            return _ASKS_DEVICE[function](device)
        with without_dispatch_modes():
            values = function(self._deferred.values(args[0]), *args[1:], **(kwargs or {}))
        if function is not Tensor.tolist:
            values.flags.writeable = False
        return values

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function in _INDEXES:
            # torch would convert them to tensors on the meta device, without their values.
            args = (args[0], _as_index(args[1]), *(_as_value(v, args[0]) for v in args[2:]))
        self.asked_for_meta = any(map(_is_meta, (*args, *kwargs.values())))
        try:
            result = function(*args, **kwargs)
        finally:
            self.asked_for_meta = False
        self._deferred.track(result)  # `tensor.data` calls no operator.
        return result


_ASKS_DEVICE: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
}
_INDEXES = frozenset([Tensor.__getitem__, Tensor.__setitem__])
_READS_VALUES = frozenset([Tensor.numpy, Tensor.tolist, Tensor.__array__])


def _as_index(index: Any) -> Any:
    """Return an index with tensors for lists and arrays."""
    if isinstance(index, tuple):
        return tuple(map(_as_index, index))
    return torch.as_tensor(index) if isinstance(index, list | np.ndarray) else index


def _as_value(value: Any, target: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=target.dtype)


def _rerun(operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
    """Run a recorded operator on storages with values, and add the storages of its results."""

    def argument(leaf: Any) -> Any:
        if isinstance(leaf, _Constant):
            return leaf.read()
        return leaf.in_storage(storages[leaf.storage]) if isinstance(leaf, _View) else leaf

    args, kwargs = tree_map(argument, operation.arguments, is_leaf=_is_recorded_tensor)
    with torch.no_grad():
        results = tree_leaves(operation.run(*args, **kwargs))
        for view, result in zip(operation.results, results, strict=True):
            if view is None or view.storage in storages:
                continue
            if _View.of(result)[1:] != view[1:]:
                result = view.empty(result.device).copy_(result)
            storages[view.storage] = result.untyped_storage()


def _give_values(tensor: Tensor, values: Tensor) -> None:
    if with_gradient_hooks([tensor]):
        raise RuntimeError(
            f"A parameter of shape {tuple(tensor.shape)} got a gradient hook in `configure_model`, "
            "before it has values. Register the hook in `on_fit_start`." + see("layers-made-later")
        )
    swap_values(tensor, values.requires_grad_(tensor.requires_grad))


def _generator(args: Any, kwargs: Any, device: torch.device) -> torch.Generator:
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
    if given:
        return given[0]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _is_recorded_tensor(value: Any) -> bool:
    return isinstance(value, _View | _Constant)


def _is_meta(value: Any) -> bool:
    return value == "meta" if isinstance(value, str) else value == _META
