"""Room by fair turns (KAI-Scheduler's preset): who comes first keeps its place, who fits elsewhere moves."""

from __future__ import annotations

from dataclasses import replace

from bench.conformance.kai_policy import KAI_SEMANTICS, kai_policy
from scheduler.core.decide import decide
from scheduler.core.model.apply_plan import apply_plan
from scheduler.core.model.plan import EvictionReason, Plan
from scheduler.core.model.policy import Policy
from tests.core.cluster_builder import cluster, node, project, quota, runs, waits


def only(*actions: str) -> Policy:
    return replace(kai_policy(), semantics=replace(KAI_SEMANTICS, actions=actions))


def gone(plan: Plan) -> dict[str, EvictionReason]:
    return {eviction.job: eviction.reason for eviction in plan.evictions}


def kept(plan: Plan) -> dict[str, str]:
    return {start.job: start.tasks[0].node for start in plan.nominations}


def test_only_jobs_in_the_way_are_moved() -> None:
    snapshot = cluster(
        [node("n0"), node("n1")],
        [project("p")],
        [quota("p", 2)],
        running=[
            runs("big", "p", ("n0", range(3)), started_s=0),
            runs("small", "p", ("n1", range(1)), started_s=0),
            runs("middle", "p", ("n1", range(1, 3)), started_s=0),
        ],
        pending=[waits("pair", "p", 2)],
    )
    plan = decide(snapshot, only("consolidate"))
    assert gone(plan) == {"small": EvictionReason.MIGRATED}
    assert kept(plan) == {"small": "n0", "pair": "n1"}


def test_jobs_that_would_start_first_anyway_keep_their_gpus() -> None:
    def plan_with(priority: int) -> Plan:
        snapshot = cluster(
            [node("n0")],
            [project("taker", created_s=1), project("giver", created_s=2)],
            [quota("taker", 1), quota("giver", 1, weight=0.0, priority=priority)],
            running=[
                runs("mine", "taker", ("n0", range(1))),
                runs("theirs-0", "giver", ("n0", range(1, 3))),
                runs("theirs-1", "giver", ("n0", range(3, 4))),
            ],
            pending=[waits("more", "taker", 1)],
        )
        return decide(snapshot, only("reclaim"))

    assert gone(plan_with(priority=0)) == {"theirs-1": EvictionReason.RECLAIMED}
    assert gone(plan_with(priority=1)) == {}


def test_surplus_tasks_leave_before_whole_jobs() -> None:
    elastic = [
        replace(runs(name, "giver", ("n0", [first]), ("n0", [first + 1])), min_tasks=1)
        for name, first in (("a", 0), ("b", 2))
    ]
    snapshot = cluster(
        [node("n0")],
        [project("taker"), project("giver")],
        [quota("taker", 2), quota("giver", 0, weight=0.0)],
        running=elastic,
        pending=[waits("pair", "taker", 2)],
    )
    plan = decide(snapshot, only("reclaim"))
    assert {(eviction.job, eviction.ranks) for eviction in plan.evictions} == {("a", (1,)), ("b", (1,))}


def test_a_new_job_starts_where_it_would_be_moved() -> None:
    """Under our own rules: else the next decision moves the job that this one has just placed."""
    snapshot = cluster(
        [node("n0"), node("n1")],
        [project("p")],
        running=[
            runs("ending", "p", ("n0", range(1)), stopping=True),
            runs("stays", "p", ("n1", range(1))),
        ],
        pending=[waits("a", "p", 1), waits("b", "p", 2), waits("c", "p", 2, tasks=2)],
    )
    policy = replace(Policy(), movable_jobs="any")
    plan = decide(snapshot, policy)
    assert {start.job: start.tasks[0].node for start in plan.starts} == {"a": "n1", "b": "n0"}
    assert kept(plan) == {"c": "n0"}
    after = decide(apply_plan(snapshot, plan), policy)
    assert (after.starts, after.evictions) == ((), ())
