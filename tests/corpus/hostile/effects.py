"""What layers do besides returning something."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from tests.corpus.harness import entry
from tests.corpus.modules import FEATURES, OUTPUTS, Module, Regression


class Layered(Regression):
    """A stem, four layers and a head; ``layer`` gets the module and the number of the layer."""

    layer: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, OUTPUTS)
        self.model = nn.ModuleList([self.layer(self, number) for number in range(4)])

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for layer in self.model:
            x = layer(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self, owner: Module, number: int) -> None:
        super().__init__()
        self.linear, self.number, self.owner = nn.Linear(8, 8), number, [owner]

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).tanh()


class HalvesItsInput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(0.5))


@entry(equal=True)
class ReadsAStemThatTheFirstLayerChanges(Layered):
    """Pre-activation blocks with a long skip connection."""

    layer = HalvesItsInput

    def forward(self, x: Tensor) -> Any:
        skip = x = self.stem(x)
        for layer in self.model:
            x = layer(x)
        return self.head(x + skip)


@entry(equal=True)
class AddsAStemThatTheFirstLayerChanges(ReadsAStemThatTheFirstLayerChanges):
    def forward(self, x: Tensor) -> Any:
        skip = x = self.stem(x)
        for layer in self.model:
            x = layer(x) + skip
        return self.head(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("validated", F.mse_loss(self(x), y))


class WritesToMemory(Layer):
    def forward(self, x: Tensor, *, memory: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        memory[:, self.number] += x + 1
        return x + memory.sum(1)


@entry(equal=True)
class HasAMemoryOfAllLayers(Layered):
    layer = WritesToMemory

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        memory = torch.zeros(len(x), 4, 8, dtype=x.dtype)
        for layer in self.model:
            x = layer(x, memory=memory)
        return self.head(x + memory.mean(1))


class WritesToATuple(Layer):
    def forward(self, given: Any) -> Tensor:
        x, others = given
        memory = others["memory"]
        x = self.linear(x).tanh()
        with torch.no_grad():
            memory[:, self.number] += x + 1
        return x


@entry(equal=True)
class HasAMemoryInADict(Layered):
    layer = WritesToATuple

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        memory = torch.zeros(len(x), 4, 8, dtype=x.dtype)
        for layer in self.model:
            x = layer((x, {"memory": memory}))
        return self.head(x + memory.mean(1))


class AddsToABuffer(Layer):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return super().forward(x)


@entry(equal=True)
class GivesLayersABuffer(Layered):
    layer = AddsToABuffer

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        self.count.zero_()
        x = self.stem(x)
        for layer in self.model:
            x = layer(x, self.count)
        return self.head(x * self.count)


class ChangesAParameter(Layer):
    def forward(self, x: Tensor, average: Tensor) -> Tensor:
        with torch.no_grad():
            average.lerp_(x.mean(0), 0.1)
        return super().forward(x)


@entry()
class GivesLayersAParameter(Layered):
    layer = ChangesAParameter

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for layer in self.model:
            x = layer(x, self.average)
        return self.head(x + self.average)


class StoresItsOutput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.output = self.linear(x.relu_())
        return self.output


@entry(unread=("model.0.output", "model.1.output", "model.2.output"))
class ReadsAnOutputThatTheNextLayerChanges(Layered):
    layer = StoresItsOutput

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + sum(layer.output.pow(2).mean() for layer in self.model)


class ChangesAnObject(Layer):
    def forward(self, state: Any) -> None:
        state.x = self.linear(state.x).tanh()


@entry()
class LayersReturnNothing(Layered):
    layer = ChangesAnObject

    class State:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    def forward(self, x: Tensor) -> Any:
        state = self.State(self.stem(x))
        for layer in self.model:
            layer(state)
        return self.head(state.x)


class AddsToAClass(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.owner[0].losses.values.append(x.pow(2).mean(1))
        return super().forward(x)


@entry()
class SumsAListOfAClass(Layered):
    """As Megatron's losses that balance experts."""

    layer = AddsToAClass

    def __init__(self) -> None:
        super().__init__()
        self.losses: Any = type("Losses", (), {"values": []})

    def loss(self, x: Tensor, y: Tensor) -> Any:
        self.losses.values.clear()
        return super().loss(x, y) + sum(each.mean() for each in self.losses.values)


class AddsToItsOwner(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.owner[0].penalties.append(x.pow(2).mean(1))
        return super().forward(x)


@entry(unread=("penalties",))
class SumsWhatLayersAddToIt(Layered):
    layer = AddsToItsOwner

    def loss(self, x: Tensor, y: Tensor) -> Any:
        self.penalties: list[Tensor] = []
        return super().loss(x, y) + sum(each.mean() for each in self.penalties)


class Logs(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.owner[0].log(f"layer_{self.number}", x.mean())
        return super().forward(x)


@entry()
class LogsInLayers(Layered):
    layer = Logs


@entry(strategy={"loss": "mean"})
class LogsInLayersByParts(Layered):
    layer = Logs


class Measures(Layer):
    def __init__(self, owner: Module, number: int) -> None:
        super().__init__(owner, number)
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.mean.update(x.detach().mean(1))
        return super().forward(x)


@entry()
class UpdatesMetricsInLayers(Layered):
    layer = Measures

    def on_train_epoch_end(self) -> None:
        for layer in self.model:
            self.log(f"mean_{layer.number}", layer.mean.compute())
            layer.mean.reset()


class HasAMetric(Layer):
    def __init__(self, owner: Module, number: int) -> None:
        super().__init__(owner, number)
        self.mean = MeanMetric()


@entry(equal=True)
class UpdatesMetricsOfLayersBehindThem(Layered):
    layer = HasAMetric

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.model[3].mean.update(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean_loss", self.model[3].mean.compute())
        self.model[3].mean.reset()


@entry(equal=True)
class RecomputesReentrantly(Layered):
    layer = Layer

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for layer in self.model:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


@entry(equal=True)
class RecomputesAStemThatGetsNoGradient(Layered):
    """A reentrant checkpoint of tensors without gradients gives none to its parameters."""

    layer = Layer

    def forward(self, x: Tensor) -> Any:
        x = checkpoint(self.stem, x, use_reentrant=True)
        for layer in self.model:
            x = layer(x)
        return self.head(x)


@entry(equal=True)
class CountsInPlaceBeforeItsLayers(Layered):
    layer = Layer

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        x = self.stem(x)
        for layer in self.model:
            x = layer(x) * (1 + 0.1 * self.count)
        return F.mse_loss(self.head(x), y)
