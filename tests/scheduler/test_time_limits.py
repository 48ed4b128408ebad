"""Time limits on PostgreSQL: warned once before each end, more time by what a real worker says, decided by whom."""

from __future__ import annotations

import datetime as dt
import time

import pytest
import redis
from django.conf import settings
from django.db import transaction
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.engine_client import HEARTBEAT_KEY
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import Attempt, AuditEntry, Job, JobEvent, UserRequest
from portal.selectors.jobs.time_limits import ends_at
from portal.services.jobs.time_limits import (
    do_request_extension,
    warn_before_ends,
)
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from portal.services.requests.user_requests import do_answer_request, expire_requests
from portal.services.scheduling.policy_settings import do_change_policy
from scheduler.periodic import stop_overdue_attempts
from tests import factories
from tests.engine_harness import engine_harness, wait_for
from tests.table_owner import update_as_owner

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = 3600


@pytest.fixture
def dataset():
    factories.cluster_settings()
    return factories.basic_cluster() | {"admin": factories.user(admin=True), "manager": factories.user()}


def running(dataset, *, limit_s: int | None = 8 * HOUR, ran_s: float = 0.0, gpus: int = 4, **asks) -> Job:
    """A job that runs against a limit on the first GPUs of the node, for so long already."""
    asks = {"gpus_per_task": gpus, "time_limit_s": limit_s, **asks}
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"], **asks)
    with transaction.atomic():
        locked = Job.objects.select_for_update().get(pk=job.pk)
        slots = [
            RankPlacement(
                dataset["node"],
                [
                    (gpu.pk, 1000)
                    for gpu in dataset["node"].gpus.filter(used_milli=0).order_by("index")[:gpus]
                ],
            )
        ]
        attempt = job_control.start_attempt(locked, dataset["pool"], slots, epoch=1)
    task = attempt.task_rows.get()
    job_control.mark_task_sent(task)
    job_control.record_task_running(
        task.pk, container="c", ports={}, at=timezone.now() - dt.timedelta(seconds=ran_s)
    )
    return now(job)


def now(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def warnings(job: Job) -> list[JobEvent]:
    return list(JobEvent.objects.filter(job=job, kind="time_limit_warning"))


def test_users_are_warned_once_before_each_end(dataset) -> None:
    far, near = (
        running(dataset, gpus=2),
        running(dataset, gpus=1, ran_s=8 * HOUR - 840, termination_grace_s=45),
    )
    short = running(dataset, gpus=1, limit_s=600, ran_s=290.0)
    assert warn_before_ends() == 1
    (reported,) = warnings(near)
    assert reported.message == (
        "Its time limit of 8 h ends it in 14 min; then it is stopped and has 45 s to save its work."
    )
    assert (
        reported.details["limit_s"] == 8 * HOUR
        and reported.details["ends_at"] == ends_at(near, near.attempts.get()).isoformat()
    )
    assert warn_before_ends() == 0 and not warnings(far) and not warnings(short)
    Job.objects.filter(pk=near.pk).update(time_limit_s=8 * HOUR + 60)  # the end moved, and is near still
    assert warn_before_ends() == 1 and len(warnings(near)) == 2
    Attempt.objects.filter(job=short).update(running_at=timezone.now() - dt.timedelta(seconds=301))
    do_change_policy(dataset["admin"], dataset["pool"], {"time_limit_warning_s": 0}, version=1)
    assert warn_before_ends() == 0
    do_change_policy(dataset["admin"], dataset["pool"], {"time_limit_warning_s": 7200}, version=2)
    assert warn_before_ends() == 1 and warnings(
        short
    )  # from half of a short limit on, whatever the setting says


def test_the_job_ends_with_its_grace_period_and_pending_requests_lapse(dataset) -> None:
    job = running(dataset, ran_s=8 * HOUR + 1)
    asked = UserRequest.objects.create(
        kind="time",
        job=job,
        attempt=job.attempts.get(),
        requested_by=dataset["owner"],
        extra_s=60,
    )
    assert expire_requests() == 0
    stop_overdue_attempts()
    attempt = job.attempts.get()
    assert (attempt.state, attempt.stop_reason) == ("COMPLETING", EndReason.TIME_LIMIT)
    assert expire_requests() == 1
    asked.refresh_from_db()
    assert asked.state == "expired" and asked.decided_at is not None
    assert warn_before_ends() == 0
    with pytest.raises(Conflict):
        do_request_extension(dataset["owner"], now(job), HOUR)


def test_without_an_answer_a_request_waits_for_an_administrator(dataset) -> None:
    redis.Redis.from_url(settings.REDIS_URL).delete(HEARTBEAT_KEY)
    dataset["project"].memberships.create(user=dataset["manager"], role="manager")
    job = running(dataset)
    for wrong in (0, 59, 24 * HOUR + 1):
        with pytest.raises(InvalidRequest):
            do_request_extension(dataset["owner"], job, wrong)
    with pytest.raises(NotFound):
        do_request_extension(factories.user(), job, HOUR)
    asked = do_request_extension(dataset["owner"], job, HOUR, "the last epoch")
    assert (asked.state, asked.impact_known, asked.affects_other_projects) == ("open", False, True)
    with pytest.raises(Conflict):
        do_request_extension(dataset["owner"], job, HOUR)
    with pytest.raises(Forbidden, match="Only administrators"):
        do_answer_request(dataset["manager"], asked, approve=True)
    assert do_answer_request(dataset["admin"], asked, approve=True, answer="go on").state == "approved"
    assert now(job).time_limit_s == 9 * HOUR and now(job).version > job.version
    (row,) = AuditEntry.objects.filter(action="job.extend")
    assert (row.before, row.after, row.reason) == (
        {"time_limit_s": 8 * HOUR}, {"time_limit_s": 9 * HOUR}, "go on",
    )  # fmt: skip
    with pytest.raises(Conflict, match="already approved by"):
        do_answer_request(dataset["admin"], asked, approve=False)
    with pytest.raises(InvalidRequest, match="at most 23 h"):  # all extensions together
        do_request_extension(dataset["owner"], now(job), 24 * HOUR)


def test_policy_limits_all_extensions_together(dataset) -> None:
    job = running(dataset)
    do_change_policy(dataset["admin"], dataset["pool"], {"max_extension_s": HOUR / 2}, version=1)
    with pytest.raises(InvalidRequest) as refusal:
        do_request_extension(dataset["owner"], job, HOUR)
    assert "at most 30 min" in refusal.value.fields["extra_s"]


def test_the_delay_impact_comes_from_a_worker_and_is_for_managers(dataset) -> None:
    dataset["project"].memberships.create(user=dataset["manager"], role="manager")
    elsewhere = factories.project("elsewhere", member=dataset["owner"])
    job = running(dataset)
    store = redis.Redis.from_url(settings.REDIS_URL)
    with engine_harness() as harness:
        harness.start_worker("ask", beat=False)
        wait_for("a worker answers", lambda: store.exists(HEARTBEAT_KEY), 30)
        free = wait_for("an answer", lambda: _known(dataset, job), 20)
        assert free.state == "approved" and now(job).time_limit_s == 9 * HOUR
        waiting = {"gpus_per_task": 4, "time_limit_s": HOUR}
        mine = factories.job(dataset["owner"], dataset["project"], dataset["environment"], **waiting)
        time.sleep(1.1)  # answers may come from a snapshot of a second ago
        asked = wait_for("an answer", lambda: _known(dataset, job, delayed=1), 20)
        assert [one["job"] for one in asked.delays] == [mine.public_id]
        assert asked.delays[0]["by_s"] == pytest.approx(HOUR, abs=120)
        assert (asked.state, asked.affects_other_projects, now(job).time_limit_s) == (
            "open",
            False,
            9 * HOUR,
        )
        with pytest.raises(Forbidden, match="Only managers of"):
            do_answer_request(dataset["owner"], asked, approve=True)
        do_answer_request(dataset["manager"], asked, approve=False, answer="they are next")
        assert now(job).time_limit_s == 9 * HOUR
        factories.job(dataset["owner"], elsewhere, dataset["environment"], **waiting)
        asked = wait_for("an answer", lambda: _known(dataset, job, delayed=2), 20)
        assert asked.affects_other_projects
        with pytest.raises(Forbidden, match="Only administrators"):
            do_answer_request(dataset["manager"], asked, approve=True)
    reported = JobEvent.objects.filter(job=job, kind__in=["extended", "time_asked", "time_refused"])
    assert [event.message for event in reported.order_by("id")] == [
        "Time limit 8 h to 9 h. It delays no other job.",
        "An extension by 1 h was requested. It delays 1 pending job.",
        "The extension by 1 h was denied: they are next",
        "An extension by 1 h was requested. It delays 2 pending jobs.",
    ]


def _known(dataset, job: Job, delayed: int = 0) -> UserRequest | None:
    """Asks for an hour; what the worker did not answer, or from a snapshot of before, is taken back."""
    with_before = JobEvent.objects.order_by("id").last()
    asked = do_request_extension(dataset["owner"], now(job), HOUR)
    if asked.impact_known and asked.delayed_count == delayed:
        return asked
    assert asked.state == "open", "more time was granted although others wait"
    asked.delete()
    newer = JobEvent.objects.filter(job=job, pk__gt=with_before.pk)
    update_as_owner(newer, at=timezone.now() - dt.timedelta(days=31))  # recent events cannot be deleted
    newer.delete()
    return None
