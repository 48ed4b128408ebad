"""GPU alerts: counted until acknowledged, counted again from one after that, and visible to administrators."""

from __future__ import annotations

import pytest

from portal.errors import Conflict, Forbidden, NotFound
from portal.models import AuditEntry, GpuAlert
from portal.selectors.nodes.alerts import AlertView, alerts, open_alert_count
from portal.services.nodes.alerts import do_acknowledge_alert, record_xid
from portal.services.nodes.gpus import record_foreign_processes
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture
def gpu():
    factories.cluster_settings()
    return factories.node(factories.pool(), gpus=2).gpus.get(index=0)


def reported(**only) -> list[tuple[str, int, bool]]:
    return [
        (AlertView(row).name, row.repeat_count, row.acknowledged_at is not None)
        for row in alerts(acknowledged=None).filter(**only).order_by("id")
    ]


def test_xids_are_counted_until_acknowledged(gpu) -> None:
    admin, member = factories.user(admin=True), factories.user()
    record_xid(gpu.node_id, gpu.uuid, 79, 1)
    record_xid(gpu.node_id, gpu.uuid, 79, 2)
    record_xid(gpu.node_id, gpu.uuid, 31, 5)  # a program's own fault is kept, and is no alert
    for nonsense in ((gpu.node_id + 1, gpu.uuid, 79, 1), (gpu.node_id, "no-such", 79, 1)):
        record_xid(*nonsense)  # a node tells of its own GPUs alone
    record_xid(gpu.node_id, gpu.uuid, -1, 1)
    record_xid(gpu.node_id, gpu.uuid, 10**9, 1)
    assert reported() == [("XID 79", 3, False), ("XID 31", 5, False)] and open_alert_count() == 1
    row = GpuAlert.objects.get(code=79)
    assert row.first_at < row.last_at and AlertView(row).meaning == "GPU has fallen off the bus"
    with pytest.raises(Forbidden):
        do_acknowledge_alert(member, row.public_id)
    with pytest.raises(NotFound):
        do_acknowledge_alert(admin, "nothing")
    do_acknowledge_alert(admin, row.public_id, "Reseated it")
    with pytest.raises(Conflict):
        do_acknowledge_alert(admin, row.public_id)
    assert open_alert_count() == 0
    assert AuditEntry.objects.get(action="gpu.acknowledge").reason == "Reseated it"
    record_xid(gpu.node_id, gpu.uuid, 79, 1)
    assert reported(code=79) == [("XID 79", 3, True), ("XID 79", 1, False)] and open_alert_count() == 1


def test_a_foreign_process_raises_an_alert_until_gone_and_acknowledged(gpu) -> None:
    def seen(who: str) -> GpuAlert:
        record_foreign_processes(gpu.node.public_id, {gpu.uuid: who})
        return GpuAlert.objects.order_by("-id").get()

    row = seen("python (process 77) of carol")
    assert (AlertView(row).severity, AlertView(row).meaning) == ("foreign", "python (process 77) of carol")
    assert seen("").resolved_at is not None and open_alert_count() == 1  # it is gone, and nobody has looked
    row = seen("python (process 78) of carol")
    assert (row.repeat_count, row.resolved_at, row.subject) == (2, None, "python (process 78) of carol")
    do_acknowledge_alert(factories.user(admin=True), row.public_id, "She stops it at noon")
    assert (
        seen("").resolved_at is not None and open_alert_count() == 0
    )  # also where it was acknowledged before it went
