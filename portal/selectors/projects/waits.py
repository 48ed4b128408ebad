"""Reads how long jobs waited, by group and by size of the request, in one pass over the jobs that started."""

from __future__ import annotations

import datetime as dt
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from django.db.models import Aggregate, BinaryField, Case, F, IntegerField, Q, Value, When
from django.db.models.functions import TruncDate
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.access import Requester, visible_waits
from portal.models import NodePool, Project, User
from portal.models.jobs import total_gpus
from portal.selectors.projects.usage import UsageGrouping

SIZES = (
    (0, gettext_noop("no GPU")),
    (1, gettext_noop("1 GPU")),
    (4, gettext_noop("2 to 4 GPUs")),
    (8, gettext_noop("5 to 8 GPUs")),
    (16, gettext_noop("9 to 16 GPUs")),
)
"""Upper bound and name of each class of requests; larger ones are in the class ``LARGEST_SIZE``."""
LARGEST_SIZE = gettext_noop("more than 16 GPUs")
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


class PackedSeconds(Aggregate):
    """The durations of a group in seconds: doubles of 8 bytes each, in network order, not sorted.

    Percentiles of several groupings need one scan this way. ``PERCENTILE_CONT`` scans and sorts for each of them.
    """

    function = "STRING_AGG"
    template = "%(function)s(FLOAT8SEND(DATE_PART('epoch', %(expressions)s)), '')"
    output_field = BinaryField()


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


@dataclass(frozen=True)
class Waits:
    """``groups`` are by key and name; ``total`` is None if no job started. Sizes without jobs are left out."""

    groups: Mapping[tuple[str, str], WaitStatistics]
    sizes: list[WaitRow]
    total: WaitStatistics | None


def read_waits(requester: Requester, start: dt.datetime, end: dt.datetime, by: UsageGrouping) -> Waits:
    """Return how long the visible jobs waited that started in a period, in two queries plus permissions."""
    started = visible_waits(requester).filter(started_at__gte=start, started_at__lt=end).order_by()
    if by is UsageGrouping.POOL:
        started = started.filter(Q(attempts__number=1) | Q(attempts__isnull=True))
    elif by is UsageGrouping.DAY:
        started = started.annotate(day=TruncDate("started_at", tzinfo=dt.UTC))
    key = _KEY_COLUMNS[by]
    rows = (
        started.annotate(requested=total_gpus())
        .annotate(size=_SIZE)
        .values_list(key, "size")
        .annotate(waits=PackedSeconds(F("started_at") - F("submitted_at")))
    )
    groups: dict[Any, list[array[float]]] = defaultdict(list)
    sizes: dict[int, list[array[float]]] = defaultdict(list)
    for group, size, packed in rows:
        waits = _unpack(packed)
        groups[group].append(waits)
        sizes[size].append(waits)
    names = [*(name for _bound, name in SIZES), LARGEST_SIZE]
    labels = _group_labels(by, groups)
    by_size = {size: sorted(chain.from_iterable(found)) for size, found in sizes.items()}
    everything = sorted(chain.from_iterable(by_size.values()))
    return Waits(
        {
            labels[group]: WaitStatistics(*_statistics(sorted(chain.from_iterable(found))))
            for group, found in groups.items()
            if group in labels
        },
        [WaitRow(*_statistics(by_size[size]), name=_(names[size])) for size in sorted(by_size)],
        WaitStatistics(*_statistics(everything)) if everything else None,
    )


def _group_labels(by: UsageGrouping, groups: Iterable[Any]) -> dict[Any, tuple[str, str]]:
    """Return key and name of each group by the value of its column."""
    if by is UsageGrouping.DAY:
        return {day: (str(day), str(day)) for day in groups}
    table, name = {
        UsageGrouping.PROJECT: (Project, "name"),
        UsageGrouping.USER: (User, "username"),
        UsageGrouping.POOL: (NodePool, "name"),
    }[by]
    rows = table._default_manager.filter(pk__in=[pk for pk in groups if pk is not None])
    return {pk: (key, label) for pk, key, label in rows.values_list("pk", "public_id", name)}


def _unpack(packed: bytes | memoryview) -> array[float]:
    values = array("d", bytes(packed))
    if sys.byteorder == "little":
        values.byteswap()
    return values


def _statistics(ordered: list[float]) -> tuple[int, float, float]:
    """Return number, median and 90th percentile of sorted values."""
    return len(ordered), _percentile(ordered, 0.5), _percentile(ordered, 0.9)


def _percentile(ordered: list[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
