"""The settings outside the module that a step may change, such as learning rates.

These are the numbers, flags and names among the options of optimizers and the attributes of
schedulers, the Trainer, its training loops, callbacks and the datamodule; and which parameters are
trained. Runs of a step on micro-batches undo their changes. Those of the run that counts are sent
to the other ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torch.optim.lr_scheduler import LRScheduler

from lightning_axosparse.pipeline.state.values import MISSING
from lightning_axosparse.strategy.compat.internals import callbacks_of
from lightning_axosparse.support.torch_internals import plain_torch_functions

_PLAIN = frozenset({bool, int, float, complex, str, type(None)})
_CALLBACKS = "trainer.callbacks"


class Setting(NamedTuple):
    """A setting that a step has changed; can be pickled.

    Attributes:
        owner: names the object, the same one on all ranks.
        name: of its attribute or entry.
        value: the new value; ``MISSING`` if it was removed.
    """

    owner: str
    name: str
    value: Any


class OuterSettings:
    """The settings with which every run of a step on a batch begins."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._parameters = dict(module.named_parameters())
        self.begin_batch()
        self.capture()

    def begin_batch(self) -> None:
        """Note which parameters are trained when a batch begins.

        Later runs on the batch may begin with others: what a step freezes is not restored, because
        the backward passes of micro-batches would give it a gradient.
        """
        self._trained = self._trained_now()

    def capture(self) -> None:
        """Copy the present settings."""
        self._now = _namespaces(self._module)
        self._before = {owner: dict(namespace) for owner, namespace in self._now.items()}

    def begin_count(self) -> None:
        """Begin the run that counts: what hooks in layers have counted in callbacks is not sent."""
        for owner, namespace in self._now.items():
            if owner.startswith(_CALLBACKS):
                self._before[owner] = dict(namespace)

    def rewind(self) -> bool:
        """Restore the settings; return whether any had changed.

        Those of callbacks stay, as hooks in layers may have counted there; so does a request to
        stop, as a handler of a signal may have made it.
        """
        changed = self._changed()
        for owner, name, _ in changed:
            if not (owner.startswith(_CALLBACKS) or name == "should_stop"):
                _assign(self._now[owner], name, self._before[owner].get(name, MISSING))
        return bool(changed)

    def has_frozen(self) -> bool:
        """Return whether other parameters are trained than when the batch began."""
        return self._trained_now() != self._trained

    def changes(self) -> list[Setting]:
        """Return the changes of the run that counts, for :meth:`apply` on other ranks."""
        pairs = zip(self._parameters, self._trained, self._trained_now(), strict=True)
        frozen = [Setting(n, "requires_grad", now) for n, before, now in pairs if before != now]
        return [*self._changed(), *frozen]

    def apply(self, settings: Sequence[Setting]) -> None:
        """Apply the changes of the run that counts, on another rank."""
        pairs = zip(self._parameters.values(), self._trained, self._trained_now(), strict=True)
        for parameter, before, now in pairs:
            if before != now:  # Here the step has not run to its end.
                parameter.requires_grad_(before)
        for owner, name, value in settings:
            if owner in self._parameters:
                self._parameters[owner].requires_grad_(value)
            elif owner in self._now:
                _assign(self._now[owner], name, value)

    def _trained_now(self) -> list[bool]:
        with plain_torch_functions():
            return [parameter.requires_grad for parameter in self._parameters.values()]

    def _changed(self) -> list[Setting]:
        """Return the changed settings; it runs in every pass and calls little."""
        return [
            Setting(owner, name, namespace.get(name, MISSING))
            for owner, namespace in self._now.items()
            if namespace.keys() != self._before[owner].keys()
            or not all(map(operator.is_, namespace.values(), self._before[owner].values()))
            for name in {**self._before[owner], **namespace}
            if _has_changed(self._before[owner].get(name, MISSING), namespace.get(name, MISSING))
        ]


def _namespaces(module: LightningModule) -> dict[str, dict[str, Any]]:
    """Return the dicts that have settings, by names that are the same on all ranks."""
    trainer = module.trainer
    fit_loop, datamodule = trainer.fit_loop, vars(trainer).get("datamodule")
    own = [each for each in vars(module).values() if isinstance(each, LRScheduler)]
    schedulers = [*(each.scheduler for each in trainer.lr_scheduler_configs), *own]
    for each in schedulers:  # Those that one of them runs in turn are appended.
        schedulers += vars(each).get("_schedulers", [])
    return {
        **{
            f"trainer.optimizers[{i}].param_groups[{j}]": group
            for i, optimizer in enumerate(trainer.optimizers)
            for j, group in enumerate(optimizer.param_groups)
        },
        **{f"schedulers[{i}]": vars(each) for i, each in enumerate(schedulers)},
        **{f"{_CALLBACKS}[{i}]": vars(c) for i, c in enumerate(callbacks_of(trainer))},
        **({} if datamodule is None else {"trainer.datamodule": vars(datamodule)}),
        "trainer": vars(trainer),
        "trainer.fit_loop": vars(fit_loop),
        "trainer.fit_loop.epoch_loop": vars(fit_loop.epoch_loop),
    }


def _has_changed(before: Any, now: Any) -> bool:
    return before is not now and _is_plain(before) and _is_plain(now)


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a flag, a name, a list of these, or none at all."""
    if type(value) in (list, tuple):
        return all(type(each) in _PLAIN for each in value)
    return type(value) in _PLAIN or value is MISSING


def _assign(namespace: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        namespace.pop(name, None)
    else:
        namespace[name] = value
