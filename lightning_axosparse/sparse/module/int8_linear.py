"""Gives linear layers that are stored sparse unpruned values of eight bits, to predict with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_axosparse.sparse.module.sparse_module import SparseModule, forget_layout
from lightning_axosparse.sparse.ops import int8, linear
from lightning_axosparse.sparse.ops.products import can_read
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.support.compilation import compilation
from lightning_axosparse.support.troubleshooting import see


class Int8Linear(nn.Module):
    """A linear layer with a sparse weight of eight bits.

    Attributes:
        stored: the weight, shape ``(outputs, inputs)``.
        bias: shape ``(outputs,)``; None: there is none.
    """

    stored: int8.Int8Weight
    bias: Tensor | None

    @property
    def weight(self) -> Tensor:
        """The dense weight, shape ``(outputs, inputs)``, float32."""
        return self.stored.dense()

    def forward(self, input: Tensor) -> Tensor:
        """Multiply by the transposed weight, and add the bias (:func:`int8.multiply`).

        Args:
            input: shape ``(..., inputs)``.

        Returns:
            A tensor of shape ``(..., outputs)``, of the dtype of ``input``, or of autocast's.

        Raises:
            RuntimeError: if the input requires a gradient, or is not floating.
        """
        if input.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "An int8 layer computes no gradients. Predict in torch.inference_mode(), or load "
                "the weights without `dtype=` to train them." + see("sparse-storage")
            )
        if not input.is_floating_point():
            return F.linear(input, self.weight, self.bias)  # raises what a dense layer does
        stored, bias = self.stored, self.bias
        shape, dtype = stored.layout.shape, input.dtype
        operands = linear.eligible(input, bias, stored.values, shape, dtype, by_rows=True)
        if operands is None:
            return int8.multiply_densely(input, stored, bias)
        return int8.multiply(operands.inputs, stored, operands.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.stored = self.stored.to(fn(self.stored.scales).device)  # The dtypes stay.
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        raise RuntimeError(
            "Weights that were loaded with dtype=torch.int8 are neither saved nor replaced. Keep "
            "their file, and load it into a new module." + see("sparse-storage")
        )

    def extra_repr(self) -> str:
        """Describe the weight."""
        outputs, inputs = self.stored.layout.shape
        return f"in_features={inputs}, out_features={outputs}, nnz={self.stored.layout.nnz}"


def round_layers(module: nn.Module) -> None:
    """Round the unpruned values of linear layers to eight bits, in place.

    The layers become :class:`Int8Linear`. An embedding that has the parameter of such a layer keeps
    it. So do layers of too few inputs for products with unpruned values.
    """
    with compilation():
        int8.load_loops()
    for layer in module.modules():
        if isinstance(layer, SparseModule) and layer._stored.keys() == {"weight"}:
            by_rows = linear.rows_are_outputs(layer._dense_class)
            if by_rows is not None:
                _round_layer(layer, by_rows)


def _round_layer(layer: Any, by_rows: bool) -> None:
    [(_, parameter, (layout, _))] = layer._registered()
    values: Tensor = parameter.detach()
    if not by_rows:
        dense = layout.densify(values)
        layout = layout_of(layout.mask().t().contiguous())
        values = layout.compress(dense.t().contiguous())
    if not can_read(layout, values):
        return
    forget_layout(layer, "weight")
    del layer.weight
    layer.__class__ = Int8Linear
    layer.stored = int8.Int8Weight.nearest(values, layout)
