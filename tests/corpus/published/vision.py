"""Image modules in the shape of templates, tutorials and libraries."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import JaccardIndex, MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.corpus.harness import entry
from tests.corpus.modules import numbers

CLASSES, SIDE, CHANNELS, COUNT = 4, 8, 3, 24
NORMS = "Batch norms use the statistics of a micro-batch."
DOUBLE = {"precision": "64-true"}


def images(seed: int, count: int = COUNT) -> tuple[Tensor, Tensor]:
    generator = numbers(seed)
    x = torch.randn(count, CHANNELS, SIDE, SIDE, generator=generator)
    return x, x.flatten(1)[:, :CLASSES].argmax(1)


class Images(L.LightningModule):
    """Loads small images with a class."""

    @classmethod
    def loader(cls, seed: int) -> Any:
        return DataLoader(TensorDataset(*images(seed)), batch_size=8)


class SimpleDenseNet(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(inputs, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.view(x.size(0), -1))


@entry(reason=NORMS, trainer=DOUBLE)
class HydraTemplateMNIST(Images):
    """The hydra template: a network as an argument, a metric for each phase, a best value."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = SimpleDenseNet(CHANNELS * SIDE * SIDE, 16, CLASSES)
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc, self.val_acc = MulticlassAccuracy(CLASSES), MulticlassAccuracy(CLASSES)
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.Adam(self.trainer.model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=10)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "monitor": "val/loss",
                "interval": "epoch",
                "frequency": 1,
            },
        }


@entry(trainer=DOUBLE)
class LightningAutoEncoder(Images):
    """The first page of Lightning's documentation."""

    def __init__(self) -> None:
        super().__init__()
        pixels = CHANNELS * SIDE * SIDE
        self.encoder = nn.Sequential(nn.Linear(pixels, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, pixels))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = F.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@entry(reason="It has no container of layers.")
class LightningImageClassifier(Images):
    """Lightning's example with single layers as attributes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, 1), nn.Conv2d(8, 8, 3, 1)
            self.dropout1 = nn.Dropout(0.25)
            self.fc1, self.fc2 = nn.Linear(8 * 4, 16), nn.Linear(16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.conv2(F.relu(self.conv1(x))))
            x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
            return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)

    def __init__(self) -> None:
        super().__init__()
        self.model = self.Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.nll_loss(self.forward(x), y.long())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adadelta(self.model.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


class AttentionBlock(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer_norm_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads)
        self.layer_norm_2 = nn.LayerNorm(width)
        self.linear = nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        inp_x = self.layer_norm_1(x)
        x = x + self.attn(inp_x, inp_x, inp_x)[0]
        return x + self.linear(self.layer_norm_2(x))


def patches(x: Tensor, size: int) -> Tensor:
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // size, size, w // size, size).permute(0, 2, 4, 1, 3, 5)
    return x.flatten(1, 2).flatten(2, 4)


class VisionTransformer(nn.Module):
    """Of the UvA notebooks: the sequence first, a token for the class."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layer = nn.Linear(CHANNELS * 16, 16)
        self.transformer = nn.Sequential(*(AttentionBlock(16, 24, 2) for _ in range(4)))
        self.mlp_head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, CLASSES))
        self.dropout = nn.Dropout(0.0)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        self.pos_embedding = nn.Parameter(torch.randn(1, 5, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.input_layer(patches(x, 4))
        b, t, _ = x.shape
        x = torch.cat([self.cls_token.repeat(b, 1, 1), x], dim=1)
        x = self.dropout(x + self.pos_embedding[:, : t + 1])
        x = self.transformer(x.transpose(0, 1))
        return self.mlp_head(x[0])


@entry(trainer=DOUBLE)
class UvAVisionTransformer(Images):
    def __init__(self) -> None:
        super().__init__()
        self.model = VisionTransformer()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3], gamma=0.1)
        return [optimizer], [scheduler]

    def _calculate_loss(self, batch: Any, mode: str = "train") -> Tensor:
        imgs, labels = batch
        preds = self.model(imgs)
        loss = F.cross_entropy(preds, labels)
        acc = (preds.argmax(dim=-1) == labels).float().mean()
        self.log(f"{mode}_loss", loss)
        self.log(f"{mode}_acc", acc)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._calculate_loss(batch, mode="train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._calculate_loss(batch, mode="val")


class ResNetBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, subsample: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, 2 if subsample else 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.downsample = nn.Conv2d(inputs, outputs, 1, 2) if subsample else None

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        return F.relu(z + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_net = nn.Sequential(
            nn.Conv2d(CHANNELS, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.blocks = nn.Sequential(ResNetBlock(8, 8, False), ResNetBlock(8, 16, True))
        self.output_net = nn.Sequential(
            nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(16, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.output_net(self.blocks(self.input_net(x)))


@entry(reason=NORMS, trainer=DOUBLE)
class UvACIFARModule(Images):
    """The notebook on initialization and architectures, with its own optimizer choice."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = ResNet()
        self.loss_module = nn.CrossEntropyLoss()

    def forward(self, imgs: Tensor) -> Tensor:
        return self.model(imgs)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[100, 150])
        return [optimizer], [scheduler]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        imgs, labels = batch
        preds = self.model(imgs)
        loss = self.loss_module(preds, labels)
        acc = (preds.argmax(dim=-1) == labels).float().mean()
        self.log("train_acc", acc, on_step=False, on_epoch=True)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        imgs, labels = batch
        preds = self.model(imgs).argmax(dim=-1)
        self.log("val_acc", (labels == preds).float().mean())


@entry(trainer=DOUBLE)
class TorchvisionVGG(Images):
    """The layout of VGG and AlexNet, fine-tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(CHANNELS, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(64, 16), nn.ReLU(inplace=True), nn.Linear(16, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, logger=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, nesterov=True)


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Up(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose2d(inputs, inputs // 2, 2, 2)
        self.conv = DoubleConv(inputs, outputs)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.conv(torch.cat([x2, self.upsample(x1)], dim=1))


@entry(reason=NORMS, trainer=DOUBLE)
class BoltsUNet(Images):
    """The U-Net of Lightning's bolts: all its layers in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.num_layers = 3
        self.layers = nn.ModuleList(
            [
                DoubleConv(CHANNELS, 4),
                nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 8)),
                nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16)),
                Up(16, 8),
                Up(8, 4),
                nn.Conv2d(4, 2, kernel_size=1),
            ]
        )
        self.jaccard = JaccardIndex("multiclass", num_classes=2)

    def forward(self, x: Tensor) -> Tensor:
        xi = [self.layers[0](x)]
        for layer in self.layers[1 : self.num_layers]:
            xi.append(layer(xi[-1]))
        for i, layer in enumerate(self.layers[self.num_layers : -1]):
            xi[-1] = layer(xi[-1], xi[-2 - i])
        return self.layers[-1](xi[-1])

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        img, _ = batch
        mask = (img[:, 0] > 0.5).long()
        out = self(img)
        loss = F.cross_entropy(out, mask, ignore_index=250)
        self.jaccard(out.argmax(1), mask)
        self.log("iou", self.jaccard, on_epoch=True, on_step=False)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        opt = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)]


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp_tokens = nn.Sequential(nn.Linear(tokens, 8), nn.GELU(), nn.Linear(8, tokens))
        self.mlp_channels = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


@entry(trainer=DOUBLE)
class TimmMixer(Images):
    """timm: a stem, blocks in a Sequential, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, 12, 4, 4)
        self.blocks = nn.Sequential(*(MixerBlock(4, 12) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, CLASSES)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.stem(x).flatten(2).transpose(1, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x).mean(dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        target = F.one_hot(y, CLASSES) * 0.9 + 0.1 / CLASSES
        loss = torch.sum(-target * F.log_softmax(logits, dim=-1), dim=-1).mean()
        self.log_dict({"loss": loss, "acc1": (logits.argmax(1) == y).float().mean()})
        return loss

    def configure_optimizers(self) -> Any:
        decay = [p for n, p in self.named_parameters() if p.ndim > 1]
        others = [p for n, p in self.named_parameters() if p.ndim <= 1]
        groups = [{"params": decay, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.gamma = nn.Parameter(1e-2 * torch.ones(width))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        z = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))) * self.gamma
        z = z.permute(0, 3, 1, 2)
        if self.drop and self.training:
            keep = 1 - self.drop
            z = z * z.new_empty((z.shape[0], 1, 1, 1)).bernoulli_(keep).div_(keep)
        return x + z


@entry(trainer=DOUBLE)
class TimmConvNeXt(Images):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, 8, 2, 2)
        self.stages = nn.Sequential(
            nn.Sequential(ConvNeXtBlock(8, drop), ConvNeXtBlock(8, drop)),
            nn.Sequential(nn.Conv2d(8, 16, 2, 2), ConvNeXtBlock(16, drop)),
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@entry(random=True, trainer=DOUBLE)
class TimmConvNeXtWithDropPath(TimmConvNeXt):
    def __init__(self) -> None:
        super().__init__(0.2)


class MaskedConvolution(nn.Module):
    """A convolution of which a mask hides what comes later, in the weight itself."""

    def __init__(self, inputs: int, outputs: int, mask: Tensor, dilation: int = 1) -> None:
        super().__init__()
        height, width = mask.shape
        padding = (dilation * (height - 1) // 2, dilation * (width - 1) // 2)
        self.conv = nn.Conv2d(inputs, outputs, mask.shape, padding=padding, dilation=dilation)
        self.register_buffer("mask", mask[None, None])

    def forward(self, x: Tensor) -> Tensor:
        self.conv.weight.data *= self.mask
        return self.conv(x)


def vertical(inputs: int, outputs: int, centre: bool) -> MaskedConvolution:
    mask = torch.ones(3, 3)
    mask[2:], mask[1] = 0, float(centre)
    return MaskedConvolution(inputs, outputs, mask)


def horizontal(inputs: int, outputs: int, centre: bool) -> MaskedConvolution:
    mask = torch.ones(1, 3)
    mask[0, 2], mask[0, 1] = 0, float(centre)
    return MaskedConvolution(inputs, outputs, mask)


class GatedMaskedConv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_vert = vertical(width, 2 * width, True)
        self.conv_horiz = horizontal(width, 2 * width, True)
        self.conv_vert_to_horiz = nn.Conv2d(2 * width, 2 * width, 1)
        self.conv_horiz_1x1 = nn.Conv2d(width, width, 1)

    def forward(self, v_stack: Tensor, h_stack: Tensor) -> tuple[Tensor, Tensor]:
        v_feat = self.conv_vert(v_stack)
        v_val, v_gate = v_feat.chunk(2, dim=1)
        v_out = torch.tanh(v_val) * torch.sigmoid(v_gate)
        h_feat = self.conv_horiz(h_stack) + self.conv_vert_to_horiz(v_feat)
        h_val, h_gate = h_feat.chunk(2, dim=1)
        return v_out, self.conv_horiz_1x1(torch.tanh(h_val) * torch.sigmoid(h_gate)) + h_stack


@entry(trainer=DOUBLE)
class UvAPixelCNN(Images):
    def __init__(self) -> None:
        super().__init__()
        self.conv_vstack = vertical(CHANNELS, 6, False)
        self.conv_hstack = horizontal(CHANNELS, 6, False)
        self.conv_layers = nn.ModuleList(GatedMaskedConv(6) for _ in range(3))
        self.conv_out = nn.Conv2d(6, 4 * CHANNELS, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.to(self.conv_out.weight.dtype) / 3.0) * 2 - 1
        v_stack, h_stack = self.conv_vstack(x), self.conv_hstack(x)
        for layer in self.conv_layers:
            v_stack, h_stack = layer(v_stack, h_stack)
        out = self.conv_out(F.elu(h_stack))
        return out.reshape(out.shape[0], 4, out.shape[1] // 4, out.shape[2], out.shape[3])

    def calc_likelihood(self, x: Tensor) -> Tensor:
        nll = F.cross_entropy(self.forward(x), x, reduction="none")
        bpd = nll.mean(dim=[1, 2, 3]) * torch.tensor(2.718281828).log2()
        return bpd.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.calc_likelihood((batch[0] * 2).long().clamp(0, 3))
        self.log("train_bpd", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)]


@entry(trainer=DOUBLE)
class SuperResolution(Images):
    """ESPCN: its loss, and its signal-to-noise ratio in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(CHANNELS, 8, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, CHANNELS * 4, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def _step(self, batch: Any) -> tuple[Tensor, Tensor]:
        high = batch[0]
        loss = F.mse_loss(self.net(F.avg_pool2d(high, 2)), high)
        return loss, 10 * torch.log10(1.0 / loss)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, psnr = self._step(batch)
        self.log("train_loss", loss)
        self.log("train_psnr", psnr)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, psnr = self._step(batch)
        self.log_dict({"val_loss": loss, "val_psnr": psnr}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@entry(trainer=DOUBLE)
class DetectionTransformer(Images):
    """DETR: queries, a matching of each image, losses divided by the number of boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(CHANNELS, 16, 4, 4), nn.ReLU())
        self.position = nn.Parameter(torch.randn(1, 4, 16))
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True) for _ in range(2)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(16, 2, 24, 0.0, batch_first=True) for _ in range(2)
        )
        self.query_embed = nn.Embedding(3, 16)
        self.class_embed, self.bbox_embed = nn.Linear(16, CLASSES + 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        memory = self.backbone(x).flatten(2).transpose(1, 2) + self.position
        for layer in self.encoder:
            memory = layer(memory)
        hs = self.query_embed.weight[None].expand(len(x), -1, -1)
        for layer in self.decoder:
            hs = layer(hs, memory)
        return {"logits": self.class_embed(hs), "boxes": self.bbox_embed(hs).sigmoid()}

    def criterion(self, out: dict[str, Tensor], labels: Tensor, boxes: Tensor) -> Tensor:
        cost = torch.cdist(out["boxes"], boxes[:, None], p=1).squeeze(-1)
        cost = (
            cost
            - out["logits"].softmax(-1).gather(2, labels[:, None, None].expand(-1, 3, -1))[..., 0]
        )
        chosen = cost.detach().argmin(1)
        target = torch.full(out["logits"].shape[:2], CLASSES)
        target[torch.arange(len(labels)), chosen] = labels
        weight = torch.ones(CLASSES + 1, dtype=out["logits"].dtype)
        weight[-1] = 0.1
        loss_ce = F.cross_entropy(out["logits"].transpose(1, 2), target, weight)
        matched = out["boxes"][torch.arange(len(labels)), chosen]
        loss_bbox = F.l1_loss(matched, boxes, reduction="none").sum() / len(labels)
        return loss_ce + 5 * loss_bbox

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        boxes = x.flatten(1)[:, :4].sigmoid()
        loss = self.criterion(self(x), y, boxes)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        fast = [p for n, p in self.named_parameters() if "backbone" not in n]
        slow = [p for n, p in self.named_parameters() if "backbone" in n]
        return torch.optim.AdamW([{"params": fast}, {"params": slow, "lr": 1e-5}], lr=1e-4)
