"""Split: which tensors of a module live on which stages.

A parameter inside a layer lives on the layer's stage, one outside the layers on every stage, and
one that several layers share on each of their stages. In place of a tensor that lives elsewhere
stands one on the meta device, so that names, shapes and ``state_dict`` keys do not change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_axosparse.sparse.swap import layouts


class Rehoused(NamedTuple):
    """A tensor of a module whose layers were dealt anew.

    ``before`` and ``after`` are the stages, of the former and of the new pipeline, that have its
    value and that need it.
    """

    name: str
    tensor: Tensor
    before: frozenset[int]
    after: frozenset[int]


class Split:
    """The places of a module's tensors.

    Args:
        module: the user's module, whole.
        layers: names of the layers, as in ``module.named_modules()``.
        parts: the layer indices of each stage.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str], parts: Sequence[range]) -> None:
        self.module = module
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self._layers = list(layers)
        sparse = layouts(module)
        self._shapes: dict[Tensor, torch.Size] = {
            parameter: sparse[name].shape if name in sparse else parameter.shape
            for parameter, name in self.names.items()
        }
        self._taken: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        self._deal(parts)
        self._local: Collection[int] = self.everywhere

    def stage_of(self, key: str) -> int | None:
        """The stage of the layer that a parameter, buffer or state key belongs to, if any."""
        parts = key.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        return next((self._stage_of_layer[p] for p in prefixes if p in self._stage_of_layer), None)

    def source_of(self, key: str) -> int:
        """The stage whose value of a state key counts.

        That is the last stage for what is outside the layers, because it alone runs a step to its
        end.
        """
        stage = self.stage_of(key)
        return max(self.everywhere) if stage is None else stage

    def held(self) -> dict[str, nn.Parameter]:
        """The parameters that live on this rank, by name, in the module's order."""
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if self._is_local(self.holders[name])
        }

    def counted(self) -> set[str]:
        """The names that this rank counts, so that each is counted once over a pipeline."""
        return {name for name, stages in self.holders.items() if min(stages) in self._local}

    def take_away(self, local: Collection[int]) -> None:
        """Put meta tensors in the place of all tensors that do not live on the ``local`` stages."""
        for tensor in self._take_all(local, {}):
            empty(tensor)

    def give_back(self) -> None:
        """Put the taken tensors back, on CPU, with values that are yet to be filled in."""
        for original, stand_in in self._put_back().items():
            if original.shape != stand_in.shape:
                original.data = torch.empty_like(stand_in, device="cpu")
        self._local = self.everywhere

    def redeal(self, parts: Sequence[range], local: Collection[int]) -> list[Rehoused]:
        """Deal the layers to other stages, of which the ``local`` ones live on this rank.

        No value moves: what arrives is in its place and yet to be filled in; what leaves is out of
        the module, and its values are yet to be dropped.

        Returns:
            Every tensor of the module, in the same order on all ranks.
        """
        stand_ins = self._put_back()
        tensors = [(name, tensor, self._sources(tensor)) for name, tensor in self._tensors()]
        self._deal(parts)
        self._take_all(local, stand_ins)
        return [
            Rehoused(name, tensor, before, self._homes[tensor]) for name, tensor, before in tensors
        ]

    def _deal(self, parts: Sequence[range]) -> None:
        self.everywhere = frozenset(range(len(parts)))
        self._stage_of_layer = {
            self._layers[index]: stage for stage, part in enumerate(parts) for index in part
        }
        self._homes: dict[Tensor, frozenset[int]] = {}
        for name, tensor in self._tensors(remove_duplicate=False):
            self._homes[tensor] = self._homes.get(tensor, frozenset()) | self._home(name)
        self.holders = {name: self._homes[parameter] for parameter, name in self.names.items()}

    def _tensors(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        return chain(
            self.module.named_parameters(remove_duplicate=remove_duplicate),
            self.module.named_buffers(remove_duplicate=remove_duplicate),
        )

    def _sources(self, tensor: Tensor) -> frozenset[int]:
        """The stages that have a tensor's value."""
        homes = self._homes[tensor]
        if homes == self.everywhere and not isinstance(tensor, nn.Parameter):
            return frozenset([max(homes)])
        return homes

    def _take_all(self, local: Collection[int], stand_ins: dict[Tensor, Tensor]) -> list[Tensor]:
        """Take what does not live on the ``local`` stages; some may have their stand-ins yet."""
        self._local = local
        for name, layer in self.module.named_modules():
            if name not in self._stage_of_layer or self._stage_of_layer[name] in local:
                continue
            for owner in layer.modules():
                for tensors in (owner._parameters, owner._buffers):
                    self._take(tensors, stand_ins)
        return [original for _, _, original in self._taken]

    def _take(self, tensors: dict[str, Tensor | None], stand_ins: dict[Tensor, Tensor]) -> None:
        for key, tensor in tensors.items():
            if tensor is None or self._is_local(self._homes[tensor]):
                continue
            if tensor not in stand_ins:
                stand_ins[tensor] = self._stand_in(tensor)
            self._taken.append((tensors, key, tensor))
            tensors[key] = stand_ins[tensor]

    def _stand_in(self, tensor: Tensor) -> Tensor:
        shape = self._shapes.get(tensor, tensor.shape)
        meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return nn.Parameter(meta, tensor.requires_grad) if tensor in self.names else meta

    def _put_back(self) -> dict[Tensor, Tensor]:
        """Put the taken tensors back as they are, and return what stood in for each."""
        stand_ins: dict[Tensor, Tensor] = {}
        for tensors, key, original in self._taken:
            stand_in = tensors[key]
            assert stand_in is not None
            stand_ins[original] = stand_in
            # Whoever froze or unfroze it here did so to what stood in for it.
            tensors[key] = original.requires_grad_(stand_in.requires_grad)
        self._taken.clear()
        return stand_ins

    def _home(self, name: str) -> frozenset[int]:
        stage = self.stage_of(name)
        return self.everywhere if stage is None else frozenset([stage])

    def _is_local(self, stages: frozenset[int]) -> bool:
        return not stages.isdisjoint(self._local)


def empty(tensor: Tensor) -> None:
    """Drop the values and the gradient of a tensor that lives elsewhere."""
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    tensor.grad = None
