"""The ways in which the suite is run, each an environment in which a Trainer is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import pytest
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.pipeline.shard.partition import find_layers
from lightning_axosparse.strategy.compat.internals import overrides


@dataclass(frozen=True)
class Mode:
    """One way to run the suite.

    Attributes:
        name: of the mode.
        compared_with: the mode on the same models whose failures count neither way; None for plain
            Lightning.
        layers: whether Lightning's ``BoringModel`` has two layers in place of one.
        strategy: makes what a Trainer gets that is given no strategy; None for Lightning's own.
        ranks: processes that run each test at the same time.
    """

    name: str
    compared_with: str | None = None
    layers: bool = False
    strategy: Callable[..., AxoSparseStrategy] | None = None
    ranks: int = 1

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Let all Trainers and models that are made from now on be those of this mode."""
        if self.layers:
            patch.setattr(BoringModel, "__init__", _with_two_layers)
        patch.setattr(Trainer, "__init__", _with_strategy(self.strategy, self.ranks))


class _Pipeline(AxoSparseStrategy):
    """Two stages; a test whose module has no layers to deal is skipped."""

    def connect(self, model: LightningModule) -> None:
        with _skipped_without_layers(model):
            find_layers(model, None, self.g_inter)
        super().connect(model)


class _skipped_without_layers(suppress):
    """Skip the test for a module that would be refused, as it has no layers and will make none."""

    def __init__(self, model: LightningModule) -> None:
        super().__init__(MisconfigurationException)
        self._makes_layers = overrides(model, "configure_model", "setup")

    def __exit__(self, kind: Any, *details: Any) -> bool:
        refused = super().__exit__(kind, *details)
        if refused and not self._makes_layers:
            pytest.skip("the module has no layers to deal to stages")
        return bool(refused)


class _RankPipeline(_Pipeline):
    """On ranks that run one test together: the exceptions that tests want end no job."""

    def on_exception(self, exception: BaseException) -> None:
        """Leave the other rank to its own exception, or to the time limit."""


def _with_two_layers(self: BoringModel) -> None:
    LightningModule.__init__(self)
    self.layer = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2))  # type: ignore[assignment]


def _with_strategy(
    make: Callable[..., AxoSparseStrategy] | None, ranks: int
) -> Callable[..., None]:
    original = Trainer.__init__

    @wraps(original)
    def init(self: Trainer, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("strategy", "auto") != "auto":
            pytest.skip("the test is about a strategy of its own")
        if not args and make is not None:
            plugins = kwargs.get("plugins") or []
            plugins = plugins if isinstance(plugins, list) else [plugins]
            environments = [p for p in plugins if isinstance(p, ClusterEnvironment)]
            kwargs["strategy"] = make()
            if len(environments) == 1:
                # Lightning takes an environment from the strategy or from plugins, not from both.
                kwargs["plugins"] = [p for p in plugins if p is not environments[0]]
                kwargs["strategy"] = make(cluster_environment=environments[0])
            if ranks > 1 and kwargs.get("devices", "auto") in ("auto", 1, "1"):
                kwargs["devices"] = ranks
        original(self, *args, **kwargs)

    return init


MODES = {
    mode.name: mode
    for mode in (
        Mode("plain"),
        Mode("one rank", "plain", strategy=AxoSparseStrategy),
        Mode("plain, two layers", layers=True),
        Mode(
            "loopback",
            "plain, two layers",
            layers=True,
            strategy=partial(_Pipeline, g_inter=2, transport="loopback"),
        ),
        Mode(
            "two ranks",
            "loopback",
            layers=True,
            strategy=partial(_RankPipeline, g_inter=2, timeout=10),
            ranks=2,
        ),
    )
}
