"""Lets a call that has lost a rank begin again from a checkpoint of its run.

The first rank notes every checkpoint that it saves, for the caller: what callbacks on ranks know of
them ends with the ranks.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO, local_path

_notes: Path | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that a run has saved, or was about to save.

    Attributes:
        path: its file or folder.
        folders: of the Trainer's checkpoint callbacks, where they have one.
    """

    path: str
    folders: list[Any]

    @property
    def is_whole(self) -> bool:
        """Whether it is a local file or folder, as it was written."""
        path = local_path(self.path)
        if path is None or not path.exists():
            return False
        try:
            AtomicCheckpointIO().verify(path)
        except (OSError, ValueError):
            return False
        return True

    def keep_folders(self, trainer: Trainer) -> None:
        """Let the callbacks go on in the folders that they have found for this run."""
        for callback, folder in zip(trainer.checkpoint_callbacks, self.folders, strict=True):
            if getattr(callback, "dirpath", folder) is None:
                vars(callback)["dirpath"] = folder


def note_checkpoints_in(file: Path) -> None:
    """Let this rank note the checkpoints of its run in a file."""
    global _notes
    _notes = file


def note_checkpoint(path: Any, checkpoint: dict[str, Any], trainer: Trainer) -> None:
    """Note a checkpoint from which a run can go on, before it is written."""
    if _notes is None or "optimizer_states" not in checkpoint:
        return
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    with _notes.open("ab") as file:
        pickle.dump(SavedCheckpoint(str(path), folders), file)


def noted_checkpoints(file: Path) -> Sequence[SavedCheckpoint]:
    """What ranks have noted, the newest first."""
    found: list[SavedCheckpoint] = []
    if file.exists():
        with file.open("rb") as notes:
            while notes.peek(1):
                found.insert(0, pickle.load(notes))
    return found


def resumed_from(path: str, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a method of the Trainer with another ``ckpt_path``.

    Objects of the user's classes in it are loaded, unless the call says otherwise: its own ranks
    have written them.

    Args:
        path: of the checkpoint.
        function: what runs ``Trainer.fit``.
        args: its arguments.
    """
    given = inspect.signature(function).bind(*args)
    given.arguments["ckpt_path"] = path
    if given.arguments.get("weights_only") is None:
        given.arguments["weights_only"] = False
    return given.args
