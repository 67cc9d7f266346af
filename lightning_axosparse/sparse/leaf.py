"""Leaf: what a weight read from a module hands on to the parameter that it was read from.

Code that was written for dense modules takes ``module.weight`` for a leaf of autograd: it reads and
clears its gradient, freezes it, hooks on to it, or gives it other data. The weight is made anew at
each read, so all this belongs to the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.layout import Layout

_tensors: Any = Tensor
"""What every tensor does; as Any, because the type stubs know no descriptors."""


class Leaf(Tensor):
    """Mixed into a tensor with the dense shape whose kept entries are a module's parameter.

    Attributes:
        parameter: the parameter; None for a tensor that was not read from a module.
        entries: where the parameter's entries lie.
    """

    parameter: nn.Parameter | None = None
    entries: Layout
    _with: Callable[[Tensor], Tensor]

    @property
    def grad(self) -> Tensor | None:
        """The parameter's gradient, with the dense shape; what is written to it is kept."""
        if self.parameter is None or self.retains_grad:
            return _tensors.grad.__get__(self)  # type: ignore[no-any-return]
        gradient = self.parameter.grad
        return None if gradient is None else self._with(gradient)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self.parameter is None or self.retains_grad:
            _tensors.grad.__set__(self, gradient)
        else:
            dtype = self.parameter.dtype
            kept = None if gradient is None else self.entries.compress(gradient).to(dtype)
            self.parameter.grad = kept

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained."""
        if self.parameter is None:
            return _tensors.requires_grad.__get__(self)  # type: ignore[no-any-return]
        return self.parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Train the parameter from the next read on, or do not."""
        if self.parameter is None:
            return super().requires_grad_(requires_grad)
        self.parameter.requires_grad_(requires_grad)
        return self

    @property
    def data(self) -> Tensor:
        """This tensor without its history; what is written to it is kept."""
        return self.detach()

    @data.setter
    def data(self, data: Tensor) -> None:
        if data.shape != self.shape:
            raise ValueError(
                f"A weight that is stored sparse keeps its shape {tuple(self.shape)}; got data of "
                f"shape {tuple(data.shape)}. Call densify(module) first."
            )
        self.detach().copy_(data)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call ``hook`` with the gradient, of the dense shape, before it is added to the former.

        Returns:
            A handle with a method ``remove()``.
        """
        if self.parameter is None:
            return _tensors.register_hook(self, hook)

        def compact(gradient: Tensor) -> Tensor | None:
            positions = self.entries.positions()
            changed = hook(reference.scatter(gradient, positions, self.entries.shape))
            return None if changed is None else reference.gather(changed, positions)

        return _tensors.register_hook(self.parameter, compact)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Call ``hook`` with the parameter, the vector of kept values, once its gradient is final.

        Returns:
            A handle with a method ``remove()``.
        """
        if self.parameter is None:
            return _tensors.register_post_accumulate_grad_hook(self, hook)
        return _tensors.register_post_accumulate_grad_hook(self.parameter, hook)
