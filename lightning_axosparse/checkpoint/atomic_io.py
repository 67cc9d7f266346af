"""Writes checkpoints to local files atomically and verifies them before loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.utils import get_protocol
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_axosparse.checkpoint import folder as sharded
from lightning_axosparse.support import archive
from lightning_axosparse.support.archive import all_made, load_mapped
from lightning_axosparse.support.files import CorruptFileError, clear_partials, reading

_ENTRIES = {
    "state_dict": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "callbacks": dict,
    "loops": dict,
}
"""The types of a Lightning checkpoint's entries."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Read and write checkpoints as Lightning does, but replace an older file atomically.

    A checkpoint is written to a temporary file in the same folder, tensor by tensor, and renamed
    once it is on the disk. A file that is truncated or has changed since raises an error before
    anything is loaded. Deferred tensors are made while they are written. Folders (sharded
    checkpoints) are read, too. Paths that are not local, such as ``s3://bucket/last.ckpt``, are
    read and written by Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint`` to ``path``; where that fails, an older file has not changed."""
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(all_made(checkpoint), path, storage_options)
            return
        local.parent.mkdir(parents=True, exist_ok=True)
        archive.save(checkpoint, local)

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the checkpoint at ``path``, after it was verified."""
        local = local_path(path)
        if local is None or not local.exists():
            return super().load_checkpoint(path, map_location, weights_only)
        self.verify(local)
        if local.is_dir():
            return self.load_mapped(local, weights_only)
        with reading(local):
            return super().load_checkpoint(local, map_location, weights_only)

    def verify(self, path: Path) -> None:
        """Read a file or folder once, a block at a time, and check that it is as it was written."""
        if path.is_dir():
            with reading(path):
                sharded.verify(path)
        else:
            archive.check(path)

    def load_mapped(self, path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a verified checkpoint, with weights and optimizer state mapped into memory."""
        with reading(path):
            if path.is_dir():
                return sharded.load(path, weights_only)
            whole: dict[str, Any] = load_mapped(path, weights_only)
            return whole


def clear_unfinished_checkpoints(trainer: Trainer) -> None:
    """Remove the temporary files of killed jobs from the folders of the checkpoint callbacks."""
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        local = None if folder is None else local_path(folder)
        if local is not None:
            clear_partials(local)


def validated(checkpoint: Any, path: Path) -> dict[str, Any]:
    """Return what a file holds, if it has the form of a Lightning checkpoint."""
    with reading(path):
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise CorruptFileError("it is no Lightning checkpoint: it has no `state_dict`")
        for name, kind in _ENTRIES.items():
            value = checkpoint.get(name, kind())
            # Files that are made by hand have empty dicts for lists, which Lightning takes, too.
            is_empty = isinstance(value, dict) and not value
            if not (isinstance(value, kind) or is_empty):
                found = type(value).__name__
                raise CorruptFileError(f"its `{name}` is a {found}, not a {kind.__name__}")
    return checkpoint


def local_path(path: Any) -> Path | None:
    """Return ``path``, or the path of a ``file://`` URL, if it is in the local file system."""
    if get_protocol(str(path)) != "file":
        return None
    return Path(url_to_fs(str(path))[1])
