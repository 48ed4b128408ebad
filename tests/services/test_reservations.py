"""The calendar: what may be reserved, by whom, and that the database lets no two reservations of a node overlap."""

from __future__ import annotations

import datetime as dt
import threading
from dataclasses import replace

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.errors import Conflict, Forbidden, InvalidRequest, PreconditionFailed
from portal.models import AuditEntry, OutboxMessage, Reservation, ReservationNode
from portal.selectors.scheduling.reservations import node_reservations
from portal.services.lifecycle import job_control
from portal.services.scheduling.reservations import (
    ReservationInput,
    choose_nodes,
    do_cancel_reservation,
    do_restore_reservation,
    do_save_reservation,
    drain_started_reservations,
    get_nodes,
    get_projects,
)
from scheduler.cycle import run_cycle
from tests import factories
from tests.services.test_lifecycle import place, run

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = dt.timedelta(hours=1)


@pytest.fixture
def dataset():
    made = factories.basic_cluster() | {"admin": factories.user(admin=True)}
    made["other"] = factories.node(made["pool"])
    return made


def words(dataset, begin=1, end=5, **changes) -> ReservationInput:
    """Both nodes for the project, hours from now."""
    now = timezone.now()
    asked = ReservationInput(
        "course", dataset["pool"], [dataset["node"], dataset["other"]], [dataset["project"]], now + begin * HOUR,
        now + end * HOUR, "spring term",
    )  # fmt: skip
    return replace(asked, **changes)


def test_an_admin_reserves_nodes_and_the_next_cycle_hears(dataset) -> None:
    row = do_save_reservation(dataset["admin"], words(dataset))
    assert {one.node_id for one in row.reservation_nodes.all()} == {dataset["node"].pk, dataset["other"].pk}
    reported = AuditEntry.objects.get(action="reservation.create")
    assert (reported.object_id, reported.reason) == (row.public_id, "spring term")
    assert reported.after["projects"] == [dataset["project"].name]
    assert OutboxMessage.objects.filter(name="scheduler.cycle", arguments=["reservation"]).exists()
    with pytest.raises(Forbidden, match="Only administrators reserve nodes"):
        do_save_reservation(dataset["owner"], words(dataset, 10, 11))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": " "}, "name"),
        ({"name": "x" * 101}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"nodes": []}, "nodes"),
        ({"reason": "x" * 501}, "reason"),
        ({"begin": 5, "end": 5}, "ends_at"),
        ({"begin": -5, "end": -1}, "ends_at"),
        ({"begin": 1, "end": 24 * 500}, "ends_at"),
        ({"begin": 24 * 900, "end": 24 * 901}, "starts_at"),
    ],
)
def test_invalid_reservations_are_refused_by_field(dataset, changes, field) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        do_save_reservation(dataset["admin"], words(dataset, **changes))
    assert set(refusal.value.fields) == {field}
    assert not Reservation.objects.exists()


def test_nodes_of_another_pool_are_refused(dataset) -> None:
    outsider = factories.node(factories.pool())
    with pytest.raises(InvalidRequest, match="belong to the pool"):
        do_save_reservation(dataset["admin"], words(dataset, nodes=[outsider]))
    with pytest.raises(InvalidRequest, match="has no node called"):
        get_nodes(dataset["pool"], [outsider.name])
    with pytest.raises(InvalidRequest, match="no project called nowhere"):
        get_projects(["nowhere"])


def test_a_start_in_the_past_becomes_now(dataset) -> None:
    row = do_save_reservation(dataset["admin"], words(dataset, -10, 1))
    assert abs(row.starts_at - timezone.now()) < dt.timedelta(seconds=10)


def test_two_reservations_of_a_node_never_overlap(dataset) -> None:
    first = do_save_reservation(dataset["admin"], words(dataset, 1, 5))
    with pytest.raises(Conflict) as refusal:
        do_save_reservation(dataset["admin"], words(dataset, 4, 8, nodes=[dataset["node"]]))
    assert (refusal.value.code, refusal.value.details["reservation"]) == ("already_reserved", first.public_id)
    after = do_save_reservation(
        dataset["admin"], words(dataset, begin=0, end=8, nodes=[factories.node(dataset["pool"])])
    )
    assert after.reservation_nodes.count() == 1
    next_one = words(dataset)
    do_save_reservation(
        dataset["admin"], replace(next_one, starts_at=first.ends_at, ends_at=first.ends_at + HOUR)
    )
    with pytest.raises(IntegrityError), transaction.atomic():
        ReservationNode.objects.create(reservation=after, node=dataset["node"], period=first.period)


def test_of_two_concurrent_reservations_one_sees_the_conflict(dataset) -> None:
    """Two connections: the second waits for the first inside the exclusion constraint, and is refused."""
    reported: list[str] = []

    def second() -> None:
        try:
            do_save_reservation(dataset["admin"], words(dataset, name="second"))
        except Conflict as error:
            reported.append(error.code)
        finally:
            connection.close()

    with transaction.atomic():
        do_save_reservation(dataset["admin"], words(dataset, name="first"))
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(timeout=1.0)
        assert thread.is_alive()
    thread.join(timeout=20.0)
    assert reported == ["already_reserved"]
    assert list(Reservation.objects.values_list("name", flat=True)) == ["first"]


def test_a_reservation_can_be_changed_until_its_end_with_the_current_version(dataset) -> None:
    row = do_save_reservation(dataset["admin"], words(dataset))
    changed = do_save_reservation(
        dataset["admin"], words(dataset, 2, 3, nodes=[dataset["node"]]), row, version=1
    )
    assert (changed.version, changed.reservation_nodes.count()) == (2, 1)
    with pytest.raises(PreconditionFailed):
        do_save_reservation(dataset["admin"], words(dataset), row, version=1)
    begun = do_save_reservation(dataset["admin"], words(dataset, 0, 1, nodes=[dataset["other"]]))
    kept = do_save_reservation(dataset["admin"], words(dataset, 0.5, 2, nodes=[dataset["other"]]), begun)
    assert kept.starts_at == begun.starts_at and kept.ends_at > begun.ends_at


def test_a_cancellation_can_be_undone_while_the_nodes_are_free(dataset) -> None:
    admin = dataset["admin"]
    row = do_save_reservation(admin, words(dataset))
    assert do_cancel_reservation(admin, row).cancelled_at is not None
    do_cancel_reservation(admin, row)
    assert AuditEntry.objects.filter(action="reservation.cancel").count() == 1
    other = do_save_reservation(admin, words(dataset, 2, 3))
    with pytest.raises(Conflict, match="already reserved at that time"):
        do_restore_reservation(admin, row)
    assert Reservation.objects.get(pk=row.pk).cancelled_at is not None
    do_cancel_reservation(admin, other)
    assert do_restore_reservation(admin, row).cancelled_at is None
    assert ReservationNode.objects.filter(reservation=row, live=True).count() == 2
    with pytest.raises(Conflict, match="cancelled or has ended"):
        do_save_reservation(admin, words(dataset, 20, 21), other)


def test_a_count_selects_the_least_used_nodes(dataset) -> None:
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    place(dataset, job)
    now = timezone.now()
    (chosen,) = choose_nodes(dataset["pool"], 1, now, now + HOUR)
    assert chosen == dataset["other"]
    do_save_reservation(dataset["admin"], words(dataset, 0, 1, nodes=[chosen]))
    (left,) = choose_nodes(dataset["pool"], 1, now, now + HOUR)
    assert left == dataset["node"]
    with pytest.raises(InvalidRequest, match="Enter 1 to 1"):
        choose_nodes(dataset["pool"], 2, now, now + HOUR)


def test_clearing_maintenance_preempts_running_jobs_once_and_blocks_new_ones(dataset) -> None:
    stays = do_save_reservation(dataset["admin"], words(dataset, 0, 1, nodes=[dataset["other"]], projects=[]))
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    attempt = place(dataset, job)
    run(attempt)
    clears = {"nodes": [dataset["node"]], "projects": [], "drain_at_start": True, "name": "new fans"}
    row = do_save_reservation(dataset["admin"], words(dataset, 1, 5, **clears))
    assert drain_started_reservations() == 0, "it has not begun"
    assert [window.named for window in node_reservations(dataset["node"])] == [False]
    row = do_save_reservation(dataset["admin"], words(dataset, 0, 1, **clears), row)
    assert drain_started_reservations() == 1
    attempt.refresh_from_db()
    assert (attempt.stop_reason, attempt.state) == ("preempted", "COMPLETING")
    assert attempt.message.startswith("Its node is in maintenance until ")
    assert drain_started_reservations() == 0, "once"
    stays.refresh_from_db()
    assert stays.drained_at is None
    assert AuditEntry.objects.get(action="reservation.clear").after == {"tasks": 1}
    (task,) = attempt.task_rows.values_list("pk", flat=True)
    job_control.record_task_ended(task, exit_code=143, reason=EndReason.EXIT_CODE)
    job.refresh_from_db()
    assert job.state == "PENDING"
    assert run_cycle("test", "me").started == 0
    assert job.verdict.code == "reserved_for_other_job"


def test_only_maintenance_clears(dataset) -> None:
    with pytest.raises(InvalidRequest) as caught:
        do_save_reservation(dataset["admin"], words(dataset, drain_at_start=True))
    assert set(caught.value.fields) == {"drain_at_start"}
