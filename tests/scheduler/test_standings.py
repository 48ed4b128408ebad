"""Verdicts in the record: a new code at once, mere numbers a bounded part a cycle, the oldest first."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from portal.models import ClusterSettings, Job, JobEvent, Standing
from portal.words.reasons import VerdictCode
from scheduler import leases, standings
from scheduler.core.cluster import JobId
from scheduler.core.plan import Verdict
from scheduler.snapshot import take_photo
from scheduler.standings import Standings
from tests import record

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def waiting() -> list[Job]:
    settings = record.cluster()
    assert isinstance(settings, ClusterSettings)
    scene: dict[str, Any] = record.scene()
    return [record.job(scene["owner"], scene["project"], scene["environment"]) for _ in range(5)]


def written(
    jobs: list[Job],
    free: int,
    code: VerdictCode = VerdictCode.NO_FIT_NOW,
    known: Standings | None = None,
) -> int:
    """Writes one verdict for each job, as a cycle of its own would; ``known`` from the cycle before, or anew."""
    leader = leases.claim(leases.LEADER, "test", leases.LEADER_TTL_S)
    assert leader is not None
    numbers: dict[str, int | float | str | None] = {"free_gpus": free, "needed_gpus": 4.0}
    verdicts = tuple(Verdict(JobId(job.public_id), code, f"{free} are free.", numbers) for job in jobs)
    photo = take_photo(ClusterSettings.objects.get())
    return (known or Standings()).write(leader, photo.pending_rows, verdicts)


def free_told(jobs: list[Job]) -> list[int]:
    return [Standing.objects.get(job=job).numbers["free_gpus"] for job in jobs]


def test_what_is_new_is_written_at_once_and_what_is_the_same_is_not(
    waiting: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standings, "RENEWED_AT_ONCE", 2)
    assert written(waiting, free=1) == 5
    assert written(waiting, free=1) == 0
    assert written(waiting, free=1, code=VerdictCode.SHARE_USED_UP) == 5
    assert JobEvent.objects.filter(kind="verdict").count() == 10


def test_new_numbers_reach_everybody_in_turns(waiting: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standings, "RENEWED_AT_ONCE", 2)
    written(waiting, free=1)
    since = Standing.objects.get(job=waiting[0]).since
    assert written(waiting, free=2) == 2
    assert free_told(waiting) == [2, 2, 1, 1, 1]
    assert written(waiting, free=3) == 2
    assert free_told(waiting) == [2, 2, 3, 3, 1]
    assert written(waiting, free=4) == 2
    assert free_told(waiting) == [4, 2, 3, 3, 4]
    assert Standing.objects.get(job=waiting[0]).since == since
    assert JobEvent.objects.filter(kind="verdict").count() == 5


def test_what_a_process_knows_it_need_not_read_and_still_sees_what_others_wrote(waiting: list[Job]) -> None:
    known = Standings()
    assert written(waiting, free=1, known=known) == 5
    with CaptureQueriesContext(connection) as queries:
        assert known.read() == Standings().read()
    assert sum("sentence" in query["sql"] for query in queries) == 1  # only who knows nothing reads them
    Standing.objects.filter(job=waiting[0]).update(sentence="Something else.", p50_at=waiting[0].submitted_at)
    Standing.objects.filter(job=waiting[1]).delete()
    assert known.read() == Standings().read()
    assert written(waiting, free=1, known=known) == 2
    assert Standing.objects.get(job=waiting[0]).sentence == "1 are free."
    assert Standing.objects.get(job=waiting[0]).p50_at is not None  # whoever wrote that wrote it for longer


def test_verdicts_of_jobs_that_left_meanwhile_are_dropped(waiting: list[Job]) -> None:
    leader = leases.claim(leases.LEADER, "test", leases.LEADER_TTL_S)
    assert leader is not None
    photo = take_photo(ClusterSettings.objects.get())
    Job.objects.filter(pk=waiting[0].pk).update(state="CANCELLED")
    verdicts = tuple(
        Verdict(JobId(job.public_id), VerdictCode.NO_FIT_NOW, "None is free.") for job in waiting
    )
    Standings().write(leader, photo.pending_rows, verdicts)
    assert set(Standing.objects.values_list("job", flat=True)) == {job.pk for job in waiting[1:]}
