"""Steps as projects have them, whose result depends on more than the samples of a micro-batch."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader, rank_zero_only
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Embedding, Regression, Scalar, Tagger


@entry(equal=True)
class AnnealsAHyperparameter(Regression):
    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.hparams.beta = min(1.0, self.hparams.beta + 0.2)
        out = self(x)
        return F.mse_loss(out, y) + self.hparams.beta * out.pow(2).mean()


@entry(equal=True)
class CountsOnTheClass(Regression):
    """The counter belongs to the class, not to the object."""

    steps = 0

    def on_fit_start(self) -> None:
        type(self).steps = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        type(self).steps += 1
        return F.mse_loss(self(x), y)

    def on_train_epoch_end(self) -> None:
        self.log("steps", float(self.steps))


@entry(Regression, equal=True)
def scales_the_batch_in_place(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(0.5)
    return F.mse_loss(self(x), y)


@entry(Tagger, equal=True)
def takes_the_labels_out_of_the_batch(self: Any, batch: Any, batch_idx: int) -> Tensor:
    labels = batch.pop("labels")
    return F.cross_entropy(self(batch["words"]).mT, labels)


@entry(Classification, equal=True)
def catches_errors(self: Any, batch: Any, batch_idx: int) -> Any:
    """Skips a batch that does not fit into memory."""
    x, y = batch
    try:
        loss = F.cross_entropy(self(x), y)
    except Exception:
        return None
    return loss


@entry(Classification)
def predicts_before_it_trains(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Pseudo-labels: two passes through the layers."""
    with torch.no_grad():
        guess = self(x).argmax(-1)
    return F.cross_entropy(self(x + 0.1), guess)


@entry()
class NumpyGeneratorOfItsOwn(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), y) * float(self.random.uniform(0.5, 1))


@entry(equal=True)
class SharpnessAware(Regression):
    """SAM: two gradients a batch."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        held = [p for p in self.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        moves = [0.05 * p.grad / (norm + 1e-12) for p in held]
        with torch.no_grad():
            for p, move in zip(held, moves, strict=True):
                p.add_(move)
        optimizer_closure()
        with torch.no_grad():
            for p, move in zip(held, moves, strict=True):
                p.sub_(move)
        optimizer.step()


@entry()
class LimitedMemory(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


class Kept(CSVLogger):
    """Keeps what it is given in memory."""

    def __init__(self) -> None:
        super().__init__(tempfile.gettempdir())
        self.rows: list[dict[str, float]] = []

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append(dict(metrics))

    def save(self) -> None:
        pass


@entry(trainer={"logger": [Kept]})
class WritesToTheLoggerItself(Regression):
    """Of what its loggers were given it keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.log_metrics: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        for logger in self.loggers:
            logger.log_metrics({"own": loss.item()}, step=self.global_step)
        return loss

    def on_train_end(self) -> None:
        self.log_metrics = [row["own"] for row in self.loggers[0].rows if "own" in row]


@entry(equal=True)
class LogsOnTheFirstRank(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        if self.trainer.is_global_zero:
            self.log("first_rank", 2 * loss, rank_zero_only=True)
        return loss


@entry(Embedding)
def gathers_from_all_ranks(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Contrastive losses do so for more negatives; alone it gathers nothing."""
    z = self.all_gather(self(x), sync_grads=True).view(-1, 5)
    return F.cross_entropy(z, y) + torch.cdist(z, z).mean()


@entry(Regression, equal=True)
def divides_by_the_world(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y) / self.trainer.world_size


@entry()
class PredictsRanks(Scalar):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        return {"score": scores, "rank": scores.argsort().argsort()}


@entry(equal=True)
class PredictsProbabilities(Classification):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"class": logits.argmax(-1), "probability": logits.softmax(-1)}


@entry(Regression)
def skips_bad_batches(self: Any, batch: Any, batch_idx: int) -> Any:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    return None if loss.item() > 3.2 else loss


@entry(equal=True)
class NoiseOfItsOwnGenerator(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator)
        return F.mse_loss(self(x + 0.1 * noise), y)


@entry(Regression, equal=True)
def standardizes_the_input(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = (x - x.mean(0)) / x.std(0)
    return F.mse_loss(self(x), y)


@entry(Scalar, equal=True)
def logs_the_number_of_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    self.log("samples", torch.tensor(float(len(x))))
    return F.mse_loss(self(x), y)


def two_loaders(seed: int) -> CombinedLoader:
    data = Regression.dataset(seed), Regression.dataset(seed + 10)
    loaders = {name: DataLoader(one, batch_size=8) for name, one in zip("ab", data, strict=True)}
    return CombinedLoader(loaders, "min_size")


@entry(Regression, loaders=two_loaders, equal=True)
def two_loaders_aligned_by_means(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """Domain adaptation."""
    (x, y), (other, _) = batch["a"], batch["b"]
    out = self(torch.cat([x, other]))
    source, target = out.split([len(x), len(other)])
    gap = (source.mean(0) - target.mean(0)).pow(2).sum()
    return F.mse_loss(source, y) + gap
