"""The page of alerts: only administrators see and acknowledge them; the side bar counts open ones."""

from __future__ import annotations

import pytest
from django.urls import reverse

from portal.models import AuditEntry, GpuAlert, InvalidRow
from portal.services.nodes.alerts import (
    InvalidRowReport,
    record_claimed_gpus,
    record_xid,
    report_invalid_rows,
)
from portal.services.nodes.gpus import record_foreign_processes


@pytest.fixture
def alerts(dataset) -> list[GpuAlert]:
    gpu = dataset.nodes["ada-1"].gpus.get(index=0)
    for xid in (79, 79, 31):
        record_xid(gpu.node_id, gpu.uuid, xid, 1)
    record_foreign_processes(gpu.node.public_id, {gpu.uuid: "python (process 77) of <carol>"})
    return list(GpuAlert.objects.order_by("id"))


@pytest.mark.parametrize(
    ("kind", "status"), [("anonymous", 302), ("stranger", 403), ("member", 403), ("admin", 200)]
)
def test_only_administrators_see_and_acknowledge_alerts(alerts, client_of, kind, status) -> None:
    client, page = client_of(kind), reverse("alerts")
    answer = client.get(page)
    assert answer.status_code == status
    act = reverse("acknowledge-alert", args=[alerts[0].public_id])
    assert client.post(act, {"note": "Reseated it"}).status_code == (302 if kind == "admin" else status)
    alerts[0].refresh_from_db()
    assert (alerts[0].acknowledged_at is not None) is (kind == "admin")
    if kind == "admin":
        text = answer.content.decode()
        assert "XID 79" in text and "GPU has fallen off the bus; its tasks were stopped" in text
        assert "of &lt;carol&gt;" in text and '<span class="fw-nav__n">2</span>' in text
        assert text.index("XID 31") > text.index("Application-caused XIDs")
        after = client.get(page).content.decode()
        assert "Reseated it" in after and '<span class="fw-nav__n">1</span>' in after


def test_invalid_rows_are_shown_counted_and_acknowledged_until_they_are_valid(dataset, client_of) -> None:
    report = InvalidRowReport(
        "quota", "p,q", "quotas[p,q].weight", "The quota of <b> in main has an invalid value: nan."
    )
    report_invalid_rows([report])
    report_invalid_rows([report])
    (row,) = InvalidRow.objects.all()
    client, page = client_of("admin"), reverse("alerts")
    text = client.get(page).content.decode()
    assert "The quota of &lt;b&gt; in main" in text and '<span class="fw-nav__n">1</span>' in text
    act = reverse("acknowledge-invalid-row", args=[row.public_id])
    assert client_of("member").post(act, {"note": "x"}).status_code == 403
    assert client.post(act, {"note": "I correct it"}).status_code == 302
    report_invalid_rows([report])
    text = client.get(page).content.decode()
    assert "I correct it" in text and '<span class="fw-nav__n">1</span>' not in text
    assert AuditEntry.objects.get(action="invalid_row.acknowledge").reason == "I correct it"
    assert "already acknowledged" in client.post(act, follow=True).content.decode()
    report_invalid_rows([])
    assert "Invalid data" not in client.get(page).content.decode()
    report_invalid_rows([report])  # it is wrong again: a new alert
    assert InvalidRow.objects.filter(acknowledged_at__isnull=True, resolved_at__isnull=True).count() == 1


def test_a_gpu_that_two_nodes_report_is_an_alert_naming_both(dataset, client_of) -> None:
    owner, newcomer = (
        dataset.nodes["ada-1"],
        dataset.nodes["a100-2"],
    )
    gpu = owner.gpus.get(index=0)
    record_claimed_gpus(newcomer, [gpu])
    client = client_of("admin")
    text = client.get(reverse("alerts")).content.decode()
    assert "Reported by two nodes" in text and f"{newcomer.name} reports the same GPU" in text
    assert f"only {owner.name} uses it" in text
    text = client.get(reverse("node", args=[newcomer.public_id])).content.decode()
    assert "It reports the GPU" in text and gpu.uuid in text and "It is not used here." in text
    (row,) = client.get("/api/v1/alerts/").json()["items"]
    assert (row["kind"], row["severity"], row["node"]["name"]) == ("claimed", "claimed", owner.name)
    assert row["claiming_node"]["name"] == newcomer.name and row["xid"] is None
