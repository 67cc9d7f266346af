"""Message-driven pipeline parallelism and early-bird sparse training for PyTorch Lightning."""

# ruff: noqa: E402
from lightning_axosparse.mpi.slurm import announce_unmanaged_tasks

announce_unmanaged_tasks()  # before the imports that take long

from lightning.pytorch.strategies import StrategyRegistry

from lightning_axosparse.callbacks.early_bird import EarlyBirdTicket
from lightning_axosparse.callbacks.timeline import PipelineTimeline
from lightning_axosparse.compact import CompactCheckpointIO
from lightning_axosparse.corrupt import CorruptFileError
from lightning_axosparse.files import load_sparse
from lightning_axosparse.pruning import Ticket
from lightning_axosparse.sparse import densify, save_safetensors, sparsify
from lightning_axosparse.strategy import AxoSparseStrategy

__version__ = "0.1.0"
__all__ = [
    "AxoSparseStrategy",
    "CompactCheckpointIO",
    "CorruptFileError",
    "EarlyBirdTicket",
    "PipelineTimeline",
    "Ticket",
    "densify",
    "load_sparse",
    "save_safetensors",
    "sparsify",
]

AxoSparseStrategy.register_strategies(StrategyRegistry)
