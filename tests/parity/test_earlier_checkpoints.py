"""After a pruned fit, a checkpoint from before the ticket loads with all of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, GradualPruning
from tests.parity.cases import BATCHES, EPOCHS, Plain, loader, trainer, whole_state
from tests.ranks import run_ranks

CALLBACKS: dict[str, Any] = {
    "gradual": lambda: GradualPruning(0.7, start=2, end=2 * BATCHES + 2, every=2),
    "early bird": lambda: EarlyBirdTicket(0.5, every=3, draw_by=BATCHES + 3, threshold=1e-9),
}
GRIDS: dict[str, dict[str, Any]] = {
    "one stage": {},
    "two stages": {"g_inter": 2},
    "loopback": {"g_inter": 2, "transport": "loopback"},
}


def results(name: str, grid: str, folder: Path) -> dict[str, Any]:
    """Train, test each epoch's checkpoint, and resume from the first one, by the same objects."""
    L.seed_everything(0, verbose=False)
    callback, module = CALLBACKS[name](), Plain().double()
    saved = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    ranks = 2 if grid == "two stages" else 1
    run = trainer(
        AxoSparseStrategy(**GRIDS[grid]),
        ranks,
        precision="64-true",
        callbacks=[callback, saved],
        enable_checkpointing=True,
    )
    run.fit(module, loader(1))
    ticket, weights = callback.ticket, whole_state(run, module)
    files = [folder / f"epoch={epoch}.ckpt" for epoch in range(EPOCHS)]
    assert ticket is not None
    tested = [run.test(module, loader(2), path, verbose=False)[0]["test_loss"] for path in files]
    assert callback.ticket == ticket, "evaluation leaves the callback as it is"
    run.fit(module, loader(1), ckpt_path=files[0], weights_only=False)
    again = whole_state(run, module)
    same = [torch.equal(again[key], value) for key, value in weights.items()]
    run = trainer(AxoSparseStrategy(**GRIDS[grid]), ranks, precision="64-true", max_epochs=1)
    run.fit(module, loader(1))
    dense = all((weight != 0).all() for weight in whole_state(run, module).values())
    return {"tested": tested, "again": all(same) and callback.ticket == ticket, "dense": dense}


def losses_of_files(folder: Path) -> list[float]:
    """The test loss of the weights in each file."""
    losses = []
    for epoch in range(EPOCHS):
        module = Plain().double()
        file = torch.load(folder / f"epoch={epoch}.ckpt", weights_only=False)
        module.load_state_dict(file["state_dict"])
        run = trainer(precision="64-true")
        losses.append(run.test(module, loader(2), verbose=False)[0]["test_loss"])
    return losses


def searched(grid: str, file: Path) -> tuple[dict[int, float], int]:
    """Fit twice without a draw, and save between; the distances and the window in the file."""
    L.seed_everything(0, verbose=False)
    callback = EarlyBirdTicket(0.5, every=1, draw_by=None, threshold=1e-9, window=3)
    ranks = 2 if grid == "two stages" else 1
    settings = {"precision": "64-true", "max_epochs": 1, "callbacks": [callback]}
    run = trainer(AxoSparseStrategy(**GRIDS[grid]), ranks, **settings)
    module = Plain().double()
    run.fit(module, loader(1))
    run.save_checkpoint(file)
    state = torch.load(file, weights_only=False)["callbacks"][callback.state_key]
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(1))
    return callback.distances, sum(len(masks["bits"]) for masks in state["window"])


def test_a_search_goes_on_in_the_next_fit(tmp_path: Path) -> None:
    distances, saved = searched("one stage", tmp_path / "a.ckpt")
    assert len(distances) == 2 * BATCHES - 1
    for grid in ("loopback", "two stages"):
        found, window = searched(grid, tmp_path / "a.ckpt")
        assert found == pytest.approx(distances, abs=1e-9)
        assert window == saved > 0


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", CALLBACKS)
def test_test_and_resume_from_before_the_ticket(name: str, grid: str, tmp_path: Path) -> None:
    if grid == "two stages":
        found = run_ranks(2, results, name, grid, tmp_path)
    else:
        found = [results(name, grid, tmp_path)]
    expected = losses_of_files(tmp_path)
    assert len({round(loss, 9) for loss in expected}) == EPOCHS
    for each in found:
        assert each["tested"] == pytest.approx(expected, rel=1e-12)
        assert each["again"]
        assert each["dense"], "a fit without the callback trains all weights"
