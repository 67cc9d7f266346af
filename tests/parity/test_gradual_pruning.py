"""Gradual pruning on ranks: as on one process, and as masked training in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from lightning_axosparse import AxoSparseStrategy, GradualPruning, Ticket
from tests.parity.cases import BATCHES, EPOCHS, Net, Record, loader, recorded, share, trainer
from tests.ranks import run_ranks

RATIO, START, EVERY, END, CLIP = 0.6, 4, 3, 15, 0.5
CHANGES = [7, 10, 13]


class Sizes(Callback):
    """Counts what this rank keeps of weights, and of their optimizer state, after each step."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def on_train_batch_end(self, run: L.Trainer, *args: Any) -> None:
        state = run.optimizers[0].state
        moments = sum(each["exp_avg"].numel() for each in state.values())
        values = sum(parameter.numel() for parameter in state)
        assert values == moments
        self.kept.append(values)


def callback(**others: Any) -> GradualPruning:
    times = {"start": START, "every": EVERY, "end": END}
    search: dict[str, Any] = {"score": "magnitude", "floor": 0.0, **times, **others}
    return GradualPruning(RATIO, **search)


def train(
    ranks: int,
    grid: dict[str, Any],
    epochs: int = EPOCHS,
    folder: Path | None = None,
    resumed: Path | None = None,
) -> tuple[Record, Ticket, list[int]]:
    """Train on the same global batches on every grid."""
    L.seed_everything(0, verbose=False)
    draw, sizes = callback(), Sizes()
    saved = [] if folder is None else [ModelCheckpoint(folder, "stop", save_top_k=-1)]
    run = trainer(
        AxoSparseStrategy(microbatches=2, **grid),
        ranks,
        max_epochs=epochs,
        callbacks=[draw, sizes, *saved],
        enable_checkpointing=folder is not None,
        precision="64-true",
        use_distributed_sampler=False,
        gradient_clip_val=CLIP,
    )
    module = Net(outer=True, tied=True).double()
    run.fit(module, share(run, loader(1).dataset), ckpt_path=resumed, weights_only=False)
    return recorded(run, module), draw.ticket, sizes.kept


def on_two_ranks(folder: Path) -> dict[str, Any]:
    train(2, {"g_inter": 2}, 2, folder=folder)
    return {
        "stages, resumed": train(2, {"g_inter": 2}, resumed=folder / "stop.ckpt"),
        "replicas": train(2, {"g_inter": 1}),
    }


@pytest.fixture(scope="module")
def alone() -> tuple[Record, Ticket, list[int]]:
    return train(1, {})


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...], case: str) -> None:
    (record, ticket, _), (through, expected_ticket, _) = found, expected
    assert ticket == expected_ticket, case
    assert ticket.step == END
    for name, weight in through.weights.items():
        assert torch.allclose(record.weights[name], weight, rtol=0, atol=1e-12), (case, name)


def test_ranks_replicas_and_resumed_runs_have_the_numbers_of_one_process(
    alone: tuple[Any, ...], tmp_path: Path
) -> None:
    for results in run_ranks(2, on_two_ranks, tmp_path):
        for case, result in results.items():
            assert_same(result, alone, case)
        record, *_ = results["stages, resumed"]
        expected = alone[0].losses[-BATCHES:]
        assert record.losses == pytest.approx(expected, abs=1e-12)


def test_a_loopback_has_them_too(alone: tuple[Any, ...]) -> None:
    assert_same(train(1, {"g_inter": 2, "transport": "loopback"}), alone, "loopback")


def test_weights_and_optimizer_state_shrink_each_time(alone: tuple[Any, ...]) -> None:
    _, _, kept = alone
    shrinks = [step for step in range(2, len(kept) + 1) if kept[step - 1] < kept[step - 2]]
    assert shrinks == [*CHANGES, END]


def largest(weights: dict[str, nn.Parameter], ratio: float) -> dict[str, Tensor]:
    """The masks of the largest weights."""
    flat = torch.cat([weight.detach().abs().reshape(-1) for weight in weights.values()])
    order = flat.argsort(stable=True)
    kept = torch.ones(len(flat), dtype=torch.bool)
    kept[order[: round(ratio * len(flat))]] = False
    parts = kept.split([weight.numel() for weight in weights.values()])
    return {n: part.view_as(w) for (n, w), part in zip(weights.items(), parts, strict=True)}


def reference() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train in plain PyTorch with masks to the end; return weights and the last masks."""
    L.seed_everything(0, verbose=False)
    net = Net(outer=True, tied=True).double()
    [optimizer], [scheduler] = net.configure_optimizers()
    weights = {n: p for n, p in net.named_parameters() if p.dim() > 1}
    masks: dict[str, Tensor] = {}

    def prune(new: dict[str, Tensor]) -> None:
        masks.update(new)
        with torch.no_grad():
            for name, mask in masks.items():
                state = optimizer.state[weights[name]]
                for value in (weights[name], state["exp_avg"], state["exp_avg_sq"]):
                    value.mul_(mask)

    step = 0
    for _ in range(EPOCHS):
        for x, y in loader(1):
            way = (step - START) / (END - START)
            if step in (*CHANGES, END):
                prune(largest(weights, RATIO * (1 - (1 - way) ** 3)))
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x.double()), y).backward()
            for name, mask in masks.items():
                weights[name].grad.mul_(mask)  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            step += 1
        scheduler.step()
    return {name: value.detach() for name, value in net.state_dict().items()}, masks


def test_the_numbers_are_those_of_masked_training(alone: tuple[Any, ...]) -> None:
    record, ticket, _ = alone
    weights, masks = reference()
    for name, mask in masks.items():
        assert torch.equal(ticket.masks[name], mask), name
    for name, weight in weights.items():
        assert torch.allclose(record.weights[name], weight, rtol=0, atol=1e-12), name


def test_a_draw_before_the_first_masks_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"end=15 must come after start=20"):
        callback(start=20)
    run = trainer(AxoSparseStrategy(), callbacks=[callback(start=0.9)])
    with pytest.raises(MisconfigurationException, match=r"end, after 15 .*start, after 16"):
        run.fit(Net(), loader(1))
