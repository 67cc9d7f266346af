"""Tells which of Lightning's hooks a user has written."""

from __future__ import annotations

from lightning.pytorch.utilities.model_helpers import is_overridden


def overrides(owner: object | None, *hooks: str) -> bool:
    """Whether a LightningModule, LightningDataModule or callback overrides one of these hooks."""
    return any(is_overridden(hook, owner) for hook in hooks)
