"""Times several runners on a device, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile


def median_seconds(
    runners: Mapping[str, Callable[[], object]], trials: int, device: torch.device, repeats: int = 1
) -> dict[str, float]:
    """Return the median seconds of each runner until the device has finished.

    Every runner has two warm-up runs, and the order rotates from trial to trial.

    Args:
        runners: the functions to time, by name.
        trials: number of timings of each.
        device: the device that they run on.
        repeats: runs per timing; more than one hides the host's time to start a run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for trial in range(-2, trials):
        turn = max(trial, 0) % len(names)
        for name in names[turn:] + names[:turn]:
            finish(device)
            start = time.perf_counter()
            for _ in range(repeats):
                runners[name]()
            finish(device)
            if trial >= 0:
                seconds[name].append((time.perf_counter() - start) / repeats)
    return {name: statistics.median(times) for name, times in seconds.items()}


def finish(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of all kernels that a run starts on a GPU; 0 on CPU."""
    if device.type != "cuda":
        return 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        finish(device)
    # Annotations count the kernels within them once more.
    kernels = [e for e in profiler.key_averages() if not e.key.startswith("Optimizer.")]
    return sum(event.self_device_time_total for event in kernels) / 1e6


def recorded(
    runners: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, Callable[[], object]]:
    """Return the runners as CUDA graphs, which a host starts at once; on CPU, themselves.

    A product of few tokens takes a GPU less time than Python takes to start it.
    """
    if device.type != "cuda":
        return dict(runners)
    return {name: cuda_graph(run) for name, run in runners.items()}


def cuda_graph(run: Callable[[], object]) -> Callable[[], None]:
    """Return what starts all kernels of a function again; it runs three times to be recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # Triton compiles, and libraries allocate, before the recording
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
