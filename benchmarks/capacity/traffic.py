"""Counts what the ranks of a pipeline send in a step beside activations and gradients.

    mpiexec -n 2 python -m benchmarks.capacity.traffic

A GPT with a vocabulary of 50 000 trains on batches of 8 x 512 tokens as two stages, and returns its
logits beside the loss. Prints a Markdown row for each rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.distributed.mpi.process_group import MPIProcessGroup
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.pipeline.crossing import message
from lightning_axosparse.support.torch_internals import tensors_in

COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "gather", "scatter", "barrier")


@dataclass
class Traffic:
    """What this rank has sent, or received of collectives, so far.

    Attributes:
        collectives: the bytes of each collective, with its name.
        headers: the bytes of each header of a message between stages.
    """

    collectives: list[tuple[str, int]] = field(default_factory=list)
    headers: list[int] = field(default_factory=list)

    @classmethod
    @contextmanager
    def counted(cls) -> Iterator[Traffic]:
        """Count inside the context."""
        traffic = cls()
        patched = {name: traffic._counting(name) for name in COLLECTIVES}
        with (
            patch.multiple(MPIProcessGroup, **patched),
            patch.object(message, "encode", traffic._encode),
        ):
            yield traffic

    def _counting(self, name: str) -> Callable[..., Any]:
        collective = getattr(MPIProcessGroup, name)

        def counted(group: MPIProcessGroup, *args: Any, **kwargs: Any) -> Any:
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(args))
            self.collectives.append((name, size))
            return collective(group, *args, **kwargs)

        return counted

    def _encode(
        self, tree: Any, device: torch.device, encode: Callable[..., Any] = message.encode
    ) -> Any:
        encoded = encode(tree, device)
        self.headers.append(len(encoded[0]))
        return encoded


@dataclass(frozen=True)
class StepTraffic:
    """What one step sent beside the values of activations and gradients.

    Attributes:
        collectives: number of collectives, those of gradients included.
        collective_bytes: their bytes without the gradients.
        messages: number of messages between stages.
        header_bytes: the bytes of their headers: pickled, so numbers of other sizes change them.
    """

    collectives: int
    collective_bytes: int
    messages: int
    header_bytes: int


class StepCounter(Callback):
    """Counts the traffic of steps, but not of the first four, which measure memory and time.

    Args:
        traffic: that of this rank.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.steps: list[StepTraffic] = []
        self._traffic = traffic

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        """Count what was sent since the last step ended."""
        sent, headers = self._traffic.collectives, self._traffic.headers
        total = sum(size for _, size in sent) - trainer.strategy.reduced_bytes
        if module.global_step > 4:
            self.steps.append(StepTraffic(len(sent), total, len(headers), sum(headers)))
        sent.clear()
        headers.clear()


class ReturnsLogits(GPT):
    """Returns its logits beside the loss, as modules do whose callbacks look at predictions."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        """Compute and log the loss of a batch."""
        tokens, next_tokens = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())
        self.log("train_loss", loss)
        return {"loss": loss, "logits": logits}


def step_traffic(vocabulary: int, samples: int, context: int, stages: int) -> StepTraffic:
    """What the last of a few steps sends on this rank."""
    torch.manual_seed(0)
    tokens = torch.randint(vocabulary, (6 * samples, context + 1))
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), samples)
    with Traffic.counted() as traffic:
        counter = StepCounter(traffic)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=stages,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[counter],
            strategy=AxoSparseStrategy(stages, samples, "model", loss="mean"),
        )
        trainer.fit(
            ReturnsLogits(width=32, depth=2, heads=2, context=context, vocabulary=vocabulary), data
        )
    return counter.steps[-1]


def main() -> None:
    """Print the row of this rank."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--vocabulary", type=int, default=50_000)
    arguments.add_argument("--samples", type=int, default=8)
    arguments.add_argument("--context", type=int, default=512)
    options = arguments.parse_args()
    step = step_traffic(options.vocabulary, options.samples, options.context, 2)
    print(
        f"| {torch.distributed.get_rank()} | {step.collectives} | {step.collective_bytes} "
        f"| {step.messages} | {step.header_bytes} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
