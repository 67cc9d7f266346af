"""What a step changes on the module is what one process would have, on every rank."""

from __future__ import annotations

import copy
import warnings
from collections import Counter, OrderedDict, deque
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from tests.parity.cases import CLASSES, FEATURES, loader, trainer, whole_state
from tests.ranks import run_ranks

WIDTH, BATCHES, EPOCHS = 24, 4, 2


class Plain(L.LightningModule):
    """A classifier with a head behind the layers; it trains with SGD, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*self.layers())
        self.head = self.last()

    def layers(self) -> list[nn.Module]:
        return [nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]

    def last(self) -> nn.Module:
        return nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3)

    def facts(self) -> Any:
        """What hooks read on every rank."""
        return None


class CountingLayer(nn.Module):
    """A layer that is warmed up by a counter in a buffer, and keeps another as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.tensor(0))
        self.seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen = 0.5 * self.seen + 1
        return self.linear(x) * (self.calls / 4).clamp(max=1) * self.calls


class Counting(Plain):
    def layers(self) -> list[nn.Module]:
        return [*super().layers(), CountingLayer()]


class AveragingLayer(nn.Module):
    """Divides by a moving average, which autograd keeps for the backward pass."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(WIDTH))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        out = x / self.average.clone()
        if self.training:
            average = 0.9 * self.average + 0.1 * x.detach().abs().mean(0)
            self.average = self.average.copy_(average) if self.in_place else average
        return out


class Averaging(Plain):
    """Divides by moving averages, which one layer sets, and another one writes to.

    What a micro-batch divides by depends on those before it.
    """

    def layers(self) -> list[nn.Module]:
        writes = AveragingLayer(in_place=True)
        return [nn.Linear(FEATURES, WIDTH), AveragingLayer(), nn.Tanh(), writes]


class Spectral(Plain):
    def layers(self) -> list[nn.Module]:
        linears = spectral_norm(nn.Linear(FEATURES, WIDTH)), spectral_norm(nn.Linear(WIDTH, WIDTH))
        return [linears[0], nn.Tanh(), linears[1], nn.Tanh()]

    def last(self) -> nn.Module:
        return spectral_norm(nn.Linear(WIDTH, CLASSES))


class Hooked(Plain):
    """The old spectral norm, which sets the weight in a hook."""

    def layers(self) -> list[nn.Module]:
        return [
            nn.utils.spectral_norm(layer) if i == 2 else layer
            for i, layer in enumerate(super().layers())
        ]


class CountingInHooks(Plain):
    """Hooks of layers count in a buffer and an attribute, and multiply by them."""

    def layers(self) -> list[nn.Module]:
        layers = super().layers()
        for layer in layers[1:3]:
            layer.register_buffer("calls", torch.tensor(0))
            layer.register_forward_pre_hook(self.count)
        layers[1].register_forward_hook(lambda layer, args, out: out * layer.calls)
        layers[2].register_forward_hook(lambda layer, args, out: out / layer.number)
        return layers

    @staticmethod
    def count(layer: nn.Module, args: Any) -> None:
        layer.calls += 1
        layer.number = getattr(layer, "number", 0) + 1


class Meter:
    def __init__(self) -> None:
        self.total, self.count, self.last = 0.0, 0, None


class Collecting(Plain):
    """Keeps what hooks read, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = {"loss": 0.0, "samples": 0}
        self.confusion = torch.zeros(CLASSES, CLASSES).double()
        self.arrays, self.tensors, self.outputs = [], [], []
        self.predicted: list[int] = []
        self.meters = {"loss": Meter()}
        self.labels: Counter[int] = Counter()
        self.window: deque[float] = deque(maxlen=3)
        self.seen: set[int] = set()
        self.history = np.zeros(CLASSES)
        self.read: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.sums["loss"] += loss.item() * len(x)
        self.sums["samples"] += len(x)
        guess = logits.argmax(-1)
        self.confusion.index_put_((y, guess), torch.ones(len(y)).double(), accumulate=True)
        self.arrays.append(logits.detach().numpy())
        self.tensors.append(loss.detach())
        self.predicted.extend(guess.tolist())
        self.meters["loss"].total += loss.item() * len(x)
        self.meters["loss"].count += len(x)
        self.meters["loss"].last = logits.detach()
        self.labels.update(y.tolist())
        self.window.append(loss.item())
        self.seen |= set(y.tolist())
        self.history += np.bincount(y.numpy(), minlength=CLASSES)
        self.last_loss, self.last_guess = loss.item(), guess
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.read.append((self.last_loss, self.last_guess, dict(self.sums)))

    def on_train_epoch_end(self) -> None:
        self.read.append((list(self.tensors), np.concatenate(self.arrays), list(self.predicted)))
        self.read.append((list(self.window), self.confusion.clone(), dict(self.sums)))
        self.tensors.clear()
        self.arrays = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append({"logits": self(batch[0]), "size": len(batch[0])})

    def on_validation_epoch_end(self) -> None:
        self.read.append([torch.cat([each["logits"] for each in self.outputs])])
        self.read.append([each["size"] for each in self.outputs])
        self.outputs.clear()

    def facts(self) -> Any:
        meter = vars(self.meters["loss"])
        return self.read, meter, dict(sorted(self.labels.items())), sorted(self.seen), self.history


class Nested(Plain):
    """A step changes a collection and an object in it, an object and then the attribute with it."""

    def __init__(self) -> None:
        super().__init__()
        self.meters, self.recent = {"loss": Meter()}, Meter()
        self.order = OrderedDict.fromkeys(range(CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.meters["loss"].count += 1
        self.meters[f"batch {batch_idx}"] = Meter()
        self.recent.total += 1
        if batch_idx == 2:
            self.recent = Meter()
        self.order.move_to_end(batch_idx % CLASSES)
        self.lengths = torch.nested.nested_tensor([torch.ones(2), torch.ones(batch_idx + 1)])
        return super().training_step(batch, batch_idx)

    def facts(self) -> Any:
        meters = {name: meter.count for name, meter in self.meters.items()}
        return meters, self.recent.total, list(self.order), self.lengths.unbind()


class OwnNorm(nn.Module):
    """A BatchNorm that calls the function on buffers of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.training)


class Rewriting(Plain):
    """Steps write to buffers that norms and hooks change without changing their versions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.total = OwnNorm(FEATURES), nn.Buffer(torch.zeros(1))
        self.average = nn.Buffer(torch.ones(3))

    def last(self) -> nn.Module:
        return nn.Sequential(OwnNorm(WIDTH), super().last())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx < 2:
            self.total += 1
        self.average.data.mul_(0.5).add_(1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.total.data.zero_()
            self.average.data = torch.full_like(self.average, 4)

    def facts(self) -> Any:
        return {name: value.clone() for name, value in self.named_buffers()}


class Measuring(Plain):
    """Hooks of the module and of a callback make metrics while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []
        self.batches = BatchCount()

    def configure_callbacks(self) -> list[Callback]:
        return [self.batches]

    def on_train_start(self) -> None:
        self.accuracy = {"all": [MulticlassAccuracy(CLASSES, average="micro")]}

    def on_train_epoch_start(self) -> None:
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.mean.update(loss.detach(), len(batch[1]))
        self.accuracy["all"][0].update(logits, batch[1])
        return loss

    def on_train_epoch_end(self) -> None:
        metrics = self.mean, self.accuracy["all"][0], self.batches.count
        self.read.append([float(metric.compute()) for metric in metrics])

    def facts(self) -> Any:
        return self.read


class BatchCount(Callback):
    def on_train_epoch_start(self, *args: Any) -> None:
        self.count = SumMetric()

    def on_train_batch_end(self, *args: Any) -> None:
        self.count.update(1)


class Facts(Callback):
    """Keeps losses, and what hooks read, on every rank."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.kept.append((float(outputs["loss"]), copy.deepcopy(module.facts())))


def train(
    module: type[Plain], strategy: Any, ranks: int = 1, *callbacks: Callback
) -> tuple[Any, ...]:
    L.seed_everything(0, verbose=False)
    facts, network = Facts(), module().double()
    run = trainer(
        strategy, ranks, precision="64-true", max_epochs=EPOCHS, callbacks=[facts, *callbacks]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(network, loader(1, BATCHES, extra=6), loader(2, batches=2))
    said = [str(w.message) for w in caught if " changes `self." in str(w.message)]
    return (facts.kept, network.facts()), whole_state(run, network), said


def pipelined(stages: int = 2, microbatches: int = 4, **options: Any) -> AxoSparseStrategy:
    return AxoSparseStrategy(stages, microbatches, pipeline="model", **options)


def assert_equal(one: Any, other: Any) -> None:
    (kept, weights, _), (theirs, their_weights, _) = one, other
    torch.testing.assert_close(kept, theirs, rtol=0, atol=1e-10)
    torch.testing.assert_close(weights, their_weights, rtol=0, atol=1e-10)


STEPS = [Nested, Rewriting, Measuring]


@pytest.mark.parametrize(
    "module", [Counting, Spectral, Hooked, CountingInHooks, Collecting, *STEPS]
)
@pytest.mark.parametrize("options", [{}, {"microbatches": 1}, {"recompute": 1}])
def test_layers_that_change(module: type[Plain], options: dict[str, Any]) -> None:
    expected = train(module, "auto")
    assert_equal(train(module, pipelined(transport="loopback", **options)), expected)


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_are_recomputed_with_their_buffers(stages: int) -> None:
    grid = {"transport": "loopback", "microbatches": 1, "recompute": 1}
    found = train(Averaging, pipelined(stages, **grid))
    assert_equal(found, train(Averaging, "auto"))
    divided = [train(Averaging, pipelined(2, transport="loopback", recompute=r)) for r in (None, 1)]
    assert_equal(*divided)


def test_a_layer_that_averages_samples_is_named() -> None:
    *_, said = train(Averaging, pipelined(transport="loopback"))
    assert len(said) == 2  # Such layers.
    expected = "A layer changes `self.model[1].average` by what is in its samples: here each micro-"
    assert any(text.startswith(expected) for text in said)
    expected = train(Averaging, "auto")
    alone = train(Averaging, AxoSparseStrategy(2, 1, pipeline="model", transport="loopback"))
    assert_equal(alone, expected)


class Large(Plain):
    """Keeps more than is sent to other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.kept.append(logits.detach().repeat(1, 10_000))
        return nn.functional.cross_entropy(logits, batch[1])

    def facts(self) -> Any:
        return len(self.kept)


class Shared(Collecting):
    """All of that, and a layer that counts."""

    def layers(self) -> list[nn.Module]:
        return [*super().layers(), CountingLayer()]


def shared(strategy: Any, ranks: int = 1) -> tuple[Any, ...]:
    """Draw a ticket after the first epoch, and train with one stage from then on."""
    return train(
        Shared,
        strategy,
        ranks,
        EarlyBirdTicket(0.5, every="1 epoch", draw_by="1 epoch"),
    )


def on_two_ranks() -> dict[str, Any]:
    modules = Counting, Collecting, Large, *STEPS
    runs = {each.__name__: train(each, pipelined(), 2) for each in modules}
    runs["Shared"] = shared(pipelined(regrid=1), 2)
    runs["recomputed"] = train(Counting, pipelined(recompute=1), 2)
    return runs


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks)


@pytest.mark.parametrize("module", [Counting, Collecting, *STEPS])
def test_on_two_ranks(module: type[Plain], ranks: list[dict[str, Any]]) -> None:
    expected = train(module, "auto")
    for runs in ranks:
        assert_equal(runs[module.__name__], expected)
        assert not runs[module.__name__][2]
        if module is Counting:
            assert_equal(runs["recomputed"], expected)


def test_replicas_of_shorter_pipelines_go_on_with_the_state(ranks: list[dict[str, Any]]) -> None:
    (expected, _), weights, _ = shared(AxoSparseStrategy())
    for runs in ranks:
        (kept, _), own, _ = runs["Shared"]
        before = len(expected) // EPOCHS
        torch.testing.assert_close(kept[:before], expected[:before], rtol=0, atol=1e-10)
        torch.testing.assert_close(own, weights, rtol=0, atol=1e-10)


def test_what_is_too_large_to_be_sent_is_named(ranks: list[dict[str, Any]]) -> None:
    assert [facts for _, facts in (runs["Large"][0] for runs in ranks)] == [10, 0]
    (said,) = ranks[0]["Large"][2]
    assert said.startswith("The step changes `self.kept`, but what is new is larger than 1 MB")
