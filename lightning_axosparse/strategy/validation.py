"""Validates the arguments, module, callbacks, optimizers and ranks of a run.

Every error says what to do instead. Lightning itself raises, before any rank is started, for a
module or Trainer of the ``pytorch_lightning`` package and for a module compiled as a whole; and for
several optimizers, when they are configured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric

from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO, local_path
from lightning_axosparse.distributed.grid import divisors
from lightning_axosparse.pipeline.schedule import SCHEDULES, WeightGradients
from lightning_axosparse.strategy.lightning.checkpoint_io import (
    reading_files,
    writes_in_background,
)
from lightning_axosparse.strategy.lightning.hooks import overrides
from lightning_axosparse.support.troubleshooting import see

# The strategy's arguments


def validate_arguments(
    g_inter: int | Literal["auto"],
    in_flight: int | None,
    schedule: str,
    transport: str,
    balance: str | Sequence[int],
    regrid: int | Literal["auto"] | None,
) -> None:
    """Check that arguments of the strategy, each valid by itself, go together.

    Raises:
        MisconfigurationException: with the values, and what to give instead.
    """
    if g_inter == "auto" and transport == "loopback":
        raise MisconfigurationException(
            "g_inter='auto' divides the ranks that there are into stages and replicas, but with "
            "transport='loopback' all stages share one. Give g_inter a number." + see("grid")
        )
    if g_inter == "auto" and not isinstance(balance, str):
        raise MisconfigurationException(
            f"balance={list(balance)} gives the layers of {len(balance)} stages: say "
            f"g_inter={len(balance)} instead of 'auto', or leave balance out." + see("grid")
        )
    if not isinstance(balance, str) and len(balance) != g_inter:
        raise MisconfigurationException(
            f"balance={list(balance)} gives the layers of {len(balance)} stages, but there are "
            f"g_inter={g_inter}. Give one number of layers a stage." + see("grid")
        )
    if in_flight is not None and schedule != "message-driven":
        raise MisconfigurationException(
            f"in_flight={in_flight} belongs to schedule='message-driven'; {schedule!r} has its own "
            "fixed limit. Leave one of them out." + see("grid")
        )
    if regrid is not None and transport == "loopback":
        raise MisconfigurationException(
            f"regrid={regrid!r} moves layers between ranks, but transport='loopback' runs all "
            "stages in one process. Leave regrid out." + see("grid")
        )
    if regrid == "auto" and (in_flight is not None or schedule != "message-driven"):
        raise MisconfigurationException(
            "regrid='auto' needs the bytes of a micro-batch, which are measured for "
            "schedule='message-driven' with in_flight=None alone. Leave these two as they are by "
            "default, or give regrid a number of stages." + see("grid")
        )
    if g_inter != "auto":
        validate_regrid_stages(regrid, g_inter)


def validate_weight_gradients(
    weight_gradients: WeightGradients | None, schedule: str, recompute: int | str | None
) -> None:
    """Check that weight gradients can be made when the arguments say.

    Raises:
        MisconfigurationException: with the values, and what to give instead.
    """
    if weight_gradients is not None and weight_gradients not in SCHEDULES[schedule]:
        others = [name for name, kinds in SCHEDULES.items() if weight_gradients in kinds]
        raise MisconfigurationException(
            f"schedule={schedule!r} makes weight gradients {' or '.join(SCHEDULES[schedule])}, not "
            f"{weight_gradients!r}: choose a schedule from {others}, or leave weight_gradients out."
            + see("grid")
        )
    defers = weight_gradients or next(iter(SCHEDULES[schedule]))
    if defers != "together" and recompute is not None:
        given = f"schedule={schedule!r}" if weight_gradients is None else f"{weight_gradients=}"
        raise MisconfigurationException(
            f"{given} keeps the inputs of layers for longer than recompute={recompute!r}, which "
            "computes them again for their backward pass alone. Leave one of them out."
            + see("grid")
        )


def validate_regrid_stages(regrid: int | Literal["auto"] | None, g_inter: int) -> None:
    """Check that pipelines of ``g_inter`` stages can be shortened to ``regrid`` stages.

    Raises:
        MisconfigurationException: with the numbers that are possible.
    """
    if isinstance(regrid, int) and (g_inter % regrid or regrid == g_inter):
        shorter = divisors(g_inter)[:-1]
        choice = f"Choose from {shorter}, or 'auto'" if shorter else "Leave regrid out"
        raise MisconfigurationException(
            f"regrid={regrid} is no proper divisor of g_inter={g_inter}, so the ranks of a "
            f"pipeline cannot form pipelines of so many stages. {choice}." + see("grid")
        )


# The module


def validate_module(module: LightningModule) -> None:
    """Check that a module whose steps are pipelined leaves optimization to Lightning.

    Raises:
        MisconfigurationException: if the module optimizes by hand.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__name__} sets `automatic_optimization = False`, but in a pipeline "
            "`training_step` runs once for each micro-batch, and its code behind the layers on the "
            "last stage alone: the other stages would never call `optimizer.step()`, and the last "
            "would call it for each micro-batch. Return the loss from `training_step` instead and "
            "leave `automatic_optimization` alone; or train with g_inter=1 and microbatches=1, "
            "where replicas optimize by hand as with Lightning's ddp." + see("steps")
        )


def validate_split_module(module: LightningModule) -> None:
    """Check that backward passes of a module may leave out weight gradients.

    Raises:
        MisconfigurationException: if the module overrides ``backward``.
    """
    if overrides(module, "backward"):
        raise MisconfigurationException(
            f"{type(module).__name__} overrides `backward`, which may read gradients that "
            "weight_gradients='deferred' or 'cooldown' and schedule='zb-h1' make only after it. "
            "Leave these arguments out, or `backward`." + see("steps")
        )


def advise_on_batch_norm(module: nn.Module, microbatches: int, deferred: bool) -> None:
    """Say that norms with running statistics see micro-batches, if the module has some."""
    norms = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats
    ]
    if norms and microbatches > 1:
        name, part = norms[0]
        others = f", like {len(norms) - 1} more," if len(norms) > 1 else ""
        updates = (
            "by those of the whole batch"
            if deferred
            else "by each of them, as with gradient accumulation (not so with "
            "batch_norm='deferred')"
        )
        rank_zero_info(
            f"{name!r} ({type(part).__name__}){others} normalizes by the statistics of a "
            f"micro-batch, and updates its running statistics {updates}: expect other losses than "
            "on one process. With microbatches=1 they are those of the batch."
        )


@contextmanager
def unless_made_later(module: LightningModule) -> Iterator[None]:
    """Ignore errors about layers that the module's own hooks may yet make."""
    try:
        yield
    except MisconfigurationException:
        if not overrides(module, "configure_model", "setup"):
            raise


def validate_layers_exist(module: LightningModule) -> None:
    """Check that the layers exist before a grid is chosen for them.

    Raises:
        MisconfigurationException: if ``configure_model`` is going to make them.
    """
    if overrides(module, "configure_model") and not list(module.parameters()):
        raise MisconfigurationException(
            "g_inter='auto' looks at the layers before any rank starts, but"
            f" {type(module).__name__} makes them in `configure_model`. Give g_inter a number of"
            " stages, or call `module.configure_model()` before the Trainer does." + see("layers")
        )


def validate_regrid_module(module: nn.Module) -> None:
    """Check that a module computes the same when several replicas share a batch.

    Raises:
        MisconfigurationException: naming the layer or the metric.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise MisconfigurationException(
                f"{name!r} ({type(part).__name__}) keeps running statistics of the micro-batches "
                "that it sees. After a regrid replicas share each batch, so they would differ "
                "between them. Use a norm without, such as nn.GroupNorm or nn.LayerNorm, or leave "
                "regrid out, and resume the checkpoint with another g_inter." + see("grid")
            )
        if isinstance(part, Metric) and part.dist_sync_on_step:
            raise MisconfigurationException(
                f"The metric {name!r} ({type(part).__name__}) synchronises in every micro-batch "
                "(dist_sync_on_step=True), of which replicas that share a batch after a regrid may "
                "have different numbers. Leave dist_sync_on_step out, or regrid." + see("grid")
            )


# Callbacks


def validate_callbacks(callbacks: Sequence[Callback], transport: str = "mpi") -> None:
    """Check that no callback needs the whole module on every rank.

    Args:
        callbacks: those of a run with several stages.
        transport: "loopback" where one process has all stages.

    Raises:
        MisconfigurationException: naming the callback and what to use instead.
    """
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, ModelPruning) and transport != "loopback":
            raise MisconfigurationException(
                f"{name} masks weights of the whole module in one process, but each rank has only"
                " those of its stage. Use lightning_axosparse.EarlyBirdTicket(pruning_ratio=...),"
                " which ranks all stages' weights together and stores what is kept."
                + see("callbacks")
            )
        if isinstance(callback, BatchSizeFinder) and transport != "loopback":
            raise MisconfigurationException(
                f"{name} tries batch sizes until the memory of one process is full, which Lightning"
                " does not support on several ranks. Find the batch size by measuring: it is the"
                " micro-batch that has to fit, of which a stage holds `strategy.in_flight`."
                + see("callbacks")
            )


def validate_copied_whole(callbacks: Sequence[Callback]) -> None:
    """Check that no callback copies a module that an earlier run has left sharded.

    Raises:
        MisconfigurationException: naming the callback.
    """
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            raise MisconfigurationException(
                f"{type(callback).__name__} copies the module when `fit` begins, but an earlier run"
                " has left it sharded: this rank has only its own layers. Save a checkpoint with"
                " `trainer.save_checkpoint`, and give `fit` a new module and `ckpt_path=`."
                + see("callbacks")
            )


def validate_beside_pruning(callbacks: Sequence[Callback]) -> None:
    """Check that no callback keeps dense weights or masks of its own beside EarlyBirdTicket.

    Raises:
        MisconfigurationException: naming the callback.
    """
    for callback in callbacks:
        if isinstance(callback, (ModelPruning, StochasticWeightAveraging, WeightAveraging)):
            raise MisconfigurationException(
                f"{type(callback).__name__} keeps dense weights or masks of its own, which do not"
                " fit those that EarlyBirdTicket stores as their kept entries. Leave one of the two"
                " callbacks out." + see("callbacks")
            )


# Optimizers


def optimizers_before_setup(module: LightningModule) -> list[Optimizer]:
    """Call ``configure_optimizers`` before the run is set up, to validate what it returns.

    Returns:
        The optimizers; an empty list where the hook fails, because it needs the Trainer, the data
        or the ranks. They are validated again on the ranks.
    """
    try:
        configured = module.configure_optimizers()
    except Exception:
        return []
    found: list[Optimizer] = []
    apply_to_collection(configured, Optimizer, found.append)
    return found


def validate_optimizers(optimizers: Sequence[Optimizer], pipelines: bool, g_data: int) -> None:
    """Check that the ranks can step the optimizers, each its own parameters.

    Args:
        optimizers: what ``configure_optimizers`` returned.
        pipelines: whether steps run on micro-batches or on several stages.
        g_data: number of replicas.

    Raises:
        MisconfigurationException: if there are several in a pipeline, or one calls its closure
            again.
    """
    if len(optimizers) > 1 and pipelines:
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
        if isinstance(optimizer, LBFGS) and (pipelines or g_data > 1):
            raise MisconfigurationException(
                f"`configure_optimizers` returned {type(optimizer).__name__}, which calls the"
                " closure as often as the loss and the gradients of all parameters want, but each"
                " stage holds only some of them, and each replica has a loss of its own. Use an"
                " optimizer that takes one step a batch, such as AdamW or SGD, or train on one"
                " rank with g_inter=1 and microbatches=1." + see("optimizers")
            )


def validate_one_optimizer(optimizers: Sequence[Optimizer], feature: str) -> None:
    """Check that there is not more than one optimizer.

    Args:
        optimizers: what ``configure_optimizers`` returned.
        feature: what works with one alone, for the message.

    Raises:
        MisconfigurationException: if there are several.
    """
    if len(optimizers) > 1:
        raise MisconfigurationException(
            f"{feature} works with one optimizer, but `configure_optimizers` returned"
            f" {len(optimizers)}. Give one optimizer several parameter groups, or leave"
            f" {feature} out." + see("optimizers")
        )


def validate_parameters_known(
    optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str]
) -> None:
    """Check that optimizers have the module's parameters, and no others.

    Args:
        optimizers: those of the run.
        names: of the module's parameters.

    Raises:
        MisconfigurationException: if one has a parameter that no stage would keep.
    """
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


def validate_world_size(devices: int, num_nodes: int, job_size: int) -> None:
    """Check that MPI has started as many ranks as the Trainer wants.

    Args:
        devices: ranks a node, as the Trainer understood ``devices``.
        num_nodes: nodes, as given to the Trainer.
        job_size: ranks in this MPI job; 1 in a plain process, where the strategy starts the ranks
            itself, on this node.

    Raises:
        MisconfigurationException: if the numbers differ, or there is no job for several nodes.
    """
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
    """Check that this rank's node has no more ranks than the Trainer wants there.

    Args:
        local_rank: this rank's number on its node.
        devices: ranks a node, as the Trainer understood ``devices``.
        num_nodes: nodes, as given to the Trainer.

    Raises:
        MisconfigurationException: if it has more.
    """
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

    Raises:
        MisconfigurationException: if one was, but for ``AsyncCheckpointIO`` around none.
    """
    writes_itself = type(io) is AtomicCheckpointIO or writes_in_background(io)
    if not writes_itself or type(reading_files(io)) is not AtomicCheckpointIO:
        raise MisconfigurationException(
            f"save_distributed_checkpoint=True writes folders to which all stages write, but "
            f"{type(io).__name__} writes one file. Leave one of the two out." + see("checkpoints")
        )


def validate_local(path: Any, storage_options: Any) -> Path:
    """Check that a folder to which all stages write is in the local file system.

    Raises:
        MisconfigurationException: if it is not, or with options for a storage.
    """
    local = local_path(path)
    if local is None or storage_options is not None:
        raise MisconfigurationException(
            f"save_distributed_checkpoint=True cannot write '{path}': it needs a file system that "
            "all ranks see under one path. Give such a path, or leave save_distributed_checkpoint "
            "out." + see("checkpoints")
        )
    return local
