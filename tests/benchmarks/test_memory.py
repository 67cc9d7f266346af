from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import prune

from benchmarks.memory import step
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
