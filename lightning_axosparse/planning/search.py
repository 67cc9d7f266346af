"""Finds the fastest grid, micro-batch size and in-flight limit that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from lightning_axosparse.distributed.grid import divisors
from lightning_axosparse.pipeline.schedule import MessageDriven
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
        shard_optimizer: whether replicas shard the optimizer's state.
        g_expert: over how many replicas experts may be spread.
        g_tensor: how many ranks may share the layers of a stage.
        splits_experts: whether these ranks divide experts, too; otherwise they have the same ones.
    """

    layers: LayerCosts
    cluster: Cluster
    batch: int
    storage: Storage
    pruning_ratio: float = 0.0
    recompute: bool = False
    overhead: float = 0.0
    shard_optimizer: bool = False
    g_expert: tuple[int, ...] = (1,)
    g_tensor: tuple[int, ...] = (1,)
    splits_experts: bool = False


@dataclass(frozen=True)
class Choice:
    """One way to run a workload, with ``microbatch`` samples in a micro-batch."""

    g_inter: int
    microbatch: int
    in_flight: int
    g_expert: int = 1
    g_tensor: int = 1


@dataclass(frozen=True)
class Plan:
    """A choice and its simulated step.

    ``memory`` are the peak bytes of the device that needs most, ``message_seconds`` the seconds
    that the slowest link is busy, both directions added, and those of exchanges inside of layers.
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

    A ValueError reports the memory of the smallest choice if nothing fits.
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
        plans.append(step.plan())
        plans.sort(key=lambda plan: (plan.simulation.makespan, plan.memory))
        del plans[best:]
    return plans


def evaluate(workload: Workload, choice: Choice) -> Plan:
    """Simulate one choice, whether it fits into memory or not."""
    ranks = choice.g_inter * choice.g_tensor
    if workload.batch * ranks % (workload.cluster.devices * choice.microbatch):
        raise ValueError(
            f"A batch of {workload.batch} samples is not a whole number of micro-batches of "
            f"{choice.microbatch} for each replica of {ranks} of "
            f"{workload.cluster.devices} devices." + see("planning")
        )
    return _StepEstimate(workload, choice).plan()


def _choices(workload: Workload) -> Iterator[Choice]:
    devices = workload.cluster.devices
    for g_inter, g_tensor in product(divisors(devices), workload.g_tensor):
        replica = g_inter * g_tensor
        batch, rest = divmod(workload.batch * replica, devices)
        if rest or devices % replica or g_inter > len(workload.layers.forward):
            continue
        for microbatch in divisors(batch):
            microbatches = batch // microbatch
            limits = {g_inter, 2 * g_inter} if g_inter > 1 else {1}
            for in_flight in {min(limit, microbatches) for limit in limits}:
                yield Choice(g_inter, microbatch, in_flight, g_tensor=g_tensor)
            for g_expert in (size for size in workload.g_expert if size > 1):
                if devices // replica % g_expert == 0:
                    # Backward passes begin when all forward passes have run.
                    yield Choice(g_inter, microbatch, microbatches, g_expert, g_tensor)


class _StepEstimate:
    """The times and memory of the parts of one step, before any simulation."""

    def __init__(self, workload: Workload, choice: Choice) -> None:
        self.choice = choice
        layers, stages, ratio = workload.layers, choice.g_inter, workload.pruning_ratio
        cluster, g_tensor = workload.cluster, choice.g_tensor
        self._g_data = cluster.devices // (stages * g_tensor)
        self._microbatches = workload.batch // self._g_data // choice.microbatch
        parts = _partition(layers.forward, stages)
        seconds = choice.microbatch * (1 + workload.overhead) / cluster.speed / g_tensor
        recomputed = workload.recompute * _sums(layers.recomputed, parts)
        # Recomputation exchanges nothing a second time.
        exchange = self._token_exchange(workload, parts) + self._layer_all_reduce(workload, parts)
        self._exchange = exchange
        self._forward: Seconds = seconds * _sums(layers.forward, parts) + exchange
        self._backward: Seconds = seconds * (_sums(layers.backward, parts) + recomputed) + exchange
        experts, g_expert = _sums(layers.expert_weights, parts), choice.g_expert
        others = (_sums(layers.weights, parts) - experts) / g_tensor + layers.outside_weights
        same_experts = self._g_data // g_expert
        if workload.splits_experts:
            experts = experts / g_tensor
        elif g_expert > 1:  # Of these, each computes its share of a replica's tokens.
            same_experts *= g_tensor
        experts = experts / g_expert
        storage, ring = workload.storage, cluster.ring(stages * g_tensor)
        # An all-gather of the values takes half as long as an all-reduce of as many bytes.
        messages = 1.5 if workload.shard_optimizer else 1.0
        state, self._all_reduce = np.full(stages, storage.fixed), np.zeros(stages)
        for weights, replicas in ((others, self._g_data), (experts, same_experts)):
            per_rank = replace(storage, fixed=0.0)
            if workload.shard_optimizer:
                per_rank = per_rank.sharded(replicas)
            state = state + per_rank.state_bytes(weights, ratio)
            reduced = messages * storage.reduced_bytes(weights, ratio)
            duration = ring_all_reduce(reduced, replicas, ring.bandwidth, ring.latency)
            self._all_reduce += np.where(weights > 0, duration, 0.0)
        self.memory = float((state + _activation_bytes(workload, choice, parts)).max())
        self._optimizer: Seconds = state / cluster.memory_bandwidth
        sent = [layers.output_bytes[part[-1]] for part in parts[:-1]]
        self._message_bytes = choice.microbatch * max(sent, default=0.0)
        self._wires = cluster.wires(stages)

    def _token_exchange(self, workload: Workload, parts: Sequence[range]) -> Seconds:
        """Return the seconds of a pass in which tokens go to their experts and come back."""
        choice, g_expert = self.choice, self.choice.g_expert
        link = workload.cluster.exchange(choice.g_inter * choice.g_tensor, g_expert)
        share = choice.microbatch / choice.g_tensor * (g_expert - 1) / g_expert
        moved = _sums(workload.layers.token_bytes, parts) * share
        return 2 * np.where(moved > 0, link.latency + moved / link.bandwidth, 0.0)

    def _layer_all_reduce(self, workload: Workload, parts: Sequence[range]) -> Seconds:
        """Return the seconds of a pass in which ranks all-reduce the outputs of shared layers."""
        choice = self.choice
        link = workload.cluster.exchange(choice.g_inter, choice.g_tensor)
        moved = choice.microbatch * _sums(workload.layers.shared_bytes, parts)
        times: Seconds = np.array([2.0 * len(part) for part in parts])  # two in each layer
        seconds = ring_all_reduce(moved / times, choice.g_tensor, link.bandwidth, link.latency)
        return times * seconds

    @property
    def lower_bound(self) -> float:
        """Seconds that a step takes at least, whatever the schedule.

        That is the time of all passes of one stage and of one micro-batch on the stages before it,
        then of the all-reduce and the optimizer step of the first stage, which ends last.
        """
        both = self._forward + self._backward
        pipeline = both.cumsum() - both + self._microbatches * both
        return float(pipeline.max() + self._all_reduce[0] + self._optimizer[0])

    def plan(self) -> Plan:
        """Simulate the step."""
        choice = self.choice
        simulation = simulate(
            [
                MessageDriven(
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


_partition = cache(balance)


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
    if workload.recompute:
        saved = _sums(layers.output_bytes, parts)
    else:
        divided = _sums(layers.split_activation_bytes, parts)
        saved = _sums(layers.activation_bytes, parts) - divided + divided / choice.g_tensor
    return choice.microbatch * (choice.in_flight * saved + temporary)
