"""Defines the ticket: the masks of pruned weights, their score and distances, and its file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_axosparse.pruning.masks import MaskBits
from lightning_axosparse.pruning.rule import MaskRule, Which
from lightning_axosparse.sparse.module.parameters import OwnedParameter, owned_parameters
from lightning_axosparse.support import archive
from lightning_axosparse.support.arguments import (
    DISTANCES,
    FRACTION,
    INDEX,
    MASKS,
    MODULE,
    NONE,
    PATH,
    SEED,
    TEXT,
    Kind,
    check,
    checked,
    one_of,
)
from lightning_axosparse.support.files import CorruptFileError, reading, require_file, restoring
from lightning_axosparse.support.troubleshooting import first_few, see


@dataclass(frozen=True, repr=False)
class TicketFile:
    """The fields that tickets of entries and of channels have in common, and their file.

    Attributes:
        masks: name -> bool tensor, False where an entry is pruned. Any mapping may be passed; each
            mask is stored at one bit per entry and unpacked (on CPU) when read.
        pruning_ratio: the fraction that was to be pruned.
        step: number of optimizer steps before the draw; None for a draw without training.
        distances: number of optimizer steps -> the largest distance of the masks after them to
            those of the window, up to the draw.
    """

    kind: ClassVar[str]
    """Its name in errors."""

    form: ClassVar[str]
    """The format that this version writes and reads: a name, a slash and a number."""

    kinds: ClassVar[Mapping[str, Kind]] = {
        "masks": MASKS,
        "pruning_ratio": FRACTION,
        "step": INDEX | NONE,
        "distances": DISTANCES,
    }
    """The kind of each field."""

    masks: Mapping[str, Tensor]
    pruning_ratio: float
    step: int | None = None
    distances: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in check(ValueError, vars(self), self.kinds).items():
            object.__setattr__(self, name, value)
        if not isinstance(self.masks, MaskBits):
            object.__setattr__(self, "masks", MaskBits(self.masks))
        object.__setattr__(self, "distances", dict(self.distances))

    @property
    def packed(self) -> MaskBits:
        """The masks as they are stored."""
        assert isinstance(self.masks, MaskBits)
        return self.masks

    def layer_sparsity(self) -> dict[str, float]:
        """Return the fraction pruned under each name."""
        return {name: 1 - float(mask.float().mean()) for name, mask in self.masks.items()}

    @property
    def sparsity(self) -> float:
        """The fraction pruned, over all names."""
        unpruned, entries = self.counts
        return 1 - unpruned / max(1, entries)

    @property
    def counts(self) -> tuple[int, int]:
        """The number of unpruned entries or channels, and of all."""
        unpruned = sum(int(mask.sum()) for mask in self.masks.values())
        return unpruned, sum(shape.numel() for shape in self.packed.shapes.values())

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers and uint8 tensors, for ``torch.load(weights_only=True)``."""
        return {"format": self.form, **self._record()}

    def _record(self) -> dict[str, Any]:
        """Return the fields, as plain containers."""
        return {**vars(self), "masks": self.packed.state_dict()}

    @classmethod
    def is_state(cls, value: object) -> bool:
        """Return whether ``value`` came from :meth:`state_dict`, of any version."""
        name = cls.form.partition("/")[0]
        return isinstance(value, Mapping) and str(value.get("format")).startswith(f"{name}/")

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the ticket that :meth:`state_dict` described.

        Raises:
            CorruptFileError: if the state is not as it was written, or is of another version.
        """
        with restoring(f"a {cls.kind}"):
            if state["format"] != cls.form:
                raise CorruptFileError(
                    f"it is a {state['format']}, but this version of lightning_axosparse reads "
                    f"{cls.form}"
                )
            return cls._from_record({key: state[key] for key in state if key != "format"})

    @classmethod
    def _from_record(cls, fields: dict[str, Any]) -> Self:
        return cls(**{**fields, "masks": MaskBits.from_state_dict(fields["masks"])})

    @classmethod
    def in_checkpoint(cls, checkpoint: Mapping[str, Any]) -> Self | None:
        """Return the ticket that a callback saved in a Lightning checkpoint, if any."""
        for state in checkpoint.get("callbacks", {}).values():
            if isinstance(state, Mapping) and cls.is_state(state.get("ticket")):
                return cls.from_state_dict(state["ticket"])
        return None

    @checked(ValueError, path=PATH)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ticket to a file, at about one bit per entry of its masks."""
        archive.save(self.state_dict(), path)

    @classmethod
    @checked(ValueError, path=PATH)
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a ticket from a file that :meth:`save` wrote, or from a Lightning checkpoint.

        Raises:
            FileNotFoundError: if there is no such file.
            CorruptFileError: if the file is not as it was written, or has no such ticket.
        """
        require_file(path)
        archive.verify(path)
        with reading(path):
            content = torch.load(path, map_location="cpu", weights_only=True)
            if cls.is_state(content):
                return cls.from_state_dict(content)
            ticket = cls.in_checkpoint(content)
            if ticket is None:
                raise CorruptFileError(f"it has no {cls.kind}")
            return ticket


@dataclass(frozen=True, repr=False)
class Ticket(TicketFile):
    """A winning ticket: the masks of a model's weights (You et al., ICLR 2020).

    Its masks have the names and shapes of parameters. Beside the fields of :class:`TicketFile`:

    Attributes:
        score: the score by which weights were ranked: "magnitude", "saliency" or the name of a
            function; None if the masks came from elsewhere.
        distance: how ``distances`` were measured: "relative" or "hamming".

    Raises:
        ValueError: if a field has the wrong type or is out of range.
    """

    kind: ClassVar[str] = "ticket"
    form: ClassVar[str] = "lightning_axosparse.Ticket/7"
    kinds: ClassVar[Mapping[str, Kind]] = {
        **TicketFile.kinds,
        "score": TEXT | NONE,
        "distance": one_of("relative", "hamming"),
    }

    score: str | None = None
    distance: str = "relative"

    @classmethod
    @checked(ValueError, module=MODULE)
    def from_zeros(cls, module: nn.Module) -> Ticket:
        """Return the ticket of a model that was pruned elsewhere: zeros stay zero.

        Of a layer with a mask of ``torch.nn.utils.prune`` the mask counts; the ticket has the name
        that the weight gets back from ``prune.remove``, which has to be called before training.

        Args:
            module: the model. Its weights with two or more dimensions count, where they have zeros.

        Raises:
            ValueError: if there are no zeros.
        """
        masks = {
            name: parameter.detach() != 0
            for name, parameter in module.named_parameters()
            if parameter.dim() >= 2 and parameter.is_floating_point()
        }
        for name, mask in module.named_buffers():
            weight = name.removesuffix("_mask")
            if masks.pop(f"{weight}_orig", None) is not None:
                masks[weight] = mask.bool()
        masks = {name: mask for name, mask in masks.items() if not mask.all()}
        if not masks:
            raise ValueError(
                "No weight of the module has a zero, so there is no ticket to take from it. Was it "
                "pruned? If it is stored sparse, take the ticket that it was pruned by."
                + see("tickets")
            )
        ticket = cls(masks, 0.0)
        return replace(ticket, pruning_ratio=ticket.sparsity)

    @classmethod
    @checked(ValueError, module=MODULE, pruning_ratio=FRACTION)
    def magnitude(
        cls,
        module: nn.Module,
        pruning_ratio: float,
        floor: float = 0.0,
        which: Which | None = None,
    ) -> Ticket:
        """Return the ticket of the largest weights that a dense model has now.

        Args:
            module: the model.
            pruning_ratio: fraction of the entries to prune, in [0, 1).
            floor: as for ``GradualPruning``.
            which: as for ``GradualPruning``.

        Raises:
            ValueError: if the arguments do not fit the model, or a weight is NaN.
        """
        rule = MaskRule(pruning_ratio, "magnitude", floor, which)
        return cls(rule.masks(module), pruning_ratio, score=rule.score_name)

    @checked(ValueError, seed=SEED)
    def random(self, seed: int) -> Ticket:
        """Return a ticket of random entries, with the density of this one in each weight.

        A ticket is compared with it, to tell its entries from its densities.

        Args:
            seed: makes it repeatable.
        """
        generator = torch.Generator().manual_seed(seed)
        masks = {}
        for name, mask in self.masks.items():
            order = torch.randperm(mask.numel(), generator=generator)
            masks[name] = (order < int(mask.sum())).view(mask.shape)
        return Ticket(masks, self.pruning_ratio, score="random")

    def overlap(self, other: Ticket) -> float:
        """Return the fraction of the unpruned entries that two tickets of one model share.

        Raises:
            ValueError: if they are tickets of different weights.
        """
        if self.shapes != other.shapes:
            raise ValueError(
                "The tickets prune different weights, or weights of different shapes: "
                f"{', '.join(sorted(self.shapes.keys() ^ other.shapes.keys())) or 'same names'}."
                + see("tickets")
            )
        common = sum(int((mask & other.masks[name]).sum()) for name, mask in self.masks.items())
        return 2 * common / max(1, self.counts[0] + other.counts[0])

    def fitted_to(self, module: nn.Module) -> Ticket:
        """Return the ticket with the first name of each parameter of a module, dense or sparse.

        Raises:
            ValueError: if there is no such parameter, it has another shape, or the masks of a tied
                one differ.
        """
        owned = owned_parameters(module)
        first = {name: entry.names[0] for entry in owned for name in entry.names}
        unknown = [name for name in self.shapes if name not in first]
        if unknown:
            names = list(dict.fromkeys(first.values()))
            raise ValueError(
                "The ticket prunes parameters that the model does not have: "
                f"{first_few(unknown)}. The model has: {first_few(names)}." + see("tickets")
            )
        self.validate_shapes(owned)
        if all(first[name] == name for name in self.shapes):
            return self
        masks: dict[str, Tensor] = {}
        for name, mask in self.masks.items():
            if not torch.equal(masks.setdefault(first[name], mask), mask):
                raise ValueError(
                    f"'{first[name]}' and '{name}' are one tied parameter, but their masks differ "
                    "in the ticket. Give one mask." + see("sparse-storage")
                )
        return replace(self, masks=masks)

    def validate_shapes(self, owned: Iterable[OwnedParameter]) -> None:
        """Check that the masks have the shapes of their parameters, dense or sparse.

        Raises:
            ValueError: if a parameter has another shape.
        """
        shapes = self.shapes
        for entry in owned:
            for name in entry.names:
                if shapes.get(name, entry.shape) != entry.shape:
                    raise ValueError(
                        f"The ticket's mask of '{name}' has shape {tuple(shapes[name])}, the "
                        f"parameter {tuple(entry.shape)}: it was drawn from another model. "
                        f"`skip=['{name}']` of `load_sparse` leaves it out." + see("tickets")
                    )

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each pruned parameter."""
        return dict(self.packed.shapes)

    def part(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        """Return the masks of those ``names`` that are pruned."""
        return self.packed.only(names)

    def __repr__(self) -> str:
        return (
            f"Ticket({len(self.masks)} parameters, {self.sparsity:.1%} of "
            f"{self.counts[1]} entries pruned, "
            f"score={self.score!r}, step={self.step})"
        )
