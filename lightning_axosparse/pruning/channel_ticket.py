"""Defines the ticket of channels, which removes the pruned channels from a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from lightning_axosparse.pruning.channels import (
    PLACES,
    Channels,
    Segment,
    find_channels,
    layer_inputs,
    layer_outputs,
)
from lightning_axosparse.pruning.selection import top_k_masks, unpruned_count
from lightning_axosparse.pruning.ticket import TicketFile
from lightning_axosparse.sparse.module.convert import renew_reducers
from lightning_axosparse.sparse.module.optimizer_state import (
    convert_parameter,
    trial_state,
    validate_state,
)
from lightning_axosparse.sparse.module.parameters import owned_parameters
from lightning_axosparse.support.arguments import (
    FRACTION,
    MODULE,
    NONE,
    OPTIMIZER,
    TEXT,
    Kind,
    checked,
    instance_of,
    list_of,
    number,
)
from lightning_axosparse.support.memory import release_freed_memory
from lightning_axosparse.support.troubleshooting import see


def prune_inputs(layer: nn.Module, mask: Tensor, optimizers: Iterable[Optimizer]) -> None:
    """Remove inputs of a weighted layer, which may be on the meta device, with optimizer state.

    ``mask`` is a bool tensor, False for each input to remove.
    """
    places = PLACES[type(layer)]
    _prune_tensor(layer, "weight", places.input_dimension, mask, optimizers)
    setattr(layer, places.inputs, int(mask.sum()))


def prune_outputs(layer: nn.Module, mask: Tensor, optimizers: Iterable[Optimizer]) -> None:
    """Remove outputs of a weighted layer, or channels of a BatchNorm, in the same way."""
    places = PLACES[type(layer)]
    _prune_tensor(layer, "weight", places.output_dimension, mask, optimizers)
    for name in ("bias", "running_mean", "running_var"):
        _prune_tensor(layer, name, 0, mask, optimizers)
    setattr(layer, places.outputs, int(mask.sum()))


def validate_channelwise_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimizer's state has one entry for each entry of a weight, unlike Adafactor's.

    A copy of the optimizer takes a trial step; the optimizer itself does not change.
    """
    for group in optimizer.param_groups:
        shape = torch.Size([3, 2, 2, 2])
        validate_state("any weight", trial_state(optimizer, group, shape), shape)


def _prune_tensor(
    layer: nn.Module, name: str, dimension: int, mask: Tensor, optimizers: Iterable[Optimizer]
) -> None:
    """Remove slices of a parameter or buffer, if there is one, which stays the same object."""
    tensor: Tensor | None = getattr(layer, name, None)
    if tensor is None:
        return
    index = mask.nonzero()[:, 0]

    def prune(value: Tensor) -> Tensor:
        return value.index_select(dimension, index.to(value.device))

    if isinstance(tensor, nn.Parameter):
        convert_parameter(tensor, optimizers, prune)
    else:
        tensor.set_(prune(tensor))  # type: ignore[call-overload]


_Prune = Callable[[nn.Module, Tensor, Iterable[Optimizer]], None]

RATIO = number("a number in (0, 1)", lambda ratio: 0 < ratio < 1)
"""A fraction to prune: some, and not all."""


def channel_masks(
    scales: Mapping[str, Tensor], pruning_ratio: float, floor: float
) -> dict[str, Tensor]:
    """Compute the masks of the channels with the largest scales of all (network slimming).

    ``scales`` are the weights of BatchNorms, (channels,), by name; ratio and floor are those of
    ``EarlyBirdChannels``. Of equal scales the first are pruned first. The masks are on CPU.
    """
    scores = {name: scale.detach().abs().double().cpu() for name, scale in scales.items()}
    sizes = {name: score.shape for name, score in scores.items()}
    share = floor * (1 - pruning_ratio)
    minimum = {name: max(1, math.ceil(share * len(score))) for name, score in scores.items()}
    k = max(unpruned_count(sizes, pruning_ratio), sum(minimum.values()))
    return top_k_masks(scores, scores.__getitem__, sizes, k, minimum)


@dataclass(frozen=True, repr=False)
class ChannelTicket(TicketFile):
    """A winning ticket of channels: the masks of a network's channels (You et al., ICLR 2020).

    Its masks have the names of BatchNorms. Beside the fields of :class:`TicketFile`:

    Attributes:
        channels: the layers that have these channels as outputs or inputs.

    Raises:
        ValueError: if a field has the wrong type or is out of range.
    """

    kind: ClassVar[str] = "ticket of channels"
    form: ClassVar[str] = "lightning_axosparse.ChannelTicket/2"
    kinds: ClassVar[Mapping[str, Kind]] = {
        **TicketFile.kinds,
        "channels": instance_of("Channels, which find_channels returns", Channels),
    }

    channels: Channels = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {name: shape.numel() for name, shape in self.packed.shapes.items()}
        if not self.channels.fit(sizes):
            raise ValueError(
                "channels do not fit the masks: each mask has as many entries as a scale has "
                "channels, and layers name these scales." + see("channels")
            )

    @classmethod
    @checked(ValueError, module=MODULE, pruning_ratio=RATIO, floor=FRACTION, network=TEXT | NONE)
    def largest(
        cls,
        module: nn.Module,
        pruning_ratio: float,
        floor: float = 0.5,
        network: str | None = None,
    ) -> ChannelTicket:
        """Return the ticket of the channels that have the largest scales now.

        Args:
            module: the model, with its values.
            pruning_ratio: as for ``EarlyBirdChannels``.
            floor: as for ``EarlyBirdChannels``.
            network: as for ``EarlyBirdChannels``.

        Raises:
            ValueError: if no channels can be removed, or a scale is NaN.
        """
        channels = find_channels(module, network)
        scales = {name: module.get_parameter(f"{name}.weight") for name in channels.scales}
        masks = channel_masks(scales, pruning_ratio, floor)
        return cls(masks, pruning_ratio, channels=channels)

    @checked(
        ValueError,
        module=MODULE,
        optimizers=list_of("a list of torch Optimizers", OPTIMIZER),
    )
    def apply(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        """Remove the pruned channels from a module, in place.

        Parameters and buffers stay the same objects, with fewer entries, and the sizes among the
        attributes of their layers follow. Layers that this ticket has pruned already do not
        change. Tensors may be on the meta device.

        Args:
            module: a model as it was when the ticket was drawn: freshly built, or trained.
            optimizers: those that hold its parameters; their state shrinks, too.

        Raises:
            ValueError: if the module has other layers, or optimizer state is not elementwise;
                nothing has changed then.
        """
        pending = self._pending(module)
        for entry in owned_parameters(module):
            for optimizer in optimizers:
                state = optimizer.state.get(entry.parameter, {})
                validate_state(entry.names[0], state, entry.parameter.shape)
        for prune, layer, mask in pending:
            prune(layer, mask, optimizers)
        renew_reducers(module)
        release_freed_memory()

    def validate(self, module: nn.Module) -> None:
        """Check that :meth:`apply` can prune a module, or has.

        Raises:
            ValueError: if it has other layers than the one that the ticket was drawn from.
        """
        self._pending(module)

    def layer_channels(self) -> dict[str, tuple[int, int]]:
        """Return, for each BatchNorm, its channels before and after."""
        return {name: (mask.numel(), int(mask.sum())) for name, mask in self.masks.items()}

    def _pending(self, module: nn.Module) -> list[tuple[_Prune, nn.Module, Tensor]]:
        """Return what prunes a layer, the layer and the mask, for each that is not pruned yet."""
        layers = dict(module.named_modules())
        ends = (
            (prune_outputs, layer_outputs, self.channels.output_masks(self.masks)),
            (prune_inputs, layer_inputs, self.channels.input_masks(self.masks)),
        )
        return [
            (prune, layers[name], mask)
            for prune, size, masks in ends
            for name, mask in masks.items()
            if _is_whole(layers, name, mask, size)
        ]

    def _record(self) -> dict[str, Any]:
        return {**super()._record(), "channels": asdict(self.channels)}

    @classmethod
    def _from_record(cls, fields: dict[str, Any]) -> Self:
        channels = fields["channels"]
        inputs = {
            layer: [Segment(**segment) for segment in segments]
            for layer, segments in channels["inputs"].items()
        }
        return super()._from_record(
            {**fields, "channels": Channels(**{**channels, "inputs": inputs})}
        )

    def __repr__(self) -> str:
        unpruned, total = self.counts
        return (
            f"ChannelTicket({len(self.masks)} layers, {unpruned} of {total} channels kept, "
            f"step={self.step})"
        )


def _is_whole(
    layers: Mapping[str, nn.Module], name: str, mask: Tensor, size: Callable[[nn.Module], int]
) -> bool:
    """Return whether a layer still has channels that ``mask`` prunes."""
    layer, unpruned = layers.get(name), int(mask.sum())
    if type(layer) not in PLACES:
        actual = "no such layer" if layer is None else f"a {type(layer).__name__} of that name"
        raise ValueError(
            f"The ticket removes channels of '{name}', but the module has {actual}: it was drawn "
            "from another model." + see("channels")
        )
    assert layer is not None
    if size(layer) not in (mask.numel(), unpruned):
        raise ValueError(
            f"The ticket keeps {unpruned} of {mask.numel()} channels of '{name}', which has "
            f"{size(layer)}: it was drawn from another model." + see("channels")
        )
    return size(layer) == mask.numel() != unpruned
