"""Wraps Lightning's private API for several modules: hooks, devices, collectives, files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from zipfile import is_zipfile

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core import saving
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.support.archive import load_mapped
from lightning_axosparse.support.files import reading
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.remote_files import local_path
from lightning_axosparse.support.torch_internals import tensors_in

_KNOWN = ("lightning.", "pytorch_lightning.", "lightning_axosparse.")
_C = TypeVar("_C", bound="RankLocalCallback")

move_optimizers = _optimizers_to_device
"""Moves the state of optimizers to a device."""

all_gather = _all_gather_ddp_if_available
"""Stacks the tensors of all ranks of a group, shape ``(ranks, *tensor.shape)``."""

random_states = _collect_rng_states
"""Returns the states of the global generators of torch, numpy and Python."""

set_random_states = _set_rng_states
"""Sets the states that :func:`random_states` has returned."""

reduce = _sync_ddp_if_available
"""Reduces a tensor over a group, in place."""


def set_metrics(trainer: Trainer, name: str, metrics: dict[str, Any]) -> None:
    """Set ``callback_metrics``, ``logged_metrics`` or ``progress_bar_metrics`` of a Trainer."""
    setattr(trainer._logger_connector, f"_{name}", metrics)


class RankLocalCallback(Callback):
    """A callback of the strategy that refers to objects of one rank and one run."""

    def __deepcopy__(self: _C, memo: dict[int, Any]) -> _C:
        # Users copy the Trainer's callbacks, but process groups cannot be copied.
        return self

    @contextmanager
    def added_to(self, trainer: Trainer) -> Iterator[None]:
        """Add this callback to the Trainer's inside the context."""
        # First, since the hooks of others may contain collectives, or read values of this one.
        callbacks_of(trainer).insert(0, self)
        try:
            yield
        finally:
            if self in callbacks_of(trainer):  # A hook may have replaced the list.
                callbacks_of(trainer).remove(self)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's own list of callbacks, an attribute that it sets without declaring."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def wants_norms_synchronized(strategy: ParallelStrategy) -> bool:
    """Whether the Trainer of a strategy was made with ``sync_batchnorm=True``."""
    return strategy._layer_sync is not None


def trainer_of(module: LightningModule) -> Trainer | None:
    """Return the Trainer of a module; None in the process that only starts the ranks."""
    return module._trainer


def trains_on_a_stream(trainer: Trainer) -> bool:
    """Whether ``fit`` was given a loader without a length, and no limit to its batches."""
    loader = trainer.fit_loop._data_source.instance
    has_limit = isinstance(trainer.limit_train_batches, int)
    return isinstance(loader, DataLoader) and sized_len(loader) is None and not has_limit


def with_given_loader(trainer: Trainer, arguments: Sequence[Any]) -> AbstractContextManager[None]:
    """Let the Trainer have, inside the context, what ``fit`` was given as training loader.

    Otherwise it has it only on ranks. ``arguments`` are those of Lightning's launcher.
    """
    is_fit = trainer.state.fn == TrainerFn.FITTING and len(arguments) > 1
    return patched(trainer.fit_loop._data_source, "instance", arguments[1] if is_fit else None)


def attach_datamodule(trainer: Trainer) -> None:
    """Let hooks of the module or its datamodule move batches, also outside of a run.

    ``to_onnx`` and ``to_torchscript`` call them.
    """
    datamodule = vars(trainer)["datamodule"]
    trainer._data_connector.attach_datamodule(trainer.lightning_module, datamodule)


def overrides(owner: object | None, *hooks: str) -> bool:
    """Whether a LightningModule, LightningDataModule or callback overrides one of these hooks."""
    return any(is_overridden(hook, owner) for hook in hooks)


def has_hook(trainer: Trainer, hook: str) -> bool:
    """Whether the user has written a hook of this name, in the module or in a callback."""
    users = [each for each in callbacks_of(trainer) if not type(each).__module__.startswith(_KNOWN)]
    return any(overrides(each, hook) for each in (trainer.lightning_module, *users))


def move_module(module: LightningModule, device: torch.device) -> None:
    """Move every tensor, except those on the meta device, which stand for other stages' tensors.

    ``LightningModule.to`` raises for meta tensors; like it, this sets ``module.device``.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    module._apply(move)
    _update_properties(module, device=device)


_ON_CPU = (None, "cpu", torch.device("cpu"), saving._default_map_location)


@contextmanager
def files_mapped() -> Iterator[Callable[[Tensor], bool]]:
    """Let ``load_from_checkpoint`` map local files inside the context.

    Yields:
        A function: whether a tensor was mapped in the context, so that it alone uses its memory.
    """
    read, mapped = saving.pl_load, WeakIdKeyDictionary()

    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        local = local_path(path) if isinstance(path, str | Path) else None
        if local is None or map_location not in _ON_CPU or not is_zipfile(local):
            return read(path, map_location, weights_only)
        with reading(local):
            checkpoint = load_mapped(local, weights_only)
        mapped.update(dict.fromkeys(tensors_in(checkpoint)))
        return checkpoint

    with patched(saving, "pl_load", load):
        yield mapped.__contains__


def set_device_mesh(module: LightningModule, mesh: DeviceMesh | None) -> None:
    """Set ``module.device_mesh``, as ``ModelParallelStrategy`` does."""
    module._device_mesh = mesh


def with_atomic_files(given: CheckpointIO | None) -> CheckpointIO:
    """Return the user's plugin, or one that writes a file whole or not at all.

    Args:
        given: the user's plugin, or None. A wrapper such as ``AsyncCheckpointIO`` gets an
            ``AtomicCheckpointIO`` to wrap; it ignores that if it wraps the user's.
    """
    if given is None:
        return AtomicCheckpointIO()
    if isinstance(given, _WrappingCheckpointIO):
        given.checkpoint_io = AtomicCheckpointIO()
    return given


def reading_files(io: CheckpointIO) -> AtomicCheckpointIO | None:
    """Return the plugin that reads local files, itself or wrapped; None if it is the user's."""
    read_by = io.checkpoint_io if isinstance(io, _WrappingCheckpointIO) else io
    return read_by if isinstance(read_by, AtomicCheckpointIO) else None


def remove_checkpoint(io: CheckpointIO, path: Any) -> None:
    """Remove a checkpoint; ``AsyncCheckpointIO`` removes it in its thread, which may not have it.

    Lightning removes it at once, and a file that is written afterwards would stay for ever.
    """
    executor = io._executor if isinstance(io, AsyncCheckpointIO) else None
    if executor is None:
        io.remove_checkpoint(path)
    else:
        executor.submit(io.remove_checkpoint, path)


def in_thread(io: AsyncCheckpointIO, write: Callable[[], None]) -> None:
    """Write in the thread of ``io``, which raises the errors at the next checkpoint or the end."""

    def write_or_keep_error() -> None:
        try:
            write()
        except BaseException as error:
            io._error = error

    io._ensure_setup()
    assert io._executor is not None
    io._executor.submit(write_or_keep_error)


def wait_for_thread(io: AsyncCheckpointIO) -> None:
    """Wait until the thread has written everything; raise the error if it has failed."""
    if io._executor is not None:
        io._executor.submit(lambda: None).result()
    if io._error is not None:
        raise io._error
