"""Tensor parallelism gives the same numbers as one process, on every grid.

All rows of one number of ranks run in one job, because starting ranks takes longer than a row.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset

from lightning_axosparse import AxoSparseStrategy, TensorParallel
from tests.parity.cases import (
    Record,
    difference,
    loaded,
    mean_losses,
    own_attributes,
    recorded,
    share,
    trainer,
)
from tests.ranks import PATIENCE, run_ranks

# Jobs of four and eight ranks take minutes where two cores run several.
pytestmark = pytest.mark.timeout(PATIENCE)

VOCABULARY, WIDTH, LAYERS, LENGTH, HEADS = 24, 16, 2, 6, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        # A bias of keys changes no output: its gradient is rounding, of which AdamW makes steps.
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


def plan(sequence: bool) -> dict[str, Any]:
    """Column- and row-wise; with ``sequence``, norms run on a part of each sequence."""
    columns = ("attention.query", "attention.key", "attention.value", "up")
    rows = ("attention.out", "down")
    if not sequence:
        return {
            **{name: ColwiseParallel() for name in columns},
            **{name: RowwiseParallel() for name in rows},
        }
    whole = {"desired_input_layouts": (Replicate(),), "input_layouts": (Shard(1),)}
    return {
        "norm": SequenceParallel(),
        "norm_2": SequenceParallel(),
        "attention": PrepareModuleInput(**whole),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        **{name: ColwiseParallel() for name in columns[:3]},
        **{name: RowwiseParallel(output_layouts=Shard(1)) for name in rows},
    }


class Language(L.LightningModule):
    """Such blocks between an embedding and a head."""

    def __init__(self, blocks: Iterable[nn.Module], slow: bool = False) -> None:
        super().__init__()
        self.slow = slow
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            if self.slow:
                time.sleep(random.SystemRandom().random() * 0.004)
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, ids: Tensor) -> Tensor:
        logits = self(ids[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = self.loss(ids)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, ids: Tensor, index: int) -> None:
        self.log("val_loss", self.loss(ids), sync_dist=True)

    def predict_step(self, ids: Tensor, index: int) -> Tensor:
        return self(ids)


class Own(Language):
    """A transformer as it is written for Lightning's ModelParallelStrategy."""

    def __init__(self, sequence: bool = False, slow: bool = False) -> None:
        super().__init__((Block() for _ in range(LAYERS)), slow)
        self.sequence = sequence

    def configure_model(self) -> None:
        if self.device_mesh is None:
            return
        mesh, self.replicas = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        for block in self.blocks:
            parallelize_module(block, mesh, plan(self.sequence))
        if self.sequence:
            outer: dict[str, Any] = {
                "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            }
            parallelize_module(self, mesh, outer)

    def configure_optimizers(self) -> Any:
        if self.dtype == torch.float64:
            return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        # With a larger eps than usual it amplifies less of the rounding of small gradients.
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-6)


class Hooked(Own):
    """Logs norms of gradients, and clips by a rule of its own, which reads a layer's weight."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict({name: float(norm) for name, norm in grad_norm(self, 2).items()})

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        gradient = self.blocks[0].up.weight.grad
        assert gradient is not None
        self.clip_gradients(optimizer, float(gradient.norm(2)) / 2, "norm")


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "use_cache": False,
    "experts_implementation": "eager",
}


class Llama(Own):
    """Hugging Face's Llama with grouped queries, whose plan the strategy takes."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        from transformers import LlamaConfig, LlamaForCausalLM

        self.network = LlamaForCausalLM(LlamaConfig(**SIZES))

    configure_model = L.LightningModule.configure_model

    def forward(self, ids: Tensor) -> Tensor:
        return self.network(ids).logits


class Mixtral(Llama):
    """Attention is split as its authors say, and experts are whole on each rank."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        self.network = MixtralForCausalLM(config)


class Qwen(Llama):
    """Besides, queries and keys are normalized head by head, and one layer has no experts."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
        config = Qwen3MoeConfig(**SIZES, **experts, mlp_only_layers=[1], head_dim=4)
        self.network = Qwen3MoeForCausalLM(config)


class Tokens(Dataset):
    def __init__(self, seed: int, samples: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[index]


def loaders(run: L.Trainer) -> tuple[DataLoader, DataLoader]:
    """What a replica trains on, and what it validates on."""
    return share(run, Tokens(1, 32), 8), share(run, Tokens(2, 16), 8)


# Lightning's own sampler would shuffle where there are replicas.
FIXED: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False}
OWN: dict[str, Any] = {"pipeline": "blocks"}
LLAMA: dict[str, Any] = {"pipeline": "network.model.layers"}
# Row: module, strategy, trainer.
ROWS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "own, float64": (Own, OWN, {"precision": "64-true"}),
    "own, float32": (Own, OWN, {}),
    "sequence parallel": (lambda: Own(sequence=True), OWN, {"precision": "64-true"}),
    "recomputed": (Own, {**OWN, "recompute": 1}, {"precision": "64-true"}),
    "clipped": (Own, OWN, {"precision": "64-true", "gradient_clip_val": 0.05}),
    "gradients in hooks": (Hooked, OWN, {"precision": "64-true"}),
    "accumulated": (Own, OWN, {"precision": "64-true", "accumulate_grad_batches": 2}),
    "Llama, float64": (Llama, LLAMA, {"precision": "64-true"}),
    "Llama, float32": (Llama, LLAMA, {}),
    "Mixtral": (Mixtral, LLAMA, {"precision": "64-true"}),
    "Qwen": (Qwen, LLAMA, {"precision": "64-true"}),
    "slow ranks": (lambda: Own(slow=True), OWN, {"precision": "64-true", "max_epochs": 3}),
}


def run(row: str, strategy: Any, ranks: int, resumes: Path | None = None, **options: Any) -> Record:
    make, _, settings = ROWS[row]
    L.seed_everything(0 if resumes is None else 1, verbose=False)
    module = make()
    fit = trainer(strategy, ranks, **{**FIXED, **settings, **options})
    fit.fit(module, *loaders(fit), ckpt_path=resumes)
    return recorded(fit, module)


def on_grid(rows: Iterable[str], g_data: int) -> dict[str, Record]:
    """Train on two stages of two ranks, with so many replicas."""
    found = {}
    for row in rows:
        strategy = AxoSparseStrategy(2, 2, tensor_parallel=2, **ROWS[row][1])
        found[row] = run(row, strategy, 4 * g_data)
    return found


def on_four_ranks(folder: Path) -> dict[str, Any]:
    def strategy() -> AxoSparseStrategy:
        return AxoSparseStrategy(2, 2, tensor_parallel=2, **OWN)

    half_way(folder, strategy(), 4)
    found = {"predicted": predicted(strategy(), 4), "facts": facts(strategy(), 4)}
    for how, stages in (("resumed", 2), ("resumed elsewhere", 1)):
        grid = AxoSparseStrategy(stages, 2, tensor_parallel=4 // stages, **OWN)
        found[how] = resumed(folder, grid, 4)
    return {**found, "rows": on_grid(ROWS, 1)}


class Saves(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, run: L.Trainer, *_: Any) -> None:
        run.save_checkpoint(self.folder / "half.ckpt")


def half_way(folder: Path, strategy: Any, ranks: int) -> None:
    """Train the first of two epochs, and save."""
    run("own, float64", strategy, ranks, max_epochs=1, callbacks=[Saves(folder)])


def resumed(folder: Path, strategy: Any, ranks: int) -> Record:
    """The second epoch, from a checkpoint."""
    return run("own, float64", strategy, ranks, folder / "half.ckpt")


def predicted(strategy: Any, ranks: int) -> list[Tensor]:
    L.seed_everything(0, verbose=False)
    return trainer(strategy, ranks, precision="64-true").predict(
        Own(), DataLoader(Tokens(3, 16), 8)
    )


class Looks(L.Callback):
    """Notes what a rank keeps and what hooks see."""

    def on_train_batch_end(self, run: L.Trainer, module: Any, *_: Any) -> None:
        held = run.strategy.local_parameters()
        self.kept = {name: tuple(p.shape) for name, p in held.items()}
        self.whole = {n: tuple(p.shape) for n, p in run.strategy.whole_parameters()}
        self.shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
        self.kept_by_torch = _get_work_registry_size()


def facts(strategy: Any, ranks: int) -> dict[str, Any]:
    looks = Looks()
    run("sequence parallel", strategy, ranks, max_steps=1, callbacks=[looks])
    return own_attributes(looks)


STEPS = 400


class Jittery(L.LightningModule):
    """Layers before which any rank may sleep."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))
        self.layers = nn.ModuleList(pairs)
        self.random = random.SystemRandom()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = batch
        for layer in self.layers:
            if self.random.random() < 0.05:
                time.sleep(self.random.random() * 0.01)
            x = layer(x)
        return (x - batch.flip(1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def jittery(strategy: Any, ranks: int) -> list[float]:
    L.seed_everything(0, verbose=False)
    fit = trainer(strategy, ranks, max_epochs=1, precision="64-true")
    module = Jittery()
    fit.fit(module, DataLoader(torch.randn(4 * STEPS, 4), 4))
    return recorded(fit, module).losses


def jittery_ranks() -> list[float]:
    pairs = TensorParallel(2, {"layers.*.0": ColwiseParallel(), "layers.*.1": RowwiseParallel()})
    return jittery(AxoSparseStrategy(2, 2, tensor_parallel=pairs, pipeline="layers"), 4)


@pytest.mark.slow
def test_many_steps_with_sleeping_ranks_neither_hang_nor_differ() -> None:
    expected = jittery("auto", 1)
    assert expected[-1] < expected[0] / 4
    for losses in run_ranks(4, jittery_ranks):
        assert losses == pytest.approx(expected, abs=1e-12)


def on_two_ranks() -> Record:
    return run("own, float64", AxoSparseStrategy(1, 2, tensor_parallel=2, **OWN), 2)


def test_two_ranks_share_layers_and_train_as_one_process() -> None:
    expected = run("own, float64", "auto", 1)
    for record in run_ranks(2, on_two_ranks):
        assert difference(record, expected) <= 1e-10


@pytest.fixture(scope="module")
def alone() -> dict[str, Record]:
    return {row: run(row, "auto", 1) for row in ROWS}


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(4, on_four_ranks, folder), folder


REPLICATED = ("own, float64", "recomputed", "clipped")


@pytest.mark.slow
def test_two_replicas_of_two_stages_train_as_one_process(alone: dict[str, Record]) -> None:
    compare(run_ranks(8, on_grid, REPLICATED, 2), alone)


@pytest.mark.slow
def test_two_stages_of_two_ranks_train_as_one_process(
    alone: dict[str, Record], two_by_two: Any
) -> None:
    compare([found["rows"] for found in two_by_two[0]], alone)


def compare(ranks: list[dict[str, Record]], alone: dict[str, Record]) -> None:
    for row in ranks[0]:
        tolerance = 1e-10 if "precision" in ROWS[row][2] else 1e-5
        losses = mean_losses(found[row] for found in ranks)
        for found in ranks:
            found[row].losses = losses
            assert difference(found[row], alone[row]) <= tolerance, row


@pytest.mark.slow
def test_a_checkpoint_is_that_of_one_process_and_resumes_on_other_grids(
    two_by_two: Any, tmp_path: Path
) -> None:
    ranks, folder = two_by_two
    half_way(tmp_path, "auto", 1)
    expected = resumed(tmp_path, "auto", 1)
    ours, theirs = loaded(folder / "half.ckpt", tmp_path / "half.ckpt")
    torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], atol=1e-12, rtol=0)
    mine, other = (saved["optimizer_states"][0] for saved in (ours, theirs))
    torch.testing.assert_close(mine["state"], other["state"], atol=1e-12, rtol=0)
    for found in ranks:
        for how in ("resumed", "resumed elsewhere"):
            assert difference(found[how], expected) <= 1e-10


@pytest.mark.slow
def test_every_rank_gets_the_predictions_of_one_process(two_by_two: Any) -> None:
    expected = predicted("auto", 1)
    for found in two_by_two[0]:
        torch.testing.assert_close(found["predicted"], expected, atol=1e-12, rtol=0)


@pytest.mark.slow
def test_a_rank_keeps_its_part_of_each_weight_and_hooks_get_all_of_it(two_by_two: Any) -> None:
    shapes = {name: tuple(p.shape) for name, p in Own().named_parameters()}
    for rank, found in enumerate(two_by_two[0]):
        facts, stage = found["facts"], 1 - rank % 2  # The first rank has the last stage.
        assert facts["whole"] == shapes
        assert facts["kept"][f"blocks.{stage}.up.weight"] == (2 * WIDTH, WIDTH)
        assert facts["kept"][f"blocks.{stage}.down.weight"] == (WIDTH, 2 * WIDTH)
        assert facts["kept"][f"blocks.{stage}.down.bias"] == (WIDTH,)
        assert facts["kept_by_torch"] == 0  # results of collectives that nobody has waited for
        # Layers of other stages show their whole shape.
        assert facts["shapes"][f"blocks.{1 - stage}.up.weight"] == (4 * WIDTH, WIDTH)
