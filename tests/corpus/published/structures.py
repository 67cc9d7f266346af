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


@entry(trainer=DOUBLE)
class VitPyTorch(Classifier):
    """vit-pytorch: a list of lists of attention and feed-forward."""

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.layers = nn.ModuleList([])
            for _ in range(3):
                self.layers.append(nn.ModuleList([Attention(), FeedForward()]))

        def forward(self, x: Tensor) -> Tensor:
            for attn, ff in self.layers:
                x = attn(x) + x
                x = ff(x) + x
            return self.norm(x)

    def network(self) -> nn.Module:
        return self.Transformer()


@entry(trainer=DOUBLE)
class XTransformers(Classifier):
    """x-transformers: norms, blocks and residuals of each layer in an inner list, some absent."""

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer_types = ("a", "f") * 2
            self.layers = nn.ModuleList(
                nn.ModuleList(
                    [
                        nn.ModuleList([nn.LayerNorm(WIDTH), None]),
                        Attention() if kind == "a" else FeedForward(),
                        nn.Identity(),
                    ]
                )
                for kind in self.layer_types
            )
            self.final_norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for _kind, (norms, block, residual_fn) in zip(
                self.layer_types, self.layers, strict=True
            ):
                pre_norm, post_norm = norms
                inner = residual_fn(x)
                x = block(pre_norm(x)) + inner
                if post_norm is not None:
                    x = post_norm(x)
            return self.final_norm(x)

    def network(self) -> nn.Module:
        return self.Transformer()


@entry(trainer=DOUBLE)
class ListWithANone(Classifier):
    """A list in which a layer is absent."""

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([FeedForward(), None, FeedForward(), FeedForward()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if layer is not None:
                    x = x + layer(x)
            return x

    def network(self) -> nn.Module:
        return self.Transformer()


@entry(trainer=DOUBLE)
class TwoListsInTurn(Classifier):
    """Attention in one list, feed-forward in another, called in turn."""

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attentions = nn.ModuleList(Attention() for _ in range(3))
            self.feed_forwards = nn.ModuleList(FeedForward() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for attention, feed_forward in zip(self.attentions, self.feed_forwards, strict=True):
                x = x + attention(x)
                x = x + feed_forward(x)
            return x

    def network(self) -> nn.Module:
        return self.Transformer()


@entry(trainer=DOUBLE)
class DictOfBlocks(Classifier):
    """Blocks by name in a ModuleDict, beside a list."""

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleDict({f"block_{n}": FeedForward() for n in range(3)})

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks.values():
                x = x + block(x)
            return x

    def network(self) -> nn.Module:
        return self.Transformer()


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


@entry(trainer=DOUBLE)
class NeRF(Images):
    """A list of linear layers with a skip from the input to the third."""

    def __init__(self) -> None:
        super().__init__()
        self.pts_linears = nn.ModuleList(
            [nn.Linear(18, 16)]
            + [nn.Linear(16, 16) if i != 1 else nn.Linear(34, 16) for i in range(3)]
        )
        self.rgb_linear, self.alpha_linear = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for i, layer in enumerate(self.pts_linears):
            h = F.relu(layer(h))
            if i == 1:
                h = torch.cat([x, h], -1)
        return torch.cat([self.rgb_linear(h), self.alpha_linear(h)], -1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        points = x.flatten(1)[:, :3]
        features = torch.cat(
            [fn(points * f) for f in (1, 2, 4) for fn in (torch.sin, torch.cos)], 1
        )
        target = x.flatten(1)[:, 3:6].sigmoid()
        mse = torch.mean((torch.sigmoid(self(features)[:, :3]) - target) ** 2)
        self.log("train/psnr", -10.0 * torch.log10(mse.detach()))
        self.log("train/loss", mse)
        return mse

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-4)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1 ** (1 / 100))]
