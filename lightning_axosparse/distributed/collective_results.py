"""Records the results of collectives in a forward pass, and returns them when it is recomputed.

With activation checkpointing, layers are computed twice, but their collectives run only once: the
communication-aware checkpointing of TED (Singh et al., ICS 2023). Results take memory until the
backward pass of their layers has ended.
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


_current: Collective = _run
"""The function that runs a collective now."""


def collective(start: Start, outputs: Sequence[Tensor]) -> dist.Work | None:
    """Start a collective, or fill its outputs with the recorded result.

    Args:
        start: starts the collective.
        outputs: the tensors that the collective fills.

    Returns:
        The work of the collective; None if the outputs are filled.
    """
    run = _current
    with _replaced(_run):  # A collective may consist of others.
        return run(start, outputs)


@contextmanager
def _replaced(by: Collective) -> Iterator[None]:
    global _current
    before, _current = _current, by
    try:
        yield
    finally:
        _current = before


class CollectiveResults:
    """The results of the collectives of a forward pass, in the order in which they began."""

    def __init__(self) -> None:
        self._results: list[list[Tensor]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the results of the collectives in the context, after those of earlier contexts."""
        with _replaced(self._record):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Return the recorded results, in their order, from the collectives in the context."""
        results = iter(self._results)

        def fill(_: Start, outputs: Sequence[Tensor]) -> None:
            for output, result in zip(outputs, next(results), strict=True):
                output.copy_(result)

        with _replaced(fill):
            yield

    def _record(self, start: Start, outputs: Sequence[Tensor]) -> dist.Work:
        work = start()
        work.wait()
        # Copies, as layers may change the outputs in place.
        self._results.append([output.detach().clone() for output in outputs])
        return work
