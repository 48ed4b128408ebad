"""Old rows: one table says how long they are kept, and each pass deletes a bounded number as the services' role."""

from __future__ import annotations

import datetime as dt

import pytest
from django.conf import settings as django_settings
from django.utils import timezone

from portal.models import (
    AuditEntry,
    BrowserSession,
    ClusterSettings,
    Cycle,
    Forecast,
    Job,
    JobEvent,
    NodeMetricsMinute,
    Project,
    QuotaReplay,
)
from scheduler import retention
from scheduler.cycle import run_cycle
from scheduler.periodic import delete_old_rows
from tests import factories

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


@pytest.mark.parametrize(("setting", "kept"), [({}, 1), ({"forecast_retention_days": 30}, 0)])
def test_forecasts_are_kept_as_long_as_the_cluster_says(setting, kept):
    dataset = factories.basic_cluster()
    factories.cluster_settings()
    ClusterSettings.objects.update(policy=setting)
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    at = aged(60)
    Forecast.objects.create(job=job, made_at=at, is_first=True, p10_at=at, p50_at=at, p90_at=at)
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


def test_jobs_their_events_and_the_audit_trail_are_kept():
    dataset = factories.basic_cluster()
    factories.cluster_settings()
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    Job.objects.filter(pk=job.pk).update(submitted_at=aged(4000))
    run_cycle("test", "me")
    before = [model.objects.count() for model in (Job, JobEvent, AuditEntry)]
    delete_old_rows()
    assert [model.objects.count() for model in (Job, JobEvent, AuditEntry)] == before


def test_the_documentation_has_the_table():
    text = (django_settings.BASE_DIR / "docs" / "operations.md").read_text()
    assert "\n".join(retention.table_rows()) in text
