"""Copies the changes of a call from its ranks to the caller's objects: attributes and weights.

The caller keeps its objects: attributes are set in its module, callbacks, loggers and datamodule.
A list, dict or set that such an attribute has had all the time is updated in place, as the caller
may refer to it; one that the call has put there is a new one here, too. Each rank writes the
weights that it stores to a file of its own. The caller reads them into the memory of its own
parameters, one tensor at a time, so that neither a rank nor a buffer ever holds the whole model.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_axosparse.pipeline.state.values import COLLECTIONS, overwrite
from lightning_axosparse.strategy.compat.internals import callbacks_of, set_metrics
from lightning_axosparse.strategy.compat.lockstep import loops_of, progress_of
from lightning_axosparse.strategy.launcher.pickling import can_be_copied, names_by_id, pickle_digest
from lightning_axosparse.support.torch_internals import swap_values, tree_map_only
from lightning_axosparse.support.troubleshooting import see

_TRAINER_ATTRIBUTES = ("state", "should_stop", "callbacks", "datamodule")
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_STRATEGY_ATTRIBUTES = frozenset({"regridded"})
_LIBRARIES = (
    *("lightning.", "pytorch_lightning.", "lightning_fabric."),
    *("lightning_axosparse.", "torch.", "torchmetrics."),
)
# Attributes of every module, such as hooks, that belong to one process.
_MODULE_INTERNALS = {*vars(LightningModule()), "_compiled_call_impl"} - {
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_trainer",
    "_dtype",
    "_example_input_array",
    "_strict_loading",
    "training",
}


@dataclass(frozen=True)
class Changes:
    """The changes of a call to objects.

    Attributes:
        attributes: the new values of changed attributes, by the name of the object.
        in_place: the names of objects with those of attributes that are the same list, dict or set
            as before the call.
        removed: the names of objects with those of attributes that they no longer have, such as a
            None that ``configure_model`` has replaced by a submodule.
        unpicklable: changed attributes of the user's objects that cannot be pickled.
    """

    attributes: dict[str, dict[str, Any]]
    in_place: set[tuple[str, str]]
    removed: list[tuple[str, str]]
    unpicklable: list[str]

    def apply(self, named: Mapping[str, Any]) -> None:
        """Make the same changes to the objects of the same names in ``named``."""
        for name, attribute in self.removed:
            vars(named[name]).pop(attribute, None)
        for name, attributes in self.attributes.items():
            for attribute, value in attributes.items():
                if (name, attribute) in self.in_place:
                    old = getattr(named[name], attribute, None)
                    value = old if isinstance(old, COLLECTIONS) and overwrite(old, value) else value
                _assign(named[name], attribute, value)
        if self.unpicklable:
            rank_zero_warn(
                f"The call has set {', '.join(self.unpicklable)} on the rank that returns its "
                "changes, but this cannot be pickled, so it is not in this process: here it is as "
                "before the call. Keep results in attributes that can be pickled, or in files."
                + see("copies")
            )


class Snapshot:
    """The objects of a call before it runs, by name, on the rank that returns its changes."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._all = named
        self._types = {name: type(value) for name, value in named.items()}
        self._before = _digests(named)
        self._values = {
            (name, attribute): value
            for name, owner in named.items()
            for attribute, value in _returned_attributes(owner).items()
        }

    @property
    def named(self) -> dict[str, Any]:
        """The objects whose type has not changed.

        An object with another type (a lazy layer, a sparse one) is new to the caller, and is copied
        as an attribute of the module that has it.
        """
        return {
            name: value for name, value in self._all.items() if type(value) is self._types[name]
        }

    def changes(self) -> Changes:
        """Return the changes of the call."""
        named = self.named
        changed: dict[str, dict[str, Any]] = {}
        unpicklable: list[str] = []
        in_place: set[tuple[str, str]] = set()
        digests = _digests(named)
        removed = [key for key in self._before.keys() - digests.keys() if key[0] in named]
        for (name, attribute), digest in digests.items():
            if digest == self._before.get((name, attribute), b""):
                continue
            value = _returned_attributes(named[name])[attribute]
            if digest is not None and can_be_copied(value, named):
                changed.setdefault(name, {})[attribute] = value
                if value is self._values.get((name, attribute)):
                    in_place.add((name, attribute))
            elif not type(named[name]).__module__.startswith(_LIBRARIES):
                unpicklable.append(f"{name}.{attribute} ({type(value).__name__})")
        return Changes(changed, in_place, removed, unpicklable)


def _digests(named: Mapping[str, Any]) -> dict[tuple[str, str], bytes | None]:
    names = names_by_id(named)
    return {
        (name, attribute): pickle_digest(value, names)
        for name, owner in named.items()
        for attribute, value in _returned_attributes(owner).items()
    }


def named_objects(trainer: Trainer, arguments: Iterable[Any]) -> dict[str, Any]:
    """Return the objects that the caller and the ranks have, by names that are the same on all."""
    named: dict[str, Any] = {"trainer": trainer, "strategy": trainer.strategy}
    named |= {f"trainer.callbacks[{n}]": each for n, each in enumerate(callbacks_of(trainer))}
    named |= {f"trainer.loggers[{n}]": each for n, each in enumerate(trainer.loggers)}
    for each in (vars(trainer)["datamodule"], *arguments):
        if isinstance(each, LightningDataModule):
            named["datamodule"] = each
    named |= loops_of(trainer)
    if trainer.lightning_module is not None:
        module = trainer.lightning_module
        named |= {f"model.{name}".rstrip("."): each for name, each in module.named_modules()}
        named |= {f"parameter {name}": each for name, each in module.named_parameters()}
        named |= {f"buffer {name}": each for name, each in module.named_buffers()}
    return named


def _returned_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of ``owner`` that are returned to the caller when they change."""
    match owner:
        case Trainer():
            metrics = {name: getattr(owner, name) for name in _METRICS}
            own = {name: vars(owner)[name] for name in _TRAINER_ATTRIBUTES}
            return own | cast(dict[str, Any], tree_map_only(Tensor, Tensor.cpu, metrics))
        case Strategy():
            return {name: vars(owner)[name] for name in _STRATEGY_ATTRIBUTES & vars(owner).keys()}
        case nn.Module():
            return {k: v for k, v in vars(owner).items() if k not in _MODULE_INTERNALS}
        case nn.Parameter():
            return {"requires_grad": owner.requires_grad}
        case Callback() | Logger() | LightningDataModule():
            return vars(owner)
    return progress_of(owner)


def _assign(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, nn.Parameter):
        owner.requires_grad_(value)
    elif isinstance(owner, Trainer) and name in _METRICS:
        set_metrics(owner, name, value)
    else:
        vars(owner)[name] = value


def write_tensors(tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Write named tensors to a file, each before the next one is generated."""
    with path.open("wb") as file:
        for name, tensor in tensors:
            pickle.dump((name, tensor.dtype, tensor.shape), file)
            file.write(_bytes_of(tensor.detach().cpu().contiguous()))


def read_tensors(path: Path, module: nn.Module) -> None:
    """Read the tensors of a file, one at a time, into those of ``module`` that have their names.

    A tensor of ``module`` with another shape or dtype, or on the meta device, gets new memory.
    """
    targets = dict(
        chain(
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        )
    )
    with path.open("rb") as file:
        while file.peek(1):
            name, dtype, shape = pickle.load(file)
            values = torch.empty(shape, dtype=dtype)
            file.readinto(_bytes_of(values))
            if name in targets:
                _replace(targets[name], values)


def _replace(target: Tensor, values: Tensor) -> None:
    """Copy values into the memory of a tensor, which views may share, or replace the memory."""
    if target.is_meta:
        swap_values(target, values.requires_grad_(target.requires_grad))
    elif target.shape == values.shape and target.dtype == values.dtype:
        target.detach().copy_(values)
    else:
        target.data = values


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
