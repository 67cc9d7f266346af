"""Search: every grid, micro-batch and in-flight limit that fits, simulated, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from lightning_axosparse.pipeline.partition import balance
from lightning_axosparse.pipeline.schedule import SCHEDULES
from lightning_axosparse.pipeline.simulate import (
    Seconds,
    Simulation,
    ring_all_reduce,
    simulate,
)
from lightning_axosparse.planning.cost import Cluster, Transformer
from lightning_axosparse.planning.memory import Storage


@dataclass(frozen=True)
class Job:
    """What is to be trained, and on what.

    Attributes:
        model: the model.
        cluster: the machine.
        batch: samples of a step, over all replicas.
        storage: how weights are stored.
        pruning_ratio: share of the weights that are pruned.
        recompute: whether blocks keep only their input and run forward again in backward.
        overhead: time that sparse storage adds to a pass, as a share of it.
    """

    model: Transformer
    cluster: Cluster
    batch: int
    storage: Storage
    pruning_ratio: float = 0.0
    recompute: bool = False
    overhead: float = 0.0


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
            f"{job.cluster.devices} devices with at most {job.model.layers} stages. Choose a "
            "batch that the number of devices divides."
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
    for g_inter in _divisors(job.cluster.devices):
        share, rest = divmod(job.batch * g_inter, job.cluster.devices)
        if rest or g_inter > job.model.layers:
            continue
        for microbatch in _divisors(share):
            microbatches = share // microbatch
            limits = {g_inter, 2 * g_inter} if g_inter > 1 else {1}
            for in_flight in {min(limit, microbatches) for limit in limits}:
                yield Choice(g_inter, microbatch, in_flight)


@cache
def _dealt(model: Transformer, stages: int) -> tuple[int, ...]:
    """How many blocks each stage computes; the last stage has the head, too."""
    costs = [model.layer_flops] * model.layers
    costs[-1] += model.head_flops
    return tuple(len(part) for part in balance(costs, stages))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


class _Step:
    """The parts of one step of a job, run in one way."""

    def __init__(self, job: Job, choice: Choice) -> None:
        self.choice = choice
        self._job, stages = job, choice.g_inter
        model, ratio = job.model, job.pruning_ratio
        self._g_data = job.cluster.devices // stages
        self._microbatches = job.batch // self._g_data // choice.microbatch
        layers: Seconds = np.array(_dealt(model, stages), dtype=np.float64)
        head = np.zeros(stages)
        head[-1] = model.head_flops
        seconds_a_flop = choice.microbatch * (1 + job.overhead) / job.cluster.speed
        blocks = layers * model.layer_flops * seconds_a_flop
        self._forward: Seconds = blocks + head * seconds_a_flop
        self._backward: Seconds = 2 * self._forward + job.recompute * blocks
        weights = layers * model.layer_weights + model.embedding_weights
        state = np.array([job.storage.state_bytes(n, ratio) for n in weights])
        self.memory = float((state + self._activation_bytes(layers)).max())
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
        self._message_bytes = choice.microbatch * model.message_bytes
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

    def _activation_bytes(self, layers: Seconds) -> Seconds:
        """What a stage may hold at its in-flight limit, and one micro-batch's logits."""
        model, microbatch = self._job.model, self.choice.microbatch
        kept = model.message_bytes if self._job.recompute else model.layer_activation_bytes
        transient = model.layer_activation_bytes if self._job.recompute else 0.0
        logits = np.zeros(len(layers))
        logits[-1] = model.sequence * model.vocabulary * 4.0
        return microbatch * (self.choice.in_flight * layers * kept + transient + logits)
