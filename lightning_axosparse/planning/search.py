"""Search: every grid, micro-batch and in-flight limit that fits, simulated, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from lightning_axosparse.grid import divisors
from lightning_axosparse.pipeline.partition import balance
from lightning_axosparse.pipeline.schedule import SCHEDULES
from lightning_axosparse.pipeline.simulate import (
    Seconds,
    Simulation,
    ring_all_reduce,
    simulate,
)
from lightning_axosparse.planning.cost import Cluster, LayerCosts
from lightning_axosparse.planning.memory import Storage


@dataclass(frozen=True)
class Job:
    """What is to be trained, and on what.

    Attributes:
        layers: the layers of the model.
        cluster: the machine.
        batch: samples of a step, over all replicas.
        storage: how weights are stored.
        pruning_ratio: share of the weights that are pruned.
        recompute: whether layers keep only their input and run forward again in backward.
        overhead: time that sparse storage adds to a pass, as a share of it.
        balance: what the stages are given evenly: time, or parameters.
    """

    layers: LayerCosts
    cluster: Cluster
    batch: int
    storage: Storage
    pruning_ratio: float = 0.0
    recompute: bool = False
    overhead: float = 0.0
    balance: Literal["time", "parameters"] = "time"


@dataclass(frozen=True)
class Choice:
    """One way to run a job: stages, samples of a micro-batch, micro-batches in flight."""

    g_inter: int
    microbatch: int
    in_flight: int


@dataclass(frozen=True)
class Plan:
    """A choice, and what a step would take.

    Attributes:
        choice: the choice.
        g_data: replicas.
        microbatches: micro-batches of a replica's share of the batch.
        memory: bytes that the fullest device may come to hold.
        message_seconds: seconds the busiest link is occupied, in both directions together.
        all_reduce_seconds: seconds of the longest data-parallel all-reduce.
        simulation: the simulated step.
    """

    choice: Choice
    g_data: int
    microbatches: int
    memory: float
    message_seconds: float
    all_reduce_seconds: float
    simulation: Simulation


def search(job: Job, best: int = 10) -> list[Plan]:
    """The fastest plans of a job, fastest first.

    Args:
        job: what is to be trained, and on what.
        best: how many plans to return, at most.

    Raises:
        ValueError: if nothing fits, with what the most economical choice would need.
    """
    stepped = [_Step(job, choice) for choice in _choices(job)]
    if not stepped:
        raise ValueError(
            f"A batch of {job.batch} samples cannot be dealt evenly to the replicas of "
            f"{job.cluster.devices} devices with at most {len(job.layers.forward)} stages. Choose "
            "a batch that the number of devices divides."
        )
    fitting = [step for step in stepped if step.memory <= job.cluster.memory]
    if not fitting:
        least = min(stepped, key=lambda step: step.memory)
        raise ValueError(
            f"Nothing fits: a device has {job.cluster.memory / 1e9:.3g} GB, and the most "
            f"economical choice (g_inter={least.choice.g_inter}, micro-batches of "
            f"{least.choice.microbatch}) needs {least.memory / 1e9:.3g} GB. Recompute activations, "
            "prune more, or use more devices."
        )
    plans: list[Plan] = []
    for step in sorted(fitting, key=lambda step: step.shortest):
        if len(plans) == best and step.shortest >= plans[-1].simulation.makespan:
            break
        plans = sorted([*plans, step.plan()], key=_rank)[:best]
    return plans


def evaluate(job: Job, choice: Choice) -> Plan:
    """Simulate one choice, whether it fits into memory or not.

    Raises:
        ValueError: if the batch cannot be dealt evenly to the replicas and their micro-batches.
    """
    if job.batch * choice.g_inter % (job.cluster.devices * choice.microbatch):
        raise ValueError(
            f"A batch of {job.batch} samples is not a whole number of micro-batches of "
            f"{choice.microbatch} for each replica of {choice.g_inter} of "
            f"{job.cluster.devices} devices."
        )
    return _Step(job, choice).plan()


def _rank(plan: Plan) -> tuple[float, float]:
    """The faster first; of equals the one that needs less memory."""
    return plan.simulation.makespan, plan.memory


def _choices(job: Job) -> Iterator[Choice]:
    for g_inter in divisors(job.cluster.devices):
        share, rest = divmod(job.batch * g_inter, job.cluster.devices)
        if rest or g_inter > len(job.layers.forward):
            continue
        for microbatch in divisors(share):
            microbatches = share // microbatch
            limits = {g_inter, 2 * g_inter} if g_inter > 1 else {1}
            for in_flight in {min(limit, microbatches) for limit in limits}:
                yield Choice(g_inter, microbatch, in_flight)


class _Step:
    """The parts of one step of a job, run in one way."""

    def __init__(self, job: Job, choice: Choice) -> None:
        self.choice = choice
        layers, stages, ratio = job.layers, choice.g_inter, job.pruning_ratio
        self._g_data = job.cluster.devices // stages
        self._microbatches = job.batch // self._g_data // choice.microbatch
        evened = layers.forward if job.balance == "time" else layers.weights
        parts = _dealt(evened, stages)
        seconds = choice.microbatch * (1 + job.overhead) / job.cluster.speed
        again = job.recompute * _sums(layers.again, parts)
        self._forward: Seconds = seconds * _sums(layers.forward, parts)
        self._backward: Seconds = seconds * (_sums(layers.backward, parts) + again)
        weights = _sums(layers.weights, parts) + layers.outside_weights
        state = np.array([job.storage.state_bytes(n, ratio) for n in weights])
        self.memory = float((state + _activation_bytes(job, choice, parts)).max())
        self._optimizer: Seconds = state / job.cluster.memory_bandwidth
        ring = job.cluster.ring(stages)
        self._all_reduce: Seconds = np.array(
            [
                ring_all_reduce(
                    job.storage.reduced_bytes(n, ratio), self._g_data, ring.bandwidth, ring.latency
                )
                for n in weights
            ]
        )
        sent = [layers.output_bytes[part[-1]] for part in parts[:-1]]
        self._message_bytes = choice.microbatch * max(sent, default=0.0)
        self._wires = job.cluster.wires(stages)

    @property
    def shortest(self) -> float:
        """Seconds below which no order can bring the step.

        All passes of one stage, and the way of one micro-batch to that stage and back.
        """
        both = self._forward + self._backward
        pipeline = (both.cumsum() + (self._microbatches - 1) * both).max()
        return float(pipeline + self._all_reduce[0] + self._optimizer[0])

    def plan(self) -> Plan:
        """Simulate it."""
        choice = self.choice
        simulation = simulate(
            [
                SCHEDULES["message-driven"](
                    stage, choice.g_inter, self._microbatches, choice.in_flight
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
            message_seconds=2 * self._microbatches * self._message_bytes / slowest,
            all_reduce_seconds=float(self._all_reduce.max()),
            simulation=simulation,
        )


@cache
def _dealt(costs: tuple[float, ...], stages: int) -> list[range]:
    return balance(costs, stages)


def _sums(costs: Sequence[float], parts: Sequence[range]) -> Seconds:
    """What the layers of each stage cost together, shape ``(stages,)``."""
    return np.array([sum(costs[layer] for layer in part) for part in parts], dtype=np.float64)


def _activation_bytes(job: Job, choice: Choice, parts: Sequence[range]) -> Seconds:
    """What each stage may hold at its in-flight limit, and what lives for a moment beside it."""
    layers = job.layers
    moment = np.zeros(len(parts))
    if job.recompute:
        moment += [max(layers.kept_bytes[layer] for layer in part) for part in parts]
    moment[-1] += layers.closing_bytes
    kept = _sums(layers.output_bytes if job.recompute else layers.kept_bytes, parts)
    return choice.microbatch * (choice.in_flight * kept + moment)
