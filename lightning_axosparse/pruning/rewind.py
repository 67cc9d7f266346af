"""Goes back to the weights of an earlier step when the ticket is drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Adagrad, Optimizer

from lightning_axosparse.distributed.process_groups import gather


class EarlierWeights:
    """A copy of this rank's parameters in host memory, to go back to.

    After Frankle et al., *Linear Mode Connectivity and the Lottery Ticket Hypothesis* (ICML 2020,
    arXiv 1912.05671): all parameters get their values of an early step, and the optimizer begins
    with the state that it has before its first step.
    """

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    @property
    def taken(self) -> bool:
        """Whether there is a copy."""
        return bool(self._values)

    def take(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy the parameters of this rank."""
        self._values = {
            name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()
        }

    def restore(
        self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
    ) -> None:
        """Give the parameters their earlier values, drop the copy, and reset the optimizers."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self._values[name])
        for optimizer in optimizers:
            _reset(optimizer)
        self._values = {}

    def gather_state(
        self, counted: Collection[str], stages: ProcessGroup | None
    ) -> dict[str, Tensor]:
        """Return the copies of all stages on the first one; collective.

        Args:
            counted: the names of the parameters that this rank counts, of all that a pipeline has.
            stages: the ranks whose stages make up the model; None if this rank has all of it.
        """
        own = {name: value for name, value in self._values.items() if name in counted}
        return {name: value for part in gather(own, stages) for name, value in part.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`gather_state` returned."""
        self._values = dict(state)

    def keep_only(self, names: Collection[str]) -> None:
        """Drop the copies of parameters of other ranks."""
        self._values = {name: value for name, value in self._values.items() if name in names}


def _reset(optimizer: Optimizer) -> None:
    """Give an optimizer the state that it has before its first step."""
    if not isinstance(optimizer, Adagrad):
        optimizer.state.clear()
        return
    # The one optimizer of torch whose state its constructor makes.
    for state in optimizer.state.values():
        state["step"].zero_()
        state["sum"].fill_(optimizer.defaults["initial_accumulator_value"])
