"""Tells which of Lightning's hooks a user has written."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

_KNOWN = ("lightning.", "lightning_axosparse.")


def overrides(owner: object | None, *hooks: str) -> bool:
    """Whether a LightningModule, LightningDataModule or callback overrides one of these hooks."""
    return any(is_overridden(hook, owner) for hook in hooks)


def checkpoint_hooks(trainer: Trainer, hook: str) -> bool:
    """Whether the user has written this hook, in the module or in a callback.

    Args:
        trainer: the Trainer.
        hook: one that is given the whole checkpoint.
    """
    callbacks = vars(trainer)["callbacks"]
    users = [each for each in callbacks if not type(each).__module__.startswith(_KNOWN)]
    return any(overrides(each, hook) for each in (trainer.lightning_module, *users))
