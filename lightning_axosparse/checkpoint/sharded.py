"""Writes checkpoints as folders to which all stages write at once, and reads tensors out of them.

The tensors are in files of ``torch.distributed.checkpoint``, by name and whole, so they do not
depend on the grid. A file of ``torch.save`` has everything else: it is the checkpoint with a record
in the place of each tensor.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_axosparse.checkpoint.stage_tensors import StageTensors
from lightning_axosparse.support import archive
from lightning_axosparse.support.atomic_file import replacing_folder
from lightning_axosparse.support.corrupt_file import CorruptFileError, reading
from lightning_axosparse.support.deferred_tensor import DeferredTensor, each_once
from lightning_axosparse.support.torch_internals import tree_leaves, tree_map, tree_map_only
from lightning_axosparse.support.troubleshooting import see, without_link

_FORMAT = "lightning_axosparse.ShardedTensor/1"


def table(folder: Path) -> Path:
    """The file of a sharded checkpoint that has everything but the tensors."""
    return folder / "meta.pt"  # as Lightning calls it


def save_sharded(
    checkpoint: dict[str, Any], path: str | os.PathLike[str], tensors: StageTensors
) -> None:
    """Write a checkpoint as a folder; collective over the stages of a pipeline.

    Args:
        checkpoint: on the first stage the whole checkpoint, with deferred tensors.
        path: the folder, which is replaced when all stages have written.
        tensors: what the other stages have offered to the first.

    Raises:
        OSError: if a stage cannot write; an older checkpoint is then unchanged.
    """
    with ExitStack() as stack:
        folder, own = None, {}
        if tensors.is_first:
            folder = stack.enter_context(replacing_folder(path))
            leaves = tree_leaves(checkpoint)
            deferred = {leaf.key: leaf for leaf in leaves if isinstance(leaf, DeferredTensor)}
            own = {name: tensor for name, tensor in deferred.items() if name not in tensors.remote}
            archive.save(
                tree_map_only(DeferredTensor, each_once(_record), checkpoint), table(folder)
            )
            tensors.agree((folder, deferred.keys() & tensors.remote))
        else:
            folder, wanted = tensors.agree(None)
            own = {name: tensor for name, tensor in tensors.offered().items() if name in wanted}
        _write(own, folder, tensors.group)
        tensors.forget()


def deferred(contents: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Put deferred tensors, which are read when they are made, in the place of their records.

    Args:
        contents: of the :func:`table`.
        folder: of the checkpoint.
    """

    def restored(value: Any) -> Any:
        if not _is_record(value):
            return value
        name, shape, dtype = value["name"], value["shape"], value["dtype"]
        return DeferredTensor(name, shape, dtype, lambda: _read(folder, name, shape, dtype))

    whole: dict[str, Any] = tree_map(each_once(restored), contents, is_leaf=_is_record)
    return whole


def _write(own: dict[str, DeferredTensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write this stage's tensors, one at a time; collective over the group."""
    # Imported here, because few runs need it and it takes a while.
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.planner import WriteItem

    class Planner(checkpoint.DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            return object.made() if isinstance(object, DeferredTensor) else object

    with _quiet():
        try:
            checkpoint.save(
                own,
                storage_writer=checkpoint.FileSystemWriter(folder),
                planner=Planner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )
        except checkpoint.CheckpointException as error:
            raise OSError(
                f"'{folder}' was not written: {without_link(error)}." + see("files")
            ) from error


def _read(folder: Path, name: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    from torch.distributed import checkpoint

    tensor = torch.empty(shape, dtype=dtype)
    with reading(folder), _quiet():
        try:
            checkpoint.load(
                {name: tensor}, storage_reader=checkpoint.FileSystemReader(folder), no_dist=True
            )
        except checkpoint.CheckpointException as error:
            raise CorruptFileError(f"{name}: {error}") from error
    return tensor


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the advice to start ranks, where one reads or writes alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load)")
        yield


def _record(tensor: DeferredTensor) -> dict[str, Any]:
    """What stands for a tensor in the table; plain, for ``torch.load(weights_only=True)``."""
    return {
        "format": _FORMAT,
        "name": tensor.key,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
    }


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") == _FORMAT
