"""Compares the loss of a whole batch with what the losses of its micro-batches combine to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.engine import Pipeline
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.outputs import merge
from lightning_axosparse.pipeline.stage_step import TrainingBatch, loss_of
from lightning_axosparse.support.torch_internals import tree_map
from lightning_axosparse.support.troubleshooting import see


def check_loss(
    pipeline: Pipeline, training: TrainingBatch, batch: Any, module: nn.Module, tolerance: float
) -> None:
    """Compare the loss of a batch as a whole with that of its micro-batches.

    The module computes in evaluation mode, so that dropout makes no difference; only the layers of
    the last stage compute, on what the previous stage has sent.

    Args:
        pipeline: the stages of this process, with the last.
        training: the batch as it was trained on, with what the last stage received.
        batch: the whole batch.
        module: the user's module.
        tolerance: largest relative difference.

    Raises:
        MisconfigurationException: if the losses differ by more.
    """
    parts, received = training.microbatches, training.received
    assert received is not None
    sizes = [part.size for part in parts]
    whole = replace(training, microbatches=[MicroBatch(batch, sum(sizes), 1.0)])
    with torch.no_grad(), evaluating(module):
        outputs = pipeline.repeat_last_stage(whole, [joined(received, sizes)])
        theirs = float(loss_of(merge(outputs, [1.0])))
        outputs = pipeline.repeat_last_stage(training, received)
        ours = float(loss_of(merge(outputs, [part.weight for part in parts], sizes)))
    if abs(ours - theirs) > tolerance * max(abs(theirs), 1e-6):
        raise MisconfigurationException(
            f"The loss of a whole batch is {theirs:.6g}, but those of its {len(parts)} "
            f"micro-batches combine to {ours:.6g}: it is no mean, or sum, over samples, as losses "
            "that compare samples with each other are not. AxoSparseStrategy(microbatches=1) is "
            "exact; microbatch_loss= and microbatch_weight= say how losses combine; "
            "check_loss=False accepts the difference." + see("losses")
        )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Have a module and its submodules in evaluation mode inside the context."""
    modes = {submodule: submodule.training for submodule in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes.items():
            submodule.training = training


def joined(trees: Sequence[Any], sizes: Sequence[int]) -> Any:
    """What would have been received for the whole batch.

    Args:
        trees: pytrees of one structure, one a micro-batch.
        sizes: samples in each micro-batch.

    Returns:
        A tree with tensors joined along the dimension that has the samples, if there is one; any
        other leaf is that of the first micro-batch.
    """

    def join(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, Tensor):
            return first
        for dim in range(first.dim()):
            if all(leaf.shape[dim] == size for leaf, size in zip(leaves, sizes, strict=True)):
                return torch.cat([leaf.detach() for leaf in leaves], dim)
        return first

    return tree_map(join, *trees)
