"""Defines by which rule products run on the unpruned values of a sparse weight, or on a dense one.

With ``compute="auto"`` the density of the weight and the kind of processor decide. The ranks of a
run agree on one kind (:func:`most_cautious`), so that all choose alike.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from typing import Literal, NamedTuple, get_args

from lightning_axosparse.support.dense_products import cpu_info

Compute = Literal["auto", "dense", "sparse", "samo"]
"""How products run: the fastest way, with a dense weight made at every use, with the unpruned
values, or with a dense copy that stays in memory."""

COMPUTES: tuple[str, ...] = get_args(Compute)

Processor = Literal["dense", "few", "matrix", "bfloat16", "float32"]
"""A kind of processor, in the order of how much sparse products gain there, the least first.

- "dense": it is not x86-64, and sparse products are slower there, or have not been measured.
- "few": it is not x86-64, and up to a quarter of unpruned values they are faster, in float32.
- "matrix": its matrix instructions (AMX) multiply in 16 bits many times as fast as in float32.
  Sparse products have not been compared with those.
- "bfloat16": its vector instructions (AVX-512) multiply in bfloat16, some times as fast.
- "float32": it has neither, and products in 16 bits take longer than those in float32.
"""

PROCESSORS: tuple[Processor, ...] = get_args(Processor)


class Backend(NamedTuple):
    """How products with one sparse weight run.

    Attributes:
        compute: as for :func:`lightning_axosparse.sparsify`.
        agreed: the kind of processor for which "auto" chooses, if several ranks have agreed on one;
            None: this one's.
    """

    compute: Compute = "auto"
    agreed: Processor | None = None

    @property
    def processor(self) -> Processor:
        """The kind of processor for which "auto" chooses."""
        return self.agreed or this_processor()


AUTO = Backend()
"""How products run by default."""


@cache
def this_processor() -> Processor:
    """Return the kind of this machine's processor; ``ops/measure.py`` measures one of "dense"."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "dense"
    flags = cpu_info()["flags"].split()
    if "amx_tile" in flags:
        return "matrix"
    return "bfloat16" if "avx512_bf16" in flags else "float32"


def most_cautious(processors: Iterable[Processor]) -> Processor:
    """Return the kind of several processors on which sparse products gain least."""
    return min(processors, key=PROCESSORS.index)
