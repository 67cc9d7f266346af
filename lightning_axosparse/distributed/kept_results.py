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


_now: tuple[Collective, bool] = _run, True
"""What a collective does at this moment, and whether it sends anything."""


def collectives_send() -> bool:
    """Whether collectives run now, and do not return what they returned in the pass before."""
    return _now[1]


def collective(start: Start, outputs: Sequence[Tensor]) -> dist.Work | None:
    """Start a collective, or fill its outputs with what it returned in the pass before.

    Args:
        start: starts it.
        outputs: the tensors that it fills.

    Returns:
        Its work; None where the outputs are filled.
    """
    own, sends = _now
    with _replaced(_run, sends):  # A collective may consist of others.
        return own(start, outputs)


@contextmanager
def _replaced(by: Collective, sends: bool) -> Iterator[None]:
    global _now
    before, _now = _now, (by, sends)
    try:
        yield
    finally:
        _now = before


class KeptResults:
    """The results of the collectives of a forward pass, in the order in which they began.

    Args:
        count: called with the bytes of each result that the second pass gets.
    """

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._results: list[list[Tensor]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep results of the collectives in the context, behind those of earlier contexts."""
        with _replaced(self._keep, sends=True):
            yield

    @contextmanager
    def returned(self) -> Iterator[None]:
        """Let the collectives in the context return what is kept, in the same order."""
        results = iter(self._results)

        def fill(_: Start, outputs: Sequence[Tensor]) -> None:
            for output, result in zip(outputs, next(results), strict=True):
                output.copy_(result)
                self._count(result.nbytes)

        with _replaced(fill, sends=False):
            yield

    def _keep(self, start: Start, outputs: Sequence[Tensor]) -> dist.Work:
        work = start()
        work.wait()
        # Layers may change theirs.
        self._results.append([output.detach().clone() for output in outputs])
        return work
