"""Minutes out of samples: means, energy by counters and by power, who held a GPU; joined and deleted."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest
from django.utils import timezone

from agents.wire.messages import GpuProcess, GpuSample, NodeSample, TaskSample
from portal.live.collector.rollup import MAX_COUNTER_GAP_S, NodeRollup, minute_columns
from portal.models import Attempt, AttemptGpuDay, NodeMetricsMinute
from portal.selectors.jobs.jobs import attempt_energy_joules, list_attempts
from portal.selectors.nodes.metric_series import read_node_series
from portal.services.nodes.metrics_rollup import save_node_metrics
from scheduler.retention import delete_expired_rows
from tests import factories


def sample(
    *, use: float | None = 50, watts: float | None = 100, job: str | None = None, at_s: float = 0
) -> NodeSample:
    users = (GpuProcess(1, 10, job, 1, job is None),) if job != "" else ()
    gpu = GpuSample("GPU-1", use, 1000, watts, 40, "ok", users if job is not None else ())
    return NodeSample(at_s, 10.0, 2048, 9999, (gpu,), (TaskSample("abc", 1, 0, 80.0, 512),))


def test_a_minute_is_the_mean_of_known_samples():
    rollup = NodeRollup()
    for second, use in enumerate([0, 100, None, 50]):
        assert rollup.add(6000 + second, sample(use=use)) is None
    minute = rollup.add(6060, sample())
    row = minute_columns(minute, ["GPU-1", "GPU-gone"])
    assert minute.start_s == 6000
    assert row["samples"] == 4
    assert row["utilisation_percent"] == [50.0, None]
    assert row["tasks"] == [{"job": "abc", "rank": 0, "cpu_percent": 80.0, "memory_mib": 512.0}]


def test_energy_is_the_area_under_power():
    rollup = NodeRollup()
    for second in range(61):
        minute = rollup.add(6000 + second, sample(watts=100 + second))
    # the trapezoid over 0..59 s; the step from 59 to 60 counts to the next minute
    assert minute_columns(minute, ["GPU-1"])["energy_joules"] == [pytest.approx(100 * 59 + 59 * 59 / 2)]


def counted(joules: float | None, *, watts: float | None = 100) -> NodeSample:
    first = sample(watts=watts)
    gpu = replace(first.gpus[0], energy_joules=joules)
    return replace(first, gpus=(gpu,))


def test_energy_is_the_increase_of_the_counter():
    rollup = NodeRollup()
    for at_s, joules in (
        (6000, 1e9),
        (6001, 1e9 + 90),
        (6031, 1e9 + 3090),
        (6032, None),
        (6033, 5),
        (6034, 95),
    ):
        rollup.add(at_s, counted(joules))
    # a gap of 30 s counts; without a counter, and where it began anew, power stands in for a second each
    assert minute_columns(rollup.pop_partial(), ["GPU-1"])["energy_joules"] == [
        pytest.approx(3090 + 100 + 100 + 90)
    ]


def test_the_increase_over_a_long_gap_is_not_attributed():
    rollup = NodeRollup()
    rollup.add(6000, counted(10.0))
    rollup.add(6000 + MAX_COUNTER_GAP_S + 1, counted(9_000.0))
    assert minute_columns(rollup.pop_partial(), ["GPU-1"])["energy_joules"] == [None]


def test_energy_is_attributed_to_the_holders_of_the_gpu():
    rollup, both = NodeRollup(), {"GPU-1": [("abc", 2, 250), ("xyz", 1, 500)]}
    rollup.add(6000, counted(0.0), both)
    rollup.add(6001, counted(400.0), both)
    rollup.add(6002, counted(500.0), {"GPU-1": [("xyz", 1, 1000)]})
    rollup.add(6003, counted(600.0))
    attempts = rollup.pop_partial().attempts
    assert {key: use.joules for key, use in attempts.items()} == {("abc", 2): 100.0, ("xyz", 1): 300.0}


def test_gpu_seconds_of_an_attempt_are_measured_busy_and_idle():
    rollup = NodeRollup()
    for second, use in enumerate([90, 90, 1, None, 50]):
        rollup.add(6000 + second, sample(use=use), {"GPU-1": [("abc", 1, 500)]})
    rollup.add(6020, sample(use=50), {"GPU-1": [("abc", 1, 500)]})  # nothing is known of the gap before it
    use = rollup.pop_partial().attempts["abc", 1]
    assert (use.measured_s, use.idle_s) == (1.5, 0.5)
    assert use.busy_s == pytest.approx((0.9 + 0.01 + 0.5) / 2)


def test_joules_are_added_to_the_attempt(db):
    owner, pool = factories.user(), factories.pool()
    factories.node(pool)
    job = factories.job(owner, factories.project(member=owner), factories.environment())
    attempt = Attempt.objects.create(job=job, number=1, pool=pool, leader_epoch=1)
    assert attempt_energy_joules(list_attempts(job)[0]) is None
    first, second = dt.date(2026, 1, 1), dt.date(2026, 1, 2)
    for day, joules in ((first, 40.0), (first, None), (second, 30.0)):
        use = (joules, 60.0, 30.0, 10.0, None)
        known = (job.public_id, 1, day)
        save_node_metrics([], {known: use, (job.public_id, 2, day): use, ("gone", 1, day): use})
    assert attempt_energy_joules(list_attempts(job)[0]) == 70.0
    assert list(attempt.gpu_days.order_by("day").values_list("day", "measured_gpu_s", "idle_gpu_s")) == [
        (first, 120.0, 20.0),
        (second, 60.0, 10.0),
    ]


def test_gaps_and_unknown_power_have_no_energy():
    rollup = NodeRollup()
    rollup.add(6000, sample())
    rollup.add(6030, sample())
    rollup.add(6031, sample(watts=None))
    minute = rollup.pop_partial()
    assert minute_columns(minute, ["GPU-1"])["energy_joules"] == [None]


def test_a_minute_ends_without_a_further_sample():
    rollup = NodeRollup()
    rollup.add(6000, sample())
    assert rollup.pop_finished(6059) is None
    assert rollup.pop_finished(6061).samples == 1
    assert rollup.pop_finished(6062) is None


def test_holders_are_jobs_or_foreign():
    rollup = NodeRollup()
    rollup.add(6000, sample(job="abc"))
    foreign = NodeSample(
        0, None, None, None, (GpuSample("GPU-1", 1, 1, 1, 1, "ok", (GpuProcess(9, 1, None, None, True),)),)
    )
    rollup.add(6001, foreign)
    assert minute_columns(rollup.pop_partial(), ["GPU-1"])["holders"] == [["abc", "foreign"]]


def _row(
    use: float, *, samples: int = 10, uuid: str = "GPU-1", joules: float | None = 5.0
) -> dict[str, object]:
    return {
        "gpu_uuids": [uuid],
        "samples": samples,
        "utilisation_percent": [use],
        "memory_used_mib": [1.0],
        "power_watts": [None],
        "temperature_c": [None],
        "energy_joules": [joules],
        "cpu_percent": 1.0,
        "node_memory_used_mib": None,
        "holders": [["abc"]],
        "tasks": [],
    }


def test_a_minute_in_two_parts_is_joined(db):
    node = factories.node(factories.pool())
    start = int(timezone.now().timestamp() // 60) * 60
    save_node_metrics([(node.public_id, start, _row(0, samples=30))])
    save_node_metrics([(node.public_id, start, _row(100, samples=10)), ("unknown", start, _row(1))])
    row = NodeMetricsMinute.objects.get()
    assert (row.samples, row.utilisation_percent, row.energy_joules) == (40, [25.0], [10.0])
    save_node_metrics([(node.public_id, start, _row(7, uuid="GPU-2"))])
    row.refresh_from_db()
    assert (row.gpu_uuids, row.utilisation_percent) == (["GPU-1", "GPU-2"], [25.0, 7.0])
    assert row.holders == [["abc"], ["abc"]]


def test_old_minutes_are_removed(db):
    node = factories.node(factories.pool())
    now = timezone.now()
    for days in [0, 1, 89, 91, 92, 200]:
        moment = now - dt.timedelta(days=days)
        save_node_metrics([(node.public_id, int(moment.timestamp() // 60) * 60, _row(1))])
    kind = "metrics of nodes per minute"
    assert delete_expired_rows()[kind] == 3
    assert delete_expired_rows()[kind] == 0
    assert NodeMetricsMinute.objects.count() == 3


def test_a_node_is_read_as_series(db):
    person, node = factories.user(), factories.node(factories.pool(), gpus=2)
    uuids = [gpu.uuid for gpu in node.gpus.all()]
    start = int(timezone.now().timestamp() // 60) * 60
    save_node_metrics(
        [
            (node.public_id, start - 60, _row(30, uuid=uuids[1])),
            (node.public_id, start, _row(40, uuid=uuids[0])),
        ]
    )
    series = read_node_series(person, node)
    assert series.times_s == [start - 60, start]
    assert [gpu.utilisation_percent for gpu in series.gpus] == [[None, 40.0], [30.0, None]]
    assert series.energy_joules == 10.0


def test_peak_memory_is_that_of_exclusively_held_gpus():
    rollup, alone = NodeRollup(), {"GPU-1": [("job1", 1, 1000)]}
    rollup.add(6000, sample(), alone)
    rollup.add(6001, sample(), {"GPU-1": [("job1", 1, 500), ("job2", 1, 500)]})
    used = rollup.pop_partial().attempts
    assert (used["job1", 1].peak_memory_mib, used["job2", 1].peak_memory_mib) == (1000, None)


def test_the_highest_peak_of_a_day_is_kept(db):
    dataset = factories.basic_cluster()
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    Attempt.objects.create(job=job, number=1, pool=dataset["pool"], leader_epoch=1)
    for peak in (None, 5000.0, 3000.0):
        save_node_metrics([], {(job.public_id, 1, dt.date(2026, 1, 1)): (None, 10.0, 5.0, 0.0, peak)})
    stored = AttemptGpuDay.objects.get()
    assert (stored.measured_gpu_s, stored.peak_memory_mib) == (30, 5000)
