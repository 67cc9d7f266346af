"""Deployment: a module dealt to the stages of this rank, and made whole again afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from lightning_axosparse.adapters.device import move_held
from lightning_axosparse.dealing import Deal
from lightning_axosparse.groups import Groups
from lightning_axosparse.pipeline.link import Link, LoopbackLink, MailboxLink
from lightning_axosparse.pipeline.recompute import Recompute
from lightning_axosparse.pipeline.split import Split
from lightning_axosparse.pipeline.stage import PipelinedLayers
from lightning_axosparse.reduce import GradientReducer, Share
from lightning_axosparse.sparse import densify
from lightning_axosparse.sparse.parcel import forget
from lightning_axosparse.sparse.scratch import scratch
from lightning_axosparse.sparse.swap import owners
from lightning_axosparse.transfer import Transfer


class Deployment:
    """The part of a module that lives on this rank.

    Creating it is collective over the job; the weights of the first replica become everybody's.

    Args:
        module: the user's module, whole.
        dealt: which layers each stage computes.
        groups: the process groups of the job's grid.
        stages: the stages on this rank: one, or all with the loopback transport.
        device: device of this rank.
        recompute: which layers are computed again in the backward pass; None for none.
    """

    def __init__(
        self,
        module: LightningModule,
        dealt: Deal,
        groups: Groups,
        stages: range,
        device: torch.device,
        recompute: Recompute | None,
    ) -> None:
        self.module, self.stages, self.device = module, stages, device
        self.groups, self.grid = groups, groups.grid
        self.split = Split(module, dealt.names, dealt.parts)
        groups.share(self._shared_sets())
        self._recompute = recompute
        self.layers = PipelinedLayers(dealt.names, dealt.layers, dealt.parts, recompute)
        self.optimizer_groups: list[list[list[str]]] = []
        self.reducer: GradientReducer | None = None

    @property
    def last_stage(self) -> int:
        """Index of the last stage of the pipeline."""
        return len(self.layers.parts) - 1

    @property
    def runs_last_stage(self) -> bool:
        """Whether this rank runs steps to their end."""
        return self.last_stage in self.stages

    def occupy(self, optimizers: Sequence[Optimizer]) -> None:
        """Keep only what lives here, in the module and in its optimizers, and move it in."""
        names = self.split.names
        self.optimizer_groups = [
            [[names[parameter] for parameter in group["params"]] for group in opt.param_groups]
            for opt in optimizers
        ]
        owned = owners(self.module)
        self.split.take_away(self.stages)
        held = self.split.held()
        for parameter, name in names.items():
            if name not in held:
                forget(parameter, owned[name], optimizers)
        self._give_params(optimizers)
        move_held(self.module, self.device)
        self._agree_on_weights()
        self._example_input = self.module.example_input_array
        self._install()

    def move(self, dealt: Deal, groups: Groups, optimizers: Sequence[Optimizer]) -> None:
        """Become the part of the module that lives on this rank in another grid.

        Weights and optimizer state come from the ranks that had them; collective over the job.

        Args:
            dealt: the same layers, dealt to the stages of the new grid.
            groups: the process groups of the new grid, whose feeds are those of the present one.
            optimizers: the optimizers, between two steps.
        """
        self._uninstall()
        old, new = self.grid, groups.grid
        Transfer(self.split, old, new, optimizers, self.device).run(dealt.parts)
        self._give_params(optimizers)
        self.groups, self.grid, self.stages = groups, new, range(new.stage, new.stage + 1)
        groups.share(self._shared_sets())
        self.layers = PipelinedLayers(dealt.names, dealt.layers, dealt.parts, self._recompute)
        self._install()

    def leave(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the module whole, dense and ordinary again, on the CPU of every rank."""
        self._uninstall()
        densify(self.module, optimizers[0] if optimizers else None)
        scratch.clear()
        self.split.give_back()
        self.module.cpu()
        self._collect()

    def _give_params(self, optimizers: Sequence[Optimizer]) -> None:
        """Put the parameters that live here, and no others, into the optimizers' groups."""
        held = self.split.held()
        for optimizer, groups in zip(optimizers, self.optimizer_groups, strict=True):
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [held[name] for name in names if name in held]

    def _install(self) -> None:
        self.layers.install(self.stages)
        # Lightning's model summary would send it through layers that are elsewhere.
        if len(self.stages) <= self.last_stage:
            self.module.example_input_array = None
        if self.grid.world_size > 1:
            self.reducer = GradientReducer(self._shares(), self.grid.feeds)

    def _uninstall(self) -> None:
        if self.reducer is not None:
            self.reducer.remove()
        self.layers.uninstall()
        self.module.example_input_array = self._example_input

    def links(self, window: int) -> dict[int, Link]:
        """Connect the stages of this rank; collective over the job."""
        if len(self.stages) > 1 or self.last_stage == 0:
            return dict(enumerate(LoopbackLink.chain(self.last_stage + 1)))
        from lightning_axosparse.mpi.neighbours import neighbours
        from lightning_axosparse.mpi.staging import staging

        stage, grid = self.grid.stage, self.grid
        previous, following = neighbours(
            stage, grid.g_inter, grid.replica, window, staging(self.device)
        )
        return {stage: MailboxLink(previous, following, self.device)}

    def _shared_sets(self) -> set[frozenset[int]]:
        if self.grid.g_inter == 1:
            return set()
        return set(self.split.holders.values())

    def _shares(self) -> list[Share]:
        """The held parameters by who else holds them, in an order that all ranks agree on."""
        by_stages: dict[frozenset[int], list[nn.Parameter]] = {}
        for name, parameter in self.split.held().items():
            by_stages.setdefault(self._holders(name), []).append(parameter)
        shares = []
        for stages in sorted(by_stages, key=sorted):
            group = self.groups.holding(stages)
            if group is not None:
                shares.append(Share(group, by_stages[stages]))
        return shares

    def _holders(self, name: str) -> frozenset[int]:
        """The stages, as ranks see them, that hold a parameter."""
        stages = self.split.holders[name]
        return stages if self.grid.g_inter > 1 else frozenset([0])

    def _agree_on_weights(self) -> None:
        for name, parameter in self.split.held().items():
            stages = self._holders(name)
            group = self.groups.holding(stages)
            if group is not None:
                source = self.grid.ranks_holding(stages)[0]
                dist.broadcast(parameter.data, src=source, group=group)
        if self.groups.data is not None:
            buffers = [b for b in self.module.buffers() if not b.is_meta and b.numel()]
            for buffer in buffers:
                dist.broadcast(buffer, src=self.grid.stage, group=self.groups.data)

    def _collect(self) -> None:
        """Fill in the parameters and buffers of other stages."""
        if self.groups.inter is None:
            return
        ranks = self.grid.pipeline(self.grid.replica)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                source = ranks[min(self.split.holders[name])]
                dist.broadcast(parameter.data, src=source, group=self.groups.inter)
            buffers = dict(self.module.named_buffers())
            for stage, source in enumerate(ranks):
                mine = {k: b for k, b in buffers.items() if self.split.source_of(k) == stage}
                for key, value in self.groups.broadcast_along_pipeline(mine, stage).items():
                    if self.grid.rank != source:
                        buffers[key].set_(value)  # type: ignore[call-overload]
