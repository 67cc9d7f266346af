"""Announces that loops are compiled, which takes some seconds the first time on a machine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numba.core import event


def announced_compilation() -> AbstractContextManager[Any]:
    """Announce once in the context that loops are compiled, if they are not in numba's cache."""
    listener: Any = _Announcer()
    context: AbstractContextManager[Any] = event.install_listener("numba:compile", listener)
    return context


class _Announcer(event.Listener):
    """Announces the first compilation."""

    announced = False

    def on_start(self, event: Any) -> None:
        if not self.announced:
            rank_zero_info("Compiling loops: only the first time on a machine.")
        self.announced = True

    def on_end(self, event: Any) -> None:
        """Do nothing."""
