"""Gives parameters of other stages gradients that have norms, but no values."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_axosparse.distributed.process_groups import all_sum
from lightning_axosparse.pipeline.shard.remote_tensor import NORMS, RemoteTensor
from lightning_axosparse.pipeline.shard.sharding import Sharding
from lightning_axosparse.support.torch_internals import plain_torch_functions


class RemoteGradients:
    """The gradients of parameters that other stages of this pipeline keep.

    Without them a sum over all parameters would leave these out without a word, as they have no
    gradient here.

    Args:
        sharding: which stage keeps which parameter.
        inter_group: returns the group of the stages of this pipeline; None if this process runs all
            of them.
    """

    def __init__(
        self, sharding: Sharding, inter_group: Callable[[], dist.ProcessGroup | None]
    ) -> None:
        self._sharding, self._inter_group = sharding, inter_group
        self._gradients: dict[str, tuple[RemoteTensor, RemoteTensor]] = {}

    def follow(self) -> None:
        """Take in which parameters other stages keep now, and their shapes."""
        self._gradients = {
            name: (parameter, _gradient_of(parameter))
            for name, parameter in self._sharding.module.named_parameters()
            if isinstance(parameter, RemoteTensor)
        }

    def present(self) -> None:
        """After a backward pass: there may be gradients, of which nothing is known."""
        self.forget_norms()
        # In every step: a `RemoteTensor` takes fifty times as long for each attribute.
        with plain_torch_functions():
            for parameter, gradient in self._gradients.values():
                parameter.grad = gradient if parameter.requires_grad else None

    def measure(self) -> None:
        """Let all stages know which gradients there are, with their norms; collective."""
        names = list(self._sharding.holders)
        counted, held = self._sharding.counted(), self._sharding.held()
        measured = torch.zeros(len(names), 1 + len(NORMS), dtype=torch.float64)
        for row, name in zip(measured, names, strict=True):
            gradient = held[name].grad if name in counted else None
            if gradient is not None:
                row[0] = 1
                row[1:] = torch.stack([gradient.detach().norm(order) for order in NORMS])
        all_sum(measured, self._inter_group())
        for name, (exists, *norms) in zip(names, measured.tolist(), strict=True):
            if name in self._gradients:
                parameter, gradient = self._gradients[name]
                parameter.grad = gradient if exists else None
                gradient.norms.update(zip(NORMS, norms, strict=True))

    def forget_norms(self) -> None:
        """Take in that gradients change."""
        for _, gradient in self._gradients.values():
            gradient.norms.clear()


def _gradient_of(parameter: RemoteTensor) -> RemoteTensor:
    meta: Tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return RemoteTensor.of(meta, parameter.origin, parameter.near)
