"""Job: a call on its way to the ranks, and the folder where they find it and leave answers."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from lightning.pytorch import Trainer


@dataclass(frozen=True)
class ProcessState:
    """What a call depends on beside its arguments: random states, torch's settings, ``argv``."""

    python_random: Any
    numpy_random: Any
    torch_random: torch.Tensor
    cuda_random: list[torch.Tensor]
    deterministic: bool
    deterministic_warns: bool
    cudnn_benchmark: bool
    matmul_precision: str
    default_dtype: torch.dtype
    argv: list[str]

    @classmethod
    def of_this_process(cls) -> ProcessState:
        """Capture it."""
        cuda_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            python_random=random.getstate(),
            numpy_random=np.random.get_state(),
            torch_random=torch.get_rng_state(),
            cuda_random=torch.cuda.get_rng_state_all() if cuda_in_use else [],
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warns=torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            matmul_precision=torch.get_float32_matmul_precision(),
            default_dtype=torch.get_default_dtype(),
            argv=sys.argv,
        )

    def restore(self) -> None:
        """Bring this process into it."""
        random.setstate(self.python_random)
        np.random.set_state(self.numpy_random)
        torch.set_rng_state(self.torch_random)
        if self.cuda_random:
            torch.cuda.set_rng_state_all(self.cuda_random)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warns)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_default_dtype(self.default_dtype)
        sys.argv = self.argv


@dataclass(frozen=True)
class Job:
    """One call, as each rank runs it."""

    ranks: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trainer: Trainer | None
    state: ProcessState


@dataclass(frozen=True)
class Answer:
    """What rank 0 brings home from a call."""

    result: Any
    changes: Any
    state: ProcessState


@dataclass(frozen=True)
class Failure:
    """The end of one rank.

    Attributes:
        when: seconds of the host's clock; the first failure is the one to report.
        where: the rank, in words.
        exception: what it raised, unless that cannot be pickled.
        trace: its traceback, as text.
    """

    when: float
    where: str
    exception: BaseException | None
    trace: str

    @classmethod
    def of(cls, exception: BaseException, where: str) -> Failure:
        """Describe an exception that has just been caught."""
        trace = "".join(traceback.format_exception(exception))
        try:  # Some exceptions are pickled gladly and cannot be read back.
            cloudpickle.loads(cloudpickle.dumps(exception))
        except Exception:
            return cls(time.time(), where, None, trace)
        return cls(time.time(), where, exception, trace)


_PREFIX = "axosparse-"


class JobFolder:
    """The files of one job.

    Args:
        path: an existing folder that caller and ranks see.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job = path / "job"
        self.answer = path / "answer"

    @classmethod
    @contextmanager
    def temporary(cls) -> Iterator[JobFolder]:
        """A folder for the caller, with its lifeline held; both gone at the end.

        The lifeline is a lock that the operating system takes from the caller however it dies. Of
        callers that were killed together with their ranks, the folders are removed here.
        """
        remove_orphans(Path(tempfile.gettempdir()))
        prefix = f"{_PREFIX}{os.getpid()}-"
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as path:
            folder = cls(Path(path))
            unlocked = folder.path / "unlocked"
            with unlocked.open("w") as lifeline:
                fcntl.lockf(lifeline, fcntl.LOCK_EX)
                unlocked.rename(folder._lifeline)  # Who finds one that is free may remove it.
                yield folder

    @property
    def _lifeline(self) -> Path:
        return self.path / "lifeline"

    def wait_for_caller_to_go(self) -> None:
        """Block until the caller lets the lifeline go."""
        with self._lifeline.open() as lifeline:
            fcntl.lockf(lifeline, fcntl.LOCK_SH)

    def whereabouts(self, rank: int) -> Path:
        """The file in which a rank shows where it is."""
        return self.path / f"whereabouts-{rank}"

    def write_failure(self, rank: int, failure: Failure) -> None:
        """Leave word of a rank's end."""
        partial = self.path / f"partial-{rank}"
        partial.write_bytes(cloudpickle.dumps(failure))
        partial.rename(self.path / f"failure-{rank}")

    def first_failure(self) -> Failure | None:
        """The failure that came first, if any rank left one."""
        failures = [cloudpickle.loads(f.read_bytes()) for f in self.path.glob("failure-*")]
        return min(failures, key=lambda failure: failure.when, default=None)


def remove_orphans(folder: Path) -> None:
    """Remove this user's job folders in ``folder`` whose caller is dead.

    A process never tries a lifeline of its own: closing the file would let its lock go.
    """
    for path in folder.glob(f"{_PREFIX}*-*"):
        try:
            mine = path.name.startswith(f"{_PREFIX}{os.getpid()}-")
            if mine or path.lstat().st_uid != os.getuid():
                continue
            with (path / "lifeline").open("r+") as lifeline:
                fcntl.lockf(lifeline, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # The caller lives, or the folder is gone by now.
            continue
