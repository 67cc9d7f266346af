"""Loaders: which loaders of the Trainer a batch comes from, and what batches they would make."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.pytorch.utilities._pytree import tree_unflatten
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

_TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
_LEFT_ALONE = (type, ModuleType, Tensor, np.ndarray, pl.Trainer)
_MOST_OBJECTS, _LONGEST_CONTAINER = 10_000, 1_000


@dataclass(frozen=True)
class Source:
    """Where a batch comes from.

    Attributes:
        name: "train", "val", "test" or "predict".
        loop: the loop that runs.
        index: which of the loop's loaders; 0 where their batches come together.
        loaders: the loaders whose batches make up this one.
        combine: makes a batch of the loaders' batches.
    """

    name: str
    loop: object
    index: int
    loaders: tuple[Any, ...]
    combine: Callable[[Sequence[Any]], Any]

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch, where the loaders say so and agree."""
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
    stage: Any = trainer.state.stage
    name = stage.dataloader_prefix
    combined = loop._combined_loader
    loaders = combined.flattened
    if combined._mode != "sequential":
        return Source(name, loop, 0, tuple(loaders), partial(_together, combined._spec))
    index = step_arguments[-1] if len(loaders) > 1 and step_arguments else 0
    return Source(name, loop, index, (loaders[index],), _alone)


def collates_as_usual(trainer: pl.Trainer, origin: Source) -> bool:
    """Whether batches are what torch's ``default_collate`` makes, and nobody changes them."""
    return not _changing_hooks(trainer) and all(
        _is_usual(loader) and loader.collate_fn is default_collate for loader in origin.loaders
    )


def sample_batches(trainer: pl.Trainer, origin: Source, counts: Sequence[int]) -> list[Any] | None:
    """Make batches of so many times the same sample, in the way in which the steps get theirs.

    No loader is iterated and no worker started. The random states of torch, numpy and Python are
    afterwards as before, as are the generators and attributes of datasets and collate functions.

    Args:
        trainer: the running Trainer.
        origin: where the batches come from.
        counts: numbers of samples.

    Returns:
        A batch for each count; None where datasets cannot be indexed, or cannot do this.
    """
    loaders = origin.loaders
    if not all(_is_usual(loader) and not has_iterable_dataset(loader) for loader in loaders):
        return None
    touched = [part for loader in loaders for part in (loader.dataset, loader.collate_fn)]
    with isolate_rng(), _unchanged([*touched, *_changing_hooks(trainer)]):
        try:
            fetches = [_fetcher(loader) for loader in loaders]
            batches = [origin.combine([fetch(count) for fetch in fetches]) for count in counts]
            return [_transferred(trainer, batch, origin.index) for batch in batches]
        except Exception:
            # What cannot make a batch of one repeated sample tells nothing; real batches will.
            return None


def _is_usual(loader: object) -> bool:
    """Whether a loader does what torch's does: it collates samples into batches."""
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
    """The module and the datamodule, where they change batches after collation."""
    owners = (trainer.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]
    return [
        owner for owner in owners if any(is_overridden(hook, owner) for hook in _TRANSFER_HOOKS)
    ]


def _fetcher(loader: DataLoader[Any]) -> Callable[[int], Any]:
    dataset: Any = loader.dataset
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return lambda count: loader.collate_fn(dataset.__getitems__([0] * count))
    sample = dataset[0]
    # Collate functions may take samples apart.
    return lambda count: loader.collate_fn([copy.deepcopy(sample) for _ in range(count)])


def _transferred(trainer: pl.Trainer, batch: Any, index: int) -> Any:
    """What the loops do with a batch before a step."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=index)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=index)


def _together(spec: Any, batches: Sequence[Any]) -> Any:
    return tree_unflatten(list(batches), spec)


def _alone(batches: Sequence[Any]) -> Any:
    return batches[0]


@contextmanager
def _unchanged(roots: Iterable[object]) -> Iterator[None]:
    """Give the objects reachable from some their attributes and random states back."""
    restore = [undo for item in _reachable(roots) for undo in _undoing(item)]
    try:
        yield
    finally:
        for undo in restore:
            undo()


def _undoing(item: Any) -> Iterator[Callable[[], object]]:
    """What would bring an object back to where it is now."""
    if isinstance(item, torch.Generator):
        yield partial(item.set_state, item.get_state())
    elif isinstance(item, np.random.Generator):
        bits: Any = item.bit_generator
        yield partial(setattr, bits, "state", copy.deepcopy(bits.state))
    elif isinstance(item, np.random.RandomState):
        yield partial(item.set_state, item.get_state())
    elif isinstance(item, random.Random):
        yield partial(item.setstate, item.getstate())
    elif isinstance(getattr(item, "__dict__", None), dict) and not isinstance(item, FunctionType):
        yield partial(_restore_attributes, item, dict(vars(item)))


def _restore_attributes(item: Any, attributes: dict[str, Any]) -> None:
    vars(item).clear()
    vars(item).update(attributes)


def _reachable(roots: Iterable[object]) -> list[object]:
    """Objects that datasets, transforms and collate functions are made of."""
    found: dict[int, object] = {}
    waiting = list(roots)
    while waiting and len(found) < _MOST_OBJECTS:
        item = waiting.pop()
        if id(item) not in found and not isinstance(item, _LEFT_ALONE):
            found[id(item)] = item
            waiting += _parts(item)
    return list(found.values())


def _parts(item: Any) -> list[object]:
    if isinstance(item, (str, bytes, int, float)):
        return []
    if isinstance(item, (dict, list, tuple)):
        # Long ones hold samples.
        short = len(item) < _LONGEST_CONTAINER
        return list(item.values() if isinstance(item, dict) else item) if short else []
    if isinstance(item, MethodType):
        return [item.__self__]
    if isinstance(item, partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, FunctionType):
        cells = [_content(cell) for cell in item.__closure__ or ()]
        return [*cells, *(item.__defaults__ or ())]
    attributes = getattr(item, "__dict__", None)
    if isinstance(attributes, dict):
        return list(attributes.values())
    return []


def _content(cell: Any) -> object:
    try:
        return cast(object, cell.cell_contents)
    except ValueError:
        return None
