"""Validates the module, callbacks, optimizers and ranks of a run.

Every ``validate`` function raises a ``MisconfigurationException`` that names the problem and a
remedy. Lightning itself raises for several optimizers, when they are configured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, WeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.pipeline.microbatch import Norm
from lightning_axosparse.pipeline.shard.partition import Partition
from lightning_axosparse.sparse.module.optimizer_state import trial_steps
from lightning_axosparse.strategy.compat.internals import callbacks_of, overrides
from lightning_axosparse.strategy.config import Config
from lightning_axosparse.strategy.expert_parallel import expert_layers
from lightning_axosparse.support.remote_files import local_path
from lightning_axosparse.support.troubleshooting import first_few, see, without_link

_log = logging.getLogger(__name__)


@runtime_checkable
class NeedsWholeWeights(Protocol):
    """A callback that takes the weights that a rank has for all of them."""

    needs_whole_weights: Literal[True]


# A run


def validate_run(config: Config, trainer: Trainer, io: CheckpointIO) -> None:
    """Check that the module and the callbacks of a run work on ranks with a part of the module."""
    module = trainer.lightning_module
    if config.runs_pipeline:
        validate_steps(module, trainer.state.fn)
        if trainer.state.fn == TrainerFn.FITTING:
            validate_module(module)
    if config.shares_layers or (config.g_inter > 1 and config.transport != "loopback"):
        validate_callbacks(callbacks_of(trainer))
    if config.shares_layers:
        validate_whole_weights(config, callbacks_of(trainer))
    if not overrides(module, "configure_model"):  # That may create layers, or split them.
        validate_shared_layers(config, module)
    if config.save_distributed_checkpoint:
        validate_default_checkpoint_io(io)


# The module


def validate_module(module: LightningModule) -> None:
    """Check that a module whose steps are pipelined leaves optimization to Lightning."""
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__name__} sets `automatic_optimization = False`, but in a pipeline the "
            "code of `training_step` behind the layers runs on the last stage alone: the other "
            "stages would never call `optimizer.step()`. Return the loss from `training_step` "
            "instead and leave `automatic_optimization` alone; or train with g_inter=1 and "
            "microbatches=1, where replicas optimize by hand as with Lightning's ddp."
            + see("steps")
        )


_STEPS: Mapping[Any, Sequence[str]] = {
    TrainerFn.FITTING: ("training_step", "validation_step"),
    TrainerFn.VALIDATING: ("validation_step",),
    TrainerFn.TESTING: ("test_step",),
    TrainerFn.PREDICTING: ("predict_step",),
}


def validate_steps(module: LightningModule, fn: TrainerFn | None) -> None:
    """Check that the steps of a run take batches, which a pipeline splits."""
    for name in _STEPS.get(fn, ()):
        step = getattr(module, name)  # None switches evaluation off.
        if step is not None and "dataloader_iter" in signature(step).parameters:
            raise MisconfigurationException(
                f"`{name}(self, dataloader_iter)` of {type(module).__name__} takes batches from an "
                "iterator, but in a pipeline each stage runs the step, for each micro-batch: they "
                "would train on different ones. Take `batch, batch_idx` instead; or use g_inter=1 "
                "and microbatches=1." + see("steps")
            )


def advise_on_norms(partition: Partition, microbatches: int, trains: bool) -> None:
    """Say which norms use the statistics of a micro-batch: in training, and in every step."""
    if microbatches == 1:
        return
    norms = [
        (name, part)
        for prefix, layer in zip(partition.names, partition.layers, strict=True)
        for name, part in layer.named_modules(prefix=prefix)
        if isinstance(part, nn.modules.batchnorm._NormBase)
    ]
    without = [each for each in norms if isinstance(each[1], Norm) and each[1].running_mean is None]
    updated = [each for each in norms if trains and each[1].track_running_stats]
    by_each = "updates its running statistics by each of them, as with gradient accumulation"
    for found, more in ((without, "does so in evaluation, too"), (updated, by_each)):
        if found:
            name, part = found[0]
            others = f", like {len(found) - 1} more," if len(found) > 1 else ""
            rank_zero_info(
                f"{name!r} ({type(part).__name__}){others} normalizes by the statistics of a "
                f"micro-batch, and {more}: expect other losses than on one process. With "
                "microbatches=1 they are those of the batch."
            )


def norms_outside(module: nn.Module, layers: Sequence[nn.Module]) -> list[str]:
    """Return the names of norms that use statistics of a batch, without those of layers."""
    inside = {part for layer in layers for part in layer.modules()}
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part not in inside
    ]


def advise_on_parts_of_batches(
    module: nn.Module, layers: Sequence[nn.Module], microbatches: int
) -> None:
    """Warn of norms to which it matters that each replica has a part of the batch from now on."""
    names = norms_outside(module, layers if microbatches > 1 else ())
    if names:
        others = f", like {len(names) - 1} more," if len(names) > 1 else ""
        rank_zero_warn(
            f"From now on {names[0]!r}{others} normalizes by the statistics of a replica's part of "
            "the batch, as with ddp: expect other losses than on one process, or leave regrid= "
            "out." + see("grid")
        )


def advise_on_dropout(module: nn.Module) -> None:
    """Warn that masks of dropout repeat in a tensor group, if the module has dropout."""
    dropouts = [
        f"{name}.{key}".lstrip(".")
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, float) and value > 0
        if "dropout" in key or (key == "p" and "Dropout" in type(part).__name__)
    ]
    if dropouts:
        rank_zero_info(
            "The ranks that share layers draw the same random numbers: dropout "
            f"({first_few(dropouts)}) between a column-wise and a row-wise layer drops the same "
            "entries of each rank's part. Elsewhere its masks are like those of one process."
        )


@contextmanager
def ignore_if_layers_follow(module: LightningModule) -> Iterator[None]:
    """Ignore errors inside the context if the module's own hooks may create its layers later."""
    try:
        yield
    except MisconfigurationException:
        if not overrides(module, "configure_model", "setup"):
            raise


def validate_layers(partition: Partition) -> None:
    """Check that the gradients of micro-batches add up to those of a batch in every layer."""
    for name, layer in zip(partition.names, partition.layers, strict=True):
        for path, part in layer.named_modules(prefix=name):
            if getattr(part, "scale_grad_by_freq", False):
                raise MisconfigurationException(
                    f"{path!r} ({type(part).__name__}) has scale_grad_by_freq=True: it divides "
                    "gradients by how often a row occurs in a batch, and would count in each "
                    "micro-batch. Leave it out, or use microbatches=1." + see("layers")
                )


# Weights that are split over ranks


def validate_shared_layers(config: Config, module: LightningModule) -> None:
    """Check that ranks can share the layers of a module, and its experts, as configured."""
    tensors, experts = config.tensors, config.experts
    if tensors.ranks > 1:
        # Imported here, because it loads DTensor.
        from lightning_axosparse.strategy.tensor_parallel import styles_of

        styles_of(module, tensors.plan, tensors.ranks)
    if experts.ranks > 1:
        expert_layers(module, experts.experts, experts.ranks)


def validate_whole_weights(config: Config, callbacks: Sequence[Callback]) -> None:
    """Check that no callback of this package mistakes a part of a weight for the whole."""
    ranks, name = config.tensors.ranks, "tensor_parallel"
    if ranks == 1:
        ranks, name = config.experts.ranks, "expert_parallel"
    for callback in callbacks:
        if isinstance(callback, NeedsWholeWeights):
            raise MisconfigurationException(
                f"{type(callback).__name__} does not work with {name}={ranks}: it "
                "would take the part of a weight that a rank has for all of it. Leave one of the "
                "two out." + see("tensor-parallel")
            )


# Callbacks


def validate_callbacks(callbacks: Sequence[Callback]) -> None:
    """Check that no callback needs the whole module on every rank."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                f"{name} masks weights of the whole module in one process, but each rank has only"
                " those of its stage. Use lightning_axosparse.GradualPruning(pruning_ratio=...),"
                " which ranks all stages' weights together and stores the unpruned entries."
                + see("callbacks")
            )
        if isinstance(callback, BatchSizeFinder):
            raise MisconfigurationException(
                f"{name} tries batch sizes until the memory of one process is full, which Lightning"
                " does not support on several ranks. Find the batch size by measuring: it is the"
                " micro-batch that has to fit, of which a stage holds `strategy.in_flight`."
                + see("callbacks")
            )


def validate_copied_whole(callbacks: Sequence[Callback]) -> None:
    """Check that no callback copies a module that an earlier run has left sharded."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            raise MisconfigurationException(
                f"{type(callback).__name__} copies the module when `fit` begins, but an earlier run"
                " has left it sharded: this rank has only its own layers. Save a checkpoint with"
                " `trainer.save_checkpoint`, and give `fit` a new module and `ckpt_path=`."
                + see("callbacks")
            )


# Optimizers


def optimizers_before_setup(module: LightningModule) -> list[Optimizer]:
    """Call ``configure_optimizers`` before the run is set up, to validate its result.

    Returns:
        The optimizers; an empty list if the hook fails because it needs the Trainer, the data or
        the ranks. They are validated again on the ranks.
    """
    try:
        configured = module.configure_optimizers()
    except Exception:  # The user's code may raise anything; if it does so on ranks, they show it.
        _log.debug("No optimizers before the run is set up", exc_info=True)
        return []
    optimizers: list[Optimizer] = []
    apply_to_collection(configured, Optimizer, optimizers.append)
    return optimizers


def validate_optimizers(config: Config, optimizers: Sequence[Optimizer], g_data: int) -> None:
    """Check that the ranks can step the optimizers, each its own parameters."""
    if len(optimizers) > 1 and config.runs_pipeline:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise MisconfigurationException(
            f"`configure_optimizers` returned {len(optimizers)} optimizers ({names}), which takes"
            " manual optimization; in a pipeline AxoSparseStrategy drives one. Give one optimizer"
            " several parameter groups: `AdamW([{'params': a, 'lr': 1e-3}, {'params': b, 'lr':"
            " 1e-4}])`; or train with g_inter=1 and microbatches=1. Optimizers stepped in turn, as"
            " in a GAN, would take a pipeline of micro-batches for each of their losses."
            + see("optimizers")
        )
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS) and (config.runs_pipeline or g_data > 1):
            raise MisconfigurationException(
                f"`configure_optimizers` returned {type(optimizer).__name__}, which calls the"
                " closure as often as the loss and the gradients of all parameters want, but each"
                " stage holds only some of them, and each replica has a loss of its own. Use an"
                " optimizer that takes one step a batch, such as AdamW or SGD, or train on one"
                " rank with g_inter=1 and microbatches=1." + see("optimizers")
            )
    given = {
        "shard_optimizer": config.shard_optimizer,
        "tensor_parallel": config.tensors.ranks > 1,
        "expert_parallel": config.experts.ranks > 1,
    }
    dividing = " and ".join(each for each, is_given in given.items() if is_given)
    if dividing:
        validate_one_optimizer(optimizers, dividing)
        for optimizer in optimizers:
            validate_steps_in_parts(optimizer, dividing)


def validate_one_optimizer(optimizers: Sequence[Optimizer], feature: str) -> None:
    """Check that there is only one optimizer, for a feature that does not support several."""
    if len(optimizers) > 1:
        raise MisconfigurationException(
            f"{feature} works with one optimizer, but `configure_optimizers` returned"
            f" {len(optimizers)}. Give one optimizer several parameter groups, or leave"
            f" {feature} out." + see("optimizers")
        )


def validate_steps_in_parts(optimizer: Optimizer, dividing: str) -> None:
    """Check that an optimizer steps parts of parameters like whole ones.

    An optimizer of the same class and settings takes trial steps on small random parameters; the
    optimizer itself does not change. ``dividing`` names the arguments by which each rank has a part
    of every parameter.
    """
    for group in optimizer.param_groups:
        try:
            whole, parts = (trial_steps(optimizer, group, in_parts) for in_parts in (False, True))
        except Exception as error:  # The user's optimizer may raise anything.
            reason = f"a trial step failed: {without_link(error)}"
            raise _not_in_parts(optimizer, dividing, reason) from error
        if not torch.allclose(whole, parts):
            reason = "parts of a parameter get other numbers than all of it"
            raise _not_in_parts(optimizer, dividing, reason)


def _not_in_parts(optimizer: Optimizer, dividing: str, reason: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"{type(optimizer).__name__} cannot step parts of parameters: {reason}. By {dividing} each "
        "rank has some of the elements of a parameter: use AdamW, Adam, SGD, RMSprop, NAdam, "
        f"Adagrad or the like, with their default `capturable=False`, or leave {dividing} out."
        + see("optimizers")
    )


def validate_parameters_known(
    optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str]
) -> None:
    """Check that optimizers have the module's parameters, and no others."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:
                    raise MisconfigurationException(
                        f"`configure_optimizers` gave {type(optimizer).__name__} a parameter of "
                        f"shape {tuple(parameter.shape)} that is not part of the module, so it is "
                        "not known which stage keeps it. Make it an attribute of the module."
                        + see("optimizers")
                    )


# Ranks


def norms_not_synchronized() -> MisconfigurationException:
    """Return the error of a Trainer that is asked for norms with the statistics of all ranks."""
    return MisconfigurationException(
        "Trainer(sync_batchnorm=True) is not supported on several ranks: norms in layers take the "
        "statistics of a micro-batch, with microbatches=1 those of a replica's batch. Leave it out."
        + see("arguments")
    )


def validate_world_size(devices: int, num_nodes: int, job_size: int) -> None:
    """Check that MPI has started as many ranks as the Trainer wants."""
    if job_size == 1 and num_nodes > 1:
        raise MisconfigurationException(
            f"`Trainer(devices={devices}, num_nodes={num_nodes})` wants ranks on {num_nodes} nodes,"
            " but without `mpiexec` or `srun` they are started on this node alone. Start them with"
            f" `mpiexec -n {devices * num_nodes} python train.py`, under Slurm with"
            " `srun --mpi=pmi2 -K python train.py`; or leave `num_nodes` out."
            + see("starting-ranks")
        )
    if job_size not in (1, devices * num_nodes):
        raise MisconfigurationException(
            f"MPI has started {job_size} ranks, but `Trainer(devices={devices},"
            f" num_nodes={num_nodes})` wants {devices} x {num_nodes} = {devices * num_nodes}. Start"
            f" `mpiexec -n {devices * num_nodes}`, or set `devices` to the ranks on each node so"
            f" that `devices * num_nodes` is {job_size}." + see("grid")
        )


def validate_local_rank(local_rank: int, devices: int, num_nodes: int) -> None:
    """Check that this rank's node has no more ranks than the Trainer wants there."""
    if local_rank >= devices:
        raise MisconfigurationException(
            f"This is rank {local_rank} of its node, counted from 0, but"
            f" `Trainer(devices={devices}, num_nodes={num_nodes})` wants {devices} on each of"
            f" {num_nodes} nodes. Start {devices} a node (`mpiexec -ppn {devices}`,"
            f" `srun --ntasks-per-node={devices}`), or set `devices` and `num_nodes` to what the"
            " job has." + see("grid")
        )


# Checkpoints


def validate_default_checkpoint_io(io: CheckpointIO) -> None:
    """Check that no plugin was given for checkpoints that the stages write themselves.

    ``AsyncCheckpointIO`` lets them write in a thread.
    """
    written_by = io.checkpoint_io if type(io) is AsyncCheckpointIO else io
    if type(written_by) is not AtomicCheckpointIO:
        raise MisconfigurationException(
            f"save_distributed_checkpoint=True writes folders to which all stages write, but "
            f"{type(written_by).__name__} writes one file. Leave one of the two out."
            + see("checkpoints")
        )


def validate_folder(path: Any, storage_options: Any) -> None:
    """Check that stages can write to a folder."""
    if storage_options is not None:
        raise MisconfigurationException(
            f"save_distributed_checkpoint=True cannot write '{path}' with storage_options. Leave "
            "them out, or leave save_distributed_checkpoint out." + see("checkpoints")
        )
    local = local_path(path)
    if local is not None and local.is_file() and not local.is_symlink():
        raise MisconfigurationException(
            f"'{path}' is a file, perhaps an older checkpoint, so no folder of that name can be "
            "written. Move it away, or choose another name." + see("files")
        )
