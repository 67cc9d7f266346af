import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.pipeline.schedule import (
    SCHEDULES,
    BubbleFilling,
    CooldownFilling,
    ForwardOnly,
    GPipe,
    MessageDriven,
    OneForwardOneBackward,
    Op,
    Schedule,
    ZeroBubbleH1,
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
    """Run a pipeline whose messages arrive, and whose stages act, in a random order.

    Weight gradients of a micro-batch are one to three, and count as one pass, their last.
    """
    rng = random.Random(seed)
    given = stages, microbatches, limit, *forwards_first
    schedules = [kind(stage, *given) for stage in range(stages)]
    activations = [microbatches] + [0] * (stages - 1)
    gradients = [0] * (stages - 1) + [microbatches]
    on_the_way: list[tuple[list[int], int]] = []
    history: list[list[Op]] = [[] for _ in range(stages)]
    peak, products = [0] * stages, [0] * stages
    while not all(schedule.finished for schedule in schedules):
        acted = False
        for stage in rng.sample(range(stages), stages):
            op = schedules[stage].start_next(activations[stage], gradients[stage])
            if op is None:
                continue
            acted = True
            if op.kind == "weight gradient":
                products[stage] = products[stage] or rng.randint(1, 3)
                products[stage] -= 1
                if products[stage] == 0:
                    schedules[stage].end_weight_gradients()
                    history[stage].append(op)
                continue
            history[stage].append(op)
            peak[stage] = max(peak[stage], schedules[stage].held + schedules[stage].pending)
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
    for stage, (history, _) in enumerate(drive(schedule, stages, microbatches, limit, seed)):
        defers = schedule(stage, stages, microbatches, limit).defers
        every = list(range(microbatches))
        passes = {
            "forward": every,
            "backward": every,
            "weight gradient": list(filter(defers, every)),
        }
        assert len(history) == sum(map(len, passes.values()))
        for kind, expected in passes.items():
            assert [op.microbatch for op in history if op.kind == kind] == expected
        for microbatch in every:
            kinds = [kind for kind, those in passes.items() if microbatch in those]
            places = [history.index(Op(kind, microbatch)) for kind in kinds]
            assert places == sorted(places)
        # Terms of a gradient are added in the order of the micro-batches.
        makes = [op for op in history if op.kind == "weight gradient" or not defers(op.microbatch)]
        added = [op.microbatch for op in makes if op.kind != "forward"]
        assert added == every


@given(shape=shapes, seed=st.integers(0, 10_000))
def test_no_stage_holds_more_than_the_limit(shape: tuple[int, int, int], seed: int) -> None:
    stages, microbatches, limit = shape
    for schedule in (MessageDriven, BubbleFilling, CooldownFilling, ZeroBubbleH1):
        for _, peak in drive(schedule, stages, microbatches, limit, seed):
            assert peak <= limit
    for stage, (_, peak) in enumerate(drive(OneForwardOneBackward, stages, microbatches, 99, seed)):
        assert peak == min(stages - stage, microbatches)
    for _, peak in drive(GPipe, stages, microbatches, limit, seed):
        assert peak == microbatches


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


@given(shape=shapes, seed=st.integers(0, 10_000))
def test_weight_gradients_wait_until_nothing_else_may_run(
    shape: tuple[int, int, int], seed: int
) -> None:
    stages, microbatches, limit = shape
    rng = random.Random(seed)
    stage = rng.randrange(stages)
    filling = BubbleFilling(stage, stages, microbatches, limit)
    plain = MessageDriven(stage, stages, microbatches, limit)
    activations = gradients = 0
    while not filling.finished:
        activations += rng.randint(0, 2)
        gradients += rng.randint(0, 2)
        plain.forwards, plain.backwards = filling.forwards, filling.backwards
        plain.in_flight = limit - filling.pending
        expected = plain.start_next(activations, gradients)
        pending = filling.pending
        op = filling.start_next(activations, gradients)
        if expected is not None or not pending:
            assert op == expected
            continue
        assert op == Op("weight gradient", filling.weight_gradients)
        filling.end_weight_gradients()


def test_weight_gradients_make_room_for_the_next_forward() -> None:
    schedule = BubbleFilling(0, 2, 5, 3)
    assert [schedule.start_next(5, 1) for _ in range(4)] == [
        Op("forward", 0),
        Op("forward", 1),
        Op("backward", 0),
        Op("forward", 2),
    ]
    # Two micro-batches are held and one is pending, and no gradient is there.
    assert schedule.start_next(5, 1) == Op("weight gradient", 0)
    assert schedule.start_next(5, 1) == Op("weight gradient", 0), "it has a second product"
    assert schedule.start_next(5, 2) == Op("backward", 1), "a gradient comes before a third"
    schedule.end_weight_gradients()
    assert schedule.start_next(5, 2) == Op("forward", 3)
    assert schedule.start_next(5, 2) == Op("weight gradient", 1)


def test_the_weight_gradients_of_the_last_microbatches_alone_are_deferred() -> None:
    for stages, microbatches in ((1, 4), (2, 8), (4, 16), (4, 5)):
        for stage in range(stages):
            schedule = CooldownFilling(stage, stages, microbatches, 2 * stages)
            deferred = [n for n in range(microbatches) if schedule.defers(n)]
            assert deferred == list(range(microbatches))[-(2 * stages - 1) :]


def test_zb_h1_in_the_order_of_its_paper() -> None:
    """Figure 1 of Qi et al. for four stages: one weight gradient more is postponed each stage."""
    orders = []
    for stage in range(4):
        schedule, order = ZeroBubbleH1(stage, 4, 5, 4), ""
        while (op := schedule.start_next(5, 5)) is not None:
            order += {"forward": "F", "backward": "B", "weight gradient": "W"}[op.kind]
            if op.kind == "weight gradient":
                schedule.end_weight_gradients()
        orders.append(order)
    assert orders == [
        "FFFFBWFBWBWBWBW",
        "FFFBFBWFBWBWBWW",
        "FFBFBFBWFBWBWWW",
        "FBFBFBFBWFBWWWW",
    ]
