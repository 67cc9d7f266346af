"""Measures the memory of forward passes in bytes, and the time of layers and stages in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pipeline.shard.partition import Partition
from lightning_axosparse.support.torch_internals import (
    OperatorMode,
    storage_id,
    tree_leaves,
    tree_map_only,
)
from lightning_axosparse.support.trace import clock
from lightning_axosparse.support.troubleshooting import see


@contextmanager
def activation_bytes(device: torch.device, received: Any) -> Iterator[Callable[[], int]]:
    """Measure the bytes that a forward pass in the context saves for backward.

    They include the tensors that the pass has received, which are saved as long, but no parameters,
    buffers and their views. On CPU, they do not include tensors that the kernels of a compiled
    layer save.

    Yields:
        A function that returns the bytes, to be called after the pass.
    """
    arrived = sum(storage.nbytes() for storage in _storages(received).values())
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        yield lambda: arrived + torch.cuda.memory_allocated(device) - before
        return
    with _NewStorages() as new:
        yield lambda: arrived + new.bytes_alive()


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """Measure the peak of allocated bytes; call the function that is yielded after the pass."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
        return
    with _Peak() as new:
        yield lambda: new.peak


class _NewStorages(OperatorMode):
    """Records the storages that operators allocate inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self._new: dict[int, tuple[StorageWeakRef, int]] = {}
        self._earlier: dict[int, StorageWeakRef] = {}

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        for key, storage in _storages((args, kwargs)).items():
            if key not in self._new:
                self._earlier[key] = StorageWeakRef(storage)
        output = func(*args, **kwargs)
        for key, storage in _storages(output).items():
            if key not in self._earlier:
                self._new[key] = StorageWeakRef(storage), storage.nbytes()
        return output

    def bytes_alive(self) -> int:
        """Bytes of the storages that still exist."""
        return sum(size for storage, size in self._new.values() if not storage.expired())


class _Peak(_NewStorages):
    """Records the peak of the bytes of these storages."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = super().observe(func, args, kwargs)
        self._new = {key: new for key, new in self._new.items() if not new[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._new.values()))
        return output


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of a pytree's tensors; a wrapper such as a sparse weight has none."""
    storages = (leaf.untyped_storage() for leaf in tree_leaves(tree) if _has_storage(leaf))
    return {storage_id(storage): storage for storage in storages}


def _has_storage(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.layout == torch.strided
        and not leaf.is_meta
        and type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


_REPEATS = 5

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def validate_example_input(module: LightningModule) -> None:
    """Check that a module has an input on which its layers can be timed."""
    if module.example_input_array is None:
        raise MisconfigurationException(
            f"balance='time' runs {type(module).__name__} on its example_input_array, which is "
            "None. Set it in __init__ to what `forward` takes, of a micro-batch's size, or use "
            "balance='parameters'." + see("layers")
        )


def profile_example(
    module: LightningModule, partition: Partition, precision: Precision, device: torch.device
) -> list[float]:
    """Measure a forward and backward pass of each layer on ``example_input_array``, in seconds."""
    example = precision.convert_input(module.example_input_array)

    def forward() -> None:
        if isinstance(example, Mapping):
            module(**example)
        else:
            module(*(example if isinstance(example, tuple) else (example,)))

    layers = dict(zip(partition.names, partition.layers, strict=True))
    return profile_layers(layers, forward, precision.forward_context, device)


def profile_layers(
    layers: Mapping[str, nn.Module],
    forward: Callable[[], Any],
    context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
) -> list[float]:
    """Measure each layer by its fastest pass of a few, as other processes may slow some.

    Weights, buffers and random generators do not change. At most one layer is on ``device`` at a
    time.

    Returns:
        Seconds of a forward and backward pass of each layer.
    """
    buffers = [(b, b.clone()) for layer in layers.values() for b in layer.buffers()]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            with context(), torch.no_grad():
                inputs = _inputs(layers, forward)
            seconds = []
            for name, layer in layers.items():
                try:
                    layer.to(device)
                    moved = tree_map_only(Tensor, lambda t: t.to(device), inputs[name])
                    times = (_pass(layer, moved, context, device) for _ in range(_REPEATS))
                    seconds.append(min(times))
                finally:
                    layer.to("cpu")
    finally:
        for buffer, value in buffers:
            buffer.data.copy_(value)
    return seconds


def _inputs(layers: Mapping[str, nn.Module], forward: Callable[[], Any]) -> dict[str, Inputs]:
    """Return the inputs of each layer in a forward pass."""
    inputs: dict[str, Inputs] = {}

    def recorder(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[name] = args, kwargs

        return hook

    with ExitStack() as stack:
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(recorder(name), with_kwargs=True)
            stack.callback(handle.remove)
        forward()
    missing = [name for name in layers if name not in inputs]
    if missing:
        raise MisconfigurationException(
            f"balance='time' runs the module on its example_input_array, but that did not call "
            f"layer {missing[0]!r}. Let `forward` call every layer, or use balance='parameters'."
            + see("layers")
        )
    return inputs


def _pass(
    layer: nn.Module,
    inputs: Inputs,
    context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
) -> float:
    args, kwargs = tree_map_only(Tensor, _leaf, inputs)
    began = _now(device)
    with context(), torch.enable_grad():
        output = layer(*args, **kwargs)
    _differentiate(tree_leaves(output), tree_leaves((args, kwargs)), layer)
    return _now(device) - began


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _differentiate(outputs: Sequence[Any], inputs: Sequence[Any], layer: nn.Module) -> None:
    ends = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    starts = [t for t in [*inputs, *layer.parameters()] if isinstance(t, Tensor)]
    wanted = [tensor for tensor in starts if tensor.requires_grad]
    if ends and wanted:
        ones = [torch.ones_like(tensor) for tensor in ends]
        torch.autograd.grad(ends, wanted, ones, allow_unused=True)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


_WARM_UP, _BATCHES = 1, 3
_UNEQUAL = 1.3
"""Ratio of the slowest stage's time to the mean above which the slowest stage is reported."""


class StageTimes:
    """The computing time of this rank's stage in the first batches.

    Args:
        group: the stages of the pipeline; None to compare nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._seconds = group, list[float]()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Measure a training batch; after the last measured one, compare stages; collective."""
        began = _computing_seconds()
        yield
        if self._group is not None and len(self._seconds) < _WARM_UP + _BATCHES:
            self._seconds.append(_computing_seconds() - began)
            if len(self._seconds) == _WARM_UP + _BATCHES:
                mean = sum(self._seconds[_WARM_UP:]) / _BATCHES
                # The first rank of a pipeline has its last stage.
                _report(all_gather(mean, self._group)[::-1])


def _computing_seconds() -> float:
    return clock.totals["forward"] + clock.totals["backward"]


def _report(seconds: Sequence[float]) -> None:
    slowest, mean = max(seconds), sum(seconds) / len(seconds)
    if slowest > _UNEQUAL * mean:
        rank_zero_info(
            f"Stage {seconds.index(slowest)} computes {slowest / mean:.1f} times as long as the "
            f"mean stage: {', '.join(f'{1e3 * s:,.0f}' for s in seconds)} ms of a batch by stage. "
            "Try balance='time', or balance=[...] with the layers of each stage."
        )
