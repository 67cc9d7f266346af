"""Stores pruned weights as their kept values; the dense weight exists only while it is used.

It may import from support and distributed.
"""

from lightning_axosparse.sparse.module.convert import densify, sparsify

__all__ = ["densify", "sparsify"]
