from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import swa_utils

from lightning_axosparse.pipeline.shard.remote_tensor import LocalSteps, RemoteTensor

CPU = torch.device("cpu")


def remote(*shape: int) -> RemoteTensor:
    return RemoteTensor.of(torch.empty(shape, device="meta"), "net.weight", CPU)


def parameter() -> Tensor:
    made = nn.Parameter(remote(3, 2))
    assert isinstance(made, RemoteTensor)
    assert isinstance(made, nn.Parameter)
    return made


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda p: p.norm().item(),
    "float": lambda p: float(p.sum()),
    "int": lambda p: int(p.sum()),
    "bool": lambda p: bool((p > 0).all()),
    "format": lambda p: f"{p.mean():.3f}",
    "numpy": lambda p: p.detach().numpy(),
    "list": lambda p: p.tolist(),
    "list of scalars": lambda p: torch.tensor([p.norm()]),
    "equal": lambda p: torch.equal(p, p),
    "concatenation": lambda p: torch.cat([p.flatten(), torch.ones(2)]),
    "stack": lambda p: torch.stack([p.norm(), torch.ones(())]),
    "copy into values": lambda p: torch.ones(3, 2).copy_(p),
    # torch itself adds nothing here, and says nothing.
    "sum into values": lambda p: torch.ones(3, 2).add_(p),
    "product": lambda p: nn.functional.linear(torch.ones(1, 2), p, torch.ones(3)),
    "penalty": lambda p: (torch.ones((), requires_grad=True) + p.square().sum()).backward(),
    "file": lambda p: torch.save({"weight": p}, io.BytesIO()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reading_values_raises_one_error(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"'net.weight' belongs to another stage"):
        read(parameter())


def test_what_needs_no_values_works() -> None:
    layer = nn.Linear(2, 3)
    layer.weight = parameter()  # type: ignore[assignment]
    assert layer.weight.is_meta
    assert layer.weight.device == CPU  # where other tensors are made for it
    assert torch.ones(2, device=layer.weight.device).sum() == 2
    assert torch.zeros_like(layer.weight, device="cpu").sum() == 0
    copied = copy.deepcopy(layer)
    assert isinstance(copied.weight, RemoteTensor)
    assert copied.weight.requires_grad
    assert list(copied.double().state_dict()) == ["weight", "bias"]
    assert layer.weight.cpu() is layer.weight.to(CPU) is layer.weight
    assert layer.weight.to(CPU, copy=True) is not layer.weight
    there = layer.weight.to("cuda", torch.float16)
    assert (there.device.type, there.dtype, layer.weight.device) == ("cuda", torch.float16, CPU)
    assert torch.ones(2).to(copied.weight).tolist() == [1, 1]
    assert torch.ones(2).to(copied.weight).dtype == torch.float64
    with torch.no_grad():
        layer.weight.mul_(0.9).add_(layer.weight, alpha=0.1)
        average = layer.weight.lerp(copied.float().weight, 0.5)
    assert isinstance(average, RemoteTensor)
    assert sum(p.shape.numel() for p in layer.parameters()) == 9


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"avg_fn": swa_utils.get_ema_avg_fn()},
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn()},
        {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    ],
)
def test_averages_of_torch_stay_where_the_parameter_is(how: dict[str, Any]) -> None:
    layer = nn.Linear(2, 3)
    layer.weight = parameter()  # type: ignore[assignment]
    averaged = swa_utils.AveragedModel(layer, CPU, **how)
    for _ in range(3):
        layer.bias.data += 1
        averaged.update_parameters(layer)
    assert isinstance(averaged.module.weight, RemoteTensor)
    assert (layer.bias - averaged.module.bias).min() > 0.9


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.far, self.near = parameter(), nn.Parameter(torch.ones(2))
        self.far.grad, self.near.grad = remote(3, 2), torch.full((2,), 4.0)
        self.far.grad.norms.update({1.0: 5.0, 2.0: 3.0, torch.inf: 2.0})


def test_known_norms_of_gradients() -> None:
    module = Two()
    near = float(module.near.grad.norm())
    norms = grad_norm(module, 2)
    assert norms["grad_2.0_norm/far"] == 3.0
    assert norms["grad_2.0_norm_total"] == pytest.approx((9 + near**2) ** 0.5)
    assert grad_norm(module, "inf")["grad_inf_norm_total"] == 4.0
    assert module.far.grad.abs().max().is_meta  # not known in this way
    for norm in (module.far.grad.norm(), torch.linalg.vector_norm(module.far.grad, 2.0)):
        assert norm == 3.0
    assert module.far.grad.norm(2, dim=0).is_meta
    with pytest.raises(RuntimeError, match="belongs to another stage"):
        grad_norm(module, 3)


def test_clipping_by_hand_counts_all_stages_and_ends_what_is_known() -> None:
    module = Two()
    total = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    assert total == pytest.approx((9 + 32) ** 0.5)
    assert module.near.grad.tolist() == pytest.approx([4 / float(total)] * 2)
    assert module.far.grad.norm().is_meta


def test_a_change_of_a_view_ends_what_is_known() -> None:
    gradient = Two().far.grad
    gradient.detach().data.mul_(2)
    assert gradient.norm().is_meta


class Ascends(torch.optim.SGD):
    """Calls its closure again at weights that it has moved, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        super().step()
        closure()
        return loss


def test_an_optimizer_that_needs_gradients_twice_a_step_is_refused() -> None:
    layer, calls = nn.Linear(2, 1), []
    optimizer = Ascends(layer.parameters(), lr=0.1)
    steps = LocalSteps(optimizer)

    def closure() -> Tensor:
        calls.append(None)
        layer(torch.ones(1, 2)).sum().backward()
        return torch.ones(())

    with pytest.raises(
        MisconfigurationException, match=r"more than once a step, as SAM.*g_inter=1"
    ):
        optimizer.step(closure)
    assert len(calls) == 1
    steps.remove()
    assert optimizer.step(closure) == 1
    assert len(calls) == 3


@pytest.mark.parametrize(
    "draw",
    [
        nn.init.kaiming_uniform_,
        nn.init.xavier_normal_,
        torch.randn_like,
        lambda x: x.data.uniform_(),
        lambda x: x.add_(torch.randn_like(x), alpha=0.1).exponential_(),
        lambda x: torch.bernoulli(torch.ones_like(x) * 0.5),
        lambda x: F.dropout(x, 0.3),
    ],
)
def test_random_numbers_are_drawn_as_for_a_tensor_with_values(draw: Any) -> None:
    states = []
    for tensor in (torch.zeros(6, 8), remote(6, 8)):
        torch.manual_seed(0)
        with torch.no_grad():
            draw(tensor)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
