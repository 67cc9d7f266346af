import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.pipeline.schedule import (
    SCHEDULES,
    ForwardOnly,
    MessageDriven,
    OneForwardOneBackward,
    Op,
    Schedule,
)

EVERY = list(SCHEDULES.values())

shapes = st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(1, 14))


def drive(
    kind: type[Schedule],
    stages: int,
    microbatches: int,
    limit: int,
    seed: int,
    *forwards_first: bool,
) -> list:
    """Run a pipeline whose messages arrive, and whose stages act, in a random order."""
    rng = random.Random(seed)
    given = stages, microbatches, limit, *forwards_first
    schedules = [kind(stage, *given) for stage in range(stages)]
    activations = [microbatches] + [0] * (stages - 1)
    gradients = [0] * (stages - 1) + [microbatches]
    on_the_way: list[tuple[list[int], int]] = []
    history: list[list[Op]] = [[] for _ in range(stages)]
    peak = [0] * stages
    while not all(schedule.finished for schedule in schedules):
        acted = False
        for stage in rng.sample(range(stages), stages):
            op = schedules[stage].start_next(activations[stage], gradients[stage])
            if op is None:
                continue
            acted = True
            history[stage].append(op)
            peak[stage] = max(peak[stage], schedules[stage].held)
            neighbour = stage + 1 if op.kind == "forward" else stage - 1
            if 0 <= neighbour < stages:
                arrivals = activations if op.kind == "forward" else gradients
                on_the_way.append((arrivals, neighbour))
        if not acted:
            assert on_the_way, "every stage waits and no message is on its way"
        for message in rng.sample(on_the_way, rng.randint(not acted, len(on_the_way))):
            on_the_way.remove(message)
            message[0][message[1]] += 1
    assert not on_the_way
    return list(zip(history, peak, strict=True))


@pytest.mark.parametrize("schedule", EVERY)
@given(shape=shapes, seed=st.integers(0, 10_000))
def test_every_pass_of_every_microbatch_runs_once_whatever_order_messages_come_in(
    schedule: type[Schedule], shape: tuple[int, int, int], seed: int
) -> None:
    stages, microbatches, limit = shape
    for history, _ in drive(schedule, stages, microbatches, limit, seed):
        every = list(range(microbatches))
        assert len(history) == 2 * microbatches
        for kind in ("forward", "backward"):
            assert [op.microbatch for op in history if op.kind == kind] == every
        for microbatch in every:
            places = [history.index(Op(kind, microbatch)) for kind in ("forward", "backward")]
            assert places == sorted(places)


@given(shape=shapes, seed=st.integers(0, 10_000))
def test_no_stage_holds_more_than_the_limit(shape: tuple[int, int, int], seed: int) -> None:
    stages, microbatches, limit = shape
    for _, peak in drive(MessageDriven, stages, microbatches, limit, seed):
        assert peak <= limit
    for stage, (_, peak) in enumerate(drive(OneForwardOneBackward, stages, microbatches, 99, seed)):
        assert peak == min(stages - stage, microbatches)


@pytest.mark.parametrize("schedule", EVERY)
@given(shape=shapes, seed=st.integers(0, 10_000))
def test_backward_passes_may_wait_for_all_forward_passes(
    schedule: type[Schedule], shape: tuple[int, int, int], seed: int
) -> None:
    stages, microbatches, limit = shape
    for history, peak in drive(schedule, stages, microbatches, limit, seed, True):
        kinds = [op.kind for op in history]
        assert kinds[:microbatches] == ["forward"] * microbatches
        assert kinds.count("backward") == microbatches
        assert peak == microbatches


@given(shape=shapes, seed=st.integers(0, 10_000))
def test_evaluation_goes_forward_alone(shape: tuple[int, int, int], seed: int) -> None:
    stages, microbatches, limit = shape
    for history, peak in drive(ForwardOnly, stages, microbatches, limit, seed):
        assert history == [Op("forward", i) for i in range(microbatches)]
        assert peak == 0


@given(stage=st.integers(0, 3), activations=st.integers(0, 8), gradients=st.integers(0, 8))
def test_message_driven_never_waits_while_something_may_run(
    stage: int, activations: int, gradients: int
) -> None:
    schedule = MessageDriven(stage, 4, 8, 6)
    while schedule.start_next(activations, gradients) is not None:
        pass
    assert schedule.forwards == min(activations, 6 + schedule.backwards, 8)
    assert schedule.backwards == min(gradients, schedule.forwards)


def test_without_slack_it_waits_for_a_missing_activation_below_its_warm_up() -> None:
    tight, loose = MessageDriven(0, 4, 8, 4), MessageDriven(0, 4, 8, 5)
    for schedule in (tight, loose):
        assert [schedule.start_next(2, 1) for _ in range(2)] == [Op("forward", i) for i in range(2)]
    assert tight.start_next(2, 1) is None
    assert loose.start_next(2, 1) == Op("backward", 0)
    assert tight.start_next(3, 1) == Op("forward", 2)


def test_message_driven_runs_in_1f1b_order_when_messages_come_in_time() -> None:
    for stage in range(4):
        orders = []
        for kind in (MessageDriven, OneForwardOneBackward):
            schedule = kind(stage, 4, 8, 8)
            orders.append([schedule.start_next(8, 8) for _ in range(16)])
        assert orders[0] == orders[1]


def test_message_driven_goes_ahead_where_1f1b_waits_for_a_late_gradient() -> None:
    early, patient = MessageDriven(0, 2, 8, 4), OneForwardOneBackward(0, 2, 8, 4)
    assert [early.start_next(8, 0) for _ in range(5)] == [
        *(Op("forward", i) for i in range(4)),
        None,
    ]
    assert [patient.start_next(8, 0) for _ in range(3)] == [
        Op("forward", 0),
        Op("forward", 1),
        None,
    ]
