"""An invalid row never stops a cycle: an unrelated job starts on another node, and an alert names the row."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.apps import apps
from django.db import connection, models, transaction
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.models import (
    Allocation,
    Attempt,
    FailedCycle,
    Gpu,
    InvalidRow,
    Job,
    JobVerdict,
    Quota,
    Topology,
    UsageInterval,
)
from portal.services.jobs.submission import preview_query_body, request_from_job
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from portal.services.scheduling.reservations import ReservationInput, do_save_reservation
from scheduler import what_if
from scheduler.cycle import CycleState, run_cycle
from scheduler.forecast.forecast_pass import run_forecast_pass
from tests import factories
from tests.table_owner import execute_as_owner

pytestmark = pytest.mark.django_db(transaction=True)

TABLES = (
    "NodePool", "Node", "Gpu", "Project", "Quota", "Job", "Attempt", "Task", "Allocation", "UsageInterval",
    "Reservation", "Environment", "Topology", "Membership",
)  # fmt: skip


@pytest.fixture
def no_checks() -> Iterator[None]:
    """The tables without their CHECK constraints, as long as the test runs."""
    tables = [apps.get_model("portal", name)._meta.db_table for name in TABLES]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE contype = 'c' AND conrelid::regclass::text = ANY(%s)",
            [tables],
        )
        checks = cursor.fetchall()
        for table, name, _ in checks:
            execute_as_owner(f'ALTER TABLE {table} DROP CONSTRAINT "{name}"')
        yield
        execute_as_owner(f"TRUNCATE {', '.join(tables)} CASCADE")
        for table, name, definition in checks:
            execute_as_owner(f'ALTER TABLE {table} ADD CONSTRAINT "{name}" {definition}')


class FixtureData:
    """A pool with everything in it that can be corrupted, and another one with a single free node."""

    def __init__(self) -> None:
        factories.cluster_settings()
        self.owner, self.pool, self.environment = (
            factories.user("ada"),
            factories.pool("main"),
            factories.environment("lab"),
        )
        self.node = factories.node(self.pool, name="n1")
        self.second = factories.node(self.pool, name="n2", gpus=1)
        self.second.gpus.update(model="Other")
        self.top = factories.project("top", member=self.owner)
        self.project = factories.project("vision", parent=self.top)
        self.quota = Quota.objects.create(project=self.project, pool=self.pool, guaranteed_milli=2000)
        self.topology = Topology.objects.create(name="fabric", levels=["rack"])
        self.running = self.submit(
            gpu_model="Test 80",
            topology_constraint={"topology": "fabric", "required": None, "preferred": "rack"},
        )
        with transaction.atomic():
            row = Job.objects.select_for_update().get(pk=self.running.pk)
            gpu = self.node.gpus.get(index=0)
            job_control.start_attempt(row, self.pool, [RankPlacement(self.node, [(gpu.pk, 1000)])], epoch=1)
        self.attempt = Attempt.objects.get()
        self.task = self.attempt.task_rows.get()
        self.allocation = Allocation.objects.get()
        self.gpu = Gpu.objects.get(pk=self.allocation.gpu_id)
        self.ledger = UsageInterval.objects.get()
        self.pending = self.submit(name="related", gpus_per_task=4)
        self.near = self.submit(
            name="near",
            gpus_per_task=4,
            topology_constraint={"topology": "fabric", "required": "rack", "preferred": None},
        )
        admin, later = factories.user(admin=True), timezone.now() + dt.timedelta(days=90)
        self.reservation = do_save_reservation(
            admin,
            ReservationInput(
                "course", self.pool, [self.node], [self.project], later, later + dt.timedelta(days=1)
            ),
        )
        self.other_owner, self.other_pool = factories.user("bob"), factories.pool("other")
        self.free = factories.node(self.other_pool, name="free", gpus=8)
        self.other_project = factories.project("nlp", member=self.other_owner)
        self.other_environment = factories.environment("other")
        self.remembered = CycleState()

    def submit(self, **fields: Any) -> Job:
        return factories.job(self.owner, self.project, self.environment, **{"pool": self.pool} | fields)

    def unrelated(self) -> Job:
        """A new job that can start on the free node."""
        return factories.job(
            self.other_owner,
            self.other_project,
            self.other_environment,
            pool=self.other_pool,
            gpus_per_task=0,
        )

    def cycle(self) -> None:
        outcome = run_cycle("test", "me", self.remembered)
        assert outcome is not None


@contextmanager
def corrupted(row: models.Model, **columns: Any) -> Iterator[None]:
    """The row with values that the database would refuse, until the end."""
    table = row._meta.db_table
    names = [row._meta.get_field(name).column for name in columns]
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {', '.join(f'{name}::text' for name in names)} FROM {table} WHERE id = %s", [row.pk]
        )
        before = cursor.fetchone()
    _write(row, dict(zip(names, columns.values(), strict=True)))
    try:
        yield
    finally:
        _write(row, dict(zip(names, before, strict=True)))


def _write(row: models.Model, columns: dict[str, Any]) -> None:
    types = {field.column: field.db_type(connection) for field in row._meta.concrete_fields}
    types = {name: (kind or "").replace("serial", "int").split(" CHECK")[0] for name, kind in types.items()}
    chosen = ", ".join(f"{name} = %s::text::{types[name]}" for name in columns)
    execute_as_owner(
        f"SET LOCAL session_replication_role = replica; UPDATE {row._meta.db_table} SET {chosen} WHERE id = %s",
        *columns.values(),
        row.pk,
    )


CASES = [
    ("node", "node", {"cpu_milli": "-1"}),
    ("node", "node", {"labels": "[1]"}),
    ("node", "node", {"labels": '{"rack": {"a": 1}}'}),
    ("node", "node", {"agent_info": '{"driver": 5}'}),
    ("gpu", "node", {"used_milli": "1700"}),
    ("gpu", "node", {"used_milli": "-5"}),
    ("gpu", "node", {"used_milli": "0"}),
    ("gpu", "node", {"memory_mib": "-1"}),
    ("gpu", "node", {"compute_capability": "NaN"}),
    ("pool", "pool", {"policy": "[]"}),
    ("pool", "pool", {"policy": '{"usage_half_life_s": "x"}'}),
    ("pool", "pool", {"policy": '{"usage_half_life_s": 1}'}),
    ("top", "project", {"parent": "{project}"}),
    ("project", "project", {"parent": "{project}"}),
    ("project", "project", {"created_at": "infinity"}),
    ("quota", "quota", {"guaranteed_milli": "-1"}),
    ("quota", "quota", {"limit_milli": "-1"}),
    ("quota", "quota", {"weight": "NaN"}),
    ("running", "running", {"topology_constraint": "[1]"}),
    ("running", "running", {"volumes": "[7]"}),
    ("running", "running", {"memory_mib": "-1"}),
    ("attempt", "running", {"created_at": "infinity"}),
    ("attempt", "running", {"checkpoint_at": "-infinity"}),
    ("allocation", "running", {"milli": "0"}),
    ("allocation", "running", {"gpu": "{other_gpu}"}),
    ("task", "running", {"node": "{other_node}"}),
    ("ledger", "usage", {"milli": "-5000"}),
    ("reservation", "reservation", {"period": "[2020-01-01, infinity)"}),
    ("pending", "pending", {"tasks": "0"}),
    ("pending", "pending", {"tasks": "2147483647"}),
    ("pending", "pending", {"gpus_per_task": "2147483647"}),
    ("pending", "pending", {"milli_per_gpu": "4000"}),
    ("pending", "pending", {"tasks": "3", "min_tasks": "0"}),
    ("pending", "pending", {"topology_constraint": '"rack"'}),
    ("pending", "pending", {"topology_constraint": '{"topology": []}'}),
    ("pending", "pending", {"volumes": '{"a": 1}'}),
    ("pending", "pending", {"volumes": "[[]]"}),
    ("pending", "pending", {"submitted_at": "infinity"}),
    ("pending", "pending", {"start_after": "infinity"}),
    ("pending", "pending", {"preferred_nodes": "[[]]"}),
    ("pending", "pending", {"min_compute_capability": "NaN"}),
    ("environment", "environment", {"min_driver": "new"}),
    ("topology", "topology", {"levels": '["rack", "rack"]'}),
    ("topology", "topology", {"levels": "5"}),
]


def values_of(fixture_data: FixtureData, columns: dict[str, str]) -> dict[str, str]:
    """The values with the rows that they name as numbers."""
    named = {
        "{project}": fixture_data.project.pk,
        "{other_node}": fixture_data.second.pk,
        "{other_gpu}": fixture_data.second.gpus.order_by("index")[0].pk,
    }
    return {name: str(named.get(value, value)) for name, value in columns.items()}


def test_unrelated_job_starts_and_an_alert_names_the_row(no_checks: None) -> None:
    fixture_data = FixtureData()
    fixture_data.cycle()
    for name, kind, columns in CASES:
        case = f"{name} {columns}"
        row = getattr(fixture_data, name)
        job = fixture_data.unrelated()
        with corrupted(row, **values_of(fixture_data, columns)):
            if name == "allocation":  # read with its task, and not again until that is written
                fixture_data.remembered.reset()
            fixture_data.cycle()
            assert Job.objects.get(pk=job.pk).state == "RUNNING", case
            assert not FailedCycle.objects.exists(), (case, FailedCycle.objects.latest("id").message)
            alerts = InvalidRow.objects.filter(resolved_at__isnull=True)
            named = {(alert.kind, alert.row) for alert in alerts}
            expected = {"gpu": fixture_data.node, "top": fixture_data.top}.get(name, row)
            wanted = {
                "quota": f"{fixture_data.project.public_id},{fixture_data.pool.public_id}",
                "usage": ",".join(
                    (
                        fixture_data.project.public_id,
                        fixture_data.pool.public_id,
                        fixture_data.owner.public_id,
                    )
                ),
                "running": fixture_data.running.public_id,
                "topology": "fabric",
            }.get(kind) or expected.public_id
            assert (kind, wanted) in named, (case, named)
            assert all(alert.message for alert in alerts)
            waiting = set(Job.objects.filter(state="PENDING").values_list("pk", flat=True))
            assert waiting == set(JobVerdict.objects.values_list("job_id", flat=True)), case
            assert Job.objects.get(pk=fixture_data.running.pk).state == "RUNNING"
            stops = Attempt.objects.filter(job=fixture_data.running, stop_requested_at__isnull=False)
            assert not stops, (case, stops[0].message, named)
            times = alerts.count(), InvalidRow.objects.count()
            fixture_data.cycle()
            assert (alerts.count(), InvalidRow.objects.count()) == times, (
                case
            )  # once for each row, not each cycle
        if name == "allocation":
            fixture_data.remembered.reset()
        fixture_data.cycle()
        assert not InvalidRow.objects.filter(resolved_at__isnull=True).exists(), case
        job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="bob")
        for attempt in Attempt.objects.filter(job=job, ended_at__isnull=True):
            job_control.record_task_ended(attempt.task_rows.get().pk, exit_code=0, reason=EndReason.COMPLETED)


VALUES = {
    "JSONField": ["[]", "{}", '"x"', "5", "[1]", '{"a": 1}', "[[]]", '{"a": {}}'],
    "DateTimeField": ["infinity", "-infinity", "0001-01-01"],
    "FloatField": ["NaN", "Infinity", "-1"],
    "CharField": ["", "x", "a/own"],
    "DateTimeRangeField": ["empty", "(,)", "[2020-01-01,infinity)"],
}
NUMBERS = ["-1", "0", "2147483647", "-2147483648"]
ROWS = (
    "node", "gpu", "pool", "top", "project", "quota", "running", "attempt", "task", "allocation", "ledger",
    "pending", "environment", "topology", "reservation",
)  # fmt: skip
KEYS = {"id", "public_id", "state"}
"""Which row it is, and whether it takes part at all, is no value that can be wrong."""


def every_corruption(fixture_data: FixtureData) -> list[tuple[str, dict[str, str]]]:
    """Each column of each row with each value that its type allows and its constraints may not."""
    found = []
    for name in ROWS:
        for field in getattr(fixture_data, name)._meta.concrete_fields:
            kind = field.get_internal_type()
            values = VALUES.get(kind, NUMBERS if kind.endswith("IntegerField") else [])
            if kind.startswith("PositiveSmall"):
                values = NUMBERS[:2]
            if field.name not in KEYS and not field.is_relation:
                found += [(name, {field.name: value}) for value in values]
    return found


@pytest.mark.timeout(900)
def test_no_value_of_any_column_stops_the_others(no_checks: None, request: pytest.FixtureRequest) -> None:
    fixture_data = FixtureData()
    cases = every_corruption(fixture_data)
    if not request.config.getoption("--long"):
        cases = random.Random(15).sample(cases, 30)
    for name, columns in cases:
        case = f"{name} {columns}"
        job = fixture_data.unrelated()
        with corrupted(getattr(fixture_data, name), **columns):
            fixture_data.remembered.reset()
            fixture_data.cycle()
            assert not FailedCycle.objects.exists(), (case, FailedCycle.objects.latest("id").message)
            assert Job.objects.get(pk=job.pk).state == "RUNNING", case
        job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="bob")


def test_forecasts_and_previews_continue_beside_an_invalid_row(no_checks: None) -> None:
    fixture_data = FixtureData()
    job = fixture_data.unrelated()
    with corrupted(fixture_data.quota, weight="NaN"), corrupted(fixture_data.node, labels="[1]"):
        assert run_forecast_pass() >= 0
        what_if._cached_inputs = None
        body = preview_query_body(fixture_data.other_owner, request_from_job(job))
        for _ in range(2):
            found = what_if._answer("would_start", body)
            assert found.get("starts_now") is True, found
    what_if._cached_inputs = None
