"""Wrong gradients and hangs that users of other systems have reported do not happen here.

Each row is named by where it was reported. SGD shows what Adam hides: a gradient that is a multiple
of the right one. All rows of one number of ranks run in one job, as starting ranks takes longer.
"""

from __future__ import annotations

import random
import time
from statistics import fmean
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy, ExpertParallel, TensorParallel
from tests.parity import test_expert_parallel as experts
from tests.parity.cases import Record, difference, recorded, trainer
from tests.parity.test_tensor_parallel import FIXED, VOCABULARY, WIDTH, loader
from tests.ranks import run_ranks


class Block(nn.Module):
    """A perceptron that a tensor group splits, with biases, and experts, or neither."""

    def __init__(self, route: str | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mixed = None if route is None else experts.Block(experts.Experts, route)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return x if self.mixed is None else self.mixed(x)


class Language(experts.Own):
    """One expert layer for each route; None is a layer without experts."""

    def __init__(self, *routes: str | None) -> None:
        L.LightningModule.__init__(self)
        self.slow = False
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(route) for route in routes)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3)


class Norms(Language):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict({name: float(norm) for name, norm in grad_norm(self, 2).items()})


class Tuned(Language):
    """LoRA of PEFT on the experts, and on nothing else."""

    def __init__(self) -> None:
        super().__init__("best", "best")
        lora = LoraConfig(r=2, target_modules=r".*experts\.\d\.(up|down)", lora_alpha=8)
        self.blocks = get_peft_model(self.blocks, lora).base_model.model
        for name, parameter in self.blocks.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)


BEST = ("best", "best")
CLIPPED = {"gradient_clip_val": 0.05}
# Row: module, options of the Trainer.
ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Megatron 4851, vLLM 43547: a rank without a token": (lambda: Language("first", "first"), {}),
    "a layer that sends no token at all": (lambda: Language("none", "best"), {}),
    "a stage without experts": (lambda: Language("best", None), {}),
    "PyTorch 160285: twice the gradient": (lambda: Language(*BEST), {}),
    "DeepSpeed 8064, torchtitan 4245: gradients and biases once for each tensor rank": (
        lambda: Language(*BEST),
        {},
    ),
    "Megatron 5916: norms of gradients": (lambda: Norms(*BEST), CLIPPED),
    "Megatron-Bridge 1363: LoRA on experts": (Tuned, CLIPPED),
}
PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
SPREAD: dict[str, Any] = {
    "expert_parallel": ExpertParallel(2, "blocks.*.mixed.experts"),
    "pipeline": "blocks",
}


def run(row: str, strategy: Any, ranks: int = 1, g_data: int = 1) -> Record:
    make, options = ROWS[row]
    L.seed_everything(0, verbose=False)
    module = make()
    fit = trainer(strategy, ranks, **{**FIXED, "precision": "64-true", **options})
    replica = 0
    if ranks > 1:
        from mpi4py import MPI

        replica = MPI.COMM_WORLD.rank * g_data // ranks
    fit.fit(module, loader(1, g_data, 3, replica), loader(2, g_data, 2, replica))
    return recorded(fit, module)


def on_grid(g_inter: int, g_tensor: int) -> dict[str, Record]:
    options = {**SPREAD, "tensor_parallel": TensorParallel(g_tensor, PLAN)}
    ranks = 2 * g_inter * g_tensor
    return {row: run(row, AxoSparseStrategy(g_inter, 2, **options), ranks, 2) for row in ROWS}


@pytest.fixture(scope="module")
def alone() -> dict[str, Record]:
    return {row: run(row, "auto") for row in ROWS}


@pytest.fixture(scope="module", params=[(2, 1), (1, 2), (2, 2)], ids=str)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Record]]:
    g_inter, g_tensor = request.param
    return run_ranks(2 * g_inter * g_tensor, on_grid, g_inter, g_tensor)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_reported(row: str, ranks: list[dict[str, Record]], alone: dict[str, Record]) -> None:
    # A replica's loss is that of its part of the batch.
    losses = [fmean(each) for each in zip(*(found[row].losses for found in ranks), strict=True)]
    for found in ranks:
        found[row].losses = losses
        assert difference(found[row], alone[row]) <= 1e-12


STEPS = 120


class Sleepy(Language):
    """Any rank may sleep before any layer."""

    def forward(self, ids: Tensor) -> Tensor:
        own, x = random.SystemRandom(), self.embedding(ids)
        for block in self.blocks:
            if own.random() < 0.1:
                time.sleep(own.random() * 0.01)
            x = block(x)
        return self.head(self.norm(x))


def sleepy(steps: int, g_data: int = 1, **options: Any) -> list[float]:
    L.seed_everything(0, verbose=False)
    replica = 0
    strategy: Any = "auto"
    if options:
        from mpi4py import MPI

        replica = MPI.COMM_WORLD.rank * g_data // MPI.COMM_WORLD.size
        strategy = AxoSparseStrategy(**options)
    ranks = 4 * g_data if options else 1
    fit = trainer(strategy, ranks, **{**FIXED, "max_epochs": 1, "precision": "64-true"})
    module = Sleepy(*BEST)
    ids = torch.randint(VOCABULARY, (4 * steps, 5))
    each = 4 // g_data
    mine = ids.view(steps, g_data, each, 5)[:, replica].flatten(0, 1)
    fit.fit(module, DataLoader(mine, each))
    return recorded(fit, module).losses


def sleepy_ranks(steps: int) -> list[float]:
    split = TensorParallel(2, PLAN)
    options = {**SPREAD, "g_inter": 2, "microbatches": 2, "tensor_parallel": split}
    return sleepy(steps, 2, **options)


@pytest.mark.slow
def test_megatron_5749_no_hang_after_many_steps() -> None:
    """Run it by hand with 2,000 steps after changes of who decides, or of exchanges."""
    expected = sleepy(STEPS)
    found = run_ranks(8, sleepy_ranks, STEPS)
    losses = [fmean(each) for each in zip(*found, strict=True)]
    assert losses == pytest.approx(expected, abs=1e-10)
