"""Reads how long jobs waited, by group and by size of the request, in one pass over the jobs that started."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from django.db.models import Aggregate, BinaryField, Case, F, IntegerField, Q, QuerySet, Value, When
from django.db.models.functions import TruncDate
from django.utils.translation import gettext_noop
from numpy.typing import NDArray

from portal.models import Job
from portal.models.jobs.jobs import total_gpus
from portal.selectors.reports.held_time import TimeRange, UsageGrouping, number_of_day, within

SIZES = (
    (0, gettext_noop("no GPU")),
    (1, gettext_noop("1 GPU")),
    (4, gettext_noop("2 to 4 GPUs")),
    (8, gettext_noop("5 to 8 GPUs")),
    (16, gettext_noop("9 to 16 GPUs")),
)
"""Upper bound and name of each class of requests; larger ones are in the class ``LARGEST_SIZE``."""
LARGEST_SIZE = gettext_noop("more than 16 GPUs")
SIZE_NAMES = (*(name for _bound, name in SIZES), LARGEST_SIZE)
_SIZE = Case(
    *(When(requested__lte=bound, then=Value(index)) for index, (bound, _name) in enumerate(SIZES)),
    default=Value(len(SIZES)),
    output_field=IntegerField(),
)
_KEY_COLUMNS = {
    UsageGrouping.PROJECT: "project_id",
    UsageGrouping.USER: "owner_id",
    UsageGrouping.POOL: "attempts__pool_id",
    UsageGrouping.DAY: "day",
}
_SECONDS = np.dtype(">f8")
NO_GROUP = 0
"""Group of jobs that started without an attempt, by pool."""


class PackedSeconds(Aggregate):
    """The durations of a group in seconds: doubles of 8 bytes each, in network order, not sorted.

    Percentiles of several groupings need one scan this way. ``PERCENTILE_CONT`` scans and sorts for each of them.
    """

    function = "STRING_AGG"
    template = "%(function)s(FLOAT8SEND(DATE_PART('epoch', %(expressions)s)), '')"
    output_field = BinaryField()


class PackedWaits(NamedTuple):
    """From submission to the first start of the jobs of a group and a class of sizes, as ``PackedSeconds``."""

    group: int
    size: int
    seconds: bytes


def read_waits(rows: QuerySet[Job], ranges: Sequence[TimeRange], by: UsageGrouping) -> Iterator[PackedWaits]:
    """Return how long the jobs of these rows waited that started in parts of a period, in one query."""
    if not ranges:
        return
    started = rows.filter(within(ranges, "started_at")).order_by()
    if by is UsageGrouping.POOL:
        started = started.filter(Q(attempts__number=1) | Q(attempts__isnull=True))
    elif by is UsageGrouping.DAY:
        started = started.annotate(day=TruncDate("started_at", tzinfo=dt.UTC))
    found = (
        started.annotate(requested=total_gpus())
        .annotate(size=_SIZE)
        .values_list(_KEY_COLUMNS[by], "size")
        .annotate(waits=PackedSeconds(F("started_at") - F("submitted_at")))
    )
    for group, size, packed in found:
        key = number_of_day(group) if by is UsageGrouping.DAY else group or NO_GROUP
        yield PackedWaits(key, size, bytes(packed))


@dataclass(frozen=True)
class WaitStatistics:
    """From submission to the first start. Percentiles are interpolated as by ``PERCENTILE_CONT``."""

    jobs: int
    p50_s: float
    p90_s: float


@dataclass(frozen=True)
class WaitRow(WaitStatistics):
    """Those of one class of sizes."""

    name: str


def wait_statistics(packed: Iterable[bytes]) -> WaitStatistics | None:
    """Return number, median and 90th percentile of all values; None if there is none."""
    waits = np.frombuffer(b"".join(packed), _SECONDS).astype(np.float64)
    if not waits.size:
        return None
    places = [fraction * (waits.size - 1) for fraction in (0.5, 0.9)]
    last = waits.size - 1
    waits.partition(sorted({each for place in places for each in (int(place), min(int(place) + 1, last))}))
    return WaitStatistics(waits.size, *(_interpolate(waits, place) for place in places))


def _interpolate(waits: NDArray[np.float64], place: float) -> float:
    """Return the value at a place between two, which are where they are in the order of all."""
    below = int(place)
    above = min(below + 1, waits.size - 1)
    return float(waits[below] + (waits[above] - waits[below]) * (place - below))
