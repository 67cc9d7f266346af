"""The callback of Hydra that makes the folder of a run, or ends the command with one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from typing_extensions import override

from lightning_axosparse.support.troubleshooting import see


class RunFolder(Callback):
    """Makes the folder before Hydra does, which would print a traceback where it cannot."""

    @override
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        make(config, "run")

    @override
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        make(config, "sweep")


def make(config: DictConfig, mode: str) -> None:
    """Make the folder ``hydra.MODE.dir``.

    Raises:
        SystemExit: if it cannot be made; Hydra turns any exception of a callback into a warning.
    """
    folder = Path(config.hydra[mode].dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(
            f"hydra.{mode}.dir={folder} cannot be made: {error.strerror}. Name a folder in which "
            "you may write." + see("commands")
        )
