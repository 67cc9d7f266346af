"""The arms that are compared: ways to train and to prune a network."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Method = Literal["once", "gradual", "through", "returning", "set", "rigl"]
Shape = Literal["cosine", "linear"]

BEFORE = ("rate", "weight_decay", "dropout", "final", "shape", "ham", "ham_decay")
"""The fields that matter before the first change of an arm."""


@dataclass(frozen=True)
class Arm:
    """How a network is trained and pruned; times are shares of the run.

    Lines of the results leave nothing out, and a line without a field has its default: so fields
    may be added, and defaults never change.

    Attributes:
        rate: learning rate of AdamW after the warm-up.
        ratio: fraction of the entries to prune; 0: dense.
        method: "once": prune at ``begin``. "gradual": raise the ratio, fast at first, from
            ``begin`` to ``end``. "through": likewise, but entries under the mask go on training by
            straight-through gradients until ``end``. "returning": likewise, but after each step all
            but the largest entries of each weight are zero, and all are updated by the next one
            (arXiv 2511.13653). "set", "rigl": prune at ``begin``, then drop and regrow entries
            until ``end``.
        begin: when pruning begins; of a dense arm, when ``factor`` and ``averaged`` do.
        end: when the ticket is drawn; with "once" it is ``begin``.
        every: how often masks change; of "returning", 0 means after every step.
        drop: fraction of the kept entries that are dropped and regrown at first; with "gradual",
            at every change, those of the largest gradient.
        factor: what rates are multiplied by from ``begin`` on; with "gradual" and "through" it
            rises with the pruned fraction.
        rewarm: rates rise again from 0 after the draw for this share of the run.
        decay: weight decay from the draw on; None: as before.
        distill: weight of the divergence from the dense network of the draw in the loss, 0 to 1.
        score: what says how much each weight keeps; "saliency": by the root of squared gradients;
            "slow": the same with squares averaged over a hundred steps; "curvature": by their
            fourth root, which is the package's saliency; "sixth root", "v^0.08" and so on: by such
            powers of them.
        entries: which entries of each weight are kept.
        scope: how the weights shared what is kept, in earlier results; now "global".
        power: densities of the weights were those by score to this power, likewise; now 1.
        floor: the least density of a weight, of the mean density.
        weight_decay: of the matrices.
        dropout: of the network.
        final: what is left of the rate at the end of the run, as a share of it.
        shape: how the rate decays after the warm-up: "cosine" or "linear".
        rise: rates are multiplied by the kept fraction to minus this power, as it shrinks.
        ramp: power of the schedule of "gradual" and "through"; 3: cubic.
        block: rows of a column that are pruned together; 4: the pattern "4x1".
        row_floor: entries that each row of a weight keeps at least, as far as they are trained.
        own_rates: the rate of each pruned weight is multiplied by (the mean density / its own
            density) to this power, which is clamped to 0.5 to 3.
        ham: a of HAM (arXiv 2506.02630), which multiplies matrices by
            ``exp(rate * (-a * sign(w) * g - b))`` after each step, with g as AdamW normalises it.
        ham_decay: b of HAM.
        averaged: the network that is evaluated is the moving average of the weights from the draw
            on, with this decay a step; 0: their last values.
        smoothed: weights are scored by their moving average with this decay a step, from ``begin``
            on.
    """

    rate: float = 3e-3
    ratio: float = 0.0
    method: Method = "once"
    begin: float = 0.25
    end: float = 0.25
    every: float = 1 / 32
    drop: float = 0.0
    factor: float = 1.0
    rewarm: float = 0.0
    decay: float | None = None
    distill: float = 0.0
    score: str = "saliency"
    entries: str = "score"
    scope: str = "global"
    power: float = 1.0
    floor: float = 0.05
    weight_decay: float = 0.1
    dropout: float = 0.0
    final: float = 0.1
    shape: Shape = "cosine"
    rise: float = 0.0
    ramp: float = 3.0
    block: int = 1
    row_floor: int = 0
    own_rates: float = 0.0
    ham: float = 0.0
    ham_decay: float = 0.0
    averaged: float = 0.0
    smoothed: float = 0.0

    def __post_init__(self) -> None:
        if self.method == "once" and self.begin != self.end:
            raise ValueError(f"Pruned once, at {self.begin}, but the end is {self.end}.")

    @property
    def changes(self) -> bool:
        """Whether it is anything but dense training from beginning to end."""
        return self.ratio > 0 or self.factor != 1 or self.averaged > 0

    @property
    def beginning(self) -> Arm:
        """The dense arm that trains as this one does before ``begin``."""
        return Arm(**{name: getattr(self, name) for name in BEFORE})

    @property
    def label(self) -> str:
        """What the arm is, and where it differs from the defaults."""
        kind = f"{100 * self.ratio:g}% {self.method}" if self.ratio else "dense"
        standard = Arm(method=self.method, begin=0.0, end=0.0)
        left_out = {"rate", "ratio", "method", *([] if self.changes else ["begin", "end"])}
        left_out |= {"end"} if self.method == "once" else set()
        found = [
            f"{field.name} {getattr(self, field.name):.3g}".replace("begin", "from")
            if isinstance(getattr(self, field.name), float)
            else f"{field.name} {getattr(self, field.name)}"
            for field in fields(self)
            if field.name not in left_out
            and getattr(self, field.name) != getattr(standard, field.name)
        ]
        return ", ".join([kind, f"{self.rate:g}", *found])


def once(ratio: float, at: float = 0.25, rate: float = 3e-3, **others: object) -> Arm:
    """Return an arm that prunes at one time."""
    return Arm(rate, ratio, "once", at, at, **others)  # type: ignore[arg-type]
