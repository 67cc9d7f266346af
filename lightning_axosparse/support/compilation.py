"""Announces that loops are compiled, and frees the compiler afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numba.core import event

from lightning_axosparse.support.memory import release_library


@contextmanager
def compilation() -> Iterator[None]:
    """Load loops inside the context: some are compiled, if they are not in numba's cache.

    The first one is announced, as that takes some seconds. The compiler's memory is released in the
    end, because it is not needed again.
    """
    listener: Any = _Announcer()
    with event.install_listener("numba:compile", listener):
        yield
    release_library("libllvmlite")


class _Announcer(event.Listener):
    """Announces the first compilation."""

    announced = False

    def on_start(self, event: Any) -> None:
        if not self.announced:
            rank_zero_info("Compiling loops: only the first time on a machine.")
        self.announced = True

    def on_end(self, event: Any) -> None:
        """Do nothing."""
