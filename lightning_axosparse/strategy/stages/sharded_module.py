"""Leaves a module sharded after a run, and brings its tensors to ranks that need them later.

Each rank keeps the tensors of its layers, as they are stored. Those of other layers are on the meta
device, so that names and shapes do not change. A tensor is sent straight from a rank that has it,
one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pipeline.shard.sharding import free
from lightning_axosparse.sparse.module.parameter_state import forget, pack, unpack
from lightning_axosparse.sparse.module.parameters import Owner, owners
from lightning_axosparse.support.torch_internals import swap_values
from lightning_axosparse.support.troubleshooting import see

_left: WeakKeyDictionary[nn.Module, tuple[RemovableHandle, ...]] = WeakKeyDictionary()
"""The modules that a run has left sharded, with the hooks that keep a part from being used."""


def leave_sharded(module: nn.Module, freed: Mapping[Tensor, Tensor]) -> None:
    """Let a module be known as sharded, until a run takes it again.

    Args:
        module: the module.
        freed: its tensors that this rank does not keep, each with a meta tensor of its shape.
    """
    for tensor, meta in freed.items():
        _to_meta(tensor, meta.shape)
    take(module)
    _refuse(module)


def is_left_sharded(module: nn.Module) -> bool:
    """Whether a run has left this module sharded: the same on all ranks."""
    return module in _left


def take(module: nn.Module) -> None:
    """Let a module no longer be known as sharded."""
    for hook in _left.pop(module, ()):
        hook.remove()


def bring(module: nn.Module, wanted: Collection[str]) -> list[str]:
    """Give this rank the tensors of a sharded module that it wants; collective over the job.

    A parameter arrives as it is stored: where it is sparse, so it is here.

    Args:
        module: the module, the same on all ranks but for what is on the meta device.
        wanted: names of parameters and buffers.

    Returns:
        The names of those that this rank did not have.
    """
    tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    missing = [name for name in tensors if name in wanted and tensors[name].is_meta]
    held = {name for name, tensor in tensors.items() if not tensor.is_meta}
    everyone = all_gather((held, frozenset(missing)), dist.group.WORLD)
    owned, rank = owners(module), dist.get_rank()
    for name, tensor in tensors.items():
        holders = [other for other, (theirs, _) in enumerate(everyone) if name in theirs]
        asking = [other for other, (_, theirs) in enumerate(everyone) if name in theirs]
        if not holders:
            continue
        if rank == holders[0] and asking:
            packed = _packed(tensor, owned.get(name, []))
            for other in asking:
                dist.send_object_list([packed], dst=other)
        elif rank in asking:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=holders[0])
            _fill(tensor, received[0], owned.get(name, []))
    return missing


@contextmanager
def summoned(module: nn.Module, on_this_rank: bool) -> Iterator[None]:
    """Have all of a module inside the context; where it is left sharded, collective over the job.

    Args:
        module: the module.
        on_this_rank: whether this rank gets all of it; the others only send.
    """
    if not is_left_sharded(module):
        yield
        return
    tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    brought = bring(module, tensors if on_this_rank else ())
    try:
        with in_parts(module) if on_this_rank else nullcontext():
            yield
    finally:
        owned = owners(module)
        for name in brought:
            tensor = tensors[name]
            if isinstance(tensor, nn.Parameter):
                forget(tensor, owned[name], [])
            free(tensor)
            _to_meta(tensor, shapes[name])


@contextmanager
def in_parts(module: nn.Module) -> Iterator[None]:
    """Let ``state_dict`` of a module that is left sharded return what is there, in the context."""
    left = is_left_sharded(module)
    take(module)
    try:
        yield
    finally:
        if left:
            _refuse(module)


def _packed(tensor: Tensor, owned: Sequence[Owner]) -> Any:
    return pack(tensor, owned, []) if isinstance(tensor, nn.Parameter) else tensor.cpu()


def _fill(tensor: Tensor, received: Any, owned: Sequence[Owner]) -> None:
    free(tensor)
    if isinstance(tensor, nn.Parameter):
        unpack(received, tensor, owned, [], torch.device("cpu"))
    else:
        tensor.set_(received)


def _to_meta(tensor: Tensor, shape: torch.Size) -> None:
    if not tensor.is_meta:
        meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
        swap_values(tensor, meta.requires_grad_(tensor.requires_grad))


def _refuse(module: nn.Module) -> None:
    _left[module] = (
        module.register_state_dict_pre_hook(_refuse_state_dict),
        module.register_forward_pre_hook(_refuse_forward, prepend=True),
    )


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> Any:
    raise RuntimeError(_refusal(f"{type(module).__name__}.state_dict()"))


def _refuse_forward(module: nn.Module, args: Any) -> Any:
    raise RuntimeError(_refusal(type(module).__name__))


def _refusal(called: str) -> str:
    return (
        f"{called} was called after the run had ended, when each rank "
        "has only the weights of its own layers. On all ranks, enter `with "
        "trainer.strategy.summon_full_params():`, inside of which the first rank has all of them; "
        "or call `trainer.save_checkpoint`. Where the call has started the ranks itself, the "
        "module is whole when `fit` has returned." + see("values-between-layers")
    )
