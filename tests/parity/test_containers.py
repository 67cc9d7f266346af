"""Networks whose layers stand in several containers, with values that go round layers, train in a
pipeline as they do on one process: residual networks, U-Nets, encoders with decoders."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

from lightning_axosparse import EarlyBirdTicket
from tests.parity.cases import Record, difference, trained
from tests.parity.rows import rows_with_ticket

CLASSES, BATCH, STEPS = 5, 4, 4


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(2, outputs), nn.ReLU(inplace=True)
    )


class Residual(nn.Module):
    """The layout of torchvision's ResNet; the sums of the last stages stand in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.layer1, self.layer2 = block(8, 8), block(8, 16, stride=2)
        self.layer3 = nn.ModuleList(block(16, 16) for _ in range(3))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        for layer in self.layer3:
            x = x + layer(x)
        return self.fc(self.avgpool(x).flatten(1))


class Normed(nn.Module):
    """A norm with running statistics before the layers, which sees the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.layers = nn.Sequential(block(3, 8), block(8, 8), block(8, 8))
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(self.norm(x)).mean((2, 3)))


class Plain(nn.Module):
    """The layout of torchvision's VGG: activations in place are layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*block(3, 8), nn.MaxPool2d(2), *block(8, 16))
        self.classifier = nn.Sequential(nn.Linear(16 * 16, 16), nn.ReLU(True), nn.Dropout(0.0))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.classifier(self.features(x).flatten(1)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([block(3, 8), block(8, 16, 2), block(16, 16, 2)])
        self.bottom = block(16, 16)
        self.ups = nn.ModuleList([block(32, 16), block(24, 8)])
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
        x = self.bottom(skips.pop())
        for up in self.ups:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = up(torch.cat([x, skips.pop()], 1))
        return self.head(x).mean((2, 3))


class ListOfLists(nn.Module):
    """Attention and feed-forward parts in one list a layer, called in another order, or not."""

    def __init__(self) -> None:
        super().__init__()
        width = 12
        self.inputs = nn.Linear(3, width)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.Linear(width, width),
                    nn.ModuleList([nn.LayerNorm(width), None]),
                    nn.MultiheadAttention(width, 2, batch_first=True),
                    nn.Identity(),
                    nn.ModuleDict({"norm": nn.LayerNorm(width)}) if number else None,
                ]
            )
            for number in range(3)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x.flatten(2).mT)
        for feed_forward, (before, _), attention, drop, last in self.layers:
            normed = before(x)
            x = x + drop(drop(attention(normed, normed, normed)[0]))
            x = x + feed_forward(x).relu()
            x = x if last is None else last["norm"](x)
        return self.head(x.mean(1))


class Alternating(nn.Module):
    """Two lists whose layers take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)])
        self.norms = nn.ModuleList([nn.GroupNorm(2, 8), nn.GroupNorm(2, 8)])
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x)).relu()
        return self.fc(x.mean((2, 3)))


class Hugging(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(pixel_values=x).logits


def resnet() -> nn.Module:
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5
    )
    return Hugging(ResNetForImageClassification(config))


class Classifier(L.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network
        if isinstance(network, UNet):
            self.example_input_array = torch.randn(BATCH, 3, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# Row: network, options of the strategy, without `pipeline` where the order of calls is found, for
# the U-Net by its example and else by the loader. Where BatchNorm is in a layer, the whole batch is
# a micro-batch.
WHOLE = {"microbatches": 1}
NETWORKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "residual": (
        Residual,
        {"pipeline": ["net.conv1", "net.bn1", "net.layer1", "net.layer2", "net.layer3"], **WHOLE},
    ),
    "norm before the layers": (Normed, {}),
    "VGG": (Plain, {"pipeline": ["net.features", "net.classifier"]}),
    "U-Net": (UNet, {}),
    "list of lists": (ListOfLists, {}),
    "alternating": (Alternating, {}),
    "ResNet": (
        resnet,
        {"pipeline": ["net.network.resnet.embedder", "net.network.resnet.encoder.stages"], **WHOLE},
    ),
}


OPTIONS = {network: {"microbatches": 2, **own} for network, (_, own) in NETWORKS.items()}


def train(network: str, strategy: Any, ranks: int = 1, ticket: bool = False) -> Record:
    x = torch.randn(STEPS * BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x.double(), torch.arange(len(x)) % CLASSES)
    return trained(
        lambda: Classifier(NETWORKS[network][0]()),
        strategy,
        ranks,
        DataLoader(data, BATCH),
        DataLoader(data, BATCH),
        max_epochs=2,
        callbacks=[EarlyBirdTicket(0.5, every=1, draw_by=2)] if ticket else [],
    )


@pytest.fixture(scope="module", params=["one process", "ticket on ranks"])
def runs(request: pytest.FixtureRequest) -> tuple[dict[str, Record], list[dict[str, Record]]]:
    """The records of every network; a ticket is drawn after two of eight steps."""
    return rows_with_ticket("ranks" in request.param, train, OPTIONS)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_trains_as_on_one_process(network: str, runs: Any) -> None:
    expected, ranks = runs
    for records in ranks:
        assert difference(expected[network], records[network]) <= 1e-12
