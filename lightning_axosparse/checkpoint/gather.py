"""Gathers the state of a pipeline in the form that one process saves, and selects a rank's part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.distributed.process_groups import broadcast_from_first, gather
from lightning_axosparse.pipeline.shard.remote_tensor import RemoteTensor
from lightning_axosparse.pipeline.shard.sharding import Sharding
from lightning_axosparse.sparse.module.optimizer_state import compress_state, with_master
from lightning_axosparse.sparse.module.parameters import OwnedParameter, owned_parameters
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.weight import SparseWeight
from lightning_axosparse.support.archive import DeferredTensor
from lightning_axosparse.support.torch_internals import (
    path_name,
    tree_leaves_with_path,
    tree_map_only,
    tree_map_with_path,
)

_SMALL = 1024
"""Tensors of at most this many bytes are gathered at once, not deferred."""

_END = -1

GroupNames = list[list[str]]
"""Parameter names of each param group, in the order of ``configure_optimizers``."""


@dataclass(frozen=True)
class _Offer:
    """A tensor that another stage has; can be pickled."""

    name: str
    rank: int
    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class StageTensors:
    """The tensors of a checkpoint on the stages that have them.

    Every stage calls :meth:`gather` with its part of the checkpoint, as often as there are parts.
    The first rank gets the others' tensors deferred: each asks its owner when it is
    read. Meanwhile the others :meth:`serve`, until the first calls :meth:`end`.

    Args:
        group: returns the stages of one pipeline, which a regrid changes; None if there is one.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup | None]) -> None:
        self._find_group = group
        self._offered: list[DeferredTensor] = []
        self.remote: set[str] = set()
        """The names of the tensors that other stages have offered to this one."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The stages of the pipeline."""
        return self._find_group()

    @property
    def is_first(self) -> bool:
        """Whether this stage writes the checkpoint."""
        return self.group is None or dist.get_rank(self.group) == 0

    def offered(self) -> dict[str, DeferredTensor]:
        """Return the larger tensors of this stage that the first rank may ask for, by name."""
        return {tensor.key: tensor for tensor in self._offered}

    def gather(self, part: Any) -> list[Any]:
        """Gather the parts of all stages on the first rank; an empty list on the others.

        A part is a tree of deferred tensors.
        """
        if self.is_first:
            part = tree_map_only(DeferredTensor, _computed_if_small, part)
            return [part, *tree_map_only(_Offer, self._deferred, gather(None, self.group)[1:])]
        gather(tree_map_only(DeferredTensor, self._offer, part), self.group)
        return []

    def gather_entries(self, local: dict[str, Any]) -> dict[str, Any]:
        """Gather the entries of all stages' parts on the first rank; none on the others."""
        return {name: entry for part in self.gather(local) for name, entry in part.items()}

    def serve(self) -> None:
        """Send the first rank the tensors it asks for, until it calls :meth:`end`."""
        group = self.group
        assert group is not None
        first, request = dist.get_global_rank(group, 0), torch.empty((), dtype=torch.int64)
        while True:
            dist.recv(request, first, group)
            if request == _END:
                break
            dist.send(self._offered[int(request)].computed().contiguous(), first, group)
        self._offered.clear()

    def end(self) -> None:
        """Let the other stages continue; called by the first rank when it needs no more tensors."""
        self.forget()
        if self.group is not None:
            for rank in dist.get_process_group_ranks(self.group)[1:]:
                dist.send(torch.tensor(_END), rank, self.group)

    def forget(self) -> None:
        """Drop the offered tensors, after all stages have written theirs."""
        self._offered.clear()
        self.remote.clear()

    def broadcast(self, value: Any) -> Any:
        """Return the first rank's value on all stages."""
        return broadcast_from_first(value, self.group)

    def _offer(self, tensor: DeferredTensor) -> Any:
        if tensor.nbytes <= _SMALL:
            return tensor.computed()
        self._offered.append(tensor)
        place = len(self._offered) - 1
        return _Offer(tensor.key, dist.get_rank(), place, tuple(tensor.shape), tensor.dtype)

    def _deferred(self, offer: _Offer) -> DeferredTensor:
        self.remote.add(offer.name)
        return DeferredTensor(offer.name, offer.shape, offer.dtype, lambda: self._fetch(offer))

    def _fetch(self, offer: _Offer) -> Tensor:
        dist.send(torch.tensor(offer.place), offer.rank, self.group)
        tensor = torch.empty(offer.shape, dtype=offer.dtype)
        dist.recv(tensor, offer.rank, self.group)
        return tensor


def _computed_if_small(tensor: DeferredTensor) -> Tensor:
    return tensor.computed() if tensor.nbytes <= _SMALL else tensor


def gather_model_state(
    split: Sharding, stages: range, tensors: StageTensors, whole_values: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Gather the module's state on the first rank, in the key order of the full module.

    ``whole_values`` has the full values, by name, of parameters of which the module has a part.

    Returns:
        The state, with the same tensor object under all names of a tied parameter, so that files
        hold it once; an empty dict on other stages. Larger tensors are deferred.
    """
    state = split.module.state_dict(keep_vars=True)
    tied = [entry.names for entry in owned_parameters(split.module) if entry.names[0] in state]
    first = {name: names[0] for names in tied for name in names}
    local = {
        key: _deferred(f"state_dict.{key}", whole_values.get(key, value))
        for key, value in state.items()
        if first.get(key, key) == key and split.source_of(key) in stages
    }
    full = tensors.gather_entries(local)
    return {key: full[first.get(key, key)] for key in state} if full else {}


def gather_remote_tensors(checkpoint: dict[str, Any], tensors: StageTensors) -> dict[str, Any]:
    """Fill the first rank's checkpoint with the remote tensors that hooks have put into it.

    The stage that has such a tensor has put its values at the same place of its checkpoint.
    """
    leaves = [(path_name(path), leaf) for path, leaf in tree_leaves_with_path(checkpoint)]
    missing = {name for name, leaf in leaves if isinstance(leaf, RemoteTensor)}
    wanted = tensors.broadcast(missing)
    if not wanted:
        return checkpoint
    local = {name: _deferred(name, leaf) for name, leaf in leaves if name in wanted - missing}
    values = tensors.gather_entries(local)
    complete: dict[str, Any] = tree_map_with_path(
        lambda path, leaf: values.get(path_name(path), leaf), checkpoint
    )
    return complete


def local_model_state(state: Mapping[str, Any], split: Sharding, stages: range) -> dict[str, Any]:
    """Return the part of a full module's state that these stages hold."""
    return {key: value for key, value in state.items() if split.stage_of(key) in (None, *stages)}


def gather_shards(
    states: Mapping[str, Mapping[str, Any]],
    parameters: Mapping[str, nn.Parameter],
    tensors: StageTensors,
) -> dict[str, Mapping[str, Any]]:
    """Unshard a stage's optimizer state, of which each replica has a part, on the first one.

    Returns it by the names of the parameters, and an empty dict on other replicas.
    """
    local = {
        name: {key: _deferred(f"{key}.{name}", value) for key, value in state.items()}
        for name, state in states.items()
    }
    parts = tensors.gather(local)
    if not parts:
        return {}
    return {
        name: {
            key: _unshard(f"{key}.{name}", parameters[name].shape, [p[name][key] for p in parts])
            for key in state
        }
        for name, state in parts[0].items()
    }


def _unshard(key: str, shape: torch.Size, parts: Sequence[Any]) -> Any:
    """Return a tensor of this shape from its parts, or the number that all replicas have."""
    first = parts[0]
    if not isinstance(first, Tensor) or first.shape == shape or not first.shape:
        return first  # among them a number that each replica counts, such as the steps
    if sum(part.numel() for part in parts) != shape.numel():
        return first

    def concatenate() -> Tensor:
        pieces = [p.computed() if isinstance(p, DeferredTensor) else p.cpu() for p in parts]
        return torch.cat(pieces).view(shape)

    return DeferredTensor(key, shape, first.dtype, concatenate)


def gather_optimizer_state(
    optimizer: Optimizer,
    groups: GroupNames,
    states: Mapping[str, Mapping[str, Any]],
    sparse: Mapping[str, OwnedParameter],
    tensors: StageTensors,
) -> dict[str, Any]:
    """Gather an optimizer's state on the first rank, dense, in the form of its ``state_dict``.

    It includes the master weights of sparse weights whose dtype has fewer bits. ``states`` has the
    state of this rank's parameters, and ``sparse`` those that are stored sparse. Other stages get
    an empty dict.
    """
    order = [name for group in groups for name in group]
    local = {}
    for name in order:
        state, layout = states.get(name, {}), None
        if name in sparse and name in states:
            layout, state = sparse[name].layout, with_master(sparse[name], state)
        if state:
            local[name] = {
                key: _deferred(f"optimizer_states.{key}.{name}", value, layout)
                for key, value in state.items()
            }
    by_name = tensors.gather_entries(local)
    if not tensors.is_first:
        return {}
    index = {name: position for position, name in enumerate(order)}
    return {
        "state": {index[name]: by_name[name] for name in order if name in by_name},
        "param_groups": [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [index[name] for name in members],
            }
            for group, members in zip(optimizer.param_groups, groups, strict=True)
        ],
    }


def local_optimizer_state(
    state: Mapping[str, Any],
    groups: GroupNames,
    local_names: Collection[str],
    sparse: Mapping[str, OwnedParameter],
) -> dict[str, Any]:
    """Return this rank's part of an optimizer's full state dict, compressed for sparse weights."""
    order = [name for group in groups for name in group]
    local = {}
    for index, entry in state["state"].items():
        name = order[index]
        if name in local_names:
            layout = sparse[name].layout if name in sparse else None
            local[index] = _copied(dict(entry), layout)
    return {"state": local, "param_groups": state["param_groups"]}


def _copied(state: dict[str, Any], layout: Layout | None) -> dict[str, Any]:
    """Return a copy of a parameter's optimizer state, which may be mapped from a file."""
    if layout is not None:
        return compress_state(state, layout)
    copied: dict[str, Any] = tree_map_only(Tensor, Tensor.clone, state)
    return copied


def _deferred(name: str, value: Any, layout: Layout | None = None) -> Any:
    """Return a tensor of this stage, deferred and dense; ``layout`` is that of unpruned values."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, SparseWeight):
        make = partial(_densified, value.sparse_layout, value.dtype, value.stored_values)
        return DeferredTensor(name, value.shape, value.dtype, make)
    if layout is not None and value.shape == (layout.nnz,):
        make = partial(_densified, layout, value.dtype, value)
        return DeferredTensor(name, layout.shape, value.dtype, make)
    read = value.computed if isinstance(value, DeferredTensor) else value.detach
    return DeferredTensor(name, value.shape, value.dtype, read)


def _densified(layout: Layout, dtype: torch.dtype, values: Tensor) -> Tensor:
    if isinstance(values, DeferredTensor):
        values = values.computed()
    return layout.to(values.device).densify(values.detach().to(dtype))
