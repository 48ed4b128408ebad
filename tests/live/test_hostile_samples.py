"""Samples of a hostile node change nothing of other nodes, and keep none of their metrics from being written."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction

from portal.live.collector import collector, gpu_memory_overuse
from portal.live.collector.pending_writes import PendingWrites, flush
from portal.models import Attempt, AttemptGpuDay, Gpu, Job, Node, NodeIncident, NodeMetricsMinute, Task
from portal.services.lifecycle import job_control
from portal.valkey import sample_cache
from tests import factories
from tests.hostile_agent import Frame, ScriptedAgent, hello, reading, sample
from tests.live.test_collector import collecting, until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def nodes(settings, tmp_path) -> tuple[Node, Node]:
    """A hostile one and an honest one, with two GPUs each."""
    settings.LOG_DIR = tmp_path / "logs"
    pool = factories.pool()
    hostile, honest = (
        factories.node(pool, gpus=2, name=name, runtime="process") for name in ("hostile", "honest")
    )
    return hostile, honest


def uuids(node: Node) -> list[str]:
    return [gpu.uuid for gpu in node.gpus.order_by("index")]


def running_share(node: Node) -> tuple[Job, Attempt]:
    """A job that holds half of the first GPU of a node."""
    owner = factories.user()
    environment, project = (
        factories.environment(runtime="process", tool=False),
        factories.project(member=owner),
    )
    job = factories.job(owner, project, environment, milli_per_gpu=500)
    gpu = Gpu.objects.filter(node=node).first()
    with transaction.atomic():
        attempt = job_control.start_attempt(
            job, node.pool, [job_control.RankPlacement(node, [(gpu.pk, 500)])], epoch=1
        )
    task = Task.objects.get(attempt=attempt)
    job_control.mark_task_sent(task)
    job_control.record_task_running(task.pk, container="c", ports={})
    return job, attempt


def paced(frames: Iterator[Frame], pause_s: float = 0.1) -> Iterator[Frame]:
    for frame in frames:
        yield frame
        time.sleep(pause_s)


def opener_of(**frames: Any) -> Any:
    """Opens a link to an agent that sends these samples, by name of its node."""
    agents = {
        name: ScriptedAgent(lambda: hello([]), frames=lambda role, each=each: paced(each()))
        for name, each in frames.items()
    }

    def opener(watched: Any, on_event: Any) -> Any:
        return agents[watched.name].open("watch", on_event=on_event)

    return opener


def honest_samples(node: Node) -> Any:
    gpus = uuids(node)
    return lambda: (sample(*(reading(uuid) for uuid in gpus)) for _ in itertools.count())


def heard(node: Node) -> Any:
    return sample_cache.latest_frames([node.public_id])


def test_a_forged_sample_ends_no_job_of_another_node_and_books_no_energy_to_it(nodes, monkeypatch) -> None:
    monkeypatch.setattr(gpu_memory_overuse, "REPORT_AFTER_S", 0.5)
    hostile, honest = nodes
    job, attempt = running_share(honest)
    process = {"pid": 7, "memory_mib": 81_000, "job": job.public_id, "attempt": 1, "foreign": False}

    def forged() -> Iterator[Frame]:
        for count in itertools.count():
            claims = (reading(uuid, process, energy_joules=1e9 * count) for uuid in uuids(honest))
            task = {"job": job.public_id, "attempt": 1, "task": 0, "cpu_percent": 900.0, "memory_mib": 5}
            own = (reading(uuid, process, energy_joules=1e9 * count) for uuid in uuids(hostile))
            yield sample(*claims, *own, tasks=(task,))

    began = time.monotonic()
    with collecting(opener_of(hostile=forged, honest=honest_samples(honest))):
        until(lambda: heard(hostile) and heard(honest) and time.monotonic() - began > 3)
        frame = heard(hostile)[hostile.public_id]
    attempt.refresh_from_db()
    assert attempt.stop_requested_at is None
    assert [gpu["uuid"] for gpu in frame["gpus"]] == uuids(hostile)
    minutes = NodeMetricsMinute.objects.filter(node=hostile)
    assert minutes and all(row.gpu_uuids == uuids(hostile) and not row.tasks for row in minutes)
    assert all(row.holders == [[], []] for row in minutes)
    # two GPUs at 100 W, of which it holds a half of one
    assert AttemptGpuDay.objects.get(attempt=attempt).joules < 60 * (time.monotonic() - began)


@pytest.mark.parametrize(
    "spoil",
    [
        {"uuid": "GPU\0"},
        {"processes": [{"pid": 10**400, "memory_mib": 1, "job": "\0", "attempt": 1, "foreign": True}]},
    ],
)
def test_a_malformed_sample_does_not_block_minutes_of_other_nodes(nodes, spoil) -> None:
    hostile, honest = nodes
    bad = {**reading(uuids(hostile)[0]), **spoil}
    with collecting(
        opener_of(hostile=lambda: (sample(bad) for _ in itertools.count()), honest=honest_samples(honest))
    ):
        until(lambda: heard(honest))
        reported = until(lambda: NodeIncident.objects.filter(node=hostile, kind="malformed").first())
    assert "could not be parsed" in reported.message
    assert NodeMetricsMinute.objects.filter(node=honest).exists()
    assert not NodeIncident.objects.filter(node=honest).exists()


def test_a_node_that_keeps_sending_malformed_samples_is_quarantined(nodes, monkeypatch) -> None:
    monkeypatch.setattr(collector, "MALFORMED_REPORT_INTERVAL_S", 0.1)
    hostile, honest = nodes
    bad = sample(reading("\0"))
    with collecting(
        opener_of(hostile=lambda: (bad for _ in itertools.count()), honest=honest_samples(honest))
    ):
        until(lambda: Node.objects.get(pk=hostile.pk).breaker_state == "quarantined")
        rows = NodeIncident.objects.filter(node=hostile).count()
        until(lambda: heard(honest))
    hostile.refresh_from_db()
    assert (hostile.breaker_cause, hostile.breaker_message) == (
        "malformed",
        "It repeatedly sent invalid messages.",
    )
    assert rows == NodeIncident.objects.filter(node=hostile).count(), "no rows while it is aside"
    assert Node.objects.get(pk=honest.pk).breaker_state == "healthy"


def test_rows_of_one_node_refused_by_the_database_do_not_affect_others(nodes) -> None:
    hostile, honest = nodes
    columns = {
        "gpu_uuids": ["g"], "samples": 1, "utilisation_percent": [1.0], "memory_used_mib": [1.0],
        "power_watts": [1.0], "temperature_c": [1.0], "energy_joules": [1.0], "cpu_percent": 1.0,
        "node_memory_used_mib": 1.0,
        "holders": [[]], "tasks": [],
    }  # fmt: skip
    notes = {
        hostile.public_id: PendingWrites(minutes=[(hostile.public_id, 60, columns | {"gpu_uuids": ["\0"]})]),
        honest.public_id: PendingWrites(minutes=[(honest.public_id, 60, columns)]),
    }
    notes[hostile.public_id].logs[1] = 2**80
    notes[honest.public_id].foreign_users[uuids(honest)[0]] = "python (process 7)"
    flush(notes)
    assert NodeMetricsMinute.objects.get().node == honest
    assert honest.gpus.exclude(foreign_process_owner="").get().foreign_process_owner == "python (process 7)"


def test_foreign_processes_are_recorded_only_on_gpus_of_the_reporting_node(nodes) -> None:
    hostile, honest = nodes
    flush(
        {
            hostile.public_id: PendingWrites(
                foreign_users=dict.fromkeys([*uuids(honest), *uuids(hostile)], "x")
            )
        }
    )
    assert set(Gpu.objects.exclude(foreign_process_owner="").values_list("node__name", flat=True)) == {
        "hostile"
    }
