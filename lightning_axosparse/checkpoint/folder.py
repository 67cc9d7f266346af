"""Writes and reads checkpoints that are folders, to which all stages write at once.

Each stage writes a file of ``torch.save`` with its tensors, by name and whole, so they do not
depend on the grid. The table has everything else: it is the checkpoint with a record in the place
of each tensor. The first stage puts the folder in its place when all have written. In the
background, where ranks must not send messages, it looks for the others' files, which have their
names when they are whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
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

_LOOK_SECONDS = 0.1


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


class FolderWriter:
    """Writes one folder after the other; collective over the stages of a pipeline.

    ``in_background`` lets a thread of each stage write copies, until the next :meth:`save` or
    :meth:`wait`. An ``OSError`` of one stage is then raised on all of them, and an older folder is
    unchanged.
    """

    def __init__(self, tensors: StageTensors, in_background: bool = False) -> None:
        self._tensors = tensors
        self._in_background = in_background
        self._pending: _Write | None = None
        self._when_written: list[Callable[[], None]] = []

    def save(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, which the first stage has whole, with deferred tensors."""
        self.wait()
        self._pending = write = self._begin(checkpoint, Path(path))
        if self._in_background:
            Thread(target=write.in_background, name="axosparse-checkpoint", daemon=True).start()
        else:
            write.written.set_result(write.write())
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written, if one is, is in its place."""
        write, self._pending = self._pending, None
        actions, self._when_written = self._when_written, []
        if write is None:
            return
        errors = gather(write.written.result(), self._tensors.group)
        error = None
        if self._tensors.is_first:
            write.all_written.set_result(errors)
            if not self._in_background:
                write.put_in_place(errors)
            error = write.in_place.result()
        error = self._tensors.agree(error)
        if error is not None:
            raise OSError(
                f"'{write.goal}' was not written: {error}. An older checkpoint of that name is as "
                "it was. Make room, or write elsewhere." + see("files")
            )
        for action in actions:
            action()

    def when_written(self, action: Callable[[], None]) -> None:
        """Do something, such as removing an older checkpoint, once the pending one is in place."""
        if self._pending is None:
            action()
        else:
            self._when_written.append(action)

    def _begin(self, checkpoint: dict[str, Any], goal: Path) -> _Write:
        """Agree on which stage writes what."""
        tensors = self._tensors
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
            if self._in_background:
                own = {name: tensor.copied() for name, tensor in own.items()}
            group = tensors.group
            stage, stages = (0, 1) if group is None else (dist.get_rank(group), group.size())
            write = _Write(goal, folder, stage, stages, own, stack.pop_all())
        tensors.forget()
        return write


class _NotWritten(Exception):
    """A stage could not write its part, so the folder is removed."""


@dataclass(frozen=True)
class _Write:
    """One folder that is being written.

    Attributes:
        goal: its name in the end.
        folder: its name until then.
        stage: this stage.
        stages: how many there are.
        tensors: what this stage writes, by name.
        place: on the first stage, puts the folder in its place, or removes it after an error.
        written: why this stage could not write, or None.
        all_written: on the first stage, that of each stage, if they have told it.
        in_place: on the first stage, the error that prevented it, or None.
    """

    goal: Path
    folder: Path
    stage: int
    stages: int
    tensors: dict[str, DeferredTensor]
    place: ExitStack
    written: Future[str | None] = field(default_factory=Future)
    all_written: Future[list[str | None]] = field(default_factory=Future)
    in_place: Future[str | None] = field(default_factory=Future)

    @torch.no_grad()
    def write(self) -> str | None:
        """Write what this stage has; return why it could not."""
        content = {WRITTEN_AS: self.folder.name, "state_dict": self.tensors}
        try:
            archive.save(content, of_stage(self.folder, self.stage))
        except Exception as error:  # of the system, or of a tensor that is made
            return f"stage {self.stage}: {without_link(error)}"
        return None

    def put_in_place(self, errors: list[str | None]) -> None:
        """End the folder when all stages have written, or could not."""
        try:
            with self.place:
                if found := [error for error in errors if error is not None]:
                    raise _NotWritten("; ".join(found))
        except Exception as error:
            self.in_place.set_result(without_link(error))
        else:
            self.in_place.set_result(None)

    def in_background(self) -> None:
        """Do all that is to be done without messages."""
        error = self.write()
        self.written.set_result(error)
        if self.stage == 0:
            self.put_in_place(self._errors(error))

    def _errors(self, mine: str | None) -> list[str | None]:
        """Why stages could not write, as soon as the files of all are there or all have told it."""
        files = [of_stage(self.folder, stage) for stage in range(1, self.stages)]
        while not self.all_written.done():
            if all(file.exists() for file in files):
                return [mine]
            wait([self.all_written], _LOOK_SECONDS)
        return self.all_written.result()
