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
"""Tensors of at most so many bytes are gathered with their names."""

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
    The first rank gets what the others have as deferred tensors; to make one is to ask its owner
    for it. Meanwhile the others :meth:`serve`, until the first calls :meth:`end`.

    Args:
        group: the stages of one pipeline, by a function, as a regrid changes them; None for one.
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
        """The larger tensors that this stage has for the first rank, by name."""
        return {tensor.key: tensor for tensor in self._offered}

    def gather(self, mine: Any) -> list[Any]:
        """Gather the parts of all stages on the first rank; an empty list on the others.

        A part is a tree of deferred tensors.
        """
        if self.is_first:
            mine = tree_map_only(DeferredTensor, _made_if_small, mine)
            return [mine, *tree_map_only(_Offer, self._deferred, gather(None, self.group)[1:])]
        gather(tree_map_only(DeferredTensor, self._offer, mine), self.group)
        return []

    def merged(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Gather the entries of all stages' parts on the first rank; none on the others."""
        return {name: entry for part in self.gather(mine) for name, entry in part.items()}

    def serve(self) -> None:
        """Send the first rank what it asks for, until it calls :meth:`end`; then drop the rest."""
        group = self.group
        assert group is not None
        first, request = dist.get_global_rank(group, 0), torch.empty((), dtype=torch.int64)
        while True:
            dist.recv(request, first, group)
            if request == _END:
                break
            dist.send(self._offered[int(request)].made().contiguous(), first, group)
        self._offered.clear()

    def end(self) -> None:
        """Let the other stages go on; called by the first rank when it has what it needs."""
        self.forget()
        if self.group is not None:
            for rank in dist.get_process_group_ranks(self.group)[1:]:
                dist.send(torch.tensor(_END), rank, self.group)

    def forget(self) -> None:
        """Drop what was offered, after all stages have written their own."""
        self._offered.clear()
        self.remote.clear()

    def agree(self, value: Any) -> Any:
        """The first rank's value, on all stages."""
        return broadcast_from_first(value, self.group)

    def _offer(self, tensor: DeferredTensor) -> Any:
        if tensor.nbytes <= _SMALL:
            return tensor.made()
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


def _made_if_small(tensor: DeferredTensor) -> Tensor:
    return tensor.made() if tensor.nbytes <= _SMALL else tensor


def gather_model_state(
    split: Sharding, stages: range, tensors: StageTensors, whole_values: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Gather the module's state on the first rank, in the key order of the whole module.

    ``whole_values`` has, by name, those of parameters of which the module has a part.

    Returns:
        The state, with the same tensor object under all names of a tied parameter, so that files
        hold it once; an empty dict on other stages. Larger tensors are deferred.
    """
    state = split.module.state_dict(keep_vars=True)
    tied = [entry.names for entry in owned_parameters(split.module) if entry.names[0] in state]
    first = {name: names[0] for names in tied for name in names}
    mine = {
        key: _deferred(f"state_dict.{key}", whole_values.get(key, value))
        for key, value in state.items()
        if first.get(key, key) == key and split.source_of(key) in stages
    }
    whole = tensors.merged(mine)
    return {key: whole[first.get(key, key)] for key in state} if whole else {}


def gather_remote_tensors(checkpoint: dict[str, Any], tensors: StageTensors) -> dict[str, Any]:
    """Give the first rank's checkpoint the values of tensors that hooks have put into it.

    The stage that has such a tensor has put its values at the same place of its own checkpoint.
    """
    leaves = [(path_name(path), leaf) for path, leaf in tree_leaves_with_path(checkpoint)]
    missing = {name for name, leaf in leaves if isinstance(leaf, RemoteTensor)}
    wanted = tensors.agree(missing)
    if not wanted:
        return checkpoint
    mine = {name: _deferred(name, leaf) for name, leaf in leaves if name in wanted - missing}
    found = tensors.merged(mine)
    complete: dict[str, Any] = tree_map_with_path(
        lambda path, leaf: found.get(path_name(path), leaf), checkpoint
    )
    return complete


def local_model_state(state: Mapping[str, Any], split: Sharding, stages: range) -> dict[str, Any]:
    """Return the part of a whole module's state that these stages hold."""
    return {key: value for key, value in state.items() if split.stage_of(key) in (None, *stages)}


def gather_shards(
    states: Mapping[str, Mapping[str, Any]],
    held: Mapping[str, nn.Parameter],
    tensors: StageTensors,
) -> dict[str, Mapping[str, Any]]:
    """Put a stage's optimizer state, of which each replica has a part, together on the first one.

    The state is by the names of the parameters, and empty on other replicas.
    """
    mine = {
        name: {key: _deferred(f"{key}.{name}", value) for key, value in state.items()}
        for name, state in states.items()
    }
    parts = tensors.gather(mine)
    if not parts:
        return {}
    return {
        name: {
            key: _joined(f"{key}.{name}", held[name].shape, [part[name][key] for part in parts])
            for key in state
        }
        for name, state in parts[0].items()
    }


def _joined(key: str, shape: torch.Size, parts: Sequence[Any]) -> Any:
    """A tensor of that shape by its parts, or the number that all replicas have."""
    first = parts[0]
    if not isinstance(first, Tensor) or first.shape == shape or not first.shape:
        return first  # among them a number that each replica counts, such as the steps
    if sum(part.numel() for part in parts) != shape.numel():
        return first

    def make() -> Tensor:
        pieces = [p.made() if isinstance(p, DeferredTensor) else p.cpu() for p in parts]
        return torch.cat(pieces).view(shape)

    return DeferredTensor(key, shape, first.dtype, make)


def gather_optimizer_state(
    optimizer: Optimizer,
    groups: GroupNames,
    states: Mapping[str, Mapping[str, Any]],
    sparse: Mapping[str, OwnedParameter],
    tensors: StageTensors,
) -> dict[str, Any]:
    """Gather an optimizer's state on the first rank, dense, in the form of its ``state_dict``.

    It includes the master weights of sparse weights whose dtype has fewer bits. ``states`` has the
    parameters that this rank keeps, and ``sparse`` those of them that are stored sparse. Other
    stages get an empty dict.
    """
    order = [name for group in groups for name in group]
    mine = {}
    for name in order:
        state, layout = states.get(name, {}), None
        if name in sparse and name in states:
            layout, state = sparse[name].layout, with_master(sparse[name], state)
        if state:
            mine[name] = {
                key: _deferred(f"optimizer_states.{key}.{name}", value, layout)
                for key, value in state.items()
            }
    by_name = tensors.merged(mine)
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
    held: Collection[str],
    sparse: Mapping[str, OwnedParameter],
) -> dict[str, Any]:
    """Return this rank's part of an optimizer's whole state dict, compressed for sparse weights."""
    order = [name for group in groups for name in group]
    local = {}
    for index, entry in state["state"].items():
        name = order[index]
        if name in held:
            layout = sparse[name].layout if name in sparse else None
            local[index] = _own(dict(entry), layout)
    return {"state": local, "param_groups": state["param_groups"]}


def _own(state: dict[str, Any], layout: Layout | None) -> dict[str, Any]:
    """A parameter's optimizer state with memory of its own, not that of a mapped file."""
    if layout is not None:
        return compress_state(state, layout)
    own: dict[str, Any] = tree_map_only(Tensor, Tensor.clone, state)
    return own


def _deferred(name: str, value: Any, layout: Layout | None = None) -> Any:
    """A tensor of this stage as checkpoints hold it, dense; ``layout`` is of the entries it has."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, SparseWeight):
        make = partial(_densified, value.entries, value.dtype, value.kept)
        return DeferredTensor(name, value.shape, value.dtype, make)
    if layout is not None and value.shape == (layout.nnz,):
        make = partial(_densified, layout, value.dtype, value)
        return DeferredTensor(name, layout.shape, value.dtype, make)
    own = value.made if isinstance(value, DeferredTensor) else value.detach
    return DeferredTensor(name, value.shape, value.dtype, own)


def _densified(layout: Layout, dtype: torch.dtype, kept: Tensor) -> Tensor:
    if isinstance(kept, DeferredTensor):
        kept = kept.made()
    return layout.to(kept.device).densify(kept.detach().to(dtype))
