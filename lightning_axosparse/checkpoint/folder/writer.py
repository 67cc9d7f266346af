"""Writes checkpoints as folders to which all stages write at once, also while training goes on.

Each stage writes its own tensors, and the first one writes the manifest and puts the folder in its
place when all have. In the background, where ranks must not send messages, the others leave in the
folder what they have written, for the first to find.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from lightning_axosparse.checkpoint.folder import manifest, shard_metadata
from lightning_axosparse.checkpoint.folder.sharded import record, table
from lightning_axosparse.checkpoint.folder.stage_tensors import StageTensors
from lightning_axosparse.distributed.process_groups import gather
from lightning_axosparse.support.files import archive
from lightning_axosparse.support.files.atomic_file import replacing, replacing_folder
from lightning_axosparse.support.files.deferred_tensor import DeferredTensor, each_once
from lightning_axosparse.support.torch_internals import tree_leaves, tree_map_only
from lightning_axosparse.support.troubleshooting import see, without_link

_LOOK_SECONDS = 0.1


class FolderWriter:
    """Writes one folder after the other; collective over the stages of a pipeline.

    Args:
        tensors: what the stages have for a checkpoint.
        in_background: write copies in a thread of each stage, until the next :meth:`save` or
            :meth:`wait`.
    """

    def __init__(self, tensors: StageTensors, in_background: bool = False) -> None:
        self._tensors = tensors
        self._in_background = in_background
        self._pending: _Write | None = None
        self._when_written: list[Callable[[], None]] = []

    def save(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: on the first stage the whole checkpoint, with deferred tensors.
            path: the folder, which is replaced when all stages have written.

        Raises:
            OSError: on all stages, if one cannot write, or could not write the checkpoint before;
                an older one is then unchanged.
        """
        self.wait()
        self._pending = write = self._begin(checkpoint, Path(path))
        if self._in_background:
            Thread(target=write.in_background, name="axosparse-checkpoint", daemon=True).start()
        else:
            write.written.set_result(write.write())
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written, if one is, is in its place.

        Raises:
            OSError: on all stages, if one could not write it.
        """
        write, self._pending = self._pending, None
        actions, self._when_written = self._when_written, []
        if write is None:
            return
        parts = gather(write.written.result(), self._tensors.group)
        error = None
        if self._tensors.is_first:
            write.all_written.set_result(parts)
            if not self._in_background:
                write.put_in_place(parts)
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
                archive.save(
                    tree_map_only(DeferredTensor, each_once(record), checkpoint), table(folder)
                )
                tensors.agree((folder, deferred.keys() & tensors.remote))
            else:
                folder, wanted = tensors.agree(None)
                own = {name: each for name, each in tensors.offered().items() if name in wanted}
            if self._in_background:
                own = {name: tensor.copied() for name, tensor in own.items()}
            group = tensors.group
            stage, stages = (0, 1) if group is None else (dist.get_rank(group), group.size())
            write = _Write(goal, folder, stage, stages, _plan(own, folder, group), stack.pop_all())
        tensors.forget()
        return write


@dataclass(frozen=True)
class _Written:
    """What a stage has written, or why it could not.

    Attributes:
        records: as torch records it.
        files: by name, what the manifest says of the stage's files.
        error: why it could not; None if it could.
    """

    records: list[Any]
    files: dict[str, manifest.Entry]
    error: str | None


class _NotWritten(Exception):
    """A stage could not write its part, so the folder is removed."""


@dataclass(frozen=True)
class _Plan:
    """What is left to do of ``torch.distributed.checkpoint.save``: write, and on one stage end."""

    write: Callable[[], list[Any]]
    end: Callable[[list[list[Any]]], None]


@dataclass(frozen=True)
class _Write:
    """One folder that is being written.

    Attributes:
        goal: its name in the end.
        folder: its name until then.
        stage: this stage.
        stages: how many there are.
        plan: what this stage writes.
        place: on the first stage, puts the folder in its place, or removes it after an error.
        written: by this stage.
        all_written: on the first stage, what each has written, if they have told it.
        in_place: on the first stage, the error that prevented it, or None.
    """

    goal: Path
    folder: Path
    stage: int
    stages: int
    plan: _Plan
    place: ExitStack
    written: Future[_Written] = field(default_factory=Future)
    all_written: Future[list[_Written]] = field(default_factory=Future)
    in_place: Future[str | None] = field(default_factory=Future)

    def write(self) -> _Written:
        """Write what this stage has."""
        try:
            with torch.no_grad():
                records = self.plan.write()
            return _Written(records, self._entries(_files_of(records)), None)
        except Exception as error:  # of the system, or of a tensor that is made
            return _Written([], {}, f"stage {self.stage}: {error}")

    def put_in_place(self, parts: list[_Written]) -> None:
        """End the folder with what all stages have written."""
        try:
            with self.place:
                if errors := [part.error for part in parts if part.error is not None]:
                    raise _NotWritten("; ".join(errors))
                for stage in range(self.stages):
                    self._left_by(stage).unlink(missing_ok=True)
                self.plan.end([part.records for part in parts])
                files = self._entries({table(self.folder).name, shard_metadata.NAME})
                for part in parts:
                    files |= part.files
                manifest.write(self.folder, files)
        except Exception as error:
            self.in_place.set_result(without_link(error))
        else:
            self.in_place.set_result(None)

    def in_background(self) -> None:
        """Do all that is to be done without messages."""
        written = self.write()
        if self.stage > 0 and written.error is None:
            with suppress(OSError), replacing(self._left_by(self.stage)) as file:
                pickle.dump(written, file)
        self.written.set_result(written)
        if self.stage == 0:
            self.put_in_place(self._parts(written))

    def _parts(self, mine: _Written) -> list[_Written]:
        """What all stages have written, as soon as they have left or told it."""
        left = [self._left_by(stage) for stage in range(1, self.stages)]
        while not self.all_written.done():
            if all(path.exists() for path in left):
                return [mine, *(pickle.loads(path.read_bytes()) for path in left)]
            wait([self.all_written], _LOOK_SECONDS)
        return self.all_written.result()

    def _entries(self, names: set[str]) -> dict[str, manifest.Entry]:
        return {name: manifest.entry(self.folder / name) for name in names}

    def _left_by(self, stage: int) -> Path:
        return self.folder / f"written-{stage}"


def _files_of(records: list[Any]) -> set[str]:
    """The names of the files to which a stage has written."""
    return {record.storage_data.relative_path for record in records}


def _plan(own: dict[str, DeferredTensor], folder: Path, group: dist.ProcessGroup | None) -> _Plan:
    """Plan how to write this stage's tensors, one at a time; collective over the group."""
    # Imported here, because few runs need it and it takes a while.
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.futures import Future as TorchFuture

    class Planner(checkpoint.DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            return object.made() if isinstance(object, DeferredTensor) else object

    class Writer(checkpoint.FileSystemWriter):
        """Leaves writing until it is told to."""

        def write_data(self, plan: Any, planner: Any) -> TorchFuture[list[Any]]:
            later["write"] = partial(super().write_data, plan, planner)
            nothing = TorchFuture[list[Any]]()
            nothing.set_result([])
            return nothing

        def finish(self, metadata: Any, results: Any) -> None:
            later["end"] = partial(super().finish, metadata)

    later: dict[str, Callable[..., Any]] = {}
    with warnings.catch_warnings():
        # The advice to start ranks, where one writes alone.
        warnings.filterwarnings("ignore", message=".*assuming the intent is to save")
        try:
            checkpoint.save(
                own,
                storage_writer=Writer(folder),
                planner=Planner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )
        except checkpoint.CheckpointException as error:
            raise OSError(
                f"'{folder}' was not written: {without_link(error)}." + see("files")
            ) from error
    write = later["write"]
    return _Plan(lambda: write().value(), later.get("end", _nothing))


def _nothing(records: list[list[Any]]) -> None:
    """Another stage ends the folder."""
