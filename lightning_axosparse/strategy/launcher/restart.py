"""Records the checkpoints of a run, so that it can restart from one after a rank was killed."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Trainer

from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.strategy.launcher.call import Call
from lightning_axosparse.support.remote_files import local_path

_record: Path | None = None


class SavedCheckpoint(NamedTuple):
    """A checkpoint of a run.

    Attributes:
        path: its path.
        folders: those of the Trainer's checkpoint callbacks, in their order.
    """

    path: str
    folders: list[Any]


def record_checkpoints_in(file: Path) -> None:
    """Let this rank record the checkpoints of its run in a file."""
    global _record
    _record = file


def record_checkpoint(path: Any, checkpoint: dict[str, Any], trainer: Trainer) -> None:
    """Record a checkpoint from which a run can continue, before it is written."""
    if _record is None or "optimizer_states" not in checkpoint:
        return
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    with _record.open("a") as file:
        file.write(json.dumps([str(path), folders], default=str) + "\n")


def recorded_checkpoints(file: Path) -> list[SavedCheckpoint]:
    """Return the recorded checkpoints of a run, the oldest first."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [SavedCheckpoint(*json.loads(line)) for line in lines]


def restarted_call(call: Call, saved: list[SavedCheckpoint]) -> tuple[Call, str]:
    """Return the call that continues from the newest complete checkpoint, and its description."""
    newest = next((each for each in reversed(saved) if _is_complete(each.path)), None)
    if newest is None or call.trainer is None or not call.trainer.training:
        return call, "where it had begun, as it has saved no whole checkpoint"
    # The callbacks continue in the folders that they have chosen for this run.
    for callback, folder in zip(call.trainer.checkpoint_callbacks, newest.folders, strict=True):
        if getattr(callback, "dirpath", folder) is None:
            vars(callback)["dirpath"] = folder
    given = inspect.signature(call.function).bind(*call.args)
    given.arguments["ckpt_path"] = newest.path
    if given.arguments.get("weights_only") is None:
        # Objects of the user's classes are loaded: the call's own ranks have written them.
        given.arguments["weights_only"] = False
    return replace(call, args=given.args), f"'{newest.path}'"


def _is_complete(checkpoint: str) -> bool:
    """Whether a path is that of a local checkpoint whose checksums are right."""
    path = local_path(checkpoint)
    if path is None or not path.exists():
        return False
    try:
        AtomicCheckpointIO().verify(path)
    except (OSError, ValueError):
        return False
    return True
