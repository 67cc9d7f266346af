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
from torch.nn.functional import cross_entropy, mse_loss, normalize, one_hot
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import (
    Record,
    Recorder,
    difference,
    free_port,
    join_ddp,
    recorded,
    trainer,
)
from tests.ranks import run_ranks

WORDS, WIDTH, LENGTH, IGNORED = 11, 8, 6, -100
SAMPLES = (8, 8, 8, 3)


class Tagger(L.LightningModule):
    """Tags words; some of the tags are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.layers = nn.ModuleList(layers)
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("weights", torch.linspace(0.5, 2, WORDS))

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


class HiddenSum(Tagger):
    """Has a sum that no one sees through."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.einsum("ijk->", self.logits(batch["words"]).pow(2)) / 100


class MeanAndSum(Tagger):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.logits(batch["words"])
        return cross_entropy(logits.mT, batch["words"]) + logits.pow(2).sum()


class TwoMeans(Tagger):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.logits(batch["words"])
        return cross_entropy(logits.mT, batch["labels"]) + mse_loss(logits, logits.detach() + 1)


class Branch(Tagger):
    """A mean of what a mask leaves, if it leaves anything."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, mask = self.logits(batch["words"]), batch["labels"] != IGNORED
        return (logits[mask] - 1).pow(2).mean() if mask.any() else 0 * logits.sum()


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


class Clip(Tagger):
    """Two towers, one of them outside the layers: each sample finds its own in the other."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        words = batch["words"]
        other = normalize(self.head(self.embed(words.flip(1)).square()).mean(1))
        logits = self.text(words) @ other.mT * self.temperature.exp()
        own = torch.arange(len(words))
        return (cross_entropy(logits, own) + cross_entropy(logits.mT, own)) / 2


class Prototypes(Tagger):
    """Every second sample is classified by its distances from the means of the others."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        texts, kinds = self.text(batch["words"]), batch["words"][:, 0] % 3
        members = one_hot(kinds[::2], 3).to(texts)
        means = members.mT @ texts[::2] / members.sum(0).clamp(min=1)[:, None]
        return cross_entropy(-torch.cdist(texts[1::2], means), kinds[1::2])


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


class Diffusion(Tagger):
    """Draws a time and noise before the layers, and finds the noise again."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        clean = self.embed(batch["words"])
        time, noise = torch.rand(len(clean), 1, 1), torch.randn_like(clean)
        found = self.hidden((1 - time) * clean + time * noise)
        return ((found - noise).pow(2) / (time + 0.1)).mean()


class Late(Tagger):
    """A term that compares samples counts from the second epoch on."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, weight = self.logits(batch["words"]), float(self.current_epoch > 0)
        return cross_entropy(logits.mT, batch["words"]) + weight * logits.std(0).mean()


class LateBranch(Tagger):
    """It is not even computed before."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.logits(batch["words"])
        loss = cross_entropy(logits.mT, batch["words"])
        return loss + logits.std(0).mean() if self.current_epoch else loss


class Language(Tagger):
    """A network of transformers with its own loss; its layers are the pipeline's."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        del self.embed, self.head, self.layers, self.temperature
        self.network = network

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        mask = (batch["words"] > 0).long()
        return self.network(
            input_ids=batch["words"], attention_mask=mask, labels=batch["labels"], use_cache=False
        ).loss


def llama() -> Language:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Language(LlamaForCausalLM(config))


class Masked(Language):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        mask = (batch["words"] > 0).long()
        words, labels = batch["words"], batch["labels"]
        return self.network(input_ids=words, attention_mask=mask, labels=labels).loss


def bert() -> Masked:
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return Masked(BertForMaskedLM(config))


MODULES: dict[str, Callable[[], Tagger]] = {
    "padding": Tagger,
    "class weights": Weighted,
    "by hand": ByHand,
    "sum": Summed,
    "shape of one": ShapeOfOne,
    "items": Items,
    "Llama": llama,
    "BERT": bert,
    "mean and sum": MeanAndSum,
    "hidden": Hidden,
    "hidden sum": HiddenSum,
    "two means": TwoMeans,
    "branch": Branch,
    "supervised contrastive": Supervised,
    "CLIP": Clip,
    "prototypes": Prototypes,
    "variational": Variational,
    "diffusion": Diffusion,
    "late": Late,
    "late branch": LateBranch,
}
PARTS = (
    "padding",
    "sum",
    "shape of one",
    "items",
    "BERT",
    "variational",
    "diffusion",
)
"""The losses that go by parts; Llama's would, but gradients of float32 differ in float64."""
WHOLE = [name for name in MODULES if name not in PARTS]
CONTAINERS = {"Llama": "network.model.layers", "BERT": "network.bert.encoder.layer"}
# Llama's loss and norms go through float32, whatever the precision.
TOLERANCES = {"Llama": 2e-6}
# Row: module, strategy, trainer.
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {}, {}) for name in MODULES},
    **{f"{name}, whole": (name, {"loss": "whole"}, {}) for name in ("padding", *WHOLE)},
    "padding, accumulated": ("padding", {}, {"accumulate_grad_batches": 3}),
    "padding, clipped": ("padding", {}, {"gradient_clip_val": 0.05}),
    "padding, 1f1b": ("padding", {"schedule": "1f1b"}, {}),
    "sum, accumulated": ("sum", {}, {"accumulate_grad_batches": 2}),
    **{
        f"{name}, recomputed": (name, {"recompute": "sqrt"}, {})
        for name in ("padding", "supervised contrastive", "variational", "diffusion")
    },
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


def run(strategy: Any, ranks: int = 1, **options: Any) -> L.Trainer:
    settings = {"max_epochs": 2, "use_distributed_sampler": False, **options}
    return trainer(strategy, ranks, precision="64-true", **settings)


def train(name: str, strategy: Any, ranks: int = 1, shift: int = 0, **options: Any) -> Record:
    """Train a module; ``shift`` is the replica whose batches these are."""
    L.seed_everything(0, verbose=False)
    training = run(strategy, ranks, recorder=Outputs(), **options)
    module = MODULES[name]()
    training.fit(module, batches(1 + shift), batches(2 + shift))
    return recorded(training, module)


def train_row(row: str, stages: int, ranks: int = 1, shift: int = 0, **more: Any) -> Record:
    name, strategy, options = ROWS[row]
    arguments = {"microbatches": 4, "pipeline": CONTAINERS.get(name, "layers"), **strategy, **more}
    return train(name, AxoSparseStrategy(stages, **arguments), ranks, shift, **options)


@cache
def one_process(row: str) -> Record:
    name, _, options = ROWS[row]
    return train(name, "auto", **options)


def train_rows(ranks: int) -> dict[str, Record]:
    return {row: train_row(row, ranks, ranks) for row in ROWS}


@pytest.fixture(scope="module", params=[2, 4], ids="{} stages".format)
def runs(request: pytest.FixtureRequest) -> list[dict[str, Record]]:
    return run_ranks(request.param, train_rows, request.param)


@pytest.mark.parametrize("row", ROWS)
def test_ranks_do_what_one_process_does(row: str, runs: list[dict[str, Record]]) -> None:
    expected = one_process(row)
    assert len(expected.losses) == 2 * len(SAMPLES)
    for records in runs:
        assert difference(expected, records[row]) <= TOLERANCES.get(row.partition(",")[0], 1e-12)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_in_one_process_do_too(
    stages: int, row: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        record = train_row(row, stages, transport="loopback")
    assert difference(one_process(row), record) <= TOLERANCES.get(row.partition(",")[0], 1e-12)
    name, strategy, _ = ROWS[row]
    if stages > 1 and "loss" not in strategy:
        is_whole = "the loss is differentiated once a batch" in caplog.text
        assert is_whole == (name in WHOLE)


def train_replicas(kind: str, devices: int, port: int) -> dict[str, Record]:
    """Two replicas of different batches, with Lightning's ddp or as two pipelines."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    if kind != "ddp":
        return {row: train_row(row, 2, devices, 10 * (rank // 2)) for row in REPLICATED}
    join_ddp(devices, port)
    rows = {row: ROWS[row] for row in REPLICATED}
    return {
        row: train(name, "ddp", devices, 10 * rank, **options)
        for row, (name, _, options) in rows.items()
    }


REPLICATED = ("padding", "padding, accumulated", *WHOLE, *(f"{name}, whole" for name in WHOLE))


def test_replicas_mean_what_they_mean_in_ddp() -> None:
    port = free_port()
    expected = run_ranks(2, train_replicas, "ddp", 2, port)
    for rank, records in enumerate(run_ranks(4, train_replicas, "axosparse", 4, port)):
        for row in REPLICATED:
            name = row.partition(",")[0]
            tolerance = TOLERANCES.get(name, 1e-12)
            assert difference(expected[rank // 2][row], records[row]) <= tolerance, row
