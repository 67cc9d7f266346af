"""Requirements: what cannot work in a pipeline is refused, with what to do instead.

Lightning itself refuses, before any rank is started, a module or Trainer of the
``pytorch_lightning`` package and a module compiled as a whole; and, when they are configured,
several optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch.optim import LBFGS, Optimizer

_STRATEGY = "AxoSparseStrategy"


def refuse_together(
    g_inter: int | Literal["auto"],
    in_flight: int | None,
    schedule: str,
    transport: str,
    balance: str | Sequence[int],
) -> None:
    """Refuse arguments of the strategy that contradict each other.

    Raises:
        MisconfigurationException: with the values, and what to give instead.
    """
    if g_inter == "auto" and transport == "loopback":
        raise MisconfigurationException(
            "g_inter='auto' divides the ranks that there are into stages and replicas, but with "
            "transport='loopback' all stages share one. Give g_inter a number."
        )
    if g_inter == "auto" and not isinstance(balance, str):
        raise MisconfigurationException(
            f"balance={list(balance)} gives the layers of {len(balance)} stages: say "
            f"g_inter={len(balance)} instead of 'auto', or leave balance out."
        )
    if not isinstance(balance, str) and len(balance) != g_inter:
        raise MisconfigurationException(
            f"balance={list(balance)} gives the layers of {len(balance)} stages, but there are "
            f"g_inter={g_inter}. Give one number of layers a stage."
        )
    if in_flight is not None and schedule != "message-driven":
        raise MisconfigurationException(
            f"in_flight={in_flight} belongs to schedule='message-driven'; {schedule!r} has its own "
            "fixed limit. Leave one of them out."
        )


def refuse_module(module: LightningModule) -> None:
    """Refuse a module that no pipeline can train.

    Raises:
        MisconfigurationException: if the module optimizes by hand.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__name__} sets `automatic_optimization = False`, but under {_STRATEGY}"
            " only the last stage reaches the code that follows the model in `training_step`: the"
            " other stages would never call `optimizer.step()`. Return the loss from"
            " `training_step` instead and leave `automatic_optimization` alone; where two"
            " optimizers were wanted, give one several parameter groups:"
            " `AdamW([{'params': a, 'lr': 1e-3}, {'params': b, 'lr': 1e-4}])`."
        )


@contextmanager
def unless_made_later(module: LightningModule) -> Iterator[None]:
    """Let a refusal wait that the module's own hooks may do away with, by making its layers."""
    try:
        yield
    except MisconfigurationException:
        if not (is_overridden("configure_model", module) or is_overridden("setup", module)):
            raise


def refuse_unmade(module: LightningModule) -> None:
    """Refuse to choose a grid for layers that are not there yet.

    Raises:
        MisconfigurationException: if ``configure_model`` is going to make them.
    """
    if is_overridden("configure_model", module) and not list(module.parameters()):
        raise MisconfigurationException(
            "g_inter='auto' looks at the layers before any rank starts, but"
            f" {type(module).__name__} makes them in `configure_model`. Give g_inter a number of"
            " stages, or call `module.configure_model()` before the Trainer does."
        )


def refuse_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks that need the whole module on every rank.

    Raises:
        MisconfigurationException: naming the callback and what to use instead.
    """
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                f"{name} would prune the layers of each stage by themselves, and its masks come on"
                " top of the weights. Use lightning_axosparse.EarlyBirdTicket(pruning_ratio=...),"
                " which ranks all stages' weights together and stores what is kept."
            )
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise MisconfigurationException(
                f"{name} keeps an averaged copy of the whole module, but a stage of a pipeline"
                " holds only its own layers. Leave the callback out, or train with g_inter=1."
            )


def refuse_beside_pruning(callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks that go on with dense weights of their own where EarlyBirdTicket prunes.

    Raises:
        MisconfigurationException: naming the callback.
    """
    for callback in callbacks:
        if isinstance(callback, (ModelPruning, StochasticWeightAveraging, WeightAveraging)):
            raise MisconfigurationException(
                f"{type(callback).__name__} keeps dense weights or masks of its own, which do not"
                " fit those that EarlyBirdTicket stores as their kept entries. Leave one of the two"
                " callbacks out."
            )


def foreseen_optimizers(module: LightningModule) -> list[Optimizer]:
    """The optimizers that a module will have, where its hook can tell before the run is set up.

    One that asks for the Trainer, the data or a rank cannot; it is asked again on the ranks.
    """
    try:
        configured = module.configure_optimizers()
    except Exception:
        return []
    found: list[Optimizer] = []
    apply_to_collection(configured, Optimizer, found.append)
    return found


def refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse what stages cannot step on their own.

    Args:
        optimizers: what ``configure_optimizers`` returned.

    Raises:
        MisconfigurationException: if there are several, or one calls its closure again.
    """
    if len(optimizers) > 1:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise MisconfigurationException(
            f"`configure_optimizers` returned {len(optimizers)} optimizers ({names}), which takes"
            f" manual optimization; {_STRATEGY} drives one. Give one optimizer several parameter"
            " groups: `AdamW([{'params': a, 'lr': 1e-3}, {'params': b, 'lr': 1e-4}])`."
        )
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException(
                f"`configure_optimizers` returned {type(optimizer).__name__}, which calls the"
                " closure as often as its line search over all parameters wants, but each stage"
                f" holds only some of them. With {_STRATEGY} use an optimizer that takes one step a"
                " batch, such as AdamW or SGD."
            )


def refuse_world(devices: int, num_nodes: int, job_size: int) -> None:
    """Refuse a Trainer that counts on another number of ranks than MPI has started.

    Args:
        devices: ranks a node, as the Trainer understood ``devices``.
        num_nodes: nodes, as given to the Trainer.
        job_size: ranks in this MPI job; 1 if the process was started plainly, and then the strategy
            starts the ranks itself.

    Raises:
        MisconfigurationException: if the numbers differ.
    """
    if job_size not in (1, devices * num_nodes):
        raise MisconfigurationException(
            f"MPI has started {job_size} ranks, but `Trainer(devices={devices},"
            f" num_nodes={num_nodes})` wants {devices} x {num_nodes} = {devices * num_nodes}. Start"
            f" `mpiexec -n {devices * num_nodes}`, or set `devices` to the ranks on each node so"
            f" that `devices * num_nodes` is {job_size}."
        )
