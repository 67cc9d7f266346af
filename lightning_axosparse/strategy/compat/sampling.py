"""Seeds loaders so that all stages of a replica are given the same batches."""

from __future__ import annotations

import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states


def process_dataloader(dataloader: object, data_rank: int) -> object:
    """Seed a loader's workers by data-parallel rank, so that all stages of a replica augment alike.

    Lightning calls this first and would then seed the workers by global rank, but not if there is a
    ``worker_init_fn``. As with Lightning, nothing happens without
    ``seed_everything(workers=True)``.

    Args:
        dataloader: any iterable that Lightning takes, with its sampler already in place.
        data_rank: the data-parallel rank.

    Returns:
        The same loader.
    """
    _auto_add_worker_init_fn(dataloader, data_rank)
    return dataloader


def broadcast_seed(group: dist.ProcessGroup | None, source: int) -> None:
    """Broadcast the random state (torch's on the CPU, numpy's, Python's) among some ranks.

    Samplers, loaders, collate functions and transforms without a generator of their own draw from
    this state: ``DataLoader(shuffle=True)`` draws a seed from it whenever it is iterated. As long
    as steps leave the state alone, all stages draw the same numbers, and sample what one process
    would. The order differs from one process, from the second epoch on, only where the layers of
    that process draw from the same state, as dropout on the CPU does.

    Args:
        group: the ranks that are given the same batches; None for this rank alone.
        source: global rank whose state the others get.
    """
    if group is None:
        return
    states = [_collect_rng_states(include_cuda=False)]
    dist.broadcast_object_list(states, src=source, group=group)
    _set_rng_states(states[0])
