from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from lightning_axosparse.distributed import gradient_reducer
from lightning_axosparse.pipeline.shard import optimizers as stepping
from lightning_axosparse.pipeline.shard.optimizers import (
    BucketwiseOptimizer,
    HostMemory,
    bucketed,
)
from lightning_axosparse.sparse.module.optimizer_state import MASTER
from lightning_axosparse.strategy.validation import validate_placement
from tests.parity.cases import Net, Record, difference, loader, trainer, whole_state
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SHAPES = ((7, 5), (3,), (20, 20), (4, 4, 2))

Configure = Callable[[Iterable[Any]], Optimizer]

OPTIMIZERS: dict[str, Configure] = {
    "Adam": lambda p: Adam(p, 1e-2, amsgrad=True),
    "AdamW": lambda p: AdamW(p, 1e-2, weight_decay=0.1),
    "AdamW foreach": lambda p: AdamW(p, 1e-2, foreach=True),
    "AdamW fused": lambda p: AdamW(p, 1e-2, fused=True),
    "SGD": lambda p: SGD(p, 0.1),
    "SGD nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: RMSprop(p, 1e-2),
    "NAdam": lambda p: NAdam(p, 1e-2),
    "Adagrad": lambda p: Adagrad(p, 1e-2),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def differentiate(parameters: Iterable[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("bucket", [1, 50, 10_000])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_numbers_are_the_same_to_the_bit(kind: str, bucket: int) -> None:
    ours, theirs = parameters(), parameters()
    offloaded, plain = OPTIMIZERS[kind](ours), OPTIMIZERS[kind](theirs)
    BucketwiseOptimizer(offloaded, HostMemory(), bucket=bucket)
    for step in range(4):
        differentiate(ours, step)
        differentiate(theirs, step)
        ours[step].grad = theirs[step].grad = None  # unused in this step
        offloaded.step()
        plain.step()
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
            assert (mine.grad is None) == (other.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, other.grad)
    expected = plain.state_dict()
    assert offloaded.state_dict()["param_groups"] == expected["param_groups"]
    for index, state in offloaded.state_dict()["state"].items():
        assert state.keys() == expected["state"][index].keys()
        for key, value in state.items():
            assert torch.equal(value, expected["state"][index][key])


def test_the_step_is_one_step_to_hooks_schedulers_and_closures() -> None:
    weights = parameters()
    optimizer = AdamW([{"params": weights[:2]}, {"params": weights[2:], "lr": 0.5}], 1e-2)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    offload = BucketwiseOptimizer(optimizer, HostMemory(), bucket=1)
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
    offload.remove()
    differentiate(weights, 1)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_stepped_as_its_float32_master(dtype: torch.dtype) -> None:
    ours, masters = parameters(dtype), [nn.Parameter(p.detach().float()) for p in parameters(dtype)]
    offloaded, plain = Adagrad(ours, 1e-3), Adagrad(masters, 1e-3)
    BucketwiseOptimizer(offloaded, HostMemory(), bucket=50)
    for step in range(5):
        differentiate(ours, step)
        for parameter, master in zip(ours, masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        offloaded.step()
        plain.step()
    for parameter, master in zip(ours, masters, strict=True):
        assert torch.equal(parameter, master.to(dtype))
        assert torch.equal(offloaded.state[parameter][MASTER], master)
        assert {v.dtype for v in offloaded.state[parameter].values()} == {torch.float32}


def test_a_master_gives_way_where_somebody_has_changed_the_parameter() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 1.0, 1.0], dtype=torch.bfloat16))
    optimizer = SGD([weight], 1e-4)
    BucketwiseOptimizer(optimizer, HostMemory(), bucket=10)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0, 1.0]  # bfloat16 cannot tell
    weight.data[1] = 2.0
    optimizer.step()
    kept = optimizer.state[weight][MASTER]
    assert torch.allclose(kept, torch.tensor([1 - 3e-4, 2 - 1e-4, 1 - 3e-4]), rtol=0, atol=1e-7)


def test_state_is_loaded_in_the_precision_of_the_masters() -> None:
    weights, others = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, other = AdamW(weights), AdamW(others)
    BucketwiseOptimizer(optimizer, HostMemory(), bucket=50)
    offload = BucketwiseOptimizer(other, HostMemory(), bucket=50)
    for step in range(3):
        differentiate(weights, step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    offload.load_state_dict(saved)
    assert set(other.state) == set(others)
    for index, parameter in enumerate(others):
        assert other.param_groups[0]["params"][index] is parameter
        for key, value in other.state[parameter].items():
            assert value.dtype == torch.float32
            assert torch.equal(value, saved["state"][index][key])


def test_the_device_holds_parameters_and_gradients_and_the_host_a_bucket() -> None:
    widest: list[int] = []

    class Watched(AdamW):
        def step(self, closure: Any = None) -> Any:
            widest.append(sum(p.numel() for group in self.param_groups for p in group["params"]))
            return super().step(closure)

    weights = [nn.Parameter(torch.randn(10, 10, dtype=torch.bfloat16)) for _ in range(8)]
    optimizer = Watched(weights)
    BucketwiseOptimizer(optimizer, HostMemory(), bucket=250)
    for step in range(2):
        differentiate(weights, step)
        optimizer.step()
    elements = sum(weight.numel() for weight in weights)
    on_device = [t for weight in weights for t in (weight, weight.grad)]
    on_host = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    assert bytes_of(on_device) == 4 * elements
    assert bytes_of(on_host) == 12 * elements
    assert bytes_of([*on_device, *on_host]) == 16 * elements  # nothing is shared
    assert set(widest) == {200, 800}  # the last of a step is the whole, with nothing to do


def bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


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
    validate_placement(optimizer, "offload_optimizer")
    assert repr(optimizer.state_dict()) == repr(before)


def test_so_are_those_that_step_whole_matrices() -> None:
    validate_placement(Muon([nn.Parameter(torch.randn(4, 4))]), "offload_optimizer")


@pytest.mark.parametrize(
    ("configure", "reason"),
    [
        (lambda p: ByNorm(p, 0.1), "gives other numbers"),
        (lambda p: Adam(p, capturable=True), "capturable"),
    ],
)
def test_others_are_refused(configure: Configure, reason: str) -> None:
    with pytest.raises(MisconfigurationException, match=reason):
        validate_placement(configure(parameters()), "offload_optimizer")


def test_refusals_come_before_the_run() -> None:
    class Joint(Net):
        def configure_optimizers(self) -> Optimizer:
            return ByNorm(self.parameters(), 0.1)

    for devices in (1, 2):
        run = trainer(AxoSparseStrategy(offload_optimizer=True), devices)
        with pytest.raises(MisconfigurationException, match="ByNorm cannot be offloaded"):
            run.fit(Joint(), loader(1))


@given(st.lists(st.integers(0, 12)), st.integers(1, 20))
def test_buckets_are_full_and_in_order(sizes: list[int], limit: int) -> None:
    weights = [nn.Parameter(torch.empty(size)) for size in sizes]
    buckets = bucketed(weights, limit)
    assert [id(p) for bucket in buckets for p in bucket] == [id(p) for p in weights]
    totals = [sum(p.numel() for p in bucket) for bucket in buckets]
    for bucket, total in zip(buckets, totals, strict=True):
        assert total <= limit or len(bucket) == 1
    for total, following in zip(totals, buckets[1:], strict=False):
        assert total + following[0].numel() > limit


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
    BucketwiseOptimizer(
        optimizer, HostMemory(), None, lambda parameters: note("await", parameters), 20
    )
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
OFFLOADED = {"offload_optimizer": True}


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
        found.append(bool(self.under_way))

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


@pytest.mark.parametrize("other", [OFFLOADED, SHARDED, OFFLOADED | SHARDED], ids="-".join)
def test_ranks_train_to_the_same_bits(other: dict[str, Any], tmp_path: Path) -> None:
    for results in run_ranks(2, train_both_ways, [(2, 2), (1, 2)], other, tmp_path):
        for result in results:
            check(result)
        pipeline, replicas = results
        assert any(replicas["under way"])
        assert not any(pipeline["under way"])  # nothing to reduce but what stages share


def test_a_resumed_run_goes_on_from_its_masters(tmp_path: Path) -> None:
    def run(epochs: int, name: str, resume: Path | None = None) -> Record:
        return train((1, 1), OFFLOADED, epochs, tmp_path / name, resume, precision="bf16-true")

    expected = run(EPOCHS, "whole")
    run(STOP, "part")
    stopped = tmp_path / "part" / "stop.ckpt"
    for state in torch.load(stopped, weights_only=False)["optimizer_states"][0]["state"].values():
        assert {state[key].dtype for key in (MASTER, "exp_avg", "exp_avg_sq")} == {torch.float32}
    record = run(EPOCHS, "rest", stopped)
    assert record.losses == expected.losses[-len(record.losses) :]
    for name, weight in expected.weights.items():
        assert torch.equal(record.weights[name], weight)
