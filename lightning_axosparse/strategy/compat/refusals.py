"""Refuses the strategy in Fabric, and what is of pytorch_lightning, and says what to use."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

import lightning as L
from lightning.fabric.connector import _Connector
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import compile as compiling

from lightning_axosparse.support.troubleshooting import see

_STRATEGIES = "pytorch_lightning.strategies"


def refuse_fabric(name: str, kind: type[Strategy]) -> None:
    """Refuse a strategy, by its name and as an object of its class."""
    STRATEGY_REGISTRY.register(name, _refuse_fabric, override=True)
    connector: Any = _Connector
    check = connector._check_config_and_set_final_flags

    def check_by_name(self: _Connector, strategy: Any, **others: Any) -> None:
        # Fabric calls an object that is no strategy of its own an invalid name.
        check(self, name if isinstance(strategy, kind) else strategy, **others)

    connector._check_config_and_set_final_flags = check_by_name


def _refuse_fabric(**_: Any) -> NoReturn:
    """Raise: a loop of the user's own cannot be cut into the passes of stages."""
    raise MisconfigurationException(
        "Fabric(strategy='axosparse') is not possible: with Fabric the loop is yours, and a stage "
        "has to run parts of it again and again. Write a LightningModule, for `L.Trainer("
        "strategy='axosparse')`. Sparse storage alone works under Fabric with any of its "
        "strategies for one process: sparsify(model, masks, optimizer) before fabric.setup(...)."
        + see("starting-ranks")
    )


def refuse_other_package(name: str) -> None:
    """Refuse the strategy's name in Trainers of the other package, and its modules in Lightning's.

    Lightning refuses the module itself, but does not say that there are two packages.
    """
    check = compiling._check_mixed_imports

    def check_bases(instance: object) -> None:
        if any(base.__module__.startswith("pytorch_lightning.") for base in type(instance).__mro__):
            raise _mixed()
        check(instance)

    compiling._check_mixed_imports = check_bases
    if _STRATEGIES in sys.modules:
        _register(name, sys.modules[_STRATEGIES])
    else:  # importing it takes a second, and most programs do not need it
        sys.meta_path.insert(0, _WhenImported(name))


class _WhenImported(MetaPathFinder):
    """Registers the refusal once the program imports the other package."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != _STRATEGIES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(self._name, module)

            vars(spec.loader)["exec_module"] = execute_and_register
        return spec


def _register(name: str, strategies: ModuleType) -> None:
    strategies.StrategyRegistry.register(name, validate_package, override=True, trainer=None)


def validate_package(trainer: object) -> None:
    """Raise for a Trainer of the other package, which has the same classes.

    Raises:
        MisconfigurationException: if it is one.
    """
    if not isinstance(trainer, L.Trainer):
        raise _mixed()


def _mixed() -> MisconfigurationException:
    return MisconfigurationException(
        "pytorch_lightning and lightning have the same classes under two names, and an object "
        "of one is none of the other. Write `import lightning.pytorch as pl` in place of "
        "`import pytorch_lightning as pl`, for the module and the Trainer." + see("copies")
    )
