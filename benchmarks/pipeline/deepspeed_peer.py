"""DeepSpeed's pipeline engine over gloo, as a peer where it is installed."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn

IS_INSTALLED = find_spec("deepspeed") is not None


class DeepSpeed:
    """The stage of this rank in DeepSpeed's 1F1B, without the optimizer's step.

    ``torch.distributed`` has to be initialized. The first one compiles DeepSpeed's operators for
    shared memory, which takes minutes.

    Args:
        blocks: the layers of all stages, as many for each.
        microbatches: micro-batches of a step.
        samples: of a micro-batch.
        loss: of an output and a target.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], microbatches: int, samples: int, loss: Any
    ) -> None:
        world = MPI.COMM_WORLD
        here = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size}
        os.environ.update({name: str(value) for name, value in here.items()})
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        layers = copy.deepcopy(list(blocks))
        count = len(layers) // world.size
        self.blocks = nn.ModuleList(layers[world.rank * count : (world.rank + 1) * count])
        module = PipelineModule(
            layers, num_stages=world.size, loss_fn=loss, partition_method="uniform"
        )
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=torch.optim.SGD(self.blocks.parameters()),
            config={
                "train_batch_size": samples * microbatches,
                "train_micro_batch_size_per_gpu": samples,
                "gradient_accumulation_steps": microbatches,
                "steps_per_print": 2**31,
            },
        )
        self._engine._take_model_step = self._count_step
        self._microbatches = microbatches

    def __call__(self, x: Tensor, y: Tensor) -> None:
        parts = zip(x.chunk(self._microbatches), y.chunk(self._microbatches), strict=True)
        self._engine.train_batch(parts)

    def _count_step(self, *arguments: Any) -> None:
        """Leave the optimizer out, as the other peers have none."""
        self._engine.global_steps += 1
