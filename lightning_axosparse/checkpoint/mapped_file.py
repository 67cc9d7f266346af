"""Maps a checkpoint file into memory, so that a rank reads only the tensors that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_axosparse.support.corrupt_file import CorruptFileError
from lightning_axosparse.support.files.deferred_tensor import each_once
from lightning_axosparse.support.torch_internals import tree_leaves, tree_map_only

_LARGE = ("state_dict", "optimizer_states")
"""The entries of a checkpoint that have the tensors of the whole model."""


def load_mapped(path: Path, weights_only: bool | None) -> Any:
    """Read what ``torch.load`` returns, with weights and optimizer state mapped copy-on-write.

    Pages of the file are read when they are used, and may be changed in memory. Other tensors are
    read at once, as what keeps one of them would keep the mapping.

    Args:
        path: a file of ``torch.save``.
        weights_only: as for ``torch.load``.

    Raises:
        CorruptFileError: if a tensor is larger than the file, whatever shape it declares.
    """
    contents: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    size = path.stat().st_size
    for leaf in tree_leaves(contents):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.nbytes > size:
            raise CorruptFileError(f"no tensor of the shape {tuple(leaf.shape)} is in it")
    if not isinstance(contents, dict):
        return contents
    read = each_once(lambda each: each.clone() if type(each) is Tensor else each)
    return {
        key: value if key in _LARGE else tree_map_only(Tensor, read, value)
        for key, value in contents.items()
    }
