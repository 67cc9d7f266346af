"""Split: which tensors of a module live on which stages.

A parameter inside a layer lives on the layer's stage, one outside the layers on every stage, and
one that several layers share on each of their stages. In place of a tensor that lives elsewhere
stands one on the meta device, so that names, shapes and ``state_dict`` keys do not change.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn


class Split:
    """The places of a module's tensors.

    Args:
        module: the user's module, whole.
        layers: names of the layers, as in ``module.named_modules()``.
        parts: the layer indices of each stage.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str], parts: Sequence[range]) -> None:
        self.module = module
        self.everywhere = frozenset(range(len(parts)))
        self._stage_of_layer = {
            layers[index]: stage for stage, part in enumerate(parts) for index in part
        }
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.holders: dict[str, frozenset[int]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first = self.names[parameter]
            self.holders[first] = self.holders.get(first, frozenset()) | self._home(name)
        self._taken: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
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
        self._local = local
        stand_ins: dict[Tensor, Tensor] = {}
        for name, layer in self.module.named_modules():
            if name not in self._stage_of_layer or self._stage_of_layer[name] in local:
                continue
            for owner in layer.modules():
                for tensors in (owner._parameters, owner._buffers):
                    self._take(tensors, stand_ins)
        for tensor in stand_ins:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.grad = None

    def give_back(self) -> None:
        """Put the taken tensors back, on CPU, with values that are yet to be filled in."""
        for tensors, key, original in self._taken:
            stand_in = tensors[key]
            assert stand_in is not None
            if original.shape != stand_in.shape:
                original.data = torch.empty_like(stand_in, device="cpu")
            tensors[key] = original
        self._taken.clear()
        self._local = self.everywhere

    def _take(self, tensors: dict[str, Tensor | None], stand_ins: dict[Tensor, Tensor]) -> None:
        for key, tensor in tensors.items():
            if tensor is None or self._lives_here(tensor):
                continue
            if tensor not in stand_ins:
                meta = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                stand_ins[tensor] = (
                    nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
                )
            self._taken.append((tensors, key, tensor))
            tensors[key] = stand_ins[tensor]

    def _lives_here(self, tensor: Tensor) -> bool:
        name = self.names.get(tensor)  # type: ignore[call-overload]
        return name is not None and self._is_local(self.holders[name])

    def _home(self, name: str) -> frozenset[int]:
        stage = self.stage_of(name)
        return self.everywhere if stage is None else frozenset([stage])

    def _is_local(self, stages: frozenset[int]) -> bool:
        return not stages.isdisjoint(self._local)
