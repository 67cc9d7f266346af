"""The objects that the steps of a run share on one grid of ranks: pipeline, effects, state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pipeline.choice import InFlightLimit
from lightning_axosparse.pipeline.engine import SharedOrder
from lightning_axosparse.pipeline.pipeline import Pipeline
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.schedule import Schedule
from lightning_axosparse.pipeline.state.layer_state import LayerState
from lightning_axosparse.pipeline.state.module_state import ModuleState
from lightning_axosparse.strategy.compat.gradients import (
    pipeline_precision,
    replace_backward,
    restore_precision,
    show_whole_gradients,
)
from lightning_axosparse.strategy.compat.internals import callbacks_of
from lightning_axosparse.strategy.compat.metrics import PipelinedMetrics
from lightning_axosparse.strategy.stages.stage_module import StageModule
from lightning_axosparse.strategy.step.effects import StepEffects


class OpenPipeline:
    """The pipeline of one grid of ranks, with effects and state; creating it is collective.

    ``give_gradients`` sets the gradients of parameters to those that a step has computed.
    """

    def __init__(
        self,
        stage_module: StageModule,
        limit: InFlightLimit,
        schedule: type[Schedule],
        precision: Precision,
        give_gradients: Callable[[], None],
    ) -> None:
        module, grid, groups = stage_module.module, stage_module.grid, stage_module.groups
        self.stage_module = stage_module
        part = grid.part_of_batch if grid.replicas_per_batch > 1 else None
        self.rng = PipelineRNG(torch.initial_seed(), stage_module.device, part)
        with ExitStack() as undo:  # An error below undoes the changes before it.
            undo.callback(restore_precision, precision)
            pipeline_precision(
                precision,
                groups.whole,
                groups.world,
                stage_module.counting_rule(),
                stage_module.remote_gradients.forget_norms,
            )
            replace_backward(precision, give_gradients)
            if stage_module.weight_parts:
                show_whole_gradients(precision, module.trainer, stage_module.weight_parts.gathered)
            self.pipeline = Pipeline(
                stage_module.layers,
                stage_module.links(limit.largest),
                schedule,
                limit,
                partial(all_gather, group=groups.inter),
                None if groups.ordered is None else SharedOrder.of(groups.ordered),
                partial(_outer_parameters, stage_module),
            )
            self.metrics = PipelinedMetrics(
                module,
                callbacks_of(module.trainer),
                groups.data,
                partial(groups.broadcast_along_pipeline, stage=stage_module.last_stage),
                stage_module.runs_last_stage,
                stage_module.layers.refuse_inside,
            )
            undo.callback(self.metrics.detach)
            self.metrics.attach()
            remember = stage_module.layers.remember
            undo.callback(setattr, stage_module.layers, "remember", remember)
            self._watch()
            self._undo = undo.pop_all()

    def follow_changes(self) -> bool:
        """Watch the modules inside layers; return whether hooks have changed them."""
        if not self.stage_module.layers.follow_changes():
            return False
        self._watch()
        return True

    def _watch(self) -> None:
        stage_module = self.stage_module
        module, layers = stage_module.module, stage_module.layers
        has_stages = stage_module.groups.inter is not None
        self.effects = StepEffects(module, layers, self.metrics, has_stages)
        self.layer_state = LayerState(module)
        layers.remember = self.layer_state.remember

    def close(self) -> None:
        """Undo the changes to the module; metrics keep the states of the last stage."""
        self._undo.close()

    @contextmanager
    def layers_rewound(self, stages: Collection[int]) -> Iterator[None]:
        """Undo, after the context, the changes to the layers of some stages."""
        state = self.state_of_layers(stages)
        try:
            with state.writes():
                yield
        finally:
            state.rewind()

    def state_of_layers(self, stages: Collection[int]) -> ModuleState:
        """Capture the state of the layers of some stages, without objects used outside, too."""
        layers = self.stage_module.layers
        own = [layers.names[index] for stage in stages for index in layers.part(stage)]
        return ModuleState(self.stage_module.module, self.effects.reached, own)


def _outer_parameters(stage_module: StageModule) -> list[nn.Parameter]:
    """Return the parameters outside the layers that are trained."""
    outside = stage_module.sharding.parameters_outside_layers()
    return [parameter for parameter in outside if parameter.requires_grad]
