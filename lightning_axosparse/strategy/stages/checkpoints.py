"""Saves and loads the parts of a module, and of its optimizers, that each stage stores.

A checkpoint is dense, as one process writes it: one file, or a folder with a file of each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.optim import Optimizer

from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.checkpoint.folder import save_folder, save_folder_later
from lightning_axosparse.checkpoint.gather import (
    StageTensors,
    gather_model_state,
    gather_optimizer_state,
    gather_remote_tensors,
    gather_shards,
    local_model_state,
    local_optimizer_state,
)
from lightning_axosparse.pipeline.shard.optimizers import OptimizerShards
from lightning_axosparse.pipeline.shard.sharded_module import load_values, state_dict_allowed
from lightning_axosparse.sparse.module.optimizer_state import restore_masters
from lightning_axosparse.sparse.module.parameters import OwnedParameter, sparse_parameters
from lightning_axosparse.strategy.compat.callbacks import weight_averages
from lightning_axosparse.strategy.compat.internals import (
    has_hook,
    in_thread,
    move_optimizers,
    wait_for_thread,
)
from lightning_axosparse.strategy.config import Config
from lightning_axosparse.strategy.stages.stage_module import StageModule
from lightning_axosparse.strategy.validation import validate_folder
from lightning_axosparse.support.archive import all_computed
from lightning_axosparse.support.torch_internals import tree_map_only
from lightning_axosparse.support.troubleshooting import see


class _OnFirstRank(dict[str, Any]):
    """The state of a module or an optimizer in a checkpoint, on a rank that does not have it."""

    def __missing__(self, name: str) -> Any:
        raise MisconfigurationException(
            f"on_save_checkpoint reads {name!r} of a checkpoint's state, which only the first rank "
            "has, because it writes the file: read it where `trainer.is_global_zero`."
            + see("checkpoints")
        )


class StageCheckpoints:
    """The checkpoints of a module whose ranks store only the tensors of their stages."""

    def __init__(
        self, config: Config, stage_module: StageModule, shards: OptimizerShards | None = None
    ) -> None:
        self._stage_module, self._shards = stage_module, shards
        self._as_folders = config.save_distributed_checkpoint
        self._timeout = config.timeout_seconds
        self._is_sharded = config.g_inter > 1 or config.shares_layers or self._as_folders
        # Functions, as a regrid changes the groups.
        self._tensors = StageTensors(lambda: stage_module.groups.inter)
        self._shard_tensors = StageTensors(
            lambda: None if shards is None else stage_module.groups.data
        )

    @property
    def _is_ordinary(self) -> bool:
        """Whether this rank has the module as one process has it: full, and dense."""
        is_sharded = self._is_sharded or self._shards is not None
        return not (is_sharded or sparse_parameters(self._stage_module.module))

    def model_state(self) -> dict[str, Any]:
        """Return the full module's state on the first rank; collective.

        Other ranks return it if they have it without more, else nothing.
        """
        stage_module = self._stage_module
        module, grid = stage_module.module, stage_module.grid
        if self._is_ordinary:
            return module.state_dict()
        if grid.replica > 0:
            if grid.replica < grid.g_expert:
                stage_module.weight_parts.gather_values()
            return _OnFirstRank()
        with state_dict_allowed(module):
            joined = stage_module.weight_parts.gather_values()
            if grid.pipeline_index > 0:
                return _OnFirstRank()
            for average in weight_averages(module.trainer):
                stage_module.share_outer_buffers(average)
            sharding, stages = stage_module.sharding, stage_module.stages
            return self._for_hooks(gather_model_state(sharding, stages, self._tensors, joined))

    def optimizer_state(
        self, optimizer: Optimizer, ordinary: Callable[[Optimizer], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the whole optimizer's state on the first rank, nothing on others; collective."""
        stage_module = self._stage_module
        states = self._states(optimizer)
        if stage_module.grid.pipeline_index > 0:
            return _OnFirstRank()
        if self._is_ordinary:
            return ordinary(optimizer)
        groups, sparse = stage_module.group_names(optimizer), self._sparse
        return self._for_hooks(
            gather_optimizer_state(optimizer, groups, states, sparse, self._tensors)
        )

    @property
    def _sparse(self) -> dict[str, OwnedParameter]:
        """The sparse parameters whose state on this rank has all unpruned entries."""
        parts = self._stage_module.weight_parts.parameters
        sparse = sparse_parameters(self._stage_module.module)
        return {name: entry for name, entry in sparse.items() if name not in parts}

    def _states(self, optimizer: Optimizer) -> dict[str, Mapping[str, Any]]:
        """Return the state of this rank's parameters, by name; collective over the replicas.

        If replicas divide the state of a parameter, the first one gets all of it.
        """
        stage_module, shards = self._stage_module, self._shards
        local = stage_module.stepped_parameters(optimizer)
        parts = stage_module.weight_parts.parameters
        states = {name: optimizer.state.get(parameter, {}) for name, parameter in local.items()}
        joined = {}
        for name in (each for each in local if each in parts):
            state = states.pop(name)
            state = state if shards is None else shards.gather_state(local[name], state)
            joined[name] = parts[name].gather_dense_state(state)
        if shards is not None:
            states = gather_shards(states, local, self._shard_tensors)
            if self._is_read_by_hooks:
                states = self._written(states, self._shard_tensors)
        return {**states, **joined}

    def save(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any, io: CheckpointIO
    ) -> None:
        """Write a checkpoint; collective over the stages of the first replica."""
        tensors = self._tensors
        grid = self._stage_module.grid
        if grid.replica > 0 and self._shards is not None:
            self._shard_tensors.serve()
        elif grid.tensor_rank > 0:
            self._shard_tensors.end()
        if grid.pipeline_index > 0:
            return
        checkpoint = gather_remote_tensors(checkpoint, tensors)
        if self._as_folders:
            validate_folder(path, storage_options)
            if isinstance(io, AsyncCheckpointIO):
                wait_for_thread(io)
                in_thread(io, save_folder_later(checkpoint, path, tensors, self._timeout))
            else:
                save_folder(checkpoint, path, tensors)
        elif tensors.is_first:
            if not isinstance(io, AtomicCheckpointIO):
                checkpoint = all_computed(checkpoint)
            io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            tensors.end()
        else:
            tensors.serve()
        self._shard_tensors.end()

    @property
    def _is_read_by_hooks(self) -> bool:
        return bool(has_hook(self._stage_module.module.trainer, "on_save_checkpoint"))

    def _for_hooks(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state whose deferred tensors are written if a hook of the user reads them."""
        if not self._is_read_by_hooks:
            return state
        state = self._written(state, self._tensors)
        return state if self._tensors.is_first else _OnFirstRank()

    def _written(self, state: dict[str, Any], tensors: StageTensors) -> dict[str, Any]:
        """Write the deferred tensors of a state on the first rank, to which others send theirs."""
        if not tensors.is_first:
            tensors.serve()
            return state
        state = all_computed(state)
        tensors.end()
        return state

    def load_model(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load this rank's part of the full module's state while the module is sharded."""
        stage_module = self._stage_module
        if not self._is_ordinary:
            state = local_model_state(state, stage_module.sharding, stage_module.stages)
            strict = False
        state = stage_module.weight_parts.local_values(state)
        load_values(stage_module.module, state, strict)

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of the whole optimizer's state."""
        stage_module = self._stage_module
        if self._is_ordinary:
            load_whole_optimizer(optimizer, state, stage_module.device)
            return
        sparse = sparse_parameters(stage_module.module)
        groups = stage_module.group_names(optimizer)
        state = {**state, "state": stage_module.weight_parts.local_states(state["state"], groups)}
        parameters = stage_module.stepped_parameters(optimizer)
        local = local_optimizer_state(state, groups, parameters, sparse)
        if self._shards is not None:
            local = self._shards.shard_state_dict(local)
        optimizer.load_state_dict(local)
        move_optimizers([optimizer], stage_module.device)
        restore_masters(optimizer, sparse.values())


def load_whole_optimizer(optimizer: Optimizer, state: Mapping[str, Any], device: Any) -> None:
    """Load the whole state of an optimizer."""
    # A copy, because the state would refer to a mapped file.
    optimizer.load_state_dict(tree_map_only(Tensor, Tensor.clone, dict(state)))
    move_optimizers([optimizer], device)
