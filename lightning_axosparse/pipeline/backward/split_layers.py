"""Splits the backward pass of linear and convolution layers, so that weight gradients can be later.

The gradient of a layer's input takes one product, those of its weight and bias take another. A
split layer computes the first in the backward pass, and queues the second where the pass is one of
the engine's. Nothing else changes: the split happens where autograd would have called the same
operators, so it walks no graph twice.

Ordinary, by the layer's own ``forward``:

    layers      of other classes, or compiled; whose parameters stand elsewhere in the module, too;
                in sparse storage, but for linear ones of which the weight alone is pruned;
                whose weight is computed, also from some batch on: masks, weight norms
    calls       without gradients, or whose input needs none; inside ``torch.func`` transforms;
                where what autograd saves is replaced, as by activation checkpointing
    parameters  that are frozen

A split layer that the user's own code differentiates (``torch.autograd.grad`` in a step), or that
is differentiated twice, makes all its gradients at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_axosparse.pipeline.backward.parameter_gradients import (
    WeightGradientQueue,
    WeightProduct,
)
from lightning_axosparse.sparse.module.sparse_module import SparseModule, kept_product
from lightning_axosparse.sparse.ops.linear import KeptProduct, rows_are_outputs
from lightning_axosparse.sparse.store.materialize import autocast_dtype, autocast_to
from lightning_axosparse.sparse.store.scratch import scratch
from lightning_axosparse.support.patched import replaced_forward
from lightning_axosparse.support.torch_internals import (
    apply_untransformed,
    backward_transformed,
    is_compiled,
    saved_tensors_are_hooked,
    storage_id,
    transformed,
)

Operands = tuple[Tensor, Tensor, Tensor | None]
"""Input, weight and bias."""


@dataclass(frozen=True)
class MatrixProduct:
    """``x W^T + b`` of ``nn.Linear``, or ``x W + b`` of Hugging Face's ``Conv1D``.

    Attributes:
        by_rows: whether the rows of the weight, or its columns, give the outputs.
    """

    by_rows: bool

    def operands(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Operands | None:
        """Cast the operands, if the input is a contiguous batch of vectors."""
        return _cast(x, weight, bias) if x.dim() > 1 and x.is_contiguous() else None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply as the layer does."""
        if self.by_rows:
            return functional.linear(x, weight, bias)
        assert bias is not None
        flat = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
        return flat.view(*x.shape[:-1], weight.shape[1])

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply the output's gradient by the weight."""
        flat = gradient.reshape(-1, gradient.shape[-1])
        return flat.mm(weight if self.by_rows else weight.t()).view(x.shape)

    def parameter_gradients(
        self,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        in_scratch: bool = False,
    ) -> list[Tensor]:
        """Multiply the output's gradient by the input, and sum it.

        Args:
            gradient: that of the output.
            x: the input.
            weight: the weight, which may have another dtype.
            bias: the bias, if it has a gradient.
            in_scratch: whether the weight's gradient may be in scratch memory, without a graph.
        """
        flat = gradient.reshape(-1, gradient.shape[-1])
        left, right = flat, x.reshape(-1, x.shape[-1])
        if not self.by_rows:
            left, right = right, left
        if not in_scratch:
            product = left.t().mm(right)
        else:
            memory = scratch.take("weight gradient", weight.numel(), x.dtype, x.device)
            product = memory.view(weight.shape)
            torch.mm(left.t(), right, out=product)
        return [product] if bias is None else [product, flat.sum(0)]


@dataclass(frozen=True)
class Convolution:
    """A convolution over one to three dimensions, with its arguments."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def operands(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Operands | None:
        """Cast the operands, if the input is a batch."""
        return _cast(x, weight, bias) if x.dim() == 2 + len(self.stride) else None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve as the layer does."""
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(self.stride) - 1]
        return convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve the output's gradient with the weight."""
        return self._backward(gradient, x, weight, [True, False, False])[0]

    def parameter_gradients(
        self,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        in_scratch: bool = False,
    ) -> list[Tensor]:
        """Convolve the input with the output's gradient; the operator takes no memory for it."""
        wanted = [False, True, bias is not None]
        gradients = self._backward(gradient, x, weight.to(x.dtype), wanted)
        return [each for each, is_wanted in zip(gradients, wanted, strict=True) if is_wanted]

    def _backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]
    ) -> list[Tensor]:
        return list(
            torch.ops.aten.convolution_backward(
                gradient,
                x,
                weight,
                [weight.shape[0]],
                self.stride,
                self.padding,
                self.dilation,
                False,
                [0] * len(self.stride),
                self.groups,
                wanted,
            )
        )


@dataclass(frozen=True)
class KeptValues:
    """The product of a layer that multiplies by the kept values of its weight.

    Attributes:
        product: that product.
        training: whether the layer is in training mode.
    """

    product: KeptProduct
    training: bool

    def operands(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Operands | None:
        """Cast the operands, and let a resident dense copy follow autocast."""
        self.product.form.for_values(weight, self.training)
        return self.product.operands(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply as the layer does."""
        return self.product.forward(x, weight, bias)

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply the output's gradient by the kept values."""
        return self.product.input_gradient(gradient, x, weight)

    def parameter_gradients(
        self,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        in_scratch: bool = False,
    ) -> list[Tensor]:
        """Compute the kept entries of the product alone, in new memory."""
        kept = self.product.values_gradient(gradient, x, weight)
        if bias is None:
            return [kept]
        # Every call of the layer casts its bias, so the terms of several are added uncast.
        return [kept, gradient.reshape(-1, gradient.shape[-1]).sum(0).to(bias.dtype)]


Operation: TypeAlias = MatrixProduct | Convolution | KeptValues
"""The product of an input and a weight, and its gradients.

``operands`` casts what is multiplied as the layer's ``forward`` and autocast do; it is None where
that computes another product of these.
"""


def _operation(layer: nn.Module) -> Operation | None:
    """The product that a layer computes; None if it is not known."""
    product = kept_product(layer)
    if product is not None:
        return KeptValues(product, layer.training)
    if isinstance(layer, SparseModule):
        return None
    by_rows = rows_are_outputs(type(layer))
    if by_rows is not None:
        return MatrixProduct(by_rows)
    if type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            return Convolution(layer.stride, layer.padding, layer.dilation, layer.groups)
    return None


class _Destination(NamedTuple):
    """Where the products of the running backward pass are queued."""

    queue: WeightGradientQueue
    microbatch: int
    borrowed: Collection[int]

    def add(self, call: _LayerCall, gradient: Tensor, x: Tensor) -> None:
        """Queue the product of a call, of which these are the output's gradient and the input."""
        tensors = self._kept(gradient), self._kept(x)
        weight, bias = call.operands
        compute = partial(call.operation.parameter_gradients, *tensors, weight, bias)
        self.queue.add(self.microbatch, WeightProduct(call.parameters, tensors, compute))

    def _kept(self, tensor: Tensor) -> Tensor:
        borrowed = storage_id(tensor.untyped_storage()) in self.borrowed
        return tensor.clone() if borrowed else tensor


class SplitLayers:
    """The layers of a module whose backward pass is split.

    Args:
        module: the whole module, in which a parameter may stand in several places.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters: set[nn.Parameter] = set()
        """The parameters of all calls in this batch whose products are queued in backward."""
        self._module = module
        self._layers: list[nn.Module] = []
        self._undo = ExitStack()
        self._calls: dict[nn.Module, _LayerCall] = {}
        self.destination: _Destination | None = None
        """None outside of backward passes of the engine."""
        self.suspended = False
        """Whether the layers that are called now stay whole."""

    def install(self) -> None:
        """Split the layers of the module that this rank holds."""
        # A module that stands in several places counts once: it is the same layer.
        owners = Counter(p for m in self._module.modules() for p in m.parameters(recurse=False))
        compiled = (each for each in self._module.modules() if is_compiled(each))
        inside = {module for each in compiled for module in each.modules()}
        for layer in self._module.modules():
            if layer in inside or _operation(layer) is None or "forward" in vars(layer):
                continue
            alone = all(owners[p] == 1 and not p.is_meta for p in layer.parameters(recurse=False))
            if alone and _has_its_operands(layer):
                self._layers.append(layer)
                replaced = replaced_forward(layer, partial(self._forward, layer))
                self._undo.enter_context(replaced)

    def uninstall(self) -> None:
        """Give the layers their own ``forward`` back."""
        self._undo.close()
        self._layers.clear()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Split the layers that are called inside the context, for one batch."""
        for layer in self._layers:
            # Layers go over to sparse storage between two batches, and users mask their weights.
            operation, parameters = _operation(layer), tuple(layer.parameters(recurse=False))
            if operation is None or not _has_its_operands(layer):
                continue
            if all(map(_trained, parameters)):
                self._calls[layer] = _LayerCall(self, operation, parameters)
        try:
            yield
        finally:
            self._calls.clear()
            self.parameters = set()

    @contextmanager
    def deferring(
        self, queue: WeightGradientQueue, microbatch: int, borrowed: Sequence[Tensor | None]
    ) -> Iterator[None]:
        """Queue the products of the backward pass that runs inside the context.

        Args:
            queue: that of the stage.
            microbatch: the micro-batch of the pass.
            borrowed: tensors whose memory is others' and should be free after the pass.
        """
        storages = {storage_id(t.untyped_storage()) for t in borrowed if t is not None}
        self.destination = _Destination(queue, microbatch, storages)
        try:
            yield
        finally:
            self.destination = None

    def _forward(self, layer: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = self._calls.get(layer)
            if call is not None and len(args) == 1 and not (kwargs or self.suspended):
                output = self._split(call, args[0])
                if output is not None:
                    return output
            return own(*args, **kwargs)

        return forward

    def _split(self, call: _LayerCall, x: Any) -> Tensor | None:
        """Call a layer so that its backward pass is split; None where that is not possible."""
        # In a backward pass layers are called to recompute what was not saved.
        if self.destination is not None or saved_tensors_are_hooked() or transformed():
            return None
        if not _differentiable(x):
            return None
        operands = call.operation.operands(x, *call.operands)
        if operands is None:
            return None
        self.parameters.update(call.parameters)
        output: Tensor = apply_untransformed(_SplitCall, *operands, call)
        return output


class _LayerCall(NamedTuple):
    """How a layer is called in a batch."""

    layers: SplitLayers
    operation: Operation
    parameters: Sequence[nn.Parameter]

    @property
    def operands(self) -> tuple[Tensor, Tensor | None]:
        """The weight, and the bias if there is one."""
        weight, *bias = self.parameters
        return weight, bias[0] if bias else None


class _SplitCall(torch.autograd.Function):
    """A call of a layer. Its parameters get no gradient from a pass that queues their product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _LayerCall
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call = call
        # No view, so that what follows may change it in place.
        return call.operation.forward(x, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        operation, destination = ctx.call.operation, ctx.call.layers.destination
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = operation.input_gradient(gradient, x, weight)
        if destination is not None and not backward_transformed(gradient):
            destination.add(ctx.call, gradient, x)
            return of_input, None, None, None
        bias = ctx.call.operands[1] if ctx.needs_input_grad[2] else None
        of_weight, *of_bias = operation.parameter_gradients(gradient, x, weight, bias)
        return of_input, of_weight, *(of_bias or [None]), None


def _differentiable(x: Any) -> bool:
    return (
        type(x) is Tensor
        and x.requires_grad
        and torch.is_grad_enabled()
        and x.numel() > 0
        and not x.is_complex()
    )


def _has_its_operands(layer: nn.Module) -> bool:
    """Whether a layer's weight and bias are its parameters.

    What computes its weight, as masks and weight norms do, has another parameter in its place.
    """
    names = [name for name, _ in layer.named_parameters(recurse=False)]
    return names in (["weight"], ["weight", "bias"])


def _trained(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and parameter.requires_grad


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> Operands | None:
    """The operands of a dense product as autocast gives them; None if their dtypes differ then."""
    dtype = autocast_dtype(x.device)
    if dtype is not None:
        x, weight = autocast_to(dtype, x), autocast_to(dtype, weight)
        bias = None if bias is None else autocast_to(dtype, bias)
    same = weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype)
    return (x, weight, bias) if same else None
