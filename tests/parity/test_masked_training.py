"""Gradual pruning, SET and RigL on ranks: as on one process, and as the papers say."""

from __future__ import annotations

from math import cos, pi
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from tests.parity.cases import BATCH, BATCHES, EPOCHS, Net, Record, loader, recorded, trainer
from tests.ranks import run_ranks

RATIO, BEGIN, EVERY, END, CLIP, DROPPED = 0.6, 4, 3, 15, 0.5, 0.3
CHANGES = [7, 10, 13]
METHODS = ["gradual", "set", "rigl"]


def callback(method: str, **others: Any) -> EarlyBirdTicket:
    times = {"draw_after": BEGIN, "every": EVERY, "draw_by": END}
    search: dict[str, Any] = {"score": "magnitude", "floor": 0.0, **times, **others}
    return EarlyBirdTicket(RATIO, method=method, **search)


def train(
    method: str,
    ranks: int,
    grid: dict[str, Any],
    epochs: int = EPOCHS,
    folder: Path | None = None,
    resumed: Path | None = None,
) -> tuple[Record, EarlyBirdTicket]:
    """Train on the same global batches on every grid."""
    L.seed_everything(0, verbose=False)
    draw = callback(method)
    saved = [] if folder is None else [ModelCheckpoint(folder, "stop", save_top_k=-1)]
    run = trainer(
        AxoSparseStrategy(microbatches=2, **grid),
        ranks,
        max_epochs=epochs,
        callbacks=[draw, *saved],
        enable_checkpointing=folder is not None,
        precision="64-true",
        use_distributed_sampler=False,
        gradient_clip_val=CLIP,
    )
    module = Net(outer=True, tied=True).double()
    places = run.strategy.distributed_sampler_kwargs
    data = loader(1)
    sampler = DistributedSampler(data.dataset, shuffle=False, **places)  # type: ignore[arg-type]
    part = DataLoader(data.dataset, BATCH // places["num_replicas"], sampler=sampler)
    run.fit(module, part, ckpt_path=resumed, weights_only=False)
    return recorded(run, module), draw


def on_two_ranks(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        place = folder / method
        train(method, 2, {"g_inter": 2}, 2, folder=place)
        found[method] = {
            "stages, resumed": train(method, 2, {"g_inter": 2}, resumed=place / "stop.ckpt"),
            "replicas": train(method, 2, {"g_inter": 1}),
        }
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[Record, EarlyBirdTicket]]:
    return {method: train(method, 1, {}) for method in METHODS}


def assert_same(found: tuple[Record, Any], expected: tuple[Record, Any], case: str) -> None:
    (record, draw), (through, drawn) = found, expected
    assert draw.ticket == drawn.ticket, case
    assert draw.ticket.step == END
    for name, weight in through.weights.items():
        assert torch.allclose(record.weights[name], weight, rtol=0, atol=1e-12), (case, name)


def test_ranks_replicas_and_resumed_runs_have_the_numbers_of_one_process(
    alone: dict[str, Any], tmp_path: Path
) -> None:
    for found in run_ranks(2, on_two_ranks, tmp_path):
        for method, results in found.items():
            for case, result in results.items():
                assert_same(result, alone[method], f"{method}: {case}")
            record, _ = results["stages, resumed"]
            expected = alone[method][0].losses[-BATCHES:]
            assert record.losses == pytest.approx(expected, abs=1e-12)
    masks = [repr(draw.ticket.state_dict()["masks"]) for _, draw in alone.values()]
    assert len(set(masks)) == len(masks)


def test_an_offloaded_optimizer_and_a_loopback_have_them_too(alone: dict[str, Any]) -> None:
    grid = {"g_inter": 2, "transport": "loopback", "offload_optimizer": True, "offload_bucket": 100}
    assert_same(train("rigl", 1, grid), alone["rigl"], "offloaded")


def largest(weights: dict[str, nn.Parameter], ratio: float) -> dict[str, Tensor]:
    """The masks of the largest weights."""
    flat = torch.cat([weight.detach().abs().reshape(-1) for weight in weights.values()])
    order = flat.argsort(stable=True)
    kept = torch.ones(len(flat), dtype=torch.bool)
    kept[order[: round(ratio * len(flat))]] = False
    parts = kept.split([weight.numel() for weight in weights.values()])
    return {n: part.view_as(w) for (n, w), part in zip(weights.items(), parts, strict=True)}


def rigged(weight: nn.Parameter, mask: Tensor, fraction: float) -> Tensor:
    """Algorithm 1 of Evci et al. for one layer."""
    count = int(fraction * int(mask.sum()))
    alive = weight.detach().abs().masked_fill(~mask, torch.inf).reshape(-1)
    new = mask.clone().reshape(-1)
    new[alive.argsort()[:count]] = False
    assert weight.grad is not None
    candidates = weight.grad.abs().reshape(-1).masked_fill(new, -torch.inf)
    new[candidates.argsort(descending=True)[:count]] = True
    return new.view_as(mask)


def reference(method: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
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
            way = (step - BEGIN) / (END - BEGIN)
            changes = step == BEGIN or step in CHANGES
            if method == "gradual" and (changes or step == END):
                prune(largest(weights, RATIO * (1 - (1 - way) ** 3)))
            elif method == "rigl" and step == BEGIN:
                prune(largest(weights, RATIO))
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x.double()), y).backward()
            if method == "rigl" and step in CHANGES:
                fraction = DROPPED / 2 * (1 + cos(pi * way))
                prune({n: rigged(weights[n], mask, fraction) for n, mask in masks.items()})
            for name, mask in masks.items():
                weights[name].grad.mul_(mask)  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            step += 1
        scheduler.step()
    return {name: value.detach() for name, value in net.state_dict().items()}, masks


@pytest.mark.parametrize("method", ["gradual", "rigl"])
def test_the_numbers_are_those_of_the_papers_algorithm(method: str, alone: dict[str, Any]) -> None:
    record, draw = alone[method]
    weights, masks = reference(method)
    for name, mask in masks.items():
        assert torch.equal(draw.ticket.masks[name], mask), name
    for name, weight in weights.items():
        assert torch.allclose(record.weights[name], weight, rtol=0, atol=1e-12), name


def test_a_draw_before_the_first_masks_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"draw_by=15 .*draw_after=20"):
        callback("rigl", draw_after=20)
    run = trainer(AxoSparseStrategy(), callbacks=[callback("rigl", draw_after=0.9)])
    with pytest.raises(MisconfigurationException, match=r"draw_by, after 15 .*draw_after"):
        run.fit(Net(), loader(1))
