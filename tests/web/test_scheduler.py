"""The scheduler page: access, the alert on every administration page, and audited downloads."""

from __future__ import annotations

import pytest
from django.urls import reverse
from django.utils import timezone

from portal.models import AuditEntry, ClusterSettings, Cycle, FailedCycle

SENTENCE = "The scheduler starts nothing: nodes[n1].cpu_milli: -1 is below 0"


@pytest.fixture
def stopped(dataset):
    now = timezone.now()
    ClusterSettings.objects.update(scheduler_alert=SENTENCE, scheduler_alert_at=now)
    return FailedCycle.objects.create(
        first_at=now,
        last_at=now,
        repeat_count=7,
        kind="snapshot",
        field="nodes[n1].cpu_milli",
        message=SENTENCE,
        trigger="submit",
        content=b"a case",
        size_bytes=6,
    )


def words(answer) -> str:
    return " ".join(answer.content.decode().split())


@pytest.mark.parametrize(
    ("kind", "status"), [("anonymous", 302), ("stranger", 403), ("member", 403), ("admin", 200)]
)
def test_the_scheduler_page_is_for_administrators(stopped, client_of, kind, status):
    assert client_of(kind).get(reverse("scheduler")).status_code == status
    download = reverse("failed-cycle", args=[stopped.public_id])
    assert client_of(kind).post(download).status_code == status
    assert client_of("admin").get(download).status_code == 405


def test_the_alert_is_on_every_administration_page(stopped, client_of):
    for page in ("home", "jobs", "quotas", "users", "audit", "policy"):
        shown = words(client_of("admin").get(reverse(page)))
        assert SENTENCE in shown and f'href="{reverse("scheduler")}"' in shown, page
        assert SENTENCE not in words(client_of("member").get(reverse(page))) or page in ("users", "audit")
    ClusterSettings.objects.update(scheduler_alert="", scheduler_alert_at=None)
    assert SENTENCE not in words(client_of("admin").get(reverse("home")))


def test_a_failed_cycle_shows_its_error_and_count(stopped, client_of):
    page = words(client_of("admin").get(reverse("scheduler")))
    assert "Nothing has been started since" in page and "nodes[n1].cpu_milli" in page
    assert ">7<" in page and "triggered by submit" in page


def test_each_download_leaves_an_audit_row(stopped, client_of):
    answer = client_of("admin").post(reverse("failed-cycle", args=[stopped.public_id]))
    assert answer.content == b"a case" and ".json.gz" in answer["Content-Disposition"]
    row = AuditEntry.objects.get(action="failed_cycle.export")
    assert (row.actor_name, row.object_id) == ("r-castellan", stopped.public_id)
    FailedCycle.objects.update(content=b"", size_bytes=0)
    assert client_of("admin").post(reverse("failed-cycle", args=[stopped.public_id])).status_code == 409
    assert client_of("admin").post(reverse("failed-cycle", args=["nothere"])).status_code == 404


def test_newest_cycles_with_their_times_and_an_empty_start(dataset, client_of):
    assert "No cycle yet" in words(client_of("admin").get(reverse("scheduler")))
    Cycle.objects.create(
        started_at=timezone.now(), epoch=1, trigger="submit", snapshot_ms=4, decide_ms=12, commit_ms=3,
        pending=9, started_jobs=2, refused_commits=1, steps=321, truncated=True,
    )  # fmt: skip
    page = words(client_of("admin").get(reverse("scheduler")))
    assert "12.0&nbsp;ms" in page and "cut short" in page and "321" in page
