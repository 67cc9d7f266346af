"""Metrics: torchmetrics objects whose states live on the last stage mean the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial, wraps
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

_ORIGINALS = "_axosparse_originals"


class PipelinedMetrics:
    """Makes every torchmetrics object of a module right on every rank of a grid.

    Only the last stage of a pipeline updates metrics. ``compute()`` therefore runs there, with
    torchmetrics' own synchronisation over the replicas' last stages, and its result is broadcast
    over the pipeline; as with any synchronised metric, every rank has to call it. Inside
    :meth:`batch`, where only the last stage gets to the end of a step, it stays on that stage.

    It also finds the value of a metric for a whole batch out of its micro-batches
    (:meth:`batch_value`): a twin of the metric sees the micro-batches of this batch alone. So it is
    exact for every metric, also those that cannot merge states, for one more ``update`` a call.

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
        self._twins: dict[int, tuple[Metric, Metric]] = {}
        self._forwards: dict[int, int] = {}
        self._batch_values: dict[int, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedMetrics:
        # Metrics carry references to this object, and users copy metrics (MetricTracker does).
        return self

    def attach(self) -> None:
        """Take over synchronisation, ``compute`` and ``forward`` of each metric of the module."""
        for metric in self._metrics():
            vars(metric)[_ORIGINALS] = (metric.distributed_available_fn, metric.dist_sync_fn)
            metric.distributed_available_fn = self._has_replicas
            metric.dist_sync_fn = metric.dist_sync_fn or self._gather
            metric.forward = partial(self._forward, metric)
            metric._wrap_compute = partial(self._wrap_compute, metric)
            _rewrap_compute(metric)

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        for metric in self._metrics():
            if _ORIGINALS in vars(metric):
                metric.distributed_available_fn, metric.dist_sync_fn = vars(metric).pop(_ORIGINALS)
                del metric.forward, metric._wrap_compute
                _rewrap_compute(metric)
        self._twins.clear()
        self._batch_values.clear()

    @contextmanager
    def batch(self, microbatches: int) -> Iterator[None]:
        """Surround a batch's micro-batches, on every rank of the pipeline.

        Args:
            microbatches: how many micro-batches the batch is split into.
        """
        self._microbatches, self._local = microbatches, True
        self._forwards.clear()
        self._batch_values.clear()
        try:
            yield
            self._batch_values = {
                key: twin.compute()
                for key, (_, twin) in self._twins.items()
                if 0 < self._forwards.get(key, 0) <= microbatches
            }
        finally:
            self._local = False
            for _, twin in self._twins.values():
                twin.reset()

    def batch_value(self, metric: Metric) -> Any:
        """What ``metric.forward`` would have returned for the last batch as a whole.

        Returns:
            None where micro-batches do not tell: the metric was not called, or more than once in
            one micro-batch, or the batch was a single micro-batch.
        """
        return self._batch_values.get(id(metric))

    def share_states(self) -> None:
        """Bring the last stage's states, with their update counts, to every rank of the pipeline.

        Needed before states are read without ``compute()``, as a checkpoint does with persistent
        ones. All ranks of the pipeline have to call it.
        """
        for metric in self._metrics():
            states = {name: getattr(metric, name) for name in metric._defaults}
            states, count = self._from_last_stage((states, metric._update_count))
            if not self._is_last_stage:
                for name, state in states.items():
                    setattr(metric, name, _to(state, metric.device))
                metric._update_count = count

    def _metrics(self) -> Iterator[Any]:
        return (module for module in self._module.modules() if isinstance(module, Metric))

    def _has_replicas(self) -> bool:
        return self._data_group is not None

    def _gather(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        gathered: list[Tensor] = gather_all_tensors(tensor, group=self._data_group)
        return gathered

    def _forward(self, metric: Any, *args: Any, **kwargs: Any) -> Any:
        value = type(metric).forward(metric, *args, **kwargs)
        if isinstance(value, dict):
            # Wrappers do not keep what they return, but it has to be recognised when logged.
            metric._forward_cache = value
        if self._local and self._microbatches > 1:
            key = id(metric)
            if key not in self._twins:
                self._twins[key] = metric, _twin(metric)
            self._twins[key][1].update(*args, **kwargs)
            self._forwards[key] = self._forwards.get(key, 0) + 1
        return value

    def _wrap_compute(self, metric: Metric, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Let the last stage compute for all; torchmetrics wraps copies of a metric with it too."""
        local_compute = type(metric)._wrap_compute(metric, compute)

        @wraps(compute)
        def compute_for_all(*args: Any, **kwargs: Any) -> Any:
            if self._local:
                return local_compute(*args, **kwargs)
            # A metric made of metrics calls their `compute`, which only the last stage gets to.
            self._local = True
            try:
                value = local_compute(*args, **kwargs) if self._is_last_stage else None
            finally:
                self._local = False
            return _to(self._from_last_stage(value), metric.device)

        return compute_for_all

    def _from_last_stage(self, value: Any) -> Any:
        if self._inter_group is None:
            return value
        box = [_to(value, "cpu")]
        dist.broadcast_object_list(box, src=self._last_stage_rank, group=self._inter_group)
        return value if self._is_last_stage else box[0]


def _to(value: Any, device: Any) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.to(device))


def _rewrap_compute(metric: Any) -> None:
    """Wrap the class's ``compute`` anew, as torchmetrics does when it unpickles a metric."""
    metric.compute = metric._wrap_compute(type(metric).compute.__get__(metric))


def _twin(metric: Metric) -> Metric:
    """An empty copy that synchronises only what its original synchronises in every ``forward``."""
    twin = deepcopy(metric)
    twin.reset()
    for part in twin.modules():
        if isinstance(part, Metric):
            part._to_sync = part.dist_sync_on_step
            vars(part).pop("forward", None)
    return twin
