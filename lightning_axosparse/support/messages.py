"""Says things on the first rank, beside progress bars and not inside them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr

from lightning.pytorch.utilities import rank_zero
from lightning_utilities.core import rank_zero as shared

# A bar of a notebook is of another class, but among the same instances.
from tqdm.auto import tqdm

from lightning_axosparse.support.patched import patched


def rank_zero_info(text: str) -> None:
    """Log as Lightning's function of this name."""
    with _beside_bars():
        rank_zero.rank_zero_info(text)


def rank_zero_warn(text: str) -> None:
    """Warn as Lightning's function of this name, on behalf of the caller."""
    with _beside_bars():
        rank_zero.rank_zero_warn(text, stacklevel=5)


@contextmanager
def _beside_bars() -> Iterator[None]:
    """Take bars off the terminal inside the context, where messages go through the bars' file.

    A rank's standard output and error are two pipes: what is written into both may change order.
    """
    bars = [bar for bar in getattr(tqdm, "_instances", ()) if not bar.disable]
    with ExitStack() as stack:
        for bar in bars[:1]:
            stack.enter_context(tqdm.external_write_mode(file=bar.fp))
            stack.enter_context(redirect_stderr(bar.fp))
        for handler in _handlers(shared.log):  # of the Lightning package imported last
            if type(handler) is logging.StreamHandler:
                # The file of its beginning is not the one that a bar of rich puts in its place,
                # and may be closed by now, so that it can't be flushed as `setStream` would.
                stack.enter_context(patched(handler, "stream", sys.stderr))
        yield


def _handlers(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None
