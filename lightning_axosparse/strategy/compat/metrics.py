"""Gives torchmetrics objects, updated only on the last stage, the same values on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.memory import recursive_detach
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_axosparse.pipeline.crossing.skip_tensors import unnumbered
from lightning_axosparse.pipeline.state.module_state import OF_LIBRARIES
from lightning_axosparse.pipeline.state.values import entries
from lightning_axosparse.support.object_trees import object_leaves
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.torch_internals import without_dispatch_modes

_REPLACED = "_wrap_update", "_wrap_compute", "forward", "sync"


class _Mode(NamedTuple):
    """What metrics do in a run of the step.

    Attributes:
        skips: whether they stay unchanged.
        reads: whether the tensors that are passed to them are read then.
        synchronizes: whether they compute over all replicas.
        broadcasts: whether all stages get what the last stage has computed.
    """

    skips: bool = False
    reads: bool = False
    synchronizes: bool = False
    broadcasts: bool = False


_SHARED = _Mode(synchronizes=True, broadcasts=True)
_COUNTED = _Mode(synchronizes=True)
_SKIPPED = _Mode(skips=True)
_READ = _Mode(skips=True, reads=True)
_ALONE = _Mode()


class PipelinedMetrics:
    """Makes every torchmetrics object of a module return the same value on every rank of a grid.

    Only the last stage updates metrics, in the end of the step, once a batch. So ``compute()`` runs
    there, with torchmetrics' own synchronisation over the replicas' last stages, and its result is
    broadcast over the pipeline; as with any synchronised metric, every rank has to call it. Inside
    :meth:`counted`, where only the last stage runs, nothing is broadcast.

    Runs of a step on micro-batches do not change metrics (:meth:`skipped`).

    Args:
        module: the LightningModule; metrics may also be in lists, dicts and objects of the user
            that it, a submodule or a callback has as attributes.
        callbacks: the Trainer's callbacks.
        data_group: this stage in all replicas; None if there is one replica.
        from_last_stage: returns the value of the last stage on every stage of the pipeline.
        is_last_stage: whether this process runs the last stage.
        refuse_inside: refuses an action if a layer is being computed.

    Attributes:
        touched: whether a metric was called in the last run in :meth:`skipped`.
    """

    def __init__(
        self,
        module: LightningModule,
        callbacks: Sequence[Callback],
        data_group: dist.ProcessGroup | None,
        from_last_stage: Callable[[Any], Any],
        is_last_stage: bool,
        refuse_inside: Callable[[str], None],
    ) -> None:
        self._module, self._callbacks, self._data_group = module, callbacks, data_group
        self._refuse_inside = refuse_inside
        self._from_last_stage, self._is_last_stage = from_last_stage, is_last_stage
        self._mode = _SHARED
        self._uncounted: Callable[[], AbstractContextManager[None]] = unnumbered
        self.touched = False
        self._returned: dict[int, Any] = {}
        """The last value of each metric's ``forward``, by the metric's id."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedMetrics:
        # Metrics carry references to this object, and users copy metrics (MetricTracker does).
        return self

    def attach(self) -> None:
        """Replace ``update``, ``compute``, ``forward`` and ``sync`` of metrics and their copies."""
        for metric in self._metrics():
            own = vars(metric)
            if isinstance(metric, Metric):
                own.update({name: partial(getattr(self, name), metric) for name in _REPLACED})
                _wrap_again(metric)
            else:  # A collection would compare the states of metrics that were not updated.
                own["update"] = partial(self._update, partial(type(metric).update, metric))

    def detach(self) -> None:
        """Undo :meth:`attach`, and reset metrics on all stages but the last.

        torchmetrics then computes over all ranks. Computed values are dropped on every rank, as a
        rank with a value would not take part in the synchronisation of others.
        """
        for metric in self._metrics():
            for name in (*_REPLACED, "update"):
                vars(metric).pop(name, None)
            if isinstance(metric, Metric):
                _wrap_again(metric)
                metric._computed = None
            if not self._is_last_stage:
                metric.reset()

    def counted(self) -> AbstractContextManager[None]:
        """Let metrics compute without other stages inside the context."""
        return patched(self, "_mode", _COUNTED)

    def skipped(self, reads: bool = False) -> AbstractContextManager[None]:
        """Leave metrics unchanged inside the context, where their values are NaN.

        Args:
            reads: whether to read the tensors that are passed to metrics.
        """
        self.touched = False
        return patched(self, "_mode", _READ if reads else _SKIPPED)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore metrics after the context, whose samples another replica counts."""
        metrics = [each for each in self._metrics() if isinstance(each, Metric)]
        before = [(each, each._copy_state_dict(), each._update_count) for each in metrics]
        yield
        for metric, states, count in before:
            vars(metric).update(states, _update_count=count, _computed=None)

    def _metrics(self) -> Iterator[Any]:
        """Yield the metrics in attributes of the module, its submodules and the callbacks."""
        seen: set[int] = set()
        waiting: list[Any] = [self._module, *map(vars, self._callbacks)]
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, (Metric, MetricCollection)):
                yield value
            if isinstance(value, nn.Module):
                own = vars(value).items()
                waiting += value.children()
                waiting += (each for name, each in own if name not in OF_LIBRARIES)
            else:
                waiting += (entries(value) or {}).values()

    def _skips(self, *arguments: Any) -> bool:
        """Whether the present run leaves metrics unchanged; record that it has called one."""
        if not self._mode.skips:
            return False
        self._refuse_inside("updates or computes a torchmetrics object")
        self.touched = True
        for tensor in object_leaves(arguments, Tensor) if self._mode.reads else ():
            tensor.clone()
        return True

    def _wrap_update(self, metric: Metric, update: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(update)(partial(self._update, type(metric)._wrap_update(metric, update)))

    def _update(self, update: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if not self._skips(args, kwargs):
            with self._uncounted():
                update(*args, **kwargs)

    def forward(self, metric: Metric, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` of a metric; in :meth:`skipped`, return NaN in the form of its value."""
        if not self._skips(args, kwargs):
            # Code between layers that computes with the value, a NaN in other runs, is refused.
            with patched(self, "_uncounted", nullcontext):
                value = type(metric).forward(metric, *args, **kwargs)
            self._returned[id(metric)] = recursive_detach(value)
            return value
        if id(metric) not in self._returned:
            self._returned[id(metric)] = self._tried(metric, args, kwargs)
        return apply_to_collection(self._returned[id(metric)], Tensor, _not_a_number)

    def _tried(self, metric: Metric, args: Any, kwargs: Any) -> Any:
        """Call ``forward`` of a copy of a metric, for the form of its value."""
        try:
            with patched(self, "_mode", _ALONE), without_dispatch_modes():
                return recursive_detach(metric.clone().forward(*args, **kwargs))
        except Exception:  # It may need more samples; the run on the batch raises it again.
            return torch.zeros(())

    def sync(self, metric: Metric, **options: Any) -> None:
        """Synchronise a metric over the replicas, if all of them do."""
        # Replicas may run a step different numbers of times before it counts.
        is_alone = self._data_group is None or not self._mode.synchronizes
        options.update(process_group=self._data_group, distributed_available=lambda: not is_alone)
        type(metric).sync(metric, **options)

    def _wrap_compute(self, metric: Metric, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Compute on the last stage, and broadcast the value."""
        own = type(metric)._wrap_compute(metric, compute)

        @wraps(compute)
        def compute_for_all(*args: Any, **kwargs: Any) -> Any:
            if self._skips():
                with patched(metric, "_computed", None), self._uncounted():
                    return own(*args, **kwargs)
            if not self._mode.broadcasts:
                with self._uncounted():
                    return own(*args, **kwargs)
            # A metric of metrics calls their `compute`, on the last stage alone.
            with self.counted():
                value = own(*args, **kwargs) if self._is_last_stage else None
            value = self._from_last_stage(move_data_to_device(value, "cpu"))
            return move_data_to_device(value, metric.device)

        return compute_for_all


def _wrap_again(metric: Metric) -> None:
    """Wrap ``update`` and ``compute`` again, as torchmetrics does for copies of metrics."""
    for name in ("update", "compute"):
        vars(metric).pop(name, None)
    metric.__setstate__({})


def _not_a_number(tensor: Tensor) -> Tensor:
    # NaN, so that a comparison sees a loss that is computed from it.
    return tensor.to(torch.get_default_dtype()) * torch.nan
