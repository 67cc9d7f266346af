"""Reads tensors out of checkpoints that are folders, to which all stages have written at once.

The tensors are in files of ``torch.distributed.checkpoint``, by name and whole, so they do not
depend on the grid. A file of ``torch.save`` has everything else: it is the checkpoint with a record
in the place of each tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_axosparse.support.corrupt_file import CorruptFileError, reading
from lightning_axosparse.support.deferred_tensor import DeferredTensor, each_once
from lightning_axosparse.support.torch_internals import tree_map

_FORMAT = "lightning_axosparse.ShardedTensor/1"


def table(folder: Path) -> Path:
    """The file of a sharded checkpoint that has everything but the tensors."""
    return folder / "meta.pt"  # as Lightning calls it


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


def _read(folder: Path, name: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    from torch.distributed import checkpoint

    tensor = torch.empty(shape, dtype=dtype)
    with reading(folder), quiet():
        try:
            checkpoint.load(
                {name: tensor}, storage_reader=checkpoint.FileSystemReader(folder), no_dist=True
            )
        except checkpoint.CheckpointException as error:
            raise CorruptFileError(f"{name}: {error}") from error
    return tensor


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the advice to start ranks, where one reads or writes alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load)")
        yield


def record(tensor: DeferredTensor) -> dict[str, Any]:
    """What stands for a tensor in the table; plain, for ``torch.load(weights_only=True)``."""
    return {
        "format": _FORMAT,
        "name": tensor.key,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
    }


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") == _FORMAT
