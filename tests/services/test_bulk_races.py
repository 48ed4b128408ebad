"""Actions on the same jobs at once, and single changes beside them."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from django.db import connection

from portal.errors import FairwayError
from portal.models import Job
from portal.services.jobs.bulk import advance_bulk, bulk_results, start_bulk
from portal.services.jobs.changes import do_change_job
from portal.services.jobs.submission import do_cancel_job, do_hold_job
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


def test_actions_in_opposite_orders_and_single_changes_end_and_leave_one_result_for_each_job(caplog):
    owner = factories.user("ada")
    factories.node(factories.pool("main"), gpus=4, name="n1")
    project = factories.project("nlp", member=owner)
    environment = factories.environment("batch", tool=False)
    jobs = [factories.job(owner, project, environment, name=f"j{number}") for number in range(20)]
    operations = [
        start_bulk(owner, jobs, "hold"),
        start_bulk(owner, jobs[::-1], "priority", -3),
        start_bulk(owner, jobs[::2] + jobs[1::2], "stop"),
        start_bulk(owner, jobs[1::2] + jobs[::2], "requeue"),
    ]
    unforeseen: list[Exception] = []

    def run(work) -> None:
        try:
            work()
        except Exception as error:
            unforeseen.append(error)
        finally:
            connection.close()

    def single() -> None:
        deadline_s = time.monotonic() + 10
        for job in reversed(jobs):
            if time.monotonic() > deadline_s:
                break
            for change in (
                lambda row: do_hold_job(owner, row, False),
                lambda row: do_change_job(owner, row, {"priority": -4}),
                lambda row: do_cancel_job(owner, row),
            ):
                with contextlib.suppress(FairwayError):
                    change(Job.objects.get(pk=job.pk))

    work = [lambda operation=operation: advance_bulk(operation, 60) for operation in operations] + [single]
    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert unforeseen == []
    for operation in operations:
        operation.refresh_from_db()
        assert operation.finished_at is not None and set(operation.results) == {job.public_id for job in jobs}
        assert not [one.refusal for one in bulk_results(operation) if "error in Fairway" in one.refusal]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
