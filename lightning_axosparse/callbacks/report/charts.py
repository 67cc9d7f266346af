"""Draws curves, Gantt charts and densities as SVG; ``zoom.js`` zooms into them along x."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from lightning_axosparse.callbacks.gantt import COLOURS, INNER, RecordedStep

WIDTH, LEFT, RIGHT = 1000.0, 120.0, 990.0
"""Of every chart, and where its x axis begins and ends; in pixels, if it is as wide as that."""

_TOP, _BOTTOM = 24.0, 34.0
_MOST_POINTS = 2000
"""Of a curve; more are averaged, so that a page of a long run stays small."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart: values ``y`` at ``x``, both of the same length."""

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False


def zoom() -> str:
    """Return the script that zooms into all charts of a page."""
    return files(__package__).joinpath("zoom.js").read_text()


def line_chart(
    title: str, x: str, y: str, curves: Sequence[Curve], marks: Mapping[str, float]
) -> str:
    """Return a chart of curves.

    Args:
        title: above it.
        x: what the x axis shows.
        y: what the y axis shows.
        curves: not empty; values that are not finite are left out.
        marks: name -> x of vertical lines.
    """
    height = 300.0
    thinned = [_thinned(curve) for curve in curves]
    xs = [value for curve in thinned for value in curve.x] + list(marks.values())
    ys = [value for curve in thinned for value in curve.y]
    low, high = _range(xs)
    bottom, top = _range(ys)

    def place(a: float, b: float) -> tuple[float, float]:
        share = (b - bottom) / (top - bottom)
        return _x(a, low, high), _TOP + (1 - share) * (height - _TOP - _BOTTOM)

    drawn = []
    for curve in thinned:
        places = [place(a, b) for a, b in zip(curve.x, curve.y, strict=True)]
        points = " ".join(f"{a:.2f},{b:.2f}" for a, b in places)
        name = escape(curve.name)
        drawn.append(
            f'<polyline data-name="{name}" points="{points}" fill="none" stroke="{curve.colour}"/>'
        )
        if curve.points:
            drawn += [
                f'<path d="M{a:.2f} {b:.2f}h0" stroke="{curve.colour}" stroke-width="7" '
                f'stroke-linecap="round"><title>{name}: {v:.4g} at {u:g}</title></path>'
                for (a, b), u, v in zip(places, curve.x, curve.y, strict=True)
            ]
    for name, at in marks.items():
        drawn.append(
            f'<path d="M{_x(at, low, high):.2f} {_TOP}V{height - _BOTTOM}" stroke="#54a24b" '
            f'stroke-dasharray="5 4"><title>{escape(name)}: {at:g}</title></path>'
        )
    ticks = [(place(low, b)[1], f"{b:.4g}") for b in (bottom, (bottom + top) / 2, top)]
    legend = {curve.name: curve.colour for curve in curves} | dict.fromkeys(marks, "#54a24b")
    return _chart(f"{title} ({y})", x, (low, high), height, drawn, [], ticks, legend)


def gantt_chart(step: RecordedStep) -> str:
    """Return the Gantt chart of a step: a row per stage, a bar per span, its times as a tooltip."""
    rows = {row: number for number, row in enumerate(step.rows)}
    height = _TOP + 34 * len(rows) + _BOTTOM
    end = max((placed.span.end - step.start for placed in step.spans), default=0.0) * 1e3 or 1.0
    drawn, labels = [], []
    # What runs inside a pass is drawn on it.
    for placed in sorted(step.spans, key=lambda placed: placed.span.activity in INNER):
        span, row = placed.span, rows[placed.replica, placed.span.stage]
        start, stop = (span.start - step.start) * 1e3, (span.end - step.start) * 1e3
        left, right = _x(start, 0, end), _x(stop, 0, end)
        inner = span.activity in INNER
        top = _TOP + 34 * row + (10 if inner else 2)
        batch = "" if span.microbatch is None else f", micro-batch {span.microbatch}"
        tooltip = f"{span.activity}{batch}: {start:.3f} to {stop:.3f} ms"
        drawn.append(
            f'<rect x="{left:.3f}" y="{top:g}" width="{right - left:.3f}" '
            f'height="{14 if inner else 30}" fill="{COLOURS[span.activity]}" stroke="#fff" '
            f'stroke-width="{0 if inner else 0.5}"><title>{tooltip}</title></rect>'
        )
        if span.microbatch is not None and span.activity != "wait":
            labels.append(
                f'<text x="{(left + right) / 2:.3f}" data-width="{right - left:.3f}" '
                f'y="{top + 19:g}" text-anchor="middle">{span.microbatch}</text>'
            )
    used = {placed.span.activity for placed in step.spans}
    legend: dict[str, str] = {name: colour for name, colour in COLOURS.items() if name in used}
    ticks = [(_TOP + 34 * n + 20, f"replica {r}, stage {s}") for (r, s), n in rows.items()]
    title = f"Epoch {step.epoch}, batch {step.batch_idx}: {step.weights} weights"
    return _chart(title, "ms", (0, end), height, drawn, labels, ticks, legend)


def density_chart(densities: Mapping[str, float]) -> str:
    """Return bars of the fraction kept of each weight."""
    height = _TOP + 18 * len(densities) + 6
    bars = []
    for row, (name, kept) in enumerate(densities.items()):
        top = _TOP + 18 * row
        bars.append(
            f'<text x="390" y="{top + 12:g}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="400" y="{top:g}" width="{530 * kept:.2f}" height="14" fill="#4c78a8"/>'
            f'<text x="{406 + 530 * kept:.2f}" y="{top + 12:g}">{kept:.1%}</text>'
        )
    title = '<text x="400" y="14">Kept of each weight</text>'
    box = f'viewBox="0 0 {WIDTH:g} {height:g}"'
    return f'<figure><svg class="chart" {box}>{title}{"".join(bars)}</svg></figure>'


def _chart(
    title: str,
    x: str,
    ends: tuple[float, float],
    height: float,
    drawn: Sequence[str],
    labels: Sequence[str],
    ticks: Sequence[tuple[float, str]],
    legend: Mapping[str, str],
) -> str:
    """Return a chart whose x axis ``zoom.js`` draws, and then changes.

    Args:
        title: above it.
        x: what the x axis shows.
        ends: of the x axis.
        height: in pixels.
        drawn: SVG that is stretched by zooming.
        labels: texts with ``data-width``, the pixels that they need to be shown in.
        ticks: of the y axis: pixels from the top, and the text.
        legend: name -> colour.
    """
    low, high = ends
    bottom = height - _BOTTOM
    words = "".join(
        f'<tspan fill="{colour}"> \N{BLACK SQUARE} </tspan><tspan>{escape(name)}</tspan>'
        for name, colour in legend.items()
    )
    left = "".join(
        f'<text x="{LEFT - 6:g}" y="{y + 4:g}" text-anchor="end">{escape(text)}</text>'
        for y, text in ticks
    )
    return (
        f'<figure><svg class="chart zooms" viewBox="0 0 {WIDTH:g} {height:g}" '
        f'data-low="{low!r}" data-high="{high!r}" data-left="{LEFT:g}" data-right="{RIGHT:g}" '
        f'data-bottom="{bottom:g}">'
        f'<rect x="{LEFT:g}" y="{_TOP:g}" width="{RIGHT - LEFT:g}" height="{bottom - _TOP:g}" '
        'fill="#fff"/>'
        f'<text x="{LEFT:g}" y="14">{escape(title)}{words}</text>{left}'
        f'<path class="axis" d="M{LEFT:g} {_TOP:g}V{bottom:g}H{RIGHT:g}" fill="none" '
        'stroke="#888"/>'
        # A nested svg clips what is drawn beyond its edges.
        f'<svg x="{LEFT:g}" width="{RIGHT - LEFT:g}" height="{height:g}" '
        f'viewBox="{LEFT:g} 0 {RIGHT - LEFT:g} {height:g}">'
        f'<g class="scaled">{"".join(drawn)}</g><g class="labels">{"".join(labels)}</g></svg>'
        f'<g class="ticks"></g><text x="{RIGHT:g}" y="{height - 4:g}" text-anchor="end">'
        f"{escape(x)}</text></svg></figure>"
    )


def _x(value: float, low: float, high: float) -> float:
    return LEFT + (value - low) / (high - low) * (RIGHT - LEFT)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the largest value, apart from each other."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _thinned(curve: Curve) -> Curve:
    """Leave out what is not finite, and average neighbours where there are too many points."""
    found = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
    size = max(1, math.ceil(len(found) / _MOST_POINTS))
    groups = [found[i : i + size] for i in range(0, len(found), size)]
    means = [[sum(column) / len(group) for column in zip(*group, strict=True)] for group in groups]
    return Curve(
        curve.name, curve.colour, [m[0] for m in means], [m[1] for m in means], curve.points
    )
