"""Maps a checkpoint file into memory, so that a rank reads only the tensors that it needs."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.support.corrupt_file import CorruptFileError
from lightning_axosparse.support.files.deferred_tensor import DeferredTensor, each_once
from lightning_axosparse.support.torch_internals import (
    checkpoint_offset,
    tree_leaves,
    tree_map_only,
)

_LARGE = ("state_dict", "optimizer_states")
"""The entries of a checkpoint that have the tensors of the whole model."""

_SMALL = 1024
"""Tensors of at most so many bytes are read at once."""

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def load_mapped(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read what ``torch.load`` returns, with deferred tensors for weights and optimizer state.

    To make one is to map its part of the file into memory, copy-on-write, so that its pages are
    read when they are used. It may be changed; the file is not. With objects in the checkpoint that
    are neither numbers, text nor containers of them, all of the file is mapped at once.

    Args:
        path: a file of ``torch.save``.
        weights_only: as for ``torch.load``.
    """
    contents = torch.load(path, map_location="meta", weights_only=weights_only)
    if not (isinstance(contents, dict) and all(map(_is_plain, tree_leaves(contents)))):
        # Other objects may have tensors, which have to be there when they are unpickled.
        mapped: dict[str, Any] = torch.load(
            path, map_location="cpu", mmap=True, weights_only=weights_only
        )
        return mapped
    file = _File(path)
    read = each_once(lambda tensor: file.tensor(tensor).clone())
    deferred = each_once(lambda tensor: _deferred(tensor, file, read))
    tree_map_only(Tensor, file.validate, contents)
    return {
        key: tree_map_only(Tensor, deferred if key in _LARGE else read, value)
        for key, value in contents.items()
    }


class _File:
    """A file whose tensors are mapped into memory; the same file, even if another takes its name.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)

    def validate(self, stored: Tensor) -> None:
        """Check that a tensor is in the file, and no larger than it, whatever shape it declares."""
        size, storage = os.fstat(self._handle).st_size, stored.untyped_storage().nbytes()
        start = checkpoint_offset(stored) if storage else 0
        if start + storage > size or stored.nbytes > size:
            raise CorruptFileError(f"no tensor of the shape {tuple(stored.shape)} is in it")

    def tensor(self, stored: Tensor) -> Tensor:
        """The tensor that ``torch.load`` has put on the meta device, with its values."""
        size = stored.untyped_storage().nbytes()
        if size == 0:
            return torch.empty_like(stored, device="cpu")
        start = checkpoint_offset(stored)
        inside = start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            self._handle, inside + size, access=mmap.ACCESS_COPY, offset=start - inside
        )
        values = torch.frombuffer(mapped, dtype=torch.uint8, offset=inside).view(stored.dtype)
        return values.as_strided(stored.size(), stored.stride(), stored.storage_offset())


def _deferred(stored: Tensor, file: _File, read: Callable[[Tensor], Tensor]) -> Tensor:
    if stored.nbytes <= _SMALL:
        return read(stored)
    key = f"{checkpoint_offset(stored)}+{stored.storage_offset()}"
    return DeferredTensor(key, stored.shape, stored.dtype, partial(file.tensor, stored))


def _is_plain(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return type(leaf) is Tensor and leaf.layout == torch.strided and not leaf.requires_grad
    if isinstance(leaf, dict):  # such as the Counter of a scheduler
        return all(map(_is_number_or_text, leaf.values()))
    return _is_number_or_text(leaf)


def _is_number_or_text(leaf: Any) -> bool:
    return leaf is None or type(leaf) in _PLAIN or isinstance(leaf, np.generic)
