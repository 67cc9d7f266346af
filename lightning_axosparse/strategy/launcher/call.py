"""A call as it is sent to its ranks: the function, the Trainer, and settings of the process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_axosparse.strategy.compat.internals import random_states, set_random_states
from lightning_axosparse.strategy.launcher.changes import named_objects
from lightning_axosparse.support.torch_flags import flags, set_flags


@dataclass(frozen=True)
class ProcessState:
    """Global state on which a call depends: random states, flags of torch, ``sys.argv``."""

    random: dict[str, Any]
    flags: dict[str, Any]
    argv: list[str]

    @classmethod
    def of_this_process(cls) -> ProcessState:
        """Return the state of this process."""
        cuda_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(random_states(include_cuda=cuda_in_use), flags(), sys.argv)

    def restore(self) -> None:
        """Set the state of this process."""
        set_random_states(self.random)
        set_flags(self.flags)
        sys.argv = self.argv


def origin_of_main() -> dict[str, Any]:
    """Return the origin of ``__main__``, which processes that a rank spawns import again.

    It is the file of a script, or the spec of the module that ``python -m`` runs.
    """
    main = vars(sys.modules["__main__"])
    origin = {"__file__": main["__file__"]} if "__file__" in main else {}
    if spec := main.get("__spec__"):
        origin["__spec__"] = ModuleSpec(spec.name, loader=None)
    return origin


@dataclass(frozen=True)
class Call:
    """A call that each rank runs."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trainer: Trainer | None
    state: ProcessState
    main: dict[str, Any]

    @property
    def named_objects(self) -> dict[str, Any]:
        """The objects that exist both in the caller and on the ranks, by name."""
        if self.trainer is None:
            return {}
        return named_objects(self.trainer, (*self.args, *self.kwargs.values()))
