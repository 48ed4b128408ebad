"""Elastic jobs in the record: what is accepted, and that in any order of events nothing is counted twice or lost."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portal.domain.jobs.end_states import backoff_s
from portal.domain.jobs.reasons import EndReason
from portal.domain.states import LIVE_ATTEMPT_STATES, TERMINAL_JOB_STATES
from portal.errors import Conflict, InvalidRequest, Unsatisfiable
from portal.models import Allocation, Attempt, Gpu, Job, Quota, Task, UsageInterval
from portal.services.lifecycle import elastic, job_control
from portal.services.lifecycle.elastic import ScaleUpSession, TaskEviction
from portal.services.lifecycle.job_control import RankPlacement
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

TASKS, LEAST = 4, 2


def submit(dataset, **asks) -> Job:
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], **asks)


@pytest.mark.parametrize(
    "asks",
    [
        {"tasks": 2, "min_tasks": 3},
        {"tasks": 2, "min_tasks": 0},
        {"kind": "workspace", "min_tasks": 1},
    ],
)
def test_a_minimum_that_cannot_be_is_refused_by_field(asks) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        submit(factories.basic_cluster(), **asks)
    assert set(refusal.value.fields) == {"min_tasks"}


@pytest.mark.parametrize("least", [0, 3])
def test_the_database_refuses_it_too(least) -> None:
    job = submit(factories.basic_cluster(), tasks=2, min_tasks=2)
    assert not job.is_elastic and job.required_tasks == 2
    with pytest.raises(IntegrityError), transaction.atomic():
        Job.objects.filter(pk=job.pk).update(min_tasks=least)


def test_a_job_whose_minimum_fits_is_accepted_whatever_its_maximum() -> None:
    dataset = factories.basic_cluster()  # four GPUs
    Quota.objects.create(project=dataset["project"], pool=dataset["pool"], limit_milli=2000)
    assert submit(dataset, tasks=100, min_tasks=2).is_elastic
    with pytest.raises(Unsatisfiable):
        submit(dataset, tasks=100, min_tasks=3)


def test_the_pause_doubles_to_five_minutes() -> None:
    assert [backoff_s(failures) for failures in (0, 1, 2, 3, 5, 6, 10_000)] == [10, 10, 20, 40, 160, 300, 300]


# -- any order of events -----------------------------------------------------------------------------


class FixtureData:
    """One job of two to four tasks on a node of four GPUs, and all that can befall it."""

    def __init__(self) -> None:
        self.dataset = factories.basic_cluster()
        self.job = submit(self.dataset, tasks=TASKS, min_tasks=LEAST, max_attempts=20)
        with transaction.atomic():
            job_control.start_attempt(self._locked(), self.dataset["pool"], self._seats(LEAST), epoch=1)
        self.attempt = self.job.attempts.get()

    def _locked(self) -> Job:
        return Job.objects.select_for_update().get(pk=self.job.pk)

    def _seats(self, count: int) -> list[RankPlacement]:
        free = Gpu.objects.filter(node=self.dataset["node"], used_milli=0).order_by("index")
        return [RankPlacement(self.dataset["node"], [(gpu.pk, 1000)]) for gpu in free[:count]]

    def _task(self, pick: int) -> Task | None:
        tasks = list(self.attempt.task_rows.filter(container_removed=False))
        return tasks[pick % len(tasks)] if tasks else None

    def grow(self, pick: int) -> None:
        slots = self._seats(1 + pick % 2)
        if not slots:
            return
        before = self._live()
        try:
            with transaction.atomic():
                job = self._locked()
                elastic.scale_up_attempts([ScaleUpSession([job]).scale_up(job, slots)])
        except Conflict:
            assert self._live() == before
            return
        assert self._live() == before + len(slots)

    def shrink(self, pick: int) -> None:
        task = self._task(pick)
        ranks = frozenset({task.rank} if task else {99})
        elastic.request_task_evictions([TaskEviction(self.attempt.pk, ranks, EndReason.PREEMPTED)])

    def start(self, pick: int) -> None:
        task = self._task(pick)
        if task is not None and job_control.mark_task_sent(task):
            job_control.record_task_running(task.pk, container=f"c{task.rank}", ports={})

    def fail(self, pick: int) -> None:
        self._end(pick, 3, EndReason.EXIT_CODE)

    def reboot(self, pick: int) -> None:
        self._end(pick, None, EndReason.NODE_REBOOTED)

    def finish(self, pick: int) -> None:
        self._end(pick, 0, EndReason.COMPLETED)

    def _end(self, pick: int, code: int | None, reason: EndReason) -> None:
        task = self._task(pick)
        if task is not None:
            for _ in range(2):  # told twice, it ends once
                job_control.record_task_ended(task.pk, exit_code=code, reason=reason)

    def refuse(self, pick: int) -> None:
        task = self._task(pick)
        if task is not None:
            elastic.end_tasks([task.pk], EndReason.START_REFUSED, message="No.")

    def cancel(self, _: int) -> None:
        job_control.cancel_job(self.job.pk, EndReason.CANCELLED_BY_USER, actor="ada")

    def _live(self) -> int:
        return self.attempt.task_rows.filter(container_removed=False).count()

    def check(self) -> None:
        """What must be so after each event."""
        self.job.refresh_from_db()
        self.attempt = Attempt.objects.get(pk=self.attempt.pk)
        tasks = list(self.attempt.task_rows.all())
        held = Allocation.objects.filter(ended_at__isnull=True, task__attempt=self.attempt)
        live = [task for task in tasks if not task.container_removed]
        assert sorted(held.values_list("task_id", flat=True)) == sorted(task.pk for task in live)
        assert sum(self.dataset["node"].gpus.values_list("used_milli", flat=True)) == 1000 * len(live)
        assert UsageInterval.objects.filter(job=self.job, ended_at__isnull=True).count() == len(live)
        assert len(live) <= TASKS and len({task.rank for task in tasks}) == len(tasks)
        assert self.job.attempts.count() == 1
        if self.job.state == "RUNNING":
            assert self.attempt.state in LIVE_ATTEMPT_STATES
            if self.attempt.stop_requested_at is None and not any(
                task.state == "COMPLETED" for task in tasks
            ):
                stay = [
                    t for t in tasks if t.state in LIVE_ATTEMPT_STATES and t.eviction_requested_at is None
                ]
                assert len(stay) >= LEAST
        else:
            assert not live and self.attempt.state not in LIVE_ATTEMPT_STATES
            assert self.job.state == "PENDING" or self.job.state in TERMINAL_JOB_STATES


EVENTS = ("grow", "shrink", "start", "fail", "reboot", "finish", "refuse", "cancel")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3)), max_size=14))
def test_gpus_usage_and_tasks_agree_after_any_sequence(events) -> None:
    fixture_data = FixtureData()
    fixture_data.check()
    for name, pick in [*events, *((name, 0) for name in ("cancel", *["reboot"] * TASKS))]:
        getattr(fixture_data, name)(pick)
        fixture_data.check()
    assert set(fixture_data.dataset["node"].gpus.values_list("used_milli", flat=True)) == {0}
