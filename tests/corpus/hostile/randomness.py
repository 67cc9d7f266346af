"""Random numbers: steps that are wrong in micro-batches, and draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Regression


@entry(Classification)
def mixup_by_torch_beta(self: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.distributions.Beta(0.4, 0.4).sample()
    index = torch.randperm(len(x))
    target = F.one_hot(y, 4).float()
    target = weight * target + (1 - weight) * target[index]
    logits = self(weight * x + (1 - weight) * x[index])
    return -(target * logits.log_softmax(-1)).sum(-1).mean()


@entry(Regression)
def numpy_permutation(self: Any, x: Tensor, y: Tensor) -> Tensor:
    order = torch.from_numpy(np.random.permutation(len(x)))
    z = self(x)
    return F.mse_loss(z, y) + 0.1 * F.mse_loss(z, z[order])
