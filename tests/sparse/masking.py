"""Random masks, and what to compare sparse modules and their products with."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.backend import Compute


class Tied(nn.Module):
    """An embedding and a head that have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight


def random_masks(module: nn.Module, density: float = 0.3) -> dict[str, Tensor]:
    """Return a mask for each parameter with at least two dimensions."""
    return {
        name: torch.rand(parameter.shape) < density
        for name, parameter in module.named_parameters()
        if parameter.dim() >= 2
    }


def apply_masks(module: nn.Module, masks: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in masks:
                parameter.mul_(masks[name])


def sparse_and_dense(
    module: nn.Module, masks: dict[str, Tensor], compute: Compute = "auto"
) -> tuple[nn.Module, nn.Module]:
    """Return ``module`` stored sparse, and a dense copy with zeros where it is pruned."""
    dense = copy.deepcopy(module)
    apply_masks(dense, masks)
    sparsify(module, masks, compute=compute)
    return module, dense


def unpruned(name: str, tensor: Tensor, masks: dict[str, Tensor]) -> Tensor:
    """Return the entries of a dense ``tensor`` that the sparse parameter of that name keeps."""
    return tensor[masks[name]] if name in masks else tensor


def assert_same_gradients(sparse: nn.Module, dense: nn.Module, masks: dict[str, Tensor]) -> None:
    """Compare gradients of what is kept."""
    expected = dict(dense.named_parameters())
    for name, parameter in sparse.named_parameters():
        gradient = expected[name].grad
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        torch.testing.assert_close(parameter.grad, unpruned(name, gradient, masks))


def close(found: Tensor, function: Callable[..., Tensor], *factors: Tensor) -> None:
    """Assert that float32 sums of products are the exact ones, but for their rounding.

    That is bounded by the sum of the absolute values of what is added.
    """
    exact = function(*(factor.double() for factor in factors))
    magnitude = function(*(factor.double().abs() for factor in factors))
    assert torch.all((found.double() - exact).abs() <= 1e-5 * magnitude)
