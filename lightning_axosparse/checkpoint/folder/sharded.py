"""Reads checkpoints that are folders, to which all stages have written at once.

Each stage has written a file of ``torch.save`` with its tensors, by name and whole, so they do not
depend on the grid. The table has everything else: it is the checkpoint with a record in the place
of each tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_axosparse.checkpoint.mapped_file import load_mapped
from lightning_axosparse.support.corrupt_file import CorruptFileError
from lightning_axosparse.support.files import archive
from lightning_axosparse.support.files.deferred_tensor import DeferredTensor
from lightning_axosparse.support.torch_internals import tree_map

_FORMAT = "lightning_axosparse.ShardedTensor/2"
_TABLE = "meta.pt"

WRITTEN_AS = "lightning_axosparse.folder"
"""The entry of each file with the name under which its folder was written, and no other one."""


def table(folder: Path) -> Path:
    """The file of a sharded checkpoint that has everything but the tensors."""
    return folder / _TABLE


def of_stage(folder: Path, stage: int) -> Path:
    """The file of a sharded checkpoint that has the tensors of a stage."""
    return folder / f"stage-{stage}.pt"


def record(tensor: DeferredTensor) -> dict[str, Any]:
    """What stands for a tensor in the table."""
    return {"format": _FORMAT, "name": tensor.key}


def verify(folder: Path) -> None:
    """Read each file of a folder once and check that it is as it was written.

    Raises:
        CorruptFileError: if one is not, or the folder is none of this version.
    """
    for file in _files(folder):
        archive.check(file)


def load(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read a verified checkpoint, whose weights and optimizer state are mapped into memory.

    Args:
        folder: of the checkpoint.
        weights_only: as for ``torch.load``.

    Raises:
        CorruptFileError: if a tensor is not in the folder, or files are of several checkpoints.
    """
    tensors: dict[str, Any] = {}
    first, *others = _files(folder)
    contents, parts = load_mapped(first, weights_only), [load_mapped(each, True) for each in others]
    written_as = contents.pop(WRITTEN_AS)
    for part in parts:
        if part[WRITTEN_AS] != written_as:
            raise CorruptFileError("its files are of several checkpoints")
        tensors.update(part["state_dict"])

    def tensor(value: Any) -> Any:
        if not _is_record(value):
            return value
        if value["name"] not in tensors:
            raise CorruptFileError(f"the folder has no tensor {value['name']!r}")
        return tensors[value["name"]]

    whole: dict[str, Any] = tree_map(tensor, contents, is_leaf=_is_record)
    return whole


def _files(folder: Path) -> list[Path]:
    """The files of a folder, the table first; no links, which may lead out of it."""
    found = [table(folder), *sorted(folder.glob("stage-*.pt"))]
    files = [file for file in found if file.is_file() and not file.is_symlink()]
    if len(files) < 2 or files[0] != found[0]:
        raise CorruptFileError(
            f"the folder has no {_TABLE} and stage-0.pt; of a folder of other strategies, make one "
            "file: python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER"
        )
    return files


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") == _FORMAT
