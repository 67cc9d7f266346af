"""Makes the facts of a run for the tests of the report."""

from __future__ import annotations

from lightning_axosparse.callbacks.report.facts import (
    RankFacts,
    RunFacts,
    TicketDraw,
    ValidationLoss,
    Work,
)


def make_work(scale: float) -> Work:
    return Work(
        steps=10,
        seconds=2.0 * scale,
        activities={
            "forward": 0.5 * scale,
            "backward": 0.8 * scale,
            "wait": 0.2 * scale,
            "optimizer": 0.1 * scale,
            "densify": 0.05 * scale,
            "compress": 0.05 * scale,
        },
        state={"weights": 8_000_000, "indices": 0, "gradients": 8_000_000, "optimizer": 16_000_000},
        reduced_bytes=int(4_000_000 * scale),
    )


def make_facts() -> RunFacts:
    ranks = [
        RankFacts(
            rank, rank % 2, rank // 2, {"dense": make_work(1), "sparse": make_work(0.5)}, losses
        )
        for rank, losses in enumerate([[3.0, 2.0], [3.0, 2.0], [5.0, 4.0], [5.0, 4.0]])
    ]
    ranks[0].tokens = 20
    return RunFacts(
        ranks,
        steps=[1, 2],
        validations=[ValidationLoss(0, 1, 2.0, "dense"), ValidationLoss(1, 2, 1.0, "sparse")],
        distances={1: 0.4, 2: 0.05},
        threshold=0.1,
        draw=TicketDraw(0.8, {"model.0.weight": 0.75, "model.1.weight": 0.85}, 0.2, step=1),
        test_loss=1.5,
        parameters=1,
    )
