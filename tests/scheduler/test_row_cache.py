"""A snapshot that reads only rows changed since the last one equals a snapshot that reads all rows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.errors import Conflict, Unsatisfiable
from portal.models import Attempt, ClusterSettings, Environment, Gpu, Job, Node, Quota, Volume
from portal.services.jobs.task_reports import record_checkpoint
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from scheduler.cycle import CycleState
from scheduler.snapshot.decision_input import DecisionInput, SnapshotCache, take_snapshot
from scheduler.snapshot.row_cache import RowCache
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

ROUNDS = 60


def said(inputs: DecisionInput) -> dict[str, Any]:
    """All of a snapshot but its moment and the order of its rows."""
    known = inputs.snapshot
    snapshot = dataclasses.replace(
        known,
        now_s=0.0,
        usage=(),
        nodes=tuple(sorted(known.nodes, key=lambda row: row.id)),
        running=tuple(sorted(known.running, key=lambda row: row.job)),
        pending=tuple(sorted(known.pending, key=lambda row: row.job)),
    )
    return {**vars(inputs), "snapshot": snapshot}


class FixtureData:
    """A small cluster on which things happen at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.settings = factories.cluster_settings()
        self.pool = factories.pool()
        kinds = ("podman", "podman", "process")
        self.nodes = [factories.node(self.pool, gpus=3, runtime=kind) for kind in kinds]
        self.owner, self.other = factories.user(), factories.user()
        self.project = factories.project(member=self.owner)
        self.environments = [factories.environment(), factories.environment(runtime="process")]
        for _ in range(4):
            self.submit()

    def submit(self) -> None:
        kind = self.random.choice(["training", "workspace"])
        milli = self.random.choice([1000, 500])
        owned = self.random.choice(self.environments)
        job = factories.job(self.owner, self.project, owned, kind=kind, milli_per_gpu=milli)
        if self.random.random() < 0.3:
            job.avoid_nodes.add(self.random.choice(self.nodes))

    def start(self) -> None:
        job, gpu = self._job("PENDING"), self._gpu()
        if job is None or gpu is None:
            return
        epoch = 1
        with transaction.atomic():
            row = Job.objects.select_for_update().get(pk=job.pk)
            if gpu.used_milli + row.milli_per_gpu <= 1000 and not row.held:
                job_control.start_attempt(
                    row, self.pool, [RankPlacement(gpu.node, [(gpu.pk, row.milli_per_gpu)])], epoch=epoch
                )

    def send(self) -> None:
        attempt = self._attempt()
        if attempt is not None and job_control.mark_task_sent(task := attempt.task_rows.get()):
            job_control.record_task_running(task.pk, container=f"c{task.pk}", ports={})

    def save(self) -> None:
        attempt = self._attempt()
        if attempt is not None:
            record_checkpoint(attempt, self.random.uniform(0, 60), polled_at=timezone.now())

    def stop(self) -> None:
        attempt, winner = self._attempt(), self._job("PENDING")
        if attempt is not None:
            stop = job_control.StopRequest(attempt.pk, EndReason.PREEMPTED, for_job=winner)
            job_control.request_stops([stop])

    def end(self) -> None:
        attempt = self._attempt()
        if attempt is not None:
            reason = self.random.choice([EndReason.COMPLETED, EndReason.EXIT_CODE, EndReason.NODE_REBOOTED])
            job_control.record_task_ended(attempt.task_rows.get().pk, exit_code=0, reason=reason)

    def cancel(self) -> None:
        job = self._job("PENDING")
        if job is not None:
            job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="x")

    def hold(self) -> None:
        job = self._job("PENDING")
        if job is not None:
            job_control.set_job_held(job.pk, not job.held, actor="x")

    def edit(self) -> None:
        jobs = Job.objects.filter(pk=self.random.choice(list(Job.objects.values_list("pk", flat=True))))
        kept = [[0, "n", [["u", 1000]]]]
        changes: list[dict[str, Any]] = [
            {"priority": 5},
            {"name": "other"},
            {"nominated_placement": kept},
            {"nominated_placement": None},
        ]
        jobs.update(**self.random.choice(changes))

    def node(self) -> None:
        rows = Node.objects.filter(pk=self.random.choice(self.nodes).pk)
        changes: list[dict[str, Any]] = [
            {"state": "cordoned"},
            {"state": "ready"},
            {"reachable": False},
            {"runtime": "docker"},
            {"memory_mib": 1},
        ]
        rows.update(**self.random.choice(changes))

    def gpu(self) -> None:
        gpu = self._gpu()
        if gpu is not None:
            change = self.random.choice(
                [{"health": "lost"}, {"health": "ok"}, {"present": False}, {"present": True}]
            )
            Gpu.objects.filter(pk=gpu.pk).update(**change)

    def environment(self) -> None:
        row = self.random.choice(self.environments)
        Environment.objects.filter(pk=row.pk).update(runtime=self.random.choice(["process", "podman"]))

    def home(self) -> None:
        where = {"name": "home", "scope": "node", "node": self.random.choice(self.nodes)}
        Volume.objects.update_or_create(owner=self.owner, kind="home", defaults=where)

    def another_pool(self) -> None:
        pool = factories.pool()
        self.nodes.append(factories.node(pool, gpus=1))

    def quota(self) -> None:
        Quota.objects.update_or_create(
            project=self.project, pool=self.pool, defaults={"limit_milli": self.random.choice([None, 1000])}
        )

    def _job(self, state: str) -> Job | None:
        return self._one(Job.objects.filter(state=state))

    def _attempt(self) -> Attempt | None:
        return self._one(Attempt.objects.filter(state__in=["CONFIGURING", "RUNNING", "COMPLETING"]))

    def _gpu(self) -> Gpu | None:
        return self._one(Gpu.objects.filter(health="ok", present=True, node__pool=self.pool))

    def _one(self, rows: Any) -> Any:
        return self.random.choice(list(rows.order_by("pk")) or [None])


ACTS: list[Callable[[FixtureData], None]] = [
    FixtureData.submit,
    FixtureData.submit,
    FixtureData.start,
    FixtureData.start,
    FixtureData.send,
    FixtureData.save,
    FixtureData.stop,
    FixtureData.end,
    FixtureData.cancel,
    FixtureData.hold,
    FixtureData.edit,
    FixtureData.node,
    FixtureData.gpu,
    FixtureData.environment,
    FixtureData.home,
    FixtureData.another_pool,
    FixtureData.quota,
]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_cached_and_fresh_snapshots_are_equal(seed: int) -> None:
    fixture_data, cache = FixtureData(seed), SnapshotCache()
    done: list[str] = []
    for _ in range(ROUNDS):
        for _ in range(fixture_data.random.randint(0, 3)):
            act = fixture_data.random.choice(ACTS)
            done.append(act.__name__)
            try:
                act(fixture_data)
            except (Conflict, Unsatisfiable):
                continue
        with_cache, without = (
            take_snapshot(fixture_data.settings, cache),
            take_snapshot(fixture_data.settings),
        )
        assert said(with_cache) == said(without), done


def test_unchanged_rows_are_the_same_objects_and_not_read() -> None:
    fixture_data, cache = FixtureData(1), SnapshotCache()
    fixture_data.start()
    first = take_snapshot(fixture_data.settings, cache).snapshot
    job = Job.objects.filter(state="PENDING").earliest("pk")
    Job.objects.filter(pk=job.pk).update(priority=7)
    with CaptureQueriesContext(connection) as queries:
        second = take_snapshot(fixture_data.settings, cache).snapshot
    same = [one is other for one, other in zip(first.pending, second.pending, strict=True)]
    assert same.count(False) == 1 and second.pending[same.index(False)].priority == 7
    assert all(one is other for one, other in zip(first.nodes, second.nodes, strict=True))
    assert all(one is other for one, other in zip(first.running, second.running, strict=True))
    read = [query["sql"] for query in queries if "submitted_at" in query["sql"]]
    assert len(read) == 1 and str(job.pk) in read[0].rpartition("WHERE")[2]


def test_a_checkpoint_changes_only_the_row_of_its_job() -> None:
    fixture_data, cache = FixtureData(2), SnapshotCache()
    for _ in range(6):
        fixture_data.submit()
        fixture_data.start()
    fixture_data.send()
    before = take_snapshot(fixture_data.settings, cache).snapshot
    assert len(before.running) > 1 and {row.checkpoint_s for row in before.running} == {None}
    attempt = Attempt.objects.select_related("job").filter(running_at__isnull=False).earliest("pk")
    assert record_checkpoint(attempt, 0.0, polled_at=timezone.now())
    after = take_snapshot(fixture_data.settings, cache)
    reported = {row.job: row.checkpoint_s for row in after.snapshot.running if row.checkpoint_s is not None}
    attempt.refresh_from_db()
    assert attempt.checkpoint_at and reported == {attempt.job.public_id: attempt.checkpoint_at.timestamp()}
    same = [one is other for one, other in zip(before.running, after.snapshot.running, strict=True)]
    assert same.count(False) == 1
    assert said(after) == said(take_snapshot(fixture_data.settings))


def test_another_database_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: ClusterSettings = factories.cluster_settings()
    recall = CycleState()
    recall.reset_if_database_changed()
    kept = recall.snapshot_cache
    take_snapshot(settings, recall.snapshot_cache)
    recall.reset_if_database_changed()
    assert recall.snapshot_cache is kept
    monkeypatch.setattr("scheduler.cycle.database_identity", lambda: ("another",))
    recall.reset_if_database_changed()
    assert recall.snapshot_cache is not kept


def test_an_own_row_removed_before_reading_is_forgotten() -> None:
    known: RowCache[str] = RowCache()
    read: list[Any] = []

    def fetch(ids: Any) -> list[tuple[int, str]]:
        read.append(ids)
        return [(1, "one")]

    assert known.refresh_blocks([(0, "1:900")], fetch) == {1: "one"}
    known.put([(2, "901")], {2: "two"})
    known.put([(3, "902")], {3: "three"})
    assert known.refresh_blocks([(0, "1:900 3:902")], fetch) == {1: "one", 3: "three"}
    assert known.refresh_blocks([(0, "1:900")], fetch) == {1: "one"}
    assert len(read) == 1
