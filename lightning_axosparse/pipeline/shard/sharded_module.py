"""Creates and loads only the layers of this rank, and leaves a module sharded after a run.

No rank allocates all of a module. Each stores the tensors of its layers; those of other layers are
on the meta device, so that names and shapes do not change. After a run, tensors are sent one at a
time, directly from a rank that stores one to a rank that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pipeline.shard.sharding import free
from lightning_axosparse.sparse.module.parameters import forget, owners, pack, unpack
from lightning_axosparse.support.torch_internals import swap_values
from lightning_axosparse.support.troubleshooting import see

_CPU, _META = torch.device("cpu"), torch.device("meta")

_left: WeakKeyDictionary[nn.Module, tuple[RemovableHandle, ...]] = WeakKeyDictionary()
"""The modules that a run has left sharded, with the hooks that refuse calls of them."""


def leave_sharded(module: nn.Module, freed: Mapping[Tensor, Tensor]) -> None:
    """Leave a module sharded until the next run.

    Args:
        module: the module.
        freed: its tensors that this rank does not store, each with a meta tensor of its shape.
    """
    for tensor, meta in freed.items():
        _to_meta(tensor, meta.shape)
    mark_whole(module)
    _refuse_calls(module)


def is_left_sharded(module: nn.Module) -> bool:
    """Whether a run has left this module sharded: the same on all ranks."""
    return module in _left


def mark_whole(module: nn.Module) -> None:
    """Mark a module as no longer left sharded."""
    for hook in _left.pop(module, ()):
        hook.remove()


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, by name."""
    return dict(chain(module.named_parameters(), module.named_buffers()))


class Transfer:
    """Sends tensors of a module, and frees those that are not needed.

    A parameter arrives in its storage format, which may be sparse, with its optimizer state, but
    without its gradient.

    Args:
        module: the module.
        optimizers: its optimizers.
        device: of this rank's tensors.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device
    ) -> None:
        self._owners = owners(module)
        self._optimizers, self._device = optimizers, device

    def send(self, name: str, tensor: Tensor, source: int, destinations: Collection[int]) -> None:
        """Send a tensor of this name; collective over its source and its destinations."""
        rank = dist.get_rank()
        if rank in destinations:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=source)
            self._fill(name, tensor, received[0])
        elif rank == source and destinations:
            packed = self._packed(name, tensor)
            for destination in destinations:
                dist.send_object_list([packed], dst=destination)

    def drop(self, name: str, tensor: Tensor) -> None:
        """Free a tensor of this name, and its optimizer state."""
        if isinstance(tensor, nn.Parameter):
            forget(tensor, self._owners[name], self._optimizers)
        free(tensor)

    def _packed(self, name: str, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return pack(tensor, self._owners[name], self._optimizers)
        return tensor.to("cpu", copy=True)

    def _fill(self, name: str, tensor: Tensor, packed: Any) -> None:
        free(tensor)
        if isinstance(tensor, nn.Parameter):
            unpack(packed, tensor, self._owners[name], self._optimizers, self._device)
        else:
            tensor.data = packed.to(self._device)


def gather_tensors(module: nn.Module, names: Collection[str]) -> list[str]:
    """Receive tensors of a sharded module on this rank; collective over all ranks.

    Returns:
        The names of those that this rank did not store before.
    """
    tensors = all_tensors(module)
    missing = [name for name in tensors if name in names and tensors[name].is_meta]
    stored = {name for name, tensor in tensors.items() if not tensor.is_meta}
    every_rank = all_gather((stored, frozenset(missing)), dist.group.WORLD)
    transfer = Transfer(module, [], _CPU)
    for name, tensor in tensors.items():
        holders = [rank for rank, (stores, _) in enumerate(every_rank) if name in stores]
        receivers = [rank for rank, (_, lacks) in enumerate(every_rank) if name in lacks]
        if holders:
            transfer.send(name, tensor, holders[0], receivers)
    return missing


@contextmanager
def full_module(module: nn.Module, on_this_rank: bool) -> Iterator[None]:
    """Gather a module that is left sharded inside the context; collective over all ranks.

    Args:
        module: the module; if it is not left sharded, nothing happens.
        on_this_rank: whether this rank gets the full module; the others only send.
    """
    if not is_left_sharded(module):
        yield
        return
    tensors = all_tensors(module)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    received = gather_tensors(module, tensors if on_this_rank else ())
    try:
        with state_dict_allowed(module) if on_this_rank else nullcontext():
            yield
    finally:
        transfer = Transfer(module, [], _CPU)
        for name in received:
            transfer.drop(name, tensors[name])
            _to_meta(tensors[name], shapes[name])


@contextmanager
def state_dict_allowed(module: nn.Module) -> Iterator[None]:
    """Allow ``state_dict`` of a module that is left sharded inside the context."""
    left = is_left_sharded(module)
    mark_whole(module)
    try:
        yield
    finally:
        if left:
            _refuse_calls(module)


def _to_meta(tensor: Tensor, shape: torch.Size) -> None:
    if not tensor.is_meta:
        meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
        swap_values(tensor, meta.requires_grad_(tensor.requires_grad))


def _refuse_calls(module: nn.Module) -> None:
    _left[module] = (
        module.register_state_dict_pre_hook(_refuse_state_dict),
        module.register_forward_pre_hook(_LeftShardedHook(), prepend=True),
        # Such as of a backbone, whose layers this rank may lack.
        *(
            part.register_state_dict_pre_hook(_refuse_lacking)
            for part in module.modules()
            if part is not module
        ),
    )


def _refuse_lacking(module: nn.Module, prefix: str, keep_vars: bool) -> Any:
    tensors = chain(module.parameters(recurse=False), module.buffers(recurse=False))
    if any(tensor.is_meta for tensor in tensors):
        _refuse_state_dict(module, prefix, keep_vars)


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> Any:
    raise RuntimeError(_refusal(f"{type(module).__name__}.state_dict()"))


class _LeftShardedHook:
    """Refuses calls of a module, and copies and pickles of it, of which the hook is a part."""

    def __call__(self, module: nn.Module, args: Any) -> NoReturn:
        raise RuntimeError(_refusal(type(module).__name__))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(_refusal("torch.save, pickle or copy.deepcopy of the module"))


def _refusal(called: str) -> str:
    return (
        f"{called} was called after the run had ended, when each rank "
        "has only the weights of its own layers. On all ranks, enter `with "
        "trainer.strategy.summon_full_params():`, inside of which the first rank has all of them; "
        "or call `trainer.save_checkpoint`. Where the call has started the ranks itself, the "
        "module is whole when `fit` has returned." + see("values-between-layers")
    )


@contextmanager
def parameters_on_meta(may_share: Callable[[Tensor], bool]) -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it in the context.

    A state dict that is loaded in the context gives parameters their values and memory.

    Args:
        may_share: whether a parameter may share the memory of a loaded tensor.
    """
    loading: dict[nn.Module, RemovableHandle] = {}
    allocate_parameters = partial(_allocate_parameters, may_share)

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if module not in loading:
            loading[module] = module.register_load_state_dict_pre_hook(allocate_parameters)
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.detach().to(_META), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    except NotImplementedError as error:
        empty = [
            f"{type(module).__name__}.{name} of shape {tuple(parameter.shape)}"
            for module in loading
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.is_meta
        ]
        if not empty or "meta tensor" not in str(error):
            raise
        raise _no_values(empty) from error
    finally:
        hook.remove()
        for handle in loading.values():
            handle.remove()


def _no_values(empty: Sequence[str]) -> MisconfigurationException:
    return MisconfigurationException(
        f"The module has no values for {empty[0]} and {len(empty) - 1} more of its parameters, "
        "which are on the meta device: `trainer.init_module(empty_init=True)` gives them none, and "
        "no checkpoint has. Load a checkpoint of the whole module, or leave out `empty_init`."
        + see("layers")
    )


def _allocate_parameters(
    may_share: Callable[[Tensor], bool],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    """Allocate a module's own parameters before they are loaded, or share the loaded memory."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(value, Tensor) or value.is_meta:
            continue
        matches = (value.shape, value.dtype) == (parameter.shape, parameter.dtype)
        if not parameter.is_meta:
            is_shared = matches and value.data_ptr() == parameter.data_ptr()
        elif is_shared := matches and may_share(value):
            swap_values(parameter, value.detach().requires_grad_(parameter.requires_grad))
        else:
            allocate([parameter])
        if is_shared:
            state[prefix + name] = parameter  # Torch does not copy a tensor onto itself.


def allocate(tensors: Iterable[Tensor]) -> None:
    """Give tensors on the meta device uninitialised memory on the CPU."""
    for tensor in tensors:
        if tensor.is_meta:
            empty = torch.empty_like(tensor, device="cpu", requires_grad=tensor.requires_grad)
            swap_values(tensor, empty)


def load_values(
    module: nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    unchanged: Iterable[Tensor] = (),
) -> None:
    """Load the tensors of a state that a sharded module stores, and read no others.

    Args:
        module: the module; its tensors on the meta device stay there.
        state: the state of the full module.
        strict: as for ``load_state_dict``.
        unchanged: tensors of the module that keep their values.
    """
    unchanged_ids = {id(tensor) for tensor in unchanged}

    def local(value: Any, present: Any) -> Any:
        if not (isinstance(value, Tensor) and isinstance(present, Tensor)):
            return value
        if present.is_meta:
            return torch.empty_like(value, device=_META)
        return present if id(present) in unchanged_ids else value

    with state_dict_allowed(module):
        tensors = module.state_dict(keep_vars=True)
    local_state = {name: local(value, tensors.get(name)) for name, value in state.items()}
    module.load_state_dict(local_state, strict=strict)


def validate_values(tensors: Iterable[tuple[str, Tensor]], stage: int) -> None:
    """Check that the tensors of a stage have values."""
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise MisconfigurationException(
            f"Stage {stage} has no values for {empty[0]!r} and {len(empty) - 1} more of its "
            "tensors, which are on the meta device. If the module was made under "
            "`trainer.init_module(empty_init=True)`, call `load_from_checkpoint` inside of it, "
            "give `ckpt_path=`, or leave out `empty_init`." + see("layers")
        )
