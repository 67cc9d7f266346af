"""Gradients of split layers are those of autograd, to the bit, whatever is asked of the layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from lightning_axosparse import sparsify
from lightning_axosparse.pipeline.backward.parameter_gradients import WeightGradientQueue
from lightning_axosparse.pipeline.backward.split_layers import SplitLayers
from tests.sparse.masking import random_masks


class Inner(nn.Module):
    """What needs a gradient of its input: the first layer of a network does not."""

    def __init__(self, *layers: nn.Module, shape: Sequence[int] = (6,)) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(*shape) + 0.5)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().pow(2).mean()


class Split:
    """A module whose layers are split, and the queue of its products."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.final = model, []
        self.layers = SplitLayers(model)
        self.layers.install()
        self.queue = WeightGradientQueue(self.final.append)

    def backward(self, microbatch: int, loss: Tensor, *borrowed: Tensor, **kwargs: Any) -> None:
        with self.layers.deferring(self.queue, microbatch, borrowed):
            loss.backward(**kwargs)

    def train(self, inputs: Sequence[Tensor], loss: Callable[..., Tensor] = mean_square) -> int:
        """Run micro-batches forward and back, then all products; the number of these."""
        with self.layers.batch():
            for microbatch, x in enumerate(inputs):
                self.backward(microbatch, loss(self.model, x))
        self.queue.end_backwards()
        return self.compute()

    def compute(self) -> int:
        count = 0
        while any(self.queue.holds(microbatch) for microbatch in range(9)):
            self.queue.compute_next()
            count += 1
        return count


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name


def compare(
    model: nn.Module,
    inputs: Sequence[Tensor],
    products: int,
    loss: Callable[..., Tensor] = mean_square,
) -> None:
    """Compare the gradients of three micro-batches, and count the products that were queued."""
    ordinary = copy.deepcopy(model)
    for x in inputs:
        loss(ordinary, x).backward()
    own = [vars(module).get("forward") for module in model.modules()]
    split = Split(model)
    assert split.train(inputs, loss) == products
    split.layers.uninstall()
    assert_same(model, ordinary)
    assert own == [vars(module).get("forward") for module in model.modules()]


def inputs(*shape: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6), (2, 3, 5, 6), (1, 6)])
def test_linear(bias: bool, shape: tuple[int, ...]) -> None:
    model = Inner(nn.Linear(6, 8, bias), nn.GELU(), nn.Linear(8, 1, bias))
    compare(model, inputs(*shape), products=6)


def test_a_large_linear_under_several_threads() -> None:
    model = Inner(nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192), shape=(192,))
    compare(model, inputs(2, 128, 192), products=6)


def test_conv1d_of_transformers() -> None:
    from transformers.pytorch_utils import Conv1D

    compare(Inner(Conv1D(24, 6), nn.GELU(), Conv1D(6, 24)), inputs(2, 5, 6), products=6)


def test_what_follows_may_work_in_place() -> None:
    from transformers.pytorch_utils import Conv1D

    layers = nn.Linear(6, 8), nn.ReLU(inplace=True), Conv1D(6, 8), nn.ReLU(inplace=True)
    compare(Inner(*layers), inputs(2, 5, 6), products=6)
    ordinary, split = sparse_and_split(*copy.deepcopy(layers))
    for x in inputs(2, 5, 6):
        mean_square(ordinary, x).backward()
    assert split.train(inputs(2, 5, 6)) == 6
    assert_same(split.model, ordinary)


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 10)),
    "2d": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 10, 9)),
    "3d": (lambda: nn.Conv3d(4, 6, 2), (2, 4, 5, 6, 5)),
    "stride": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), bias=False), (2, 4, 10, 9)),
    "groups": (lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2), (2, 4, 10, 9)),
    "one pixel": (lambda: nn.Conv2d(4, 6, 1), (20, 4, 10, 9)),
    "float64": (lambda: nn.Conv2d(4, 6, 3).double(), (2, 4, 10, 9)),
    "channels last": (
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        (16, 4, 10, 9),
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    make, shape = CONVOLUTIONS[name]
    layer = make()
    model = Inner(layer, shape=shape[1:]).to(layer.weight.dtype)
    compare(model, [x.to(layer.weight.dtype) for x in inputs(*shape)], products=3)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, padding="same"),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(4, 6, 3),
        parametrizations.weight_norm(nn.Conv2d(4, 6, 3)),
        nn.utils.spectral_norm(nn.Conv2d(4, 6, 3)),
        torch.compile(nn.Conv2d(4, 6, 3), backend="eager"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_compute_something_else_are_left_alone(layer: nn.Module) -> None:
    compare(Inner(layer, shape=(1,)), inputs(2, 4, 10, 9), products=0)


def test_a_layer_compiled_in_place_is_left_alone() -> None:
    model = Inner(nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 6))
    model.layers[0].compile(backend="eager")
    split = Split(model)
    assert split.train(inputs(5, 6)) == 3
    assert model.layers[0][0].weight.grad is not None


class Described(nn.Linear):
    """A subclass with the forward of ``nn.Linear``."""


class Scaled(nn.Linear):
    """A subclass with another one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_subclasses() -> None:
    compare(Inner(Described(6, 6), Scaled(6, 6)), inputs(5, 6), products=3)


def test_calls_by_keyword_of_one_vector_or_of_nothing_are_ordinary() -> None:
    compare(
        Inner(nn.Linear(6, 6)),
        inputs(2, 6),
        0,
        lambda model, x: model.layers[0](input=x * model.scale).sum(),
    )
    compare(Inner(nn.Linear(6, 6)), inputs(6), products=0)
    compare(Inner(nn.Linear(6, 6)), [torch.zeros(0, 6)], 0, lambda model, x: model(x).sum())


def test_inputs_that_need_no_gradient_or_are_not_contiguous_are_ordinary() -> None:
    compare(nn.Linear(6, 6), inputs(5, 6), products=0)
    compare(
        Inner(nn.Linear(6, 6), shape=(1,)),
        inputs(6, 5),
        0,
        lambda model, x: model(x.t()).sum(),
    )


def test_nothing_is_queued_outside_a_batch() -> None:
    split = Split(Inner(nn.Linear(6, 6)))
    split.backward(0, mean_square(split.model, inputs(5, 6)[0]))
    assert split.compute() == 0
    assert split.model.layers[0].weight.grad is not None


def test_weights_get_no_gradient_before_their_product_is_computed() -> None:
    split = Split(Inner(nn.Linear(6, 6)))
    layer = split.model.layers[0]
    with split.layers.batch():
        split.backward(0, mean_square(split.model, inputs(5, 6)[0]))
        assert split.layers.parameters == {layer.weight, layer.bias}
    assert not split.layers.parameters
    assert layer.weight.grad is None
    assert layer.bias.grad is None
    assert split.model.scale.grad is not None
    assert split.queue.bytes_of(0) == 2 * 5 * 6 * 4
    assert split.compute() == 1
    assert layer.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return model(x).float().pow(2).mean()

    compare(Inner(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)), inputs(5, 6), 6, loss)
    compare(Inner(nn.Conv2d(4, 6, 3), shape=(1,)), inputs(2, 4, 9, 9), 3, loss)
    compare(
        Inner(nn.Linear(6, 8).double(), shape=(1,)), [x.double() for x in inputs(5, 6)], 3, loss
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = Inner(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).to(dtype)
    compare(model, [x.to(dtype) for x in inputs(5, 6)], products=6)


@pytest.mark.parametrize("times", [2, 3])
def test_a_layer_that_is_called_several_times_in_a_micro_batch(times: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        for _ in range(times):
            x = torch.tanh(model(x))
        return x.pow(2).mean()

    compare(Inner(nn.Linear(6, 6)), inputs(5, 6), 3, loss)

    def mixed(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, x).float()

    compare(Inner(nn.Linear(6, 6)), inputs(5, 6), 3, mixed)


def test_dropout_and_accumulation_over_batches() -> None:
    model = Inner(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    ordinary = copy.deepcopy(model)
    split = Split(model)
    for seed in range(2):
        torch.manual_seed(seed)
        for x in inputs(5, 6):
            mean_square(ordinary, x).backward()
        torch.manual_seed(seed)
        split.queue = WeightGradientQueue(split.final.append)
        assert split.train(inputs(5, 6)) == 6
    assert_same(model, ordinary)


def test_tied_and_frozen_parameters_are_ordinary() -> None:
    tied = Inner(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))
    tied.layers[2].weight = tied.layers[0].weight
    compare(tied, inputs(5, 6), products=3)
    shared = nn.Linear(6, 6)
    compare(Inner(shared, nn.Tanh(), shared), inputs(5, 6), products=3)

    for frozen in ("weight", "bias"):
        model = Inner(nn.Linear(6, 6), nn.Linear(6, 6))
        getattr(model.layers[1], frozen).requires_grad_(False)
        compare(model, inputs(5, 6), products=3)


def test_a_parameter_may_be_frozen_and_unfrozen_between_batches() -> None:
    split = Split(Inner(nn.Linear(6, 6)))
    weight = split.model.layers[0].weight.requires_grad_(False)
    assert split.train(inputs(5, 6)) == 0
    assert weight.grad is None
    weight.requires_grad_(True)
    assert split.train(inputs(5, 6)) == 3
    assert weight.grad is not None


@pytest.mark.parametrize(
    "compute_weight",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        parametrizations.weight_norm,
        lambda layer: prune.remove(prune.l1_unstructured(layer, "weight", 0.5), "weight"),
    ],
)
def test_a_weight_may_be_computed_from_some_batch_on(compute_weight: Callable[..., Any]) -> None:
    expected = Inner(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    split = Split(copy.deepcopy(expected))
    assert split.train(inputs(5, 6)) == 6
    for model in (split.model, expected):
        compute_weight(model.layers[2])
    split.model.zero_grad()
    for x in inputs(5, 6):
        mean_square(expected, x).backward()
    assert split.train(inputs(5, 6)) == 3
    assert_same(split.model, expected)


def test_a_weight_that_is_also_read_elsewhere_misses_no_term() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return mean_square(model, x) + model.layers[0].weight.pow(2).sum()

    model = Inner(nn.Linear(6, 6))
    ordinary = copy.deepcopy(model)
    for x in inputs(5, 6):
        loss(ordinary, x).backward()
    assert Split(model).train(inputs(5, 6), loss) == 3
    for ours, theirs in zip(model.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_what_a_step_differentiates_itself_is_ordinary() -> None:
    """A penalty on the gradients of the input and of a weight, differentiated twice."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        value = mean_square(model, x)
        wanted = [x, model.layers[2].weight]
        of_x, of_weight = torch.autograd.grad(value, wanted, create_graph=True)
        (plain,) = torch.autograd.grad(mean_square(model, x), [model.layers[0].weight])
        assert plain.abs().sum() > 0
        return value + of_x.pow(2).sum() + of_weight.pow(2).sum()

    model = Inner(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    ordinary = copy.deepcopy(model)
    for x in inputs(5, 6):
        loss(ordinary, x).backward()
    Split(model).train(inputs(5, 6), loss)
    for ours, theirs in zip(model.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_backward_pass_that_keeps_its_graph_makes_all_gradients_at_once() -> None:
    split = Split(Inner(nn.Linear(6, 8), nn.Tanh(), nn.Conv1d(1, 3, 2), shape=(6,)))
    split.model.layers.insert(2, nn.Unflatten(-1, (1, 8)))
    (x,) = inputs(5, 6, count=1)
    with split.layers.batch():
        split.backward(0, mean_square(split.model, x), create_graph=True)
    assert split.compute() == 0
    weight = split.model.layers[0].weight
    (twice,) = torch.autograd.grad(weight.grad.pow(2).sum(), [weight])
    assert twice.abs().sum() > 0


@pytest.mark.parametrize(
    "layer", [nn.Linear(6, 4), nn.Sequential(nn.Unflatten(-1, (1, 6)), nn.Conv1d(1, 3, 2))]
)
def test_transforms_and_batches_of_gradients(layer: nn.Module) -> None:
    model = Inner(layer)
    ordinary = copy.deepcopy(model)
    split = Split(model)
    (x,) = inputs(5, 6, count=1)
    results = []
    with split.layers.batch():
        for one in (model, ordinary):
            output = one(x)
            basis = torch.eye(output.numel()).view(-1, *output.shape)
            jacobians = torch.autograd.grad(
                output, list(one.parameters()), basis, is_grads_batched=True
            )
            per_sample = torch.func.vmap(one)(x.unsqueeze(1))
            tangents = torch.func.jvp(one, (x,), (x.sin(),))[1]
            values = dict(one.named_parameters())
            functional = torch.func.grad(
                lambda v, one=one: torch.func.functional_call(one, v, (x,)).pow(2).sum()
            )(values)
            results.append([*jacobians, per_sample, tangents, *functional.values()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert split.compute() == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_recomputed_in_backward_is_ordinary(reentrant: bool) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x * model.scale
        inner = checkpoint(model.layers[0], x, use_reentrant=reentrant)
        return model.layers[1](inner).pow(2).mean()

    layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    compare(Inner(layer, nn.Linear(6, 6)), inputs(5, 6), 3, loss)


def sparse_and_split(
    *layers: nn.Module, shape: Sequence[int] = (6,), **options: Any
) -> tuple[nn.Module, Split]:
    """A module in sparse storage, and a copy that is split before it goes over to that."""
    ordinary = Inner(*layers, shape=shape)
    split = Split(copy.deepcopy(ordinary))
    masks = random_masks(ordinary)
    for model in (ordinary, split.model):
        sparsify(model, masks, **options)
    return ordinary, split


@pytest.mark.parametrize("policy", ["sparse", "samo"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("times", [1, 2])
def test_layers_in_sparse_storage(policy: str, dtype: torch.dtype | None, times: int) -> None:
    """The first goes over between two batches, the second is sparse before it is split."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            for _ in range(times):
                x = torch.tanh(model(x))
        return x.float().pow(2).mean()

    from transformers.pytorch_utils import Conv1D

    layers = nn.Linear(6, 300), nn.Tanh(), Conv1D(6, 300)
    ordinary, split = sparse_and_split(*layers, policy=policy)
    compare(copy.deepcopy(ordinary), inputs(2, 5, 6), 6, loss)
    for x in inputs(2, 5, 6):
        loss(ordinary, x).backward()
    assert split.train(inputs(2, 5, 6), loss) == 6
    assert_same(split.model, ordinary)
    assert split.model.layers[0].weight.grad.shape == (300, 6)
    assert split.model.layers[0]._parameters["weight"].grad.dim() == 1


def test_other_layers_in_sparse_storage_are_ordinary() -> None:
    layers = nn.Conv1d(6, 8, 3, padding=1), nn.Tanh(), nn.Linear(9, 6)
    ordinary, split = sparse_and_split(*layers, shape=(9,))
    for x in inputs(2, 6, 9):
        mean_square(ordinary, x).backward()
    assert split.train(inputs(2, 6, 9)) == 3
    assert_same(split.model, ordinary)


def test_a_sparse_layer_that_the_step_differentiates_twice_is_ordinary() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        value = mean_square(model, x)
        (of_x,) = torch.autograd.grad(value, [x], create_graph=True)
        return value + of_x.pow(2).sum()

    ordinary, split = sparse_and_split(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    for x in inputs(5, 6):
        loss(ordinary, x).backward()
    split.train(inputs(5, 6), loss)
    for ours, theirs in zip(split.model.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_borrowed_memory_is_not_kept() -> None:
    model = Inner(nn.Linear(6, 6))
    split = Split(model)
    (x,) = inputs(5, 6, count=1)
    received = x.clone().requires_grad_()
    with split.layers.batch():
        output = model.layers[0](received)
        gradient = torch.ones_like(output)
        with split.layers.deferring(split.queue, 0, [received, gradient, None]):
            torch.autograd.backward([output], [gradient])
    pointers = {
        tensor.untyped_storage().data_ptr()
        for products in split.queue._products.values()
        for product in products
        for tensor in product.tensors
    }
    assert len(pointers) == 2
    assert not pointers & {received.data_ptr(), gradient.data_ptr()}
    with torch.no_grad():
        received.zero_()
        gradient.zero_()
    split.compute()
    assert torch.equal(model.layers[0].weight.grad, torch.ones(5, 6).t().mm(x))


def test_layers_on_the_meta_device_or_with_a_forward_of_their_own_are_left_alone() -> None:
    model = Inner(nn.Linear(6, 6), nn.Linear(6, 6, device="meta"), nn.Linear(6, 6))
    own = model.layers[2].forward = model.layers[2].forward
    SplitLayers(model).install()
    assert "forward" in vars(model.layers[0])
    assert "forward" not in vars(model.layers[1])
    assert model.layers[2].forward is own


def test_a_weight_that_is_read_elsewhere_too_is_found() -> None:
    for reads in (False, True):
        split = Split(Inner(nn.Linear(6, 6)))
        layer = split.model.layers[0]
        with split.layers.batch():
            loss = mean_square(split.model, inputs(5, 6)[0])
            split.backward(0, loss + layer.weight.square().sum() if reads else loss)
        split.compute()
        assert split.queue.reordered == reads


def test_a_layer_whose_bias_is_pruned_too_keeps_its_backward_pass() -> None:
    split = Split(Inner(nn.Linear(6, 6)))
    layer = split.model.layers[0]
    masks = {f"layers.0.{name}": torch.rand(p.shape) > 0.5 for name, p in layer.named_parameters()}
    sparsify(split.model, masks)
    with split.layers.batch():
        split.backward(0, mean_square(split.model, inputs(5, 6)[0]))
    assert split.compute() == 0
    assert all(p.grad is not None for p in layer.parameters())
