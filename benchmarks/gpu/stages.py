"""Trains with two ranks that share one GPU, in each way to divide a model or a batch.

    python -m benchmarks.gpu.stages              # on a CUDA device
    python -m benchmarks.gpu.stages --tiny       # on CPU: does it all work?

Prints a Markdown table: the largest difference of a loss from that of one process, the milliseconds
of a step as a fraction of those of one process (both ranks compute on the same GPU, so 1 is the
best), and the bytes that a step copies between GPU and host on both ranks. The exit status says
whether all losses are within their bounds. NCCL connects ranks that share a GPU only if it takes
them for ranks of several hosts, and newer versions do not: a row that fails says why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import lightning as L
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.gpu.timing import finish
from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, TensorParallel
from lightning_axosparse.examples.gpt import GPT

STEPS, SAMPLES, MICROBATCHES = 12, 8, 4
PROFILED, FIRST_TIMED = 5, 6
COPIES = ("Memcpy HtoD", "Memcpy DtoH")
PLAN = {"model.*.mlp.0": ColwiseParallel(), "model.*.mlp.2": RowwiseParallel()}
BOUND = 1e-4

ROWS: dict[str, dict[str, Any]] = {
    "one process": {},
    "two stages": {"g_inter": 2},
    "two stages, by parts": {"g_inter": 2, "loss": "mean"},
    "two replicas": {},
    "two replicas, shard_optimizer": {"shard_optimizer": True},
    "tensor_parallel": {"tensor_parallel": TensorParallel(2, PLAN)},
}


class Size(NamedTuple):
    """A GPT, and the device that it trains on."""

    width: int
    depth: int
    length: int
    device: str


class Data(L.LightningDataModule):
    """Random tokens, in the same batches for any number of replicas."""

    def __init__(self, length: int) -> None:
        super().__init__()
        tokens = torch.randint(256, (SAMPLES * STEPS, length + 1))
        self._tokens = TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        share: dict[str, Any] = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {})
        sampler = DistributedSampler[Any](self._tokens, **share, shuffle=False)
        return DataLoader(self._tokens, SAMPLES // sampler.num_replicas, sampler=sampler)


class Measured(NamedTuple):
    """What the ranks of a run measured.

    Attributes:
        losses: of the batches, averaged over replicas.
        seconds: of a step, of the slowest rank.
        copied: bytes between GPU and host in a step, on all ranks.
    """

    losses: list[float]
    seconds: float
    copied: int


class Recorder(L.Callback):
    """Writes the losses, the seconds of steps and the copied bytes of one step of a rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._losses, self._seconds = list[float](), list[float]()
        self._copied = 0
        self._profiler: Any = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        os.environ["NCCL_HOSTID"] = f"rank {trainer.global_rank}"

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == PROFILED and module.device.type == "cuda":
            self._profiler = profile(activities=[ProfilerActivity.CUDA])
            self._profiler.start()
        finish(module.device)
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        finish(module.device)
        if index >= FIRST_TIMED:
            self._seconds.append(time.perf_counter() - self._start)
        if index == PROFILED and module.device.type == "cuda":
            self._profiler.stop()
            self._copied = self._copied_bytes(trainer.global_rank)
        self._losses.append(float(outputs["loss"]))

    def _copied_bytes(self, rank: int) -> int:
        trace = self._folder / f"trace{rank}.json"
        self._profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        copies = [each for each in events if each.get("name", "").startswith(COPIES)]
        return sum(each["args"]["bytes"] for each in copies)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        found = self._losses, median(self._seconds), self._copied
        (self._folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


def measure(ranks: int, arguments: dict[str, Any], size: Size, *callbacks: L.Callback) -> Measured:
    """Train so many ranks on one device."""
    L.seed_everything(0, verbose=False)
    strategy = AxoSparseStrategy(**{"microbatches": MICROBATCHES, **arguments})
    devices: dict[str, Any] = {"accelerator": size.device, "devices": ranks}
    if size.device == "cuda":
        strategy.parallel_devices = [torch.device("cuda", 0)] * ranks
        devices = {"accelerator": "cuda"}
    with tempfile.TemporaryDirectory() as name:
        trainer = L.Trainer(
            **devices,
            strategy=strategy,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[Recorder(Path(name)), *callbacks],
        )
        model = GPT(width=size.width, depth=size.depth, heads=4, context=size.length)
        trainer.fit(model, Data(size.length))
        files = sorted(Path(name).glob("rank*.json"))
        found = [json.loads(file.read_text()) for file in files]
    losses = [sum(each) / len(found) for each in zip(*(row[0] for row in found), strict=True)]
    return Measured(losses, max(row[1] for row in found), sum(row[2] for row in found))


def print_rows(size: Size, drawn: bool) -> bool:
    """Print the rows of dense or of pruned weights; return whether all losses are in the bound."""
    pruned, all_within = "80%" if drawn else "0%", True
    alone: Measured | None = None
    for name, arguments in ROWS.items():
        tickets = [EarlyBirdTicket(0.8, every=1, draw_by=2)] if drawn else []
        try:
            found = measure(1 if alone is None else 2, arguments, size, *tickets)
        except Exception as error:
            print(f"| {name} | {pruned} | failed: {str(error).splitlines()[:1]} | | |", flush=True)
            all_within = False
            continue
        alone = alone or found
        pairs = zip(found.losses, alone.losses, strict=True)
        difference = max(abs(one - other) for one, other in pairs)
        all_within = all_within and difference <= BOUND
        cells = f"{difference:.1e} | {found.seconds / alone.seconds:.2f} | {found.copied:,}"
        print(f"| {name} | {pruned} | {cells} |", flush=True)
    return all_within


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tiny", action="store_true", help="a small model on CPU")
    options = arguments.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("No CUDA device here: run with --tiny to try the script on CPU.")
    warnings.simplefilter("ignore")
    size = Size(32, 4, 16, "cpu") if options.tiny else Size(1024, 12, 512, "cuda")
    print("| ranks | pruned | loss, difference | step / one process | bytes over PCIe |")
    print("| --- | --: | --: | --: | --: |")
    within = [print_rows(size, drawn) for drawn in (False, True)]
    sys.exit(not all(within))


if __name__ == "__main__":
    main()
