"""Schedules: due times, one job for each of them, overlaps, missed times, and what disables a schedule."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import close_old_connections, connection
from django.utils import timezone

from portal.domain.jobs.schedules import ScheduleSpec, next_due, schedule_errors
from portal.errors import FairwayError, InvalidRequest
from portal.models import AuditEntry, Job, Membership, Schedule, ScheduleRun
from portal.services.jobs.schedules import (
    do_change_schedule,
    do_create_schedule,
    do_delete_schedule,
    submit_due_job,
    submit_due_jobs,
)
from portal.services.jobs.submission import JobRequest
from tests import factories
from tests.process_environment import service_environment

pytestmark = pytest.mark.django_db(transaction=True)
NIGHTLY = ScheduleSpec(cron="30 2 * * *", time_zone="Europe/Berlin")


def due_times(spec: ScheduleSpec, after: str, count: int) -> list[str]:
    at, found = dt.datetime.fromisoformat(after), []
    for _ in range(count):
        at = next_due(spec, at)
        found.append(f"{at:%m-%d %H:%M}")
    return found


def test_due_times_around_clock_changes() -> None:
    """At 2:30 in Berlin: the spring change leaves it out, the autumn change has it twice."""
    assert due_times(NIGHTLY, "2027-03-26T12:00:00+00:00", 3) == ["03-27 01:30", "03-28 01:00", "03-29 00:30"]
    assert due_times(NIGHTLY, "2027-10-29T12:00:00+00:00", 3) == ["10-30 00:30", "10-31 00:30", "11-01 01:30"]
    hourly = ScheduleSpec(cron="0 * * * *", time_zone="Europe/Berlin")
    assert due_times(hourly, "2027-03-28T00:30:00+00:00", 2) == ["03-28 01:00", "03-28 02:00"]
    assert due_times(hourly, "2027-10-30T23:30:00+00:00", 3) == ["10-31 00:00", "10-31 01:00", "10-31 02:00"]


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"cron": ""}, "cron", "five fields"),
        ({"cron": "* * * * * *"}, "cron", "five fields"),
        ({"cron": "61 * * * *"}, "cron", "Bad minute"),
        ({"cron": "0 0 30 2 *"}, "cron", "Bad day-of-month"),
        ({"cron": "0 0 * * *", "time_zone": "Mars/Olympus"}, "time_zone", "such as Europe/Berlin"),
        ({"cron": "0 0 * * *", "time_zone": "../../etc/passwd"}, "time_zone", "such as Europe/Berlin"),
        ({"cron": "0 0 * * *", "overlap": "x"}, "overlap", "Choose one of"),
    ],
)
def test_a_wrong_schedule_names_the_field(fields: dict[str, str], field: str, message: str) -> None:
    wrong = schedule_errors(ScheduleSpec(**fields), timezone.now())
    assert wrong.keys() == {field}
    assert message in wrong[field]


def test_a_wrong_time_zone_hides_no_wrong_expression() -> None:
    wrong = schedule_errors(ScheduleSpec(cron="61 * * * *", time_zone="Mars/Olympus"), timezone.now())
    assert wrong.keys() == {"cron", "time_zone"} and "Bad minute" in wrong["cron"]


@pytest.fixture
def cluster() -> dict[str, Any]:
    factories.cluster_settings()
    return factories.basic_cluster()


def new_schedule(cluster: dict[str, Any], overlap: str = "skip", **fields: Any) -> Schedule:
    rows = {name: cluster[name] for name in ("project", "environment")}
    request = JobRequest(**{"name": "nightly", "command": ["true"], **rows, **fields})
    spec = ScheduleSpec(cron="30 2 * * *", time_zone="Europe/Berlin", overlap=overlap)
    return do_create_schedule(cluster["owner"], spec, request)


def make_due(schedule: Schedule, ago: dt.timedelta = dt.timedelta(seconds=1)) -> Schedule:
    Schedule.objects.filter(pk=schedule.pk).update(next_at=timezone.now() - ago)
    return schedule


def test_each_due_time_submits_one_job_of_the_owner(cluster) -> None:
    roles = [
        {"name": "chief", "tasks": 1, "command": ["a"]},
        {"name": "worker", "tasks": 2, "command": ["b"]},
    ]
    schedule = new_schedule(cluster, roles=roles, env={"A": "1"}, time_limit_s=60)
    assert schedule.next_at and schedule.next_at > timezone.now()
    submit_due_jobs()
    assert not Job.objects.exists()
    make_due(schedule)
    for _ in range(2):
        submit_due_jobs()
    job = Job.objects.get()
    assert (job.owner, job.name, job.env, job.time_limit_s, job.tasks) == (
        cluster["owner"],
        "nightly",
        {"A": "1"},
        60,
        3,
    )
    schedule.refresh_from_db()
    assert schedule.next_at > timezone.now()
    run = ScheduleRun.objects.get()
    assert (run.job, run.message) == (job, "")


def test_two_concurrent_workers_submit_one_job(cluster) -> None:
    schedule = make_due(new_schedule(cluster))

    def work(_: int) -> None:
        submit_due_job(schedule.pk)
        close_old_connections()
        connection.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    assert (Job.objects.count(), ScheduleRun.objects.count()) == (1, 1)


def test_a_killed_worker_leaves_nothing_or_everything(cluster) -> None:
    schedule = make_due(new_schedule(cluster))
    code = "import django; django.setup()\nfrom portal.services.jobs import schedules\n"
    code += f"schedules.submit_due_job({schedule.pk})"
    environment = service_environment() | {
        "DJANGO_SETTINGS_MODULE": "portal.config.settings",
        "FAIRWAY_KILL_AT": "schedule.job_created",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60)
    assert done.returncode == -9
    assert not Job.objects.exists() and not ScheduleRun.objects.exists()
    submit_due_jobs()
    assert (Job.objects.count(), ScheduleRun.objects.count()) == (1, 1)


def test_missed_due_times_submit_one_job_that_mentions_them(cluster) -> None:
    schedule = make_due(new_schedule(cluster), dt.timedelta(days=5))
    submit_due_jobs()
    run = ScheduleRun.objects.get()
    assert run.job == Job.objects.get()
    assert "no scheduler ran when it was due" in run.message
    schedule.refresh_from_db()
    assert schedule.next_at > timezone.now()


@pytest.mark.parametrize(("overlap", "states"), [("skip", ["PENDING"]), ("allow", ["PENDING", "PENDING"]),
                                                 ("replace", ["CANCELLED", "PENDING"])])  # fmt: skip
def test_overlap(cluster, overlap, states) -> None:
    schedule = new_schedule(cluster, overlap)
    for _ in range(2):
        submit_due_jobs() if make_due(schedule) else None
    assert list(Job.objects.order_by("id").values_list("state", flat=True)) == states
    second = schedule.runs.order_by("-due_at").first()
    if overlap == "skip":
        assert second.job is None and "has not ended" in second.message
    if overlap == "replace":
        assert "Replaced by the next run" in Job.objects.order_by("id").first().message


@pytest.mark.parametrize("lost", ["account", "membership", "environment"])
def test_an_owner_without_rights_disables_it_with_a_notice(cluster, lost) -> None:
    schedule = make_due(new_schedule(cluster))
    owner = cluster["owner"]
    if lost == "account":
        owner.is_active = False
        owner.save()
    elif lost == "membership":
        Membership.objects.filter(user=owner).delete()
    else:
        cluster["environment"].enabled = False
        cluster["environment"].save()
    submit_due_jobs()
    schedule.refresh_from_db()
    assert (schedule.enabled, schedule.next_at) == (False, None)
    assert f"refused for {owner.username}" in schedule.notice
    assert not Job.objects.exists()
    assert AuditEntry.objects.filter(action="schedule.disable", object_id=schedule.public_id).count() == 1
    with pytest.raises(FairwayError):
        do_change_schedule(factories.user(admin=True), schedule, enabled=True)


def test_changes_are_checked_and_audited(cluster) -> None:
    owner, schedule = cluster["owner"], new_schedule(cluster)
    with pytest.raises(InvalidRequest):
        do_change_schedule(owner, schedule, cron="x")
    with pytest.raises(FairwayError):
        do_change_schedule(factories.user(), schedule, enabled=False)
    changed = do_change_schedule(owner, schedule, enabled=False)
    assert (changed.enabled, changed.next_at) == (False, None)
    changed = do_change_schedule(owner, changed, enabled=True, cron="0 4 * * *", time_zone="UTC")
    assert f"{changed.next_at:%H:%M}" == "04:00"
    do_delete_schedule(owner, changed)
    actions = (
        AuditEntry.objects.filter(object_kind="schedule").order_by("id").values_list("action", flat=True)
    )
    assert list(actions) == ["schedule.create", "schedule.change", "schedule.change", "schedule.delete"]


@pytest.mark.parametrize("fields", [{"held": True}, {"start_after": timezone.now()}, {"kind": "workspace"}])
def test_a_scheduled_job_cannot_have_a_start_time_or_dependencies(cluster, fields) -> None:
    with pytest.raises(InvalidRequest) as refused:
        new_schedule(cluster, **fields)
    assert fields.keys() <= refused.value.fields.keys()
