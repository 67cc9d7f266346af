from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from lightning_axosparse.distributed import gradient_reducer
from lightning_axosparse.sparse.module.parameters import state_bytes
from tests.parity.cases import Net, Record, difference, loader, trainer, whole_state
from tests.pipeline.shard.test_optimizers import OPTIMIZERS
from tests.ranks import run_ranks


class Trained(Net):
    """A network with an optimizer of its own, which records the elements of its state."""

    optimizer = "AdamW"

    def configure_optimizers(self) -> Optimizer:
        optimizer: Optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        return optimizer

    def on_train_epoch_end(self) -> None:
        self.elements = elements(self.trainer)


def elements(run: L.Trainer) -> dict[str, tuple[int, int]]:
    """Of each parameter that this rank has, its elements and those of its state."""

    def most(state: dict[str, Any]) -> int:
        counts = ("step", "mu_product")  # Of NAdam.
        return max(v.numel() for k, v in state.items() if isinstance(v, Tensor) and k not in counts)

    states = run.optimizers[0].state
    held = run.strategy.local_parameters()  # type: ignore[attr-defined]
    return {name: (p.numel(), most(states[p])) for name, p in held.items() if states.get(p)}


def part(size: int, replicas: int, rank: int) -> int:
    """How many of ``size`` elements the replica of that rank keeps."""
    if size < 64 * replicas:
        return size
    blocks = -(-size // 64)
    each = -(-blocks // replicas) * 64
    return max(0, min(size - each * rank, each))


def train(
    folder: Path,
    shards: bool,
    ranks: int,
    optimizer: str = "AdamW",
    epochs: int = 3,
    resume: Path | None = None,
    draw_by: int = 1,
    **options: Any,
) -> tuple[Record, Trained, L.Trainer]:
    L.seed_everything(0, verbose=False)
    module = Trained(outer=True, tied=True)
    module.optimizer = optimizer
    run = trainer(
        AxoSparseStrategy(shard_optimizer=shards, microbatches=2, **options),
        ranks,
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[
            EarlyBirdTicket(
                0.6,
                score="magnitude",
                every="1 epoch",
                draw_by=f"{draw_by} epochs",
            ),
            ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1),
        ],
    )
    run.fit(module, loader(1), ckpt_path=resume, weights_only=False)
    record: Record = run.callbacks[0].record
    record.weights = whole_state(run, module)
    return record, module, run


def train_each_optimizer(folder: Path) -> list[Any]:
    results = []
    for optimizer in OPTIMIZERS:
        plain, sharded = (
            train(folder / f"{optimizer}{shards}", shards, 3, optimizer) for shards in (False, True)
        )
        states = [run.optimizers[0].state_dict()["state"] for *_, run in (plain, sharded)]
        results.append(
            (optimizer, difference(plain[0], sharded[0]), plain[1].elements, sharded[1].elements)
        )
        for index, state in states[0].items():
            for key, value in state.items():
                same = states[1][index][key]
                assert value is same or torch.equal(torch.as_tensor(value), torch.as_tensor(same))
    return results


def test_three_replicas_keep_a_third_each_and_train_to_the_same_bits(tmp_path: Path) -> None:
    ranks = run_ranks(3, train_each_optimizer, tmp_path)
    for rank, results in enumerate(ranks):
        for optimizer, differs, whole, parts in results:
            assert differs == 0, optimizer
            assert (len(whole) == 0) == (optimizer == "SGD")
            assert whole.keys() == parts.keys()
            for name, (size, kept) in parts.items():
                assert whole[name] == (size, size)
                assert kept == part(size, 3, rank)


def train_with_folders(folder: Path) -> list[Any]:
    results = []
    options = {"save_distributed_checkpoint": True, "g_inter": 2, "draw_by": 2}
    whole, *_ = train(folder / "whole", False, 4, epochs=4, **options)
    train(folder / "part", True, 4, epochs=1, **options)
    stopped = folder / "part" / "epoch=0.ckpt"
    for shards in (False, True):
        record, *_ = train(folder / "rest", shards, 4, epochs=4, resume=stopped, **options)
        results.append(
            record.losses == whole.losses[-len(record.losses) :]
            and all(torch.equal(record.weights[n], w) for n, w in whole.weights.items())
        )
    return results


def test_every_way_resumes_from_the_folders_of_shards(tmp_path: Path) -> None:
    for same in run_ranks(4, train_with_folders, tmp_path):
        assert same == [True] * 2


def test_one_replica_keeps_all(tmp_path: Path) -> None:
    (plain, module, _), (sharded, same, _) = (train(tmp_path, s, 1) for s in (False, True))
    assert difference(plain, sharded) == 0
    assert module.elements == same.elements
    assert all(kept == size for size, kept in same.elements.values())


class Wide(L.LightningModule):
    """A network whose small parameters count little, which notes the bytes of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), 1e-3)

    def on_train_epoch_end(self) -> None:
        self.bytes = state_bytes(self, self.trainer.optimizers[0])
        self.elements = elements(self.trainer)
        self.gradients = {name: p.grad for name, p in self.named_parameters()}


class Tied(Wide):
    """The first and the last layer, of either stage, have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.model[3].weight = self.model[0].weight


class Reading(Wide):
    """Reads its gradients before the optimizer steps."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.norms = {n: float(norm) for n, norm in grad_norm(self, 2).items()}


def train_wide(
    kind: type[Wide], shards: bool, ranks: int, **options: Any
) -> tuple[Wide, dict[str, Tensor]]:
    """The module after a run, and the whole state of it and of its optimizer."""
    L.seed_everything(0, verbose=False)
    module = kind()
    callbacks = [make() for make in options.pop("callbacks", ())]
    strategy = AxoSparseStrategy(shard_optimizer=shards, **options.pop("strategy", {}))
    options = {"max_epochs": 1, "callbacks": callbacks, **options}
    run = trainer(strategy, ranks, **options)
    run.fit(module, DataLoader(torch.randn(24, 128, generator=torch.Generator().manual_seed(0)), 2))
    states = run.optimizers[0].state_dict()["state"].items()
    moments = {f"{index} {name}": value for index, of in states for name, value in of.items()}
    return module, whole_state(run, module) | moments


def drawn() -> EarlyBirdTicket:
    return EarlyBirdTicket(0.5, every="1 epoch", draw_by="2 epochs")


def averaged() -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=0.5)


LONGER = {"max_epochs": 4}


def divide_gradients() -> dict[str, Any]:
    found: dict[str, Any] = {}
    gradient_reducer.BUCKET_BYTES = 4 * (128 * 128 + 128)
    for name, kind, options in (
        ("plain", Wide, {}),
        ("micro-batches", Wide, {"strategy": {"microbatches": 2}}),
        ("accumulated", Wide, {"accumulate_grad_batches": 2}),
        ("drawn", Wide, {"callbacks": [drawn], "max_epochs": 3}),
        ("averaged", Wide, {"callbacks": [averaged], "max_epochs": 3}),
        ("regrid", Tied, {"strategy": {"g_inter": 2, "regrid": 1}, "callbacks": [drawn]} | LONGER),
        ("clipped", Wide, {"gradient_clip_val": 0.01}),
        ("read", Reading, {}),
    ):
        ((plain, expected), (module, state)) = (
            train_wide(kind, shards, 2, **options) for shards in (False, True)
        )
        same = all(torch.equal(state[key], value) for key, value in expected.items())
        message = ""
        try:
            module.gradients["model.0.weight"].norm()
        except RuntimeError as error:
            message = str(error)
        norms = getattr(module, "norms", None) == getattr(plain, "norms", None)
        sizes = plain.elements, module.elements
        found[name] = same, plain.bytes, module.bytes, sizes, message, norms
    return found


def test_gradients_are_divided_unless_something_reads_them() -> None:
    for rank, found in enumerate(run_ranks(2, divide_gradients)):
        for name, (same, plain, divided, sizes, message, norms) in found.items():
            assert same, name
            of_whole, of_part = sizes
            assert len(of_whole) == (7 if name == "regrid" else 8)
            assert of_part == {n: (size, part(size, 2, rank)) for n, (size, _) in of_whole.items()}
            assert norms, name
            whole = name in ("clipped", "read")
            assert (message == "") == whole, name
            assert whole or "on_before_optimizer_step" in message
            expected = plain.weights + plain.indices + plain.gradients / (1 if whole else 2)
            expected += plain.optimizer / 2
            assert divided.total == pytest.approx(expected, rel=0.05), name


class ByRow(SGD):
    """Steps each parameter by a share of its norm, as LAMB does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for g in self.param_groups for p in g["params"]):
            parameter.sub_(parameter.grad / parameter.grad.norm())


def test_refusals_come_before_the_run() -> None:
    class Rows(Net):
        def configure_optimizers(self) -> Optimizer:
            return ByRow(self.parameters(), 0.1)

    run = trainer(AxoSparseStrategy(shard_optimizer=True), 2)
    with pytest.raises(MisconfigurationException, match="ByRow cannot step parts"):
        run.fit(Rows(), loader(1))


class Failing(Trained):
    """Raises in the second epoch, on every rank or on one."""

    ranks: tuple[int, ...] = ()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.global_rank in self.ranks:
            raise ArithmeticError("of the user")


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=str)
def test_a_failing_run_ends_with_its_error(ranks: tuple[int, ...]) -> None:
    L.seed_everything(0, verbose=False)
    module = Failing()
    module.ranks = ranks
    run = trainer(AxoSparseStrategy(shard_optimizer=True, microbatches=2), 2, max_epochs=3)
    with pytest.raises(Exception, match="of the user"):
        run.fit(module, loader(1))
