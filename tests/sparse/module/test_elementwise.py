from __future__ import annotations

import copy

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn, optim

from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.module.elementwise import validate_elementwise_optimizers
from tests.sparse.module.test_optimizer_state import ELEMENTWISE, Net, Training, batches


def test_sparsify_raises_for_a_matrix_optimizer_without_state():
    model = nn.Linear(4, 3)
    optimizer = optim.Adafactor(model.parameters())
    with pytest.raises(MisconfigurationException, match=r"Adafactor cannot.*AdamW"):
        sparsify(model, {"weight": torch.ones(3, 4, dtype=torch.bool)}, optimizer)
    assert isinstance(model.weight, nn.Parameter)


class RowNormalised(optim.SGD):
    """Looks at rows, as third-party matrix optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm(dim=-1, keepdim=True))
        return super().step(closure)


class TrustRatio(optim.SGD):
    """Looks at the norm of the whole parameter, as LARS and LAMB do: a vector has it too."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(parameter.detach().norm() / parameter.grad.norm())
        return super().step(closure)


class EarlyState(optim.Optimizer):
    """Makes its state before the first step, as Adagrad did until torch 2.12."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"step": 0, "sum": torch.full_like(parameter, 0.5)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] += 1
                state["sum"].addcmul_(parameter.grad, parameter.grad)
                parameter.addcdiv_(parameter.grad, state["sum"].sqrt(), value=-group["lr"])


MATRIX = {
    "Adafactor": lambda ps: optim.Adafactor(ps),
    "Muon": lambda ps: optim.Muon([p for p in ps if p.dim() == 2]),
    "LBFGS": lambda ps: optim.LBFGS(ps),
    "SparseAdam": lambda ps: optim.SparseAdam(ps),
    "RowNormalised": lambda ps: RowNormalised(ps, 1e-2),
}


def snapshot(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_state_that_was_made_before_the_first_step_is_copied():
    model = Net()
    optimizer = EarlyState(model.parameters())
    before = snapshot(model, optimizer)
    validate_elementwise_optimizers(optimizer)
    assert_same(before, snapshot(model, optimizer))


@pytest.mark.parametrize("warm_up", [False, True])
@pytest.mark.parametrize("name", MATRIX)
def test_an_error_names_an_optimizer_that_needs_matrices(name, warm_up):
    model = Net()
    optimizer = MATRIX[name](list(model.parameters()))
    if warm_up:  # the first learning rate is zero
        optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    before = snapshot(model, optimizer)
    with pytest.raises(MisconfigurationException, match=f"{name} cannot.*AdamW"):
        validate_elementwise_optimizers(optimizer)
    assert_same(before, snapshot(model, optimizer))


@pytest.mark.parametrize("warm_up", [False, True])
@pytest.mark.parametrize("make", [*ELEMENTWISE.values(), lambda groups: TrustRatio(groups, 1e-2)])
def test_elementwise_optimizers_are_accepted_and_left_untouched(make, warm_up):
    training = Training(Net(), make)
    if warm_up:
        optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: step / 10)
    training.backward(*batches(1))
    training.step()
    before = snapshot(training.model, training.optimizer)
    validate_elementwise_optimizers(training.optimizer)
    assert_same(before, snapshot(training.model, training.optimizer))


def test_only_groups_with_matrices_count():
    model = nn.Linear(4, 4)
    optimizer = optim.Adafactor([model.bias])
    validate_elementwise_optimizers(optimizer)
