"""Message-driven pipeline parallelism and early-bird sparse training for PyTorch Lightning."""

import lightning_axosparse.support.lightning_names  # noqa: F401  before Lightning is imported

# isort: split
from lightning.pytorch.strategies import StrategyRegistry

from lightning_axosparse.callbacks.early_bird import EarlyBirdTicket
from lightning_axosparse.callbacks.early_bird_channels import EarlyBirdChannels
from lightning_axosparse.callbacks.gradual_pruning import GradualPruning
from lightning_axosparse.callbacks.timeline import PipelineTimeline
from lightning_axosparse.checkpoint.load import load_sparse
from lightning_axosparse.checkpoint.safetensors import save_safetensors
from lightning_axosparse.pruning import ChannelTicket, Ticket
from lightning_axosparse.sparse import densify, sparsify
from lightning_axosparse.strategy.config import ExpertParallel, TensorParallel
from lightning_axosparse.strategy.launcher.failure import RankFailedError
from lightning_axosparse.strategy.launcher.fork_server import close_ranks
from lightning_axosparse.strategy.strategy import AxoSparseStrategy
from lightning_axosparse.support.files import CorruptFileError

__version__ = "0.1.0"
__all__ = [
    "AxoSparseStrategy",
    "ChannelTicket",
    "CorruptFileError",
    "EarlyBirdChannels",
    "EarlyBirdTicket",
    "ExpertParallel",
    "GradualPruning",
    "PipelineTimeline",
    "RankFailedError",
    "TensorParallel",
    "Ticket",
    "close_ranks",
    "densify",
    "load_sparse",
    "save_safetensors",
    "sparsify",
]

AxoSparseStrategy.register_strategies(StrategyRegistry)
