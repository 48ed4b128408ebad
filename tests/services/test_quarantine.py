"""What befalls nodes as the record keeps it: who is put aside, who is tried, and what an administrator may do."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db import transaction
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.domain.nodes.node_breaker import BreakerState, IncidentKind
from portal.errors import Forbidden
from portal.models import Attempt, AuditEntry, Membership, Node, NodeIncident, Task
from portal.services.lifecycle import job_control
from portal.services.nodes import quarantine
from scheduler.retention import delete_expired_rows
from tests import factories
from tests.services.test_lifecycle import place, run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    made = factories.basic_cluster()
    others = [factories.user() for _ in range(2)]
    for other in others:
        Membership.objects.create(project=made["project"], user=other, role="member")
    return made | {"others": others, "admin": factories.user(admin=True)}


def fails(dataset, owner, node: Node | None = None, *, code: int = 3) -> None:
    """A job of ``owner`` that ends with this code as soon as it has begun."""
    job = factories.job(owner, dataset["project"], dataset["environment"])
    there = dataset if node is None else dataset | {"node": node}
    (task,) = run(place(there, job))
    reason = EndReason.EXIT_CODE if code else EndReason.COMPLETED
    if job_control.record_task_ended(task, exit_code=code, reason=reason):
        quarantine.record_task_failure(task, reason)


def now(node: Node) -> tuple[str, str]:
    node.refresh_from_db()
    return node.breaker_state, node.breaker_cause


def test_jobs_of_several_people_that_fail_soon_put_it_aside(dataset) -> None:
    factories.node(dataset["pool"])
    for owner in (dataset["owner"], *dataset["others"]):
        assert now(dataset["node"]) == ("healthy", "")
        fails(dataset, owner)
    assert now(dataset["node"]) == ("quarantined", "early_failures")
    assert not dataset["node"].accepts_work
    entry = AuditEntry.objects.get(action="node.breaker")
    assert (entry.before["state"], entry.after["cause"], entry.reason) == (
        "healthy",
        "early_failures",
        "Exit code 3.",
    )


@pytest.mark.parametrize("case", ["one did well between", "it ran for long", "it was asked to leave"])
def test_endings_that_do_not_count_against_a_node(dataset, case: str) -> None:
    for number, owner in enumerate((dataset["owner"], *dataset["others"])):
        if case == "one did well between" and number == 1:
            fails(dataset, owner, code=0)
        job = factories.job(owner, dataset["project"], dataset["environment"])
        attempt = place(dataset, job)
        (task,) = run(attempt)
        if case == "it ran for long":
            Task.objects.filter(pk=task).update(running_at=timezone.now() - dt.timedelta(seconds=61))
        if case == "it was asked to leave":
            job_control.request_stop(attempt.pk, EndReason.CANCELLED_BY_USER)
        if job_control.record_task_ended(task, exit_code=1, reason=EndReason.EXIT_CODE):
            quarantine.record_task_failure(task, EndReason.EXIT_CODE)
    assert now(dataset["node"]) == ("healthy", "")


def test_failures_of_one_user_count_once_their_jobs_succeed_elsewhere(dataset) -> None:
    other = factories.node(dataset["pool"])
    for _ in range(3):
        fails(dataset, dataset["owner"])
    quarantine.evaluate_breakers()
    assert now(dataset["node"]) == ("healthy", "")
    fails(dataset, dataset["owner"], other, code=0)
    quarantine.evaluate_breakers()
    assert now(dataset["node"]) == ("quarantined", "early_failures")


def test_no_more_than_a_third_of_a_pool_is_put_aside(dataset) -> None:
    nodes = [dataset["node"], *(factories.node(dataset["pool"]) for _ in range(5))]
    for node in nodes:
        for _ in range(4):
            quarantine.record_incident(node.pk, IncidentKind.LINK_LOST)
    assert Node.objects.filter(breaker_state=BreakerState.QUARANTINED).count() == 2
    quarantine.do_clear_node_quarantine(
        dataset["admin"], Node.objects.filter(breaker_state=BreakerState.QUARANTINED).first()
    )
    quarantine.evaluate_breakers()
    assert Node.objects.filter(breaker_state=BreakerState.QUARANTINED).count() == 2, (
        "the next of those that were spared"
    )


def test_a_trial_takes_one_attempt_and_is_repeated_when_inconclusive(dataset) -> None:
    node = dataset["node"]
    Node.objects.filter(pk=node.pk).update(
        breaker_state="probation", breaker_cause="link_lost", breaker_since=timezone.now()
    )
    node.refresh_from_db()
    attempt = place(dataset, factories.job(dataset["owner"], dataset["project"], dataset["environment"]))
    with transaction.atomic():
        quarantine.start_probations([(attempt, [node])])
    node.refresh_from_db()
    assert node.probation_attempt == attempt and not node.accepts_work
    job_control.request_stop(attempt.pk, EndReason.CANCELLED_BY_USER)
    quarantine.evaluate_breakers()
    assert not Node.objects.get(pk=node.pk).accepts_work, "who ended it may be about to say why"
    attempt.task_rows.update(ended_at=timezone.now() - dt.timedelta(seconds=10))
    quarantine.evaluate_breakers()
    assert now(node) == ("probation", "link_lost") and node.accepts_work
    quarantine.record_incident(node.pk, IncidentKind.COMMAND_TIMEOUTS)
    assert now(node) == ("quarantined", "command_timeouts")


def test_a_task_that_joins_a_node_on_trial_is_judged_separately(dataset) -> None:
    """Its attempt has run for long elsewhere: that says nothing of this node."""
    node, minute = dataset["node"], dt.timedelta(seconds=70)
    other = factories.node(dataset["pool"])
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    attempt = place(dataset | {"node": other}, job)
    run(attempt)
    Attempt.objects.filter(pk=attempt.pk).update(running_at=timezone.now() - minute)
    joined = Task.objects.create(
        attempt=attempt, rank=7, node=node, state="RUNNING", running_at=timezone.now()
    )
    trial = {
        "breaker_state": "probation",
        "breaker_cause": "link_lost",
        "probation_attempt": attempt,
        "breaker_since": timezone.now(),
    }
    Node.objects.filter(pk=node.pk).update(**trial)
    quarantine.evaluate_breakers()
    assert now(node) == ("probation", "link_lost") and not node.accepts_work
    Task.objects.filter(pk=joined.pk).update(running_at=timezone.now() - minute)
    quarantine.evaluate_breakers()
    assert now(node) == ("healthy", "")


def test_only_an_administrator_may_end_a_quarantine(dataset) -> None:
    node = dataset["node"]
    quarantine.record_stuck_job(
        node.pk, factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    )
    assert now(node) == ("quarantined", "stuck") and node.probe_at is None
    with pytest.raises(Forbidden):
        quarantine.do_clear_node_quarantine(dataset["owner"], node)
    quarantine.do_clear_node_quarantine(dataset["admin"], node, reason="restarted the daemon")
    assert now(node) == ("healthy", "") and node.accepts_work and node.trip_count == 0
    assert AuditEntry.objects.filter(action="node.breaker", actor=dataset["admin"]).exists()


def test_old_troubles_are_dropped(dataset) -> None:
    quarantine.record_incident(dataset["node"].pk, IncidentKind.LINK_LOST)
    NodeIncident.objects.update(at=timezone.now() - dt.timedelta(days=15))
    quarantine.record_incident(dataset["node"].pk, IncidentKind.LINK_LOST)
    delete_expired_rows()
    assert NodeIncident.objects.count() == 1
