"""Lets micro-batches, and a batch that runs again, begin with the state from before the batch.

A layer that counts its calls, or iterates a spectral norm, does so once a batch: every micro-batch
begins with a copy of the attribute's value before the batch, and as all of them change it to the
same value, the batch does, too: a counter of calls is 7 before four micro-batches, 8 after each of
them, and 8 after the batch. Attributes that depend on the samples, such as running statistics,
change with each micro-batch, as with gradient accumulation. A comparison of a batch with its
micro-batches shows which attributes are of the first kind (``strategy.step.comparison``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.state.module_state import (
    AttributePath,
    attribute_value,
    owner_of,
    set_attribute,
    value_at,
)
from lightning_axosparse.pipeline.state.values import copied, overwrite, same
from lightning_axosparse.support.torch_internals import set_versions, version_of
from lightning_axosparse.support.troubleshooting import see


@dataclass
class _Counted:
    """An attribute of a layer, with its values after each micro-batch of the batch."""

    path: AttributePath
    stage: int
    owner: Any
    parts: list[Any] = field(default_factory=list)
    is_in_place: bool = False

    @property
    def value(self) -> Any:
        return attribute_value(self.owner, self.path.name)

    @value.setter
    def value(self, value: Any) -> None:
        set_attribute(self.owner, self.path.name, value)


class LayerState:
    """The state of layers before a batch: attributes that count calls, and all buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._counted: dict[AttributePath, _Counted] = {}
        self._rewritten: dict[tuple[AttributePath, int], Tensor] = {}
        self._versions: dict[int, list[int]] = {}
        """By stage, the versions of rewritten parameters before the first micro-batch."""
        self._before: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        """While a batch runs, all buffers before it: the owner, the name, and a copy."""

    def learn(
        self,
        counted: Collection[tuple[AttributePath, int]],
        rewritten: Collection[tuple[AttributePath, int]] = (),
    ) -> None:
        """Add attributes, each with its stage.

        Args:
            counted: attributes that every micro-batch changes to the same value.
            rewritten: parameters to which every pass writes the values that they have, so that
                backward passes of other micro-batches may still use them.
        """
        for path, stage in rewritten:
            value = value_at(self._module, path)
            if isinstance(value, Tensor):
                self._rewritten[path, stage] = value
        for path, stage in counted:
            owner = owner_of(self._module, path)
            if owner is not None:
                self._counted.setdefault(path, _Counted(path, stage, owner))

    def begin_batch(self) -> None:
        """Prepare for the micro-batches of a batch.

        If the last batch has not ended, it runs again, with the buffers from before it.
        """
        for owner, name, buffer, values in self._before:
            setattr(owner, name, buffer)
            with torch.no_grad():
                buffer.copy_(values)
        self._before = [
            (owner, name, value, value.clone())
            for owner in self._module.modules()
            for name, value in owner.named_buffers(recurse=False)
            if not value.is_meta
        ]
        self._versions = {}
        for each in self._counted.values():
            each.parts = []

    def of_pass(self, stage: int | None) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's pass through a stage; None: a run without layers.

        Hooks of layers may be called in other runs, too: their changes are undone.
        """
        return self._of_pass(stage) if self._counted or self._rewritten else nullcontext()

    @contextmanager
    def _of_pass(self, stage: int | None) -> Iterator[None]:
        counted = list(self._counted.values())
        copies = [copied(each.value) for each in counted]
        rewritten = [each for (_, own), each in self._rewritten.items() if stage in (own, None)]
        versions = [version_of(each) for each in rewritten]
        if stage is not None:  # So that each pass ends with the same versions as the first one.
            set_versions(rewritten, self._versions.setdefault(stage, versions))
        with _values_set(counted, copies) if counted else nullcontext():
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
        """Set the attributes to their values after the batch; return warnings."""
        self._before = []
        warnings = []
        for each in self._counted.values():
            if each.parts and not all(same(part, each.parts[0]) for part in each.parts):
                warnings.append(depends_on_samples(each.path))
            if each.parts and not (each.is_in_place and overwrite(each.value, each.parts[-1])):
                each.value = each.parts[-1]
        return warnings

    def remember(self, layer: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Copy the attributes of a layer that is about to be computed.

        Returns:
            A function that makes a context in which the layer has these values again; its changes
            are undone after it.
        """
        parts = {id(part) for part in layer.modules()} if self._counted else set()
        own = [each for each in self._counted.values() if id(each.owner) in parts]
        return (
            partial(_values_set, own, [copied(each.value) for each in own]) if own else nullcontext
        )


@contextmanager
def _values_set(attributes: Sequence[_Counted], values: Sequence[Any]) -> Iterator[None]:
    """Set attributes to these values inside the context."""
    before = [each.value for each in attributes]
    for each, value in zip(attributes, values, strict=True):
        each.value = value
    try:
        yield
    finally:
        for each, value in zip(attributes, before, strict=True):
            each.value = value


def depends_on_samples(path: AttributePath) -> str:
    """Return the warning about an attribute that micro-batches change to different values."""
    return (
        f"A layer changes `{path}` by what is in its samples: here each micro-batch does, one "
        "after the other, as with gradient accumulation. AxoSparseStrategy(microbatches=1) changes "
        "it once a batch." + see("steps")
    )
