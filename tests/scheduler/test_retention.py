"""Old rows: one table says how long they are kept, and each pass deletes a bounded number as the services' role."""

from __future__ import annotations

import datetime as dt
from contextlib import suppress

import pytest
from django.conf import settings as django_settings
from django.db import DatabaseError, transaction
from django.utils import timezone

from portal.domain.states import TERMINAL_JOB_STATES, JobState
from portal.models import (
    Attempt,
    AttemptWork,
    AuditEntry,
    BrowserSession,
    Checkpoint,
    ClusterSettings,
    Cycle,
    Dependency,
    Forecast,
    Job,
    JobEvent,
    NodeMetricsMinute,
    Project,
    QuotaReplay,
    SavedImage,
    ScheduleRun,
    Sweep,
    UsageInterval,
)
from portal.selectors.jobs.logs.files import log_path
from portal.services.jobs.logs import write_log_bytes
from scheduler import retention
from scheduler.cycle import run_cycle
from scheduler.periodic import delete_old_rows
from tests import factories
from tests.api import fixture_data
from tests.table_owner import execute_as_owner, update_as_owner

pytestmark = pytest.mark.django_db


def aged(days: float) -> dt.datetime:
    return timezone.now() - dt.timedelta(days=days)


def minute(node, days: float) -> None:
    NodeMetricsMinute.objects.create(
        node=node, minute=aged(days), samples=1, gpu_uuids=[], utilisation_percent=[], memory_used_mib=[],
        power_watts=[], temperature_c=[], energy_joules=[], cpu_percent=1.0, node_memory_used_mib=1.0, holders=[],
    )  # fmt: skip


def cycle(days: float) -> None:
    Cycle.objects.create(
        started_at=aged(days), epoch=1, trigger="x", snapshot_ms=1, decide_ms=1, commit_ms=1, pending=0,
        started_jobs=0, refused_commits=0, steps=0,
    )  # fmt: skip


@pytest.mark.parametrize(("setting", "kept"), [({}, 2), ({"metrics_retention_days": 10}, 1)])
def test_metrics_are_kept_as_long_as_the_cluster_says(setting, kept):
    factories.cluster_settings()
    ClusterSettings.objects.update(policy=setting)
    node = factories.node(factories.pool())
    for days in (1, 80, 91):
        minute(node, days)
    delete_old_rows()
    assert NodeMetricsMinute.objects.count() == kept


@pytest.mark.parametrize(("setting", "kept"), [({}, 1), ({"cycle_retention_days": 100}, 2)])
def test_cycles_are_kept_as_long_as_the_cluster_says(setting, kept):
    factories.cluster_settings()
    ClusterSettings.objects.update(policy=setting)
    cycle(1)
    cycle(20)
    delete_old_rows()
    assert Cycle.objects.count() == kept
    assert not QuotaReplay.objects.exists()


@pytest.mark.parametrize(("setting", "kept"), [({}, 2), ({"forecast_retention_days": 30}, 0)])
def test_forecasts_are_kept_as_long_as_the_cluster_says(setting, kept):
    dataset = factories.basic_cluster()
    factories.cluster_settings()
    ClusterSettings.objects.update(policy=setting)
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    at = aged(60)
    Forecast.objects.create(job=job, made_at=at, is_first=True, p10_at=at, p50_at=at, p90_at=at)
    Forecast.objects.create(job=job, made_at=at, p10_at=at, p50_at=at, p90_at=at)
    delete_old_rows()
    assert Forecast.objects.filter(is_first=True).exists(), "it is scored when the job starts"
    Job.objects.filter(pk=job.pk).update(state=JobState.CANCELLED)
    delete_old_rows()
    assert Forecast.objects.count() == kept


def test_a_pass_deletes_a_bounded_number_of_each_kind_oldest_first(monkeypatch):
    factories.cluster_settings()
    monkeypatch.setattr(retention, "MAX_DELETED", 3)
    for days in (40, 39, 38, 37, 36, 1):
        cycle(days)
    BrowserSession.objects.bulk_create(
        BrowserSession(session_key=f"k{number}", session_data="", expire_date=aged(1)) for number in range(5)
    )
    deleted = retention.delete_expired_rows()
    assert (deleted["scheduling cycles"], deleted["sessions, after their end"]) == (3, 3)
    assert min(Cycle.objects.values_list("started_at", flat=True)) > aged(37.5)
    deleted = retention.delete_expired_rows()
    assert (deleted["scheduling cycles"], deleted["sessions, after their end"]) == (2, 2)
    assert Cycle.objects.count() == 1


def test_a_kind_that_cannot_be_deleted_does_not_keep_the_others(monkeypatch, caplog):
    """Such as by a statement timeout, or by a row that another refers to."""
    factories.cluster_settings()
    cycle(40)
    dataset = factories.basic_cluster()
    factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    protected = retention.RetentionRule("projects", lambda before: Project.objects.all())
    refused = retention.RetentionRule("audit", lambda before: AuditEntry.objects.all())
    run_cycle("test", "me")
    AuditEntry.objects.create(action="x.y", object_kind="job", object_id="j", object_name="j")
    monkeypatch.setattr(retention, "RULES", (protected, refused, *retention.RULES))
    assert retention.delete_expired_rows()["scheduling cycles"] == 1
    assert Project.objects.exists()
    assert AuditEntry.objects.exists()
    assert caplog.text.count("old rows could not be deleted") == 2


def write_audit_entry(days: float) -> None:
    """Write an old entry, which the services cannot."""
    execute_as_owner(
        "INSERT INTO portal_auditentry (at, actor_name, action, object_kind, object_id, object_name, reason)"
        " VALUES (now() - %s * interval '1 day', 'ada', 'x.y', 'job', 'j', 'j', '')",
        days,
    )


def test_the_audit_trail_is_kept_as_long_as_the_cluster_says_and_its_deletion_is_an_entry():
    factories.cluster_settings()
    for days in (5000, 4000, 1000, 1):
        write_audit_entry(days)
    delete_old_rows()
    (entry,) = AuditEntry.objects.filter(action="audit.delete_expired")
    assert (entry.after["entries"], entry.actor_name) == (2, "fairway")
    assert entry.after["first"] < entry.after["last"] < aged(3999).isoformat()
    assert AuditEntry.objects.filter(action="x.y").count() == 2
    delete_old_rows()
    assert AuditEntry.objects.count() == 3, "nothing was deleted, so there is no further entry"
    ClusterSettings.objects.update(policy={"audit_retention_days": 400})
    delete_old_rows()
    assert AuditEntry.objects.filter(action="x.y").count() == 1


def test_recent_entries_of_the_audit_trail_cannot_be_deleted_by_anybody():
    write_audit_entry(399)
    with pytest.raises(DatabaseError, match="are kept for 400 days"), transaction.atomic():
        AuditEntry.objects.all().delete()
    with pytest.raises(DatabaseError, match="are kept for 400 days"), transaction.atomic():
        execute_as_owner("DELETE FROM portal_auditentry")
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        execute_as_owner("UPDATE portal_auditentry SET action = 'z'")


def end_jobs(days: float) -> None:
    """End all jobs, with all that is written about them, so many days ago."""
    at = aged(days)
    for state in (JobState.COMPLETED, JobState.CANCELLED):
        for job in Job.objects.exclude(state__in=TERMINAL_JOB_STATES):
            with suppress(DatabaseError), transaction.atomic():
                Job.objects.filter(pk=job.pk).update(state=state)
    Job.objects.update(submitted_at=at, ended_at=at)
    update_as_owner(JobEvent.objects.all(), at=at)
    update_as_owner(AttemptWork.objects.all(), ended_at=at)


@pytest.fixture
def world(settings, tmp_path):
    settings.LOG_DIR = tmp_path
    return fixture_data.make()


def test_timelines_of_ended_jobs_are_deleted_and_jobs_stay(world):
    write_audit_entry(1)
    jobs, events = Job.objects.count(), JobEvent.objects.count()
    delete_old_rows()
    assert JobEvent.objects.count() == events
    end_jobs(500)
    ClusterSettings.objects.update(policy={"event_retention_days": 600})
    delete_old_rows()
    assert JobEvent.objects.count() == events
    ClusterSettings.objects.update(policy={})
    running = factories.job(
        *(world.rows["job"].owner, world.rows["job"].project, world.rows["job"].environment)
    )
    JobEvent.objects.create(job=running, kind="submitted")
    update_as_owner(JobEvent.objects.filter(job=running), at=aged(500))
    delete_old_rows()
    assert set(JobEvent.objects.values_list("job", flat=True)) == {running.pk}
    assert Job.objects.count() == jobs + 1


def test_old_jobs_are_deleted_with_all_that_refers_to_them_except_what_somebody_keeps(world):
    first = Job.objects.order_by("pk").first()
    write_log_bytes(first.public_id, 1, 0, "raw", 0, b"line\n")
    end_jobs(3000)
    jobs = Job.objects.count()
    delete_old_rows()
    assert Job.objects.count() == jobs, "they are kept for ten years"
    ClusterSettings.objects.update(policy={"job_retention_days": 2900})
    live = factories.job(first.owner, first.project, first.environment)
    Dependency.objects.create(job=live, depends_on=first)
    Sweep.objects.update(ended_at=aged(3000))
    ScheduleRun.objects.all().delete()
    delete_old_rows()
    keeps = {
        *SavedImage.objects.values_list("task__attempt__job", flat=True),
        *Checkpoint.objects.filter(pinned_at__isnull=False).values_list("job", flat=True),
        *(first.pk, live.pk),
    }
    assert set(Job.objects.values_list("pk", flat=True)) == keeps
    assert log_path(first.public_id, 1, 0, "raw").exists()
    Dependency.objects.all().delete()
    SavedImage.objects.all().delete()
    Checkpoint.objects.update(pinned_at=None)
    delete_old_rows()
    assert list(Job.objects.all()) == [live]
    assert not Sweep.objects.exists() and not Attempt.objects.exists() and not UsageInterval.objects.exists()
    assert not (django_settings.LOG_DIR / first.public_id).exists()


def test_the_documentation_has_the_table():
    text = (django_settings.BASE_DIR / "docs" / "operations.md").read_text()
    assert "\n".join(retention.table_rows()) in text
