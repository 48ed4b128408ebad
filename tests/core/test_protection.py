"""Who runs undisturbed for a while: nobody asks them to leave, and who waits for it is told until when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy, SchedulingSemantics
from scheduler.core.model.snapshot import NodeId, ProjectId, ReservationRow, Snapshot
from tests.core.cluster_builder import NOW_S, cluster, node, project, quota, runs, waits

MINIMUM_S = 3_600.0
POLICY = replace(Policy(), preempt_min_runtime_s=MINIMUM_S)


def owner_and_borrower(*ages_s: float, asks: int = 2, **changes: Any) -> Snapshot:
    """The owner is guaranteed both GPUs, which two jobs of the borrower hold, for so long each."""
    return cluster(
        [node("n0", 2)],
        [project("owner"), project("borrower")],
        [quota("owner", 2)],
        running=[
            runs(f"borrows-{n}", "borrower", ("n0", [n]), started_s=NOW_S - age_s, **changes)
            for n, age_s in enumerate(ages_s)
        ],
        pending=[waits("mine", "owner", asks)],
    )


def opening_s(snapshot: Snapshot, policy: Policy = POLICY) -> float:
    """The moment that the verdict of the waiting job names; it must stand in the message, too."""
    plan = decide(snapshot, policy)
    (verdict,) = plan.verdicts
    assert not plan.evictions and verdict.code is VerdictCode.VICTIMS_PROTECTED, verdict
    until_s = verdict.details["protected_until_s"]
    assert isinstance(until_s, float) and "are protected until" in verdict.message
    return until_s


@pytest.mark.parametrize(
    ("why", "snapshot", "expected_s"),
    [
        ("both must go: the later counts", owner_and_borrower(600, 1_800), MINIMUM_S - 600),
        ("one is enough: the earlier counts", owner_and_borrower(600, 1_800, asks=1), MINIMUM_S - 1_800),
        ("one may be asked already", owner_and_borrower(600, 4_000), MINIMUM_S - 600),
    ],
)
def test_the_first_moment_that_helps_is_named(why: str, snapshot: Snapshot, expected_s: float) -> None:
    until_s = opening_s(snapshot)
    assert until_s == NOW_S + expected_s, why
    then = replace(snapshot, now_s=until_s)
    assert {eviction.for_job for eviction in decide(then, POLICY).evictions} == {"mine"}
    before = replace(snapshot, now_s=until_s - 1)
    assert not decide(before, POLICY).evictions


SPARING = replace(Policy(), near_end_protection_s=900)


def test_a_job_that_is_about_to_end_is_left_to() -> None:
    soon = owner_and_borrower(600, 600, predicted_end_s=NOW_S + 300)
    nothing_promised = replace(soon, quotas=(quota("borrower", weight=0.0),))
    assert opening_s(nothing_promised, SPARING) == NOW_S + 300


def test_protection_does_not_apply_against_the_guarantee_holder() -> None:
    soon = owner_and_borrower(600, 600, predicted_end_s=NOW_S + 300)
    assert {eviction.for_job for eviction in decide(soon, SPARING).evictions} == {"mine"}


def test_a_near_end_protects_a_job_beyond_its_minimum_and_after_it() -> None:
    """The verdict names the time at which the same rules let the job be evicted."""
    policy = replace(POLICY, near_end_protection_s=900)

    def borrowed(predicted_end_s: float) -> Snapshot:
        snapshot = owner_and_borrower(3_000, 3_000, predicted_end_s=predicted_end_s)
        return replace(snapshot, quotas=(quota("borrower", weight=0.0),))

    for ends_in_s, expected_s in ((300, 600), (600, 600), (1_000, 1_000), (1_499, 1_499), (1_501, 600)):
        snapshot = borrowed(NOW_S + ends_in_s)
        assert opening_s(snapshot, policy) == NOW_S + expected_s
        then = decide(replace(snapshot, now_s=NOW_S + expected_s + 1), policy)
        assert {eviction.for_job for eviction in then.evictions} == {"mine"}


def test_inside_a_project_too() -> None:
    snapshot = cluster(
        [node("n0", 1)],
        [project("p")],
        running=[runs("low", "p", ("n0", [0]), started_s=NOW_S - 600)],
        pending=[waits("high", "p", 1, priority=90)],
    )
    assert opening_s(snapshot) == NOW_S + MINIMUM_S - 600


@pytest.mark.parametrize(
    ("why", "snapshot", "policy"),
    [
        ("who is guaranteed the GPUs keeps them anyhow", replace(
            owner_and_borrower(600, 600), quotas=(quota("owner"), quota("borrower", 2))), POLICY),
        ("whoever may be asked is asked", owner_and_borrower(4_000, 4_000), POLICY),
        ("the cluster takes nothing back", owner_and_borrower(600, 600), replace(
            POLICY, semantics=SchedulingSemantics(actions=("allocate",)))),
        ("there is no budget for it", owner_and_borrower(600, 600), replace(POLICY, max_suggestion_steps=0)),
    ],
)  # fmt: skip
def test_protection_is_not_mentioned_where_it_is_not_the_reason(
    why: str, snapshot: Snapshot, policy: Policy
) -> None:
    codes = {verdict.code for verdict in decide(snapshot, policy).verdicts}
    assert VerdictCode.VICTIMS_PROTECTED not in codes, why


def test_asking_on_paper_changes_no_plan() -> None:
    """Others are placed, and told why they wait, as if nobody had asked."""
    snapshot = owner_and_borrower(600, 1_800)
    more = replace(
        snapshot,
        nodes=(*snapshot.nodes, node("n1", 1)),
        pending=(*snapshot.pending, waits("small", "borrower", 1), waits("large", "borrower", 2)),
    )
    asked, quiet = (decide(more, replace(POLICY, max_suggestion_steps=steps)) for steps in (400, 0))
    assert asked.starts == quiet.starts and asked.evictions == quiet.evictions
    assert {v.job: v.details.get("free_gpus") for v in asked.verdicts} == {
        v.job: v.details.get("free_gpus") for v in quiet.verdicts
    }


# -- moves -------------------------------------------------------------------------------------------------

ANY_JOB = replace(Policy(), movable_jobs="any")


def scattered(
    of: str = "lab", priority: int = 60, project_of_running: str = "lab", **changes: Any
) -> Snapshot:
    """Two jobs of 100 s on two nodes of two GPUs; if one is moved, the pending job gets a whole node."""
    running = [
        runs(name, project_of_running, (where, [0]), **{"started_s": NOW_S - 100, **changes})
        for name, where in (("a", "n0"), ("b", "n1"))
    ]
    return cluster(
        [node("n0", 2), node("n1", 2)],
        [project("lab"), project("other")],
        [quota("lab", 2), quota("other", 2)],
        running=running,
        pending=[waits("wide", of, 2, priority=priority)],
    )


def moved(snapshot: Snapshot, policy: Policy) -> set[str]:
    policy = replace(policy, semantics=SchedulingSemantics(actions=("allocate", "consolidate")))
    return {str(eviction.job) for eviction in decide(snapshot, policy).evictions}


def test_a_job_moves_for_one_that_could_evict_it() -> None:
    assert moved(scattered(), Policy()) == {"a"}


@pytest.mark.parametrize("changes", [{"predicted_end_s": NOW_S + 60}, {"preemptible": False}, {}])
@pytest.mark.parametrize("policy", [Policy(), ANY_JOB])
def test_protections_hold_for_moves(policy: Policy, changes: dict[str, Any]) -> None:
    if not changes:
        policy = replace(policy, preempt_min_runtime_s=MINIMUM_S)
    assert moved(scattered(**changes), policy) == set()
    assert moved(scattered("other", **changes), policy) == set()


def test_a_project_protects_its_jobs_from_moves_for_others() -> None:
    guarded = replace(scattered("other"), quotas=(replace(quota("lab", 0), reclaim_min_runtime_s=MINIMUM_S),))
    assert moved(guarded, ANY_JOB) == set()
    assert moved(replace(guarded, pending=(waits("wide", "lab", 2),)), ANY_JOB) == {"a"}


@pytest.mark.parametrize(
    ("why", "snapshot"),
    [
        ("lower priority", scattered(priority=1)),
        ("equal priority", scattered(priority=50)),
        ("its project is within its guarantee", scattered("other", priority=100)),
        ("the pending job's project exceeds its share", replace(
            scattered("other", 100), quotas=(quota("lab", 2), quota("other", 0, weight=0.0)))),
    ],
)  # fmt: skip
def test_whoever_may_not_evict_a_job_may_not_move_it(why: str, snapshot: Snapshot) -> None:
    assert moved(snapshot, Policy()) == set(), why
    assert moved(snapshot, ANY_JOB) == {"a"}, why


def test_a_move_counts_each_job_that_is_moved_as_if_it_were_reclaimed() -> None:
    """The project of the running jobs exceeds its entitlement by one GPU: one of them may be disturbed."""

    def moved_for(wants: int, guaranteed: int) -> set[str]:
        nodes = [node("n0", 3), node("n1", 3)]
        running = [
            runs(f"{where.id}-{i}", "lab", (where.id, [i]), started_s=NOW_S - 100)
            for where in nodes
            for i in range(2 if where.id == "n0" else 1)
        ]
        return moved(
            cluster(
                nodes,
                [project("lab"), project("other")],
                [quota("lab", guaranteed, weight=0.0), quota("other", 3)],
                running=running,
                pending=[waits("wide", "other", wants)],
            ),
            Policy(),
        )

    assert moved_for(3, guaranteed=2) == {"n1-0"}
    assert moved_for(3, guaranteed=3) == set()


def test_jobs_near_their_end_are_moved_only_if_all_of_them_could_be_evicted() -> None:
    """Also where any job may be moved: whoever may evict one of them may not disturb two."""

    def moved_for(guaranteed: int) -> set[str]:
        ends = {"predicted_end_s": NOW_S + 60, "started_s": NOW_S - 100}
        running = [runs(f"ends-{i}", "lab", ("n0", [i]), **ends) for i in range(2)]
        stays = runs("stays", "lab", ("n1", [0]), preemptible=False)
        return moved(
            cluster(
                [node("n0", 3), node("n1", 3)],
                [project("lab"), project("other")],
                [quota("lab", guaranteed, weight=0.0), quota("other", 3)],
                running=[*running, stays],
                pending=[waits("wide", "other", 3)],
            ),
            ANY_JOB,
        )

    assert moved_for(guaranteed=1) == {"ends-0", "ends-1"}
    assert moved_for(guaranteed=2) == set()


@pytest.mark.parametrize("actions", [("allocate", "reclaim"), SchedulingSemantics().actions])
def test_a_reclaim_moves_no_job_that_it_may_not_evict(actions: tuple[str, ...]) -> None:
    """The running job holds what its project is guaranteed, and could continue on the node reserved for it."""
    theirs = ReservationRow("res", "theirs", (NodeId("n1"),), (ProjectId("lab"),), NOW_S, NOW_S + 7_200)
    snapshot = cluster(
        [node("n0", 2), node("n1", 2)],
        [project("lab"), project("other")],
        [quota("lab", 2), quota("other", 2)],
        running=[runs("stays", "lab", ("n0", [0, 1]), started_s=NOW_S - 100)],
        pending=[waits("wide", "other", 2)],
    )
    snapshot = replace(snapshot, reservations=(theirs,))
    rules = replace(Policy(), semantics=SchedulingSemantics(actions=actions))
    assert decide(snapshot, rules).evictions == ()
    any_job = decide(snapshot, replace(rules, movable_jobs="any"))
    assert {eviction.job for eviction in any_job.evictions} == {"stays"}
    less = replace(snapshot, quotas=(quota("lab", 1, weight=0.0), quota("other", 2)))
    assert {eviction.job for eviction in decide(less, rules).evictions} == {"stays"}


def test_a_job_that_takes_the_place_of_another_has_to_have_the_right_to_its_victims() -> None:
    """The job of the lab is evicted for another of the lab, and not for a project from which it is protected."""
    protected = replace(quota("lab", weight=0.0), reclaim_min_runtime_s=MINIMUM_S)
    snapshot = cluster(
        [node("n0", 4)],
        [project("lab"), project("other")],
        [protected, quota("other", 4)],
        running=[runs("low", "lab", ("n0", range(4)), priority=25)],
        pending=[waits("high", "lab", 4, priority=90), waits("theirs", "other", 4)],
    )
    (eviction,) = decide(snapshot, Policy()).evictions
    assert (eviction.job, eviction.for_job) == ("low", "high")
    unprotected = replace(snapshot, quotas=(quota("lab", weight=0.0), quota("other", 4)))
    (eviction,) = decide(unprotected, Policy()).evictions
    assert (eviction.job, eviction.for_job) == ("low", "theirs")


def test_a_job_that_takes_the_place_of_another_disturbs_no_work_within_a_guarantee() -> None:
    """The lab may move its own job for a more important one; another project may reclaim only the latter."""
    snapshot = cluster(
        [node("n0", 2, model="H100"), node("n1", 4)],
        [project("lab"), project("other")],
        [quota("lab", 2, weight=0.0), quota("other", 4)],
        running=[runs("low", "lab", ("n1", [0]), started_s=NOW_S - 100)],
        pending=[waits("high", "lab", 4, priority=90), waits("theirs", "other", 4)],
    )
    assert {eviction.for_job for eviction in decide(snapshot, Policy()).evictions} <= {"high"}
