"""Files: a trained model from its checkpoint straight into sparse storage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_axosparse import archive
from lightning_axosparse.arguments import MODULE, NONE, PATH, PATTERNS, checked, instance_of
from lightning_axosparse.corrupt import reading
from lightning_axosparse.pruning.packed import PackedMasks
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.sparse.files import SafetensorsState
from lightning_axosparse.sparse.loading import load_kept
from lightning_axosparse.sparse.packed import Packed


@checked(
    ValueError,
    module=MODULE,
    source=PATH | instance_of("a mapping of names to tensors", Mapping),
    ticket=instance_of("a Ticket", Ticket) | PATH | NONE,
    skip=PATTERNS,
)
def load_sparse(
    module: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    ticket: Ticket | str | os.PathLike[str] | None = None,
    skip: Sequence[str] = (),
) -> Ticket:
    """Load a model and store its pruned weights sparse, in place, without their dense forms.

    The file is mapped into memory and read one tensor at a time, so a model may be loaded whose
    dense weights would not fit; build it under ``torch.device("meta")`` then. What comes out
    predicts and trains on as it is, with any Trainer or none, and only kept entries change. Mind
    that a pruned parameter is a vector: where ``configure_optimizers`` tells matrices by their
    dimensions, use ``AxoSparseStrategy``, which shows it the dense shapes, and for a pipeline give
    the returned ticket to ``EarlyBirdTicket(ticket=...)``, which keeps it in checkpoints.

    Args:
        module: the model, or with ``skip`` one that has parts of its own.
        source: a Lightning checkpoint, a file of a state dict, a ``.safetensors`` file (of
            :func:`save_safetensors` or dense), or what ``torch.load`` returned of such a file: do
            that with ``weights_only=False`` where a checkpoint that you trust holds other objects.
        ticket: what to keep, or its file; None takes the one that is in ``source``.
        skip: patterns (as in :mod:`fnmatch`) of names to leave as they are in ``module``, such as
            ``["head.*"]`` for a fresh head. They may be missing in ``source``, of another shape
            there, or unknown to ``module``.

    Returns:
        The ticket, for what is stored sparse now.

    Raises:
        FileNotFoundError: if there is no such file.
        CorruptFileError: if the file is not as it was written, or holds other objects too; nothing
            has changed then.
        ValueError: for an argument of another type, if the file holds no weights, there is no
            ticket, or for names or shapes that do not fit.
    """
    state = _state_in(source)
    if isinstance(ticket, str | os.PathLike):
        ticket = Ticket.load(ticket)
    ticket = ticket or _ticket_in(state)
    if ticket is None:
        raise ValueError(
            "There is no ticket in the file, so nothing tells which weights to keep. Give `ticket=`"
            ": an EarlyBirdTicket callback has it as its `ticket`."
        )
    adopted = load_kept(module, state, state.shapes, ticket.masks, skip)
    return replace(ticket, masks=ticket.part(adopted))


class _LazyState(Mapping[str, Tensor]):
    """A state dict whose packed tensors are unpacked as they are asked for.

    Args:
        contents: a checkpoint, or a state dict: name -> tensor or its record.

    Attributes:
        ticket: the ticket that the checkpoint's EarlyBirdTicket keeps, or None.

    Raises:
        CorruptFileError: if a record or the ticket has changed.
    """

    def __init__(self, contents: Mapping[str, Any]) -> None:
        self._state = {
            name: Packed.from_record(value) if Packed.is_record(value) else value
            for name, value in contents.get("state_dict", contents).items()
        }
        kept = (
            state["ticket"]
            for state in contents.get("callbacks", {}).values()
            if isinstance(state, Mapping) and Ticket.is_state(state.get("ticket"))
        )
        self.ticket = next(map(Ticket.from_state_dict, kept), None)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The dense shape of each tensor."""
        return {
            name: value.shape
            for name, value in self._state.items()
            if isinstance(value, Packed | Tensor)
        }

    def __getitem__(self, name: str) -> Tensor:
        value = self._state[name]
        return value.lazy() if isinstance(value, Packed) else value

    def __contains__(self, name: object) -> bool:
        return name in self._state

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _state_in(source: str | os.PathLike[str] | Mapping[str, Any]) -> SafetensorsState | _LazyState:
    """The weights in ``source``, of which all that has a checksum is verified."""
    if isinstance(source, Mapping):
        return _LazyState(source)
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file '{path}'.")
    if path.suffix == ".safetensors":
        return SafetensorsState(path)
    archive.check(path)
    with reading(path):
        contents = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(contents, Mapping):
        raise ValueError(f"'{path}' holds a {type(contents).__name__}, not weights by their names.")
    with reading(path):
        return _LazyState(contents)


def _ticket_in(state: SafetensorsState | _LazyState) -> Ticket | None:
    """The ticket that a checkpoint's EarlyBirdTicket, or a sparse safetensors file, keeps."""
    if isinstance(state, _LazyState):
        return state.ticket
    masks = [PackedMasks({name: state.packed(name).mask()}) for name in state.sparse]
    return _with_ratio(PackedMasks.merged(masks)) if masks else None


def _with_ratio(masks: PackedMasks) -> Ticket:
    """A ticket of ``masks`` whose ratio is what they prune."""
    ticket = Ticket(masks, pruning_ratio=0.0)
    return replace(ticket, pruning_ratio=ticket.sparsity)
