"""Passes tensors of all stages to the first, one at a time, while it writes a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_axosparse.distributed.process_groups import broadcast_from_first, gather
from lightning_axosparse.support.files.deferred_tensor import DeferredTensor
from lightning_axosparse.support.torch_internals import tree_map_only

_SMALL = 1024
"""Tensors of at most so many bytes are gathered with their names."""

_END = -1


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
    The first stage gets what the others have as deferred tensors; to make one is to ask its owner
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
        """The larger tensors that this stage has for the first one, by name."""
        return {tensor.key: tensor for tensor in self._offered}

    def gather(self, mine: Any) -> list[Any]:
        """Gather the parts of all stages on the first one; an empty list on the others.

        Args:
            mine: a tree of this stage's part, whose tensors are deferred.
        """
        if self.is_first:
            mine = tree_map_only(DeferredTensor, _made_if_small, mine)
            return [mine, *tree_map_only(_Offer, self._deferred, gather(None, self.group)[1:])]
        gather(tree_map_only(DeferredTensor, self._offer, mine), self.group)
        return []

    def serve(self) -> None:
        """Send the first stage what it asks for, until it calls :meth:`end`; then drop the rest."""
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
        """Let the other stages go on; called by the first one when it has what it needs."""
        self.forget()
        if self.group is not None:
            for rank in dist.get_process_group_ranks(self.group)[1:]:
                dist.send(torch.tensor(_END), rank, self.group)

    def forget(self) -> None:
        """Drop what was offered, after all stages have written their own."""
        self._offered.clear()
        self.remote.clear()

    def agree(self, value: Any) -> Any:
        """The first stage's value, on all stages."""
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
