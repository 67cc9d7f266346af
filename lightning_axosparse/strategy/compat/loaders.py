"""The Trainer's loaders: the source of a batch, the first step, the same order on all stages."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn, has_iterable_dataset
from lightning.pytorch.utilities._pytree import tree_unflatten
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from lightning_axosparse.distributed.process_groups import broadcast
from lightning_axosparse.pipeline.shard.partition import ExampleCall
from lightning_axosparse.strategy.compat.internals import (
    overrides,
    random_states,
    set_random_states,
)
from lightning_axosparse.support.object_trees import put_together, take_apart

_log = logging.getLogger(__name__)

_TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
_STEPS = {
    "train": "training_step",
    "val": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
_FEW = 2
"""Number of samples in the batch of the first step: batch norms need two."""
_SHARED = (Tensor, np.ndarray, nn.Module, pl.Trainer)
"""Types of objects that a copied dataset shares with its original."""


@dataclass(frozen=True)
class Source:
    """The source of a batch.

    Attributes:
        name: "train", "val", "test" or "predict".
        loop: the running loop.
        index: index of the loader among the loop's; 0 where batches of several are combined.
        loaders: the loaders whose batches make up this one.
        combine: makes one batch of the loaders' batches.
    """

    name: str
    loop: object
    index: int
    loaders: tuple[Any, ...]
    combine: Callable[[Sequence[Any]], Any]

    @property
    def key(self) -> tuple[object, int]:
        """The loop and the index of the loader, which tell the run's loaders apart."""
        return self.loop, self.index

    @property
    def batch_size(self) -> int | None:
        """Number of samples in a full batch, if all loaders have the same; else None."""
        sizes = {_batch_size(loader) for loader in self.loaders}
        return sizes.pop() if len(sizes) == 1 else None


def source(trainer: pl.Trainer, step_arguments: Sequence[Any]) -> Source:
    """Find the loaders that the running loop takes its batches from.

    Args:
        trainer: the running Trainer.
        step_arguments: the arguments of the step behind the batch: the last one is the loader's
            index where a loop goes through several.
    """
    loop: Any = trainer._active_loop
    combined = loop._combined_loader
    several = len(combined.flattened) > 1
    return _of(trainer, combined, step_arguments[-1] if several and step_arguments else 0)


def first_step(trainer: pl.Trainer) -> ExampleCall | None:
    """Return the first step of a run that starts, on a few samples of its loader.

    The loader is created, but not iterated, and no worker starts. The random states of torch, numpy
    and Python are restored; datasets and collate functions are copied, with the generators from
    which they draw. From a list of batches, the first one is taken.

    Args:
        trainer: the Trainer, which has not created its loaders yet.

    Returns:
        The call of the module's step; None if there are no such samples.
    """
    loop: Any = trainer._active_loop
    if loop is None or loop._data_source.instance is None:
        return None
    with isolate_rng():
        try:
            return _step_of(trainer, loop._data_source.dataloader())
        except Exception:  # of the user's code; the run will raise it again
            _log.debug("No first step could be made", exc_info=True)
            return None


def _step_of(trainer: pl.Trainer, loaders: Any) -> ExampleCall:
    """Return the step on a few samples of the loaders of the running loop."""
    if not isinstance(loaders, CombinedLoader):
        loaders = CombinedLoader(loaders, "max_size_cycle" if trainer.training else "sequential")
    origin = _of(trainer, loaders, 0)
    batch = origin.combine([_first_batch(loader) for loader in origin.loaders])
    batch = _transferred(trainer, batch)
    name = _STEPS[origin.name]
    step = getattr(trainer.lightning_module, name)
    numbers = int(is_param_in_hook_signature(step, "batch_idx", min_args=2))
    if loaders._mode == "sequential" and len(loaders.flattened) > 1:
        numbers = 2
    return ExampleCall(name, (batch, *[0] * numbers))


def _of(trainer: pl.Trainer, combined: Any, index: int) -> Source:
    """Return the source of batches of the running loop."""
    loop, loaders = trainer._active_loop, combined.flattened
    stage: Any = trainer.state.stage
    name = stage.dataloader_prefix
    if combined._mode != "sequential":
        return Source(name, loop, 0, tuple(loaders), partial(_combined, combined._spec))
    return Source(name, loop, index, (loaders[index],), itemgetter(0))


def collates_as_usual(trainer: pl.Trainer, origin: Source) -> bool:
    """Whether batches are those of torch's ``default_collate``, and no hook changes them."""
    return not _changing_hooks(trainer) and all(
        _is_usual(loader) and loader.collate_fn is default_collate for loader in origin.loaders
    )


def _is_usual(loader: object) -> bool:
    """Whether a loader collates samples into batches as torch's does."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
    )


def _batch_size(loader: object) -> int | None:
    sampler = getattr(loader, "batch_sampler", None)
    # For prediction, Lightning wraps the sampler, and the loader says None.
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _changing_hooks(trainer: pl.Trainer) -> list[object]:
    """Return the module and the datamodule, if they have hooks that change batches."""
    owners = (trainer.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]
    return [owner for owner in owners if overrides(owner, *_TRANSFER_HOOKS)]


def _first_batch(loader: Any) -> Any:
    """Return a batch that repeats a loader's first sample, or the first of a list of batches."""
    if hasattr(loader, "__getitem__"):  # a list or tensor of batches
        return copy.deepcopy(loader[0])
    own = loader.dataset, loader.collate_fn
    dataset, collate = put_together(*take_apart(own, _SHARED))
    is_batched = loader.batch_sampler is not None
    if has_iterable_dataset(loader):
        sample = next(iter(dataset))
    elif is_batched and getattr(dataset, "__getitems__", None):
        return collate(dataset.__getitems__([0] * _FEW))
    else:
        sample = dataset[0]
    # Collate functions may change samples in place.
    samples = [copy.deepcopy(sample) for _ in range(_FEW)]
    return collate(samples if is_batched else samples[0])


def _transferred(trainer: pl.Trainer, batch: Any) -> Any:
    """Convert and move a batch of the first loader, as Lightning's loops do before a step.

    The module is not on the strategy's device yet, so the batch is moved to the module's.
    """
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, module.device, dataloader_idx=0)


def _combined(spec: Any, batches: Sequence[Any]) -> Any:
    return tree_unflatten(list(batches), spec)


def process_dataloader(dataloader: object, data_rank: int) -> object:
    """Seed a loader's workers by data-parallel rank, so that all stages of a replica augment alike.

    Lightning calls this first and would then seed the workers by global rank, unless there is a
    ``worker_init_fn``. As in Lightning, workers are seeded only with
    ``seed_everything(workers=True)``.

    Returns:
        The same loader.
    """
    _auto_add_worker_init_fn(dataloader, data_rank)
    return dataloader


def broadcast_seed(group: dist.ProcessGroup | None, source: int) -> None:
    """Broadcast the random state (torch's on the CPU, numpy's, Python's) among some ranks.

    Samplers, loaders, collate functions and transforms without a generator of their own draw from
    this state: ``DataLoader(shuffle=True)`` draws a seed from it whenever it is iterated. As long
    as steps do not change the state, all stages draw the same numbers, and the same samples as one
    process. The order differs from one process, from the second epoch on, only if the layers of
    that process draw from the same state, as dropout on the CPU does.
    """
    if group is not None:
        set_random_states(broadcast(random_states(include_cuda=False), source, group))
