"""Brings the weights of the ranks into the caller's module, one tensor at a time.

Each rank writes what it keeps to a file of its own. The caller reads it into the memory of its own
parameters, so that neither a rank nor a buffer in between ever has the whole model.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, runtime_checkable

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_axosparse.support.torch_internals import swap_values


@runtime_checkable
class ReturnsShard(Protocol):
    """A strategy of which each rank keeps a part of the module, and returns that alone."""

    def keep_sharded(self) -> None:
        """Leave the module sharded when a run ends; :meth:`release_shard` is called then."""

    def release_shard(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank returns, by name, dense, and free it, one tensor at a time."""


class _Header(NamedTuple):
    """What stands in the file before the bytes of a tensor."""

    name: str
    dtype: torch.dtype
    shape: torch.Size


def returned_by(strategy: Strategy, rank: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a rank returns after a run; without sharding, the first one returns all."""
    if isinstance(strategy, ReturnsShard):
        yield from strategy.release_shard()
    elif rank == 0 and strategy.lightning_module is not None:
        module = strategy.lightning_module
        yield from chain(module.named_parameters(), module.named_buffers())


def write(tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Write named tensors to a file, each before the next one is asked for."""
    with path.open("wb") as file:
        for name, tensor in tensors:
            pickle.dump(_Header(name, tensor.dtype, tensor.shape), file)
            file.write(_bytes_of(tensor.detach().cpu().contiguous()))


def read(path: Path, module: nn.Module) -> None:
    """Read the tensors of a file into those of ``module`` that have their names.

    What has another shape or dtype, or is on the meta device, gets memory of its own.
    """
    targets = dict(
        chain(
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        )
    )
    with path.open("rb") as file:
        while file.peek(1):
            header = pickle.load(file)
            _read_into(targets.get(header.name), header, file)


def _read_into(target: Tensor | None, header: _Header, file: BinaryIO) -> None:
    fits = (
        target is not None
        and (target.shape, target.dtype) == (header.shape, header.dtype)
        and target.device.type == "cpu"
        and target.is_contiguous()
    )
    if fits and target is not None:
        file.readinto(_bytes_of(target.detach()))  # type: ignore[attr-defined]
        return
    values = torch.empty(header.shape, dtype=header.dtype)
    file.readinto(_bytes_of(values))  # type: ignore[attr-defined]
    if target is not None:
        _replace(target, values)


def _replace(target: Tensor, values: Tensor) -> None:
    """Copy into the memory of a tensor, which views may share, or give it that of ``values``."""
    if target.is_meta:
        swap_values(target, values.requires_grad_(target.requires_grad))
    elif target.shape == values.shape and target.dtype == values.dtype:
        target.detach().copy_(values)
    else:
        target.data = values


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
