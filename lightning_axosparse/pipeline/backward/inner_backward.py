"""Checks the backward passes that a user's step runs itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.support.troubleshooting import see


class InnerBackward:
    """Backward passes that a step runs itself, as in adversarial training and gradient penalties.

    On a stage such a pass ends at the received tensors, as the layers before them are on other
    ranks. So it is refused if the gradient depends on these layers. Inside one layer, before and
    behind the layers, and on one stage, it is right.

    On one process, Lightning clears the gradients that such a pass adds to parameters before the
    real backward pass. In a pipeline, gradients of other micro-batches may already be there, so
    those of the inner pass are dropped at the end of the run.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[nn.Parameter]],
        received: Callable[[], Iterable[Tensor]],
        earlier: Sequence[nn.Module],
    ) -> None:
        self._parameters, self._received, self._earlier_layers = parameters, received, earlier
        self._given: set[Any] = set()
        """The nodes and leaves of which arguments of earlier stages' layers were computed."""
        self._gradients: dict[nn.Parameter, Tensor | None] = {}

    def end(self) -> None:
        """Drop the gradients that the passes have added to parameters."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient

    def record_arguments(self, arguments: Iterable[Tensor]) -> None:
        """Record the graph of the arguments of an earlier stage's layer.

        It is recorded now: later the node of a ``torch.autograd.Function`` may be freed with its
        tensor, and a reference to the tensor would make it a value to send.
        """
        nodes = [_node(argument) for argument in arguments if argument.requires_grad]
        if nodes:
            _follow(nodes, self._given)

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
        remote = {parameter for layer in self._earlier_layers for parameter in layer.parameters()}
        if remote.union(self._given).isdisjoint(map(_node, inputs)):
            return False
        return not _follow(map(_node, outputs), set()).isdisjoint(self._received())

    def _refuse(self) -> None:
        raise MisconfigurationException(
            "The step runs a backward pass of its own (`backward` or `torch.autograd.grad`) through"
            " layers that are on another stage, so their part of the gradient would be missing."
            " Adversarial training, energy models, gradient penalties by the network's input and"
            " the gradients of tasks by its weights need all layers in one process: use"
            " AxoSparseStrategy(g_inter=1), with replicas (`devices`). On several stages a step may"
            " differentiate inside of one layer, or what it computes behind the layers."
            + see("steps")
        )


def _node(tensor: Any) -> Any:
    """Return the graph node of a tensor, or of torch's ``GradientEdge``; of a leaf, the leaf."""
    if not isinstance(tensor, Tensor):
        return tensor.node
    node = tensor.grad_fn
    return tensor if node is None else node


def _follow(nodes: Iterable[Any], seen: set[Any]) -> set[Any]:
    """Add nodes, and all nodes and leaves from which they were computed, to those seen."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, Tensor):
            continue
        if type(node).__name__ == "AccumulateGrad":
            waiting.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return seen
