"""Brings what a call changed on its ranks into the caller's objects: attributes and weights.

The caller's objects stay the same ones: attributes are set in its module, callbacks, loggers and
datamodule. Every reference to them then shows what it would show after a call in the caller's
process. Each rank writes the weights that it keeps to a file of its own. The caller reads it into
the memory of its own parameters, one tensor at a time, so that neither a rank nor a buffer in
between ever has the whole model.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_axosparse.strategy.compat.internals import callbacks_of
from lightning_axosparse.strategy.compat.lockstep import loops_of, progress_of
from lightning_axosparse.strategy.launcher.pickling import fingerprint, survives
from lightning_axosparse.support.torch_internals import swap_values, tree_map_only
from lightning_axosparse.support.troubleshooting import see

_TRAINER_ATTRIBUTES = frozenset({"state", "should_stop", "callbacks", "datamodule"})
_STRATEGY_ATTRIBUTES = frozenset({"regridded"})
_LIBRARIES = ("lightning.", "lightning_axosparse.", "torch.", "torchmetrics.")
# Attributes of every module whose content, such as hooks, belongs to one process.
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
        requires_grad: by name, that of each parameter.
        attributes: by name of the object, the new values of its changed attributes.
        deleted: by name of the object, the attributes that it no longer has.
        metrics: the trainer's callback, logged and progress bar metrics.
        lost: changed attributes of the user's objects that cannot be pickled.
    """

    requires_grad: dict[str, bool]
    attributes: dict[str, dict[str, Any]]
    deleted: dict[str, list[str]]
    metrics: list[dict[str, Any]]
    lost: list[str]

    def apply(self, known: Mapping[str, Any]) -> None:
        """Make the same changes to the objects of ``known``, which have the same names."""
        for name, requires_grad in self.requires_grad.items():
            known[name].requires_grad_(requires_grad)
        for name, attributes in self.attributes.items():
            for attribute, value in attributes.items():
                _assign(vars(known[name]), attribute, value)
        for name, deleted in self.deleted.items():
            for attribute in deleted:
                vars(known[name]).pop(attribute, None)
        for old, new in zip(_metrics(known["trainer"]), self.metrics, strict=True):
            old.clear()
            old.update(new)
        if self.lost:
            rank_zero_warn(
                f"The call has set {', '.join(self.lost)} on the rank that returns what it has "
                "changed, but this cannot be pickled, so it is not in this process: here it is as "
                "before the call. Keep results in attributes that can be pickled, or in files."
                + see("copies")
            )


class Snapshot:
    """The objects of a call before it runs, by name, on the rank that returns what it changes."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._all = known
        self._types = {name: type(value) for name, value in known.items()}
        self._before = self._fingerprints(known)

    @property
    def known(self) -> dict[str, Any]:
        """The objects that have kept their type.

        An object with another type (a lazy layer, a sparse one) is new to the caller, and is copied
        as a whole, as an attribute of the module that has it.
        """
        return {
            name: value for name, value in self._all.items() if type(value) is self._types[name]
        }

    def changes(self) -> Changes:
        """What the call has changed."""
        known = self.known
        changed: dict[str, dict[str, Any]] = {}
        lost: list[str] = []
        after = self._fingerprints(known)
        for (name, attribute), now in after.items():
            value = vars(known[name])[attribute]
            if now == self._before.get((name, attribute), b""):
                continue
            if now is not None and survives(value, known):
                changed.setdefault(name, {})[attribute] = value
            elif _is_users(known[name]):
                lost.append(f"{name}.{attribute} ({type(value).__name__})")
        deleted: dict[str, list[str]] = {}
        for name, attribute in self._before.keys() - after.keys():
            if name in known:
                deleted.setdefault(name, []).append(attribute)
        requires_grad = {
            name: value.requires_grad
            for name, value in known.items()
            if isinstance(value, nn.Parameter)
        }
        metrics = [tree_map_only(Tensor, Tensor.cpu, each) for each in _metrics(known["trainer"])]
        return Changes(requires_grad, changed, deleted, metrics, lost)

    @staticmethod
    def _fingerprints(known: Mapping[str, Any]) -> dict[tuple[str, str], bytes | None]:
        return {
            (name, attribute): fingerprint(value, known)
            for name, owner in known.items()
            for attribute, value in _returned_attributes(owner).items()
        }


def known_objects(trainer: Trainer, arguments: Iterable[Any]) -> dict[str, Any]:
    """The objects of a call that its caller has, too, by names that are the same on every rank."""
    known: dict[str, Any] = {"trainer": trainer, "strategy": trainer.strategy}
    known |= {f"trainer.callbacks[{n}]": each for n, each in enumerate(callbacks_of(trainer))}
    known |= {f"trainer.loggers[{n}]": each for n, each in enumerate(trainer.loggers)}
    for each in (vars(trainer)["datamodule"], *arguments):
        if isinstance(each, LightningDataModule):
            known["datamodule"] = each
    known |= loops_of(trainer)
    if trainer.lightning_module is not None:
        module = trainer.lightning_module
        known |= {f"model.{name}".rstrip("."): each for name, each in module.named_modules()}
        known |= {f"parameter {name}": each for name, each in module.named_parameters()}
        known |= {f"buffer {name}": each for name, each in module.named_buffers()}
    return known


def _returned_attributes(owner: Any) -> dict[str, Any]:
    """The attributes of ``owner`` that are returned to the caller when they change."""
    match owner:
        case Trainer():
            return {name: vars(owner)[name] for name in _TRAINER_ATTRIBUTES}
        case Strategy():
            return {
                name: value for name, value in vars(owner).items() if name in _STRATEGY_ATTRIBUTES
            }
        case nn.Module():
            return {k: v for k, v in vars(owner).items() if k not in _MODULE_INTERNALS}
        case Callback() | Logger() | LightningDataModule():
            return vars(owner)
    return progress_of(owner)


def _is_users(owner: Any) -> bool:
    """Whether the user has written the class of an object, so that its attributes matter here."""
    return not type(owner).__module__.startswith(_LIBRARIES)


def _metrics(trainer: Trainer) -> list[dict[str, Any]]:
    return [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]


def _assign(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute; update a list, dict or set in place, as the caller may refer to it."""
    old: Any = attributes.get(name)
    if type(old) is type(value) and isinstance(old, dict | set):
        old.clear()
        old.update(value)
    elif type(old) is type(value) and isinstance(old, list | deque):
        old.clear()
        old.extend(value)
    else:
        attributes[name] = value


@runtime_checkable
class ReturnsShard(Protocol):
    """A strategy of which each rank keeps a part of the module, and returns that alone."""

    def keep_sharded(self) -> None:
        """Leave the module sharded when a run ends; :meth:`release_shard` is called then."""

    def release_shard(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank returns, by name, dense, and free it, one tensor at a time."""


def returned_by(strategy: Strategy, rank: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a rank returns after a run; without sharding, the first one returns all."""
    if isinstance(strategy, ReturnsShard):
        yield from strategy.release_shard()
    elif rank == 0 and strategy.lightning_module is not None:
        module = strategy.lightning_module
        yield from chain(module.named_parameters(), module.named_buffers())


def write(tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Write named tensors to a file, each before the next one is asked for."""
    with path.open("wb") as file:
        for name, tensor in tensors:
            pickle.dump((name, tensor.dtype, tensor.shape), file)
            file.write(_bytes_of(tensor.detach().cpu().contiguous()))


def read(path: Path, module: nn.Module) -> None:
    """Read the tensors of a file, one at a time, into those of ``module`` that have their names.

    What has another shape or dtype, or is on the meta device, gets memory of its own.
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
    """Copy into the memory of a tensor, which views may share, or give it that of ``values``."""
    if target.is_meta:
        swap_values(target, values.requires_grad_(target.requires_grad))
    elif target.shape == values.shape and target.dtype == values.dtype:
        target.detach().copy_(values)
    else:
        target.data = values


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
