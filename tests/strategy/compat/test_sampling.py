from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning import seed_everything
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.strategy.compat.loaders import broadcast_seed, process_dataloader
from tests.ranks import run_ranks
from tests.strategy.compat.harness import fit

SAMPLES = list(range(23))


class Stream(IterableDataset):
    """Shuffles by numpy's and Python's global generators."""

    def __iter__(self) -> Iterator[float]:
        order = np.random.permutation(SAMPLES)
        return iter([float(sample) + random.random() for sample in order])


class UsersSampler(Sampler):
    """Shuffles by a global generator too."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(SAMPLES)).tolist())

    def __len__(self) -> int:
        return len(SAMPLES)


def loaders(workers: int = 0) -> dict[str, DataLoader]:
    def collate(samples: list[int]) -> Tensor:
        return torch.tensor(samples) + torch.rand(1)

    return {
        "shuffle": DataLoader(SAMPLES, 5, shuffle=True, collate_fn=collate),
        "weighted": DataLoader(SAMPLES, 5, sampler=WeightedRandomSampler([1.0] * 23, 23)),
        "stream": DataLoader(Stream(), 5),
        "users": DataLoader(SAMPLES, 5, sampler=UsersSampler()),
        "workers": DataLoader(Augmented(), 5, shuffle=True, num_workers=workers),
    }


class Augmented(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> list[float]:
        return [index + torch.rand(()).item(), np.random.rand(), random.random()]


def batches(replica: int, workers: int) -> dict[str, list[Any]]:
    """What two epochs of each loader yield."""
    found = {}
    for name, loader in loaders(workers).items():
        process_dataloader(loader, replica)
        found[name] = [
            [b.tolist() if name != "workers" else torch.stack(b, 1).tolist() for b in loader]
            for _ in range(2)
        ]
    return found


def batches_on_stages() -> tuple[dict[str, list[Any]], int]:
    import torch.distributed as dist

    from lightning_axosparse.distributed.mpi.process_group import init_process_group

    init_process_group("cpu")
    grid = Grid(2, 2, dist.get_rank())
    seed_everything(7 if grid.stage == 0 else 1234, workers=True, verbose=False)
    broadcast_seed(dist.group.WORLD, grid.pipeline[0])
    found = batches(grid.replica, workers=1)
    return found, torch.initial_seed()


def test_two_stages_sample_what_one_process_samples() -> None:
    seed_everything(7, workers=True, verbose=False)
    expected = batches(replica=0, workers=1)
    for batches_found, seed in run_ranks(2, batches_on_stages):
        assert batches_found == expected
        assert seed == 7
    assert expected["shuffle"][0] != expected["shuffle"][1]


def test_replicas_augment_differently() -> None:
    ours = []
    for replica in (0, 0, 1):
        seed_everything(7, workers=True, verbose=False)
        ours.append(batches(replica, workers=1)["workers"])
    assert ours[0] == ours[1] != ours[2]
    indices = [[[int(row[0]) for row in b] for epoch in o for b in epoch] for o in ours]
    assert indices[0] == indices[2]


class Sees(LightningModule):
    """Remembers its batches."""

    def __init__(self, combined: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen: list[Any] = []
        self.combined = combined

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append([part.flatten().tolist() for part in batch])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return sum(self.net(part).mean() for part in batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        data = torch.arange(14.0).split(1)
        a, b = DataLoader(data, 4, shuffle=True), DataLoader(data, 3, shuffle=True)
        return CombinedLoader([a, b], "min_size") if self.combined else [a]


class Remembers(AxoSparseStrategy):
    """Keeps the loaders that Lightning asks about."""

    def process_dataloader(self, dataloader: object) -> object:
        self.loaders = [*getattr(self, "loaders", []), dataloader]
        return process_dataloader(dataloader, data_rank=3)


@pytest.mark.parametrize("combined", [False, True])
def test_a_shuffled_fit_sees_the_batches_of_one_process(combined: bool) -> None:
    seen = []
    for strategy in ("auto", Remembers()):
        seed_everything(11, verbose=False)
        module = Sees(combined)
        fit(module, strategy)
        seen.append(module.seen)
    assert seen[0] == seen[1]
    assert seen[0][:4] != seen[0][4:]
    assert len(strategy.loaders) == (2 if combined else 1)


def test_alone_nothing_is_compared_or_drawn() -> None:
    state = torch.get_rng_state()
    broadcast_seed(None, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_are_seeded_only_where_nobody_did() -> None:
    seed_everything(3, workers=True, verbose=False)
    strategy = Remembers()
    fit(Sees(), strategy)
    function = strategy.loaders[0].worker_init_fn
    assert isinstance(function, partial)
    assert function.func is pl_worker_init_function
    assert function.keywords == {"rank": 3}
    seed_everything(3, workers=False, verbose=False)


def test_without_seeded_workers_nothing_happens() -> None:
    seed_everything(3, workers=False, verbose=False)
    loader = loaders()["shuffle"]
    assert process_dataloader(loader, 0) is loader
    assert loader.worker_init_fn is None
    assert process_dataloader([1, 2], 0) == [1, 2]
