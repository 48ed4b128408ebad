"""One report of a period: GPU-hours held, useful, lost and idle, their energy and cost, and how long jobs waited."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from django.utils.translation import gettext as _

from portal.access import Requester
from portal.domain.scheduling.policy_settings import GPU_HOUR_PRICE, GRID_CO2, PRICE_CURRENCY, default_value
from portal.models import NodePool
from portal.selectors.reports.held_time import TimeRange, UsageGrouping, count_distinct, day_of_number
from portal.selectors.reports.report_figures import LOST_COLUMNS, Figures, read_figures
from portal.selectors.reports.usage import as_hours, group_labels
from portal.selectors.reports.waits import SIZE_NAMES, WaitRow, wait_statistics
from portal.selectors.scheduling.settings import cluster_settings, pool_settings

_J_PER_KWH = 3_600_000.0


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
        return _percent(self.idle_gpu_hours, self.measured_gpu_hours)

    @property
    def lost_percent(self) -> float | None:
        ended = self.useful_gpu_hours + self.startup_gpu_hours + self.lost_gpu_hours
        return _percent(self.lost_gpu_hours, ended)


MIN_SHARED_GPU_HOURS = 1.0
"""A part of less GPU time is not given in percent: a quarter of three minutes says nothing."""


def _percent(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole >= MIN_SHARED_GPU_HOURS else None


_SUMS = (
    *("jobs", "gpu_hours", "cost", "useful_gpu_hours", "startup_gpu_hours", "lost_gpu_hours"),
    *("measured_gpu_hours", "busy_gpu_hours", "idle_gpu_hours", "idle_cost", "energy_joules", "co2_kg"),
    "started_jobs",
)


@dataclass(frozen=True)
class DayHours:
    """The held and the idle GPU-hours of a day (UTC)."""

    name: str
    gpu_hours: float
    idle_gpu_hours: float


@dataclass(frozen=True)
class Report:
    """``currency`` is blank without prices."""

    rows: list[ReportRow]
    total: ReportRow
    waits: list[WaitRow]
    """By size of the request."""
    days: list[DayHours]
    """Of every day that the period touches, in order."""
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
    figures, days = read_figures(requester, start, end, by), TimeRange(start, end).days
    groups = {group for group, _pool in figures.sums} | set(figures.jobs) | set(figures.waits)
    if by is UsageGrouping.DAY:
        groups.update(days)
    labels = group_labels(requester, by, groups)
    rows = {group: ReportRow(*label) for group, label in labels.items()}
    _add_sums(rows, figures, prices)
    for group, row in rows.items():
        row.jobs = count_distinct(figures.jobs.get(group, ()))
        row.co2_kg = row.energy_kwh * co2_g_per_kwh / 1000
        if waits := wait_statistics(figures.waits.get(group, ())):
            row.started_jobs, row.wait_p50_s, row.wait_p90_s = waits.jobs, waits.p50_s, waits.p90_s
    found = sorted(
        rows.values(), key=lambda row: row.key if by is UsageGrouping.DAY else (-row.gpu_hours, row.key)
    )
    total = ReportRow(
        "", _("All"), **{column: sum(getattr(row, column) for row in found) for column in _SUMS}
    )
    by_size = sorted(figures.waits_by_size.items())
    if waits := wait_statistics(chain.from_iterable(packed for _size, packed in by_size)):
        total.wait_p50_s, total.wait_p90_s = waits.p50_s, waits.p90_s
    return Report(
        found,
        total,
        [
            WaitRow(waits.jobs, waits.p50_s, waits.p90_s, _(SIZE_NAMES[size]))
            for size, packed in by_size
            if (waits := wait_statistics(packed))
        ],
        [_day_hours(figures, day) for day in days],
        str(cluster.get(PRICE_CURRENCY, default_value(PRICE_CURRENCY))) if any(prices.values()) else "",
        bool(co2_g_per_kwh),
    )


def _add_sums(rows: Mapping[int, ReportRow], figures: Figures, prices: Mapping[int, float]) -> None:
    """Add the sums of each pool to the rows of their groups, as hours and costs."""
    totals: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (group, pool), sums in figures.sums.items():
        total, price = totals[group], prices.get(pool, 0.0)
        for column, value in sums.items():
            total[column] += value
        total["cost"] += sums["held_gpu_s"] * price
        total["idle_cost"] += sums["idle_gpu_s"] * price
    for group, total in totals.items():
        row = rows.get(group)
        if row is None:
            continue
        row.gpu_hours, row.cost = as_hours(total["held_gpu_s"]), as_hours(total["cost"])
        row.startup_gpu_hours = as_hours(total["startup_gpu_s"])
        row.useful_gpu_hours = as_hours(total["useful_gpu_s"])
        row.lost_gpu_hours = as_hours(total["lost_gpu_s"])
        row.lost_by_cause = {
            cause: as_hours(total[column]) for cause, column in LOST_COLUMNS.items() if total[column]
        }
        row.measured_gpu_hours = total["measured_gpu_s"] / 3600
        row.busy_gpu_hours = total["busy_gpu_s"] / 3600
        row.idle_gpu_hours, row.idle_cost = total["idle_gpu_s"] / 3600, total["idle_cost"] / 3600
        row.energy_joules = total["joules"]


def _day_hours(figures: Figures, day: int) -> DayHours:
    held_s, idle_s = figures.days.get(day, (0.0, 0.0))
    return DayHours(str(day_of_number(day)), as_hours(held_s), idle_s / 3600)
