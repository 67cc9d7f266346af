"""Backward passes that a step runs itself, as adversarial training and gradient penalties do.

On a stage such a pass ends at what the stage has received: the layers before are on other ranks. So
it is refused where the gradient it asks for comes from there, too. Inside one layer, before and
behind the layers, and on one stage, it is right.

On one process Lightning clears the gradients that it leaves in parameters before the real backward
pass. Here that of another micro-batch may have come before, so they are dropped with the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.support.torch_internals import plain_torch_functions, tree_leaves
from lightning_axosparse.support.troubleshooting import see


class InnerBackward:
    """The backward passes inside the step of one micro-batch on one stage.

    Args:
        parameters: returns those of the module.
        received: returns the tensors that stand for those of earlier stages.
        first: name of the stage's first layer.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[nn.Parameter]],
        received: Callable[[], Iterable[Tensor]],
        first: str,
    ) -> None:
        self._parameters, self._received, self._first = parameters, received, first
        self._given: list[Any] = []
        self._gradients: dict[nn.Parameter, Tensor | None] = {}

    def end(self) -> None:
        """Drop the gradients that the passes have left in parameters."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient

    def give(self, args: Any, kwargs: Any) -> None:
        """Note what the step gives to a layer of an earlier stage."""
        single = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        leaves = args if single else tree_leaves((args, kwargs))
        with plain_torch_functions():
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    self._given.append(_node(leaf))

    def run(
        self,
        own: Callable[..., Any],
        outputs: Sequence[Any],
        gradients: Any,
        keep: Any,
        create: Any,
        inputs: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a backward pass as torch's ``own`` function does."""
        if inputs and self._needs_earlier_stages(outputs, inputs):
            self._refuse()
        if kwargs.get("accumulate_grad") and not self._gradients:
            self._gradients = {parameter: parameter.grad for parameter in self._parameters()}
            for parameter in self._gradients:
                parameter.grad = None
        result = own(outputs, gradients, keep, create, inputs, *args, **kwargs)
        if any(tensor.grad is not None for tensor in self._received()):
            self._refuse()
        return result

    def _needs_earlier_stages(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """Whether an earlier stage has computed a part of ``outputs`` from one of ``inputs``."""
        before = _graph(self._given)  # nodes, as a tensor that is kept would count as needed
        if before.isdisjoint(map(_node, inputs)):
            return False
        return not _graph(map(_node, outputs)).isdisjoint(self._received())

    def _refuse(self) -> None:
        raise MisconfigurationException(
            "The step runs a backward pass of its own (`backward` or `torch.autograd.grad`) through"
            f" the layers, but this stage begins with {self._first!r}: the layers before it are on"
            " other ranks, so their part of the gradient would be missing. Adversarial training,"
            " energy models and gradient penalties by the network's input need all layers in one"
            " process: use AxoSparseStrategy(g_inter=1), with replicas (`devices`). On several"
            " stages a step may differentiate inside of one layer, or what it computes behind the"
            " layers." + see("steps")
        )


def _node(tensor: Any) -> Any:
    """Where a tensor, or torch's ``GradientEdge``, stands in its graph; a leaf is itself."""
    if not isinstance(tensor, Tensor):
        return tensor.node
    node = tensor.grad_fn
    return tensor if node is None else node


def _graph(nodes: Iterable[Any]) -> set[Any]:
    """The nodes and leaves that these were computed from, and themselves."""
    seen: set[Any] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, Tensor):
            continue
        if node.name() == "torch::autograd::AccumulateGrad":
            waiting.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return seen
