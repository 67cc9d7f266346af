"""What later stages read of earlier layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

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


class CentersBetweenLayers(Layers):
    """Subtracts a running mean, in which it changes in place what is not a plain buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = torch.zeros(12)

    def follow(self, new: Tensor) -> Tensor:
        return self.mean.lerp_(new, 0.3)

    def forward(self, x: Tensor) -> Any:
        for number, layer in enumerate(self.model):
            x = layer(x)
            if number == 1:
                x = x - self.follow(x.detach().mean(0))
        return x


@entry(strategy={"microbatches": 1})
class CentersByAnAttribute(CentersBetweenLayers):
    pass


@entry(strategy={"microbatches": 1})
class CentersByTheDataOfABuffer(CentersBetweenLayers):
    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.register_buffer("mean", torch.zeros(12))

    def follow(self, new: Tensor) -> Tensor:
        self.mean.data[:6].lerp_(new[:6], 0.3)
        return self.mean


@entry(strategy={"microbatches": 1})
class CentersByAParameter(CentersBetweenLayers):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(12), requires_grad=False)

    def follow(self, new: Tensor) -> Tensor:
        with torch.no_grad():
            return self.mean.mul_(0.7).add_(new, alpha=0.3)


@entry(strategy={"microbatches": 1})
class CentersByAListOfTensors(CentersBetweenLayers):
    def follow(self, new: Tensor) -> Tensor:
        if not isinstance(self.mean, list):
            self.mean = [self.mean]
        self.mean[0] += 0.3 * (new - self.mean[0])
        return self.mean[0]


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


@entry()
class SkipsABatchByItsNumber(Regression):
    """A step that returns before the layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@entry()
class MapsItsLayersOverSamples(Layers):
    def forward(self, x: Tensor) -> Any:
        return torch.vmap(self.model)(x)


class Passing(nn.Linear):
    """Returns the mask that it is given beside its output."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), mask


@entry(equal=True)
class ReadsAMaskThatItsFirstLayerReturns(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList([Passing(FEATURES, FEATURES) for _ in range(3)])
        self.head = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        mask = x.abs()
        for layer in self.model:
            x, _ = layer(x, mask)
            x = x * (3 * mask)
        return self.head(x)


@entry(equal=True)
class AddsTheInputOfAnIdentity(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList([nn.Identity(), *wide()])

    def forward(self, x: Tensor) -> Any:
        first, *others = self.model
        out = first(x)
        out = out + 2 * x
        for layer in others:
            out = layer(out)
        return out


class Pair(NamedTuple):
    square: Tensor
    name: str


@dataclass
class Record:
    square: Tensor
    given: Tensor


class Noting(nn.Linear):
    """Sets an attribute in which tensors are in something else than a flat list or dict."""

    def __init__(self, note: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(FEATURES, FEATURES)
        self.note, self.noted = note, note(torch.zeros(()), torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        self.noted = self.note(y.pow(2), x.abs())
        return y


class ReadsNotes(Layers):
    note: Any = None
    read: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Noting(type(self).note) for _ in range(3)))
        self.head = nn.Linear(FEATURES, OUTPUTS)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.head(self.model(x)), y)
        return loss + sum(type(self).read(layer.noted).mean() for layer in self.model)


@entry(equal=True)
class ReadsATupleOfItsLayers(ReadsNotes):
    note, read = lambda square, given: (square, given), itemgetter(1)


@entry(equal=True)
class ReadsANamedTupleOfItsLayers(ReadsNotes):
    note, read = lambda square, given: Pair(square, "it"), attrgetter("square")


@entry(equal=True)
class ReadsNestedListsOfItsLayers(ReadsNotes):
    note, read = lambda square, given: [[given], [square]], lambda noted: noted[1][0]


@entry(equal=True)
class ReadsADictOfTuplesOfItsLayers(ReadsNotes):
    note, read = lambda square, given: {"of": (square, 1)}, lambda noted: noted["of"][0]


@entry(equal=True)
class ReadsARecordOfItsLayers(ReadsNotes):
    note, read = lambda square, given: Record(square, given), attrgetter("given")


@entry(strategy={"microbatches": 8})
class VarianceOfSingleSamples(Layers):
    """It is NaN in micro-batches of one sample."""

    def forward(self, x: Tensor) -> Any:
        for number, layer in enumerate(self.model):
            x = layer(x)
            if number == 0:
                x = x / x.std(0)
        return x


@entry()
class ChangesInPlaceWhatItHasAveraged(Layers):
    def forward(self, x: Tensor) -> Any:
        mean: Any = 0.0
        for number, layer in enumerate(self.model):
            x = layer(x)
            if number == 0:
                mean = x.mean()
                x += 1
        return x * (1 + mean)


@entry()
class ChangesInPlaceByWhatItHasRead(Layers):
    def forward(self, x: Tensor) -> Any:
        for number, layer in enumerate(self.model):
            x = layer(x)
            if number == 0:
                large = 1.0 if x.mean() > -10 else 0.0
                x += large
        return x * 0.5 * large


@entry(equal=True)
class SumsMeansOfLayersInPlace(Layers):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.model:
            x = layer(x)
            total += x.mean()
        return F.mse_loss(x, y) + 0.1 * total.square()
