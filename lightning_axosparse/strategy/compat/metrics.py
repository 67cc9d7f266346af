"""Gives torchmetrics objects, which only the last stage updates, the same value on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers import Running

from lightning_axosparse.distributed.process_groups import all_gather, broadcast
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.torch_internals import tensors_in

_ORIGINALS = "_axosparse_originals"

_NO_VALUE = (ArithmeticError, LookupError, RuntimeError, ValueError)
"""What metrics raise that need more samples or updates for a value."""


class PipelinedMetrics:
    """Makes every torchmetrics object of a module return the same on every rank of a grid.

    Only the last stage of a pipeline updates metrics. ``compute()`` therefore runs there, with
    torchmetrics' own synchronisation over the replicas' last stages, and its result is broadcast
    over the pipeline; as with any synchronised metric, every rank has to call it. Inside
    :meth:`batch`, where only the last stage reaches the end of a step, nothing is broadcast.

    It also computes the value of a metric for a whole batch (:meth:`batch_value`): an empty copy of
    the metric, its batch metric, is updated with the micro-batches of this batch alone. The value
    is exact for every metric, also for those whose states cannot be merged, at the cost of one more
    ``update`` per call. Where replicas share a batch, the states of their batch metrics are merged
    on one rank (:meth:`recorded`, :meth:`join`). From them also come the entries of ``Running``
    metrics, whose windows count batches.

    Args:
        module: the LightningModule; its metrics are those among its submodules.
        inter_group: the stages of this pipeline; None if this process runs all of them.
        data_group: this stage in all replicas; None if there is one replica.
        last_stage_rank: global rank of this pipeline's last stage.
        is_last_stage: whether this process runs the last stage.
    """

    def __init__(
        self,
        module: LightningModule,
        inter_group: dist.ProcessGroup | None,
        data_group: dist.ProcessGroup | None,
        last_stage_rank: int,
        is_last_stage: bool,
    ) -> None:
        self._module = module
        self._inter_group = inter_group
        self._data_group = data_group
        self._last_stage_rank = last_stage_rank
        self._is_last_stage = is_last_stage
        self._microbatches = 0
        self._local = False
        self._forwarded: Metric | None = None
        # By id, since a metric's hash depends on its states.
        self._batch_metrics: dict[int, tuple[Metric, Metric]] = {}
        self._forwards: dict[int, int] = {}
        self._windows: set[int] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedMetrics:
        # Metrics carry references to this object, and users copy metrics (MetricTracker does).
        return self

    def attach(self) -> None:
        """Replace synchronisation, ``compute`` and ``forward`` of each metric of the module."""
        for metric in self._metrics():
            vars(metric)[_ORIGINALS] = (metric.distributed_available_fn, metric.dist_sync_fn)
            metric.distributed_available_fn = self._has_replicas
            metric.dist_sync_fn = metric.dist_sync_fn or self._gather
            metric.forward = partial(self._forward, metric)
            if isinstance(metric, Running):
                replaced: dict[str, Any] = {
                    "update": metric.update,
                    "forward": partial(Running.forward, metric),
                }
                vars(metric).update(
                    {k: partial(self._update_window, metric, f) for k, f in replaced.items()}
                )
            metric._wrap_compute = partial(self._wrap_compute, metric)
            _rewrap_compute(metric)

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        for metric in self._metrics():
            if _ORIGINALS in vars(metric):
                metric.distributed_available_fn, metric.dist_sync_fn = vars(metric).pop(_ORIGINALS)
                del metric.forward, metric._wrap_compute
                if isinstance(metric, Running):
                    vars(metric)["update"] = vars(metric)["update"].args[1]
                _rewrap_compute(metric)
        self._batch_metrics.clear()
        self._forwards.clear()
        self._windows.clear()

    @contextmanager
    def batch(self, microbatches: int) -> Iterator[None]:
        """Surround a batch's micro-batches, on every rank of the pipeline."""
        self._microbatches = microbatches
        self._forwards.clear()
        self._windows.clear()
        for _, batch_metric in self._batch_metrics.values():
            batch_metric.reset()
        with self._on_this_rank():
            yield

    def recorded(self) -> dict[str, BatchStates]:
        """The states of this rank's batch metrics, by the metrics' attribute paths."""
        paths = {id(module): path for path, module in self._module.named_modules()}
        return {
            paths[key]: BatchStates(
                count, [_to(_states(part), "cpu") for part in _parts(self._batch_metrics[key][1])]
            )
            for key, count in self._forwards.items()
        }

    def join(self, recorded: Sequence[Mapping[str, BatchStates]]) -> None:
        """Merge what the replicas that share a batch have :meth:`recorded`, in their order."""
        for path in dict.fromkeys(path for states in recorded for path in states):
            of_replicas = [states[path] for states in recorded if path in states]
            metric = self._module.get_submodule(path)
            assert isinstance(metric, Metric)
            for index, part in enumerate(_parts(self._batch_metric(metric))):
                _merge(part, [states.parts[index] for states in of_replicas])
            self._forwards[id(metric)] = sum(states.forwards for states in of_replicas)

    def batch_value(self, metric: Metric) -> Any:
        """What ``metric.forward`` would have returned for the last batch as a whole.

        Returns:
            None where it is not known: the metric was not called, or more than once in one
            micro-batch, or the batch was a single micro-batch.
        """
        if not 0 < self._forwards.get(id(metric), 0) <= self._microbatches:
            return None
        with self._on_this_rank():
            return self._batch_metrics[id(metric)][1].compute()

    def updated_value(self, metric: Metric) -> Any:
        """What a metric is on this rank alone; None where it needs more updates for a value."""
        copy = deepcopy(metric, _detached(metric))
        for part in _parts(copy):
            part._to_sync = False
        with self._on_this_rank(), suppress(*_NO_VALUE):
            return copy.compute()
        return None

    @contextmanager
    def states_shared(self, collect: Callable[[Any], list[Any]]) -> Iterator[None]:
        """Give every rank the last stage's states, with their update counts, inside the context.

        For readers of states that do not call ``compute()``, such as checkpoints of persistent
        states. All ranks of the pipeline have to enter it.

        Args:
            collect: returns the values of all last stages that are given the same batches, on all
                ranks that are given them.
        """
        own = [
            (metric, {k: vars(metric)[k] for k in _memory(metric)}) for metric in self._metrics()
        ]
        for metric, _ in own:
            gathered = collect(_to((_states(metric), metric._update_count), "cpu"))
            _merge(metric, [states for states, _ in gathered])
            metric._update_count = sum(count for _, count in gathered)
        try:
            yield
        finally:
            for metric, memory in own:
                vars(metric).update(memory)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the states of all metrics after the context."""
        before = [(m, deepcopy(_memory(m), _detached(m))) for m in self._metrics()]
        try:
            yield
        finally:
            for metric, memory in before:
                vars(metric).update(memory)

    def reset(self) -> None:
        """Reset all metrics of this rank, whose states the last stage has."""
        for metric in self._metrics():
            metric.reset()

    def _on_this_rank(self) -> AbstractContextManager[None]:
        """Let metrics compute without other ranks inside the context."""
        return patched(self, "_local", True)

    def _metrics(self) -> Iterator[Any]:
        return (module for module in self._module.modules() if isinstance(module, Metric))

    def _has_replicas(self) -> bool:
        return self._data_group is not None

    def _gather(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        # A last stage that was given no sample does not know the others' dtype and shape.
        own = (tensor.dtype, tensor.shape[1:]) if tensor.numel() else None
        kinds = all_gather(own, self._data_group)
        if None in kinds:
            tensor = torch.atleast_1d(tensor)
        if own is None and any(kinds):
            dtype, shape = next(kind for kind in kinds if kind)
            tensor = torch.empty((0, *shape), dtype=dtype, device=tensor.device)
        gathered: list[Tensor] = gather_all_tensors(tensor, group=self._data_group)
        return gathered

    def _forward(self, metric: Any, *args: Any, **kwargs: Any) -> Any:
        is_part = self._local and self._microbatches > 1
        with patched(self, "_forwarded", metric if is_part else None):
            value = type(metric).forward(metric, *args, **kwargs)
        if isinstance(value, dict):
            # Wrappers do not keep what they return; the log recognises a metric's value by it.
            metric._forward_cache = value
        if is_part:
            self._batch_metric(metric).update(*args, **kwargs)
            self._forwards[id(metric)] = self._forwards.get(id(metric), 0) + 1
        return value

    def _update_window(
        self, metric: Any, update: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Update a ``Running`` metric, of which all micro-batches of a batch make up one entry."""
        if not self._local or self._microbatches == 1:
            return update(*args, **kwargs)
        base = metric.base_metric
        forwards = self._forwards.get(id(base))
        metric._num_vals_seen -= id(metric) in self._windows
        self._windows.add(id(metric))
        value = update(*args, **kwargs)
        entry = self._batch_metric(base)
        if self._forwards.get(id(base)) == forwards:  # `forward` has updated it already
            entry.update(*args, **kwargs)
        place = (metric._num_vals_seen - 1) % metric.window
        for name, state in _states(entry).items():
            copied = list(state) if isinstance(state, list) else state.clone()
            setattr(metric, f"{name}_{place}", copied)
        return value

    def _batch_metric(self, metric: Metric) -> Metric:
        if id(metric) not in self._batch_metrics:
            self._batch_metrics[id(metric)] = metric, _empty_copy(metric)
        return self._batch_metrics[id(metric)][1]

    def _wrap_compute(self, metric: Metric, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Compute on the last stage and broadcast; torchmetrics also calls this for copies."""
        local_compute = type(metric)._wrap_compute(metric, compute)

        @wraps(compute)
        def compute_for_all(*args: Any, **kwargs: Any) -> Any:
            if self._local and self._forwarded is metric:
                # Some, such as R2Score, need more samples than a micro-batch may have: the log
                # asks for the value of the batch.
                try:
                    return local_compute(*args, **kwargs)
                except _NO_VALUE:
                    return torch.tensor(torch.nan, device=metric.device)
            if self._local:
                return local_compute(*args, **kwargs)
            # A metric made of metrics calls their `compute`, but on the last stage alone.
            with self._on_this_rank():
                value = local_compute(*args, **kwargs) if self._is_last_stage else None
            return _to(self._from_last_stage(value), metric.device)

        return compute_for_all

    def _from_last_stage(self, value: Any) -> Any:
        if self._inter_group is None:
            return value
        received = broadcast(_to(value, "cpu"), self._last_stage_rank, self._inter_group)
        return value if self._is_last_stage else received


@dataclass(frozen=True)
class BatchStates:
    """The states of a batch metric.

    Attributes:
        forwards: how often the metric was called for the batch.
        parts: the states of the metric and of the metrics that it is made of.
    """

    forwards: int
    parts: list[dict[str, Any]]


def _to(value: Any, device: Any) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.to(device))


def _rewrap_compute(metric: Any) -> None:
    """Wrap the class's ``compute`` anew, as torchmetrics does when it unpickles a metric."""
    metric.compute = metric._wrap_compute(type(metric).compute.__get__(metric))


def _empty_copy(metric: Metric) -> Metric:
    """A reset copy that synchronises only what its original synchronises in every ``forward``."""
    copy = deepcopy(metric, _detached(metric))
    copy.reset()
    for part in _parts(copy):
        part._to_sync = part.dist_sync_on_step
        vars(part).pop("forward", None)
    return copy


def _parts(metric: Metric) -> list[Any]:
    return [module for module in metric.modules() if isinstance(module, Metric)]


def _states(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}


def _memory(metric: Metric) -> dict[str, Any]:
    """The attributes of a metric that its updates change."""
    names = [*metric._defaults, "_update_count", "_computed"]
    names += ["_num_vals_seen"] if isinstance(metric, Running) else []
    return {name: getattr(metric, name) for name in names}


def _detached(metric: Metric) -> dict[int, Any]:
    """A memo of detached clones for ``deepcopy``, which cannot copy tensors of a graph."""
    held = [[_memory(part), part._forward_cache] for part in _parts(metric)]
    of_graphs = (tensor for tensor in tensors_in(held) if not tensor.is_leaf)
    return {id(tensor): tensor.detach().clone() for tensor in of_graphs}


def _merge(metric: Metric, states: Sequence[Mapping[str, Any]]) -> None:
    """Give a metric the merged states of several, as torchmetrics' own synchronisation would."""
    for name, reduction in metric._reductions.items():
        values = [_to(state[name], metric.device) for state in states]
        if len(values) == 1:
            merged = values[0]
        elif isinstance(values[0], list):
            merged = [entry for value in values for entry in value]
        else:
            stacked = torch.stack(values)
            merged = reduction(stacked) if callable(reduction) else stacked
        setattr(metric, name, merged)
    metric._update_count = max(1, metric._update_count)
    metric._computed = None
