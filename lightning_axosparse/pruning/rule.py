"""Selects the parameters to prune, scores their entries, and computes masks by the scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from lightning_axosparse.pruning.selection import minimum_counts, top_k_masks, unpruned_count
from lightning_axosparse.sparse.module.optimizer_state import expand_state, trial_state
from lightning_axosparse.sparse.module.parameters import OwnedParameter, Owner, owned_parameters
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.support.troubleshooting import first_few, see, without_link

ParameterKind = Literal["weight", "embedding", "head", "norm", "bias", "other"]
"""The role of a parameter in its layer."""

PRUNED_BY_DEFAULT: Mapping[str, bool] = {
    "weight": True,
    "embedding": True,
    "head": True,
    "norm": False,
    "bias": False,
    "other": False,
}
"""Whether each kind is pruned."""

Which = Mapping[str, bool] | Callable[[str, nn.Parameter], bool]
"""A table by kinds and patterns of names, or a function of a parameter's name and the parameter."""

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, _NormBase)


def prunable(module: nn.Module, which: Which | None = None) -> dict[str, torch.Size]:
    """Return the parameters that are pruned, with their dense shapes, in module order.

    Tied parameters appear once; parameters on the meta device are included.

    Args:
        module: the full model.
        which: a table, whose keys are kinds or patterns (as in :mod:`fnmatch`) of parameter names,
            and whose values say whether they are pruned: the last entry that fits a parameter
            counts, and :data:`PRUNED_BY_DEFAULT` where none fits. Or a function that decides for
            each floating-point parameter. The kinds are "embedding" (also of a tied head), "head"
            (the weight of the last linear layer), "norm" (the parameters of a normalization, or of
            ``weight_norm``), "bias", "weight" (all others with two or more dimensions) and "other".

    Raises:
        ValueError: if a key of the table is no kind and matches no parameter.
    """
    kinds = parameter_kinds(module)
    owned = {entry.names[0]: entry for entry in owned_parameters(module)}
    if which is None or isinstance(which, Mapping):
        _validate(which or {}, list(kinds))
        table = [*PRUNED_BY_DEFAULT.items(), *(which or {}).items()]
        pruned = {name: _decide(table, name, kind) for name, kind in kinds.items()}
    else:
        # A weight that is stored sparse is shown in its dense shape.
        pruned = {name: bool(which(name, getattr(*owned[name].owners[0]))) for name in kinds}
    return {name: owned[name].shape for name, is_pruned in pruned.items() if is_pruned}


def parameter_kinds(module: nn.Module) -> dict[str, ParameterKind]:
    """Return the kind of each floating-point parameter, in module order."""
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    head = linear[-1] if linear else None
    return {
        entry.names[0]: _kind(entry.owners, entry.shape, head)
        for entry in owned_parameters(module)
        if entry.parameter.is_floating_point()
    }


def _kind(owners: list[Owner], shape: torch.Size, head: nn.Linear | None) -> ParameterKind:
    layers = [layer for layer, _ in owners]
    if any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in layers):
        return "embedding"
    if any(isinstance(layer, _NORMS) or type(layer).__name__.endswith("Norm") for layer in layers):
        return "norm"
    if any(_is_weight_norm(layer, name) for layer, name in owners):
        return "norm"  # A row without entries has no direction: 0 / 0.
    if "bias" in owners[0][1]:
        return "bias"
    if len(shape) < 2:
        return "other"
    return "head" if any(layer is head for layer in layers) else "weight"


def _is_weight_norm(layer: nn.Module, name: str) -> bool:
    """Return whether a parameter is a length or direction of either ``weight_norm`` of torch."""
    if isinstance(layer, nn.utils.parametrize.ParametrizationList):
        return any(type(step).__name__ == "_WeightNorm" for step in layer)
    hooks: list[Any] = [*layer._forward_pre_hooks.values()]
    names = {hook.name for hook in hooks if type(hook).__name__ == "WeightNorm"}
    return name.removesuffix("_g").removesuffix("_v") in names


def _decide(table: list[tuple[str, bool]], name: str, kind: ParameterKind) -> bool:
    return [pruned for key, pruned in table if key == kind or fnmatchcase(name, key)][-1]


def _validate(table: Mapping[str, bool], names: list[str]) -> None:
    for key in table:
        if key not in PRUNED_BY_DEFAULT and not any(fnmatchcase(name, key) for name in names):
            raise ValueError(
                f"which={{'{key}': ...}}: '{key}' matches no parameter and is none of the kinds "
                f"{', '.join(PRUNED_BY_DEFAULT)}. There are: {first_few(names)}." + see("pruning")
            )


State = Mapping[str, Any]
"""The content of ``optimizer.state[parameter]``; empty before its first step."""

Score = Callable[[Tensor, State], Tensor]
"""The scores of a weight's entries, of its shape, by the weight and its optimizer state."""

_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
"""Their names in the state of Adam and its kin, of RMSprop and Adadelta, and of Adagrad."""


def magnitude(weight: Tensor, state: State) -> Tensor:
    """Return ``|w|``."""
    return weight.abs()


def saliency(weight: Tensor, state: State) -> Tensor:
    """Return ``|w| v^(1/4)``, where v is the optimizer's estimate of the squared gradient.

    The square of it, ``w^2 sqrt(v)``, estimates how much the loss grows when the entry becomes zero
    (Optimal Brain Damage; LeCun, Denker & Solla, NeurIPS 1989): Adam's preconditioner ``sqrt(v)``
    stands for the diagonal of the Hessian. That v itself serves as the diagonal of the Fisher
    information, for pruning too, is shown by Li et al. (*Fishers for Free?*, 2025, arXiv
    2507.18807); ``benchmarks/perplexity`` compares powers of v.
    """
    moment = _second_moment(weight.shape, state)
    if moment is None:
        raise ValueError(
            "it has no second moment of gradients, because it has not been trained. Leave it dense "
            "with which={...: False}, or set score='magnitude'"
        )
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.abs() * moment.to(weight.device, wide).sqrt().sqrt()


SCORES: dict[str, Score] = {"magnitude": magnitude, "saliency": saliency}


class Stored(NamedTuple):
    """A weight as it is stored: dense, or its unpruned values and their layout."""

    values: Tensor
    state: State
    layout: Layout | None


def scores_of(score: Score, name: str, stored: Stored) -> Tensor:
    """Return the scores of a weight, without a graph.

    Of a weight that is stored sparse, entries that are pruned have the lowest score of all.
    """
    weight, state, layout = stored.values.detach(), stored.state, stored.layout
    if layout is not None:
        weight, state = layout.densify(weight), expand_state(state, layout)
    with torch.no_grad():
        try:
            scores = score(weight, state)
        except ValueError as error:
            raise ValueError(
                f"The weight '{name}' cannot be scored: {without_link(error)}." + see("pruning")
            ) from error
    if not isinstance(scores, Tensor) or scores.shape != weight.shape:
        result = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(
            f"The score function returned {result} for the weight '{name}'. It must return a "
            f"tensor of the weight's shape, {tuple(weight.shape)}." + see("pruning")
        )
    if layout is None:
        return scores
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return wide.masked_fill(~layout.mask(), -torch.inf)


def has_second_moment(optimizer: Optimizer) -> bool:
    """Return whether an optimizer estimates squared gradients, as :func:`saliency` needs.

    A copy of the optimizer takes a trial step; the optimizer itself does not change.
    """
    shape = torch.Size([2, 2])
    try:
        state = trial_state(optimizer, optimizer.param_groups[0], shape)
    except (TypeError, ValueError, RuntimeError):
        # It wants a closure, sparse gradients or other shapes: refused where weights become sparse.
        return False
    return _second_moment(shape, state) is not None


def _second_moment(shape: torch.Size, state: State) -> Tensor | None:
    moments = (state.get(name) for name in _SECOND_MOMENTS)
    return next((m for m in moments if isinstance(m, Tensor) and m.shape == shape), None)


@dataclass(frozen=True)
class MaskSchedule:
    """The optimizer steps after which weights are pruned: ``start``, and then each ``every`` steps.

    ``end`` is the number of steps before the draw.
    """

    start: int
    every: int
    end: int

    def __post_init__(self) -> None:
        if self.start >= self.end:
            raise ValueError(
                f"end, after {self.end} optimizer steps, must come after start, after "
                f"{self.start}: weights are pruned in between." + see("tickets")
            )

    def changes_after(self, steps: int) -> bool:
        """Return whether weights are pruned after this many optimizer steps, before the draw."""
        return self.start <= steps < self.end and (steps - self.start) % self.every == 0

    def progress(self, steps: int) -> float:
        """Return how far the schedule has come: 0 at its start, 1 from its end on."""
        return min(max((steps - self.start) / (self.end - self.start), 0.0), 1.0)


def cubic_ratio(ratio: float, progress: float) -> float:
    """Return the pruning ratio on the way to ``ratio``: fast at first, then slower.

    After Zhu & Gupta, *To prune, or not to prune* (2017, arXiv 1710.01878), from a ratio of 0.
    """
    return float(ratio * (1 - (1 - progress) ** 3))


@dataclass(frozen=True)
class MaskRule:
    """A rule for masks: the entries of lowest score are pruned.

    Attributes:
        ratio: fraction of the entries of all pruned weights to prune, in [0, 1).
        score: as for ``GradualPruning``.
        floor: as for ``GradualPruning``.
        which: the parameters to prune (:func:`lightning_axosparse.pruning.rule.prunable`).
        untrained: names of such as stay dense, because no step trains them.
    """

    ratio: float
    score: str | Score = "auto"
    floor: float = 0.0
    which: Which | None = None
    untrained: frozenset[str] = frozenset()

    def sizes(self, module: nn.Module) -> dict[str, torch.Size]:
        """Return the weights that are pruned, with their shapes.

        Raises:
            ValueError: if there are none.
        """
        chosen = prunable(module, self.which)
        sizes = {name: size for name, size in chosen.items() if name not in self.untrained}
        if not sizes:
            raise ValueError(
                f"There is nothing to prune: which={self.which} leaves all dense." + see("pruning")
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
                "score='saliency' needs gradients, but these weights are frozen: "
                f"{first_few(frozen)}. "
                "Leave them dense with which={'PATTERN': False}, or set score='magnitude'."
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
            module: the full model.
            optimizers: those that train it, for scores that need their state.
            counted: the parameters that this rank counts, of which some may not be pruned; each is
                counted by exactly one rank of ``group``. None: all of the module.
            group: the ranks whose stages make up the model; None if this rank has the full model.
            stored: returns a weight by name; None takes it from ``module`` and ``optimizers``.

        Returns:
            name -> bool tensor of the weight's shape, False where an entry is pruned.
        """
        # A weight that was frozen since fit began keeps its moments.
        rule = self.resolved(module, optimizers) if self.score == "auto" else self
        sizes = self.sizes(module)
        names = [name for name in sizes if counted is None or name in counted]
        owned = {entry.names[0]: entry for entry in owned_parameters(module)}
        read = stored or partial(_stored_in, owned, optimizers)
        score = SCORES[rule.score] if isinstance(rule.score, str) else rule.score
        k = unpruned_count(sizes, self.ratio)
        minimum = minimum_counts(sizes, k, self.floor)
        masks = top_k_masks(
            names, lambda name: scores_of(score, name, read(name)), sizes, k, minimum, group
        )
        for name in names:
            layout = read(name).layout
            if layout is not None:
                # Floors that fall are rounded, and may ask for one entry more than before.
                masks[name] &= layout.mask()
        return masks

    def without_moments(self, names: Collection[str], stored: Callable[[str], Stored]) -> list[str]:
        """Return the weights of this rank that the score needs a second moment of, in vain."""
        if self.score != "saliency":
            return []
        weights = ((name, stored(name)) for name in names)
        return [
            name
            for name, (values, state, _) in weights
            if _second_moment(values.shape, state) is None
        ]

    @property
    def score_name(self) -> str:
        """The name of the score."""
        if isinstance(self.score, str):
            return self.score
        return getattr(self.score, "__name__", type(self.score).__name__)


def _stored_in(
    owned: Mapping[str, OwnedParameter], optimizers: Sequence[Optimizer], name: str
) -> Stored:
    weight = owned[name].parameter
    state: State = next((o.state[weight] for o in optimizers if weight in o.state), {})
    return Stored(weight, state, owned[name].layout)
