"""Weights that ranks share are pruned as on one process: by the same masks, and to the same values.

All rows of one number of ranks run in one job, because starting ranks takes longer than a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, GradualPruning, Ticket
from tests.parity.cases import Record, difference, mean_losses, recorded, trainer
from tests.parity.test_tensor_parallel import FIXED, LLAMA, OWN, Hooked, Llama, Own, loaders
from tests.ranks import PATIENCE, run_ranks

# Jobs of four and eight ranks take minutes where two cores run several.
pytestmark = pytest.mark.timeout(PATIENCE)

RATIO, EPOCHS = 0.6, 3


class Adam(Own):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


@dataclass
class Kept:
    """What a rank keeps after the last step, in entries, and the bytes that it has reduced."""

    sizes: dict[str, tuple[int, ...]]
    states: list[dict[str, int]]
    reduced: int
    whole: dict[str, tuple[int, ...]]


class Counts(L.Callback):
    def on_train_end(self, run: L.Trainer, *_: Any) -> None:
        held = run.strategy.local_parameters()
        state = run.optimizers[0].state
        self.kept = Kept(
            {name: tuple(parameter.shape) for name, parameter in held.items()},
            [{key: value.numel() for key, value in state[p].items()} for p in held.values()],
            run.strategy.reduced_bytes,
            {name: tuple(p.shape) for name, p in run.strategy.whole_parameters()},
        )


GRADUAL = partial(GradualPruning, RATIO, start=3, every=3, end=9)
EARLY = partial(EarlyBirdTicket, RATIO, every=2, draw_by=5)
F64: dict[str, Any] = {"precision": "64-true"}
# Row: module, strategy, callback, trainer.
ROWS: dict[str, tuple[Any, dict[str, Any], Callable[[], L.Callback], dict[str, Any]]] = {
    "gradual": (Own, OWN, GRADUAL, F64),
    "by saliency, clipped": (Adam, OWN, GRADUAL, {**F64, "gradient_clip_val": 0.05}),
    "early bird": (Own, OWN, EARLY, F64),
    "sequence parallel": (lambda: Own(sequence=True), OWN, GRADUAL, F64),
    "gradients in hooks": (Hooked, OWN, GRADUAL, F64),
    "resident copies": (Adam, OWN, partial(GRADUAL, compute="samo"), F64),
    "Llama": (Llama, LLAMA, GRADUAL, F64),
}

Found = tuple[Record, Ticket, Kept]
Row = tuple[Any, dict[str, Any], Callable[[], L.Callback], dict[str, Any]]


def run(row: Row, strategy: Any, ranks: int, folder: Path | None = None, **resumed: Any) -> Found:
    make, _, pruning, settings = row
    L.seed_everything(0, verbose=False)
    # Loaded as they are saved: Lightning loads weights before precision converts the module.
    module, draw, counts = make().double(), pruning(), Counts()
    callbacks = [draw, counts]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, "{epoch}", save_top_k=-1))
    options = {**FIXED, "max_epochs": EPOCHS, "enable_checkpointing": folder is not None}
    fit = trainer(strategy, ranks, **{**options, **settings}, callbacks=callbacks)
    fit.fit(module, *loaders(fit), weights_only=False, **resumed)
    return recorded(fit, module), draw.ticket, counts.kept


def on_grid(rows: Iterable[str], g_data: int) -> dict[str, Found]:
    """Train on two stages of two ranks, with so many replicas."""
    found = {}
    for row in rows:
        strategy = AxoSparseStrategy(2, 2, tensor_parallel=2, **ROWS[row][1])
        found[row] = run(ROWS[row], strategy, 4 * g_data)
    return found


def on_four_ranks(folder: Path) -> dict[str, Any]:
    """What one replica trains, what it resumes, and what a rank of two replicas keeps."""
    row, resumed = ROWS["by saliency, clipped"], {}
    run(row, AxoSparseStrategy(2, 2, tensor_parallel=2, **OWN), 4, folder)
    # While weights are pruned, and once the ticket is drawn; here, and on another grid.
    for epoch in (0, 1):
        for name, g_inter in (("here", 2), ("elsewhere", 1)):
            strategy = AxoSparseStrategy(g_inter, 2, tensor_parallel=4 // g_inter, **OWN)
            path = folder / f"epoch={epoch}.ckpt"
            resumed[f"{name}, {epoch}"] = run(row, strategy, 4, ckpt_path=path)
    replicas = AxoSparseStrategy(1, 2, tensor_parallel=2, **OWN)
    kept = run(ROWS["gradual"], replicas, 4)[2]
    return {"rows": on_grid(ROWS, 1), "resumed": resumed, "kept": kept}


@pytest.fixture(scope="module")
def alone() -> dict[str, Found]:
    return {row: run(case, AxoSparseStrategy(1, 2), 1) for row, case in ROWS.items()}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, on_four_ranks, tmp_path_factory.mktemp("checkpoints"))


REPLICATED = ("by saliency, clipped", "early bird", "sequence parallel")


@pytest.mark.slow
@pytest.mark.parametrize("g_data", [1, 2])
def test_shared_weights_are_pruned_as_on_one_process(
    g_data: int, alone: dict[str, Found], four: list[dict[str, Any]]
) -> None:
    ranks = [found["rows"] for found in four]
    if g_data == 2:
        ranks = run_ranks(8, on_grid, REPLICATED, 2)
    for row in ranks[0]:
        expected, ticket, _ = alone[row]
        assert ticket.sparsity == pytest.approx(RATIO, abs=1e-3)
        losses = mean_losses(found[row][0] for found in ranks)
        for found in ranks:
            record, drawn, _ = found[row]
            record.losses = losses
            assert drawn == ticket, row
            assert difference(record, expected) <= 1e-10, row


@pytest.mark.slow
def test_a_checkpoint_resumes_with_the_same_masks(
    alone: dict[str, Found], four: list[dict[str, Any]]
) -> None:
    expected, ticket, _ = alone["by saliency, clipped"]
    for found in four:
        for row, (record, drawn, _) in found["resumed"].items():
            assert drawn.masks == ticket.masks, row
            torch.testing.assert_close(record.weights, expected.weights, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_rank_keeps_the_kept_entries_of_its_parts_and_reduces_them_over_replicas(
    alone: dict[str, Found], four: list[dict[str, Any]]
) -> None:
    kept = [found["kept"] for found in four]
    _, ticket, whole = alone["gradual"]
    for name, (entries,) in ((n, s) for n, s in whole.sizes.items() if n in ticket.masks):
        mask = ticket.masks[name]
        by_rows = any(each in name for each in ("query", "key", "value", "up"))
        by_columns = any(each in name for each in ("out", "down"))
        parts = mask.chunk(2, 0 if by_rows else 1) if by_rows or by_columns else [mask]
        for rank, each in enumerate(kept):
            assert each.sizes[name] == (int(parts[rank % len(parts)].sum()),), name
        assert int(mask.sum()) == entries
    for each in kept:
        assert each.reduced == 8 * sum(torch.Size(shape).numel() for shape in each.sizes.values())
        for state, shape in zip(each.states, each.sizes.values(), strict=True):
            assert state == {"momentum_buffer": torch.Size(shape).numel()}
