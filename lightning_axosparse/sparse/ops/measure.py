"""Measures, on processors other than x86-64, which products run faster on unpruned values.

What is measured is a kind of processor (``backend``): the one with the highest densities up to
which all products are faster than those with panels of a dense weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import inf
from time import perf_counter
from typing import Any

import torch

from lightning_axosparse.sparse.backend import PROCESSORS, Processor, this_processor
from lightning_axosparse.sparse.ops import panels, products
from lightning_axosparse.sparse.ops.products import MAX_DENSITY, Densities
from lightning_axosparse.sparse.store.formats import layout_of

_ROWS, _COLUMNS, _TOKENS = 2048, 1024, 256
_TRIALS, _ENOUGH = 5, 0.3
"""How often both ways run, unless they have run for these seconds: one that is so slow loses."""

_ONE_TOKEN = 0.3
"""The density at which a single token is measured: panels gain nothing where more is unpruned."""


@cache
def measured_processor() -> Processor | None:
    """Measure for some seconds which kind this processor is; None if its flags say so."""
    if this_processor() != "dense":
        return None
    products.load_loops()
    return next(kind for kind in reversed(PROCESSORS) if _reaches(kind))


def _reaches(kind: Processor) -> bool:
    dtypes = torch.float32, torch.bfloat16
    limits = zip(MAX_DENSITY[kind], dtypes, strict=True)
    return all(_is_faster(densities, dtype) for densities, dtype in limits)


def _is_faster(densities: Densities, dtype: torch.dtype) -> bool:
    """Return whether each product is faster on unpruned values at its density, if at any."""
    return all(
        _one_is_faster(product, density, dtype)
        for product, density in densities.items()
        if density > 0
    )


@cache
def _one_is_faster(product: str, density: float, dtype: torch.dtype) -> bool:
    name, tokens = product, _TOKENS
    if product == "one_token":
        name, tokens, density = "spmm_t", 1, min(density, _ONE_TOKEN)
    generator = torch.Generator("cpu").manual_seed(0)
    chances = torch.rand(_ROWS, _COLUMNS, generator=generator, device="cpu")
    layout = layout_of(chances < density, "segments")
    ones = partial(torch.ones, dtype=dtype, device="cpu")
    values, outputs, inputs = ones(layout.nnz), ones(tokens, _ROWS), ones(tokens, _COLUMNS)
    operands: dict[str, tuple[Any, ...]] = {
        "spmm_t": (inputs, values, layout),
        "spmm": (outputs, values, layout),
        "sddmm": (outputs, inputs, layout),
    }
    cast = (dtype,) if name == "sddmm" else ()
    unpruned, dense = _seconds(
        lambda: getattr(products, name)(*operands[name]),
        lambda: getattr(panels, name)(*operands[name], *cast),
    )
    return unpruned < dense


def _seconds(*functions: Callable[[], Any]) -> list[float]:
    """Return the least seconds of functions that run in turn: other work only adds to them."""
    seconds = [inf] * len(functions)
    begin = perf_counter()
    for trial in range(_TRIALS):
        if trial > 1 and perf_counter() - begin > _ENOUGH:
            break
        for at, function in enumerate(functions):
            start = perf_counter()
            function()
            seconds[at] = min(seconds[at], perf_counter() - start)
    return seconds
