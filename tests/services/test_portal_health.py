"""What the portal's own machine needs: measured, exported, and said to administrators."""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from redis.exceptions import ConnectionError as RedisAway

from portal.config import last_backup
from portal.config.last_backup import last_backup_s, record_backup
from portal.domain.cluster.portal_health import (
    CertificateStatus,
    DiskUsage,
    PortalAlertKind,
    PortalMeasurement,
    portal_alerts,
)
from portal.selectors.cluster import portal_alerts as views
from portal.services.cluster import portal_health
from portal.services.cluster.portal_health import FolderSize, measure_portal
from portal.valkey import portal_health as stored
from tests import factories

DAY_S = 86_400.0
NOW_S = 1_900_000_000.0
ROOMY = DiskUsage("data", "/d", 1000, 500, 1000, 500)
FINE = PortalMeasurement(NOW_S, (ROOMY,), 10, 1, NOW_S - 3600, 2 * DAY_S, NOW_S - 30 * DAY_S)


@pytest.mark.parametrize(
    ("changes", "kinds", "urgent"),
    [
        ({}, [], False),
        ({"disks": (replace(ROOMY, free_bytes=99),)}, ["disk_space"], False),
        ({"disks": (replace(ROOMY, free_bytes=29),)}, ["disk_space"], True),
        ({"disks": (replace(ROOMY, free_inodes=99),)}, ["disk_inodes"], False),
        ({"disks": (replace(ROOMY, total_inodes=0, free_inodes=0),)}, [], False),
        ({"backup_s": NOW_S - 3 * DAY_S}, ["backup_old"], False),
        ({"backup_s": None}, ["backup_missing"], False),
        ({"backup_s": None, "installed_s": NOW_S - DAY_S}, [], False),
        ({"backup_s": None, "backup_limit_s": 0.0}, [], False),
        ({"certificate": CertificateStatus("c", None)}, [], False),
        ({"certificate": CertificateStatus("c", NOW_S + 15 * DAY_S)}, [], False),
        ({"certificate": CertificateStatus("c", NOW_S + 13 * DAY_S)}, ["certificate_expires"], False),
        ({"certificate": CertificateStatus("c", NOW_S - DAY_S)}, ["certificate_expires"], True),
        ({"certificate": CertificateStatus("c", NOW_S + 90 * DAY_S, "x")}, ["certificate_refused"], False),
        ({"measured_s": NOW_S - 700}, ["not_measured"], False),
    ],
)
def test_conditions_that_need_an_administrator(changes, kinds, urgent):
    alerts = portal_alerts(replace(FINE, **changes), NOW_S)
    assert [alert.kind.value for alert in alerts] == kinds
    assert any(alert.urgent for alert in alerts) is urgent
    for alert in alerts:
        view = views.PortalAlertView(alert)
        assert view.title
        assert view.action
        assert "{" not in view.message


def test_a_log_folder_is_counted_in_bounded_steps_and_without_following_links(tmp_path):
    logs, outside = tmp_path / "logs", tmp_path / "outside"
    outside.mkdir()
    (outside / "large").write_bytes(b"x" * 1_000_000)
    for job in range(10):
        folder = logs / f"job{job}" / "1"
        folder.mkdir(parents=True)
        (folder / "0.log").write_bytes(b"x" * 4096)
    (logs / "link").symlink_to(outside)
    size = FolderSize(logs)
    size.count(7)
    assert size.complete is None
    for _ in range(20):
        size.count(7)
    assert size.complete is not None
    used, files = size.complete
    assert files == 10
    assert used <= 10 * 8192
    (logs / "job0" / "1" / "0.log").unlink()
    for _ in range(20):
        size.count(7)
    assert size.complete[1] == 9


@pytest.fixture
def administrator(client, transactional_db, settings, tmp_path):
    factories.cluster_settings()
    settings.DATA_DIR, settings.LOG_DIR = tmp_path, tmp_path / "logs"
    (tmp_path / "logs").mkdir()
    portal_health._certificate = None
    client.force_login(factories.user("root", admin=True))
    yield client
    stored.valkey_client(stored.VALKEY_TIMEOUT_S).delete(stored._KEY)


def test_a_measurement_reaches_metrics_rest_and_pages(administrator, settings):
    measure_portal()
    settings.BACKUP_ALERT_HOURS = 1
    record_backup(Path(settings.DATA_DIR), time.time() - 7200)
    measure_portal()
    text = administrator.get("/metrics").content.decode()
    assert 'fairway_disk_free_bytes{disk="data"}' in text
    assert "fairway_log_files 0.0" in text
    assert "fairway_last_backup_timestamp_seconds 0.0" not in text
    assert "fairway_backup_limit_seconds 3600.0" in text
    body = administrator.get("/api/v1/portal-health/").json()
    assert [alert["kind"] for alert in body["alerts"] if alert["kind"].startswith("backup")] == ["backup_old"]
    assert body["log_files"] == 0
    assert body["disks"][0]["total_bytes"] > 0
    for page in ("/", "/alerts/"):
        assert "The last backup is old." in administrator.get(page).content.decode()
    administrator.force_login(factories.user("someone"))
    assert "The last backup is old." not in administrator.get("/").content.decode()


def test_the_certificate_that_the_gateway_serves_comes_before_one_that_was_asked_for(administrator):
    measure_portal()
    stored.store_gateway_certificate(CertificateStatus("/cert.pem", NOW_S, "broken"))
    assert stored.last_measurement().certificate == CertificateStatus("/cert.pem", NOW_S, "broken")
    assert "fairway_certificate_refused 1.0" in administrator.get("/metrics").content.decode()
    stored.forget_gateway_certificate()
    assert stored.last_measurement().certificate is None


def test_pages_and_metrics_work_without_measurements(administrator, monkeypatch):
    assert administrator.get("/metrics").status_code == 200
    assert administrator.get("/api/v1/portal-health/").json()["measured_at"] is None
    monkeypatch.setattr(views, "_STARTED_S", time.monotonic())
    assert "not being watched" not in administrator.get("/alerts/").content.decode()
    monkeypatch.setattr(views, "_STARTED_S", time.monotonic() - 3600)
    assert "not being watched" in administrator.get("/alerts/").content.decode()

    def away(*_):
        raise RedisAway("x")

    with monkeypatch.context() as outage:
        outage.setattr(stored, "valkey_client", away)
        assert administrator.get("/alerts/").status_code == 200


def test_a_backup_made_by_other_means_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAIRWAY_DATA_DIR", str(tmp_path))
    assert last_backup_s(tmp_path) is None
    call_command("record_backup")
    assert abs(last_backup_s(tmp_path) - time.time()) < 60
    call_command("record_backup", at="2026-01-31T02:00:00Z")
    assert last_backup_s(tmp_path) == dt.datetime(2026, 1, 31, 2, tzinfo=dt.UTC).timestamp()
    for wrong in ("yesterday", "2999-01-01T00:00:00Z", "2026-13-01T00:00:00Z"):
        with pytest.raises(CommandError):
            call_command("record_backup", at=wrong)
    (tmp_path / "last_backup.json").write_text("{")
    assert last_backup_s(tmp_path) is None
    assert [name for name in os.listdir(tmp_path) if name != "last_backup.json"] == []


def test_measurements_of_another_version_are_ignored(administrator):
    stored.valkey_client(stored.VALKEY_TIMEOUT_S).hset(stored._KEY, "machine", json.dumps({"other": 1}))
    assert stored.last_measurement() is None
    assert PortalAlertKind.NOT_MEASURED in {alert.kind for alert in portal_alerts(None)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to the owner of the folder")
def test_root_gives_no_file_away_through_a_link_of_the_folders_owner(tmp_path, monkeypatch):
    """The owner of the data folder may replace the record between its writing and the change of its owner."""
    foreign = tmp_path / "foreign"
    foreign.write_text("")
    data = tmp_path / "data"
    data.mkdir()
    os.chown(data, 12345, 12345)
    record = data / last_backup.FILE_NAME
    monkeypatch.setattr(last_backup, "write_atomic", lambda path, content: record.symlink_to(foreign))
    record_backup(data, 1.0)
    assert foreign.stat().st_uid == 0
