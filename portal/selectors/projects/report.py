"""One report of a period: GPU-hours held, useful, lost and idle, their energy and cost, and how long jobs waited."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field

from django.db.models import Sum
from django.utils.translation import gettext as _

from portal.access import Requester, nameable_projects, visible_gpu_days
from portal.domain.policy_settings import GPU_HOUR_PRICE, GRID_CO2, PRICE_CURRENCY, default_value
from portal.models import NodePool
from portal.selectors.projects.usage import UsageGrouping, WorkRow, gpu_hours_by, gpu_hours_of_days, work_by
from portal.selectors.projects.waits import WaitRow, read_waits
from portal.selectors.scheduling.settings import cluster_settings, pool_settings
from portal.visibility import HIDDEN_PROJECT_NAME

IDLE_JOBS = 10
_J_PER_KWH = 3_600_000.0
_MEASURED = ("measured_gpu_s", "busy_gpu_s", "idle_gpu_s", "joules")
_GPU_DAY_COLUMNS = {
    UsageGrouping.PROJECT: ("attempt__job__project__public_id", "attempt__job__project__name"),
    UsageGrouping.USER: ("attempt__job__owner__public_id", "attempt__job__owner__username"),
    UsageGrouping.POOL: ("attempt__pool__public_id", "attempt__pool__name"),
    UsageGrouping.DAY: ("day", "day"),
}


@dataclass
class ReportRow:
    """The figures of one group. ``measured_gpu_hours`` is the part of the held time with samples.

    Useful, start-up and lost hours are those of attempts that ended in the period, so they need not add up to
    the hours held in it.
    """

    key: str
    name: str
    jobs: int = 0
    gpu_hours: float = 0.0
    cost: float = 0.0
    useful_gpu_hours: float = 0.0
    startup_gpu_hours: float = 0.0
    lost_gpu_hours: float = 0.0
    lost_by_cause: Mapping[str, float] = field(default_factory=dict)
    measured_gpu_hours: float = 0.0
    busy_gpu_hours: float = 0.0
    idle_gpu_hours: float = 0.0
    idle_cost: float = 0.0
    energy_joules: float = 0.0
    co2_kg: float = 0.0
    started_jobs: int = 0
    wait_p50_s: float | None = None
    wait_p90_s: float | None = None

    @property
    def energy_kwh(self) -> float:
        return self.energy_joules / _J_PER_KWH

    @property
    def utilisation_percent(self) -> float | None:
        """Mean utilisation of the held GPUs while it was measured."""
        return 100 * self.busy_gpu_hours / self.measured_gpu_hours if self.measured_gpu_hours else None

    @property
    def idle_percent(self) -> float | None:
        return 100 * self.idle_gpu_hours / self.measured_gpu_hours if self.measured_gpu_hours else None

    @property
    def lost_percent(self) -> float | None:
        ended = self.useful_gpu_hours + self.startup_gpu_hours + self.lost_gpu_hours
        return 100 * self.lost_gpu_hours / ended if ended else None


_SUMS = (
    *("jobs", "gpu_hours", "cost", "useful_gpu_hours", "startup_gpu_hours", "lost_gpu_hours"),
    *("measured_gpu_hours", "busy_gpu_hours", "idle_gpu_hours", "idle_cost", "energy_joules", "co2_kg"),
    "started_jobs",
)


@dataclass(frozen=True)
class IdleJob:
    """A job whose GPUs were idle while it held them."""

    job: str
    name: str
    owner: str
    idle_gpu_hours: float
    utilisation_percent: float


@dataclass(frozen=True)
class Report:
    """``currency`` is blank without prices."""

    rows: list[ReportRow]
    total: ReportRow
    waits: list[WaitRow]
    """By size of the request."""
    currency: str
    has_co2: bool


def read_report(requester: Requester, start: dt.datetime, end: dt.datetime, by: UsageGrouping) -> Report:
    """Return the visible figures of a period, largest use first; days (UTC) ascending.

    Measurements are kept by day: those of the first and the last day count whole.
    """
    cluster = cluster_settings()
    pools = {pool.pk: pool_settings(pool, cluster) for pool in NodePool.objects.all()}
    prices = {pk: float(settings[GPU_HOUR_PRICE]) for pk, settings in pools.items()}
    co2_g_per_kwh = float(cluster.get(GRID_CO2, default_value(GRID_CO2)))
    rows: dict[str, ReportRow] = {}

    def row_of(key: object, name: object) -> ReportRow:
        return rows.setdefault(str(key), ReportRow(str(key), str(name)))

    for used in gpu_hours_by(requester, start, end, by, prices=prices):
        row = row_of(used.key, used.name)
        row.jobs, row.gpu_hours, row.cost = used.jobs, used.gpu_hours, used.cost
    for work in work_by(requester, start, end, by):
        _add_work(row_of(work.key, work.name), work)
    key, name = _GPU_DAY_COLUMNS[by]
    days = visible_gpu_days(requester).filter(day__gte=start.date(), day__lte=end.date())
    sums = {column: Sum(column) for column in _MEASURED}
    for each in days.order_by().values(*{key, name}, "attempt__pool").annotate(**sums):
        row = row_of(each[key], each[name])
        idle = each["idle_gpu_s"] / 3600
        row.measured_gpu_hours += each["measured_gpu_s"] / 3600
        row.busy_gpu_hours += each["busy_gpu_s"] / 3600
        row.idle_gpu_hours += idle
        row.idle_cost += idle * prices.get(each["attempt__pool"], 0.0)
        row.energy_joules += each["joules"] or 0.0
    waits = read_waits(requester, start, end, by)
    for (key, name), waited in waits.groups.items():
        row = row_of(key, name)
        row.started_jobs, row.wait_p50_s, row.wait_p90_s = waited.jobs, waited.p50_s, waited.p90_s
    for row in rows.values():
        row.co2_kg = row.energy_kwh * co2_g_per_kwh / 1000
    _hide_names(requester, rows, by)
    found = sorted(
        rows.values(), key=lambda row: row.key if by is UsageGrouping.DAY else (-row.gpu_hours, row.key)
    )
    total = ReportRow(
        "", _("All"), **{column: sum(getattr(row, column) for row in found) for column in _SUMS}
    )
    if waits.total:
        total.wait_p50_s, total.wait_p90_s = waits.total.p50_s, waits.total.p90_s
    currency = str(cluster.get(PRICE_CURRENCY, default_value(PRICE_CURRENCY))) if any(prices.values()) else ""
    return Report(found, total, waits.sizes, currency, bool(co2_g_per_kwh))


def hours_by_day(requester: Requester, start: dt.datetime, end: dt.datetime) -> list[ReportRow]:
    """Return only the held and the idle GPU-hours of each day (UTC), in order."""
    held = gpu_hours_of_days(requester, start, end)
    rows = {day: ReportRow(day, day, gpu_hours=hours) for day, hours in held.items()}
    days = visible_gpu_days(requester).filter(day__gte=start.date(), day__lte=end.date())
    for day, idle_s in days.order_by().values_list("day").annotate(Sum("idle_gpu_s")):
        if row := rows.get(str(day)):
            row.idle_gpu_hours = idle_s / 3600
    return list(rows.values())


def most_idle_jobs(requester: Requester, start: dt.datetime, end: dt.datetime) -> list[IdleJob]:
    """Return the jobs whose GPUs were idle longest in the period, longest first."""
    days = visible_gpu_days(requester).filter(day__gte=start.date(), day__lte=end.date(), idle_gpu_s__gt=0)
    columns = ("attempt__job__public_id", "attempt__job__name", "attempt__job__owner__username")
    sums = {column: Sum(column) for column in _MEASURED}
    rows = days.order_by().values(*columns).annotate(**sums).order_by("-idle_gpu_s", columns[0])[:IDLE_JOBS]
    return [
        IdleJob(
            row[columns[0]],
            row[columns[1]],
            row[columns[2]],
            row["idle_gpu_s"] / 3600,
            100 * row["busy_gpu_s"] / row["measured_gpu_s"],
        )
        for row in rows
    ]


def _add_work(row: ReportRow, work: WorkRow) -> None:
    row.useful_gpu_hours, row.startup_gpu_hours = work.useful_gpu_hours, work.startup_gpu_hours
    row.lost_gpu_hours, row.lost_by_cause = work.lost_gpu_hours, work.lost_by_cause


def _hide_names(requester: Requester, rows: Mapping[str, ReportRow], by: UsageGrouping) -> None:
    """Replace the names of projects that a user has left."""
    if by is UsageGrouping.PROJECT:
        seen = set(nameable_projects(requester).values_list("public_id", flat=True))
        for row in rows.values():
            if row.key not in seen:
                row.name = HIDDEN_PROJECT_NAME
