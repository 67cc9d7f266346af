"""The parameters of a stage of which ranks have each a part, and all of them where asked for.

Gradients, their all-reduce, optimizers and clipping take a part for a parameter like any other.
Hooks, tickets and checkpoints get all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_axosparse.pruning.rule import Stored
from lightning_axosparse.sparse.module.parameters import OwnedParameter, owned_parameters
from lightning_axosparse.strategy.split_parameter import SplitParameter
from lightning_axosparse.support.troubleshooting import see


class Division(Protocol):
    """Divides some parameters over the ranks of a group, whose layers compute with the parts.

    Attributes:
        group: the ranks.
    """

    group: dist.ProcessGroup

    def divided(self, held: Mapping[str, OwnedParameter]) -> dict[str, SplitParameter]:
        """The parameters, of those that this stage holds, of which ranks have parts."""

    def read_parts(self) -> None:
        """Let layers compute with parts."""

    def read_plainly(self) -> None:
        """Let layers compute as they did before."""

    def end(self) -> None:
        """Give the module back what was changed in it besides."""


class WeightParts:
    """The parameters of which this rank has a part.

    Args:
        module: the module.
        divisions: by which ranks they are divided, and how layers compute with parts.
    """

    def __init__(self, module: nn.Module, divisions: Sequence[Division]) -> None:
        self._module, self._divisions = module, divisions
        self._split: dict[str, SplitParameter] = {}
        self._copies: dict[nn.Module, RemovableHandle] = {}
        self._is_whole = True

    # From whole weights to parts, and back

    def split(self, held: Collection[str]) -> None:
        """Keep this rank's part of the parameters that its stage holds."""
        owned = {e.names[0]: e for e in owned_parameters(self._module) if e.names[0] in held}
        for division in self._divisions:
            divided = division.divided(owned)
            for name in divided.keys() & self._split.keys():
                raise MisconfigurationException(
                    f"{name!r} belongs to experts that g_expert spreads, but the plan of g_tensor "
                    "splits it, too. Leave it out of the plan, or the experts out of `experts`."
                    + see("expert-parallel")
                )
            self._split.update(divided)
        self._divide(self._split.values(), ())

    def join(self, optimizers: Iterable[Optimizer], together: bool) -> None:
        """Make parameters and optimizers' state whole, and the layers ordinary ones.

        Args:
            optimizers: those that step the parameters.
            together: whether all ranks do so; else parts stay parts.
        """
        self._read_plainly()
        for copied, hook in self._copies.items():
            hook.remove()
            if together:
                self._join_copy(copied)
        self._copies = {}
        if together:
            for split in self._split.values():
                split.entry.parameter.grad = None
                split.gather(optimizers)
        for division in self._divisions:
            division.end()
        self._divisions, self._split = (), {}

    @contextmanager
    def whole(
        self, names: Collection[str] | None = None, optimizers: Sequence[Optimizer] = ()
    ) -> Iterator[None]:
        """Have whole parameters with whole gradients and state; collective over their ranks.

        What changes inside the context, these ranks have to change alike.

        Args:
            names: the parameters; None for all of this stage.
            optimizers: those whose state of the parameters is whole, too.
        """
        splits = [s for name, s in self._split.items() if names is None or name in names]
        self._read_plainly()
        self._is_whole = names is None
        for split in splits:
            split.gather(optimizers)
        try:
            yield
        finally:
            self._divide(splits, optimizers)

    def _divide(self, splits: Iterable[SplitParameter], optimizers: Sequence[Optimizer]) -> None:
        for split in splits:
            split.divide(optimizers)
        self._is_whole = False
        for division in self._divisions:
            division.read_parts()

    def _read_plainly(self) -> None:
        for division in self._divisions:
            division.read_plainly()

    def divide_copy(self, copied: nn.Module) -> None:
        """Keep parts in a copy of the module, too; its ``state_dict`` is whole, and collective."""
        parameters = dict(copied.named_parameters())
        for name, split in self._split.items():
            parameters[name].data = split.local({"": parameters[name].data})[""]

        def join(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
            for name, split in self._split.items():
                state[prefix + name] = split.joining()[1](state[prefix + name])

        self._copies[copied] = copied.register_state_dict_post_hook(join)

    def _join_copy(self, copied: nn.Module) -> None:
        parameters = dict(copied.named_parameters())
        for name, split in self._split.items():
            parameters[name].data = split.joining()[1](parameters[name].data)

    # What clipping, hooks, tickets and checkpoints ask

    def __bool__(self) -> bool:
        """Whether ranks may have parts of parameters."""
        return bool(self._divisions)

    def __contains__(self, name: object) -> bool:
        """Whether this rank has a part of a parameter."""
        return name in self._split

    def group_of(self, name: str) -> dist.ProcessGroup | None:
        """The ranks that have each a part of a parameter; None where this one has all of it."""
        return self._split[name].group if name in self._split else None

    def counts(self, name: str) -> bool:
        """Whether this rank counts a parameter: of what several ranks have alike, the first one."""
        parted = None if self._is_whole else self.group_of(name)
        groups = (division.group for division in self._divisions)
        return all(group is parted or dist.get_rank(group) == 0 for group in groups)

    def whole_values(self) -> dict[str, Tensor]:
        """The whole, dense values of the parameters; collective over their ranks."""
        return {name: split.dense() for name, split in self._split.items()}

    def whole_parameter(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter, or a copy of all of it with its gradient; collective over its ranks."""
        if name not in self._split:
            return parameter
        split = self._split[name]
        (_, joined), gradient = split.joining(), split.gradient()
        whole = nn.Parameter(joined(parameter.detach()), parameter.requires_grad)
        whole.grad = None if gradient is None else joined(gradient)
        return whole

    def whole_stored(self, name: str, stored: Stored) -> Stored:
        """All of a parameter, with its optimizer state; collective over its ranks."""
        return self._split[name].stored(stored.state) if name in self._split else stored

    def whole_state(self, name: str, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A parameter's optimizer state, with whole, dense tensors; collective over its ranks."""
        return self._split[name].dense_state(state) if name in self._split else state

    def local_values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A module's state with this rank's parts in place of whole tensors."""
        return {
            name: self._split[name].local({"": value})[""] if name in self._split else value
            for name, value in state.items()
        }

    def local_states(
        self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Sequence[str]]
    ) -> dict[int, Mapping[str, Any]]:
        """An optimizer's state, by number, with this rank's parts in place of whole tensors."""
        names = [name for group in groups for name in group]
        return {
            number: self._split[name].local(state) if name in self._split else state
            for number, state in states.items()
            for name in [names[number]]
        }
