"""Stand-ins for the streams and events of a GPU: they run what they were given only later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

CPU = torch.device("cpu")


class Stream:
    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.waits_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other)

    def run(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class Event:
    """Done when its stream has run; with ``delay``, queries run it, that one and those before."""

    def __init__(self, delay: int | None = None) -> None:
        self.done, self._left = False, delay
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._stream = stream
        stream.queue.append(lambda: setattr(self, "done", True))

    def query(self) -> bool:
        if self._left is not None:
            self._left -= 1
            while self._left < 0 and not self.done:
                assert self._stream is not None
                self._stream.queue.pop(0)()
        return self.done


class Runtime:
    """Stands in for ``torch.cuda``."""

    def __init__(self, delay: Callable[[], int] | None = None) -> None:
        self.compute = Stream()
        self.streams: list[Stream] = []
        self.active = self.compute
        self._delay = delay

    def Stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def Event(self) -> Event:
        return Event(self._delay and self._delay())

    def current_stream(self, device: torch.device) -> Stream:
        return self.active

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.run()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.active, before = stream, self.active
        yield
        self.active = before


@contextmanager
def queued_copies(runtime: Runtime) -> Iterator[list[tuple[Tensor, Any]]]:
    """Queue asynchronous copies on the active stream; yield the calls of ``record_stream``."""
    copy = Tensor.copy_

    def queued_copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return copy(target, source)
        stream, view = runtime.active, source[:]
        alive = weakref.ref(source)

        def run() -> None:
            assert stream.waits_for == [] or alive() is not None, "the source is gone already"
            copy(target, view)

        stream.queue.append(run)
        return target

    used: list[tuple[Tensor, Any]] = []
    with (
        patch.object(Tensor, "copy_", queued_copy),
        patch.object(Tensor, "record_stream", lambda tensor, stream: used.append((tensor, stream))),
    ):
        yield used


_shared: list[Tensor] = []
"""Allocated until this process ends; torch frees memory of a GPU when nobody has it mapped."""


def share(tensor: Tensor) -> tuple[Any, ...]:
    """Move a tensor into shared memory, as ``reduce_tensor`` shares one of a GPU."""
    _shared.append(tensor)
    return _map, tuple(tensor.untyped_storage()._share_filename_cpu_())


def _map(manager: bytes, handle: bytes, size: int) -> Tensor:
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager, handle, size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)
