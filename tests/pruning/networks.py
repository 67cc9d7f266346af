"""Convolutional networks, as they are written, for the tests of channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def vgg() -> nn.Sequential:
    """Two linear layers behind a flatten of four places a channel."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(conv(8, 12), nn.BatchNorm2d(12), nn.GELU(), nn.AvgPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(48, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 5)),
    )


class Block(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class Head(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(x, 1)
        return self.linear(x.view(x.size(0), -1))


def resnet() -> nn.Sequential:
    stem = nn.Sequential(conv(3, 6), nn.BatchNorm2d(6), nn.ReLU())
    return nn.Sequential(stem, Block(6, 6), Block(6, 10, 2), Block(10, 10), Head(10, 5))


class UNet(nn.Module):
    """Concatenates; its channels go up through a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(conv(3, 6), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.middle = nn.Sequential(conv(6, 9, 2), nn.BatchNorm2d(9), nn.SiLU())
        self.up = nn.Sequential(
            nn.ConvTranspose2d(9, 7, 2, stride=2), nn.BatchNorm2d(7), nn.LeakyReLU(0.1)
        )
        self.out = conv(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        down = self.down(x)
        up = self.up(self.middle(down))
        return self.out(torch.cat([up, down], dim=1)).mean((2, 3))


class DenseNet(nn.Module):
    """Normalizes what it has concatenated; the bottleneck inside can shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 4)
        self.norm1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 8, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(8), conv(8, 4)
        self.norm3, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        new = self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())
        both = self.norm3(torch.cat((x, new), 1)).relu()
        return self.head(both.mean([2, 3]))


class MobileNet(nn.Module):
    """A depthwise convolution, and squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.bn1 = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.depthwise, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.squeeze = nn.Conv2d(8, 8, 1)
        self.project, self.bn3 = nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6)
        self.head = Head(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.expand(x)).relu()
        x = self.bn2(self.depthwise(x)).relu()
        x = x * torch.sigmoid(self.squeeze(x.mean((2, 3), keepdim=True)))
        return self.head(F.relu6(self.bn3(self.project(x))))


NETWORKS = {
    "vgg": vgg,
    "resnet": resnet,
    "unet": UNet,
    "densenet": DenseNet,
    "mobilenet": MobileNet,
}


def made(name: str, seed: int = 0) -> nn.Module:
    """A network in float64 with scales and statistics of a trained one."""
    torch.manual_seed(seed)
    network = NETWORKS[name]().double()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return network


def images(samples: int = 4, seed: int = 1, side: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, side, side, generator=generator, dtype=torch.float64)
