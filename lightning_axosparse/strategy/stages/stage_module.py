"""The part of a module that the stages of this rank compute and store."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.distributed.gradient_reducer import DividedGradient
from lightning_axosparse.distributed.process_groups import ProcessGroups
from lightning_axosparse.pipeline.backward.recompute import ActivationCheckpointing
from lightning_axosparse.pipeline.crossing.message import ChannelLink, Link, LoopbackLink
from lightning_axosparse.pipeline.shard.partition import Partition
from lightning_axosparse.pipeline.shard.remote_tensor import (
    LocalSteps,
    RemoteTensor,
    updating_param_groups,
)
from lightning_axosparse.pipeline.shard.sharded_module import (
    gather_tensors,
    is_left_sharded,
    leave_sharded,
    mark_whole,
    validate_values,
)
from lightning_axosparse.pipeline.shard.sharding import RemoteGradients, Sharding, free
from lightning_axosparse.pipeline.stage_forward import PipelinedLayers
from lightning_axosparse.sparse import densify
from lightning_axosparse.sparse.module.parameters import (
    dense_copy,
    forget,
    owners,
    sparse_parameters,
)
from lightning_axosparse.sparse.store.scratch import scratch
from lightning_axosparse.strategy.compat.internals import move_module
from lightning_axosparse.strategy.config import Config
from lightning_axosparse.strategy.expert_parallel import SpreadExperts
from lightning_axosparse.strategy.stages.shared_parameters import SharedParameters, broadcast_first
from lightning_axosparse.strategy.validation import validate_parameters_known
from lightning_axosparse.strategy.weight_parts import Division, WeightParts

if TYPE_CHECKING:  # It loads DTensor, which only tensor parallelism needs.
    from lightning_axosparse.strategy.tensor_parallel import TensorShards


class StageModule:
    """A module of which this rank stores only the tensors of its stages.

    The rank has the full module until :meth:`shard`, and again after :meth:`unshard`. Creating this
    object is collective over all ranks.

    Attributes:
        grid: the grid of ranks.
        partition: the layers of each stage.
        sharding: the stages that store each tensor.
        tensors: the weights that a tensor group splits; None without tensor parallelism.
        weight_parts: the parameters of which this rank has a part.
        layers: the partitioned layers.
        recompute: the activation checkpointing; None without.
        shared: this rank's parameters, by the ranks that store the same ones.
        remote_gradients: the gradients of parameters of other stages.
    """

    def __init__(
        self,
        config: Config,
        module: LightningModule,
        partition: Partition,
        groups: ProcessGroups,
        stages: range,
        device: torch.device,
        tensors: TensorShards | None = None,
        experts: SpreadExperts | None = None,
    ) -> None:
        self.module, self.stages, self.device = module, stages, device
        self.tensors = tensors
        divisions: list[Division] = [each for each in (tensors, experts) if each is not None]
        self.weight_parts = WeightParts(module, divisions)
        self.partition = partition
        self.groups, self.grid = groups, groups.grid
        self.sharding = Sharding(module, partition.names, partition.parts, device)
        self.recompute: ActivationCheckpointing | None = None
        if config.recompute is not None:
            self.recompute = ActivationCheckpointing(config.recompute, device)
        self._freed: dict[Tensor, Tensor] = {}
        self._counted: dict[Tensor, str] = {}
        self._optimizers: Sequence[Optimizer] = ()
        self._followed: list[nn.Parameter | Optimizer] = []
        """The parameters that are sharded and reduced, and the optimizers that step them."""
        self._attached = ExitStack()
        self._limited: dict[Optimizer, LocalSteps] = {}
        self.shared = SharedParameters(self.sharding, self.weight_parts, groups)
        self.layers = self._pipelined_layers(partition)
        self.remote_gradients = RemoteGradients(self.sharding, lambda: self.groups.inter)

    @property
    def last_stage(self) -> int:
        """Index of the last stage of the pipeline."""
        return len(self.layers.parts) - 1

    @property
    def runs_last_stage(self) -> bool:
        """Whether this rank runs the last stage, the only one that runs a step to its end."""
        return self.last_stage in self.stages

    @property
    def has_all_stages(self) -> bool:
        """Whether this rank runs all stages."""
        return len(self.stages) > self.last_stage

    @property
    def was_interrupted(self) -> bool:
        """Whether an exception has ended the run, so that other ranks may have ended."""
        return self.module.trainer.state.status == TrainerStatus.INTERRUPTED

    def shard(self, optimizers: Sequence[Optimizer]) -> None:
        """Free the tensors of other stages in the module and its optimizers; collective.

        The other tensors move to the device, with the values of the first replica. If the last run
        has left the module sharded, ranks that store them send them.
        """
        names = self.sharding.names
        own_tensors, _ = self.sharding.split(self.stages)
        if is_left_sharded(self.module):
            gather_tensors(self.module, own_tensors)
            mark_whole(self.module)
        validate_values(own_tensors.items(), self.grid.stage)
        self._optimizers = optimizers
        if not self.has_all_stages:
            validate_parameters_known(optimizers, names)
        owned = owners(self.module)
        with updating_param_groups(self.module, optimizers):
            self.sharding.shard(self.stages)
        local = self.sharding.local_parameters()
        for parameter, name in names.items():
            if name not in local:
                forget(parameter, owned[name], optimizers)
        move_module(self.module, self.device)
        self.shared.broadcast_weights()
        self.broadcast_buffers()
        self.weight_parts.split(self.sharding.local_parameters())
        self._attach()

    def follow_changes(self) -> None:
        """Shard and reduce what hooks have added or replaced; alike on all ranks."""
        trainer = self.module.trainer
        # Those of an earlier fit may belong to another module.
        fits = trainer.state.fn == TrainerFn.FITTING
        optimizers = trainer.optimizers if fits else self._optimizers
        now = [*self.module.parameters(), *optimizers]
        if len(now) == len(self._followed) and all(map(operator.is_, now, self._followed)):
            return
        if self.last_stage:
            self.layers.validate_places()
        self._optimizers = list(optimizers)
        with updating_param_groups(self.module, optimizers):
            self.sharding.follow_changes()
        self.shared.set_groups(self.groups)
        self.remote_gradients.update()
        self._count()
        self.shared.detach()
        self.shared.attach()
        self._limit_steps()
        self._followed = [*self.module.parameters(), *optimizers]

    @contextmanager
    def reshard(self, partition: Partition, groups: ProcessGroups) -> Iterator[None]:
        """Change to this rank's stage in another grid; collective over all ranks.

        Code in the context has to reshard :attr:`sharding` and to move the tensors between ranks.
        """
        self._detach()
        with updating_param_groups(self.module, self._optimizers):
            yield
        self.groups, self.grid = groups, groups.grid
        self.stages, self.partition = range(self.grid.stage, self.grid.stage + 1), partition
        self.shared.set_groups(groups)
        self.layers = self._pipelined_layers(partition)
        self._attach()

    def unshard(self) -> None:
        """Undo :meth:`shard` on a rank that has all stages; the module becomes dense."""
        self._detach()
        self._join()
        densify(self.module, self._optimizers[0] if self._optimizers else None)
        scratch.clear()
        self.module.cpu()

    def end_run(self) -> None:
        """Undo :meth:`shard`, except that tensors of other stages stay freed."""
        self._detach()
        self._join()
        with updating_param_groups(self.module, self._optimizers):
            self._freed = self.sharding.restore_tensors()
        scratch.clear()
        self.share_outer_buffers(self.module)

    def _join(self) -> None:
        if self.weight_parts:
            self.weight_parts.join(self._optimizers, not self.was_interrupted)

    def counting_rule(self) -> Callable[[Tensor], bool]:
        """Return whether this rank counts a parameter, as a function.

        Each part of a parameter is counted once over the ranks that have the whole model.
        """
        self._count()
        return lambda p: p in self._counted and self.weight_parts.counts(self._counted[p])

    def _count(self) -> None:
        local = self.sharding.local_parameters()
        self._counted = {local[name]: name for name in self.sharding.counted_names()}

    @torch.no_grad()
    def share_outer_buffers(self, module: nn.Module) -> None:
        """Broadcast the last stage's buffers outside the layers; collective over the stages."""
        outer = {n: b for n, b in module.named_buffers() if self.sharding.stage_of(n) is None}
        for stage, source in enumerate(self.grid.pipeline):
            own = {n: b for n, b in outer.items() if self.sharding.source_of(n) == stage}
            if own:
                for name, value in self.groups.broadcast_along_pipeline(own, stage).items():
                    if self.grid.rank != source:
                        outer[name].set_(value)  # type: ignore[call-overload]

    @torch.no_grad()
    def broadcast_buffers(self) -> None:
        """Broadcast the first replica's buffers; collective over the replicas of a stage."""
        for buffer in self.module.buffers():
            if not buffer.is_meta and buffer.numel():
                broadcast_first(buffer, self.groups.data)
                broadcast_first(buffer, self.groups.tensor)

    def leave_sharded(self) -> None:
        """Move the tensors of other stages to the meta device, after :meth:`end_run`."""
        leave_sharded(self.module, self._freed)
        self._freed = {}

    def release(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the caller gets from this rank, dense, by name, and free them."""
        mark_whole(self.module)
        owned, sparse = owners(self.module), sparse_parameters(self.module)
        first = self.grid.pipeline_index == 0
        for name, parameter in self.sharding.local_parameters().items():
            if first and min(self.sharding.holders_of(name)) in self.stages:
                dense = sparse[name].dense() if name in sparse else parameter.detach()
                yield name, dense
                del dense
            forget(parameter, owned[name], self._optimizers)
            free(parameter)
        for name, buffer in self.module.named_buffers():
            if first and self.sharding.source_of(name) in self.stages:
                yield name, buffer

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter of the full model with its gradient; collective over a pipeline.

        Of sparse ones, dense copies. If replicas have divided the gradients, those of other stages
        and of sparse parameters are None.
        """
        local, entries = self.sharding.local_parameters(), sparse_parameters(self.module).items()
        sparse = {name: entry.stored for name, entry in entries if entry.stored is not None}
        for name, stages in self.sharding.holders.items():
            own, stage = local.get(name), min(stages)
            if name in self.weight_parts.parameters:
                own = self.weight_parts.parameters[name].gather_copy()
            elif own is not None and name in sparse:
                own = dense_copy(own, sparse[name])
            values = own if own is None else (own.detach().cpu(), _on_cpu(own.grad))
            values = self.groups.broadcast_along_pipeline(values, stage)
            if own is not None:
                yield name, own
                continue
            assert values is not None
            parameter, gradient = values
            parameter = parameter.to(self.device)
            parameter.grad = gradient if gradient is None else gradient.to(self.device)
            yield name, parameter

    def validate_replicated_gradients(self, tolerance: float) -> None:
        """Once a run, compare gradients that are replicated in a tensor group; collective."""
        if self.tensors is None or self.tensors.gradients_are_compared:
            return
        if self.shared.step_reducer is self.shared.reducer:
            local = self.sharding.local_parameters()
            replicated = {n: p for n, p in local.items() if n not in self.weight_parts.parameters}
            self.shared.wait_for(replicated.values())
            self.tensors.validate_gradients(replicated, tolerance)

    def links(self, window: int) -> dict[int, Link]:
        """Connect the stages of this rank to the adjacent stages; collective over all ranks.

        Args:
            window: most messages on their way between two stages.
        """
        if len(self.stages) > 1 or self.last_stage == 0:
            return dict(enumerate(LoopbackLink.chain(self.last_stage + 1)))
        # Importing it starts MPI, which is not needed on one rank.
        from lightning_axosparse.distributed.mpi.transport import connect_stages

        stage, grid = self.grid.stage, self.grid
        previous, following = connect_stages(
            stage, grid.g_inter, grid.pipeline_index, window, self.device
        )
        return {stage: ChannelLink(previous, following, self.device)}

    def _pipelined_layers(self, partition: Partition) -> PipelinedLayers:
        return PipelinedLayers(
            partition.names,
            partition.layers,
            partition.parts,
            self.recompute,
            self.module,
        )

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the names of the parameters of all stages in each group of an optimizer."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        names |= {parameter: name for name, parameter in self._former(optimizer).items()}
        return [[names[p] for p in group["params"]] for group in optimizer.param_groups]

    def stepped_parameters(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """Return this rank's parameters, and those that only the optimizer still has, by name."""
        former = self._former(optimizer).items()
        left = {name: each for name, each in former if not isinstance(each, RemoteTensor)}
        return {**self.sharding.local_parameters(), **left}

    def _former(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """Return the parameters that hooks have removed from the module, named by their places."""
        present = set(self.module.parameters())
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        return {f"optimizer[{n}]": each for n, each in enumerate(parameters) if each not in present}

    def _attach(self) -> None:
        """Let the layers compute as stages, and reduce the gradients."""
        module, undo = self.module, self._attached
        self.layers.install(self.stages)
        undo.callback(self.layers.uninstall)
        self.remote_gradients.update()
        if not self.has_all_stages:
            # Lightning's model summary would call layers of other stages with it.
            undo.callback(setattr, module, "example_input_array", module.example_input_array)
            module.example_input_array = None
        self._limit_steps()
        undo.callback(self._unlimit_steps)
        self.shared.attach()
        undo.callback(self.shared.detach)
        self._followed = [*module.parameters(), *self._optimizers]

    def _limit_steps(self) -> None:
        """Let the optimizers step only this rank's parameters."""
        if self.has_all_stages:
            return
        # One that steps now keeps its hooks, among which this may be called.
        for optimizer in self._limited.keys() - set(self._optimizers):
            self._limited.pop(optimizer).remove()
        for optimizer in self._optimizers:
            if optimizer not in self._limited:
                self._limited[optimizer] = LocalSteps(optimizer)

    def _unlimit_steps(self) -> None:
        for limited in self._limited.values():
            limited.remove()
        self._limited = {}

    def _detach(self) -> None:
        """Undo :meth:`_attach`."""
        self._attached.close()


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None or isinstance(tensor, DividedGradient) else tensor.cpu()
