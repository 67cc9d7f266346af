"""Sampling: all stages of a replica are given the same batches, in one process's order."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


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


def check_same_batch(batch: object, inter_group: dist.ProcessGroup | None) -> None:
    """Refuse a batch that differs between the stages of a pipeline.

    Costs a pass over the batch's bytes and a small gather: meant for the first batches of a loader.

    Args:
        batch: any collection of tensors, arrays, numbers and strings.
        inter_group: the stages of this pipeline; None if this process runs all of them.

    Raises:
        MisconfigurationException: on every stage, if the batch is not the same on all of them.
    """
    if inter_group is None:
        return
    mine = torch.tensor([fingerprint(batch)])
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(inter_group))]
    dist.all_gather(theirs, mine, group=inter_group)
    prints = [int(theirs_.item()) for theirs_ in theirs]
    if len(set(prints)) > 1:
        listed = ", ".join(f"stage {stage}: {value:08x}" for stage, value in enumerate(prints))
        raise MisconfigurationException(
            f"The stages of one pipeline were given different batches (checksums: {listed}), so the"
            " layers of one would be trained with the labels of another. Something that picks or"
            " transforms the samples is random in its own way on each rank: give the sampler, the"
            " dataset or the transform a seed that does not depend on the rank, and call"
            " `lightning.seed_everything(seed, workers=True)` if loader workers draw at random."
        )


def fingerprint(batch: object) -> int:
    """CRC-32 of the values, types and shapes in a batch, in order; 0 if there are none."""
    crc = 0

    def add(leaf: object) -> object:
        nonlocal crc
        for data in _bytes(leaf):
            crc = zlib.crc32(data, crc)
        return leaf

    apply_to_collection(batch, (Tensor, np.ndarray, int, float, complex, str, bytes), add)
    return crc


def _bytes(leaf: Any) -> Iterator[bytes]:
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        yield f"{leaf.dtype}{tuple(leaf.shape)}".encode()
        yield leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        yield f"{leaf.dtype}{leaf.shape}".encode()
        yield leaf.tobytes()
    else:
        yield repr(leaf).encode()
