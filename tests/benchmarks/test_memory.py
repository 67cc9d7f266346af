from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from benchmarks.memory import replicas, step
from lightning_axosparse.pruning.rule import MaskRule


def test_the_masks_are_those_that_pytorchs_method_would_find():
    ours, theirs = (nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 7)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    masks = MaskRule(0.75, "magnitude").masks(ours)
    for model, method in ((ours, step.method_of(masks)), (theirs, prune.L1Unstructured)):
        layers = [(layer, "weight") for layer in model]
        prune.global_unstructured(layers, pruning_method=method, amount=0.75)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.weight, other.weight)


def test_every_row_runs_on_a_small_model():
    rows = {variant: step.measure(variant, width=32, depth=1) for variant in step.VARIANTS}
    dense = rows["dense"]
    assert rows["sparse 0.9"]["state"] < 0.2 * dense["state"]
    assert rows["drawn 0.9"]["state"] == rows["sparse 0.9"]["state"]
    for variant in ("prune 0.9", "ModelPruning 0.9"):
        assert rows[variant]["parameters"] == dense["parameters"]
        assert rows[variant]["state"] > 1.2 * dense["state"]


@pytest.mark.slow
def test_replicas_divide_the_optimizers_state(monkeypatch, capsys):
    arguments = ["--ratios", "0.8", "--replicas", "1", "2", "--width", "64", "--depth", "2"]
    monkeypatch.setattr("sys.argv", ["replicas", *arguments])
    replicas.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "MB" in line]
    assert [row[:2] for row in rows] == [["dense", "1"], ["80 % pruned", "1"], ["80 % pruned", "2"]]
    dense, one, two = (float(row[3]) for row in rows)
    assert dense == 1 < one < two
