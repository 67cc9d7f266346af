"""Hooks may change parameters, modules and optimizers of a run, with one process's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import (
    CLASSES,
    FEATURES,
    Net,
    Record,
    difference,
    loader,
    mean_losses,
    recorded,
    share,
    trainer,
)
from tests.ranks import run_ranks


class Changing(Net):
    """Has a gain before and a head behind the layers, and changes when its second epoch begins."""

    microbatches, accumulated = 2, 1

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(FEATURES))
        self.head = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x * self.gain))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.change()
            self.double()
            self.change_optimizers()

    def change(self) -> None:
        raise NotImplementedError

    def change_optimizers(self) -> None:
        self.trainer.optimizers = [self.configure_optimizers()]


class Replaces(Changing):
    """New weights outside the layers, and in the layers of every stage."""

    def change(self) -> None:
        self.gain = nn.Parameter(torch.full((FEATURES,), 1.5))
        self.head = nn.Linear(CLASSES, CLASSES)
        for layer in self.linears():
            layer.weight = nn.Parameter(torch.randn(layer.weight.shape) / 8)

    def linears(self) -> list[nn.Linear]:
        return [part for part in self.model.modules() if isinstance(part, nn.Linear)]


class Removes(Replaces):
    def change(self) -> None:
        self.linears()[0].bias = self.linears()[-1].bias = None


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Parametrizes(Replaces):
    def change(self) -> None:
        for layer in (self.linears()[0], self.linears()[-1], self.head):
            parametrize.register_parametrization(layer, "weight", Halves())


class NormalizesSpectra(Replaces):
    """Parameters and buffers of other names, which each batch changes once."""

    def change(self) -> None:
        for layer in self.linears():
            nn.utils.spectral_norm(layer)


class Freezes(Replaces):
    """Between accumulated batches, parameters in and outside layers, which have gradients then."""

    accumulated = 3

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for part in (self.linears()[0], self.head):
                part.requires_grad_(False)

    def change(self) -> None:
        self.requires_grad_(True)


class Counts(nn.Tanh):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Resets(Changing):
    """A buffer in a layer of each stage, which gets other values where the layer runs."""

    microbatches = 1

    def __init__(self) -> None:
        super().__init__()
        for place in (1, 3):
            self.model[place] = Counts()

    def change(self) -> None:
        for place in (1, 3):
            self.model[place].calls = torch.zeros(())


class LeavesToTheOptimizer(Removes):
    """The optimizer still has the parameters that the module no longer has."""

    def change_optimizers(self) -> None:
        pass


class Adapter(nn.Module):
    """Adds to what a layer computes, counts its calls, and leaves a penalty for the step."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.added, self.calls = base, nn.Linear(24, 24), 0

    def forward(self, x: Tensor) -> Tensor:
        added = self.added(x)
        self.penalty, self.calls = added.square().mean(-1), self.calls + 1
        return self.base(x) + added


class Adapts(Changing):
    """Modules inside the layers of each stage are others than those that were there before."""

    def __init__(self) -> None:
        super().__init__()
        for place in (2, 4):
            self.model[place] = nn.Sequential(self.model[place])

    def change(self) -> None:
        for place in (2, 4):
            self.model[place][0] = Adapter(self.model[place][0])

    def change_optimizers(self) -> None:
        added = [p for name, p in self.named_parameters() if ".added." in name]
        self.trainer.optimizers[0].add_param_group({"params": added, "lr": 2e-2})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        adapters = [part for part in self.modules() if isinstance(part, Adapter)]
        penalty = sum(part.penalty.mean() for part in adapters)
        return loss + penalty

    def on_train_end(self) -> None:
        counts = [part.calls for part in self.modules() if isinstance(part, Adapter) and part.calls]
        assert set(counts) == {2 * len(self.trainer.train_dataloader)}


MODULES = [
    Replaces,
    Removes,
    LeavesToTheOptimizer,
    Parametrizes,
    NormalizesSpectra,
    Freezes,
    Resets,
    Adapts,
]


def train(make: type[Changing], strategy: Any, ranks: int, file: Path | None = None) -> Record:
    L.seed_everything(0, verbose=False)
    module = make().double()
    run = trainer(
        strategy,
        ranks,
        precision="64-true",
        gradient_clip_val=0.1,
        accumulate_grad_batches=make.accumulated,
        use_distributed_sampler=False,
    )
    run.fit(module, share(run, loader(1).dataset))
    if file is not None:
        run.save_checkpoint(file)
    return recorded(run, module)


def on_ranks(folder: Path) -> dict[str, Any]:
    found = {}
    for make in MODULES:
        for g_inter in (1, 2):
            strategy = AxoSparseStrategy(
                g_inter, make.microbatches, pipeline="model", shard_optimizer=g_inter == 1
            )
            path = folder / f"{make.__name__}-{g_inter}.ckpt"
            found[make.__name__, g_inter] = train(make, strategy, 2, path)
    return found


def saved(path: Path) -> list[Any]:
    """The weights and the state of the optimizer in a checkpoint."""
    checkpoint = torch.load(path, weights_only=False)
    return [checkpoint["state_dict"], checkpoint["optimizer_states"][0]["state"]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[Any, Record]], Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(2, on_ranks, folder), folder


@pytest.mark.parametrize("make", MODULES)
def test_they_train_as_on_one_process(make: type[Changing], ranks: Any, tmp_path: Path) -> None:
    alone = train(make, "auto", 1, tmp_path / "alone.ckpt")
    expected = saved(tmp_path / "alone.ckpt")
    loopback = AxoSparseStrategy(2, make.microbatches, pipeline="model", transport="loopback")
    assert difference(train(make, loopback, 1), alone) < 1e-10
    found, folder = ranks
    for g_inter in (1, 2):
        losses = mean_losses(each[make.__name__, g_inter] for each in found)
        assert losses == pytest.approx(alone.losses, abs=1e-10)
        for record in (each[make.__name__, g_inter] for each in found):
            torch.testing.assert_close(record.weights, alone.weights, rtol=0, atol=1e-10)
        ours = saved(folder / f"{make.__name__}-{g_inter}.ckpt")
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


class PutsAnotherLayer(Replaces):
    def change(self) -> None:
        self.model[2] = nn.Linear(24, 24)


class PutsAnotherActivation(Replaces):
    def change(self) -> None:
        self.model[1] = nn.ReLU()


@pytest.mark.parametrize(("make", "name"), [(PutsAnotherLayer, 2), (PutsAnotherActivation, 1)])
def test_another_layer_in_the_place_of_one_is_refused(make: type[Changing], name: int) -> None:
    loopback = AxoSparseStrategy(2, 2, pipeline="model", transport="loopback")
    with pytest.raises(MisconfigurationException, match=rf"or removed layer 'model\.{name}'"):
        train(make, loopback, 1)
