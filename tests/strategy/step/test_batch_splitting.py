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
from lightning_axosparse.strategy.step import batch_splitting

WIDTH = 4


class Net(L.LightningModule):
    """Notes the shapes of the micro-batches that its last stage sees."""

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
        strategy=AxoSparseStrategy(
            2, microbatches, transport="loopback", **{"check_first_batch": False, **options}
        ),
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
    monkeypatch.setattr(batch_splitting, "rank_zero_info", lines.append)
    return lines


def test_what_is_cut_and_what_not_is_said_once_a_loader(told: list[str]) -> None:
    def collate(samples: list) -> Any:
        return {"x": torch.stack(samples), "y": np.zeros(len(samples)), "names": ["a", "b"]}

    loader = DataLoader(torch.rand(9, 7, WIDTH), 3, collate_fn=collate)
    module = Net()
    trainer().fit(module, loader, loader)
    line = "cut batch['x'], batch['y'] along dimension 0; passed whole: batch['names']."
    assert told == [f"Micro-batches of {name} batches: {line}" for name in ("val", "train")]
    sizes = [len(part["y"]) for part in module.seen]
    assert sizes[:6] == [1] * 6, "three samples are validated in equal parts"
    assert sizes[6:12] == [1, 2] * 3
    assert all(part["x"].shape == (len(part["y"]), 7, WIDTH) for part in module.seen)


def test_an_object_beside_tensors_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"gets the whole batch\['graph'\].*split_batch"):
        fit(made({"x": torch.rand(4, WIDTH), "graph": object()}))


class Graphs:
    """A batch as torch_geometric makes them: one object, with an index of the samples."""

    def __init__(self) -> None:
        self.x, self.batch = torch.rand(4, WIDTH), torch.tensor([0, 0, 1, 1])

    def __iter__(self) -> Any:
        return iter([self.x])


def test_batches_that_are_one_object_are_warned_of() -> None:
    words = r"Train batches stay whole.*microbatches=2 has no effect.*Graphs.*split_batch"
    with pytest.warns(UserWarning, match=words):
        module = fit(made(Graphs()))
    assert len(module.seen) == 1
    with pytest.warns(UserWarning, match=r"nothing but batch\['graph'\].*split_batch"):
        trainer().validate(Reading(), made({"graph": Graphs(), "number": 1}), verbose=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*split_batch")
        fit(made(Graphs()), split_batch=lambda batch, parts: [batch.x[:2], batch.x[2:]])
        fit(made(Graphs()), microbatches=1)


def test_parts_that_replicas_with_experts_do_not_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_splitting, "all_gather", lambda number, _: [number, 3])
    fit(made(torch.rand(4, WIDTH)), 4, split_batch=Tensor.tensor_split)
    with pytest.raises(MisconfigurationException, match=r"made 4, 3 micro-batches"):
        fit(made(torch.rand(4, WIDTH)), 4, split_batch=lambda batch, _: batch.split(1))


class Reading(Net):
    def compute(self, batch: Any) -> Tensor:
        return super().compute(batch["graph"])


class Related(Net):
    """Reads a tensor beside the samples that is as long as they are many."""

    def compute(self, batch: Any) -> Tensor:
        x, other = batch["x"], batch["other"]
        if other.dim() == 2:
            return super().compute(other @ x)
        return nn.functional.cross_entropy(self.layers(x), batch["y"], weight=other)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.eye(6), r"RuntimeError.*\n.*batch\['x'\] \(6, 4\), batch\['other'\] \(6, 6\)"),
        (torch.ones(2), r"RuntimeError.*\n.*batch\['other'\] \(2,\)"),
    ],
)
def test_what_is_no_samples_and_as_long_as_a_batch_is_named(other: Tensor, words: str) -> None:
    """An adjacency matrix, and class weights: the first step raises."""
    count = len(other)
    batch = {"x": torch.rand(count, WIDTH), "other": other, "y": torch.ones(count).long()}
    module = Related()
    with pytest.raises(MisconfigurationException, match=rf"(?s){words}.*split_batch"):
        trainer().fit(module, made(batch))

    def split(batch: Any, parts: int) -> list[Any]:
        if other.dim() == 2:
            return [batch]
        cut = zip(batch["x"].chunk(parts), batch["y"].chunk(parts), strict=True)
        return [{**batch, "x": x, "y": y} for x, y in cut]

    trainer(split_batch=split).fit(Related(), made(batch))


@pytest.mark.parametrize(
    ("batches", "named"),
    [
        (made((torch.rand(4, WIDTH), torch.rand(3))), r"batch\[1\] of shape \(3,\)"),
        (
            DataLoader(
                torch.rand(8, 3, WIDTH), 4, collate_fn=lambda s: (torch.stack(s, 1), torch.ones(4))
            ),
            r"batch\[0\] of shape \(3, 4, 4\) .* batch\[1\] has 4 samples",
        ),
        (
            CombinedLoader([DataLoader(torch.rand(8, WIDTH), n) for n in (2, 4)]),
            r"batch\[0\]: 2, batch\[1\]: 4",
        ),
    ],
)
def test_ambiguous_batches_are_refused(batches: Any, named: str) -> None:
    with pytest.raises(ValueError, match=rf"{named}.*split_batch"):
        fit(batches)


def test_a_split_of_ones_own() -> None:
    def split(batch: Any, parts: int) -> list[Any]:
        x, table = batch
        return [(chunk, table) for chunk in x.split([3, 1])]

    batches = made((torch.rand(4, WIDTH), torch.rand(3)))
    module = fit(batches, split_batch=split, check_first_batch=True)
    assert [len(x) for x, _ in module.seen] == [3, 1]
    assert module.logged[0]["n"] == 4


def test_the_number_of_samples_is_logged_as_of_the_batch() -> None:
    # The third batch's number is also the number of samples of its micro-batches.
    module = fit(DataLoader(TensorDataset(torch.rand(15, WIDTH)), 4), check_first_batch=True)
    assert [logged["n"] for logged in module.logged] == [4, 4, 4, 3]
    assert [logged["batch_number"] for logged in module.logged] == [0, 1, 2, 3]


@pytest.mark.parametrize(("samples", "parts"), [(10, 5), (7, 7), (8, 4)])
def test_evaluation_takes_equal_parts(samples: int, parts: int) -> None:
    module = Net()
    batch = [torch.rand(samples, WIDTH)]
    trainer(4).validate(module, made(batch), verbose=False)
    assert [len(part[0]) for part in module.seen] == [samples // parts] * parts


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


def test_several_loaders_of_one_size_are_cut_together() -> None:
    data = [DataLoader(torch.rand(4, 3, WIDTH), 4, collate_fn=torch.stack)] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = fit(CombinedLoader({"a": data[0], "b": [data[1]]}))
    assert [(len(p["a"]), len(p["b"][0])) for p in module.seen] == [(2, 2)] * 2


def test_a_lone_vector_may_be_one_sample_and_stays_whole(told: list[str]) -> None:
    """As one process, where the dataset gives samples and the loader makes no batches of them."""
    samples = torch.rand(3, WIDTH)
    module = Net()
    loader = made(*samples)
    run = trainer(microbatches=4)
    run.fit(module, loader, loader)
    assert [part.shape for part in module.seen] == [(WIDTH,)] * (2 + 3 + 3)
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
