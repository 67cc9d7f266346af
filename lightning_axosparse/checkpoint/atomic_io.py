"""Writes checkpoints to files atomically, and verifies files and folders before loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_axosparse.checkpoint.folder import files_of, load_folder
from lightning_axosparse.support import archive
from lightning_axosparse.support.archive import all_computed, load_mapped
from lightning_axosparse.support.files import CorruptFileError, clear_partials, reading
from lightning_axosparse.support.remote_files import is_web_page, local_copy, local_path

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
    anything is loaded. Deferred tensors are computed while they are written. Folders (sharded
    checkpoints) are read, too. Files that are not local, such as ``s3://bucket/last.ckpt``, are
    written by Lightning, and read from a local copy.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint`` to ``path``; where that fails, an older file has not changed."""
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(all_computed(checkpoint), path, storage_options)
            return
        archive.save(checkpoint, local)

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the checkpoint at ``path``, after it was verified."""
        local = local_path(path)
        if local is None and not is_web_page(path):
            with local_copy(path) as copy, reading(path):
                return self.load_checkpoint(copy, map_location, weights_only)
        if local is None or not local.exists():
            return super().load_checkpoint(path, map_location, weights_only)
        self.verify(local)
        with reading(local):
            if local.is_dir():
                return load_folder(local, weights_only)
            return super().load_checkpoint(local, map_location, weights_only)

    def verify(self, path: Path) -> None:
        """Read a file or folder once, a block at a time, and check that it is as it was written."""
        if path.is_dir():
            with reading(path):
                for file in files_of(path):
                    archive.verify(file)
        else:
            archive.verify(path)

    def load_mapped(self, path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a verified checkpoint, with weights and optimizer state mapped into memory.

        Raises:
            CorruptFileError: if it has not the form of a Lightning checkpoint.
        """
        with reading(path):
            load = load_folder if path.is_dir() else load_mapped
            checkpoint: dict[str, Any] = load(path, weights_only)
            _validate_form(checkpoint)
        return checkpoint


def clear_unfinished_checkpoints(trainer: Trainer) -> None:
    """Remove the temporary files of killed jobs from the folders of the checkpoint callbacks."""
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        local = None if folder is None else local_path(folder)
        if local is not None:
            clear_partials(local)


def _validate_form(checkpoint: Any) -> None:
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CorruptFileError("it is no Lightning checkpoint: it has no `state_dict`")
    for name, kind in _ENTRIES.items():
        value = checkpoint.get(name, kind())
        # Files that are written by hand have empty dicts for lists, which Lightning accepts, too.
        is_empty = isinstance(value, dict) and not value
        if not (isinstance(value, kind) or is_empty):
            actual = type(value).__name__
            raise CorruptFileError(f"its `{name}` is a {actual}, not a {kind.__name__}")
