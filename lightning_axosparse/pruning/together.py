"""Together: collectives over a process group, or over nobody else when the group is None."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def all_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum a CPU tensor over the ranks of ``group``, in place."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


def all_gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The picklable ``value`` of every rank of ``group``, in rank order, on every rank."""
    if group is None:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def gather(value: T, group: dist.ProcessGroup | None) -> list[T] | None:
    """As :func:`all_gather`, but on the first rank of ``group`` alone; None on the others."""
    if group is None:
        return [value]
    first = dist.get_rank(group) == 0
    gathered: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    dist.gather_object(value, gathered, dst=dist.get_global_rank(group, 0), group=group)
    return gathered


def from_first(value: T, group: dist.ProcessGroup | None) -> T:
    """The picklable ``value`` of the first rank of ``group``."""
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]
