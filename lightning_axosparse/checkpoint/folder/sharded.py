"""Reads tensors out of checkpoints that are folders, to which all stages have written at once.

The tensors are in files of ``torch.distributed.checkpoint``, by name and whole, so they do not
depend on the grid. A file of ``torch.save`` has everything else: it is the checkpoint with a record
in the place of each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_axosparse.checkpoint.folder import manifest
from lightning_axosparse.checkpoint.folder.shard_metadata import (
    Chunk,
    StoredTensor,
    StoredValue,
    stored,
)
from lightning_axosparse.support.corrupt_file import CorruptFileError, reading
from lightning_axosparse.support.files import archive
from lightning_axosparse.support.files.deferred_tensor import DeferredTensor, each_once
from lightning_axosparse.support.torch_internals import tree_map

_FORMAT = "lightning_axosparse.ShardedTensor/1"


def table(folder: Path) -> Path:
    """The file of a sharded checkpoint that has everything but the tensors."""
    return folder / "meta.pt"  # as Lightning calls it


def deferred(contents: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Put deferred tensors, which are read when they are made, in the place of their records.

    Args:
        contents: of the :func:`table`; without weights, as other strategies write it, they are
            added.
        folder: of the checkpoint.

    Raises:
        CorruptFileError: if a record is not that of a tensor in the folder.
    """
    found = stored(folder)

    def restored(value: Any) -> Any:
        if not _is_record(value):
            return value
        each = found.get(value["name"])
        said = torch.Size(value["shape"]), value["dtype"]
        if not isinstance(each, StoredTensor) or said != (each.shape, each.dtype):
            raise CorruptFileError(f"the folder has no tensor {value['name']!r} of {said}")
        return _deferred(folder, value["name"], each)

    with reading(folder):
        if "state_dict" not in contents:
            entries = {each.path: _deferred(folder, name, each) for name, each in found.items()}
            return contents | _checkpoint_of(entries)
        whole: dict[str, Any] = tree_map(each_once(restored), contents, is_leaf=_is_record)
        return whole


def _checkpoint_of(entries: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """What another strategy has written, in the form of one process's checkpoint.

    Lightning's ``ModelParallelStrategy`` and ``FSDPStrategy`` leave weights and optimizers out of
    their table. They name the parameters of optimizers, which one process counts.

    Args:
        entries: by the keys that lead to it, each tensor or value in the folder.
    """
    tree = _nested(entries)
    if "model" in tree:  # as FSDPStrategy calls it
        tree.setdefault("state_dict", tree.pop("model"))
    optimizers = []
    for number in count():
        if f"optimizer_{number}" not in tree:
            break
        optimizers.append(_counted(tree.pop(f"optimizer_{number}")))
    return tree | ({"optimizer_states": optimizers} if optimizers else {})


def _nested(entries: Mapping[tuple[str | int, ...], Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for keys, value in entries.items():
        inner = tree
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
    return tree


def _counted(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with the numbers of parameters in the place of their names."""
    groups = optimizer["param_groups"]
    groups = [groups[number] for number in sorted(groups)] if isinstance(groups, dict) else groups
    order = [name for group in groups for name in group["params"]]
    number_of = {name: number for number, name in enumerate(order)}
    return {
        "state": {number_of[name]: state for name, state in optimizer.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [number_of[name] for name in group["params"]]} for group in groups
        ],
    }


def _deferred(folder: Path, name: str, each: StoredTensor | StoredValue) -> Any:
    if isinstance(each, StoredValue):
        return _load(folder, each.place)
    return DeferredTensor(name, each.shape, each.dtype, partial(_read, folder, each))


def _read(folder: Path, tensor: StoredTensor) -> Tensor:
    with reading(folder):
        if len(tensor.chunks) == 1:
            return _read_chunk(folder, tensor.chunks[0], tensor.dtype)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for chunk in tensor.chunks:
            sides = zip(chunk.offsets, chunk.sizes, strict=True)
            place = tuple(slice(offset, offset + size) for offset, size in sides)
            whole[place] = _read_chunk(folder, chunk, tensor.dtype)
        return whole


def _read_chunk(folder: Path, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    values = _load(folder, chunk)
    if not isinstance(values, Tensor) or (values.shape, values.dtype) != (chunk.sizes, dtype):
        raise CorruptFileError(f"a part of {chunk.file!r} is not the tensor that it should be")
    return values


def _load(folder: Path, chunk: Chunk) -> Any:
    """Read what ``torch.save`` has written to a part of a file."""
    with manifest.opened(folder, chunk.file) as file:
        file.seek(chunk.start)
        part = BytesIO(file.read(chunk.length))
    archive.check_records(part)
    part.seek(0)
    return torch.load(part, map_location="cpu", weights_only=True)


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
