"""Draws README's picture: one step of a dense network, and of the same network 80 % pruned.

    python -m benchmarks.pipeline.picture docs/images/step.svg

Both steps are simulated with the schedule that trains. Backward passes take twice as long as
forward passes. The memory saved lets two stages hold what four did, so the ranks are two replicas.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from lightning_axosparse.callbacks.timeline import COLOURS
from lightning_axosparse.pipeline.schedule import MessageDriven
from lightning_axosparse.planning.simulate import Simulation, simulate
from lightning_axosparse.support.trace import Activity, Span

RANKS = 4
MICROBATCHES = 8
PRUNED = 0.6
"""Time of a pruned block, of the dense one's: 80 %, width 1024 (`benchmarks/overhead`)."""
ALL_REDUCE = 0.4
"""Seconds of the all-reduce of kept entries, for two replicas."""
JITTER = 0.15
"""Standard deviation of the logarithm of a pass."""

WIDTH, ROW, BAR, LEFT, TOP = 560, 26, 20, 70, 34
"""Narrow, so that its words can be read on a phone."""
TEXT = 'font-family="system-ui, sans-serif" font-size="14" fill="#333"'


def step(stages: int, share: float) -> list[Simulation]:
    """Simulate a step of every replica of a grid.

    Args:
        stages: of the pipeline; the other ranks are replicas.
        share: of the dense time.
    """
    replicas = RANKS // stages
    microbatches = MICROBATCHES // replicas
    found = []
    for replica in range(replicas):
        random = np.random.default_rng(replica)
        jitter = random.lognormal(0, JITTER, (stages, microbatches))
        seconds = share * RANKS / stages * jitter
        schedules = [
            MessageDriven(stage, stages, microbatches, 2 * stages) for stage in range(stages)
        ]
        found.append(simulate(schedules, seconds, 2 * seconds))
    return found


def ends(replicas: list[Simulation]) -> list[float]:
    """Return when each stage has sent its gradients, which it does with its replicas."""
    last = np.max([each.pipeline_end for each in replicas], axis=0)
    return [float(end) + (ALL_REDUCE if len(replicas) > 1 else 0.0) for end in last]


def chart(title: str, replicas: list[Simulation], top: float, seconds: float) -> list[str]:
    """Return the bars of a step, a row for each rank."""
    scale = (WIDTH - LEFT - 12) / seconds
    lines = [f'<text x="12" y="{top - 10}" {TEXT} font-weight="600">{title}</text>']
    stages = len(replicas[0].busy)
    for rank in range(RANKS):
        replica, stage = divmod(rank, stages)
        y = top + rank * ROW
        lines.append(f'<text x="12" y="{y + 15}" {TEXT}>rank {rank}</text>')
        spans = [each for each in replicas[replica].spans if each.stage == stage]
        if len(replicas) > 1:
            end = ends(replicas)[stage]
            spans.append(Span("all-reduce", end - ALL_REDUCE, end, stage, None))
        for span in spans:
            if span.activity == "wait":
                continue
            x, width = LEFT + span.start * scale, (span.end - span.start) * scale
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width - 1:.1f}" height="{BAR}" rx="2" '
                f'fill="{COLOURS[span.activity]}"/>'
            )
            if span.microbatch is not None:
                number = replica * MICROBATCHES // len(replicas) + span.microbatch
                lines.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 14}" {TEXT.replace("#333", "#fff")} '
                    f'text-anchor="middle">{number}</text>'
                )
    return lines


def picture() -> str:
    """Return the picture, as SVG."""
    dense, pruned = step(RANKS, 1.0), step(RANKS // 2, PRUNED)
    longest = max(ends(dense) + ends(pruned))
    second = TOP + RANKS * ROW + 40
    height = second + RANKS * ROW + 34
    lines = [
        *chart("dense: 4 stages", dense, TOP, longest),
        *chart(
            "80 % pruned: the same network fits on 2 stages, so 2 replicas", pruned, second, longest
        ),
    ]
    shown: tuple[Activity, ...] = ("forward", "backward", "all-reduce")
    for place, activity in enumerate(shown):
        x, y = LEFT + 110 * place, height - 22
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[activity]}"/>')
        lines.append(f'<text x="{x + 18}" y="{y + 11}" {TEXT}>{activity}</text>')
    lines.append(f'<text x="{WIDTH - 12}" y="{height - 11}" {TEXT} text-anchor="end">time</text>')
    size = f'width="{WIDTH}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    back = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, back, *lines, "</svg>", ""])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.parse_args().file.write_text(picture())


if __name__ == "__main__":
    main()
