"""Runs parts of a product in threads, as many as torch's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch

WORK_OF_A_THREAD = 2**20
"""Fewer multiplications are not worth another thread."""


def run_in_threads(part: Callable[[int, int], None], size: int, multiple: int, work: int) -> None:
    """Run ``part`` on ranges that make up ``range(size)``.

    Args:
        part: takes the first number of a range and the one after its last; it may run in several
            threads at once.
        size: the number of items to divide.
        multiple: ranges begin at multiples of this.
        work: the number of multiplications.
    """
    threads = min(torch.get_num_threads(), work // WORK_OF_A_THREAD, -(-size // multiple))
    if threads < 2:
        part(0, size)
        return
    edges = _edges(size, multiple, threads)
    others = [_threads().submit(part, *edge) for edge in pairwise(edges[1:])]
    part(*edges[:2])
    for other in others:
        other.result()


def _edges(size: int, multiple: int, parts: int) -> Sequence[int]:
    pieces = -(-size // multiple)
    return [min(pieces * part // parts * multiple, size) for part in range(parts + 1)]


@cache  # One pool for the process, as torch has one.
def _threads() -> ThreadPoolExecutor:
    # A forked process no longer has the pool's threads.
    os.register_at_fork(after_in_child=_threads.cache_clear)
    return ThreadPoolExecutor(thread_name_prefix="axosparse-product")
