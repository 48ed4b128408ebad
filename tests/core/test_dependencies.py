"""Jobs that start after others: what they are told, and that they take no part meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.decide import decide, preview_request
from scheduler.core.forecast.durations import DurationHistory
from scheduler.core.forecast.start_times import QueueForecast
from scheduler.core.model.plan import Verdict
from scheduler.core.model.policy import Policy
from scheduler.core.model.serialization import snapshot_from_json, snapshot_to_json
from scheduler.core.model.snapshot import JobDependency, JobId, PendingRow
from scheduler.core.model.validation import SnapshotError, check_snapshot
from tests.core.cluster_builder import MAIN, cluster, node, project, started, waits
from tests.core.plan_rules import PlanError, check_plan

POLICY = Policy()
VISION, NLP = project("vision"), project("nlp", created_s=1.0)
PREP, EVAL = JobDependency(JobId("p"), "prep", VISION.id), JobDependency(JobId("e"), "eval", VISION.id)
SECRET = JobDependency(JobId("s"), "secret", NLP.id)


def reported(row: PendingRow) -> Verdict:
    (verdict,) = decide(cluster([node("n0")], [VISION, NLP], pending=[row]), POLICY).verdicts
    return verdict


@pytest.mark.parametrize(
    ("after", "any_end", "message"),
    [
        ((PREP,), False, "It starts after prep has completed."),
        ((PREP,), True, "It starts after prep has ended."),
        ((PREP, EVAL), False, "It starts after eval, prep have completed."),
        ((SECRET,), False, "It starts after a job of another project has completed."),
        ((PREP, SECRET), True, "It starts after prep and 1 more have ended."),
    ],
)
def test_a_waiting_job_names_its_dependencies_of_its_own_project_only(after, any_end, message) -> None:
    verdict = reported(waits("j", "vision", dependencies=after, ignore_dependency_failure=any_end))
    assert (verdict.code, verdict.message) == (VerdictCode.DEPENDENCY, message)
    assert verdict.details == {"unfinished_dependencies": len(after)}
    assert verdict.suggestion is None


def test_it_starts_when_no_dependency_is_left() -> None:
    assert started(decide(cluster([node("n0")], [VISION], pending=[waits("j", "vision")]), POLICY)) == {"j"}


def test_a_dependent_job_claims_no_share_and_blocks_nobody() -> None:
    first = waits("first", "vision", 4, age_s=99, priority=90, dependencies=(PREP,))
    plan = decide(cluster([node("n0")], [VISION], pending=[first, waits("second", "vision", 4)]), POLICY)
    assert started(plan) == {"second"}
    assert plan.share_breakdowns[0].requested_milli == 4000


def test_impossible_requests_are_reported_at_once() -> None:
    verdict = reported(waits("j", "vision", 9, dependencies=(PREP,)))
    assert verdict.code is VerdictCode.UNSATISFIABLE


def test_a_hold_has_precedence_over_dependencies() -> None:
    assert reported(waits("j", "vision", dependencies=(PREP,), held=True)).code is VerdictCode.HELD


def test_a_preview_reports_the_dependency_and_suggests_no_useless_change() -> None:
    snapshot = cluster([node("n0")], [VISION])
    answer = preview_request(snapshot, POLICY, waits("asked", "vision", 2, dependencies=(PREP,)))
    assert not answer.starts_now and not answer.is_unsatisfiable
    assert answer.verdict is not None and answer.verdict.code is VerdictCode.DEPENDENCY
    assert answer.alternatives == ()
    assert preview_request(
        snapshot, POLICY, waits("asked", "vision", 9, dependencies=(PREP,))
    ).is_unsatisfiable


def test_forecasts_do_not_count_a_dependent_job() -> None:
    rows = [
        waits("a", "vision", 4, age_s=9, dependencies=(PREP,)),
        waits("b", "vision", 4),
        waits("c", "vision", 4),
    ]
    snapshot = cluster([node("n0")], [VISION], pending=rows)
    outlook = QueueForecast(snapshot, decide(snapshot, POLICY), MAIN, DurationHistory(), POLICY)
    with pytest.raises(KeyError):
        outlook.median_starts_s([JobId("a")])
    alone = replace(snapshot, pending=tuple(rows[1:]))
    without = QueueForecast(alone, decide(alone, POLICY), MAIN, DurationHistory(), POLICY)
    assert outlook.median_starts_s([JobId("c")]) == without.median_starts_s([JobId("c")])


@pytest.mark.parametrize("dependencies", [(PREP, PREP), (JobDependency(JobId("j"), "j", VISION.id),)])
def test_invalid_dependencies_are_refused_by_field(dependencies) -> None:
    row = waits("j", "vision", dependencies=dependencies)
    with pytest.raises(SnapshotError, match="dependencies"):
        check_snapshot(cluster([node("n0")], [VISION], pending=[row]))


def test_a_plan_that_starts_it_is_refused() -> None:
    snapshot = cluster([node("n0")], [VISION], pending=[waits("j", "vision")])
    plan = decide(snapshot, POLICY)
    early = replace(snapshot, pending=(waits("j", "vision", dependencies=(PREP,)),))
    with pytest.raises(PlanError, match="has dependencies"):
        check_plan(early, plan)


def test_a_save_keeps_the_dependencies() -> None:
    snapshot = cluster(
        [node("n0")],
        [VISION, NLP],
        pending=[waits("j", "vision", dependencies=(PREP, SECRET), ignore_dependency_failure=True)],
    )
    assert snapshot_from_json(snapshot_to_json(snapshot)) == snapshot
