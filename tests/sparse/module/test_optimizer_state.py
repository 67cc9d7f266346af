from __future__ import annotations

import copy

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn, optim

from lightning_axosparse.sparse import densify, sparsify
from lightning_axosparse.sparse.module.optimizer_state import (
    compress_state,
    dense_shapes,
    expand_state,
    validate_elementwise_optimizers,
)
from lightning_axosparse.sparse.store.formats import BitmapLayout
from tests.sparse.masking import apply_masks, random_masks, unpruned

ELEMENTWISE = {
    "SGD": lambda groups: optim.SGD(groups, 1e-2, momentum=0.9),
    "SGD nesterov": lambda groups: optim.SGD(groups, 1e-2, momentum=0.9, nesterov=True),
    "Adam": lambda groups: optim.Adam(groups, 1e-2),
    "Adam amsgrad": lambda groups: optim.Adam(groups, 1e-2, amsgrad=True, foreach=False),
    "AdamW": lambda groups: optim.AdamW(groups, 1e-2),
    "AdamW foreach": lambda groups: optim.AdamW(groups, 1e-2, foreach=True),
    "AdamW fused": lambda groups: optim.AdamW(groups, 1e-2, fused=True),
    "RMSprop": lambda groups: optim.RMSprop(groups, 1e-3, momentum=0.9, centered=True),
    "NAdam": lambda groups: optim.NAdam(groups, 1e-3),
    "Adagrad": lambda groups: optim.Adagrad(groups, 1e-2),
}
elementwise = pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))


class Training:
    """A model with two parameter groups, a schedule, accumulation and clipping."""

    def __init__(self, model, make, masks=None):
        self.model, self.masks = model, masks
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        self.optimizer = make(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        )
        self.schedule = optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 12)

    def backward(self, tokens):
        logits = self.model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()).backward()

    def step(self):
        if self.masks:
            self.mask(lambda name, p: p.grad)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        if self.masks:
            apply_masks(self.model, self.masks)
        self.schedule.step()
        self.optimizer.zero_grad()

    def prune(self, masks):
        """From now on, be what sparse training must equal: dense with masks."""
        self.masks = masks
        apply_masks(self.model, masks)
        for key in {key for state in self.optimizer.state.values() for key in state}:
            self.mask(lambda name, p, key=key: self.optimizer.state[p][key])

    def mask(self, tensor_of):
        for name, parameter in self.model.named_parameters():
            tensor = tensor_of(name, parameter)
            if name in self.masks and tensor.shape == parameter.shape:
                tensor.mul_(self.masks[name])


def batches(count):
    return [torch.randint(12, (4, 5)) for _ in range(count)]


@elementwise
def test_training_on_after_the_swap_equals_masked_dense_training(make):
    torch.manual_seed(0)
    model = Net().double()
    masks = random_masks(model, density=0.2)
    sparse, dense = Training(model, make), Training(copy.deepcopy(model), make)
    groups = [[id(p) for p in group["params"]] for group in sparse.optimizer.param_groups]
    for one, other in zip(batches(10), batches(10), strict=True):
        for training in (sparse, dense):
            training.backward(one)
        if dense.masks is None and dense.schedule.last_epoch == 4:  # in mid-accumulation
            sparsify(sparse.model, masks, sparse.optimizer)
            dense.prune(masks)
        for training in (sparse, dense):
            training.backward(other)
            training.step()
    assert [[id(p) for p in g["params"]] for g in sparse.optimizer.param_groups] == groups
    assert sparse.schedule.get_last_lr() == dense.schedule.get_last_lr()
    expected = dict(dense.model.named_parameters())
    for name, parameter in sparse.model.named_parameters():
        torch.testing.assert_close(parameter, unpruned(name, expected[name], masks))
        states = sparse.optimizer.state[parameter], dense.optimizer.state[expected[name]]
        assert states[0].keys() == states[1].keys()
        for key, value in states[1].items():
            if torch.is_tensor(value) and value.dim() > 0:
                torch.testing.assert_close(states[0][key], unpruned(name, value, masks))


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_fused_optimizer_with_state_of_another_size_is_refused(goes_back):
    model = torch.nn.Linear(64, 64)
    masks = {"weight": torch.rand(64, 64) < 0.2}
    if goes_back:
        sparsify(model, masks)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    densify(model) if goes_back else sparsify(model, masks)
    model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(RuntimeError, match="Give the optimizer to sparsify"):
        optimizer.step()


def test_densify_expands_the_state():
    torch.manual_seed(0)
    training = Training(Net(), ELEMENTWISE["AdamW"])
    masks = random_masks(training.model)
    training.backward(*batches(1))
    training.step()
    sparsify(training.model, masks, training.optimizer)
    densify(training.model, training.optimizer)
    for name, parameter in training.model.named_parameters():
        state = training.optimizer.state[parameter]
        assert state["exp_avg"].shape == parameter.shape
        if name in masks:
            assert state["exp_avg_sq"][masks[name]].any()
            assert not state["exp_avg_sq"][~masks[name]].any()
    training.backward(*batches(1))
    training.step()


def test_state_of_one_parameter_to_compact_and_back():
    mask = torch.tensor([[True, False, True]])
    layout = BitmapLayout.from_mask(mask)
    dense = {"step": torch.tensor(3.0), "exp_avg": torch.tensor([[1.0, 0.0, 2.0]]), "mode": "max"}
    compact = compress_state(dense, layout)
    assert compact["exp_avg"].tolist() == [1.0, 2.0]
    assert dense["exp_avg"].shape == (1, 3)
    back = expand_state(compact, layout)
    assert torch.equal(back["exp_avg"], dense["exp_avg"])
    assert (back["step"], back["mode"]) == (dense["step"], "max")


def test_state_that_is_not_elementwise_raises_before_anything_changes():
    model = nn.Linear(4, 3)
    optimizer = optim.Adafactor(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"row_var.*'weight'.*\(3, 4\)"):
        sparsify(model, {"weight": torch.ones(3, 4, dtype=torch.bool)}, optimizer)
    assert model.weight.shape == (3, 4)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad])
def test_optimizers_see_matrices_and_step_vectors(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    masks = random_masks(model)
    sparsify(model, masks)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with dense_shapes(model) as made:
        assert {n: p.shape for n, p in model.named_parameters() if p.dim() > 1} == {
            name: mask.shape for name, mask in masks.items()
        }
        made.append(kind(model.parameters(), 0.1))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name])
    model(torch.randn(2, 6)).sum().backward()
    made[0].step()
    for parameter in model.parameters():
        for state in made[0].state[parameter].values():
            assert state.dim() == 0 or state.shape == parameter.shape


def test_values_come_back_when_configuring_fails():
    model = nn.Linear(6, 8)
    sparsify(model, random_masks(model))
    shape = dict(model.named_parameters())["weight"].shape
    with pytest.raises(ZeroDivisionError), dense_shapes(model):
        raise ZeroDivisionError
    assert dict(model.named_parameters())["weight"].shape == shape


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
