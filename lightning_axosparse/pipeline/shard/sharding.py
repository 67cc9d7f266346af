"""Shards a module: this rank stores the tensors that its stages need, and frees the others.

A parameter of a layer is stored by the layer's stage, one outside the layers by every stage, and
one that several layers share by each of their stages. Any other tensor is replaced by a
``RemoteTensor``, so that names, shapes and ``state_dict`` keys do not change, and its gradient by
one that has norms, but no values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_axosparse.distributed.process_groups import all_sum
from lightning_axosparse.pipeline.shard.remote_tensor import NORMS, RemoteTensor
from lightning_axosparse.sparse.module.parameters import layouts
from lightning_axosparse.support.torch_internals import (
    move_gradient_hooks,
    plain_torch_functions,
    swap_values,
)


class ReshardedTensor(NamedTuple):
    """A tensor of a module whose layers have another partition.

    Attributes:
        name: its name in the module.
        tensor: the tensor.
        before: the stages of the former pipeline that have its value.
        after: the stages of the new pipeline that store it.
    """

    name: str
    tensor: Tensor
    before: frozenset[int]
    after: frozenset[int]


class Sharding:
    """The assignment of a module's tensors to the stages that store them."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[str],
        parts: Sequence[range],
        device: torch.device | None = None,
    ) -> None:
        self.module = module
        self._device = device or torch.device("cpu")
        self._layers = list(layers)
        self._replaced: dict[Tensor, Tensor] = {}
        self._assign(parts)
        self._local: Collection[int] = self.all_stages

    def stage_of(self, key: str) -> int | None:
        """Return the stage of the layer to which a parameter, buffer or state key belongs."""
        parts = key.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        return next((self._stage_of_layer[p] for p in prefixes if p in self._stage_of_layer), None)

    def holders_of(self, name: str) -> frozenset[int]:
        """Return the stages that store a parameter, also one that was added later."""
        return self.holders.get(name) or self._holders_of_name(name)

    def source_of(self, key: str) -> int:
        """Return the stage whose value of a state key is saved.

        For a key outside the layers it is the last stage, because only that runs a step to its end.
        """
        stage = self.stage_of(key)
        return max(self.all_stages) if stage is None else stage

    def local_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank stores, by name, in the module's order."""
        # Not by `holders_of`, as each step would call it for every parameter.
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if not (self.holders.get(name) or self._holders_of_name(name)).isdisjoint(self._local)
        }

    def parameters_outside_layers(self) -> list[nn.Parameter]:
        """Return the parameters that belong to no layer."""
        prefixes = tuple(f"{layer}." for layer in self._layers)
        local = self.local_parameters()
        return [parameter for name, parameter in local.items() if not name.startswith(prefixes)]

    def counted_names(self) -> set[str]:
        """Return the names of the parameters that this rank counts, each once in a pipeline."""
        return {name for name, stages in self.holders.items() if min(stages) in self._local}

    def split(self, stages: Collection[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of a full module that some stages store, and the others; by name."""
        local: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, tensor in self._tensors():
            is_local = not self._holders_of_tensor(name, tensor).isdisjoint(stages)
            (local if is_local else others)[name] = tensor
        return local, others

    def shard(self, local: Collection[int]) -> None:
        """Replace and free all tensors that the ``local`` stages do not store."""
        for tensor in self._replace_all(local, {}):
            free(tensor)

    def follow_changes(self) -> None:
        """Shard the tensors that hooks, which run on every rank, have added or replaced."""
        self._assign(self._parts)
        self.shard(self._local)

    def shard_copy(self, copied: nn.Module) -> None:
        """Replace the same tensors in a copy of the module."""
        memo: dict[int, Any] = {}
        modules = dict(self.module.named_modules())
        for name, copied_part in copied.named_modules():
            if name not in modules:
                continue
            part = modules[name]
            for tensors, originals in (
                (copied_part._parameters, part._parameters),
                (copied_part._buffers, part._buffers),
            ):
                for key, tensor in originals.items():
                    if isinstance(tensor, RemoteTensor):
                        tensors[key] = copy.deepcopy(tensor, memo)

    def restore_tensors(self) -> dict[Tensor, Tensor]:
        """Put the replaced tensors back, which are freed; return the meta tensor of each."""
        self.follow_changes()  # Hooks may have set tensors with values in layers of other stages.
        metas: dict[Tensor, Tensor] = {}
        for part in self.module.modules():
            kinds: tuple[dict[str, Any], ...] = part._parameters, part._buffers
            for tensors in kinds:
                for key, meta in tensors.items():
                    if isinstance(meta, RemoteTensor):
                        original = self._replaced.setdefault(meta, _without_values(meta))
                        metas[original] = meta
                        # The user may have frozen, unfrozen or hooked the meta tensor.
                        tensors[key] = original.requires_grad_(meta.requires_grad)
                        move_gradient_hooks(meta, original)
        self._replaced.clear()
        self._assign(self._parts)
        return metas

    def reshard(self, parts: Sequence[range], local: Collection[int]) -> list[ReshardedTensor]:
        """Change to another partition of the layers.

        Values are not moved: the module has the tensors that this rank stores from now on, still
        empty; those that it no longer stores are replaced, but not yet freed.

        Returns:
            Every tensor of the module, in the same order on all ranks.
        """
        metas = self.restore_tensors()
        tensors = [(name, tensor, self._sources(name, tensor)) for name, tensor in self._tensors()]
        self._assign(parts)
        self._replace_all(local, metas)
        return [
            ReshardedTensor(name, tensor, before, self._holders[tensor])
            for name, tensor, before in tensors
        ]

    def _assign(self, parts: Sequence[range]) -> None:
        self._parts = parts
        self.names = {parameter: name for name, parameter in self.module.named_parameters()}
        self.all_stages = frozenset(range(len(parts)))
        self._stage_of_layer = {
            self._layers[index]: stage for stage, part in enumerate(parts) for index in part
        }
        self._holders: dict[Tensor, frozenset[int]] = {}
        for name, tensor in self._tensors(remove_duplicate=False):
            known = self._holders.get(tensor, frozenset())
            self._holders[tensor] = known | self._holders_of_name(name)
        self.holders = {name: self._holders[parameter] for parameter, name in self.names.items()}

    def _tensors(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        return chain(
            self.module.named_parameters(remove_duplicate=remove_duplicate),
            self.module.named_buffers(remove_duplicate=remove_duplicate),
        )

    def _holders_of_tensor(self, name: str, tensor: Tensor) -> frozenset[int]:
        """Return the stages that store a tensor; a layer may have replaced a buffer by another."""
        return self._holders.get(tensor) or self._holders_of_name(name)

    def _sources(self, name: str, tensor: Tensor) -> frozenset[int]:
        """Return the stages that have a tensor's value."""
        holders = self._holders_of_tensor(name, tensor)
        if holders == self.all_stages and not isinstance(tensor, nn.Parameter):
            return frozenset([max(holders)])
        return holders

    def _replace_all(self, local: Collection[int], metas: dict[Tensor, Tensor]) -> list[Tensor]:
        """Replace the tensors that the ``local`` stages do not store, and return them."""
        self._local = local
        sparse = layouts(self.module)
        shapes: dict[Tensor, torch.Size] = {
            p: sparse[name].shape for p, name in self.names.items() if name in sparse
        }
        for name, layer in self.module.named_modules():
            if name not in self._stage_of_layer or self._stage_of_layer[name] in local:
                continue
            for path, owner in layer.named_modules(prefix=name):
                for tensors in (owner._parameters, owner._buffers):
                    self._replace(path, tensors, metas, shapes)
        return list(self._replaced.values())

    def _replace(
        self,
        path: str,
        tensors: dict[str, Tensor | None],
        metas: dict[Tensor, Tensor],
        shapes: Mapping[Tensor, torch.Size],
    ) -> None:
        for key, tensor in tensors.items():
            if tensor is None or isinstance(tensor, RemoteTensor):
                continue
            if not self._holders[tensor].isdisjoint(self._local):
                continue
            if tensor not in metas:
                shape = shapes.get(tensor, tensor.shape)
                metas[tensor] = self._remote(tensor, shape, f"{path}.{key}")
            tensors[key] = metas[tensor]
            self._replaced[metas[tensor]] = tensor

    def _remote(self, tensor: Tensor, shape: torch.Size, name: str) -> Tensor:
        meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
        remote = RemoteTensor.of(meta, name, self._device)
        return nn.Parameter(remote, tensor.requires_grad) if tensor in self.names else remote

    def _holders_of_name(self, name: str) -> frozenset[int]:
        stage = self.stage_of(name)
        return self.all_stages if stage is None else frozenset([stage])


def _without_values(meta: Tensor) -> Tensor:
    """Return a freed tensor for one that a hook has made of another stage's."""
    empty = torch.empty(0, dtype=meta.dtype)
    return nn.Parameter(empty, meta.requires_grad) if isinstance(meta, nn.Parameter) else empty


def free(tensor: Tensor) -> None:
    """Free the values and the gradient of a tensor."""
    if tensor.is_meta:
        empty = torch.empty(0, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        swap_values(tensor, empty)
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    tensor.grad = None


class RemoteGradients:
    """The gradients of parameters that other stages of this pipeline store.

    Without them, a sum over the gradients of all parameters would silently leave these out.
    """

    def __init__(
        self, sharding: Sharding, inter_group: Callable[[], dist.ProcessGroup | None]
    ) -> None:
        self._sharding, self._inter_group = sharding, inter_group
        self._gradients: dict[str, tuple[RemoteTensor, RemoteTensor]] = {}

    def update(self) -> None:
        """Create gradients again, after the module's remote parameters or their shapes changed."""
        self._gradients = {
            name: (parameter, parameter.without_norms())
            for name, parameter in self._sharding.module.named_parameters()
            if isinstance(parameter, RemoteTensor)
        }

    def mark_present(self) -> None:
        """Give all parameters a gradient with unknown norms, after a backward pass."""
        self.forget_norms()
        # Every step runs this, and attributes of a `RemoteTensor` take fifty times as long.
        with plain_torch_functions():
            for name, (parameter, gradient) in self._gradients.items():
                if gradient.dtype != parameter.dtype:  # A hook has converted the parameter.
                    gradient = parameter.without_norms()
                    self._gradients[name] = parameter, gradient
                parameter.grad = gradient if parameter.requires_grad else None

    def measure(self) -> None:
        """Exchange with all stages which gradients exist, and their norms; collective."""
        names = list(self._sharding.holders)
        counted, local = self._sharding.counted_names(), self._sharding.local_parameters()
        # A row for each parameter: whether its gradient exists, and the norms.
        table = torch.zeros(len(names), 1 + len(NORMS), dtype=torch.float64)
        for row, name in zip(table, names, strict=True):
            gradient = local[name].grad if name in counted else None
            if gradient is not None:
                row[0] = 1
                row[1:] = torch.stack([gradient.detach().norm(order) for order in NORMS])
        all_sum(table, self._inter_group())
        for name, (exists, *norms) in zip(names, table.tolist(), strict=True):
            if name in self._gradients:
                parameter, gradient = self._gradients[name]
                parameter.grad = gradient if exists else None
                gradient.norms.update(zip(NORMS, norms, strict=True))

    def forget_norms(self) -> None:
        """Forget the norms, as gradients change."""
        for _, gradient in self._gradients.values():
            gradient.norms.clear()
