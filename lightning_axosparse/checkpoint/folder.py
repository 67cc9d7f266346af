"""Writes and reads checkpoints that are folders, to which all stages write at once.

Each stage writes a file of ``torch.save`` with its tensors, by name and whole, so they do not
depend on the grid. The table has everything else: it is the checkpoint with a record in the place
of each tensor. The first stage puts the folder in its place when all have written.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_axosparse.checkpoint.gather import StageTensors
from lightning_axosparse.distributed.process_groups import gather
from lightning_axosparse.support import archive
from lightning_axosparse.support.archive import DeferredTensor, load_mapped
from lightning_axosparse.support.files import CorruptFileError, replacing_folder
from lightning_axosparse.support.torch_internals import tree_leaves, tree_map, tree_map_only
from lightning_axosparse.support.troubleshooting import see, without_link

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
    """Read each file of a folder once and check that it is as it was written."""
    for file in _files(folder):
        archive.check(file)


def load(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read a verified checkpoint, whose weights and optimizer state are mapped into memory."""
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


class _NotWritten(Exception):
    """A stage could not write its part, so the folder is removed."""


def save(checkpoint: dict[str, Any], goal: Path, tensors: StageTensors) -> None:
    """Write a checkpoint, which the first stage has whole, with deferred tensors.

    Collective over the stages of a pipeline. An older folder is unchanged until all have written.

    Raises:
        OSError: on all stages, if one of them could not write.
    """
    with ExitStack() as stack:
        if tensors.is_first:
            folder = stack.enter_context(replacing_folder(goal))
            leaves = tree_leaves(checkpoint)
            deferred = {leaf.key: leaf for leaf in leaves if isinstance(leaf, DeferredTensor)}
            own = {name: each for name, each in deferred.items() if name not in tensors.remote}
            content = tree_map_only(DeferredTensor, record, checkpoint)
            archive.save({**content, WRITTEN_AS: folder.name}, table(folder))
            tensors.agree((folder, deferred.keys() & tensors.remote))
        else:
            folder, wanted = tensors.agree(None)
            own = {name: each for name, each in tensors.offered().items() if name in wanted}
        place = stack.pop_all()
    tensors.forget()
    errors = gather(_write(own, folder, tensors.group), tensors.group)
    error = tensors.agree(_put_in_place(place, errors) if tensors.is_first else None)
    if error is not None:
        raise OSError(
            f"'{goal}' was not written: {error}. An older checkpoint of that name is as it was. "
            "Make room, or write elsewhere." + see("files")
        )


@torch.no_grad()
def _write(
    own: dict[str, DeferredTensor], folder: Path, group: dist.ProcessGroup | None
) -> str | None:
    """Write what this stage has; return why it could not."""
    stage = 0 if group is None else dist.get_rank(group)
    try:
        archive.save({WRITTEN_AS: folder.name, "state_dict": own}, of_stage(folder, stage))
    except Exception as error:  # of the system, or of a tensor that is made
        return f"stage {stage}: {without_link(error)}"
    return None


def _put_in_place(place: ExitStack, errors: list[str | None]) -> str | None:
    """End the folder when all stages have written, or could not; return why it is not there."""
    try:
        with place:
            if found := [error for error in errors if error is not None]:
                raise _NotWritten("; ".join(found))
    except (OSError, _NotWritten) as error:
        return without_link(error)
    return None
