"""Minutes out of samples: means, energy as the integral of power, who held a GPU; joined and deleted."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from agents.samples import GpuSample, GpuUser, NodeSample, TaskSample
from portal.live.rollup import NodeRollup, columns
from portal.models import UsageMinute
from portal.selectors.minutes import node_minutes
from portal.services.minutes import delete_old_minutes, write_minutes
from tests import record


def sample(
    *, use: float | None = 50, watts: float | None = 100, job: str | None = None, at_s: float = 0
) -> NodeSample:
    users = (GpuUser(1, 10, job, 1, job is None),) if job != "" else ()
    gpu = GpuSample("GPU-1", use, 1000, watts, 40, "ok", users if job is not None else ())
    return NodeSample(at_s, 10.0, 2048, 9999, (gpu,), (TaskSample("abc", 1, 0, 80.0, 512),))


def test_a_minute_is_the_mean_of_what_was_known():
    rollup = NodeRollup()
    for second, use in enumerate([0, 100, None, 50]):
        assert rollup.add(6000 + second, sample(use=use)) is None
    minute = rollup.add(6060, sample())
    row = columns(minute, ["GPU-1", "GPU-gone"])
    assert minute.start_s == 6000
    assert row["samples"] == 4
    assert row["utilisation_percent"] == [50.0, None]
    assert row["tasks"] == [{"job": "abc", "rank": 0, "cpu_percent": 80.0, "memory_mib": 512.0}]


def test_energy_is_the_area_under_power():
    rollup = NodeRollup()
    for second in range(61):
        minute = rollup.add(6000 + second, sample(watts=100 + second))
    # the trapezoid over 0..59 s; the step from 59 to 60 counts to the next minute
    assert columns(minute, ["GPU-1"])["energy_joules"] == [pytest.approx(100 * 59 + 59 * 59 / 2)]


def test_a_gap_and_an_unknown_power_hold_no_energy():
    rollup = NodeRollup()
    rollup.add(6000, sample())
    rollup.add(6030, sample())
    rollup.add(6031, sample(watts=None))
    minute = rollup.rest()
    assert columns(minute, ["GPU-1"])["energy_joules"] == [None]


def test_a_minute_ends_without_a_further_sample():
    rollup = NodeRollup()
    rollup.add(6000, sample())
    assert rollup.due(6059) is None
    assert rollup.due(6061).samples == 1
    assert rollup.due(6062) is None


def test_holders_are_jobs_or_foreign():
    rollup = NodeRollup()
    rollup.add(6000, sample(job="abc"))
    foreign = NodeSample(
        0, None, None, None, (GpuSample("GPU-1", 1, 1, 1, 1, "ok", (GpuUser(9, 1, None, None, True),)),)
    )
    rollup.add(6001, foreign)
    assert columns(rollup.rest(), ["GPU-1"])["holders"] == [["abc", "foreign"]]


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
    node = record.node(record.pool())
    start = int(timezone.now().timestamp() // 60) * 60
    write_minutes([(node.public_id, start, _row(0, samples=30))])
    write_minutes([(node.public_id, start, _row(100, samples=10)), ("unknown", start, _row(1))])
    row = UsageMinute.objects.get()
    assert (row.samples, row.utilisation_percent, row.energy_joules) == (40, [25.0], [10.0])
    write_minutes([(node.public_id, start, _row(7, uuid="GPU-2"))])
    row.refresh_from_db()
    assert (row.gpu_uuids, row.utilisation_percent) == (["GPU-1", "GPU-2"], [25.0, 7.0])
    assert row.holders == [["abc"], ["abc"]]


def test_old_minutes_go_by_whole_days(db):
    node = record.node(record.pool())
    now = timezone.now()
    for days in [0, 1, 89, 91, 92, 200]:
        moment = now - dt.timedelta(days=days)
        write_minutes([(node.public_id, int(moment.timestamp() // 60) * 60, _row(1))])
    assert delete_old_minutes(90) == 3
    assert delete_old_minutes(90) == 0
    assert UsageMinute.objects.count() == 3


def test_a_node_is_read_as_series(db):
    person, node = record.person(), record.node(record.pool(), gpus=2)
    uuids = [gpu.uuid for gpu in node.gpus.all()]
    start = int(timezone.now().timestamp() // 60) * 60
    write_minutes(
        [
            (node.public_id, start - 60, _row(30, uuid=uuids[1])),
            (node.public_id, start, _row(40, uuid=uuids[0])),
        ]
    )
    series = node_minutes(person, node)
    assert series.minutes_s == [start - 60, start]
    assert [gpu.utilisation_percent for gpu in series.gpus] == [[None, 40.0], [30.0, None]]
    assert series.energy_joules == 10.0
