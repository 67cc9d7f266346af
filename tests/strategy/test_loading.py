"""A rank that resumes reads of the file what its stage needs, and does not keep it open."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.checkpoint import atomic_io
from tests.memory import touched
from tests.parity.cases import trainer
from tests.ranks import run_ranks

WIDTH, LARGE, LAYERS = 64, 512, 4
LAST = f"layers.{LAYERS - 1}.weight"
"""Of the first rank, which has the last stage."""


class Equal(L.LightningModule):
    """Equal layers without biases, and a matrix outside of them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self.layers, self.outer = nn.Sequential(*layers), nn.Parameter(torch.eye(width))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch @ self.outer), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watched(Callback):
    """Notes where the checkpoint is mapped into memory when training starts."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def on_train_start(self, *_: Any) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        self.mapped = [line for line in lines if line.endswith(self.path)]


class Doubles(Watched):
    """Reads and changes the checkpoint before it is loaded."""

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["optimizer_states"][0]["state"]
        self.types = {
            type(t) for each in (checkpoint["state_dict"], *state.values()) for t in each.values()
        }
        for each in state.values():
            each["exp_avg"].mul_(2)


def resume(stages: int, watched: Watched) -> dict[str, Any]:
    """Go on for one step; what the rank read, mapped and has then."""
    L.seed_everything(1, verbose=False)
    checked: list[Any] = []

    def check(file: Any, original: Any = atomic_io.archive.verify) -> None:
        checked.append(file)
        original(file)

    run = trainer(AxoSparseStrategy(stages, 2), stages, max_steps=2, callbacks=[watched])
    module = Equal()
    with patch.object(atomic_io.archive, "verify", check):
        run.fit(module, DataLoader(torch.ones(16, WIDTH), 8), ckpt_path=watched.path)
    weights = {n: p.detach().clone() for n, p in module.named_parameters() if not p.is_meta}
    return {
        "checked": len(checked),
        "mapped": watched.mapped,
        "weights": weights,
        "types": getattr(watched, "types", None),
    }


def load_from_checkpoint(stages: int, path: Path) -> dict[str, Any]:
    """Train a step with the weights of a file; what of it was read before, and after."""
    mappings: list[Any] = []

    def kept(*args: Any, original: Any = torch.UntypedStorage.from_file) -> Any:
        mappings.append(original(*args))
        return mappings[-1]

    run = trainer(AxoSparseStrategy(stages, 2), stages, max_steps=1)
    with patch.object(torch.UntypedStorage, "from_file", kept), run.init_module(empty_init=True):
        module = Equal.load_from_checkpoint(path, strict=True)
    is_file = lambda line: line.endswith(str(path))  # noqa: E731
    before = touched(is_file)
    run.fit(module, DataLoader(torch.ones(16, LARGE), 8))
    weights = {n: p.detach().clone() for n, p in module.named_parameters() if not p.is_meta}
    return {"before": before, "read": touched(is_file), "weights": weights}


def on_two(path: Path) -> dict[str, Any]:
    return {
        "plain": resume(2, Watched(path / "plain.ckpt")),
        "hooked": resume(2, Doubles(path / "plain.ckpt")),
        "loaded": load_from_checkpoint(2, path / "large.ckpt"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    L.seed_everything(0, verbose=False)
    for name, width in (("plain", WIDTH), ("large", LARGE)):
        run = trainer(
            AxoSparseStrategy(1, 2),
            max_steps=1,
            callbacks=[ModelCheckpoint(path, name)],
            enable_checkpointing=True,
        )
        L.seed_everything(0, verbose=False)
        run.fit(Equal(width), DataLoader(torch.ones(16, width), 8))
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(2, on_two, folder)


def test_a_file_is_checked_once_and_not_kept_open(ranks: list[dict[str, Any]]) -> None:
    assert [rank["plain"]["checked"] for rank in ranks] == [1, 0]
    results = (rank[way] for rank in ranks for way in ("plain", "hooked"))
    assert not any(result["mapped"] for result in results)


@pytest.mark.parametrize("way", ["plain", "hooked"])
def test_stages_go_on_as_one_process_does(
    ranks: list[dict[str, Any]], folder: Path, way: str
) -> None:
    watched = Doubles if way == "hooked" else Watched
    alone = resume(1, watched(folder / "plain.ckpt"))
    assert not alone["mapped"]
    for rank in ranks:
        assert rank[way]["types"] == alone["types"] == ({Tensor} if way == "hooked" else None)
        for name, weight in rank[way]["weights"].items():
            torch.testing.assert_close(weight, alone["weights"][name], rtol=1e-5, atol=1e-7)


def test_a_hook_changes_what_is_loaded(ranks: list[dict[str, Any]]) -> None:
    plain, hooked = (ranks[0][way]["weights"][LAST] for way in ("plain", "hooked"))
    assert not torch.equal(plain, hooked)


def test_load_from_checkpoint_without_memory_reads_what_a_stage_uses(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    weight = 4 * LARGE * LARGE
    of_a_stage = (LAYERS // 2 + 1) * weight
    for rank in ranks:
        assert rank["loaded"]["before"] < weight
        assert of_a_stage <= rank["loaded"]["read"] < of_a_stage + weight

    run = trainer("auto", max_steps=1)
    module = Equal.load_from_checkpoint(folder / "large.ckpt")
    run.fit(module, DataLoader(torch.ones(16, LARGE), 8))
    alone = dict(module.named_parameters())
    for rank in ranks:
        for name, value in rank["loaded"]["weights"].items():
            torch.testing.assert_close(value, alone[name].detach(), rtol=1e-5, atol=1e-7)
    assert set().union(*(rank["loaded"]["weights"] for rank in ranks)) == alone.keys()
