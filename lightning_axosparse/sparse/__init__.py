"""Sparse storage: the kept values are the parameter, the dense weight exists only while in use."""

from lightning_axosparse.sparse.files import save_safetensors
from lightning_axosparse.sparse.swap import densify, sparsify

__all__ = ["densify", "save_safetensors", "sparsify"]
