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
    AttributePath,
    held_by,
    hold,
    owner_of,
    value_at,
)
from lightning_axosparse.pipeline.state.values import copied, overwrite, same
from lightning_axosparse.support.torch_internals import set_versions, version_of
from lightning_axosparse.support.troubleshooting import see


@dataclass
class _Counted:
    """An attribute of a layer, and what micro-batches have made of it."""

    place: AttributePath
    stage: int
    owner: Any
    parts: list[Any] = field(default_factory=list)
    is_in_place: bool = False

    @property
    def value(self) -> Any:
        return held_by(self.owner, self.place.name)

    @value.setter
    def value(self, value: Any) -> None:
        hold(self.owner, self.place.name, value)


class LayerState:
    """The attributes that layers of this rank's stages change alike for every micro-batch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._counted: dict[AttributePath, _Counted] = {}
        self._rewritten: dict[tuple[AttributePath, int], Tensor] = {}
        self._versions: dict[int, list[int]] = {}
        """Of these, by stage, as the first micro-batch has found them."""

    def learn(
        self,
        counted: Collection[tuple[AttributePath, int]],
        rewritten: Collection[tuple[AttributePath, int]] = (),
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
        for place, stage in counted:
            owner = owner_of(self._module, place)
            if owner is not None:
                self._counted.setdefault(place, _Counted(place, stage, owner))

    def begin_batch(self) -> None:
        """Prepare for the micro-batches of a batch."""
        self._versions = {}
        for each in self._counted.values():
            each.parts = []

    def of_pass(self, stage: int | None) -> AbstractContextManager[None]:
        """Surround a micro-batch's pass through a stage; with None a run that passes none.

        Hooks of a layer are called in other runs, too: what they change there does not count.
        """
        return self._of_pass(stage) if self._counted or self._rewritten else nullcontext()

    @contextmanager
    def _of_pass(self, stage: int | None) -> Iterator[None]:
        counted = list(self._counted.values())
        copies = [copied(each.value) for each in counted]
        rewritten = [each for (_, own), each in self._rewritten.items() if stage in (own, None)]
        versions = [version_of(each) for each in rewritten]
        if stage is not None:  # Each pass leaves them as the first one does.
            set_versions(rewritten, self._versions.setdefault(stage, versions))
        with _holding(counted, copies) if counted else nullcontext():
            try:
                yield
            finally:
                for each, copy in zip(counted, copies, strict=True):
                    if each.stage == stage:
                        each.parts.append(each.value)
                        each.is_in_place = each.value is copy
                if stage is None:
                    set_versions(rewritten, versions)

    def end_batch(self) -> list[str]:
        """Give the attributes what the batch has made of them; return what to warn of."""
        warnings = []
        for each in self._counted.values():
            if each.parts and not all(same(part, each.parts[0]) for part in each.parts):
                warnings.append(depends_on_samples(each.place))
            if each.parts and not (each.is_in_place and overwrite(each.value, each.parts[-1])):
                each.value = each.parts[-1]
        return warnings

    def remember(self, layer: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Remember what a layer that is about to be computed reads now.

        Returns:
            What makes a context in which it reads that again; what it changes in it is undone.
        """
        parts = {id(part) for part in layer.modules()} if self._counted else set()
        own = [each for each in self._counted.values() if id(each.owner) in parts]
        return partial(_holding, own, [copied(each.value) for each in own]) if own else nullcontext


@contextmanager
def _holding(attributes: Sequence[_Counted], values: Sequence[Any]) -> Iterator[None]:
    """Let attributes hold these values inside the context."""
    before = [each.value for each in attributes]
    for each, value in zip(attributes, values, strict=True):
        each.value = value
    try:
        yield
    finally:
        for each, value in zip(attributes, before, strict=True):
            each.value = value


def depends_on_samples(place: AttributePath) -> str:
    """What to say of an attribute of a layer that micro-batches do not change alike."""
    return (
        f"A layer changes `{place}` by what is in its samples: here each micro-batch does, one "
        "after the other, as with gradient accumulation. AxoSparseStrategy(microbatches=1) changes "
        "it once a batch." + see("steps")
    )
