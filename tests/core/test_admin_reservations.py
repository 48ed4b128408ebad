"""Reserved nodes: who may stand there when, what the others are told, and that nobody is thrown out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.decide import decide, preview_request
from scheduler.core.model.plan import Plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import NodeId, PoolId, PoolRow, ProjectId, ReservationRow, Snapshot
from scheduler.core.model.validation import SnapshotError, check_snapshot
from scheduler.core.session.cache import DecisionCache
from tests.core.cluster_builder import NOW_S, cluster, node, places, project, quota, runs, started, waits
from tests.core.plan_rules import PlanError, check_plan

POLICY = Policy()
HOUR = 3_600.0


def reserve(
    nodes: str, projects: str = "", begin: float = 0.0, end: float = HOUR, name: str = "course"
) -> ReservationRow:
    """Names separated by spaces; times from now."""
    return ReservationRow(
        f"{nodes}/{begin}", name, tuple(map(NodeId, nodes.split())), tuple(map(ProjectId, projects.split())),
        NOW_S + begin, NOW_S + end,
    )  # fmt: skip


def hall(*reservations: ReservationRow, pending=(), running=(), quotas=()) -> Snapshot:
    drawn = cluster(
        [node("n0", 4), node("n1", 4)],
        [project("p"), project("below", "p"), project("q")],
        quotas,
        running=running,
        pending=pending,
    )
    return replace(drawn, reservations=reservations)


@pytest.mark.parametrize(
    ("why", "reservation", "of", "limit", "starts"),
    [
        ("it has begun for others", reserve("n0 n1", "q"), "p", 60.0, False),
        ("it is the project's own", reserve("n0 n1", "p"), "p", None, True),
        ("it is that of a project above", reserve("n0 n1", "p"), "below", None, True),
        ("it is that of a project below", reserve("n0 n1", "below"), "p", None, False),
        ("maintenance is for nobody", reserve("n0 n1"), "p", 60.0, False),
        ("no limit is never surely gone", reserve("n0 n1", "q", 1e8, 2e8), "p", None, False),
        ("gone in time, to the second", reserve("n0 n1", "q", 600.0), "p", 600.0, True),
        ("a second too long", reserve("n0 n1", "q", 600.0), "p", 601.0, False),
        ("it is over", reserve("n0 n1", "q", -HOUR, 0.0), "p", None, True),
        ("another node is free of it", reserve("n0", "q"), "p", None, True),
    ],
)
def test_who_may_start_on_reserved_nodes(why, reservation, of, limit, starts) -> None:
    snapshot = hall(reservation, pending=[waits("j", of, 4, time_limit_s=limit)])
    plan = decide(snapshot, POLICY)
    assert bool(plan.starts) is starts, why
    check_plan(snapshot, plan)
    if not starts:
        assert plan.verdicts[0].code is VerdictCode.RESERVED_FOR_OTHER_JOB


def test_a_plan_that_starts_on_nodes_reserved_for_others_is_invalid() -> None:
    open_to_all = hall(pending=[waits("j", "p", 4)])
    plan = decide(open_to_all, POLICY)
    taken = places(plan, "j")[0][0]
    with pytest.raises(PlanError, match="reservation"):
        check_plan(replace(open_to_all, reservations=(reserve(taken, "q", 60.0),)), plan)


def test_a_blocked_job_names_the_reservation_and_its_end() -> None:
    now = hall(reserve("n0 n1", "q", -60.0), pending=[waits("j", "p", 4)])
    (verdict,) = decide(now, POLICY).verdicts
    assert verdict.message == (
        "Needs 4 GPUs; enough is free now, but 2 nodes are reserved until 1970-01-12 14:46 UTC (course)."
    )
    assert verdict.details["reserved_until_s"] == NOW_S + HOUR
    later = hall(reserve("n0 n1", "q", 600.0), pending=[waits("j", "p", 4, time_limit_s=HOUR)])
    (verdict,) = decide(later, POLICY).verdicts
    assert verdict.message == (
        "Needs 4 GPUs; enough is free now, but 2 nodes are reserved from 1970-01-12 13:56 UTC "
        "until 1970-01-12 14:46 UTC (course). With a time limit that ends before then, it could start now."
    )
    assert preview_request(later, POLICY, replace(later.pending[0], time_limit_s=600.0)).starts_now


def test_running_jobs_stay_and_others_see_the_reservation() -> None:
    here = runs("r", "p", ("n0", [0, 1, 2, 3]), time_limit_s=10 * HOUR)
    snapshot = hall(reserve("n0 n1"), running=[here], pending=[waits("j", "p", 4)])
    plan = decide(snapshot, POLICY)
    assert plan == Plan(
        verdicts=plan.verdicts,
        share_breakdowns=plan.share_breakdowns,
        steps_used=plan.steps_used,
        truncated=False,
    )
    assert plan.verdicts[0].code is VerdictCode.RESERVED_FOR_OTHER_JOB


def test_no_preemption_frees_a_reserved_node() -> None:
    """The owed project takes back on the open node only."""
    held = [
        runs("a", "p", ("n0", [0, 1, 2, 3])),
        runs("b", "p", ("n1", [0, 1, 2, 3]), started_s=NOW_S - 9_999),
    ]
    owed = [quota("q", 4)]
    snapshot = hall(reserve("n0", "p"), running=held, quotas=owed, pending=[waits("j", "q", 4)])
    assert [eviction.job for eviction in decide(snapshot, POLICY).evictions] == ["b"]
    both = replace(snapshot, reservations=(reserve("n0 n1", "p"),))
    assert decide(both, POLICY).evictions == ()


def test_a_reservation_in_another_pool_is_not_mentioned() -> None:
    """Whom it keeps out there is waiting here for another reason: the one node is avoided after a failure."""
    photo = hall(reserve("n0", "q"))
    other = node("far", 4, pool="other")
    job = waits("j", "p", 1, pools=(PoolId("other"),), avoid_nodes=(NodeId("far"),))
    photo = replace(
        photo, nodes=(*photo.nodes, other), pools=(*photo.pools, PoolRow(PoolId("other"), "other")),
        pending=(job,),
    )  # fmt: skip
    (verdict,) = decide(photo, POLICY).verdicts
    assert verdict.code is VerdictCode.INSUFFICIENT_RESOURCES and "reserved" not in verdict.message


def test_nodes_under_maintenance_count_towards_no_share() -> None:
    full = [runs("r", "p", ("n1", [0, 1, 2, 3]))]
    snapshot = hall(reserve("n0"), running=full, pending=[waits("j", "q", 2)])
    assert [eviction.job for eviction in decide(snapshot, POLICY).evictions] == ["r"]
    assert (
        sum(breakdown.fair_share_milli for breakdown in decide(snapshot, POLICY).share_breakdowns)
        <= 2 * 4_000
    )


def test_a_job_for_which_no_change_helps_is_offered_none() -> None:
    snapshot = hall(reserve("n0 n1", "q"), pending=[waits("j", "p", 4)])
    assert preview_request(snapshot, POLICY, snapshot.pending[0]).alternatives == ()
    half = hall(reserve("n0", "q"), pending=[waits("j", "p", 4, tasks=2)])
    offered = preview_request(half, POLICY, half.pending[0]).alternatives
    assert [change.fields for change in offered][:1] == [{"tasks": 1}]


def test_an_incremental_decision_follows_the_clock() -> None:
    memory = DecisionCache()
    snapshot = hall(reserve("n0 n1", "q", 600.0), pending=[waits("j", "p", 4, time_limit_s=300.0)])
    assert started(decide(snapshot, POLICY, memory)) == {"j"}
    at = replace(snapshot, now_s=NOW_S + 400.0)
    assert decide(at, POLICY, memory).verdicts[0].code is VerdictCode.RESERVED_FOR_OTHER_JOB
    assert started(decide(replace(at, now_s=NOW_S + 600.0 + HOUR), POLICY, memory)) == {"j"}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"nodes": (NodeId("n9"),)}, "reservations[n0/0.0].nodes"),
        ({"nodes": (NodeId("n0"), NodeId("n0"))}, "reservations[n0/0.0].nodes[n0]"),
        ({"projects": (ProjectId("nobody"),)}, "reservations[n0/0.0].projects"),
        ({"end_s": NOW_S}, "reservations[n0/0.0].end_s"),
        ({"start_s": float("nan")}, "reservations[n0/0.0].start_s"),
    ],
)
def test_a_reservation_that_cannot_be_is_refused(wrong, field) -> None:
    with pytest.raises(SnapshotError) as refusal:
        check_snapshot(hall(replace(reserve("n0"), **wrong)))
    assert refusal.value.field == field
