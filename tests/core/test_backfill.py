"""Reserve and backfill: the earliest time of a gang, and who may pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.actions.backfill import JobEnd, ReservationPlanner, expected_end_s
from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.model.snapshot import HeldSlots, JobId, TaskRequest, TaskShape
from tests.core.cluster_builder import NOW_S, node


def floor(nodes: int, gpus: int = 4) -> NodePlacer:
    return NodePlacer([node(f"n{i}", gpus) for i in range(nodes)], "pack")


def shape(gpus: int) -> TaskShape:
    return TaskShape(TaskRequest(gpus, 1000, 0, 0))


def held(at: int, *slots: int) -> tuple[HeldSlots, ...]:
    return (HeldSlots(at, slots, 1000, 0, 0),)


def busy(ground: NodePlacer, *jobs: tuple[str, float | None, tuple[HeldSlots, ...]]) -> list[JobEnd]:
    """Running jobs with their places taken on ``ground``; ends in seconds from now."""
    for _, _, places in jobs:
        for one in places:
            ground.adjust(one, -1)
    return [JobEnd(JobId(job), None if end is None else NOW_S + end, places) for job, end, places in jobs]


def plan(ground: NodePlacer, endings: list[JobEnd], most_steps: int = 1_000) -> ReservationPlanner:
    return ReservationPlanner(ground, endings, NOW_S, most_steps)


def test_a_gang_gets_the_time_at_which_enough_nodes_are_whole() -> None:
    ground = floor(3)
    endings = busy(
        ground,
        ("a", 100.0, held(0, 0, 1, 2, 3)),
        ("b", 300.0, held(1, 0)),
        ("c", 200.0, held(2, 0, 1)),
    )
    found = plan(ground, endings).reserve(JobId("gang"), shape(4), 2)
    assert found is not None
    assert found.start_s == NOW_S + 200.0
    assert sorted(one.node for one in found.held) == [0, 2]


def test_jobs_without_an_end_release_no_gpus() -> None:
    ground = floor(2)
    endings = busy(ground, ("a", None, held(0, 0)), ("b", 50.0, held(1, 0)))
    reservations = plan(ground, endings)
    assert reservations.reserve(JobId("both"), shape(4), 2) is None
    alone = reservations.reserve(JobId("one"), shape(4), 1)
    assert alone is not None
    assert alone.start_s == NOW_S + 50.0


def test_a_later_job_passes_if_it_ends_earlier_or_uses_other_nodes() -> None:
    ground = floor(2)
    endings = busy(ground, ("a", 100.0, held(0, 0, 1)), ("b", None, held(1, 0)))
    reservations = plan(ground, endings)
    assert reservations.reserve(JobId("gang"), shape(4), 1) is not None  # node 0 in 100 s
    assert reservations.unreserved_nodes(NOW_S + 100.0).tolist() == [True, True]
    assert reservations.unreserved_nodes(NOW_S + 101.0).tolist() == [False, True]
    assert reservations.unreserved_nodes(None).tolist() == [False, True]
    assert reservations.unreserved_nodes(None, JobId("gang")).tolist() == [True, True]


def test_a_second_reservation_does_not_move_the_first() -> None:
    ground = floor(2)
    endings = busy(ground, ("a", 100.0, held(0, 0)), ("b", 200.0, held(1, 0)))
    reservations = plan(ground, endings)
    first = reservations.reserve(JobId("first"), shape(4), 1)
    second = reservations.reserve(JobId("second"), shape(4), 1)
    assert first is not None
    assert second is not None
    assert (first.start_s, second.start_s) == (NOW_S + 100.0, NOW_S + 200.0)
    assert {one.node for one in first.held} & {one.node for one in second.held} == set()
    assert reservations.unreserved_nodes(NOW_S + 150.0).tolist() == [
        first.held[0].node == 1,
        first.held[0].node == 0,
    ]
    assert reservations.unreserved_nodes(NOW_S + 250.0).tolist() == [False, False]


def test_an_overdue_job_counts_as_ending_at_any_moment() -> None:
    ground = floor(2)
    endings = busy(ground, ("late", -5.0, held(0, 0)), ("later", -3.0, held(1, 0)), ("a", 9.0, held(1, 1)))
    reservations = plan(ground, endings)
    found = reservations.reserve(JobId("gang"), shape(3), 2)
    assert found is not None
    assert (found.start_s, reservations.steps_used) == (NOW_S, 2)


def test_the_search_is_bounded() -> None:
    ground = floor(1)
    endings = busy(ground, *((f"j{i}", 10.0 * (i + 1), held(0, i)) for i in range(4)))
    short = plan(ground, endings, most_steps=2)
    assert short.reserve(JobId("gang"), shape(4), 1) is None
    assert short.steps_used == 2
    assert plan(ground, endings).reserve(JobId("gang"), shape(4), 1) is not None


@pytest.mark.parametrize(
    ("limit_s", "predicted_s", "end_s"),
    [
        (None, None, None),
        (500.0, None, NOW_S + 400.0),
        (50.0, None, NOW_S),
        (None, 70.0, NOW_S + 70.0),
        (500.0, 70.0, NOW_S + 70.0),
        (500.0, 4_000.0, NOW_S + 400.0),
        (500.0, -1.0, NOW_S + 400.0),
        (None, -1.0, None),
    ],
)
def test_a_job_is_gone_by_its_prediction_or_its_limit(
    limit_s: float | None, predicted_s: float | None, end_s: float | None
) -> None:
    predicted = None if predicted_s is None else NOW_S + predicted_s
    assert expected_end_s(NOW_S, NOW_S - 100.0, limit_s, predicted) == end_s


def one_by_one(ground: NodePlacer, endings: list[JobEnd], asked: TaskShape, tasks: int) -> float | None:
    """The first time at which so many tasks fit, found the slow way."""
    then, start_s = ground.copy(), NOW_S
    waiting = sorted((each for each in endings if each.end_s is not None), key=lambda each: each.end_s or 0.0)
    while int(then.capacity(asked).sum()) < tasks:
        if not waiting:
            return None
        start_s = max(NOW_S, waiting[0].end_s or 0.0)
        then.release(waiting.pop(0).held)
    return start_s


@given(data=st.data())
def test_backfilled_jobs_on_open_nodes_delay_no_reservation(data: st.DataObject) -> None:
    """At its time, with everybody gone who said so, each reserved gang finds its places free; none was sooner."""
    ground = floor(3, 3)
    jobs = [
        (f"{at}{slot}", data.draw(st.sampled_from([None, -5.0, 10.0, 20.0, 30.0])), held(at, slot))
        for at in range(3)
        for slot in range(3)
        if data.draw(st.booleans())
    ]
    endings = busy(ground, *jobs)
    reservations = plan(ground, endings)
    for i in range(data.draw(st.integers(1, 2))):
        asked, tasks = shape(data.draw(st.integers(1, 3))), data.draw(st.integers(1, 3))
        found = reservations.reserve(JobId(f"gang{i}"), asked, tasks)
        if i == 0:
            assert (found.start_s if found else None) == one_by_one(ground, endings, asked, tasks)
    passing: list[tuple[float | None, list[HeldSlots]]] = []
    for _ in range(data.draw(st.integers(0, 6))):
        ends = data.draw(st.sampled_from([None, 5.0, 10.0, 15.0, 25.0]))
        ends_s = None if ends is None else NOW_S + ends
        places = ground.place_gang(shape(data.draw(st.integers(1, 2))), 1)
        if places is not None and not all(reservations.unreserved_nodes(ends_s)[one.node] for one in places):
            ground.release(places)
        elif places is not None:
            passing.append((ends_s, places))
    for moment in sorted(each.start_s for each in reservations.reservations):
        then = ground.copy()
        for ending in endings:
            if ending.end_s is not None and ending.end_s <= moment:
                then.release(ending.held)
        for ends_s, places in passing:
            if ends_s is not None and ends_s <= moment:
                then.release(places)
        for each in reservations.reservations:
            if each.start_s <= moment:
                for one in each.held:
                    then.adjust(one, -1)
                assert not then.is_overcommitted(each.held)
