"""AtomicCheckpointIO: checkpoints in local files, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol, get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_axosparse import archive
from lightning_axosparse.replacing import clear_partials


class AtomicCheckpointIO(TorchCheckpointIO):
    """Read and write checkpoints as Lightning does, so that a fault leaves the older file whole.

    A checkpoint is written beside its target, tensor by tensor, and takes its name when it is on
    the disk. One that was cut short or has changed since is refused before anything is loaded.
    Paths that are not local, such as ``s3://bucket/last.ckpt``, are read and written Lightning's
    way.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint`` to ``path``.

        Raises:
            OSError: if it cannot be written; an older file is as it was then.
        """
        local = _local(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        local.parent.mkdir(parents=True, exist_ok=True)
        archive.save(checkpoint, local)

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the checkpoint at ``path``.

        Raises:
            FileNotFoundError: if there is no such file.
            CorruptFileError: if it is not as it was written.
        """
        local = _local(path)
        if local is not None and local.is_file():
            archive.check(local)
        return super().load_checkpoint(path, map_location, weights_only)


def clear_unfinished_checkpoints(trainer: Trainer) -> None:
    """Remove what killed jobs left unfinished in the folders that checkpoints will be written to.

    Args:
        trainer: its callbacks know their folders.
    """
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        local = None if folder is None else _local(folder)
        if local is not None:
            clear_partials(local)


def _local(path: Any) -> Path | None:
    """``path`` if it is in the local file system, of which it may be a ``file://`` URL."""
    if not _is_local_file_protocol(path):
        return None
    return Path(get_filesystem(path)._strip_protocol(str(path)))
