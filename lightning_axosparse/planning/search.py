"""Finds the fastest grid, micro-batch size and in-flight limit that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from lightning_axosparse.distributed.grid import divisors
from lightning_axosparse.pipeline.schedule import SCHEDULES, WeightGradients
from lightning_axosparse.pipeline.shard.partition import balance
from lightning_axosparse.planning.cost import Cluster, LayerCosts, Storage
from lightning_axosparse.planning.simulate import Seconds, Simulation, ring_all_reduce, simulate
from lightning_axosparse.support.troubleshooting import see


@dataclass(frozen=True)
class Workload:
    """A model to train and the cluster to train it on.

    Attributes:
        layers: the costs of the model's layers.
        cluster: the cluster.
        batch: samples per step, over all replicas.
        storage: how weights are stored.
        pruning_ratio: fraction of the weights that are pruned.
        recompute: whether layers use activation checkpointing.
        overhead: time that sparse storage adds to a pass, as a fraction of the pass.
        weight_gradients: when weight gradients may be made.
        shard_optimizer: whether replicas divide the optimizer's state.
        g_expert: over how many replicas experts may be spread.
    """

    layers: LayerCosts
    cluster: Cluster
    batch: int
    storage: Storage
    pruning_ratio: float = 0.0
    recompute: bool = False
    overhead: float = 0.0
    weight_gradients: tuple[WeightGradients, ...] = ("together",)
    shard_optimizer: bool = False
    g_expert: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Choice:
    """One way to run a workload, with ``microbatch`` samples in a micro-batch."""

    g_inter: int
    microbatch: int
    in_flight: int
    weight_gradients: WeightGradients = "together"
    g_expert: int = 1


@dataclass(frozen=True)
class Plan:
    """A choice and its simulated step.

    ``memory`` are the peak bytes of the device that needs most, ``message_seconds`` the seconds
    that the slowest link is busy, both directions added, with those in which tokens are exchanged.
    """

    choice: Choice
    g_data: int
    microbatches: int
    memory: float
    message_seconds: float
    all_reduce_seconds: float
    simulation: Simulation


def search(workload: Workload, best: int = 10) -> list[Plan]:
    """Return the fastest plans of a workload, at most ``best``, fastest first.

    A ValueError says what the smallest choice needs if nothing fits into memory.
    """
    estimates = [_StepEstimate(workload, choice) for choice in _choices(workload)]
    if not estimates:
        raise ValueError(
            f"A batch of {workload.batch} samples cannot be split evenly over the replicas of "
            f"{workload.cluster.devices} devices with at most {len(workload.layers.forward)} "
            "stages. Choose a batch that the number of devices divides." + see("planning")
        )
    fitting = [step for step in estimates if step.memory <= workload.cluster.memory]
    if not fitting:
        least = min(estimates, key=lambda step: step.memory)
        raise ValueError(
            f"Nothing fits: a device has {workload.cluster.memory / 1e9:.3g} GB, and the most "
            f"economical choice (g_inter={least.choice.g_inter}, micro-batches of "
            f"{least.choice.microbatch}) needs {least.memory / 1e9:.3g} GB. Recompute activations, "
            "prune more, or use more devices." + see("planning")
        )
    plans: list[Plan] = []
    for step in sorted(fitting, key=lambda step: step.lower_bound):
        if len(plans) == best and step.lower_bound >= plans[-1].simulation.makespan:
            break
        plans = sorted([*plans, step.plan()], key=_seconds_then_memory)[:best]
    return plans


def evaluate(workload: Workload, choice: Choice) -> Plan:
    """Simulate one choice, whether it fits into memory or not."""
    if workload.batch * choice.g_inter % (workload.cluster.devices * choice.microbatch):
        raise ValueError(
            f"A batch of {workload.batch} samples is not a whole number of micro-batches of "
            f"{choice.microbatch} for each replica of {choice.g_inter} of "
            f"{workload.cluster.devices} devices." + see("planning")
        )
    return _StepEstimate(workload, choice).plan()


def _seconds_then_memory(plan: Plan) -> tuple[float, float]:
    return plan.simulation.makespan, plan.memory


def _choices(workload: Workload) -> Iterator[Choice]:
    for g_inter in divisors(workload.cluster.devices):
        batch, rest = divmod(workload.batch * g_inter, workload.cluster.devices)
        if rest or g_inter > len(workload.layers.forward):
            continue
        # One stage waits for no message.
        kinds = workload.weight_gradients if g_inter > 1 else workload.weight_gradients[:1]
        for microbatch in divisors(batch):
            microbatches = batch // microbatch
            limits = {g_inter, 2 * g_inter} if g_inter > 1 else {1}
            for in_flight in {min(limit, microbatches) for limit in limits}:
                for kind in kinds:
                    yield Choice(g_inter, microbatch, in_flight, kind)
            for g_expert in (each for each in workload.g_expert if each > 1):
                if workload.cluster.devices // g_inter % g_expert == 0:
                    # Backward passes begin when all forward passes have run.
                    yield Choice(g_inter, microbatch, microbatches, "together", g_expert)


class _StepEstimate:
    """The times and memory of the parts of one step, before any simulation."""

    def __init__(self, workload: Workload, choice: Choice) -> None:
        self.choice = choice
        layers, stages, ratio = workload.layers, choice.g_inter, workload.pruning_ratio
        self._g_data = workload.cluster.devices // stages
        self._microbatches = workload.batch // self._g_data // choice.microbatch
        parts = _partition(layers.forward, stages)
        seconds = choice.microbatch * (1 + workload.overhead) / workload.cluster.speed
        recomputed = workload.recompute * _sums(layers.recomputed, parts)
        self._forward: Seconds = seconds * _sums(layers.forward, parts)
        self._backward: Seconds = seconds * (_sums(layers.backward, parts) + recomputed)
        self._weight_gradient: Seconds = seconds * _sums(layers.weight_gradients, parts)
        experts, g_expert = _sums(layers.expert_weights, parts), choice.g_expert
        others = _sums(layers.weights, parts) - experts + layers.outside_weights
        experts = experts / g_expert
        link = workload.cluster.exchange(stages, g_expert)
        moved = _sums(layers.token_bytes, parts) * choice.microbatch * (g_expert - 1) / g_expert
        # Tokens go and come back, and so do their gradients.
        one_way = np.where(moved > 0, link.latency + moved / link.bandwidth, 0.0)
        self._exchange: Seconds = 2 * one_way
        self._forward = self._forward + self._exchange
        self._backward = self._backward + self._exchange * (1 + workload.recompute)
        weights = others + experts
        storage, messages = workload.storage, 1.0
        if workload.shard_optimizer and self._g_data > 1:
            # An all-gather of the values takes half as long as an all-reduce of as many bytes.
            storage, messages = storage.divided(self._g_data), 1.5
        state = np.array([storage.state_bytes(n, ratio) for n in weights])
        self.memory = float((state + _activation_bytes(workload, choice, parts)).max())
        self._optimizer: Seconds = state / workload.cluster.memory_bandwidth
        ring = workload.cluster.ring(stages)
        self._all_reduce: Seconds = np.array(
            [
                sum(
                    ring_all_reduce(
                        messages * storage.reduced_bytes(n, ratio),
                        replicas,
                        ring.bandwidth,
                        ring.latency,
                    )
                    for n, replicas in ((other, self._g_data), (own, self._g_data // g_expert))
                    if n
                )
                for other, own in zip(others, experts, strict=True)
            ]
        )
        sent = [layers.output_bytes[part[-1]] for part in parts[:-1]]
        self._message_bytes = choice.microbatch * max(sent, default=0.0)
        self._wires = workload.cluster.wires(stages)

    @property
    def lower_bound(self) -> float:
        """Seconds that a step takes at least, whatever the schedule.

        These are all passes of one stage, and those of one micro-batch on the stages before it:
        forward, and, unless it may go on with weight gradients meanwhile, backward.
        """
        both, first = self._forward + self._backward, self._forward
        if self.choice.weight_gradients == "together":
            first = both
        pipeline = first.cumsum() - first + self._microbatches * both
        # Deferred, a stage may end last that is not the first.
        ends = pipeline + (self._all_reduce + self._optimizer).min()
        return float(ends.max())

    def plan(self) -> Plan:
        """Simulate the step."""
        choice = self.choice
        schedule = SCHEDULES[choice.weight_gradients]
        simulation = simulate(
            [
                schedule(
                    stage,
                    choice.g_inter,
                    self._microbatches,
                    choice.in_flight,
                    choice.g_expert > 1,
                )
                for stage in range(choice.g_inter)
            ],
            self._forward,
            self._backward,
            self._wires,
            self._message_bytes,
            self._all_reduce,
            self._optimizer,
            weight_gradient=self._weight_gradient,
        )
        slowest = min((wire.bandwidth for wire in self._wires), default=float("inf"))
        return Plan(
            choice=choice,
            g_data=self._g_data,
            microbatches=self._microbatches,
            memory=self.memory,
            message_seconds=2
            * self._microbatches
            * (self._message_bytes / slowest + float(self._exchange.max())),
            all_reduce_seconds=float(self._all_reduce.max()),
            simulation=simulation,
        )


@cache
def _partition(costs: tuple[float, ...], stages: int) -> list[range]:
    return balance(costs, stages)


def _sums(costs: Sequence[float], parts: Sequence[range]) -> Seconds:
    """Sum the costs of the layers of each stage, if they have any; shape ``(stages,)``."""
    return np.array([sum(costs[part.start : part.stop]) for part in parts], dtype=np.float64)


def _activation_bytes(workload: Workload, choice: Choice, parts: Sequence[range]) -> Seconds:
    """Return each stage's activation bytes at its in-flight limit, with temporary tensors."""
    layers = workload.layers
    temporary = np.zeros(len(parts))
    if workload.recompute:
        temporary += [max(layers.activation_bytes[layer] for layer in part) for part in parts]
    temporary[-1] += layers.loss_bytes
    kept = _sums(layers.output_bytes if workload.recompute else layers.activation_bytes, parts)
    return choice.microbatch * (choice.in_flight * kept + temporary)
