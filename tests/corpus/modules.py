"""The modules whose steps the corpus replaces, each with a few batches of its own data."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

SAMPLES, BATCHES, FEATURES, OUTPUTS, CLASSES = 8, 3, 6, 3, 4
WORDS, LENGTH, IGNORED = 11, 5, -100


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(inputs: int, outputs: int, width: int = 12) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, outputs),
    )


class Module(L.LightningModule):
    """A module whose training step logs and returns what :meth:`loss` says of a batch."""

    pipeline: Any = "model"

    def forward(self, x: Any) -> Any:
        return self.model(x)

    def loss(self, *batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    @classmethod
    def dataset(cls, seed: int) -> Dataset:
        raise NotImplementedError

    @classmethod
    def loader(cls, seed: int) -> Any:
        return DataLoader(cls.dataset(seed), batch_size=SAMPLES)


class Regression(Module):
    """Three numbers of six."""

    outputs = OUTPUTS

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp(FEATURES, self.outputs)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), y)

    @classmethod
    def dataset(cls, seed: int) -> Dataset:
        generator = numbers(seed)
        x = torch.randn(BATCHES * SAMPLES, FEATURES, generator=generator)
        noise = 0.3 * torch.randn(len(x), cls.outputs, generator=generator)
        return TensorDataset(x, x[:, : cls.outputs] * 1.5 + x[:, -1:] + noise)


class Scalar(Regression):
    """One number a sample, without a dimension of its own."""

    outputs = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).squeeze(-1)

    @classmethod
    def dataset(cls, seed: int) -> Dataset:
        x, y = Regression.dataset(seed).tensors
        return TensorDataset(x, y[:, 0])


class Classification(Module):
    """One of four classes, which are not equally frequent."""

    outputs = CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp(FEATURES, self.outputs)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    @classmethod
    def dataset(cls, seed: int) -> Dataset:
        x = torch.randn(BATCHES * SAMPLES, FEATURES, generator=numbers(seed))
        return TensorDataset(x, (x[:, :CLASSES] + torch.tensor([1.0, 0.3, 0, 0])).argmax(-1))


class Embedding(Classification):
    """Classification whose outputs are compared with each other."""

    outputs = 5


class Tagger(Module):
    """Tags the words of sentences of different lengths, in batches that are dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Embedding(WORDS, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, WORDS)
        )

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["words"]).mT, batch["labels"], ignore_index=IGNORED)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    @classmethod
    def dataset(cls, seed: int) -> Dataset:
        generator = numbers(seed)
        words = torch.randint(1, WORDS, (BATCHES * SAMPLES, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (len(words),), generator=generator)
        mask = torch.arange(LENGTH) < lengths[:, None]
        words, labels = words.where(mask, 0), words.flip(1).where(mask, IGNORED)
        return Rows(words=words, labels=labels, mask=mask, lengths=lengths)


class Rows(Dataset):
    """Tensors by name; a sample is a dict."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


class Sequences(Module):
    """The next values of a time series."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), y)

    @classmethod
    def dataset(cls, seed: int) -> Dataset:
        x = torch.randn(BATCHES * SAMPLES, 7, 2, generator=numbers(seed)).cumsum(1)
        return TensorDataset(x[:, :-1], x[:, 1:])
