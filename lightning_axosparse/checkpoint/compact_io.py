"""Writes Lightning checkpoints in which tensors of mostly zeros are encoded without the zeros."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.checkpoint.sparse_encoding import EncodedTensor
from lightning_axosparse.support.corrupt_file import reading
from lightning_axosparse.support.files.deferred_tensor import DeferredTensor, all_made, each_once
from lightning_axosparse.support.files.stored_shape import stored_shape
from lightning_axosparse.support.torch_internals import tree_map, tree_map_only

_MOST_KEPT = 0.9
"""The largest fraction of nonzero entries for which encoding is worth its time."""


class CompactCheckpointIO(AtomicCheckpointIO):
    """Write small Lightning checkpoints of pruned models: weights and optimizer state.

    Pass it to the Trainer: ``Trainer(plugins=[CompactCheckpointIO()], ...)``. A checkpoint has the
    usual content, but matrices with many zeros are encoded without loss. A run resumes from it with
    the same plugin, and :func:`lightning_axosparse.load_sparse` reads it without making anything
    dense. ``CompactCheckpointIO().load_checkpoint(path)`` returns the ordinary checkpoint.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint``, encoded, to ``path``."""
        super().save_checkpoint(compacted(checkpoint), path, storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, encoded or not, as a dense one.

        Raises:
            FileNotFoundError: if there is no such file.
            CorruptFileError: if it is not as it was written.
        """
        checkpoint = super().load_checkpoint(path, map_location, weights_only)
        with reading(path):
            whole: dict[str, Any] = all_made(expanded(checkpoint))
            return whole

    def load_deferred(self, path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a verified checkpoint, with deferred tensors for the encoded ones, too."""
        checkpoint = super().load_deferred(path, weights_only)
        with reading(path):
            return expanded(checkpoint)


def compacted(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return ``checkpoint`` with tensors of mostly zeros encoded, each object once."""
    encoded: dict[str, Any] = tree_map_only(Tensor, each_once(_encoded), checkpoint)
    return encoded


def expanded(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the inverse of :func:`compacted`, with deferred tensors for the encoded ones."""
    is_record, made = EncodedTensor.is_record, dict[int, Tensor]()

    def decoded(value: Any) -> Any:
        if not is_record(value):
            return value
        key = id(value["index"])  # records of one tensor have one index
        if key not in made:
            shape = stored_shape(value["shape"], "an encoded tensor")
            made[key] = DeferredTensor(
                f"encoded {key}", shape, value["dtype"], partial(_dense, value), value["index"]
            )
        return made[key]

    dense: dict[str, Any] = tree_map(decoded, checkpoint, is_leaf=is_record)
    return dense


def _encoded(tensor: Tensor) -> Any:
    if not (tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel()):
        return tensor
    values = tensor.made() if isinstance(tensor, DeferredTensor) else tensor
    if values.count_nonzero() > _MOST_KEPT * values.numel():
        return tensor
    return EncodedTensor.encode_nonzeros(values).record()


def _dense(record: dict[str, Any], _: Tensor) -> Tensor:
    return EncodedTensor.from_record(all_made(record)).decode().dense()
