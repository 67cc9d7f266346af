"""Reads and writes checkpoint files: by plugin, and mapped into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core import saving
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO, local_path
from lightning_axosparse.support.archive import load_mapped
from lightning_axosparse.support.corrupt_file import reading
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.torch_internals import tree_leaves

_ON_CPU = (None, "cpu", torch.device("cpu"), saving._default_map_location)


@contextmanager
def files_mapped() -> Iterator[Callable[[Tensor], bool]]:
    """Let ``load_from_checkpoint`` map local files inside the context.

    Yields:
        Whether a tensor was mapped in the context, so nothing else refers to its memory.
    """
    read, mapped = saving.pl_load, WeakIdKeyDictionary()

    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        local = local_path(path) if isinstance(path, str | Path) else None
        if local is None or map_location not in _ON_CPU or not is_zipfile(local):
            return read(path, map_location, weights_only)
        with reading(local):
            checkpoint = load_mapped(local, weights_only)
        tensors = (leaf for leaf in tree_leaves(checkpoint) if isinstance(leaf, Tensor))
        mapped.update(dict.fromkeys(tensors))
        return checkpoint

    with patched(saving, "pl_load", load):
        yield mapped.__contains__


def with_atomic_files(given: CheckpointIO | None) -> CheckpointIO:
    """The user's plugin, or one that writes a file whole or not at all.

    Args:
        given: the user's; None for none. A wrapper such as ``AsyncCheckpointIO`` gets an
            ``AtomicCheckpointIO`` to wrap; it ignores that if it wraps the user's.
    """
    if given is None:
        return AtomicCheckpointIO()
    if isinstance(given, _WrappingCheckpointIO):
        given.checkpoint_io = AtomicCheckpointIO()
    return given


def reading_files(io: CheckpointIO) -> AtomicCheckpointIO | None:
    """The plugin that reads local files, itself or wrapped; None for one of the user's."""
    read_by = io.checkpoint_io if isinstance(io, _WrappingCheckpointIO) else io
    return read_by if isinstance(read_by, AtomicCheckpointIO) else None


def writes_in_background(io: CheckpointIO) -> bool:
    """Whether checkpoints are written while training goes on."""
    return isinstance(io, AsyncCheckpointIO)
