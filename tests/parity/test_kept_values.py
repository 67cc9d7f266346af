"""Runs that multiply with the kept values after the draw: one process, any grid, and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from mpi4py import MPI
from torch import Tensor, nn

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from lightning_axosparse.callbacks import weight_pruning
from lightning_axosparse.sparse.backend import Backend, Processor
from lightning_axosparse.sparse.module.parameters import sparse_parameters
from lightning_axosparse.sparse.ops import products as kept_products
from tests.parity.cases import CLASSES, FEATURES, Net, Record, difference, fit, trainer
from tests.ranks import run_ranks

EPOCHS, DRAW, WIDTH = 3, 1, 80
GRIDS = {"2x1": (2, 1), "1x2": (1, 2), "2x2": (2, 2)}


class Wide(Net):
    """The same module, wide enough for segments of its own in each row."""

    def __init__(self) -> None:
        super().__init__(outer=True)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Tanh(),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )


class Outputs(nn.Module):
    """The outputs of a recurrent layer, without its last state."""

    def __init__(self, layer: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)[0]
        return outputs


class Recurrent(Net):
    """The same module with layers of GRU and LSTM."""

    def __init__(self) -> None:
        super().__init__(outer=True)
        self.model = nn.Sequential(
            nn.Sequential(nn.Linear(FEATURES, 3 * WIDTH), nn.Unflatten(1, (3, WIDTH))),
            Outputs(nn.GRU(WIDTH, WIDTH, 2, batch_first=True)),
            Outputs(nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)),
            nn.Sequential(nn.Flatten(), nn.Linear(6 * WIDTH, CLASSES)),
        )


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """A list that grows with each product to gradients of kept values."""
    calls, function = list[int](), kept_products.sddmm

    def counted(*args: Any) -> Any:
        calls.append(1)
        return function(*args)

    with patch.object(kept_products, "sddmm", counted):
        yield calls


def train(
    strategy: Any,
    ranks: int,
    folder: Path | None,
    compute: str = "auto",
    module: Callable[[], Net] = Wide,
    **options: Any,
) -> tuple[Record, int]:
    """The record of a run, and how often this rank multiplied to gradients of kept values."""
    L.seed_everything(0, verbose=False)
    ticket = EarlyBirdTicket(0.8, every="1 epoch", draw_by=f"{DRAW} epochs", compute=compute)
    checkpoints = [] if folder is None else [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    run = trainer(
        strategy,
        ranks,
        max_epochs=EPOCHS,
        callbacks=[ticket, *checkpoints],
        enable_checkpointing=folder is not None,
    )
    with counted_products() as calls:
        return fit(run, module(), **options), len(calls)


def train_on(grid: str, folder: Path, **options: Any) -> tuple[Record, int]:
    stages, replicas = GRIDS[grid]
    return train(pipeline(stages, 4 // replicas), stages * replicas, folder, **options)


def pipeline(ranks: int, microbatches: int) -> AxoSparseStrategy:
    """Two stages on two ranks, or on one: bits depend on the samples of a product."""
    transport = "mpi" if ranks == 2 else "loopback"
    return AxoSparseStrategy(g_inter=2, microbatches=microbatches, transport=transport)


def on_one_rank(**options: Any) -> tuple[Record, int]:
    return train(pipeline(1, 4), 1, None, **options)


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """What a rank does on each grid, from the middle of "2x1", and in bfloat16."""
    middle = folder / "2x1" / f"epoch={DRAW}.ckpt"
    return {
        **{grid: train_on(grid, folder / grid) for grid in ("2x1", "1x2")},
        "resumed": train_on("2x1", folder / "again", ckpt_path=middle),
        "recurrent": train_recurrent(2),
        "mixed": mixed_rank(folder / "mixed"),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def runs(
    two: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[Record, int]]]:
    """What each rank of a grid did, and of the grid that goes on from the middle of "2x1"."""
    found = {run: [rank[run] for rank in two] for run in ("2x1", "1x2", "resumed")}
    return {**found, "2x2": run_ranks(4, train_on, "2x2", tmp_path_factory.mktemp("four"))}


def assert_goes_on(rest: Record, whole: Record) -> None:
    """To the same bits."""
    assert rest.losses == whole.losses[-len(rest.losses) :]
    torch.testing.assert_close(rest.weights, whole.weights, rtol=0, atol=0)


def assert_same_bits(one: Record, other: Record) -> None:
    assert len(one.losses) == len(other.losses)
    assert_goes_on(one, other)


def test_dense_products_are_those_of_the_kept_values_but_for_rounding(one_rank: Any) -> None:
    kept, products = one_rank
    dense, none = on_one_rank(compute="dense")
    assert products > 0
    assert none == 0
    assert difference(kept, dense) < 5e-6
    assert kept.losses != dense.losses


@pytest.fixture(scope="module")
def one_rank() -> tuple[Record, int]:
    return on_one_rank()


def test_every_rank_multiplies_with_kept_values(runs: dict[str, list[Any]]) -> None:
    assert all(products > 0 for ranks in runs.values() for _, products in ranks)


def test_a_pipeline_has_the_bits_of_one_rank(one_rank: Any, runs: dict[str, list[Any]]) -> None:
    assert_same_bits(runs["2x1"][0][0], one_rank[0])


def test_two_pipelines_have_the_bits_of_two_replicas(runs: dict[str, list[Any]]) -> None:
    assert_same_bits(runs["2x2"][0][0], runs["1x2"][0][0])


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(runs: dict[str, list[Any]]) -> None:
    assert_goes_on(runs["resumed"][0][0], runs["2x1"][0][0])


def train_recurrent(ranks: int) -> Record:
    return train(pipeline(ranks, 4), ranks, None, module=Recurrent)[0]


def test_recurrent_layers_on_a_pipeline(two: list[dict[str, Any]]) -> None:
    expected = train_recurrent(1)
    for found in two:
        assert_same_bits(found["recurrent"], expected)


def train_mixed(
    processor: Processor, ranks: int, ratio: float, folder: Path, **options: Any
) -> tuple[Record, int, set[Backend]]:
    """A run in bfloat16 on such a processor: record, products with kept values, ways of weights."""
    backend: set[Backend] = set()

    def note_ways(_: L.Trainer, module: L.LightningModule) -> None:
        stored = sparse_parameters(module).values()
        backend.update(each.form.backend for each in stored if each.form is not None)

    L.seed_everything(0, verbose=False)
    run = trainer(
        AxoSparseStrategy(g_inter=2, microbatches=4 // ranks, transport="loopback"),
        ranks,
        max_epochs=EPOCHS,
        callbacks=[
            EarlyBirdTicket(ratio, floor=1.0, every="1 epoch", draw_by=f"{DRAW} epochs"),
            ModelCheckpoint(folder, "{epoch}", save_top_k=-1),
            LambdaCallback(on_train_end=note_ways),
        ],
        enable_checkpointing=True,
        precision="bf16-mixed",
    )
    chosen = patch.object(weight_pruning, "this_processor", lambda: processor)
    with counted_products() as calls, chosen:
        record = fit(run, Wide(), **options)
    return record, len(calls), backend


def mixed_rank(folder: Path) -> dict[str, tuple[Record, int, set[Backend]]]:
    """What two replicas do in bfloat16 whose processors are of two kinds, then of one kind."""
    two: list[Processor] = ["float32", "bfloat16"]
    own, middle = two[MPI.COMM_WORLD.rank], folder / "few" / f"epoch={DRAW}.ckpt"
    return {
        "few": train_mixed(own, 2, 0.9, folder / "few"),
        "more": train_mixed(own, 2, 0.72, folder / "more"),
        "resumed": train_mixed("float32", 2, 0.9, folder / "again", ckpt_path=middle),
        "matrix": train_mixed("matrix", 2, 0.9, folder / "matrix", ckpt_path=middle),
    }


@pytest.fixture(scope="module")
def mixed(two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found["mixed"] for found in two]


def test_ranks_choose_for_the_processor_on_which_kept_values_gain_least(mixed: Any) -> None:
    for found in mixed:
        assert found["few"][2] == {Backend("auto", "bfloat16")}
        # A "float32" processor alone would multiply with them.
        assert found["more"][2] == {Backend("samo", "bfloat16")}
        assert found["few"][1] > 0


def test_a_resumed_run_goes_on_in_the_ways_of_the_checkpoint(mixed: Any) -> None:
    for found in mixed:
        record, products, backend = found["resumed"]
        whole, _, _ = found["few"]
        assert backend == {Backend("auto", "bfloat16")}
        assert products > 0
        assert_goes_on(record, whole)


def test_a_resumed_run_leaves_kept_values_where_a_rank_would_lose_by_them(mixed: Any) -> None:
    for found in mixed:
        record, products, backend = found["matrix"]
        assert backend == {Backend("samo", "matrix")}
        assert products == 0
        assert difference(record, found["resumed"][0]) < 0.05
