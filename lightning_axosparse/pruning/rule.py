"""Says which entries of a model's weights are kept, how their number falls, and makes masks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_axosparse.pruning.prunable import Prune, few, prunable
from lightning_axosparse.pruning.scores import (
    SCORES,
    Score,
    Scores,
    State,
    Stored,
    has_second_moment,
)
from lightning_axosparse.pruning.selection import highest, kept_entries
from lightning_axosparse.sparse.module.parameters import OwnedParameter, owned_parameters
from lightning_axosparse.support.troubleshooting import see


@dataclass(frozen=True)
class MaskSchedule:
    """The optimizer steps after which weights are pruned: ``begin``, and ``every`` so many more.

    ``end`` are those before the draw.
    """

    begin: int
    every: int
    end: int

    def __post_init__(self) -> None:
        if self.begin >= self.end:
            raise ValueError(
                f"draw_by, after {self.end} optimizer steps, must come after draw_after (every, if "
                f"that is None), after {self.begin}: weights are pruned in between."
                + see("tickets")
            )

    def changes_after(self, steps: int) -> bool:
        """Return whether weights are pruned after so many optimizer steps, before the draw."""
        return self.begin <= steps < self.end and (steps - self.begin) % self.every == 0

    def progress(self, steps: int) -> float:
        """Return how far the schedule has come: 0 at its beginning, 1 from its end on."""
        return min(max((steps - self.begin) / (self.end - self.begin), 0.0), 1.0)


def cubic_ratio(ratio: float, progress: float) -> float:
    """Return the pruning ratio on the way to ``ratio``: fast at first, then slower.

    After Zhu & Gupta, *To prune, or not to prune* (2017, arXiv 1710.01878), from a ratio of 0.
    """
    return float(ratio * (1 - (1 - progress) ** 3))


@dataclass(frozen=True)
class MaskRule:
    """A rule for masks: the entries of highest score are kept.

    Attributes:
        ratio: fraction of the entries of all pruned weights to prune, in [0, 1).
        score: as for ``EarlyBirdTicket``, as are the following
            (:mod:`lightning_axosparse.pruning.scores`).
        floor: the least that a weight keeps, as a fraction of what it would keep if all kept alike;
            with 1 all do.
        prune: which parameters are pruned (:func:`lightning_axosparse.pruning.prunable.prunable`).
    """

    ratio: float
    score: str | Score = "auto"
    floor: float = 0.0
    prune: Prune | None = None

    def sizes(self, module: nn.Module) -> dict[str, torch.Size]:
        """Return the weights that are pruned, with their shapes.

        Raises:
            ValueError: if there are none.
        """
        sizes = prunable(module, self.prune)
        if not sizes:
            raise ValueError(
                f"There is nothing to prune: prune={self.prune} leaves all dense." + see("pruning")
            )
        return sizes

    def resolved(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> MaskRule:
        """Return the rule with "auto" replaced by the score that it stands for."""
        if self.score not in ("auto", "saliency"):
            return self
        without = [type(o).__name__ for o in optimizers if not has_second_moment(o)]
        sizes = self.sizes(module)
        frozen = [n for n, p in module.named_parameters() if n in sizes and not p.requires_grad]
        if self.score == "auto":
            return replace(self, score="magnitude" if without or frozen else "saliency")
        if without:
            raise ValueError(
                "score='saliency' needs the optimizer's second moment of gradients, which "
                f"{', '.join(without)} does not estimate. Use AdamW, Adam, NAdam, RAdam, RMSprop, "
                "Adadelta or Adagrad, or set score='magnitude'." + see("pruning")
            )
        if frozen:
            raise ValueError(
                f"score='saliency' needs gradients, but these weights are frozen: {few(frozen)}. "
                "Leave them dense with prune={'PATTERN': False}, or set score='magnitude'."
                + see("pruning")
            )
        return self

    def masks(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        counted: Collection[str] | None = None,
        group: ProcessGroup | None = None,
        stored: Callable[[str], Stored] | None = None,
    ) -> dict[str, Tensor]:
        """Compute the masks of the weights that this rank counts, as one process would.

        Args:
            module: the whole model.
            optimizers: those that train it, for scores that need their state.
            counted: the parameters that this rank counts, of which some may not be pruned; each is
                counted by exactly one rank of ``group``. None: all of the module.
            group: the ranks whose stages make up the model; None if this rank has the whole model.
            stored: returns a weight by name; None takes it from ``module`` and ``optimizers``.

        Returns:
            name -> bool tensor of the weight's shape, True where an entry is kept.
        """
        rule, sizes = self.resolved(module, optimizers), self.sizes(module)
        names = [name for name in sizes if counted is None or name in counted]
        stored = stored or partial(_stored_in, _by_name(module), optimizers)

        score = SCORES[rule.score] if isinstance(rule.score, str) else rule.score
        scores = Scores(score, names, stored)
        masks = highest(scores, sizes, kept_entries(sizes, self.ratio), self.floor, group)
        for name in names:
            layout = stored(name).layout
            if layout is not None:
                # Floors that fall are rounded, and may ask for one entry more than before.
                masks[name] &= layout.mask()
        return masks

    @property
    def score_name(self) -> str:
        """The name of the score."""
        named = getattr(self.score, "__name__", type(self.score).__name__)
        return self.score if isinstance(self.score, str) else named


def _by_name(module: nn.Module) -> dict[str, OwnedParameter]:
    return {entry.names[0]: entry for entry in owned_parameters(module)}


def _stored_in(
    owned: Mapping[str, OwnedParameter], optimizers: Sequence[Optimizer], name: str
) -> Stored:
    weight = owned[name].parameter
    state: State = next((o.state[weight] for o in optimizers if weight in o.state), {})
    return Stored(weight, state, owned[name].layout)
