"""Trains several jobs of one task at once on a GPU, with stacked weights.

    python -m benchmarks.perplexity.together PHASE ... [--folder FOLDER]

A network of this study leaves most of a GPU idle, and its steps take the time that starting kernels
takes. A step of all jobs starts as many, and is one CUDA graph. So give one process all jobs:
several processes take turns on the GPU. Weights, masks, rates and the order
of the windows are those of ``training.py``, whose pruner changes views of the stacked tensors, so
results differ from those of one job by rounding: ``tests/benchmarks/test_perplexity.py``.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.timing import cuda_graph
from benchmarks.perplexity.job import Job, bytes_of_state
from benchmarks.perplexity.plan import PHASES, jobs
from benchmarks.perplexity.results import Results
from benchmarks.perplexity.training import Training
from benchmarks.perplexity.updates import changes_updates
from lightning_axosparse.examples.data import EpochShuffle, Windows

BETAS, EPSILON = (0.9, 0.95), 1e-8
EVALUATED = 128
"""Windows of a batch without gradients."""


class Together:
    """Runs of one task whose weights are the rows of one tensor.

    Args:
        jobs: of one task, with arms that prune once or gradually and need no dropout.
        folder: of text, for tasks that need one.
        device: what they train on.

    Raises:
        ValueError: for another arm.
    """

    def __init__(self, jobs: Sequence[Job], folder: Path | None, device: torch.device) -> None:
        for arm in (job.arm for job in jobs):
            simple = arm.method in ("once", "gradual") and arm.score != "slow"
            simple = simple and not changes_updates(arm)
            if not simple or arm.drop or arm.distill or arm.dropout or arm.decay is not None:
                raise ValueError(f"{arm.label} changes more between steps: run it by itself.")
        self._task = jobs[0].task
        self._texts = self._task.texts(folder)
        self._device = device
        self.runs = [Training(self._task, job.arm, job.seed, self._texts) for job in jobs]
        self._model = self._task.model(0.0)
        self._shapes = {name: p.shape for name, p in self._model.named_parameters()}
        size = sum(shape.numel() for shape in self._shapes.values())
        self._weights = torch.empty(len(jobs), size, device=device)
        self._means, self._squares = (torch.zeros_like(self._weights) for _ in range(2))
        self._kept = torch.ones_like(self._weights)
        self._decay = torch.zeros_like(self._weights)
        for row, run in enumerate(self.runs):
            self._adopt(row, run)
        steps = range(self._task.all_steps)
        rates = [[run.rate(step) for run in self.runs] for step in steps]
        self._rates = torch.tensor(rates, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._order = torch.zeros(
            len(jobs), self._task.steps * self._task.batch_size, dtype=torch.int64, device=device
        )

    def train(self) -> None:
        """Train all steps."""
        initial, step_all = self._weights.clone(), self._train_one
        if self._device.type == "cuda":
            step_all = cuda_graph(self._train_one)
            self._weights.copy_(initial)  # Recording has trained some steps.
            for tensor in (self._means, self._squares, self._step):
                tensor.zero_()
        for step in range(self._task.all_steps):
            if step % self._task.steps == 0:
                self._shuffle(step // self._task.steps)
            for row, run in enumerate(self.runs):
                held = run.pruner.masks
                run.pruner.begin_step(step)
                if run.pruner.masks is not held:
                    self._mask(row, run)
            step_all()

    @torch.no_grad()
    def perplexities(self, windows: Windows) -> list[float]:
        """Return the perplexity of a text for each run."""
        total = torch.zeros(len(self.runs), dtype=torch.float64, device=self._device)
        for first in range(0, len(windows), EVALUATED):
            numbers = torch.arange(first, min(first + EVALUATED, len(windows)))
            tokens = self._tokens(windows, numbers.to(self._device).expand(len(self.runs), -1))
            total += self._losses(self._parameters(), tokens).double() * len(numbers)
        return (total / len(windows)).exp().tolist()

    def _adopt(self, row: int, run: Training) -> None:
        """Let the parameters of a run, and its optimizer's state, be views of the rows."""
        for name, weight, mean, square, decay in zip(
            self._shapes,
            *map(self._views, (self._weights, self._means, self._squares, self._decay)),
            strict=True,
        ):
            parameter = run.model.get_parameter(name)
            weight[row].copy_(parameter.detach())
            parameter.data = weight[row]
            run.optimizer.state[parameter] = {"exp_avg": mean[row], "exp_avg_sq": square[row]}
            decay[row].fill_(run.arm.weight_decay if parameter.dim() > 1 else 0.0)

    def _views(self, stacked: Tensor) -> list[Tensor]:
        """Return the part of each parameter in a stacked tensor, with the parameter's shape."""
        parts = stacked.split([shape.numel() for shape in self._shapes.values()], 1)
        shapes = self._shapes.values()
        return [part.view(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]

    def _parameters(self) -> dict[str, Tensor]:
        return dict(zip(self._shapes, self._views(self._weights), strict=True))

    def _mask(self, row: int, run: Training) -> None:
        assert run.pruner.masks is not None
        for name, kept in zip(self._shapes, self._views(self._kept), strict=True):
            if name in run.pruner.masks:
                kept[row].copy_(run.pruner.masks[name])

    def _shuffle(self, epoch: int) -> None:
        """Write down the windows of an epoch, in each run's order."""
        for row, run in enumerate(self.runs):
            order = EpochShuffle(len(self._texts.train), run.seed)
            order.set_epoch(epoch)
            self._order[row] = torch.tensor(list(order)[: self._order.shape[1]])

    def _tokens(self, windows: Windows, numbers: Tensor) -> Tensor:
        """Return the bytes of some windows and the next one: ``(..., context + 1)``."""
        start = numbers * windows.available // windows.size * windows.context
        within = torch.arange(windows.context + 1, device=self._device)
        return self._on_device(windows)[start[..., None] + within].long()

    def _on_device(self, windows: Windows) -> Tensor:
        if windows.text.device.type != self._device.type:
            windows.text = windows.text.to(self._device)
        return windows.text

    def _losses(self, parameters: dict[str, Tensor], tokens: Tensor) -> Tensor:
        def loss(parameters: dict[str, Tensor], tokens: Tensor) -> Tensor:
            logits = functional_call(self._model, parameters, (tokens[:, :-1],))
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

        with sdpa_kernel(SDPBackend.MATH):  # the only one of which many run as one
            losses: Tensor = vmap(loss)(parameters, tokens)
        return losses

    def _train_one(self) -> None:
        """Train one step; all that changes from step to step is on the device."""
        size = self._task.batch_size
        place = self._step % self._task.steps * size + torch.arange(size, device=self._device)
        tokens = self._tokens(self._texts.train, self._order.index_select(1, place))
        parameters = {n: p.detach().requires_grad_() for n, p in self._parameters().items()}
        losses = self._losses(parameters, tokens)
        gradients = torch.autograd.grad(losses.sum(), list(parameters.values()))
        with torch.no_grad():
            gradient = torch.cat([each.flatten(1) for each in gradients], 1).mul_(self._kept)
            norm = gradient.norm(dim=1, keepdim=True)
            gradient *= (self._task.clip / (norm + 1e-6)).clamp(max=1.0)
            self._update(gradient)

    def _update(self, gradient: Tensor) -> None:
        """Do what AdamW does."""
        rate = self._rates.index_select(0, self._step.view(1)).t()
        self._step += 1
        step = self._step.to(torch.float64)
        unbiased = [(1 - beta**step).to(gradient.dtype) for beta in BETAS]
        self._weights.mul_(1 - rate * self._decay)
        self._means.lerp_(gradient, 1 - BETAS[0])
        self._squares.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        root = (self._squares / unbiased[1]).sqrt_().add_(EPSILON)
        self._weights.sub_(rate / unbiased[0] * self._means / root)


def run_all(chosen: Sequence[Job], results: Results, folder: Path | None) -> None:
    """Run jobs of one task that were not finished, and add their lines."""
    done = results.lines()
    chosen = [job for job in chosen if job not in done]
    if not chosen:
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    begun = time.perf_counter()
    together = Together(chosen, folder, device)
    together.train()
    texts = chosen[0].task.texts(folder)
    found = zip(
        chosen,
        together.runs,
        together.perplexities(texts.validation),
        together.perplexities(texts.test),
        strict=True,
    )
    for job, run, validation, test in found:
        masks = run.pruner.masks and {n: m.cpu() for n, m in run.pruner.masks.items()}
        densities = {n: float(m.float().mean()) for n, m in (masks or {}).items()}
        line: dict[str, Any] = {
            "validation": round(validation, 4),
            "test": round(test, 4),
            "tokens_a_parameter": round(job.task.tokens / run.parameters, 2),
            "state_bytes": bytes_of_state(run.model.cpu(), masks),
            "densities": {name: round(density, 4) for name, density in densities.items()},
            "seconds": round((time.perf_counter() - begun) / len(chosen)),
            "torch": f"{torch.__version__}, {name}",
        }
        results.add(job, line)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("phases", nargs="+", metavar="PHASE", help=" or ".join(PHASES))
    arguments.add_argument("--folder", type=Path, help="of text, for the tasks that need one")
    arguments.add_argument("--results", type=Path, default=Path(__file__).parent / "results.jsonl")
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    for phase in options.phases:
        for _, found in groupby(jobs(phase), lambda job: job.task):
            run_all(list(found), Results(options.results), options.folder)


if __name__ == "__main__":
    main()
