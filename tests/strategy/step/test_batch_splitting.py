"""What a user sees of the cutting, with all stages in one process."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.strategy.compat.loaders import Source
from lightning_axosparse.strategy.step import batch_splitting
from lightning_axosparse.strategy.step.batch_splitting import BatchSplitter

WIDTH = 4


class Net(L.LightningModule):
    """Notes what the end of its step sees, behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
        self.seen: list[Any] = []
        self.logged: list[dict[str, float]] = []

    def compute(self, batch: Any) -> Tensor:
        x = batch
        while not isinstance(x, Tensor):
            x = next(iter(x.values() if isinstance(x, dict) else x))
        loss = self.layers(x).square().mean()
        self.seen.append(batch)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.compute(batch)
        self.log("n", len(batch[0]) if isinstance(batch, (list, tuple)) else 1)
        self.log("batch_number", batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.compute(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.logged.append({k: float(v) for k, v in self.trainer.logged_metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(microbatches: int = 2, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=AxoSparseStrategy(2, microbatches, transport="loopback", **options),
    )


def fit(batches: Any, microbatches: int = 2, **options: Any) -> Net:
    module = Net()
    trainer(microbatches, **options).fit(module, batches)
    return module


def made(*batches: Any) -> DataLoader:
    """A loader whose dataset holds whole batches."""
    return DataLoader(list(batches), batch_size=None)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(batch_splitting, "rank_zero_debug", lines.append)
    return lines


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The micro-batches of each batch."""
    found: list[list[Any]] = []

    def noting(split: Any) -> Any:
        def split_and_note(*args: Any) -> Any:
            parts = split(*args)
            found.append([part.batch for part in parts])
            return parts

        return split_and_note

    monkeypatch.setattr(BatchSplitter, "microbatches_of", noting(BatchSplitter.microbatches_of))
    return found


def test_what_is_cut_and_what_not_is_said_once_a_loader(told: list[str], cut: list[Any]) -> None:
    def collate(samples: list) -> Any:
        return {"x": torch.stack(samples), "y": np.zeros(len(samples)), "names": ["a", "b"]}

    loader = DataLoader(torch.rand(9, 7, WIDTH), 3, collate_fn=collate)
    module = Net()
    trainer().fit(module, loader, loader)
    line = "cut batch['x'], batch['y'] along dimension 0; passed whole: batch['names']."
    assert told == [f"Micro-batches of {name} batches: {line}" for name in ("val", "train")]
    sizes = [[len(part["y"]) for part in parts] for parts in cut]
    assert sizes == [[1, 2]] * 8
    for part in (part for parts in cut for part in parts):
        assert part["x"].shape == (len(part["y"]), 7, WIDTH)
        assert part["names"] == ["a", "b"]
    assert [batch["x"].shape for batch in module.seen] == [(3, 7, WIDTH)] * 8


def test_an_object_beside_tensors_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"gets the whole batch\['graph'\].*split_batch"):
        fit(made({"x": torch.rand(4, WIDTH), "graph": object()}))


class Graphs:
    """A batch as torch_geometric makes them: one object, with an index of the samples."""

    def __init__(self) -> None:
        self.x, self.batch = torch.rand(4, WIDTH), torch.tensor([0, 0, 1, 1])

    def __iter__(self) -> Any:
        return iter([self.x])


def test_batches_that_are_one_object_are_warned_of(cut: list[Any]) -> None:
    words = r"Train batches stay whole.*microbatches=2 has no effect.*Graphs.*split_batch"
    with pytest.warns(UserWarning, match=words):
        fit(made(Graphs()))
    assert [len(parts) for parts in cut] == [1]
    with pytest.warns(UserWarning, match=r"nothing but batch\['graph'\].*split_batch"):
        trainer().validate(Reading(), made({"graph": Graphs(), "number": 1}), verbose=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*split_batch")
        fit(made(Graphs()), split_batch=lambda batch, parts: [batch.x[:2], batch.x[2:]])
        assert [len(part) for part in cut[-1]] == [2, 2]
        fit(made(Graphs()), microbatches=1)


def test_parts_that_replicas_with_experts_do_not_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_splitting, "all_gather", lambda number, _: [number, 3])
    fit(made(torch.rand(4, WIDTH)), 4, split_batch=Tensor.tensor_split)
    with pytest.raises(MisconfigurationException, match=r"made 4, 3 micro-batches"):
        fit(made(torch.rand(4, WIDTH)), 4, split_batch=lambda batch, _: batch.split(1))


class Reading(Net):
    def compute(self, batch: Any) -> Tensor:
        return super().compute(batch["graph"])


class Adjacent(Net):
    """Reads a matrix before the layers that has as many rows as there are samples."""

    def compute(self, batch: Any) -> Tensor:
        return super().compute(batch["other"] @ batch["x"])


def test_what_is_no_samples_and_as_long_as_a_batch_leaves_it_whole() -> None:
    batch, module = {"x": torch.rand(6, WIDTH), "other": torch.eye(6)}, Adjacent()
    with pytest.warns(UserWarning, match=r"(?s)on one of 2 micro-batches, raised RuntimeError"):
        trainer().fit(module, made(batch))
    assert [len(each) for each in module.seen] == [6]


class Weighted(Net):
    """Gives its classes weights, of which there are as many as samples."""

    def compute(self, batch: Any) -> Tensor:
        x, y, weight = batch["x"], batch["y"], batch["weight"]
        return nn.functional.cross_entropy(self.layers(x), y, weight=weight)


def split_samples(batch: Any, parts: int) -> list[Any]:
    cut = zip(batch["x"].chunk(parts), batch["y"].chunk(parts), strict=True)
    return [{**batch, "x": x, "y": y} for x, y in cut]


@pytest.mark.parametrize("split_batch", [None, split_samples])
def test_behind_the_layers_what_is_no_samples_is_whole(split_batch: Any) -> None:
    weight, y = torch.tensor([1.0, 3.0]), torch.tensor([0, 1])
    batch, module = {"x": torch.rand(2, WIDTH), "weight": weight, "y": y}, Weighted()
    trainer(split_batch=split_batch).fit(module, made(batch))
    gradients = {name: p.grad.clone() for name, p in module.layers.named_parameters()}
    module.layers.zero_grad()
    module.compute(batch).backward()
    for name, parameter in module.layers.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


@pytest.mark.parametrize(
    ("batches", "named"),
    [
        (made((torch.rand(4, WIDTH), torch.rand(3))), r"batch\[1\] of shape \(3,\)"),
        (
            DataLoader(
                torch.rand(8, 3, WIDTH), 4, collate_fn=lambda s: (torch.stack(s, 1), torch.ones(4))
            ),
            r"batch\[0\] of shape \(3, 4, 4\), as batch\[1\] has 4 samples",
        ),
        (
            CombinedLoader([DataLoader(torch.rand(8, WIDTH), n) for n in (2, 4)]),
            r"batch\[0\]: 2, batch\[1\]: 4",
        ),
    ],
)
def test_ambiguous_batches_stay_whole(batches: Any, named: str, cut: list[Any]) -> None:
    with pytest.warns(UserWarning, match=rf"Train batches stay whole.*{named}.*split_batch"):
        fit(batches)
    assert {len(parts) for parts in cut} == {1}


def test_a_split_of_ones_own(cut: list[Any]) -> None:
    def split(batch: Any, parts: int) -> list[Any]:
        x, table = batch
        return [(chunk, table) for chunk in x.split([3, 1])]

    batches = made((torch.rand(4, WIDTH), torch.rand(3)))
    module = fit(batches, split_batch=split)
    assert [[len(x) for x, _ in parts] for parts in cut] == [[3, 1]]
    assert [len(x) for x, _ in module.seen] == [4]
    assert module.logged[0]["n"] == 4


def test_the_number_of_samples_is_logged_as_of_the_batch() -> None:
    # The third batch's number is also the number of samples of its micro-batches.
    module = fit(DataLoader(TensorDataset(torch.rand(15, WIDTH)), 4))
    assert [logged["n"] for logged in module.logged] == [4, 4, 4, 3]
    assert [logged["batch_number"] for logged in module.logged] == [0, 1, 2, 3]


def test_loaders_are_told_apart(told: list[str]) -> None:
    def columns(samples: list) -> Any:
        return {"x": torch.stack(samples)}

    module = Net()
    run = trainer()

    class Two(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.compute(batch)

    module = Two()
    data = torch.rand(4, 4, WIDTH)
    run.validate(
        module, [DataLoader(data, 4), DataLoader(data, 4, collate_fn=columns)], verbose=False
    )
    assert told == [
        "Micro-batches of val batches: cut batch along dimension 0.",
        "Micro-batches of val batches: cut batch['x'] along dimension 0.",
    ]


def test_several_loaders_of_one_size_are_cut_together(cut: list[Any]) -> None:
    data = [DataLoader(torch.rand(4, 3, WIDTH), 4, collate_fn=torch.stack)] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(CombinedLoader({"a": data[0], "b": [data[1]]}))
    assert [[(len(p["a"]), len(p["b"][0])) for p in parts] for parts in cut] == [[(2, 2)] * 2]


def test_a_lone_vector_may_be_one_sample_and_stays_whole(told: list[str], cut: list[Any]) -> None:
    """As one process, where the dataset gives samples and the loader makes no batches of them."""
    samples = torch.rand(3, WIDTH)
    module = Net()
    loader = made(*samples)
    run = trainer(microbatches=4)
    run.fit(module, loader, loader)
    assert [[part.shape for part in parts] for parts in cut] == [[(WIDTH,)]] * (2 + 3 + 3)
    module.predict_step = lambda batch, batch_idx: module.layers(batch)
    predictions = run.predict(module, loader)
    assert torch.equal(torch.stack(predictions), torch.stack([*map(module.layers, samples)]))
    line = "batches: nothing is cut; passed whole: batch."
    assert told == [f"Micro-batches of {name} {line}" for name in ("val", "train", "predict")]


@pytest.mark.parametrize("returned", [None, [], "ab", 3])
def test_what_is_no_list_of_parts_is_refused(returned: Any) -> None:
    def split(batch: Any, parts: int) -> Any:
        return returned

    with pytest.raises(ValueError, match=r"split_batch=<function .* returned .* for 2 micro-batc"):
        fit(made(torch.rand(4, WIDTH)), split_batch=split)
    with pytest.raises(ValueError, match=r"split_batch=<built-in function print> returned None"):
        fit(made(torch.rand(4, WIDTH)), split_batch=print)


def labels(batch: Any) -> int:
    return int((batch[1] >= 0).sum())


@pytest.mark.parametrize(
    ("reduction", "samples", "expected"),
    [
        (None, 7, [(6 / 7, 6 / 7), (8 / 7, 8 / 7)]),
        ("mean", 8, [(1.0, 1.0), (1.0, 1.0)]),
        ("sum", 7, [(6 / 7, 2.0), (8 / 7, 2.0)]),
        ("sum", 1, [(2.0, 2.0), (0.0, 0.0)]),
        (labels, 7, [(6 / 7, 2 * 2 / 6), (8 / 7, 2 * 4 / 6)]),
        (labels, 2, [(0.0, 0.0), (1.0, 2.0)]),
    ],
)
def test_a_replica_that_has_a_part_of_a_batch_counts_for_it(
    reduction: Any, samples: int, expected: Any
) -> None:
    batch = [torch.randn(samples, WIDTH), torch.arange(samples) - 1]
    run, loader = trainer(), DataLoader(TensorDataset(*batch), samples)
    run.fit(Net(), loader)
    origin = Source("train", None, 0, (loader,), list)
    for rank, share in enumerate(expected):
        grid = Grid(2, 1, rank, replicas_per_batch=2)
        splitter = BatchSplitter(run, 2, None)
        (x, _), own = splitter.own_part(batch, origin, grid, reduction)
        assert own[:2] == pytest.approx(share)
        if own.samples:
            assert own.size == (len(x), samples) == (round(samples * own.samples / 2), samples)


def test_a_batch_that_cannot_be_divided_counts_once() -> None:
    batch = [torch.randn(3, WIDTH), torch.randn(5, WIDTH)]
    origin = Source("train", None, 0, (made(batch),), list)
    splitter = BatchSplitter(trainer(), 2, None)
    shares = [
        splitter.own_part(batch, origin, Grid(2, 1, rank, replicas_per_batch=2), None)[1]
        for rank in range(2)
    ]
    assert [share[:2] for share in shares] == [(2.0, 1.0), (0.0, 1.0)]
