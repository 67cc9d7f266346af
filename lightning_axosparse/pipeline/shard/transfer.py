"""Sends tensors of a module from ranks that store them to those that need them, one at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.pipeline.shard.sharding import free
from lightning_axosparse.sparse.module.parameters import forget, owners, pack, unpack


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
