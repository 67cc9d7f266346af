from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.seed import _collect_rng_states
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_axosparse.strategy.compat.loaders import (
    collates_as_usual,
    first_step,
    source,
)
from tests.quiet import QUIET


class Noisy(Dataset):
    """Draws from every random state that there is, and counts."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(0)
        self.numpy: Any = [np.random.default_rng(0), {"old": np.random.RandomState(0)}]
        self.python = random.Random(0)
        self.calls = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        self.calls += 1
        self.opened = object()
        return torch.full((3,), self.draw() + torch.rand(()) + np.random.rand() + random.random())

    def draw(self) -> float:
        first, others = self.numpy
        drawn = torch.rand(1, generator=self.torch).item() + self.python.random()
        return drawn + first.random() + others["old"].rand()


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.zeros(32)


class Own(DataLoader):
    def __iter__(self) -> Any:
        return ((batch, batch) for batch in super().__iter__())


class Asks(BoringModel):
    """Asks, in every step, where its batch comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, list[Any]] = {}

    def ask(self, stage: str, *rest: Any) -> None:
        origin = source(self.trainer, rest)
        facts = origin.index, len(origin.loaders), origin.batch_size
        asked = self.asked.setdefault(stage, [])
        if facts not in asked:
            asked.append(facts)
        self.origin = origin

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.ask("fit", batch_idx)
        return self.layer(pytree.tree_leaves(batch)[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.ask("validate", batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.ask("predict", batch_idx, dataloader_idx)


def trainer() -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=2,
        limit_predict_batches=2,
        **QUIET,
    )


def data(batch_size: int = 2, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.rand(8, 32)), batch_size, **options)


def test_the_loaders_of_the_running_loop_are_found() -> None:
    module, run = Asks(), trainer()
    run.fit(module, data(2), [data(3), data(4)])
    run.predict(module, [data(4), data(1)])
    assert module.asked == {
        "fit": [(0, 1, 2)],
        "validate": [(0, 1, 3), (1, 1, 4)],
        "predict": [(0, 1, 4), (1, 1, 1)],
    }
    together = CombinedLoader({"a": data(2), "b": [data(4)]}, "max_size")
    module.asked.clear()
    run = trainer()
    run.fit(module, together, CombinedLoader([data(2), data(2)], "min_size"))
    assert module.asked == {"fit": [(0, 2, None)], "validate": [(0, 2, 2)]}


def collates(loader: Any, module: Any = None, **options: Any) -> bool:
    """Whether a loader collates as usual."""
    found: list[bool] = []

    class Probe(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            found.append(collates_as_usual(trainer, source(trainer, [0])))

    run = trainer()
    run.callbacks.append(Probe())
    run.fit(module or Asks(), loader, **options)
    return found[-1]


def twice(samples: list) -> Tensor:
    return torch.stack([sample[0] for sample in samples] * 2)


def taking_apart(samples: list) -> Tensor:
    return torch.stack([sample.pop("x") for sample in samples])


class Listed(TensorDataset):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self.tensors[0][index] for index in indices]


class Keyed(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(32)}


@pytest.mark.parametrize(
    ("loader", "is_usual"),
    [
        (lambda: data(), True),
        (lambda: data(collate_fn=twice), False),
        (lambda: DataLoader(Endless(), 2), True),
        (lambda: DataLoader(Keyed(), None), False),
        (lambda: Own(Keyed(), 2), False),
        (lambda: [torch.zeros(2, 32)] * 3, False),
        (lambda: {"a": data(), "b": data()}, True),
    ],
)
def test_loaders_that_collate_as_usual_are_known(loader: Callable[[], Any], is_usual: bool) -> None:
    assert collates(loader()) == is_usual


class Unknown(Exception):
    """An exception of a user."""


def needing_all(samples: list) -> Tensor:
    if len(samples) != 8:
        raise Unknown("for whole batches")
    return torch.stack([sample[0] for sample in samples])


def test_what_the_code_of_a_user_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "lightning_axosparse"):
        assert given_first(data(8, collate_fn=needing_all), Asks()) is None
    assert "for whole batches" in caplog.text


class Transposing(Asks):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0].T]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0].T).mean()


class TransposingData(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return data()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0].unsqueeze(0)]


def test_hooks_that_change_batches_are_seen() -> None:
    assert not collates(data(), Transposing())
    assert not collates(None, datamodule=TransposingData())
    assert given_first(data(), Transposing()) == ("training_step", ([(32, 2)], 0))
    given = given_first(None, Asks(), datamodule=TransposingData())
    assert given == ("training_step", ([(1, 2, 32)], 0))


def test_no_random_state_moves_and_no_worker_starts() -> None:
    dataset = Noisy()
    offset = torch.Generator().manual_seed(1)

    def collate(samples: list) -> Tensor:
        return torch.stack(samples) + torch.rand(1, generator=offset)

    shuffled = torch.Generator().manual_seed(2)
    loader = DataLoader(
        dataset,
        2,
        shuffle=True,
        generator=shuffled,
        collate_fn=collate,
        num_workers=1,
        multiprocessing_context="fork",  # others cannot send this function to a worker
    )
    before = drawn(dataset), dict(vars(dataset))
    seeds = offset.get_state(), shuffled.get_state()

    def check() -> None:
        assert (drawn(dataset), vars(dataset)) == before
        assert dataset.calls == 0
        assert torch.equal(seeds[0], offset.get_state())
        assert torch.equal(seeds[1], shuffled.get_state())
        assert loader._iterator is None

    assert given_first(loader, Steps(), check) == ("training_step", ((2, 3),))


def drawn(dataset: Noisy) -> list[str]:
    """The states of the dataset's own generators."""
    first, others = dataset.numpy
    return [
        repr(dataset.torch.get_state().tolist()),
        repr(dataset.python.getstate()),
        repr(first.bit_generator.state),
        repr(others["old"].get_state()),
    ]


class Counting(L.LightningDataModule):
    """Counts how often it was asked for a loader."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.dataset = 0, Noisy()

    def train_dataloader(self) -> DataLoader:
        self.asked += 1
        return DataLoader(self.dataset, 4)


class Once(IterableDataset):
    """Ends after one pass."""

    def __init__(self) -> None:
        self.left = [torch.full((32,), float(n)) for n in range(8)]

    def __iter__(self) -> Iterator[Tensor]:
        while self.left:
            yield self.left.pop(0)


class Steps(Asks):
    """Trains on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any) -> Tensor:
        tensor = pytree.tree_leaves(batch)[0]
        self.seen.append(tuple(tensor.shape))
        return sum(parameter.sum() for parameter in self.parameters())


META = torch.device("meta")


def given_first(
    loader: Any, module: Any, check: Callable[[], None] = lambda: None, **options: Any
) -> tuple[str, Any]:
    """The method of the first step and the shapes of its arguments, before the loop begins."""
    found: list[Any] = []

    class Probe(L.Callback):
        def on_fit_start(self, trainer: Any, *args: Any) -> None:
            before = pytree.tree_map(repr, _collect_rng_states())
            step = first_step(trainer)
            assert pytree.tree_map(repr, _collect_rng_states()) == before
            if not found:
                check()
            if step is None:
                found.append(None)
                return
            shapes = pytree.tree_map_only(Tensor, lambda t: tuple(t.shape), step.args)
            found.append((step.method, shapes))

        on_validation_start = on_test_start = on_predict_start = on_fit_start

    run = trainer()
    run.callbacks.append(Probe())
    run.fit(module, loader, **options)
    return found[0]


def test_the_first_step_of_a_run_is_known_before_it_and_consumes_nothing() -> None:
    counting, module = Counting(), Steps()
    state = drawn(counting.dataset)
    assert given_first(None, module, datamodule=counting) == ("training_step", ((2, 3),))
    assert counting.asked == 2
    assert module.seen == [(4, 3)] * 2
    once = Steps()
    assert given_first(DataLoader(Once(), 4), once) == ("training_step", ((2, 32),))
    assert once.seen == [(4, 32)] * 2
    assert drawn(Noisy()) == state


def test_the_first_step_is_where_the_module_is_before_it_moves_to_the_strategys_device() -> None:
    devices: list[torch.device] = []

    class Probe(L.Callback):
        def on_fit_start(self, trainer: Any, *args: Any) -> None:
            elsewhere = mock.patch.object(type(trainer.strategy), "root_device", META)
            with elsewhere:
                step = first_step(trainer)
            devices.extend(each.device for each in pytree.tree_leaves(step.args))

    run = trainer()
    run.callbacks.append(Probe())
    run.fit(Steps(), data())
    assert devices == [torch.device("cpu")]


@pytest.mark.parametrize(
    ("loader", "shapes"),
    [
        (lambda: data(), [(2, 32)]),
        (lambda: data(1), [(2, 32)]),
        (lambda: data(collate_fn=twice), (4, 32)),
        (lambda: DataLoader(Keyed(), batch_sampler=[[0]], collate_fn=taking_apart), (2, 32)),
        (lambda: DataLoader(Listed(torch.rand(4, 32)), 2), (2, 32)),
        (lambda: {"a": data(), "b": data(3)}, {"a": [(2, 32)], "b": [(2, 32)]}),
        (lambda: DataLoader(Keyed(), None), {"x": (32,)}),
        (lambda: [torch.zeros(5, 32)] * 3, [(32,)] * 3),
        (lambda: DataLoader(Endless(), None), (32,)),
    ],
)
def test_loaders_of_all_kinds_show_a_step(loader: Callable[[], Any], shapes: Any) -> None:
    assert given_first(loader(), Steps()) == ("training_step", (shapes,))
    assert given_first(loader(), Asks()) == ("training_step", (shapes, 0))


def test_a_loader_that_can_be_asked_once_shows_none() -> None:
    module = Steps()
    assert given_first((torch.full((5, 32), float(n)) for n in range(2)), module) is None
    assert module.seen == [(5, 32)] * 2
