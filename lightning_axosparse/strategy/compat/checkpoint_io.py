"""Chooses the plugin that reads and writes checkpoint files."""

from __future__ import annotations

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO


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
