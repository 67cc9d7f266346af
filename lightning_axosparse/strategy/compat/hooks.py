"""Tells which of Lightning's hooks a user has written, and adds some of the strategy's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

_KNOWN = ("lightning.", "lightning_axosparse.")
_C = TypeVar("_C", bound="RankLocalCallback")


class RankLocalCallback(Callback):
    """A callback of the strategy, which refers to what one rank has for one run."""

    def __deepcopy__(self: _C, memo: dict[int, Any]) -> _C:
        # Users copy the Trainer's callbacks, but process groups cannot be copied.
        return self

    @contextmanager
    def added_to(self, trainer: Trainer) -> Iterator[None]:
        """Add this callback to the Trainer's inside the context."""
        # First, since the hooks of the others may contain collectives, or read what this one knows.
        callbacks_of(trainer).insert(0, self)
        try:
            yield
        finally:
            if self in callbacks_of(trainer):  # A hook may have replaced the list.
                callbacks_of(trainer).remove(self)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The Trainer's own list of its callbacks, an attribute that it sets without declaring it."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def trainer_of(module: LightningModule) -> Trainer | None:
    """The Trainer to which a module is attached; None in the process that only starts the ranks."""
    return module._trainer


def overrides(owner: object | None, *hooks: str) -> bool:
    """Whether a LightningModule, LightningDataModule or callback overrides one of these hooks."""
    return any(is_overridden(hook, owner) for hook in hooks)


def checkpoint_hooks(trainer: Trainer, hook: str) -> bool:
    """Whether the user has written this hook, in the module or in a callback.

    Args:
        trainer: the Trainer.
        hook: one that is given the whole checkpoint.
    """
    users = [each for each in callbacks_of(trainer) if not type(each).__module__.startswith(_KNOWN)]
    return any(overrides(each, hook) for each in (trainer.lightning_module, *users))
