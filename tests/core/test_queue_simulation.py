"""When jobs start in a simulated queue: cases worked out by hand, and rules for generated ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.forecast.capacity_buckets import BucketRequest, BucketSlots, CapacityBuckets
from scheduler.core.forecast.queue_simulation import (
    SIMULATION_RUNS,
    Closure,
    JobClass,
    RunningJob,
    SimulationInput,
    simulate_queue,
)
from scheduler.core.forecast.simulated_reclaims import ReclaimRules, Requeue
from scheduler.core.model.resources import ResourceVector
from scheduler.core.model.snapshot import WHOLE_MILLI, ProjectId, QuotaRow, UserId
from scheduler.core.shares.quota_ledger import JobOwner, PoolLedger
from tests.core.cluster_builder import quota

P, Q = ProjectId("p"), ProjectId("q")
SHARE = {P: 4_000.0, Q: 4_000.0}
ADA, BOB = UserId("ada"), UserId("bob")
PATHS = {P: (P, ProjectId("top")), Q: (Q, ProjectId("top")), ProjectId("top"): (ProjectId("top"),)}
"""Two projects below one."""


def job_owner(of: ProjectId, milli: int, user: UserId = ADA, preemptible: bool = True) -> JobOwner:
    return JobOwner(of, of, user, preemptible, ResourceVector(milli))


def running_job(
    of: ProjectId, left_s: float, *places: BucketSlots, user: UserId = ADA, preemptible: bool = True
) -> RunningJob:
    milli = sum(amount * (len(gpus) or WHOLE_MILLI) for _, amount, gpus in places)
    return RunningJob(job_owner(of, milli, user, preemptible), places, [left_s] * SIMULATION_RUNS)


def pending_job(
    of: ProjectId,
    duration_s: float,
    *needs: tuple[BucketRequest, int],
    user: UserId = ADA,
    preemptible: bool = True,
    **more: Any,
) -> tuple[JobClass, float]:
    """One waiting job, and how long it runs."""
    milli = sum(need.gpus * need.milli * count for need, count in needs)
    return JobClass(job_owner(of, milli, user, preemptible), needs, (), **more), duration_s


def task(gpus: int, *bucket_types: int, milli: int = WHOLE_MILLI) -> BucketRequest:
    return BucketRequest(gpus, milli, bucket_types or (0,))


def buckets(
    *whole: int, bucket_types: Sequence[int] = (), shared: dict[int, dict[int, int]] | None = None
) -> CapacityBuckets:
    """Buckets with so many free whole GPUs, of type 0 unless given."""
    return CapacityBuckets(tuple(bucket_types or (0 for _ in whole)), whole, shared or {}, 100)


def ledger(running: Sequence[RunningJob], *quotas: QuotaRow) -> PoolLedger:
    """The ledger of two projects below one, with what the running jobs hold."""
    rows = {each: quota(each) for each in PATHS} | {row.project: row for row in quotas}
    found = PoolLedger(rows, PATHS)
    for job in running:
        found.add(job.owner.leaf_project, job.owner.user, job.owner.amounts, job.owner.preemptible)
    return found


def simulation_of(
    free: CapacityBuckets,
    running: Sequence[RunningJob],
    pending: Sequence[tuple[JobClass, float]],
    *quotas: QuotaRow,
) -> SimulationInput:
    """The pending jobs in this order."""
    classes = [each._replace(positions=(position,)) for position, (each, _) in enumerate(pending)]
    durations_s = [[duration_s] * SIMULATION_RUNS for _, duration_s in pending]
    return SimulationInput(
        free, running, classes, durations_s, SHARE, ledger(running, *quotas) if quotas else None
    )


def start_s(
    free: CapacityBuckets,
    running: Sequence[RunningJob],
    pending: Sequence[tuple[JobClass, float]],
    *quotas: QuotaRow,
    **bound: int,
) -> float | None:
    """When the last pending job starts; None: not within the bound."""
    last = len(pending) - 1
    runs = simulate_queue(simulation_of(free, running, pending, *quotas), [last], **bound)[last]
    assert len(runs) == SIMULATION_RUNS
    assert len(set(runs)) == 1
    return runs[0]


def test_a_job_starts_when_enough_jobs_ended_and_those_ahead_started() -> None:
    running = [running_job(P, 50.0, (0, 1, ())), running_job(P, 80.0, (0, 1, ()))]
    me = pending_job(P, 10.0, (task(1), 1))
    assert start_s(buckets(0), running, [me]) == 50.0
    assert start_s(buckets(0), running, [me, me]) == 60.0
    assert start_s(buckets(0), running, [pending_job(P, 500.0, (task(1), 1)), me]) == 80.0
    assert start_s(buckets(1), running, [me]) == 0.0


def test_a_gang_waits_for_whole_nodes_while_smaller_jobs_pass() -> None:
    running = [running_job(P, 50.0, (0, 2, ())), running_job(P, 80.0, (1, 2, ()))]
    gang = pending_job(P, 10.0, (task(4), 2))
    assert start_s(buckets(2, 2), running, [gang]) == 80.0
    assert start_s(buckets(2, 0), running, [gang, pending_job(P, 10.0, (task(2), 1))]) == 0.0


def test_the_lowest_share_in_use_goes_first() -> None:
    running = [
        running_job(P, 900.0, (0, 2, ())),
        running_job(P, 50.0, (0, 1, ())),
        running_job(Q, 900.0, (0, 1, ())),
    ]
    mine, theirs = pending_job(P, 10.0, (task(1), 1)), pending_job(Q, 10.0, (task(1), 1))
    assert start_s(buckets(0), running, [mine, theirs]) == 50.0
    assert start_s(buckets(0), running, [theirs, mine]) == 60.0


def test_a_simulation_is_bounded_and_reports_nothing_beyond() -> None:
    running = [running_job(P, 10.0 * n, (0, 1, ())) for n in range(1, 100)]
    assert start_s(buckets(0), running, [pending_job(P, 1.0, (task(9), 1))], max_steps=20) == 90.0
    assert start_s(buckets(0), running, [pending_job(P, 1.0, (task(90), 1))], max_steps=20) is None
    too_large = pending_job(P, 1.0, (task(200), 1))  # for the empty pool
    assert start_s(buckets(0), running, [too_large]) == math.inf


# -- limits and guarantees ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [quota("p", limit=2), quota("top", limit=3)], ids=["own", "above"])
def test_a_limit_of_the_project_or_its_parent_delays_a_job(bound: QuotaRow) -> None:
    running = [
        running_job(P, 300.0, (0, 1, ())), running_job(P, 200.0, (0, 1, ())), running_job(Q, 700.0, (0, 1, ()))
    ]  # fmt: skip
    me = pending_job(P, 10.0, (task(1), 1))
    assert start_s(buckets(5), running, [me], bound) == 200.0
    assert start_s(buckets(5), running, [pending_job(P, 50.0, (task(1), 1)), me], bound) == 250.0
    assert start_s(buckets(5), running, [pending_job(P, 10.0, (task(2), 1)), me], bound) == 200.0  # passes it


def test_the_limit_per_user_delays_only_that_user() -> None:
    running = [running_job(P, 300.0, (0, 2, ()), user=ADA)]
    bound = quota("top", person=2)
    assert start_s(buckets(5), running, [pending_job(P, 10.0, (task(1), 1), user=ADA)], bound) == 300.0
    hers, his = pending_job(P, 10.0, (task(1), 1), user=ADA), pending_job(P, 10.0, (task(1), 1), user=BOB)
    assert start_s(buckets(5), running, [hers, his], bound) == 0.0


def test_a_guarantee_waits_for_jobs_that_cannot_be_preempted() -> None:
    running = [
        running_job(P, 400.0, (0, 2, ()), preemptible=False), running_job(P, 100.0, (0, 1, ()))
    ]  # fmt: skip
    firm = pending_job(P, 10.0, (task(1), 1), preemptible=False)
    loose = pending_job(P, 10.0, (task(1), 1))
    promised = [quota("p", guaranteed=2), quota("top", guaranteed=2)]
    assert start_s(buckets(5), running, [firm], *promised) == 400.0
    assert start_s(buckets(5), running, [firm, loose], *promised) == 0.0
    assert start_s(buckets(5), running, [firm], quota("p", guaranteed=3), quota("top", guaranteed=2)) == 400.0


def test_a_job_blocked_by_its_limit_gets_no_forecast() -> None:
    running = [running_job(Q, 10.0 * n, (0, 1, ())) for n in range(1, 100)]
    me = pending_job(P, 10.0, (task(3), 1))
    assert start_s(buckets(9), running, [me], quota("p", limit=2), max_steps=7) == math.inf
    firm = pending_job(P, 10.0, (task(3), 1), preemptible=False)
    assert start_s(buckets(9), running, [firm], quota("p", guaranteed=2), max_steps=7) == math.inf


# -- where tasks can stand ----------------------------------------------------------------------------------


def test_a_task_waits_for_buckets_of_its_types() -> None:
    running = [running_job(P, 50.0, (0, 1, ())), running_job(P, 80.0, (1, 1, ()))]
    free = buckets(0, 0, bucket_types=(0, 1))
    assert start_s(free, running, [pending_job(P, 10.0, (task(1, 1), 1))]) == 80.0
    assert start_s(free, running, [pending_job(P, 10.0, (task(1, 0, 1), 1))]) == 50.0
    nowhere = pending_job(P, 10.0, (BucketRequest(1, WHOLE_MILLI, ()), 1))
    assert start_s(free, running, [nowhere], max_steps=1) == math.inf


def test_shares_join_a_gpu_and_a_whole_one_waits_for_all_of_them() -> None:
    free = buckets(0, shared={0: {7: 400}})
    running = [running_job(P, 50.0, (0, 300, (7,))), running_job(P, 90.0, (0, 300, (7,)))]
    assert start_s(free, running, [pending_job(P, 10.0, (task(1, milli=400), 1))]) == 0.0
    assert start_s(free, running, [pending_job(P, 10.0, (task(1, milli=500), 1))]) == 50.0
    assert start_s(free, running, [pending_job(P, 10.0, (task(1), 1))]) == 90.0
    share = pending_job(P, 500.0, (task(1, milli=400), 1))
    assert start_s(free, running, [share, pending_job(P, 10.0, (task(1), 1))]) == 500.0


def test_two_free_halves_of_two_gpus_are_not_a_whole_gpu() -> None:
    free = buckets(0, shared={0: {7: 500, 8: 500}})
    running = [running_job(P, 60.0, (0, 500, (8,))), running_job(P, 70.0, (0, 500, (7,)))]
    assert start_s(free, running, [pending_job(P, 10.0, (task(1), 1))]) == 60.0
    assert (
        start_s(free, running, [pending_job(P, 10.0, (task(2, milli=500), 1))]) == 0.0
    )  # a share of each of two
    assert start_s(free, running, [pending_job(P, 10.0, (task(1, milli=500), 2))]) == 0.0
    assert start_s(free, running, [pending_job(P, 10.0, (task(1, milli=500), 3))]) == 60.0


def test_a_gang_of_unequal_tasks_is_placed_completely_or_not_at_all() -> None:
    gang = pending_job(P, 10.0, (task(4), 1), (task(2), 1))
    running = [running_job(P, 50.0, (1, 2, ()))]
    assert start_s(buckets(4, 0), running, [gang]) == 50.0
    assert (
        start_s(buckets(4, 0), running, [gang, pending_job(P, 10.0, (task(4), 1))]) == 0.0
    )  # it took nothing


# -- the clock ------------------------------------------------------------------------------------------------


def test_no_job_starts_before_its_start_time() -> None:
    later = pending_job(P, 10.0, (task(1), 1), not_before_s=30.0)
    assert start_s(buckets(1), [], [later]) == 30.0
    assert (
        start_s(buckets(1), [], [later, pending_job(P, 500.0, (task(1), 1))]) == 0.0
    )  # nothing is kept for it


def test_reserved_capacity_opens_when_it_is_free_again() -> None:
    closed = (Closure(frozenset({0}), -math.inf, 70.0),)
    assert start_s(buckets(1), [], [pending_job(P, 10.0, (task(1), 1), closures=closed)]) == 70.0
    elsewhere = pending_job(P, 10.0, (task(1, 0, 1), 1), closures=closed)
    running = [running_job(P, 40.0, (1, 1, ()))]
    assert start_s(buckets(1, 0, bucket_types=(0, 1)), running, [elsewhere]) == 40.0


def test_capacity_closes_when_a_reservation_is_too_near() -> None:
    closed = (Closure(frozenset({0}), 60.0, 500.0),)
    me = pending_job(P, 10.0, (task(1), 1), closures=closed)
    assert start_s(buckets(0), [running_job(P, 60.0, (0, 1, ()))], [me]) == 60.0
    assert start_s(buckets(0), [running_job(P, 61.0, (0, 1, ()))], [me]) == 500.0
    other = pending_job(Q, 10.0, (task(1), 1))  # the reservation is for its project
    assert start_s(buckets(0), [running_job(P, 61.0, (0, 1, ()))], [me, other]) == 61.0


# -- reclaims ---------------------------------------------------------------------------------------------------


def evictable(
    job: RunningJob, number: int, saved_s: float = 0.0, protected_until_s: float = 0.0
) -> RunningJob:
    """The job as one whose class and queue position have this number."""
    return job._replace(requeue=Requeue(number, number, saved_s, protected_until_s))


def reclaim_start_s(
    rules: ReclaimRules | None, protected_until_s: float = 0.0, of: ProjectId = Q
) -> float | None:
    """When a job of P for two GPUs starts; P is entitled to two, Q to one.

    Jobs for one GPU end after 10, 200 and 300 s, and one elsewhere after 80 s.
    """
    classes = [
        JobClass(job_owner(of, WHOLE_MILLI), ((task(1), 1),), ()),
        *[pending_job(P, 0.0, (task(2), 1))[0]],
    ]
    running = [
        *(
            evictable(running_job(of, left_s, (0, 1, ())), 0, 0.0, protected_until_s)
            for left_s in (10.0, 200.0, 300.0)
        ),
        running_job(Q, 80.0, (1, 1, ())),
    ]
    simulation_input = SimulationInput(
        buckets(0, 0, bucket_types=(0, 1)),
        running,
        [classes[0], classes[1]._replace(positions=(1,))],
        [[30.0] * SIMULATION_RUNS] * 2,
        {P: 2_000.0, Q: 1_000.0},
        reclaim_rules=rules,
    )
    return simulate_queue(simulation_input, [1])[1][0]


def test_a_project_within_its_share_reclaims_once_something_changes() -> None:
    assert reclaim_start_s(None) == 200.0
    assert reclaim_start_s(ReclaimRules(0.0, {})) == 10.0
    assert reclaim_start_s(ReclaimRules(60.0, {})) == pytest.approx(
        60.0
    )  # it waits before others are evicted
    assert reclaim_start_s(ReclaimRules(0.0, {}), protected_until_s=60.0) == 60.0
    assert reclaim_start_s(ReclaimRules(0.0, {}), of=P) == 200.0  # not from its own jobs


def test_a_victim_continues_before_later_jobs() -> None:
    running = [running_job(Q, left_s, (0, 1, ())) for left_s in (10.0, 100.0, 200.0)]
    classes = [
        JobClass(job_owner(Q, WHOLE_MILLI), ((task(1), 1),), (3,)),
        pending_job(P, 0.0, (task(2), 1))[0]._replace(positions=(4,)),
        pending_job(Q, 0.0, (task(1), 1), not_before_s=30.0)[0]._replace(positions=(5,)),
    ]
    simulation_input = SimulationInput(
        buckets(0),
        [job._replace(requeue=Requeue(0, number, -50.0, 0.0)) for number, job in enumerate(running)],
        [classes[0]._replace(positions=()), *classes[1:]],
        [[1_000.0] * SIMULATION_RUNS] * 6,
        {P: 2_000.0, Q: 1_000.0},
        reclaim_rules=ReclaimRules(0.0, {}),
    )
    found = simulate_queue(simulation_input, [4, 5])
    # the victim has 90 or 190 s left, and continues when the other job ends
    assert (found[4][0], found[5][0]) == (10.0, 290.0)
    assert simulate_queue(simulation_input, [4])[4] == found[4]


# -- generated queues -------------------------------------------------------------------------------------

SHARES = {ProjectId(name): share for name, share in (("a", 4_001.7), ("b", 2_999.3), ("c", 7_013.9))}
"""Shares of which no two parts are equal: nothing hangs on ties."""
TREE = {project: (project, ProjectId("top")) for project in SHARES} | {ProjectId("top"): (ProjectId("top"),)}
CLOSURES = [(), (), (Closure(frozenset({1}), 40.0, 90.0),), (Closure(frozenset({0}), -math.inf, 55.5),)]
seconds = st.floats(0.5, 300.0)
needs = st.lists(
    st.tuples(
        st.builds(
            BucketRequest,
            st.integers(1, 3),
            st.sampled_from([WHOLE_MILLI, WHOLE_MILLI, 500]),
            st.sampled_from([(0,), (1,), (0, 1)]),
        ),
        st.integers(1, 2),
    ),
    min_size=1,
    max_size=2,
    unique_by=lambda each: each[0],
).map(tuple)


@st.composite
def simulations(draw: st.DrawFn, reclaims: bool = False) -> SimulationInput:
    """Small pools of buckets of two types, where jobs of three projects run and wait."""
    free_gpus = draw(st.lists(st.integers(0, 4), min_size=2, max_size=5))
    projects = st.sampled_from(sorted(SHARES))
    users = st.sampled_from([ADA, BOB])
    places = st.tuples(st.integers(0, len(free_gpus) - 1), st.integers(1, 3), st.just(()))
    running = [
        RunningJob(job_owner(draw(projects), place[1] * WHOLE_MILLI, draw(users), draw(st.booleans())), (place,),
              draw(st.lists(seconds, min_size=SIMULATION_RUNS, max_size=SIMULATION_RUNS)))
        for place in draw(st.lists(places, max_size=6))
    ]  # fmt: skip
    classes_of: dict[JobClass, list[int]] = {}
    count = draw(st.integers(1, 12))
    for position in range(count):
        job_class, _ = pending_job(
            draw(projects), 0.0, *draw(needs), user=draw(users), preemptible=draw(st.booleans()),
            not_before_s=draw(st.sampled_from([0.0, 0.0, 25.0, 70.5])), closures=draw(st.sampled_from(CLOSURES)),
        )  # fmt: skip
        classes_of.setdefault(job_class, []).append(position)
    classes = [job_class._replace(positions=mine) for job_class, mine in classes_of.items()]
    if reclaims:
        for number, job in enumerate(running):
            if job.owner.preemptible:
                requeue = Requeue(
                    len(classes), -1 - number, -draw(seconds), draw(st.sampled_from([0.0, 50.0]))
                )
                running[number] = job._replace(requeue=requeue)
                (bucket, gpus, _) = job.slots[0]
                classes.append(JobClass(job.owner, ((task(gpus, bucket % 2), 1),), ()))
    numbers = st.sampled_from([None, 2, 5])
    quotas = {
        each: quota(each, guaranteed=draw(st.integers(0, 4)), limit=draw(numbers), person=draw(numbers))
        for each in TREE
    }
    book = PoolLedger(quotas, TREE)
    for job in running:
        book.add(job.owner.leaf_project, job.owner.user, job.owner.amounts, job.owner.preemptible)
    return SimulationInput(
        buckets(*free_gpus, bucket_types=[number % 2 for number in range(len(free_gpus))]),
        running,
        classes,
        draw(
            st.lists(
                st.lists(seconds, min_size=SIMULATION_RUNS, max_size=SIMULATION_RUNS),
                min_size=count,
                max_size=count,
            )
        ),
        SHARES,
        book if draw(st.booleans()) else None,
        reclaim_rules=ReclaimRules(draw(st.sampled_from([0.0, 30.0])), {}) if reclaims else None,
    )


any_simulation = st.booleans().flatmap(simulations)


@given(simulations())
def test_the_last_job_of_a_project_starts_alike_alone_and_with_others(
    simulation_input: SimulationInput,
) -> None:
    together = simulate_queue(simulation_input, simulation_input.class_of)
    last: dict[ProjectId, int] = {}
    for position, job_class in sorted(simulation_input.class_of.items()):
        last[simulation_input.job_classes[job_class].owner.project] = position
    for position in last.values():
        assert simulate_queue(simulation_input, [position])[position] == together[position]
    assert together == simulate_queue(simulation_input, sorted(simulation_input.class_of, reverse=True))


@given(any_simulation, st.integers(1, 40))
def test_a_bound_removes_answers_and_changes_none(simulation_input: SimulationInput, max_steps: int) -> None:
    free = simulate_queue(simulation_input, simulation_input.class_of)
    for position, runs in simulate_queue(
        simulation_input, simulation_input.class_of, max_steps=max_steps
    ).items():
        assert all(
            each is None or each == start_s for each, start_s in zip(runs, free[position], strict=True)
        )


@given(any_simulation)
def test_jobs_of_one_queue_start_in_order_and_not_too_early(simulation_input: SimulationInput) -> None:
    found = simulate_queue(simulation_input, simulation_input.class_of)
    for job_class in simulation_input.job_classes:
        for run in range(SIMULATION_RUNS):
            starts_s = [found[position][run] or 0.0 for position in job_class.positions]
            assert starts_s == sorted(starts_s)
            assert all(start_s >= job_class.not_before_s for start_s in starts_s)


@given(simulations())
def test_starts_never_exceed_a_limit(simulation_input: SimulationInput) -> None:
    if simulation_input.ledger is None:
        return
    found = simulate_queue(simulation_input, simulation_input.class_of)
    for run in range(SIMULATION_RUNS):
        spans = [(job.owner, -1.0, job.remaining_s[run]) for job in simulation_input.running]
        for position, runs in found.items():
            start_s, job_class = runs[run], simulation_input.job_classes[simulation_input.class_of[position]]
            assert start_s is not None
            spans.append((job_class.owner, start_s, start_s + simulation_input.durations_s[position][run]))
        for of, at_s, _ in spans:
            if 0.0 <= at_s < math.inf:
                for level in TREE[of.leaf_project]:
                    held = [
                        job_owner.amounts.gpu_milli
                        for job_owner, start_s, end_s in spans
                        if level in TREE[job_owner.leaf_project] and start_s <= at_s < end_s
                    ]
                    assert sum(held) <= simulation_input.ledger.limit[level].gpu_milli


def test_a_quota_is_checked_again_for_the_next_job_of_a_queue() -> None:
    job_class, _ = pending_job(P, 0.0, (task(1), 1))
    simulation_input = SimulationInput(
        buckets(5),
        [],
        [job_class._replace(positions=(0, 1, 2))],
        [[40.0] * SIMULATION_RUNS] * 3,
        SHARE,
        ledger([], quota("p", limit=2)),
    )
    assert [runs[0] for runs in simulate_queue(simulation_input, [0, 1, 2]).values()] == [0.0, 0.0, 40.0]


def test_a_later_project_uses_what_an_earlier_one_cannot() -> None:
    running = [running_job(P, 50.0, (0, 1, ()))]
    large, small = pending_job(P, 10.0, (task(2), 1)), pending_job(P, 200.0, (task(1), 1))
    simulation_input = simulation_of(buckets(1), running, [large, small])
    assert simulate_queue(simulation_input, [0])[0] == [50.0] * SIMULATION_RUNS
    assert simulate_queue(simulation_input, [0, 1]) == {
        0: [200.0] * SIMULATION_RUNS,
        1: [0.0] * SIMULATION_RUNS,
    }
