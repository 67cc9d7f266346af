"""Stages that receive different batches raise at the first that differs."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_axosparse import AxoSparseStrategy
from tests.faults import jobs


class OwnGenerator(Dataset):
    """From one sample on, draws noise by a generator that each rank seeds in its own way."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.generator: torch.Generator | None = None

    def __len__(self) -> int:
        return 6 * jobs.SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        self.generator = self.generator or torch.Generator().manual_seed(os.getpid())
        noise = torch.rand(jobs.WIDTH, generator=self.generator)
        return torch.ones(jobs.WIDTH) + (noise if index >= self.first else 0)


class Data(L.LightningDataModule):
    """Loaders whose samples differ between ranks from some sample on."""

    def __init__(self, train: int, validate: int) -> None:
        super().__init__()
        self.firsts = train, validate

    def train_dataloader(self) -> DataLoader:
        return DataLoader(OwnGenerator(self.firsts[0]), batch_size=jobs.SAMPLES)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(OwnGenerator(self.firsts[1]), batch_size=jobs.SAMPLES)


def train(data: Data, **options: Any) -> L.Trainer:
    trainer = jobs.trainer(AxoSparseStrategy(**options))
    trainer.fit(jobs.Plain(), data)
    return trainer


NEVER = 10**6


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (Data(0, NEVER), "batch 0 of training epoch 0"),  # after two batches of the sanity check
        (Data(3 * jobs.SAMPLES, NEVER), "batch 3 of training epoch 0"),
        (Data(NEVER, 0), "batch 0 of sanity check epoch 0"),
    ],
)
def test_stages_that_draw_other_samples_raise(data: Data, place: str) -> None:
    words = rf"In {place}, ranks that share a batch.*stage 0: \w{{8}}, stage 1: \w{{8}}.*seed"
    with pytest.raises(MisconfigurationException, match=words):
        train(data, g_inter=2)


def test_replicas_may_be_given_different_batches() -> None:
    assert train(Data(0, 0), g_inter=1).global_step == 6
