"""Alarms about GPUs: counted until somebody acknowledges them, begun anew after that, and whose they are."""

from __future__ import annotations

import pytest

from portal.errors import Conflict, NotAllowed, NotThere
from portal.models import AuditEntry, GpuAlarm
from portal.selectors.alarms import Alarm, alarms, open_alarms
from portal.services.alarms import do_acknowledge_alarm, record_xid
from portal.services.gpus import record_foreign
from tests import record

pytestmark = pytest.mark.django_db


@pytest.fixture
def gpu():
    record.cluster()
    return record.node(record.pool(), gpus=2).gpus.get(index=0)


def told(**only) -> list[tuple[str, int, bool]]:
    return [
        (Alarm(row).name, row.times, row.acknowledged_at is not None)
        for row in alarms(acknowledged=None).filter(**only).order_by("id")
    ]


def test_an_xid_is_counted_until_somebody_looked_and_then_begins_anew(gpu) -> None:
    admin, member = record.person(admin=True), record.person()
    record_xid(gpu.node_id, gpu.uuid, 79, 1)
    record_xid(gpu.node_id, gpu.uuid, 79, 2)
    record_xid(gpu.node_id, gpu.uuid, 31, 5)  # a program's own fault is kept, and is no alarm
    for nonsense in ((gpu.node_id + 1, gpu.uuid, 79, 1), (gpu.node_id, "no-such", 79, 1)):
        record_xid(*nonsense)  # a node tells of its own GPUs alone
    record_xid(gpu.node_id, gpu.uuid, -1, 1)
    record_xid(gpu.node_id, gpu.uuid, 10**9, 1)
    assert told() == [("XID 79", 3, False), ("XID 31", 5, False)] and open_alarms() == 1
    row = GpuAlarm.objects.get(code=79)
    assert row.first_at < row.last_at and Alarm(row).meaning == "GPU has fallen off the bus"
    with pytest.raises(NotAllowed):
        do_acknowledge_alarm(member, row.public_id)
    with pytest.raises(NotThere):
        do_acknowledge_alarm(admin, "nothing")
    do_acknowledge_alarm(admin, row.public_id, "Reseated it")
    with pytest.raises(Conflict):
        do_acknowledge_alarm(admin, row.public_id)
    assert open_alarms() == 0
    assert AuditEntry.objects.get(act="gpu.acknowledge").reason == "Reseated it"
    record_xid(gpu.node_id, gpu.uuid, 79, 1)
    assert told(code=79) == [("XID 79", 3, True), ("XID 79", 1, False)] and open_alarms() == 1


def test_a_foreign_program_is_an_alarm_while_it_is_there_and_until_somebody_looked(gpu) -> None:
    def seen(who: str) -> GpuAlarm:
        record_foreign(gpu.node.public_id, {gpu.uuid: who})
        return GpuAlarm.objects.order_by("-id").get()

    row = seen("python (process 77) of carol")
    assert (Alarm(row).grade, Alarm(row).meaning) == ("foreign", "python (process 77) of carol")
    assert seen("").over_at is not None and open_alarms() == 1  # it is gone, and nobody has looked
    row = seen("python (process 78) of carol")
    assert (row.times, row.over_at, row.who) == (2, None, "python (process 78) of carol")
    do_acknowledge_alarm(record.person(admin=True), row.public_id, "She stops it at noon")
    assert (
        seen("").over_at is not None and open_alarms() == 0
    )  # also where it was acknowledged before it went
