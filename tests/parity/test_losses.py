"""Losses that are no plain means over samples train as on one process.

Padding, class weights, sums and means by hand make micro-batches count for more or less than their
samples. All rows of one number of ranks run in one job, in float64.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
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

    def logits(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.temperature

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
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


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

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = torch.einsum("ijk->", self.logits(batch["words"]).pow(2)) / 100
        return {"loss": loss, "twice": torch.zeros(())}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.logits(batch["words"])


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
    "hidden": Hidden,
    "hidden sum": HiddenSum,
    "Llama": llama,
    "BERT": bert,
}
CONTAINERS = {"Llama": "network.model.layers", "BERT": "network.bert.encoder.layer"}
# Llama's loss and norms go through float32, whatever the precision.
TOLERANCES = {"Llama": 2e-6}
# Row: module, strategy, trainer.
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {}, {}) for name in MODULES if "hidden" not in name},
    "hidden, by name": ("hidden", {"microbatch_weight": "labels"}, {}),
    "padding, accumulated": ("padding", {}, {"accumulate_grad_batches": 3}),
    "padding, clipped": ("padding", {}, {"gradient_clip_val": 0.05}),
    "padding, recomputed": ("padding", {"recompute": "sqrt"}, {}),
    "padding, 1f1b": ("padding", {"schedule": "1f1b"}, {}),
    "padding, offloaded": ("padding", {"offload_optimizer": True}, {}),
    "hidden sum": ("hidden sum", {}, {}),
    "sum, accumulated": ("sum", {}, {"accumulate_grad_batches": 2}),
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
    """Keeps also what the steps returned beside the loss."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, outputs, *args)
        self.record.losses.append(float(outputs["twice"]))


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


def train_row(row: str, ranks: int, **more: Any) -> Record:
    name, strategy, options = ROWS[row]
    arguments = {"microbatches": 4, "pipeline": CONTAINERS.get(name), **strategy, **more}
    arguments["step_outputs"] = "all"
    return train(name, AxoSparseStrategy(g_inter=ranks, **arguments), ranks, **options)


def pruned(strategy: Any, ranks: int = 1) -> Record:
    """A run that goes on with shorter pipelines, or does not, once its weights are sparse."""
    ticket = EarlyBirdTicket(0.5, method="early-bird", every="1 epoch", draw_by="1 epoch")
    return train("padding", strategy, ranks, callbacks=[ticket], max_epochs=3)


def two_ranks() -> dict[str, Record]:
    found = {row: train_row(row, 2) for row in ROWS}
    for regrid in (None, 1):
        strategy = AxoSparseStrategy(2, 4, "layers", regrid=regrid, step_outputs="all")
        found[f"regrid {regrid}"] = pruned(strategy, 2)
    return found


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Record]]:
    return run_ranks(2, two_ranks)


def one_process(row: str) -> Record:
    name, _, options = ROWS[row]
    return train(name, "auto", **options)


@pytest.mark.parametrize("row", ROWS)
def test_ranks_do_what_one_process_does(row: str, runs: list[dict[str, Record]]) -> None:
    expected = one_process(row)
    assert len(expected.losses) == 2 * 2 * len(SAMPLES)
    for records in runs:
        assert difference(expected, records[row]) <= TOLERANCES.get(row, 1e-12)


@pytest.mark.parametrize("row", ["padding", "by hand", "padding, accumulated", "Llama"])
def test_stages_in_one_process_do_too(row: str) -> None:
    name, strategy, options = ROWS[row]
    pipeline = CONTAINERS.get(name, "layers")
    loopback = AxoSparseStrategy(
        g_inter=4, microbatches=3, transport="loopback", pipeline=pipeline, **strategy
    )
    record = train(name, loopback, **options)
    assert difference(one_process(row), record) <= TOLERANCES.get(row, 1e-12)


def test_replicas_that_share_a_batch_agree_on_its_denominator(runs: Any) -> None:
    for records in runs:
        assert difference(records["regrid None"], records["regrid 1"]) <= 1e-12


def train_replicas(kind: str, devices: int, port: int) -> list[Record]:
    """Two replicas of different paddings, with Lightning's ddp or as two pipelines."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    if kind == "ddp":
        join_ddp(devices, port)
    found = []
    for options in ({}, {"accumulate_grad_batches": 2}):
        strategy: Any = "ddp"
        if kind != "ddp":
            strategy = AxoSparseStrategy(2, 4, "layers", step_outputs="all")
        shift = rank if kind == "ddp" else rank // 2
        found.append(train("padding", strategy, devices, 10 * shift, **options))
    return found


def test_replicas_mean_what_they_mean_in_ddp() -> None:
    port = free_port()
    expected = run_ranks(2, train_replicas, "ddp", 2, port)
    for rank, records in enumerate(run_ranks(4, train_replicas, "axosparse", 4, port)):
        for ours, theirs in zip(records, expected[rank // 2], strict=True):
            assert difference(theirs, ours) <= 1e-12


class Contrastive(Tagger):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        texts = self.logits(batch["words"]).mean(1)
        return cross_entropy(texts @ texts.mT, torch.arange(len(texts)))


class MeanAndSum(Tagger):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.logits(batch["words"])
        return cross_entropy(logits.mT, batch["words"]) + logits.pow(2).sum()


class Variance(Tagger):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.logits(batch["words"])
        return cross_entropy(logits.mT, batch["words"]) + logits.std(0).mean()


class TwoMeans(Tagger):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.logits(batch["words"])
        return cross_entropy(logits.mT, batch["labels"]) + mse_loss(logits, logits.detach() + 1)


def fit_loopback(module: Tagger, **options: Any) -> None:
    options = {"g_inter": 2, "microbatches": 4, "transport": "loopback", **options}
    training = run(AxoSparseStrategy(pipeline="layers", **options), max_steps=3)
    training.fit(module, batches(1))


@pytest.mark.parametrize("module", [MeanAndSum, TwoMeans])
def test_functions_of_several_means_and_sums_are_those_of_the_batch(module: type[Tagger]) -> None:
    ours = module().double()
    theirs = copy.deepcopy(ours)
    fit_loopback(ours)
    run("auto", max_steps=3).fit(theirs, batches(1))
    for own, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("module", [Contrastive, Variance, Hidden])
def test_losses_that_no_weight_makes_right_are_refused(module: type[Tagger]) -> None:
    with pytest.raises(MisconfigurationException, match=r"on its 4 micro-batches.*microbatches=1"):
        fit_loopback(module())
    fit_loopback(module(), microbatches=1)
    with pytest.warns(UserWarning, match=r"on its 4 micro-batches"):
        fit_loopback(module(), microbatch_weight=lambda batch: len(batch["words"]))
    fit_loopback(module(), check_first_batch=False)


class Similar(Tagger):
    """Compares the samples with each other by hand, with dropout, a metric and a log."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.mean = nn.Dropout(0.5), MeanMetric()
        self.steps = 0

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        texts = self.dropout(self.logits(batch["words"]).mean(1))
        return (texts @ texts.mT).logsumexp(1).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("loss", loss, batch_size=len(batch["words"]))
        return loss


class Averaged(Similar):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.dropout(self.logits(batch["words"]))
        return cross_entropy(logits.mT, batch["labels"])


def test_a_loss_that_differs_is_found_on_one_stage() -> None:
    options: dict[str, Any] = {"transport": "mpi", "g_inter": 1}
    with pytest.raises(MisconfigurationException, match=r"on its 4 micro-batches.*microbatches=1"):
        fit_loopback(Similar(), **options)
    fit_loopback(Averaged(), **options)


def test_the_check_leaves_the_training_as_it_is() -> None:
    weights, means = [], []
    for check in (False, True):
        module = Averaged()
        L.seed_everything(0, verbose=False)
        module.load_state_dict(Averaged().state_dict())
        fit_loopback(module, check_first_batch=check)
        weights.append(module.state_dict())
        means.append(float(module.mean.compute()))
    assert means[0] == means[1]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name])


def test_a_function_of_a_mean_is_logged_as_of_the_batch() -> None:
    class Perplexity(Tagger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("perplexity", loss.detach().exp(), batch_size=len(batch["words"]))
            self.log("number", math.exp(loss.item()), batch_size=len(batch["words"]))
            return loss

    logged = []
    for strategy in ("auto", AxoSparseStrategy(2, 4, "layers", transport="loopback")):
        L.seed_everything(0, verbose=False)
        training = run(strategy, max_steps=3)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            training.fit(Perplexity(), batches(1))
        logged.append({name: float(value) for name, value in training.logged_metrics.items()})
    assert logged[1]["perplexity"] == pytest.approx(logged[0]["perplexity"], rel=1e-12)
    assert logged[1]["number"] != pytest.approx(logged[0]["number"], rel=1e-6)
    about = [str(w.message) for w in said if "self.log(" in str(w.message)]
    assert len(about) == 1
    assert "'number'" in about[0]
