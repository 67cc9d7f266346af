"""Notes the checkpoints of a run, so that a run that loses a rank can begin again from one."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.strategy.launcher.call import Call
from lightning_axosparse.support.remote_files import local_path

_notes: Path | None = None

Note = tuple[str, list[Any]]
"""The path of a checkpoint, and the folders of the Trainer's checkpoint callbacks."""


def note_checkpoints_in(file: Path) -> None:
    """Let this rank note the checkpoints of its run in a file."""
    global _notes
    _notes = file


def note_checkpoint(path: Any, checkpoint: dict[str, Any], trainer: Trainer) -> None:
    """Note a checkpoint from which a run can go on, before it is written."""
    if _notes is None or "optimizer_states" not in checkpoint:
        return
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    with _notes.open("a") as file:
        file.write(json.dumps([str(path), folders], default=str) + "\n")


def noted_checkpoints(file: Path) -> list[Note]:
    """What a run has noted, the oldest first."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [(path, folders) for path, folders in map(json.loads, lines)]


def begun_again(call: Call, saved: list[Note]) -> tuple[Call, str]:
    """The call that goes on from the newest whole checkpoint, and from where that is, in words."""
    newest = next((note for note in reversed(saved) if _is_whole(note[0])), None)
    if newest is None or call.trainer is None or not call.trainer.training:
        return call, "where it had begun, as it has saved no whole checkpoint"
    path, folders = newest
    # The callbacks go on in the folders that they have found for this run.
    for callback, folder in zip(call.trainer.checkpoint_callbacks, folders, strict=True):
        if getattr(callback, "dirpath", folder) is None:
            vars(callback)["dirpath"] = folder
    given = inspect.signature(call.function).bind(*call.args)
    given.arguments["ckpt_path"] = path
    if given.arguments.get("weights_only") is None:
        # Objects of the user's classes are loaded: the call's own ranks have written them.
        given.arguments["weights_only"] = False
    return replace(call, args=given.args), f"'{path}'"


def _is_whole(checkpoint: str) -> bool:
    """Whether it is a local file or folder, as it was written."""
    path = local_path(checkpoint)
    if path is None or not path.exists():
        return False
    try:
        AtomicCheckpointIO().verify(path)
    except (OSError, ValueError):
        return False
    return True
