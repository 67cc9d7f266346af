"""Stores weights as vectors of their unpruned values; a dense weight exists only while in use.

It may import from support and distributed.
"""

from lightning_axosparse.sparse.module.convert import densify, sparsify

__all__ = ["densify", "sparsify"]
