"""Lets the micro-batches of a batch find layers in the state that the whole batch would find.

A layer that counts its calls, or iterates a spectral norm, does so once a batch: every micro-batch
begins with a copy of what there was before the batch, and what all of them make of it alike is what
the batch leaves. What depends on the samples, such as running statistics, changes with each
micro-batch, as with gradient accumulation. Which attributes are of the first kind is seen where a
batch is compared with its micro-batches (``strategy.step.comparison``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_axosparse.pipeline.state.module_state import (
    Place,
    held_by,
    namespace_of,
    owner_of,
    value_at,
)
from lightning_axosparse.pipeline.state.values import MISSING, copied, overwrite, same
from lightning_axosparse.support.torch_internals import set_versions, version_of
from lightning_axosparse.support.troubleshooting import see


@dataclass
class _Counted:
    """An attribute of a layer that every micro-batch changes alike."""

    place: Place
    stage: int
    owner: Any
    before: Any = MISSING
    copy: Any = MISSING
    parts: list[Any] = field(default_factory=list)
    is_same: bool = False

    def hold(self, value: Any) -> None:
        namespace = namespace_of(self.owner, self.place.name)
        if value is MISSING:
            namespace.pop(self.place.name, None)
        else:
            namespace[self.place.name] = value

    def lend(self) -> None:
        """Give the micro-batch a copy."""
        self.before = held_by(self.owner, self.place.name)
        self.copy = lent(self.before)
        self.hold(self.copy)

    def take_back(self, counts: bool) -> None:
        """Note what the micro-batch has made of it, if that counts."""
        if counts:
            self.parts.append(held_by(self.owner, self.place.name))
            self.is_same = self.parts[-1] is self.copy
        self.hold(self.before)

    def end(self) -> None:
        """Give the attribute what micro-batches have made of it, in the same object if they do."""
        value = self.parts[-1]
        if not (self.is_same and overwrite(self.before, value)):
            self.hold(value)


def lent(value: Any) -> Any:
    """A copy, so that what is done to it can be taken back; not of a tensor with a graph."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value
    if isinstance(value, nn.Parameter):
        parameter = nn.Parameter(value.detach().clone(), value.requires_grad)
        vars(parameter).update(vars(value))  # as the full shape of what this rank has a part of
        return parameter
    return copied(value)


class LayerState:
    """The attributes that layers of this rank's stages change alike for every micro-batch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._counted: list[_Counted] = []
        self._rewritten: dict[tuple[Place, int], Tensor] = {}
        self._versions: dict[int, list[int]] = {}
        """Of these, by stage, as the first micro-batch has found them."""
        self._left: dict[int, list[int]] = {}
        """The same, as micro-batches have left them, whose backward passes expect that."""

    def learn(
        self,
        counted: Collection[tuple[Place, int]],
        rewritten: Collection[tuple[Place, int]] = (),
    ) -> None:
        """Take in which attributes these are, each with its stage.

        Args:
            counted: those that change.
            rewritten: parameters that every pass sets to the same, so that what others need of
                them in their backward passes is there still.
        """
        for place, stage in rewritten:
            value = value_at(self._module, place)
            if isinstance(value, Tensor):
                self._rewritten[place, stage] = value
        known = {each.place for each in self._counted}
        for place, stage in counted:
            owner = owner_of(self._module, place)
            if place not in known and owner is not None:
                self._counted.append(_Counted(place, stage, owner))

    def begin_batch(self) -> None:
        """Prepare for the micro-batches of a batch."""
        self._versions, self._left = {}, {}
        for each in self._counted:
            each.parts = []

    @contextmanager
    def of_pass(self, stage: int | None) -> Iterator[None]:
        """Surround a micro-batch's pass through a stage; with None a run that passes none.

        Hooks of a layer are called in other runs, too: what they change there does not count.
        """
        for each in self._counted:
            each.lend()
        rewritten = self._rewritten_of(stage)
        if stage is not None and rewritten:  # Each pass leaves them as the first one does.
            versions = self._versions.setdefault(stage, [*map(version_of, rewritten)])
            set_versions(rewritten, versions)
        try:
            yield
        finally:
            for each in self._counted:
                each.take_back(counts=each.stage == stage)
            if stage is not None and rewritten:
                self._left[stage] = [*map(version_of, rewritten)]
            for each_stage, left in self._left.items() if stage is None else ():
                set_versions(self._rewritten_of(each_stage), left)

    def _rewritten_of(self, stage: int | None) -> list[Tensor]:
        return [value for (_, own), value in self._rewritten.items() if own == stage]

    def end_batch(self) -> list[str]:
        """Give the attributes what the batch has made of them; return what to warn of."""
        warnings = []
        for each in self._counted:
            if not each.parts:
                continue
            if not all(same(part, each.parts[0]) for part in each.parts):
                warnings.append(depends_on_samples(each.place))
            each.end()
        return warnings

    def remember(self, layer: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Remember what a layer that is about to be computed reads now.

        Returns:
            What makes a context in which it reads that again; what it changes in it is undone.
        """
        parts = {id(part) for part in layer.modules()} if self._counted else set()
        values = [
            (each, lent(held_by(each.owner, each.place.name)))
            for each in self._counted
            if id(each.owner) in parts
        ]
        return partial(_remembered, values) if values else nullcontext


@contextmanager
def _remembered(values: Sequence[tuple[_Counted, Any]]) -> Iterator[None]:
    """Let attributes hold these values inside the context."""
    before = [held_by(each.owner, each.place.name) for each, _ in values]
    for each, value in values:
        each.hold(value)
    try:
        yield
    finally:
        for (each, _), value in zip(values, before, strict=True):
            each.hold(value)


def depends_on_samples(place: Place) -> str:
    """What to say of an attribute of a layer that micro-batches do not change alike."""
    return (
        f"A layer changes `{place}` by what is in its samples: here each micro-batch does, one "
        "after the other, as with gradient accumulation. AxoSparseStrategy(microbatches=1) changes "
        "it once a batch." + see("steps")
    )
