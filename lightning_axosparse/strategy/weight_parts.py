"""The parameters of a stage of which ranks have each a part, and all of them where asked for.

Gradients, their all-reduce, optimizers and clipping take a part for a parameter like any other.
Hooks, tickets and checkpoints get all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_axosparse.distributed.gradient_reducer import DividedGradient
from lightning_axosparse.distributed.process_groups import all_gather, broadcast
from lightning_axosparse.pruning.rule import Stored
from lightning_axosparse.sparse.module.optimizer_state import (
    convert_state,
    expand_state,
    with_master,
)
from lightning_axosparse.sparse.module.parameters import (
    OwnedParameter,
    owned_parameters,
    set_values,
)
from lightning_axosparse.sparse.module.sparse_module import make_sparse
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm
from lightning_axosparse.support.troubleshooting import see

T = TypeVar("T")


def hugging_face_plans(
    module: nn.Module, attribute: str
) -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    """The plans that Hugging Face modules inside a module have of all of their parts.

    Yields:
        The name of a module that is in none of the others, the module, and its plan.
    """
    planned: tuple[str, ...] = ()
    for path, part in module.named_modules():
        # PEFT's modules have all attributes of the module inside of them.
        plan = getattr(part, attribute, None) if hasattr(type(part), attribute) else None
        if isinstance(plan, Mapping) and plan and not path.startswith(planned):
            planned += (f"{path}.",)
            yield path, part, plan


def matches(path: str, pattern: str) -> bool:
    """Whether each word of a name matches that of a pattern: ``*`` is no more than one."""
    words, patterns = path.split("."), pattern.split(".")
    return len(words) == len(patterns) and all(map(fnmatchcase, words, patterns))


class SplitParameter:
    """A parameter of which each rank of a group has a part, along one dimension.

    Of a weight that is stored sparse, each rank has the unpruned entries of its part.

    Args:
        entry: the parameter, whole, and its owners, which read it plainly when it is replaced.
        dimension: along which it is split.
        sizes: the length of each rank's part; a rank may have nothing. A dimension that is longer
            than their sum consists of blocks of that length, each of which is split.
        group: the ranks.

    Attributes:
        shape: the dense shape of all of it.
    """

    def __init__(
        self,
        entry: OwnedParameter,
        dimension: int,
        sizes: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        self.entry, self.shape, self.group = entry, entry.shape, group
        self._dimension, self._sizes = dimension, list(sizes)
        self._blocks = entry.shape[dimension] // sum(sizes)

    def gather(self, optimizers: Iterable[Optimizer]) -> None:
        """Have all of it, its gradient and state on each rank; collective."""
        self._replace(*self.joining(), optimizers)
        self.entry.whole_shape = None

    def divide(self, optimizers: Iterable[Optimizer]) -> None:
        """Keep this rank's part of it, its gradient and state."""
        self._replace(*self._converted(self._part), optimizers)
        self.entry.whole_shape = self.shape

    def _replace(
        self,
        layout: Layout | None,
        converted: Callable[[Tensor], Tensor],
        optimizers: Iterable[Optimizer],
    ) -> None:
        parameter, form = self.entry.parameter, self.entry.form
        shape, gradient = parameter.shape, self.gradient()
        for optimizer in optimizers:
            state = self._agreed(optimizer.state.get(parameter, {}))
            if state:
                optimizer.state[parameter] = convert_state(state, shape, converted)
        gradient = None if gradient is None else converted(gradient)
        set_values(parameter, converted(parameter.detach()), gradient)
        if layout is not None:
            assert form is not None
            for owner, attribute in self.entry.owners:
                made = DenseForm(form.dtype)
                made.compute_by(form.backend)
                make_sparse(owner, attribute, layout, made)

    def joining(self) -> tuple[Layout | None, Callable[[Tensor], Tensor]]:
        """Return the full weight's layout, None if it is dense, and a function that joins a tensor.

        The function joins the parts of a tensor of the weight's shape. Collective.
        """
        return self._converted(self._joined)

    def _converted(
        self, redistributed: Callable[[Tensor], Tensor]
    ) -> tuple[Layout | None, Callable[[Tensor], Tensor]]:
        layout = self.entry.layout
        if layout is None:
            return None, redistributed
        made = layout_of(redistributed(layout.mask().to(torch.uint8)).bool())
        return made, lambda values: made.compress(redistributed(layout.densify(values)))

    def gradient(self) -> Tensor | None:
        """This rank's part of its gradient, also where it has nothing of it; collective.

        None if the replicas of any rank have divided theirs. Those of another may not have: the
        gradient of a part with few entries, as after pruning, is not worth dividing.
        """
        gradient = self.entry.parameter.grad
        divided = isinstance(gradient, DividedGradient)
        found = all_gather((divided, gradient is not None), self.group)
        if any(divided for divided, _ in found) or not any(has for _, has in found):
            return None
        return torch.zeros_like(self.entry.parameter) if gradient is None else gradient

    def _agreed(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its optimizer state, also where this rank has nothing of it; collective.

        An optimizer makes no state of a parameter that never gets a gradient.
        """
        part = self.entry.parameter
        kinds = self._of_owner(convert_state(state, part.shape, lambda value: value.dtype))
        return {
            key: state.get(key, torch.empty_like(part, dtype=kind))
            if isinstance(kind, torch.dtype)
            else kind
            for key, kind in kinds.items()
        }

    def _of_owner(self, value: T) -> T:
        """The value of the rank that has all of it; of this one where each has a part."""
        owners = [rank for rank, size in enumerate(self._sizes) if size]
        if len(owners) == len(self._sizes):
            return value
        return broadcast(value, dist.get_global_rank(self.group, owners[0]), self.group)

    def dense(self) -> Tensor:
        """All of its values, dense; collective."""
        parameter = self.entry.parameter.detach()
        return self._joined(parameter if self.entry.layout is None else self.entry.dense())

    def dense_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """All of its optimizer state, dense, as checkpoints hold it; collective."""
        state = self._agreed(state)
        if self.entry.layout is None:
            return convert_state(state, self.entry.parameter.shape, self._joined)
        state = expand_state(with_master(self.entry, state), self.entry.layout)
        return convert_state(state, self.entry.layout.shape, self._joined)

    def copy(self) -> nn.Parameter:
        """A copy of all of it with its gradient; collective."""
        (_, joined), gradient = self.joining(), self.gradient()
        parameter = self.entry.parameter
        whole = nn.Parameter(joined(parameter.detach()), parameter.requires_grad)
        whole.grad = None if gradient is None else joined(gradient)
        return whole

    def stored(self, state: Mapping[str, Any]) -> Stored:
        """All of it as one process would have it; collective."""
        parameter = self.entry.parameter.detach()
        state, (layout, joined) = self._agreed(state), self.joining()
        return Stored(joined(parameter), convert_state(state, parameter.shape, joined), layout)

    def local(self, value: Any) -> Any:
        """This rank's part of what has the whole shape; anything else as it is."""
        is_whole = isinstance(value, Tensor) and value.shape == self.shape
        return self._part(value) if is_whole else value

    def _part(self, whole: Tensor) -> Tensor:
        dim = self._dimension
        blocks = whole.unflatten(dim, (self._blocks, sum(self._sizes)))
        part: Tensor = blocks.split(self._sizes, dim + 1)[self.group.rank()].flatten(dim, dim + 1)
        return part.clone(memory_format=torch.contiguous_format)

    def _joined(self, part: Tensor) -> Tensor:
        dim, own = self._dimension, self._sizes[self.group.rank()]
        blocks = part.detach().unflatten(dim, (self._blocks, own))
        shapes = [list(blocks.shape) for _ in self._sizes]
        for shape, size in zip(shapes, self._sizes, strict=True):
            shape[dim + 1] = size
        parts = [part.new_empty(shape) for shape in shapes]
        dist.all_gather(parts, blocks.contiguous(), group=self.group)
        return torch.cat(parts, dim + 1).flatten(dim, dim + 1)


class Division(Protocol):
    """Divides some parameters over the ranks of a group, whose layers compute with the parts.

    Attributes:
        group: the ranks.
    """

    group: dist.ProcessGroup

    def divided(self, held: Mapping[str, OwnedParameter]) -> dict[str, SplitParameter]:
        """The parameters, of those that this stage holds, of which ranks have parts."""

    def reading_parts(self) -> AbstractContextManager[None]:
        """Let layers compute with parts inside the context."""


class WeightParts:
    """The parameters of which this rank has a part.

    Attributes:
        parameters: these, by name.
    """

    def __init__(self, module: nn.Module, divisions: Sequence[Division]) -> None:
        self.parameters: dict[str, SplitParameter] = {}
        self._module, self._divisions = module, divisions
        self._copies: dict[nn.Module, RemovableHandle] = {}
        self._reading = ExitStack()

    # From whole weights to parts, and back

    def split(self, held: Collection[str]) -> None:
        """Keep this rank's part of the parameters that its stage holds."""
        owned = {e.names[0]: e for e in owned_parameters(self._module) if e.names[0] in held}
        for division in self._divisions:
            divided = division.divided(owned)
            for name in divided.keys() & self.parameters.keys():
                raise MisconfigurationException(
                    f"{name!r} belongs to experts that expert_parallel spreads, but the plan of "
                    "tensor_parallel splits it, too. Leave it out of one of the two."
                    + see("expert-parallel")
                )
            self.parameters.update(divided)
        self._divide(self.parameters.values(), ())

    def join(self, optimizers: Iterable[Optimizer], together: bool) -> None:
        """Make the layers ordinary ones and, if all ranks do so together, parameters whole."""
        self._reading.close()
        for copied, hook in self._copies.items():
            hook.remove()
            if together:
                self._join_copy(copied)
        for split in self.parameters.values():
            if together:
                split.entry.parameter.grad = None
                split.gather(optimizers)
            split.entry.whole_shape = None  # Also of what stays a part.
        self._divisions, self.parameters, self._copies = (), {}, {}

    @contextmanager
    def whole(
        self, names: Collection[str] | None = None, optimizers: Sequence[Optimizer] = ()
    ) -> Iterator[None]:
        """Have whole parameters with whole gradients and state; collective over their ranks.

        What changes inside the context, these ranks have to change alike. Without names these are
        all parameters of this stage.
        """
        splits = [s for name, s in self.parameters.items() if names is None or name in names]
        self._reading.close()
        for split in splits:
            split.gather(optimizers)
        try:
            yield
        finally:
            self._divide(splits, optimizers)

    def _divide(self, splits: Iterable[SplitParameter], optimizers: Sequence[Optimizer]) -> None:
        for split in splits:
            split.divide(optimizers)
        for division in self._divisions:
            self._reading.enter_context(division.reading_parts())

    def divide_copy(self, copied: nn.Module) -> None:
        """Keep parts in a copy of the module, too; its ``state_dict`` is whole, and collective."""
        parameters = dict(copied.named_parameters())
        for name, split in self.parameters.items():
            parameters[name].data = split.local(parameters[name].data)

        def join(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
            for name, split in self.parameters.items():
                state[prefix + name] = split.joining()[1](state[prefix + name])

        self._copies[copied] = copied.register_state_dict_post_hook(join)

    def _join_copy(self, copied: nn.Module) -> None:
        parameters = dict(copied.named_parameters())
        for name, split in self.parameters.items():
            parameters[name].data = split.joining()[1](parameters[name].data)

    # What clipping, hooks, tickets and checkpoints ask

    def __bool__(self) -> bool:
        """Whether ranks may have parts of parameters."""
        return bool(self._divisions)

    def counts(self, name: str) -> bool:
        """Whether this rank counts a parameter: of what several ranks have alike, the first one."""
        split = self.parameters.get(name)
        parted = None if split is None or split.entry.whole_shape is None else split.group
        groups = (division.group for division in self._divisions)
        return all(group is parted or dist.get_rank(group) == 0 for group in groups)

    def whole_values(self) -> dict[str, Tensor]:
        """The whole, dense values of the parameters; collective over their ranks."""
        return {name: split.dense() for name, split in self.parameters.items()}

    def local_values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A module's state with this rank's parts in place of whole tensors."""
        parts = {n: split.local(state[n]) for n, split in self.parameters.items() if n in state}
        return {**state, **parts}

    def local_states(
        self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Sequence[str]]
    ) -> dict[int, Mapping[str, Any]]:
        """An optimizer's state, by number, with this rank's parts in place of whole tensors."""
        local = dict(states)
        for number, name in enumerate(name for group in groups for name in group):
            if number in local and name in self.parameters:
                split = self.parameters[name]
                local[number] = {key: split.local(each) for key, each in local[number].items()}
        return local
