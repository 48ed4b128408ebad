"""The jobs with the longest idle time: the same as from sums of all rows, whatever is left out first."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portal.models import Attempt, AttemptGpuDay, Job
from portal.selectors.reports import idle_jobs
from portal.selectors.reports.idle_jobs import most_idle_jobs
from portal.services.nodes.metrics_rollup import save_node_metrics
from tests import factories
from tests.api.fixture_data import FixtureData, running

START = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)
# By attempt, day and idle seconds, as the collector reports them; equal sums have no order
REPORTS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 5), st.sampled_from([0.0, 1.0, 10.0, 30.0, 100.0])),
    min_size=1,
    max_size=40,
)


@pytest.fixture
def attempts(fixture_data: FixtureData) -> list[Attempt]:
    """Two attempts of each of four jobs."""
    node = factories.node(fixture_data.rows["pool"], gpus=4)
    rows = []
    for _ in range(4):
        job = factories.job(
            fixture_data.people["member"], fixture_data.rows["project"], fixture_data.rows["batch"]
        )
        running(job, node)
        first = job.attempts.get()
        second = Attempt.objects.create(job=job, number=2, pool=first.pool, leader_epoch=1, state="COMPLETED")
        rows += [first, second]
    return rows


@settings(
    max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(reports=REPORTS, first=st.integers(0, 5), length=st.integers(1, 6), listed=st.integers(1, 3))
def test_the_longest_sums_are_found(
    fixture_data: FixtureData,
    attempts: list[Attempt],
    reports: list[tuple[int, int, float]],
    first: int,
    length: int,
    listed: int,
) -> None:
    AttemptGpuDay.objects.all().delete()
    for place, day, idle_s in reports:
        attempt = attempts[place]
        key = (attempt.job.public_id, attempt.number, (START + day * DAY).date())
        save_node_metrics([], {key: (None, 100.0, 0.0, idle_s, None)})
    assert all(
        AttemptGpuDay.objects.filter(job=job, is_continued=False).count() <= 1 for job in Job.objects.all()
    )
    idle_s: dict[str, float] = defaultdict(float)
    for place, day, seconds in reports:
        if first <= day < first + length and seconds:
            idle_s[attempts[place].job.public_id] += seconds
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(idle_jobs, "IDLE_JOBS", 2)
        patched.setattr(idle_jobs, "FIRST_DAYS_LISTED", listed)
        found = most_idle_jobs(
            fixture_data.people["admin"], START + first * DAY, START + (first + length) * DAY
        )
    assert [row.idle_gpu_hours * 3600 for row in found] == pytest.approx(
        sorted(idle_s.values(), reverse=True)[:2]
    )
    assert all(idle_s[row.job] == pytest.approx(row.idle_gpu_hours * 3600) for row in found)
