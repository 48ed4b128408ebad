"""Usage from the ledger: spans are cut at the ends and at midnight, and open ones count up to now."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from zoneinfo import ZoneInfo

import pytest
from django.db.models.functions import Now
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portal.models import Allocation, UsageInterval, User
from portal.selectors.reports.held_time import UsageGrouping
from portal.selectors.reports.usage import gpu_hours_by
from tests import factories
from tests.api.fixture_data import FixtureData, running

USAGE = "/api/v1/usage/"
MIDNIGHT = dt.datetime(2026, 5, 2, tzinfo=dt.UTC)
HOUR = dt.timedelta(hours=1)


@pytest.fixture
def spans(fixture_data: FixtureData) -> FixtureData:
    """Two spans of the running job: 22:00 to 02:00 with a whole GPU, 23:00 to 23:30 with half of one."""
    hour = dt.timedelta(hours=1)
    ends = [(MIDNIGHT - 2 * hour, MIDNIGHT + 2 * hour, 1000), (MIDNIGHT - hour, MIDNIGHT - hour / 2, 500)]
    for row, (start, end, milli) in zip(UsageInterval.objects.order_by("id"), ends, strict=True):
        UsageInterval.objects.filter(pk=row.pk).update(started_at=start, ended_at=end, milli=milli)
    return fixture_data


def ask(fixture_data: FixtureData, actor: str = "member", **query: str) -> dict:
    answer = fixture_data.client(actor).get(USAGE, query)
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


def test_open_spans_count_up_to_now(fixture_data):
    began = timezone.now() - dt.timedelta(hours=3)
    UsageInterval.objects.update(started_at=began)
    assert Allocation.objects.filter(ended_at__isnull=True).count() == 2
    for by in ("project", "day"):
        assert ask(fixture_data, by=by)["total_gpu_hours"] == pytest.approx(6.0, abs=0.01)


def test_users_see_their_own_usage_and_managers_their_projects(spans):
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
    ("query", "status"),
    [
        ({"start": "2026-05-03T00:00:00Z", "end": "2026-05-01T00:00:00Z"}, 422),
        ({"start": "2020-05-03T00:00:00Z", "end": "2026-05-01T00:00:00Z"}, 422),
        ({"start": "yesterday"}, 400),
        ({"end": "0001-01-01T00:00:00Z"}, 422),
        ({"by": "password"}, 400),
    ],
)
def test_wrong_spans_are_refused(fixture_data, query, status):
    assert fixture_data.client("member").get(USAGE, query).status_code == status


# What the ledger may hold: spans that begin or end at midnight or a microsecond beside it, that last days or no
# time at all, that are open, and several of one job on one day; asked for by people of several time zones.
DAY = dt.timedelta(days=1)
NEAR_MIDNIGHT = st.sampled_from([dt.timedelta(microseconds=n) for n in (-1, 0, 1)])
WITHIN_A_DAY = st.timedeltas(dt.timedelta(0), DAY)
INSTANTS = st.builds(
    lambda day, off: MIDNIGHT + day * DAY + off, st.integers(-3, 3), NEAR_MIDNIGHT | WITHIN_A_DAY
)
LENGTHS = st.sampled_from([dt.timedelta(0), DAY]) | WITHIN_A_DAY | st.timedeltas(dt.timedelta(0), 6 * DAY)
SPANS = st.tuples(INSTANTS, st.none() | LENGTHS, st.sampled_from([1000, 1000, 250, 1]))
ZONES = st.sampled_from(
    [dt.UTC, ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kolkata"), ZoneInfo("Pacific/Auckland")]
)


@pytest.fixture
def ledger(fixture_data: FixtureData) -> list[UsageInterval]:
    """Ten rows: one job of the world and four more of two people, each on two GPUs."""
    people = [fixture_data.people["member"], fixture_data.people["colleague"]]
    pools = [fixture_data.rows["pool"], factories.pool("other")]
    for number in range(4):
        job = factories.job(
            people[number % 2], fixture_data.rows["project"], fixture_data.rows["batch"], tasks=2
        )
        running(job, factories.node(pools[number // 2], gpus=2))
    return list(UsageInterval.objects.order_by("id"))


@settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_every_sum_is_the_sum_of_its_spans(ledger: list[UsageInterval], data: st.DataObject) -> None:
    now = User.objects.values_list(Now(), flat=True)[0]
    admin = User.objects.get(username="admin-x")
    for row in ledger:
        row.started_at, length, row.milli = data.draw(SPANS)
        row.ended_at = None if length is None else row.started_at + length
    UsageInterval.objects.bulk_update(ledger, ["started_at", "ended_at", "milli"])
    zone = data.draw(ZONES)
    start, end = sorted(moment.astimezone(zone) for moment in (data.draw(INSTANTS), data.draw(INSTANTS)))
    end += dt.timedelta(microseconds=1)

    hours: dict[str, float] = defaultdict(float)
    jobs: dict[str, set[int]] = defaultdict(set)
    for row in ledger:
        began, ended = max(row.started_at, start), min(row.ended_at or now, end)
        if ended < began or row.started_at >= end:
            continue
        if row.ended_at is not None and row.ended_at <= start and row.started_at < start:
            continue
        keys = [row.project.public_id, row.user.public_id, row.pool.public_id]
        day = began.astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        for key in keys:
            hours[key] += row.milli / 1000 * ((ended - began) / HOUR)
            jobs[key].add(row.job_id)
        while day < ended or day <= began:
            piece = min(ended, day + DAY) - max(began, day)
            hours[f"{day:%Y-%m-%d}"] += row.milli / 1000 * (piece / HOUR)
            jobs[f"{day:%Y-%m-%d}"].add(row.job_id)
            day += DAY

    totals = []
    for by in UsageGrouping:
        found = gpu_hours_by(admin, start, end, by)
        totals.append(sum(item.gpu_hours for item in found))
        for item in found:
            assert item.gpu_hours == pytest.approx(hours.get(item.key, 0), abs=2e-6), (by, item)
            assert item.jobs == len(jobs.get(item.key, ())), (by, item)
        if by is UsageGrouping.DAY:
            asked = [item.key for item in found]
            assert asked == sorted(asked)
            assert {key for key in jobs if key[:2] == "20"} <= set(asked)
            assert (asked[0], asked[-1]) == (
                f"{start.astimezone(dt.UTC):%Y-%m-%d}",
                f"{end.astimezone(dt.UTC) - dt.timedelta(microseconds=1):%Y-%m-%d}",
            )
    assert totals == pytest.approx([totals[0]] * len(totals), abs=1e-4)
