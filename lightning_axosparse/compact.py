"""Compact: checkpoints in which what is mostly zeros takes only the space of the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from lightning_axosparse.checkpoint_io import AtomicCheckpointIO
from lightning_axosparse.corrupt import reading
from lightning_axosparse.sparse.packed import Packed

_MOST_KEPT = 0.9
"""The largest share of nonzero entries for which packing is worth its time."""


class CompactCheckpointIO(AtomicCheckpointIO):
    """Write Lightning checkpoints small once a ticket is drawn: weights and optimizer state.

    Pass it to the Trainer: ``Trainer(plugins=[CompactCheckpointIO()], ...)``. A checkpoint then is
    what it always is, but for its matrices with many zeros, which are packed without loss. A run
    resumes from it with the same plugin, and :func:`lightning_axosparse.load_sparse` reads it
    without making anything dense; ``CompactCheckpointIO().load_checkpoint(path)`` is the ordinary
    checkpoint again.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint``, packed, to ``path``."""
        super().save_checkpoint(compacted(checkpoint), path, storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, packed or not, as the dense one that it was.

        Raises:
            FileNotFoundError: if there is no such file.
            CorruptFileError: if it is not as it was written.
        """
        checkpoint = super().load_checkpoint(path, map_location, weights_only)
        with reading(path):
            return expanded(checkpoint)


def compacted(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """``checkpoint`` with its tensors of mostly zeros packed, each once, whatever its names."""
    packed: dict[str, Any] = tree_map_only(Tensor, _each_once(_packed), checkpoint)
    return packed


def expanded(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint of which :func:`compacted` made ``checkpoint``."""
    whole: dict[str, Any] = tree_map(_each_once(_expanded), checkpoint, is_leaf=Packed.is_record)
    return whole


def _packed(tensor: Tensor) -> Any:
    if not (tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel()):
        return tensor
    if tensor.count_nonzero() > _MOST_KEPT * tensor.numel():
        return tensor
    return Packed.of_nonzeros(tensor).record()


def _expanded(value: Any) -> Any:
    return Packed.from_record(value).lazy().dense() if Packed.is_record(value) else value


def _each_once(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``function``, whose result for the same object is the same; for objects that stay alive."""
    results: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if id(value) not in results:
            results[id(value)] = function(value)
        return results[id(value)]

    return once
