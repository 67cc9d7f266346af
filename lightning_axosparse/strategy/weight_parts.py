"""Parameters of a stage that are split over ranks, and gathered where they are needed whole.

Gradients, their all-reduce, optimizers and clipping treat a part like any other parameter. Hooks,
tickets and checkpoints get the whole parameter.
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
    dense_copy,
    owned_parameters,
    set_values,
)
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm
from lightning_axosparse.support.troubleshooting import see

T = TypeVar("T")


def hugging_face_plans(
    module: nn.Module, attribute: str
) -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    """Yield the parallelization plans of the Hugging Face modules inside a module.

    Args:
        module: the module.
        attribute: the attribute that has a plan, ``"tp_plan"`` or ``"ep_plan"``.

    Yields:
        The name of an outermost module with a plan, the module, and its plan.
    """
    planned: tuple[str, ...] = ()
    for path, part in module.named_modules():
        # PEFT's modules have all attributes of the module that they wrap.
        plan = getattr(part, attribute, None) if hasattr(type(part), attribute) else None
        if isinstance(plan, Mapping) and plan and not path.startswith(planned):
            planned += (f"{path}.",)
            yield path, part, plan


def matches(path: str, pattern: str) -> bool:
    """Whether each word of a name matches that of a pattern.

    For example, ``"layers.*.up"`` matches ``"layers.0.up"``, but not ``"layers.0.mlp.up"``.
    """
    words, patterns = path.split("."), pattern.split(".")
    return len(words) == len(patterns) and all(map(fnmatchcase, words, patterns))


class SplitParameter:
    """A parameter that is split over the ranks of a group along one dimension.

    Of a sparse parameter, each rank has the unpruned entries of its part.

    For example, sizes of (2, 1) split a dimension of length 3 into entries 0, 1 and entry 2. A
    dimension of length 6 then has two blocks: entries 0, 1, 3, 4, and entries 2, 5.

    Args:
        entry: the whole parameter, and its owners.
        dimension: the dimension along which it is split.
        sizes: the length of each rank's part, which may be 0. A dimension that is longer than their
            sum consists of blocks of that length, each of which is split.
        group: the ranks.

    Attributes:
        shape: the dense shape of the whole parameter.
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
        """Gather the parameter, its gradient and state on each rank; collective."""
        self._replace(*self.prepare_join(), optimizers)
        self.entry.whole_shape = None

    def keep_part(self, optimizers: Iterable[Optimizer]) -> None:
        """Keep only this rank's part of the parameter, its gradient and state."""
        self._replace(*self._conversion(self._part), optimizers)
        self.entry.whole_shape = self.shape

    def _replace(
        self,
        layout: Layout | None,
        convert: Callable[[Tensor], Tensor],
        optimizers: Iterable[Optimizer],
    ) -> None:
        """Convert the parameter, its gradient and state; ``layout`` is its new one."""
        parameter, form = self.entry.parameter, self.entry.form
        shape, gradient = parameter.shape, self.gradient()
        for optimizer in optimizers:
            state = self._common_state(optimizer.state.get(parameter, {}))
            if state:
                optimizer.state[parameter] = convert_state(state, shape, convert)
        gradient = None if gradient is None else convert(gradient)
        set_values(parameter, convert(parameter.detach()), gradient)
        if layout is not None:
            assert form is not None
            new_form = DenseForm(form.dtype)
            new_form.compute_by(form.backend)
            self.entry.read_as(layout, new_form)

    def prepare_join(self) -> tuple[Layout | None, Callable[[Tensor], Tensor]]:
        """Return the whole layout, and a function that gathers stored values; collective."""
        return self._conversion(self._gather)

    def _conversion(
        self, convert_dense: Callable[[Tensor], Tensor]
    ) -> tuple[Layout | None, Callable[[Tensor], Tensor]]:
        """Return the layout after a conversion, and a function that converts stored values.

        ``convert_dense`` converts a dense tensor from a part to the whole, or the reverse.
        """
        layout = self.entry.layout
        if layout is None:
            return None, convert_dense
        converted = layout_of(convert_dense(layout.mask().to(torch.uint8)).bool())
        return converted, lambda values: converted.compress(convert_dense(layout.densify(values)))

    def gradient(self) -> Tensor | None:
        """Return this rank's part of the gradient, also if the part is empty; collective.

        It is None if the replicas of any rank have divided theirs. Those of another rank may not
        have, as a part with few entries, such as after pruning, is not divided.
        """
        gradient = self.entry.parameter.grad
        own = isinstance(gradient, DividedGradient), gradient is not None
        of_ranks = all_gather(own, self.group)
        if any(is_divided for is_divided, _ in of_ranks) or not any(has for _, has in of_ranks):
            return None
        return torch.zeros_like(self.entry.parameter) if gradient is None else gradient

    def _common_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the optimizer state of this rank's part, also if the part is empty; collective.

        An optimizer has no state of a parameter that has never had a gradient.
        """
        part = self.entry.parameter
        kinds = self._from_owner(convert_state(state, part.shape, lambda value: value.dtype))
        return {
            key: state.get(key, torch.empty_like(part, dtype=kind))
            if isinstance(kind, torch.dtype)
            else kind
            for key, kind in kinds.items()
        }

    def _from_owner(self, value: T) -> T:
        """Broadcast the value of the first rank with a part, if the parts of others are empty."""
        owners = [rank for rank, size in enumerate(self._sizes) if size]
        if len(owners) == len(self._sizes):
            return value
        return broadcast(value, dist.get_global_rank(self.group, owners[0]), self.group)

    def gather_dense(self) -> Tensor:
        """Return the whole parameter, dense; collective."""
        parameter = self.entry.parameter.detach()
        return self._gather(parameter if self.entry.layout is None else self.entry.dense())

    def gather_dense_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the whole optimizer state, dense, as checkpoints have it; collective."""
        state = self._common_state(state)
        if self.entry.layout is None:
            return convert_state(state, self.entry.parameter.shape, self._gather)
        state = expand_state(with_master(self.entry, state), self.entry.layout)
        return convert_state(state, self.entry.layout.shape, self._gather)

    def gather_copy(self) -> nn.Parameter:
        """Return a dense copy of the whole parameter with its gradient; collective."""
        (layout, join), gradient = self.prepare_join(), self.gradient()
        parameter = self.entry.parameter
        whole = nn.Parameter(join(parameter.detach()), parameter.requires_grad)
        whole.grad = None if gradient is None else join(gradient)
        stored = self.entry.stored
        if stored is None or layout is None:
            return whole
        return dense_copy(whole, stored._replace(layout=layout))

    def gather_stored(self, state: Mapping[str, Any]) -> Stored:
        """Return the whole parameter and its state as one process stores them; collective."""
        parameter = self.entry.parameter.detach()
        state, (layout, join) = self._common_state(state), self.prepare_join()
        return Stored(join(parameter), convert_state(state, parameter.shape, join), layout)

    def local_part(self, value: Any) -> Any:
        """Return this rank's part of a tensor of the whole shape; other values do not change."""
        is_whole = isinstance(value, Tensor) and value.shape == self.shape
        return self._part(value) if is_whole else value

    def _part(self, whole: Tensor) -> Tensor:
        dim = self._dimension
        blocks = whole.unflatten(dim, (self._blocks, sum(self._sizes)))
        part: Tensor = blocks.split(self._sizes, dim + 1)[self.group.rank()].flatten(dim, dim + 1)
        return part.clone(memory_format=torch.contiguous_format)

    def _gather(self, part: Tensor) -> Tensor:
        dim, own = self._dimension, self._sizes[self.group.rank()]
        blocks = part.detach().unflatten(dim, (self._blocks, own))
        shapes = [list(blocks.shape) for _ in self._sizes]
        for shape, size in zip(shapes, self._sizes, strict=True):
            shape[dim + 1] = size
        parts = [part.new_empty(shape) for shape in shapes]
        dist.all_gather(parts, blocks.contiguous(), group=self.group)
        return torch.cat(parts, dim + 1).flatten(dim, dim + 1)


class Division(Protocol):
    """Splits some parameters over the ranks of a group, whose layers compute with the parts.

    Attributes:
        group: the ranks.
    """

    group: dist.ProcessGroup

    def split_parameters(self, local: Mapping[str, OwnedParameter]) -> dict[str, SplitParameter]:
        """Return those of this stage's parameters that are split."""

    def reading_parts(self) -> AbstractContextManager[None]:
        """Return a context in which layers compute with parts."""


class WeightParts:
    """The parameters of which this rank has a part.

    Attributes:
        parameters: the parameters by name.
    """

    def __init__(self, module: nn.Module, divisions: Sequence[Division]) -> None:
        self.parameters: dict[str, SplitParameter] = {}
        self._module, self._divisions = module, divisions
        self._copies: dict[nn.Module, RemovableHandle] = {}
        self._reading = ExitStack()

    # From whole weights to parts, and back

    def split(self, local: Collection[str]) -> None:
        """Keep this rank's part of its stage's parameters, of which ``local`` are the names."""
        owned = {e.names[0]: e for e in owned_parameters(self._module) if e.names[0] in local}
        for division in self._divisions:
            splits = division.split_parameters(owned)
            for name in splits.keys() & self.parameters.keys():
                raise MisconfigurationException(
                    f"{name!r} belongs to experts that expert_parallel spreads, but the plan of "
                    "tensor_parallel splits it, too. Leave it out of one of the two."
                    + see("expert-parallel")
                )
            self.parameters.update(splits)
        self._keep_parts(self.parameters.values(), ())

    def join(self, optimizers: Iterable[Optimizer], together: bool) -> None:
        """Restore the layers and, if all ranks do so together, the whole parameters."""
        self._reading.close()
        for copied, hook in self._copies.items():
            hook.remove()
            if together:
                self._join_copy(copied)
        for split in self.parameters.values():
            if together:
                split.entry.parameter.grad = None
                split.gather(optimizers)
            split.entry.whole_shape = None  # Also if it stays a part.
        self._divisions, self.parameters, self._copies = (), {}, {}

    @contextmanager
    def gathered(
        self, names: Collection[str] | None = None, optimizers: Sequence[Optimizer] = ()
    ) -> Iterator[None]:
        """Gather parameters, gradients and state inside the context; collective over their ranks.

        These ranks have to make the same changes in the context. Without names, all parameters of
        this stage are gathered.
        """
        splits = [s for name, s in self.parameters.items() if names is None or name in names]
        self._reading.close()
        for split in splits:
            split.gather(optimizers)
        try:
            yield
        finally:
            self._keep_parts(splits, optimizers)

    def _keep_parts(
        self, splits: Iterable[SplitParameter], optimizers: Sequence[Optimizer]
    ) -> None:
        for split in splits:
            split.keep_part(optimizers)
        for division in self._divisions:
            self._reading.enter_context(division.reading_parts())

    def split_copy(self, copied: nn.Module) -> None:
        """Keep parts in a copy of the module, too; its ``state_dict`` gathers them collectively."""
        parameters = dict(copied.named_parameters())
        for name, split in self.parameters.items():
            parameters[name].data = split.local_part(parameters[name].data)

        def join(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
            for name, split in self.parameters.items():
                state[prefix + name] = split.prepare_join()[1](state[prefix + name])

        self._copies[copied] = copied.register_state_dict_post_hook(join)

    def _join_copy(self, copied: nn.Module) -> None:
        parameters = dict(copied.named_parameters())
        for name, split in self.parameters.items():
            parameters[name].data = split.prepare_join()[1](parameters[name].data)

    # For clipping, hooks, tickets and checkpoints

    def __bool__(self) -> bool:
        """Whether parameters may be split."""
        return bool(self._divisions)

    def counts(self, name: str) -> bool:
        """Whether this rank counts a parameter: if ranks have copies, only the first one does."""
        split = self.parameters.get(name)
        split_over = None if split is None or split.entry.whole_shape is None else split.group
        groups = (division.group for division in self._divisions)
        return all(group is split_over or dist.get_rank(group) == 0 for group in groups)

    def gather_values(self) -> dict[str, Tensor]:
        """Return the whole parameters, dense, by name; collective over their ranks."""
        return {name: split.gather_dense() for name, split in self.parameters.items()}

    def local_values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a module's state with this rank's parts in place of whole tensors."""
        parts = {
            n: split.local_part(state[n]) for n, split in self.parameters.items() if n in state
        }
        return {**state, **parts}

    def local_states(
        self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Sequence[str]]
    ) -> dict[int, Mapping[str, Any]]:
        """Return an optimizer's state with this rank's parts in place of whole tensors."""
        local = dict(states)
        for number, name in enumerate(name for group in groups for name in group):
            if number in local and name in self.parameters:
                split = self.parameters[name]
                local[number] = {key: split.local_part(each) for key, each in local[number].items()}
        return local
