"""The GPU paths with stand-ins: a stream runs what it was given only when the test says so."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_axosparse.distributed.mpi import staging
from lightning_axosparse.distributed.mpi.staging import DeviceStaging, HostStaging, PinnedStaging

CPU = torch.device("cpu")


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.queue: list[Callable[[], None]] = []
        self.waits_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other)

    def run(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class Event:
    def __init__(self) -> None:
        self.done = False

    def record(self, stream: Stream) -> None:
        stream.queue.append(lambda: setattr(self, "done", True))

    def query(self) -> bool:
        return self.done


class Runtime:
    """Stands in for ``torch.cuda``."""

    Event = Event

    def __init__(self) -> None:
        self.compute = Stream()
        self.streams: list[Stream] = []
        self.active = self.compute

    def Stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> Stream:
        return self.active

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.active, before = stream, self.active
        yield
        self.active = before


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    stand_in = Runtime()
    copy = Tensor.copy_

    def queued_copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return copy(target, source)
        stream, view = stand_in.active, source[:]
        alive = weakref.ref(source)

        def run() -> None:
            assert alive() is not None, "the source is gone before it was copied"
            copy(target, view)

        stream.queue.append(run)
        return target

    used: list[tuple[Tensor, Any]] = []
    monkeypatch.setattr(Tensor, "copy_", queued_copy)
    monkeypatch.setattr(Tensor, "record_stream", lambda t, s: used.append((t, s)))
    stand_in.used = used
    return stand_in


def test_mpi_uses_the_memory_of_cpu_tensors() -> None:
    block = torch.arange(5, dtype=torch.uint8)
    given, ready = HostStaging().outgoing(block)
    assert given is block
    assert ready()
    assert HostStaging().incoming(block) is block
    assert HostStaging().empty(7).shape == (7,)


def test_a_pinned_copy_is_ready_when_it_is_done_after_the_compute_stream(
    runtime: Runtime,
) -> None:
    pinned = PinnedStaging(CPU, runtime)
    host, ready = pinned.outgoing(torch.arange(5, dtype=torch.uint8))
    leaving, arriving = runtime.streams
    assert leaving.waits_for == [runtime.compute]
    assert arriving.waits_for == []
    assert runtime.compute.queue == []
    assert not ready()
    leaving.run()
    assert ready()
    assert host.tolist() == [0, 1, 2, 3, 4]


def test_the_compute_stream_waits_for_what_arrives_through_pinned_memory(runtime: Runtime) -> None:
    block = torch.arange(5, dtype=torch.uint8)
    arrived = PinnedStaging(CPU, runtime).incoming(block)
    assert runtime.compute.waits_for == runtime.streams[1:]
    assert arrived.data_ptr() != block.data_ptr()
    assert arrived.tolist() == block.tolist()
    assert [(t is arrived, s) for t, s in runtime.used] == [(True, runtime.compute)]


def test_a_cuda_aware_mpi_reads_a_block_once_it_is_computed(runtime: Runtime) -> None:
    direct = DeviceStaging(CPU, runtime)
    block = torch.arange(5, dtype=torch.uint8)
    given, ready = direct.outgoing(block)
    assert given is block
    assert not ready()
    runtime.compute.run()
    assert ready()
    assert direct.empty(3).shape == (3,)
    assert direct.incoming(block) is block
    assert runtime.used[0][1] is runtime.compute


@pytest.mark.parametrize(("value", "aware"), [("0", False), ("1", True)])
def test_the_variable_decides_on_cuda_awareness(
    value: str, aware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AXOSPARSE_CUDA_AWARE_MPI", value)
    assert staging.mpi_is_cuda_aware() is aware


def test_another_value_of_the_variable_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXOSPARSE_CUDA_AWARE_MPI", "yes")
    with pytest.raises(ValueError, match=r"'yes'\. Set it to 0 or 1"):
        staging.mpi_is_cuda_aware()


def test_a_library_without_cuda_is_not_cuda_aware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AXOSPARSE_CUDA_AWARE_MPI", raising=False)
    libraries = [str(path) for path in Path(torch.__file__).parent.glob("lib/libtorch_cpu.so")]
    assert libraries
    monkeypatch.setattr(staging, "loaded_mpi_libraries", lambda: set(libraries))
    assert not staging.mpi_is_cuda_aware()
