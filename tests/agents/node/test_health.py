"""From the readings of a GPU to its health: the table, what is worst, and the driver's events as they come."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as drawn

from agents.local import open_local
from agents.node.gpus import LOST, OK, QUARANTINED
from agents.node.gpus import nvml as by_nvml
from agents.node.gpus.faults import FaultLog
from agents.node.gpus.health import APPLICATION_XIDS, XID_HEALTH, HealthReadings, evaluate_health
from agents.node.gpus.simulated import SimulatedGpus
from agents.node.tasks import monitor
from agents.node.tasks.disk_limit import DiskLimitEnforcer
from agents.xid_catalog import XID_MEANINGS, XidSeverity, xid_severity
from tests.agents.node.conftest import wait_for
from tests.fakes import nvml

needs_compiler = pytest.mark.skipif(nvml.missing_compiler() is not None, reason=str(nvml.missing_compiler()))
WORST_FIRST = (LOST, QUARANTINED, OK)


@pytest.mark.parametrize(
    ("readings", "health", "fatal", "says"),
    [
        (HealthReadings(), OK, False, None),
        (HealthReadings(responds=False), LOST, True, "no longer reports"),
        (HealthReadings(xids=(79,)), LOST, True, "XID 79: it fell off the bus."),
        (HealthReadings(xids=(48,)), QUARANTINED, True, "XID 48"),
        (HealthReadings(xids=(94,)), QUARANTINED, True, "XID 94"),
        (HealthReadings(xids=(95,)), QUARANTINED, True, "XID 95"),
        (HealthReadings(xids=(13, 31, 45)), OK, False, None),
        (HealthReadings(xids=(31, 48, 79)), LOST, True, "XID 79"),
        (HealthReadings(xids=(74,)), QUARANTINED, False, "NVLink"),
        (HealthReadings(xids=(999,)), OK, False, "XID 999"),
        (
            HealthReadings(xids=(0,)),
            QUARANTINED,
            True,
            "Its memory had an uncorrectable error.",
        ),
        (HealthReadings(rows_failed=True), QUARANTINED, False, "vendor"),
        (HealthReadings(rows_pending=True), OK, False, "next reset"),
        (HealthReadings(pages_pending=True), QUARANTINED, False, "next reset of the GPU"),
        (HealthReadings(ecc_uncorrected=2), OK, False, "since the driver was loaded"),
        (HealthReadings(throttle=0x40, throttled_s=31), OK, False, "throttled: it is too hot"),
        (HealthReadings(throttle=0x40, throttled_s=5), OK, False, None),
        (HealthReadings(throttle=0x4, throttled_s=600), OK, False, None),
        (HealthReadings(throttle=0x88, throttled_s=60), OK, False, "power supply"),
    ],
)
def test_readings_have_a_health_and_a_sentence(readings, health, fatal, says) -> None:
    found = evaluate_health(readings)
    assert (found.health, found.fatal) == (health, fatal)
    assert found.message is None if says is None else says in str(found.message)


@given(
    drawn.builds(
        HealthReadings,
        responds=drawn.booleans(),
        xids=drawn.lists(drawn.sampled_from([*XID_HEALTH, *APPLICATION_XIDS, 500]), max_size=4).map(tuple),
        ecc_uncorrected=drawn.none() | drawn.integers(0, 3),
        rows_pending=drawn.none() | drawn.booleans(),
        rows_failed=drawn.none() | drawn.booleans(),
        pages_pending=drawn.none() | drawn.booleans(),
        throttle=drawn.integers(0, 511),
        throttled_s=drawn.floats(0, 100),
    ),
    drawn.sampled_from(sorted(XID_HEALTH)),
)
def test_one_more_fault_never_improves_the_health(readings, xid) -> None:
    before, after = evaluate_health(readings), evaluate_health(readings._replace(xids=(*readings.xids, xid)))
    assert WORST_FIRST.index(after.health) <= WORST_FIRST.index(before.health)
    assert before.fatal <= after.fatal
    assert before.message if before.health != OK else not before.fatal


def test_a_fault_of_one_slice_does_not_affect_its_neighbours(monkeypatch) -> None:
    faults = FaultLog()
    faults.record("GPU", 94, instance=2)
    faults.record("GPU", 79)
    assert faults.recent("GPU", 1) == (79,)
    assert faults.recent("GPU", 2) == faults.recent("GPU", None) == (94, 79)
    later_s = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert faults.recent("GPU", None) == ()


def test_many_events_of_one_xid_are_counted_and_hide_no_other() -> None:
    faults = FaultLog()
    faults.record("GPU", 79)
    for _ in range(10_000):
        faults.record("GPU", 31)
    assert faults.recent("GPU", None) == (79, 31)
    assert faults.take_new() == {("GPU", 79, None): 1, ("GPU", 31, None): 10_000} and faults.take_new() == {}


def test_every_xid_with_a_rule_has_a_meaning_and_the_gravest_are_those_that_end_work() -> None:
    assert {*XID_HEALTH, *APPLICATION_XIDS} <= set(XID_MEANINGS)
    fatal = {xid for xid in XID_MEANINGS if xid_severity(xid) is XidSeverity.FATAL}
    assert fatal == {0, 46, 48, 62, 79, 94, 95, 109, 110, 119, 120, 140, 143, 158}
    assert {xid for xid in XID_MEANINGS if xid_severity(xid) is XidSeverity.QUARANTINE} == {64, 74, 136, 156}
    assert (xid_severity(31), xid_severity(92), xid_severity(9999)) == (
        XidSeverity.APPLICATION,
        XidSeverity.WARNING,
        XidSeverity.WARNING,
    )


@needs_compiler
def test_memory_errors_that_grow_are_a_fault_and_old_ones_a_warning(tmp_path: Path, monkeypatch) -> None:
    driver = nvml.FakeDriver(tmp_path, [nvml.h200(0, "ecc 3"), nvml.h200(1)])
    driver.take(monkeypatch)
    gpus = by_nvml.open_nvml()
    first, second = gpus.gpus()
    assert (first.health, first.fatal, first.ecc_uncorrected, second.health_message) == (OK, False, 3, None)
    assert "since the driver was loaded" in str(first.health_message)
    driver.write([nvml.h200(0, "ecc 4"), nvml.h200(1)])
    first, second = gpus.gpus()
    assert (first.health, first.fatal, second.health) == (QUARANTINED, True, OK)


@needs_compiler
def test_rows_pages_and_clocks_are_read(tmp_path: Path, monkeypatch) -> None:
    rows = [nvml.h200(0, "rows 0 1 1 0"), nvml.h200(1, "rows 0 1 0 1"), nvml.h200(2, "retired 1")]
    driver = nvml.FakeDriver(tmp_path, [*rows, nvml.h200(3, "throttle 0x20")])
    driver.take(monkeypatch)
    monkeypatch.setattr("agents.node.gpus.health.THROTTLE_WARNING_S", 0.0)
    reported = [(gpu.health, str(gpu.health_message).split()[-1]) for gpu in by_nvml.open_nvml().gpus()]
    assert reported == [(OK, "GPU."), (QUARANTINED, "vendor."), (QUARANTINED, "GPU."), (OK, "hot.")]


def test_quarantined_gpus_are_reported_again_and_changed_ones_at_once(tmp_path: Path, monkeypatch) -> None:
    def write(*health: str) -> None:
        rows = [{"uuid": f"GPU-{n}", "health": reported} for n, reported in enumerate(health)]
        (tmp_path / "new.json").write_text(json.dumps({"gpus": rows}))
        (tmp_path / "new.json").replace(tmp_path / "gpus.json")

    write(QUARANTINED, OK, LOST)
    reported: list[tuple[str, str]] = []
    monkeypatch.setattr(monitor, "_REPEAT_HEALTH_INTERVAL_S", 0.0)
    tasks: Any = SimpleNamespace(gpus=SimulatedGpus(str(tmp_path / "gpus.json")))
    look = monitor.TaskMonitor(
        tasks, lambda event: reported.append((event["uuid"], event["health"])), DiskLimitEnforcer(tasks, [])
    )
    look._check_gpus()
    assert reported == [("GPU-0", QUARANTINED)]
    monkeypatch.setattr(monitor, "_REPEAT_HEALTH_INTERVAL_S", 60.0)
    look._check_gpus()
    reported.clear()
    look._check_gpus()
    assert reported == []
    write(QUARANTINED, LOST, LOST)
    look._check_gpus()
    assert reported == [("GPU-1", LOST)]


@needs_compiler
def test_an_xid_is_reported_within_seconds_and_the_gpu_takes_no_work(tmp_path: Path, pyz: Path) -> None:
    driver = nvml.FakeDriver(tmp_path, [nvml.h200(0), nvml.h200(1, "event 1 8 79")])
    own = {"cluster": "t", "state_dir": str(tmp_path / "state"), "home_root": str(tmp_path / "homes")}
    (tmp_path / "node.json").write_text(json.dumps({**own, "gpu_provider": "nvml"}))
    with open_local(
        pyz, "control", tmp_path / "node.json", cluster="t", environment=driver.environment
    ) as link:
        assert [gpu.health for gpu in link.hello.gpus] == [OK, OK]  # earlier faults do not count
        time.sleep(0.3)
        driver.write([nvml.h200(0, "event 2 8 31", "event 3 8 95"), nvml.h200(1)])
        reported = {wait_for(link, "gpu_xid", timeout_s=10, uuid="GPU-h200-0")["xid"] for _ in range(2)}
        assert reported == {31, 95}  # earlier faults do not count
        event = wait_for(link, "gpu_health", timeout_s=10)
        assert (event["uuid"], event["health"], event["fatal"]) == ("GPU-h200-0", QUARANTINED, True)
        assert event["message"] == "The driver reported XID 95: its memory had an uncontained error."
        gpus = link.request("hello", timeout_s=5)["hello"]["gpus"]
        assert [gpu["health"] for gpu in gpus] == [QUARANTINED, OK]
        driver.write([nvml.h200(0), nvml.h200(1, "lost")])
        event = wait_for(link, "gpu_health", timeout_s=10, uuid="GPU-h200-1")
        assert (event["health"], event["fatal"], event["message"]) == (
            LOST,
            True,
            "The GPU fell off the bus.",
        )
