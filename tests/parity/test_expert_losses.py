"""Losses that balance experts are those of the whole batch, whatever its micro-batches.

Such a loss is a product of means over the batch's tokens: of the share of tokens that each expert
gets, and of its mean probability. It is differentiated once a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Record, difference, free_port, join_ddp, trained, trainer
from tests.parity.networks import VOCABULARY as WORDS
from tests.parity.networks import WIDTH, decoder, in_float64
from tests.ranks import run_ranks

LENGTH, LAYERS, PADDING = 10, 4, 0
BATCH, SAMPLES = 6, 22
"""Micro-batches of two samples; the last batch has four."""

Balance = Callable[[Tensor, int], Tensor]
"""The loss that balances so many experts by the probabilities ``(tokens, experts)``."""


def by_one_hot(p: Tensor, experts: int) -> Tensor:
    f = F.one_hot(p.topk(2).indices, experts).to(p).mean(0).sum(0)
    return experts * (f * p.mean(0)).sum()


def by_counts(p: Tensor, experts: int) -> Tensor:
    chosen = p.topk(2).indices
    f = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
    return experts * torch.dot(f.to(p), p.mean(0))


class Router(nn.Module):
    """A layer that leaves the logits of its router."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, experts), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.logits = self.gate(x)
        return x + self.up(x).tanh() * self.logits.softmax(-1).amax(-1, keepdim=True)


class Routed(L.LightningModule):
    """Adds the balance of experts to a cross entropy over what is no padding, and a z-loss."""

    def __init__(self, balance: Balance | None, experts: int, optimizer: Any) -> None:
        super().__init__()
        self.balance, self.experts, self.optimizer = balance, experts, optimizer
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Router(experts) for _ in range(LAYERS))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["ids"])
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x)[:, :-1].mT, batch["labels"][:, 1:])
        kept = batch["mask"].bool()
        logits = [layer.logits[kept] for layer in self.layers]
        if self.balance is not None:
            balance = sum(self.balance(each.softmax(-1), self.experts) for each in logits)
            self.log("balance", balance, batch_size=len(kept))
            loss += 0.1 * balance
        return loss + 0.01 * sum(each.logsumexp(-1).pow(2).mean() for each in logits)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch), batch_size=len(batch["ids"]))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.05)


SGD = partial(torch.optim.SGD, momentum=0.9)
OWN: dict[str, Callable[[], Routed]] = {
    "one hot": partial(Routed, by_one_hot, 4, SGD),
    "counts": partial(Routed, by_counts, 4, torch.optim.AdamW),
    "as many experts as samples in the batch": partial(Routed, by_one_hot, 6, SGD),
}


def samples(padded: bool = True) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (SAMPLES, 1), generator=generator)
    mask = torch.arange(LENGTH).lt(lengths if padded else LENGTH).expand(SAMPLES, -1).long()
    labels = ids.masked_fill(mask == 0, -100)
    rows = zip(ids * mask, mask, labels, strict=True)
    return [{"ids": i, "mask": m, "labels": y} for i, m, y in rows]


def train(
    make: Callable[[], L.LightningModule], strategy: Any, ranks: int = 1, **options: Any
) -> Record:
    batches = samples()
    loaders = (DataLoader(part, batch_size=BATCH) for part in (batches, batches[:BATCH]))
    return trained(make, strategy, ranks, *loaders, max_epochs=1, **options)


def own(name: str, strategy: Any, ranks: int = 1) -> Record:
    return train(OWN[name], strategy, ranks)


def pipeline(stages: int, container: str = "layers", **options: Any) -> AxoSparseStrategy:
    return AxoSparseStrategy(stages, 3, pipeline=container, **options)


@cache
def on_one_process(name: str) -> Record:
    return own(name, "auto")


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", OWN)
def test_the_balance_of_experts_is_that_of_the_batch(name: str, stages: int) -> None:
    record = own(name, pipeline(stages, transport="loopback"))
    assert difference(on_one_process(name), record) <= 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"recompute": 1},
    ],
)
def test_the_balance_of_experts_in_any_order(options: dict[str, Any]) -> None:
    record = own("one hot", pipeline(3, transport="loopback", **options))
    assert difference(on_one_process("one hot"), record) <= 1e-12


class Peaks(L.Callback):
    """Keeps how many micro-batches each stage has held in each batch."""

    def __init__(self) -> None:
        self.seen: list[dict[int, int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append(trainer.strategy.peak_in_flight)


class Unbalanced(Routed):
    """The cross entropy alone."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["ids"])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].mT, batch["labels"][:, 1:])


def test_a_declared_mean_lets_stages_hold_few_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OWN, "unbalanced", partial(Unbalanced, None, 4, SGD))
    declared = {"loss": "mean", "in_flight": 2}
    for name, options, held in (
        ("unbalanced", declared, {0: 2, 1: 1}),
        ("one hot", {}, {0: 3, 1: 3}),
    ):
        L.seed_everything(0, verbose=False)
        peaks = Peaks()
        strategy = pipeline(2, transport="loopback", **options)
        run = trainer(strategy, max_epochs=1, max_steps=2, callbacks=[peaks])
        run.fit(OWN[name](), DataLoader(samples(padded=False), batch_size=BATCH))
        assert peaks.seen == [held, held]


SIZES = {
    **decoder(LAYERS),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_cache": False,
    "pad_token_id": PADDING,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
    "num_experts_per_tok": 2,
}
NARROW = {**SIZES, "num_experts": 4, "moe_intermediate_size": 16}
EAGER = {"experts_implementation": "eager"}
"""transformers' default is torch's ``grouped_mm``, which takes no float64."""


def mixtral(**how: Any) -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, **how))


def qwen2(**how: Any) -> nn.Module:
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**NARROW, shared_expert_intermediate_size=16, **how))


def qwen3(**how: Any) -> nn.Module:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**NARROW, **how))


def olmoe(**how: Any) -> nn.Module:
    return OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=4, **how))


def gpt_oss(**how: Any) -> nn.Module:
    kinds = ["full_attention", "sliding_attention"] * (LAYERS // 2)
    return GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, layer_types=kinds, **how))


FAMILIES = {"mixtral": mixtral, "qwen2": qwen2, "qwen3": qwen3, "olmoe": olmoe, "gpt-oss": gpt_oss}


class Family(L.LightningModule):
    """A network of transformers with its own loss."""

    def __init__(self, network: nn.Module, masked: bool) -> None:
        super().__init__()
        self.network, self.masked = network, masked

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        mask = batch["mask"] if self.masked else None
        output = self.network(input_ids=batch["ids"], attention_mask=mask, labels=batch["labels"])
        self.log("balance", output.aux_loss, batch_size=len(batch["ids"]))
        return output.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.05)


def family(name: str, strategy: Any, ranks: int = 1, masked: bool = True) -> Record:
    return train(lambda: Family(in_float64(FAMILIES[name](**EAGER)), masked), strategy, ranks)


@cache
def family_on_one_process(name: str, masked: bool = True) -> Record:
    return family(name, "auto", masked=masked)


def family_pipeline(stages: int, **options: Any) -> AxoSparseStrategy:
    return pipeline(stages, "network.model.layers", **options)


TOLERANCE = 1e-5
"""Of networks of transformers, which computes this loss in single precision."""


@pytest.mark.slow
def test_the_balance_without_a_mask() -> None:
    record = family("mixtral", family_pipeline(2, transport="loopback"), masked=False)
    assert difference(family_on_one_process("mixtral", masked=False), record) <= TOLERANCE


def as_it_comes(name: str, strategy: Any, ranks: int = 1) -> Record:
    """In single precision, with the default way of computing experts."""

    def make() -> Family:
        network = FAMILIES[name]()
        assert network.config._experts_implementation == "grouped_mm"
        return Family(network, masked=True)

    return train(make, strategy, ranks, precision="32-true")


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_as_they_come(name: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = as_it_comes(name, "auto")
    for stages in (1, 2):
        with caplog.at_level("DEBUG", "lightning.pytorch.utilities.rank_zero"):
            record = as_it_comes(name, family_pipeline(stages, transport="loopback"))
        assert "not be compared" not in caplog.text
        assert difference(expected, record) <= TOLERANCE


def over_two_ranks() -> dict[str, tuple[Record, Record]]:
    """Two replicas that have some of the experts each, and two that have all of them."""
    found = {}
    for name in FAMILIES:
        strategies = (family_pipeline(1, expert_parallel=ranks) for ranks in (2, 1))
        found[name] = tuple(as_it_comes(name, strategy, 2) for strategy in strategies)
    return found


def test_experts_of_transformers_as_they_come_over_ranks() -> None:
    for records in run_ranks(2, over_two_ranks):
        for spread, whole in records.values():
            assert difference(whole, spread) <= TOLERANCE


def on_four_ranks(port: int) -> dict[str, Record]:
    """Families on four stages, two replicas of two stages and, on two ranks, ddp."""
    found = {name: family(name, family_pipeline(4), 4) for name in FAMILIES}
    found["replicas"] = own("one hot", pipeline(2), 4)
    if join_ddp(2, port):
        found["ddp"] = own("one hot", "ddp", 2)
    return found


@pytest.fixture(scope="module")
def four() -> list[dict[str, Record]]:
    return run_ranks(4, on_four_ranks, free_port())


@pytest.mark.slow
def test_each_replica_balances_its_own_batch_as_ddp_does(four: list[dict[str, Record]]) -> None:
    for rank, found in enumerate(four):
        assert difference(four[rank // 2]["ddp"], found["replicas"]) <= 1e-12


@pytest.mark.slow
def test_the_balance_of_transformers_on_ranks(four: list[dict[str, Record]]) -> None:
    for found in four:
        for name in FAMILIES:
            assert difference(family_on_one_process(name), found[name]) <= TOLERANCE
