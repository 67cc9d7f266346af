from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torchmetrics import MeanMetric

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.grid import Grid
from lightning_axosparse.regrid import Regrid, Regridded, bubble, refuse_module
from tests.parity.cases import Net, fit, trainer


def test_what_is_told_of_a_move() -> None:
    old = Grid(4, 4)
    moved = Regridded(old, old.shortened(2), epoch=3, seconds=0.5, microbatches=16)
    assert moved.bubbles == (3 / 19, 1 / 9)
    assert "2 stages x 2 replicas instead of 4 x 1" in str(moved)
    assert "11.1% instead of 15.8%" in str(moved)
    assert bubble(1, 8) == 0


def test_a_run_without_a_draw_ends_with_a_warning() -> None:
    nothing: Any = None
    move = Regrid(2, *[nothing] * 6)
    with pytest.warns(UserWarning, match="regrid=2 changed nothing.*EarlyBirdTicket"):
        move.warn_without_draw()
    move.after_draw()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        move.warn_without_draw()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"g_inter": 4, "regrid": 3}, r"regrid=3 .*g_inter=4.*\[1, 2\]"),
        ({"g_inter": 4, "regrid": 4}, r"regrid=4 .*\[1, 2\]"),
        ({"g_inter": 1, "regrid": 1}, r"regrid=1 .*Leave regrid out"),
        ({"g_inter": 4, "regrid": "some"}, r"regrid='some' must be"),
        ({"g_inter": 4, "regrid": True}, r"regrid=True must be.*'auto'"),
        ({"g_inter": 4, "regrid": 2.0}, r"regrid=2.0 must be"),
        ({"g_inter": "auto", "regrid": -1}, r"regrid=-1 must be"),
        ({"g_inter": 2, "regrid": 1, "transport": "loopback"}, "one process"),
        ({"g_inter": 2, "regrid": "auto", "in_flight": 2}, "in_flight=None"),
        ({"g_inter": 2, "regrid": "auto", "schedule": "gpipe"}, "message-driven"),
    ],
)
def test_what_cannot_be_moved_to_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        AxoSparseStrategy(**options)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (nn.BatchNorm1d(3), "BatchNorm1d.*GroupNorm"),
        (MeanMetric(dist_sync_on_step=True), "MeanMetric.*dist_sync_on_step"),
    ],
)
def test_what_replicas_would_not_agree_on_is_refused(part: nn.Module, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        refuse_module(nn.ModuleDict({"part": part}))
    refuse_module(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), MeanMetric()))


def test_a_module_is_refused_before_any_rank_is_started() -> None:
    module = Net()
    module.norm = nn.BatchNorm1d(3)
    with pytest.raises(MisconfigurationException, match="'norm'"):
        fit(trainer(AxoSparseStrategy(g_inter=2, regrid=1), 2), module)


def test_buffers_that_layers_share_stay_where_one_of_them_is() -> None:
    from lightning_axosparse.pipeline.split import Split

    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    common = torch.arange(3.0)
    for layer in model:
        layer.register_buffer("common", common)
    split = Split(model, ["0", "1"], [range(1), range(1, 2)])
    split.take_away([0])
    assert torch.equal(model[0].common, torch.arange(3.0))
    assert model[1].weight.is_meta
