"""Numbers taken out of torch: what a step computes and decides with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Regression, Scalar


@entry(Scalar)
def scipy_like_rank_weights(self: Any, x: Tensor, y: Tensor) -> Tensor:
    errors = (self(x) - y).abs()
    ranks = np.argsort(np.argsort(errors.detach().numpy()))
    return (errors * torch.from_numpy(ranks).float()).mean()


@entry(Regression)
def skips_bad_batches(self: Any, batch: Any, batch_idx: int) -> Any:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    return None if loss.item() > 3.2 else loss
