"""Prints what the micro-batches of a batch say by ``self.print`` once, on the first rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule

from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.troubleshooting import see


@dataclass(frozen=True)
class PrintCall:
    """One call of ``self.print``; can be sent to another rank.

    Attributes:
        texts: of the values.
        options: the other keyword arguments.
        stream: the name in ``sys`` of its ``file``, if it was given one.
    """

    texts: tuple[str, ...]
    options: dict[str, Any]
    stream: str | None

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the call, on this rank."""
        file = {} if self.stream is None else {"file": getattr(sys, self.stream)}
        return {**self.options, **file}


class MicrobatchPrint:
    """Replaces ``module.print``: records inside a micro-batch, and calls the original outside.

    Code behind the layers runs on the last stage alone, code before them on every stage, and all of
    it once a micro-batch. So the last stage's calls count, and of the micro-batches' first calls
    one, of their second calls one, and so on: that of the first micro-batch that has it.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._open: list[PrintCall] | None = None
        self._microbatches: list[list[PrintCall]] = []

    def attached(self) -> AbstractContextManager[None]:
        """Replace the module's ``print`` inside the context."""
        return patched(self._module, "print", self._print)

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Record, instead of executing, the calls of ``self.print`` inside the context.

        What an error would keep from being printed is printed here.
        """
        self._open = opened = list[PrintCall]()
        try:
            yield
            self._microbatches.append(opened)
        except Exception:
            for call in [*self.combined(), *opened]:
                print(*call.texts, **call.arguments)
            raise
        finally:
            self._open = None

    def combined(self) -> list[PrintCall]:
        """The calls of the batch; none if no micro-batch reached the end of its step here."""
        return [
            next(call for call in calls if call is not None)
            for calls in zip_longest(*self._microbatches)
        ]

    def replay(self, calls: list[PrintCall]) -> None:
        """Call the module's own ``print``, which prints on the first rank."""
        for call in calls:
            type(self._module).print(self._module, *call.texts, **call.arguments)

    def clear(self) -> None:
        """Forget what was recorded."""
        self._microbatches.clear()

    def _print(self, *values: Any, file: Any = None, **options: Any) -> None:
        if self._open is None:
            file_given = {} if file is None else {"file": file}
            type(self._module).print(self._module, *values, **options, **file_given)
            return
        streams = {None: None, sys.stdout: "stdout", sys.stderr: "stderr"}
        if file not in streams:
            raise MisconfigurationException(
                f"`self.print(..., file={file!r})` in a step of a pipeline prints on the first rank"
                " what the last stage says, which sends no files: use sys.stdout or sys.stderr, or"
                " write to the file where a batch ends (on_train_batch_end)." + see("logging")
            )
        self._open.append(PrintCall(tuple(map(str, values)), options, streams[file]))
