"""Gives torchmetrics objects, which only the last stage updates, the same value on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_axosparse.distributed.process_groups import all_gather, broadcast
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.torch_internals import tensors_in, without_dispatch_modes

_ORIGINALS = "_axosparse_originals"
_CALLS = "update", "forward"
_SYNCHRONISATION = "distributed_available_fn", "dist_sync_fn"


class PipelinedMetrics:
    """Makes every torchmetrics object of a module return the same on every rank of a grid.

    The last stage alone updates metrics, in the end of the step, once for the batch. ``compute()``
    therefore runs there, with torchmetrics' own synchronisation over the replicas' last stages, and
    its result is broadcast over the pipeline; as with any synchronised metric, every rank has to
    call it. Inside :meth:`counted`, where the last stage alone runs, nothing is broadcast.

    Runs of a step on micro-batches change no metric (:meth:`skipped`).

    Args:
        module: the LightningModule; its metrics are those among its submodules.
        inter_group: the stages of this pipeline; None if this process runs all of them.
        data_group: this stage in all replicas; None if there is one replica.
        last_stage_rank: global rank of this pipeline's last stage.
        is_last_stage: whether this process runs the last stage.

    Attributes:
        touched: whether a metric was called since this was set to False.
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
        self._local = False
        self._take: Callable[[Any], None] | None = None
        self.touched = False
        self._returned: dict[int, Any] = {}
        """What each metric's ``forward`` has returned last, by its id."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedMetrics:
        # Metrics carry references to this object, and users copy metrics (MetricTracker does).
        return self

    def attach(self) -> None:
        """Replace synchronisation, ``compute``, ``update`` and ``forward`` of each metric."""
        for metric in self._metrics():
            own = {name: vars(metric).get(name) for name in _CALLS}
            if isinstance(metric, Metric):
                own |= {name: vars(metric)[name] for name in _SYNCHRONISATION}
                metric.distributed_available_fn = self._has_replicas
                metric.dist_sync_fn = metric.dist_sync_fn or self._gather
                vars(metric)["_wrap_compute"] = partial(self._wrap_compute, metric)
                _rewrap_compute(metric)
            vars(metric)[_ORIGINALS] = own
            for name in _CALLS:
                vars(metric)[name] = partial(self._call, metric, name)

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        for metric in self._metrics():
            own = vars(metric).pop(_ORIGINALS, None)
            if own is None:
                continue
            for name, value in own.items():
                if value is None and name in _CALLS:
                    del vars(metric)[name]
                else:
                    vars(metric)[name] = value
            if isinstance(metric, Metric):
                del vars(metric)["_wrap_compute"]
                _rewrap_compute(metric)
        self._returned.clear()

    def counted(self) -> AbstractContextManager[None]:
        """Let metrics compute without other stages inside the context."""
        return patched(self, "_local", True)

    @contextmanager
    def skipped(self, take: Callable[[Any], None] = lambda values: None) -> Iterator[None]:
        """Change no metric inside the context: what they return there is not a number.

        Args:
            take: is given the arguments of their calls.
        """
        self.touched = False
        with patched(self, "_take", take), patched(self, "_local", True):
            yield

    @contextmanager
    def states_shared(self, collect: Callable[[Any], Any]) -> Iterator[None]:
        """Give every rank the last stage's states, with their update counts, inside the context.

        For readers of states that do not call ``compute()``, such as checkpoints of persistent
        states. All ranks of the pipeline have to enter it.

        Args:
            collect: returns the value of the last stage on all ranks.
        """
        metrics = [metric for metric in self._metrics() if isinstance(metric, Metric)]
        own = [{name: vars(metric)[name] for name in _memory(metric)} for metric in metrics]
        for metric, memory in zip(metrics, own, strict=True):
            shared = collect(_to(memory, "cpu"))
            vars(metric).update(_to(shared, metric.device))
        try:
            yield
        finally:
            for metric, memory in zip(metrics, own, strict=True):
                vars(metric).update(memory)

    def end(self) -> None:
        """Leave states on the last stage alone, of which torchmetrics computes over all ranks.

        No rank keeps a value that was computed: it would not take part where others synchronise.
        """
        for metric in self._metrics():
            if not self._is_last_stage:
                metric.reset()
            elif isinstance(metric, Metric):
                metric._computed = None

    def _metrics(self) -> Iterator[Any]:
        kinds = Metric, MetricCollection
        return (module for module in self._module.modules() if isinstance(module, kinds))

    def _call(self, metric: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``update`` or ``forward`` of a metric, unless a micro-batch does."""
        own = vars(metric)[_ORIGINALS][name] or partial(getattr(type(metric), name), metric)
        if self._take is None:
            value = own(*args, **kwargs)
            if name == "forward":
                self._returned[id(metric)] = value
            return value
        self.touched = True
        self._take((args, kwargs))
        if name == "update":
            return None
        if id(metric) not in self._returned:
            self._returned[id(metric)] = _tried(metric, args, kwargs)
        return apply_to_collection(self._returned[id(metric)], Tensor, _not_a_number)

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

    def _wrap_compute(self, metric: Metric, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Compute on the last stage and broadcast; torchmetrics also calls this for copies."""
        local_compute = type(metric)._wrap_compute(metric, compute)

        @wraps(compute)
        def compute_for_all(*args: Any, **kwargs: Any) -> Any:
            if self._take is not None:  # Other replicas may run this step another number of times.
                self.touched = True
                with patched(metric, "_to_sync", False), patched(metric, "_computed", None):
                    return local_compute(*args, **kwargs)
            if self._local:
                return local_compute(*args, **kwargs)
            # A metric made of metrics calls their `compute`, but on the last stage alone.
            with self.counted():
                value = local_compute(*args, **kwargs) if self._is_last_stage else None
            return _to(self._from_last_stage(value), metric.device)

        return compute_for_all

    def _from_last_stage(self, value: Any) -> Any:
        if self._inter_group is None:
            return value
        received = broadcast(_to(value, "cpu"), self._last_stage_rank, self._inter_group)
        return value if self._is_last_stage else received


def _tried(metric: Any, args: Any, kwargs: Any) -> Any:
    """What ``forward`` of a metric returns, whose values do not matter."""
    try:
        with without_dispatch_modes():
            return _unattached(metric).forward(*args, **kwargs)
    except Exception:  # It may need more samples; where it counts it raises.
        return torch.zeros(())


def _unattached(metric: Any) -> Any:
    """A copy of a metric that is called as its class says."""
    copy = deepcopy(metric, _detached(metric))
    for part in copy.modules():
        for name in (*_CALLS, _ORIGINALS):
            vars(part).pop(name, None)
        if isinstance(part, Metric):
            part._to_sync = False
            vars(part)["update"] = part._wrap_update(part.update)
    return copy


def _not_a_number(tensor: Tensor) -> Tensor:
    # Made of the tensor, so that a loss which has it in it is not taken for a mean over samples.
    return tensor.to(torch.get_default_dtype()) * torch.nan


def _to(value: Any, device: Any) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.to(device))


def _rewrap_compute(metric: Any) -> None:
    """Wrap the class's ``compute`` anew, as torchmetrics does when it unpickles a metric."""
    metric.compute = metric._wrap_compute(type(metric).compute.__get__(metric))


def _memory(metric: Metric) -> list[str]:
    """The names of the attributes of a metric that its updates change."""
    return [*metric._defaults, "_update_count", "_computed"]


def _detached(metric: Any) -> dict[int, Any]:
    """A memo of detached clones for ``deepcopy``, which cannot copy tensors of a graph."""
    held = [
        [getattr(part, name) for name in (*_memory(part), "_forward_cache")]
        for part in metric.modules()
        if isinstance(part, Metric)
    ]
    of_graphs = (tensor for tensor in tensors_in(held) if not tensor.is_leaf)
    return {id(tensor): tensor.detach().clone() for tensor in of_graphs}
