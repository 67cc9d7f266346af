"""Message-driven pipeline parallelism and early-bird sparse training for PyTorch Lightning."""

# ruff: noqa: E402
from lightning_axosparse.distributed.mpi.start.slurm import announce_unmanaged_tasks

announce_unmanaged_tasks()  # before the imports that take long

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

if TYPE_CHECKING:
    from lightning_axosparse.callbacks.early_bird import EarlyBirdTicket
    from lightning_axosparse.callbacks.early_bird_channels import EarlyBirdChannels
    from lightning_axosparse.callbacks.learning_rate_factor import LearningRateFactor
    from lightning_axosparse.callbacks.timeline import PipelineTimeline
    from lightning_axosparse.checkpoint.compact_io import CompactCheckpointIO
    from lightning_axosparse.checkpoint.load import load_sparse
    from lightning_axosparse.checkpoint.safetensors import save_safetensors
    from lightning_axosparse.pruning import ChannelTicket, Ticket
    from lightning_axosparse.sparse import densify, sparsify
    from lightning_axosparse.strategy.launcher.launcher import RankFailedError
    from lightning_axosparse.strategy.strategy import AxoSparseStrategy
    from lightning_axosparse.support.corrupt_file import CorruptFileError

__version__ = "0.1.0"
__all__ = [
    "AxoSparseStrategy",
    "ChannelTicket",
    "CompactCheckpointIO",
    "CorruptFileError",
    "EarlyBirdChannels",
    "EarlyBirdTicket",
    "LearningRateFactor",
    "PipelineTimeline",
    "RankFailedError",
    "Ticket",
    "densify",
    "load_sparse",
    "save_safetensors",
    "sparsify",
]

# Imported when they are asked for: sparse storage alone needs no strategy.
_MODULES = {
    "AxoSparseStrategy": "strategy.strategy",
    "ChannelTicket": "pruning",
    "CompactCheckpointIO": "checkpoint.compact_io",
    "CorruptFileError": "support.corrupt_file",
    "EarlyBirdChannels": "callbacks.early_bird_channels",
    "EarlyBirdTicket": "callbacks.early_bird",
    "LearningRateFactor": "callbacks.learning_rate_factor",
    "PipelineTimeline": "callbacks.timeline",
    "RankFailedError": "strategy.launcher.launcher",
    "Ticket": "pruning",
    "densify": "sparse",
    "load_sparse": "checkpoint.load",
    "save_safetensors": "checkpoint.safetensors",
    "sparsify": "sparse",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def _strategy(**arguments: Any) -> Any:
    """What the Trainer calls for ``strategy="axosparse"``."""
    return __getattr__("AxoSparseStrategy")(**arguments)


StrategyRegistry.register(
    "axosparse",
    _strategy,
    description="message-driven pipeline x data parallelism over MPI",
    override=True,
)
