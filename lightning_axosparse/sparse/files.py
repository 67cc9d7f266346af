"""Files: the weights of a module as safetensors, sparse or dense, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_axosparse.arguments import BOOL, MODULE, PATH, checked
from lightning_axosparse.replacing import replacing
from lightning_axosparse.sparse.packed import Packed
from lightning_axosparse.sparse.weight import SparseWeight

_KEY = "lightning_axosparse.sparse/1"
"""The entry of a file's metadata that tells shape and dtype of each sparse tensor."""

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@checked(ValueError, module=MODULE, path=PATH, sparse=BOOL)
def save_safetensors(module: nn.Module, path: str | Path, sparse: bool = True) -> None:
    """Write the state of ``module`` to a safetensors file; a dense copy of it is never made whole.

    Args:
        module: the model; some of its parameters may be stored sparse.
        path: the file.
        sparse: write sparsely stored parameters as their kept entries and coded places, for
            :func:`lightning_axosparse.load_sparse`. Otherwise the file is dense and ordinary: any
            reader of safetensors takes it.

    Raises:
        ValueError: for an argument of another type, and for state that is not a tensor, or of a
            dtype that the format does not have.
    """
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    described: dict[str, dict[str, Any]] = {}
    first_names: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or value.dtype not in _CODES:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"'{name}' is of {kind}; safetensors cannot hold it.")
        first = first_names.setdefault(id(getattr(value, "entries", value)), name)
        if first != name:
            metadata[name] = first  # tied: as safetensors.torch.save_model notes it
        elif sparse and isinstance(value, SparseWeight):
            packed = Packed.of(value.unchanged(), value.entries.mask())
            tensors[f"{name}.index"], tensors[f"{name}.values"] = packed.index, packed.values
            dtype = str(packed.dtype).removeprefix("torch.")
            described[name] = {"shape": list(packed.shape), "dtype": dtype}
        else:
            tensors[name] = value.detach()
    if described:
        metadata[_KEY] = json.dumps(described)
    _write(path, tensors, metadata)


class SafetensorsState(Mapping[str, Tensor]):
    """The state in a safetensors file, by name; tensors are read as they are asked for.

    Sparse ones have the dense shape and hold only their kept entries.

    Args:
        path: a file, written here or by others.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = safe_open(path, framework="pt")
        metadata = dict(self._file.metadata() or {})
        self._described: dict[str, dict[str, Any]] = json.loads(metadata.pop(_KEY, "{}"))
        parts = {f"{name}.{part}" for name in self._described for part in ("index", "values")}
        names: list[str] = self._file.keys()
        self._first = {n: n for n in (*self._described, *names) if n not in parts}
        self._first.update({k: v for k, v in metadata.items() if v in self._first})

    @property
    def sparse(self) -> list[str]:
        """The names of the tensors whose kept entries are in the file; of tied names the first."""
        return list(self._described)

    def packed(self, name: str) -> Packed:
        """One of the ``sparse`` tensors as it is in the file."""
        told = self._described[name]
        return Packed(
            torch.Size(told["shape"]),
            getattr(torch, told["dtype"]),
            self._file.get_tensor(f"{name}.index"),
            self._file.get_tensor(f"{name}.values"),
        )

    def __getitem__(self, name: str) -> Tensor:
        first = self._first[name]
        if first in self._described:
            return self.packed(first).lazy()
        tensor: Tensor = self._file.get_tensor(first)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)


def _write(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file of the format; a tensor is made dense, and brought to CPU, when its turn comes.

    The library's own writer wants all of them in memory at once.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # for alignment
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        shape, code = list(tensor.shape), _CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            whole = tensor.dense() if isinstance(tensor, SparseWeight) else tensor
            file.write(whole.reshape(-1).contiguous().cpu().view(torch.uint8).numpy().data)
