"""Makes only one of the ranks that are given the same batches write predictions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_axosparse.strategy.compat.hooks import callbacks_of
from lightning_axosparse.support.patched import patched

_WRITING = ("write_on_batch_end", "write_on_epoch_end")


@contextmanager
def without_writing(trainer: Trainer) -> Iterator[None]:
    """Let prediction writers write nothing inside the context; their other hooks are called."""
    writers = [each for each in callbacks_of(trainer) if isinstance(each, BasePredictionWriter)]
    with ExitStack() as stack:
        for writer, name in product(writers, _WRITING):
            stack.enter_context(patched(writer, name, _write_nothing))
        yield


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    """Another stage writes it."""
