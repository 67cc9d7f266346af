"""Networks whose layers are in lists of lists, beside None, or outside any container."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.published.vision import CHANNELS, CLASSES, DOUBLE, Images, patches

WIDTH = 12


class Classifier(Images):
    """Classifies images by patches; what stands between is the network's."""

    def __init__(self) -> None:
        super().__init__()
        self.to_patch_embedding = nn.Linear(CHANNELS * 16, WIDTH)
        self.pos_embedding = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.transformer = self.network()
        self.mlp_head = nn.Linear(WIDTH, CLASSES)

    def network(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, img: Tensor) -> Tensor:
        x = self.to_patch_embedding(patches(img, 4)) + self.pos_embedding
        return self.mlp_head(self.transformer(x).mean(dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-4)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.to_qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        dots = torch.matmul(q, k.transpose(-1, -2)) * WIDTH**-0.5
        return self.to_out(torch.matmul(dots.softmax(dim=-1), v))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@entry(reason="A layer is called more than once in a step.", trainer=DOUBLE)
class SharedLayer(Classifier):
    """ALBERT: one layer, again and again."""

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([FeedForward(), Attention()])

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                for layer in self.layers:
                    x = x + layer(x)
            return x

    def network(self) -> nn.Module:
        return self.Transformer()
