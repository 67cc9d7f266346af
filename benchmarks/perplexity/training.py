"""Trains a task in one process without a Trainer, as the example GPT says; it can be stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.perplexity.arms import Arm
from benchmarks.perplexity.pruner import Pruner
from benchmarks.perplexity.tasks import Task, Texts
from benchmarks.perplexity.updates import Updates
from lightning_axosparse.examples.data import EpochShuffle, Windows


class Training:
    """A run of a task, from its first step or from a state that an earlier one left.

    Args:
        task: what is trained, on what and how long.
        arm: how it is trained and pruned.
        seed: of the weights, of the order of the windows, and of dropout.
        texts: of the task.

    Attributes:
        step: optimizer steps that are done.
    """

    def __init__(self, task: Task, arm: Arm, seed: int, texts: Texts) -> None:
        L.seed_everything(seed, verbose=False)
        self.task, self.arm, self.seed, self.texts = task, arm, seed, texts
        self.model = task.model(arm.rate, arm.weight_decay, arm.dropout)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": arm.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=arm.rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.pruner = Pruner(arm, self.model, self.optimizer, task.all_steps, seed)
        self._updates = Updates(arm, self.model, self.optimizer, self.pruner)
        self.step = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def advance(self) -> None:
        """Train one step."""
        step = self.step
        self.pruner.begin_step(step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        with self.pruner.forward(step):
            self._loss(*self._batch(step)).backward()
        self.pruner.on_gradients(step)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self._updates.step(step)
        self.pruner.end_step(step)
        self.optimizer.zero_grad()
        self.step += 1
        if self.step == self.task.all_steps:
            self._updates.finish()

    def _loss(self, tokens: Tensor, next_tokens: Tensor) -> Tensor:
        logits = self.model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, next_tokens.flatten())
        if self.pruner.teacher is None:
            return loss
        with torch.no_grad():
            wanted = self.pruner.teacher(tokens).flatten(0, 1).log_softmax(-1)
        found = logits.log_softmax(-1)
        divergence = F.kl_div(found, wanted, reduction="batchmean", log_target=True)
        return (1 - self.arm.distill) * loss + self.arm.distill * divergence

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the windows of a step, in the order of the examples' text module."""
        epoch, place = divmod(step, self.task.steps)
        if self._order[0] != epoch:
            order = EpochShuffle(len(self.texts.train), self.seed)
            order.set_epoch(epoch)
            self._order = epoch, list(order)
        size = self.task.batch_size
        chosen = [self.texts.train[i] for i in self._order[1][place * size : (place + 1) * size]]
        if len(chosen) < size:
            raise ValueError(
                f"The text of {self.task.name} has {len(self.texts.train)} windows, fewer than "
                f"{self.task.steps} batches of {size} a epoch. Give more text."
            )
        tokens, next_tokens = zip(*chosen, strict=True)
        return torch.stack(tokens), torch.stack(next_tokens)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.arm.rate * self._schedule(step) * self.pruner.factor(step)

    def _schedule(self, step: int) -> float:
        """The part of the learning rate, of which the example GPT's is a cosine to a tenth."""
        warmup = max(1, round(self.model.warmup * self.task.all_steps))
        done = min(1.0, max(0, step - warmup) / max(1, self.task.all_steps - warmup))
        left = math.cos(math.pi * done) if self.arm.shape == "cosine" else 1 - 2 * done
        final = self.arm.final
        return min(1.0, (step + 1) / warmup) * ((1 + final) / 2 + (1 - final) / 2 * left)

    @torch.no_grad()
    def perplexity(self, windows: Windows) -> float:
        """Return the perplexity of a text; that of kept entries alone at the end of a run."""
        self.model.eval()
        losses = []
        for first in range(0, len(windows), 128):
            chosen = [windows[i] for i in range(first, min(first + 128, len(windows)))]
            tokens, next_tokens = (torch.stack(each) for each in zip(*chosen, strict=True))
            logits = self.model(tokens).flatten(0, 1)
            losses.append(F.cross_entropy(logits, next_tokens.flatten(), reduction="sum"))
        self.model.train()
        count = len(windows) * self.task.context
        return math.exp(float(torch.stack(losses).double().sum()) / count)

    @cached_property
    def parameters(self) -> int:
        """The number of parameters of the dense network."""
        return sum(p.numel() for p in self.model.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return all that the rest of the run depends on."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "pruner": self.pruner.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a run of the same network, text and seed was."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.pruner.load_state_dict(state["pruner"], self.step)
        torch.set_rng_state(state["random"])
