"""A ``TorchFunctionMode`` that can be paused, so that it does not observe the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_axosparse.support.torch_internals import current_function_mode


class PausableMode(TorchFunctionMode):
    """A mode that observes the torch functions of a step, except while it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Observe nothing inside the context."""
        before, self._is_paused = self._is_paused, True
        # A mode that is entered costs a microsecond for each torch function.
        leaves = current_function_mode() is self
        if leaves:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if leaves:
                self.__enter__()  # type: ignore[no-untyped-call]
            self._is_paused = before


def paused(modes: Sequence[PausableMode]) -> AbstractContextManager[Any]:
    """Pause some modes, of which the last was entered last, inside the context."""
    if len(modes) == 1:
        return modes[0].paused()
    stack = ExitStack()
    for mode in reversed(modes):
        stack.enter_context(mode.paused())
    return stack
