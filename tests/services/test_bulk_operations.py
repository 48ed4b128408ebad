"""Actions on many jobs: bounded work in a request, the rest in the worker, each job once."""

from __future__ import annotations

import datetime as dt
import threading

import pytest
from django.db import connection
from django.utils import timezone

from portal.errors import Conflict
from portal.models import BulkOperation, Job, Membership
from portal.services.jobs import bulk
from portal.services.jobs.bulk import (
    advance_bulk,
    advance_in_request,
    advance_open_bulk_operations,
    bulk_results,
    start_bulk,
)
from scheduler.retention import delete_expired_rows
from tests import factories
from tests.locked_rows import locked_row

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def owner():
    return factories.user("ada")


@pytest.fixture
def jobs(owner):
    return factories.pending_jobs(owner, 25)


def age(operation: BulkOperation, days: int = 0) -> None:
    BulkOperation.objects.filter(pk=operation.pk).update(
        created_at=timezone.now() - dt.timedelta(days=days, seconds=bulk.WORKER_DELAY_S + 1)
    )


def test_what_does_not_fit_into_the_request_is_done_by_the_worker(owner, jobs):
    operation = advance_bulk(start_bulk(owner, jobs, "stop"), 0.0)
    assert operation.finished_at is None and not operation.results
    advance_open_bulk_operations()
    operation.refresh_from_db()
    assert operation.finished_at is None, "the worker leaves a new row to the request that wrote it"
    age(operation)
    advance_open_bulk_operations()
    operation.refresh_from_db()
    assert operation.finished_at is not None
    assert [one.job.pk for one in bulk_results(operation)] == [job.pk for job in jobs]
    assert {job.state for job in Job.objects.all()} == {"CANCELLED"}


def test_a_kill_between_two_transactions_repeats_and_loses_no_job(owner, jobs, monkeypatch):
    for job in jobs:
        bulk.do_cancel_job(owner, job)
    operation = start_bulk(owner, jobs, "requeue")
    resubmit, calls = bulk.do_resubmit_job, []

    def killed(user, job):
        calls.append(job.pk)
        if len(calls) == 15:
            raise KeyboardInterrupt
        return resubmit(user, job)

    monkeypatch.setattr(bulk, "do_resubmit_job", killed)
    with pytest.raises(KeyboardInterrupt):
        advance_bulk(operation, 60)
    operation.refresh_from_db()
    assert 0 < len(operation.results) < len(jobs)
    assert Job.objects.count() == len(jobs) + len(operation.results)
    operation = advance_bulk(operation, 60)
    assert operation.finished_at is not None and Job.objects.count() == 2 * len(jobs)
    assert {one.refusal for one in bulk_results(operation)} == {""}


def test_two_workers_change_each_job_once(owner, jobs):
    for job in jobs:
        bulk.do_cancel_job(owner, job)
    operation = start_bulk(owner, jobs, "requeue")

    def work():
        try:
            advance_bulk(operation, 60)
        finally:
            connection.close()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Job.objects.count() == 2 * len(jobs)


def test_a_locked_job_is_refused_and_the_others_are_changed(owner, jobs):
    with locked_row(jobs[3]):
        operation = advance_bulk(start_bulk(owner, jobs, "hold"), 60)
    results = bulk_results(operation)
    assert [one.job.name for one in results if one.refusal] == ["j3"]
    assert "takes too long" in results[3].refusal
    assert Job.objects.filter(held=True).count() == len(jobs) - 1


def test_rights_are_checked_when_a_job_is_changed(owner, jobs):
    operation = start_bulk(owner, jobs, "stop")
    owner.is_active = False
    owner.save(update_fields=["is_active"])
    operation = advance_bulk(operation, 60)
    assert operation.finished_at is not None
    assert all(operation.results[job.public_id][1] for job in jobs)
    assert not Job.objects.exclude(desired_state="run").exists()


def test_the_worker_uses_the_rights_that_the_user_has_when_a_job_is_changed(owner, jobs):
    Membership.objects.filter(user=owner).update(role="manager")
    other = factories.project("vision", member=owner)
    held, moved = start_bulk(owner, jobs[:2], "hold"), start_bulk(owner, jobs[2:4], "move", other)
    Job.objects.filter(pk=jobs[1].pk).update(project=factories.project("secret"))
    Membership.objects.filter(user=owner, project=other).delete()
    for operation in (held, moved):
        age(operation)
    advance_open_bulk_operations()
    for operation in (held, moved):
        operation.refresh_from_db()
    assert held.results[jobs[0].public_id] == [jobs[0].public_id, ""]
    assert "cannot be found" in held.results[jobs[1].public_id][1]
    assert all("no such project" in refusal for _, refusal in moved.results.values())
    rest = start_bulk(owner, jobs[4:6], "hold")
    Membership.objects.filter(user=owner).delete()
    assert all(refusal for _, refusal in advance_bulk(rest, 60).results.values())
    assert [job.name for job in Job.objects.filter(held=True)] == ["j0"]


def unfinished_operations(user, number: int, ids: list[str]) -> list[BulkOperation]:
    operations = BulkOperation.objects.bulk_create(
        BulkOperation(user=user, action="hold", value=None, jobs=ids) for _ in range(number)
    )
    for operation in operations:
        age(operation)
    return operations


def test_many_actions_of_one_user_do_not_keep_those_of_others(owner, jobs):
    unfinished_operations(factories.user("eve"), 120, ["missing"])
    operation = start_bulk(owner, jobs, "hold")
    age(operation)
    advance_open_bulk_operations()
    operation.refresh_from_db()
    assert operation.results


def test_one_thread_of_a_worker_continues_actions_and_the_others_start_jobs(owner, jobs, monkeypatch):
    working, release = threading.Event(), threading.Event()

    def advance(operation, limit_s, *, wait):
        working.set()
        release.wait(60)

    monkeypatch.setattr(bulk, "advance_bulk", advance)
    unfinished_operations(owner, 2, [jobs[0].public_id])

    def work():
        advance_open_bulk_operations()
        connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert working.wait(60)
        assert advance_open_bulk_operations() == 0
    finally:
        release.set()
        thread.join()
    assert advance_open_bulk_operations() == 2


def test_a_user_has_a_bounded_number_of_unfinished_operations(owner, jobs):
    unfinished_operations(owner, bulk.MAX_OPEN_OPERATIONS - 1, [jobs[0].public_id])
    operation = start_bulk(owner, jobs, "hold")
    with pytest.raises(Conflict, match="are not finished"):
        start_bulk(owner, jobs, "hold")
    start_bulk(factories.user("eve"), [], "hold")
    advance_bulk(operation, 60)
    start_bulk(owner, jobs, "hold")


def test_a_users_further_open_actions_are_left_to_the_worker(owner, jobs):
    unfinished_operations(owner, bulk.MAX_IN_REQUESTS, [jobs[0].public_id])
    assert not advance_in_request(start_bulk(owner, jobs, "hold")).results
    eve = factories.user("eve")
    Membership.objects.create(project=jobs[0].project, user=eve, role="manager")
    assert advance_in_request(start_bulk(eve, jobs, "hold")).finished_at is not None


def test_finished_actions_are_deleted_after_a_week_and_open_ones_kept(owner, jobs):
    old, open_one = advance_bulk(start_bulk(owner, jobs, "hold"), 60), start_bulk(owner, jobs, "stop")
    age(old, 7)
    age(open_one, 7)
    assert delete_expired_rows()["finished bulk operations on jobs"] == 1
    assert list(BulkOperation.objects.all()) == [open_one]


def check_that_only_one_is_refused(jobs, caplog):
    operation = start_bulk(jobs[0].owner, jobs, "hold")
    other = start_bulk(jobs[0].owner, jobs[4:6], "priority", -5)
    age(operation)
    age(other)
    with caplog.at_level("ERROR", logger=bulk.__name__):
        advance_open_bulk_operations()
    operation.refresh_from_db()
    other.refresh_from_db()
    assert operation.finished_at is not None and other.finished_at is not None
    refused = {one.job.name: one.refusal for one in bulk_results(operation) if one.refusal}
    assert list(refused) == ["j3"] and "error in Fairway" in refused["j3"]
    assert len([record for record in caplog.records if record.name == bulk.__name__]) == 1
    assert Job.objects.filter(held=True).count() == len(jobs) - 1
    assert Job.objects.filter(priority=-5).count() == 2


def test_an_unforeseen_error_of_one_job_is_its_refusal_and_the_others_are_changed(
    owner, jobs, monkeypatch, caplog
):
    hold = bulk.do_hold_job

    def fails_for_one(user, job, held):
        if job.pk == jobs[3].pk:
            raise ZeroDivisionError
        return hold(user, job, held)

    monkeypatch.setattr(bulk, "do_hold_job", fails_for_one)
    check_that_only_one_is_refused(jobs, caplog)


def test_an_error_at_the_end_of_the_transaction_refuses_only_the_job_that_caused_it(
    owner, jobs, monkeypatch, caplog
):
    hold = bulk.do_hold_job

    def violates_a_deferred_constraint(user, job, held):
        if job.pk == jobs[3].pk:
            BulkOperation.objects.create(user_id=user.pk + 1_000_000, action="hold", jobs=[])
        return hold(user, job, held)

    monkeypatch.setattr(bulk, "do_hold_job", violates_a_deferred_constraint)
    check_that_only_one_is_refused(jobs, caplog)
