"""Writes folders like those that jobs of a sweep leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from lightning_axosparse import Ticket
from lightning_axosparse.callbacks.report.facts import RunResult
from lightning_axosparse.examples.gpt import GPT
from tests.callbacks.report.runs import make_facts


def write_job(
    folder: Path,
    arm: str,
    ratio: float | None,
    seed: int = 0,
    finished: bool = True,
    error: str | None = None,
    ticket: bool = False,
    overrides: tuple[str, ...] = (),
    **numbers: Any,
) -> RunResult | None:
    """Write a job's folder; return its result."""
    (folder / ".hydra").mkdir(parents=True)
    config = {
        "seed": seed,
        "arm": {"name": arm, "ratio": ratio},
        "pruning": {"ratio": 0.8, "callback": None},
    }
    tasks = [f"arm={arm}", f"pruning.ratio={ratio}", f"seed={seed}", *overrides]
    hydra = {"hydra": {"overrides": {"task": tasks, "hydra": ["hydra.mode=MULTIRUN"]}}}
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    OmegaConf.save(hydra, folder / ".hydra" / "hydra.yaml")
    if error is not None:
        (folder / "error.txt").write_text(error)
    if ticket:
        model = GPT(width=8, depth=1, heads=2, context=8)
        masks = {n: torch.rand_like(p) < 0.2 for n, p in model.named_parameters() if p.dim() > 1}
        Ticket(masks, 0.8).save(folder / "ticket.pt")
    if not finished or error is not None:
        return None
    result = replace(RunResult.of(make_facts(), {}), **numbers)
    result.save(folder / "result.jsonl")
    return result
