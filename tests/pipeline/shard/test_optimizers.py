from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from lightning_axosparse.distributed import gradient_reducer
from lightning_axosparse.pipeline.shard import optimizers as stepping
from lightning_axosparse.pipeline.shard.optimizers import (
    BucketwiseOptimizer,
    OptimizerShards,
)
from lightning_axosparse.strategy.validation import validate_steps_in_parts
from tests.parity.cases import Net, Record, difference, loader, trainer, whole_state
from tests.ranks import run_ranks

SHAPES = ((7, 5), (3,), (20, 20), (4, 4, 2))

Configure = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Configure] = {
    "Adam": lambda p: Adam(p, 1e-2, amsgrad=True),
    "AdamW": lambda p: AdamW(p, 1e-2, weight_decay=0.1),
    "AdamW foreach": lambda p: AdamW(p, 1e-2, foreach=True),
    "AdamW fused": lambda p: AdamW(p, 1e-2, fused=True),
    "SGD": lambda p: SGD(p, 0.1),
    "SGD nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: RMSprop(p, 1e-2),
    "NAdam": lambda p: NAdam(p, 1e-2),
    "Adagrad": lambda p: Adagrad(p, 1e-2, initial_accumulator_value=0.1),
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def differentiate(parameters: Iterable[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def in_buckets(optimizer: Optimizer, bucket: int, **options: Any) -> BucketwiseOptimizer:
    """An optimizer of which this replica keeps all."""
    shards = OptimizerShards(optimizer, lambda parameter: None)
    return BucketwiseOptimizer(optimizer, shards, bucket=bucket, **options)


@pytest.mark.parametrize("bucket", [1, 50, 10_000])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_numbers_are_the_same_to_the_bit(kind: str, bucket: int) -> None:
    ours, theirs = parameters(), parameters()
    optimizer, plain = OPTIMIZERS[kind](ours), OPTIMIZERS[kind](theirs)
    in_buckets(optimizer, bucket)
    for step in range(4):
        differentiate(ours, step)
        differentiate(theirs, step)
        ours[step].grad = theirs[step].grad = None  # unused in this step
        optimizer.step()
        plain.step()
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
            assert (mine.grad is None) == (other.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, other.grad)
    expected = plain.state_dict()
    assert optimizer.state_dict()["param_groups"] == expected["param_groups"]
    for index, state in optimizer.state_dict()["state"].items():
        assert state.keys() == expected["state"][index].keys()
        for key, value in state.items():
            assert torch.equal(value, expected["state"][index][key])


def test_the_step_is_one_step_to_hooks_schedulers_and_closures() -> None:
    weights = parameters()
    optimizer = AdamW([{"params": weights[:2]}, {"params": weights[2:], "lr": 0.5}], 1e-2)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    stepped = in_buckets(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> float:
        assert torch.is_grad_enabled()
        assert [p for group in optimizer.param_groups for p in group["params"]] == weights
        differentiate(weights, 0)
        seen.append("closure")
        return 1.5

    for call in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        seen.clear()
        assert call() == 1.5
        assert seen == ["before", "closure", "after"]
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.05]
    assert set(optimizer.state) == set(weights)
    stepped.remove()
    differentiate(weights, 1)
    optimizer.step()


class ByNorm(SGD):
    """Steps by a share of the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        members = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = sum((p.grad.square().sum() for p in members), torch.tensor(0.0)).sqrt()
        for parameter in members:
            parameter.sub_(parameter.grad / norm)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_elementwise_optimizers_are_let_through(kind: str) -> None:
    optimizer = OPTIMIZERS[kind](parameters())
    before = copy.deepcopy(optimizer.state_dict())
    validate_steps_in_parts(optimizer, "shard_optimizer")
    assert repr(optimizer.state_dict()) == repr(before)


@pytest.mark.parametrize(
    ("configure", "reason"),
    [
        (lambda p: ByNorm(p, 0.1), "ByNorm cannot step parts of parameters: parts of"),
        (lambda p: Adam(p, capturable=True), "capturable"),
        (Adafactor, "Adafactor cannot step parts of parameters: parts of"),
        (lambda p: Muon(p[:1]), "Muon cannot step parts of parameters: a trial step failed"),
    ],
    ids=["by norm", "capturable", "Adafactor", "Muon"],
)
def test_others_are_refused(configure: Configure, reason: str) -> None:
    with pytest.raises(MisconfigurationException, match=reason):
        validate_steps_in_parts(configure(parameters()), "shard_optimizer")


def test_buckets_are_stepped_as_their_gradients_arrive() -> None:
    events: list[tuple[str, list[int]]] = []
    weights = [nn.Parameter(torch.ones(10)) for _ in range(5)]

    def note(event: str, parameters: Iterable[Tensor]) -> None:
        events.append((event, [int(p[0]) for p in parameters]))

    class Watched(SGD):
        def step(self, closure: Any = None) -> Any:
            note("step", [p for group in self.param_groups for p in group["params"]])
            return super().step(closure)

    for number, weight in enumerate(weights):
        weight.data.fill_(number)
        weight.grad = torch.zeros(10)
    optimizer = Watched(weights)
    in_buckets(optimizer, 20, await_gradients=lambda parameters: note("await", parameters))
    optimizer.step()
    assert events[:8] == [
        *(("await", [4, 3]), ("step", [3, 4])),
        *(("await", [2, 1]), ("step", [1, 2])),
        *(("await", [0]), ("step", [0])),
        ("await", [0, 1, 2, 3, 4]),
        ("step", [0, 1, 2, 3, 4]),  # the optimizer's own, with nothing to do
    ]


# Runs on ranks

EPOCHS, DRAWN, STOP = 3, 2, 1
HARD = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}

SHARDED = {"shard_optimizer": True}


def train(
    grid: tuple[int, int],
    way: dict[str, Any],
    epochs: int,
    folder: Path,
    resume: Path | None = None,
    **options: Any,
) -> Record:
    """Two parameter groups with a scheduler, and a ticket that is drawn on the way."""
    L.seed_everything(0, verbose=False)
    g_inter, ranks = grid
    stepping.BUCKET = 600
    run = trainer(
        AxoSparseStrategy(g_inter=g_inter, microbatches=2, **way),
        ranks,
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[
            EarlyBirdTicket(0.6, every="1 epoch", draw_by=f"{DRAWN} epochs"),
            ModelCheckpoint(folder, filename="stop", save_top_k=-1),
        ],
        **options,
    )
    module = Net(outer=True, tied=True)
    run.fit(module, loader(1), ckpt_path=resume, weights_only=False)
    record: Record = run.callbacks[0].record
    record.weights = whole_state(run, module)
    return record


def train_both_ways(
    grids: list[tuple[int, int]], other: dict[str, Any], folder: Path
) -> list[dict[str, Any]]:
    """Uninterrupted, in the plain and another way, and with a stop at which that changes."""
    ways = {False: {}, True: other}
    results = []
    for grid in grids:
        at = folder / "x".join(map(str, grid))
        whole = [train(grid, way, EPOCHS, at / "whole", **HARD) for way in ways.values()]
        resumed = {}
        for before in (False, True):
            train(grid, ways[before], STOP, at / str(before), **HARD)
            stopped = at / str(before) / "stop.ckpt"
            resumed[before] = train(grid, ways[not before], EPOCHS, at / "end", stopped, **HARD)
        unclipped = []
        for way in ways.values():
            with buckets_under_way() as under_way:
                unclipped.append(train(grid, way, EPOCHS, at / "unclipped"))
        results.append(
            {"whole": whole, "resumed": resumed, "unclipped": unclipped, "under way": under_way}
        )
    return results


@contextmanager
def buckets_under_way() -> Iterator[list[bool]]:
    """Whether some of the all-reduce was still under way, each time that gradients had arrived."""
    reducer, found = gradient_reducer.GradientReducer, []
    wait_for, gradient_reducer.BUCKET_BYTES = reducer.wait_for, 1000

    def watched(self: Any, parameters: Any) -> None:
        wait_for(self, parameters)
        found.append(bool(self._bucket_of))

    reducer.wait_for = watched
    yield found
    reducer.wait_for = wait_for


def check(result: dict[str, Any]) -> None:
    plain, other = result["whole"]
    assert difference(plain, other) == 0
    assert difference(*result["unclipped"]) == 0
    assert any((weight == 0).float().mean() > 0.5 for weight in plain.weights.values())
    for changed_from, record in result["resumed"].items():
        assert record.losses == plain.losses[-len(record.losses) :], changed_from
        for name, weight in plain.weights.items():
            assert torch.equal(record.weights[name], weight), (changed_from, name)


def test_ranks_train_to_the_same_bits(tmp_path: Path) -> None:
    for results in run_ranks(2, train_both_ways, [(2, 2), (1, 2)], SHARDED, tmp_path):
        for result in results:
            check(result)
        pipeline, replicas = results
        assert any(replicas["under way"])
        assert not any(pipeline["under way"])  # nothing to reduce but what stages share
