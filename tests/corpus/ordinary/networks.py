"""Layers that share a module, or that draw."""

from __future__ import annotations

from torch import nn

from tests.corpus.harness import entry
from tests.corpus.modules import FEATURES, OUTPUTS, Regression, Sequences


@entry(strategy={"recompute": "sqrt"})
class OneActivationInSeveralPlaces(Regression):
    def __init__(self) -> None:
        super().__init__()
        activation = nn.ReLU()
        self.model = nn.Sequential(
            nn.Linear(FEATURES, 12),
            activation,
            nn.Linear(12, 12),
            activation,
            nn.Linear(12, OUTPUTS),
        )


@entry(random=True)
class TransformerEncoderWithDropout(Sequences):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.model = nn.Sequential(nn.Linear(2, 8), layer, nn.Linear(8, 2))
