"""Describes a launched call, its result, failures and checkpoints, and the folder of them."""

from __future__ import annotations

import fcntl
import inspect
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from lightning.pytorch import Trainer

from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO, local_path
from lightning_axosparse.strategy.compat.internals import random_states, set_random_states
from lightning_axosparse.strategy.launcher.changes import known_objects
from lightning_axosparse.support.files import LOCK, temporary_folder

_notes: Path | None = None


@dataclass(frozen=True)
class ProcessState:
    """Global state on which a call depends: random states, settings of torch, ``sys.argv``."""

    random: dict[str, Any]
    deterministic: bool
    deterministic_warns: bool
    cudnn_benchmark: bool
    onednn: bool
    matmul_precision: str
    default_dtype: torch.dtype
    argv: list[str]

    @classmethod
    def of_this_process(cls) -> ProcessState:
        """The state of this process."""
        cuda_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            random=random_states(include_cuda=cuda_in_use),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warns=torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            onednn=bool(torch.backends.mkldnn.enabled),
            matmul_precision=torch.get_float32_matmul_precision(),
            default_dtype=torch.get_default_dtype(),
            argv=sys.argv,
        )

    def restore(self) -> None:
        """Set it in this process."""
        set_random_states(self.random)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warns)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.mkldnn.set_flags(self.onednn, _fp32_precision=None)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_default_dtype(self.default_dtype)
        sys.argv = self.argv


@dataclass(frozen=True)
class MainModule:
    """From where the caller's ``__main__`` was run; processes that a rank spawns import it again.

    The file is that of a script, the name that of the module that ``python -m`` runs.
    """

    file: str | None
    name: str | None

    @classmethod
    def of_this_process(cls) -> MainModule:
        """That of this process."""
        main = sys.modules["__main__"]
        return cls(getattr(main, "__file__", None), getattr(main.__spec__, "name", None))

    def restore(self) -> None:
        """Set it in this process."""
        main = sys.modules["__main__"]
        if self.file is not None:
            main.__file__ = self.file
        if self.name is not None:
            main.__spec__ = ModuleSpec(self.name, loader=None)


@dataclass(frozen=True)
class Call:
    """One call, as each rank runs it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trainer: Trainer | None
    state: ProcessState
    main: MainModule

    @property
    def known_objects(self) -> dict[str, Any]:
        """By name, the objects of the call that exist both in the caller and on the ranks."""
        if self.trainer is None:
            return {}
        return known_objects(self.trainer, (*self.args, *self.kwargs.values()))


@dataclass(frozen=True)
class CallResult:
    """What rank 0 returns: the function's value, changes and state of the process afterwards.

    There are no changes without a trainer.
    """

    value: Any
    changes: Any
    state: ProcessState


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank, as the rank reports it.

    Attributes:
        when: seconds of the host's clock; the first failure is the cause of the others.
        rank: the rank, in words.
        exception: what it raised; None if that cannot be pickled.
        trace: its traceback, as text.
    """

    when: float
    rank: str
    exception: BaseException | None
    trace: str

    @classmethod
    def of(cls, exception: BaseException, rank: str) -> Failure:
        """The failure of a rank that has just caught ``exception``."""
        trace = "".join(traceback.format_exception(exception))
        try:  # Some exceptions can be pickled, but not unpickled.
            cloudpickle.loads(cloudpickle.dumps(exception))
        except Exception:
            return cls(time.time(), rank, None, trace)
        return cls(time.time(), rank, exception, trace)


class CallFolder:
    """The files of one call, in a folder that caller and ranks see."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.call = path / "call"
        self.result = path / "result"
        self.checkpoints = path / "checkpoints"

    @classmethod
    @contextmanager
    def temporary(cls) -> Iterator[CallFolder]:
        """Create a folder that is there until the end of the context, or of this process."""
        with temporary_folder() as path:
            yield cls(path)

    def wait_for_end_of_caller(self) -> None:
        """Block until the caller has ended or has left :meth:`temporary`."""
        with (self.path / LOCK).open() as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH)

    def status(self, rank: int) -> Path:
        """The file in which a rank publishes its status."""
        return self.path / f"status-{rank}"

    def weights(self, rank: int) -> Path:
        """The file to which a rank writes the weights that it returns."""
        return self.path / f"weights-{rank}"

    def write_failure(self, rank: int, failure: Failure) -> None:
        """Report the failure of a rank."""
        partial = self.path / f"partial-{rank}"
        partial.write_bytes(cloudpickle.dumps(failure))
        partial.rename(self.path / f"failure-{rank}")

    def first_failure(self) -> Failure | None:
        """The earliest failure, if any rank has reported one."""
        failures = [cloudpickle.loads(f.read_bytes()) for f in self.path.glob("failure-*")]
        return min(failures, key=lambda failure: failure.when, default=None)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that a run has saved, or was about to save.

    The folders are those of the Trainer's checkpoint callbacks, where they have one.
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
    """
    given = inspect.signature(function).bind(*args)
    given.arguments["ckpt_path"] = path
    if given.arguments.get("weights_only") is None:
        given.arguments["weights_only"] = False
    return given.args
