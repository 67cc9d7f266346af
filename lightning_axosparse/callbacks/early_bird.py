"""The callback that prunes while training: gradually, or at once by an early-bird ticket."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_axosparse.callbacks.ticket_search import (
    SEARCH,
    Period,
    Progress,
    TicketSearch,
    When,
    in_steps,
    misconfigured,
    strategy_of,
)
from lightning_axosparse.distributed.process_groups import all_gather, broadcast_from_first
from lightning_axosparse.pruning.masks import Distance, MaskBits
from lightning_axosparse.pruning.rule import (
    SCORES,
    MaskRule,
    MaskSchedule,
    Prune,
    Score,
    cubic_ratio,
)
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.sparse.backend import (
    COMPUTES,
    Backend,
    Compute,
    Processor,
    most_cautious,
    this_processor,
)
from lightning_axosparse.sparse.cpu.products import most_kept
from lightning_axosparse.sparse.module.optimizer_state import validate_elementwise_optimizers
from lightning_axosparse.sparse.store.materialize import Policy, best_policy
from lightning_axosparse.strategy.validation import (
    optimizers_before_setup,
    unless_made_later,
    validate_one_optimizer,
)
from lightning_axosparse.support.arguments import (
    FRACTION,
    FUNCTION,
    NONE,
    PATH,
    PRUNED,
    checked,
    instance_of,
    number,
    one_of,
)
from lightning_axosparse.support.troubleshooting import few, see

_LITTLE = 0.02
"""A weight that keeps a smaller share of its entries is named when the ticket is drawn."""


class EarlyBirdTicket(TicketSearch):
    """Prunes while training: the pruned weights are stored sparse from then on.

    At regular intervals the callback computes the masks that keep the entries of highest score,
    over all stages of the pipeline, identically on all ranks. With ``method="gradual"`` it prunes
    by each of them, a little more every time. With ``method="early-bird"`` it compares them with
    earlier ones (You et al., ICLR 2020), logs the largest distance to the window as
    ``mask_distance``, and prunes once, when the last ``window`` masks agree. Either way the
    strategy replaces the pruned weights, their gradients and their optimizer state by the kept
    entries (SAMO; Singh & Bhatele, IPDPS 2023), and the last masks are the ticket.

    ``every``, ``draw_after`` and ``draw_by`` are optimizer steps (an int), a share of the run (a
    float), or epochs (such as "3 epochs"). Masks that are due after the last batch of an epoch are
    computed when the epoch has been validated.

    Args:
        pruning_ratio: fraction of the entries of all pruned weights to prune, in (0, 1).
        score: "saliency": magnitude times the fourth root of the optimizer's second moment (Optimal
            Brain Damage), for Adam and its kin, RMSprop, Adadelta and Adagrad; "magnitude"; "auto":
            saliency where the optimizer has a second moment, else magnitude. Or a function of a
            weight and its optimizer state that returns a tensor of the weight's shape; it is called
            several times and has to return the same.
        floor: all weights are ranked together, but each keeps at least this fraction, in [0, 1], of
            what it would keep if all kept the same fraction; with 1 all do. So no layer becomes
            empty; weights that keep hardly anything are named when the ticket is drawn.
        prune: what is pruned: a table of kinds ("weight", "embedding", "head", "norm", "bias",
            "other") and patterns of names (as in :mod:`fnmatch`), such as ``{"embedding": False,
            "*.lora_*": False}``, or a function ``(name, parameter) -> bool``. By default all
            weights, embeddings and heads, no norms and biases
            (:func:`lightning_axosparse.pruning.rule.prunable`).
        method: "gradual": from ``draw_after`` to ``draw_by`` the pruning ratio rises by a cubic
            schedule (Zhu & Gupta, 2017), at intervals of ``every``; what is pruned stays pruned.
            "early-bird": nothing is pruned until the masks agree. The first costs less quality, the
            second is sparse earlier (``docs/tickets.md``).
        every: how often masks are computed. Masks change less over shorter intervals, so with
            "early-bird" it goes together with ``threshold``.
        draw_after: prune not before this, even if the masks agree; None: with "gradual" after
            ``every``, with "early-bird" as soon as they agree.
        draw_by: draw the ticket at this time, with "early-bird" at the latest; None: only when the
            masks agree.
        distance: how "early-bird" compares masks. "relative": fraction of the kept weights that
            changed, divided by that of independent random masks, so it means the same at every
            ratio; "hamming": fraction of all mask entries that changed, as in the paper.
        threshold: the ticket is drawn when the distance of the newest mask to every other mask of
            the window is smaller than this.
        window: number of masks that must agree, at least 2; the paper uses 5, one an epoch, with
            the hamming distance and a threshold of 0.1.
        ticket: a ticket, or the file or checkpoint with one, to use from the start of fit, without
            a search.
        compute: how pruned linear layers and convolutions run. On CPU "sparse" multiplies with the
            kept values, and "dense" with weights that are made dense at every use. "samo" keeps
            dense weights in the dtype of the products and updates them once per optimizer step
            (SAMO); the others keep none, and need the least memory. "auto": as is faster, but
            "samo" in 16 bits alone, with several micro-batches per step and too many weights kept
            for products on the kept values. What is faster in 16 bits depends on the processor:
            "auto" chooses for that of all ranks, and of the run that is resumed, on which kept
            values gain least.

    Attributes:
        ticket: the ticket once it is drawn or given, else None. Every rank has the whole ticket, at
            one bit per weight.
        distances: number of optimizer steps -> the largest distance of the masks after them to
            the window, from the second masks on.
        drawn_at: number of optimizer steps of this run before the draw; None if it has drawn none.

    Raises:
        MisconfigurationException: if an argument is out of range, or with "gradual" a time is given
            in epochs, or ``draw_by`` does not come after ``draw_after``.
    """

    kind = Ticket
    ticket: Ticket | None
    lack = "cannot store weights sparse"
    prunes_at_start: Literal[True] = True
    """A strategy may store weights sparse by :attr:`ticket` as soon as it makes them."""

    @checked(
        MisconfigurationException,
        pruning_ratio=number("a number in (0, 1)", lambda ratio: 0 < ratio < 1),
        score=one_of("auto", *SCORES) | FUNCTION,
        floor=FRACTION,
        prune=PRUNED | FUNCTION | NONE,
        method=one_of("gradual", "early-bird"),
        ticket=instance_of("a Ticket", Ticket) | PATH | NONE,
        compute=one_of(*COMPUTES, "samo"),
        **SEARCH,
    )
    def __init__(
        self,
        pruning_ratio: float = 0.8,
        score: Literal["auto", "magnitude", "saliency"] | Score = "auto",
        floor: float = 0.05,
        prune: Prune | None = None,
        method: Literal["gradual", "early-bird"] = "gradual",
        every: When = 1 / 32,
        draw_after: When | None = 0.25,
        draw_by: When | None = 0.9,
        distance: Distance = "relative",
        threshold: float = 0.5,
        window: int = 5,
        ticket: Ticket | str | os.PathLike[str] | None = None,
        compute: Compute | Literal["samo"] = "auto",
    ) -> None:
        super().__init__(every, draw_after, draw_by, distance, threshold, window, ticket)
        self.compute = compute
        self.pruning_ratio = pruning_ratio
        with misconfigured():
            self._rule = MaskRule(
                pruning_ratio,
                score,
                floor,
                dict(prune) if isinstance(prune, Mapping) else prune,
            )
        self.method = method
        if method == "gradual" and self.ticket is None:
            self._validate_schedule()
        self._pruned: Ticket | None = None
        """The masks by which weights are pruned so far; None before the first, and after the last.
        """
        self._processor: Processor | None = None
        """The processor for which all ranks choose products; None before weights are pruned."""

    @property
    def period(self) -> Period:
        """What the model is now."""
        return "pruning" if self.ticket is None and self._pruned is not None else super().period

    def _validate_before_launch(self, trainer: Trainer) -> None:
        with unless_made_later(trainer.lightning_module):
            self._validate_model(trainer.lightning_module)
            if trainer.strategy.launcher is not None and self.ticket is None:
                optimizers = optimizers_before_setup(trainer.lightning_module)
                with misconfigured():
                    self._rule.resolved(trainer.lightning_module, optimizers)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prune by the ticket if there is one: given by the user, or drawn before a resume."""
        self._validate_model(pl_module)
        if self.ticket is None:
            with misconfigured():
                self._rule = self._rule.resolved(pl_module, trainer.optimizers)
        validate_one_optimizer(trainer.optimizers, type(self).__name__)
        for optimizer in trainer.optimizers:
            validate_elementwise_optimizers(optimizer)
        if self.ticket is not None:
            self._prune(trainer, self.ticket)
            strategy_of(trainer).use_freed_memory()
        elif self._pruned is not None:
            self._prune(trainer, self._pruned)

    def _is_due(self, trainer: Trainer, before: Progress, now: Progress) -> bool:
        if self.method == "early-bird":
            return super()._is_due(trainer, before, now)
        schedule = self._schedule(trainer)
        steps = range(max(before.steps, schedule.begin) + 1, now.steps + 1)
        return any(map(schedule.changes_after, steps))

    def _compare(
        self, trainer: Trainer, module: LightningModule, now: Progress, late: bool, on_step: bool
    ) -> None:
        """Prune to the ratio of the schedule, or compare masks that may settle."""
        if self.method == "early-bird":
            super()._compare(trainer, module, now, late, on_step)
        elif late:
            self._draw(trainer, module, self._masks(trainer, module, self.pruning_ratio))
        else:
            ratio = cubic_ratio(self.pruning_ratio, self._schedule(trainer).progress(now.steps))
            masks = self._masks(trainer, module, ratio)
            self._pruned = self._ticket_of(trainer, module, masks, ratio)
            self._prune(trainer, self._pruned)

    def _schedule(self, trainer: Trainer) -> MaskSchedule:
        """The optimizer steps of this run after which the ratio rises."""
        assert self.draw_by is not None
        whens = (self._first, self.every, self.draw_by)
        begin, every, end = (in_steps(cast(float, when), trainer) for when in whens)
        if type(self._first) is type(self.draw_by):  # In order, but a short run rounds them alike.
            begin = min(begin, end - 1)
        with misconfigured():
            return MaskSchedule(begin, every, end)

    @property
    def _first(self) -> When:
        """When the ratio begins to rise."""
        return self.draw_after or self.every

    def _validate_schedule(self) -> None:
        """Check what can be seen of a schedule before the length of the run is known."""
        for name in ("every", "draw_after", "draw_by"):
            when = getattr(self, name)
            if isinstance(when, str) or (when is None and name == "draw_by"):
                raise MisconfigurationException(
                    f"{name}={when!r} with method='gradual': give it as optimizer steps (an int) "
                    "or a share of the run (a float), between which the pruning ratio rises; or "
                    "set method='early-bird'." + see("tickets")
                )
        begin, end = self._first, self.draw_by
        if type(begin) is type(end) and begin >= end:  # type: ignore[operator]
            raise MisconfigurationException(
                f"draw_by={end} must come after draw_after={begin} (every={self.every}, if that is "
                "None): with method='gradual' weights are pruned in between." + see("tickets")
            )

    def _new_masks(
        self, trainer: Trainer, module: LightningModule
    ) -> tuple[MaskBits, float | None]:
        strategy = strategy_of(trainer)
        masks = self._masks(trainer, module, self.pruning_ratio)
        counted = strategy.counted_parameters()
        return masks, self._window.add(masks, counted, strategy.inter_group, strategy.data_group)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if no ticket was drawn."""
        self._looked = None
        if self.ticket is not None:
            return
        drawn = f"No ticket was drawn in {trainer.global_step} optimizer steps"
        if self.method == "gradual":
            ratio = 0.0 if self._pruned is None else self._pruned.pruning_ratio
            rank_zero_warn(
                f"{drawn}: draw_by={self.draw_by} has not been reached. {ratio:.0%} of the entries "
                "are pruned. Set an earlier draw_by, or train longer." + see("tickets")
            )
            return
        rank_zero_warn(
            f"{drawn}: {self._not_settled()}. The weights are dense. Set draw_by, a larger "
            "threshold, a shorter interval (every) or a smaller window, or train longer."
            + see("tickets")
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the ticket and the distances; :meth:`on_save_checkpoint` adds the rest."""
        pruned = None if self._pruned is None else self._pruned.state_dict()
        return {**super().state_dict(), "processor": self._processor, "pruned": pruned}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Gather the masks of all stages into the state of the first one."""
        if self.ticket is None:
            strategy = strategy_of(trainer)
            checkpoint["callbacks"][self.state_key]["window"] = self._window.gather_state(
                strategy.counted_parameters(), strategy.inter_group
            )

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._processor = state.get("processor")
        pruned = state.get("pruned")
        self._pruned = None if pruned is None else Ticket.from_state_dict(pruned)

    def _masks(self, trainer: Trainer, module: LightningModule, ratio: float) -> MaskBits:
        """Compute the masks of the parameters that this rank counts."""
        strategy = strategy_of(trainer)
        return MaskBits(
            replace(self._rule, ratio=ratio).masks(
                module,
                trainer.optimizers,
                strategy.counted_parameters(),
                strategy.inter_group,
                strategy.stored_weights(),
            )
        )

    def _draw(self, trainer: Trainer, module: LightningModule, masks: MaskBits) -> None:
        """Make the masks of the first replica the ticket of all ranks, and prune by it."""
        strategy = strategy_of(trainer)
        self.ticket = self._ticket_of(trainer, module, masks, self.pruning_ratio)
        self.drawn_at, self._pruned = trainer.global_step, None
        self._window.clear()
        stages = strategy.parameter_stages()
        self._prune(trainer, self.ticket)
        strategy.use_freed_memory()
        rank_zero_info(f"Ticket drawn: {self.ticket}")
        self._warn_of_emptied(self.ticket)
        self._warn_of_imbalance(self.ticket, stages)

    def _ticket_of(
        self, trainer: Trainer, module: LightningModule, masks: MaskBits, ratio: float
    ) -> Ticket:
        """The masks of all stages, as the first replica has them; collective."""
        strategy = strategy_of(trainer)
        counted = strategy.counted_parameters()
        part = masks.only(name for name in masks if name in counted)
        part = broadcast_from_first(part, strategy.data_group)
        everywhere = MaskBits.merged(all_gather(part, strategy.inter_group))
        return Ticket(
            everywhere.only(self._rule.sizes(module)),
            pruning_ratio=ratio,
            score=self._rule.score_name,
            step=trainer.global_step,
            distance=self.distance,
            distances=self.distances,
        )

    def _warn_of_emptied(self, ticket: Ticket) -> None:
        share = min(_LITTLE, 1 - ticket.sparsity)
        low = [name for name, gone in ticket.layer_sparsity().items() if 1 - gone < share]
        if low:
            rank_zero_warn(
                f"The ticket keeps less than {share:.1%} of {few(low)}: their scores were low "
                "beside those of the others. If these weights matter, set a higher floor, another "
                "score, or leave them dense with prune={'PATTERN': False}." + see("tickets")
            )

    def _warn_of_imbalance(self, ticket: Ticket, stages: Mapping[str, Collection[int]]) -> None:
        kept: Counter[int] = Counter()
        for name, mask in ticket.masks.items():
            if len(stages[name]) == 1:  # Others are held by several stages.
                kept[min(stages[name])] += int(mask.sum())
        if kept and max(kept.values()) > 2 * min(kept.values()):
            most, least = max(kept, key=kept.__getitem__), min(kept, key=kept.__getitem__)
            rank_zero_warn(
                f"The ticket keeps {kept[most]} entries in stage {most}, but {kept[least]} in "
                f"stage {least}, and memory and time follow. Cut the stages for this ticket with "
                "balance=[...], or keep more alike with a higher floor." + see("tickets")
            )

    def _prune(self, trainer: Trainer, ticket: Ticket) -> None:
        strategy = strategy_of(trainer)
        mine = most_cautious(filter(None, (this_processor(), self._processor)))
        self._processor = most_cautious(all_gather(mine, strategy.world_group))
        backend = Backend("auto" if self.compute == "samo" else self.compute, self._processor)
        policy = self._policy(trainer, ticket, backend)
        strategy.sparsify(ticket.part(strategy.held_parameters()), policy, backend)

    def _policy(self, trainer: Trainer, ticket: Ticket, backend: Backend) -> Policy:
        if self.compute != "auto":
            return "samo" if self.compute == "samo" else "sparse"
        strategy = strategy_of(trainer)
        sixteen_bit = str(trainer.precision).startswith(("16", "bf16"))
        passes = strategy.microbatches * trainer.accumulate_grad_batches
        keeps_few = 1 - ticket.sparsity <= min(most_kept(backend, torch.bfloat16).values())
        return best_policy(sixteen_bit, passes, keeps_few and strategy.root_device.type == "cpu")

    @misconfigured()
    def _validate_model(self, module: nn.Module) -> None:
        """Check that the ticket, or the rule by which one is searched, fits the model."""
        if self.ticket is not None:
            self.ticket.validate_fits(module)
        else:
            self._rule.sizes(module)
