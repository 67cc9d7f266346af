"""Modules that compare samples, in the shape of notebooks and repositories."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.corpus.harness import entry
from tests.corpus.modules import numbers

DOUBLE = {"precision": "64-true"}


def convnet(outputs: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.GELU(),
        nn.Conv2d(8, 8, 3, 2, 1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.ReLU(inplace=True),
        nn.Linear(16, outputs),
    )


class Views(Dataset):
    """Several views of an image, and its class."""

    def __init__(self, seed: int, views: int, batches: int = 3) -> None:
        generator = numbers(seed)
        images = torch.randn(8 * batches, 3, 8, 8, generator=generator)
        noise = 0.1 * torch.randn(views, *images.shape, generator=generator)
        self.views, self.labels = images + noise, torch.arange(len(images)) % 2

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[list[Tensor], Tensor]:
        return list(self.views[:, index]), self.labels[index]


class Pairs(L.LightningModule):
    views = 2

    @classmethod
    def loader(cls, seed: int) -> Any:
        return DataLoader(Views(seed, cls.views), batch_size=8)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5, eta_min=1e-4)
        return [optimizer], [scheduler]


@entry(trainer=DOUBLE)
class UvASimCLR(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 0.07
        self.convnet = convnet()

    def info_nce_loss(self, batch: Any, mode: str = "train") -> Tensor:
        imgs, _ = batch
        feats = self.convnet(torch.cat(imgs, dim=0))
        cos_sim = F.cosine_similarity(feats[:, None, :], feats[None, :, :], dim=-1)
        self_mask = torch.eye(cos_sim.shape[0], dtype=torch.bool, device=cos_sim.device)
        cos_sim.masked_fill_(self_mask, -9e15)
        pos_mask = self_mask.roll(shifts=cos_sim.shape[0] // 2, dims=0)
        cos_sim = cos_sim / self.temperature
        nll = -cos_sim[pos_mask] + torch.logsumexp(cos_sim, dim=-1)
        nll = nll.mean()
        self.log(f"{mode}_loss", nll)
        comb_sim = torch.cat(
            [cos_sim[pos_mask][:, None], cos_sim.masked_fill(pos_mask, -9e15)], dim=-1
        )
        sim_argsort = comb_sim.argsort(dim=-1, descending=True).argmin(dim=-1)
        self.log(f"{mode}_acc_top1", (sim_argsort == 0).float().mean())
        self.log(f"{mode}_acc_mean_pos", 1 + sim_argsort.float().mean())
        return nll

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.info_nce_loss(batch, mode="train")


@entry(reason="The layers are called three times in a step.", trainer=DOUBLE)
class SiameseTripletByThreeCalls(Pairs):
    views = 3

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (anchor, positive, negative), _ = batch
        return F.triplet_margin_loss(self(anchor), self(positive), self(negative))


class Episodes(L.LightningModule):
    """Batches of a sampler: support and query samples of a few classes."""

    @classmethod
    def loader(cls, seed: int) -> Any:
        generator = numbers(seed)
        batches = []
        for _ in range(3):
            targets = torch.arange(2).repeat(4)
            imgs = torch.randn(8, 3, 8, 8, generator=generator) + targets[:, None, None, None]
            batches.append((imgs, targets))
        return DataLoader(batches, batch_size=None)


@entry(trainer=DOUBLE)
class UvAProtoNet(Episodes):
    def __init__(self) -> None:
        super().__init__()
        self.model = convnet()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[140, 180])
        return [optimizer], [scheduler]

    @staticmethod
    def calculate_prototypes(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        classes, _ = torch.unique(targets).sort()
        prototypes = [features[torch.where(targets == c)[0]].mean(dim=0) for c in classes]
        return torch.stack(prototypes, dim=0), classes

    def classify_feats(self, prototypes: Tensor, classes: Tensor, feats: Tensor, targets: Tensor):  # type: ignore[no-untyped-def]
        dist = torch.pow(prototypes[None, :] - feats[:, None], 2).sum(dim=2)
        preds = F.log_softmax(-dist, dim=1)
        labels = (classes[None, :] == targets[:, None]).long().argmax(dim=-1)
        return preds, labels, (preds.argmax(dim=1) == labels).float().mean()

    def calculate_loss(self, batch: Any, mode: str) -> Tensor:
        imgs, targets = batch
        features = self.model(imgs)
        support_feats, query_feats = features.chunk(2, dim=0)
        support_targets, query_targets = targets.chunk(2, dim=0)
        prototypes, classes = self.calculate_prototypes(support_feats, support_targets)
        preds, labels, acc = self.classify_feats(prototypes, classes, query_feats, query_targets)
        loss = F.cross_entropy(preds, labels)
        self.log(f"{mode}_loss", loss)
        self.log(f"{mode}_acc", acc)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.calculate_loss(batch, mode="train")
