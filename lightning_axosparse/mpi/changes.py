"""Changes: what a call on the ranks changed in the caller's objects, found there and redone here.

The caller keeps its own objects: weights are written into its parameters, attributes into its
module, callbacks, loggers and datamodule, so that whoever holds them sees them as after a call in
this process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_axosparse.mpi.pickling import fingerprint, survives

_TRAINER_FIELDS = frozenset({"state", "should_stop", "callbacks", "datamodule"})
_STRATEGY_FIELDS = frozenset({"regridded"})
# What a module keeps for itself; its hooks and caches hold ids and functions of its own process.
_MODULE_INTERNALS = frozenset(vars(LightningModule())) - {
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_trainer",
    "training",
}


@dataclass(frozen=True)
class Changes:
    """What a call changed.

    Attributes:
        parameters: by name, the values and ``requires_grad`` of the parameters.
        fields: by name of the object, the new values of its attributes.
        gone: by name of the object, the attributes that it no longer has.
        metrics: the trainer's callback, logged and progress bar metrics.
    """

    parameters: dict[str, tuple[Tensor, bool]]
    fields: dict[str, dict[str, Any]]
    gone: dict[str, list[str]]
    metrics: list[dict[str, Any]]

    def redo(self, known: Mapping[str, Any]) -> None:
        """Make the same changes to the caller's objects, ``known`` by the same names."""
        with torch.no_grad():
            for name, (values, requires_grad) in self.parameters.items():
                _overwrite(known[name], values)
                known[name].requires_grad_(requires_grad)
        for name, fields in self.fields.items():
            for field, value in fields.items():
                _assign(vars(known[name]), field, value)
        for name, attributes in self.gone.items():
            for attribute in attributes:
                vars(known[name]).pop(attribute, None)
        for old, new in zip(_metrics(known["trainer"]), self.metrics, strict=True):
            old.clear()
            old.update(new)


class Snapshot:
    """The caller's objects before a call; made on the rank that will tell what it changed."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._all = known
        self._types = {name: type(value) for name, value in known.items()}
        self._before = self._fingerprints(known)

    @property
    def known(self) -> dict[str, Any]:
        """The objects that are still what the caller knows.

        One that has become another type (a lazy layer, a swapped one) is new to the caller, and
        travels whole inside the module that holds it.
        """
        return {
            name: value for name, value in self._all.items() if type(value) is self._types[name]
        }

    def changes(self) -> Changes:
        """What the call has changed."""
        known = self.known
        fields: dict[str, dict[str, Any]] = {}
        after = self._fingerprints(known)
        for (name, field), now in after.items():
            value = vars(known[name])[field]
            changed = now is not None and now != self._before.get((name, field))
            if changed and survives(value, known):
                fields.setdefault(name, {})[field] = value
        gone: dict[str, list[str]] = {}
        for name, field in self._before.keys() - after.keys():
            if name in known:
                gone.setdefault(name, []).append(field)
        parameters = {
            name: (value.detach().cpu(), value.requires_grad)
            for name, value in known.items()
            if isinstance(value, nn.Parameter)
        }
        return Changes(
            parameters, fields, gone, [_on_cpu(each) for each in _metrics(known["trainer"])]
        )

    @staticmethod
    def _fingerprints(known: Mapping[str, Any]) -> dict[tuple[str, str], bytes | None]:
        return {
            (name, field): fingerprint(value, known)
            for name, owner in known.items()
            for field, value in _fields(owner).items()
        }


def known_objects(trainer: Trainer, arguments: Iterable[Any]) -> dict[str, Any]:
    """The objects of a call that its caller holds on to, by names that are the same on each side.

    Args:
        trainer: the trainer of the call.
        arguments: what the trainer's method was called with, where the datamodule may be.
    """
    known: dict[str, Any] = {"trainer": trainer, "strategy": trainer.strategy}
    known |= {
        f"trainer.callbacks[{index}]": each for index, each in enumerate(vars(trainer)["callbacks"])
    }
    known |= {f"trainer.loggers[{index}]": each for index, each in enumerate(trainer.loggers)}
    for each in (vars(trainer)["datamodule"], *arguments):
        if isinstance(each, LightningDataModule):
            known["datamodule"] = each
    known |= _loops(vars(trainer), "trainer")
    if trainer.lightning_module is not None:
        module = trainer.lightning_module
        known |= {f"model.{name}".rstrip("."): each for name, each in module.named_modules()}
        known |= {f"parameter {name}": each for name, each in module.named_parameters()}
    return known


def _loops(attributes: Mapping[str, Any], path: str) -> dict[str, Any]:
    loops = {}
    for name, value in attributes.items():
        if isinstance(value, _Loop):
            loops[f"{path}.{name}"] = value
            loops |= _loops(vars(value), f"{path}.{name}")
    return loops


def _fields(owner: Any) -> dict[str, Any]:
    """The attributes of ``owner`` that are brought home when they change."""
    match owner:
        case Trainer():
            return {name: vars(owner)[name] for name in _TRAINER_FIELDS}
        case Strategy():
            return {name: value for name, value in vars(owner).items() if name in _STRATEGY_FIELDS}
        case _Loop():
            return {name: value for name, value in vars(owner).items() if _is_progress(value)}
        case nn.Module():
            return {k: v for k, v in vars(owner).items() if k not in _MODULE_INTERNALS}
        case Callback() | Logger() | LightningDataModule():
            return vars(owner)
    return {}


def _is_progress(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | Enum | _BaseProgress)


def _metrics(trainer: Trainer) -> list[dict[str, Any]]:
    return [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]


def _on_cpu(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in metrics.items()}


def _overwrite(parameter: nn.Parameter, values: Tensor) -> None:
    """Write into the memory that others may look at, unless dtype or shape have changed."""
    if parameter.shape == values.shape and parameter.dtype == values.dtype:
        parameter.copy_(values)
    else:
        parameter.data = values


def _assign(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute; a list, dict or set that the caller may hold keeps its identity."""
    old: Any = attributes.get(name)
    if type(old) is type(value) and isinstance(old, dict | set):
        old.clear()
        old.update(value)
    elif type(old) is type(value) and isinstance(old, list | deque):
        old.clear()
        old.extend(value)
    else:
        attributes[name] = value
