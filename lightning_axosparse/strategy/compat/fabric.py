"""Refuses the strategy in Lightning's Fabric, and says what to use."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.fabric.connector import _Connector
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy

from lightning_axosparse.support.troubleshooting import see


def refuse_fabric(name: str, kind: type[Strategy]) -> None:
    """Refuse a strategy, by its name and as an object of its class."""
    STRATEGY_REGISTRY.register(name, _refuse, override=True)
    connector: Any = _Connector
    check = connector._check_config_and_set_final_flags

    def check_by_name(self: _Connector, strategy: Any, **others: Any) -> None:
        # Fabric calls an object that is no strategy of its own an invalid name.
        check(self, name if isinstance(strategy, kind) else strategy, **others)

    connector._check_config_and_set_final_flags = check_by_name


def _refuse(**_: Any) -> NoReturn:
    """Raise: a loop of the user's own cannot be cut into the passes of stages."""
    raise MisconfigurationException(
        "Fabric(strategy='axosparse') is not possible: with Fabric the loop is yours, and a stage "
        "has to run parts of it again and again. Write a LightningModule, for `L.Trainer("
        "strategy='axosparse')`. Sparse storage alone works under Fabric with any of its "
        "strategies for one process: sparsify(model, masks, optimizer) before fabric.setup(...)."
        + see("starting-ranks")
    )
