"""Writes checkpoints as folders, to which all stages write at once, and reads them.

Each stage writes a file of ``torch.save`` with its tensors, by name and whole, so they do not
depend on the grid. The table is the checkpoint with a record in the place of each tensor, and the
id of the files that belong to it. It is written last, and at once: until then the folder is the
checkpoint that it was. So folders can be on file systems that rename nothing, such as ``s3://``. A
new local folder gets its name when it is complete.

    last.ckpt/meta.pt                       the table, with id 4f2c...
    last.ckpt/stage-0.4f2c....pt            tensors of the first stage
    last.ckpt/stage-1.4f2c....pt
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from torch import Tensor

from lightning_axosparse.checkpoint.gather import StageTensors
from lightning_axosparse.distributed.process_groups import gather
from lightning_axosparse.support import archive
from lightning_axosparse.support.archive import DeferredTensor, load_mapped
from lightning_axosparse.support.files import (
    CorruptFileError,
    clear_partials,
    creating_folder,
    temporary_folder,
)
from lightning_axosparse.support.remote_files import local_path
from lightning_axosparse.support.torch_internals import tree_leaves, tree_map, tree_map_only
from lightning_axosparse.support.troubleshooting import see, without_link

_FORMAT = "lightning_axosparse.ShardedTensor/2"
_TABLE = "meta.pt"

_ID = "lightning_axosparse.folder"
"""The entry of each file with the id of the checkpoint."""

_STAGES = "lightning_axosparse.stages"
"""The entry of the table with the number of files."""


@dataclass
class _Part:
    """One stage's part of a checkpoint.

    Attributes:
        goal: path or URL of the folder.
        place: the folder to write to, which is renamed to the goal later if it is new.
        identity: the id of the checkpoint.
        stage: the stage of this rank.
        stages: the number of stages.
        tensors: the tensors of this stage.
        table: the content of the table, on the first rank.
        renaming: renames the place when it is closed, on the first rank.
        error: why the place cannot be written to; None if it can.
    """

    goal: Any
    place: Any
    identity: str
    stage: int
    stages: int
    tensors: Mapping[str, Tensor]
    table: dict[str, Any]
    renaming: ExitStack
    error: str | None

    def copied(self) -> _Part:
        """Return a part whose values do not change when training continues."""
        tensors = {name: _copied(tensor) for name, tensor in self.tensors.items()}
        table = tree_map_only(Tensor, _copied, self.table)
        return replace(self, tensors=tensors, table=table, renaming=self.renaming.pop_all())

    def write(self) -> None:
        """Write the stage's file."""
        content = {_ID: self.identity, "state_dict": self.tensors}
        _write(content, self.place, _file_name(self.stage, self.identity))

    def write_table(self) -> None:
        """Make the folder this checkpoint, once all stages have written their files."""
        _write(self.table, self.place, _TABLE)
        self.renaming.close()
        _remove_stages(self.goal, self.identity, of_it=False)


def save_folder(checkpoint: dict[str, Any], goal: Any, tensors: StageTensors) -> None:
    """Write a checkpoint, which the first rank has in full, with deferred tensors.

    Collective over the stages of a pipeline. An older folder is unchanged until all have written.

    Args:
        checkpoint: what Lightning saves.
        goal: path or URL of the folder.
        tensors: those of the stages.

    Raises:
        OSError: on all stages, if one of them could not write.
    """
    part, group = _begin(checkpoint, goal, tensors), tensors.group
    with part.renaming:
        error = part.error
        if error is None:
            error = _attempt(part.write)
            errors = [f"stage {n}: {each}" for n, each in enumerate(gather(error, group)) if each]
            if tensors.is_first:
                error = "; ".join(errors) or _attempt(part.write_table)
                if error is not None:
                    _remove_stages(goal, part.identity, of_it=True)
            error = tensors.broadcast(error if tensors.is_first else None)
        if error is not None:
            raise _not_written(goal, error)


def save_folder_later(
    checkpoint: dict[str, Any], goal: Any, tensors: StageTensors, timeout: float
) -> Callable[[], None]:
    """Copy a checkpoint as :func:`save_folder` gets it; collective over the stages.

    Args:
        checkpoint: what Lightning saves.
        goal: path or URL of the folder.
        tensors: those of the stages.
        timeout: how long the first stage waits for the files of the others, in seconds.

    Returns:
        A function that writes this stage's part, in any thread and without the others. That of the
        first stage waits for the files of the others, and raises OSError if they do not come.

    Raises:
        OSError: on all stages, if there is no place to write to.
    """
    begun = _begin(checkpoint, goal, tensors)
    with begun.renaming:
        if begun.error is not None:
            raise _not_written(goal, begun.error)
        part = begun.copied()

    def write() -> None:
        with part.renaming:
            try:
                part.write()
                if part.stage == 0:
                    _await_stages(part, timeout)
                    part.write_table()
            except Exception as error:
                if part.stage == 0:
                    _remove_stages(part.place, part.identity, of_it=True)
                raise _not_written(goal, without_link(error)) from error

    return write


def _begin(checkpoint: dict[str, Any], goal: Any, tensors: StageTensors) -> _Part:
    """Agree on a place, and on what each stage writes; collective over the stages."""
    group, renaming, table = tensors.group, ExitStack(), dict[str, Any]()
    stage, stages = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if tensors.is_first:
        identity, place, error = uuid4().hex, goal, None
        try:
            place = renaming.enter_context(_place(goal))
        except OSError as failure:
            error = without_link(failure)
        leaves = tree_leaves(checkpoint)
        deferred = {leaf.key: leaf for leaf in leaves if isinstance(leaf, DeferredTensor)}
        own = {name: t for name, t in deferred.items() if name not in tensors.remote}
        tensors.broadcast((identity, place, error, deferred.keys() & tensors.remote))
        table = tree_map_only(DeferredTensor, _record, checkpoint)
        table = {**table, _ID: identity, _STAGES: stages}
    else:
        identity, place, error, wanted = tensors.broadcast(None)
        own = {name: t for name, t in tensors.offered().items() if name in wanted}
    tensors.forget()
    return _Part(goal, place, identity, stage, stages, own, table, renaming, error)


def _copied(tensor: Tensor) -> Tensor:
    values = tensor.computed() if isinstance(tensor, DeferredTensor) else tensor.detach()
    return values.clone()


def _await_stages(part: _Part, timeout: float) -> None:
    """Wait until all stages have written their files."""
    file_system, folder = url_to_fs(str(part.place))
    end = time.monotonic() + timeout
    files = [f"{folder}/{_file_name(stage, part.identity)}" for stage in range(part.stages)]
    while missing := [file for file in files if not file_system.exists(file)]:
        if time.monotonic() > end:
            name = missing[0].rpartition("/")[2]
            raise OSError(f"there is no {name} after {timeout:.0f} s")
        time.sleep(0.05)
        file_system.invalidate_cache()


def _not_written(goal: Any, error: object) -> OSError:
    return OSError(
        f"'{goal}' was not written: {error}. An older checkpoint of that name is as it was. "
        "Make room, or write elsewhere." + see("files")
    )


def load_folder(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read a verified checkpoint, whose weights and optimizer state are mapped into memory."""
    contents = load_mapped(_table_of(folder), weights_only)
    identity, stages = contents.pop(_ID), contents.pop(_STAGES)
    tensors: dict[str, Any] = {}
    for stage in range(stages):
        file = folder / _file_name(stage, identity)
        if not _is_own(file):
            raise CorruptFileError(f"the folder has no {file.name}")
        part = load_mapped(file, True)
        if part[_ID] != identity:
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


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder, the table first; no links, which may lead out of it."""
    return [_table_of(folder), *filter(_is_own, sorted(folder.glob("stage-*.pt")))]


def _table_of(folder: Path) -> Path:
    table = folder / _TABLE
    if not _is_own(table) or not any(folder.glob("stage-*.pt")):
        raise CorruptFileError(
            f"the folder has no {_TABLE} and files of stages; of a folder of other strategies, make"
            " one file: python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER"
        )
    return table


def _is_own(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


def _file_name(stage: int, identity: str) -> str:
    return f"stage-{stage}.{identity}.pt"


def _record(tensor: DeferredTensor) -> dict[str, Any]:
    """Return the record of a tensor in the table."""
    return {"format": _FORMAT, "name": tensor.key}


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") == _FORMAT


def _attempt(function: Any, *arguments: Any) -> str | None:
    """Call a function; return its error in words, which the ranks tell one another."""
    try:
        function(*arguments)
    except Exception as error:  # of the system, or of a tensor that is computed
        return without_link(error)
    return None


@contextmanager
def _place(goal: Any) -> Iterator[Any]:
    """Yield the folder to write to: the older one, or a partial one, which is renamed later."""
    local = local_path(goal)
    if local is None:
        file_system, name = url_to_fs(str(goal))
        file_system.makedirs(name, exist_ok=True)
        yield goal
        return
    if local.is_symlink():
        local.unlink()
    if local.is_dir():
        clear_partials(local)
        yield goal
        return
    with creating_folder(local) as partial:
        yield partial


@torch.no_grad()
def _write(content: dict[str, Any], goal: Any, name: str) -> None:
    """Write a file of the folder, whole or not at all."""
    local = local_path(goal)
    if local is not None:
        archive.save(content, local / name)
        return
    file_system, folder = url_to_fs(str(goal))
    with temporary_folder() as temporary:
        archive.save(content, temporary / name)
        file_system.put_file(str(temporary / name), f"{folder}/{name}")


def _remove_stages(goal: Any, identity: str, of_it: bool) -> None:
    """Remove files of stages: those ``of_it``, the checkpoint with this id, or all others."""
    file_system, folder = url_to_fs(str(goal))
    file_system.invalidate_cache()  # Other ranks have written, too.
    with suppress(OSError):  # The checkpoint is whole also where files are left.
        for file in file_system.ls(folder, detail=False):
            is_stage = file.rpartition("/")[2].startswith("stage-")
            if is_stage and file.endswith(f".{identity}.pt") == of_it:
                file_system.rm_file(file)
