"""Gathers and reduces tensors over a process group as Lightning's own ``ddp`` does."""

from __future__ import annotations

import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    ReduceOp,
    _all_gather_ddp_if_available,
    _sync_ddp_if_available,
)
from torch import Tensor


def all_gather(tensor: Tensor, group: dist.ProcessGroup, sync_grads: bool) -> Tensor:
    """Stack the tensors of all ranks of a group, shape ``(ranks, *tensor.shape)``.

    Args:
        tensor: of the same shape on all ranks.
        group: the ranks.
        sync_grads: whether autograd follows the tensors of all ranks.
    """
    return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)


def reduce(tensor: Tensor, group: dist.ProcessGroup, reduce_op: ReduceOp | str | None) -> Tensor:
    """Reduce a tensor over a group, in place.

    Args:
        tensor: of the same shape on all ranks.
        group: the ranks.
        reduce_op: such as "mean"; None for a sum.
    """
    return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
