"""Keeps what collectives of a forward pass return for the pass that computes the same again.

With activation checkpointing layers are computed twice, but none of their collectives runs twice:
the communication-aware checkpointing of TED (Singh et al., ICS 2023). Results take memory until
their layers' backward pass is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

Start = Callable[[], dist.Work]
Collective = Callable[[Start, Sequence[Tensor]], dist.Work | None]


def _run(start: Start, outputs: Sequence[Tensor]) -> dist.Work | None:
    return start()


_now: Collective = _run
"""What a collective does at this moment."""


def collective(start: Start, outputs: Sequence[Tensor]) -> dist.Work | None:
    """Start a collective, or fill its outputs with what it returned in the pass before.

    Args:
        start: starts it.
        outputs: the tensors that it fills.

    Returns:
        Its work; None where the outputs are filled.
    """
    now = _now
    with _replaced(_run):  # A collective may consist of others.
        return now(start, outputs)


@contextmanager
def _replaced(by: Collective) -> Iterator[None]:
    global _now
    before, _now = _now, by
    try:
        yield
    finally:
        _now = before


class KeptResults:
    """The results of the collectives of a forward pass, in the order in which they began."""

    def __init__(self) -> None:
        self._results: list[list[Tensor]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep results of the collectives in the context, behind those of earlier contexts."""
        with _replaced(self._keep):
            yield

    @contextmanager
    def returned(self) -> Iterator[None]:
        """Let the collectives in the context return what is kept, in the same order."""
        results = iter(self._results)

        def fill(_: Start, outputs: Sequence[Tensor]) -> None:
            for output, result in zip(outputs, next(results), strict=True):
                output.copy_(result)

        with _replaced(fill):
            yield

    def _keep(self, start: Start, outputs: Sequence[Tensor]) -> dist.Work:
        work = start()
        work.wait()
        # Layers may change theirs.
        self._results.append([output.detach().clone() for output in outputs])
        return work
