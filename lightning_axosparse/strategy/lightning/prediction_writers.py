"""Makes only one of the ranks that are given the same batches write predictions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

_WRITING = ("write_on_batch_end", "write_on_epoch_end")


@contextmanager
def without_writing(trainer: Trainer) -> Iterator[None]:
    """Let prediction writers write nothing inside the context; their other hooks are called."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    writers = [each for each in callbacks if isinstance(each, BasePredictionWriter)]
    replaced = [(vars(writer), {k: vars(writer).get(k) for k in _WRITING}) for writer in writers]
    for attributes, _ in replaced:
        attributes.update(dict.fromkeys(_WRITING, _write_nothing))
    try:
        yield
    finally:
        for attributes, own in replaced:
            for name, function in own.items():
                del attributes[name]
                if function is not None:
                    attributes[name] = function


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    """Another stage writes it."""
