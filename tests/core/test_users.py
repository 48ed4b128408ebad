"""What one person may hold in a project at once: who starts, who is told what, and who leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.decide import decide, preview_request
from scheduler.core.model.apply_plan import apply_plan
from scheduler.core.model.plan import AlternativeKind, Plan, Verdict
from scheduler.core.model.policy import Policy
from scheduler.core.model.serialization import snapshot_from_json, snapshot_to_json
from scheduler.core.model.snapshot import PoolId, PoolRow, Snapshot, UserId
from scheduler.core.model.validation import SnapshotError, check_snapshot
from tests.core.cluster_builder import (
    MAIN,
    NOW_S,
    cluster,
    node,
    project,
    quota,
    release_stopping_jobs,
    runs,
    started,
    waits,
)
from tests.core.plan_rules import PlanError, check_plan

POLICY = Policy()
BOB = UserId("bob")
LAB = project("lab")
VISION, NLP = project("vision", "lab", 1.0), project("nlp", "lab", 2.0)


def verdict(plan: Plan, job: str) -> Verdict:
    (found,) = (verdict for verdict in plan.verdicts if verdict.job == job)
    return found


def one_team(person: float | None, *pending, running=(), nodes: int = 2) -> Snapshot:
    rows = [node(f"n{i}") for i in range(nodes)]
    return cluster(rows, [LAB], [quota("lab", person=person)], running=running, pending=pending)


def test_a_person_gets_so_much_and_a_colleague_the_rest() -> None:
    mine = [waits(f"a{i}", "lab", 2, age_s=9.0 - i) for i in range(3)]
    plan = decide(one_team(4, *mine, waits("b", "lab", 2, user=BOB)), POLICY)
    assert started(plan) == {"a0", "a1", "b"}
    reported = verdict(plan, "a2")
    assert reported.code is VerdictCode.USER_LIMIT
    assert reported.message == ("Needs 2 GPUs. In lab its owner uses 4 of the user limit of 4.")
    assert reported.details == {
        "needed_gpus": 2.0, "used_gpus": 4.0, "user_limit_gpus": 4.0, "project": "lab", "pool": "main",
    }  # fmt: skip


def test_without_a_limit_one_user_may_hold_everything() -> None:
    mine = [waits(f"a{i}", "lab", 2) for i in range(4)]
    assert len(started(decide(one_team(None, *mine), POLICY))) == 4


def test_zero_is_a_limit_too() -> None:
    plan = decide(one_team(0, waits("a", "lab", 1), waits("cpu", "lab", 0)), POLICY)
    assert started(plan) == {"cpu"}
    assert verdict(plan, "a").code is VerdictCode.USER_LIMIT


def test_fewer_gpus_are_named_where_they_would_start() -> None:
    reported = verdict(decide(one_team(3, waits("a", "lab", 4)), POLICY), "a")
    assert reported.suggestion is not None
    assert (reported.suggestion.kind, reported.suggestion.fields) == (
        AlternativeKind.FEWER_GPUS,
        {"gpus_per_task": 3},
    )
    nothing_left = one_team(3, waits("a", "lab", 1), running=[runs("r", "lab", ("n0", [0, 1, 2]))])
    assert verdict(decide(nothing_left, POLICY), "a").suggestion is None


def test_a_change_that_helps_one_user_is_not_suggested_to_another() -> None:
    """Equal requests, larger than anybody may hold: who holds nothing may have less, who holds all may not."""
    running = [runs("r", "lab", ("n0", [0, 1, 2]))]
    photo = one_team(3, waits("a", "lab", 4), waits("b", "lab", 4, user=BOB), running=running)
    plan = decide(photo, POLICY)
    assert verdict(plan, "a").suggestion is None
    helps = verdict(plan, "b").suggestion
    assert helps is not None
    assert helps.fields == {"gpus_per_task": 3}


def test_equal_jobs_of_two_users_have_different_verdicts() -> None:
    full = [
        runs("r", "lab", ("n0", range(4)), user=BOB),
        runs("s", "lab", ("n1", range(4)), user=UserId("cy")),
    ]
    plan = decide(one_team(4, waits("a", "lab", 2), waits("b", "lab", 2, user=BOB), running=full), POLICY)
    assert verdict(plan, "a").code is VerdictCode.INSUFFICIENT_RESOURCES
    assert verdict(plan, "b").code is VerdictCode.USER_LIMIT


def test_use_in_child_projects_counts_in_the_parent() -> None:
    held = [runs("r", "vision", ("n0", [0, 1]))]
    snapshot = cluster(
        [node("n0")], [LAB, VISION, NLP], [quota("lab", person=3)], running=held,
        pending=[waits("a", "nlp", 2), waits("own", "lab", 1), waits("b", "nlp", 1, user=BOB)],
    )  # fmt: skip
    plan = decide(snapshot, POLICY)
    assert started(plan) == {"own", "b"}
    assert "In lab its owner uses 3 of the user limit of 3" in verdict(plan, "a").message


def test_a_limit_in_one_pool_does_not_apply_in_another() -> None:
    other = PoolId("other")
    snapshot = cluster(
        [node("n0"), node("n1", pool=other)], [LAB], [quota("lab", person=1)],
        pools=[PoolRow(MAIN, "main"), PoolRow(other, "other")],
        pending=[waits("a", "lab", 2), waits("b", "lab", 2, pools=(MAIN, other))],
    )  # fmt: skip
    plan = decide(snapshot, POLICY)
    assert [(start.job, start.pool) for start in plan.starts] == [("b", "other")]
    assert verdict(plan, "a").message.endswith("its owner uses 0 of the user limit of 1 in the pool main.")


def test_a_job_being_stopped_still_counts() -> None:
    leaves = runs("r", "lab", ("n0", [0, 1]), stopping=True)
    before = one_team(2, waits("a", "lab", 2), running=[leaves])
    plan = decide(before, POLICY)
    assert started(plan) == set()
    assert verdict(plan, "a").code is VerdictCode.USER_LIMIT
    assert started(decide(release_stopping_jobs(apply_plan(before, plan)), POLICY)) == {"a"}


def test_a_more_urgent_job_preempts_only_jobs_of_its_own_user() -> None:
    low = [
        runs("mine", "lab", ("n0", [0, 1])),
        runs("bobs", "lab", ("n0", [2, 3]), user=BOB, started_s=NOW_S - 300),
    ]
    plan = decide(one_team(2, waits("a", "lab", 2, priority=90), running=low), POLICY)
    assert [(each.job, each.for_job) for each in plan.evictions] == [("mine", "a")]


def test_no_preemption_for_a_user_at_the_limit() -> None:
    held = [
        runs("mine", "lab", ("n0", range(4)), preemptible=False),
        runs("borrowed", "two", ("n1", range(4))),
    ]
    snapshot = cluster(
        [node("n0"), node("n1")], [LAB, project("two")], [quota("lab", 8, person=4)], running=held,
        pending=[waits("a", "lab", 4)],
    )  # fmt: skip
    plan = decide(snapshot, POLICY)
    assert plan.evictions == ()
    assert verdict(plan, "a").code is VerdictCode.USER_LIMIT
    free = replace(snapshot, quotas=(quota("lab", 8),))
    assert [each.job for each in decide(free, POLICY).evictions] == ["borrowed"]


def test_preempted_jobs_do_not_count_towards_the_limit() -> None:
    """Two of ada's jobs are to leave, for two others; the one is called back only if hers still fits beside it."""
    snapshot = cluster(
        [node("n0"), node("n1"), node("n2")],
        [project("p0"), project("p1"), project("p2")],
        [quota("p1", weight=2, priority=1, person=2), quota("p2", 1, weight=0, person=2)],
        running=[
            runs("n0-r0", "p2", ("n0", [0, 1]), priority=25, started_s=NOW_S - 1164),
            runs("n1-r0", "p1", ("n1", [0]), priority=25, started_s=NOW_S - 1764),
            runs("n1-r1", "p1", ("n1", [1, 2, 3]), priority=25, user=BOB, started_s=NOW_S - 464),
            runs("n2-r0", "p0", ("n2", [0, 1]), user=BOB, started_s=NOW_S - 7427),
            runs("n2-r2", "p2", ("n2", [2, 3]), started_s=NOW_S - 381),
        ],
        pending=[
            waits("j0", "p0", 2, tasks=2, priority=25, user=BOB),
            waits("j2", "p2", 1, priority=100, preemptible=False),
            waits("j3", "p0", 2, priority=25, user=BOB),
            waits("j4", "p0", 4, tasks=2, priority=100, milli_per_gpu=500),
        ],
    )  # fmt: skip
    plan = decide(snapshot, POLICY)
    assert {"n0-r0", "n2-r2"} <= {eviction.job for eviction in plan.evictions}
    again = decide(apply_plan(snapshot, plan), POLICY)
    assert (again.starts, again.evictions) == ((), ())


def test_a_limit_below_current_use_stops_no_job() -> None:
    held = [
        runs("mine", "lab", ("n0", range(4))),
        runs("old", "lab", ("n1", range(4)), started_s=NOW_S - 9_000),
    ]
    urgent = waits("b", "lab", 2, user=BOB, priority=90)
    snapshot = one_team(2, urgent, running=held)
    (eviction,) = decide(snapshot, POLICY).evictions
    assert eviction.for_job == "b"


def test_a_share_does_not_claim_above_the_limit_per_user() -> None:
    """Otherwise a pile of one person's jobs would hold a share that nobody can use."""
    pile = [waits(f"a{i}", "lab", 4) for i in range(9)]
    snapshot = cluster(
        [node("n0"), node("n1")], [LAB, project("two")], [quota("lab", person=2)],
        pending=[*pile, waits("c", "lab", 1, user=BOB)],
    )  # fmt: skip
    (lab,) = (
        breakdown for breakdown in decide(snapshot, POLICY).share_breakdowns if breakdown.project == "lab"
    )
    # jobs of 4 never start for one person here, so only the colleague asks for anything
    assert lab.requested_milli == 1000
    small = replace(snapshot, pending=tuple(waits(f"a{i}", "lab", 1) for i in range(9)))
    (lab,) = (breakdown for breakdown in decide(small, POLICY).share_breakdowns if breakdown.project == "lab")
    assert lab.requested_milli == 2000


def test_would_start_reports_it_before_submission() -> None:
    snapshot = one_team(2, running=[runs("r", "lab", ("n0", [0]))])
    assert preview_request(snapshot, POLICY, waits("asked", "lab", 1)).starts_now
    answer = preview_request(snapshot, POLICY, waits("asked", "lab", 2))
    assert answer.verdict is not None
    assert answer.verdict.code is VerdictCode.USER_LIMIT
    assert [change.fields for change in answer.alternatives] == [{"gpus_per_task": 1}]


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_a_number_that_cannot_be_is_refused_by_field(wrong: float) -> None:
    snapshot = one_team(2)
    broken = replace(snapshot, quotas=(replace(snapshot.quotas[0], user_limit_milli=wrong),))
    with pytest.raises(SnapshotError, match="user_limit_milli"):
        check_snapshot(broken)


def test_a_plan_above_the_limit_per_user_is_refused() -> None:
    free = one_team(None, waits("a", "lab", 4))
    plan = decide(free, POLICY)
    check_plan(free, plan)
    with pytest.raises(PlanError, match="user limit"):
        check_plan(replace(free, quotas=(quota("lab", person=3),)), plan)


def test_a_save_keeps_the_limit_and_older_ones_have_none() -> None:
    saved = snapshot_to_json(one_team(2))
    assert snapshot_from_json(saved) == one_team(2)
    assert snapshot_from_json(saved.replace(', "user_limit_milli": 2000', "")) == one_team(None)
