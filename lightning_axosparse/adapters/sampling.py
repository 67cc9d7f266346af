"""Sampling: all stages of a replica are given the same batches, in one process's order."""

from __future__ import annotations

import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states


def process_dataloader(dataloader: object, replica: int) -> object:
    """Seed a loader's workers by replica, so that all stages of a replica augment alike.

    Lightning, which comes after the strategy, would seed them by global rank; it leaves a
    ``worker_init_fn`` alone. As there, nothing happens without ``seed_everything(workers=True)``.

    Args:
        dataloader: any iterable that Lightning takes, with its sampler already in place.
        replica: which pipeline this rank belongs to.

    Returns:
        The same loader.
    """
    _auto_add_worker_init_fn(dataloader, replica)
    return dataloader


def agree_randomness(inter_group: dist.ProcessGroup | None, first_stage_rank: int) -> None:
    """Give all stages of a pipeline the first one's random state (torch's CPU, numpy's, Python's).

    Samplers, loaders, collate functions and transforms without a generator of their own draw from
    this state: ``DataLoader(shuffle=True)`` draws a seed from it whenever it is iterated. As long
    as steps leave the state alone, all stages make the same draws, and sample what one process
    would. Only where the layers of that one process draw from the same state, with dropout on the
    CPU, does its order differ, from the second epoch on.

    Args:
        inter_group: the stages of this pipeline; None if this process runs all of them.
        first_stage_rank: global rank of this pipeline's first stage.
    """
    if inter_group is None:
        return
    box = [_collect_rng_states(include_cuda=False)]
    dist.broadcast_object_list(box, src=first_stage_rank, group=inter_group)
    _set_rng_states(box[0])
