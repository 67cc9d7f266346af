"""Losses of every kind train as on one process, in float64.

Padding, class weights, sums and means by hand make micro-batches count for more or less than their
samples; other losses compare samples, draw noise, or are not the same all the time. All rows of one
number of ranks run in one job.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Record, Recorder, difference, free_port, join_ddp, trained
from tests.ranks import run_ranks

WORDS, WIDTH, LENGTH, IGNORED = 11, 8, 6, -100
SAMPLES = (8, 8, 8, 3)
WEIGHTS = torch.linspace(0.5, 2, WORDS, dtype=torch.float64)


class Tagger(L.LightningModule):
    """Tags words; some of the tags are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.layers = nn.ModuleList(layers)
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("weights", WEIGHTS.clone())

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def logits(self, words: Tensor) -> Tensor:
        return self.head(self.hidden(self.embed(words))) * self.temperature

    def text(self, words: Tensor) -> Tensor:
        return normalize(self.logits(words).mean(1))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(self.logits(batch["words"]).mT, batch["labels"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        samples = len(batch["words"])
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=samples, sync_dist=True)
        self.log("number", loss.item(), batch_size=samples)
        return {"loss": loss, "twice": 2 * loss.detach()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch["words"]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class Weighted(Tagger):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.logits(batch["words"]), batch["labels"]
        return cross_entropy(logits.mT, labels, self.weights, label_smoothing=0.1)


class ByHand(Tagger):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.logits(batch["words"]), batch["labels"]
        losses = cross_entropy(logits.mT, labels, reduction="none")
        mask = labels != IGNORED
        penalty = sum(parameter.pow(2).sum() for parameter in self.head.parameters())
        return (losses * mask).sum() / mask.sum().clamp(min=1) + 1e-3 * penalty


class ShapeOfOne(Tagger):
    """Returns its loss as a tensor with a dimension, has a metric of it, and joins epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = mse_loss(self.logits(batch["words"]), batch["words"][..., None].double())
        self.mean(loss, weight=len(batch["words"]))
        for joined in ("sum", "max", "min"):
            self.log(joined, loss, on_step=False, on_epoch=True, reduce_fx=joined)
        return {"loss": loss.reshape(1), "twice": 2 * loss.detach()}


class Summed(Tagger):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return 0.1 * cross_entropy(self.logits(batch["words"]).mT, batch["labels"], reduction="sum")


class Items(Tagger):
    """Divides by a count that comes with the batch, as `num_items_in_batch` does."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.logits(batch["words"]), batch["labels"]
        return cross_entropy(logits.mT, labels, reduction="sum") / batch["items"]


class Hidden(Tagger):
    """Has a mean that no one sees through."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.logits(batch["words"]), batch["labels"]
        losses = cross_entropy(logits.mT, labels, reduction="none")
        mask = (labels != IGNORED).double()
        return torch.einsum("ij,ij->", losses, mask) / torch.einsum("ij->", mask).clamp(min=1)


class Supervised(Tagger):
    """Contrastive with classes: samples without another of their class do not count."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        texts, kinds = self.text(batch["words"]), batch["words"][:, 0] % 3
        same = (kinds[:, None] == kinds).fill_diagonal_(False)
        itself = torch.eye(len(texts), dtype=torch.bool)
        log_probs = (texts @ texts.mT / 0.5).masked_fill(itself, -1e9).log_softmax(1)
        each = -(log_probs * same).sum(1) / same.sum(1).clamp(min=1)
        has_same = same.any(1)
        return each[has_same].mean() if has_same.any() else 0 * texts.sum()


class Variational(Tagger):
    """Draws between layers, and adds the divergence of what it has drawn from."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["words"])
        for layer in self.layers[:2]:
            x = layer(x)
        mean, spread = x, x.tanh().exp()
        x = mean + spread * torch.randn_like(mean)
        for layer in self.layers[2:]:
            x = layer(x)
        divergence = (mean.pow(2) + spread.pow(2) - 1 - spread.pow(2).log()).sum(2).mean() / 2
        return cross_entropy(self.head(x).mT, batch["words"]) + 0.1 * divergence


class Late(Tagger):
    """A term that compares samples counts from the second epoch on."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, weight = self.logits(batch["words"]), float(self.current_epoch > 0)
        return cross_entropy(logits.mT, batch["words"]) + weight * logits.std(0).mean()


MODULES: dict[str, Callable[[], Tagger]] = {
    "padding": Tagger,
    "class weights": Weighted,
    "by hand": ByHand,
    "sum": Summed,
    "shape of one": ShapeOfOne,
    "items": Items,
    "hidden": Hidden,
    "supervised contrastive": Supervised,
    "variational": Variational,
    "late": Late,
}


def tokens(batch: dict[str, Tensor]) -> int:
    """Return the number of labels that are not padding."""
    return int((batch["labels"] != IGNORED).sum())


PARTS: dict[str, Any] = {
    "padding": tokens,
    "class weights": lambda batch: WEIGHTS[batch["labels"][batch["labels"] != IGNORED]].sum(),
    "sum": "sum",
    "shape of one": "mean",
    "items": "sum",
    "hidden": tokens,
    "variational": "mean",
}
"""How losses are declared that may be differentiated by parts."""
# Row: module, strategy, trainer.
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {}, {}) for name in MODULES},
    **{f"{name}, by parts": (name, {"loss": loss}, {}) for name, loss in PARTS.items()},
    "padding, accumulated": ("padding", {"loss": tokens}, {"accumulate_grad_batches": 3}),
    "padding, clipped": ("padding", {}, {"gradient_clip_val": 0.05}),
    "padding, 1f1b": ("padding", {"schedule": "1f1b", "loss": tokens}, {}),
    "sum, accumulated": ("sum", {"loss": "sum"}, {"accumulate_grad_batches": 2}),
    "supervised contrastive, recomputed": ("supervised contrastive", {"recompute": "sqrt"}, {}),
    "padding, recomputed": ("padding", {"recompute": "sqrt", "loss": tokens}, {}),
    "variational, recomputed": ("variational", {"recompute": "sqrt", "loss": "mean"}, {}),
}


def batches(seed: int) -> DataLoader:
    """Batches in which a sample may be all padding, and a micro-batch, too."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, samples in enumerate(SAMPLES):
        words = torch.randint(1, WORDS, (samples, LENGTH), generator=generator)
        labels = words.flip(1).clone()
        lengths = torch.randint(0, LENGTH + 1, (samples, 1), generator=generator)
        labels[torch.arange(LENGTH) >= lengths] = IGNORED
        if number == 1:
            labels[:2] = IGNORED
        if number == 2:
            labels[-4:] = IGNORED
        made.append({"words": words, "labels": labels, "items": (labels != IGNORED).sum()})
    return DataLoader(made, batch_size=None)


class Outputs(Recorder):
    """Keeps also what the steps returned beside the loss, where that is."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, outputs, *args)
        if getattr(trainer.strategy, "has_step_outputs", True):
            whole = float(outputs["loss"]) * trainer.accumulate_grad_batches
            assert float(outputs["twice"]) == pytest.approx(2 * whole, rel=1e-14)


def train(name: str, strategy: Any, ranks: int = 1, shift: int = 0, **options: Any) -> Record:
    """Train a module; ``shift`` is the replica whose batches these are."""
    loaders = batches(1 + shift), batches(2 + shift)
    settings = {"max_epochs": 2, "use_distributed_sampler": False, **options}
    return trained(MODULES[name], strategy, ranks, *loaders, recorder=Outputs(), **settings)


def train_row(row: str, stages: int, ranks: int = 1, shift: int = 0, **more: Any) -> Record:
    name, strategy, options = ROWS[row]
    microbatches = 4 if stages > 1 or "loss" in strategy else None
    arguments = {"microbatches": microbatches, "pipeline": "layers", **strategy, **more}
    return train(name, AxoSparseStrategy(stages, **arguments), ranks, shift, **options)


@cache
def one_process(row: str) -> Record:
    name, _, options = ROWS[row]
    return train(name, "auto", **options)


def train_rows() -> dict[str, Record]:
    return {row: train_row(row, 2, 2) for row in ROWS}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Record]]:
    return run_ranks(2, train_rows)


@pytest.mark.parametrize("row", ROWS)
def test_ranks_do_what_one_process_does(row: str, runs: list[dict[str, Record]]) -> None:
    expected = one_process(row)
    assert len(expected.losses) == 2 * len(SAMPLES)
    for records in runs:
        assert difference(expected, records[row]) <= 1e-12


# One stage without options takes Lightning's own step.
STAGES = [(stages, row) for stages in (1, 2, 4) for row in ROWS if stages > 1 or ROWS[row][1]]


@pytest.mark.parametrize(("stages", "row"), STAGES)
def test_stages_in_one_process_do_too(stages: int, row: str) -> None:
    record = train_row(row, stages, transport="loopback")
    assert difference(one_process(row), record) <= 1e-12


REPLICATED = (
    *("padding", "padding, accumulated", "class weights", "by hand", "hidden"),
    *("supervised contrastive", "late", "padding, by parts", "hidden, by parts"),
)


def train_replicas(port: int) -> dict[str, list[Record]]:
    """Two replicas of different batches, as two pipelines and, on two ranks, with ddp."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    found = {row: [train_row(row, 2, 4, 10 * (rank // 2))] for row in REPLICATED}
    if join_ddp(2, port):
        for row in REPLICATED:
            name, _, options = ROWS[row]
            found[row].append(train(name, "ddp", 2, 10 * rank, **options))
    return found


def test_replicas_mean_what_they_mean_in_ddp() -> None:
    found = run_ranks(4, train_replicas, free_port())
    for rank, records in enumerate(found):
        for row in REPLICATED:
            _, expected = found[rank // 2][row]
            assert difference(expected, records[row][0]) <= 1e-12, row
