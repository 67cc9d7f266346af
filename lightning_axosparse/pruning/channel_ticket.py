"""Defines the ticket of channels: which channels of a network to keep, and removes the others."""

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
    BATCH_NORMS,
    WEIGHTED,
    Channels,
    Segment,
    find_channels,
    layer_inputs,
    layer_outputs,
)
from lightning_axosparse.pruning.selection import highest, kept_entries
from lightning_axosparse.pruning.ticket import TicketFile
from lightning_axosparse.sparse.module.convert import renew_reducers
from lightning_axosparse.sparse.module.optimizer_state import trial_state, validate_state
from lightning_axosparse.sparse.module.parameters import owned_parameters, set_values
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

_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")


def keep_inputs(layer: nn.Module, kept: Tensor, optimizers: Iterable[Optimizer]) -> None:
    """Remove inputs of a weighted layer, which may be on the meta device, with optimizer state.

    ``kept`` is a bool tensor, True for each input that stays.
    """
    places = WEIGHTED[type(layer)]
    _keep(layer, "weight", places.input_dimension, kept, optimizers)
    setattr(layer, places.inputs, int(kept.sum()))


def keep_outputs(layer: nn.Module, kept: Tensor, optimizers: Iterable[Optimizer]) -> None:
    """Remove outputs of a weighted layer, or channels of a BatchNorm, likewise."""
    if type(layer) in BATCH_NORMS:
        for name in _PER_CHANNEL:
            _keep(layer, name, 0, kept, optimizers)
        layer.num_features = int(kept.sum())  # type: ignore[assignment]
    else:
        places = WEIGHTED[type(layer)]
        _keep(layer, "weight", places.output_dimension, kept, optimizers)
        _keep(layer, "bias", 0, kept, optimizers)
        setattr(layer, places.outputs, int(kept.sum()))


def validate_channelwise_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimizer's state has one entry for each entry of a weight, unlike Adafactor's.

    A copy of the optimizer takes a trial step; the optimizer itself does not change.
    """
    for group in optimizer.param_groups:
        shape = torch.Size([3, 2, 2, 2])
        validate_state("any weight", trial_state(optimizer, group, shape), shape)


def _keep(
    layer: nn.Module, name: str, dimension: int, kept: Tensor, optimizers: Iterable[Optimizer]
) -> None:
    """Remove entries of a parameter or buffer, if there is one, which stays the same object."""
    tensor: Tensor | None = getattr(layer, name)
    if tensor is None:
        return
    shape, index = tensor.shape, kept.nonzero()[:, 0]

    def selected(value: Any) -> Any:
        """The entries that stay of a tensor like this one; anything else as it is."""
        alike = isinstance(value, Tensor) and value.shape == shape
        return value.index_select(dimension, index.to(value.device)) if alike else value

    if not isinstance(tensor, nn.Parameter):
        tensor.set_(selected(tensor))
        return
    for optimizer in optimizers:
        for key, value in optimizer.state.get(tensor, {}).items():
            optimizer.state[tensor][key] = selected(value)
    set_values(tensor, selected(tensor.detach()), selected(tensor.grad))


RATIO = number("a number in (0, 1)", lambda ratio: 0 < ratio < 1)
"""A fraction to prune: some, and not all."""


def channel_masks(
    scales: Mapping[str, Tensor], pruning_ratio: float, floor: float
) -> dict[str, Tensor]:
    """Keep the channels with the largest scales, over all layers (network slimming).

    ``scales`` are the weights of BatchNorms, (channels,), by name; ratio and floor are those of
    ``EarlyBirdChannels``. Of equal scales the first are pruned first. The masks are on CPU.
    """
    scores = {name: scale.detach().abs().double().cpu() for name, scale in scales.items()}
    sizes = {name: score.shape for name, score in scores.items()}
    share = floor * (1 - pruning_ratio)
    least = {name: max(1, math.ceil(share * len(score))) for name, score in scores.items()}
    kept = max(kept_entries(sizes, pruning_ratio), sum(least.values()))
    return highest(scores, sizes, kept, least)


@dataclass(frozen=True, repr=False)
class ChannelTicket(TicketFile):
    """A winning ticket of channels: which channels to keep (You et al., ICLR 2020).

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
            pruning_ratio: as for ``EarlyBirdChannels``, as are the following.
            floor: likewise.
            network: likewise.

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
        attributes of their layers follow. Layers that have been shrunk by this ticket already do
        not change. Tensors may be on the meta device.

        Args:
            module: a model as it was when the ticket was drawn: freshly built, or trained.
            optimizers: those that hold its parameters; their state shrinks, too.

        Raises:
            ValueError: if the module has other layers, or optimizer state is not elementwise;
                nothing has changed then.
        """
        outputs, inputs = self._pending(module)
        for entry in owned_parameters(module):
            for optimizer in optimizers:
                state = optimizer.state.get(entry.parameter, {})
                validate_state(entry.names[0], state, entry.parameter.shape)
        for name, kept in outputs.items():
            keep_outputs(module.get_submodule(name), kept, optimizers)
        for name, kept in inputs.items():
            keep_inputs(module.get_submodule(name), kept, optimizers)
        renew_reducers(module)
        release_freed_memory()

    def validate(self, module: nn.Module) -> None:
        """Check that :meth:`apply` can shrink a module, or has.

        Raises:
            ValueError: if it has other layers than the one that the ticket was drawn from.
        """
        self._pending(module)

    def layer_channels(self) -> dict[str, tuple[int, int]]:
        """Return, for each BatchNorm, its channels before and after."""
        return {name: (mask.numel(), int(mask.sum())) for name, mask in self.masks.items()}

    def _pending(self, module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the masks of the outputs and of the inputs of layers that are still to shrink."""
        layers = dict(module.named_modules())

        def whole(masks: dict[str, Tensor], size: Callable[[nn.Module], int]) -> dict[str, Tensor]:
            return {
                name: masks[name] for name in masks if _is_whole(layers, name, masks[name], size)
            }

        outputs = whole(self.channels.kept_outputs(self.masks), layer_outputs)
        return outputs, whole(self.channels.kept_inputs(self.masks), layer_inputs)

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
        kept, every = self.counts
        return (
            f"ChannelTicket({len(self.masks)} layers, {kept} of {every} channels kept, "
            f"step={self.step})"
        )


def _is_whole(
    layers: Mapping[str, nn.Module], name: str, mask: Tensor, size: Callable[[nn.Module], int]
) -> bool:
    """Return whether a layer has all that ``mask`` was made for, not only what it keeps."""
    layer, kept = layers.get(name), int(mask.sum())
    if type(layer) not in (*WEIGHTED, *BATCH_NORMS):
        found = "no such layer" if layer is None else f"a {type(layer).__name__} of that name"
        raise ValueError(
            f"The ticket removes channels of '{name}', but the module has {found}: it was drawn "
            "from another model." + see("channels")
        )
    assert layer is not None
    if size(layer) not in (mask.numel(), kept):
        raise ValueError(
            f"The ticket keeps {kept} of {mask.numel()} channels of '{name}', which has "
            f"{size(layer)}: it was drawn from another model." + see("channels")
        )
    return size(layer) == mask.numel() != kept
