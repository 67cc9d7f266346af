"""Counts the bytes that the savings of TED leave out: see the table in the README.

    python -m benchmarks.experts.traffic

Four ranks: two replicas of two ranks that share layers, experts spread over both replicas
(``tensor_parallel=2, expert_parallel=2, recompute=1``). A saving is switched off by replacing what
does it. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

from benchmarks.experts.step import Expert, Layer, Training
from lightning_axosparse import AxoSparseStrategy, ExpertParallel, TensorParallel
from lightning_axosparse.distributed.collective_results import CollectiveResults, collective
from lightning_axosparse.distributed.mpi import process_group
from lightning_axosparse.distributed.token_exchange import TokenExchange
from lightning_axosparse.strategy import expert_parallel

ROWS = {
    "neither": (False, False),
    "duplicate token dropping": (True, False),
    "communication-aware checkpointing": (False, True),
    "both, as it is": (True, True),
}


class Both(Training):
    """Layers with an MLP that is split, and experts that are spread."""

    def __init__(self, width: int, inner: int, experts: int, depth: int) -> None:
        super().__init__()
        pairs = (
            nn.Sequential(Expert(width, inner), Layer(width, inner, experts)) for _ in range(depth)
        )
        self.layers = nn.Sequential(*pairs)


@dataclass
class Traffic:
    """What this rank has sent so far, and what it did not have to send.

    Attributes:
        tokens: bytes of tokens and their gradients sent to other ranks.
        kept: bytes of results of collectives that the second pass of layers did not send again.
    """

    tokens: int = 0
    kept: int = 0
    _ran: bool = False

    @classmethod
    @contextmanager
    def counted(cls) -> Iterator[Traffic]:
        """Count inside the context."""
        traffic, exchange = cls(), TokenExchange.exchange

        def counted(self: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
            taken = exchange(self, rows, sent, received)
            if traffic._ran and len(rows):
                traffic.tokens += (sum(sent) - sent[self._group.rank()]) * rows[0].nbytes
            return taken

        with (
            patch.object(process_group, "collective", traffic._collective),
            patch.object(TokenExchange, "exchange", counted),
        ):
            yield traffic

    def _collective(self, start: Callable[[], Any], outputs: Sequence[Tensor]) -> Any:
        def run() -> Any:
            self._ran = True
            return start()

        self._ran = False
        work = collective(run, outputs)
        if not self._ran:
            self.kept += sum(output.nbytes for output in outputs)
        return work


class Counts(L.Callback):
    """Keeps what rank 0 has counted in all steps but the first, in MB a step."""

    def on_train_start(self, *_: Any) -> None:
        self.counting = ExitStack()
        self.traffic = self.counting.enter_context(Traffic.counted())

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.last = self.traffic.tokens, self.traffic.kept
        if trainer.global_step == 1:
            self.first = self.last

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.counting.close()
        del self.counting  # which cannot be sent back
        steps = trainer.global_step - 1
        self.found = [(b - a) / steps / 1e6 for a, b in zip(self.first, self.last, strict=True)]


class SavesOnlySome(L.Callback):
    """Switches savings off on the ranks, where callbacks are set up before layers are."""

    def __init__(self, drops: bool, keeps: bool) -> None:
        self.drops, self.keeps = drops, keeps

    def setup(self, *_: Any, **__: Any) -> None:
        if not self.drops:
            exchange = expert_parallel.TokenExchange
            expert_parallel.TokenExchange = lambda group, experts, _: exchange(group, experts)  # type: ignore[assignment, misc]
        if not self.keeps:
            CollectiveResults.recorded = CollectiveResults.replayed = lambda _: nullcontext()  # type: ignore[method-assign, assignment, return-value]


def count(drops: bool, keeps: bool, options: argparse.Namespace) -> list[float]:
    """Train some steps on four ranks, and return the bytes that rank 0 counts in one."""
    module = Both(options.width, options.inner, options.experts, options.depth)
    plan = {"layers.*.0.up": ColwiseParallel(), "layers.*.0.down": RowwiseParallel()}
    strategy = AxoSparseStrategy(
        microbatches=1,
        tensor_parallel=TensorParallel(2, plan),
        expert_parallel=ExpertParallel(2, "layers.*.1.experts"),
        pipeline="layers",
        recompute=1,
    )
    counts = Counts()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        max_steps=3,
        callbacks=[SavesOnlySome(drops, keeps), counts],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = list(torch.randn(6, options.tokens, options.width))
    trainer.fit(module, DataLoader(data, batch_size=1))  # type: ignore[arg-type]
    return counts.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("width", 512), ("inner", 512), ("experts", 8), ("depth", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=512, help="of each replica's batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| saves | tokens sent, MB | results not sent again, MB |\n| --- | --: | --: |")
    for name, saves in ROWS.items():
        L.seed_everything(0, verbose=False)
        sent, kept = count(*saves, options)
        print(f"| {name} | {sent:.1f} | {kept:.1f} |")


if __name__ == "__main__":
    main()
