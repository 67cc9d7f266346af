"""Steps of the kinds that users of pipelines have reported as broken."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, SumMetric

from tests.corpus.harness import entry
from tests.corpus.modules import BATCHES, FEATURES, SAMPLES, Module, Regression, numbers

WIDTH, PLACES = 8, 5


@entry(equal=True)
class PaddedTransformer(Module):
    """In evaluation torch makes nested tensors of padded sentences."""

    pipeline = "encoder.layers"

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)

    def loss(self, x: Tensor, is_padding: Tensor) -> Tensor:
        z = self.encoder(x, src_key_padding_mask=is_padding)
        return (z.sin() * ~is_padding[..., None]).square().sum() / (~is_padding).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))

    @classmethod
    def dataset(cls, seed: int) -> TensorDataset:
        x = torch.randn(BATCHES * SAMPLES, PLACES, WIDTH, generator=numbers(seed))
        lengths = torch.randint(1, PLACES + 1, (len(x), 1), generator=numbers(seed))
        return TensorDataset(x, torch.arange(PLACES) >= lengths)


class ComplexLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).real


@entry(equal=True, trainer={"gradient_clip_val": 0.1})
class ClipsComplexWeights(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model.insert(0, ComplexLinear())


class WithNothing(nn.Module):
    """Hands on a tensor that has no entries beside its output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: Any) -> Any:
        x, nothing = given if isinstance(given, tuple) else (given, given.new_zeros(0))
        return self.layer(x), nothing


@entry(equal=True)
class HandsOnATensorWithoutEntries(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*map(WithNothing, self.model))

    def forward(self, x: Tensor) -> Tensor:
        z, nothing = self.model(x)
        return z + nothing.sum()


def sparse_batch(samples: list[tuple[Tensor, Tensor]]) -> Any:
    x, y = (torch.stack(each) for each in zip(*samples, strict=True))
    return x.to_sparse(), y


@entry(equal=True)
class SparseBatches(Regression):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x.to_dense(), y)

    @classmethod
    def loader(cls, seed: int) -> Any:
        return DataLoader(cls.dataset(seed), batch_size=SAMPLES, collate_fn=sparse_batch)


class SwapsPairs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 2, x.shape[-1]).flip(1).reshape(x.shape)


@entry(loaders=lambda seed: DataLoader(Regression.dataset(seed), batch_size=18))
class SwapsPairsInsideALayer(Regression):
    """No micro-batch of a batch of 18, and then of 6, is divided in the middle of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(2, SwapsPairs())


@entry()
class ScalesGradientsByFrequency(Module):
    def __init__(self) -> None:
        super().__init__()
        table = nn.Embedding(7, WIDTH, scale_grad_by_freq=True)
        self.model = nn.Sequential(table, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def loss(self, words: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(words), y)

    @classmethod
    def dataset(cls, seed: int) -> TensorDataset:
        words = torch.randint(7, (BATCHES * SAMPLES,), generator=numbers(seed))
        return TensorDataset(words, torch.randn(len(words), 3, generator=numbers(seed)))


@entry(equal=True)
class ComputesAMetricTwice(Regression):
    """A second time where one rank has the value, and others would synchronise alone."""

    def __init__(self) -> None:
        super().__init__()
        self.error, self.read = MeanMetric(), list[float]()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.error.update((self(x) - y).abs())

    def on_validation_epoch_end(self) -> None:
        self.read.append(float(self.error.compute()))

    def on_fit_end(self) -> None:
        self.read.append(float(self.error.compute()))


class Twice(torch.optim.SGD):
    """Descends by gradients at weights that it has moved up before, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        moves = [(p, 0.1 * p.grad.sign()) for g in self.param_groups for p in g["params"]]
        with torch.no_grad():
            for parameter, move in moves:
                parameter.add_(move)
        closure()
        with torch.no_grad():
            for parameter, move in moves:
                parameter.sub_(move)
        super().step()
        return loss


@entry()
class MinimizesSharpness(Regression):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), lr=0.05)


class Meter:
    """An object of the user that holds a metric."""

    def __init__(self) -> None:
        self.samples = SumMetric()


class ListensForLosses(Callback):
    """Has a metric of its own."""

    def __init__(self) -> None:
        self.losses = CatMetric()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.update(outputs["loss"])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.seen += self.losses.compute().tolist()


@entry(equal=True, trainer={"callbacks": [ListensForLosses]})
class KeepsMetricsOutsideItsModules(Regression):
    """In a list, a dict and an object of its own, and in a callback."""

    def __init__(self) -> None:
        super().__init__()
        self.listed, self.named, self.meter = [MeanMetric()], {"last": CatMetric()}, Meter()
        self.seen: list[float] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self(x)
        loss = F.mse_loss(out, y)
        self.listed[0].update(loss)
        self.named["last"].update(out.mean())
        self.meter.samples.update(len(x))
        return loss

    def on_train_epoch_end(self) -> None:
        metrics = self.listed[0], self.named["last"], self.meter.samples
        self.seen += [value for each in metrics for value in each.compute().view(-1).tolist()]
