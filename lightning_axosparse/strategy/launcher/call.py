"""What a call takes along to its ranks: the function, the Trainer, and settings of the process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_axosparse.strategy.compat.internals import random_states, set_random_states
from lightning_axosparse.strategy.launcher.changes import known_objects
from lightning_axosparse.support.torch_flags import flags, set_flags


@dataclass(frozen=True)
class ProcessState:
    """Global state on which a call depends: random states, flags of torch, ``sys.argv``."""

    random: dict[str, Any]
    flags: dict[str, Any]
    argv: list[str]

    @classmethod
    def of_this_process(cls) -> ProcessState:
        """The state of this process."""
        cuda_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(random_states(include_cuda=cuda_in_use), flags(), sys.argv)

    def restore(self) -> None:
        """Set it in this process."""
        set_random_states(self.random)
        set_flags(self.flags)
        sys.argv = self.argv


def origin_of_main() -> dict[str, Any]:
    """From where ``__main__`` was run: processes that a rank spawns import it again.

    The file is that of a script, the spec names the module that ``python -m`` runs.
    """
    main = vars(sys.modules["__main__"])
    origin = {"__file__": main["__file__"]} if "__file__" in main else {}
    if spec := main.get("__spec__"):
        origin["__spec__"] = ModuleSpec(spec.name, loader=None)
    return origin


@dataclass(frozen=True)
class Call:
    """One call, as each rank runs it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trainer: Trainer | None
    state: ProcessState
    main: dict[str, Any]

    @property
    def known_objects(self) -> dict[str, Any]:
        """By name, the objects of the call that exist both in the caller and on the ranks."""
        if self.trainer is None:
            return {}
        return known_objects(self.trainer, (*self.args, *self.kwargs.values()))
