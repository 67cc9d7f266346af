"""Sparse storage: the kept values are the parameter, the dense weight exists only while in use."""

from lightning_axosparse.sparse import lookup, product
from lightning_axosparse.sparse.files import save_safetensors
from lightning_axosparse.sparse.swap import densify, sparsify
from lightning_axosparse.sparse.weight import OWN_WAYS

__all__ = ["densify", "save_safetensors", "sparsify"]

OWN_WAYS.update(lookup.WAYS)
OWN_WAYS.update(product.WAYS)
