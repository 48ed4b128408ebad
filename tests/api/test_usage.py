"""Usage from the ledger: spans are cut at the ends and at midnight, and open ones count up to now."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from portal.models import Allocation, UsageLedger
from tests.api.world import World

USAGE = "/api/v1/usage/"
MIDNIGHT = dt.datetime(2026, 5, 2, tzinfo=dt.UTC)


@pytest.fixture
def spans(world: World) -> World:
    """Two spans of the running job: 22:00 to 02:00 with a whole GPU, 23:00 to 23:30 with half of one."""
    hour = dt.timedelta(hours=1)
    ends = [(MIDNIGHT - 2 * hour, MIDNIGHT + 2 * hour, 1000), (MIDNIGHT - hour, MIDNIGHT - hour / 2, 500)]
    for row, (start, end, milli) in zip(UsageLedger.objects.order_by("id"), ends, strict=True):
        UsageLedger.objects.filter(pk=row.pk).update(started_at=start, ended_at=end, milli=milli)
    return world


def ask(world: World, actor: str = "member", **query: str) -> dict:
    answer = world.client(actor).get(USAGE, query)
    assert answer.status_code == 200, answer.content
    return answer.json()


def test_days_split_at_midnight(spans):
    found = ask(spans, start="2026-04-30T00:00:00Z", end="2026-05-04T00:00:00Z", by="day")
    days = {item["key"]: (item["gpu_hours"], item["jobs"]) for item in found["items"]}
    assert days == {
        "2026-04-30": (0.0, 0),
        "2026-05-01": (2.25, 1),
        "2026-05-02": (2.0, 1),
        "2026-05-03": (0.0, 0),
    }
    assert found["total_gpu_hours"] == 4.25


@pytest.mark.parametrize("by", ["project", "user", "pool"])
def test_sums_are_cut_at_the_ends(spans, by):
    found = ask(spans, start="2026-05-01T23:15:00Z", end="2026-05-02T01:00:00Z", by=by)
    assert [(item["gpu_hours"], item["jobs"]) for item in found["items"]] == [(1.875, 1)]
    days = ask(spans, start="2026-05-01T23:15:00Z", end="2026-05-02T01:00:00Z", by="day")
    assert days["total_gpu_hours"] == 1.875


def test_open_spans_count_up_to_now(world):
    began = timezone.now() - dt.timedelta(hours=3)
    UsageLedger.objects.update(started_at=began)
    assert Allocation.objects.filter(ended_at__isnull=True).count() == 2
    for by in ("project", "day"):
        assert ask(world, by=by)["total_gpu_hours"] == pytest.approx(6.0, abs=0.01)


def test_everybody_sees_their_own_and_managers_their_projects(spans):
    span = {"start": "2026-05-01T00:00:00Z", "end": "2026-05-03T00:00:00Z"}
    totals = {actor: ask(spans, actor, **span)["total_gpu_hours"] for actor in spans.people}
    assert totals == {
        "member": 4.25,
        "manager": 4.25,
        "admin": 4.25,
        "colleague": 0,
        "viewer": 0,
        "stranger": 0,
    }
    assert ask(spans, "admin", **span, user="colleague-x")["items"] == []
    assert ask(spans, "admin", **span, project="vision")["total_gpu_hours"] == 4.25


@pytest.mark.parametrize(
    "query",
    [
        {"start": "2026-05-03T00:00:00Z", "end": "2026-05-01T00:00:00Z"},
        {"start": "2020-05-03T00:00:00Z", "end": "2026-05-01T00:00:00Z"},
        {"start": "yesterday"},
        {"end": "0001-01-01T00:00:00Z"},
        {"by": "password"},
    ],
)
def test_wrong_spans_are_refused(world, query):
    assert world.client("member").get(USAGE, query).status_code == 400
