"""Tensors are found wherever a step may keep them."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.crossing.nodes import attribute_tensors, nodes


def found(tree: Any) -> list[float]:
    return sorted(float(node) for node in nodes(tree) if isinstance(node, Tensor))


def test_containers_and_objects_are_searched_once() -> None:
    ring: list[Any] = [torch.tensor(0.0)]
    ring.append(ring)
    kept = SimpleNamespace(value=torch.tensor(1.0), others={"a": (deque([torch.tensor(2.0)]),)})
    assert found([ring, kept, {torch.tensor(3.0)}, "text", 4, nn.Linear(1, 1)]) == [0, 1, 2, 3]


def test_attributes_of_submodules_are_searched_and_lightnings_objects_are_not() -> None:
    module, trainer = L.LightningModule(), L.Trainer(logger=False, enable_checkpointing=False)
    module.layers = nn.ModuleList([nn.Linear(1, 1), nn.BatchNorm1d(1)])
    module.layers[0].seen = [torch.tensor(5.0)]
    module.trainer = trainer
    trainer.kept = torch.tensor(6.0)
    values = [float(each) for each in attribute_tensors(module)]
    assert 5.0 in values
    assert 6.0 not in values
