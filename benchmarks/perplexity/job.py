"""One job: a task, an arm and a seed; and the numbers that it measures."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.perplexity.arms import Arm
from benchmarks.perplexity.pruner import fisher
from benchmarks.perplexity.tasks import Task
from benchmarks.perplexity.training import Training
from lightning_axosparse import sparsify
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.pruning.masks import MaskBits, mask_distance
from lightning_axosparse.pruning.rule import MaskRule
from lightning_axosparse.sparse.module.parameters import state_bytes

SHARED = (0.0625, 0.1, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
"""The shares of a dense run whose states are kept, for arms that begin as it does."""

PARTS = 32
"""A job that is stopped goes on at one of so many places; before the draw masks are compared."""

WINDOW, COMPARED = 5, 0.8
"""So many masks are compared, of this pruning ratio."""


@dataclass(frozen=True)
class Job:
    """A task, an arm and a seed: what a line of the results is found by."""

    task: Task
    arm: Arm
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        return {"task": asdict(self.task), "arm": asdict(self.arm), "seed": self.seed}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Job:
        """Return the job of a line; settings that the line lacks have their defaults."""
        return cls(Task(**line["task"]), Arm(**line["arm"]), line["seed"])

    def run(self, folder: Path | None, states: Path) -> dict[str, Any]:
        """Train, and return what was measured.

        Args:
            folder: of text, for tasks that need one.
            states: where states are kept, of this job and of the dense beginnings of all.
        """
        training = Training(self.task, self.arm, self.seed, self.task.texts(folder))
        own = states / f"{digest(self.settings)}.pt"
        found = [own, *(self._shared(states, step) for step in reversed(self._shared_steps))]
        state = next((torch.load(file) for file in found if file.exists()), {})
        if state:
            training.load_state_dict(state["training"])
        measured = state.get("measured", {"seconds": 0.0, "distances": {}, "window": []})
        self._train(training, measured, own, states)
        densities = {n: float(m.float().mean()) for n, m in (training.pruner.masks or {}).items()}
        result = {
            "validation": round(training.perplexity(training.texts.validation), 4),
            "test": round(training.perplexity(training.texts.test), 4),
            "tokens_a_parameter": round(self.task.tokens / training.parameters, 2),
            "state_bytes": bytes_of_state(training.model, training.pruner.masks),
            "densities": {name: round(density, 4) for name, density in densities.items()},
            **({} if self.arm.changes else {"distances": measured["distances"]}),
            "seconds": round(measured["seconds"]),
            "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        }
        own.unlink(missing_ok=True)
        return result

    def _train(self, training: Training, measured: dict[str, Any], own: Path, states: Path) -> None:
        """Train to the end; keep the state now and then, and where others begin."""
        part = max(1, self.task.all_steps // PARTS)
        shared = self._shared_steps
        begun = time.process_time()
        while training.step < self.task.all_steps:
            training.advance()
            step = training.step
            if step % part == 0 and step <= training.pruner.begin:
                self._compare(training, measured)
            if step % part == 0 or step in shared:
                now = time.process_time()
                measured["seconds"] += now - begun
                begun = now
                state = {"training": training.state_dict(), "measured": measured}
                save(state, own)
                if step in shared:
                    save(state, self._shared(states, step))

    def _compare(self, training: Training, measured: dict[str, Any]) -> None:
        """Measure the largest distance of new masks to those of the window, as the callback."""
        rule = MaskRule(COMPARED, fisher, floor=0.05)
        masks = rule.masks(training.model, [training.optimizer])
        window = measured["window"]
        if len(window) == WINDOW - 1:
            new = MaskBits(masks)
            distances = [
                mask_distance("relative", new, MaskBits(old), set(masks)) for old in window
            ]
            measured["distances"][training.step] = round(max(distances), 4)
        measured["window"] = [*window, masks][1 - WINDOW :]

    @property
    def _shared_steps(self) -> list[int]:
        """The optimizer steps up to which this arm is dense, and other arms are as well."""
        begin = self.arm.begin if self.arm.changes else 1.0
        steps = self.task.all_steps
        return [round(share * steps) for share in SHARED if share <= begin]

    def _shared(self, states: Path, step: int) -> Path:
        """The file of the state of a dense run that begins as this one."""
        dense = Job(self.task, self.arm.beginning, self.seed)
        return states / f"{digest(dense.settings)}-{step}.pt"


def digest(settings: Mapping[str, Any]) -> str:
    """Return a name for a file, of settings."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def save(state: Any, file: Path) -> None:
    """Write a state so that the file is whole or absent."""
    part = file.with_suffix(f".{os.getpid()}")
    torch.save(state, part)
    part.replace(file)


def bytes_of_state(model: GPT, masks: Mapping[str, torch.Tensor] | None) -> int:
    """Return the bytes of weights, indices, gradients and AdamW's moments.

    Args:
        model: dense; its weights are stored sparse in the end if there are masks.
        masks: what is kept; None: everything.
    """
    if masks is not None:
        sparsify(model, dict(masks))
    state = state_bytes(nn.ModuleList([model]))
    return 4 * state.weights + state.indices
