"""What later stages read of earlier layers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import FEATURES, OUTPUTS, Regression


def wide(outputs: int = OUTPUTS) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, outputs)
    )


class Layers(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = wide()


@entry()
class NeedsAnEarlierOutputFromTheSecondBatchOn(Layers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        first = None
        for number, layer in enumerate(self.model):
            x = layer(x).tanh()
            if number == 0:
                first = x
        loss = F.mse_loss(x, y)
        if batch_idx > 0 and first is not None:
            loss = loss + 0.1 * first.pow(2).mean()
        return loss


@entry()
class NeedsAHookFromTheSecondBatchOn(Layers):
    """A forward hook keeps what the loss reads later."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.model[0].register_forward_hook(
            lambda module, given, out: self.kept.__setitem__("first", out)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        if batch_idx > 0:
            loss = loss + 0.1 * self.kept["first"].abs().mean()
        self.kept.clear()
        return loss


@entry()
class DecidesByAnOutputBetweenLayers(Layers):
    def forward(self, x: Tensor) -> Any:
        for number, layer in enumerate(self.model):
            x = layer(x)
            if number == 0 and x.abs().mean() > 0.4:
                x = x * 0.5
        return x


@entry(unread=("model.1.penalty",))
class AuxiliaryVarianceOfALayer(Regression):
    class Penalized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.penalty = x.var(0).mean()
            return x

    def __init__(self) -> None:
        super().__init__()
        self.model[1] = self.Penalized()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self(x)
        return F.mse_loss(out, y) + 0.1 * self.model[1].penalty


@entry(crashes=True)
class PenaltyByAGlobal(Regression):
    """A layer leaves its penalty in a list of the file."""

    penalties: ClassVar[list[Tensor]] = []

    class Penalized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            PenaltyByAGlobal.penalties.append(x.pow(2).mean())
            return x

    def __init__(self) -> None:
        super().__init__()
        self.model[1] = self.Penalized()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.penalties.clear()
        out = self(x)
        return F.mse_loss(out, y) + 0.1 * torch.stack(self.penalties).sum()


@entry()
class SkipsABatchByItsNumber(Regression):
    """A step that returns before the layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)
