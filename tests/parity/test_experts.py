"""Mixtures of experts, pruned in mid-run, train on ranks as on one process.

The experts of a layer are one parameter of three dimensions. ``tests/sparse/test_mixtures.py``
compares pruned experts with dense, masked ones.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from tests.parity.cases import Record, difference, recorded, share, trainer
from tests.parity.networks import VOCABULARY
from tests.ranks import run_ranks

STEPS, BATCH, LENGTH = 5, 4, 10
WIDTH = 64

# Row: how transformers computes the experts, optimizer, precision, options of the strategy.
ROWS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "loop, AdamW": ("eager", "AdamW", "64-true", {}),
    "loop, recomputed": ("eager", "SGD", "64-true", {"recompute": 1}),
    "loop, two replicas": ("eager", "SGD", "64-true", {"g_inter": 1}),
    "loop, shards": ("eager", "AdamW", "64-true", {"g_inter": 1, "shard_optimizer": True}),
    "grouped, uneven last batch": ("grouped_mm", "AdamW", "32-true", {}),
    "batched, AdamW": ("batched_mm", "AdamW", "64-true", {}),
    "LoRA": ("eager", "SGD", "64-true", {}),
    "LoRA, shards": ("eager", "AdamW", "64-true", {"g_inter": 1, "shard_optimizer": True}),
    # torch's own grouped_mm, which runs until the ticket is drawn, takes no float64.
    "grouped": ("grouped_mm", "SGD", "32-true", {}),
}


class Language(L.LightningModule):
    """A small Mixtral of which few tokens of a micro-batch go to one expert, and none to some."""

    def __init__(self, implementation: str, optimizer: str, tuned: bool) -> None:
        super().__init__()
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=6,
            num_experts_per_tok=2,
            experts_implementation=implementation,
        )
        self.network, self.optimizer = MixtralForCausalLM(config), optimizer
        with torch.no_grad():
            for layer in self.network.model.layers:
                layer.mlp.gate.weight[4:] = layer.mlp.gate.weight[:2] - 0.01
        self.layers = "network.model.layers"
        if tuned:  # what it adds to the experts, their routers and the queries; all else is frozen
            parameters = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
            added = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
            added.init_lora_weights = False
            self.network = get_peft_model(self.network, added)
            self.layers = "network.base_model.model.model.layers"

    def training_step(self, ids: Tensor, batch_idx: int) -> dict[str, Tensor]:
        logits = self.network(input_ids=ids).logits
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:])}

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.optimizer == "SGD":
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(trained, lr=1e-3)


def train(row: str, ranks: int) -> Record:
    L.seed_everything(0, verbose=False)
    implementation, optimizer, precision, options = ROWS[row]
    tuned = row.startswith("LoRA")
    module = Language(implementation, optimizer, tuned)
    rule = {"which": {"*.lora_*": False}, "score": "magnitude"} if tuned else {}
    ticket = EarlyBirdTicket(0.7, every=1, draw_by=2, **rule)
    strategy: Any = AxoSparseStrategy()
    if ranks > 1:
        options = {
            "g_inter": ranks,
            "microbatches": 2,
            "pipeline": module.layers,
        } | options
        strategy = AxoSparseStrategy(**options)
    run = trainer(
        strategy,
        ranks,
        callbacks=[ticket],
        precision=precision,
        max_epochs=1,
        use_distributed_sampler=False,
    )
    generator = torch.Generator().manual_seed(3)
    samples = BATCH * STEPS - ("uneven" in row)
    ids = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator)
    wide = Tensor.double if precision == "64-true" else Tensor.float
    with mock.patch.object(Tensor, "float", wide):
        run.fit(module, share(run, ids, BATCH))
    return recorded(run, module)


def on_two_ranks() -> dict[str, Any]:
    """The records of every row and, where experts are passed by, of every optimizer and grid."""
    passed = {
        (optimizer, grid): pass_experts(optimizer, 2, options)
        for optimizer in STEPPED
        for grid, options in GRIDS.items()
    }
    return {"rows": {row: train(row, 2) for row in ROWS}, "passed": passed}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_pruned_experts_train_on_ranks_as_on_one_process(row: str, runs: Any) -> None:
    expected = train(row, 1)
    pruned = [name for name in expected.weights if name.endswith(("_proj", "_proj.weight"))]
    kept = sum(int(expected.weights[name].count_nonzero()) for name in pruned)
    assert kept < 0.5 * sum(expected.weights[name].numel() for name in pruned)
    bound = 1e-12 if ROWS[row][2] == "64-true" else 1e-5
    for records in runs:
        found = records["rows"][row]
        if ROWS[row][3].get("g_inter") == 1:  # a rank's loss is that of its share of the batch
            found.losses = expected.losses
        assert difference(expected, found) <= bound


class Absent(nn.Module):
    """Experts that samples of negative ``x[0]`` pass by; one of three never gets any."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(0.1 * torch.randn(3, WIDTH, WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sums = self.shared(x)
        for expert, tokens in enumerate([x[:, 0] > 0, (x[:, 0] > 0) & (x[:, 1] > 0)]):
            chosen = tokens.nonzero().squeeze(1)
            if len(chosen):  # no product, so no gradient of this rank or micro-batch, without any
                found = nn.functional.linear(x[chosen], self.stack[expert])
                sums = sums.index_add(0, chosen, found + self.experts[expert](x[chosen]))
        return x + nn.functional.pad(sums[:, 2:], (2, 0))  # what chooses experts stays as it is


class Passed(L.LightningModule):
    """Two such layers."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.model, self.optimizer = nn.Sequential(Absent(), Absent()), optimizer
        self.gradients: dict[str, list[bool | None]] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Noting(Passed):
    """Notes which gradients the optimizer steps with, and which of them are zero."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                gradient = parameter.grad
                seen = None if gradient is None else bool(gradient.any())
                self.gradients.setdefault(name, []).append(seen)


STEPPED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}
GRIDS: dict[str, dict[str, Any]] = {
    "stages": {"g_inter": 2, "microbatches": 2},
    "replicas": {"microbatches": 2},
    "shards": {"microbatches": 2, "shard_optimizer": True},
}


def pass_experts(
    optimizer: str, ranks: int, options: dict[str, Any]
) -> tuple[Record, dict[str, Any]]:
    """Train where one sample of four goes to experts, and none in the third batch of five."""
    L.seed_everything(0, verbose=False)
    # What reads gradients keeps replicas from dividing them.
    module = (Passed if "shard_optimizer" in options else Noting)(STEPPED[optimizer])
    ticket = EarlyBirdTicket(0.7, score="magnitude", every=1, draw_by=2)
    run = trainer(
        AxoSparseStrategy(**options),
        ranks,
        callbacks=[ticket],
        precision="64-true",
        max_epochs=2,
        use_distributed_sampler=False,
    )
    samples = torch.randn(BATCH * STEPS, WIDTH, generator=torch.Generator().manual_seed(3))
    numbers = torch.arange(len(samples))
    samples[:, 0] = torch.where((numbers % BATCH == 0) & (numbers // BATCH != 2), 1.0, -1.0)
    run.fit(module, share(run, samples, BATCH))
    return recorded(run, module), module.gradients


def test_ranks_and_micro_batches_without_a_token_step_as_one_process(runs: Any) -> None:
    expected = {optimizer: pass_experts(optimizer, 1, {}) for optimizer in STEPPED}
    for records in runs:
        for (optimizer, grid), (record, gradients) in records["passed"].items():
            one, its_gradients = expected[optimizer]
            if grid != "stages":  # a rank's loss is that of its share of the batch
                record.losses = one.losses
            assert difference(one, record) <= 1e-12, (optimizer, grid)
            for name, seen in gradients.items():
                assert seen == its_gradients[name], (optimizer, grid, name)
    _, gradients = expected["SGD"]
    assert gradients["model.0.stack"] == gradients["model.1.stack"]
    assert gradients["model.0.stack"][:5] == [True, True, None, True, True]
    assert set(gradients["model.0.experts.2.weight"]) == {None}
