"""The order made in one go is the order in which a queue hands out its gangs, one after the other."""

from __future__ import annotations

import gc
import weakref

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.core.decide import _Decision
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import Snapshot
from scheduler.core.session.job_queue import JobQueue, sort_fairly
from tests.core.cluster_builder import cluster, crowded, node, project, quota, snapshots, waits


def orders(snapshot: Snapshot) -> list[tuple[list[str], list[str]]]:
    """For each pool, whoever waits after a plan: handed out one by one, and in one go."""
    decision = _Decision(snapshot, Policy())
    started = {start.job for start in decision.plan().starts}
    found = []
    for pool, dataset in decision._session.pool_states.items():
        first = (gang for group in decision._session.by_first_pool[pool] for gang in group)
        waiting = [gang for gang in first if gang.job not in started]
        queue, one_by_one = JobQueue(dataset, waiting), []
        while (gang := queue.pop()) is not None:
            one_by_one.append(str(gang.job))
        found.append((one_by_one, [str(gang.job) for gang in sort_fairly(dataset, waiting)]))
    return found


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)
@given(snapshot=st.one_of(snapshots(), crowded()))
def test_both_orders_are_the_same(snapshot: Snapshot) -> None:
    for one_by_one, in_one_go in orders(snapshot):
        assert in_one_go == one_by_one


def test_sibling_queues_alternate() -> None:
    """Two projects under one roof and one beside it, with jobs of two sizes and two people."""
    sizes = (1, 1, 3, 1, 2, 2, 1)
    photo = cluster(
        [node("n0", 1)],
        [project("roof"), project("left", "roof"), project("right", "roof"), project("beside")],
        [quota("beside", weight=3.0), quota("left", 1)],
        pending=[
            waits(f"{of}-{n}", of, size, age_s=n, user=("ada", "ben")[n % 2], priority=50 + n // 4)
            for of in ("left", "right", "beside")
            for n, size in enumerate(sizes)
        ],
    )
    ((one_by_one, in_one_go),) = orders(photo)
    assert in_one_go == one_by_one
    assert len({job.partition("-")[0] for job in in_one_go[:6]}) > 1


def test_a_finished_decision_is_freed() -> None:
    """Live cycles put off looking for circles of objects: a scene in one would stay for a hundred decisions."""
    photo = cluster([node("n0", 1)], [project("p")], pending=[waits(f"j{n}", "p") for n in range(3)])
    gc.disable()
    try:
        decision = _Decision(photo, Policy())
        assert len(decision.plan().verdicts) == 2
        dataset = weakref.ref(next(iter(decision._session.pool_states.values())))
        del decision
        assert dataset() is None
    finally:
        gc.enable()
