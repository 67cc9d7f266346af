"""Runs a step with plain Lightning and in a pipeline of two stages, and says how the two compare.

=============  ===================================================================================
``equal``      same losses, weights, logged values and attributes, to the rounding of float32
``refused``    an error of this package
``warned``     a warning of this package, of nothing or of every value that differs
``silent``     something differs, and nothing was said of it
``crashed``    an error that is not of this package
=============  ===================================================================================
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import pkgutil
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torchmetrics import Metric

import lightning_axosparse
from lightning_axosparse import AxoSparseStrategy
from tests.accelerator import ACCELERATOR, trainer_devices
from tests.quiet import QUIET

Kind = Literal["equal", "refused", "warned", "silent", "crashed"]

PACKAGE = str(Path(lightning_axosparse.__file__).parent)
LINK = re.compile(r"See \S+#[a-z-]+\.")
"""At the end of an error of this package."""

ADVICE = re.compile(r"expect other losses")
"""Of batch norms, in the log."""

OTHERS = re.compile(r"/torchmetrics/|`srun` command is available")
"""Warnings of which this package can do nothing."""

RELATIVE, OF_UPDATES = 1e-4, 2e-3
"""Largest differences of values, and of the change of a weight by training."""


@dataclass(frozen=True)
class Entry:
    """A step of the corpus.

    Attributes:
        name: of the step.
        cause: the module it stands in.
        make: makes the user's module.
        equal: a hostile step that has to be right, and nothing said.
        random: whether it draws random numbers, so that values are not compared.
        reason: what a warning or an error has to tell, though this step looks ordinary.
        unread: attributes of which nobody reads what the last micro-batch leaves.
        strategy: more arguments of the strategy.
        trainer: more arguments of the Trainer.
        loaders: makes the loaders of training and validation; None takes the module's.
    """

    name: str
    cause: str
    make: Callable[[], L.LightningModule]
    equal: bool
    random: bool
    reason: str
    unread: tuple[str, ...]
    strategy: dict[str, Any]
    trainer: dict[str, Any]
    loaders: Callable[[int], Any] | None

    @property
    def hostile(self) -> bool:
        return ".hostile." in self.make.__module__


@dataclass
class Observation:
    """What a run did."""

    losses: list[float] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    error: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run in a pipeline compares with a plain one."""

    kind: Kind
    differences: dict[str, str]
    said: list[str]


_entries: dict[str, Entry] = {}


def entry(
    base: type[L.LightningModule] | None = None,
    *,
    hook: str = "",
    equal: bool = False,
    random: bool = False,
    reason: str = "",
    unread: tuple[str, ...] = (),
    strategy: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    loaders: Callable[[int], Any] | None = None,
) -> Callable[[Any], Any]:
    """Enter a module, or a method to be put into a module, into the corpus.

    Args:
        base: what the method is put into.
        hook: the method's name there; by default ``training_step`` if it takes a batch and its
            index, else ``loss``.
        equal, random, reason, unread, strategy, trainer, loaders: see :class:`Entry`.
    """

    def enter(what: Any) -> Any:
        name, made = what.__name__, what
        if not isinstance(what, type):
            assert base is not None
            takes = "batch_idx" in inspect.signature(what).parameters
            method = hook or ("training_step" if takes else "loss")
            made = type(name, (base,), {method: what, "__module__": what.__module__})
        assert name not in _entries, f"two entries are named {name}"
        _entries[name] = Entry(
            name=name,
            cause=what.__module__.rsplit(".", 1)[-1],
            make=made,
            equal=equal,
            random=random,
            reason=reason,
            unread=unread,
            strategy=dict(strategy or {}),
            trainer=dict(trainer or {}),
            loaders=loaders,
        )
        return what

    return enter


@cache
def entries(*packages: str) -> dict[str, Entry]:
    """The entries of folders of the corpus."""
    found: set[str] = set()
    for package in packages:
        folder: ModuleType = importlib.import_module(f"tests.corpus.{package}")
        for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            importlib.import_module(module.name)
            found.add(module.name)
    return {name: one for name, one in _entries.items() if one.make.__module__ in found}


class _Recorder(Callback):
    def __init__(self, seen: Observation) -> None:
        self.seen = seen

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.seen.losses.append(float("nan") if loss is None else float(loss))
        self.seen.logged.append(_numbers(trainer.logged_metrics))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.logged.append(_numbers(trainer.callback_metrics))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.logged.append(_numbers(trainer.callback_metrics))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def observe(which: Entry, strategy: Any = "auto", devices: int = 1) -> Observation:
    """Train the module of an entry, and evaluate it if it has a step for that."""
    seen = Observation()
    L.seed_everything(0, verbose=False)
    module = which.make()
    options: dict[str, Any] = {
        "max_epochs": 1,
        **trainer_devices(strategy, devices),
        **QUIET,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        **which.trainer,
    }
    options["callbacks"] = [*_made(options.get("callbacks", [])), _Recorder(seen)]
    options["logger"] = _made(options["logger"] or [])
    make = which.loaders or type(module).loader
    loaders = [make(1)]
    if _overrides(module, "validation_step"):
        loaders.append(make(2))
    with _listening(seen):
        run = L.Trainer(strategy=strategy, **options)
        seen.before = {name: value.clone() for name, value in module.state_dict().items()}
        torch.manual_seed(1)
        try:
            run.fit(module, *loaders)
            whole = isinstance(strategy, AxoSparseStrategy)
            with strategy.summon_full_params(rank0_only=False) if whole else nullcontext():
                seen.weights = {k: v.detach().cpu().clone() for k, v in module.state_dict().items()}
            seen.attributes = _attributes(module)
            if _overrides(module, "predict_step"):
                predicted = run.predict(module, make(3))
                seen.attributes.update(_leaves("predict_step", predicted))
        except Exception as error:
            if strategy == "auto":
                raise
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            seen.error = f"{type(error).__name__}: {error}"
            in_words = isinstance(error, MisconfigurationException) or LINK.search(str(error))
            seen.ours = bool(in_words) and last.startswith(PACKAGE)
    return seen


def _made(classes: Any) -> list[Any]:
    """Callbacks and loggers of a Trainer, of which the entries name the classes."""
    return [one() for one in classes]


def _overrides(module: L.LightningModule, hook: str) -> bool:
    return getattr(type(module), hook) is not getattr(L.LightningModule, hook)


@contextmanager
def _listening(seen: Observation) -> Iterator[None]:
    """Keep the warnings and log lines."""
    handler = logging.Handler()
    handler.emit = lambda record: seen.noted.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.Logger("corpus", logging.INFO)  # Whatever other tests did to Lightning's.
    logger.addHandler(handler)
    with mock.patch.object(rank_zero, "log", logger), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
        texts = [str(one.message) for one in said if not OTHERS.search(str(one))]
        seen.said = list(dict.fromkeys(texts))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What the attributes of a module and its layers are made of, by path."""
    found: dict[str, Any] = {}
    own = vars(L.LightningModule()).keys() | {"example_input_array"}
    for path, part in module.named_modules():
        if isinstance(part, Metric) or path.startswith("_"):
            continue
        for name, value in vars(part).items():
            if name not in own and not name.startswith("_"):
                found.update(_leaves(f"{path}.{name}".lstrip("."), value))
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor) and value.is_meta:  # Of a layer of another rank.
        yield path, None
    elif isinstance(value, (Tensor, np.ndarray)):
        yield path, copy.copy(torch.as_tensor(value).detach())
    elif isinstance(value, (bool, int, float)):
        yield path, torch.tensor(float(value))
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(f"{path}[{key!r}]", value[key])
    elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        yield f"len({path})", torch.tensor(float(len(value)))
        for index, one in enumerate(value):
            yield from _leaves(f"{path}[{index}]", one)


def differences(plain: Observation, ours: Observation) -> dict[str, str]:
    """What differs between two runs by more than rounding, by name, in words."""
    found: dict[str, str] = {}
    if len(plain.losses) != len(ours.losses):
        found["loss"] = f"{len(plain.losses)} steps, {len(ours.losses)} here"
    for one, other in zip(plain.losses, ours.losses, strict=False):
        if _differ(one, other):
            found.setdefault("loss", f"{one:.6g}, {other:.6g} here")
    for one, other in zip(plain.logged, ours.logged, strict=False):
        for name in one.keys() | other.keys():
            if name not in one or name not in other:
                found.setdefault(name, f"logged {name in one}, {name in other} here")
            elif _differ(one[name], other[name]):
                found.setdefault(name, f"{one[name]:.6g}, {other[name]:.6g} here")
    for name, one in plain.weights.items():
        before, other = plain.before[name], ours.weights[name]
        if _too_far(before.double(), one.double(), other.double()):
            change = (one - before).double().norm().clamp(min=1e-12)
            found[f"weight {name}"] = f"{(other - one).double().norm() / change:.2%} off"
    for name in plain.attributes.keys() | ours.attributes.keys():
        left, right = plain.attributes.get(name), ours.attributes.get(name)
        if name in ours.attributes and right is None:
            continue
        if left is None or right is None or not _same(left, right):
            found[name] = f"{_show(left)}, {_show(right)} here"
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), RELATIVE, 1e-6, equal_nan=True)


def _too_far(before: Tensor, one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return True
    before, one, other = (part.nan_to_num(0, 0, 0) for part in (before, one, other))
    near = OF_UPDATES * (one - before).norm() + 2e-6 * one.norm() + 1e-7
    return bool((other - one).norm() > near)


def _differ(one: float, other: float) -> bool:
    if one != one or other != other:
        return (one != one) != (other != other)
    return abs(one - other) > RELATIVE * max(abs(one), abs(other)) + 1e-6


def _show(value: Tensor | None) -> str:
    if value is None:
        return "absent"
    return f"{value.item():.6g}" if value.numel() == 1 else f"tensor of {tuple(value.shape)}"


def judge(which: Entry, plain: Observation, ours: Observation) -> Outcome:
    """Say how the run in a pipeline went, by what the plain run did."""
    said = [text for text in ours.said if text not in plain.said]
    said += [text for text in ours.noted if ADVICE.search(text)]
    if ours.error:
        return Outcome("refused" if ours.ours else "crashed", {}, [ours.error])
    if which.random:
        found = {"random": "not compared"} if which.hostile and not which.equal else {}
    else:
        found = differences(plain, ours)
        found = {name: what for name, what in found.items() if name not in which.unread}
    unnamed = unsaid(found, said)
    if unnamed:
        return Outcome("silent", unnamed, said)
    return Outcome("warned" if said else "equal", found, said)


def unsaid(found: dict[str, str], said: list[str]) -> dict[str, str]:
    """The differences of which no warning speaks; where one speaks of the loss, all follow."""
    text = "\n".join(said)
    trained = any(name in ("loss", "random") or name.startswith("weight ") for name in found)
    if trained and re.search(r"\bloss(es)?\b|gradient|statistic", text):
        return {}
    return {name: what for name, what in found.items() if not _names(name, text)}


def _names(name: str, text: str) -> bool:
    """Whether a text names a logged value, a weight or an attribute."""
    path = re.sub(r"^(weight |len\()|[\[)].*$|_(step|epoch)$", "", name)
    return re.search(rf"(?<!\w){re.escape(path)}(?!\w)", text) is not None


def allowed_outcomes(which: Entry) -> set[Kind]:
    """What an entry may come to."""
    told: set[Kind] = {"refused", "warned"}
    if which.reason:
        return told
    return told | {"equal"} if which.hostile and not which.equal else {"equal"}


def compare(which: Entry) -> Outcome:
    """Run an entry on one process and by loopback."""
    try:
        plain = observe(which)
    except (RuntimeError, TypeError) as error:
        if ACCELERATOR == "cpu":
            raise
        pytest.skip(f"This step makes tensors or arrays on the CPU: {error}")
    return judge(which, plain, observe(which, pipeline(which, transport="loopback")))


def pipeline(which: Entry, **more: Any) -> AxoSparseStrategy:
    """The strategy of an entry."""
    layers = getattr(which.make, "pipeline", None)
    arguments = {"g_inter": 2, "microbatches": 4, "pipeline": layers, **which.strategy, **more}
    return AxoSparseStrategy(**arguments)
