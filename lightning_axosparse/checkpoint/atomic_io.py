"""Writes checkpoints to local files and folders atomically, and verifies them before loading.

A checkpoint is one file, or a folder to which all stages write at once. In a folder, each stage
writes a file of ``torch.save`` with its tensors, by name and whole, so they do not depend on the
grid. The table is the checkpoint with a record in the place of each tensor. The first rank renames
the folder when all have written.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_axosparse.checkpoint.gather import StageTensors
from lightning_axosparse.distributed.process_groups import gather
from lightning_axosparse.support import archive
from lightning_axosparse.support.archive import DeferredTensor, all_computed, load_mapped
from lightning_axosparse.support.files import (
    CorruptFileError,
    clear_partials,
    reading,
    replacing_folder,
)
from lightning_axosparse.support.torch_internals import tree_leaves, tree_map, tree_map_only
from lightning_axosparse.support.troubleshooting import see, without_link

_ENTRIES = {
    "state_dict": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "callbacks": dict,
    "loops": dict,
}
"""The types of a Lightning checkpoint's entries."""

_FORMAT = "lightning_axosparse.ShardedTensor/2"
_TABLE = "meta.pt"
"""The file of a folder that has everything but the tensors."""

_WRITTEN_AS = "lightning_axosparse.folder"
"""The entry of each file with the name under which its folder was written."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Read and write checkpoints as Lightning does, but replace an older file atomically.

    A checkpoint is written to a temporary file in the same folder, tensor by tensor, and renamed
    once it is on the disk. A file that is truncated or has changed since raises an error before
    anything is loaded. Deferred tensors are computed while they are written. Folders (sharded
    checkpoints) are read, too. Paths that are not local, such as ``s3://bucket/last.ckpt``, are
    read and written by Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint`` to ``path``; where that fails, an older file has not changed."""
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(all_computed(checkpoint), path, storage_options)
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
        with reading(local):
            if local.is_dir():
                return _load_folder(local, weights_only)
            return super().load_checkpoint(local, map_location, weights_only)

    def verify(self, path: Path) -> None:
        """Read a file or folder once, a block at a time, and check that it is as it was written."""
        if path.is_dir():
            with reading(path):
                for file in _files(path):
                    archive.verify(file)
        else:
            archive.verify(path)

    def load_mapped(self, path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a verified checkpoint, with weights and optimizer state mapped into memory.

        Raises:
            CorruptFileError: if it has not the form of a Lightning checkpoint.
        """
        with reading(path):
            load = _load_folder if path.is_dir() else load_mapped
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


def local_path(path: Any) -> Path | None:
    """Return ``path``, or the path of a ``file://`` URL, if it is in the local file system."""
    if get_protocol(str(path)) != "file":
        return None
    return Path(url_to_fs(str(path))[1])


def _record(tensor: DeferredTensor) -> dict[str, Any]:
    """Return the record of a tensor in the table."""
    return {"format": _FORMAT, "name": tensor.key}


def _load_folder(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read a verified checkpoint, whose weights and optimizer state are mapped into memory."""
    tensors: dict[str, Any] = {}
    first, *others = _files(folder)
    contents, parts = load_mapped(first, weights_only), [load_mapped(file, True) for file in others]
    written_as = contents.pop(_WRITTEN_AS)
    for part in parts:
        if part[_WRITTEN_AS] != written_as:
            raise CorruptFileError("its files are of several checkpoints")
        tensors.update(part["state_dict"])

    def tensor(value: Any) -> Any:
        if not _is_record(value):
            return value
        if value["name"] not in tensors:
            raise CorruptFileError(f"the folder has no tensor {value['name']!r}")
        return tensors[value["name"]]

    checkpoint: dict[str, Any] = tree_map(tensor, contents, is_leaf=_is_record)
    return checkpoint


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder, the table first; no links, which may lead out of it."""
    candidates = [folder / _TABLE, *sorted(folder.glob("stage-*.pt"))]
    files = [file for file in candidates if file.is_file() and not file.is_symlink()]
    if len(files) < 2 or files[0] != candidates[0]:
        raise CorruptFileError(
            f"the folder has no {_TABLE} and stage-0.pt; of a folder of other strategies, make one "
            "file: python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER"
        )
    return files


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") == _FORMAT


def save_folder(checkpoint: dict[str, Any], goal: Path, tensors: StageTensors) -> None:
    """Write a checkpoint, which the first rank has in full, with deferred tensors.

    Collective over the stages of a pipeline. An older folder is unchanged until all have written.

    Raises:
        OSError: on all stages, if one of them could not write.
    """
    with ExitStack() as stack:
        if tensors.is_first:
            folder = stack.enter_context(replacing_folder(goal))
            leaves = tree_leaves(checkpoint)
            deferred = {leaf.key: leaf for leaf in leaves if isinstance(leaf, DeferredTensor)}
            local = {name: t for name, t in deferred.items() if name not in tensors.remote}
            content = tree_map_only(DeferredTensor, _record, checkpoint)
            archive.save({**content, _WRITTEN_AS: folder.name}, folder / _TABLE)
            tensors.broadcast((folder, deferred.keys() & tensors.remote))
        else:
            folder, wanted = tensors.broadcast(None)
            local = {name: t for name, t in tensors.offered().items() if name in wanted}
        place = stack.pop_all()
    tensors.forget()
    errors = gather(_write(local, folder, tensors.group), tensors.group)
    error = tensors.broadcast(_put_in_place(place, errors) if tensors.is_first else None)
    if error is not None:
        raise OSError(
            f"'{goal}' was not written: {error}. An older checkpoint of that name is as it was. "
            "Make room, or write elsewhere." + see("files")
        )


@torch.no_grad()
def _write(
    tensors: dict[str, DeferredTensor], folder: Path, group: dist.ProcessGroup | None
) -> str | None:
    """Write the file of this stage; return the error, if any."""
    stage = 0 if group is None else dist.get_rank(group)
    try:
        content = {_WRITTEN_AS: folder.name, "state_dict": tensors}
        archive.save(content, folder / f"stage-{stage}.pt")
    except Exception as error:  # of the system, or of a tensor that is computed
        return f"stage {stage}: {without_link(error)}"
    return None


def _put_in_place(place: ExitStack, errors: list[str | None]) -> str | None:
    """Rename the folder if all stages have written it; return the error, if any."""
    try:
        with place:
            if failures := [error for error in errors if error is not None]:
                raise OSError("; ".join(failures))
    except OSError as error:
        return without_link(error)
    return None
