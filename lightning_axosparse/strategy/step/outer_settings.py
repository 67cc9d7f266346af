"""The settings outside the module that a step may change, such as learning rates.

These are the numbers, flags and names among the options of optimizers and the attributes of
schedulers, the Trainer, its training loops, callbacks and the datamodule; and which parameters are
trained. Runs of a step on micro-batches undo their changes. Those of the run that counts are sent
to the other ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torch.optim.lr_scheduler import LRScheduler

from lightning_axosparse.pipeline.batch_layout import is_plain
from lightning_axosparse.pipeline.state.module_state import assign
from lightning_axosparse.pipeline.state.values import MISSING
from lightning_axosparse.strategy.compat.internals import callbacks_of
from lightning_axosparse.support.torch_internals import plain_torch_functions

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
        differing = [
            owner
            for owner, namespace in self._now.items()
            if namespace.keys() != self._before[owner].keys()
            or not all(map(operator.is_, namespace.values(), self._before[owner].values()))
        ]  # In every pass, of which most change nothing: it calls no function of ours.
        if not differing:
            return False
        changed = self._changed(differing)
        for owner, name, _ in changed:
            if not (owner.startswith(_CALLBACKS) or name == "should_stop"):
                assign(self._now[owner], name, self._before[owner].get(name, MISSING))
        return bool(changed)

    def has_frozen(self) -> bool:
        """Return whether other parameters are trained than when the batch began."""
        return self._trained_now() != self._trained

    def changes(self) -> list[Setting]:
        """Return the changes of the run that counts, for :meth:`apply` on other ranks."""
        pairs = zip(self._parameters, self._trained, self._trained_now(), strict=True)
        frozen = [Setting(n, "requires_grad", now) for n, before, now in pairs if before != now]
        return [*self._changed(self._now), *frozen]

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
                assign(self._now[owner], name, value)

    def _trained_now(self) -> list[bool]:
        with plain_torch_functions():
            return [parameter.requires_grad for parameter in self._parameters.values()]

    def _changed(self, owners: Iterable[str]) -> list[Setting]:
        changed = []
        for owner in owners:
            before, now = self._before[owner], self._now[owner]
            for name in {**before, **now}:
                old, new = before.get(name, MISSING), now.get(name, MISSING)
                if old is not new and _is_sent(old) and _is_sent(new):
                    changed.append(Setting(owner, name, new))
        return changed


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


def _is_sent(value: Any) -> bool:
    return value is MISSING or is_plain(value)
