"""Refuses the strategy's name in Lightning Fabric, with an error that says what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.support.troubleshooting import see


def refuse_fabric(**_: Any) -> NoReturn:
    """Raise: a loop of the user's own cannot be cut into the passes of stages."""
    raise MisconfigurationException(
        "Fabric(strategy='axosparse') is not possible: with Fabric the loop is yours, and a stage "
        "has to run parts of it again and again. Write a LightningModule, for `L.Trainer("
        "strategy='axosparse')`. Sparse storage alone works under Fabric with any of its "
        "strategies for one process: sparsify(model, masks, optimizer) before fabric.setup(...)."
        + see("starting-ranks")
    )


def register_refusal(name: str) -> None:
    """Register the refusal where Fabric looks for a strategy of this name."""
    STRATEGY_REGISTRY.register(name, refuse_fabric, "refused: needs a Trainer", override=True)
